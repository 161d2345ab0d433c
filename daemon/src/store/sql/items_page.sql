-- items_page: a page of items from a position on, each with its derived status, its criteria and its verdict.
-- locks: none   fence: none   rows: at most $3
SELECT x.*, x.acceptance_criteria::text AS criteria_json, x.verdict::text AS verdict_json
  FROM holdfast.items_shown($1, ARRAY(
       SELECT generate_series($2::integer,
                              least(2147483647, $2::bigint + $3::integer - 1)::integer))) x
