//! The database's clock is set while leases are held.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use holdfast::clock::{BootInstant, Clock};
use holdfast::health::{HealthLimits, HealthState};
use holdfast::heartbeat::Heartbeat;
use holdfast::leases::{Grant, Leases};
use holdfast::model::{BatchId, Hold, QueueName, WorkerId};
use holdfast::reap::{Judge, Reaper, SweepPolicy};
use holdfast::store::{ClaimRequest, Database, ServerReading};
use holdfast::telemetry::{BuildInfo, Metrics};
use time::OffsetDateTime;
use tokio_util::sync::CancellationToken;

use crate::support::fixture::{Bed, REAP, TTL, granted};
use crate::support::fleet::{LONG, until};
use crate::support::invariants::assert_invariants;

/// Between two heartbeats: a little more than their longest pause.
const BEAT: u64 = 20;

/// A boot-time clock that stands where the test puts it.
#[derive(Default)]
struct ManualClock(AtomicU64);

impl Clock for ManualClock {
    fn now(&self) -> BootInstant {
        BootInstant::from_nanos(self.0.load(Ordering::SeqCst) * 1_000_000_000)
    }

    fn wall(&self) -> OffsetDateTime {
        OffsetDateTime::UNIX_EPOCH
    }
}

/// Judges as its heartbeat does, and notes what it said of the readings of sweeps.
struct Noting<'a> {
    heartbeat: &'a Heartbeat,
    said: Mutex<Vec<bool>>,
}

impl Noting<'_> {
    fn said(&self) -> Vec<bool> {
        self.said.lock().unwrap().clone()
    }
}

impl Judge for Noting<'_> {
    fn may_reap(&self) -> bool {
        self.heartbeat.may_reap()
    }

    fn may_reap_by(&self, server: &ServerReading) -> bool {
        let may = self.heartbeat.may_reap_by(server);
        self.said.lock().unwrap().push(may);
        may
    }

    fn disturbed_at(&self) -> Option<OffsetDateTime> {
        self.heartbeat.disturbed_at()
    }
}

/// A database and a worker, each with a clock that only the test moves.
struct Clocks {
    bed: Bed,
    /// Its sessions read the test's clock.
    database: Database,
    boot: Arc<ManualClock>,
}

impl Clocks {
    async fn new() -> Self {
        let bed = Bed::new().await;
        bed.db.replace_clock().await;
        bed.run("UPDATE clock.set SET stands_at = pg_catalog.clock_timestamp()", &[]).await;
        let database = Database::new(bed.store.options().clone()).unwrap();
        Self { bed, database, boot: Arc::default() }
    }

    async fn claim_as(&self, worker: WorkerId, batch: BatchId) -> Hold {
        let request = ClaimRequest { worker, ..self.bed.request(batch, 1) };
        granted(self.database.claim(&request).await.unwrap()).remove(0)
    }

    async fn set_database(&self, seconds: u64) {
        let forward = "UPDATE clock.set SET stands_at = stands_at + make_interval(secs => $1)";
        self.bed.run(forward, &[&f64::from(u32::try_from(seconds).unwrap())]).await;
    }

    /// Lets both go on until the next heartbeat.
    async fn until_next_beat(&self) {
        self.set_database(BEAT).await;
        self.boot.0.fetch_add(BEAT, Ordering::SeqCst);
        self.until_beaten().await;
    }

    async fn until_beaten(&self) {
        let beaten = "SELECT w.heartbeat_at = c.stands_at FROM holdfast.workers w, clock.set c
                       WHERE w.id = $1";
        until("a heartbeat is answered", LONG, async || {
            let row = self.bed.sql.query_one(beaten, &[&self.bed.worker.uuid()]).await.unwrap();
            row.get(0)
        })
        .await;
    }

    async fn is_held(&self, hold: &Hold) -> bool {
        let held = "SELECT EXISTS (SELECT FROM holdfast.leases WHERE lease_id = $1)";
        let row = self.bed.sql.query_one(held, &[&hold.lease().uuid()]).await.unwrap();
        row.get(0)
    }
}

#[tokio::test]
async fn a_clock_set_forward_between_two_heartbeats_costs_no_lease() {
    let clocks = Clocks::new().await;
    let (bed, database) = (&clocks.bed, &clocks.database);
    let dead = WorkerId::generate();
    bed.register(dead).await;
    let batch = bed.batch(2).await;
    let held = clocks.claim_as(bed.worker, batch).await;
    let lapsing = clocks.claim_as(dead, batch).await;

    let clock: Arc<dyn Clock> = clocks.boot.clone();
    let leases = Arc::new(Leases::new(Arc::clone(&clock), TTL * 3 / 4));
    let queue: QueueName = "q".parse().unwrap();
    let metrics = Arc::new(Metrics::new([queue.clone()], &BuildInfo::current(1, 1)));
    let (lease, token, asked_at) = (held.lease(), held.token(), clock.now());
    leases.enter(Grant { batch, lease, token, queue, asked_at }, [held.item().position()]);
    let heartbeat = Heartbeat::new(
        database.clone(),
        Arc::clone(&clock),
        leases,
        Arc::clone(&metrics),
        Arc::new(HealthState::new(Arc::clone(&clock), HealthLimits::for_lease(TTL))),
        bed.worker,
        TTL,
        3,
        Arc::default(),
    );
    let policy =
        SweepPolicy { fast: Duration::from_millis(10), full: Duration::from_secs(30), reap: REAP };
    let reaper = Reaper::new(database.clone(), clock, metrics, policy);
    let judge = Noting { heartbeat: &heartbeat, said: Mutex::default() };
    let stop = CancellationToken::new();
    let steps = async {
        clocks.until_beaten().await;
        for _ in 0..3 {
            clocks.until_next_beat().await;
        }
        assert!(heartbeat.may_reap(), "the clocks agreed for a lease");

        // By the new time both leases have expired long ago, and both workers are silent.
        clocks.set_database(3_600).await;
        let first = async || !judge.said().is_empty() || !clocks.is_held(&held).await;
        tokio::select! {
            () = reaper.run(&stop, &judge, || ()) => {}
            _ = until("a sweep looks", LONG, first) => {}
        }
        assert!(clocks.is_held(&held).await, "its worker lives");
        assert!(clocks.is_held(&lapsing).await, "nothing is known of its worker");
        assert_eq!(judge.said(), [false]);
        assert!(!heartbeat.may_reap(), "the time of agreement begins anew");

        for _ in 0..4 {
            clocks.until_next_beat().await;
        }
        tokio::select! {
            () = reaper.run(&stop, &judge, || ()) => {}
            _ = until("the dead worker's lease is taken back", LONG, async || {
                !clocks.is_held(&lapsing).await
            }) => {}
        }
    };
    tokio::select! {
        () = heartbeat.run(&stop) => {}
        () = steps => {}
    }

    assert!(clocks.is_held(&held).await);
    assert_invariants(&bed.sql, batch).await;
}
