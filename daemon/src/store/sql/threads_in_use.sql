-- threads_in_use: of these threads, those with a batch that has not ended or ended less than so long ago.
-- locks: none   fence: none   rows: up to one per thread
SELECT u.owner, u.thread
  FROM unnest($1::text[], $2::text[]) u(owner, thread)
 WHERE EXISTS (
       SELECT FROM holdfast.batches b
        WHERE b.owner = u.owner AND b.thread = u.thread
          AND (b.finished_at IS NULL
               OR b.finished_at > clock_timestamp() - make_interval(secs => $3)))
