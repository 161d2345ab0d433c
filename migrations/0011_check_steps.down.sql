-- What is under check ends with its stored result and no verdict: the schema before has no other
-- place for it. Batches first, in order (L1); nothing is staged meanwhile.
DO $$
DECLARE
    v_batches uuid[] := '{}';
    v_batch   record;
    v_moved   integer;
    p         holdfast.progress;
BEGIN
    FOR v_batch IN SELECT b.id, b.lock_no FROM holdfast.batches b
                    WHERE b.finished_at IS NULL ORDER BY b.lock_no LOOP
        PERFORM pg_advisory_xact_lock(1212564301, v_batch.lock_no);
        v_batches := v_batches || v_batch.id;
    END LOOP;
    LOCK TABLE holdfast.staged_outcomes IN ACCESS EXCLUSIVE MODE;
    FOR v_batch IN SELECT DISTINCT b.id FROM holdfast.staged_outcomes s
                     JOIN holdfast.batches b ON b.id = s.batch_id
                    WHERE b.finished_at IS NULL LOOP
        IF NOT v_batch.id = ANY (v_batches) THEN
            RAISE EXCEPTION 'holdfast: batch % was begun meanwhile; try again', v_batch.id
                USING ERRCODE = 'lock_not_available';
        END IF;
        INSERT INTO holdfast.outcomes (batch_id, position, status, lease_id, token, attempt,
                worker_id, started_at, finished_at, result, result_truncated, result_size,
                stop_reason, exit_status, signal, model, usage)
        SELECT s.batch_id, s.position, 'succeeded', NULL, s.staged_token, s.attempt, s.worker_id,
               s.started_at, s.ended_at, s.result, s.result_truncated, s.result_size,
               s.stop_reason, s.exit_status, s.signal, s.model, s.usage
          FROM holdfast.staged_outcomes s WHERE s.batch_id = v_batch.id;
        GET DIAGNOSTICS v_moved = ROW_COUNT;
        DELETE FROM holdfast.waiting w WHERE w.batch_id = v_batch.id AND w.recheck;
        DELETE FROM holdfast.leases l
         WHERE l.batch_id = v_batch.id
           AND NOT EXISTS (SELECT unnest(l.positions) EXCEPT
                           SELECT s.position FROM holdfast.staged_outcomes s
                            WHERE s.batch_id = v_batch.id);
        UPDATE holdfast.leases l
           SET (positions, histories) = (
               SELECT array_agg(u.position ORDER BY u.place),
                      CASE WHEN l.histories IS NOT NULL
                           THEN array_agg(u.history ORDER BY u.place) END
                 FROM unnest(l.positions, l.histories)
                      WITH ORDINALITY u(position, history, place)
                WHERE NOT EXISTS (SELECT FROM holdfast.staged_outcomes s
                                   WHERE s.batch_id = v_batch.id AND s.position = u.position))
         WHERE l.batch_id = v_batch.id
           AND EXISTS (SELECT FROM holdfast.staged_outcomes s
                        WHERE s.batch_id = v_batch.id AND s.lease_id = l.lease_id);
        DELETE FROM holdfast.staged_outcomes s WHERE s.batch_id = v_batch.id;
        p := holdfast.current_progress(v_batch.id);
        p.checking := p.checking - v_moved;
        p.succeeded := p.succeeded + v_moved;
        PERFORM holdfast.save_progress(p);
        PERFORM holdfast.end_if_done(p);
    END LOOP;
END $$;

DROP FUNCTION holdfast.recheck(uuid, uuid, uuid, integer, double precision, text, double precision,
    text);
DROP FUNCTION holdfast.conclude(uuid, double precision, uuid[], bigint[], integer[], text[], text[],
    text[], bigint[]);
DROP FUNCTION holdfast.stage(uuid, uuid, double precision, uuid[], bigint[], integer[], integer[],
    timestamptz[], timestamptz[], text[], boolean[], bigint[], text[], integer[], integer[], text[],
    integer[], integer[], text[]);

-- give_back: return a whole lease whose claim was never answered, by its lease_id alone (F6).
-- locks: parent shared (L1), the lease row (L2)   fence: lease_id (F3)   rows: positions given back
--
-- A lost claim counts as an interruption, free of charge p_free_interruptions times.
CREATE OR REPLACE FUNCTION holdfast.give_back(p_batch uuid, p_lease uuid, p_free_interruptions integer)
RETURNS integer
LANGUAGE plpgsql VOLATILE
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off AS $$
DECLARE
    v_floor timestamptz;
    v_moved integer;
BEGIN
    PERFORM holdfast.lock_parent_shared(p_batch);
    IF NOT EXISTS (SELECT FROM holdfast.batches b
                    WHERE b.id = p_batch AND b.control <> 'cancelled') THEN
        RETURN 0;
    END IF;
    PERFORM FROM holdfast.leases l WHERE l.batch_id = p_batch AND l.lease_id = p_lease FOR UPDATE;
    SELECT p.retry_floor INTO v_floor FROM holdfast.progress p
     WHERE p.batch_id = p_batch ORDER BY p.seq DESC LIMIT 1;
    WITH gone AS (
        DELETE FROM holdfast.leases l WHERE l.batch_id = p_batch AND l.lease_id = p_lease
        RETURNING l.positions, l.histories
    ), again AS (
        INSERT INTO holdfast.waiting (batch_id, position, ready_at, history)
        SELECT p_batch, u.position, greatest(clock_timestamp(), v_floor),
               holdfast.history_interrupted(coalesce(u.history, 0), p_free_interruptions)
          FROM gone g, unnest(g.positions, g.histories) u(position, history)
        RETURNING 1
    ), moved AS (
        SELECT count(*)::integer AS n FROM again
    ), delta AS (
        INSERT INTO holdfast.progress_deltas (batch_id, executing, checking, waiting, succeeded,
                                              failed)
        SELECT p_batch, -m.n, 0, m.n, 0, 0 FROM moved m WHERE m.n > 0
    )
    SELECT m.n INTO v_moved FROM moved m;
    RETURN v_moved;
END $$;

-- reap: take back the expired leases of one batch, or clear what its cancel left behind.
-- locks: ticket tried (L4), parent exclusive (L1), lease rows skipping busy ones (L2)   fence: expiry re-checked on the row (F4)   rows: one per position taken back
--
-- Charged expiries count an attempt, and a crash when the worker's heartbeat stopped too. p_charge
-- false (a mass expiry) counts an interruption instead.
-- disposition: requeued | failed.
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
    v_requeued  integer;
    v_failed    integer;
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
                                                 - make_interval(secs => w.lease_s)) AS died
          FROM taken t, unnest(t.positions, t.histories) u(position, history)
    ), judged AS (
        SELECT x.*,
               CASE WHEN NOT p_charge
                    THEN holdfast.history_interrupted(x.before, p_free_interruptions)
                    WHEN x.died
                    THEN holdfast.history_plus(holdfast.history_plus(x.before, 0), 1)
                    ELSE holdfast.history_plus(x.before, 0) END AS after
          FROM lost x
    ), decided AS (
        SELECT j.*, holdfast.history_count(j.after, 0) AS attempts,
               CASE WHEN holdfast.history_count(j.after, 1) >= p_max_crashes THEN 'poison'
                    WHEN holdfast.history_count(j.after, 0) >= b.max_attempts THEN 'lease_expired'
               END AS fatal
          FROM judged j
    ), failed AS (
        -- Under no lease: a straggler must not read this back as its own (F6).
        INSERT INTO holdfast.outcomes (batch_id, position, status, lease_id, token, attempt,
                worker_id, started_at, finished_at, error, stop_reason)
        SELECT p_batch, d.position, 'failed', NULL, d.token, d.attempts, d.worker_id, d.granted_at,
               clock_timestamp(),
               CASE d.fatal WHEN 'poison'
                    THEN 'poison: its worker died with it ' || holdfast.history_count(d.after, 1)
                         || ' times'
                    ELSE 'the lease expired in attempt ' || d.attempts || ' of ' || b.max_attempts
               END, d.fatal
          FROM decided d WHERE d.fatal IS NOT NULL
        RETURNING 1
    ), ended AS (
        INSERT INTO holdfast.attempts (batch_id, position, lease_id, token, attempt, worker_id,
                started_at, ended_at, ending, charged, by_holder, error, stop_reason)
        SELECT p_batch, d.position, d.lease_id, d.token, holdfast.history_count(d.before, 0) + 1,
               d.worker_id, d.granted_at, clock_timestamp(), 'expired',
               holdfast.history_count(d.before, 0) < holdfast.history_count(d.after, 0), false,
               CASE WHEN d.died THEN 'the lease expired: its worker sent no heartbeat'
                    ELSE 'the lease expired while its worker lived' END, 'lease_expired'
          FROM decided d WHERE d.fatal IS NULL
    ), requeued AS (
        -- The first expiry is forgiven at once; repeated ones back off with full jitter.
        INSERT INTO holdfast.waiting (batch_id, position, ready_at, history, last_error)
        SELECT p_batch, d.position,
               greatest(clock_timestamp() + make_interval(secs => CASE WHEN d.attempts <= 1 THEN 0
                    ELSE random() * least(p_backoff_max_s, p_backoff_s * 2 ^ (d.attempts - 2)) END),
                    p.retry_floor),
               d.after, 'lease expired'
          FROM decided d WHERE d.fatal IS NULL
        RETURNING 1
    ), counted AS (
        SELECT (SELECT count(*) FROM requeued)::integer AS requeued,
               (SELECT count(*) FROM failed)::integer AS failed
    ), saved AS (
        INSERT INTO holdfast.progress (batch_id, seq, next_position, executing, checking, waiting,
                                       deferred, succeeded, failed, cancelled, retry_floor,
                                       recheck_floor, deferred_floor, last_delta)
        SELECT p_batch, p.seq + 1, p.next_position, p.executing - c.requeued - c.failed,
               p.checking, p.waiting + c.requeued, p.deferred, p.succeeded, p.failed + c.failed,
               p.cancelled, p.retry_floor, p.recheck_floor, p.deferred_floor, p.last_delta
          FROM counted c WHERE c.requeued + c.failed > 0
    )
    SELECT d.position, d.lease_id, d.token,
           CASE WHEN d.fatal IS NULL THEN 'requeued' ELSE 'failed' END,
           extract(epoch FROM clock_timestamp() - d.expires_at)::double precision
      FROM decided d;
    PERFORM holdfast.end_if_done(holdfast.current_progress(p_batch));
END $$;

-- clear_cancelled: clear away what a cancelled batch left behind, at most p_limit rows of each kind; counts stay.
-- locks: ticket tried (L4), parent exclusive (L1)   fence: control = cancelled   rows: whether another call may clear more
CREATE OR REPLACE FUNCTION holdfast.clear_cancelled(p_batch uuid, p_limit integer) RETURNS boolean
LANGUAGE plpgsql VOLATILE
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off AS $$
DECLARE
    v_leases  integer;
    v_waiting integer;
BEGIN
    IF NOT holdfast.try_ticket(p_batch) THEN
        RETURN EXISTS (SELECT FROM holdfast.batches b WHERE b.id = p_batch AND b.leftovers);
    END IF;
    PERFORM holdfast.lock_parent(p_batch);
    IF NOT EXISTS (SELECT FROM holdfast.batches b
                    WHERE b.id = p_batch AND b.control = 'cancelled' AND b.leftovers) THEN
        RETURN false;
    END IF;
    DELETE FROM holdfast.leases l
     WHERE l.batch_id = p_batch AND l.lease_id = ANY (ARRAY(
           SELECT x.lease_id FROM holdfast.leases x
            WHERE x.batch_id = p_batch ORDER BY x.lease_id LIMIT p_limit FOR UPDATE SKIP LOCKED));
    GET DIAGNOSTICS v_leases = ROW_COUNT;
    DELETE FROM holdfast.waiting w
     WHERE w.batch_id = p_batch AND w.position = ANY (ARRAY(
           SELECT x.position FROM holdfast.waiting x WHERE x.batch_id = p_batch LIMIT p_limit));
    GET DIAGNOSTICS v_waiting = ROW_COUNT;
    IF EXISTS (SELECT FROM holdfast.leases l WHERE l.batch_id = p_batch)
       OR EXISTS (SELECT FROM holdfast.waiting w WHERE w.batch_id = p_batch) THEN
        -- A row that its worker's code is relying on (is_current) is left to the next sweep.
        RETURN v_leases + v_waiting > 0;
    END IF;
    UPDATE holdfast.batches b SET leftovers = false WHERE b.id = p_batch;
    RETURN false;
END $$;
