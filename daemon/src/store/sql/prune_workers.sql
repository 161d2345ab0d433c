-- prune_workers: a chunk of workers that ended so long ago and hold nothing.
-- locks: their rows, skipping busy ones   fence: ended_at on the row   rows: 1
WITH gone AS (
    DELETE FROM holdfast.workers w
     WHERE w.id IN (SELECT x.id FROM holdfast.workers x
                     WHERE x.ended_at <= clock_timestamp() - make_interval(secs => $1)
                       AND NOT EXISTS (SELECT FROM holdfast.leases l WHERE l.worker_id = x.id)
                     LIMIT $2 FOR UPDATE SKIP LOCKED)
    RETURNING 1
)
SELECT count(*) AS removed FROM gone
