-- staged_items: criteria, evidence and workspaces of staged positions, read after the commit that took them (L3).
-- locks: none   fence: none   rows: one per position
--
-- Only what the staged attempt recorded counts. OFFSET 0: as in item_inputs.
SELECT i.position, i.acceptance_criteria::text,
       ARRAY(SELECT e.record::text FROM holdfast.evidence e
              WHERE e.batch_id = $1 AND e.position = s.position AND e.lease_id = s.staged_lease_id
              ORDER BY e.seq), s.workspace, s.staged_token, s.worker_id
  FROM unnest($2::integer[]) u(position)
 CROSS JOIN LATERAL (SELECT * FROM holdfast.items x
                      WHERE x.batch_id = $1 AND x.position = u.position OFFSET 0) i
 CROSS JOIN LATERAL (SELECT * FROM holdfast.staged_outcomes x
                      WHERE x.batch_id = $1 AND x.position = u.position OFFSET 0) s
