-- end_batch: end a batch with nothing left.
-- locks: parent exclusive (L1)   fence: counts after the lock (L2)   rows: 1
SELECT holdfast.end_batch($1)
