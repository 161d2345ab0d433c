DROP FUNCTION holdfast.raise_epoch_if_moved(double precision);
DROP FUNCTION holdfast.longest_lease_s();

-- raise_epoch_if_moved: a token epoch of its own for every system identifier and timeline (F2), and
-- before the sequence's 31 bits are used up.
CREATE FUNCTION holdfast.raise_epoch_if_moved() RETURNS holdfast.control
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    c        holdfast.control;
    v_system bigint := (SELECT system_identifier FROM pg_control_system());
    v_line   integer := ('x' || substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8))::bit(32)::integer;
BEGIN
    SELECT * INTO STRICT c FROM holdfast.control;
    IF (c.system_identifier, c.timeline) = (v_system, v_line)
       AND (SELECT last_value FROM holdfast.token_seq) - c.sequence_base < 2000000000 THEN
        RETURN c;
    END IF;
    -- A second raiser waits here, finds the row moved, and reads what the first one wrote.
    UPDATE holdfast.control u
       SET epoch = greatest(u.epoch + 1, extract(epoch FROM clock_timestamp())::bigint),
           sequence_base = (SELECT last_value FROM holdfast.token_seq),
           system_identifier = v_system, timeline = v_line, changed_at = clock_timestamp()
     WHERE (u.epoch, u.sequence_base) = (c.epoch, c.sequence_base);
    SELECT * INTO STRICT c FROM holdfast.control;
    RETURN c;
END $$;

-- claim: take up to p_want positions of one batch under a new lease; ids only, inputs are read later.
-- locks: ticket tried (L4), parent exclusive (L1), waiting rows   fence: lease_id + new token (F1, F2)   rows: one answer
--
-- answer: granted | empty | window (live window full) | capped (max_running) | backlog (checks) |
-- not_before | closed (paused, cancelled, ended) | ended (by this call) | contended | claims_off | unknown.
-- ready_in_s: when a look is worth while again, where that is known.
-- alone: the lease's one item has taken its worker down twice and must run by itself.
--
-- jit is off here and wherever plans are pinned: on paper a forbidden plan that has no alternative
-- costs 1e10, and compiling it takes a hundred times as long as running it.
CREATE OR REPLACE FUNCTION holdfast.claim(p_batch uuid, p_lease uuid, p_worker uuid, p_want integer,
                               p_lease_s double precision, p_traceparent text,
    OUT answer text, OUT token bigint, OUT positions integer[], OUT histories bigint[],
    OUT ready_in_s double precision, OUT alone boolean)
LANGUAGE plpgsql VOLATILE
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off
SET enable_mergejoin = off SET jit = off AS $$
DECLARE
    b       holdfast.batches;
    p       holdfast.progress;
    c       holdfast.control;
    due     record;
    v_now   timestamptz;
    v_room  integer;
    v_fresh integer[];
    v_later integer[];
    v_end   integer;
    v_aside integer := 0;
BEGIN
    alone := false;
    IF coalesce(p_want, 0) < 1 THEN
        RAISE EXCEPTION 'holdfast: a claim of % items', p_want USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF NOT holdfast.try_ticket(p_batch) THEN
        answer := CASE WHEN EXISTS (SELECT FROM holdfast.batches WHERE id = p_batch)
                       THEN 'contended' ELSE 'unknown' END;
        RETURN;
    END IF;
    PERFORM holdfast.lock_parent(p_batch);
    -- Everything below is read after the lock (L2).
    SELECT * INTO STRICT b FROM holdfast.batches WHERE id = p_batch;
    v_now := clock_timestamp();
    IF b.control <> 'open' OR b.finished_at IS NOT NULL THEN
        answer := 'closed';
        RETURN;
    END IF;
    IF b.not_before > v_now THEN
        answer := 'not_before';
        ready_in_s := extract(epoch FROM b.not_before - v_now);
        RETURN;
    END IF;
    c := holdfast.raise_epoch_if_moved();
    IF NOT c.claims_enabled THEN
        answer := 'claims_off';
        RETURN;
    END IF;
    p := holdfast.current_progress(p_batch);
    v_room := least(p_want, b.max_running - p.executing);
    IF v_room < 1 THEN
        answer := 'capped';
        RETURN;
    END IF;
    IF p.checking >= b.max_checking THEN
        answer := 'backlog';
        RETURN;
    END IF;

    -- Due retries first: they are in the live window already. The counts are exact under the lock, so
    -- a batch without any is not searched for them.
    IF p.waiting > p.deferred THEN
        SELECT * INTO due FROM holdfast.take_due(p_batch, false, p.retry_floor, v_now, v_room);
        p.waiting := p.waiting - due.taken;
        p.executing := p.executing + due.taken;
        p.retry_floor := due.floor;
        positions := due.positions;
        histories := due.histories;
        alone := due.alone;
        v_room := v_room - due.taken;
    END IF;

    -- Then, as far as the live window has room, items whose own time has come, then fresh ones.
    v_room := least(v_room, b.max_live - (p.executing + p.checking + p.waiting - p.deferred));
    IF v_room > 0 AND p.deferred > 0 AND NOT alone THEN
        SELECT * INTO due FROM holdfast.take_due(p_batch, true, p.deferred_floor, v_now, v_room);
        p.waiting := p.waiting - due.taken;
        p.deferred := p.deferred - due.taken;
        p.executing := p.executing + due.taken;
        p.deferred_floor := due.floor;
        positions := positions || due.positions;
        histories := histories || due.histories;
        v_room := v_room - due.taken;
    END IF;
    IF v_room > 0 AND p.next_position < b.item_count AND NOT alone THEN
        IF b.has_not_before THEN
            -- Items whose own time has not come step aside into waiting, outside the live window.
            -- Each gets a moment of its own, so that the floor can pass those that were taken.
            v_end := least(b.item_count, p.next_position + v_room + 1000);
            -- The range first, by itself: joined to the series, it would be read for the whole batch.
            v_later := ARRAY(SELECT i.position FROM holdfast.items i
                              WHERE i.batch_id = p_batch AND i.position >= p.next_position
                                AND i.position < v_end AND i.not_before IS NOT NULL
                                AND i.not_before > v_now);
            v_fresh := ARRAY(SELECT g FROM generate_series(p.next_position, v_end - 1) g
                             EXCEPT SELECT unnest(v_later) ORDER BY g LIMIT v_room);
            IF cardinality(v_fresh) = v_room THEN
                v_end := v_fresh[v_room] + 1;
            END IF;
            INSERT INTO holdfast.waiting (batch_id, position, ready_at, deferred)
            SELECT p_batch, i.position,
                   greatest(i.not_before, p.deferred_floor)
                       + i.position * interval '1 microsecond', true
              FROM holdfast.items i
             WHERE i.batch_id = p_batch AND i.position >= p.next_position
               AND i.position < v_end AND i.not_before IS NOT NULL AND i.not_before > v_now;
            GET DIAGNOSTICS v_aside = ROW_COUNT;
            p.waiting := p.waiting + v_aside;
            p.deferred := p.deferred + v_aside;
        ELSE
            v_end := least(b.item_count, p.next_position + v_room);
            v_fresh := ARRAY(SELECT g FROM generate_series(p.next_position, v_end - 1) g);
        END IF;
        p.next_position := v_end;
        p.executing := p.executing + cardinality(v_fresh);
        positions := positions || v_fresh;
        histories := histories || array_fill(0::bigint, ARRAY[cardinality(v_fresh)]);
    END IF;

    IF coalesce(cardinality(positions), 0) = 0 THEN
        positions := NULL;
        histories := NULL;
        IF v_aside > 0 THEN
            PERFORM holdfast.save_progress(p);
        END IF;
        IF holdfast.end_if_done(p) THEN
            answer := 'ended';
            RETURN;
        END IF;
        answer := CASE WHEN v_room < 1 AND (p.next_position < b.item_count OR p.deferred > 0)
                       THEN 'window' ELSE 'empty' END;
        IF v_aside > 0 AND p.next_position < b.item_count THEN
            ready_in_s := 0;
            RETURN;
        END IF;
        SELECT extract(epoch FROM least(
                   (SELECT min(w.ready_at) FROM holdfast.waiting w
                     WHERE w.batch_id = p_batch AND NOT w.recheck AND NOT w.deferred
                       AND w.ready_at >= p.retry_floor),
                   (SELECT min(w.ready_at) FROM holdfast.waiting w
                     WHERE w.batch_id = p_batch AND NOT w.recheck AND w.deferred
                       AND w.ready_at >= p.deferred_floor AND v_room > 0)) - v_now)
          INTO ready_in_s;
        RETURN;
    END IF;

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

ALTER TABLE holdfast.control DROP COLUMN quiet_until;
