-- prune_progress: progress rows older than a newer one of the same ten seconds; never the newest of a batch, in chunks.
-- locks: progress rows nobody reads any more   fence: a newer committed row exists   rows: 0
DELETE FROM holdfast.progress d
 WHERE (d.batch_id, d.seq) IN (
       SELECT x.batch_id, x.seq
         FROM holdfast.batches b
         JOIN holdfast.progress x ON x.batch_id = b.id
        WHERE (b.finished_at IS NULL OR b.finished_at > clock_timestamp() - interval '1 hour')
          AND x.seq > 0
          AND x.recorded_at < clock_timestamp() - interval '20 seconds'
          AND EXISTS (SELECT FROM holdfast.progress n
                       WHERE n.batch_id = x.batch_id AND n.seq = x.seq + 1
                         AND floor(extract(epoch FROM n.recorded_at) / 10)
                             = floor(extract(epoch FROM x.recorded_at) / 10))
        LIMIT $1)
