-- Lock helpers, packed histories and the one reading of a batch's counts. The rules L1 to L6 and F1
-- to F6 are numbered in daemon/src/store/locking.rs.
--
-- PL/pgSQL even where SQL would do: it keeps its plans for the session, while an SQL function called
-- from another function is parsed and planned again in every transaction.

-- assert_protocol: refuses an isolation level under which a look after the lock would be stale (L2).
CREATE FUNCTION holdfast.assert_protocol() RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'holdfast: the protocol runs under read committed, not %',
            current_setting('transaction_isolation') USING ERRCODE = 'invalid_transaction_state';
    END IF;
END $$;

-- lock_parent: the batch's parent lock, exclusive (L1). Null for an unknown batch.
CREATE FUNCTION holdfast.lock_parent(p_batch uuid) RETURNS integer
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_lock integer;
BEGIN
    PERFORM holdfast.assert_protocol();
    SELECT b.lock_no INTO v_lock FROM holdfast.batches b WHERE b.id = p_batch;
    IF v_lock IS NOT NULL THEN
        PERFORM pg_advisory_xact_lock(1212564301, v_lock);
    END IF;
    RETURN v_lock;
END $$;

-- lock_parent_shared: the batch's parent lock, shared (L1). Null for an unknown batch.
CREATE FUNCTION holdfast.lock_parent_shared(p_batch uuid) RETURNS integer
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_lock integer;
BEGIN
    PERFORM holdfast.assert_protocol();
    SELECT b.lock_no INTO v_lock FROM holdfast.batches b WHERE b.id = p_batch;
    IF v_lock IS NOT NULL THEN
        PERFORM pg_advisory_xact_lock_shared(1212564301, v_lock);
    END IF;
    RETURN v_lock;
END $$;

-- try_ticket: one claimer or reaper at a time per batch (L4); false when another has it.
CREATE FUNCTION holdfast.try_ticket(p_batch uuid) RETURNS boolean
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_lock integer;
BEGIN
    SELECT b.lock_no INTO v_lock FROM holdfast.batches b WHERE b.id = p_batch;
    RETURN v_lock IS NOT NULL AND pg_try_advisory_xact_lock(1212564302, v_lock);
END $$;

-- current_progress: the newest progress row with the deltas after it folded in; one statement.
-- locks: none   fence: none   rows: one, none for an unknown batch
--
-- Its plan is made while the tables are small and kept while they grow, so it is pinned.
CREATE FUNCTION holdfast.current_progress(p_batch uuid) RETURNS holdfast.progress
LANGUAGE plpgsql STABLE
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off AS $$
DECLARE
    v_now holdfast.progress;
BEGIN
    SELECT p.batch_id, p.seq, p.next_position,
           p.executing + d.executing, p.checking + d.checking, p.waiting + d.waiting, p.deferred,
           p.succeeded + d.succeeded, p.failed + d.failed, p.cancelled,
           p.retry_floor, p.recheck_floor, p.deferred_floor,
           greatest(p.last_delta, d.last_delta), p.recorded_at
      INTO v_now
      FROM (SELECT * FROM holdfast.progress WHERE batch_id = p_batch ORDER BY seq DESC LIMIT 1) p
     CROSS JOIN LATERAL (
           SELECT coalesce(sum(x.executing), 0)::integer AS executing,
                  coalesce(sum(x.checking), 0)::integer AS checking,
                  coalesce(sum(x.waiting), 0)::integer AS waiting,
                  coalesce(sum(x.succeeded), 0)::integer AS succeeded,
                  coalesce(sum(x.failed), 0)::integer AS failed,
                  coalesce(max(x.id), 0) AS last_delta
             FROM holdfast.progress_deltas x
            WHERE x.batch_id = p_batch AND x.id > p.last_delta) d;
    RETURN v_now;
END $$;

-- save_progress: the next progress row of a batch whose exclusive parent lock is held.
CREATE FUNCTION holdfast.save_progress(p holdfast.progress) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    INSERT INTO holdfast.progress (batch_id, seq, next_position, executing, checking, waiting,
                                   deferred, succeeded, failed, cancelled, retry_floor,
                                   recheck_floor, deferred_floor, last_delta)
    VALUES (p.batch_id, p.seq + 1, p.next_position, p.executing, p.checking, p.waiting, p.deferred,
            p.succeeded, p.failed, p.cancelled, p.retry_floor, p.recheck_floor,
            p.deferred_floor, p.last_delta);
END $$;

-- end_if_done: ends a batch with nothing left; its exclusive parent lock is held.
CREATE FUNCTION holdfast.end_if_done(p holdfast.progress) RETURNS boolean
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    UPDATE holdfast.batches b SET finished_at = clock_timestamp()
     WHERE b.id = p.batch_id AND b.finished_at IS NULL AND p.next_position = b.item_count
       AND p.executing = 0 AND p.checking = 0 AND p.waiting = 0;
    RETURN FOUND;
END $$;

-- history_count: one counter of a packed history. Bytes: 0 attempts, 1 crashes, 2 interruptions,
-- 3 admission failures, 4 check losses, 5 explicit retries.
CREATE FUNCTION holdfast.history_count(p_history bigint, p_byte integer) RETURNS integer
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT ((p_history >> (8 * p_byte)) & 255)::integer
$$;

-- history_plus: one more in a counter, which stops at 255.
CREATE FUNCTION holdfast.history_plus(p_history bigint, p_byte integer) RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT CASE WHEN ((p_history >> (8 * p_byte)) & 255) = 255 THEN p_history
                ELSE p_history + (1::bigint << (8 * p_byte)) END
$$;

-- history_interrupted: an interruption, free of charge p_free times, then a charged attempt.
CREATE FUNCTION holdfast.history_interrupted(p_history bigint, p_free integer) RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT CASE WHEN holdfast.history_count(p_history, 2) < p_free
                THEN holdfast.history_plus(p_history, 2)
                ELSE holdfast.history_plus(holdfast.history_plus(p_history, 2), 0) END
$$;
