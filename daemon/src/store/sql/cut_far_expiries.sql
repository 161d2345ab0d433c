-- cut_far_expiries: bring back expiries further ahead than their worker's lease, and the end of a wait (F7), after a step of the database clock (F4).
-- locks: lease rows in order, skipping busy ones   fence: the expiry itself   rows: 0
WITH far AS (
    SELECT l.batch_id, l.lease_id, w.lease_s
      FROM holdfast.leases l JOIN holdfast.workers w ON w.id = l.worker_id
     WHERE l.expires_at > clock_timestamp() + make_interval(secs => w.lease_s * 1.01 + 0.5)
     ORDER BY l.batch_id, l.lease_id FOR NO KEY UPDATE OF l SKIP LOCKED
), quiet AS (
    UPDATE holdfast.control c
       SET quiet_until = clock_timestamp() + make_interval(secs => holdfast.longest_lease_s())
     WHERE c.quiet_until > clock_timestamp()
                         + make_interval(secs => holdfast.longest_lease_s() * 1.01 + 0.5))
UPDATE holdfast.leases l SET expires_at = clock_timestamp() + make_interval(secs => f.lease_s)
  FROM far f WHERE (l.batch_id, l.lease_id) = (f.batch_id, f.lease_id)
