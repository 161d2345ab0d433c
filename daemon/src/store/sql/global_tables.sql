-- global_tables: live and dead rows of some tables, by the statistics.
-- locks: none   fence: none   rows: one per table
SELECT t.relname::text AS table, t.n_live_tup AS live, t.n_dead_tup AS dead
  FROM pg_stat_user_tables t WHERE t.schemaname = 'holdfast' AND t.relname = ANY ($1)
