-- doctor_server: what the server says of itself, apart from our schema.
-- locks: none   fence: none   rows: one per fact
SELECT 'version' AS kind, current_setting('server_version') AS subject,
       current_setting('server_version_num')::double precision AS amount,
       0::double precision AS beside
UNION ALL
SELECT 'standby', '', 0, 0 WHERE pg_is_in_recovery()
UNION ALL
SELECT 'connections', '', count(*)::double precision,
       current_setting('max_connections')::double precision
  FROM pg_stat_activity a WHERE a.backend_type = 'client backend'
UNION ALL
SELECT 'notifications', '', pg_notification_queue_usage(), 1
UNION ALL
SELECT 'blind', current_user::text, 0, 0
 WHERE NOT pg_has_role(current_user, 'pg_read_all_stats', 'MEMBER')
UNION ALL
SELECT 'setting_off', s.name, 0, 0 FROM pg_settings s
 WHERE s.name IN ('autovacuum', 'track_counts', 'fsync', 'full_page_writes') AND s.setting = 'off'
