use std::time::Duration;

use rustix::process::Signal;

use super::super::runbook::Reader;
use super::super::world::World;
use crate::support::fleet::{Fleet, LONG, SHORT, SHORT_LEASE, Submission, until};
use crate::support::invariants::assert_invariants;
use crate::support::proxy::{Proxy, Weather};

/// An item that outlives every worker the first time and ends soon the second time.
const STUCK_ONCE: &str = "[ $HOLDFAST_ATTEMPT -gt 1 ] || exec sleep 300";

/// Until a worker's clock has agreed with the database's for one lease (F4).
const TRUSTED: Duration = Duration::from_secs(4);

#[tokio::test]
async fn drill_stuck_leases() {
    let Some(world) = World::new(Fleet::new(SHORT_LEASE).await).await else { return };
    let fleet = &world.fleet;
    let mut holder = world.worker(0, &[]).await;
    let batch = fleet.submit(Submission::new(3, STUCK_ONCE)).await;
    fleet.noted(batch, "start", 3).await;
    let heir = world.worker(1, &[]).await;
    tokio::time::sleep(TRUSTED).await;
    let mut reader = Reader::new(&world, "stuck-leases")
        .knows("BATCH", batch)
        .knows("WORKER", fleet.id_of(&holder).await);

    // Somebody looked closely at a batch, and went to lunch; then its worker died.
    let sat = "BEGIN; SELECT pg_advisory_xact_lock(1212564301, lock_no) FROM holdfast.batches";
    let (session, backend) = world.session().await;
    session.batch_execute(sat).await.unwrap();
    holder.kill();
    world.fires("HoldfastLeasesOverdue").await;
    reader.learns("BACKEND", backend);
    reader.diagnoses().await;
    reader.does(&["pg_terminate_backend"]).await;
    world.ends("HoldfastLeasesOverdue").await;
    reader.verifies().await;
    until("the items ran elsewhere", LONG, async || {
        fleet.database.batch(batch, None).await.unwrap().unwrap().is_finished()
    })
    .await;

    // The last worker dies, and nobody is there to sweep.
    let until_then = format!("[ -e '{}' ] || exec sleep 300", fleet.file("then").display());
    let stuck = fleet.submit(Submission::new(2, &until_then)).await;
    fleet.noted(stuck, "start", 2).await;
    let dead = fleet.id_of(&heir).await;
    let mut heir = heir;
    heir.kill();
    world.fires("HoldfastLeasesOverdue").await;
    reader.learns("WORKER", dead);
    tokio::time::sleep(SHORT * 2).await;
    reader.does(&["leases release"]).await;
    world.ends("HoldfastLeasesOverdue").await;
    reader.verifies().await;
    fleet.touch("then");
    let _next = world.worker(2, &[]).await;
    fleet.ended(stuck).await;
}

#[tokio::test]
#[ignore = "takes half a minute: make drills, make long"]
async fn long_drill_lease_storm() {
    let Some(world) = World::new(Fleet::new(SHORT_LEASE).await).await else { return };
    let fleet = &world.fleet;
    let proxy = Proxy::before(fleet.url()).await;
    let worker = world.worker_at(proxy.url(), 0, &[]).await;
    let batch = fleet.submit(Submission::new(14, STUCK_ONCE)).await;
    fleet.noted(batch, "start", 14).await;
    let reader = Reader::new(&world, "lease-storm")
        .knows("BATCH", batch)
        .knows("WORKER", fleet.id_of(&worker).await);

    // The network between the worker and the database is cut for longer than a lease.
    proxy.set(Weather::Stalled);
    world.fires("HoldfastLeaseStorm").await;
    reader.diagnoses().await;
    proxy.set(Weather::Fair);
    reader.acts().await;
    world.ends("HoldfastLeaseStorm").await;
    reader.verifies().await;

    let row = fleet.ended(batch).await;
    assert_eq!(row.counts.succeeded, 14);
    assert_invariants(&fleet.sql, batch).await;
}

#[tokio::test]
#[ignore = "takes half a minute: make drills, make long"]
async fn long_drill_mass_expiry() {
    let Some(world) = World::new(Fleet::new(SHORT_LEASE).await).await else { return };
    let fleet = &world.fleet;
    let (mut one, mut two) =
        (world.worker(0, &["--slots", "8"]).await, world.worker(1, &["--slots", "8"]).await);
    let batch = fleet.submit(Submission::new(16, STUCK_ONCE)).await;
    fleet.noted(batch, "start", 16).await;
    let _heir = world.worker(2, &[]).await;
    tokio::time::sleep(TRUSTED).await;
    let reader = Reader::new(&world, "mass-expiry").knows("BATCH", batch);

    one.kill();
    two.kill();
    world.fires("HoldfastMassExpiry").await;
    reader.diagnoses().await;
    reader.acts().await;
    world.ends("HoldfastMassExpiry").await;
    reader.verifies().await;

    assert_eq!(fleet.ended(batch).await.counts.succeeded, 16);
}

#[tokio::test]
#[ignore = "takes half a minute: make drills, make long"]
async fn long_drill_straggler() {
    let Some(world) = World::new(Fleet::new(SHORT_LEASE).await).await else { return };
    let fleet = &world.fleet;
    let mut frozen = world.worker(0, &[]).await;
    let body = "if [ $HOLDFAST_ATTEMPT = 1 ]; then sleep 1; else sleep 3; fi";
    let batch = fleet.submit(Submission::new(8, body)).await;
    fleet.noted(batch, "start", 8).await;
    let reader = Reader::new(&world, "straggler")
        .knows("BATCH", batch)
        .knows("KEY", "k0")
        .knows("WORKER", fleet.id_of(&frozen).await);

    frozen.signal_worker(Signal::STOP).await;
    let heir = world.worker(1, &[]).await;
    until("the other worker took the items", LONG, async || {
        let marks = fleet.marks();
        marks.iter().filter(|mark| mark.attempt == 2 && mark.what == "start").count() >= 8
    })
    .await;
    // It wakes up, hands in what its commands came to, and is refused.
    frozen.signal_worker(Signal::CONT).await;
    world.fires("HoldfastStragglerWrites").await;
    reader.diagnoses().await;
    reader.acts().await;
    world.ends("HoldfastStragglerWrites").await;
    reader.verifies().await;

    assert_eq!(frozen.exit_status().await, 0, "drained, as the page said");
    fleet.ended(batch).await;
    let heir = fleet.id_of(&heir).await;
    for outcome in fleet.outcomes(batch).await {
        assert!(outcome.succeeded && outcome.worker == heir, "{outcome:?}");
    }
}
