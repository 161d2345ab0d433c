//! Workers that die: nothing is lost, everything ends.

use std::time::Duration;

use holdfast::clock::{Clock, SystemClock};
use holdfast::model::{BatchId, LeaseId, WorkerId};
use holdfast::store::{Claim, ClaimRequest, ControlVerb, ReapPolicy};
use rand::Rng;
use rustix::process::Signal;

use crate::support::fleet::{
    Fleet, LONG, SHORT, SHORT_LEASE, Submission, most_at_once, now, until,
};
use crate::support::invariants::{assert_invariants, assert_no_deadlock};
use crate::support::worker_process::WorkerProcess;

/// An item that outlives every worker the first time and ends soon the second time.
const STUCK_ONCE: &str = "[ $HOLDFAST_ATTEMPT -gt 1 ] || exec sleep 300";

/// Two workers, the first of which holds all items of a batch, and has since the second may judge
/// expiries.
async fn holder_and_heir(
    fleet: &Fleet,
    items: Submission,
) -> (WorkerProcess, WorkerProcess, BatchId) {
    let holder = fleet.start();
    holder.ready().await;
    let count = items.items.len();
    let batch = fleet.submit(items).await;
    fleet.noted(batch, "start", count).await;
    let heir = fleet.start();
    heir.ready().await;
    // Not before its clock agreed with the database's for one lease (F4).
    tokio::time::sleep(SHORT + SHORT / 3).await;
    (holder, heir, batch)
}

#[tokio::test]
async fn items_of_a_killed_worker_run_elsewhere_after_its_lease() {
    let fleet = Fleet::new(SHORT_LEASE).await;
    let (mut holder, heir, batch) = holder_and_heir(&fleet, Submission::new(5, STUCK_ONCE)).await;

    let dead = fleet.id_of(&holder).await;
    let killed = now();
    holder.kill();
    fleet.ended(batch).await;

    let marks = fleet.marks();
    let starts = marks.iter().filter(|mark| mark.what == "start" && mark.at > killed);
    let mut again: Vec<_> =
        starts.map(|mark| (mark.position, mark.at.saturating_sub(killed))).collect();
    again.sort_unstable();
    again.dedup_by_key(|(position, _)| *position);
    let latest = again.iter().map(|(_, after)| *after).max().unwrap();
    eprintln!("all items of a killed worker ran again {latest:?} after the kill");
    let promised = SHORT + Duration::from_secs(2);
    let machine = Duration::from_secs(3); // it may be busy with other tests
    assert_eq!(again.len(), 5);
    assert!(latest < promised + machine, "{latest:?}");
    let heir = fleet.id_of(&heir).await;
    for outcome in fleet.outcomes(batch).await {
        assert!(outcome.succeeded && outcome.worker == heir, "{outcome:?}");
    }
    let attempts = fleet.attempts(batch).await;
    let of_the_dead: Vec<_> = attempts.iter().filter(|lost| lost.worker == dead).collect();
    assert_eq!(of_the_dead.len(), 5);
    for lost in of_the_dead {
        assert_eq!(lost.brief(), (1, "expired", true));
        assert!(!lost.by_holder);
    }
    assert_invariants(&fleet.sql, batch).await;
}

#[tokio::test]
async fn a_crash_is_noted_and_the_last_item_of_a_batch_may_end_by_it() {
    let fleet = Fleet::new(SHORT_LEASE).await;
    let mut holder = fleet.start();
    holder.ready().await;
    let stuck = Submission::new(1, "exec sleep 300");
    let last_try = fleet.submit(Submission { max_attempts: 1, ..stuck.clone() }).await;
    let again = fleet.submit(stuck).await;
    fleet.noted(last_try, "start", 1).await;
    fleet.noted(again, "start", 1).await;

    // The only worker there is; the next one starts after it.
    holder.kill();
    let _next = fleet.start();
    let row = fleet.ended(last_try).await;
    fleet.noted(again, "start", 2).await;

    assert_eq!((row.counts.failed, row.counts.succeeded), (1, 0));
    let outcome = fleet.outcomes(last_try).await.remove(0);
    assert_eq!((outcome.stop_reason.as_str(), outcome.lease), ("lease_expired", None));
    let history = "SELECT histories[1] FROM holdfast.leases WHERE batch_id = $1";
    let packed: i64 = fleet.value(again, history).await;
    assert_eq!(packed, 0x0101, "one attempt, one crash");
    assert_invariants(&fleet.sql, last_try).await;
    assert_invariants(&fleet.sql, again).await;
}

#[tokio::test]
async fn expired_leases_of_a_paused_batch_are_recovered_and_nothing_is_claimed() {
    let fleet = Fleet::new(SHORT_LEASE).await;
    let (mut holder, _heir, batch) = holder_and_heir(&fleet, Submission::new(2, STUCK_ONCE)).await;

    fleet.control(batch, ControlVerb::Pause).await;
    holder.kill();
    let recovered = async || fleet.row(batch).await.counts.waiting == 2;
    until("the items wait for the resume", LONG, recovered).await;
    tokio::time::sleep(Duration::from_millis(1_500)).await;

    let row = fleet.row(batch).await;
    assert_eq!((row.state.as_str(), row.counts.waiting), ("paused", 2), "{row:?}");
    assert_eq!(fleet.count(batch, "start"), 2);
    assert_invariants(&fleet.sql, batch).await;
    fleet.control(batch, ControlVerb::Resume).await;
    let row = fleet.ended(batch).await;
    assert_eq!(row.counts.succeeded, 2);
}

/// Claims one item under a lease that no process knows of.
async fn claim_unknown(fleet: &Fleet, batch: BatchId, worker: WorkerId, ttl: Duration) {
    let request =
        ClaimRequest { batch, lease: LeaseId::generate(), worker, want: 1, ttl, traceparent: None };
    let claim = fleet.database.claim(&request).await.unwrap();
    assert!(matches!(claim, Claim::Granted { .. }), "{claim:?}");
}

#[tokio::test]
async fn a_lease_nobody_knows_of_is_recovered() {
    let fleet = Fleet::new(SHORT_LEASE).await;
    let worker = fleet.start();
    worker.ready().await;
    let living = fleet.id_of(&worker).await;
    // Frozen for a moment, so that it does not take what is meant to be lost.
    worker.signal_worker(Signal::STOP).await;
    let of_nobody = fleet.submit(Submission::new(1, "true")).await;
    let of_the_living = fleet.submit(Submission::new(1, "true")).await;
    claim_unknown(&fleet, of_nobody, WorkerId::generate(), SHORT).await;
    claim_unknown(&fleet, of_the_living, living, SHORT).await;
    worker.signal_worker(Signal::CONT).await;

    for batch in [of_nobody, of_the_living] {
        fleet.ended(batch).await;

        fleet.assert_each_ran_once(batch).await;
        assert_eq!(fleet.outcomes(batch).await[0].attempt, 2);
        assert_invariants(&fleet.sql, batch).await;
    }
}

/// Lets the one item of a batch take two workers down.
async fn crash_twice(fleet: &Fleet, batch: BatchId) {
    for _ in 0..2 {
        claim_unknown(fleet, batch, WorkerId::generate(), Duration::from_millis(1)).await;
        let policy = ReapPolicy {
            charge: true,
            max_crashes: 3,
            max_interruptions: 5,
            backoff_base: Duration::ZERO,
            backoff_max: Duration::ZERO,
        };
        until("the lease expires", LONG, async || {
            !fleet.database.reap(batch, &policy).await.unwrap().is_empty()
        })
        .await;
    }
}

#[tokio::test]
async fn items_that_took_their_worker_down_twice_run_alone() {
    let fleet = Fleet::new("").await;
    let mut alone = Vec::new();
    // Of batches of their own, so that a worker claims them all in one go.
    for _ in 0..4 {
        let batch = fleet.submit(Submission::new(1, "sleep 0.1")).await;
        crash_twice(&fleet, batch).await;
        alone.push(batch);
    }
    let others = fleet.submit(Submission::new(20, "sleep 0.1")).await;

    let _worker = fleet.start_with(&["--slots", "4"]);
    for batch in alone.iter().chain([&others]) {
        fleet.ended(*batch).await;
        fleet.assert_each_ran_once(*batch).await;
    }

    let marks = fleet.marks();
    let mut running = 0;
    for mark in &marks {
        running += if mark.what == "start" { 1 } else { -1 };
        let is_alone = running == i32::from(mark.what == "start");
        assert!(is_alone || !alone.contains(&mark.batch), "{mark:?} beside {running}");
    }
    assert!(most_at_once(&marks) > 1, "the others run side by side");
}

#[tokio::test]
async fn every_item_ends_once_whichever_worker_is_killed_when() {
    let settings = format!(
        "{SHORT_LEASE}[retry]\nmax_crashes = 250\nbackoff_base = '50ms'\nbackoff_max = '200ms'\n"
    );
    let fleet = Fleet::new(&settings).await;
    let start = || fleet.start_with(&["--slots", "3"]);
    let mut workers = [start(), start(), start()];
    let short = Submission { max_attempts: 100, ..Submission::new(300, "sleep 0.1") };
    let batch = fleet.submit(short).await;
    fleet.noted(batch, "end", 1).await;

    let until_then = SystemClock.now() + Duration::from_secs(15);
    let mut kills = 0;
    while SystemClock.now() < until_then && !fleet.row(batch).await.is_finished() {
        let pause = rand::rng().random_range(700..1_300);
        tokio::time::sleep(Duration::from_millis(pause)).await;
        let victim = rand::rng().random_range(0..workers.len());
        workers[victim].kill();
        workers[victim] = start();
        kills += 1;
        assert_invariants(&fleet.sql, batch).await;
    }
    let row = fleet.ended(batch).await;

    let attempts = fleet.attempts(batch).await;
    eprintln!("{kills} kills, {} attempts lost", attempts.len());
    assert!(!attempts.is_empty(), "no kill hit anything");
    assert_eq!((row.counts.succeeded, row.counts.failed), (300, 0));
    assert_eq!(fleet.outcomes(batch).await.len(), 300);
    assert_invariants(&fleet.sql, batch).await;
    assert_no_deadlock(&fleet.sql).await;
}
