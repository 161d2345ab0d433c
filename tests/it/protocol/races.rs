//! Two calls at once, many times over, each on a connection of its own. Whoever is first, the batch
//! is right afterwards and nothing happens twice.

use std::future::Future;
use std::time::Duration;

use futures::future::join_all;
use holdfast::model::{BatchId, History, Hold};
use holdfast::store::{
    ClaimAnswer, ControlAnswer, ControlVerb, HandInAnswer, RenewAnswer, RetryAnswer, Vouched,
};

use crate::support::fixture::{BatchSpec, Bed, TTL, again, failed, positions, succeeded};
use crate::support::invariants::{assert_invariants, assert_no_deadlock};
use HandInAnswer::{Applied, Cancelled, Lost};

const ROUNDS: u32 = 100;

/// Runs both at once; which is sent first changes with the round.
async fn race<A, B>(round: u32, a: impl Future<Output = A>, b: impl Future<Output = B>) -> (A, B) {
    let (a, b) = (Box::pin(a), Box::pin(b));
    // A head start lets one get at different depths before the other begins.
    let head_start = async |rounds: u32| {
        for _ in 0..rounds {
            tokio::task::yield_now().await;
        }
    };
    let behind = round / 2 % 8;
    if round.is_multiple_of(2) {
        tokio::join!(a, async {
            head_start(behind).await;
            b.await
        })
    } else {
        let (b, a) = tokio::join!(b, async {
            head_start(behind).await;
            a.await
        });
        (a, b)
    }
}

async fn many_attempts(bed: &Bed, items: i32) -> BatchId {
    bed.batch_of(BatchSpec { items, max_attempts: 100, ..BatchSpec::default() }).await
}

#[tokio::test]
async fn finish_against_reap() {
    let bed = Bed::new().await;
    let batch = many_attempts(&bed, 130).await;
    let (mut finished, mut reaped) = (0, 0);
    for round in 0..ROUNDS {
        let hold = bed.claim_one(batch).await;
        bed.expire(hold.lease()).await;

        let (answer, taken) = race(round, bed.finish(&hold), bed.reap(batch)).await;

        match answer {
            Applied => finished += 1,
            Lost => reaped += 1,
            Cancelled => panic!("nobody cancelled"),
        }
        assert_eq!(taken.len(), usize::from(answer == Lost), "either, and not both");
        assert_invariants(&bed.sql, batch).await;
    }
    assert!(finished > 0 && reaped > 0, "finished {finished}, reaped {reaped}");
    assert_eq!(bed.counts(batch).await.succeeded, finished);
    assert_no_deadlock(&bed.sql).await;
}

#[tokio::test]
async fn finish_against_cancel() {
    let bed = Bed::new().await;
    let (mut finished, mut cancelled) = (0, 0);
    for round in 0..ROUNDS {
        let batch = bed.batch(3).await;
        let holds = bed.claim(batch, 2).await;

        let (answers, control) =
            race(round, bed.hand_in(&holds, &succeeded()), bed.control(batch, ControlVerb::Cancel))
                .await;

        assert_eq!(control, ControlAnswer::Applied);
        let counts = bed.counts(batch).await;
        match answers[0] {
            Applied => finished += 1,
            Cancelled => cancelled += 1,
            Lost => panic!("nobody took it"),
        }
        assert_eq!(answers[0], answers[1], "all or nothing");
        let published = if answers[0] == Applied { 2 } else { 0 };
        assert_eq!((counts.succeeded, counts.cancelled), (published, 3 - published));
        assert_invariants(&bed.sql, batch).await;
    }
    assert!(finished > 0 && cancelled > 0, "finished {finished}, cancelled {cancelled}");
}

#[tokio::test]
async fn a_stragglers_repeat_against_a_retry() {
    let bed = Bed::new().await;
    let batch = many_attempts(&bed, 130).await;
    for round in 0..ROUNDS {
        let hold = bed.claim_one(batch).await;
        bed.hand_in_one(&hold, &failed()).await;

        let (answer, retry) =
            race(round, bed.hand_in_one(&hold, &failed()), bed.retry(batch)).await;

        assert_eq!(answer, Applied, "it was, before either");
        assert_eq!(retry, RetryAnswer::Moved { items: 1, next: None });
        assert_invariants(&bed.sql, batch).await;
        let retried = bed.claim_one(batch).await;
        assert_eq!(retried.item(), hold.item());
        bed.finish(&retried).await;
    }
}

#[tokio::test]
async fn renew_against_reap() {
    let bed = Bed::new().await;
    let batch = many_attempts(&bed, 130).await;
    let (mut renewed, mut reaped) = (0, 0);
    for round in 0..ROUNDS {
        let hold = bed.claim_one(batch).await;
        bed.expire(hold.lease()).await;
        let (lease, token) = (hold.lease(), hold.token());
        let beat = [Vouched { batch, lease, token, started: Vec::new(), reports: None }];

        let (renewal, taken) =
            race(round, bed.store.renew(bed.worker, TTL, "running", 1, &beat), bed.reap(batch))
                .await;

        assert_invariants(&bed.sql, batch).await;
        let answer = renewal.unwrap().leases[0].answer;
        if taken.is_empty() {
            renewed += 1;
            assert_eq!(answer, RenewAnswer::Renewed);
            assert_eq!(bed.finish(&hold).await, Applied);
        } else {
            reaped += 1;
            // `Renewed` first and taken back after is the one thing that must not be.
            assert_ne!(answer, RenewAnswer::Renewed);
            assert_eq!(bed.finish(&hold).await, Lost);
        }
    }
    assert!(renewed > 0 && reaped > 0, "renewed {renewed}, reaped {reaped}");
}

#[tokio::test]
async fn finish_against_give_back_of_the_same_lease() {
    let bed = Bed::new().await;
    let batch = many_attempts(&bed, 130).await;
    for round in 0..ROUNDS {
        let hold = bed.claim_one(batch).await;

        let (answer, moved) =
            race(round, bed.finish(&hold), bed.store.give_back(batch, hold.lease(), 5)).await;

        assert_eq!(moved.unwrap(), i32::from(answer == Lost), "either, and not both");
        assert_invariants(&bed.sql, batch).await;
    }
    assert_no_deadlock(&bed.sql).await;
}

#[tokio::test]
async fn a_finish_against_its_own_repeat() {
    let bed = Bed::new().await;
    let batch = many_attempts(&bed, 130).await;
    for round in 0..ROUNDS {
        let hold = bed.claim_one(batch).await;
        let returned = again(History::FRESH, Duration::ZERO);
        let settled = if round % 3 == 0 { returned } else { succeeded() };

        let answers = Box::pin(race(
            round,
            bed.hand_in_one(&hold, &settled),
            bed.hand_in_one(&hold, &settled),
        ))
        .await;

        assert_eq!(answers, (Applied, Applied));
        assert_invariants(&bed.sql, batch).await;
    }
}

#[tokio::test]
async fn hand_ins_of_one_lease_from_all_sides() {
    let bed = Bed::new().await;
    let batch = many_attempts(&bed, 700).await;
    for round in 0..ROUNDS / 4 {
        let holds = bed.claim(batch, 16).await;
        // Overlapping groups, in both orders, some giving their items back.
        let groups: Vec<&[Hold]> = (0..8).map(|n| &holds[n..n + 8]).collect();
        let ends = [succeeded(), again(History::FRESH, Duration::ZERO)];

        let answers = join_all(groups.iter().enumerate().map(|(n, group)| {
            let settled = &ends[(n + round as usize) % 2];
            bed.hand_in(group, settled)
        }))
        .await;

        assert!(answers.iter().flatten().all(|answer| *answer == Applied), "{answers:?}");
        assert_invariants(&bed.sql, batch).await;
        bed.finish(&holds[15]).await;
    }
    assert_no_deadlock(&bed.sql).await;
}

#[tokio::test]
async fn hand_ins_of_the_same_leases_in_different_orders() {
    let bed = Bed::new().await;
    let batch = many_attempts(&bed, 700).await;
    for _ in 0..ROUNDS / 4 {
        let mut all = Vec::new();
        for _ in 0..6 {
            all.push(bed.claim(batch, 4).await);
        }
        let groups: Vec<Vec<Hold>> = (0..4)
            .map(|n| {
                let mut group: Vec<Hold> =
                    all.iter_mut().map(|holds| holds.pop().unwrap()).collect();
                group.rotate_left(n);
                if n % 2 == 1 {
                    group.reverse();
                }
                group
            })
            .collect();

        let returned = again(History::FRESH, Duration::ZERO);
        let done = succeeded();
        let answers = join_all(
            groups
                .iter()
                .enumerate()
                .map(|(n, group)| bed.hand_in(group, if n == 3 { &returned } else { &done })),
        )
        .await;

        assert!(answers.iter().flatten().all(|answer| *answer == Applied));
        assert_invariants(&bed.sql, batch).await;
    }
    assert_no_deadlock(&bed.sql).await;
}

#[tokio::test]
async fn the_end_of_a_batch_against_a_retry() {
    let bed = Bed::new().await;
    for round in 0..ROUNDS / 2 {
        let batch = bed.batch(1).await;
        let hold = bed.claim_one(batch).await;
        bed.hand_in_one(&hold, &failed()).await;

        let (ended, retry) = race(round, bed.store.end_batch(batch), bed.retry(batch)).await;

        ended.unwrap();
        assert_eq!(retry, RetryAnswer::Moved { items: 1, next: None });
        assert!(!bed.is_ended(batch).await, "reopened, or never ended");
        assert_invariants(&bed.sql, batch).await;
        assert_eq!(positions(&bed.claim(batch, 1).await), [0]);
    }
}

#[tokio::test]
async fn a_pause_against_a_claim() {
    let bed = Bed::new().await;
    let batch = many_attempts(&bed, 130).await;
    for round in 0..ROUNDS {
        let (claim, control) =
            race(round, bed.try_claim(batch, 1), bed.control(batch, ControlVerb::Pause)).await;

        assert_eq!(control, ControlAnswer::Applied);
        drop(claim);
        assert_eq!(bed.refused(batch).await, ClaimAnswer::Closed, "once pause has returned");
        assert_invariants(&bed.sql, batch).await;
        bed.control(batch, ControlVerb::Resume).await;
    }
}

#[tokio::test]
async fn a_claim_against_hand_ins_that_return_items() {
    let bed = Bed::new().await;
    let batch =
        bed.batch_of(BatchSpec { items: 40, max_attempts: 100, ..Default::default() }).await;
    let mut held = bed.claim(batch, 10).await;
    for round in 0..ROUNDS {
        let returned = again(History::FRESH, Duration::ZERO);
        let (_, claim) = race(round, bed.hand_in(&held, &returned), bed.try_claim(batch, 10)).await;
        assert_invariants(&bed.sql, batch).await;
        held = match claim {
            holdfast::store::Claim::Granted { holds, .. } => holds,
            holdfast::store::Claim::Nothing(..) => bed.claim(batch, 10).await,
        };
    }
    assert_no_deadlock(&bed.sql).await;
}

#[tokio::test]
async fn a_lost_claim_against_its_give_back() {
    let bed = Bed::new().await;
    let batch = many_attempts(&bed, 130).await;
    for round in 0..ROUNDS {
        let request = bed.request(batch, 2);

        let (claim, moved) =
            race(round, bed.store.claim(&request), bed.store.give_back(batch, request.lease, 5))
                .await;

        claim.unwrap();
        let again = bed.store.give_back(batch, request.lease, 5).await.unwrap();
        assert_eq!(moved.unwrap() + again, 2, "once, now or at the next heartbeat");
        assert_invariants(&bed.sql, batch).await;
    }
    assert_eq!(bed.counts(batch).await.executing, 0);
}

#[tokio::test]
async fn a_hand_in_that_waited_for_a_heartbeat_finds_its_lease() {
    let bed = Bed::new().await;
    let batch = bed.batch(4).await;
    let holds = bed.claim(batch, 3).await;
    for (hold, settled) in holds.iter().zip([succeeded(), again(History::FRESH, TTL)]) {
        let mut other = bed.db.client().await;
        let heartbeat = other.transaction().await.unwrap();
        let beat = "UPDATE holdfast.leases SET expires_at = clock_timestamp() WHERE batch_id = $1";
        heartbeat.execute(beat, &[&batch.uuid()]).await.unwrap();

        let (answer, ()) = tokio::join!(bed.hand_in_one(hold, &settled), async {
            bed.until_waiting_for_locks(1).await;
            heartbeat.commit().await.unwrap();
        });

        assert_eq!(answer, Applied);
        assert_invariants(&bed.sql, batch).await;
    }
}

#[tokio::test]
async fn hand_ins_against_heartbeats() {
    let bed = Bed::new().await;
    let batch = many_attempts(&bed, 4 * i32::try_from(ROUNDS).unwrap()).await;
    for round in 0..ROUNDS {
        let holds = bed.claim(batch, 3).await;
        let (lease, token) = (holds[0].lease(), holds[0].token());
        let beat = [Vouched { batch, lease, token, started: Vec::new(), reports: None }];

        let (answers, renewal) = race(
            round,
            bed.hand_in(&holds[..2], &succeeded()),
            bed.store.renew(bed.worker, TTL, "running", 1, &beat),
        )
        .await;

        assert_eq!(answers, [Applied, Applied]);
        let state = renewal.unwrap().leases[0];
        assert!(matches!(state.answer, RenewAnswer::Renewed | RenewAnswer::Busy));
        assert!(state.held == 3 || state.held == 1, "{}", state.held);
        assert_eq!(bed.finish(&holds[2]).await, Applied);
    }
    assert_invariants(&bed.sql, batch).await;
}
