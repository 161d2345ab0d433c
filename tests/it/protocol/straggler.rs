//! Fences, each from both sides: the holder who may, the straggler who may not (F1, F3).

use std::time::Duration;

use holdfast::model::{ItemStatus, LeaseId};
use holdfast::store::HandInAnswer::{Applied, Cancelled, Lost};
use holdfast::store::{ControlVerb, RetryAnswer};

use crate::support::fixture::{Bed, again, failed, forged, positions, succeeded};
use crate::support::invariants::assert_invariants;

#[tokio::test]
async fn a_straggler_cannot_finish_a_reclaimed_item_and_the_holder_can() {
    let bed = Bed::new().await;
    let batch = bed.batch(1).await;
    let old = bed.claim_one(batch).await;
    bed.expire(old.lease()).await;
    bed.reap(batch).await;
    assert_eq!(bed.finish(&old).await, Lost, "while it waits");
    let new = bed.claim_one(batch).await;

    assert_eq!(bed.finish(&old).await, Lost);
    assert_eq!(bed.hand_in_one(&old, &again(old.history(), Duration::ZERO)).await, Lost);
    assert_eq!(bed.statuses(batch).await, [ItemStatus::Leased]);
    assert_invariants(&bed.sql, batch).await;

    assert!(new.token() > old.token());
    assert_eq!(bed.finish(&new).await, Applied);
    assert_eq!(bed.finish(&old).await, Lost, "when it has ended");
    let token: i64 =
        bed.value(batch, "SELECT token FROM holdfast.outcomes WHERE batch_id = $1").await;
    assert_eq!(token, new.token().get());
    assert_invariants(&bed.sql, batch).await;
}

#[tokio::test]
async fn an_expired_lease_that_nobody_took_back_may_still_finish() {
    let bed = Bed::new().await;
    let batch = bed.batch(1).await;
    let hold = bed.claim_one(batch).await;
    bed.expire(hold.lease()).await;

    assert_eq!(bed.finish(&hold).await, Applied);

    assert!(bed.reap(batch).await.is_empty());
    assert_invariants(&bed.sql, batch).await;
}

#[tokio::test]
async fn lease_and_token_are_fences_only_together() {
    let bed = Bed::new().await;
    let batch = bed.batch(2).await;
    let hold = bed.claim_one(batch).await;
    let other = bed.claim_one(batch).await;
    let (lease, token) = (hold.lease(), hold.token().get());

    for forgery in [
        forged(&hold, LeaseId::generate(), token),
        forged(&hold, other.lease(), token),
        forged(&hold, other.lease(), other.token().get()),
        forged(&hold, lease, other.token().get()),
        forged(&hold, lease, token + 1),
        forged(&hold, lease, 0),
        forged(&other, lease, token),
    ] {
        assert_eq!(bed.finish(&forgery).await, Lost, "{forgery:?}");
    }

    assert_invariants(&bed.sql, batch).await;
    assert_eq!(bed.counts(batch).await.executing, 2);
    assert_eq!(bed.finish(&hold).await, Applied);
    assert_eq!(bed.finish(&forged(&hold, lease, token + 1)).await, Lost, "no repeat of it");
    assert_eq!(bed.finish(&forged(&hold, other.lease(), token)).await, Lost, "no repeat of it");
}

#[tokio::test]
async fn one_lost_item_of_a_group_leaves_the_other_nineteen() {
    let bed = Bed::new().await;
    let batch = bed.batch(20).await;
    let lost = bed.claim_one(batch).await;
    let mut group = bed.claim(batch, 19).await;
    bed.expire(lost.lease()).await;
    bed.reap(batch).await;
    let now = bed.claim_one(batch).await;
    group.insert(7, lost);

    let answers = bed.hand_in(&group, &succeeded()).await;

    assert_eq!(answers.iter().filter(|answer| **answer == Applied).count(), 19);
    assert_eq!(answers[7], Lost);
    assert_eq!(bed.counts(batch).await.succeeded, 19);
    assert_invariants(&bed.sql, batch).await;
    assert_eq!(positions(std::slice::from_ref(&now)), [0]);
    assert_eq!(bed.finish(&now).await, Applied);
}

#[tokio::test]
async fn a_position_that_the_lease_never_held_is_lost() {
    let bed = Bed::new().await;
    let batch = bed.batch(3).await;
    let hold = bed.claim_one(batch).await;
    let other = bed.claim_one(batch).await;
    let stray = forged(&other, hold.lease(), hold.token().get());

    assert_eq!(bed.hand_in(&[hold, stray], &succeeded()).await, [Applied, Lost]);

    assert_eq!(bed.finish(&other).await, Applied);
    assert_invariants(&bed.sql, batch).await;
}

#[tokio::test]
async fn a_cancelled_batch_publishes_nothing_more() {
    let bed = Bed::new().await;
    let batch = bed.batch(3).await;
    let holds = bed.claim(batch, 2).await;
    bed.control(batch, ControlVerb::Cancel).await;

    assert_eq!(bed.finish(&holds[0]).await, Cancelled);
    assert_eq!(
        bed.hand_in_one(&holds[1], &again(holds[1].history(), Duration::ZERO)).await,
        Cancelled
    );
    while bed.store.clear_cancelled(batch, 1).await.unwrap() {}
    assert_eq!(bed.finish(&holds[0]).await, Cancelled);

    assert_eq!(bed.statuses(batch).await, [ItemStatus::Cancelled; 3]);
    assert_eq!(bed.counts(batch).await.cancelled, 3);
    assert_invariants(&bed.sql, batch).await;
}

#[tokio::test]
async fn a_finish_repeated_after_a_retry_does_not_end_the_item_again() {
    let bed = Bed::new().await;
    let batch = bed.batch(1).await;
    let old = bed.claim_one(batch).await;
    bed.hand_in_one(&old, &failed()).await;
    assert!(matches!(bed.retry(batch).await, RetryAnswer::Moved { items: 1, .. }));

    assert_eq!(bed.hand_in_one(&old, &failed()).await, Applied, "it was, before the retry");
    let new = bed.claim_one(batch).await;
    assert_eq!(bed.hand_in_one(&old, &failed()).await, Applied);

    assert_eq!(bed.statuses(batch).await, [ItemStatus::Leased]);
    assert_invariants(&bed.sql, batch).await;
    assert_eq!(bed.finish(&new).await, Applied);
    assert_eq!(bed.counts(batch).await.succeeded, 1);
}

#[tokio::test]
async fn a_straggler_does_not_take_the_reapers_outcome_for_its_own() {
    let bed = Bed::new().await;
    let batch = bed
        .batch_of(crate::support::fixture::BatchSpec { max_attempts: 1, ..Default::default() })
        .await;
    let old = bed.claim_one(batch).await;
    bed.expire(old.lease()).await;
    bed.reap(batch).await;

    assert_eq!(bed.hand_in_one(&old, &failed()).await, Lost);
    assert!(matches!(bed.retry(batch).await, RetryAnswer::Moved { items: 1, .. }));
    assert_eq!(bed.hand_in_one(&old, &failed()).await, Lost, "nor its copy after a retry");

    assert_eq!(bed.statuses(batch).await, [ItemStatus::Queued]);
    assert_invariants(&bed.sql, batch).await;
}
