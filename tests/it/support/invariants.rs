//! What holds for a batch at every moment, checked in one snapshot.

use holdfast::model::BatchId;
use tokio_postgres::Client;

/// Everything that is wrong with a batch, one row each: I1, counts, floors, tokens, ends.
///
/// One statement, so one snapshot: right beside running claims and hand-ins too.
const VIOLATIONS: &str = r"
WITH b AS (
    SELECT * FROM holdfast.batches WHERE id = $1
), p AS (
    SELECT c.* FROM b, holdfast.current_progress(b.id) c
), held AS (
    SELECT l.lease_id, l.token, u.position
      FROM holdfast.leases l, unnest(l.positions) u(position) WHERE l.batch_id = $1
), waiting AS (
    SELECT * FROM holdfast.waiting WHERE batch_id = $1
), staged AS (
    SELECT * FROM holdfast.staged_outcomes WHERE batch_id = $1
), outcomes AS (
    SELECT * FROM holdfast.outcomes WHERE batch_id = $1
), places AS (
    SELECT g AS position, 'fresh' AS place
      FROM p, b, generate_series(p.next_position, b.item_count - 1) g
     UNION ALL SELECT position, 'held' FROM held
     UNION ALL SELECT position, 'waiting' FROM waiting
     UNION ALL SELECT position, 'outcome' FROM outcomes
), located AS (
    SELECT g AS position, count(x.position) AS places, string_agg(x.place, '+') AS list
      FROM b, generate_series(0, b.item_count - 1) g
      LEFT JOIN places x ON x.position = g GROUP BY g
), counted AS (
    SELECT (SELECT count(*) FROM held
             WHERE position NOT IN (SELECT position FROM staged)) AS executing,
           (SELECT count(*) FROM staged) AS checking,
           (SELECT count(*) FROM waiting WHERE NOT recheck) AS waiting,
           (SELECT count(*) FROM waiting WHERE deferred) AS deferred,
           (SELECT count(*) FROM outcomes WHERE status = 'succeeded') AS succeeded,
           (SELECT count(*) FROM outcomes WHERE status = 'failed') AS failed,
           (SELECT count(*) FROM outcomes WHERE verdict_class = 'holds') AS holds,
           (SELECT count(*) FROM outcomes WHERE verdict_class = 'fails') AS fails,
           (SELECT count(*) FROM outcomes WHERE verdict_class = 'unverified') AS unverified
), tokens AS (
    -- Written one after the other, each in a transaction of its own, so their order is xmin's.
    SELECT a.position, a.token, a.xmin::text::bigint AS written
      FROM holdfast.attempts a WHERE a.batch_id = $1
     UNION ALL SELECT o.position, o.token, o.xmin::text::bigint
      FROM holdfast.outcomes o WHERE o.batch_id = $1
     UNION ALL SELECT h.position, h.token, 9223372036854775807 FROM held h
), risen AS (
    SELECT t.*, lag(t.token) OVER (PARTITION BY t.position ORDER BY t.written) AS before
      FROM tokens t
)
SELECT 'no progress row' WHERE NOT EXISTS (SELECT FROM p WHERE seq IS NOT NULL)
UNION ALL
SELECT format('position %s is in %s places: %s', l.position, l.places, l.list)
  FROM located l, b WHERE b.control <> 'cancelled' AND l.places <> 1
UNION ALL
SELECT format('position %s of a cancelled batch is in: %s', l.position, l.list)
  FROM located l, b WHERE b.control = 'cancelled' AND l.places > 1
UNION ALL
SELECT format('position %s is outside the batch: %s', x.position, x.place)
  FROM places x, b WHERE x.position < 0 OR x.position >= b.item_count
UNION ALL
SELECT format('counts %s, rows %s', row(p.executing, p.checking, p.waiting, p.deferred, p.succeeded,
                                        p.failed, p.cancelled),
              row(c.executing, c.checking, c.waiting, c.deferred, c.succeeded, c.failed, 0))
  FROM p, b, counted c
 WHERE b.control <> 'cancelled'
   AND (p.executing, p.checking, p.waiting, p.deferred, p.succeeded, p.failed, p.cancelled)
       <> (c.executing, c.checking, c.waiting, c.deferred, c.succeeded, c.failed, 0)
UNION ALL
SELECT format('verdict counts %s, rows %s',
              row(p.verdict_holds, p.verdict_fails, p.verdict_unverified),
              row(c.holds, c.fails, c.unverified))
  FROM p, counted c
 WHERE (p.verdict_holds, p.verdict_fails, p.verdict_unverified)
       <> (c.holds, c.fails, c.unverified)
UNION ALL
SELECT format('position %s is staged under %s, held under %s, waiting for a recheck: %s',
              s.position, s.lease_id, h.lease_id, coalesce(w.recheck, false))
  FROM b, staged s
  LEFT JOIN held h ON h.position = s.position
  LEFT JOIN waiting w ON w.position = s.position
 WHERE b.control <> 'cancelled'
   AND (s.lease_id IS DISTINCT FROM h.lease_id
        OR (s.lease_id IS NULL) <> coalesce(w.recheck, false))
UNION ALL
SELECT format('position %s waits for a recheck of nothing', w.position)
  FROM b, waiting w
 WHERE b.control <> 'cancelled' AND w.recheck
   AND (w.deferred OR w.position NOT IN (SELECT position FROM staged))
UNION ALL
SELECT format('position %s has the verdict class %s', o.position, o.verdict_class)
  FROM outcomes o
 WHERE (o.verdict IS NULL) <> (o.verdict_class IS NULL)
    OR (o.verdict IS NOT NULL AND (o.status <> 'succeeded' OR o.staged_lease_id IS NULL))
UNION ALL
SELECT format('cancelled with counts %s, rows %s', row(p.*), row(c.*))
  FROM p, b, counted c
 WHERE b.control = 'cancelled'
   AND (p.next_position, p.executing, p.checking, p.waiting, p.deferred, p.succeeded, p.failed,
        p.cancelled)
       <> (b.item_count, 0, 0, 0, 0, c.succeeded, c.failed,
           b.item_count - c.succeeded - c.failed)
UNION ALL
SELECT format('%s items run, the cap is %s', p.executing, b.max_running)
  FROM p, b WHERE p.executing > b.max_running
UNION ALL
SELECT format('position %s waits below its floor', w.position)
  FROM waiting w, p
 WHERE w.ready_at < CASE WHEN w.recheck THEN p.recheck_floor
                         WHEN w.deferred THEN p.deferred_floor ELSE p.retry_floor END
UNION ALL
SELECT format('lease %s: positions %s, histories %s', l.lease_id, l.positions, l.histories)
  FROM holdfast.leases l
 WHERE l.batch_id = $1 AND cardinality(l.positions) <> cardinality(l.histories)
UNION ALL
SELECT format('position %s: token %s after %s', r.position, r.token, r.before)
  FROM risen r WHERE r.token <= r.before
UNION ALL
SELECT 'ended with something left'
  FROM p, b WHERE b.finished_at IS NOT NULL AND b.control <> 'cancelled'
   AND (p.next_position < b.item_count OR p.executing + p.checking + p.waiting > 0)
UNION ALL
SELECT 'a delta was folded before it was drawn'
  FROM p WHERE p.last_delta > (SELECT last_value FROM holdfast.delta_seq)
";

/// What of I1, counts, floors and tokens does not hold.
pub(crate) async fn violations_of(sql: &Client, batch: BatchId) -> Vec<String> {
    let rows = sql.query(VIOLATIONS, &[&batch.uuid()]).await.unwrap();
    rows.iter().map(|row| row.get(0)).collect()
}

/// Panics unless I1 holds, the counts equal the rows, floors and tokens are right.
pub(crate) async fn assert_invariants(sql: &Client, batch: BatchId) {
    let violations = violations_of(sql, batch).await;
    assert!(violations.is_empty(), "{}", violations.join("\n"));
}

/// Panics when the server had to break a deadlock in this database.
pub(crate) async fn assert_no_deadlock(sql: &Client) {
    let deadlocks = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()";
    let row = sql.query_one(deadlocks, &[]).await.unwrap();
    assert_eq!(row.get::<_, i64>(0), 0, "deadlocks");
}
