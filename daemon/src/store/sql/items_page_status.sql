-- items_page_status: a page of items of one status from a position on.
-- locks: none   fence: none   rows: at most $3
SELECT x.*, x.acceptance_criteria::text AS criteria_json, x.verdict::text AS verdict_json
  FROM holdfast.items_shown($1, ARRAY(
       SELECT holdfast.positions_with_status($1, $4, $2::integer, $3::integer))) x
