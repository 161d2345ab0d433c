//! Explicit retries: failed items get new attempts.

use std::cell::Cell;
use std::time::Duration;

use futures::future::join_all;
use holdfast::model::ItemStatus::{Leased, Queued, Succeeded};
use holdfast::model::{BatchId, History, ItemStatus, Position};
use holdfast::store::{Claim, ClaimAnswer, ControlVerb, ReapDisposition, RetryAnswer};

use crate::support::fixture::{BatchSpec, Bed, again, failed, positions, succeeded};
use crate::support::invariants::{assert_invariants, assert_no_deadlock};

/// A batch of `items`, all failed, and ended.
async fn failed_batch(bed: &Bed, items: i32) -> BatchId {
    let batch = bed.batch(items).await;
    let holds = bed.claim(batch, items.unsigned_abs()).await;
    bed.hand_in(&holds, &failed()).await;
    assert!(bed.store.end_batch(batch).await.unwrap());
    batch
}

async fn retry(
    bed: &Bed,
    batch: BatchId,
    list: Option<&[Position]>,
    from: i32,
) -> (i32, Option<i32>) {
    let from = Position::new(from);
    match bed.store.retry_failed(batch, None, list, from, 3, "tester").await.unwrap() {
        RetryAnswer::Moved { items, next } => (items, next.map(Position::get)),
        other @ (RetryAnswer::Cancelled | RetryAnswer::Unknown) => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn one_failed_item_is_retried_from_scratch_and_its_outcome_is_kept() {
    let bed = Bed::new().await;
    let batch = bed.batch(2).await;
    let first = bed.claim_one(batch).await;
    bed.hand_in_one(&first, &again(first.history().plus_crash(), Duration::ZERO)).await;
    let holds = bed.claim(batch, 2).await;
    assert_eq!(positions(&holds), [0, 1]);
    bed.hand_in(&holds, &failed()).await;
    bed.store.end_batch(batch).await.unwrap();

    assert_eq!(retry(&bed, batch, Some(&[Position::new(0)]), 0).await, (1, None));

    assert!(!bed.is_ended(batch).await, "reopened");
    assert_eq!(bed.statuses(batch).await, [ItemStatus::Queued, ItemStatus::Failed]);
    assert_invariants(&bed.sql, batch).await;
    let kept = "SELECT * FROM holdfast.attempts WHERE ending = 'retried'";
    let kept = bed.sql.query_one(kept, &[]).await.unwrap();
    assert_eq!((kept.get::<_, i32>("position"), kept.get::<_, i32>("attempt")), (0, 2));
    assert_eq!(kept.get::<_, i64>("token"), holds[0].token().get());
    assert_eq!(kept.get::<_, &str>("error"), "it broke");
    let anew = bed.claim_one(batch).await;
    assert_eq!(anew.history(), History::FRESH.plus_retry());
    assert_eq!(anew.attempt().get(), 1);
    bed.finish(&anew).await;
    assert!(bed.store.end_batch(batch).await.unwrap());
    assert_invariants(&bed.sql, batch).await;
}

#[tokio::test]
async fn all_failed_items_are_retried_chunk_by_chunk_and_succeeded_ones_are_not() {
    let bed = Bed::new().await;
    let batch = bed.batch(9).await;
    let holds = bed.claim(batch, 9).await;
    bed.hand_in(&holds[..4], &failed()).await;
    bed.hand_in(&holds[4..5], &succeeded()).await;
    bed.hand_in(&holds[5..], &failed()).await;

    assert_eq!(retry(&bed, batch, None, 0).await, (3, Some(3)));
    assert_eq!(retry(&bed, batch, None, 0).await, (3, Some(7)), "a repeat goes on");
    assert_eq!(retry(&bed, batch, None, 7).await, (2, None));
    assert_eq!(retry(&bed, batch, None, 0).await, (0, None));

    let counts = bed.counts(batch).await;
    assert_eq!((counts.waiting, counts.succeeded, counts.failed), (8, 1, 0));
    assert_invariants(&bed.sql, batch).await;
}

#[tokio::test]
async fn a_retry_passes_over_what_is_not_failed() {
    let bed = Bed::new().await;
    let batch = bed.batch(4).await;
    let holds = bed.claim(batch, 3).await;
    bed.finish(&holds[0]).await;
    bed.hand_in_one(&holds[1], &failed()).await;
    let list = [3, 2, 1, 1, 0, 99, -1].map(Position::new);

    assert_eq!(retry(&bed, batch, Some(&list), 0).await, (1, None));
    assert_eq!(retry(&bed, batch, Some(&[]), 0).await, (0, None));

    assert_eq!(bed.statuses(batch).await, [Succeeded, Queued, Leased, Queued]);
    assert_invariants(&bed.sql, batch).await;
}

#[tokio::test]
async fn retries_of_one_item_are_counted() {
    let bed = Bed::new().await;
    let batch = failed_batch(&bed, 1).await;
    for n in 1..4 {
        retry(&bed, batch, None, 0).await;
        let hold = bed.claim_one(batch).await;
        assert_eq!((hold.history().retries(), hold.history().attempts()), (n, 0));
        bed.hand_in_one(&hold, &failed()).await;
    }
    assert_invariants(&bed.sql, batch).await;
}

#[tokio::test]
async fn a_retried_item_may_fail_as_often_as_a_new_one() {
    let bed = Bed::new().await;
    let batch = bed.batch_of(BatchSpec { max_attempts: 1, ..BatchSpec::default() }).await;
    for _ in 0..2 {
        let hold = bed.claim_one(batch).await;
        bed.expire(hold.lease()).await;
        assert_eq!(bed.reap(batch).await[0].disposition, ReapDisposition::Failed);
        assert_eq!(retry(&bed, batch, None, 0).await, (1, None));
    }
    assert_invariants(&bed.sql, batch).await;
}

#[tokio::test]
async fn a_paused_batch_stays_paused_and_a_cancelled_one_refuses() {
    let bed = Bed::new().await;
    let [paused, cancelled] = [bed.batch(2).await, bed.batch(2).await];
    for (batch, verb) in [(paused, ControlVerb::Pause), (cancelled, ControlVerb::Cancel)] {
        let hold = bed.claim_one(batch).await;
        bed.hand_in_one(&hold, &failed()).await;
        bed.control(batch, verb).await;
    }

    assert_eq!(retry(&bed, paused, None, 0).await, (1, None));
    assert_eq!(bed.retry(cancelled).await, RetryAnswer::Cancelled);
    assert_eq!(bed.retry(BatchId::generate()).await, RetryAnswer::Unknown);

    assert_eq!(bed.refused(paused).await, ClaimAnswer::Closed);
    assert_eq!(bed.counts(cancelled).await.failed, 1);
    assert_invariants(&bed.sql, paused).await;
    assert_invariants(&bed.sql, cancelled).await;
    bed.control(paused, ControlVerb::Resume).await;
    assert_eq!(positions(&bed.claim(paused, 1).await), [0]);
}

#[tokio::test]
async fn a_retry_is_the_owners_and_is_audited_once() {
    let bed = Bed::new().await;
    let batch = failed_batch(&bed, 5).await;
    let from = Position::new(0);
    let foreign = bed.store.retry_failed(batch, Some("bob"), None, from, 10, "bob").await.unwrap();
    assert_eq!(foreign, RetryAnswer::Unknown);
    assert_eq!(bed.counts(batch).await.failed, 5);

    assert_eq!(retry(&bed, batch, None, 0).await, (3, Some(3)));
    assert_eq!(retry(&bed, batch, None, 3).await, (2, None));

    let audit = "SELECT count(*) FROM holdfast.audit_log
                  WHERE batch_id = $1 AND verb = 'retry' AND actor = 'tester'";
    assert_eq!(bed.value::<i64>(batch, audit).await, 1);
}

#[tokio::test]
async fn a_retry_may_exceed_the_live_window_and_holds_fresh_items_back() {
    let bed = Bed::new().await;
    let batch = bed.batch_of(BatchSpec { items: 6, max_live: 2, ..BatchSpec::default() }).await;
    for _ in 0..2 {
        let holds = bed.claim(batch, 2).await;
        bed.hand_in(&holds, &failed()).await;
    }
    bed.retry(batch).await;

    assert_eq!(positions(&bed.claim(batch, 9).await), [0, 1, 2, 3]);
    assert_eq!(bed.refused(batch).await, ClaimAnswer::Window);
    assert_invariants(&bed.sql, batch).await;
}

#[tokio::test]
async fn a_hundred_thousand_failed_items_are_retried_while_claims_go_on() {
    const ITEMS: i32 = 100_000;
    let bed = Bed::new().await;
    let spec = BatchSpec { items: ITEMS + 3_000, ..BatchSpec::default() };
    let batch = bed.batch_of(spec).await;
    let fail = "
        WITH o AS (
            INSERT INTO holdfast.outcomes (batch_id, position, status, lease_id, token, attempt,
                   worker_id, finished_at, stop_reason)
            SELECT $1, g, 'failed', gen_random_uuid(), 1, 3, $2, clock_timestamp(), 'exit_status'
              FROM generate_series(0, $3 - 1) g)
        INSERT INTO holdfast.progress (batch_id, seq, next_position, failed) VALUES ($1, 1, $3, $3)";
    bed.run(fail, &[&batch.uuid(), &bed.worker.uuid(), &ITEMS]).await;
    let (retried, slowest) = (Cell::new(false), Cell::new(Duration::ZERO));

    let retrying = async {
        let (mut moved, mut from) = (0, Some(0));
        while let Some(next) = from {
            let from_next = Position::new(next);
            let began = bed_clock(&bed).await;
            let chunk = bed
                .store
                .retry_failed(batch, None, None, from_next, 1_000, "tester")
                .await
                .unwrap();
            slowest.set(slowest.get().max(bed_clock(&bed).await.checked_sub(began).unwrap()));
            let RetryAnswer::Moved { items, next } = chunk else { panic!("{chunk:?}") };
            moved += items;
            from = next.map(Position::get);
        }
        retried.set(true);
        moved
    };
    let working = join_all((0..4).map(|_| async {
        let mut done = 0;
        while !retried.get() {
            let Claim::Granted { holds, .. } = bed.try_claim(batch, 50).await else {
                tokio::task::yield_now().await;
                continue;
            };
            done += bed.hand_in(&holds, &succeeded()).await.len();
        }
        done
    }));
    let (moved, done) = tokio::join!(retrying, working);

    let done = i32::try_from(done.iter().sum::<usize>()).unwrap();
    assert!(moved == ITEMS && done > 0, "{moved} retried, {done} ended meanwhile");
    assert!(slowest.get() < Duration::from_secs(5), "a chunk took {:?}", slowest.get());
    let counts = bed.counts(batch).await;
    assert_eq!((counts.failed, counts.succeeded, counts.executing), (0, done, 0));
    assert_eq!(counts.waiting + counts.fresh, ITEMS + 3_000 - done);
    assert_invariants(&bed.sql, batch).await;
    assert_no_deadlock(&bed.sql).await;
}

/// The database's clock.
async fn bed_clock(bed: &Bed) -> Duration {
    let now = "SELECT extract(epoch FROM clock_timestamp())::float8";
    Duration::from_secs_f64(bed.sql.query_one(now, &[]).await.unwrap().get(0))
}
