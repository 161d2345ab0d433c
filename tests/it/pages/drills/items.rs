use holdfast::store::ControlVerb;

use super::super::dashboards::LETHAL;
use super::super::runbook::Reader;
use super::super::world::World;
use crate::support::fleet::{Fleet, LONG, SHORT_LEASE, Submission, until};
use crate::support::invariants::assert_invariants;

#[tokio::test]
async fn drill_poison_item() {
    let settings = "[retry]\nbackoff_base = '100ms'\nbackoff_max = '500ms'\nmax_crashes = 2\n";
    let Some(world) = World::new(Fleet::new(settings).await).await else { return };
    let fleet = &world.fleet;
    let _worker = world.worker(0, &["--slots", "1"]).await;
    let mended = fleet.file("mended");
    let body =
        format!("[ $input != 1 ] || [ -e '{}' ] || {{ sleep 3; {LETHAL}; }}", mended.display());
    let batch = fleet.submit(Submission { max_attempts: 9, ..Submission::new(3, &body) }).await;
    let reader = Reader::new(&world, "poison-item").knows("BATCH", batch).knows("KEY", "k1");

    world.fires("HoldfastPoisonItems").await;
    reader.diagnoses().await;
    until("the others end", LONG, async || fleet.row(batch).await.counts.succeeded == 2).await;
    assert_eq!(fleet.row(batch).await.counts.failed, 1);
    fleet.touch("mended");
    reader.does(&["holdfast retry"]).await;
    world.ends("HoldfastPoisonItems").await;
    reader.verifies().await;

    assert_eq!(fleet.ended(batch).await.counts.succeeded, 3);
    assert_invariants(&fleet.sql, batch).await;
}

#[tokio::test]
#[ignore = "takes half a minute: make drills, make long"]
async fn long_drill_worker_crash_loop() {
    let settings = "[retry]\nbackoff_base = '100ms'\nbackoff_max = '500ms'\nmax_crashes = 9\n";
    let Some(world) = World::new(Fleet::new(settings).await).await else { return };
    let fleet = &world.fleet;
    let worker = world.worker(0, &["--slots", "1"]).await;
    let body = format!("[ -e '{}' ] || {{ sleep 3; {LETHAL}; }}", fleet.file("mended").display());
    let batch = fleet.submit(Submission { max_attempts: 20, ..Submission::new(1, &body) }).await;
    let reader = Reader::new(&world, "worker-crash-loop").knows("BATCH", batch);

    world.fires("HoldfastWorkerCrashLoop").await;
    reader.diagnoses().await;
    reader.does(&["holdfast pause"]).await;
    worker.ready().await;
    fleet.touch("mended");
    world.ends("HoldfastWorkerCrashLoop").await;
    reader.does(&["holdfast resume"]).await;
    reader.verifies().await;

    assert_eq!(fleet.ended(batch).await.counts.succeeded, 1);
}

#[tokio::test]
#[ignore = "takes half a minute: make drills, make long"]
async fn long_drill_batch_stuck() {
    let Some(world) = World::new(Fleet::new(SHORT_LEASE).await).await else { return };
    let fleet = &world.fleet;
    let _worker = world.worker(0, &[]).await;
    let batch = fleet.submit(Submission::new(200, "sleep 0.2")).await;
    fleet.noted(batch, "end", 1).await;
    let reader = Reader::new(&world, "batch-stuck").knows("BATCH", batch);

    fleet.control(batch, ControlVerb::Pause).await;
    world.fires("HoldfastBatchPausedLong").await;
    reader.diagnoses().await;
    reader.does(&["holdfast resume"]).await;
    world.ends("HoldfastBatchPausedLong").await;
    reader.verifies().await;

    assert_eq!(fleet.ended(batch).await.counts.succeeded, 200);
}
