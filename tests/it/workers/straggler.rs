//! Workers that were frozen beyond their lease.

use std::time::Duration;

use holdfast::store::ControlVerb;
use rand::Rng;
use rustix::process::Signal;

use crate::support::fleet::{Fleet, LONG, SHORT_LEASE, Submission, now, until};
use crate::support::invariants::assert_invariants;

#[tokio::test]
async fn a_worker_frozen_beyond_its_lease_publishes_nothing() {
    let fleet = Fleet::new(SHORT_LEASE).await;
    let frozen = fleet.start();
    frozen.ready().await;
    // The first attempts end while their worker is frozen, the second ones after it woke up.
    let body = "if [ $HOLDFAST_ATTEMPT = 1 ]; then sleep 1; else sleep 3; fi";
    let batch = fleet.submit(Submission::new(3, body)).await;
    fleet.noted(batch, "start", 3).await;
    frozen.signal_worker(Signal::STOP).await;
    let mut other = fleet.start();

    let taken_over = async || {
        let marks = fleet.marks();
        marks.iter().filter(|mark| mark.attempt == 2 && mark.what == "start").count() >= 3
    };
    until("the other worker took the items", LONG, taken_over).await;
    frozen.signal_worker(Signal::CONT).await;
    // It hands in what its commands came to, and is refused.
    let refused = async || {
        let (_, metrics) = frozen.get("/metrics").await.unwrap();
        let lost: f64 = metrics
            .lines()
            .filter(|line| line.starts_with("holdfast_leases_lost_total{"))
            .map(|line| line.rsplit_once(' ').unwrap().1.parse::<f64>().unwrap())
            .sum();
        lost >= 3.0
    };
    until("the straggler gives up its items", LONG, refused).await;
    assert_eq!(fleet.outcomes(batch).await, [], "nothing is published by it");
    fleet.ended(batch).await;

    let heir = fleet.id_of(&other).await;
    let outcomes = fleet.outcomes(batch).await;
    assert_eq!(outcomes.len(), 3);
    for outcome in outcomes {
        assert!(outcome.succeeded && outcome.worker == heir, "{outcome:?}");
    }
    let straggler = fleet.id_of(&frozen).await;
    let attempts = fleet.attempts(batch).await;
    let lost: Vec<_> = attempts.iter().filter(|lost| lost.worker == straggler).collect();
    assert_eq!(lost.len(), 3);
    for lost in lost {
        assert_eq!(lost.brief(), (1, "expired", true));
    }
    assert_invariants(&fleet.sql, batch).await;

    // The straggler goes on as if nothing had been.
    other.kill();
    let next = fleet.submit(Submission::new(4, "sleep 0.05")).await;
    fleet.ended(next).await;
    assert!(fleet.outcomes(next).await.iter().all(|outcome| outcome.worker == straggler));
}

#[tokio::test]
async fn a_worker_taken_for_dead_is_listed_again() {
    let fleet = Fleet::new(SHORT_LEASE).await;
    let frozen = fleet.start();
    frozen.ready().await;
    let id = fleet.id_of(&frozen).await;
    frozen.signal_worker(Signal::STOP).await;
    let close = "UPDATE holdfast.workers SET ended_at = now(), state = 'exited',
                        exit_reason = 'silent' WHERE id = $1";
    fleet.sql.execute(close, &[&id.uuid()]).await.unwrap();
    frozen.signal_worker(Signal::CONT).await;

    until("it is listed", Duration::from_secs(20), async || {
        let live = fleet.database.live_workers().await.unwrap();
        live.iter().any(|worker| worker.id == id && worker.state == "running")
    })
    .await;
}

#[tokio::test]
async fn a_worker_frozen_at_any_moment_holds_up_no_control() {
    let fleet = Fleet::new("").await;
    let worker = fleet.start();
    worker.ready().await;
    let batch = fleet.submit(Submission::new(4_000, ":")).await;
    fleet.noted(batch, "start", 16).await;

    let mut longest = Duration::ZERO;
    for _ in 0..30 {
        let pause = rand::rng().random_range(5..60);
        tokio::time::sleep(Duration::from_millis(pause)).await;
        worker.signal_worker(Signal::STOP).await;
        let asked = now();
        fleet.control(batch, ControlVerb::Pause).await;
        longest = longest.max(now().saturating_sub(asked));
        fleet.control(batch, ControlVerb::Resume).await;
        worker.signal_worker(Signal::CONT).await;
    }

    eprintln!("beside a frozen worker a pause took {longest:?} at most");
    // What it left open in the middle of a transaction would be ended after five seconds.
    assert!(longest < Duration::from_secs(4), "{longest:?}");
}
