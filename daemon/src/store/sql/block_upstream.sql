-- block_upstream: nobody asks an upstream for so long.
-- locks: the upstream's row   fence: none   rows: 1
SELECT holdfast.block_upstream($1, $2, $3)
