use std::time::Duration;

use super::super::runbook::Reader;
use super::super::world::World;
use crate::support::fleet::{Fleet, LONG, SHORT_LEASE, Submission, until};

#[tokio::test]
async fn drill_emergency_stop() {
    let Some(world) = World::new(Fleet::new("").await).await else { return };
    let fleet = &world.fleet;
    let _worker = world.worker(0, &["--slots", "2"]).await;
    let wrong = fleet.submit(Submission::new(2, "exec sleep 300")).await;
    fleet.noted(wrong, "start", 2).await;
    let others = fleet.submit(Submission::new(40, "sleep 0.05")).await;
    let reader = Reader::new(&world, "emergency-stop").knows("BATCH", wrong);

    reader.does(&["ctl stop-claims"]).await;
    world.fires("HoldfastClaimsDisabled").await;
    reader.diagnoses().await;
    reader.does(&["holdfast cancel"]).await;
    until("the wrong work is stopped", LONG, async || Fleet::processes_of(wrong).is_empty()).await;
    // The slots are free, and nothing new begins.
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(fleet.count(others, "start"), 0);
    reader.does(&["ctl start-claims"]).await;
    world.ends("HoldfastClaimsDisabled").await;
    reader.verifies().await;

    assert_eq!(fleet.ended(others).await.counts.succeeded, 40);
}

#[tokio::test]
#[ignore = "takes half a minute: make drills, make long"]
async fn long_drill_monitoring_blind() {
    let Some(mut world) = World::new(Fleet::new("").await).await else { return };
    let worker = world.worker(0, &[]).await;
    world.fresh().await;
    world.ends("HoldfastExporterStale").await;

    world.stop_exporter();
    world.fires("HoldfastExporterStale").await;
    Reader::new(&world, "monitoring-blind").diagnoses().await;
    world.start_exporter();
    world.ends("HoldfastExporterStale").await;
    let reader = Reader::new(&world, "monitoring-blind").knows("GUARD", worker.pid());
    reader.acts().await;
    reader.verifies().await;
}

#[tokio::test]
#[ignore = "takes half a minute: make drills, make long"]
async fn long_drill_node_drain() {
    let Some(world) = World::new(Fleet::new(SHORT_LEASE).await).await else { return };
    let fleet = &world.fleet;
    let mut leaving = world.worker(0, &[]).await;
    let body = "[ $HOLDFAST_ATTEMPT -gt 1 ] || exec sleep 300";
    let batch = fleet.submit(Submission::new(3, body)).await;
    fleet.noted(batch, "start", 3).await;
    let _other = world.worker(1, &[]).await;
    let reader = Reader::new(&world, "node-drain")
        .knows("WORKER", fleet.id_of(&leaving).await)
        .knows("GUARD", leaving.pid());

    reader.does(&["ctl drain"]).await;
    world.fires("HoldfastDrainStuck").await;
    reader.diagnoses().await;
    reader.does(&["kill -TERM"]).await;
    world.ends("HoldfastDrainStuck").await;
    reader.verifies().await;

    assert_eq!(leaving.exit_status().await, 3, "what ran was given back");
    assert_eq!(fleet.ended(batch).await.counts.succeeded, 3);
    assert!(fleet.attempts(batch).await.iter().all(|attempt| !attempt.charged));
}
