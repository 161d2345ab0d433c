-- doctor_holders: who keeps dead rows of this database from being vacuumed away, and for how long.
-- locks: none   fence: none   rows: one per holder
--
-- amount: seconds, of slots and standbys transactions. beside: whether a slot is in use.
SELECT 'holder_session' AS kind,
       format('pid %s, %s of %s, %s', a.pid, coalesce(nullif(a.application_name, ''), 'unnamed'),
              a.usename, a.state) AS subject,
       extract(epoch FROM clock_timestamp() - a.xact_start)::double precision AS amount,
       0::double precision AS beside
  FROM pg_stat_activity a
 WHERE a.datname = current_database() AND a.backend_type = 'client backend'
   AND a.pid <> pg_backend_pid() AND a.xact_start IS NOT NULL
   AND (a.backend_xmin IS NOT NULL OR a.backend_xid IS NOT NULL)
UNION ALL
SELECT 'holder_prepared', x.gid, extract(epoch FROM clock_timestamp() - x.prepared)::double precision, 0
  FROM pg_prepared_xacts x WHERE x.database = current_database()
UNION ALL
SELECT 'holder_slot', s.slot_name::text, coalesce(age(s.xmin), 0)::double precision,
       s.active::integer::double precision
  FROM pg_replication_slots s WHERE s.database IS NULL OR s.database = current_database()
UNION ALL
SELECT 'holder_standby', coalesce(nullif(r.application_name, ''), r.client_addr::text, 'unnamed'),
       age(r.backend_xmin)::double precision, 0
  FROM pg_stat_replication r WHERE r.backend_xmin IS NOT NULL
