-- expired_batches: batches with a lease past its expiry, whatever its worker does (full sweep).
-- locks: none   fence: none; reap re-checks   rows: any
SELECT DISTINCT l.batch_id FROM holdfast.leases l
  JOIN holdfast.batches b ON b.id = l.batch_id AND b.control <> 'cancelled'
 WHERE l.expires_at < clock_timestamp()
