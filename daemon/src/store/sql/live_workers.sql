-- live_workers: workers that have not ended, oldest first; with $1 the others too.
-- locks: none   fence: none   rows: any
SELECT w.id, w.name, w.host, w.pid, w.version, w.queues, w.slots, w.state, w.executing,
       w.started_at, w.heartbeat_at, w.asked, w.ended_at, w.exit_reason,
       extract(epoch FROM clock_timestamp() - w.heartbeat_at)::double precision AS heartbeat_age_s,
       w.ended_at IS NULL
           AND w.heartbeat_at < clock_timestamp() - make_interval(secs => w.lease_s) AS silent
  FROM holdfast.workers w WHERE w.ended_at IS NULL OR $1 ORDER BY w.id
