-- leftover_batches: cancelled batches with rows to clear away (full sweep).
-- locks: none   fence: none; clear_cancelled re-checks   rows: any
SELECT b.id FROM holdfast.batches b WHERE b.leftovers
