//! The commands people type, run as processes against a real database.

mod bad_input;
mod control;
mod doctor;
mod export;
mod look;
mod operate;
mod recover;
mod schema;
mod submit;
mod watch;

use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use holdfast::model::{
    AttemptEnding, BatchId, Disposition, History, Hold, LeaseId, LogTail, PublishedResult,
    Settlement, StopReason, WorkerId,
};
use holdfast::store::{Claim, ClaimRequest, Database, DatabaseOptions, HandIn, HandInAnswer};
use serde_json::Value;
use tempfile::TempDir;
use time::macros::datetime;
use tokio::io::AsyncWriteExt;
use tokio::process::{Child, Command};

use crate::support::TestDb;

const CONFIG: &str = r#"
[queues.q]
executor = "command"
argv = ["true"]

[queues.narrow]
executor = "command"
argv = ["true"]
max_running = 4
"#;

/// The program with a configuration and a database of one test's own.
struct Cli {
    db: TestDb,
    folder: TempDir,
}

impl Cli {
    async fn new() -> Self {
        let folder = TempDir::new().unwrap();
        std::fs::write(folder.path().join("holdfast.toml"), CONFIG).unwrap();
        Self { db: TestDb::fresh().await, folder }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// A file with this content; its path as an argument.
    fn file(&self, name: &str, content: impl AsRef<[u8]>) -> String {
        let path = self.path(name);
        std::fs::write(&path, content).unwrap();
        path.to_str().unwrap().to_owned()
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_holdfast"));
        command
            .args(arguments)
            .env_clear()
            .env("HOLDFAST_CONFIG", self.path("holdfast.toml"))
            .env("HOLDFAST_DATABASE_URL", self.db.url())
            .current_dir(self.folder.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        command
    }

    async fn run(&self, arguments: &[&str]) -> Ran {
        self.run_with(arguments, b"").await
    }

    async fn run_with(&self, arguments: &[&str], input: &[u8]) -> Ran {
        let mut child = self.command(arguments).spawn().unwrap();
        let mut stdin = child.stdin.take().unwrap();
        // One that stops reading early has not failed to be fed.
        stdin.write_all(input).await.ok();
        drop(stdin);
        Ran::end(child, arguments).await
    }

    /// Submits these lines to the queue `q`; the batch's id.
    async fn submit(&self, lines: &[&str]) -> String {
        self.submit_with(lines, &[]).await
    }

    async fn submit_with(&self, lines: &[&str], flags: &[&str]) -> String {
        let mut arguments = vec!["submit", "-", "--lines", "--queue", "q", "--json"];
        arguments.extend(flags);
        let ran = self.run_with(&arguments, lines.join("\n").as_bytes()).await.exited(0);
        ran.json()["batch"].as_str().unwrap().to_owned()
    }

    /// How many batches, items and progress rows there are.
    async fn stored(&self) -> (i64, i64, i64) {
        let row = self
            .db
            .client()
            .await
            .query_one(
                "SELECT (SELECT count(*) FROM holdfast.batches),
                        (SELECT count(*) FROM holdfast.items),
                        (SELECT count(*) FROM holdfast.progress)",
                &[],
            )
            .await
            .unwrap();
        (row.get(0), row.get(1), row.get(2))
    }

    async fn counts(&self, batch: &str) -> Value {
        self.run(&["show", batch, "--json"]).await.exited(0).json()["counts"].clone()
    }

    fn fleet(&self) -> Fleet {
        let limit = Duration::from_secs(20);
        let options = DatabaseOptions {
            url: self.db.url().to_owned(),
            application: "fleet of a test".into(),
            pool_size: 2,
            connect_timeout: limit,
            lock_timeout: limit,
            statement_timeout: limit,
            heartbeat_timeout: limit,
        };
        Fleet { database: Database::new(options).unwrap(), worker: WorkerId::generate() }
    }
}

/// What a command left behind.
struct Ran {
    arguments: String,
    status: ExitStatus,
    out: String,
    err: String,
}

impl Ran {
    async fn end(child: Child, arguments: &[&str]) -> Self {
        let output = tokio::time::timeout(Duration::from_mins(2), child.wait_with_output()).await;
        let output = output.unwrap_or_else(|_| panic!("{arguments:?} did not end")).unwrap();
        Self {
            arguments: arguments.join(" "),
            status: output.status,
            out: String::from_utf8(output.stdout).unwrap(),
            err: String::from_utf8(output.stderr).unwrap(),
        }
    }

    /// Asserts the exit code.
    fn exited(self, code: i32) -> Self {
        let Self { arguments, status, out, err } = &self;
        assert_eq!(status.code(), Some(code), "{arguments}\nstdout: {out}\nstderr: {err}");
        self
    }

    /// Asserts that standard error says this.
    fn says(self, text: &str) -> Self {
        assert!(self.err.contains(text), "{}: no {text:?} in {}", self.arguments, self.err);
        self
    }

    /// Standard output as one JSON document.
    fn json(&self) -> Value {
        serde_json::from_str(&self.out).unwrap_or_else(|error| panic!("{error}: {}", self.out))
    }

    /// Standard output as one JSON document a line.
    fn lines(&self) -> Vec<Value> {
        self.out.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }
}

/// A worker of one test's making: it claims and hands in what it is told to.
struct Fleet {
    database: Database,
    worker: WorkerId,
}

impl Fleet {
    /// Claims up to this many items.
    async fn claim(&self, batch: &str, want: u32) -> Vec<Hold> {
        let request = ClaimRequest {
            batch: batch.parse().unwrap(),
            lease: LeaseId::generate(),
            worker: self.worker,
            want,
            ttl: Duration::from_mins(1),
            traceparent: None,
        };
        match self.database.claim(&request).await.unwrap() {
            Claim::Granted { holds, .. } => holds,
            Claim::Nothing(..) => Vec::new(),
        }
    }

    /// Hands items in; all must be applied.
    async fn hand_in(&self, holds: &[Hold], settle: impl Fn(&Hold) -> Settlement) {
        let settlements: Vec<Settlement> = holds.iter().map(settle).collect();
        let items: Vec<HandIn<'_>> = holds
            .iter()
            .zip(&settlements)
            .map(|(hold, settlement)| HandIn { hold, settlement })
            .collect();
        let batch = holds[0].item().batch();
        let ttl = Duration::from_mins(1);
        let answers = self.database.hand_in(batch, self.worker, ttl, &items).await.unwrap();
        assert!(answers.iter().all(|answer| *answer == HandInAnswer::Applied), "{answers:?}");
    }

    /// Runs a batch to its end.
    async fn drain(&self, batch: &str, settle: impl Fn(&Hold) -> Settlement) {
        loop {
            let holds = self.claim(batch, 256).await;
            if holds.is_empty() {
                break;
            }
            self.hand_in(&holds, &settle).await;
        }
        // The claim that finds nothing left has ended it already, unless it was paused.
        let batch: BatchId = batch.parse().unwrap();
        self.database.end_batch(batch).await.unwrap();
        let batch = self.database.batch(batch, None).await.unwrap().unwrap();
        assert!(batch.is_finished(), "{:?}", batch.counts);
    }
}

/// An outcome with this result, JSON text.
fn succeeded(json: &str) -> Settlement {
    Settlement {
        disposition: Disposition::Succeed,
        started_at: Some(datetime!(2026-01-02 03:04:05.25 UTC)),
        ended_at: datetime!(2026-01-02 03:04:06 UTC),
        result: PublishedResult {
            json: Some(json.to_owned()),
            truncated: false,
            size_bytes: i64::try_from(json.len()).unwrap(),
        },
        error: None,
        stop_reason: StopReason::Completed,
        exit_status: Some(0),
        signal: None,
        log: LogTail::default(),
    }
}

fn failed(error: &str) -> Settlement {
    Settlement {
        disposition: Disposition::Fail,
        result: PublishedResult::default(),
        error: Some(error.to_owned()),
        stop_reason: StopReason::ExitStatus,
        exit_status: Some(1),
        ..succeeded("null")
    }
}

/// A failure that is tried again at once.
fn again(error: &str) -> Settlement {
    Settlement {
        disposition: Disposition::Again {
            ending: AttemptEnding::Error,
            charged: true,
            delay: Duration::ZERO,
            history: History::FRESH.plus_attempt(),
        },
        ..failed(error)
    }
}

fn signal(child: &Child, signal: rustix::process::Signal) {
    let pid = i32::try_from(child.id().unwrap()).unwrap();
    rustix::process::kill_process(rustix::process::Pid::from_raw(pid).unwrap(), signal).unwrap();
}
