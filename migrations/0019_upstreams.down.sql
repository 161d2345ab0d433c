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

DROP FUNCTION holdfast.note_turn, holdfast.note_spent, holdfast.pause_upstream,
    holdfast.block_upstream, holdfast.grant_requests, holdfast.lock_upstream;
DROP TABLE holdfast.spent, holdfast.transcripts, holdfast.upstream_use, holdfast.upstreams;
