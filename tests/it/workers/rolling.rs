//! Workers that are replaced one after the other under load: a rolling restart, and a rolling upgrade.
//!
//! `HOLDFAST_PREVIOUS_BIN` names the program of an earlier release: its workers begin on the schema that
//! it knows, the schema is brought up to date beside them, and workers of this program take over. Without
//! it both are this program.

use std::process::Command;

use holdfast::store::migrate;
use rustix::process::Signal;
use serde_json::Value;

use crate::support::fleet::{Fleet, Submission, now};
use crate::support::invariants::assert_invariants;

const WORKERS: usize = 4;
const ITEMS: usize = 50;

fn previous() -> String {
    let this = || env!("CARGO_BIN_EXE_holdfast").to_owned();
    std::env::var("HOLDFAST_PREVIOUS_BIN").unwrap_or_else(|_| this())
}

/// The newest schema that a program knows.
fn newest_of(program: &str, url: &str) -> i64 {
    let status = Command::new(program)
        .args(["migrate", "status", "--json", "--database-url", url])
        .output()
        .unwrap();
    let text = String::from_utf8(status.stdout).unwrap();
    let versions = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    versions
        .flat_map(|value| value.as_array().cloned().unwrap_or_else(|| vec![value]))
        .filter(|migration| migration["name"] != "of a newer holdfast")
        .filter_map(|migration| migration["version"].as_i64())
        .max()
        .unwrap()
}

#[tokio::test]
async fn replaced_one_after_the_other_under_load_workers_fail_and_charge_nothing() {
    let fleet = Fleet::new("").await;
    let previous = previous();
    migrate::down(fleet.url(), newest_of(&previous, fleet.url())).await.unwrap();
    let slots = ["--slots", "2"];
    let mut old: Vec<_> =
        (0..WORKERS).map(|_| fleet.start_program(&previous, fleet.url(), &slots, &[])).collect();
    for worker in &old {
        worker.ready().await;
    }
    let load = async || {
        let batch = fleet.submit(Submission::new(ITEMS, "sleep 0.3")).await;
        fleet.noted(batch, "start", 2 * WORKERS).await;
        batch
    };
    let mut batches = vec![load().await];
    migrate::up(fleet.url(), None).await.unwrap();

    let began = now();
    let mut new = Vec::new();
    for worker in &mut old {
        let next = fleet.start_with(&slots);
        next.ready().await;
        batches.push(load().await);
        worker.signal(Signal::TERM);
        assert_eq!(worker.exit_status().await, 0, "drained, and nothing had to be stopped");
        new.push(next);
    }
    let took = now().checked_sub(began).unwrap();
    eprintln!("a rolling restart of {WORKERS} workers under load took {took:?}");

    for batch in batches {
        let row = fleet.ended(batch).await;
        assert_eq!((row.counts.failed, row.counts.cancelled), (0, 0), "{row:?}");
        let attempts = fleet.attempts(batch).await;
        assert!(attempts.iter().all(|attempt| !attempt.charged), "{attempts:?}");
        fleet.assert_each_ran_once(batch).await;
        assert_invariants(&fleet.sql, batch).await;
        let held = "SELECT count(*) FROM holdfast.leases WHERE batch_id = $1";
        assert_eq!(fleet.value::<i64>(batch, held).await, 0);
    }
}
