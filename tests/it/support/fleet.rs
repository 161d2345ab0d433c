//! Worker processes on a database of their own, and what their commands noted.

use std::fs::{self, File};
use std::io::Cursor;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use holdfast::clock::{Clock, SystemClock};
use holdfast::config::{CommandSpec, QueueSpec, Settings};
use holdfast::execute::spawn::spawn_with_death_signal;
use holdfast::model::{BatchId, LeaseId, Principal, WorkerId};
use holdfast::store::{
    BatchRecord, BatchRow, ControlAnswer, ControlVerb, Database, DatabaseOptions, Event,
};
use holdfast::submit::{Form, NewBatch, SubmitLimits, read_items};
use rustix::process::Signal;
use serde_json::Value;
use tempfile::TempDir;
use time::OffsetDateTime;
use tokio::sync::mpsc;
use tokio_postgres::Client;
use uuid::Uuid;

use super::TestDb;
use super::worker_process::WorkerProcess;

/// The one queue that a fleet's workers serve.
pub(crate) const QUEUE: &str = "work";

/// Longer than anything here takes: what is not so by then is a fault, not a slow machine.
pub(crate) const LONG: Duration = Duration::from_mins(1);

/// How long a [`SHORT_LEASE`] is: a machine with other things to do renews it in time all the same.
pub(crate) const SHORT: Duration = Duration::from_secs(3);

/// Where a worker serves its health, if its test does not care.
const ANYWHERE: &[&str] = &["--health", "127.0.0.1:0"];

/// Settings for tests that wait until a lease expires.
pub(crate) const SHORT_LEASE: &str = "
[lease]
ttl = '3s'
kill_grace = '200ms'
slack = '200ms'
";

/// What workers, their database and their commands share in one test.
pub(crate) struct Fleet {
    pub(crate) database: Database,
    pub(crate) sql: Client,
    url: String,
    folder: TempDir,
    started: AtomicUsize,
    // Last: dropped when nobody uses it any more.
    _db: Option<TestDb>,
}

/// Waits until something holds, and says how long that took.
pub(crate) async fn until(
    what: &str,
    limit: Duration,
    mut holds: impl AsyncFnMut() -> bool,
) -> Duration {
    let began = SystemClock.now();
    while !holds().await {
        let waited = SystemClock.now().since(began);
        assert!(waited < limit, "{what}: not within {limit:?}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    SystemClock.now().since(began)
}

/// The time since boot, as commands note it.
pub(crate) fn now() -> Duration {
    Duration::from_nanos(SystemClock.now().as_nanos())
}

impl Fleet {
    /// No worker yet; `settings` is TOML for those that will be started.
    pub(crate) async fn new(settings: &str) -> Self {
        let db = TestDb::fresh().await;
        let sql = db.client().await;
        let url = db.url().to_owned();
        Self::at(url, sql, Some(db), settings)
    }

    /// The same on a migrated database that the caller looks after.
    pub(crate) fn at(url: String, sql: Client, db: Option<TestDb>, settings: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let queue = format!("\n[queues.{QUEUE}]\nexecutor = 'command'\nargv = ['true']\n");
        fs::write(folder.path().join("holdfast.toml"), format!("{settings}{queue}")).unwrap();
        let database = patient_database(&url);
        Self { database, sql, url, folder, started: AtomicUsize::new(0), _db: db }
    }

    /// The folder of the configuration, of the logs and of what commands note.
    pub(crate) fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// The address of the database.
    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The root of the items' directories.
    pub(crate) fn workspaces(&self) -> PathBuf {
        self.file("workspaces")
    }

    /// Makes an empty file beside the marks.
    pub(crate) fn touch(&self, name: &str) {
        File::create(self.file(name)).unwrap();
    }

    /// Starts a worker process.
    pub(crate) fn start(&self) -> WorkerProcess {
        self.start_with(&[])
    }

    pub(crate) fn start_with(&self, arguments: &[&str]) -> WorkerProcess {
        self.start_at(&self.url, arguments, &[])
    }

    /// Starts one that reaches the database by another way, with variables of its own.
    pub(crate) fn start_at(
        &self,
        url: &str,
        arguments: &[&str],
        variables: &[(&str, &str)],
    ) -> WorkerProcess {
        self.start_program(env!("CARGO_BIN_EXE_holdfast"), url, arguments, variables)
    }

    /// Starts one of another program, such as an earlier release.
    pub(crate) fn start_program(
        &self,
        program: &str,
        url: &str,
        arguments: &[&str],
        variables: &[(&str, &str)],
    ) -> WorkerProcess {
        let number = self.started.fetch_add(1, Ordering::Relaxed);
        let log = self.file(&format!("worker-{number}.log"));
        let mut command = Command::new(program);
        command
            .args(["worker", "--log-format", "json"])
            .args(["--log-level", "info,holdfast=debug", "--database-url", url, "--config"])
            .arg(self.file("holdfast.toml"))
            .args(if arguments.contains(&"--health") { &[][..] } else { ANYWHERE })
            .args(arguments)
            // Many small workers on one server.
            .env("HOLDFAST__DATABASE__POOL_SIZE", "4")
            // What killed workers leave behind goes with the test.
            .env("TMPDIR", self.folder.path())
            .env("HOLDFAST__WORKSPACE__ROOT", self.workspaces())
            .envs(variables.iter().copied())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(&log).unwrap())
            .process_group(0);
        // Each test has its own thread, which lives as long as the test.
        let child = spawn_with_death_signal(&mut command, Signal::KILL).unwrap();
        WorkerProcess::new(child, log)
    }

    /// Starts an exporter.
    pub(crate) fn start_exporter(&self) -> WorkerProcess {
        let number = self.started.fetch_add(1, Ordering::Relaxed);
        let log = self.file(&format!("worker-{number}.log"));
        let mut command = Command::new(env!("CARGO_BIN_EXE_holdfast"));
        command
            .args(["exporter", "--listen", "127.0.0.1:0", "--log-format", "json"])
            .args(["--database-url", &self.url, "--config"])
            .arg(self.file("holdfast.toml"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(&log).unwrap());
        let child = spawn_with_death_signal(&mut command, Signal::KILL).unwrap();
        WorkerProcess::new(child, log)
    }

    /// Starts the worker that an ignored test of this program is, in place of the real one.
    pub(crate) fn start_held(&self, test: &str) -> WorkerProcess {
        let number = self.started.fetch_add(1, Ordering::Relaxed);
        let log = self.file(&format!("worker-{number}.log"));
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["--exact", test, "--ignored", "--nocapture"])
            .env("HOLDFAST_TEST_FOLDER", self.folder.path())
            .env("HOLDFAST_TEST_DATABASE", &self.url)
            .env("TMPDIR", self.folder.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(&log).unwrap())
            .process_group(0);
        let child = spawn_with_death_signal(&mut command, Signal::KILL).unwrap();
        WorkerProcess::new(child, log)
    }

    /// Whether there is a file of this name in the fleet's folder.
    pub(crate) fn is_there(&self, name: &str) -> bool {
        self.file(name).exists()
    }

    /// Stores a batch and tells the workers.
    pub(crate) async fn submit(&self, submission: Submission) -> BatchId {
        let id = submission.store(&self.database, &self.file("marks")).await;
        self.database.notify(&Event::Work(QUEUE.to_owned())).await.unwrap();
        id
    }

    /// What the commands noted, in the order in which they did.
    pub(crate) fn marks(&self) -> Vec<Mark> {
        let text = fs::read_to_string(self.file("marks")).unwrap_or_default();
        // A line is one write, but this read may come in the middle of none: all lines are whole.
        text.lines().map(Mark::parse).collect()
    }

    /// How often commands of a batch noted `what`.
    pub(crate) fn count(&self, batch: BatchId, what: &str) -> usize {
        self.marks().iter().filter(|mark| mark.batch == batch && mark.what == what).count()
    }

    pub(crate) async fn row(&self, batch: BatchId) -> BatchRow {
        self.database.batch(batch, None).await.unwrap().unwrap()
    }

    /// Waits until a batch has ended.
    pub(crate) async fn ended(&self, batch: BatchId) -> BatchRow {
        until("the batch ends", LONG, async || self.row(batch).await.is_finished()).await;
        self.row(batch).await
    }

    /// Waits until commands have noted `what` so often.
    pub(crate) async fn noted(&self, batch: BatchId, what: &str, times: usize) {
        until(what, LONG, async || self.count(batch, what) >= times).await;
    }

    /// Pauses, resumes or cancels a batch, without telling the workers.
    pub(crate) async fn control(&self, batch: BatchId, verb: ControlVerb) {
        let answer = self.database.control_batch(batch, None, verb, "test").await.unwrap();
        assert_eq!(answer, ControlAnswer::Applied);
    }

    /// The outcomes of a batch, by position.
    pub(crate) async fn outcomes(&self, batch: BatchId) -> Vec<Outcome> {
        let select = "SELECT position, status, attempt, worker_id, lease_id, stop_reason
                        FROM holdfast.outcomes WHERE batch_id = $1 ORDER BY position";
        let rows = self.sql.query(select, &[&batch.uuid()]).await.unwrap();
        rows.iter()
            .map(|row| Outcome {
                position: row.get(0),
                succeeded: row.get::<_, &str>(1) == "succeeded",
                attempt: row.get(2),
                worker: WorkerId::from_uuid(row.get(3)),
                lease: row.get::<_, Option<Uuid>>(4).map(LeaseId::from_uuid),
                stop_reason: row.get(5),
            })
            .collect()
    }

    /// The attempts of a batch that ended without an outcome, in the order in which they did.
    pub(crate) async fn attempts(&self, batch: BatchId) -> Vec<AttemptRow> {
        let select = "SELECT position, attempt, ending, charged, by_holder, worker_id
                        FROM holdfast.attempts WHERE batch_id = $1 ORDER BY ended_at, position";
        let rows = self.sql.query(select, &[&batch.uuid()]).await.unwrap();
        rows.iter()
            .map(|row| AttemptRow {
                position: row.get(0),
                attempt: row.get(1),
                ending: row.get(2),
                charged: row.get(3),
                by_holder: row.get(4),
                worker: WorkerId::from_uuid(row.get(5)),
            })
            .collect()
    }

    /// One value of a statement whose only parameter is the batch.
    pub(crate) async fn value<T>(&self, batch: BatchId, sql: &str) -> T
    where
        T: for<'a> tokio_postgres::types::FromSql<'a>,
    {
        self.sql.query_one(sql, &[&batch.uuid()]).await.unwrap().get(0)
    }

    /// The id under which a process works, once it is registered.
    pub(crate) async fn id_of(&self, worker: &WorkerProcess) -> WorkerId {
        let id = worker.id().await;
        let select = "SELECT FROM holdfast.workers WHERE id = $1";
        until("the worker registers", LONG, async || {
            self.sql.query_opt(select, &[&id.uuid()]).await.unwrap().is_some()
        })
        .await;
        id
    }

    /// Processes of a batch's executions, each with the attempt it belongs to; zombies are none.
    pub(crate) fn processes_of(batch: BatchId) -> Vec<(i32, i32)> {
        let variable = |environment: &str, name: &str| -> Option<String> {
            let mut lines = environment.split('\0');
            lines.find_map(|line| line.strip_prefix(name).map(str::to_owned))
        };
        let of_batch = |pid: i32| {
            let environment = fs::read(format!("/proc/{pid}/environ")).ok()?;
            let environment = String::from_utf8_lossy(&environment).into_owned();
            let id = variable(&environment, "HOLDFAST_BATCH_ID=")?;
            let attempt = variable(&environment, "HOLDFAST_ATTEMPT=")?.parse().ok()?;
            (id == batch.to_string()).then_some((pid, attempt))
        };
        let names = fs::read_dir("/proc").unwrap().map(|entry| entry.unwrap().file_name());
        let pids = names.filter_map(|name| name.to_str()?.parse().ok());
        pids.filter_map(of_batch).collect()
    }

    /// Every item succeeded, once, and every execution of one was noted once from start to end.
    pub(crate) async fn assert_each_ran_once(&self, batch: BatchId) {
        let row = self.row(batch).await;
        assert_eq!(row.counts.succeeded, row.item_count, "{row:?}");
        let all: Vec<i32> = (0..row.item_count).collect();
        for what in ["start", "end"] {
            let marks = self.marks().into_iter();
            let mut noted: Vec<i32> = marks
                .filter(|mark| mark.batch == batch && mark.what == what)
                .map(|mark| mark.position)
                .collect();
            noted.sort_unstable();
            assert_eq!(noted, all, "{what}");
        }
        let outcomes = self.outcomes(batch).await;
        assert_eq!(outcomes.iter().map(|outcome| outcome.position).collect::<Vec<_>>(), all);
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            return;
        }
        for number in 0..self.started.load(Ordering::Relaxed) {
            let log = fs::read_to_string(self.file(&format!("worker-{number}.log")));
            let log = log.unwrap_or_default();
            let from = log.lines().count().saturating_sub(60);
            let tail: Vec<&str> = log.lines().skip(from).collect();
            eprintln!("--- the last of worker {number}\n{}", tail.join("\n"));
        }
    }
}

/// A database whose calls never give up before a test does.
pub(crate) fn patient_database(url: &str) -> Database {
    Database::new(DatabaseOptions {
        url: url.to_owned(),
        application: "test".to_owned(),
        pool_size: 4,
        connect_timeout: LONG,
        lock_timeout: LONG,
        statement_timeout: LONG,
        heartbeat_timeout: LONG,
    })
    .unwrap()
}

/// One line that a command wrote.
#[derive(Clone, Debug)]
pub(crate) struct Mark {
    pub(crate) what: String,
    pub(crate) batch: BatchId,
    pub(crate) position: i32,
    pub(crate) attempt: i32,
    pub(crate) token: i64,
    /// When, since boot, to a hundredth of a second.
    pub(crate) at: Duration,
}

impl Mark {
    fn parse(line: &str) -> Self {
        let words: Vec<&str> = line.split(' ').collect();
        let [what, batch, position, attempt, token, at] = words[..] else {
            panic!("a mark of its own shape: {line:?}")
        };
        Self {
            what: what.to_owned(),
            batch: batch.parse().unwrap(),
            position: position.parse().unwrap(),
            attempt: attempt.parse().unwrap(),
            token: token.parse().unwrap(),
            at: Duration::from_secs_f64(at.parse().unwrap()),
        }
    }
}

/// How many commands ran at once at most, by the marks.
pub(crate) fn most_at_once<'a>(marks: impl IntoIterator<Item = &'a Mark>) -> usize {
    let mut running = 0_usize;
    let mut most = 0;
    for mark in marks {
        match mark.what.as_str() {
            "start" => running += 1,
            "end" => running -= 1,
            _ => {}
        }
        most = most.max(running);
    }
    most
}

/// A batch to be stored: every item runs `body` in a shell, between a mark `start` and a mark `end`.
/// In it `mark WORD` notes more, and `$input` is the item's input.
#[derive(Clone, Debug)]
pub(crate) struct Submission {
    pub(crate) items: Vec<Value>,
    pub(crate) body: String,
    pub(crate) owner: &'static str,
    pub(crate) max_running: Option<i32>,
    pub(crate) max_attempts: i32,
    pub(crate) not_before: Option<OffsetDateTime>,
    pub(crate) permanent: Vec<u8>,
    pub(crate) timeout: Duration,
    /// What runs the items in place of a command.
    pub(crate) spec: Option<QueueSpec>,
}

impl Submission {
    /// So many items, of which each has its position for its input.
    pub(crate) fn new(items: usize, body: &str) -> Self {
        Self::of((0..items).map(|n| serde_json::json!({"key": format!("k{n}"), "input": n})), body)
    }

    pub(crate) fn of(items: impl IntoIterator<Item = Value>, body: &str) -> Self {
        Self {
            items: items.into_iter().collect(),
            body: body.to_owned(),
            owner: "default",
            max_running: None,
            max_attempts: 3,
            not_before: None,
            permanent: Vec::new(),
            timeout: LONG,
            spec: None,
        }
    }

    /// Items that this executor runs.
    pub(crate) fn running(items: impl IntoIterator<Item = Value>, spec: QueueSpec) -> Self {
        Self { spec: Some(spec), ..Self::of(items, "") }
    }

    fn spec(&self, marks: &Path) -> QueueSpec {
        if let Some(spec) = &self.spec {
            return spec.clone();
        }
        let script = format!(
            "input=$1; mark() {{ read -r up _ </proc/uptime; echo \"$1 $HOLDFAST_BATCH_ID \
             $HOLDFAST_POSITION $HOLDFAST_ATTEMPT $HOLDFAST_TOKEN $up\" >>\"$MARKS\"; }}\n\
             mark start; {}\nmark end",
            self.body
        );
        let argv = ["sh", "-c", &script, "sh", "{input}"].map(str::to_owned);
        let mut spec = CommandSpec::new(argv.to_vec(), &Settings::defaults().limits);
        spec.env.insert("MARKS".to_owned(), marks.to_str().unwrap().to_owned());
        spec.timeout = self.timeout;
        spec.permanent.clone_from(&self.permanent);
        QueueSpec::Command(spec)
    }

    async fn store(self, database: &Database, marks: &Path) -> BatchId {
        let lines: Vec<String> = self.items.iter().map(|item| format!("{item}\n")).collect();
        let limits = SubmitLimits::default();
        let input = Cursor::new(lines.concat());
        let mut spooled = read_items(input, Form::Jsonl, &limits, None, &mut |_| ()).unwrap();
        let batch = NewBatch { owner: self.owner.to_owned(), ..queue_batch() };
        let record = BatchRecord {
            id: BatchId::generate(),
            owner: batch.owner.clone(),
            queue: QUEUE.to_owned(),
            title: None,
            thread: None,
            submission_key: None,
            digest: spooled.digest(&batch, None),
            spec_json: self.spec(marks).to_json(),
            item_count: i32::try_from(spooled.item_count()).unwrap(),
            has_not_before: spooled.has_not_before(),
            max_running: self.max_running,
            max_live: 1000,
            max_checking: 64,
            max_attempts: self.max_attempts,
            priority: 0,
            not_before: self.not_before,
            traceparent: None,
            principal: Some(Principal { owner: batch.owner.clone(), role: "submitter".to_owned() }),
        };
        let items: Vec<_> = spooled.items().unwrap().map(Result::unwrap).collect();
        let (send, receive) = mpsc::channel(1);
        send.send(Ok(items)).await.unwrap();
        drop(send);
        database.store_batch(&record, receive, |_| ()).await.unwrap().batch()
    }
}

fn queue_batch() -> NewBatch {
    NewBatch::in_queue(QUEUE.parse().unwrap())
}

/// One outcome.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Outcome {
    pub(crate) position: i32,
    pub(crate) succeeded: bool,
    pub(crate) attempt: i32,
    pub(crate) worker: WorkerId,
    /// None when a sweep wrote it.
    pub(crate) lease: Option<LeaseId>,
    pub(crate) stop_reason: String,
}

/// One attempt that did not end in an outcome.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct AttemptRow {
    pub(crate) position: i32,
    pub(crate) attempt: i32,
    pub(crate) ending: String,
    pub(crate) charged: bool,
    pub(crate) by_holder: bool,
    pub(crate) worker: WorkerId,
}

impl AttemptRow {
    /// Its number, how it ended, and whether it was charged.
    pub(crate) fn brief(&self) -> (i32, &str, bool) {
        (self.attempt, &self.ending, self.charged)
    }
}
