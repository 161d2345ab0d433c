-- doctor_state: switches, sequences (L6), epoch (F2), sweeps and workers.
-- locks: none   fence: none   rows: one per fact
SELECT 'claims_off' AS kind, to_char(c.changed_at, 'YYYY-MM-DD HH24:MI:SSOF') AS subject,
       0::double precision AS amount, 0::double precision AS beside
  FROM holdfast.control c WHERE NOT c.claims_enabled
UNION ALL
SELECT 'settling', to_char(c.changed_at, 'YYYY-MM-DD HH24:MI:SSOF'),
       extract(epoch FROM c.quiet_until - clock_timestamp())::double precision, 0
  FROM holdfast.control c WHERE c.quiet_until > clock_timestamp()
UNION ALL
SELECT 'moved', '', 0, 0 FROM holdfast.control c
 WHERE CASE WHEN pg_is_in_recovery() THEN false
            ELSE c.system_identifier <> (SELECT system_identifier FROM pg_control_system())
                 OR c.timeline <> ('x' || substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8))::bit(32)::integer
       END
UNION ALL
SELECT 'deltas_behind', '', s.last_value::double precision, f.folded::double precision
  FROM holdfast.delta_seq s,
       (SELECT coalesce(max(p.last_delta), 0) AS folded
          FROM holdfast.batches b
         CROSS JOIN LATERAL (SELECT x.last_delta FROM holdfast.progress x
                              WHERE x.batch_id = b.id ORDER BY x.seq DESC LIMIT 1) p) f
 WHERE s.last_value < f.folded
UNION ALL
SELECT 'numbers_cached', q.sequencename::text, q.cache_size::double precision, 0
  FROM pg_sequences q
 WHERE q.schemaname = 'holdfast' AND q.sequencename IN ('delta_seq', 'token_seq') AND q.cache_size > 1
UNION ALL
SELECT 'sweep_late', '',
       extract(epoch FROM clock_timestamp() - greatest(s.taken_at, w.since))::double precision,
       w.live::double precision
  FROM holdfast.sweep s,
       (SELECT count(*) AS live, max(x.lease_s) AS lease_s, min(x.started_at) AS since
          FROM holdfast.workers x
         WHERE x.ended_at IS NULL
           AND x.heartbeat_at > clock_timestamp() - make_interval(secs => x.lease_s)) w
 WHERE w.live > 0 AND greatest(s.taken_at, w.since) < clock_timestamp() - make_interval(secs => w.lease_s)
UNION ALL
SELECT 'workers_silent', min(w.name), count(*)::double precision,
       max(extract(epoch FROM clock_timestamp() - w.heartbeat_at))::double precision
  FROM holdfast.workers w
 WHERE w.ended_at IS NULL
   AND w.heartbeat_at < clock_timestamp() - make_interval(secs => w.lease_s)
HAVING count(*) > 0
UNION ALL
SELECT 'nobody_works', '', count(*)::double precision, 0
  FROM holdfast.batches b
 WHERE b.finished_at IS NULL AND b.control = 'open'
   AND NOT EXISTS (SELECT FROM holdfast.workers w
                    WHERE w.ended_at IS NULL AND b.queue = ANY (w.queues)
                      AND w.heartbeat_at > clock_timestamp() - make_interval(secs => w.lease_s))
HAVING count(*) > 0
