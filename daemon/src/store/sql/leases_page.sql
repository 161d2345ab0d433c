-- leases_page: leases with their batches and workers, the first to expire first; of an owner, a queue, a worker, of those expired so long ago, or of all.
-- locks: none   fence: none   rows: at most $3
SELECT l.batch_id, b.owner, b.queue, l.lease_id, l.token, l.worker_id, w.name AS worker,
       cardinality(l.positions) AS items, cardinality(l.started) AS started, l.granted_at,
       l.expires_at, l.expires_at < clock_timestamp() AS expired,
       extract(epoch FROM l.expires_at - clock_timestamp())::double precision AS margin_s,
       l.revoked_at
  FROM holdfast.leases l
  JOIN holdfast.batches b ON b.id = l.batch_id
  LEFT JOIN holdfast.workers w ON w.id = l.worker_id
 WHERE ($1::text IS NULL OR b.owner = $1) AND ($2::text IS NULL OR b.queue = $2)
   AND ($4::uuid[] IS NULL OR l.worker_id = ANY ($4))
   AND ($5::double precision IS NULL
        OR l.expires_at < clock_timestamp() - make_interval(secs => $5))
   AND ($6::uuid[] IS NULL OR l.lease_id = ANY ($6))
 ORDER BY l.expires_at, l.batch_id, l.lease_id LIMIT $3
