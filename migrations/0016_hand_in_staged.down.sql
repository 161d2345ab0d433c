-- hand_in: publish outcomes and end attempts of one batch, for what its leases still hold (finish, give back).
-- locks: parent shared (L1), lease rows in order (L2)   fence: lease_id + token + position (F3)   rows: one per position handed in
--
-- p_kind: succeeded | failed | again. An `again` moves its item to waiting, p_delay_s from now.
-- answer: applied (also when a repeat finds itself applied: F6) | lost | cancelled.
CREATE OR REPLACE FUNCTION holdfast.hand_in(
    p_batch uuid, p_worker uuid, p_lease_s double precision,
    p_lease uuid[], p_token bigint[], p_position integer[], p_kind text[], p_attempt integer[],
    p_started timestamptz[], p_ended timestamptz[], p_result text[], p_truncated boolean[],
    p_size bigint[], p_error text[], p_reason text[], p_exit integer[], p_signal integer[],
    p_ending text[], p_charged boolean[], p_delay_s double precision[], p_history bigint[])
RETURNS TABLE (lease_id uuid, item_position integer, answer text)
LANGUAGE plpgsql VOLATILE
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off
SET plan_cache_mode = force_generic_plan SET jit = off AS $$
#variable_conflict use_column
DECLARE
    v_control   text;
    v_again     boolean := 'again' = ANY (p_kind);
    v_floor     timestamptz;
    v_leases    uuid[];
    v_rows      tid[];
    v_held      integer[];
    v_emptied   integer;
    v_waiting   integer := 0;
    v_succeeded integer;
    v_failed    integer;
BEGIN
    -- A position named twice would be taken out of its lease once and counted twice (L5).
    IF (SELECT count(DISTINCT h) FROM unnest(p_lease, p_position) h) < cardinality(p_position) THEN
        RAISE EXCEPTION 'holdfast: a hand-in of batch % names a position twice', p_batch
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    PERFORM holdfast.lock_parent_shared(p_batch);
    SELECT b.control INTO v_control FROM holdfast.batches b WHERE b.id = p_batch;
    IF v_control IS NULL OR v_control = 'cancelled' THEN
        RETURN QUERY
        SELECT h.lease, h.position,
               CASE WHEN holdfast.was_applied(p_batch, h.position, h.lease, h.token) THEN 'applied'
                    ELSE coalesce(v_control, 'lost') END
          FROM unnest(p_lease, p_token, p_position) h(lease, token, position);
        RETURN;
    END IF;

    -- LATERAL and the row's own address leave the planner no choice: every lease is one look into the
    -- primary key, in order, however many leases or dead rows the batch has. A locked row stays where
    -- it is.
    v_leases := ARRAY(SELECT DISTINCT u.lease FROM unnest(p_lease) u(lease) ORDER BY u.lease);
    -- An item that goes back to waiting may be granted again, so nobody may still rely on the lease:
    -- FOR UPDATE waits for is_current callers, FOR NO KEY UPDATE does not.
    IF v_again THEN
        v_rows := ARRAY(SELECT r.ctid FROM unnest(v_leases) u(lease) CROSS JOIN LATERAL (
                        SELECT l.ctid FROM holdfast.leases l
                         WHERE l.batch_id = p_batch AND l.lease_id = u.lease FOR UPDATE) r);
    ELSE
        v_rows := ARRAY(SELECT r.ctid FROM unnest(v_leases) u(lease) CROSS JOIN LATERAL (
                        SELECT l.ctid FROM holdfast.leases l
                         WHERE l.batch_id = p_batch AND l.lease_id = u.lease FOR NO KEY UPDATE) r);
    END IF;
    -- What is held of what is handed in, by its place in the arrays. IS TRUE keeps IN from becoming a
    -- join of every position with every other: its set is hashed.
    v_held := ARRAY(
        SELECT n FROM generate_subscripts(p_position, 1) n
         WHERE ((p_lease[n], p_token[n], p_position[n]) IN (
                SELECT l.lease_id, l.token, unnest(l.positions) FROM holdfast.leases l
                 WHERE l.ctid = ANY (v_rows))) IS TRUE);

    IF v_held <> '{}' THEN
        WITH published AS (
            INSERT INTO holdfast.outcomes (batch_id, position, status, lease_id, token, attempt,
                    worker_id, started_at, finished_at, result, result_truncated, result_size,
                    error, stop_reason, exit_status, signal)
            SELECT p_batch, p_position[n], p_kind[n], p_lease[n], p_token[n], p_attempt[n],
                   p_worker, p_started[n], p_ended[n], p_result[n]::json, p_truncated[n],
                   p_size[n], p_error[n], p_reason[n], p_exit[n], p_signal[n]
              FROM unnest(v_held) n WHERE p_kind[n] IS DISTINCT FROM 'again'
            RETURNING status)
        SELECT count(*) FILTER (WHERE p.status = 'succeeded'),
               count(*) FILTER (WHERE p.status = 'failed')
          INTO v_succeeded, v_failed FROM published p;
        IF v_again THEN
            INSERT INTO holdfast.attempts (batch_id, position, lease_id, token, attempt, worker_id,
                    started_at, ended_at, ending, charged, by_holder, error, stop_reason,
                    exit_status, signal)
            SELECT p_batch, p_position[n], p_lease[n], p_token[n], p_attempt[n], p_worker,
                   p_started[n], p_ended[n], p_ending[n], p_charged[n], true, p_error[n],
                   p_reason[n], p_exit[n], p_signal[n]
              FROM unnest(v_held) n WHERE p_kind[n] = 'again';
            SELECT p.retry_floor INTO v_floor FROM holdfast.progress p
             WHERE p.batch_id = p_batch ORDER BY p.seq DESC LIMIT 1;
            INSERT INTO holdfast.waiting (batch_id, position, ready_at, history, last_error)
            SELECT p_batch, p_position[n],
                   greatest(clock_timestamp() + make_interval(secs => p_delay_s[n]), v_floor),
                   p_history[n], p_error[n]
              FROM unnest(v_held) n WHERE p_kind[n] = 'again';
            GET DIAGNOSTICS v_waiting = ROW_COUNT;
        END IF;
        -- A lease goes with the last of its positions; of the others what is handed in leaves.
        DELETE FROM holdfast.leases l
         WHERE l.ctid = ANY (v_rows)
           AND NOT EXISTS (SELECT FROM unnest(l.positions) u(position)
                            WHERE (l.lease_id, u.position) NOT IN (
                                  SELECT p_lease[n], p_position[n] FROM unnest(v_held) n));
        GET DIAGNOSTICS v_emptied = ROW_COUNT;
        IF v_emptied < cardinality(v_rows) THEN
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
        END IF;
        -- Counted from what happened (L5); the id is drawn here, under the lock (L6).
        INSERT INTO holdfast.progress_deltas (batch_id, executing, checking, waiting, succeeded,
                                              failed)
        VALUES (p_batch, -(v_waiting + v_succeeded + v_failed), 0, v_waiting, v_succeeded, v_failed);
    END IF;

    IF cardinality(v_held) = cardinality(p_position) THEN
        RETURN QUERY SELECT h.lease, h.position, 'applied'
                       FROM unnest(p_lease, p_position) h(lease, position);
        RETURN;
    END IF;
    RETURN QUERY
    SELECT h.lease, h.position,
           CASE WHEN h.n = ANY (v_held) THEN 'applied'
                WHEN holdfast.was_applied(p_batch, h.position, h.lease, h.token) THEN 'applied'
                ELSE 'lost' END
      FROM unnest(p_lease, p_token, p_position) WITH ORDINALITY h(lease, token, position, n);
END $$;
