-- revoke: take leases of one batch from their holders, for good (F8); audited.
-- locks: parent exclusive (L1), lease rows in order (L2)   fence: lease_id + token (F3)   rows: one per lease named
SELECT * FROM holdfast.revoke($1, $2, $3, $4, $5, $6, $7)
