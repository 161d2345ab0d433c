-- item_inputs: keys and inputs of claimed positions, read after the claim's commit (L3).
-- locks: none   fence: none   rows: one per position
SELECT i.position, i.key, i.input::text FROM holdfast.items i
 WHERE i.batch_id = $1 AND i.position = ANY ($2)
