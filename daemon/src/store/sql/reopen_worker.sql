-- reopen_worker: a worker taken for dead is there again.
-- locks: its own row   fence: id   rows: 0
UPDATE holdfast.workers SET ended_at = NULL, exit_reason = NULL, heartbeat_at = clock_timestamp()
 WHERE id = $1
