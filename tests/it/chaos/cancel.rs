//! A cancel while many workers hand in and claim.

use std::time::Duration;

use holdfast::store::{ControlVerb, Event};
use serde_json::json;

use crate::support::fleet::{Fleet, Submission, now};
use crate::support::invariants::{assert_invariants, assert_no_deadlock};

const WORKERS: usize = 32;
const ROUNDS: usize = 20;

/// Half of the slots are taken by items that wait to be stopped; the other half keeps the batch's
/// locks busy.
const BODY: &str = "case $input in
wait) trap 'mark term; exit 0' TERM; while :; do sleep 300 & wait $!; done ;;
esac";

fn percentile(sorted: &[Duration], percent: usize) -> Duration {
    sorted[(sorted.len() * percent / 100).min(sorted.len() - 1)]
}

fn told(what: &str, mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    let (half, most) = (percentile(&times, 50), percentile(&times, 99));
    eprintln!("{what} of {}: p50 {half:?}, p99 {most:?}", times.len());
    half
}

#[tokio::test]
#[ignore = "takes minutes: make long"]
async fn long_a_cancel_under_32_busy_workers_is_prompt() {
    let fleet = Fleet::new("[lease]\nttl = '60s'\nkill_grace = '500ms'\n").await;
    let workers: Vec<_> = (0..WORKERS).map(|_| fleet.start_with(&["--slots", "2"])).collect();
    for worker in &workers {
        worker.ready().await;
    }

    let (mut commands, mut stops) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let items = (0..WORKERS + 20_000).map(|n| {
            let input = if n < WORKERS { "wait" } else { "go" };
            json!({"key": n.to_string(), "input": input})
        });
        let batch = fleet.submit(Submission::of(items, BODY)).await;
        fleet.noted(batch, "start", WORKERS + 100).await;

        let asked = now();
        fleet.control(batch, ControlVerb::Cancel).await;
        commands.push(now().saturating_sub(asked));
        fleet.database.notify(&Event::Cancelled(batch)).await.unwrap();
        fleet.noted(batch, "term", WORKERS).await;

        let marks = fleet.marks();
        let terms = marks.iter().filter(|mark| mark.batch == batch && mark.what == "term");
        stops.extend(terms.map(|mark| mark.at.saturating_sub(asked)));
        assert_invariants(&fleet.sql, batch).await;
    }

    let command = told("cancel under 32 busy workers", commands);
    let stop = told("from there until an execution was told", stops);
    assert!(command < Duration::from_secs(1), "{command:?}");
    assert!(stop < Duration::from_secs(2), "{stop:?}");
    assert_no_deadlock(&fleet.sql).await;
}
