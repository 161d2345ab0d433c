-- item_inputs: keys, inputs and criteria of claimed positions, read after the claim's commit (L3).
-- locks: none   fence: none   rows: one per position
--
-- With what is known of the attempt before. OFFSET 0: one look by key for each, whatever the planner
-- believes of the table.
SELECT i.position, i.key, i.input::text, i.acceptance_criteria::text, a.token, a.ending, a.worker_id
  FROM unnest($2::integer[]) u(position)
 CROSS JOIN LATERAL (SELECT * FROM holdfast.items x
                      WHERE x.batch_id = $1 AND x.position = u.position OFFSET 0) i
  LEFT JOIN LATERAL (SELECT x.token, x.ending, x.worker_id FROM holdfast.attempts x
                      WHERE x.batch_id = $1 AND x.position = u.position
                      ORDER BY x.token DESC LIMIT 1) a ON true
