-- The tables of acceptance checks: results stored before they are checked, what was recorded of
-- their executions, verdicts, and the counts of verdicts.

-- One row per item under check: in a lease, or waiting for a recheck with lease_id null. Never shown
-- as an outcome; it becomes one when its check is over.
CREATE TABLE holdfast.staged_outcomes (
    batch_id         uuid NOT NULL,
    position         integer NOT NULL,
    -- The lease that owns it now, and the one under which it was executed and staged (F6).
    lease_id         uuid,
    staged_lease_id  uuid NOT NULL,
    staged_token     bigint NOT NULL,
    -- The last lease that gave it back unchecked (F6).
    returned_by      uuid,
    attempt          integer NOT NULL,
    worker_id        uuid NOT NULL,
    started_at       timestamptz,
    ended_at         timestamptz NOT NULL,
    result           json,
    result_truncated boolean NOT NULL DEFAULT false,
    result_size      bigint NOT NULL DEFAULT 0,
    stop_reason      text NOT NULL,
    exit_status      integer,
    signal           integer,
    model            text,
    usage            json,
    -- Its workspace, VOLUME/PLACE, where it had one: without that volume its files cannot be seen.
    workspace        text,
    staged_at        timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (batch_id, position)
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000,
        autovacuum_vacuum_cost_delay = 0);

-- One row per recorded command of a staged execution, oldest first; pruned with its batch. JSON as it
-- was written: a text in it may hold what jsonb refuses.
CREATE TABLE holdfast.evidence (
    batch_id uuid NOT NULL,
    position integer NOT NULL,
    lease_id uuid NOT NULL,
    seq      integer NOT NULL,
    record   json NOT NULL,
    PRIMARY KEY (batch_id, position, lease_id, seq)
);

-- Null where nothing was checked: no rewrite, and nothing for items without criteria to write.
ALTER TABLE holdfast.outcomes
    ADD COLUMN verdict json,
    ADD COLUMN verdict_class text,
    -- The lease under which a checked item was executed; lease_id is the one that published it.
    ADD COLUMN staged_lease_id uuid;
-- Every row there is has null: not valid only spares the look at each of them.
ALTER TABLE holdfast.outcomes ADD CONSTRAINT outcomes_verdict_class
    CHECK (verdict_class IN ('holds', 'fails', 'unverified')) NOT VALID;
-- Hand-ins wait while it is built, some seconds at ten million outcomes; heartbeats and claims do not.
CREATE INDEX outcomes_verdict ON holdfast.outcomes (batch_id, verdict_class, position)
    WHERE verdict_class IS NOT NULL;

-- Where rechecks are, over all batches. Rows of other kinds leave no entry.
CREATE INDEX waiting_recheck ON holdfast.waiting (batch_id) WHERE recheck;

-- How many of the succeeded items have a verdict of each class.
ALTER TABLE holdfast.progress
    ADD COLUMN verdict_holds integer NOT NULL DEFAULT 0,
    ADD COLUMN verdict_fails integer NOT NULL DEFAULT 0,
    ADD COLUMN verdict_unverified integer NOT NULL DEFAULT 0;
ALTER TABLE holdfast.progress_deltas
    ADD COLUMN verdict_holds integer NOT NULL DEFAULT 0,
    ADD COLUMN verdict_fails integer NOT NULL DEFAULT 0,
    ADD COLUMN verdict_unverified integer NOT NULL DEFAULT 0;

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
           greatest(p.last_delta, d.last_delta), p.recorded_at,
           p.verdict_holds + d.verdict_holds, p.verdict_fails + d.verdict_fails,
           p.verdict_unverified + d.verdict_unverified
      INTO v_now
      FROM (SELECT * FROM holdfast.progress WHERE batch_id = p_batch ORDER BY seq DESC LIMIT 1) p
     CROSS JOIN LATERAL (
           SELECT coalesce(sum(x.executing), 0)::integer AS executing,
                  coalesce(sum(x.checking), 0)::integer AS checking,
                  coalesce(sum(x.waiting), 0)::integer AS waiting,
                  coalesce(sum(x.succeeded), 0)::integer AS succeeded,
                  coalesce(sum(x.failed), 0)::integer AS failed,
                  coalesce(sum(x.verdict_holds), 0)::integer AS verdict_holds,
                  coalesce(sum(x.verdict_fails), 0)::integer AS verdict_fails,
                  coalesce(sum(x.verdict_unverified), 0)::integer AS verdict_unverified,
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
                                   recheck_floor, deferred_floor, last_delta, verdict_holds,
                                   verdict_fails, verdict_unverified)
    VALUES (p.batch_id, p.seq + 1, p.next_position, p.executing, p.checking, p.waiting, p.deferred,
            p.succeeded, p.failed, p.cancelled, p.retry_floor, p.recheck_floor,
            p.deferred_floor, p.last_delta, p.verdict_holds, p.verdict_fails,
            p.verdict_unverified);
END $$;
