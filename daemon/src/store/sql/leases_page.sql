-- leases_page: leases with their batches and workers, the first to expire first; of an owner, a queue or of all.
-- locks: none   fence: none   rows: at most $3
SELECT l.batch_id, b.owner, b.queue, l.lease_id, l.token, l.worker_id, w.name AS worker,
       cardinality(l.positions) AS items, cardinality(l.started) AS started, l.granted_at,
       l.expires_at, l.expires_at < clock_timestamp() AS expired
  FROM holdfast.leases l
  JOIN holdfast.batches b ON b.id = l.batch_id
  LEFT JOIN holdfast.workers w ON w.id = l.worker_id
 WHERE ($1::text IS NULL OR b.owner = $1) AND ($2::text IS NULL OR b.queue = $2)
 ORDER BY l.expires_at, l.batch_id, l.lease_id LIMIT $3
