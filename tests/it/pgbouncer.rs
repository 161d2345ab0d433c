//! Behind `PgBouncer` in transaction mode: every transaction may run in another session.

use std::fs::{self, File};
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use futures::future::join_all;
use holdfast::execute::spawn::spawn_with_death_signal;
use holdfast::model::{ItemStatus, Position};
use holdfast::store::{ControlVerb, Event, RetryAnswer};
use rustix::process::Signal;
use serde_json::Value;
use tempfile::TempDir;
use tokio_postgres::{Client, NoTls};
use tokio_util::task::TaskTracker;

use crate::support::TestDb;
use crate::support::fleet::{Fleet, LONG, QUEUE, SHORT, SHORT_LEASE, Submission, now, until};
use crate::support::invariants::{assert_invariants, assert_no_deadlock};

/// A pooler of the test's own before one database.
struct Pooler {
    child: Child,
    url: String,
    folder: TempDir,
    connections: TaskTracker,
}

/// The program and its version; none on a machine without it (`make setup` says how to get it).
fn pgbouncer() -> Option<(PathBuf, (u32, u32))> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&path).chain([PathBuf::from("/usr/sbin")]);
    let program = folders.map(|folder| folder.join("pgbouncer")).find(|file| file.is_file())?;
    let output = Command::new(&program).arg("--version").output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let version = text.lines().next().unwrap().rsplit(' ').next().unwrap().to_owned();
    let mut numbers = version.split('.').map(|number| number.parse().unwrap());
    Some((program, (numbers.next().unwrap(), numbers.next().unwrap())))
}

impl Pooler {
    /// Few sessions, so that they change hands; `prepared` is how many statements it keeps for each.
    async fn before(db: &TestDb, program: &PathBuf, prepared: Option<u32>) -> Self {
        let prepared =
            prepared.map_or_else(String::new, |n| format!("max_prepared_statements = {n}\n"));
        let mode = "pool_mode = transaction\ndefault_pool_size = 4\n";
        Self::with(db, program, &format!("{mode}{prepared}")).await
    }

    async fn with(db: &TestDb, program: &PathBuf, own: &str) -> Self {
        let config: tokio_postgres::Config = db.url().parse().unwrap();
        let [tokio_postgres::config::Host::Unix(socket)] = config.get_hosts() else {
            panic!("the tests' server listens on a socket: {}", db.url())
        };
        let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = free.local_addr().unwrap().port();
        drop(free);
        let open = fs::Permissions::from_mode(0o755);
        let folder = tempfile::Builder::new().permissions(open).tempdir().unwrap();
        let file = folder.path().join("pgbouncer.ini");
        let settings = format!(
            "[databases]\n* = host={} port={} user=postgres\n[pgbouncer]\n\
             listen_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\n\
             auth_type = any\nmax_client_conn = 200\n{own}",
            socket.display(),
            config.get_ports()[0],
        );
        fs::write(&file, settings).unwrap();
        // It refuses root: as whoever runs the server.
        let owner = fs::metadata(socket).unwrap();
        let mut command = Command::new(program);
        command.arg(&file).current_dir("/").stdin(Stdio::null()).stdout(Stdio::null());
        command.stderr(File::create(folder.path().join("log")).unwrap()).process_group(0);
        if rustix::process::geteuid().is_root() {
            command.uid(owner.uid()).gid(owner.gid());
        }
        let child = spawn_with_death_signal(&mut command, Signal::KILL).unwrap();
        let database = config.get_dbname().unwrap();
        let url = format!("postgres://postgres@127.0.0.1:{port}/{database}?sslmode=disable");
        let pooler = Self { child, url, folder, connections: TaskTracker::new() };
        until("the pooler answers", LONG, async || {
            tokio_postgres::connect(&pooler.url, NoTls).await.is_ok()
        })
        .await;
        pooler
    }

    async fn client(&self) -> Client {
        let (client, connection) = tokio_postgres::connect(&self.url, NoTls).await.unwrap();
        self.connections.spawn(async move { connection.await.ok() });
        client
    }
}

impl Drop for Pooler {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            let log = fs::read_to_string(self.folder.path().join("log")).unwrap_or_default();
            eprintln!("--- the pooler\n{log}");
        }
    }
}

/// What a session is left with, where nothing was left.
async fn assert_clean_sessions(pooler: &Pooler, direct: &Client) {
    let clients = join_all((0..4).map(|_| pooler.client())).await;
    let look = async |client: &Client| -> (i32, Vec<String>) {
        client.batch_execute("BEGIN").await.unwrap();
        let settings = "SELECT pg_backend_pid()::text UNION ALL
            (SELECT name || ' = ' || setting FROM pg_settings
              WHERE name IN ('lock_timeout', 'statement_timeout', 'enable_seqscan', 'jit',
                             'idle_in_transaction_session_timeout', 'synchronous_commit',
                             'transaction_isolation') AND source = 'session')";
        let rows = client.query_typed(settings, &[]).await.unwrap();
        // Held open for a moment, so that each gets a session of its own.
        tokio::time::sleep(Duration::from_millis(200)).await;
        client.batch_execute("COMMIT").await.unwrap();
        let pid: String = rows[0].get(0);
        (pid.parse().unwrap(), rows[1..].iter().map(|row| row.get(0)).collect())
    };
    for (pid, left) in join_all(clients.iter().map(look)).await {
        assert!(left.is_empty(), "session {pid} keeps {left:?}");
    }
    let locks = "SELECT count(*) FROM pg_locks l JOIN pg_stat_activity a USING (pid)
                  WHERE l.locktype = 'advisory' AND a.datname = current_database()
                    AND a.state = 'idle'";
    assert_eq!(direct.query_one(locks, &[]).await.unwrap().get::<_, i64>(0), 0, "session locks");
}

/// Submits by the command, as a process of its own.
async fn submit(fleet: &Fleet, pooler: &Pooler, number: usize) {
    let lines: Vec<String> =
        (0..200).map(|n| format!("{{\"key\":\"k{n}\",\"input\":{n}}}\n")).collect();
    let file = pooler.folder.path().join(format!("items-{number}.jsonl"));
    fs::write(&file, lines.concat()).unwrap();
    let submitted = holdfast(fleet, &["submit", file.to_str().unwrap(), "--queue", QUEUE]).await;
    assert!(submitted.status.success(), "{}", String::from_utf8_lossy(&submitted.stderr));
}

async fn holdfast(fleet: &Fleet, arguments: &[&str]) -> std::process::Output {
    let mut command = tokio::process::Command::new(env!("CARGO_BIN_EXE_holdfast"));
    command.args(arguments).args(["--database-url", fleet.url(), "--config"]);
    command.arg(fleet.folder().join("holdfast.toml")).stdin(Stdio::null()).kill_on_drop(true);
    command.output().await.unwrap()
}

/// Everything that happens to an item: submit, claim, heartbeats, finish, retry, crash, cancel,
/// export; `direct` says whether workers have a URL of their own for LISTEN.
async fn life_of_an_item(program: &PathBuf, prepared: Option<u32>, direct: bool) {
    let db = TestDb::fresh().await;
    let sql = db.client().await;
    let pooler = Pooler::before(&db, program, prepared).await;
    let listen = if direct { db.url() } else { "" };
    let settings = format!("{SHORT_LEASE}[database]\nlisten_url = \"{listen}\"\n");
    let fleet = Fleet::at(pooler.url.clone(), sql, None, &settings);
    let mut workers = [fleet.start(), fleet.start()];
    for worker in &workers {
        worker.ready().await;
    }
    let deaf = async || {
        let told = |line: &serde_json::Value| {
            line["message"].as_str().is_some_and(|text| text.contains("set database.listen_url"))
        };
        workers.iter().all(|worker| worker.log().iter().any(told))
    };
    if direct {
        assert!(!deaf().await, "it hears");
    } else {
        until("they notice that they do not hear", LONG, deaf).await;
    }

    // One outlives its lease twice, one fails once, one for good.
    let body =
        "case $input in 0) sleep 7;; 1) [ $HOLDFAST_ATTEMPT -gt 1 ] || exit 3;; 2) exit 7;; esac";
    let mixed = Submission { permanent: vec![7], ..Submission::new(40, body) };
    let asked = now();
    let batch = fleet.submit(mixed).await;
    fleet.noted(batch, "start", 1).await;
    let took = fleet.marks()[0].at.saturating_sub(asked);
    let machine = Duration::from_secs(2); // it may be busy with other tests
    assert!(took < Duration::from_millis(1_500) + machine, "{took:?}");
    let row = fleet.ended(batch).await;
    assert_eq!((row.counts.succeeded, row.counts.failed), (39, 1), "{row:?}");
    assert_eq!(fleet.count(batch, "start"), 41, "no lease was lost");
    let from = Position::new(0);
    let retried = fleet.database.retry_failed(batch, None, None, from, 10, "test").await.unwrap();
    assert_eq!(retried, RetryAnswer::Moved { items: 1, next: None });
    fleet.database.notify(&Event::Work(QUEUE.to_owned())).await.unwrap();
    fleet.ended(batch).await;

    // A worker dies, and its items run elsewhere.
    let once = "[ $HOLDFAST_ATTEMPT -gt 1 ] || exec sleep 300";
    let survives = fleet.submit(Submission::new(20, once)).await;
    fleet.noted(survives, "start", 20).await;
    workers[0].kill();
    workers[0] = fleet.start();
    workers[1].kill();
    workers[1] = fleet.start();
    assert_eq!(fleet.ended(survives).await.counts.succeeded, 20);

    // A cancel reaches what runs: at once, or with a heartbeat.
    let trap = "trap 'mark term; exit 0' TERM; while :; do sleep 300 & wait $!; done";
    let cancelled = fleet.submit(Submission::new(4, trap)).await;
    fleet.noted(cancelled, "start", 4).await;
    let asked = now();
    fleet.control(cancelled, ControlVerb::Cancel).await;
    fleet.database.notify(&Event::Cancelled(cancelled)).await.unwrap();
    fleet.noted(cancelled, "term", 4).await;
    let limit = if direct { Duration::ZERO } else { SHORT / 2 } + Duration::from_secs(2);
    assert!(now().saturating_sub(asked) < limit, "{:?}", now().saturating_sub(asked));

    // Commands, all at once: items go in by COPY.
    join_all((0..6).map(|number| submit(&fleet, &pooler, number))).await;
    let exported = holdfast(&fleet, &["export", &batch.to_string()]).await;
    assert!(exported.status.success(), "{}", String::from_utf8_lossy(&exported.stderr));
    assert_eq!(exported.stdout.split(|byte| *byte == b'\n').count(), 41, "40 lines");
    let items = fleet.database.items(batch, Some(ItemStatus::Failed), from, 10).await.unwrap();
    assert_eq!(items.len(), 1);

    for worker in &mut workers {
        worker.signal(Signal::TERM);
        assert_eq!(worker.exit_status().await, 0);
    }
    for batch in [batch, survives, cancelled] {
        assert_invariants(&fleet.sql, batch).await;
    }
    assert_no_deadlock(&fleet.sql).await;
    assert_clean_sessions(&pooler, &fleet.sql).await;
}

/// Without the pooler's own bookkeeping of prepared statements, and with it where it has one.
async fn with_and_without_prepared_statements(direct: bool) {
    let Some((program, version)) = pgbouncer() else {
        eprintln!("skipped: there is no pgbouncer");
        return;
    };
    if version < (1, 21) {
        life_of_an_item(&program, None, direct).await;
    } else {
        life_of_an_item(&program, Some(0), direct).await;
        life_of_an_item(&program, Some(100), direct).await;
    }
}

#[tokio::test]
async fn the_life_of_an_item_passes_through_a_pooler_beside_a_direct_url() {
    with_and_without_prepared_statements(true).await;
}

#[tokio::test]
async fn the_life_of_an_item_passes_through_a_pooler_alone() {
    with_and_without_prepared_statements(false).await;
}

#[tokio::test]
async fn the_doctor_says_through_which_pooler_it_looks() {
    let Some((program, _)) = pgbouncer() else {
        eprintln!("skipped: there is no pgbouncer");
        return;
    };
    let db = TestDb::fresh().await;
    let direct = format!("[database]\nlisten_url = \"{}\"\n", db.url());
    let transactions = "pool_mode = transaction\ndefault_pool_size = 4\n";
    for (mode, settings, exit, name) in [
        (transactions, "", 10, Some(("pooled", "warning"))),
        (transactions, direct.as_str(), 10, None),
        ("pool_mode = session\ndefault_pool_size = 4\n", "", 10, None),
        // One session: whoever keeps it keeps everybody else out.
        (
            "pool_mode = transaction\ndefault_pool_size = 1\n",
            direct.as_str(),
            20,
            Some(("pooler", "critical")),
        ),
        ("pool_mode = statement\ndefault_pool_size = 4\n", "", 20, Some(("pooler", "critical"))),
    ] {
        let pooler = Pooler::with(&db, &program, mode).await;
        let fleet = Fleet::at(pooler.url.clone(), db.client().await, None, settings);

        let ran = holdfast(&fleet, &["doctor", "--json"]).await;

        let said = String::from_utf8_lossy(&ran.stdout);
        assert_eq!(ran.status.code(), Some(exit), "{mode}: {said}");
        let report: Value = serde_json::from_str(&said).unwrap();
        let findings: Vec<(&str, &str)> = report["findings"]
            .as_array()
            .unwrap()
            .iter()
            .map(|finding| {
                (finding["name"].as_str().unwrap(), finding["severity"].as_str().unwrap())
            })
            // What every server of the tests lives without.
            .filter(|(name, _)| *name != "not_durable")
            .collect();
        assert_eq!(findings, name.into_iter().collect::<Vec<_>>(), "{mode}{settings}");
    }
}
