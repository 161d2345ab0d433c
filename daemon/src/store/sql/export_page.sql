-- export_page: items with their outcomes over a range of positions; the status is null where there is no outcome.
-- locks: none   fence: none   rows: at most $3
SELECT i.position, i.key, i.acceptance_criteria::text, o.status, o.attempt, o.result::text,
       coalesce(o.result_truncated, false), coalesce(o.result_size, 0), o.error, o.stop_reason,
       o.started_at, o.finished_at
  FROM holdfast.items i
  LEFT JOIN holdfast.outcomes o ON o.batch_id = i.batch_id AND o.position = i.position
 WHERE i.batch_id = $1 AND i.position >= $2 AND i.position < $2 + $3
 ORDER BY i.position
