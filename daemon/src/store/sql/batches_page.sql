-- batches_page: batches, newest first, before an id; of one owner, queue, state or of all.
-- locks: none   fence: none   rows: at most $5
SELECT s.*
  FROM holdfast.batch_status s
 WHERE ($1::text IS NULL OR s.owner = $1) AND ($2::text IS NULL OR s.queue = $2)
   AND ($3::text IS NULL OR s.state = $3) AND ($4::uuid IS NULL OR s.id < $4)
 ORDER BY s.id DESC LIMIT $5
