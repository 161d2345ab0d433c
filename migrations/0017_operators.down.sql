-- What a removed batch has left stays behind as rows that nobody reaches; `holdfast prune` clears them
-- away before.
-- take_back: end leases of one batch that their holder cannot end: what reap and release_dead have in common.
-- locks: of the caller: parent exclusive (L1), the lease rows (L2)   fence: of the caller   rows: one per position taken back
--
-- p_cause: expired, charged an attempt, and a crash when the worker's heartbeat stopped too | excused
-- (a mass expiry), counted as an interruption | crashed, charged both | ended, an interruption.
-- An item that has taken its worker down twice runs alone: it is charged only if it had begun, for
-- its worker may have died of a neighbour that it waited for. An item under check is charged nothing:
-- it waits for another check, and after three lost ones ends with its stored result and no verdict.
-- disposition: requeued | failed | rechecked | published. Ends no batch.
CREATE OR REPLACE FUNCTION holdfast.take_back(b holdfast.batches, p holdfast.progress, p_leases uuid[],
                                   p_cause text, p_max_crashes integer,
                                   p_free_interruptions integer, p_backoff_s double precision,
                                   p_backoff_max_s double precision)
RETURNS TABLE (item_position integer, lease_id uuid, token bigint, disposition text,
               late_s double precision)
LANGUAGE plpgsql VOLATILE
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    WITH taken AS (
        DELETE FROM holdfast.leases l
         WHERE l.batch_id = b.id AND l.lease_id = ANY (p_leases)
        RETURNING l.lease_id, l.token, l.worker_id, l.positions, l.histories, l.started,
                  l.granted_at, l.expires_at
    ), lost AS (
        SELECT t.lease_id, t.token, t.worker_id, t.granted_at, t.expires_at, u.position,
               coalesce(u.history, 0) AS before,
               p_cause = 'crashed' OR p_cause <> 'ended'
                   AND NOT EXISTS (SELECT FROM holdfast.workers w
                                    WHERE w.id = t.worker_id
                                      AND w.heartbeat_at > clock_timestamp()
                                                         - make_interval(secs => w.lease_s)) AS died,
               holdfast.history_count(coalesce(u.history, 0), 1) >= 2
                   AND u.position <> ALL (t.started) AS waited,
               s.staged_row, s.staged_row IS NOT NULL AS staged
          FROM taken t CROSS JOIN unnest(t.positions, t.histories) u(position, history)
          LEFT JOIN LATERAL (
               SELECT x.ctid AS staged_row FROM holdfast.staged_outcomes x
                WHERE x.batch_id = b.id AND x.position = u.position OFFSET 0) s ON true
    ), judged AS (
        SELECT x.*,
               CASE WHEN x.staged
                    THEN holdfast.history_plus(x.before, 4)
                    WHEN p_cause IN ('excused', 'ended') OR x.waited
                    THEN holdfast.history_interrupted(x.before, p_free_interruptions)
                    WHEN x.died
                    THEN holdfast.history_plus(holdfast.history_plus(x.before, 0), 1)
                    ELSE holdfast.history_plus(x.before, 0) END AS after
          FROM lost x
    ), decided AS MATERIALIZED (
        SELECT j.*, holdfast.history_count(j.before, 0) AS spent,
               holdfast.history_count(j.after, 0) AS attempts,
               CASE WHEN j.staged
                    THEN CASE WHEN holdfast.history_count(j.after, 4) >= 3 THEN 'published'
                              ELSE 'rechecked' END
                    WHEN holdfast.history_count(j.after, 1) >= p_max_crashes
                      OR holdfast.history_count(j.after, 0) >= b.max_attempts THEN 'failed'
                    ELSE 'requeued' END AS disposition,
               CASE WHEN holdfast.history_count(j.after, 1) >= p_max_crashes THEN 'poison'
                    WHEN p_cause IN ('crashed', 'ended') THEN 'worker_died'
                    ELSE 'lease_expired' END AS reason
          FROM judged j
    ), failed AS (
        -- Under no lease: a straggler must not read this back as its own (F6).
        INSERT INTO holdfast.outcomes (batch_id, position, status, lease_id, token, attempt,
                worker_id, started_at, finished_at, error, stop_reason)
        SELECT b.id, d.position, 'failed', NULL, d.token, d.attempts, d.worker_id, d.granted_at,
               clock_timestamp(),
               CASE d.reason
                    WHEN 'poison' THEN 'poison: its worker died with it '
                         || holdfast.history_count(d.after, 1) || ' times'
                    WHEN 'worker_died' THEN 'its worker died in attempt '
                         || d.attempts || ' of ' || b.max_attempts
                    ELSE 'the lease expired in attempt ' || d.attempts || ' of ' || b.max_attempts
               END, d.reason
          FROM decided d WHERE d.disposition = 'failed'
        RETURNING 1
    ), ended AS (
        INSERT INTO holdfast.attempts (batch_id, position, lease_id, token, attempt, worker_id,
                started_at, ended_at, ending, charged, by_holder, error, stop_reason)
        SELECT b.id, d.position, d.lease_id, d.token, d.spent + 1, d.worker_id, d.granted_at,
               clock_timestamp(),
               CASE WHEN p_cause = 'ended' THEN 'interrupted' ELSE 'expired' END,
               d.spent < d.attempts, false,
               CASE WHEN p_cause = 'crashed' THEN 'its worker died'
                    WHEN p_cause = 'ended' THEN 'its worker was told to end at once'
                    WHEN d.died THEN 'the lease expired: its worker sent no heartbeat'
                    ELSE 'the lease expired while its worker lived' END, d.reason
          FROM decided d WHERE d.disposition = 'requeued'
    ), requeued AS (
        -- The first is forgiven at once; repeated ones back off with full jitter.
        INSERT INTO holdfast.waiting (batch_id, position, ready_at, history, last_error, recheck)
        SELECT b.id, d.position,
               CASE WHEN d.staged THEN greatest(clock_timestamp(), p.recheck_floor)
                    ELSE greatest(clock_timestamp() + make_interval(secs =>
                             CASE WHEN d.attempts <= 1 THEN 0
                                  ELSE random() * least(p_backoff_max_s,
                                                        p_backoff_s * 2 ^ (d.attempts - 2)) END),
                         p.retry_floor) END,
               d.after,
               CASE WHEN d.staged THEN NULL
                    WHEN d.reason = 'worker_died' THEN 'its worker died'
                    ELSE 'lease expired' END, d.staged
          FROM decided d WHERE d.disposition IN ('requeued', 'rechecked')
        RETURNING recheck
    ), disowned AS (
        UPDATE holdfast.staged_outcomes s SET lease_id = NULL
         WHERE s.ctid = ANY (ARRAY(SELECT d.staged_row FROM decided d
                                    WHERE d.disposition = 'rechecked'))
    ), unchecked AS (
        DELETE FROM holdfast.staged_outcomes s
         WHERE s.ctid = ANY (ARRAY(SELECT d.staged_row FROM decided d
                                    WHERE d.disposition = 'published'))
        RETURNING s.*
    ), published AS (
        INSERT INTO holdfast.outcomes (batch_id, position, status, lease_id, token, attempt,
                worker_id, started_at, finished_at, result, result_truncated, result_size,
                stop_reason, exit_status, signal, model, usage, staged_lease_id)
        SELECT b.id, u.position, 'succeeded', NULL, d.token, u.attempt, u.worker_id,
               u.started_at, u.ended_at, u.result, u.result_truncated, u.result_size,
               u.stop_reason, u.exit_status, u.signal, u.model, u.usage, u.staged_lease_id
          FROM unchecked u JOIN decided d ON d.position = u.position
        RETURNING 1
    ), counted AS (
        SELECT (SELECT count(*) FROM requeued r WHERE NOT r.recheck)::integer AS requeued,
               (SELECT count(*) FROM failed)::integer AS failed,
               (SELECT count(*) FROM published)::integer AS published
    ), saved AS (
        INSERT INTO holdfast.progress (batch_id, seq, next_position, executing, checking, waiting,
                                       deferred, succeeded, failed, cancelled, retry_floor,
                                       recheck_floor, deferred_floor, last_delta, verdict_holds,
                                       verdict_fails, verdict_unverified)
        SELECT b.id, p.seq + 1, p.next_position, p.executing - c.requeued - c.failed,
               p.checking - c.published, p.waiting + c.requeued, p.deferred,
               p.succeeded + c.published, p.failed + c.failed, p.cancelled, p.retry_floor,
               p.recheck_floor, p.deferred_floor, p.last_delta, p.verdict_holds, p.verdict_fails,
               p.verdict_unverified
          FROM counted c WHERE c.requeued + c.failed + c.published > 0
    )
    SELECT d.position, d.lease_id, d.token, d.disposition,
           extract(epoch FROM clock_timestamp() - d.expires_at)::double precision
      FROM decided d;
END $$;

DROP FUNCTION holdfast.clear_removed(uuid, integer);
DROP FUNCTION holdfast.remove_batch(uuid, double precision, text);
DROP FUNCTION holdfast.revoke(uuid, uuid[], bigint[], boolean, boolean, text, text);
DROP TABLE holdfast.removed_batches;
ALTER TABLE holdfast.workers DROP COLUMN asked;
ALTER TABLE holdfast.leases DROP COLUMN revoked_at;
