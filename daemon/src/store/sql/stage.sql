-- stage: store results of one batch before their acceptance checks.
-- locks: parent shared (L1), lease rows (L2)   fence: lease_id + token + position (F3)   rows: one per item
SELECT x.*,
       nullif(current_setting('holdfast.lock_wait_s', true), '')::double precision AS lock_wait_s
  FROM holdfast.stage($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18,
                      $19) x
