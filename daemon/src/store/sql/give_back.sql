-- give_back: return a whole lease whose claim was never answered.
-- locks: parent shared (L1), the lease row (L2)   fence: lease_id (F3)   rows: 1
SELECT holdfast.give_back($1, $2, $3)
