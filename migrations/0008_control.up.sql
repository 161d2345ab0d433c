-- end_batch: end a batch with nothing left, paused ones included.
-- locks: parent exclusive (L1)   fence: counts read after the lock (L2)   rows: whether this call ended it
CREATE FUNCTION holdfast.end_batch(p_batch uuid) RETURNS boolean
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    IF holdfast.lock_parent(p_batch) IS NULL THEN
        RETURN false;
    END IF;
    RETURN holdfast.end_if_done(holdfast.current_progress(p_batch));
END $$;

-- control_batch: pause, resume or cancel a batch of p_owner (of anyone when null); idempotent, audited.
-- locks: parent exclusive (L1)   fence: control state read after the lock (L2)   rows: one answer
--
-- answer: applied | unchanged | ended (nothing to control any more) | unknown.
CREATE FUNCTION holdfast.control_batch(p_batch uuid, p_owner text, p_verb text, p_actor text)
RETURNS text
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    b        holdfast.batches;
    p        holdfast.progress;
    v_target text;
BEGIN
    v_target := CASE p_verb WHEN 'pause' THEN 'paused' WHEN 'resume' THEN 'open'
                            WHEN 'cancel' THEN 'cancelled' END;
    IF v_target IS NULL THEN
        RAISE EXCEPTION 'holdfast: no control named %', p_verb
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    -- The owner never changes: another owner's batch is not even locked.
    IF NOT EXISTS (SELECT FROM holdfast.batches x
                    WHERE x.id = p_batch AND (p_owner IS NULL OR x.owner = p_owner)) THEN
        RETURN 'unknown';
    END IF;
    PERFORM holdfast.lock_parent(p_batch);
    SELECT * INTO STRICT b FROM holdfast.batches x WHERE x.id = p_batch;
    IF b.finished_at IS NOT NULL AND (b.control <> 'cancelled' OR v_target <> 'cancelled') THEN
        RETURN 'ended';
    END IF;
    IF b.control = v_target THEN
        RETURN 'unchanged';
    END IF;
    IF v_target = 'cancelled' THEN
        -- The batch row and one progress row, nothing else: sweeps clear the rest away later.
        UPDATE holdfast.batches x
           SET control = 'cancelled', finished_at = clock_timestamp(), leftovers = true
         WHERE x.id = p_batch;
        p := holdfast.current_progress(p_batch);
        p.cancelled := b.item_count - p.succeeded - p.failed;
        p.next_position := b.item_count;
        p.executing := 0;
        p.checking := 0;
        p.waiting := 0;
        p.deferred := 0;
        PERFORM holdfast.save_progress(p);
    ELSE
        UPDATE holdfast.batches x SET control = v_target WHERE x.id = p_batch;
    END IF;
    INSERT INTO holdfast.audit_log (actor, verb, batch_id, before, after)
    VALUES (p_actor, p_verb, p_batch, b.control, v_target);
    RETURN 'applied';
END $$;

-- retry_failed: give failed items new attempts, at most p_limit from position p_from on.
-- locks: parent exclusive (L1)   fence: outcome still failed after the lock (L2)   rows: one answer
--
-- p_positions null means all. answer: applied | cancelled | unknown. next_from: where the next chunk
-- begins; null at the end.
CREATE FUNCTION holdfast.retry_failed(p_batch uuid, p_owner text, p_positions integer[],
                                      p_from integer, p_limit integer, p_actor text,
    OUT answer text, OUT moved integer, OUT next_from integer)
LANGUAGE plpgsql VOLATILE
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off
SET enable_mergejoin = off SET jit = off AS $$
DECLARE
    b      holdfast.batches;
    p      holdfast.progress;
    v_rows tid[];
    v_last integer;
BEGIN
    moved := 0;
    IF NOT EXISTS (SELECT FROM holdfast.batches x
                    WHERE x.id = p_batch AND (p_owner IS NULL OR x.owner = p_owner)) THEN
        answer := 'unknown';
        RETURN;
    END IF;
    PERFORM holdfast.lock_parent(p_batch);
    SELECT * INTO STRICT b FROM holdfast.batches x WHERE x.id = p_batch;
    IF b.control = 'cancelled' THEN
        answer := 'cancelled';
        RETURN;
    END IF;
    answer := 'applied';
    p := holdfast.current_progress(p_batch);
    IF p_positions IS NULL THEN
        SELECT array_agg(f.ctid), max(f.position), count(*) INTO v_rows, v_last, moved
          FROM (SELECT o.ctid, o.position FROM holdfast.outcomes o
                 WHERE o.batch_id = p_batch AND o.status <> 'succeeded' AND o.position >= p_from
                 ORDER BY o.position LIMIT p_limit) f;
    ELSE
        SELECT array_agg(f.ctid), max(f.position), count(*) INTO v_rows, v_last, moved
          FROM (SELECT o.ctid, o.position
                  FROM (SELECT DISTINCT x.position FROM unnest(p_positions) x(position)
                         WHERE x.position >= p_from) u
                 CROSS JOIN LATERAL (
                       SELECT x.ctid, x.position FROM holdfast.outcomes x
                        WHERE x.batch_id = p_batch AND x.position = u.position
                          AND x.status <> 'succeeded' OFFSET 0) o
                 ORDER BY o.position LIMIT p_limit) f;
    END IF;
    IF moved = 0 THEN
        RETURN;
    END IF;
    WITH retried AS (
        DELETE FROM holdfast.outcomes o WHERE o.ctid = ANY (v_rows) RETURNING o.*
    ), kept AS (
        INSERT INTO holdfast.attempts (batch_id, position, lease_id, token, attempt, worker_id,
                started_at, ended_at, ending, charged, by_holder, error, stop_reason, exit_status,
                signal)
        SELECT r.batch_id, r.position,
               coalesce(r.lease_id, '00000000-0000-0000-0000-000000000000'), r.token, r.attempt,
               r.worker_id, r.started_at, r.finished_at, 'retried', true, r.lease_id IS NOT NULL,
               r.error, r.stop_reason, r.exit_status, r.signal
          FROM retried r
    ), again AS (
        -- Counters from zero, but for the number of retries.
        INSERT INTO holdfast.waiting (batch_id, position, ready_at, history, last_error)
        SELECT r.batch_id, r.position, greatest(clock_timestamp(), p.retry_floor),
               least(255, 1 + (SELECT count(*) FROM holdfast.attempts a
                                WHERE a.batch_id = r.batch_id AND a.position = r.position
                                  AND a.ending = 'retried')) << 40,
               r.error
          FROM retried r
        RETURNING 1
    )
    SELECT count(*)::integer INTO moved FROM again;
    p.failed := p.failed - moved;
    p.waiting := p.waiting + moved;
    PERFORM holdfast.save_progress(p);
    UPDATE holdfast.batches x SET finished_at = NULL
     WHERE x.id = p_batch AND x.finished_at IS NOT NULL;
    IF p_from = 0 THEN
        INSERT INTO holdfast.audit_log (actor, verb, batch_id, before, after, detail)
        VALUES (p_actor, 'retry', p_batch, b.control, b.control,
                json_build_object('items', CASE WHEN p_positions IS NULL THEN NULL
                                                ELSE cardinality(p_positions) END));
    END IF;
    next_from := CASE WHEN moved = p_limit THEN v_last + 1 END;
END $$;
