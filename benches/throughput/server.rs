//! The private server: a fresh database for every measurement, and what a measurement cost it.

use std::time::Duration;

use anyhow::{Context, Result};
use serde::Serialize;
use tokio::task::JoinSet;
use tokio_postgres::{AsyncMessage, Client, NoTls};

use holdfast::clock::{BootInstant, Clock, SystemClock};
use holdfast::embedded::EmbeddedPostgres;
use holdfast::store::migrate;

const TEMPLATE: &str = "migrated";

/// Settings beside the defaults, the same for both sides. Checkpoints come between measurements,
/// not within them; statements are counted.
pub(crate) fn settings() -> Vec<(String, String)> {
    [
        ("shared_buffers", "512MB"),
        ("max_wal_size", "8GB"),
        ("checkpoint_timeout", "1h"),
        ("shared_preload_libraries", "pg_stat_statements"),
        ("pg_stat_statements.max", "10000"),
    ]
    .map(|(name, value)| (name.to_owned(), value.to_owned()))
    .into()
}

/// Now, on the clock that Holdfast uses.
pub(crate) fn now() -> BootInstant {
    SystemClock.now()
}

/// A connection whose task ends with it.
pub(crate) struct Connection {
    pub(crate) client: Client,
    task: JoinSet<()>,
}

impl Connection {
    /// Connects; `told` gets the payloads of notifications.
    pub(crate) async fn open(url: &str, told: impl Fn(String) + Send + 'static) -> Result<Self> {
        let (client, mut connection) = tokio_postgres::connect(url, NoTls).await?;
        let mut task = JoinSet::new();
        task.spawn(async move {
            while let Some(Ok(message)) =
                std::future::poll_fn(|context| connection.poll_message(context)).await
            {
                if let AsyncMessage::Notification(notification) = message {
                    told(notification.payload().to_owned());
                }
            }
        });
        Ok(Self { client, task })
    }

    pub(crate) async fn close(self) {
        let Self { client, mut task } = self;
        drop(client);
        while task.join_next().await.is_some() {}
    }
}

/// The server, as the bench uses it.
pub(crate) struct Server<'a> {
    postgres: &'a EmbeddedPostgres,
    /// To another database than those that are measured.
    watch: Connection,
}

/// Counters of one database and of the server before a measurement.
pub(crate) struct Reading {
    database: String,
    transactions: i64,
    wal: i64,
}

/// What a measurement cost the server, for each item.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Costs {
    pub(crate) transactions: f64,
    pub(crate) statements: f64,
    pub(crate) wal_bytes: f64,
}

impl<'a> Server<'a> {
    /// Makes the migrated database that all others are copied from.
    pub(crate) async fn prepare(postgres: &'a EmbeddedPostgres) -> Result<Self> {
        let watch = Connection::open(&postgres.url("postgres"), |_| ()).await?;
        watch.client.batch_execute("CREATE EXTENSION pg_stat_statements").await?;
        watch.client.batch_execute(&format!("CREATE DATABASE {TEMPLATE}")).await?;
        migrate::up(&postgres.url(TEMPLATE), None).await?;
        Ok(Self { postgres, watch })
    }

    /// A fresh migrated database, from a checkpoint on.
    pub(crate) async fn fresh(&self, name: &str) -> Result<String> {
        let client = &self.watch.client;
        client.batch_execute(&format!("CREATE DATABASE {name} TEMPLATE {TEMPLATE}")).await?;
        client.batch_execute("CHECKPOINT").await?;
        Ok(self.postgres.url(name))
    }

    /// Drops a database that nobody uses any more.
    pub(crate) async fn discard(&self, name: &str) -> Result<()> {
        self.until_unused(name).await?;
        self.watch.client.batch_execute(&format!("DROP DATABASE {name}")).await?;
        Ok(())
    }

    /// Reads the counters before a measurement.
    pub(crate) async fn reading(&self, database: &str) -> Result<Reading> {
        self.watch.client.batch_execute("SELECT pg_stat_statements_reset()").await?;
        Ok(Reading {
            database: database.to_owned(),
            transactions: self.transactions(database).await?,
            wal: self.wal().await?,
        })
    }

    /// What happened since `before`, for each of `items`. All connections of the measurement must be
    /// closed: the server counts a transaction only then for certain.
    pub(crate) async fn costs(&self, before: &Reading, wal: i64, items: u32) -> Result<Costs> {
        self.until_unused(&before.database).await?;
        let per_item = |count: i64| {
            #[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
            let count = count as f64;
            count / f64::from(items)
        };
        let statements: i64 = self
            .watch
            .client
            .query_one(
                "SELECT coalesce(sum(s.calls), 0)::bigint FROM pg_stat_statements s \
                   JOIN pg_database d ON d.oid = s.dbid WHERE d.datname = $1 AND s.toplevel",
                &[&before.database],
            )
            .await?
            .get(0);
        let transactions = self.transactions(&before.database).await?;
        Ok(Costs {
            transactions: per_item(transactions - before.transactions),
            statements: per_item(statements),
            wal_bytes: per_item(wal - before.wal),
        })
    }

    /// Bytes of WAL written so far.
    pub(crate) async fn wal(&self) -> Result<i64> {
        let sql = "SELECT (pg_current_wal_lsn() - '0/0'::pg_lsn)::bigint";
        Ok(self.watch.client.query_one(sql, &[]).await?.get(0))
    }

    async fn transactions(&self, database: &str) -> Result<i64> {
        let sql = "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = $1";
        Ok(self.watch.client.query_one(sql, &[&database]).await?.get(0))
    }

    async fn until_unused(&self, database: &str) -> Result<()> {
        let sql = "SELECT count(*) FROM pg_stat_activity \
                    WHERE datname = $1 AND backend_type = 'client backend'";
        let give_up = now() + Duration::from_secs(30);
        while self.watch.client.query_one(sql, &[&database]).await?.get::<_, i64>(0) > 0 {
            anyhow::ensure!(now() < give_up, "somebody stays connected to {database}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        Ok(())
    }

    /// How long a commit of one row takes, in milliseconds: the pace of the disk in this moment.
    pub(crate) async fn flush_ms(&self) -> Result<f64> {
        let client = &self.watch.client;
        client.batch_execute("CREATE TABLE IF NOT EXISTS flushes (n integer)").await?;
        let insert = client.prepare("INSERT INTO flushes VALUES (1)").await?;
        let mut took = Vec::new();
        for _ in 0..50 {
            let begun = now();
            client.execute(&insert, &[]).await.context("commit a row")?;
            took.push(now().since(begun).as_secs_f64() * 1e3);
        }
        Ok(super::report::quantile(&mut took, 0.5))
    }
}
