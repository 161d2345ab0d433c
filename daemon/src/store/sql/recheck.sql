-- recheck: take lost checks of one batch under a new lease.
-- locks: ticket (L4), parent exclusive (L1)   fence: new lease_id + token (F1, F2)   rows: 1
SELECT x.*,
       nullif(current_setting('holdfast.lock_wait_s', true), '')::double precision AS lock_wait_s
  FROM holdfast.recheck($1, $2, $3, $4, $5, $6, $7, $8) x
