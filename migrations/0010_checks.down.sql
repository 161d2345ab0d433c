-- Nothing is staged any more: the step before published what was.
-- current_progress: the newest progress row with the deltas after it folded in; one statement.
-- locks: none   fence: none   rows: one, none for an unknown batch
--
-- Its plan is made while the tables are small and kept while they grow, so it is pinned.
CREATE OR REPLACE FUNCTION holdfast.current_progress(p_batch uuid) RETURNS holdfast.progress
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
CREATE OR REPLACE FUNCTION holdfast.save_progress(p holdfast.progress) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    INSERT INTO holdfast.progress (batch_id, seq, next_position, executing, checking, waiting,
                                   deferred, succeeded, failed, cancelled, retry_floor,
                                   recheck_floor, deferred_floor, last_delta)
    VALUES (p.batch_id, p.seq + 1, p.next_position, p.executing, p.checking, p.waiting, p.deferred,
            p.succeeded, p.failed, p.cancelled, p.retry_floor, p.recheck_floor,
            p.deferred_floor, p.last_delta);
END $$;

ALTER TABLE holdfast.progress_deltas
    DROP COLUMN verdict_holds, DROP COLUMN verdict_fails, DROP COLUMN verdict_unverified;
ALTER TABLE holdfast.progress
    DROP COLUMN verdict_holds, DROP COLUMN verdict_fails, DROP COLUMN verdict_unverified;
DROP INDEX holdfast.waiting_recheck;
DROP INDEX holdfast.outcomes_verdict;
ALTER TABLE holdfast.outcomes
    DROP COLUMN verdict, DROP COLUMN verdict_class, DROP COLUMN staged_lease_id;
DROP TABLE holdfast.evidence, holdfast.staged_outcomes;
