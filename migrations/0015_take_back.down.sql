DROP FUNCTION holdfast.mark_begun(uuid, uuid, bigint, integer);

-- reap: take back the expired leases of one batch.
-- locks: ticket tried (L4), parent exclusive (L1), lease rows skipping busy ones (L2)   fence: expiry re-checked on the row (F4)   rows: one per position taken back
--
-- Charged expiries count an attempt, and a crash when the worker's heartbeat stopped too. p_charge
-- false (a mass expiry) counts an interruption instead. An item under check is charged nothing: it
-- waits for another check, and after three lost ones ends with its stored result and no verdict.
-- disposition: requeued | failed | rechecked | published.
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
    WITH taken AS (
        DELETE FROM holdfast.leases l
         WHERE l.batch_id = p_batch AND l.lease_id = ANY (v_expired)
        RETURNING l.lease_id, l.token, l.worker_id, l.positions, l.histories, l.granted_at,
                  l.expires_at
    ), lost AS (
        SELECT t.lease_id, t.token, t.worker_id, t.granted_at, t.expires_at, u.position,
               coalesce(u.history, 0) AS before,
               NOT EXISTS (SELECT FROM holdfast.workers w
                            WHERE w.id = t.worker_id
                              AND w.heartbeat_at > clock_timestamp()
                                                 - make_interval(secs => w.lease_s)) AS died,
               s.staged_row, s.staged_row IS NOT NULL AS staged
          FROM taken t CROSS JOIN unnest(t.positions, t.histories) u(position, history)
          LEFT JOIN LATERAL (
               SELECT x.ctid AS staged_row FROM holdfast.staged_outcomes x
                WHERE x.batch_id = p_batch AND x.position = u.position OFFSET 0) s ON true
    ), judged AS (
        SELECT x.*,
               CASE WHEN x.staged
                    THEN holdfast.history_plus(x.before, 4)
                    WHEN NOT p_charge
                    THEN holdfast.history_interrupted(x.before, p_free_interruptions)
                    WHEN x.died
                    THEN holdfast.history_plus(holdfast.history_plus(x.before, 0), 1)
                    ELSE holdfast.history_plus(x.before, 0) END AS after
          FROM lost x
    ), decided AS MATERIALIZED (
        SELECT j.*, holdfast.history_count(j.after, 0) AS attempts,
               CASE WHEN j.staged
                    THEN CASE WHEN holdfast.history_count(j.after, 4) >= 3 THEN 'published'
                              ELSE 'rechecked' END
                    WHEN holdfast.history_count(j.after, 1) >= p_max_crashes
                      OR holdfast.history_count(j.after, 0) >= b.max_attempts THEN 'failed'
                    ELSE 'requeued' END AS disposition,
               CASE WHEN holdfast.history_count(j.after, 1) >= p_max_crashes THEN 'poison'
                    ELSE 'lease_expired' END AS reason
          FROM judged j
    ), failed AS (
        -- Under no lease: a straggler must not read this back as its own (F6).
        INSERT INTO holdfast.outcomes (batch_id, position, status, lease_id, token, attempt,
                worker_id, started_at, finished_at, error, stop_reason)
        SELECT p_batch, d.position, 'failed', NULL, d.token, d.attempts, d.worker_id, d.granted_at,
               clock_timestamp(),
               CASE d.reason WHEN 'poison'
                    THEN 'poison: its worker died with it ' || holdfast.history_count(d.after, 1)
                         || ' times'
                    ELSE 'the lease expired in attempt ' || d.attempts || ' of ' || b.max_attempts
               END, d.reason
          FROM decided d WHERE d.disposition = 'failed'
        RETURNING 1
    ), ended AS (
        INSERT INTO holdfast.attempts (batch_id, position, lease_id, token, attempt, worker_id,
                started_at, ended_at, ending, charged, by_holder, error, stop_reason)
        SELECT p_batch, d.position, d.lease_id, d.token, holdfast.history_count(d.before, 0) + 1,
               d.worker_id, d.granted_at, clock_timestamp(), 'expired',
               holdfast.history_count(d.before, 0) < holdfast.history_count(d.after, 0), false,
               CASE WHEN d.died THEN 'the lease expired: its worker sent no heartbeat'
                    ELSE 'the lease expired while its worker lived' END, 'lease_expired'
          FROM decided d WHERE d.disposition = 'requeued'
    ), requeued AS (
        -- The first expiry is forgiven at once; repeated ones back off with full jitter.
        INSERT INTO holdfast.waiting (batch_id, position, ready_at, history, last_error, recheck)
        SELECT p_batch, d.position,
               CASE WHEN d.staged THEN greatest(clock_timestamp(), p.recheck_floor)
                    ELSE greatest(clock_timestamp() + make_interval(secs =>
                             CASE WHEN d.attempts <= 1 THEN 0
                                  ELSE random() * least(p_backoff_max_s,
                                                        p_backoff_s * 2 ^ (d.attempts - 2)) END),
                         p.retry_floor) END,
               d.after, CASE WHEN NOT d.staged THEN 'lease expired' END, d.staged
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
        SELECT p_batch, u.position, 'succeeded', NULL, d.token, u.attempt, u.worker_id,
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
        SELECT p_batch, p.seq + 1, p.next_position, p.executing - c.requeued - c.failed,
               p.checking - c.published, p.waiting + c.requeued, p.deferred,
               p.succeeded + c.published, p.failed + c.failed, p.cancelled, p.retry_floor,
               p.recheck_floor, p.deferred_floor, p.last_delta, p.verdict_holds, p.verdict_fails,
               p.verdict_unverified
          FROM counted c WHERE c.requeued + c.failed + c.published > 0
    )
    SELECT d.position, d.lease_id, d.token, d.disposition,
           extract(epoch FROM clock_timestamp() - d.expires_at)::double precision
      FROM decided d;
    PERFORM holdfast.end_if_done(holdfast.current_progress(p_batch));
END $$;

-- release_dead: release leases of one batch whose worker is dead, with everything that it started.
-- locks: ticket tried (L4), parent exclusive (L1), lease rows (L2)   fence: lease_id + token, worker (F3)   rows: how many items left them
--
-- The guard of a worker calls it, for leases that the worker held. No clock is asked: the holder gives
-- them back, by the one that survived it. A crash counts an attempt and a crash of every item, another
-- end an interruption. The first is forgiven at once; repeated ones back off with full jitter. An item
-- under check is charged nothing: it waits for another check, or after three lost ones ends without a
-- verdict, as in reap.
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
    v_requeued  integer;
    v_failed    integer;
    v_published integer;
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
    WITH taken AS (
        DELETE FROM holdfast.leases l
         WHERE l.batch_id = p_batch AND l.lease_id = ANY (v_held)
        RETURNING l.lease_id, l.token, l.positions, l.histories, l.granted_at
    ), lost AS (
        SELECT t.lease_id, t.token, t.granted_at, u.position, coalesce(u.history, 0) AS before,
               s.staged_row, s.staged_row IS NOT NULL AS staged
          FROM taken t CROSS JOIN unnest(t.positions, t.histories) u(position, history)
          LEFT JOIN LATERAL (
               SELECT x.ctid AS staged_row FROM holdfast.staged_outcomes x
                WHERE x.batch_id = p_batch AND x.position = u.position OFFSET 0) s ON true
    ), judged AS (
        SELECT x.*,
               CASE WHEN x.staged
                    THEN holdfast.history_plus(x.before, 4)
                    WHEN p_crashed
                    THEN holdfast.history_plus(holdfast.history_plus(x.before, 0), 1)
                    ELSE holdfast.history_interrupted(x.before, p_free_interruptions) END AS after
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
                    ELSE 'worker_died' END AS reason
          FROM judged j
    ), failed AS (
        -- Under no lease: the worker cannot read it back as its own (F6).
        INSERT INTO holdfast.outcomes (batch_id, position, status, lease_id, token, attempt,
                worker_id, started_at, finished_at, error, stop_reason)
        SELECT p_batch, d.position, 'failed', NULL, d.token, d.attempts, p_worker, d.granted_at,
               clock_timestamp(),
               CASE d.reason WHEN 'poison'
                    THEN 'poison: its worker died with it ' || holdfast.history_count(d.after, 1)
                         || ' times'
                    ELSE 'its worker died in attempt ' || d.attempts || ' of ' || b.max_attempts
               END, d.reason
          FROM decided d WHERE d.disposition = 'failed'
        RETURNING 1
    ), ended AS (
        INSERT INTO holdfast.attempts (batch_id, position, lease_id, token, attempt, worker_id,
                started_at, ended_at, ending, charged, by_holder, error, stop_reason)
        SELECT p_batch, d.position, d.lease_id, d.token, d.spent + 1, p_worker, d.granted_at,
               clock_timestamp(), CASE WHEN p_crashed THEN 'expired' ELSE 'interrupted' END,
               d.spent < d.attempts, false,
               CASE WHEN p_crashed THEN 'its worker died' ELSE 'its worker was told to end at once' END,
               'worker_died'
          FROM decided d WHERE d.disposition = 'requeued'
    ), requeued AS (
        INSERT INTO holdfast.waiting (batch_id, position, ready_at, history, last_error, recheck)
        SELECT p_batch, d.position,
               CASE WHEN d.staged THEN greatest(clock_timestamp(), p.recheck_floor)
                    ELSE greatest(clock_timestamp() + make_interval(secs =>
                             CASE WHEN d.attempts <= 1 THEN 0
                                  ELSE random() * least(p_backoff_max_s,
                                                        p_backoff_s * 2 ^ (d.attempts - 2)) END),
                         p.retry_floor) END,
               d.after, CASE WHEN NOT d.staged THEN 'its worker died' END, d.staged
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
        SELECT p_batch, u.position, 'succeeded', NULL, d.token, u.attempt, u.worker_id,
               u.started_at, u.ended_at, u.result, u.result_truncated, u.result_size,
               u.stop_reason, u.exit_status, u.signal, u.model, u.usage, u.staged_lease_id
          FROM unchecked u JOIN decided d ON d.position = u.position
        RETURNING 1
    )
    SELECT (SELECT count(*) FROM decided)::integer,
           (SELECT count(*) FROM requeued r WHERE NOT r.recheck)::integer,
           (SELECT count(*) FROM failed)::integer, (SELECT count(*) FROM published)::integer
      INTO v_moved, v_requeued, v_failed, v_published;
    IF v_requeued + v_failed + v_published > 0 THEN
        p.executing := p.executing - v_requeued - v_failed;
        p.checking := p.checking - v_published;
        p.waiting := p.waiting + v_requeued;
        p.succeeded := p.succeeded + v_published;
        p.failed := p.failed + v_failed;
        PERFORM holdfast.save_progress(p);
        PERFORM holdfast.end_if_done(holdfast.current_progress(p_batch));
    END IF;
    RETURN v_moved;
END $$;

DROP FUNCTION holdfast.take_back(holdfast.batches, holdfast.progress, uuid[], text, integer, integer,
                                 double precision, double precision);
