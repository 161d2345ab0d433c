//! Every command, every SQL statement and every expression of every page is run, in a state that the page
//! is about. The drills run some of them again, in the middle of the fault.

use std::time::Duration;

use holdfast::store::migrate;
use serde_json::json;

use super::runbook::{Language, Reader, pages};
use super::world::World;
use crate::support::fleet::{Fleet, LONG, SHORT, SHORT_LEASE, Submission, until};
use crate::support::worker_process::WorkerProcess;

/// Pages that are run in a state of their own by a drill that is part of every run of the tests.
const DRILLED: [&str; 1] = ["stuck-leases"];

/// Two items that run on, one that failed, and one that waits for its next attempt.
const MIXED: &str = "case $input in 0) exit 3 ;; 1) exit 75 ;; *) exec sleep 300 ;; esac";

async fn busy_batch(fleet: &Fleet) -> holdfast::model::BatchId {
    let items = (0..4).map(|n| json!({"key": format!("k{n}"), "input": n}));
    let batch = Submission { permanent: vec![3], ..Submission::of(items, MIXED) };
    let batch = fleet.submit(batch).await;
    until("it is under way", LONG, async || {
        let counts = fleet.row(batch).await.counts;
        counts.failed > 0 && fleet.count(batch, "start") >= 4
    })
    .await;
    batch
}

async fn follow(world: &World, slug: &str, worker: &WorkerProcess) {
    let batch = busy_batch(&world.fleet).await;
    let (session, backend) = world.session().await;
    let reader = Reader::new(world, slug)
        .knows("BATCH", batch)
        .knows("KEY", "k0")
        .knows("WORKER", world.fleet.id_of(worker).await)
        .knows("GUARD", worker.pid())
        .knows("BACKEND", backend)
        .knows("TOKEN", i64::MAX >> 2)
        .knows("TO", migrate::newest() - 1);
    for block in reader.page.blocks.clone() {
        reader.runs(&block).await;
    }
    drop(session);
    let canceled = holdfast::store::ControlVerb::Cancel;
    drop(world.fleet.database.control_batch(batch, None, canceled, "test").await);
}

#[tokio::test]
async fn every_block_of_every_page_runs() {
    // A drain ends soon.
    let settings = format!("{SHORT_LEASE}[drain]\ngrace = '5s'\n");
    let Some(world) = World::new(Fleet::new(&settings).await).await else { return };
    let mut worker = world.worker(0, &[]).await;
    let (last, others): (Vec<_>, Vec<_>) =
        pages().into_iter().partition(|page| page.slug == "migrations");
    for page in others.iter().filter(|page| !DRILLED.contains(&page.slug.as_str())) {
        // Some pages end it.
        if worker.get("/readyz").await.is_none_or(|(status, _)| status != 200) {
            if !worker.has_ended() {
                worker.kill();
            }
            worker = world.worker(0, &[]).await;
        }
        follow(&world, &page.slug, &worker).await;
    }
    // It takes the schema away under whoever works.
    for page in last {
        if !worker.has_ended() {
            worker.kill();
        }
        tokio::time::sleep(SHORT + Duration::from_secs(1)).await;
        let reader = Reader::new(&world, &page.slug).knows("TO", migrate::newest() - 1);
        for block in reader.page.blocks.clone() {
            reader.runs(&block).await;
        }
    }
}

#[test]
fn what_diagnoses_changes_nothing() {
    // Where SQL may not write, the server sees to it; of commands these change something.
    const CHANGES: [&str; 8] =
        ["ctl ", "pause", "resume", "cancel", "retry", "--yes", "kill -TERM", "kill -HUP"];
    for page in pages() {
        for block in &page.blocks {
            let looks = block.section != "Act" && block.language == Language::Shell;
            let changes = CHANGES.iter().any(|change| block.text.contains(change));
            assert!(!(looks && changes), "{}:{}: {}", page.slug, block.line, block.text);
        }
    }
}
