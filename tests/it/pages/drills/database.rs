use std::fs::Permissions;
use std::net::SocketAddr;
use std::num::NonZeroU16;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;
use std::time::Duration;

use holdfast::embedded::{DataDir, EmbeddedOptions, EmbeddedPostgres};
use holdfast::store::migrate;
use rustix::process::Signal;
use tempfile::TempDir;
use tokio_postgres::{Client, NoTls};
use tokio_util::task::TaskTracker;

use super::super::runbook::Reader;
use super::super::server::free_address;
use super::super::world::World;
use crate::chaos::servers::Servers;
use crate::support::fleet::{Fleet, LONG, SHORT_LEASE, Submission, until};
use crate::support::proxy::Proxy;

const STUCK_ONCE: &str = "[ $HOLDFAST_ATTEMPT -gt 1 ] || exec sleep 300";

#[tokio::test]
#[ignore = "takes a minute: make drills, make long"]
async fn long_drill_database_failover() {
    let mut servers = Servers::new().await;
    servers.attach_standby().await;
    // The address that everybody uses, whoever is the primary.
    let address = Proxy::before(&servers.url()).await;
    let fleet = Fleet::at(address.url().to_owned(), servers.client().await, None, SHORT_LEASE);
    let Some(world) = World::new(fleet).await else { return servers.end().await };
    let fleet = &world.fleet;
    let _workers = (world.worker(0, &[]).await, world.worker(1, &[]).await);
    let batch = fleet.submit(Submission::new(400, "sleep 0.3")).await;
    fleet.noted(batch, "end", 8).await;
    world.fresh().await;
    let reader = Reader::new(&world, "database-failover").knows("BATCH", batch);

    servers.crash(Signal::QUIT).await;
    address.reset_all();
    world.fires("HoldfastDatabaseDown").await;
    servers.fail_over().await;
    address.lead_to(&servers.url());
    world.fires("HoldfastDatabaseMoved").await;
    world.ends("HoldfastDatabaseDown").await;
    reader.diagnoses().await;
    world.ends("HoldfastDatabaseMoved").await;
    reader.verifies().await;

    let row = fleet.ended(batch).await;
    assert_eq!((row.counts.succeeded, row.counts.failed), (400, 0));
    drop(world);
    servers.end().await;
}

/// A server whose disk can be put back.
struct Disk {
    folder: TempDir,
    port: NonZeroU16,
    running: Option<EmbeddedPostgres>,
}

impl Disk {
    async fn new() -> Self {
        // The account that the server drops to must be able to pass through.
        let open = Permissions::from_mode(0o755);
        let folder = tempfile::Builder::new().permissions(open).tempdir().unwrap();
        let SocketAddr::V4(free) = free_address() else { panic!("asked for IPv4") };
        let mut disk = Self { folder, port: NonZeroU16::new(free.port()).unwrap(), running: None };
        disk.start().await;
        migrate::up(&disk.url(), None).await.unwrap();
        disk
    }

    fn url(&self) -> String {
        format!("postgres://postgres@127.0.0.1:{}/postgres", self.port)
    }

    async fn start(&mut self) {
        let options = EmbeddedOptions {
            tcp_port: Some(self.port),
            ..EmbeddedOptions::new(DataDir::State(self.folder.path().join("state")))
        };
        let started = tokio::task::spawn_blocking(move || EmbeddedPostgres::start(&options));
        self.running = Some(started.await.unwrap().unwrap_or_else(|error| panic!("{error}")));
    }

    async fn stop(&mut self) {
        let running = self.running.take();
        tokio::task::spawn_blocking(move || drop(running)).await.unwrap();
    }

    /// A snapshot of the stopped disk, or back to it.
    fn copy(&self, from: &str, to: &str) {
        let script = "rm -rf -- \"$2\" && cp -a -- \"$1\" \"$2\"";
        let (from, to) = (self.folder.path().join(from), self.folder.path().join(to));
        let copied = Command::new("sh").args(["-c", script, "sh"]).args([from, to]).status();
        assert!(copied.unwrap().success());
    }

    async fn client(&self, connections: &TaskTracker) -> Client {
        let (client, connection) = tokio_postgres::connect(&self.url(), NoTls).await.unwrap();
        connections.spawn(async move { connection.await.ok() });
        client
    }
}

#[tokio::test]
#[ignore = "takes a minute: make drills, make long"]
async fn long_drill_restore_and_the_epoch() {
    let mut disk = Disk::new().await;
    let connections = TaskTracker::new();
    disk.stop().await;
    disk.copy("state", "snapshot");
    disk.start().await;
    let fleet = Fleet::at(disk.url(), disk.client(&connections).await, None, SHORT_LEASE);
    let Some(mut world) = World::new(fleet).await else { return };
    world.fresh().await;
    let mut worker = world.worker(0, &[]).await;
    let lost = world.fleet.submit(Submission::new(5, "true")).await;
    world.fleet.ended(lost).await;
    let highest = world.fleet.marks().iter().map(|mark| mark.token).max().unwrap();

    // The snapshot from before all that is put back, beside workers that were stopped.
    worker.signal(Signal::TERM);
    worker.exit_status().await;
    disk.stop().await;
    disk.copy("snapshot", "state");
    disk.start().await;
    world.fleet.sql = disk.client(&connections).await;
    let reader = Reader::new(&world, "restore").knows("TOKEN", highest);
    world.fresh().await;
    reader.diagnoses().await;
    reader.does(&["recover raise-epoch", "ctl stop-claims"]).await;
    world.fires("HoldfastEpochRaised").await;
    let _worker = world.worker(1, &[]).await;
    reader.does(&["ctl start-claims"]).await;
    let again = world.fleet.submit(Submission::new(5, "true")).await;
    world.fleet.ended(again).await;
    world.ends("HoldfastEpochRaised").await;
    reader.verifies().await;

    let after = world.fleet.marks();
    let lowest = after.iter().filter(|mark| mark.batch == again).map(|mark| mark.token).min();
    assert!(lowest.unwrap() > highest, "{lowest:?} after {highest}");
    drop(world);
    disk.stop().await;
}

#[tokio::test]
#[ignore = "takes half a minute: make drills, make long"]
async fn long_drill_long_transaction() {
    let Some(world) = World::new(Fleet::new(SHORT_LEASE).await).await else { return };
    let _worker = world.worker(0, &[]).await;
    let forgotten = "BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT txid_current()";
    let (session, backend) = world.session().await;
    session.batch_execute(forgotten).await.unwrap();
    let reader = Reader::new(&world, "bloat").knows("BACKEND", backend);

    // The alert's age is half an hour: here it is seconds.
    let expression = world.expression("HoldfastLongTransaction").await.replace("1800", "5");
    until("it gets old", LONG, async || world.prometheus.holds(&expression).await).await;
    reader.diagnoses().await;
    reader.acts().await;
    world.becomes_empty("the transaction", &expression).await;
    reader.verifies().await;
}

#[tokio::test]
#[ignore = "takes half a minute: make drills, make long"]
async fn long_drill_connections() {
    let mut disk = Disk::new().await;
    let connections = TaskTracker::new();
    let sql = disk.client(&connections).await;
    let Some(world) = World::new(Fleet::at(disk.url(), sql, None, SHORT_LEASE)).await else {
        return;
    };
    let fleet = &world.fleet;
    let worker = world.worker(0, &[]).await;
    let batch = fleet.submit(Submission::new(4, STUCK_ONCE)).await;
    fleet.noted(batch, "start", 4).await;

    // Somebody's script takes all there are and goes on taking.
    let mut greedy = Vec::new();
    let expression = world.expression("HoldfastConnectionsExhausted").await;
    let mut backend = 0;
    until("workers are refused", LONG, async || {
        while let Ok((client, connection)) = tokio_postgres::connect(&disk.url(), NoTls).await {
            connections.spawn(async move { connection.await.ok() });
            backend = client.query_one("SELECT pg_backend_pid()", &[]).await.unwrap().get(0);
            greedy.push(client);
        }
        let end = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
                    WHERE application_name = 'holdfast worker'";
        fleet.sql.query(end, &[]).await.unwrap();
        tokio::time::sleep(Duration::from_millis(200)).await;
        world.prometheus.holds(&expression).await
    })
    .await;
    greedy.truncate(2);
    let reader = Reader::new(&world, "connection-exhaustion")
        .knows("BACKEND", backend)
        .knows("WORKER", fleet.id_of(&worker).await);
    reader.diagnoses().await;
    reader.does(&["pg_terminate_backend"]).await;
    drop(greedy);
    world.ends("HoldfastConnectionsExhausted").await;
    reader.verifies().await;
    drop(world);
    disk.stop().await;
}
