-- What the fleet shares about upstreams, and what executions of models leave beside their results.

-- One row per upstream and model that is limited, blocked or was paused; the empty model stands for
-- the upstream itself.
CREATE TABLE holdfast.upstreams (
    upstream      text NOT NULL,
    model         text NOT NULL,
    -- The earliest instant that no request has been granted yet.
    next_at       timestamptz NOT NULL DEFAULT '-infinity',
    blocked_until timestamptz NOT NULL DEFAULT '-infinity',
    -- Pauses in a row; above zero one request at a time finds out whether it is well again.
    pauses        integer NOT NULL DEFAULT 0,
    PRIMARY KEY (upstream, model)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000,
        autovacuum_vacuum_cost_delay = 0);

-- One row per worker that has requests under way: what a crashed one had is free when it expires.
CREATE TABLE holdfast.upstream_use (
    upstream   text NOT NULL,
    model      text NOT NULL,
    worker_id  uuid NOT NULL,
    in_flight  integer NOT NULL,
    expires_at timestamptz NOT NULL,
    PRIMARY KEY (upstream, model, worker_id)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000,
        autovacuum_vacuum_cost_delay = 0);

-- One row per turn of an agent, in the order of seq. JSON as it was written: a text in it may hold
-- what jsonb refuses.
CREATE TABLE holdfast.transcripts (
    batch_id uuid NOT NULL,
    position integer NOT NULL,
    lease_id uuid NOT NULL,
    seq      integer NOT NULL,
    entry    json NOT NULL,
    noted_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (batch_id, position, lease_id, seq)
);

-- One row per attempt that used a model: paid for, however the attempt ended. What the upstream did
-- not say is null, never zero.
CREATE TABLE holdfast.spent (
    batch_id         uuid NOT NULL,
    position         integer NOT NULL,
    lease_id         uuid NOT NULL,
    model            text NOT NULL,
    calls            integer NOT NULL,
    input_tokens     bigint,
    output_tokens    bigint,
    total_tokens     bigint,
    cached_tokens    bigint,
    reasoning_tokens bigint,
    PRIMARY KEY (batch_id, position, lease_id)
);

-- lock_upstream: the row of an upstream and model, made where there is none, locked.
CREATE FUNCTION holdfast.lock_upstream(p_upstream text, p_model text)
RETURNS holdfast.upstreams
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_row holdfast.upstreams;
BEGIN
    LOOP
        SELECT * INTO v_row FROM holdfast.upstreams u
         WHERE u.upstream = p_upstream AND u.model = p_model FOR NO KEY UPDATE;
        EXIT WHEN FOUND;
        INSERT INTO holdfast.upstreams (upstream, model) VALUES (p_upstream, p_model)
        ON CONFLICT DO NOTHING;
    END LOOP;
    RETURN v_row;
END $$;

-- grant_requests: how many requests a worker may begin now, and when; renews and releases what it uses.
-- locks: the upstream's row, then the worker's own   fence: none; a grant lapses   rows: 1
--
-- p_spacing_s and p_cap are null where there is no such limit. Requests are granted as instants, each
-- p_spacing_s after the one before, whoever gets them, and none before now: what nobody used is not
-- saved up, so that no minute has more than its share.
CREATE FUNCTION holdfast.grant_requests(
    p_upstream text, p_model text, p_worker uuid, p_using integer, p_want integer,
    p_spacing_s double precision, p_horizon_s double precision, p_cap integer,
    p_valid_s double precision)
RETURNS TABLE (granted integer, first_s double precision, blocked_s double precision,
               pauses integer, retry_s double precision)
LANGUAGE plpgsql VOLATILE AS $$
#variable_conflict use_column
DECLARE
    v_row    holdfast.upstreams;
    v_whole  holdfast.upstreams;
    v_pauses integer;
    v_cap    integer;
    v_free   integer;
    v_now    timestamptz;
    v_first  timestamptz;
BEGIN
    SELECT * INTO v_whole FROM holdfast.upstreams u
     WHERE u.upstream = p_upstream AND u.model = '';
    SELECT * INTO v_row FROM holdfast.upstreams u
     WHERE u.upstream = p_upstream AND u.model = p_model;
    v_pauses := greatest(v_row.pauses, v_whole.pauses, 0);
    v_cap := CASE WHEN v_pauses > 0 THEN 1 ELSE p_cap END;
    granted := p_want;
    retry_s := 0;
    -- Without a limit there is nothing to count: a look, and no lock.
    IF v_cap IS NOT NULL OR p_spacing_s IS NOT NULL THEN
        v_row := holdfast.lock_upstream(p_upstream, p_model);
    END IF;
    -- Read after the wait for the lock: an earlier instant may have been given away meanwhile.
    v_now := clock_timestamp();
    blocked_s := greatest(extract(epoch FROM greatest(v_row.blocked_until, v_whole.blocked_until,
                                                      v_now) - v_now), 0);
    IF blocked_s > 0 THEN
        granted := 0;
    END IF;
    IF v_cap IS NOT NULL THEN
        SELECT v_cap - p_using - coalesce(sum(x.in_flight), 0) INTO v_free
          FROM holdfast.upstream_use x
         WHERE x.upstream = p_upstream AND x.model = p_model AND x.worker_id <> p_worker
           AND x.expires_at > v_now;
        IF v_free < granted THEN
            granted := greatest(v_free, 0);
            retry_s := 0.1;
        END IF;
    END IF;
    v_first := v_now;
    IF p_spacing_s IS NOT NULL THEN
        v_first := greatest(v_row.next_at, v_now);
        v_free := floor(extract(epoch FROM v_now - v_first) / p_spacing_s
                        + p_horizon_s / p_spacing_s)::integer + 1;
        IF v_free < granted THEN
            granted := greatest(v_free, 0);
            retry_s := greatest(retry_s, extract(epoch FROM v_first - v_now) - p_horizon_s
                                         + granted * p_spacing_s, 0.01);
        END IF;
        IF granted > 0 THEN
            UPDATE holdfast.upstreams u
               SET next_at = v_first + make_interval(secs => granted * p_spacing_s)
             WHERE u.upstream = p_upstream AND u.model = p_model;
        END IF;
    END IF;
    IF v_cap IS NOT NULL THEN
        IF p_using + granted > 0 THEN
            INSERT INTO holdfast.upstream_use AS x
                   (upstream, model, worker_id, in_flight, expires_at)
            VALUES (p_upstream, p_model, p_worker, p_using + granted,
                    v_now + make_interval(secs => p_valid_s))
            ON CONFLICT (upstream, model, worker_id)
            DO UPDATE SET in_flight = excluded.in_flight, expires_at = excluded.expires_at;
        ELSE
            DELETE FROM holdfast.upstream_use x
             WHERE x.upstream = p_upstream AND x.model = p_model
               AND (x.worker_id = p_worker OR x.expires_at < v_now - interval '1 minute');
        END IF;
    END IF;
    first_s := extract(epoch FROM v_first - v_now);
    pauses := v_pauses;
    RETURN NEXT;
END $$;

-- block_upstream: nobody asks an upstream for so long; a longer block stays.
-- locks: the upstream's row   fence: none   rows: 1
CREATE FUNCTION holdfast.block_upstream(p_upstream text, p_model text, p_wait_s double precision)
RETURNS void
LANGUAGE sql VOLATILE AS $$
    INSERT INTO holdfast.upstreams AS u (upstream, model, blocked_until)
    VALUES (p_upstream, p_model, clock_timestamp() + make_interval(secs => p_wait_s))
    ON CONFLICT (upstream, model)
    DO UPDATE SET blocked_until = greatest(u.blocked_until, excluded.blocked_until);
$$;

-- pause_upstream: nobody asks an upstream for p_first_s, doubled for every pause in a row.
-- locks: the upstream's row   fence: none   rows: 1
--
-- Many that were under way fail together: one that is blocked already is not paused again.
CREATE FUNCTION holdfast.pause_upstream(
    p_upstream text, p_model text, p_first_s double precision, p_longest_s double precision)
RETURNS TABLE (pauses integer, blocked_s double precision)
LANGUAGE plpgsql VOLATILE AS $$
#variable_conflict use_column
DECLARE
    v_row holdfast.upstreams := holdfast.lock_upstream(p_upstream, p_model);
    v_now timestamptz := clock_timestamp();
BEGIN
    IF v_row.blocked_until <= v_now THEN
        v_row.blocked_until := v_now + make_interval(
            secs => least(p_first_s * 2 ^ least(v_row.pauses, 30), p_longest_s));
        v_row.pauses := v_row.pauses + 1;
        UPDATE holdfast.upstreams u
           SET blocked_until = v_row.blocked_until, pauses = v_row.pauses
         WHERE u.upstream = p_upstream AND u.model = p_model;
    END IF;
    pauses := v_row.pauses;
    blocked_s := extract(epoch FROM v_row.blocked_until - v_now);
    RETURN NEXT;
END $$;

-- note_spent: what an attempt used of a model so far, while its item is held.
-- locks: the lease's row, for key share   fence: lease_id + token + position (F3)   rows: 1, none when lost
CREATE FUNCTION holdfast.note_spent(
    p_batch uuid, p_lease uuid, p_position integer, p_token bigint, p_model text, p_calls integer,
    p_input bigint, p_output bigint, p_total bigint, p_cached bigint, p_reasoning bigint)
RETURNS SETOF boolean
LANGUAGE sql VOLATILE AS $$
    INSERT INTO holdfast.spent (batch_id, position, lease_id, model, calls, input_tokens,
                                output_tokens, total_tokens, cached_tokens, reasoning_tokens)
    SELECT p_batch, p_position, p_lease, p_model, p_calls, p_input, p_output, p_total, p_cached,
           p_reasoning
     WHERE holdfast.is_current(p_batch, p_lease, p_position, p_token)
    ON CONFLICT (batch_id, position, lease_id)
    DO UPDATE SET model = excluded.model, calls = excluded.calls,
                  input_tokens = excluded.input_tokens, output_tokens = excluded.output_tokens,
                  total_tokens = excluded.total_tokens, cached_tokens = excluded.cached_tokens,
                  reasoning_tokens = excluded.reasoning_tokens
    RETURNING true;
$$;

-- note_turn: one more line of an attempt's transcript, while its item is held; a repeat changes nothing.
-- locks: the lease's row, for key share   fence: lease_id + token + position (F3)   rows: 1, none when lost
CREATE FUNCTION holdfast.note_turn(
    p_batch uuid, p_lease uuid, p_position integer, p_token bigint, p_seq integer, p_entry text)
RETURNS SETOF boolean
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    IF NOT holdfast.is_current(p_batch, p_lease, p_position, p_token) THEN
        RETURN;
    END IF;
    INSERT INTO holdfast.transcripts (batch_id, position, lease_id, seq, entry)
    VALUES (p_batch, p_position, p_lease, p_seq, p_entry::json)
    ON CONFLICT DO NOTHING;
    RETURN NEXT true;
END $$;

-- clear_removed: clear away rows of a removed batch: those of the next p_limit positions, then of its history.
-- locks: rows that nobody reaches any more   fence: removed_batches, skipping one that another clears   rows: one answer
--
-- removed: rows. positions: those cleared. done: nothing is left of it.
CREATE OR REPLACE FUNCTION holdfast.clear_removed(p_batch uuid, p_limit integer,
    OUT removed bigint, OUT positions integer, OUT done boolean)
LANGUAGE plpgsql VOLATILE
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off AS $$
DECLARE
    r      holdfast.removed_batches;
    v_to   integer;
    v_rows bigint;
BEGIN
    removed := 0;
    positions := 0;
    done := false;
    SELECT * INTO r FROM holdfast.removed_batches x WHERE x.id = p_batch FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        done := true;
        RETURN;
    END IF;
    IF r.cleared < r.item_count THEN
        v_to := least(r.item_count, r.cleared + p_limit);
        DELETE FROM holdfast.evidence x
         WHERE x.batch_id = p_batch AND x.position >= r.cleared AND x.position < v_to;
        GET DIAGNOSTICS v_rows = ROW_COUNT;
        removed := removed + v_rows;
        DELETE FROM holdfast.transcripts x
         WHERE x.batch_id = p_batch AND x.position >= r.cleared AND x.position < v_to;
        GET DIAGNOSTICS v_rows = ROW_COUNT;
        removed := removed + v_rows;
        DELETE FROM holdfast.spent x
         WHERE x.batch_id = p_batch AND x.position >= r.cleared AND x.position < v_to;
        GET DIAGNOSTICS v_rows = ROW_COUNT;
        removed := removed + v_rows;
        DELETE FROM holdfast.attempts x
         WHERE x.batch_id = p_batch AND x.position >= r.cleared AND x.position < v_to;
        GET DIAGNOSTICS v_rows = ROW_COUNT;
        removed := removed + v_rows;
        DELETE FROM holdfast.outcomes x
         WHERE x.batch_id = p_batch AND x.position >= r.cleared AND x.position < v_to;
        GET DIAGNOSTICS v_rows = ROW_COUNT;
        removed := removed + v_rows;
        DELETE FROM holdfast.items x
         WHERE x.batch_id = p_batch AND x.position >= r.cleared AND x.position < v_to;
        GET DIAGNOSTICS v_rows = ROW_COUNT;
        removed := removed + v_rows;
        positions := v_to - r.cleared;
        UPDATE holdfast.removed_batches x SET cleared = v_to WHERE x.id = p_batch;
        RETURN;
    END IF;
    DELETE FROM holdfast.progress x
     WHERE x.ctid = ANY (ARRAY(SELECT y.ctid FROM holdfast.progress y
                                WHERE y.batch_id = p_batch LIMIT p_limit));
    GET DIAGNOSTICS v_rows = ROW_COUNT;
    removed := removed + v_rows;
    DELETE FROM holdfast.progress_deltas x
     WHERE x.ctid = ANY (ARRAY(SELECT y.ctid FROM holdfast.progress_deltas y
                                WHERE y.batch_id = p_batch LIMIT p_limit));
    GET DIAGNOSTICS v_rows = ROW_COUNT;
    removed := removed + v_rows;
    IF removed = 0 THEN
        DELETE FROM holdfast.removed_batches x WHERE x.id = p_batch;
        done := true;
    END IF;
END $$;
