-- control_batch: pause, resume or cancel.
-- locks: parent exclusive (L1)   fence: control state after the lock (L2)   rows: 1
SELECT holdfast.control_batch($1, $2, $3, $4)
