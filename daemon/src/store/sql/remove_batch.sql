-- remove_batch: make a batch unknown to everybody that ended so long ago; audited.
-- locks: parent exclusive (L1)   fence: its end, read after the lock (L2)   rows: 1
SELECT holdfast.remove_batch($1, $2, $3) AS removed
