-- take_sweep: the turn to do the full sweep, if the last one is old enough.
-- locks: the one row, skipping   fence: taken_at   rows: 1 when it is our turn
UPDATE holdfast.sweep s SET taken_at = clock_timestamp()
 WHERE s.singleton = (SELECT x.singleton FROM holdfast.sweep x
                       WHERE x.taken_at < clock_timestamp() - make_interval(secs => $1)
                         FOR UPDATE SKIP LOCKED)
RETURNING true
