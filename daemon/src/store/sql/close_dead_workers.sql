-- close_dead_workers: mark workers as ended that sent no heartbeat for ten leases and hold none.
-- locks: worker rows, skipping busy ones   fence: heartbeat on the row   rows: 0
UPDATE holdfast.workers w
   SET ended_at = clock_timestamp(), state = 'exited', exit_reason = 'silent'
 WHERE w.id IN (SELECT x.id FROM holdfast.workers x
                 WHERE x.ended_at IS NULL
                   AND x.heartbeat_at < clock_timestamp() - make_interval(secs => 10 * x.lease_s)
                   AND NOT EXISTS (SELECT FROM holdfast.leases l WHERE l.worker_id = x.id)
                   FOR UPDATE SKIP LOCKED)
