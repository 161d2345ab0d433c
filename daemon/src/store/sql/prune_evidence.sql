-- prune_evidence: a chunk of what was recorded of executions, of one batch that ended so long ago.
-- locks: rows that no check needs any more   fence: the batch's end in the statement's snapshot   rows: 1
--
-- A retry that follows records anew: what it adds is in no snapshot that shows the end.
WITH gone AS (
    DELETE FROM holdfast.evidence e
     WHERE e.ctid = ANY (ARRAY(
           SELECT x.ctid FROM holdfast.evidence x
             JOIN holdfast.batches b ON b.id = x.batch_id
            WHERE x.batch_id = $1
              AND b.finished_at <= clock_timestamp() - make_interval(secs => $2) LIMIT $3))
    RETURNING 1
)
SELECT count(*) AS removed FROM gone
