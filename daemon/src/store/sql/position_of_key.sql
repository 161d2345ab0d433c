-- position_of_key: where the item of a key is.
-- locks: none   fence: none   rows: 0 or 1
SELECT i.position FROM holdfast.items i WHERE i.batch_id = $1 AND i.key = $2
