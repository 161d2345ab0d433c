-- hand_in: publish outcomes and end attempts of one batch, for what its leases still hold (finish, give back).
-- locks: parent shared (L1), lease rows in order (L2)   fence: lease_id + token + position (F3)   rows: one per position handed in
--
-- p_kind: succeeded | failed | again. An `again` moves its item to waiting, p_delay_s from now.
-- answer: applied (also when a repeat finds itself applied: F6) | lost | cancelled.
CREATE FUNCTION holdfast.hand_in(
    p_batch uuid, p_worker uuid, p_lease_s double precision,
    p_lease uuid[], p_token bigint[], p_position integer[], p_kind text[], p_attempt integer[],
    p_started timestamptz[], p_ended timestamptz[], p_result text[], p_truncated boolean[],
    p_size bigint[], p_error text[], p_reason text[], p_exit integer[], p_signal integer[],
    p_ending text[], p_charged boolean[], p_delay_s double precision[], p_history bigint[])
RETURNS TABLE (lease_id uuid, item_position integer, answer text)
LANGUAGE plpgsql VOLATILE
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    v_control text;
    v_floor   timestamptz;
BEGIN
    PERFORM holdfast.lock_parent_shared(p_batch);
    SELECT b.control INTO v_control FROM holdfast.batches b WHERE b.id = p_batch;
    IF v_control IS NULL OR v_control = 'cancelled' THEN
        RETURN QUERY SELECT h.lease, h.position, coalesce(v_control, 'lost')
                       FROM unnest(p_lease, p_position) h(lease, position);
        RETURN;
    END IF;
    -- An item that goes back to waiting may be granted again, so nobody may still rely on the lease:
    -- FOR UPDATE waits for is_current callers, FOR NO KEY UPDATE does not.
    IF 'again' = ANY (p_kind) THEN
        PERFORM FROM holdfast.leases l
          WHERE l.batch_id = p_batch AND l.lease_id = ANY (p_lease)
          ORDER BY l.batch_id, l.lease_id FOR UPDATE;
    ELSE
        PERFORM FROM holdfast.leases l
          WHERE l.batch_id = p_batch AND l.lease_id = ANY (p_lease)
          ORDER BY l.batch_id, l.lease_id FOR NO KEY UPDATE;
    END IF;
    SELECT p.retry_floor INTO v_floor FROM holdfast.progress p
     WHERE p.batch_id = p_batch ORDER BY p.seq DESC LIMIT 1;

    RETURN QUERY
    WITH handed AS (
        SELECT * FROM unnest(p_lease, p_token, p_position, p_kind, p_attempt, p_started, p_ended,
                             p_result, p_truncated, p_size, p_error, p_reason, p_exit, p_signal,
                             p_ending, p_charged, p_delay_s, p_history)
            h(lease, token, position, kind, attempt, started, ended, result, truncated, size,
              error, reason, exit, signal, ending, charged, delay_s, history)
    ), held AS (
        SELECT h.* FROM handed h
          JOIN holdfast.leases l ON l.batch_id = p_batch AND l.lease_id = h.lease
                                AND l.token = h.token AND h.position = ANY (l.positions)
    ), published AS (
        INSERT INTO holdfast.outcomes (batch_id, position, status, lease_id, token, attempt,
                worker_id, started_at, finished_at, result, result_truncated, result_size, error,
                stop_reason, exit_status, signal)
        SELECT p_batch, h.position, h.kind, h.lease, h.token, h.attempt, p_worker, h.started,
               h.ended, h.result::json, h.truncated, h.size, h.error, h.reason, h.exit, h.signal
          FROM held h WHERE h.kind <> 'again'
        RETURNING status
    ), ended AS (
        INSERT INTO holdfast.attempts (batch_id, position, lease_id, token, attempt, worker_id,
                started_at, ended_at, ending, charged, by_holder, error, stop_reason, exit_status,
                signal)
        SELECT p_batch, h.position, h.lease, h.token, h.attempt, p_worker, h.started, h.ended,
               h.ending, h.charged, true, h.error, h.reason, h.exit, h.signal
          FROM held h WHERE h.kind = 'again'
    ), again AS (
        INSERT INTO holdfast.waiting (batch_id, position, ready_at, history, last_error)
        SELECT p_batch, h.position,
               greatest(clock_timestamp() + make_interval(secs => h.delay_s), v_floor),
               h.history, h.error
          FROM held h WHERE h.kind = 'again'
        RETURNING 1
    ), left_behind AS (
        SELECT h.lease, array_agg(h.position) AS positions FROM held h GROUP BY h.lease
    ), emptied AS (
        DELETE FROM holdfast.leases l USING left_behind g
         WHERE l.batch_id = p_batch AND l.lease_id = g.lease
           AND cardinality(l.positions) = cardinality(g.positions)
    ), shrunk AS (
        UPDATE holdfast.leases l
           SET positions = ARRAY(SELECT u.position
                                   FROM unnest(l.positions) WITH ORDINALITY u(position, n)
                                  WHERE u.position <> ALL (g.positions) ORDER BY u.n),
               histories = CASE WHEN l.histories IS NOT NULL THEN
                           ARRAY(SELECT u.history
                                   FROM unnest(l.positions, l.histories)
                                        WITH ORDINALITY u(position, history, n)
                                  WHERE u.position <> ALL (g.positions) ORDER BY u.n) END,
               expires_at = greatest(l.expires_at,
                                     clock_timestamp() + make_interval(secs => p_lease_s))
          FROM left_behind g
         WHERE l.batch_id = p_batch AND l.lease_id = g.lease
           AND cardinality(l.positions) > cardinality(g.positions)
    ), changed AS (
        SELECT (SELECT count(*) FROM again)::integer AS waiting,
               (SELECT count(*) FROM published WHERE status = 'succeeded')::integer AS succeeded,
               (SELECT count(*) FROM published WHERE status = 'failed')::integer AS failed
    ), delta AS (
        -- Counted from what happened (L5); the id is drawn here, under the lock (L6).
        INSERT INTO holdfast.progress_deltas (batch_id, executing, checking, waiting, succeeded,
                                              failed)
        SELECT p_batch, -(c.waiting + c.succeeded + c.failed), 0, c.waiting, c.succeeded, c.failed
          FROM changed c WHERE c.waiting + c.succeeded + c.failed > 0
    )
    SELECT h.lease, h.position,
           CASE WHEN EXISTS (SELECT FROM held x
                              WHERE (x.lease, x.position) = (h.lease, h.position)) THEN 'applied'
                WHEN EXISTS (SELECT FROM holdfast.outcomes o
                              WHERE o.batch_id = p_batch AND o.position = h.position
                                AND o.lease_id = h.lease AND o.token = h.token) THEN 'applied'
                WHEN EXISTS (SELECT FROM holdfast.attempts a
                              WHERE a.batch_id = p_batch AND a.position = h.position
                                AND a.lease_id = h.lease AND a.token = h.token AND a.by_holder)
                     THEN 'applied'
                ELSE 'lost' END
      FROM handed h;
END $$;
