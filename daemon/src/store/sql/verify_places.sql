-- verify_places: items of a range of positions that are missing, not in exactly one place, or staged and not their lease's (I1), in one snapshot.
-- locks: none   fence: none   rows: at most 20
WITH b AS (
    SELECT * FROM holdfast.batches WHERE id = $1
), p AS (
    SELECT c.* FROM b, holdfast.current_progress(b.id) c
), held AS (
    SELECT l.lease_id, u.position FROM holdfast.leases l, unnest(l.positions) u(position)
     WHERE l.batch_id = $1 AND u.position >= $2 AND u.position < $3
), waits AS (
    SELECT w.position, w.recheck FROM holdfast.waiting w
     WHERE w.batch_id = $1 AND w.position >= $2 AND w.position < $3
), staged AS (
    SELECT s.position, s.lease_id FROM holdfast.staged_outcomes s
     WHERE s.batch_id = $1 AND s.position >= $2 AND s.position < $3
), places AS (
    SELECT g AS position, 'fresh' AS place
      FROM p, b, generate_series(greatest($2, p.next_position), least($3, b.item_count) - 1) g
     UNION ALL
    SELECT h.position, 'held' FROM held h
     UNION ALL
    SELECT w.position, 'waiting' FROM waits w
     UNION ALL
    SELECT o.position, 'outcome' FROM holdfast.outcomes o
     WHERE o.batch_id = $1 AND o.position >= $2 AND o.position < $3
), located AS (
    SELECT g AS position, count(x.place) AS places, string_agg(x.place, ' and ') AS list
      FROM b CROSS JOIN LATERAL generate_series($2, least($3, b.item_count) - 1) g
      LEFT JOIN places x ON x.position = g GROUP BY g
)
SELECT format('position %s is in %s', l.position, coalesce(l.list, 'no place')) AS fault
  FROM located l, b
 WHERE l.places > 1 OR (l.places = 0 AND b.control <> 'cancelled')
UNION ALL
SELECT format('position %s has no item', l.position) FROM located l
 WHERE NOT EXISTS (SELECT FROM holdfast.items i WHERE i.batch_id = $1 AND i.position = l.position)
UNION ALL
SELECT format('position %s is staged under %s, held under %s%s', s.position,
              coalesce('lease ' || s.lease_id, 'no lease'),
              coalesce('lease ' || h.lease_id, 'no lease'),
              CASE WHEN w.recheck THEN ', and waits for a recheck' ELSE '' END)
  FROM b, staged s
  LEFT JOIN held h ON h.position = s.position
  LEFT JOIN waits w ON w.position = s.position
 WHERE b.control <> 'cancelled'
   AND (s.lease_id IS DISTINCT FROM h.lease_id OR (s.lease_id IS NULL) <> coalesce(w.recheck, false))
UNION ALL
SELECT format('position %s waits for a recheck of nothing', w.position)
  FROM b, waits w
 WHERE b.control <> 'cancelled' AND w.recheck
   AND NOT EXISTS (SELECT FROM staged s WHERE s.position = w.position)
 LIMIT 20
