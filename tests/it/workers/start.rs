//! How a worker starts or says why not, and what it tells while it runs.

use rustix::process::Signal;
use tokio::process::Command;
use tokio::time::timeout;

use crate::support::TestDb;
use crate::support::fleet::{Fleet, LONG, Submission};
use crate::support::invariants::assert_invariants;

/// Runs `holdfast worker` with this configuration to its end: exit status and error.
async fn refused(config: &str, url: &str) -> (Option<i32>, String) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("holdfast.toml");
    std::fs::write(&file, config).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_holdfast"));
    command.args(["worker", "--health", "127.0.0.1:0", "--database-url", url, "--config"]);
    command.arg(file).kill_on_drop(true);
    let output = timeout(LONG, command.output()).await.expect("it refuses").unwrap();
    (output.status.code(), String::from_utf8(output.stderr).unwrap())
}

const QUEUE: &str = "[queues.work]\nexecutor = 'command'\nargv = ['true']\n";
const NOWHERE: &str = "postgres://postgres@127.0.0.1:1/nowhere";

#[tokio::test]
async fn a_worker_that_cannot_start_says_why_and_exits_accordingly() {
    let empty = TestDb::fresh().await;
    empty
        .client()
        .await
        .batch_execute("DROP SCHEMA holdfast CASCADE; DROP TABLE IF EXISTS _sqlx_migrations")
        .await
        .unwrap();
    let unknown_key = format!("[lease]\ntll = '60s'\n{QUEUE}");

    for (config, url, exit, words) in [
        (QUEUE, NOWHERE, 75, ["database", "onnect"]),
        (QUEUE, empty.url(), 69, ["schema", "holdfast migrate up"]),
        (unknown_key.as_str(), NOWHERE, 78, ["lease.tll", "holdfast.toml"]),
        ("", NOWHERE, 78, ["queues", "[queues.NAME]"]),
    ] {
        let (status, error) = refused(config, url).await;

        assert_eq!(status, Some(exit), "{error}");
        for word in words {
            assert!(error.contains(word), "no {word:?} in: {error}");
        }
    }
}

#[tokio::test]
async fn a_worker_answers_its_probes_and_counts_what_it_does() {
    let fleet = Fleet::new("").await;
    let worker = fleet.start();
    worker.ready().await;

    let batch = fleet.submit(Submission::new(7, "true")).await;
    fleet.ended(batch).await;

    for path in ["/livez", "/readyz", "/startupz"] {
        assert_eq!(worker.get(path).await.unwrap().0, 200, "{path}");
    }
    let (status, metrics) = worker.get("/metrics").await.unwrap();
    assert_eq!(status, 200);
    for line in [
        r#"holdfast_items_finished_total{outcome="succeeded",queue="work"} 7"#,
        r#"holdfast_leases_granted_total{queue="work"} 7"#,
        r#"holdfast_executions_started_total{queue="work"} 7"#,
        r#"holdfast_worker_state{state="running"} 1"#,
        "holdfast_db_up 1",
    ] {
        assert!(metrics.lines().any(|found| found == line), "no {line} in\n{metrics}");
    }
}

#[tokio::test]
async fn every_log_line_inside_a_lease_says_which() {
    let fleet = Fleet::new("").await;
    let mut worker = fleet.start();
    let batch = fleet.submit(Submission::new(3, "true")).await;
    fleet.ended(batch).await;
    worker.signal(Signal::TERM);
    worker.exit_status().await;

    let tokens: Vec<i64> = fleet.marks().iter().map(|mark| mark.token).collect();
    let log = worker.log();
    let inside: Vec<_> = log.iter().filter(|line| !line["position"].is_null()).collect();
    // One of the executor and one of the attempt for each item at least.
    assert!(inside.len() >= 6, "{log:?}");
    for line in inside {
        assert_eq!(line["batch"], batch.to_string(), "{line}");
        assert!((0..3).contains(&line["position"].as_i64().unwrap()), "{line}");
        assert!(line["lease"].as_str().unwrap().len() == 36, "{line}");
        let token: i64 = line["token"].as_str().unwrap().parse().unwrap();
        assert!(tokens.contains(&token), "{line}");
    }
}

#[tokio::test]
async fn a_worker_refuses_sequences_that_stand_wrong_and_names_the_remedy() {
    let fleet = Fleet::new("").await;
    let batch = fleet.submit(Submission::new(3, "true")).await;
    let folded = "UPDATE holdfast.progress SET last_delta = 1000 WHERE batch_id = $1";
    fleet.sql.execute(folded, &[&batch.uuid()]).await.unwrap();
    let setback = "SELECT setval('holdfast.delta_seq', 999)";
    let cached = "ALTER SEQUENCE holdfast.delta_seq CACHE 32";

    for (wrong, remedy) in [
        (setback, "SELECT setval('holdfast.delta_seq', 1000)"),
        (cached, "ALTER SEQUENCE holdfast.delta_seq CACHE 1"),
    ] {
        fleet.sql.batch_execute(wrong).await.unwrap();
        let (status, error) = refused(QUEUE, fleet.url()).await;

        assert_eq!(status, Some(69), "{error}");
        assert!(error.contains(remedy), "{error}");
        fleet.sql.batch_execute(remedy).await.unwrap();
    }

    let _worker = fleet.start();
    fleet.ended(batch).await;
    fleet.assert_each_ran_once(batch).await;
    assert_invariants(&fleet.sql, batch).await;
}
