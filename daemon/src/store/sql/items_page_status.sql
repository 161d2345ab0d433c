-- items_page_status: a page of items of one status from a position on.
-- locks: none   fence: none   rows: at most $3
SELECT * FROM holdfast.items_at($1,
    ARRAY(SELECT holdfast.positions_with_status($1, $4, $2::integer, $3::integer)))
