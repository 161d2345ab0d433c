-- ask_workers: what some workers are asked for, seen with their next heartbeat; audited.
-- locks: their rows, in order   fence: not ended, not asked to drain already   rows: one per worker asked
WITH these AS (
    SELECT w.id, w.asked FROM holdfast.workers w
     WHERE w.id = ANY ($1) AND w.ended_at IS NULL AND w.asked IS DISTINCT FROM 'drain'
     ORDER BY w.id FOR NO KEY UPDATE
), asked AS (
    UPDATE holdfast.workers w SET asked = $2 FROM these t WHERE w.id = t.id
    RETURNING w.id, t.asked AS before
), noted AS (
    INSERT INTO holdfast.audit_log (actor, verb, before, after, detail)
    SELECT $3, coalesce($2, 'unquiet'), a.before, $2,
           json_build_object('worker', a.id, 'reason', $4::text)
      FROM asked a
)
SELECT a.id FROM asked a ORDER BY a.id
