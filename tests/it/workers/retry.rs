//! Attempts that fail, and times before which nothing begins.

use std::time::Duration;

use holdfast::model::BatchId;
use serde_json::json;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use crate::support::fleet::{AttemptRow, Fleet, Mark, Outcome, Submission, now};
use crate::support::invariants::assert_invariants;

const QUICK_RETRIES: &str = "[retry]\nbackoff_base = '100ms'\nbackoff_max = '1s'\n";

/// The attempts of a batch of one item that did not end in its outcome.
async fn lost(fleet: &Fleet, batch: BatchId) -> Vec<(i32, String, bool)> {
    let attempts = fleet.attempts(batch).await;
    assert!(attempts.iter().all(|attempt| attempt.by_holder));
    let brief = |attempt: &AttemptRow| {
        let (number, ending, charged) = attempt.brief();
        (number, ending.to_owned(), charged)
    };
    attempts.iter().map(brief).collect()
}

fn charged(number: i32, ending: &str) -> (i32, String, bool) {
    (number, ending.to_owned(), true)
}

/// How the one item of a batch ended: whether it succeeded, its attempt, and why.
fn end(outcomes: &[Outcome]) -> (bool, i32, &str) {
    let [outcome] = outcomes else { panic!("one outcome: {outcomes:?}") };
    (outcome.succeeded, outcome.attempt, &outcome.stop_reason)
}

#[tokio::test]
async fn failures_are_tried_again_unless_they_are_permanent() {
    let fleet = Fleet::new(QUICK_RETRIES).await;
    let _worker = fleet.start();
    let mended = Submission::new(1, "[ $HOLDFAST_ATTEMPT = 3 ] || exit 1");
    let mended = fleet.submit(mended).await;
    let broken = Submission { max_attempts: 2, ..Submission::new(1, "exit 75") };
    let broken = fleet.submit(broken).await;
    let permanent = Submission { permanent: vec![9], ..Submission::new(1, "exit 9") };
    let permanent = fleet.submit(permanent).await;
    let timeout = Duration::from_millis(300);
    let slow = Submission { timeout, max_attempts: 2, ..Submission::new(1, "exec sleep 300") };
    let slow = fleet.submit(slow).await;
    let killed = Submission { max_attempts: 1, ..Submission::new(1, "kill -9 $$") };
    let killed = fleet.submit(killed).await;
    for batch in [mended, broken, permanent, slow, killed] {
        fleet.ended(batch).await;
        assert_invariants(&fleet.sql, batch).await;
    }

    let ends = [mended, broken, permanent, slow, killed].map(|batch| fleet.outcomes(batch));
    let ends = futures::future::join_all(ends).await;
    assert_eq!(end(&ends[0]), (true, 3, "completed"));
    assert_eq!(end(&ends[1]), (false, 2, "exit_status"));
    assert_eq!(end(&ends[2]), (false, 1, "exit_status"));
    assert_eq!(end(&ends[3]), (false, 2, "timed_out"));
    assert_eq!(end(&ends[4]), (false, 1, "signal"));
    let twice = [charged(1, "error"), charged(2, "error")];
    assert_eq!(lost(&fleet, mended).await, twice);
    assert_eq!(lost(&fleet, broken).await, twice[..1]);
    assert_eq!(lost(&fleet, permanent).await, []);
    assert_eq!(lost(&fleet, slow).await, [charged(1, "timed_out")]);
    assert_eq!(lost(&fleet, killed).await, []);
}

#[tokio::test]
async fn an_attempt_waits_for_its_backoff_and_hardly_longer() {
    let fleet = Fleet::new("[retry]\nbackoff_base = '1s'\nbackoff_max = '1s'\n").await;
    let worker = fleet.start();
    worker.ready().await;

    let batch = fleet.submit(Submission::new(8, "[ $HOLDFAST_ATTEMPT = 3 ] || exit 1")).await;
    fleet.ended(batch).await;

    // Two pauses of up to a second each, drawn evenly: sixteen draws are never all near an end.
    let marks = fleet.marks();
    let mut pauses = Vec::new();
    for position in 0..8 {
        let of_item = marks.iter().filter(|mark| mark.what == "start" && mark.position == position);
        let at: Vec<Duration> = of_item.map(|mark| mark.at).collect();
        assert_eq!(at.len(), 3);
        pauses.extend([at[1].saturating_sub(at[0]), at[2].saturating_sub(at[1])]);
    }
    eprintln!("pauses between attempts: {pauses:?}");
    let longest = *pauses.iter().max().unwrap();
    assert!(longest > Duration::from_millis(200), "{pauses:?}");
    let machine = Duration::from_millis(1_500); // it may be busy with other tests
    assert!(longest < Duration::from_secs(1) + machine, "{pauses:?}");
}

#[tokio::test]
async fn nothing_begins_before_its_time() {
    let fleet = Fleet::new("").await;
    let worker = fleet.start();
    worker.ready().await;
    let wait = Duration::from_secs(2);
    let later = OffsetDateTime::now_utc() + wait;
    let due = now() + wait;
    let later_text = later.format(&Rfc3339).unwrap();
    let items = (0..4).map(|n| match n {
        1 | 2 => json!({"key": n.to_string(), "input": n, "not_before": later_text}),
        _ => json!({"key": n.to_string(), "input": n}),
    });
    let mixed = fleet.submit(Submission::of(items, "true")).await;
    let whole = Submission { not_before: Some(later), ..Submission::new(2, "true") };
    let whole = fleet.submit(whole).await;
    fleet.ended(mixed).await;
    fleet.ended(whole).await;

    let marks = fleet.marks();
    let starts: Vec<&Mark> = marks.iter().filter(|mark| mark.what == "start").collect();
    assert_eq!(starts.len(), 6);
    let early = Duration::from_millis(10); // as exact as a mark is
    for mark in starts {
        let deferred = mark.batch == whole || [1, 2].contains(&mark.position);
        if deferred {
            assert!(mark.at + early >= due, "{mark:?} is before {due:?}");
            let late = mark.at.saturating_sub(due);
            eprintln!("began {late:?} after its time");
            assert!(late < Duration::from_secs(2), "{mark:?} is {late:?} late");
        } else {
            assert!(mark.at < due, "{mark:?} waited for the others");
        }
    }
    for batch in [mixed, whole] {
        fleet.assert_each_ran_once(batch).await;
        assert_invariants(&fleet.sql, batch).await;
    }
}
