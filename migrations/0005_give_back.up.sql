-- give_back: return a whole lease whose claim was never answered, by its lease_id alone (F6).
-- locks: parent shared (L1), the lease row (L2)   fence: lease_id (F3)   rows: positions given back
--
-- A lost claim counts as an interruption, free of charge p_free_interruptions times.
CREATE FUNCTION holdfast.give_back(p_batch uuid, p_lease uuid, p_free_interruptions integer)
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
