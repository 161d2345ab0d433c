-- prune_plan: what a prune would remove: batches and their items, rows of workers, of the audit log.
-- locks: none   fence: none   rows: 1
SELECT b.batches, b.items, b.oldest,
       (SELECT count(*) FROM holdfast.workers w
         WHERE w.ended_at <= t.before
           AND NOT EXISTS (SELECT FROM holdfast.leases l WHERE l.worker_id = w.id)) AS workers,
       (SELECT count(*) FROM holdfast.audit_log a WHERE a.at <= t.before) AS audit,
       (SELECT count(*) FROM holdfast.removed_batches) AS left_over
  FROM (SELECT clock_timestamp() - make_interval(secs => $1) AS before) t
 CROSS JOIN LATERAL (
       SELECT count(*) AS batches, coalesce(sum(x.item_count), 0)::bigint AS items,
              min(x.finished_at) AS oldest
         FROM holdfast.batches x
        WHERE x.finished_at <= t.before AND NOT x.leftovers
          AND ($2::text IS NULL OR x.owner = $2) AND ($3::text IS NULL OR x.queue = $3)
          AND CASE WHEN x.control = 'cancelled' THEN 'cancelled' ELSE 'finished' END = ANY ($4)) b
