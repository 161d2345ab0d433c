-- renew: one heartbeat of one worker, and what an operator asks of it.
-- locks: lease rows, skipping busy ones   fence: lease_id + token (F3)   rows: one per lease, at least 1
SELECT r.*, (SELECT w.asked FROM holdfast.workers w WHERE w.id = $1) AS asked
  FROM holdfast.renew($1, $2, $3, $4, $5, $6, $7, $8) r
