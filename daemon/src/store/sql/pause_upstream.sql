-- pause_upstream: nobody asks an upstream for so long, longer with every pause in a row.
-- locks: the upstream's row   fence: none   rows: 1
SELECT * FROM holdfast.pause_upstream($1, $2, $3, $4)
