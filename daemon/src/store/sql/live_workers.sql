-- live_workers: workers that have not ended, oldest first.
-- locks: none   fence: none   rows: any
SELECT w.id, w.name, w.host, w.pid, w.version, w.queues, w.slots, w.state, w.executing,
       w.started_at, w.heartbeat_at,
       w.heartbeat_at < clock_timestamp() - make_interval(secs => w.lease_s) AS silent
  FROM holdfast.workers w WHERE w.ended_at IS NULL ORDER BY w.id
