-- What metrics need to know and only the server can tell: waits for the parent lock, how long an item
-- was next in line, and the load of a queue.

-- lock_parent: the batch's parent lock, exclusive (L1). Null for an unknown batch.
CREATE OR REPLACE FUNCTION holdfast.lock_parent(p_batch uuid) RETURNS integer
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_lock integer;
    v_from timestamptz;
BEGIN
    PERFORM holdfast.assert_protocol();
    SELECT b.lock_no INTO v_lock FROM holdfast.batches b WHERE b.id = p_batch;
    IF v_lock IS NOT NULL THEN
        v_from := clock_timestamp();
        PERFORM pg_advisory_xact_lock(1212564301, v_lock);
        PERFORM holdfast.note_lock_wait(v_from);
    END IF;
    RETURN v_lock;
END $$;

-- lock_parent_shared: the batch's parent lock, shared (L1). Null for an unknown batch.
CREATE OR REPLACE FUNCTION holdfast.lock_parent_shared(p_batch uuid) RETURNS integer
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_lock integer;
    v_from timestamptz;
BEGIN
    PERFORM holdfast.assert_protocol();
    SELECT b.lock_no INTO v_lock FROM holdfast.batches b WHERE b.id = p_batch;
    IF v_lock IS NOT NULL THEN
        v_from := clock_timestamp();
        PERFORM pg_advisory_xact_lock_shared(1212564301, v_lock);
        PERFORM holdfast.note_lock_wait(v_from);
    END IF;
    RETURN v_lock;
END $$;

-- note_lock_wait: keeps until the end of the transaction for how long it waited for its parent lock, in seconds.
--
-- As the setting holdfast.lock_wait_s; where an earlier transaction of the session set it, it is empty
-- before that.
CREATE FUNCTION holdfast.note_lock_wait(p_from timestamptz) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    PERFORM set_config('holdfast.lock_wait_s',
                       extract(epoch FROM clock_timestamp() - p_from)::text, true);
END $$;

-- waited: for how long items were next in line that the calling statement has claimed, in seconds.
-- locks: none   fence: none   rows: one
--
-- Being STABLE it sees what was there before the statement that calls it. again_s: of each that was
-- waiting, from when it was ready. fresh_s: of the others, from when the batch was last served or
-- opened, or its time came; null when it had reached a cap by then: nobody notes when a cap frees.
CREATE FUNCTION holdfast.waited(p_batch uuid, p_positions integer[],
    OUT again_s double precision[], OUT fresh_s double precision)
LANGUAGE plpgsql STABLE
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off
SET enable_mergejoin = off SET jit = off AS $$
DECLARE
    b     holdfast.batches;
    p     holdfast.progress;
    v_now timestamptz := clock_timestamp();
BEGIN
    IF p_positions IS NULL THEN
        RETURN;
    END IF;
    SELECT * INTO b FROM holdfast.batches x WHERE x.id = p_batch;
    SELECT * INTO p FROM holdfast.progress x WHERE x.batch_id = p_batch ORDER BY x.seq DESC LIMIT 1;
    IF (p.executing < b.max_running) IS NOT false AND p.checking < b.max_checking
       AND p.executing + p.checking + p.waiting - p.deferred < b.max_live THEN
        fresh_s := greatest(0, extract(epoch FROM v_now - greatest(p.recorded_at, b.not_before)));
    END IF;
    p := holdfast.current_progress(p_batch);
    -- In the order in which the claim takes them, and from the floors on: not by key, for a key that
    -- was there before has left dead entries.
    IF p.waiting > 0 THEN
        again_s := ARRAY(
            SELECT greatest(0, extract(epoch FROM v_now - w.ready_at))
              FROM ((SELECT x.ready_at FROM holdfast.waiting x
                      WHERE p.waiting > p.deferred
                        AND x.batch_id = p_batch AND NOT x.recheck AND NOT x.deferred
                        AND x.ready_at >= p.retry_floor AND x.ready_at <= v_now
                      ORDER BY x.ready_at, x.position LIMIT cardinality(p_positions))
                    UNION ALL
                    (SELECT x.ready_at FROM holdfast.waiting x
                      WHERE p.deferred > 0
                        AND x.batch_id = p_batch AND NOT x.recheck AND x.deferred
                        AND x.ready_at >= p.deferred_floor AND x.ready_at <= v_now
                      ORDER BY x.ready_at, x.position LIMIT cardinality(p_positions))) w
             LIMIT cardinality(p_positions));
    END IF;
END $$;

-- batch_load: what a batch that has not ended asks of workers; never a count of items.
-- locks: none   fence: none   rows: one
--
-- queued: may be claimed now, or is between two attempts. pending: beyond the live window, before its
-- time, or the batch is paused. ready_since: from when the first that may be claimed now was next in
-- line; null when none may.
CREATE FUNCTION holdfast.batch_load(p_batch uuid,
    OUT pending integer, OUT queued integer, OUT executing integer, OUT checking integer,
    OUT ready_since timestamptz)
LANGUAGE plpgsql STABLE
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off
SET enable_mergejoin = off SET jit = off AS $$
DECLARE
    b       holdfast.batches;
    p       holdfast.progress;
    v_now   timestamptz := clock_timestamp();
    v_fresh integer;
    v_room  integer;
    v_due   integer := 0;
BEGIN
    SELECT * INTO b FROM holdfast.batches x WHERE x.id = p_batch AND x.finished_at IS NULL;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    p := holdfast.current_progress(p_batch);
    executing := p.executing;
    checking := p.checking;
    v_fresh := b.item_count - p.next_position;
    IF b.control <> 'open' OR b.not_before > v_now THEN
        queued := 0;
        pending := v_fresh + p.waiting;
        RETURN;
    END IF;
    v_room := greatest(0, b.max_live - (p.executing + p.checking + p.waiting - p.deferred));
    IF p.deferred > 0 THEN
        -- No more of them than may be claimed are looked at.
        SELECT count(*), min(w.ready_at) INTO v_due, ready_since
          FROM (SELECT x.ready_at FROM holdfast.waiting x
                 WHERE x.batch_id = p_batch AND NOT x.recheck AND x.deferred
                   AND x.ready_at >= p.deferred_floor AND x.ready_at <= v_now
                 ORDER BY x.ready_at LIMIT v_room) w;
    END IF;
    queued := p.waiting - p.deferred + v_due + least(v_fresh, v_room - v_due);
    pending := v_fresh + p.waiting - queued;
    IF (p.executing < b.max_running) IS NOT false AND p.checking < b.max_checking THEN
        IF p.waiting > p.deferred THEN
            ready_since := least(ready_since, (
                SELECT min(w.ready_at) FROM holdfast.waiting w
                 WHERE w.batch_id = p_batch AND NOT w.recheck AND NOT w.deferred
                   AND w.ready_at >= p.retry_floor AND w.ready_at <= v_now));
        END IF;
        IF least(v_fresh, v_room - v_due) > 0 THEN
            ready_since := least(ready_since, greatest(p.recorded_at, b.not_before));
        END IF;
    ELSE
        ready_since := NULL;
    END IF;
END $$;

-- autoscale_demand: items of a queue that workers have or could have: ready, leased, running and under check.
-- locks: none   fence: none   rows: one
--
-- What scaling asks for. It stays as it is: name, argument and meaning.
CREATE FUNCTION holdfast.autoscale_demand(p_queue text) RETURNS bigint
LANGUAGE sql STABLE AS $$
    SELECT coalesce(sum(l.queued + l.executing + l.checking), 0)::bigint
      FROM holdfast.batches b CROSS JOIN LATERAL holdfast.batch_load(b.id) l
     WHERE b.finished_at IS NULL AND b.queue = p_queue
$$;
