-- clear_cancelled: clear away what a cancel left behind.
-- locks: ticket (L4), parent exclusive (L1)   fence: control = cancelled   rows: 1
SELECT holdfast.clear_cancelled($1, $2)
