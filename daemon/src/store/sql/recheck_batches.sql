-- recheck_batches: batches of some queues with lost checks, paused ones too, the longest waiting first.
-- locks: none   fence: none; recheck re-checks   rows: at most 32
SELECT b.id, b.queue
  FROM holdfast.waiting w
  JOIN holdfast.batches b ON b.id = w.batch_id AND b.finished_at IS NULL AND b.queue = ANY ($1)
  JOIN holdfast.staged_outcomes s ON (s.batch_id, s.position) = (w.batch_id, w.position)
 WHERE w.recheck AND w.ready_at <= statement_timestamp()
   AND (s.workspace IS NULL OR split_part(s.workspace, '/', 1) = $2
        OR w.ready_at <= statement_timestamp() - make_interval(secs => $3))
 GROUP BY b.id ORDER BY min(w.ready_at), b.id LIMIT 32
