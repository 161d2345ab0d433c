//! The database goes away in the middle.

use std::net::{Ipv4Addr, TcpListener};
use std::num::NonZeroU16;
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use holdfast::embedded::{DataDir, EmbeddedOptions, EmbeddedPostgres};
use holdfast::store::migrate;
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;
use tokio_postgres::{Client, NoTls};
use tokio_util::task::TaskTracker;

use crate::support::fleet::{Fleet, LONG, SHORT_LEASE, Submission, until};
use crate::support::invariants::assert_invariants;

/// A server of the test's own, at the same address after every start.
struct Server {
    folder: TempDir,
    port: NonZeroU16,
    running: Option<EmbeddedPostgres>,
    connections: TaskTracker,
}

impl Server {
    async fn new() -> Self {
        // The account that the server drops to must be able to pass through.
        let open = std::fs::Permissions::from_mode(0o755);
        let folder = tempfile::Builder::new().permissions(open).tempdir().unwrap();
        let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = NonZeroU16::new(free.local_addr().unwrap().port()).unwrap();
        drop(free);
        let mut server = Self { folder, port, running: None, connections: TaskTracker::new() };
        server.start().await;
        migrate::up(&server.url(), None).await.unwrap();
        server
    }

    fn url(&self) -> String {
        format!("postgres://postgres@127.0.0.1:{}/postgres", self.port)
    }

    async fn start(&mut self) {
        let options = EmbeddedOptions {
            fsync: false,
            tcp_port: Some(self.port),
            ..EmbeddedOptions::new(DataDir::State(self.folder.path().join("state")))
        };
        let started = tokio::task::spawn_blocking(move || EmbeddedPostgres::start(&options));
        self.running = Some(started.await.unwrap().unwrap());
    }

    async fn stop(&mut self) {
        let running = self.running.take();
        tokio::task::spawn_blocking(move || drop(running)).await.unwrap();
    }

    async fn client(&self) -> Client {
        let url = self.url();
        let mut client = None;
        until("the server takes connections", LONG, async || {
            let Ok((connected, connection)) = tokio_postgres::connect(&url, NoTls).await else {
                return false;
            };
            self.connections.spawn(async move { connection.await.ok() });
            client = Some(connected);
            true
        })
        .await;
        client.unwrap()
    }

    /// Kills one of its processes: it drops everyone, and recovers as after a crash.
    async fn crash(&self, client: &Client) {
        let select = "SELECT pid FROM pg_stat_activity WHERE application_name = 'holdfast worker'
                       ORDER BY state_change DESC LIMIT 1";
        let pid: i32 = client.query_one(select, &[]).await.unwrap().get(0);
        kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
        until("the server drops everyone", LONG, async || client.is_closed()).await;
    }
}

#[tokio::test]
async fn workers_outlive_a_crash_and_a_restart_of_the_database() {
    let mut server = Server::new().await;
    let mut fleet = Fleet::at(server.url(), server.client().await, None, "");
    let workers = [fleet.start_with(&["--slots", "4"]), fleet.start_with(&["--slots", "4"])];
    let batch = fleet.submit(Submission::new(400, "sleep 0.05")).await;

    fleet.noted(batch, "end", 60).await;
    server.crash(&fleet.sql).await;
    fleet.sql = server.client().await;
    let ended = fleet.count(batch, "end");
    fleet.noted(batch, "end", ended + 60).await;
    server.stop().await;
    tokio::time::sleep(Duration::from_millis(1_500)).await;
    server.start().await;
    fleet.sql = server.client().await;
    let answers = async || fleet.database.batch(batch, None).await.is_ok();
    until("the test is connected again", LONG, answers).await;
    assert!(!fleet.row(batch).await.is_finished(), "the batch outlived both");
    fleet.ended(batch).await;

    // No lease ran out, so nothing ran twice; a claim whose answer was lost never ran.
    fleet.assert_each_ran_once(batch).await;
    let attempts = fleet.attempts(batch).await;
    assert!(attempts.iter().all(|attempt| !attempt.charged), "{attempts:?}");
    assert_invariants(&fleet.sql, batch).await;
    drop(workers);
    server.stop().await;
}

#[tokio::test]
async fn what_ran_into_a_long_outage_is_stopped_and_runs_again() {
    let mut server = Server::new().await;
    let settings = format!("{SHORT_LEASE}[drain]\ngrace = '1s'\nrelease = '500ms'\n");
    let mut fleet = Fleet::at(server.url(), server.client().await, None, &settings);
    let mut worker = fleet.start();
    let body = "[ $(grep -c start \"$MARKS\") -gt 3 ] || { trap 'mark term; exit 1' TERM; sleep 300 & wait; }";
    let batch = fleet.submit(Submission::new(3, body)).await;
    fleet.noted(batch, "start", 3).await;

    server.stop().await;
    // Nobody renews its lease: the worker ends them before anyone else could begin them again.
    fleet.noted(batch, "term", 3).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    server.start().await;
    fleet.sql = server.client().await;
    let answers = async || fleet.database.batch(batch, None).await.is_ok();
    until("the test is connected again", LONG, answers).await;
    let row = fleet.ended(batch).await;

    assert_eq!(row.counts.succeeded, 3, "{row:?}");
    assert_eq!(fleet.count(batch, "start"), 6);
    let outcomes = fleet.outcomes(batch).await;
    assert!(outcomes.iter().all(|outcome| outcome.attempt == 1), "free of charge: {outcomes:?}");
    assert_invariants(&fleet.sql, batch).await;

    // Nor does an outage hold up the end of a worker that cannot hand in what it has.
    let last = fleet.submit(Submission::new(1, "sleep 0.5")).await;
    fleet.noted(last, "start", 1).await;
    server.stop().await;
    worker.signal(Signal::TERM);
    assert_eq!(worker.exit_status().await, 4);
}

#[tokio::test]
async fn a_worker_that_died_while_the_database_was_away_is_not_charged() {
    let mut server = Server::new().await;
    let mut fleet = Fleet::at(server.url(), server.client().await, None, SHORT_LEASE);
    let mut dead = fleet.start();
    let batch = fleet.submit(Submission::new(2, "exec sleep 300")).await;
    fleet.noted(batch, "start", 2).await;

    server.stop().await;
    dead.kill();
    server.start().await;
    fleet.sql = server.client().await;
    let _heir = fleet.start();
    fleet.noted(batch, "start", 4).await;

    let attempts = fleet.attempts(batch).await;
    assert_eq!(attempts.len(), 2, "{attempts:?}");
    assert!(attempts.iter().all(|lost| lost.brief() == (1, "expired", false)), "{attempts:?}");
    let history = "SELECT histories[1] FROM holdfast.leases WHERE batch_id = $1 LIMIT 1";
    assert_eq!(fleet.value::<i64>(batch, history).await, 0x01_00_00, "one interruption");
    assert_invariants(&fleet.sql, batch).await;
    server.stop().await;
}
