//! What the tests share: a private server per run, and a fresh database per test.

// By path: a bench that includes this file by its path would look for the module elsewhere.
#[path = "support/cluster.rs"]
mod cluster;
#[path = "support/collector.rs"]
pub(crate) mod collector;
#[path = "support/fixture.rs"]
pub(crate) mod fixture;
#[path = "support/fleet.rs"]
pub(crate) mod fleet;
#[path = "support/invariants.rs"]
pub(crate) mod invariants;
#[path = "support/prometheus.rs"]
pub(crate) mod prometheus;
#[path = "support/proxy.rs"]
pub(crate) mod proxy;
#[path = "support/scene.rs"]
pub(crate) mod scene;
#[path = "support/upstream.rs"]
pub(crate) mod upstream;
#[path = "support/worker_process.rs"]
pub(crate) mod worker_process;

use tokio_postgres::{Client, NoTls};
use tokio_util::task::TaskTracker;

use cluster::Cluster;

/// A migrated database of one test's own, dropped in the background when the test lets go of it.
pub(crate) struct TestDb {
    cluster: &'static Cluster,
    name: String,
    url: String,
    connections: TaskTracker,
}

impl TestDb {
    /// Copies the migrated template.
    pub(crate) async fn fresh() -> Self {
        let cluster = Cluster::shared().await;
        let name = cluster.create_database().await;
        let url = cluster.url(&name);
        Self { cluster, name, url, connections: TaskTracker::new() }
    }

    /// The address of the database, for any client and for worker processes.
    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    /// Puts a clock that tests can set before the server's own, for the sessions opened from now on:
    /// by `clock.set`, it stands or it is ahead.
    pub(crate) async fn replace_clock(&self) {
        let statements = format!(
            "CREATE SCHEMA clock;
             CREATE TABLE clock.set (stands_at timestamptz, ahead interval NOT NULL DEFAULT '0');
             INSERT INTO clock.set DEFAULT VALUES;
             CREATE FUNCTION clock.clock_timestamp() RETURNS timestamptz LANGUAGE sql VOLATILE
                 AS 'SELECT coalesce(stands_at, pg_catalog.clock_timestamp()) + ahead FROM clock.set';
             ALTER DATABASE {} SET search_path = clock, pg_catalog, public",
            self.name
        );
        self.client().await.batch_execute(&statements).await.unwrap();
    }

    /// A connection of its own. It ends when the client is dropped, and with the database.
    pub(crate) async fn client(&self) -> Client {
        connect(&self.url, &self.connections).await
    }
}

impl Drop for TestDb {
    fn drop(&mut self) {
        self.cluster.discard_database(std::mem::take(&mut self.name));
    }
}

async fn connect(url: &str, connections: &TaskTracker) -> Client {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await.unwrap();
    // Its error is the client's too, and every call reports it there.
    connections.spawn(async move { connection.await.ok() });
    client
}
