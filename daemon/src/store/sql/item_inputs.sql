-- item_inputs: keys, inputs and criteria of claimed positions, read after the claim's commit (L3).
-- locks: none   fence: none   rows: one per position
--
-- OFFSET 0: one look by key for each, whatever the planner believes of the table.
SELECT i.position, i.key, i.input::text, i.acceptance_criteria::text
  FROM unnest($2::integer[]) u(position)
 CROSS JOIN LATERAL (SELECT * FROM holdfast.items x
                      WHERE x.batch_id = $1 AND x.position = u.position OFFSET 0) i
