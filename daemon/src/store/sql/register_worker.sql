-- register_worker: a worker process that has just started.
-- locks: none   fence: new id   rows: 0
INSERT INTO holdfast.workers (id, name, host, pid, version, queues, slots, lease_s, state)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9)
