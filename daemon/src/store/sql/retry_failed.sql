-- retry_failed: give a chunk of failed items new attempts.
-- locks: parent exclusive (L1)   fence: outcome still failed (L2)   rows: 1
SELECT * FROM holdfast.retry_failed($1, $2, $3, $4, $5, $6)
