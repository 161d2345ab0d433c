-- grant_requests: how many requests a worker may begin at an upstream, and when.
-- locks: the upstream's row, then the worker's own   fence: none; a grant lapses   rows: 1
SELECT * FROM holdfast.grant_requests($1, $2, $3, $4, $5, $6, $7, $8, $9)
