-- mark_begun: an execution that runs alone is about to begin: its worker's death is judged by that.
-- locks: the lease row (L2)   fence: lease_id + token, position (F3)   rows: 1, whether it still holds it
SELECT holdfast.mark_begun($1, $2, $3, $4) AS held
