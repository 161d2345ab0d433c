-- drawn_numbers: what the sequences have drawn, beside what unfinished batches have folded in (L6).
-- locks: none   fence: none   rows: 1
SELECT (SELECT s.last_value FROM holdfast.delta_seq s) AS drawn,
       (SELECT coalesce(max(p.last_delta), 0)
          FROM holdfast.batches b
         CROSS JOIN LATERAL (SELECT x.last_delta FROM holdfast.progress x
                              WHERE x.batch_id = b.id ORDER BY x.seq DESC LIMIT 1) p
         WHERE b.finished_at IS NULL) AS folded,
       (SELECT max(q.seqcache) FROM pg_sequence q
         WHERE q.seqrelid IN ('holdfast.delta_seq'::regclass, 'holdfast.token_seq'::regclass)) AS cache
