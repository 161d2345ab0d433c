-- database_was_away: whether expired leases of a batch speak of a database that was away, and not of their workers.
-- locks: none   fence: none; decides charging alone   rows: 1
--
-- With the clock, start and timeline of the server, by which the asker judges whether it may reap at all (F4).
-- Since one of them was last renewed the server started, its epoch was raised, or (at $2) its clock, start or
-- timeline changed under the process that asks; or three workers at least, and more than half of those that were
-- at work together, fell silent within half a lease. Restarts of one worker, each after the last had died, were
-- never at work together.
SELECT coalesce(bool_or(
           greatest(pg_postmaster_start_time(), to_timestamp(c.epoch), $2)
               >= l.expires_at - make_interval(secs => w.lease_s)
           OR (f.silent >= 3 AND 2 * f.silent > f.at_work)), false),
       clock_timestamp(), pg_postmaster_start_time(),
       ('x' || substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8))::bit(32)::integer
  FROM holdfast.leases l
  JOIN holdfast.workers w ON w.id = l.worker_id
 CROSS JOIN holdfast.control c
 CROSS JOIN LATERAL (
       SELECT count(*) AS at_work,
              count(*) FILTER (WHERE v.heartbeat_at < clock_timestamp()
                                                      - make_interval(secs => v.lease_s / 2)
                                 AND v.heartbeat_at <= w.heartbeat_at
                                                       + make_interval(secs => w.lease_s / 2)) AS silent
         FROM holdfast.workers v
        WHERE v.ended_at IS NULL AND v.started_at <= w.heartbeat_at
          AND v.heartbeat_at >= greatest(w.started_at,
                                         w.heartbeat_at - make_interval(secs => w.lease_s / 2))) f
 WHERE l.batch_id = $1 AND l.expires_at < clock_timestamp()
