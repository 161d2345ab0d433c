//! Leases of a worker that is proven dead: released by whoever proved it.

use std::time::Duration;

use holdfast::model::{FencingToken, WorkerId};
use holdfast::store::{DeadLease, ReapPolicy};

use crate::support::fixture::Bed;
use crate::support::invariants::assert_invariants;

const CRASHED: ReapPolicy = ReapPolicy {
    charge: true,
    max_crashes: 3,
    max_interruptions: 5,
    backoff_base: Duration::ZERO,
    backoff_max: Duration::ZERO,
};

#[tokio::test]
async fn what_a_dead_worker_held_runs_again_and_what_it_had_run_is_only_checked_again() {
    let bed = Bed::new().await;
    let batch = bed.batch(4).await;
    let holds = bed.claim(batch, 3).await;
    bed.stage(&holds[..1], &[]).await;
    let leases = bed.store.leases_of_worker(bed.worker).await.unwrap();
    assert_eq!(leases.len(), 1);

    // Neither another worker's name nor another token opens it.
    let forged = DeadLease { token: FencingToken::new(1), ..leases[0].clone() };
    let release = async |worker, lease: &DeadLease, policy| {
        bed.store.release_dead(worker, std::slice::from_ref(lease), policy).await.unwrap()
    };
    assert_eq!(release(WorkerId::generate(), &leases[0], &CRASHED).await, 0);
    assert_eq!(release(bed.worker, &forged, &CRASHED).await, 0);
    assert_eq!(release(bed.worker, &leases[0], &CRASHED).await, 3);
    assert_eq!(release(bed.worker, &leases[0], &CRASHED).await, 0, "once");

    let counts = bed.counts(batch).await;
    assert_eq!((counts.executing, counts.checking, counts.waiting), (0, 1, 2));
    assert_invariants(&bed.sql, batch).await;
    let rechecked = bed.recheck(batch, 4).await;
    assert_eq!(rechecked.len(), 1);
    assert_eq!((rechecked[0].history().attempts(), rechecked[0].history().crashes()), (0, 0));
    let again = bed.claim(batch, 2).await;
    for hold in &again {
        assert_eq!((hold.history().attempts(), hold.history().crashes()), (1, 1));
    }
    assert_invariants(&bed.sql, batch).await;
}

#[tokio::test]
async fn an_end_that_was_asked_for_is_an_interruption() {
    let bed = Bed::new().await;
    let batch = bed.batch(1).await;
    let _held = bed.claim_one(batch).await;
    let leases = bed.store.leases_of_worker(bed.worker).await.unwrap();

    let policy = ReapPolicy { charge: false, ..CRASHED };
    assert_eq!(bed.store.release_dead(bed.worker, &leases, &policy).await.unwrap(), 1);

    let history = bed.claim_one(batch).await.history();
    assert_eq!((history.attempts(), history.crashes(), history.interruptions()), (0, 0, 1));
    assert_invariants(&bed.sql, batch).await;
}
