-- reap: take back the expired leases of one batch, or clear what its cancel left behind.
-- locks: ticket tried (L4), parent exclusive (L1), lease rows skipping busy ones (L2)   fence: expiry re-checked on the row (F4)   rows: one per position taken back
--
-- Charged expiries count an attempt, and a crash when the worker's heartbeat stopped too. p_charge
-- false (a mass expiry) counts an interruption instead.
-- disposition: requeued | failed.
CREATE FUNCTION holdfast.reap(p_batch uuid, p_charge boolean, p_max_crashes integer,
                              p_free_interruptions integer, p_backoff_s double precision,
                              p_backoff_max_s double precision)
RETURNS TABLE (item_position integer, lease_id uuid, token bigint, disposition text,
               late_s double precision)
LANGUAGE plpgsql VOLATILE
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    b           holdfast.batches;
    p           holdfast.progress;
    v_expired   uuid[];
    v_requeued  integer;
    v_failed    integer;
BEGIN
    IF NOT holdfast.try_ticket(p_batch) THEN
        RETURN;
    END IF;
    PERFORM holdfast.lock_parent(p_batch);
    SELECT * INTO STRICT b FROM holdfast.batches x WHERE x.id = p_batch;
    IF b.control = 'cancelled' THEN
        RETURN;
    END IF;
    p := holdfast.current_progress(p_batch);
    v_expired := ARRAY(SELECT l.lease_id FROM holdfast.leases l
                        WHERE l.batch_id = p_batch AND l.expires_at < clock_timestamp()
                        ORDER BY l.lease_id FOR UPDATE SKIP LOCKED);
    RETURN QUERY
    WITH taken AS (
        DELETE FROM holdfast.leases l
         WHERE l.batch_id = p_batch AND l.lease_id = ANY (v_expired)
        RETURNING l.lease_id, l.token, l.worker_id, l.positions, l.histories, l.granted_at,
                  l.expires_at
    ), lost AS (
        SELECT t.lease_id, t.token, t.worker_id, t.granted_at, t.expires_at, u.position,
               coalesce(u.history, 0) AS before,
               NOT EXISTS (SELECT FROM holdfast.workers w
                            WHERE w.id = t.worker_id
                              AND w.heartbeat_at > clock_timestamp()
                                                 - make_interval(secs => w.lease_s)) AS died
          FROM taken t, unnest(t.positions, t.histories) u(position, history)
    ), judged AS (
        SELECT x.*,
               CASE WHEN NOT p_charge
                    THEN holdfast.history_interrupted(x.before, p_free_interruptions)
                    WHEN x.died
                    THEN holdfast.history_plus(holdfast.history_plus(x.before, 0), 1)
                    ELSE holdfast.history_plus(x.before, 0) END AS after
          FROM lost x
    ), decided AS (
        SELECT j.*, holdfast.history_count(j.after, 0) AS attempts,
               CASE WHEN holdfast.history_count(j.after, 1) >= p_max_crashes THEN 'poison'
                    WHEN holdfast.history_count(j.after, 0) >= b.max_attempts THEN 'lease_expired'
               END AS fatal
          FROM judged j
    ), failed AS (
        -- Under no lease: a straggler must not read this back as its own (F6).
        INSERT INTO holdfast.outcomes (batch_id, position, status, lease_id, token, attempt,
                worker_id, started_at, finished_at, error, stop_reason)
        SELECT p_batch, d.position, 'failed', NULL, d.token, d.attempts, d.worker_id, d.granted_at,
               clock_timestamp(),
               CASE d.fatal WHEN 'poison'
                    THEN 'poison: its worker died with it ' || holdfast.history_count(d.after, 1)
                         || ' times'
                    ELSE 'the lease expired in attempt ' || d.attempts || ' of ' || b.max_attempts
               END, d.fatal
          FROM decided d WHERE d.fatal IS NOT NULL
        RETURNING 1
    ), ended AS (
        INSERT INTO holdfast.attempts (batch_id, position, lease_id, token, attempt, worker_id,
                started_at, ended_at, ending, charged, by_holder, error, stop_reason)
        SELECT p_batch, d.position, d.lease_id, d.token, holdfast.history_count(d.before, 0) + 1,
               d.worker_id, d.granted_at, clock_timestamp(), 'expired',
               holdfast.history_count(d.before, 0) < holdfast.history_count(d.after, 0), false,
               CASE WHEN d.died THEN 'the lease expired: its worker sent no heartbeat'
                    ELSE 'the lease expired while its worker lived' END, 'lease_expired'
          FROM decided d WHERE d.fatal IS NULL
    ), requeued AS (
        -- The first expiry is forgiven at once; repeated ones back off with full jitter.
        INSERT INTO holdfast.waiting (batch_id, position, ready_at, history, last_error)
        SELECT p_batch, d.position,
               greatest(clock_timestamp() + make_interval(secs => CASE WHEN d.attempts <= 1 THEN 0
                    ELSE random() * least(p_backoff_max_s, p_backoff_s * 2 ^ (d.attempts - 2)) END),
                    p.retry_floor),
               d.after, 'lease expired'
          FROM decided d WHERE d.fatal IS NULL
        RETURNING 1
    ), counted AS (
        SELECT (SELECT count(*) FROM requeued)::integer AS requeued,
               (SELECT count(*) FROM failed)::integer AS failed
    ), saved AS (
        INSERT INTO holdfast.progress (batch_id, seq, next_position, executing, checking, waiting,
                                       deferred, succeeded, failed, cancelled, retry_floor,
                                       recheck_floor, last_delta)
        SELECT p_batch, p.seq + 1, p.next_position, p.executing - c.requeued - c.failed,
               p.checking, p.waiting + c.requeued, p.deferred, p.succeeded, p.failed + c.failed,
               p.cancelled, p.retry_floor, p.recheck_floor, p.last_delta
          FROM counted c WHERE c.requeued + c.failed > 0
    )
    SELECT d.position, d.lease_id, d.token,
           CASE WHEN d.fatal IS NULL THEN 'requeued' ELSE 'failed' END,
           extract(epoch FROM clock_timestamp() - d.expires_at)::double precision
      FROM decided d;
    PERFORM holdfast.end_if_done(holdfast.current_progress(p_batch));
END $$;

-- clear_cancelled: clear away what a cancelled batch left behind, at most p_limit rows of each kind; counts stay.
-- locks: ticket tried (L4), parent exclusive (L1)   fence: control = cancelled   rows: whether anything is left
CREATE FUNCTION holdfast.clear_cancelled(p_batch uuid, p_limit integer) RETURNS boolean
LANGUAGE plpgsql VOLATILE
SET enable_hashjoin = off SET enable_mergejoin = off AS $$
BEGIN
    IF NOT holdfast.try_ticket(p_batch) THEN
        RETURN true;
    END IF;
    PERFORM holdfast.lock_parent(p_batch);
    IF NOT EXISTS (SELECT FROM holdfast.batches b
                    WHERE b.id = p_batch AND b.control = 'cancelled' AND b.leftovers) THEN
        RETURN false;
    END IF;
    DELETE FROM holdfast.leases l
     WHERE l.batch_id = p_batch AND l.lease_id = ANY (ARRAY(
           SELECT x.lease_id FROM holdfast.leases x
            WHERE x.batch_id = p_batch ORDER BY x.lease_id LIMIT p_limit FOR UPDATE SKIP LOCKED));
    DELETE FROM holdfast.waiting w
     WHERE w.batch_id = p_batch AND w.position = ANY (ARRAY(
           SELECT x.position FROM holdfast.waiting x WHERE x.batch_id = p_batch LIMIT p_limit));
    IF EXISTS (SELECT FROM holdfast.leases l WHERE l.batch_id = p_batch)
       OR EXISTS (SELECT FROM holdfast.waiting w WHERE w.batch_id = p_batch) THEN
        RETURN true;
    END IF;
    UPDATE holdfast.batches b SET leftovers = false WHERE b.id = p_batch;
    RETURN false;
END $$;
