-- take_back: end leases of one batch that their holder cannot end: what reap and release_dead have in common.
-- locks: of the caller: parent exclusive (L1), the lease rows (L2)   fence: of the caller   rows: one per position taken back
--
-- p_cause: expired, charged an attempt, and a crash when the worker's heartbeat stopped too | excused
-- (a mass expiry), counted as an interruption | crashed, charged both | ended, an interruption.
-- An item that has taken its worker down twice runs alone: it is charged only if it had begun, for
-- its worker may have died of a neighbour that it waited for. An item under check is charged nothing:
-- it waits for another check, and after three lost ones ends with its stored result and no verdict.
-- disposition: requeued | failed | rechecked | published. Ends no batch.
CREATE FUNCTION holdfast.take_back(b holdfast.batches, p holdfast.progress, p_leases uuid[],
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

-- reap: take back the expired leases of one batch.
-- locks: ticket tried (L4), parent exclusive (L1), lease rows skipping busy ones (L2)   fence: expiry re-checked on the row (F4)   rows: one per position taken back
--
-- p_charge false (a mass expiry) counts an interruption. disposition: as take_back.
CREATE OR REPLACE FUNCTION holdfast.reap(p_batch uuid, p_charge boolean, p_max_crashes integer,
                              p_free_interruptions integer, p_backoff_s double precision,
                              p_backoff_max_s double precision)
RETURNS TABLE (item_position integer, lease_id uuid, token bigint, disposition text,
               late_s double precision)
LANGUAGE plpgsql VOLATILE
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    b           holdfast.batches;
    p           holdfast.progress;
    v_expired   uuid[];
BEGIN
    IF NOT holdfast.try_ticket(p_batch) THEN
        RETURN;
    END IF;
    PERFORM holdfast.lock_parent(p_batch);
    SELECT * INTO STRICT b FROM holdfast.batches x WHERE x.id = p_batch;
    IF b.control = 'cancelled' THEN
        RETURN;
    END IF;
    p := holdfast.current_progress(p_batch);
    v_expired := ARRAY(SELECT l.lease_id FROM holdfast.leases l
                        WHERE l.batch_id = p_batch AND l.expires_at < clock_timestamp()
                        ORDER BY l.lease_id FOR UPDATE SKIP LOCKED);
    RETURN QUERY
    SELECT * FROM holdfast.take_back(b, p, v_expired,
                      CASE WHEN p_charge THEN 'expired' ELSE 'excused' END, p_max_crashes,
                      p_free_interruptions, p_backoff_s, p_backoff_max_s);
    PERFORM holdfast.end_if_done(holdfast.current_progress(p_batch));
END $$;

-- release_dead: release leases of one batch whose worker is dead, with everything that it started.
-- locks: ticket tried (L4), parent exclusive (L1), lease rows (L2)   fence: lease_id + token, worker (F3)   rows: how many items left them
--
-- The guard of a worker calls it, for leases that the worker held. No clock is asked: the holder gives
-- them back, by the one that survived it.
CREATE OR REPLACE FUNCTION holdfast.release_dead(p_batch uuid, p_worker uuid, p_leases uuid[],
                                      p_tokens bigint[], p_crashed boolean,
                                      p_max_crashes integer, p_free_interruptions integer,
                                      p_backoff_s double precision,
                                      p_backoff_max_s double precision)
RETURNS integer
LANGUAGE plpgsql VOLATILE
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off AS $$
DECLARE
    b           holdfast.batches;
    p           holdfast.progress;
    v_held      uuid[];
    v_moved     integer;
BEGIN
    IF NOT holdfast.try_ticket(p_batch) THEN
        RETURN 0;
    END IF;
    PERFORM holdfast.lock_parent(p_batch);
    SELECT * INTO STRICT b FROM holdfast.batches x WHERE x.id = p_batch;
    IF b.control = 'cancelled' THEN
        RETURN 0;
    END IF;
    p := holdfast.current_progress(p_batch);
    v_held := ARRAY(SELECT l.lease_id FROM holdfast.leases l
                     WHERE l.batch_id = p_batch AND l.worker_id = p_worker
                       AND (l.lease_id, l.token) IN (
                           SELECT x.lease_id, x.token FROM unnest(p_leases, p_tokens) x(lease_id, token))
                     ORDER BY l.lease_id FOR UPDATE SKIP LOCKED);
    SELECT count(*) INTO v_moved
      FROM holdfast.take_back(b, p, v_held, CASE WHEN p_crashed THEN 'crashed' ELSE 'ended' END,
                              p_max_crashes, p_free_interruptions, p_backoff_s, p_backoff_max_s);
    PERFORM holdfast.end_if_done(holdfast.current_progress(p_batch));
    RETURN v_moved;
END $$;

-- mark_begun: the execution of one position is about to begin; said where a crash is judged by it.
-- locks: the lease row   fence: lease_id + token, position (F3)   rows: whether the lease still holds it
CREATE FUNCTION holdfast.mark_begun(p_batch uuid, p_lease uuid, p_token bigint, p_position integer)
RETURNS boolean
LANGUAGE plpgsql VOLATILE
SET enable_seqscan = off SET jit = off AS $$
BEGIN
    PERFORM holdfast.assert_protocol();
    UPDATE holdfast.leases l SET started = array_append(l.started, p_position)
     WHERE (l.batch_id, l.lease_id, l.token) = (p_batch, p_lease, p_token)
       AND p_position = ANY (l.positions);
    RETURN FOUND;
END $$;
