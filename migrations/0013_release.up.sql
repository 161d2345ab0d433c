-- release_dead: release leases of one batch whose worker is dead, with everything that it started.
-- locks: ticket tried (L4), parent exclusive (L1), lease rows (L2)   fence: lease_id + token, worker (F3)   rows: how many items left them
--
-- The guard of a worker calls it, for leases that the worker held. No clock is asked: the holder gives
-- them back, by the one that survived it. A crash counts an attempt and a crash of every item, another
-- end an interruption. The first is forgiven at once; repeated ones back off with full jitter.
CREATE FUNCTION holdfast.release_dead(p_batch uuid, p_worker uuid, p_leases uuid[],
                                      p_tokens bigint[], p_crashed boolean,
                                      p_max_crashes integer, p_free_interruptions integer,
                                      p_backoff_s double precision,
                                      p_backoff_max_s double precision)
RETURNS integer
LANGUAGE plpgsql VOLATILE
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off AS $$
DECLARE
    b          holdfast.batches;
    p          holdfast.progress;
    v_held     uuid[];
    v_requeued integer;
    v_failed   integer;
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
    ), judged AS (
        SELECT t.lease_id, t.token, t.granted_at, u.position, coalesce(u.history, 0) AS before,
               CASE WHEN p_crashed
                    THEN holdfast.history_plus(holdfast.history_plus(coalesce(u.history, 0), 0), 1)
                    ELSE holdfast.history_interrupted(coalesce(u.history, 0), p_free_interruptions)
               END AS after
          FROM taken t, unnest(t.positions, t.histories) u(position, history)
    ), decided AS (
        SELECT j.*, holdfast.history_count(j.before, 0) AS spent,
               holdfast.history_count(j.after, 0) AS attempts,
               CASE WHEN holdfast.history_count(j.after, 1) >= p_max_crashes THEN 'poison'
                    WHEN holdfast.history_count(j.after, 0) >= b.max_attempts THEN 'worker_died'
               END AS fatal
          FROM judged j
    ), failed AS (
        -- Under no lease: the worker cannot read it back as its own (F6).
        INSERT INTO holdfast.outcomes (batch_id, position, status, lease_id, token, attempt,
                worker_id, started_at, finished_at, error, stop_reason)
        SELECT p_batch, d.position, 'failed', NULL, d.token, d.attempts, p_worker, d.granted_at,
               clock_timestamp(),
               CASE d.fatal WHEN 'poison'
                    THEN 'poison: its worker died with it ' || holdfast.history_count(d.after, 1)
                         || ' times'
                    ELSE 'its worker died in attempt ' || d.attempts || ' of ' || b.max_attempts
               END, d.fatal
          FROM decided d WHERE d.fatal IS NOT NULL
        RETURNING 1
    ), ended AS (
        INSERT INTO holdfast.attempts (batch_id, position, lease_id, token, attempt, worker_id,
                started_at, ended_at, ending, charged, by_holder, error, stop_reason)
        SELECT p_batch, d.position, d.lease_id, d.token, d.spent + 1, p_worker, d.granted_at,
               clock_timestamp(), CASE WHEN p_crashed THEN 'expired' ELSE 'interrupted' END,
               d.spent < d.attempts, false,
               CASE WHEN p_crashed THEN 'its worker died' ELSE 'its worker was told to end at once' END,
               'worker_died'
          FROM decided d WHERE d.fatal IS NULL
    ), requeued AS (
        INSERT INTO holdfast.waiting (batch_id, position, ready_at, history, last_error)
        SELECT p_batch, d.position,
               greatest(clock_timestamp() + make_interval(secs => CASE WHEN d.attempts <= 1 THEN 0
                    ELSE random() * least(p_backoff_max_s, p_backoff_s * 2 ^ (d.attempts - 2)) END),
                    p.retry_floor),
               d.after, 'its worker died'
          FROM decided d WHERE d.fatal IS NULL
        RETURNING 1
    )
    SELECT (SELECT count(*) FROM requeued)::integer, (SELECT count(*) FROM failed)::integer
      INTO v_requeued, v_failed;
    IF v_requeued + v_failed > 0 THEN
        p.executing := p.executing - v_requeued - v_failed;
        p.waiting := p.waiting + v_requeued;
        p.failed := p.failed + v_failed;
        PERFORM holdfast.save_progress(p);
        PERFORM holdfast.end_if_done(holdfast.current_progress(p_batch));
    END IF;
    RETURN v_requeued + v_failed;
END $$;
