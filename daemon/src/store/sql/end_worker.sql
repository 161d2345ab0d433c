-- end_worker: a worker process that ends, and why.
-- locks: its own row   fence: id   rows: 0
UPDATE holdfast.workers SET ended_at = clock_timestamp(), state = 'exited', exit_reason = $2
 WHERE id = $1 AND ended_at IS NULL
