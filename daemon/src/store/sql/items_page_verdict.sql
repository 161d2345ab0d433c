-- items_page_verdict: a page of items whose verdict is of one class, or that have none, from a position on.
-- locks: none   fence: none   rows: at most $3
SELECT x.*, x.acceptance_criteria::text AS criteria_json, x.verdict::text AS verdict_json
  FROM holdfast.items_shown($1, ARRAY(
       SELECT holdfast.positions_with_verdict($1, $4, $5, $2::integer, $3::integer))) x
