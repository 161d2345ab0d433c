-- release_dead: release leases of one batch that a dead worker held.
-- locks: ticket (L4), parent exclusive (L1), lease rows (L2)   fence: lease_id + token (F3)   rows: one
SELECT holdfast.release_dead($1, $2, $3, $4, $5, $6, $7, $8, $9) AS items
