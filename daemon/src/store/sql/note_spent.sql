-- note_spent: what an attempt used of a model so far.
-- locks: the lease's row, for key share   fence: lease_id + token + position (F3)   rows: 1, none when lost
SELECT * FROM holdfast.note_spent($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)
