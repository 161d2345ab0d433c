-- held_by: what a lease still holds, with its histories, and whether it is under check.
-- locks: none   fence: lease_id + token (F3)   rows: one per position
SELECT u.position, coalesce(u.history, 0),
       EXISTS (SELECT FROM holdfast.staged_outcomes s
                WHERE s.batch_id = $1 AND s.position = u.position)
  FROM holdfast.leases l, unnest(l.positions, l.histories) u(position, history)
 WHERE l.batch_id = $1 AND l.lease_id = $2 AND l.token = $3
