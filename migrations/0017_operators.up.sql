-- What operators do: take leases from their holders, ask workers, remove what is old.

-- When an operator took it from its holder (F8); for display and for who is charged.
ALTER TABLE holdfast.leases ADD COLUMN revoked_at timestamptz;

-- What an operator asks of it; it reads that with its heartbeat.
ALTER TABLE holdfast.workers
    ADD COLUMN asked text CONSTRAINT workers_asked CHECK (asked IN ('quiet', 'drain'));

-- Batches that are gone for everybody, and of which rows are still to be cleared away.
CREATE TABLE holdfast.removed_batches (
    id         uuid PRIMARY KEY,
    item_count integer NOT NULL,
    -- Positions below it are cleared.
    cleared    integer NOT NULL DEFAULT 0,
    removed_at timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- revoke: take leases of one batch from their holders, for good (F8); audited.
-- locks: parent exclusive (L1), lease rows in order (L2)   fence: lease_id + token (F3)   rows: one per lease named
--
-- p_at_once: the lease is over now and not at its expiry. Refused while its worker may live, unless
-- somebody vouches for the end of all that it runs (p_worker_is_gone).
-- answer: revoked | refused | gone (or under another token). token: the one it has now.
CREATE FUNCTION holdfast.revoke(p_batch uuid, p_leases uuid[], p_tokens bigint[], p_at_once boolean,
                                p_worker_is_gone boolean, p_actor text, p_reason text)
RETURNS TABLE (lease_id uuid, answer text, token bigint, expires_in_s double precision)
LANGUAGE plpgsql VOLATILE
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    c      holdfast.control;
    l      holdfast.leases;
    v_now  timestamptz;
    v_next bigint;
    n      integer;
BEGIN
    PERFORM holdfast.lock_parent(p_batch);
    PERFORM FROM holdfast.leases x
      WHERE x.batch_id = p_batch AND x.lease_id = ANY (p_leases)
      ORDER BY x.lease_id FOR UPDATE;
    v_now := clock_timestamp();
    FOR n IN SELECT generate_subscripts(p_leases, 1) LOOP
        lease_id := p_leases[n];
        SELECT x.* INTO l FROM holdfast.leases x
          JOIN holdfast.batches b ON b.id = x.batch_id AND b.control <> 'cancelled'
         WHERE (x.batch_id, x.lease_id, x.token) = (p_batch, p_leases[n], p_tokens[n]);
        IF NOT FOUND THEN
            answer := 'gone';
            token := NULL;
            expires_in_s := NULL;
            RETURN NEXT;
            CONTINUE;
        END IF;
        IF p_at_once AND NOT p_worker_is_gone AND NOT (
               l.expires_at < v_now
               -- Two leases of silence: a step of the clock by less than one proves nothing.
               AND NOT EXISTS (SELECT FROM holdfast.workers w
                                WHERE w.id = l.worker_id AND w.ended_at IS NULL
                                  AND w.heartbeat_at > v_now - make_interval(secs => 2 * w.lease_s)))
        THEN
            answer := 'refused';
            token := l.token;
            expires_in_s := extract(epoch FROM l.expires_at - v_now);
            RETURN NEXT;
            CONTINUE;
        END IF;
        c := holdfast.raise_epoch_if_moved();
        v_next := c.epoch * 2147483648 + (nextval('holdfast.token_seq') - c.sequence_base);
        UPDATE holdfast.leases x
           SET token = v_next, revoked_at = coalesce(x.revoked_at, v_now),
               expires_at = CASE WHEN p_at_once THEN least(x.expires_at, v_now)
                                 ELSE x.expires_at END
         WHERE (x.batch_id, x.lease_id) = (p_batch, p_leases[n])
        RETURNING extract(epoch FROM x.expires_at - v_now) INTO expires_in_s;
        INSERT INTO holdfast.audit_log (actor, verb, batch_id, before, after, detail)
        VALUES (p_actor, CASE WHEN p_at_once THEN 'release_lease' ELSE 'expire_lease' END, p_batch,
                l.token::text, v_next::text,
                json_build_object('lease', l.lease_id, 'worker', l.worker_id,
                                  'items', cardinality(l.positions), 'reason', p_reason,
                                  'worker_is_gone', p_worker_is_gone));
        answer := 'revoked';
        token := v_next;
        RETURN NEXT;
    END LOOP;
END $$;

-- remove_batch: make one batch unknown to everybody that ended so long ago; its rows are cleared away by clear_removed; audited.
-- locks: parent exclusive (L1)   fence: its end, read after the lock (L2)   rows: whether it is removed
--
-- Its submission key is free again. Whoever still works on what was cancelled with it finds it lost.
CREATE FUNCTION holdfast.remove_batch(p_batch uuid, p_age_s double precision, p_actor text)
RETURNS boolean
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    b holdfast.batches;
BEGIN
    IF holdfast.lock_parent(p_batch) IS NULL THEN
        RETURN false;
    END IF;
    DELETE FROM holdfast.batches x
     WHERE x.id = p_batch AND NOT x.leftovers
       AND x.finished_at <= clock_timestamp() - make_interval(secs => p_age_s)
    RETURNING * INTO b;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    INSERT INTO holdfast.removed_batches (id, item_count) VALUES (b.id, b.item_count);
    INSERT INTO holdfast.audit_log (actor, verb, batch_id, before, detail)
    VALUES (p_actor, 'prune', b.id,
            CASE WHEN b.control = 'cancelled' THEN 'cancelled' ELSE 'finished' END,
            json_build_object('owner', b.owner, 'queue', b.queue, 'items', b.item_count,
                              'finished_at', b.finished_at));
    RETURN true;
END $$;

-- clear_removed: clear away rows of a removed batch: those of the next p_limit positions, then of its history.
-- locks: rows that nobody reaches any more   fence: removed_batches, skipping one that another clears   rows: one answer
--
-- removed: rows. positions: those cleared. done: nothing is left of it.
CREATE FUNCTION holdfast.clear_removed(p_batch uuid, p_limit integer,
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

-- take_back: end leases of one batch that their holder cannot end: what reap and release_dead have in common.
-- locks: of the caller: parent exclusive (L1), the lease rows (L2)   fence: of the caller   rows: one per position taken back
--
-- p_cause: expired, charged an attempt, and a crash when the worker's heartbeat stopped too | excused
-- (a mass expiry), counted as an interruption | crashed, charged both | ended, an interruption.
-- An item that has taken its worker down twice runs alone: it is charged only if it had begun, for
-- its worker may have died of a neighbour that it waited for. An item under check is charged nothing:
-- it waits for another check, and after three lost ones ends with its stored result and no verdict. What
-- an operator took from its holder (F8) is an interruption, whatever became of the worker.
-- disposition: requeued | failed | rechecked | published. Ends no batch.
CREATE OR REPLACE FUNCTION holdfast.take_back(b holdfast.batches, p holdfast.progress, p_leases uuid[],
                                   p_cause text, p_max_crashes integer,
                                   p_free_interruptions integer, p_backoff_s double precision,
                                   p_backoff_max_s double precision)
RETURNS TABLE (item_position integer, lease_id uuid, token bigint, disposition text,
               late_s double precision)
LANGUAGE plpgsql VOLATILE
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    WITH taken AS (
        DELETE FROM holdfast.leases l
         WHERE l.batch_id = b.id AND l.lease_id = ANY (p_leases)
        RETURNING l.lease_id, l.token, l.worker_id, l.positions, l.histories, l.started,
                  l.granted_at, l.expires_at, l.revoked_at IS NOT NULL AS revoked
    ), lost AS (
        SELECT t.lease_id, t.token, t.worker_id, t.granted_at, t.expires_at, t.revoked, u.position,
               coalesce(u.history, 0) AS before,
               p_cause = 'crashed' OR p_cause <> 'ended'
                   AND NOT EXISTS (SELECT FROM holdfast.workers w
                                    WHERE w.id = t.worker_id
                                      AND w.heartbeat_at > clock_timestamp()
                                                         - make_interval(secs => w.lease_s)) AS died,
               holdfast.history_count(coalesce(u.history, 0), 1) >= 2
                   AND u.position <> ALL (t.started) AS waited,
               s.staged_row, s.staged_row IS NOT NULL AS staged
          FROM taken t CROSS JOIN unnest(t.positions, t.histories) u(position, history)
          LEFT JOIN LATERAL (
               SELECT x.ctid AS staged_row FROM holdfast.staged_outcomes x
                WHERE x.batch_id = b.id AND x.position = u.position OFFSET 0) s ON true
    ), judged AS (
        SELECT x.*,
               CASE WHEN x.staged
                    THEN holdfast.history_plus(x.before, 4)
                    WHEN p_cause IN ('excused', 'ended') OR x.waited OR x.revoked
                    THEN holdfast.history_interrupted(x.before, p_free_interruptions)
                    WHEN x.died
                    THEN holdfast.history_plus(holdfast.history_plus(x.before, 0), 1)
                    ELSE holdfast.history_plus(x.before, 0) END AS after
          FROM lost x
    ), decided AS MATERIALIZED (
        SELECT j.*, holdfast.history_count(j.before, 0) AS spent,
               holdfast.history_count(j.after, 0) AS attempts,
               CASE WHEN j.staged
                    THEN CASE WHEN holdfast.history_count(j.after, 4) >= 3 THEN 'published'
                              ELSE 'rechecked' END
                    WHEN holdfast.history_count(j.after, 1) >= p_max_crashes
                      OR holdfast.history_count(j.after, 0) >= b.max_attempts THEN 'failed'
                    ELSE 'requeued' END AS disposition,
               CASE WHEN holdfast.history_count(j.after, 1) >= p_max_crashes THEN 'poison'
                    WHEN j.revoked THEN 'revoked'
                    WHEN p_cause IN ('crashed', 'ended') THEN 'worker_died'
                    ELSE 'lease_expired' END AS reason
          FROM judged j
    ), failed AS (
        -- Under no lease: a straggler must not read this back as its own (F6).
        INSERT INTO holdfast.outcomes (batch_id, position, status, lease_id, token, attempt,
                worker_id, started_at, finished_at, error, stop_reason)
        SELECT b.id, d.position, 'failed', NULL, d.token, d.attempts, d.worker_id, d.granted_at,
               clock_timestamp(),
               CASE d.reason
                    WHEN 'poison' THEN 'poison: its worker died with it '
                         || holdfast.history_count(d.after, 1) || ' times'
                    WHEN 'revoked' THEN 'an operator took it from its worker in attempt '
                         || d.attempts || ' of ' || b.max_attempts
                    WHEN 'worker_died' THEN 'its worker died in attempt '
                         || d.attempts || ' of ' || b.max_attempts
                    ELSE 'the lease expired in attempt ' || d.attempts || ' of ' || b.max_attempts
               END, d.reason
          FROM decided d WHERE d.disposition = 'failed'
        RETURNING 1
    ), ended AS (
        INSERT INTO holdfast.attempts (batch_id, position, lease_id, token, attempt, worker_id,
                started_at, ended_at, ending, charged, by_holder, error, stop_reason)
        SELECT b.id, d.position, d.lease_id, d.token, d.spent + 1, d.worker_id, d.granted_at,
               clock_timestamp(),
               CASE WHEN p_cause = 'ended' OR d.revoked THEN 'interrupted' ELSE 'expired' END,
               d.spent < d.attempts, false,
               CASE WHEN d.revoked THEN 'an operator took it from its worker'
                    WHEN p_cause = 'crashed' THEN 'its worker died'
                    WHEN p_cause = 'ended' THEN 'its worker was told to end at once'
                    WHEN d.died THEN 'the lease expired: its worker sent no heartbeat'
                    ELSE 'the lease expired while its worker lived' END, d.reason
          FROM decided d WHERE d.disposition = 'requeued'
    ), requeued AS (
        -- The first is forgiven at once; repeated ones back off with full jitter.
        INSERT INTO holdfast.waiting (batch_id, position, ready_at, history, last_error, recheck)
        SELECT b.id, d.position,
               CASE WHEN d.staged THEN greatest(clock_timestamp(), p.recheck_floor)
                    ELSE greatest(clock_timestamp() + make_interval(secs =>
                             CASE WHEN d.attempts <= 1 THEN 0
                                  ELSE random() * least(p_backoff_max_s,
                                                        p_backoff_s * 2 ^ (d.attempts - 2)) END),
                         p.retry_floor) END,
               d.after,
               CASE WHEN d.staged THEN NULL
                    WHEN d.reason = 'revoked' THEN 'an operator took it from its worker'
                    WHEN d.reason = 'worker_died' THEN 'its worker died'
                    ELSE 'lease expired' END, d.staged
          FROM decided d WHERE d.disposition IN ('requeued', 'rechecked')
        RETURNING recheck
    ), disowned AS (
        UPDATE holdfast.staged_outcomes s SET lease_id = NULL
         WHERE s.ctid = ANY (ARRAY(SELECT d.staged_row FROM decided d
                                    WHERE d.disposition = 'rechecked'))
    ), unchecked AS (
        DELETE FROM holdfast.staged_outcomes s
         WHERE s.ctid = ANY (ARRAY(SELECT d.staged_row FROM decided d
                                    WHERE d.disposition = 'published'))
        RETURNING s.*
    ), published AS (
        INSERT INTO holdfast.outcomes (batch_id, position, status, lease_id, token, attempt,
                worker_id, started_at, finished_at, result, result_truncated, result_size,
                stop_reason, exit_status, signal, model, usage, staged_lease_id)
        SELECT b.id, u.position, 'succeeded', NULL, d.token, u.attempt, u.worker_id,
               u.started_at, u.ended_at, u.result, u.result_truncated, u.result_size,
               u.stop_reason, u.exit_status, u.signal, u.model, u.usage, u.staged_lease_id
          FROM unchecked u JOIN decided d ON d.position = u.position
        RETURNING 1
    ), counted AS (
        SELECT (SELECT count(*) FROM requeued r WHERE NOT r.recheck)::integer AS requeued,
               (SELECT count(*) FROM failed)::integer AS failed,
               (SELECT count(*) FROM published)::integer AS published
    ), saved AS (
        INSERT INTO holdfast.progress (batch_id, seq, next_position, executing, checking, waiting,
                                       deferred, succeeded, failed, cancelled, retry_floor,
                                       recheck_floor, deferred_floor, last_delta, verdict_holds,
                                       verdict_fails, verdict_unverified)
        SELECT b.id, p.seq + 1, p.next_position, p.executing - c.requeued - c.failed,
               p.checking - c.published, p.waiting + c.requeued, p.deferred,
               p.succeeded + c.published, p.failed + c.failed, p.cancelled, p.retry_floor,
               p.recheck_floor, p.deferred_floor, p.last_delta, p.verdict_holds, p.verdict_fails,
               p.verdict_unverified
          FROM counted c WHERE c.requeued + c.failed + c.published > 0
    )
    SELECT d.position, d.lease_id, d.token, d.disposition,
           extract(epoch FROM clock_timestamp() - d.expires_at)::double precision
      FROM decided d;
END $$;
