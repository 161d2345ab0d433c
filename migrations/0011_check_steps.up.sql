-- stage: store results of one batch whose acceptance checks come next, for what its leases still hold.
-- locks: parent shared (L1), lease rows in order (L2)   fence: lease_id + token + position (F3)   rows: one per position handed in
--
-- The positions stay in their leases. p_record: what was recorded of the executions, oldest first;
-- p_record_of: the place of its item in the other arrays.
-- answer: staged (also when a repeat finds itself applied: F6) | moved (stored under this lease, which
-- has lost the item since) | lost | cancelled.
CREATE FUNCTION holdfast.stage(
    p_batch uuid, p_worker uuid, p_lease_s double precision,
    p_lease uuid[], p_token bigint[], p_position integer[], p_attempt integer[],
    p_started timestamptz[], p_ended timestamptz[], p_result text[], p_truncated boolean[],
    p_size bigint[], p_reason text[], p_exit integer[], p_signal integer[], p_workspace text[],
    p_record_of integer[], p_record_seq integer[], p_record text[])
RETURNS TABLE (lease_id uuid, item_position integer, answer text)
LANGUAGE plpgsql VOLATILE
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off
SET plan_cache_mode = force_generic_plan SET jit = off AS $$
#variable_conflict use_column
DECLARE
    v_control text;
    v_leases  uuid[];
    v_rows    tid[];
    v_held    integer[] := '{}';
    v_staged  integer;
BEGIN
    -- A position named twice would be counted twice (L5).
    IF (SELECT count(DISTINCT h) FROM unnest(p_lease, p_position) h) < cardinality(p_position) THEN
        RAISE EXCEPTION 'holdfast: a hand-in of batch % names a position twice', p_batch
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    PERFORM holdfast.lock_parent_shared(p_batch);
    SELECT b.control INTO v_control FROM holdfast.batches b WHERE b.id = p_batch;
    IF v_control <> 'cancelled' THEN
        v_leases := ARRAY(SELECT DISTINCT u.lease FROM unnest(p_lease) u(lease) ORDER BY u.lease);
        v_rows := ARRAY(SELECT r.ctid FROM unnest(v_leases) u(lease) CROSS JOIN LATERAL (
                        SELECT l.ctid FROM holdfast.leases l
                         WHERE l.batch_id = p_batch AND l.lease_id = u.lease FOR NO KEY UPDATE) r);
        v_held := ARRAY(
            SELECT n FROM generate_subscripts(p_position, 1) n
             WHERE ((p_lease[n], p_token[n], p_position[n]) IN (
                    SELECT l.lease_id, l.token, unnest(l.positions) FROM holdfast.leases l
                     WHERE l.ctid = ANY (v_rows))) IS TRUE
               AND NOT EXISTS (SELECT FROM holdfast.staged_outcomes s
                                WHERE s.batch_id = p_batch AND s.position = p_position[n] OFFSET 0));
    END IF;

    IF v_held <> '{}' THEN
        WITH staged AS (
            INSERT INTO holdfast.staged_outcomes (batch_id, position, lease_id, staged_lease_id,
                    staged_token, attempt, worker_id, started_at, ended_at, result,
                    result_truncated, result_size, stop_reason, exit_status, signal, workspace)
            SELECT p_batch, p_position[n], p_lease[n], p_lease[n], p_token[n], p_attempt[n],
                   p_worker, p_started[n], p_ended[n], p_result[n]::json, p_truncated[n],
                   p_size[n], p_reason[n], p_exit[n], p_signal[n], p_workspace[n]
              FROM unnest(v_held) n
            RETURNING 1)
        SELECT count(*) INTO v_staged FROM staged;
        IF p_record_of <> '{}' THEN
            INSERT INTO holdfast.evidence (batch_id, position, lease_id, seq, record)
            SELECT p_batch, p_position[p_record_of[k]], p_lease[p_record_of[k]], p_record_seq[k],
                   p_record[k]::json
              FROM generate_subscripts(p_record_of, 1) k WHERE p_record_of[k] = ANY (v_held);
        END IF;
        UPDATE holdfast.leases l
           SET expires_at = greatest(l.expires_at,
                                     clock_timestamp() + make_interval(secs => p_lease_s))
         WHERE l.ctid = ANY (v_rows)
           AND (l.lease_id IN (SELECT p_lease[n] FROM unnest(v_held) n)) IS TRUE;
        -- Counted from what happened (L5); the id is drawn here, under the lock (L6).
        INSERT INTO holdfast.progress_deltas (batch_id, executing, checking, waiting, succeeded,
                                              failed)
        VALUES (p_batch, -v_staged, v_staged, 0, 0, 0);
    END IF;

    IF cardinality(v_held) = cardinality(p_position) THEN
        RETURN QUERY SELECT h.lease, h.position, 'staged'
                       FROM unnest(p_lease, p_position) h(lease, position);
        RETURN;
    END IF;
    RETURN QUERY
    SELECT h.lease, h.position,
           CASE WHEN v_control = 'cancelled' THEN 'cancelled'
                WHEN h.n = ANY (v_held) THEN 'staged'
                WHEN s.lease_id = h.lease THEN 'staged'
                WHEN s.position IS NOT NULL THEN 'moved'
                WHEN EXISTS (SELECT FROM holdfast.outcomes o
                              WHERE o.batch_id = p_batch AND o.position = h.position
                                AND o.staged_lease_id = h.lease) THEN 'moved'
                ELSE 'lost' END
      FROM unnest(p_lease, p_token, p_position) WITH ORDINALITY h(lease, token, position, n)
      LEFT JOIN LATERAL (
           SELECT x.position, x.lease_id FROM holdfast.staged_outcomes x
            WHERE x.batch_id = p_batch AND x.position = h.position
              AND x.staged_lease_id = h.lease AND x.staged_token = h.token OFFSET 0) s ON true;
END $$;

-- conclude: publish checked outcomes of one batch, or give them back for another check (finish, give back).
-- locks: parent shared (L1), lease rows in order (L2)   fence: lease_id + token + position (F3)   rows: one per position handed in
--
-- p_kind: publish, with the verdict and its class or null for none | recheck, which goes to waiting
-- with p_history.
-- answer: applied (also when a repeat finds itself applied: F6) | lost | cancelled.
CREATE FUNCTION holdfast.conclude(
    p_batch uuid, p_lease_s double precision,
    p_lease uuid[], p_token bigint[], p_position integer[], p_kind text[], p_verdict text[],
    p_class text[], p_history bigint[])
RETURNS TABLE (lease_id uuid, item_position integer, answer text)
LANGUAGE plpgsql VOLATILE
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off
SET plan_cache_mode = force_generic_plan SET jit = off AS $$
#variable_conflict use_column
DECLARE
    v_control    text;
    v_returns    boolean := 'recheck' = ANY (p_kind);
    v_floor      timestamptz;
    v_leases     uuid[];
    v_rows       tid[];
    v_held       integer[] := '{}';
    v_results    tid[];
    v_published  integer;
    v_holds      integer;
    v_fails      integer;
    v_unverified integer;
BEGIN
    IF (SELECT count(DISTINCT h) FROM unnest(p_lease, p_position) h) < cardinality(p_position) THEN
        RAISE EXCEPTION 'holdfast: a hand-in of batch % names a position twice', p_batch
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    PERFORM holdfast.lock_parent_shared(p_batch);
    SELECT b.control INTO v_control FROM holdfast.batches b WHERE b.id = p_batch;
    IF v_control <> 'cancelled' THEN
        v_leases := ARRAY(SELECT DISTINCT u.lease FROM unnest(p_lease) u(lease) ORDER BY u.lease);
        -- An item that goes back to waiting may be granted again: as in hand_in.
        IF v_returns THEN
            v_rows := ARRAY(SELECT r.ctid FROM unnest(v_leases) u(lease) CROSS JOIN LATERAL (
                            SELECT l.ctid FROM holdfast.leases l
                             WHERE l.batch_id = p_batch AND l.lease_id = u.lease FOR UPDATE) r);
        ELSE
            v_rows := ARRAY(SELECT r.ctid FROM unnest(v_leases) u(lease) CROSS JOIN LATERAL (
                            SELECT l.ctid FROM holdfast.leases l
                             WHERE l.batch_id = p_batch AND l.lease_id = u.lease
                               FOR NO KEY UPDATE) r);
        END IF;
        v_held := ARRAY(
            SELECT n FROM generate_subscripts(p_position, 1) n
             WHERE ((p_lease[n], p_token[n], p_position[n]) IN (
                    SELECT l.lease_id, l.token, unnest(l.positions) FROM holdfast.leases l
                     WHERE l.ctid = ANY (v_rows))) IS TRUE
               AND EXISTS (SELECT FROM holdfast.staged_outcomes s
                            WHERE s.batch_id = p_batch AND s.position = p_position[n] OFFSET 0));
    END IF;

    IF v_held <> '{}' THEN
        v_results := ARRAY(SELECT s.ctid FROM unnest(v_held) n CROSS JOIN LATERAL (
                           SELECT x.ctid FROM holdfast.staged_outcomes x
                            WHERE x.batch_id = p_batch AND x.position = p_position[n] OFFSET 0) s
                            WHERE p_kind[n] = 'publish');
        WITH gone AS (
            DELETE FROM holdfast.staged_outcomes s WHERE s.ctid = ANY (v_results) RETURNING s.*
        ), published AS (
            INSERT INTO holdfast.outcomes (batch_id, position, status, lease_id, token, attempt,
                    worker_id, started_at, finished_at, result, result_truncated, result_size,
                    stop_reason, exit_status, signal, model, usage, verdict, verdict_class,
                    staged_lease_id)
            SELECT p_batch, g.position, 'succeeded', p_lease[n], p_token[n], g.attempt,
                   g.worker_id, g.started_at, g.ended_at, g.result, g.result_truncated,
                   g.result_size, g.stop_reason, g.exit_status, g.signal, g.model, g.usage,
                   p_verdict[n]::json, p_class[n], g.staged_lease_id
              FROM gone g JOIN unnest(v_held) n ON p_position[n] = g.position
            RETURNING verdict_class)
        SELECT count(*), count(*) FILTER (WHERE p.verdict_class = 'holds'),
               count(*) FILTER (WHERE p.verdict_class = 'fails'),
               count(*) FILTER (WHERE p.verdict_class = 'unverified')
          INTO v_published, v_holds, v_fails, v_unverified FROM published p;
        IF v_returns THEN
            SELECT p.recheck_floor INTO v_floor FROM holdfast.progress p
             WHERE p.batch_id = p_batch ORDER BY p.seq DESC LIMIT 1;
            INSERT INTO holdfast.waiting (batch_id, position, ready_at, history, recheck)
            SELECT p_batch, p_position[n], greatest(clock_timestamp(), v_floor), p_history[n], true
              FROM unnest(v_held) n WHERE p_kind[n] = 'recheck';
            v_results := ARRAY(SELECT s.ctid FROM unnest(v_held) n CROSS JOIN LATERAL (
                               SELECT x.ctid FROM holdfast.staged_outcomes x
                                WHERE x.batch_id = p_batch AND x.position = p_position[n]
                               OFFSET 0) s
                                WHERE p_kind[n] = 'recheck');
            UPDATE holdfast.staged_outcomes s SET lease_id = NULL, returned_by = s.lease_id
             WHERE s.ctid = ANY (v_results);
        END IF;
        -- A lease goes with the last of its positions; of the others what is handed in leaves.
        DELETE FROM holdfast.leases l
         WHERE l.ctid = ANY (v_rows)
           AND NOT EXISTS (SELECT FROM unnest(l.positions) u(position)
                            WHERE (l.lease_id, u.position) NOT IN (
                                  SELECT p_lease[n], p_position[n] FROM unnest(v_held) n));
        UPDATE holdfast.leases l
           SET positions = ARRAY(
                   SELECT u.position FROM unnest(l.positions) WITH ORDINALITY u(position, place)
                    WHERE (l.lease_id, u.position) NOT IN (
                          SELECT p_lease[n], p_position[n] FROM unnest(v_held) n)
                    ORDER BY u.place),
               histories = CASE WHEN l.histories IS NOT NULL THEN ARRAY(
                   SELECT u.history
                     FROM unnest(l.positions, l.histories)
                          WITH ORDINALITY u(position, history, place)
                    WHERE (l.lease_id, u.position) NOT IN (
                          SELECT p_lease[n], p_position[n] FROM unnest(v_held) n)
                    ORDER BY u.place) END,
               expires_at = greatest(l.expires_at,
                                     clock_timestamp() + make_interval(secs => p_lease_s))
         WHERE l.ctid = ANY (v_rows)
           AND (l.lease_id IN (SELECT p_lease[n] FROM unnest(v_held) n)) IS TRUE;
        -- What is given back stays under check: it changes no count (L5).
        IF v_published > 0 THEN
            INSERT INTO holdfast.progress_deltas (batch_id, executing, checking, waiting, succeeded,
                    failed, verdict_holds, verdict_fails, verdict_unverified)
            VALUES (p_batch, 0, -v_published, 0, v_published, 0, v_holds, v_fails, v_unverified);
        END IF;
    END IF;

    IF cardinality(v_held) = cardinality(p_position) THEN
        RETURN QUERY SELECT h.lease, h.position, 'applied'
                       FROM unnest(p_lease, p_position) h(lease, position);
        RETURN;
    END IF;
    RETURN QUERY
    SELECT h.lease, h.position,
           CASE WHEN h.n = ANY (v_held) THEN 'applied'
                WHEN EXISTS (SELECT FROM holdfast.outcomes o
                              WHERE o.batch_id = p_batch AND o.position = h.position
                                AND o.lease_id = h.lease AND o.token = h.token)
                  OR EXISTS (SELECT FROM holdfast.staged_outcomes s
                              WHERE s.batch_id = p_batch AND s.position = h.position
                                AND s.returned_by = h.lease) THEN 'applied'
                WHEN v_control = 'cancelled' THEN 'cancelled'
                ELSE 'lost' END
      FROM unnest(p_lease, p_token, p_position) WITH ORDINALITY h(lease, token, position, n);
END $$;

-- recheck: take up to p_want items of one batch whose checks were lost, under a new lease; they are never executed again.
-- locks: ticket tried (L4), parent exclusive (L1), waiting rows   fence: lease_id + new token (F1, F2)   rows: one answer
--
-- In paused batches too, and outside every cap: they are under check already. For p_foreign_s those on
-- another volume than p_volume are left to a worker that sees it.
-- answer: granted | empty | closed (cancelled, ended) | contended | claims_off | unknown.
CREATE FUNCTION holdfast.recheck(p_batch uuid, p_lease uuid, p_worker uuid, p_want integer,
                                 p_lease_s double precision, p_volume text,
                                 p_foreign_s double precision, p_traceparent text,
    OUT answer text, OUT token bigint, OUT positions integer[], OUT histories bigint[])
LANGUAGE plpgsql VOLATILE
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off
SET enable_mergejoin = off SET jit = off AS $$
DECLARE
    b        holdfast.batches;
    p        holdfast.progress;
    c        holdfast.control;
    v_now    timestamptz;
    v_rows   tid[];
    v_staged tid[];
    v_taken  integer;
    v_gone   integer;
    v_last   timestamptz;
    v_left   timestamptz;
BEGIN
    IF coalesce(p_want, 0) < 1 THEN
        RAISE EXCEPTION 'holdfast: a recheck of % items', p_want
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF NOT holdfast.try_ticket(p_batch) THEN
        answer := CASE WHEN EXISTS (SELECT FROM holdfast.batches WHERE id = p_batch)
                       THEN 'contended' ELSE 'unknown' END;
        RETURN;
    END IF;
    PERFORM holdfast.lock_parent(p_batch);
    SELECT * INTO STRICT b FROM holdfast.batches WHERE id = p_batch;
    v_now := clock_timestamp();
    IF b.finished_at IS NOT NULL THEN
        answer := 'closed';
        RETURN;
    END IF;
    c := holdfast.raise_epoch_if_moved();
    IF NOT c.claims_enabled THEN
        answer := 'claims_off';
        RETURN;
    END IF;
    p := holdfast.current_progress(p_batch);
    SELECT array_agg(d.position ORDER BY d.ready_at, d.position),
           array_agg(d.history ORDER BY d.ready_at, d.position), array_agg(d.ctid),
           array_agg(d.staged_row), count(*), max(d.ready_at)
      INTO positions, histories, v_rows, v_staged, v_taken, v_last
      FROM (SELECT w.ctid, s.ctid AS staged_row, w.position, w.history, w.ready_at
              FROM holdfast.waiting w
             CROSS JOIN LATERAL (
                   SELECT x.ctid, split_part(x.workspace, '/', 1) AS volume FROM holdfast.staged_outcomes x
                    WHERE x.batch_id = p_batch AND x.position = w.position OFFSET 0) s
             WHERE w.batch_id = p_batch AND w.recheck AND NOT w.deferred
               AND w.ready_at >= p.recheck_floor AND w.ready_at <= v_now
               AND (s.volume IS NULL OR s.volume = p_volume
                    OR w.ready_at <= v_now - make_interval(secs => p_foreign_s))
             ORDER BY w.ready_at, w.position LIMIT p_want) d;
    IF v_taken = 0 THEN
        answer := 'empty';
        RETURN;
    END IF;
    DELETE FROM holdfast.waiting w WHERE w.ctid = ANY (v_rows);
    UPDATE holdfast.staged_outcomes s SET lease_id = p_lease
     WHERE s.ctid = ANY (v_staged) AND s.lease_id IS NULL;
    GET DIAGNOSTICS v_gone = ROW_COUNT;
    IF v_gone <> v_taken THEN
        RAISE EXCEPTION 'holdfast: rechecks % items of batch %, of which % are staged',
            v_taken, p_batch, v_gone USING ERRCODE = 'data_corrupted';
    END IF;
    SELECT min(w.ready_at) INTO v_left FROM holdfast.waiting w
     WHERE w.batch_id = p_batch AND w.recheck AND NOT w.deferred
       AND w.ready_at >= p.recheck_floor;
    p.recheck_floor := greatest(p.recheck_floor, least(v_last, v_left));
    IF 0 = ALL (histories) THEN
        histories := NULL;
    END IF;
    token := c.epoch * 2147483648 + (nextval('holdfast.token_seq') - c.sequence_base);
    INSERT INTO holdfast.leases (batch_id, lease_id, token, worker_id, positions, histories,
                                 expires_at, traceparent)
    VALUES (p_batch, p_lease, token, p_worker, positions, histories,
            clock_timestamp() + make_interval(secs => p_lease_s), p_traceparent);
    PERFORM holdfast.save_progress(p);
    answer := 'granted';
END $$;

-- give_back: return a whole lease whose claim was never answered, by its lease_id alone (F6).
-- locks: parent shared (L1), the lease row (L2)   fence: lease_id (F3)   rows: positions given back
--
-- A lost claim counts as an interruption, free of charge p_free_interruptions times; one of rechecks
-- counts nothing.
CREATE OR REPLACE FUNCTION holdfast.give_back(p_batch uuid, p_lease uuid,
                                              p_free_interruptions integer)
RETURNS integer
LANGUAGE plpgsql VOLATILE
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off AS $$
DECLARE
    v_retry_floor   timestamptz;
    v_recheck_floor timestamptz;
    v_moved         integer;
BEGIN
    PERFORM holdfast.lock_parent_shared(p_batch);
    IF NOT EXISTS (SELECT FROM holdfast.batches b
                    WHERE b.id = p_batch AND b.control <> 'cancelled') THEN
        RETURN 0;
    END IF;
    PERFORM FROM holdfast.leases l WHERE l.batch_id = p_batch AND l.lease_id = p_lease FOR UPDATE;
    SELECT p.retry_floor, p.recheck_floor INTO v_retry_floor, v_recheck_floor
      FROM holdfast.progress p WHERE p.batch_id = p_batch ORDER BY p.seq DESC LIMIT 1;
    WITH gone AS (
        DELETE FROM holdfast.leases l WHERE l.batch_id = p_batch AND l.lease_id = p_lease
        RETURNING l.positions, l.histories
    ), lost AS MATERIALIZED (
        SELECT u.position, coalesce(u.history, 0) AS history, s.staged_row,
               s.staged_row IS NOT NULL AS staged
          FROM gone g CROSS JOIN unnest(g.positions, g.histories) u(position, history)
          LEFT JOIN LATERAL (
               SELECT x.ctid AS staged_row FROM holdfast.staged_outcomes x
                WHERE x.batch_id = p_batch AND x.position = u.position OFFSET 0) s ON true
    ), disowned AS (
        UPDATE holdfast.staged_outcomes s SET lease_id = NULL
         WHERE s.ctid = ANY (ARRAY(SELECT x.staged_row FROM lost x WHERE x.staged))
    ), again AS (
        INSERT INTO holdfast.waiting (batch_id, position, ready_at, history, recheck)
        SELECT p_batch, x.position,
               greatest(clock_timestamp(),
                        CASE WHEN x.staged THEN v_recheck_floor ELSE v_retry_floor END),
               CASE WHEN x.staged THEN x.history
                    ELSE holdfast.history_interrupted(x.history, p_free_interruptions) END,
               x.staged
          FROM lost x
        RETURNING recheck
    ), moved AS (
        SELECT count(*)::integer AS n,
               (count(*) FILTER (WHERE NOT a.recheck))::integer AS unstaged FROM again a
    ), delta AS (
        INSERT INTO holdfast.progress_deltas (batch_id, executing, checking, waiting, succeeded,
                                              failed)
        SELECT p_batch, -m.unstaged, 0, m.unstaged, 0, 0 FROM moved m WHERE m.unstaged > 0
    )
    SELECT m.n INTO v_moved FROM moved m;
    RETURN v_moved;
END $$;

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

-- clear_cancelled: clear away what a cancelled batch left behind, at most p_limit rows of each kind; counts stay.
-- locks: ticket tried (L4), parent exclusive (L1)   fence: control = cancelled   rows: whether another call may clear more
CREATE OR REPLACE FUNCTION holdfast.clear_cancelled(p_batch uuid, p_limit integer) RETURNS boolean
LANGUAGE plpgsql VOLATILE
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off AS $$
DECLARE
    v_leases  integer;
    v_waiting integer;
    v_staged  integer;
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
    DELETE FROM holdfast.staged_outcomes s
     WHERE s.batch_id = p_batch AND s.position = ANY (ARRAY(
           SELECT x.position FROM holdfast.staged_outcomes x
            WHERE x.batch_id = p_batch LIMIT p_limit));
    GET DIAGNOSTICS v_staged = ROW_COUNT;
    IF EXISTS (SELECT FROM holdfast.leases l WHERE l.batch_id = p_batch)
       OR EXISTS (SELECT FROM holdfast.waiting w WHERE w.batch_id = p_batch)
       OR EXISTS (SELECT FROM holdfast.staged_outcomes s WHERE s.batch_id = p_batch) THEN
        -- A row that its worker's code is relying on (is_current) is left to the next sweep.
        RETURN v_leases + v_waiting + v_staged > 0;
    END IF;
    UPDATE holdfast.batches b SET leftovers = false WHERE b.id = p_batch;
    RETURN false;
END $$;
