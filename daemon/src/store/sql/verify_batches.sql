-- verify_batches: batches by id, to be verified one after the other.
-- locks: none   fence: none   rows: at most $2
SELECT b.id, b.item_count FROM holdfast.batches b WHERE b.id > $1 ORDER BY b.id LIMIT $2
