-- verify_counts: whether the counts, floors and ends of a batch fit its rows, in one snapshot.
-- locks: none   fence: none   rows: one per fault
WITH b AS (
    SELECT * FROM holdfast.batches WHERE id = $1
), p AS (
    SELECT c.* FROM b, holdfast.current_progress(b.id) c
), held AS (
    SELECT coalesce(sum(cardinality(l.positions)), 0) AS n FROM holdfast.leases l WHERE l.batch_id = $1
), staged AS (
    SELECT count(*) AS n FROM holdfast.staged_outcomes s WHERE s.batch_id = $1
), waits AS (
    SELECT count(*) FILTER (WHERE NOT w.recheck) AS waiting, count(*) FILTER (WHERE w.recheck) AS rechecks,
           count(*) FILTER (WHERE w.deferred) AS deferred
      FROM holdfast.waiting w WHERE w.batch_id = $1
), ended AS (
    SELECT count(*) FILTER (WHERE o.status = 'succeeded') AS succeeded,
           count(*) FILTER (WHERE o.status <> 'succeeded') AS failed
      FROM holdfast.outcomes o WHERE o.batch_id = $1
), counted AS (
    SELECT held.n + waits.rechecks - staged.n AS executing, staged.n AS checking, waits.waiting,
           waits.deferred, ended.succeeded, ended.failed
      FROM held, staged, waits, ended
)
SELECT 'it has no progress row' AS fault FROM b WHERE NOT EXISTS (SELECT FROM p WHERE p.seq IS NOT NULL)
UNION ALL
SELECT format('%s executing and %s checked items are counted, rows say %s and %s', p.executing,
              p.checking, c.executing, c.checking)
  FROM p, b, counted c
 WHERE b.control <> 'cancelled' AND (p.executing, p.checking) <> (c.executing, c.checking)
UNION ALL
SELECT format('%s waiting items are counted, %s of them deferred, rows say %s and %s', p.waiting,
              p.deferred, c.waiting, c.deferred)
  FROM p, b, counted c
 WHERE b.control <> 'cancelled' AND (p.waiting, p.deferred) <> (c.waiting, c.deferred)
UNION ALL
SELECT format('%s succeeded and %s failed items are counted, rows say %s and %s', p.succeeded, p.failed,
              c.succeeded, c.failed)
  FROM p, counted c WHERE (p.succeeded, p.failed) <> (c.succeeded, c.failed)
UNION ALL
SELECT format('it is cancelled with %s items at work or waiting, %s cancelled of %s',
              p.executing + p.checking + p.waiting, p.cancelled, b.item_count)
  FROM p, b
 WHERE b.control = 'cancelled'
   AND (p.executing + p.checking + p.waiting <> 0 OR p.next_position <> b.item_count
        OR p.cancelled <> b.item_count - p.succeeded - p.failed)
UNION ALL
SELECT format('its counts add up to %s of %s items',
              b.item_count - p.next_position + p.executing + p.checking + p.waiting + p.succeeded
              + p.failed + p.cancelled, b.item_count)
  FROM p, b
 WHERE b.item_count - p.next_position + p.executing + p.checking + p.waiting + p.succeeded + p.failed
       + p.cancelled <> b.item_count
UNION ALL
SELECT format('%s items run, the cap is %s', p.executing, b.max_running)
  FROM p, b WHERE p.executing > b.max_running
UNION ALL
SELECT format('%s items wait below their floor, position %s is one', count(*), min(w.position))
  FROM holdfast.waiting w, p
 WHERE w.batch_id = $1
   AND w.ready_at < CASE WHEN w.recheck THEN p.recheck_floor WHEN w.deferred THEN p.deferred_floor
                         ELSE p.retry_floor END
HAVING count(*) > 0
UNION ALL
SELECT 'it has ended with something left' FROM p, b
 WHERE b.finished_at IS NOT NULL AND b.control <> 'cancelled'
   AND (p.next_position < b.item_count OR p.executing + p.checking + p.waiting > 0)
