-- reap: take back the expired leases of one batch.
-- locks: ticket (L4), parent exclusive (L1), lease rows (L2)   fence: expiry on the row (F4)   rows: one per position
SELECT * FROM holdfast.reap($1, $2, $3, $4, $5, $6)
