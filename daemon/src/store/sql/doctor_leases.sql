-- doctor_leases: leases that are not as they should be, by kind, with one of each to look at.
-- locks: none   fence: none   rows: one per kind found
--
-- amount: how many. beside: seconds overdue or ahead, at most.
WITH l AS (
    SELECT x.batch_id, x.lease_id, x.positions, x.histories, x.expires_at,
           coalesce(w.lease_s, 60) AS lease_s, w.id IS NULL AS stranger,
           w.ended_at IS NOT NULL AS ended, b.id IS NULL AS orphan, b.item_count,
           coalesce(b.control = 'cancelled', false) AS cancelled,
           coalesce(b.leftovers, false) AS leftovers
      FROM holdfast.leases x
      LEFT JOIN holdfast.workers w ON w.id = x.worker_id
      LEFT JOIN holdfast.batches b ON b.id = x.batch_id
), found AS (
    SELECT 'lease_overdue' AS kind, l.batch_id, l.lease_id,
           extract(epoch FROM clock_timestamp() - l.expires_at) AS seconds
      FROM l WHERE NOT l.cancelled
       AND l.expires_at < clock_timestamp() - make_interval(secs => greatest(30, 2 * l.lease_s))
    UNION ALL
    SELECT 'lease_far', l.batch_id, l.lease_id, extract(epoch FROM l.expires_at - clock_timestamp())
      FROM l WHERE l.expires_at
                   > clock_timestamp() + make_interval(secs => l.lease_s * 1.01 + 0.5)
    UNION ALL
    SELECT 'lease_stranger', l.batch_id, l.lease_id, 0 FROM l WHERE l.stranger
    UNION ALL
    SELECT 'lease_of_ended', l.batch_id, l.lease_id, 0 FROM l WHERE l.ended AND NOT l.cancelled
    UNION ALL
    SELECT 'lease_orphan', l.batch_id, l.lease_id, 0 FROM l WHERE l.orphan
    UNION ALL
    SELECT 'lease_left_over', l.batch_id, l.lease_id, 0 FROM l WHERE l.cancelled AND NOT l.leftovers
    UNION ALL
    SELECT 'lease_uneven', l.batch_id, l.lease_id, 0 FROM l
     WHERE cardinality(l.positions) <> cardinality(l.histories)
    UNION ALL
    SELECT 'lease_outside', l.batch_id, l.lease_id, 0 FROM l
     WHERE EXISTS (SELECT FROM unnest(l.positions) u(position)
                    WHERE u.position < 0 OR u.position >= l.item_count)
    UNION ALL
    SELECT 'lease_overlap', l.batch_id, min(l.lease_id::text)::uuid, 0
      FROM l, unnest(l.positions) u(position)
     GROUP BY l.batch_id, u.position HAVING count(*) > 1
)
SELECT f.kind, format('lease %s of batch %s', min(f.lease_id::text), min(f.batch_id::text)) AS subject,
       count(*)::double precision AS amount, max(f.seconds)::double precision AS beside
  FROM found f GROUP BY f.kind
