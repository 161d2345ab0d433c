//! Exports: their shape, and that there is all of it or nothing.

use std::os::unix::fs::{PermissionsExt, symlink};
use std::process::Stdio;

use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, BufReader};

use super::{Cli, failed, succeeded};

const MEMBERS: [&str; 13] = [
    "key",
    "position",
    "status",
    "attempt",
    "result",
    "result_truncated",
    "result_size",
    "error",
    "stop_reason",
    "started_at",
    "finished_at",
    "acceptance_criteria",
    "acceptance_verdict",
];

/// The names of a line's own members, as they stand in it.
fn members(line: &str) -> Vec<String> {
    let members: std::collections::BTreeMap<String, &serde_json::value::RawValue> =
        serde_json::from_str(line).unwrap();
    let at = |name: &str| line.find(&format!("\"{name}\":")).unwrap();
    let mut names: Vec<String> = members.into_keys().collect();
    names.sort_by_key(|name| at(name));
    names
}

#[tokio::test]
async fn every_line_has_the_same_members_in_position_order() {
    let cli = Cli::new().await;
    let input = "{\"key\":\"first\",\"input\":1,\"acceptance_criteria\":[\"file_exists:a\"]}\n\
                 {\"key\":\"second\",\"input\":2}\n{\"key\":\"third\",\"input\":3}\n";
    let submit = ["submit", "-", "--queue", "q", "--json"];
    let ran = cli.run_with(&submit, input.as_bytes()).await.exited(0).json();
    let batch = ran["batch"].as_str().unwrap();
    let fleet = cli.fleet();
    let holds = fleet.claim(batch, 2).await;
    fleet.hand_in(&holds[1..], |_| failed("no luck\n")).await;
    fleet.hand_in(&holds[..1], |_| succeeded("{\"a\": [1,\t2]}")).await;

    let ran = cli.run(&["export", batch]).await.exited(0);

    assert!(ran.out.ends_with('\n'));
    let lines = ran.lines();
    assert_eq!(lines.len(), 2);
    for line in ran.out.lines() {
        assert_eq!(members(line), MEMBERS);
    }
    assert_eq!(
        lines[0],
        json!({
            "key": "first", "position": 0, "status": "succeeded", "attempt": 1,
            "result": {"a": [1, 2]}, "result_truncated": false, "result_size": 13,
            "error": null, "stop_reason": "completed", "started_at": "2026-01-02T03:04:05.25Z",
            "finished_at": "2026-01-02T03:04:06Z", "acceptance_criteria": ["file_exists:a"],
            "acceptance_verdict": null,
        })
    );
    assert_eq!((&lines[1]["status"], &lines[1]["result"]), (&json!("failed"), &Value::Null));
    assert_eq!(lines[1]["error"], "no luck\n");
    let ran = ran.says("1 of 3 items had not ended");

    // Cancelled, the third has ended without an outcome.
    cli.run(&["cancel", batch]).await.exited(0);
    let cancelled = cli.run(&["export", batch]).await.exited(0);
    assert_eq!(cancelled.err, "");
    assert!(cancelled.out.starts_with(&ran.out));
    let last = cancelled.out.lines().last().unwrap();
    assert_eq!(members(last), MEMBERS);
    let last: Value = serde_json::from_str(last).unwrap();
    assert_eq!((&last["key"], &last["status"]), (&json!("third"), &json!("cancelled")));
    assert_eq!((&last["attempt"], &last["finished_at"]), (&Value::Null, &Value::Null));
}

#[tokio::test]
async fn an_export_takes_the_statuses_asked_for() {
    let cli = Cli::new().await;
    let batch = cli.submit(&["a", "b", "c", "d"]).await;
    let fleet = cli.fleet();
    let holds = fleet.claim(&batch, 3).await;
    fleet
        .hand_in(&holds, |hold| match hold.item().position().get() {
            1 => failed("no"),
            _ => succeeded("1"),
        })
        .await;
    cli.run(&["cancel", &batch]).await.exited(0);
    let keys = async |flags: &[&str]| {
        let arguments = [&["export", &batch] as &[&str], flags].concat();
        let lines = cli.run(&arguments).await.exited(0).lines();
        lines.iter().map(|line| line["key"].as_str().unwrap().to_owned()).collect::<String>()
    };

    assert_eq!(keys(&[]).await, "abcd");
    assert_eq!(keys(&["--status", "failed"]).await, "b");
    assert_eq!(keys(&["--status", "cancelled"]).await, "d");
    assert_eq!(keys(&["--status", "cancelled", "--status", "succeeded"]).await, "acd");
    cli.run(&["export", &batch, "--status", "running"]).await.exited(2);
}

#[tokio::test]
async fn large_and_small_results_come_out_whole_over_many_pages() {
    let cli = Cli::new().await;
    let keys: Vec<String> = (0..5_000).map(|n| format!("k{n}")).collect();
    let lines: Vec<&str> = keys.iter().map(String::as_str).collect();
    let batch = cli.submit_with(&lines, &["--max-live", "10000"]).await;
    // Larger than a page every 500, and a stretch of nothing but failures.
    let size = |position: i32| match position {
        n if n % 500 == 0 => 1_500_000,
        n if n < 100 => 40_000,
        _ => 10,
    };
    cli.fleet()
        .drain(&batch, |hold| match hold.item().position().get() {
            2_001..=4_400 => failed("no"),
            n => succeeded(&format!("\"{}\"", "x".repeat(size(n)))),
        })
        .await;

    let ran = cli.run(&["export", &batch, "--status", "succeeded"]).await.exited(0);

    let lines = ran.lines();
    let expected: Vec<i32> = (0..=2_000).chain(4_401..5_000).collect();
    let positions: Vec<i32> =
        lines.iter().map(|l| i32::try_from(l["position"].as_i64().unwrap()).unwrap()).collect();
    assert_eq!(positions, expected);
    for line in &lines {
        let position = i32::try_from(line["position"].as_i64().unwrap()).unwrap();
        assert_eq!(line["result"].as_str().unwrap().len(), size(position));
    }
    let all = cli.run(&["export", &batch]).await.exited(0);
    assert_eq!((all.lines().len(), all.err.as_str()), (5_000, ""));
}

#[tokio::test]
async fn a_file_appears_when_it_is_complete() {
    let cli = Cli::new().await;
    let batch = cli.submit(&["a", "b"]).await;
    cli.fleet().drain(&batch, |_| succeeded("1")).await;
    let files = || {
        let mut names: Vec<String> = std::fs::read_dir(cli.folder.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .filter(|name| name != "holdfast.toml")
            .collect();
        names.sort();
        names
    };

    let said = cli.run(&["export", &batch, "--output", "out.jsonl", "--json"]).await.exited(0);
    assert_eq!(
        said.json(),
        json!({"batch": batch, "file": "out.jsonl", "items": 2, "unfinished": 0})
    );
    let content = std::fs::read_to_string(cli.path("out.jsonl")).unwrap();
    assert_eq!(content, cli.run(&["export", &batch]).await.exited(0).out);
    let mode = std::fs::metadata(cli.path("out.jsonl")).unwrap().permissions().mode();
    assert_eq!(mode & 0o600, 0o600);
    assert_eq!(files(), ["out.jsonl"]);

    // It replaces what was there; through a link, the file the link leads to.
    cli.file("old.jsonl", "old");
    symlink("old.jsonl", cli.path("link.jsonl")).unwrap();
    cli.run(&["export", &batch, "-o", "link.jsonl"]).await.exited(0);
    assert_eq!(std::fs::read_to_string(cli.path("old.jsonl")).unwrap(), content);
    assert!(cli.path("link.jsonl").is_symlink());

    // Nothing that is no regular file is replaced, and a failure leaves nothing.
    cli.run(&["export", &batch, "-o", "/dev/null"]).await.exited(74).says("regular file");
    cli.run(&["export", &batch, "-o", "."]).await.exited(74).says("regular file");
    cli.run(&["export", &batch, "-o", "no/such/folder"]).await.exited(74).says("no/such/folder");
    assert_eq!(files(), ["link.jsonl", "old.jsonl", "out.jsonl"]);
}

#[tokio::test]
async fn a_failure_in_the_middle_is_seen_and_leaves_no_file() {
    let cli = Cli::new().await;
    let keys: Vec<String> = (0..3_000).map(|n| format!("k{n}")).collect();
    let lines: Vec<&str> = keys.iter().map(String::as_str).collect();
    let batch = cli.submit_with(&lines, &["--max-live", "10000"]).await;
    cli.fleet().drain(&batch, |_| succeeded("1")).await;
    // The second page fails.
    let client = cli.db.client().await;
    client
        .batch_execute(
            "ALTER TABLE holdfast.outcomes RENAME TO real_outcomes;
             CREATE VIEW holdfast.outcomes AS
             SELECT batch_id, position, status, attempt, result, result_truncated,
                    result_size / (position - 2500) * (position - 2500) AS result_size, error,
                    stop_reason, started_at, finished_at, verdict, verdict_class
               FROM holdfast.real_outcomes",
        )
        .await
        .unwrap();

    let ran = cli.run(&["export", &batch]).await.exited(70).says("division by zero");
    assert_eq!(ran.lines().len(), 2_000);
    cli.file("out.jsonl", "old");
    cli.run(&["export", &batch, "--output", "out.jsonl"]).await.exited(70);

    assert_eq!(std::fs::read_to_string(cli.path("out.jsonl")).unwrap(), "old");
    assert_eq!(std::fs::read_dir(cli.folder.path()).unwrap().count(), 2);
}

#[tokio::test]
async fn an_interrupted_export_leaves_no_file() {
    let cli = Cli::new().await;
    let batch = cli.submit(&["a"]).await;
    cli.fleet().drain(&batch, |_| succeeded("1")).await;
    let client = cli.db.client().await;
    client.batch_execute("BEGIN; LOCK TABLE holdfast.outcomes").await.unwrap();
    let child = cli.command(&["export", &batch, "--output", "out.jsonl"]).spawn().unwrap();
    let waits = "SELECT count(*) FROM pg_locks WHERE NOT granted";
    while client.query_one(waits, &[]).await.unwrap().get::<_, i64>(0) == 0 {
        tokio::task::yield_now().await;
    }
    assert_eq!(std::fs::read_dir(cli.folder.path()).unwrap().count(), 2, "a part is there");

    super::signal(&child, rustix::process::Signal::INT);
    super::Ran::end(child, &["export"]).await.exited(130);

    assert_eq!(std::fs::read_dir(cli.folder.path()).unwrap().count(), 1);
}

#[tokio::test]
async fn a_reader_that_goes_away_ends_an_export_quietly() {
    let cli = Cli::new().await;
    let batch = cli.submit(&["a", "b", "c"]).await;
    let large = format!("\"{}\"", "x".repeat(1_000_000));
    cli.fleet().drain(&batch, |_| succeeded(&large)).await;

    let mut child = cli.command(&["export", &batch]).spawn().unwrap();
    let mut out = BufReader::new(child.stdout.take().unwrap());
    out.read_line(&mut String::new()).await.unwrap();
    drop(out);
    child.stdout = None;

    let ran = super::Ran::end(child, &["export"]).await.exited(141);
    assert_eq!(ran.err, "");
}

#[tokio::test]
async fn a_full_disk_is_a_failure() {
    let cli = Cli::new().await;
    let batch = cli.submit(&["a"]).await;
    cli.fleet().drain(&batch, |_| succeeded("1")).await;
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let mut command = cli.command(&["export", &batch]);
    command.stdout(Stdio::from(full));
    super::Ran::end(command.spawn().unwrap(), &["export"]).await.exited(74).says("No space left");
}
