-- doctor_tables: dead rows of the narrow tables, and how our tables are vacuumed.
-- locks: none   fence: none   rows: one per fact
SELECT 'dead_rows' AS kind, t.relname::text AS subject, t.n_dead_tup::double precision AS amount,
       t.n_live_tup::double precision AS beside
  FROM pg_stat_user_tables t
 WHERE t.schemaname = 'holdfast'
   AND t.relname IN ('leases', 'waiting', 'workers', 'progress', 'progress_deltas')
UNION ALL
SELECT 'vacuum_off', c.relname::text, 0, 0
  FROM pg_class c, pg_options_to_table(c.reloptions) o
 WHERE c.relnamespace = to_regnamespace('holdfast') AND c.relkind = 'r'
   AND o.option_name = 'autovacuum_enabled' AND NOT o.option_value::boolean
UNION ALL
SELECT 'vacuum_lazy', c.relname::text, 0, 0
  FROM pg_class c
 WHERE c.relnamespace = to_regnamespace('holdfast')
   AND c.relname IN ('leases', 'waiting', 'workers')
   AND NOT EXISTS (SELECT FROM pg_options_to_table(c.reloptions) o
                    WHERE o.option_name = 'autovacuum_vacuum_threshold')
