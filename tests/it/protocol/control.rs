//! Pause, resume, cancel and the end of a batch.

use std::time::Duration;

use holdfast::model::{BatchId, History, ItemStatus};
use holdfast::store::ControlAnswer::{Applied, Ended, Unchanged, Unknown};
use holdfast::store::ControlVerb::{Cancel, Pause, Resume};
use holdfast::store::{ClaimAnswer, FlightError, HandInAnswer};

use crate::support::fixture::{BatchSpec, Bed, again, positions, succeeded};
use crate::support::invariants::assert_invariants;

const MINUTE: Duration = Duration::from_mins(1);

#[tokio::test]
async fn a_cancel_counts_the_rest_and_touches_no_item() {
    let bed = Bed::new().await;
    let batch = bed.batch(10_000).await;
    let holds = bed.claim(batch, 5).await;
    bed.finish(&holds[0]).await;
    bed.hand_in(&holds[1..3], &again(History::FRESH, MINUTE)).await;
    let rows = "SELECT (SELECT count(*) FROM holdfast.leases) * 1000000
                     + (SELECT count(*) FROM holdfast.waiting) * 1000
                     + (SELECT count(*) FROM holdfast.outcomes) WHERE $1::uuid IS NOT NULL";
    let before: i64 = bed.value(batch, rows).await;

    assert_eq!(bed.control(batch, Cancel).await, Applied);

    assert_eq!(bed.value::<i64>(batch, rows).await, before, "left to the sweeps");
    let counts = bed.counts(batch).await;
    assert_eq!((counts.succeeded, counts.cancelled, counts.total()), (1, 9_999, 10_000));
    assert!(bed.is_ended(batch).await);
    assert_eq!(bed.refused(batch).await, ClaimAnswer::Closed);
    let statuses = bed.statuses(batch).await;
    assert_eq!(statuses[0], ItemStatus::Succeeded);
    assert!(statuses[1..].iter().all(|status| *status == ItemStatus::Cancelled));
    assert_invariants(&bed.sql, batch).await;
}

#[tokio::test]
async fn leftovers_of_a_cancel_are_cleared_in_chunks_without_touching_counts() {
    let bed = Bed::new().await;
    let batch = bed.batch(20).await;
    for _ in 0..5 {
        drop(bed.claim_one(batch).await);
    }
    let holds = bed.claim(batch, 7).await;
    bed.hand_in(&holds, &again(History::FRESH, MINUTE)).await;
    bed.control(batch, Cancel).await;
    assert_eq!(bed.store.batches_with_leftovers().await.unwrap(), [batch]);

    let mut calls = 1;
    while bed.store.clear_cancelled(batch, 3).await.unwrap() {
        assert_invariants(&bed.sql, batch).await;
        calls += 1;
    }

    assert_eq!(calls, 3, "7 rows by threes");
    assert!(bed.store.batches_with_leftovers().await.unwrap().is_empty());
    assert!(!bed.store.clear_cancelled(batch, 3).await.unwrap(), "a repeat");
    let left = "SELECT (SELECT count(*) FROM holdfast.leases WHERE batch_id = $1)
                     + (SELECT count(*) FROM holdfast.waiting WHERE batch_id = $1)";
    assert_eq!(bed.value::<i64>(batch, left).await, 0);
    assert_eq!(bed.counts(batch).await.cancelled, 20);
    assert_invariants(&bed.sql, batch).await;
}

#[tokio::test]
async fn only_cancelled_batches_are_cleared() {
    let bed = Bed::new().await;
    let batch = bed.batch(2).await;
    drop(bed.claim_one(batch).await);

    assert!(!bed.store.clear_cancelled(batch, 10).await.unwrap());
    assert!(!bed.store.clear_cancelled(BatchId::generate(), 10).await.unwrap());

    assert_eq!(bed.counts(batch).await.executing, 1);
    assert_invariants(&bed.sql, batch).await;
}

#[tokio::test]
async fn clearing_leaves_a_row_in_use_to_the_next_sweep() {
    let bed = Bed::new().await;
    let batch = bed.batch(2).await;
    let hold = bed.claim_one(batch).await;
    drop(bed.claim_one(batch).await);
    let mut client = bed.db.client().await;
    let work = client.transaction().await.unwrap();
    let current = "SELECT holdfast.is_current($1, $2, 0, $3)";
    let (lease, token) = (hold.lease().uuid(), hold.token().get());
    work.query_one(current, &[&batch.uuid(), &lease, &token]).await.unwrap();
    bed.control(batch, Cancel).await;

    let mut calls = 1;
    while bed.store.clear_cancelled(batch, 10).await.unwrap() {
        calls += 1;
        assert!(calls < 4, "nothing is gained by asking again at once");
    }

    assert_eq!(bed.store.batches_with_leftovers().await.unwrap(), [batch]);
    work.commit().await.unwrap();
    while bed.store.clear_cancelled(batch, 10).await.unwrap() {}
    assert!(bed.store.batches_with_leftovers().await.unwrap().is_empty());
}

#[tokio::test]
async fn a_paused_batch_grants_nothing_and_finishes_what_runs() {
    let bed = Bed::new().await;
    let batch = bed.batch(2).await;
    let hold = bed.claim_one(batch).await;

    assert_eq!(bed.control(batch, Pause).await, Applied);
    assert_eq!(bed.control(batch, Pause).await, Unchanged);
    assert_eq!(bed.refused(batch).await, ClaimAnswer::Closed);
    assert_eq!(bed.finish(&hold).await, HandInAnswer::Applied);
    assert_eq!(bed.store.batch(batch, None).await.unwrap().unwrap().state, "paused");

    assert_eq!(bed.control(batch, Resume).await, Applied);
    assert_eq!(bed.control(batch, Resume).await, Unchanged);
    assert_eq!(positions(&bed.claim(batch, 2).await), [1]);
    assert_invariants(&bed.sql, batch).await;
}

#[tokio::test]
async fn a_paused_batch_can_end_and_be_cancelled() {
    let bed = Bed::new().await;
    let [ends, cancelled] = [bed.batch(1).await, bed.batch(1).await];
    let hold = bed.claim_one(ends).await;
    bed.control(ends, Pause).await;
    bed.control(cancelled, Pause).await;

    bed.finish(&hold).await;

    assert!(bed.store.end_batch(ends).await.unwrap());
    assert_eq!(bed.store.batch(ends, None).await.unwrap().unwrap().state, "finished");
    assert_eq!(bed.control(cancelled, Cancel).await, Applied);
    assert_invariants(&bed.sql, ends).await;
    assert_invariants(&bed.sql, cancelled).await;
}

#[tokio::test]
async fn what_has_ended_cannot_be_controlled_and_a_repeated_cancel_is_no_change() {
    let bed = Bed::new().await;
    let [ended, cancelled] = [bed.batch(1).await, bed.batch(1).await];
    let hold = bed.claim_one(ended).await;
    bed.finish(&hold).await;
    bed.store.end_batch(ended).await.unwrap();
    bed.control(cancelled, Cancel).await;

    assert_eq!(bed.control(ended, Cancel).await, Ended);
    assert_eq!(bed.control(ended, Pause).await, Ended);
    assert_eq!(bed.control(cancelled, Cancel).await, Unchanged);
    assert_eq!(bed.control(cancelled, Resume).await, Ended);
    assert_eq!(bed.control(BatchId::generate(), Cancel).await, Unknown);
    assert!(!bed.store.end_batch(cancelled).await.unwrap());
    assert!(!bed.store.end_batch(BatchId::generate()).await.unwrap());
    assert_invariants(&bed.sql, cancelled).await;
}

#[tokio::test]
async fn another_owners_batch_is_as_good_as_none() {
    let bed = Bed::new().await;
    let batch = bed.batch_of(BatchSpec { owner: "alice", ..BatchSpec::default() }).await;
    for verb in [Pause, Cancel] {
        let answer = bed.store.control_batch(batch, Some("bob"), verb, "bob").await.unwrap();
        assert_eq!(answer, Unknown);
    }
    assert_eq!(positions(&bed.claim(batch, 1).await), [0]);

    let own = bed.store.control_batch(batch, Some("alice"), Cancel, "alice").await.unwrap();
    assert_eq!(own, Applied);
    let audit = bed
        .sql
        .query("SELECT actor, verb, before, after FROM holdfast.audit_log", &[])
        .await
        .unwrap();
    let audit: Vec<[&str; 4]> =
        audit.iter().map(|row| [row.get(0), row.get(1), row.get(2), row.get(3)]).collect();
    assert_eq!(audit, [["alice", "cancel", "open", "cancelled"]]);
}

#[tokio::test]
async fn a_control_gives_up_when_the_batch_stays_busy_and_may_be_repeated() {
    let bed = Bed::new().await;
    let batch = bed.batch(1).await;
    let impatient = bed.store_that_waits(Duration::from_millis(100));
    let mut other = bed.db.client().await;
    let finisher = other.transaction().await.unwrap();
    finisher.query_one("SELECT holdfast.lock_parent_shared($1)", &[&batch.uuid()]).await.unwrap();

    let refused = impatient.control_batch(batch, None, Cancel, "tester").await;

    assert!(matches!(refused, Err(ref error @ FlightError::RolledBack(_)) if !error.is_lasting()));
    finisher.rollback().await.unwrap();
    let repeated = impatient.control_batch(batch, None, Cancel, "tester").await.unwrap();
    assert_eq!(repeated, Applied);
}

#[tokio::test]
async fn hand_ins_pass_each_other_and_a_cancel_goes_before_newcomers() {
    let bed = Bed::new().await;
    let batch = bed.batch(3).await;
    let holds = bed.claim(batch, 2).await;
    let mut other = bed.db.client().await;
    let finisher = other.transaction().await.unwrap();
    finisher.query_one("SELECT holdfast.lock_parent_shared($1)", &[&batch.uuid()]).await.unwrap();
    assert_eq!(bed.finish(&holds[0]).await, HandInAnswer::Applied, "beside another hand-in");

    let (cancelled, late, ()) = tokio::join!(
        bed.control(batch, Cancel),
        async {
            bed.until_waiting_for_locks(1).await;
            bed.finish(&holds[1]).await
        },
        async {
            bed.until_waiting_for_locks(2).await;
            finisher.commit().await.unwrap();
        }
    );

    assert_eq!((cancelled, late), (Applied, HandInAnswer::Cancelled));
    assert_invariants(&bed.sql, batch).await;
}

#[tokio::test]
async fn a_batch_ends_only_when_nothing_is_left_anywhere() {
    let bed = Bed::new().await;
    let batch = bed.batch(2).await;
    assert!(!bed.store.end_batch(batch).await.unwrap(), "fresh items");
    let holds = bed.claim(batch, 2).await;
    assert!(!bed.store.end_batch(batch).await.unwrap(), "held items");
    bed.finish(&holds[0]).await;
    bed.hand_in_one(&holds[1], &again(History::FRESH, Duration::ZERO)).await;
    assert!(!bed.store.end_batch(batch).await.unwrap(), "waiting items");
    let last = bed.claim_one(batch).await;
    bed.hand_in_one(&last, &succeeded()).await;
    assert!(bed.store.end_batch(batch).await.unwrap());
    assert_invariants(&bed.sql, batch).await;
}
