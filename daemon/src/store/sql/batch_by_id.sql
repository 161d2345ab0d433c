-- batch_by_id: one batch with its counts, of one owner or of anyone.
-- locks: none   fence: none   rows: 0 or 1
SELECT * FROM holdfast.batch_status s WHERE s.id = $1 AND ($2::text IS NULL OR s.owner = $2)
