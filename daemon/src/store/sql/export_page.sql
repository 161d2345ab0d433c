-- export_page: ended items of some statuses and verdict classes over a range of positions, with their outcomes; as many as fit, at least one.
-- locks: none   fence: none   rows: at most $3
--
-- $4: bytes to fit in. $6: what an item without an outcome is: cancelled in a cancelled batch, else null. $7: classes,
-- none for those without a verdict. Results are cut off by their recorded size, so that those left out are never read.
SELECT p.position, p.key, p.acceptance_criteria::text, p.status, p.attempt, p.result::text,
       p.result_truncated, p.result_size, p.error, p.stop_reason, p.started_at, p.finished_at, p.size,
       p.verdict::text
  FROM (SELECT i.position, i.key, i.acceptance_criteria, coalesce(o.status, $6) AS status, o.attempt,
               o.result, coalesce(o.result_truncated, false) AS result_truncated,
               coalesce(o.result_size, 0) AS result_size, o.error, o.stop_reason, o.started_at,
               o.finished_at, o.verdict, s.size,
               sum(s.size) OVER (ORDER BY i.position ROWS UNBOUNDED PRECEDING) AS reached
          FROM holdfast.items i
          -- Its range is said for each table, so that one look at each will do.
          LEFT JOIN holdfast.outcomes o ON o.batch_id = $1 AND o.position = i.position
               AND o.position >= $2 AND o.position < $2 + $3
         CROSS JOIN LATERAL (
               SELECT least(500 + octet_length(i.key) + coalesce(octet_length(o.error), 0)
                            + coalesce(pg_column_size(i.acceptance_criteria), 0)
                            + coalesce(pg_column_size(o.verdict), 0)
                            + coalesce(o.result_size, 0), 1 << 30)::integer AS size) s
         WHERE i.batch_id = $1 AND i.position >= $2 AND i.position < $2 + $3
           AND coalesce(o.status, $6) = ANY ($5)
           AND coalesce(o.verdict_class, 'none') = ANY ($7)) p
 WHERE p.reached - p.size < $4
 ORDER BY p.position
