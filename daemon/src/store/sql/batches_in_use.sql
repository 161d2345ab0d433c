-- batches_in_use: of these batches, those that have not ended or ended less than so long ago.
-- locks: none   fence: none   rows: up to one per batch
SELECT b.id
  FROM unnest($1::uuid[]) u(id)
  JOIN holdfast.batches b ON b.id = u.id
 WHERE b.finished_at IS NULL OR b.finished_at > clock_timestamp() - make_interval(secs => $2)
