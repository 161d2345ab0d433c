-- global_server: the timeline, the oldest open transaction of this database, the queue of notifications.
-- locks: none   fence: none   rows: one
--
-- Sessions of other users are seen only with pg_read_all_stats.
SELECT CASE WHEN pg_is_in_recovery() THEN (SELECT c.timeline_id FROM pg_control_checkpoint() c)
            ELSE ('x' || substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8))::bit(32)::integer
       END::bigint AS timeline,
       least((SELECT min(a.xact_start) FROM pg_stat_activity a
               WHERE a.datname = current_database() AND a.backend_type = 'client backend'
                 AND a.pid <> pg_backend_pid()),
             (SELECT min(x.prepared) FROM pg_prepared_xacts x WHERE x.database = current_database()))
           AS oldest_transaction,
       pg_notification_queue_usage() AS notify_queue_usage
