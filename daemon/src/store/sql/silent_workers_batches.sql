-- silent_workers_batches: batches with expired leases of workers whose heartbeat is older than their lease (fast sweep).
-- locks: none   fence: none; reap re-checks   rows: any
SELECT DISTINCT l.batch_id
  FROM holdfast.workers w JOIN holdfast.leases l ON l.worker_id = w.id
 WHERE w.ended_at IS NULL
   AND w.heartbeat_at < clock_timestamp() - make_interval(secs => w.lease_s)
   AND l.expires_at < clock_timestamp()
