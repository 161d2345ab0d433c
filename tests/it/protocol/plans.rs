//! How the tables are read: by key, also when they were empty when they were analysed, and the same
//! amount however many dead rows a snapshot keeps.

use std::collections::BTreeMap;
use std::time::Duration;

use holdfast::model::{BatchId, Conclusion, Evidence, Finding, History, ItemStatus, Position};
use holdfast::store::{ClaimRequest, Concluding, ControlVerb, StageAnswer, Vouched};

use crate::support::fixture::{
    BatchSpec, Bed, TTL, again, everything, failed, granted, publish, succeeded,
};
use crate::support::invariants::assert_invariants;

const ITEMS: i32 = 20_000;

/// What sessions that have ended have read of each table: sequential scans, and index entries.
async fn reads(bed: &Bed) -> BTreeMap<String, (i64, i64)> {
    let rows = "SELECT t.relname::text, t.seq_scan,
                       (SELECT sum(i.idx_tup_read)::bigint FROM pg_stat_user_indexes i
                         WHERE i.relid = t.relid)
                  FROM pg_stat_user_tables t
                 WHERE t.schemaname = 'holdfast'
                   AND t.relname IN ('leases', 'waiting', 'items', 'outcomes', 'attempts',
                                     'progress', 'progress_deltas', 'staged_outcomes', 'evidence')";
    let rows = bed.sql.query(rows, &[]).await.unwrap();
    rows.iter().map(|row| (row.get(0), (row.get(1), row.get(2)))).collect()
}

/// Ends all sessions but the one that keeps a snapshot: the counters of a session arrive with its
/// end.
async fn end_sessions(bed: &mut Bed) {
    bed.store = bed.store_that_waits(TTL);
    bed.sql = bed.db.client().await;
    let open = "SELECT count(*) FROM pg_stat_activity
                 WHERE datname = current_database() AND backend_type = 'client backend'
                   AND pid <> pg_backend_pid() AND application_name <> 'keeper'";
    let closed = async {
        while bed.sql.query_one(open, &[]).await.unwrap().get::<_, i64>(0) > 0 {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), closed).await.expect("the sessions end");
    // Version 14 has its counters from a process of its own, which writes them down twice a second.
    let version = "SELECT current_setting('server_version_num')::integer";
    if bed.sql.query_one(version, &[]).await.unwrap().get::<_, i32>(0) < 150_000 {
        tokio::time::sleep(Duration::from_millis(1_500)).await;
    }
}

/// What some steps read, which the store takes on sessions of its own.
async fn read_by(bed: &mut Bed, steps: impl AsyncFnOnce(&Bed)) -> BTreeMap<String, (i64, i64)> {
    end_sessions(bed).await;
    let before = reads(bed).await;
    steps(bed).await;
    end_sessions(bed).await;
    let mut read = reads(bed).await;
    for (table, (scans, entries)) in &mut read {
        *scans -= before[table].0;
        *entries -= before[table].1;
    }
    read
}

#[track_caller]
fn assert_read(read: &BTreeMap<String, (i64, i64)>, most: i64) {
    for (table, (scans, entries)) in read {
        assert_eq!(*scans, 0, "sequential scans of {table}: {read:?}");
        assert!(*entries <= most, "index entries of {table}: {read:?}");
    }
}

/// A batch in full swing: outcomes, retries, leases and items under check in the thousands.
async fn busy_batch(bed: &Bed) -> BatchId {
    let sql = bed.db.client().await;
    sql.batch_execute("ANALYZE").await.unwrap();
    let spec =
        BatchSpec { items: ITEMS, max_live: 5_000, max_checking: 5_000, ..BatchSpec::default() };
    let batch = bed.batch_of(spec).await;
    for fill in [
        "INSERT INTO holdfast.attempts (batch_id, position, lease_id, token, attempt, worker_id,
                ended_at, ending, charged, by_holder)
         SELECT $1, g, gen_random_uuid(), 0, 1, $1, clock_timestamp(), 'error', true, true
           FROM generate_series(0, 11999) g",
        "INSERT INTO holdfast.outcomes (batch_id, position, status, lease_id, token, attempt,
                worker_id, finished_at, stop_reason)
         SELECT $1, g, CASE WHEN g % 4 = 0 THEN 'failed' ELSE 'succeeded' END, gen_random_uuid(), 1,
                1, $1, clock_timestamp(), 'completed'
           FROM generate_series(0, 11999) g",
        "INSERT INTO holdfast.waiting (batch_id, position, ready_at)
         SELECT $1, g, clock_timestamp() FROM generate_series(12000, 13999) g",
        "INSERT INTO holdfast.leases (batch_id, lease_id, token, worker_id, positions, expires_at)
         SELECT $1, gen_random_uuid(), 1, $1, ARRAY[g], clock_timestamp() + interval '1 min'
           FROM generate_series(14000, 15999) g",
        "INSERT INTO holdfast.staged_outcomes (batch_id, position, lease_id, staged_lease_id,
                staged_token, attempt, worker_id, ended_at, stop_reason)
         SELECT $1, l.positions[1], l.lease_id, l.lease_id, 1, 1, $1, clock_timestamp(), 'completed'
           FROM holdfast.leases l WHERE l.batch_id = $1 AND l.positions[1] < 15000",
        "INSERT INTO holdfast.evidence (batch_id, position, lease_id, seq, record)
         SELECT s.batch_id, s.position, s.lease_id, 0, '{}' FROM holdfast.staged_outcomes s
          WHERE s.batch_id = $1",
        "INSERT INTO holdfast.progress (batch_id, seq, next_position, executing, checking, waiting,
                succeeded, failed)
         VALUES ($1, 1, 16000, 1000, 1000, 2000, 9000, 3000)",
    ] {
        sql.execute(fill, &[&batch.uuid()]).await.unwrap();
    }
    assert_invariants(&sql, batch).await;
    batch
}

/// The steps of workers, and look-ups by key, all on 20 items.
async fn work(bed: &Bed, batch: BatchId) {
    let holds = bed.claim(batch, 20).await;
    let list: Vec<Position> = holds.iter().map(|hold| hold.item().position()).collect();
    assert_eq!(bed.store.item_inputs(batch, &list).await.unwrap().len(), 20);
    let (lease, token) = (holds[0].lease(), holds[0].token());
    let beat = [Vouched { batch, lease, token, started: list, reports: None }];
    bed.store.renew(bed.worker, TTL, "running", 20, &beat).await.unwrap();
    bed.hand_in(&holds[..5], &succeeded()).await;
    bed.hand_in(&holds[..10], &failed()).await;
    bed.hand_in(&holds[10..15], &again(History::FRESH, Duration::from_secs(1))).await;
    assert_eq!(bed.store.give_back(batch, lease, 5).await.unwrap(), 5);
    check(bed, batch).await;
    assert!(!bed.store.is_exhausted(batch).await.unwrap());
    assert!(!bed.store.end_batch(batch).await.unwrap());
    let one = [Position::new(8_000)];
    bed.store.retry_failed(batch, None, Some(&one), Position::new(0), 20, "t").await.unwrap();
    bed.store.retry_failed(batch, None, None, Position::new(0), 20, "t").await.unwrap();
    bed.store.position_of_key(batch, "item-77").await.unwrap().unwrap();
    bed.store.batch(batch, None).await.unwrap().unwrap();
}

/// The steps of checks on 20 items.
async fn check(bed: &Bed, batch: BatchId) {
    let holds = bed.claim(batch, 20).await;
    let evidence = [Evidence::default(), Evidence::default()];
    assert_eq!(bed.stage(&holds, &evidence).await, [StageAnswer::Staged; 20]);
    let list: Vec<Position> = holds.iter().map(|hold| hold.item().position()).collect();
    assert_eq!(bed.store.staged_items(batch, &list).await.unwrap().len(), 20);
    let ends: Vec<Conclusion> = holds
        .iter()
        .enumerate()
        .map(|(n, hold)| match n % 2 {
            0 => publish(Finding::Holds),
            _ => Conclusion::Recheck(hold.history()),
        })
        .collect();
    let items: Vec<Concluding<'_>> =
        holds.iter().zip(&ends).map(|(hold, conclusion)| Concluding { hold, conclusion }).collect();
    bed.store.conclude(batch, TTL, &items).await.unwrap();
    let again = bed.recheck(batch, 10).await;
    assert_eq!(again.len(), 10);
    assert_eq!(bed.store.give_back(batch, again[0].lease(), 5).await.unwrap(), 10);
    for hold in bed.recheck(batch, 10).await {
        bed.conclude(&hold, &Conclusion::Publish(None)).await;
    }
}

#[tokio::test]
async fn workers_read_by_key_what_was_empty_when_it_was_analysed() {
    let mut bed = Bed::new().await;
    let batch = busy_batch(&bed).await;

    let read = read_by(&mut bed, async |bed| {
        for _ in 0..10 {
            work(bed, batch).await;
        }
    })
    .await;

    assert_read(&read, 10 * 400);
    assert_invariants(&bed.db.client().await, batch).await;
}

#[tokio::test]
async fn pages_are_read_by_key_but_for_one_look_at_the_leases() {
    let mut bed = Bed::new().await;
    let batch = busy_batch(&bed).await;

    let mut read = read_by(&mut bed, async |bed| {
        for status in ItemStatus::ALL.map(Some).into_iter().chain([None]) {
            for from in [0, 15_900] {
                bed.store.items(batch, status, Position::new(from), 50).await.unwrap();
            }
        }
    })
    .await;
    let leases = read.insert("leases".into(), (0, 0)).unwrap();
    assert_eq!(leases.0, 0);
    assert!(leases.1 < 23 * 2_000, "{leases:?}");
    let staged = read.insert("staged_outcomes".into(), (0, 0)).unwrap();
    assert!(staged.0 == 0 && staged.1 < 23 * 1_000, "{staged:?}");
    // Where succeeded and failed items lie far apart, some are passed over.
    assert_read(&read, 4_000);

    bed.control(batch, ControlVerb::Cancel).await;
    let mut read = read_by(&mut bed, async |bed| {
        let cancelled = Some(ItemStatus::Cancelled);
        for status in [cancelled, None] {
            bed.store.items(batch, status, Position::new(12_000), 50).await.unwrap();
        }
    })
    .await;
    read.remove("leases");
    assert_read(&read, 300);
}

#[tokio::test]
async fn sweeps_and_exports_scan_no_table() {
    let mut bed = Bed::new().await;
    let batch = busy_batch(&bed).await;

    let read = read_by(&mut bed, async |bed| {
        let ttl = Duration::from_micros(1);
        let request = ClaimRequest { ttl, ..bed.request(batch, 1) };
        drop(granted(bed.store.claim(&request).await.unwrap()));
        assert_eq!(bed.reap(batch).await.len(), 1);
        bed.store.export_page(&everything(batch, 500)).await.unwrap();
        bed.control(batch, ControlVerb::Cancel).await;
        while bed.store.clear_cancelled(batch, 500).await.unwrap() {}
    })
    .await;

    assert!(read.values().all(|(scans, _)| *scans == 0), "{read:?}");
}

#[tokio::test]
async fn a_claim_reads_the_times_of_its_own_range() {
    let mut bed = Bed::new().await;
    bed.db.client().await.batch_execute("ANALYZE").await.unwrap();
    let batch = bed.batch(ITEMS).await;
    bed.defer(batch, 0, 1_000, 3_600.0).await;
    bed.defer(batch, 1_000, ITEMS, -1.0).await;

    let read = read_by(&mut bed, async |bed| {
        for _ in 0..5 {
            assert_eq!(bed.claim(batch, 20).await.len(), 20);
        }
    })
    .await;

    assert_read(&read, 5 * 2 * 1_020);
}

#[tokio::test]
async fn a_snapshot_held_elsewhere_does_not_make_workers_read_more() {
    let mut bed = Bed::new().await;
    bed.db.client().await.batch_execute("ANALYZE").await.unwrap();
    let batch =
        bed.batch_of(BatchSpec { items: 1_000, max_attempts: 100, ..Default::default() }).await;
    let other = bed.db.client().await;
    let keep = "SET application_name = 'keeper'; BEGIN ISOLATION LEVEL REPEATABLE READ";
    other.batch_execute(keep).await.unwrap();
    other.query("SELECT FROM holdfast.leases", &[]).await.unwrap();
    let rounds = async |bed: &Bed| {
        for _ in 0..20 {
            let holds = bed.claim(batch, 30).await;
            bed.hand_in(&holds[..29], &again(History::FRESH, Duration::ZERO)).await;
            bed.hand_in(&holds[29..], &failed()).await;
        }
    };

    let first = read_by(&mut bed, rounds).await;
    for _ in 0..8 {
        rounds(&bed).await;
    }
    let last = read_by(&mut bed, rounds).await;

    for (table, (scans, entries)) in &first {
        assert_eq!(*scans, 0, "{table}");
        let last = last[table].1;
        assert!(last <= entries * 3 / 2 + 100, "{table}: {entries} at first, {last} at last");
    }
    other.batch_execute("COMMIT").await.unwrap();
    assert_invariants(&bed.sql, batch).await;
}

#[tokio::test]
async fn a_whole_table_would_be_seen() {
    let mut bed = Bed::new().await;
    let read = read_by(&mut bed, async |bed| {
        bed.store.batches_with_expired_leases().await.unwrap();
    })
    .await;
    assert_eq!(read["leases"].0, 1);
}
