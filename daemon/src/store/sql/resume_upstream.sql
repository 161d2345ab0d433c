-- resume_upstream: a paused upstream is well again.
-- locks: the upstream's row   fence: none   rows: at most 1
UPDATE holdfast.upstreams u SET pauses = 0
 WHERE u.upstream = $1 AND u.model = $2 AND u.pauses > 0
RETURNING true
