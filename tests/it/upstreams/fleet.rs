//! Upstreams and whole fleets: shared limits, connections of lost leases, and criteria that are judged
//! apart from what a model says.

use std::time::Duration;

use holdfast::clock::{Clock, SystemClock};
use holdfast::config::{AgentSpec, QueueSpec, Settings};
use holdfast::model::{Finding, ItemStatus, Leaf, Position, VerdictClass};
use holdfast::store::{ControlVerb, Database, RequestsWanted};
use rustix::process::Signal;
use serde_json::{Value, json};

use super::support::{LOCAL, spec};
use crate::support::fixture::Bed;
use crate::support::fleet::{Fleet, LONG, SHORT_LEASE, Submission, until};
use crate::support::invariants::assert_invariants;
use crate::support::upstream::{Reply, Upstream};
use crate::support::worker_process::WorkerProcess;

/// Settings of workers that may reach this machine.
fn settings(more: &str) -> String {
    format!("[upstreams.{LOCAL}]\nallow_networks = ['127.0.0.0/8']\n{more}\n")
}

fn items(count: usize) -> Vec<Value> {
    (0..count).map(|n| json!({"key": format!("k{n}"), "input": n})).collect()
}

async fn workers(fleet: &Fleet, count: usize) -> Vec<WorkerProcess> {
    let workers: Vec<WorkerProcess> = (0..count).map(|_| fleet.start()).collect();
    for worker in &workers {
        worker.ready().await;
    }
    workers
}

/// The most requests within any `window`, and the time from the first to the last.
fn busiest(upstream: &Upstream, window: Duration) -> (usize, Duration) {
    let mut times: Vec<_> = upstream.seen().iter().map(|seen| seen.at).collect();
    times.sort_unstable();
    let within = |n: usize| times[n..].iter().take_while(|at| at.since(times[n]) < window).count();
    let most = (0..times.len()).map(within).max().unwrap_or(0);
    (most, times[times.len() - 1].since(times[0]))
}

/// Four workers run `items` items under this limit.
async fn limited(per_minute: u32, count: usize) -> (Upstream, Duration) {
    let upstream = Upstream::new([Reply::text("done")]).await;
    let fleet = Fleet::new(&settings(&format!("requests_per_minute = {per_minute}"))).await;
    let _workers = workers(&fleet, 4).await;
    let began = SystemClock.now();
    let http = QueueSpec::Http(spec(upstream.url("/")));
    let batch = fleet.submit(Submission::running(items(count), http)).await;
    let limit = Duration::from_mins(10);
    until("the batch ends", limit, async || fleet.row(batch).await.is_finished()).await;
    let took = SystemClock.now().since(began);
    let row = fleet.row(batch).await;
    assert_eq!(row.counts.succeeded, row.item_count);
    assert_eq!(upstream.count(), count, "each item asked once");
    assert_eq!(fleet.attempts(batch).await.len(), 0, "nobody was turned away");
    (upstream, took)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn four_workers_keep_one_limit() {
    let (upstream, _) = limited(600, 60).await;

    let (_, took) = busiest(&upstream, Duration::from_mins(1));

    // 59 gaps of at least 100 ms, but for what the way to the server may differ.
    assert!(took >= Duration::from_secs(5), "{took:?}");
    // The busiest six seconds of the minute's 600.
    let (most, _) = busiest(&upstream, Duration::from_secs(3));
    assert!(most <= 45, "{most} within 3 s");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "long"]
async fn long_four_workers_keep_sixty_requests_a_minute_and_use_them() {
    let (upstream, _) = limited(60, 240).await;

    let (most, took) = busiest(&upstream, Duration::from_mins(1));
    let rate = 239.0 / took.as_secs_f64() * 60.0;
    eprintln!("at most {most} requests in any 60 s, {rate:.1} a minute over {took:?}");
    assert!(most <= 60, "{most} in a minute");
    assert!(rate >= 54.0, "{rate} a minute");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn four_workers_keep_one_cap_of_requests_under_way() {
    let reply = Reply::text("done").after(Duration::from_millis(100));
    let upstream = Upstream::new([reply]).await;
    let fleet = Fleet::new(&settings("max_in_flight = 3")).await;
    let _workers = workers(&fleet, 4).await;
    let http = QueueSpec::Http(spec(upstream.url("/")));

    let batch = fleet.submit(Submission::running(items(40), http)).await;

    let row = fleet.ended(batch).await;
    assert_eq!(row.counts.succeeded, 40);
    assert_eq!(upstream.count(), 40);
    assert!((2..=3).contains(&upstream.most_at_once()), "{}", upstream.most_at_once());
}

/// What a worker wants of one upstream.
fn wanting(
    bed: &Bed,
    want: u32,
    spacing: Option<Duration>,
    cap: Option<u32>,
) -> RequestsWanted<'_> {
    RequestsWanted {
        upstream: "u",
        model: "m",
        worker: bed.worker,
        using: 0,
        want,
        spacing,
        horizon: Duration::from_secs(1),
        cap,
        valid: Duration::from_secs(15),
    }
}

#[tokio::test]
async fn requests_are_granted_as_instants_and_unused_ones_are_not_saved_up() {
    let bed = Bed::new().await;
    let wanted = wanting(&bed, 100, Some(Duration::from_millis(250)), None);

    let first = bed.store.grant_requests(&wanted).await.unwrap();
    let second = bed.store.grant_requests(&wanted).await.unwrap();

    // Now, and at 250, 500, 750 and 1000 ms: the horizon.
    assert_eq!((first.granted, first.first_in), (5, Duration::ZERO));
    assert!(second.granted <= 4, "{second:?}");
    assert!(second.granted > 0 || second.retry_in > Duration::ZERO, "{second:?}");
    tokio::time::sleep(Duration::from_secs(3)).await;
    let later = bed.store.grant_requests(&wanted).await.unwrap();
    assert_eq!((later.granted, later.first_in), (5, Duration::ZERO), "nothing was saved up");
}

#[tokio::test]
async fn what_a_crashed_worker_had_under_way_is_free_when_it_expires() {
    let bed = Bed::new().await;
    let wanted = wanting(&bed, 9, None, Some(3));
    let other = holdfast::model::WorkerId::generate();
    assert_eq!(bed.store.grant_requests(&wanted).await.unwrap().granted, 3);
    let others = RequestsWanted { worker: other, ..wanted };
    let refused = bed.store.grant_requests(&others).await.unwrap();
    assert_eq!((refused.granted, refused.retry_in), (0, Duration::from_millis(100)));

    let expired = "UPDATE holdfast.upstream_use SET expires_at = clock_timestamp()";
    bed.run(expired, &[]).await;

    assert_eq!(bed.store.grant_requests(&others).await.unwrap().granted, 3);
    // Whoever tells what it uses is counted again.
    let using = RequestsWanted { using: 2, want: 1, ..wanted };
    assert_eq!(bed.store.grant_requests(&using).await.unwrap().granted, 0);
    let released = RequestsWanted { want: 0, ..others };
    bed.store.grant_requests(&released).await.unwrap();
    assert_eq!(bed.store.grant_requests(&using).await.unwrap().granted, 1);
}

#[tokio::test]
async fn blocks_and_pauses_are_everybody_s_and_the_longer_one_stays() {
    let bed = Bed::new().await;
    let (store, wanted): (&Database, _) = (&bed.store, wanting(&bed, 5, None, None));
    let seconds = Duration::from_secs;
    store.block_upstream("u", "m", seconds(60)).await.unwrap();
    store.block_upstream("u", "m", seconds(5)).await.unwrap();
    let blocked = store.grant_requests(&wanted).await.unwrap();
    assert!(blocked.granted == 0 && blocked.blocked_for > seconds(50), "{blocked:?}");
    let other = RequestsWanted { model: "n", ..wanted };
    assert_eq!(store.grant_requests(&other).await.unwrap().granted, 5, "another model");

    // A pause of the upstream is one of all its models; many that fail together are one pause.
    for _ in 0..3 {
        let (pauses, wait) =
            store.pause_upstream("u", "", seconds(60), seconds(900)).await.unwrap();
        assert!(pauses == 1 && wait <= seconds(60), "{pauses} {wait:?}");
    }
    let paused = store.grant_requests(&other).await.unwrap();
    assert!(paused.granted == 0 && paused.pauses == 1, "{paused:?}");
    let over = "UPDATE holdfast.upstreams SET blocked_until = '-infinity'";
    bed.run(over, &[]).await;
    let (pauses, wait) = store.pause_upstream("u", "", seconds(60), seconds(900)).await.unwrap();
    assert!(pauses == 2 && wait > seconds(100), "{pauses} {wait:?}");
    bed.run(over, &[]).await;
    // One at a time finds out whether it is well again.
    assert_eq!(store.grant_requests(&other).await.unwrap().granted, 1);
    store.resume_upstream("u", "").await.unwrap();
    assert_eq!(store.grant_requests(&other).await.unwrap().granted, 5);
}

#[tokio::test]
async fn only_a_holder_notes_what_it_used_and_what_was_said() {
    let bed = Bed::new().await;
    let batch = bed.batch(1).await;
    let hold = bed.claim_one(batch).await;
    let spent = |calls| holdfast::store::SpentRow {
        model: "m".to_owned(),
        calls,
        tokens: [Some(7), None, None, None, None],
    };
    let (item, lease, token) = (hold.item(), hold.lease(), hold.token());
    for calls in 1..=2 {
        assert!(bed.store.note_spent(item, lease, token, &spent(calls)).await.unwrap());
        assert!(bed.store.note_turn(item, lease, token, 0, r#"{"a":"\u0000"}"#).await.unwrap());
    }
    bed.expire(lease).await;
    bed.reap(batch).await;

    assert!(!bed.store.note_spent(item, lease, token, &spent(3)).await.unwrap());
    assert!(!bed.store.note_turn(item, lease, token, 1, "{}").await.unwrap());

    let kept = "SELECT concat(s.calls, ' ', s.input_tokens, ' ', s.output_tokens, ' ', count(t))
                  FROM holdfast.spent s JOIN holdfast.transcripts t USING (batch_id, position, lease_id)
                 WHERE s.batch_id = $1 GROUP BY s.calls, s.input_tokens, s.output_tokens";
    assert_eq!(bed.value::<String>(batch, kept).await, "2 7  1");
}

#[tokio::test]
async fn a_cancel_and_a_lost_lease_close_the_connection() {
    let upstream = Upstream::new([Reply::hang()]).await;
    let fleet = Fleet::new(&format!("{SHORT_LEASE}\n{}", settings(""))).await;
    let mut worker = fleet.start();
    worker.ready().await;
    let http = || QueueSpec::Http(spec(upstream.url("/")));
    let cancelled = fleet.submit(Submission::running(items(1), http())).await;
    upstream.has_seen(1).await;

    fleet.control(cancelled, ControlVerb::Cancel).await;
    until("the cancelled call is dropped", LONG, async || upstream.dropped() == 1).await;
    assert_eq!(fleet.outcomes(cancelled).await.len(), 0);

    // Its lease is taken away: it learns of that with its next heartbeat.
    let lost = fleet.submit(Submission::running(items(1), http())).await;
    upstream.has_seen(2).await;
    let taken = "DELETE FROM holdfast.leases WHERE batch_id = $1";
    fleet.sql.execute(taken, &[&lost.uuid()]).await.unwrap();
    until("the lost call is dropped", LONG, async || upstream.dropped() == 2).await;

    worker.signal(Signal::TERM);
    worker.exit_status().await;
}

#[tokio::test]
async fn a_paused_upstream_costs_no_attempt_and_the_batch_goes_on_when_it_is_well() {
    let replies = [Reply::status(401), Reply::status(401), Reply::text("done")];
    let upstream = Upstream::new(replies).await;
    let fleet = Fleet::new(&settings("pause_min = '200ms'\npause_max = '1s'")).await;
    let _workers = workers(&fleet, 1).await;
    let submission = Submission::running(items(4), QueueSpec::Http(spec(upstream.url("/"))));

    let batch = fleet.submit(Submission { max_attempts: 1, ..submission }).await;

    let row = fleet.ended(batch).await;
    assert_eq!(row.counts.succeeded, 4);
    let attempts = fleet.attempts(batch).await;
    assert!(!attempts.is_empty());
    for attempt in attempts {
        assert_eq!(attempt.brief(), (1, "not_admitted", false));
    }
    assert!(upstream.count() <= 4 + 2 + 4, "{} requests", upstream.count());
}

fn agent(upstream: &Upstream) -> QueueSpec {
    QueueSpec::Agent(AgentSpec {
        upstream: LOCAL.to_owned(),
        ..AgentSpec::new(upstream.url("/v1"), "m", &Settings::defaults().limits)
    })
}

#[tokio::test]
async fn a_report_that_claims_everything_is_judged_by_what_is_there() {
    let claims = "All done: summary.md and table.csv are written, and the text is excellent. \
                  All tests passed.";
    let write = json!({"path": "summary.md", "content": "# Summary\n"});
    let upstream =
        Upstream::new([Reply::calls(&[("write_file", write)]), Reply::says(claims)]).await;
    let fleet = Fleet::new(&settings("")).await;
    let _workers = workers(&fleet, 1).await;
    let criteria = ["file:summary.md exists", "file:table.csv exists", "SENTINEL: well written"];
    let item = json!({"key": "k", "input": "summarise", "acceptance_criteria": criteria});

    let batch = fleet.submit(Submission::running([item], agent(&upstream))).await;

    let row = fleet.ended(batch).await;
    assert_eq!((row.counts.succeeded, row.counts.failed), (1, 0));
    assert_eq!(fleet.attempts(batch).await.len(), 0, "not tried again");
    let item = fleet.database.items(batch, None, Position::new(0), 9).await.unwrap().remove(0);
    assert_eq!(item.status, ItemStatus::Succeeded);
    let verdict = item.acceptance_verdict.unwrap();
    let found: Vec<Finding> = verdict.leaves().iter().map(Leaf::finding).collect();
    let expected = [Finding::Holds, Finding::DoesNotHold, Finding::Unchecked];
    assert_eq!(found, expected, "{verdict:?}");
    assert_eq!(verdict.class(), VerdictClass::Fails);
    for seen in upstream.seen() {
        assert!(!seen.messages("system").iter().any(|m| m.to_string().contains("SENTINEL")));
        assert!(seen.messages("user")[0].to_string().contains("SENTINEL"));
    }
    let result = "SELECT result::text FROM holdfast.outcomes WHERE batch_id = $1";
    assert_eq!(fleet.value::<String>(batch, result).await, Value::from(claims).to_string());
    let noted = "SELECT concat(max(s.model), ' ', max(s.total_tokens), ' ', count(*))
                   FROM holdfast.transcripts t JOIN holdfast.spent s USING (batch_id, position, lease_id)
                  WHERE t.batch_id = $1";
    assert_eq!(fleet.value::<String>(batch, noted).await, "scripted-1 30 4");
    assert_invariants(&fleet.sql, batch).await;
}

#[tokio::test]
async fn a_real_unit_test_that_ran_proves_that_tests_passed() {
    let suite = "import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n        \
                 self.assertEqual(1 + 1, 2)\n";
    let command = "python3 -m unittest -v test_a";
    let replies = [
        Reply::calls(&[
            ("write_file", json!({"path": "test_a.py", "content": suite})),
            ("shell", json!({ "command": command })),
        ]),
        Reply::says("The tests pass."),
    ];
    let upstream = Upstream::new(replies).await;
    let fleet = Fleet::new(&settings("")).await;
    let _workers = workers(&fleet, 1).await;
    let criteria = [format!("tests_passed:{command}"), "tests_passed:make test".to_owned()];
    let item = json!({"key": "k", "input": "test it", "acceptance_criteria": criteria});

    let batch = fleet.submit(Submission::running([item], agent(&upstream))).await;

    fleet.ended(batch).await;
    let item = fleet.database.items(batch, None, Position::new(0), 9).await.unwrap().remove(0);
    let verdict = item.acceptance_verdict.unwrap();
    let found: Vec<Finding> = verdict.leaves().iter().map(Leaf::finding).collect();
    assert_eq!(found, [Finding::Holds, Finding::Unchecked], "{verdict:?}");
}

#[tokio::test]
async fn what_the_configuration_says_is_what_a_queue_does() {
    let upstream = Upstream::new([Reply::text("done")]).await;
    let queue = format!(
        "[queues.web]\nexecutor = 'http'\nurl = '{}'\nupstream = '{LOCAL}'\n",
        upstream.url("/")
    );
    let fleet = Fleet::new(&settings(&queue)).await;
    let worker = fleet.start();
    worker.ready().await;
    let mut command = tokio::process::Command::new(env!("CARGO_BIN_EXE_holdfast"));
    let mut child = command
        .args(["submit", "-", "--queue", "web", "--database-url", fleet.url(), "--config"])
        .arg(fleet.file("holdfast.toml"))
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    tokio::io::AsyncWriteExt::write_all(&mut stdin, b"{\"key\": \"a\", \"input\": 1}\n")
        .await
        .unwrap();
    drop(stdin);
    assert!(child.wait().await.unwrap().success());

    upstream.has_seen(1).await;

    assert_eq!(upstream.seen()[0].body, "1");
}
