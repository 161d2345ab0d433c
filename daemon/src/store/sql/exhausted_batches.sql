-- exhausted_batches: unfinished batches with nothing left (full sweep).
-- locks: none   fence: none; end_batch re-checks   rows: any
SELECT b.id FROM holdfast.batches b, holdfast.current_progress(b.id) p
 WHERE b.finished_at IS NULL AND p.next_position = b.item_count
   AND p.executing = 0 AND p.checking = 0 AND p.waiting = 0
