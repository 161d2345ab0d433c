-- prunable_batches: batches that ended so long ago, after an id; of an owner, a queue, an end or of all.
-- locks: none   fence: none; remove_batch re-checks   rows: at most $6
SELECT b.id, b.item_count
  FROM holdfast.batches b
 WHERE b.finished_at <= clock_timestamp() - make_interval(secs => $1) AND NOT b.leftovers
   AND ($2::text IS NULL OR b.owner = $2) AND ($3::text IS NULL OR b.queue = $3)
   AND CASE WHEN b.control = 'cancelled' THEN 'cancelled' ELSE 'finished' END = ANY ($4)
   AND ($5::uuid IS NULL OR b.id > $5)
 ORDER BY b.id LIMIT $6
