-- items_page: a page of items from a position on, each with its derived status.
-- locks: none   fence: none   rows: at most $3
SELECT * FROM holdfast.items_at($1, ARRAY(
    SELECT generate_series($2::integer, least(2147483647, $2::bigint + $3::integer - 1)::integer)))
