//! Parts of a worker that panic: it must not go on looking alive.

use std::backtrace::Backtrace;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use holdfast::clock::{BootInstant, Clock, SystemClock};
use holdfast::execute::{Execution, ExecutionEnd, Executor, Job};
use holdfast::store::BatchWork;
use holdfast::supervise::Executors;
use holdfast::workspace::Gate;
use time::OffsetDateTime;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use super::checks::judged;
use super::in_process::{InProcess, Noop, Only, execution, settings};
use crate::support::fleet::{Fleet, LONG, Submission, until};
use crate::support::invariants::assert_invariants;

/// A clock that panics the next time it is asked from a file of this name.
#[derive(Default)]
struct Trap(Mutex<Option<&'static str>>);

impl Trap {
    fn set(&self, caller: &'static str) {
        *self.0.lock().unwrap() = Some(caller);
    }
}

impl Clock for Trap {
    fn now(&self) -> BootInstant {
        let caller = *self.0.lock().unwrap();
        if let Some(caller) = caller
            && Backtrace::force_capture().to_string().contains(caller)
            && self.0.lock().unwrap().take().is_some()
        {
            panic!("the clock is a trap for {caller}");
        }
        SystemClock.now()
    }

    fn wall(&self) -> OffsetDateTime {
        SystemClock.wall()
    }
}

struct PanicsToo;

impl Executors for PanicsToo {
    fn executor(
        &self,
        _: &BatchWork,
        _: &Arc<Gate>,
    ) -> Result<(Arc<dyn Executor>, Duration), String> {
        panic!("what makes executors is at fault")
    }
}

async fn exit_reasons(fleet: &Fleet) -> Vec<Option<String>> {
    let select = "SELECT exit_reason FROM holdfast.workers ORDER BY id";
    fleet.sql.query(select, &[]).await.unwrap().iter().map(|row| row.get(0)).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_ends_when_one_of_its_loops_panics() {
    let fleet = Fleet::new("").await;
    let loops = ["src/claim.rs", "src/heartbeat.rs", "src/health/state.rs"];
    for caller in loops {
        let trap = Arc::new(Trap::default());
        let only = Arc::new(Only(Arc::new(Noop)));
        let mut worker = InProcess::start(settings(fleet.url(), 2), only, trap.clone());
        let batch = fleet.submit(Submission::new(1, "true")).await;
        fleet.ended(batch).await;

        trap.set(caller);
        let ended = timeout(LONG, worker.ended()).await;

        let ended = ended.unwrap_or_else(|_| panic!("it lives on without its {caller}"));
        assert!(ended.faulty, "{caller}: {ended:?}");
    }
    assert_eq!(exit_reasons(&fleet).await, vec![Some("panicked".to_owned()); loops.len()]);
}

#[tokio::test]
async fn a_worker_ends_when_what_it_claimed_cannot_be_begun_for_a_panic() {
    let fleet = Fleet::new("").await;
    let batch = fleet.submit(Submission::new(2, "true")).await;
    let clock = Arc::new(SystemClock);
    let mut faulty = InProcess::start(settings(fleet.url(), 2), Arc::new(PanicsToo), clock.clone());

    let ended = timeout(LONG, faulty.ended()).await.expect("it keeps items that it never begins");

    assert!(ended.faulty && ended.forced, "{ended:?}");
    // Its lease lapses, and they run elsewhere.
    let only = Arc::new(Only(Arc::new(Noop)));
    let worker = InProcess::start(settings(fleet.url(), 2), only, clock);
    fleet.ended(batch).await;
    assert!(!worker.drain().await.faulty);
    assert_invariants(&fleet.sql, batch).await;
}

/// Panics over the first item, once; holds the others until they are let go.
struct ForgetsOne {
    forgot: AtomicBool,
    go: CancellationToken,
}

#[async_trait]
impl Executor for ForgetsOne {
    async fn execute(&self, job: &Job, stop: &CancellationToken) -> Execution {
        if job.item.position().get() == 0 {
            assert!(self.forgot.swap(true, Ordering::Relaxed), "a fault of the executor");
        } else {
            tokio::select! {
                () = self.go.cancelled() => {}
                () = stop.cancelled() => return execution(ExecutionEnd::Stopped),
            }
        }
        execution(ExecutionEnd::Succeeded)
    }
}

#[tokio::test]
async fn a_position_that_its_worker_forgot_is_given_back_while_its_siblings_run() {
    let fleet = Fleet::new("").await;
    let batch = fleet.submit(Submission::new(3, "true")).await;
    let go = CancellationToken::new();
    let forgets = Arc::new(ForgetsOne { forgot: AtomicBool::new(false), go: go.clone() });
    let only = Arc::new(Only(forgets));
    let worker = InProcess::start(settings(fleet.url(), 3), only, Arc::new(SystemClock));

    until("the forgotten item runs again", LONG, async || fleet.outcomes(batch).await.len() == 1)
        .await;

    let outcomes = fleet.outcomes(batch).await;
    assert_eq!((outcomes[0].position, outcomes[0].succeeded), (0, true));
    let attempts = fleet.attempts(batch).await;
    assert_eq!(attempts.len(), 1, "{attempts:?}");
    assert_eq!(attempts[0].brief(), (1, "interrupted", false));
    assert!(attempts[0].by_holder);
    let siblings = "SELECT min(cardinality(positions)) FROM holdfast.leases WHERE batch_id = $1";
    assert_eq!(fleet.value::<i32>(batch, siblings).await, 2, "under their first lease");
    assert_invariants(&fleet.sql, batch).await;
    go.cancel();
    fleet.ended(batch).await;
    assert_eq!(fleet.attempts(batch).await.len(), 1);
    assert_eq!(worker.drain().await.stopped, 0);
    assert_invariants(&fleet.sql, batch).await;
}

/// The check of the first item ends in a panic before it begins, once; the others are held until they
/// are let go.
struct ForgetsACheck {
    trap: Arc<Trap>,
    go: CancellationToken,
}

#[async_trait]
impl Executor for ForgetsACheck {
    async fn execute(&self, job: &Job, stop: &CancellationToken) -> Execution {
        if job.item.position().get() == 0 {
            self.trap.set("src/attempt/check.rs");
        } else {
            tokio::select! {
                () = self.go.cancelled() => {}
                () = stop.cancelled() => return execution(ExecutionEnd::Stopped),
            }
        }
        execution(ExecutionEnd::Succeeded)
    }
}

#[tokio::test]
async fn a_staged_position_that_its_worker_forgot_is_checked_again_while_its_siblings_run() {
    let fleet = Fleet::new("").await;
    let batch = fleet.submit(judged(3, "true")).await;
    let (trap, go) = (Arc::new(Trap::default()), CancellationToken::new());
    let forgets = Arc::new(ForgetsACheck { trap: Arc::clone(&trap), go: go.clone() });
    let worker = InProcess::start(settings(fleet.url(), 3), Arc::new(Only(forgets)), trap);

    until("the forgotten item is checked", LONG, async || fleet.outcomes(batch).await.len() == 1)
        .await;

    let outcomes = fleet.outcomes(batch).await;
    assert_eq!((outcomes[0].position, outcomes[0].succeeded), (0, true));
    assert!(fleet.attempts(batch).await.is_empty(), "it was not executed again");
    let elsewhere = "SELECT lease_id <> staged_lease_id FROM holdfast.outcomes WHERE batch_id = $1";
    assert!(fleet.value::<bool>(batch, elsewhere).await, "by a recheck");
    let siblings = "SELECT min(cardinality(positions)) FROM holdfast.leases WHERE batch_id = $1";
    assert_eq!(fleet.value::<i32>(batch, siblings).await, 2, "under their first lease");
    assert_invariants(&fleet.sql, batch).await;
    go.cancel();
    let row = fleet.ended(batch).await;
    assert_eq!(row.verdicts.unverified, 3);
    assert_eq!(worker.drain().await.stopped, 0);
    assert_invariants(&fleet.sql, batch).await;
}
