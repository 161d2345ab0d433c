-- counts: whether a batch has nothing left and is not ended yet; the look after a finish, without a lock.
-- locks: none   fence: none   rows: 0 or 1
SELECT p.next_position = b.item_count AND p.executing = 0 AND p.checking = 0 AND p.waiting = 0
  FROM holdfast.batches b, holdfast.current_progress(b.id) p
 WHERE b.id = $1 AND b.finished_at IS NULL
