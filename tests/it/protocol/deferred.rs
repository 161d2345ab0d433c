//! Items with a time of their own, and the floors of `waiting`: nothing is passed over for good.

use std::time::Duration;

use holdfast::model::{History, ItemStatus};
use holdfast::store::{Claim, ClaimAnswer, ControlVerb};

use crate::support::fixture::{BatchSpec, Bed, again, failed, positions, succeeded};
use crate::support::invariants::assert_invariants;

const MINUTE: Duration = Duration::from_mins(1);

#[tokio::test]
async fn two_thousand_deferred_items_do_not_hold_up_the_ones_behind_them() {
    let bed = Bed::new().await;
    let batch =
        bed.batch_of(BatchSpec { items: 2_050, max_live: 20, ..BatchSpec::default() }).await;
    bed.defer(batch, 0, 2_000, 3_600.0).await;

    let mut calls = 0;
    let holds = loop {
        calls += 1;
        match bed.try_claim(batch, 10).await {
            Claim::Granted { holds, .. } => break holds,
            Claim::Nothing(answer, ready_in) => {
                assert_eq!((answer, ready_in), (ClaimAnswer::Empty, Some(Duration::ZERO)));
            }
        }
        assert!(calls < 4, "a thousand step aside at a time");
    };

    assert_eq!(positions(&holds), (2_000..2_010).collect::<Vec<_>>());
    let counts = bed.counts(batch).await;
    assert_eq!((counts.waiting, counts.executing, counts.fresh), (2_000, 10, 40));
    assert_invariants(&bed.sql, batch).await;
    assert_eq!(bed.claim(batch, 100).await.len(), 10, "the window is full of held items alone");
    assert_eq!(bed.refused(batch).await, ClaimAnswer::Window);
}

#[tokio::test]
async fn a_deferred_item_is_claimed_at_its_time_and_not_before() {
    let bed = Bed::new().await;
    let batch = bed.batch(3).await;
    bed.defer(batch, 0, 1, 0.5).await;
    bed.defer(batch, 2, 3, 3_600.0).await;
    assert_eq!(positions(&bed.claim(batch, 3).await), [1]);

    let hold = loop {
        match bed.try_claim(batch, 3).await {
            Claim::Granted { mut holds, .. } => break holds.pop().unwrap(),
            Claim::Nothing(answer, ready_in) => {
                assert_eq!(answer, ClaimAnswer::Empty);
                assert!(ready_in.unwrap() <= Duration::from_millis(500));
            }
        }
    };

    assert_eq!((hold.item().position().get(), hold.history()), (0, History::FRESH));
    let in_time = "SELECT l.granted_at >= i.not_before
                     FROM holdfast.leases l JOIN holdfast.items i USING (batch_id)
                    WHERE batch_id = $1 AND l.positions = '{0}' AND i.position = 0";
    assert!(bed.value::<bool>(batch, in_time).await);
    let claim = bed.try_claim(batch, 1).await;
    assert!(
        matches!(claim, Claim::Nothing(ClaimAnswer::Empty, Some(ready)) if ready > MINUTE),
        "{claim:?}"
    );
    assert_invariants(&bed.sql, batch).await;
}

#[tokio::test]
async fn items_that_become_due_together_do_not_exceed_the_live_window() {
    let bed = Bed::new().await;
    let batch = bed.batch_of(BatchSpec { items: 12, max_live: 3, ..BatchSpec::default() }).await;
    bed.defer(batch, 0, 10, 3_600.0).await;
    assert_eq!(positions(&bed.claim(batch, 1).await), [10]);
    let due = "UPDATE holdfast.waiting SET ready_at = clock_timestamp() WHERE batch_id = $1";
    assert_eq!(bed.run(due, &[&batch.uuid()]).await, 10);

    let holds = bed.claim(batch, 12).await;

    assert_eq!(holds.len(), 2, "one is held already");
    assert_eq!(bed.refused(batch).await, ClaimAnswer::Window);
    assert_invariants(&bed.sql, batch).await;
    // What fails is tried again before more of them are begun.
    for hold in &holds {
        bed.hand_in_one(hold, &again(hold.history(), MINUTE)).await;
    }
    assert_eq!(bed.refused(batch).await, ClaimAnswer::Window);
    assert_eq!(bed.run(due, &[&batch.uuid()]).await, 10);
    let retried = bed.claim(batch, 12).await;
    assert_eq!(retried.iter().map(|hold| hold.history().attempts()).collect::<Vec<_>>(), [1, 1]);
    assert_invariants(&bed.sql, batch).await;
    bed.hand_in(&retried, &succeeded()).await;
    assert_eq!(bed.claim(batch, 12).await.len(), 2);
    assert_invariants(&bed.sql, batch).await;
}

#[tokio::test]
async fn a_batch_with_deferred_items_left_is_not_done() {
    let bed = Bed::new().await;
    let [batch, cancelled] = [bed.batch(2).await, bed.batch(2).await];
    for batch in [batch, cancelled] {
        bed.defer(batch, 0, 1, 3_600.0).await;
        let hold = bed.claim_one(batch).await;
        bed.finish(&hold).await;
        assert_eq!(bed.refused(batch).await, ClaimAnswer::Empty);
        assert!(!bed.store.end_batch(batch).await.unwrap());
    }
    bed.control(cancelled, ControlVerb::Cancel).await;

    assert_eq!(bed.statuses(batch).await, [ItemStatus::Queued, ItemStatus::Succeeded]);
    assert_eq!(bed.statuses(cancelled).await, [ItemStatus::Cancelled, ItemStatus::Succeeded]);
    assert_invariants(&bed.sql, batch).await;
    assert_invariants(&bed.sql, cancelled).await;
}

#[tokio::test]
async fn a_deferred_item_that_fails_is_an_ordinary_retry() {
    let bed = Bed::new().await;
    let batch = bed.batch_of(BatchSpec { items: 2, max_live: 1, ..BatchSpec::default() }).await;
    bed.defer(batch, 0, 2, 0.0).await;
    let hold = bed.claim_one(batch).await;
    bed.hand_in_one(&hold, &again(hold.history(), MINUTE)).await;

    assert_eq!(bed.refused(batch).await, ClaimAnswer::Window, "it takes its place in the window");
    assert_invariants(&bed.sql, batch).await;
}

#[tokio::test]
async fn due_rows_left_behind_are_claimed_later() {
    let bed = Bed::new().await;
    let batch = bed.batch(90).await;
    let holds = bed.claim(batch, 90).await;
    // Many share one time, and some come in below the largest time that was taken.
    for group in holds.chunks(30) {
        bed.hand_in(group, &again(History::FRESH, Duration::ZERO)).await;
    }
    let same = "UPDATE holdfast.waiting SET ready_at = date_trunc('second', ready_at)
                 WHERE batch_id = $1";
    bed.run(same, &[&batch.uuid()]).await;
    let mut taken = Vec::new();
    while taken.len() < 90 {
        let holds = bed.claim(batch, 7).await;
        assert_invariants(&bed.sql, batch).await;
        let (back, done) = holds.split_at(holds.len() / 4);
        bed.hand_in(back, &again(History::FRESH, Duration::ZERO)).await;
        bed.hand_in(done, &succeeded()).await;
        taken.extend(positions(done));
    }
    taken.sort_unstable();
    assert_eq!(taken, (0..90).collect::<Vec<_>>());
    assert_invariants(&bed.sql, batch).await;
}

/// After a step of the clock the floor is ahead of it.
async fn step_back(bed: &Bed, batch: holdfast::model::BatchId) {
    let ahead = "UPDATE holdfast.progress
                    SET retry_floor = clock_timestamp() + interval '1 hour'
                  WHERE batch_id = $1";
    bed.run(ahead, &[&batch.uuid()]).await;
}

#[tokio::test]
async fn whoever_lets_an_item_wait_writes_at_least_the_floor() {
    let bed = Bed::new().await;
    let batch = bed.batch_of(BatchSpec { items: 5, ..BatchSpec::default() }).await;
    let [returned, expired, given_back, ended] = [
        bed.claim_one(batch).await,
        bed.claim_one(batch).await,
        bed.claim_one(batch).await,
        bed.claim_one(batch).await,
    ];
    bed.hand_in_one(&ended, &failed()).await;
    step_back(&bed, batch).await;

    bed.hand_in_one(&returned, &again(History::FRESH, Duration::ZERO)).await;
    bed.expire(expired.lease()).await;
    bed.reap(batch).await;
    bed.store.give_back(batch, given_back.lease(), 5).await.unwrap();
    bed.retry(batch).await;

    assert_eq!(bed.counts(batch).await.waiting, 4);
    assert_invariants(&bed.sql, batch).await;
    // An hour later all are there.
    let later = "UPDATE holdfast.waiting SET ready_at = clock_timestamp() WHERE batch_id = $1";
    bed.run(later, &[&batch.uuid()]).await;
    bed.run("UPDATE holdfast.progress SET retry_floor = '-infinity'", &[]).await;
    assert_eq!(bed.claim(batch, 5).await.len(), 5);
}
