-- renew: one heartbeat of one worker.
-- locks: lease rows, skipping busy ones   fence: lease_id + token (F3)   rows: one per lease, at least 1
SELECT * FROM holdfast.renew($1, $2, $3, $4, $5, $6, $7, $8)
