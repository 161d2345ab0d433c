-- prune_audit: the oldest chunk of an audit log older than so long.
-- locks: their rows   fence: at on the row   rows: 1
WITH gone AS (
    DELETE FROM holdfast.audit_log a
     WHERE a.id = ANY (ARRAY(SELECT x.id FROM holdfast.audit_log x
                              WHERE x.at <= clock_timestamp() - make_interval(secs => $1)
                              ORDER BY x.id LIMIT $2))
    RETURNING 1
)
SELECT count(*) AS removed FROM gone
