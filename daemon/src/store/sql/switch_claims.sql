-- switch_claims: grant claims, or grant none, in the whole database; audited.
-- locks: the control row   fence: none, idempotent   rows: 1 when it was the other way before
WITH switched AS (
    UPDATE holdfast.control c SET claims_enabled = $1, changed_at = clock_timestamp()
     WHERE c.claims_enabled <> $1
    RETURNING 1
), noted AS (
    INSERT INTO holdfast.audit_log (actor, verb, before, after, detail)
    SELECT $2, CASE WHEN $1 THEN 'start_claims' ELSE 'stop_claims' END,
           CASE WHEN $1 THEN 'off' ELSE 'on' END, CASE WHEN $1 THEN 'on' ELSE 'off' END,
           json_build_object('reason', $3::text)
      FROM switched
)
SELECT true FROM switched
