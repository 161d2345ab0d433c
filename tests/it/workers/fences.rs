//! What a worker does not do while it cannot be sure.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use holdfast::clock::{BootInstant, Clock};
use holdfast::fault::Fault;
use holdfast::finish::{Finished, Finisher, Grouping};
use holdfast::leases::{Grant, Leases};
use holdfast::store::{Database, DatabaseOptions};
use holdfast::telemetry::{BuildInfo, Metrics};
use rustix::process::Signal;
use time::OffsetDateTime;
use tokio_util::task::TaskTracker;
use tracing::Span;

use crate::support::fixture::{Bed, TTL, succeeded};
use crate::support::fleet::{Fleet, LONG, SHORT, SHORT_LEASE, Submission, until};
use crate::support::invariants::assert_invariants;
use crate::support::proxy::Proxy;

#[tokio::test]
async fn nothing_is_claimed_while_heartbeats_are_not_answered() {
    let fleet = Fleet::new(SHORT_LEASE).await;
    let worker = fleet.start();
    worker.ready().await;
    let id = fleet.id_of(&worker).await;
    // Its row, which only heartbeats need.
    fleet.sql.batch_execute("BEGIN").await.unwrap();
    let lock = "SELECT FROM holdfast.workers WHERE id = $1 FOR UPDATE";
    fleet.sql.execute(lock, &[&id.uuid()]).await.unwrap();
    until("a heartbeat fails", LONG, async || {
        worker.log().iter().any(|line| {
            line["message"].as_str().is_some_and(|text| text.contains("claiming nothing until"))
        })
    })
    .await;

    let batch = fleet.submit(Submission::new(2, "true")).await;
    tokio::time::sleep(SHORT).await;
    assert_eq!(fleet.row(batch).await.counts.fresh, 2, "claimed without a heartbeat");

    fleet.sql.batch_execute("COMMIT").await.unwrap();
    fleet.ended(batch).await;
    fleet.assert_each_ran_once(batch).await;
}

#[tokio::test]
async fn a_place_that_a_draining_worker_frees_is_taken_at_once() {
    // Nobody finds it by polling.
    let polls = "[worker]\nnotified_poll_interval = '1m'\npoll_interval = '1m'\n";
    let fleet = Fleet::new(polls).await;
    let mut draining = fleet.start();
    draining.ready().await;
    let capped = Submission { max_running: Some(1), ..Submission::new(2, "sleep 1") };
    let batch = fleet.submit(capped).await;
    fleet.noted(batch, "start", 1).await;
    let other = fleet.start();
    other.ready().await;

    draining.signal(Signal::TERM);
    assert_eq!(draining.exit_status().await, 0);
    until("the second item starts", Duration::from_secs(20), async || {
        fleet.count(batch, "start") == 2
    })
    .await;

    fleet.ended(batch).await;
    fleet.assert_each_ran_once(batch).await;
}

#[derive(Default)]
struct ManualClock(AtomicU64);

impl ManualClock {
    fn to(&self, seconds: u64) {
        self.0.store(seconds * 1_000_000_000, Ordering::SeqCst);
    }
}

impl Clock for ManualClock {
    fn now(&self) -> BootInstant {
        BootInstant::from_nanos(self.0.load(Ordering::SeqCst))
    }

    fn wall(&self) -> OffsetDateTime {
        OffsetDateTime::UNIX_EPOCH
    }
}

#[tokio::test]
async fn a_hand_in_whose_first_answer_was_lost_extends_no_trust() {
    const TRUST: Duration = Duration::from_secs(45);
    let bed = Bed::new().await;
    let batch = bed.batch(3).await;
    let proxy = Proxy::before(bed.db.url()).await;
    let database = Database::new(DatabaseOptions {
        url: proxy.url().to_owned(),
        ..bed.store.options().clone()
    })
    .unwrap();
    let clock = Arc::new(ManualClock::default());
    let leases = Arc::new(Leases::new(clock.clone(), TRUST));
    let mut holds = bed.claim(batch, 3).await;
    let (lease, queue) = (holds[0].lease(), "q".parse::<holdfast::model::QueueName>().unwrap());
    let grant = Grant {
        batch,
        lease,
        token: holds[0].token(),
        queue: queue.clone(),
        asked_at: clock.now(),
    };
    leases.enter(grant, holds.iter().map(|hold| hold.item().position()));
    let hand_ins = TaskTracker::new();
    let metrics = Arc::new(Metrics::new([queue.clone()], &BuildInfo::current(1, 1)));
    let finisher = Finisher::new(
        database,
        clock.clone(),
        Arc::clone(&leases),
        metrics,
        bed.worker,
        TTL,
        Grouping { delay: Duration::ZERO, items: 1, bytes: 1 << 20 },
        hand_ins.clone(),
        Fault::default(),
        Arc::default(),
    );
    let mut hand_in = async || {
        let (_, before) = leases.size();
        finisher.submit(Finished {
            hold: holds.pop().unwrap(),
            settlement: succeeded(),
            queue: queue.clone(),
            slot: None,
            span: Span::none(),
            fenced: false,
        });
        until("it is handed in", LONG, async || leases.size().1 < before).await;
    };
    // How much trust is left; the question itself extends nothing.
    let left = || leases.extend(lease, BootInstant::from_nanos(0)).unwrap();

    clock.to(10);
    hand_in().await;
    assert_eq!(left(), TRUST, "an applied hand-in extends trust from when it was asked");
    clock.to(20);
    proxy.lose_the_next_commit();
    hand_in().await;

    assert_eq!(bed.counts(batch).await.succeeded, 2, "it was stored, once");
    assert_eq!(left() + Duration::from_secs(10), TRUST, "only the first try extended the row");
    assert_invariants(&bed.sql, batch).await;
}
