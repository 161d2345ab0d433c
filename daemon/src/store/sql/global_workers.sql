-- global_workers: how many workers that have not ended are how.
-- locks: none   fence: none   rows: one
SELECT count(*) FILTER (WHERE NOT w.silent AND NOT w.ending) AS live,
       count(*) FILTER (WHERE NOT w.silent AND w.ending) AS draining,
       count(*) FILTER (WHERE w.silent) AS stale
  FROM (SELECT x.state IN ('draining', 'cancelling', 'releasing') AS ending,
               x.heartbeat_at < clock_timestamp() - make_interval(secs => x.lease_s) AS silent
          FROM holdfast.workers x WHERE x.ended_at IS NULL) w
