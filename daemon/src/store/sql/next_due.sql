-- next_due: seconds until the next item or batch of some queues that waits for its time may be claimed; null when none does.
-- locks: none   fence: none   rows: 1
--
-- By the time of the statement, not of the row: only what is stable is a bound for the index.
SELECT extract(epoch FROM min(t.due) - clock_timestamp())::double precision
  FROM holdfast.batches b
 CROSS JOIN LATERAL (
       SELECT CASE WHEN b.not_before > clock_timestamp() THEN b.not_before
                   ELSE least((SELECT min(w.ready_at) FROM holdfast.waiting w
                                WHERE w.batch_id = b.id AND NOT w.recheck AND NOT w.deferred
                                  AND w.ready_at > statement_timestamp()),
                              (SELECT min(w.ready_at) FROM holdfast.waiting w
                                WHERE w.batch_id = b.id AND NOT w.recheck AND w.deferred
                                  AND w.ready_at > statement_timestamp())) END AS due) t
 WHERE b.finished_at IS NULL AND b.control = 'open' AND b.queue = ANY ($1)
