-- renew: one heartbeat of one worker: its row, and the expiry of every lease it vouches for; never waits.
-- locks: lease rows only, in order, skipping busy ones   fence: lease_id + token (F3)   rows: one per lease, at least one
--
-- answer: renewed | busy (a hand-in is at it) | cancelled | gone. held: positions left in the row.
-- Every row carries the database's clock, server start and timeline (F4).
CREATE FUNCTION holdfast.renew(p_worker uuid, p_lease_s double precision, p_state text,
                               p_executing integer, p_batch uuid[], p_lease uuid[],
                               p_token bigint[], p_started text[])
RETURNS TABLE (lease_id uuid, answer text, held integer, database_now timestamptz,
               server_started timestamptz, timeline integer, known boolean)
LANGUAGE plpgsql VOLATILE
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    v_known boolean;
BEGIN
    PERFORM holdfast.assert_protocol();
    UPDATE holdfast.workers w
       SET heartbeat_at = clock_timestamp(), state = p_state, executing = p_executing
     WHERE w.id = p_worker AND w.ended_at IS NULL;
    v_known := FOUND;
    RETURN QUERY
    WITH vouched AS (
        SELECT * FROM unnest(p_batch, p_lease, p_token, p_started)
            h(batch_id, lease_id, token, started)
    ), mine AS (
        SELECT l.batch_id, l.lease_id, h.started::integer[] AS started
          FROM vouched h
          JOIN holdfast.leases l ON (l.batch_id, l.lease_id, l.token)
                                  = (h.batch_id, h.lease_id, h.token)
          JOIN holdfast.batches b ON b.id = h.batch_id AND b.control <> 'cancelled'
         ORDER BY l.batch_id, l.lease_id FOR NO KEY UPDATE OF l SKIP LOCKED
    ), renewed AS (
        UPDATE holdfast.leases l
           SET expires_at = clock_timestamp() + make_interval(secs => p_lease_s),
               started = m.started
          FROM mine m WHERE (l.batch_id, l.lease_id) = (m.batch_id, m.lease_id)
        RETURNING l.lease_id, cardinality(l.positions) AS held
    ), answered AS (
        SELECT h.lease_id,
               CASE WHEN r.lease_id IS NOT NULL THEN 'renewed'
                    WHEN b.control = 'cancelled' THEN 'cancelled'
                    WHEN l.lease_id IS NOT NULL THEN 'busy'
                    ELSE 'gone' END AS answer,
               coalesce(r.held, cardinality(l.positions), 0) AS held
          FROM vouched h
          LEFT JOIN renewed r ON r.lease_id = h.lease_id
          LEFT JOIN holdfast.batches b ON b.id = h.batch_id
          LEFT JOIN holdfast.leases l ON (l.batch_id, l.lease_id, l.token)
                                       = (h.batch_id, h.lease_id, h.token)
    )
    SELECT a.lease_id, a.answer, a.held, t.now, pg_postmaster_start_time(), t.line, v_known
      FROM (SELECT clock_timestamp() AS now,
                   ('x' || substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8))::bit(32)::integer
                       AS line) t
      LEFT JOIN answered a ON true;
END $$;
