//! `holdfast exporter`: what it shows of a database, with and without one.

use std::fs::{self, File};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use holdfast::clock::{Clock, SystemClock};
use holdfast::exporter::Exporter;
use holdfast::health::Probed;
use holdfast::model::{BatchId, Finding, History, QueueName, WorkerId};
use holdfast::store::{ControlVerb, Database, DatabaseOptions};
use holdfast::telemetry::BuildInfo;
use holdfast::telemetry::metrics::GlobalMetrics;
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::support::TestDb;
use crate::support::fixture::{BatchSpec, Bed, again, publish};
use crate::support::fleet::{LONG, until};
use crate::support::prometheus::{self, find, value};
use crate::support::proxy::{Proxy, Weather};

/// One that collects when it is told to, of the queue of a [`Bed`].
fn exporter(url: &str) -> Exporter {
    let options = DatabaseOptions {
        url: url.to_owned(),
        application: "holdfast exporter".to_owned(),
        pool_size: 1,
        connect_timeout: LONG,
        lock_timeout: LONG,
        statement_timeout: LONG,
        heartbeat_timeout: LONG,
    };
    let queue: QueueName = "q".parse().unwrap();
    let metrics = GlobalMetrics::new([queue], &BuildInfo::current(1, 1), LONG);
    let clock: Arc<dyn Clock> = Arc::new(SystemClock);
    let database = Database::new(options).unwrap();
    Exporter::new(database, Arc::new(metrics), clock, LONG, LONG)
}

async fn collected(exporter: &Exporter) -> String {
    exporter.collect().await;
    exporter.exposition().unwrap()
}

fn items(exposition: &str) -> [f64; 5] {
    ["pending", "queued", "leased", "running", "checking"]
        .map(|state| value(exposition, &format!(r#"holdfast_items{{queue="q",state="{state}"}}"#)))
}

async fn demand(bed: &Bed) -> i64 {
    let demand = "SELECT holdfast.autoscale_demand('q')";
    bed.sql.query_one(demand, &[]).await.unwrap().get(0)
}

/// Seconds from the database's clock to a timestamp of the exposition.
async fn age(bed: &Bed, exposition: &str, series: &str) -> f64 {
    let now = "SELECT extract(epoch FROM clock_timestamp())::double precision";
    let now: f64 = bed.sql.query_one(now, &[]).await.unwrap().get(0);
    now - value(exposition, series)
}

const READY: &str = r#"holdfast_queue_oldest_ready_timestamp_seconds{queue="q"}"#;

#[tokio::test]
async fn items_are_shown_in_every_state_and_counted_as_demand() {
    let bed = Bed::new().await;
    let exporter = exporter(bed.db.url());
    assert_eq!((items(&collected(&exporter).await), demand(&bed).await), ([0.0; 5], 0));
    // A window of ten over forty items.
    let batch = bed.batch_of(BatchSpec { items: 40, max_live: 10, ..BatchSpec::default() }).await;
    assert_eq!(items(&collected(&exporter).await), [30.0, 10.0, 0.0, 0.0, 0.0]);

    let held = bed.claim(batch, 6).await;
    let started = "UPDATE holdfast.leases SET started = positions[1:2] WHERE batch_id = $1";
    bed.run(started, &[&batch.uuid()]).await;
    assert_eq!(items(&collected(&exporter).await), [30.0, 4.0, 4.0, 2.0, 0.0]);

    bed.stage(&held[5..], &[]).await;
    bed.finish(&held[4]).await;
    bed.hand_in_one(&held[3], &again(History::FRESH, Duration::from_mins(5))).await;
    let text = collected(&exporter).await;
    // Three held, one under check, one between two attempts, five fresh ones in the window.
    assert_eq!(items(&text), [29.0, 6.0, 1.0, 2.0, 1.0]);
    assert_eq!(demand(&bed).await, 10);
    assert_eq!(find(&text, r#"holdfast_leases_active{queue="q"}"#), Some(4.0));
    assert_eq!(find(&text, r#"holdfast_leases_overdue{queue="q"}"#), Some(0.0));
    let checking = r#"holdfast_queue_oldest_checking_timestamp_seconds{queue="q"}"#;
    assert!((0.0..60.0).contains(&age(&bed, &text, checking).await));

    bed.expire(held[0].lease()).await;
    let text = collected(&exporter).await;
    assert_eq!(find(&text, r#"holdfast_leases_active{queue="q"}"#), Some(0.0));
    assert_eq!(find(&text, r#"holdfast_leases_overdue{queue="q"}"#), Some(4.0));

    // What is held goes on; nothing else is asked for.
    bed.control(batch, ControlVerb::Pause).await;
    let text = collected(&exporter).await;
    assert_eq!(items(&text), [35.0, 0.0, 1.0, 2.0, 1.0]);
    assert_eq!(find(&text, READY), Some(0.0));
    assert_eq!(find(&text, r#"holdfast_batches{state="paused"}"#), Some(1.0));
    assert_eq!(demand(&bed).await, 4);

    bed.control(batch, ControlVerb::Cancel).await;
    let text = collected(&exporter).await;
    assert_eq!((items(&text), demand(&bed).await), ([0.0; 5], 0));
    for gone in ["leases_active", "leases_overdue", "queue_oldest_checking_timestamp_seconds"] {
        assert_eq!(find(&text, &format!(r#"holdfast_{gone}{{queue="q"}}"#)), Some(0.0), "{gone}");
    }
}

/// Moves the last look at a batch into the past.
async fn age_batch(bed: &Bed, batch: BatchId, seconds: i32) {
    let older = "UPDATE holdfast.progress
                    SET recorded_at = clock_timestamp() - make_interval(secs => $2)
                  WHERE batch_id = $1";
    bed.run(older, &[&batch.uuid(), &f64::from(seconds)]).await;
}

#[tokio::test]
async fn the_oldest_ready_item_is_the_one_that_was_next_in_line_for_longest() {
    let bed = Bed::new().await;
    let exporter = exporter(bed.db.url());
    let capped = BatchSpec { items: 9, max_running: Some(2), ..BatchSpec::default() };
    let batch = bed.batch_of(capped).await;
    age_batch(&bed, batch, 500).await;
    let since = age(&bed, &collected(&exporter).await, READY).await;
    assert!((500.0..560.0).contains(&since), "{since}");

    // Served, it waits anew; at its cap nothing waits.
    let held = bed.claim(batch, 1).await;
    let since = age(&bed, &collected(&exporter).await, READY).await;
    assert!((0.0..60.0).contains(&since), "{since}");
    bed.claim(batch, 1).await;
    assert_eq!(find(&collected(&exporter).await, READY), Some(0.0));

    // An item whose next attempt is due.
    bed.hand_in_one(&held[0], &again(History::FRESH, Duration::ZERO)).await;
    let due = "UPDATE holdfast.waiting SET ready_at = ready_at - interval '100 s'";
    bed.run(due, &[]).await;
    let floor = "UPDATE holdfast.progress SET retry_floor = '-infinity'";
    bed.run(floor, &[]).await;
    let since = age(&bed, &collected(&exporter).await, READY).await;
    assert!((100.0..160.0).contains(&since), "{since}");
}

#[tokio::test]
async fn items_with_a_time_of_their_own_are_pending_until_it_comes() {
    let bed = Bed::new().await;
    let exporter = exporter(bed.db.url());
    let batch = bed.batch(4).await;
    bed.defer(batch, 0, 4, 300.0).await;
    // The claim sets them aside.
    bed.try_claim(batch, 4).await;
    assert_eq!(items(&collected(&exporter).await), [4.0, 0.0, 0.0, 0.0, 0.0]);

    bed.run("UPDATE holdfast.waiting SET ready_at = clock_timestamp()", &[]).await;
    bed.run("UPDATE holdfast.progress SET deferred_floor = '-infinity'", &[]).await;

    assert_eq!(items(&collected(&exporter).await), [0.0, 4.0, 0.0, 0.0, 0.0]);
    assert_eq!(demand(&bed).await, 4);
    let not_before = "UPDATE holdfast.batches SET not_before = clock_timestamp() + interval '1 h'";
    bed.run(not_before, &[]).await;
    assert_eq!(items(&collected(&exporter).await), [4.0, 0.0, 0.0, 0.0, 0.0]);
}

#[tokio::test]
async fn workers_switches_and_the_server_are_shown() {
    let bed = Bed::new().await;
    let exporter = exporter(bed.db.url());
    let (draining, stale) = (WorkerId::generate(), WorkerId::generate());
    for worker in [draining, stale] {
        bed.register(worker).await;
    }
    let drains = "UPDATE holdfast.workers SET state = 'draining' WHERE id = $1";
    bed.run(drains, &[&draining.uuid()]).await;
    bed.silence(stale).await;
    bed.run("UPDATE holdfast.control SET claims_enabled = false", &[]).await;
    let other = bed.db.client().await;
    other.batch_execute("BEGIN; SELECT txid_current()").await.unwrap();

    let text = collected(&exporter).await;

    for (series, expected) in [
        (r#"workers{state="live"}"#, 1.0),
        (r#"workers{state="draining"}"#, 1.0),
        (r#"workers{state="stale"}"#, 1.0),
        ("claims_enabled", 0.0),
        ("notify_queue_usage_ratio", 0.0),
        ("db_up", 1.0),
    ] {
        assert_eq!(find(&text, &format!("holdfast_{series}")), Some(expected), "{series}");
    }
    let row = "SELECT c.epoch::double precision, c.timeline::double precision,
                      (SELECT max(version) FROM holdfast.schema_migrations)::double precision
                 FROM holdfast.control c";
    let row = bed.sql.query_one(row, &[]).await.unwrap();
    for (place, series) in ["lease_epoch", "db_timeline", "schema_version"].iter().enumerate() {
        let expected: f64 = row.get(place);
        assert_eq!(find(&text, &format!("holdfast_{series}")), Some(expected), "{series}");
    }
    let open = "holdfast_db_oldest_transaction_timestamp_seconds";
    assert!((0.0..60.0).contains(&age(&bed, &text, open).await));
    assert!(text.contains(r#"holdfast_table_dead_tuples{table="leases"}"#), "{text}");
    other.batch_execute("ROLLBACK").await.unwrap();
}

#[tokio::test]
async fn to_read_is_enough() {
    let bed = Bed::new().await;
    let batch = bed.batch_of(BatchSpec { items: 3, ..BatchSpec::default() }).await;
    let held = bed.claim(batch, 2).await;
    bed.stage(&held[1..], &[]).await;
    bed.conclude(&held[1], &publish(Finding::Holds)).await;
    // Roles are of the whole server, which other tests share.
    let role = format!("viewer_{}", BatchId::generate().to_string().replace('-', ""));
    let rights = format!(
        "CREATE ROLE {role} LOGIN; GRANT USAGE ON SCHEMA holdfast TO {role};
         GRANT SELECT ON ALL TABLES IN SCHEMA holdfast TO {role}"
    );
    bed.sql.batch_execute(&rights).await.unwrap();
    let mut url: String = bed.db.url().to_owned();
    url = url.replace("user=postgres", &format!("user={role}"));
    url = url.replace("//postgres@", &format!("//{role}@"));
    let who = exporter(&url);

    let text = collected(&who).await;

    let drop = format!("DROP OWNED BY {role}; DROP ROLE {role}");
    bed.sql.batch_execute(&drop).await.unwrap();
    assert_ne!(url, bed.db.url());
    assert_eq!(items(&text), [0.0, 1.0, 1.0, 0.0, 0.0]);
    assert!(value(&text, "holdfast_exporter_last_success_timestamp_seconds") > 0.0);
}

/// The command, on a database and a folder of one test's own.
struct Running {
    child: Child,
    folder: TempDir,
}

impl Running {
    fn start(url: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let config = "[exporter]\ninterval = '1s'\ntimeout = '1s'\n[database]\n\
                      connect_timeout = '1s'\n[queues.q]\nexecutor = 'command'\nargv = ['true']\n";
        fs::write(folder.path().join("holdfast.toml"), config).unwrap();
        let child = Command::new(env!("CARGO_BIN_EXE_holdfast"))
            .args(["exporter", "--listen", "127.0.0.1:0", "--log-format", "json"])
            .args(["--database-url", url, "--config"])
            .arg(folder.path().join("holdfast.toml"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(folder.path().join("log")).unwrap())
            .spawn()
            .unwrap();
        Self { child, folder }
    }

    fn log(&self) -> String {
        fs::read_to_string(self.folder.path().join("log")).unwrap()
    }

    async fn address(&self) -> SocketAddr {
        let mut address = None;
        until("it serves", LONG, async || {
            let log = self.log();
            let serves = log.lines().find(|line| line.contains("serving metrics and health"));
            address = serves.and_then(|line| serde_json::from_str::<serde_json::Value>(line).ok());
            address.is_some()
        })
        .await;
        address.unwrap()["address"].as_str().unwrap().parse().unwrap()
    }

    async fn get(&self, path: &str) -> (u16, String) {
        let mut stream = TcpStream::connect(self.address().await).await.unwrap();
        let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
    }

    async fn scrape(&self) -> String {
        let (status, text) = self.get("/metrics").await;
        assert_eq!(status, 200, "{text}");
        text
    }

    /// Waits until the scrape is so.
    async fn shows(&self, what: &str, is: impl Fn(&str) -> bool) {
        until(what, LONG, async || is(&self.scrape().await)).await;
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn up(text: &str) -> bool {
    find(text, "holdfast_db_up") == Some(1.0)
}

fn knows_items(text: &str) -> bool {
    text.contains("holdfast_items{")
}

#[tokio::test]
async fn it_answers_at_once_while_the_database_is_away_and_says_since_when() {
    let db = TestDb::fresh().await;
    let proxy = Proxy::before(db.url()).await;
    let mut running = Running::start(proxy.url());
    let last = "holdfast_exporter_last_success_timestamp_seconds";
    running.shows("it has collected", |text| value(text, last) > 0.0).await;
    let text = running.scrape().await;
    assert!(up(&text) && knows_items(&text), "{text}");
    let before = value(&text, last);

    // As behind a firewall that forgot it: no answer, and no error.
    proxy.set(Weather::BlackHole);
    running.shows("it notices", |text| !up(text)).await;
    let asked = SystemClock.now();
    let text = running.scrape().await;
    let took = SystemClock.now().since(asked);
    assert!(took < Duration::from_secs(1), "a scrape waits for nothing: {took:?}");
    let since = value(&text, last);
    assert!(since >= before, "{text}");
    running.shows("what is not known any more goes", |text| !knows_items(text)).await;
    let text = running.scrape().await;
    assert!((value(&text, last) - since).abs() < 60.0);
    assert!(value(&text, r#"holdfast_exporter_collect_errors_total{collector="queues"}"#) > 0.0);
    for path in ["/livez", "/readyz", "/startupz"] {
        assert_eq!(running.get(path).await.0, 200, "{path}");
    }

    proxy.set(Weather::Fair);
    proxy.reset_all();
    running
        .shows("it is back", |text| up(text) && knows_items(text) && value(text, last) > since)
        .await;
    if let Some(promtool) = prometheus::program("promtool") {
        assert_eq!(prometheus::check_metrics(&promtool, &running.scrape().await), "");
    }
    assert_eq!(
        running.log().lines().filter(|line| line.contains("a collection failed")).count(),
        1
    );

    let pid = Pid::from_raw(i32::try_from(running.child.id()).unwrap()).unwrap();
    kill_process(pid, Signal::TERM).unwrap();
    let mut status = None;
    until("it ends", LONG, async || {
        status = running.child.try_wait().unwrap();
        status.is_some()
    })
    .await;
    assert_eq!(status.unwrap().code(), Some(0));
}

#[tokio::test]
async fn it_starts_without_a_database_and_refuses_an_address_in_use() {
    let nowhere = "postgres://nobody@127.0.0.1:1/none";
    let running = Running::start(nowhere);
    running
        .shows("it has tried", |text| {
            find(text, r#"holdfast_exporter_collect_errors_total{collector="server"}"#) >= Some(1.0)
        })
        .await;
    let text = running.scrape().await;
    assert_eq!(find(&text, "holdfast_exporter_last_success_timestamp_seconds"), Some(0.0));
    assert!(!up(&text) && !knows_items(&text), "{text}");
    assert_eq!(running.get("/readyz").await.0, 200);
    let address = running.address().await.to_string();

    let taken = Command::new(env!("CARGO_BIN_EXE_holdfast"))
        .args(["exporter", "--listen", &address, "--database-url", nowhere])
        .args(["--config", "/dev/null"])
        .output()
        .unwrap();

    assert_eq!(taken.status.code(), Some(78));
    let said = String::from_utf8(taken.stderr).unwrap();
    assert!(said.contains(&format!("exporter.listen {address}")), "{said}");
    let nothing = Command::new(env!("CARGO_BIN_EXE_holdfast"))
        .args(["exporter", "--listen", "", "--database-url", nowhere, "--config", "/dev/null"])
        .output()
        .unwrap();
    assert_eq!(nothing.status.code(), Some(78));
}
