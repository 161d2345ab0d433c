-- items_at: the items at some positions of a batch, each with its derived status; the one statement of I1 in SQL.
-- locks: none   fence: none   rows: one per position that exists
CREATE OR REPLACE FUNCTION holdfast.items_at(p_batch uuid, p_positions integer[])
RETURNS TABLE (item_position integer, key text, status text, attempt integer, ready_at timestamptz,
               worker_id uuid, lease_id uuid, token bigint, started_at timestamptz,
               finished_at timestamptz, error text, stop_reason text)
LANGUAGE sql STABLE
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off
SET enable_mergejoin = off SET jit = off AS $$
    WITH batch AS (
        SELECT b.control, b.max_live, p.next_position,
               p.executing + p.checking + p.waiting - p.deferred AS live
          FROM holdfast.batches b, holdfast.current_progress(b.id) p
         WHERE b.id = p_batch
    ), held AS MATERIALIZED (
        SELECT u.position, coalesce(u.history, 0) AS history, l.lease_id, l.token, l.worker_id,
               l.granted_at, u.position = ANY (l.started) AS started
          FROM batch b, holdfast.leases l, unnest(l.positions, l.histories) u(position, history)
         WHERE b.control <> 'cancelled' AND l.batch_id = p_batch
           AND u.position = ANY (p_positions)
    )
    SELECT i.position, i.key,
           CASE WHEN o.position IS NOT NULL THEN o.status
                WHEN b.control = 'cancelled' THEN 'cancelled'
                WHEN s.position IS NOT NULL THEN 'checking'
                WHEN h.started THEN 'running'
                WHEN h.position IS NOT NULL THEN 'leased'
                WHEN w.position IS NOT NULL THEN 'queued'
                WHEN i.position - b.next_position < b.max_live - b.live THEN 'queued'
                ELSE 'pending' END,
           CASE WHEN o.position IS NOT NULL THEN o.attempt
                WHEN b.control = 'cancelled' THEN NULL
                WHEN s.position IS NOT NULL THEN s.attempt
                WHEN h.position IS NOT NULL THEN holdfast.history_count(h.history, 0) + 1
                WHEN w.position IS NOT NULL THEN holdfast.history_count(w.history, 0) + 1
                ELSE 1 END,
           CASE WHEN o.position IS NULL AND b.control <> 'cancelled'
                THEN coalesce(w.ready_at, i.not_before) END,
           coalesce(o.worker_id, h.worker_id), coalesce(o.lease_id, h.lease_id),
           coalesce(o.token, h.token), coalesce(o.started_at, s.started_at, h.granted_at),
           o.finished_at,
           CASE WHEN o.position IS NOT NULL THEN o.error ELSE w.last_error END, o.stop_reason
      FROM batch b
     CROSS JOIN unnest(p_positions) u(position)
     -- OFFSET 0: one look by key for each, whatever the planner believes of the tables.
     CROSS JOIN LATERAL (SELECT * FROM holdfast.items x
                          WHERE x.batch_id = p_batch AND x.position = u.position OFFSET 0) i
      LEFT JOIN LATERAL (SELECT * FROM holdfast.outcomes x
                          WHERE x.batch_id = p_batch AND x.position = u.position OFFSET 0) o ON true
      LEFT JOIN LATERAL (SELECT * FROM holdfast.waiting x
                          WHERE x.batch_id = p_batch AND x.position = u.position
                            AND b.control <> 'cancelled' OFFSET 0) w ON true
      LEFT JOIN LATERAL (SELECT * FROM holdfast.staged_outcomes x
                          WHERE x.batch_id = p_batch AND x.position = u.position
                            AND b.control <> 'cancelled' OFFSET 0) s ON true
      LEFT JOIN held h ON h.position = u.position
     ORDER BY i.position
$$;

-- positions_with_status: where to look for items of one status, from a position on; never a count, never an anti-join over history.
-- locks: none   fence: none   rows: at most p_limit positions, ascending
CREATE OR REPLACE FUNCTION holdfast.positions_with_status(p_batch uuid, p_status text, p_from integer,
                                                          p_limit integer) RETURNS SETOF integer
LANGUAGE plpgsql STABLE
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off
SET enable_mergejoin = off SET jit = off AS $$
DECLARE
    b      holdfast.batches;
    p      holdfast.progress;
    v_edge integer;
BEGIN
    SELECT * INTO b FROM holdfast.batches x WHERE x.id = p_batch;
    p := holdfast.current_progress(p_batch);
    IF p_status IN ('succeeded', 'failed') THEN
        IF p_status = 'failed' THEN
            RETURN QUERY SELECT o.position FROM holdfast.outcomes o
                          WHERE o.batch_id = p_batch AND o.status <> 'succeeded'
                            AND o.position >= p_from ORDER BY o.position LIMIT p_limit;
        ELSE
            RETURN QUERY SELECT o.position FROM holdfast.outcomes o
                          WHERE o.batch_id = p_batch AND o.status = 'succeeded'
                            AND o.position >= p_from ORDER BY o.position LIMIT p_limit;
        END IF;
        RETURN;
    END IF;
    IF b.control = 'cancelled' THEN
        IF p_status = 'cancelled' THEN
            RETURN QUERY SELECT i.position FROM holdfast.items i
                          WHERE i.batch_id = p_batch AND i.position >= p_from
                            AND NOT EXISTS (SELECT FROM holdfast.outcomes o
                                             WHERE o.batch_id = p_batch AND o.position = i.position
                                            OFFSET 0)
                          ORDER BY i.position LIMIT p_limit;
        END IF;
        RETURN;
    END IF;
    v_edge := p.next_position + least(b.item_count - p.next_position,
              greatest(0, b.max_live - (p.executing + p.checking + p.waiting - p.deferred)));
    IF p_status = 'checking' THEN
        RETURN QUERY SELECT s.position FROM holdfast.staged_outcomes s
                      WHERE s.batch_id = p_batch AND s.position >= p_from
                      ORDER BY s.position LIMIT p_limit;
    ELSIF p_status IN ('leased', 'running') THEN
        RETURN QUERY SELECT u.position
                       FROM holdfast.leases l, unnest(l.positions) u(position)
                      WHERE l.batch_id = p_batch AND u.position >= p_from
                        AND (u.position = ANY (l.started)) = (p_status = 'running')
                        AND NOT EXISTS (SELECT FROM holdfast.staged_outcomes s
                                         WHERE s.batch_id = p_batch AND s.position = u.position
                                        OFFSET 0)
                      ORDER BY u.position LIMIT p_limit;
    ELSIF p_status = 'queued' THEN
        RETURN QUERY SELECT q.position FROM (
                           (SELECT w.position FROM holdfast.waiting w
                             WHERE w.batch_id = p_batch AND w.position >= p_from
                               -- Spelled so that no other index looks better than the key.
                               AND w.recheck::integer = 0
                             ORDER BY w.position LIMIT p_limit)
                           UNION ALL
                           (SELECT generate_series(greatest(p_from, p.next_position), v_edge - 1)
                             LIMIT p_limit)) q
                      ORDER BY q.position LIMIT p_limit;
    ELSIF p_status = 'pending' THEN
        RETURN QUERY SELECT generate_series(greatest(p_from, v_edge), b.item_count - 1)
                      LIMIT p_limit;
    END IF;
END $$;

-- positions_with_verdict: where to look for items whose verdict is of one class, from a position on.
-- locks: none   fence: none   rows: at most p_limit positions, ascending
--
-- p_class null: items without a verdict, of which p_succeeded asks for those that succeeded.
CREATE FUNCTION holdfast.positions_with_verdict(p_batch uuid, p_class text, p_succeeded boolean,
                                                p_from integer, p_limit integer)
RETURNS SETOF integer
LANGUAGE plpgsql STABLE
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off
SET enable_mergejoin = off SET jit = off AS $$
BEGIN
    IF p_class IS NOT NULL THEN
        RETURN QUERY SELECT o.position FROM holdfast.outcomes o
                      WHERE o.batch_id = p_batch AND o.verdict_class = p_class
                        AND o.position >= p_from ORDER BY o.position LIMIT p_limit;
    ELSIF p_succeeded THEN
        RETURN QUERY SELECT o.position FROM holdfast.outcomes o
                      WHERE o.batch_id = p_batch AND o.status = 'succeeded'
                        AND o.verdict_class IS NULL AND o.position >= p_from
                      ORDER BY o.position LIMIT p_limit;
    ELSE
        RETURN QUERY SELECT i.position FROM holdfast.items i
                      WHERE i.batch_id = p_batch AND i.position >= p_from
                        AND NOT EXISTS (SELECT FROM holdfast.outcomes o
                                         WHERE o.batch_id = p_batch AND o.position = i.position
                                           AND o.verdict_class IS NOT NULL OFFSET 0)
                      ORDER BY i.position LIMIT p_limit;
    END IF;
END $$;

-- items_shown: items_at with the criteria and the verdict of each.
-- locks: none   fence: none   rows: one per position that exists
CREATE FUNCTION holdfast.items_shown(p_batch uuid, p_positions integer[])
RETURNS TABLE (item_position integer, key text, status text, attempt integer, ready_at timestamptz,
               worker_id uuid, lease_id uuid, token bigint, started_at timestamptz,
               finished_at timestamptz, error text, stop_reason text, acceptance_criteria json,
               verdict json)
LANGUAGE sql STABLE
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off
SET enable_mergejoin = off SET jit = off AS $$
    SELECT x.*, i.acceptance_criteria, o.verdict
      FROM holdfast.items_at(p_batch, p_positions) x
     CROSS JOIN LATERAL (SELECT y.acceptance_criteria FROM holdfast.items y
                          WHERE y.batch_id = p_batch AND y.position = x.item_position OFFSET 0) i
      LEFT JOIN LATERAL (SELECT y.verdict FROM holdfast.outcomes y
                          WHERE y.batch_id = p_batch AND y.position = x.item_position
                         OFFSET 0) o ON true
     ORDER BY x.item_position
$$;

-- batch_status: every batch with its counts and its derived state.
CREATE OR REPLACE VIEW holdfast.batch_status AS
SELECT b.id, b.owner, b.queue, b.title, b.thread, b.submission_key, b.item_count, b.priority,
       b.max_running, b.max_live, b.max_attempts, b.not_before, b.control, b.created_at,
       b.finished_at,
       CASE WHEN b.control = 'cancelled' THEN 'cancelled'
            WHEN b.finished_at IS NOT NULL THEN 'finished'
            WHEN b.control = 'paused' THEN 'paused'
            WHEN p.executing + p.checking > 0 THEN 'running'
            ELSE 'queued' END AS state,
       b.item_count - p.next_position AS fresh, p.waiting, p.deferred, p.executing, p.checking,
       p.succeeded, p.failed, p.cancelled, p.recorded_at, b.max_checking, p.verdict_holds,
       p.verdict_fails, p.verdict_unverified
  FROM holdfast.batches b, holdfast.current_progress(b.id) p;
