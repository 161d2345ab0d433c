-- rank_batches: open batches of some queues with something to claim now, best first: priority with ageing, then the owner, then the batch with the fewest executing, then oldest.
-- locks: none   fence: none   rows: at most $4
--
-- Due by the time of the statement, not of the row: only what is stable is a bound for the index.
WITH held AS (
    SELECT l.batch_id, sum(cardinality(l.positions)) AS items
      FROM holdfast.leases l GROUP BY l.batch_id
), owners AS (
    SELECT b.owner, sum(h.items) AS items
      FROM held h JOIN holdfast.batches b ON b.id = h.batch_id GROUP BY b.owner
)
SELECT b.id, b.queue, b.owner,
       (b.priority + floor(extract(epoch FROM clock_timestamp() - p.recorded_at) / $3))::integer
           AS rank,
       coalesce(h.items, 0)::bigint AS held, coalesce(o.items, 0)::bigint AS held_by_owner
  FROM holdfast.batches b
 CROSS JOIN LATERAL holdfast.current_progress(b.id) p
  LEFT JOIN held h ON h.batch_id = b.id
  LEFT JOIN owners o ON o.owner = b.owner
 WHERE b.finished_at IS NULL AND b.control = 'open' AND b.queue = ANY ($1)
   AND NOT b.id = ANY ($2)
   AND (b.not_before IS NULL OR b.not_before <= clock_timestamp())
   AND (b.max_running IS NULL OR p.executing < b.max_running)
   AND p.checking < b.max_checking
   AND ((p.executing + p.checking + p.waiting - p.deferred < b.max_live
         AND (p.next_position < b.item_count
              OR EXISTS (SELECT FROM holdfast.waiting w
                          WHERE w.batch_id = b.id AND NOT w.recheck AND w.deferred
                            AND w.ready_at >= p.deferred_floor
                            AND w.ready_at <= statement_timestamp())))
        OR EXISTS (SELECT FROM holdfast.waiting w
                    WHERE w.batch_id = b.id AND NOT w.recheck AND NOT w.deferred
                      AND w.ready_at >= p.retry_floor AND w.ready_at <= statement_timestamp()))
 ORDER BY rank DESC, held_by_owner, held, b.id
 LIMIT $4
