//! Signals: drain, stop, give back.

use std::time::Duration;

use rustix::process::Signal;

use crate::support::fleet::{Fleet, LONG, SHORT_LEASE, Submission, until};
use crate::support::invariants::assert_invariants;
use crate::support::worker_process::WorkerProcess;

/// An item that ends when it is told to, or when it runs a second time.
const STUCK_HERE: &str = "[ $(grep -c start \"$MARKS\") -gt 2 ] || exec sleep 300";

/// How the row of a worker that ended in order says so: state, reason, and whether it ended.
async fn closing_of(fleet: &Fleet, worker: &WorkerProcess) -> (String, Option<String>, bool) {
    let id = fleet.id_of(worker).await;
    let select = "SELECT state, exit_reason, ended_at IS NOT NULL FROM holdfast.workers
                   WHERE id = $1";
    let row = fleet.sql.query_one(select, &[&id.uuid()]).await.unwrap();
    (row.get(0), row.get(1), row.get(2))
}

#[tokio::test]
async fn a_signal_drains_what_runs_ends_and_nothing_new_begins() {
    let fleet = Fleet::new("").await;
    let mut worker = fleet.start_with(&["--slots", "2"]);
    worker.ready().await;
    let batch = fleet.submit(Submission::new(6, "sleep 1")).await;
    fleet.noted(batch, "start", 2).await;

    worker.signal(Signal::TERM);
    until("it says that it drains", LONG, async || {
        worker.get("/readyz").await.is_some_and(|(status, _)| status == 503)
    })
    .await;
    let (status, body) = worker.get("/readyz").await.unwrap();
    let alive = worker.get("/livez").await.unwrap().0;
    let exit = worker.exit_status().await;

    assert_eq!((status, alive), (503, 200));
    assert!(body.contains("draining"), "{body}");
    assert_eq!(exit, 0);
    assert_eq!((fleet.count(batch, "start"), fleet.count(batch, "end")), (2, 2));
    let row = fleet.row(batch).await;
    assert_eq!((row.counts.succeeded, row.counts.fresh), (2, 4), "{row:?}");
    assert_eq!(fleet.attempts(batch).await, []);
    let closing = closing_of(&fleet, &worker).await;
    assert_eq!(closing, ("exited".to_owned(), Some("drained".to_owned()), true));
    assert_invariants(&fleet.sql, batch).await;
}

/// Two items were stopped and given back free of charge, and ran again on another worker.
async fn assert_given_back(fleet: &Fleet, batch: holdfast::model::BatchId) {
    let attempts = fleet.attempts(batch).await;
    assert_eq!(attempts.len(), 2, "{attempts:?}");
    for attempt in attempts {
        assert_eq!(attempt.brief(), (1, "interrupted", false));
        assert!(attempt.by_holder);
    }
    for outcome in fleet.outcomes(batch).await {
        assert!(outcome.succeeded && outcome.attempt == 1, "{outcome:?}");
    }
    assert_invariants(&fleet.sql, batch).await;
}

#[tokio::test]
async fn a_second_signal_stops_what_runs_and_gives_it_back_at_once() {
    let fleet = Fleet::new("").await;
    let mut worker = fleet.start();
    worker.ready().await;
    let batch = fleet.submit(Submission::new(2, STUCK_HERE)).await;
    fleet.noted(batch, "start", 2).await;
    let other = fleet.start();
    other.ready().await;

    worker.signal(Signal::TERM);
    // A repeat within two seconds is the same signal, delivered twice.
    tokio::time::sleep(Duration::from_millis(500)).await;
    worker.signal(Signal::TERM);
    tokio::time::sleep(Duration::from_millis(1_800)).await;
    assert_eq!(fleet.row(batch).await.counts.executing, 2, "still draining");
    worker.signal(Signal::TERM);
    let exit = worker.exit_status().await;
    let handed_over =
        until("both run again", LONG, async || fleet.count(batch, "start") == 4).await;
    fleet.ended(batch).await;

    eprintln!("items given back ran elsewhere {handed_over:?} after the exit");
    assert!(handed_over < Duration::from_secs(3), "{handed_over:?}");
    assert_eq!(exit, 3);
    assert_given_back(&fleet, batch).await;
}

#[tokio::test]
async fn a_third_signal_ends_everything_at_once_and_the_guard_gives_it_back() {
    let fleet = Fleet::new("").await;
    let mut worker = fleet.start();
    worker.ready().await;
    let batch = fleet.submit(Submission::new(1, "trap '' TERM; mark $$; exec sleep 300")).await;
    fleet.noted(batch, "start", 1).await;

    for _ in 0..2 {
        worker.signal(Signal::TERM);
        tokio::time::sleep(Duration::from_millis(2_200)).await;
    }
    assert_eq!(worker.try_exit_status(), None, "the command has its grace");
    worker.signal(Signal::TERM);
    let exit = worker.exit_status().await;

    assert_eq!(exit, 4);
    let row = fleet.row(batch).await;
    assert_eq!((row.counts.executing, row.counts.waiting), (0, 1), "it waits for another worker");
    let attempts = fleet.attempts(batch).await;
    assert_eq!(attempts.len(), 1, "{attempts:?}");
    assert_eq!(attempts[0].brief(), (1, "interrupted", false));
    assert!(!attempts[0].by_holder);
    // Its command did not outlive it.
    let marks = fleet.marks();
    let command = format!("/proc/{}/cmdline", marks[1].what);
    until("its command is gone", LONG, async || {
        !std::fs::read_to_string(&command).is_ok_and(|argv| argv.contains("sleep"))
    })
    .await;
    assert_invariants(&fleet.sql, batch).await;
}

#[tokio::test]
async fn the_end_of_the_grace_is_as_a_second_signal() {
    let fleet = Fleet::new(&format!("{SHORT_LEASE}[drain]\ngrace = '300ms'\n")).await;
    let mut worker = fleet.start();
    worker.ready().await;
    // One that ignores TERM, too.
    let body = format!("trap '' TERM; {STUCK_HERE}");
    let batch = fleet.submit(Submission::new(2, &body)).await;
    fleet.noted(batch, "start", 2).await;
    let _other = fleet.start();

    worker.signal(Signal::TERM);
    let exit = worker.exit_status().await;
    fleet.ended(batch).await;

    assert_eq!(exit, 3);
    assert_given_back(&fleet, batch).await;
}

#[tokio::test]
async fn a_claim_under_way_at_the_signal_leaves_no_lease_behind() {
    let fleet = Fleet::new("").await;
    let batch = fleet.submit(Submission::new(2_000, "true")).await;
    // With one slot each, and items this short, most of the time a claim or a hand-in is under way.
    let mut workers: Vec<_> = (0..6).map(|_| fleet.start_with(&["--slots", "1"])).collect();
    fleet.noted(batch, "end", 20).await;

    for worker in &mut workers {
        worker.signal(Signal::TERM);
        assert_eq!(worker.exit_status().await, 0);
        let id = fleet.id_of(worker).await;
        let select = "SELECT count(*) FROM holdfast.leases WHERE worker_id = $1";
        let left: i64 = fleet.sql.query_one(select, &[&id.uuid()]).await.unwrap().get(0);
        assert_eq!(left, 0, "leases left behind by a worker that ended in order");
    }

    assert!(fleet.row(batch).await.counts.fresh > 0, "the batch outlived all signals");
    assert_invariants(&fleet.sql, batch).await;
}
