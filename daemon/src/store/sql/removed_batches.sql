-- removed_batches: batches of which rows are still to be cleared away, oldest first.
-- locks: none   fence: none; clear_removed re-checks   rows: any
SELECT r.id, r.item_count - r.cleared AS left FROM holdfast.removed_batches r ORDER BY r.removed_at, r.id
