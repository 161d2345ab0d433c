-- taken_back: of items taken back from leases, those that ended with it or wait for another check; the others wait for their next attempt.
-- locks: none   fence: none   rows: at most one per position
SELECT u.position,
       CASE WHEN o.status = 'failed' THEN 'failed' WHEN o.status IS NOT NULL THEN 'published'
            ELSE 'rechecked' END AS disposition,
       coalesce(o.stop_reason = 'poison', false) AS poison
  FROM unnest($2::integer[]) u(position)
  LEFT JOIN LATERAL (SELECT x.status, x.stop_reason FROM holdfast.outcomes x
                      WHERE x.batch_id = $1 AND x.position = u.position AND x.lease_id IS NULL
                     OFFSET 0) o ON true
  LEFT JOIN LATERAL (SELECT x.position FROM holdfast.staged_outcomes x
                      WHERE x.batch_id = $1 AND x.position = u.position OFFSET 0) s ON true
 WHERE o.status IS NOT NULL OR s.position IS NOT NULL
