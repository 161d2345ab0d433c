-- claim: take items of one batch under a new lease.
-- locks: ticket (L4), parent exclusive (L1)   fence: new lease_id + token (F1, F2)   rows: 1
SELECT c.*, w.again_s, w.fresh_s,
       nullif(current_setting('holdfast.lock_wait_s', true), '')::double precision AS lock_wait_s
  FROM holdfast.claim($1, $2, $3, $4, $5, $6) c CROSS JOIN LATERAL holdfast.waited($1, c.positions) w
