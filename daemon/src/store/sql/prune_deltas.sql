-- prune_deltas: deltas that a committed progress row has folded in, of batches that are at work, in chunks.
-- locks: delta rows nobody reads any more   fence: id <= last_delta of a committed row (L6)   rows: 0
DELETE FROM holdfast.progress_deltas d
 WHERE (d.batch_id, d.id) IN (
       SELECT x.batch_id, x.id
         FROM holdfast.batches b
        CROSS JOIN LATERAL (SELECT p.last_delta FROM holdfast.progress p
                             WHERE p.batch_id = b.id ORDER BY p.seq DESC LIMIT 1) p
         JOIN holdfast.progress_deltas x ON x.batch_id = b.id AND x.id <= p.last_delta
        WHERE b.finished_at IS NULL OR b.finished_at > clock_timestamp() - interval '1 hour'
        LIMIT $1)
