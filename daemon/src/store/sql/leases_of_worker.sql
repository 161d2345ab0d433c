-- leases_of_worker: what a worker holds, batch by batch.
-- locks: none   fence: none; release_dead re-checks   rows: any
SELECT l.batch_id, l.lease_id, l.token, l.positions, b.queue
  FROM holdfast.leases l JOIN holdfast.batches b ON b.id = l.batch_id
 WHERE l.worker_id = $1 ORDER BY l.batch_id, l.lease_id
