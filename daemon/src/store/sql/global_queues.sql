-- global_queues: what every queue has to do, and what is held of it; never a count of items.
-- locks: none   fence: none   rows: one per queue with a batch that has not ended
--
-- Leases and results under check are no more than workers hold.
WITH held AS MATERIALIZED (
    SELECT l.batch_id,
           sum(cardinality(l.positions)) FILTER (WHERE l.expires_at >= clock_timestamp()) AS active,
           sum(cardinality(l.positions)) FILTER (WHERE l.expires_at < clock_timestamp()) AS overdue,
           sum((SELECT count(*) FROM unnest(l.started) s(position)
                 WHERE s.position = ANY (l.positions))) AS running
      FROM holdfast.leases l GROUP BY l.batch_id
), staged AS MATERIALIZED (
    SELECT s.batch_id, min(s.staged_at) AS since FROM holdfast.staged_outcomes s GROUP BY s.batch_id
)
SELECT b.queue, sum(l.pending)::bigint AS pending, sum(l.queued)::bigint AS queued,
       sum(l.executing)::bigint AS executing, coalesce(sum(h.running), 0)::bigint AS running,
       sum(l.checking)::bigint AS checking, coalesce(sum(h.active), 0)::bigint AS active,
       coalesce(sum(h.overdue), 0)::bigint AS overdue,
       count(*) FILTER (WHERE b.control = 'open') AS open,
       count(*) FILTER (WHERE b.control = 'paused') AS paused,
       min(l.ready_since) AS ready_since, min(s.since) AS checking_since
  FROM holdfast.batches b
 CROSS JOIN LATERAL holdfast.batch_load(b.id) l
  LEFT JOIN held h ON h.batch_id = b.id
  LEFT JOIN staged s ON s.batch_id = b.id
 WHERE b.finished_at IS NULL
 GROUP BY b.queue
