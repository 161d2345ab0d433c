//! How the tables are read: by index, also on tables that were empty when they were analysed.

use std::collections::BTreeMap;
use std::time::Duration;

use holdfast::model::{BatchId, History, ItemStatus, Position};
use holdfast::store::{ControlVerb, Vouched};

use crate::support::fixture::{Bed, TTL, again, everything, failed, succeeded};
use crate::support::invariants::assert_invariants;

const ITEMS: i32 = 20_000;

/// Sequential scans of each table by sessions that have ended.
async fn scans(bed: &Bed) -> BTreeMap<String, i64> {
    let rows = "SELECT relname::text, seq_scan FROM pg_stat_user_tables
                 WHERE schemaname = 'holdfast' AND relname IN ('leases', 'waiting', 'items',
                       'outcomes', 'attempts', 'progress', 'progress_deltas')";
    let rows = bed.sql.query(rows, &[]).await.unwrap();
    rows.iter().map(|row| (row.get(0), row.get(1))).collect()
}

/// A batch in full swing: outcomes, retries and leases in the thousands.
async fn busy_batch(bed: &Bed) -> BatchId {
    bed.sql.batch_execute("ANALYZE").await.unwrap();
    let batch = bed.batch(ITEMS).await;
    let worker = bed.worker.uuid();
    for fill in [
        "INSERT INTO holdfast.outcomes (batch_id, position, status, lease_id, token, attempt,
                worker_id, finished_at, stop_reason)
         SELECT $1, g, CASE WHEN g % 4 = 0 THEN 'failed' ELSE 'succeeded' END, gen_random_uuid(), 1,
                1, $2, clock_timestamp(), 'completed'
           FROM generate_series(0, 11999) g",
        "INSERT INTO holdfast.waiting (batch_id, position, ready_at)
         SELECT $1, g, clock_timestamp() FROM generate_series(12000, 13999) g
          WHERE $2::uuid IS NOT NULL",
        "INSERT INTO holdfast.leases (batch_id, lease_id, token, worker_id, positions, expires_at)
         SELECT $1, gen_random_uuid(), 1, $2, ARRAY[g], clock_timestamp() + interval '1 min'
           FROM generate_series(14000, 15999) g",
        "INSERT INTO holdfast.progress (batch_id, seq, next_position, executing, waiting, succeeded,
                failed)
         SELECT $1, 1, 16000, 2000, 2000, 9000, 3000 WHERE $2::uuid IS NOT NULL",
        "UPDATE holdfast.batches SET max_live = 5000 WHERE id = $1 AND $2::uuid IS NOT NULL",
    ] {
        bed.run(fill, &[&batch.uuid(), &worker]).await;
    }
    assert_invariants(&bed.db.client().await, batch).await;
    batch
}

/// Every step of the protocol, a few times each.
async fn exercise(bed: &Bed, batch: BatchId) {
    for _ in 0..10 {
        let holds = bed.claim(batch, 20).await;
        let (done, back) = holds.split_at(10);
        let (lease, token) = (holds[0].lease(), holds[0].token());
        let beat = [Vouched { batch, lease, token, started: vec![Position::new(3)] }];
        bed.store.renew(bed.worker, TTL, "running", 20, &beat).await.unwrap();
        bed.hand_in(&done[..5], &succeeded()).await;
        bed.hand_in(done, &failed()).await;
        bed.hand_in(&back[..5], &again(History::FRESH, Duration::from_secs(1))).await;
        bed.store.give_back(batch, lease, 5).await.unwrap();
        let expired = bed.claim_one(batch).await;
        let expire = "UPDATE holdfast.leases SET expires_at = clock_timestamp()
                       WHERE batch_id = $1 AND lease_id = $2";
        bed.run(expire, &[&batch.uuid(), &expired.lease().uuid()]).await;
        assert_eq!(bed.reap(batch).await.len(), 1);
        assert!(!bed.store.is_exhausted(batch).await.unwrap());
        assert!(!bed.store.end_batch(batch).await.unwrap());
        bed.store.item_inputs(batch, &[expired.item().position()]).await.unwrap();
        bed.store.retry_failed(batch, None, None, Position::new(0), 20, "t").await.unwrap();
        let one = [Position::new(4_000)];
        bed.store.retry_failed(batch, None, Some(&one), one[0], 20, "t").await.unwrap();
    }
    for status in ItemStatus::ALL.map(Some).into_iter().chain([None]) {
        for from in [0, 15_900] {
            bed.store.items(batch, status, Position::new(from), 100).await.unwrap();
        }
    }
    bed.store.export_page(&everything(batch, 500)).await.unwrap();
    bed.store.position_of_key(batch, "item-77").await.unwrap().unwrap();
    bed.store.batch(batch, None).await.unwrap().unwrap();
}

/// Ends the pool's sessions: the counters of a session arrive with its end.
async fn close_pool(bed: &mut Bed) {
    bed.store = bed.store_that_waits(TTL);
    until_alone(bed).await;
}

async fn until_alone(bed: &Bed) {
    let others = "SELECT count(*) FROM pg_stat_activity
                   WHERE datname = current_database() AND pid <> pg_backend_pid()
                     AND backend_type = 'client backend'";
    let closed = async {
        while bed.sql.query_one(others, &[]).await.unwrap().get::<_, i64>(0) > 0 {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), closed).await.expect("the sessions end");
}

#[tokio::test]
async fn no_step_reads_a_whole_table_that_was_analysed_while_empty() {
    let mut bed = Bed::new().await;
    let batch = busy_batch(&bed).await;
    close_pool(&mut bed).await;
    let before = scans(&bed).await;
    assert_eq!(before.len(), 7);

    exercise(&bed, batch).await;
    close_pool(&mut bed).await;

    assert_eq!(scans(&bed).await, before);
    assert_invariants(&bed.db.client().await, batch).await;

    bed.control(batch, ControlVerb::Cancel).await;
    close_pool(&mut bed).await;
    let before = scans(&bed).await;
    bed.store.items(batch, None, Position::new(0), 100).await.unwrap();
    let cancelled = Some(ItemStatus::Cancelled);
    bed.store.items(batch, cancelled, Position::new(12_000), 100).await.unwrap();
    while bed.store.clear_cancelled(batch, 500).await.unwrap() {}
    close_pool(&mut bed).await;
    assert_eq!(scans(&bed).await, before, "nor after a cancel");
}

#[tokio::test]
async fn a_scan_would_be_seen() {
    let bed = Bed::new().await;
    bed.batch(1).await;
    let before = scans(&bed).await;
    let other = bed.db.client().await;
    other.query("SELECT count(*) FROM holdfast.items", &[]).await.unwrap();
    drop(other);

    let seen = async {
        while scans(&bed).await["items"] <= before["items"] {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), seen).await.expect("it is counted");
}
