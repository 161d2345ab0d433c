-- clear_removed: clear away a chunk of a removed batch.
-- locks: rows that nobody reaches any more   fence: removed_batches, skipping one that another clears   rows: 1
SELECT * FROM holdfast.clear_removed($1, $2)
