//! Worker rows.

use serde::Serialize;
use time::OffsetDateTime;
use tokio_postgres::types::Type;
use uuid::Uuid;

use super::{Database, StoreError, statements};
use crate::model::WorkerId;

/// One worker process, as its row says.
#[derive(Clone, Debug, Serialize)]
pub struct WorkerRow {
    /// New at every start.
    pub id: WorkerId,
    /// The name from its configuration.
    pub name: String,
    /// The machine.
    pub host: String,
    /// Its process id there.
    pub pid: i32,
    /// The program's version.
    pub version: String,
    /// The queues it serves.
    pub queues: Vec<String>,
    /// Execution slots.
    pub slots: i32,
    /// Its state at the last heartbeat.
    pub state: String,
    /// Executions at the last heartbeat.
    pub executing: i32,
    /// When it started, by the database clock.
    #[serde(with = "time::serde::rfc3339")]
    pub started_at: OffsetDateTime,
    /// Its last heartbeat, by the database clock.
    #[serde(with = "time::serde::rfc3339")]
    pub heartbeat_at: OffsetDateTime,
    /// Seconds since then.
    pub heartbeat_age_s: f64,
    /// Whether that is longer ago than its lease, and it has not ended.
    pub silent: bool,
    /// What an operator asks of it: `quiet` or `drain`.
    pub asked: Option<String>,
    /// When it ended, by the database clock.
    #[serde(with = "time::serde::rfc3339::option")]
    pub ended_at: Option<OffsetDateTime>,
    /// How: `drained`, `forced`, `crashed`, `panicked` or `silent`.
    pub exit_reason: Option<String>,
}

impl Database {
    /// Stores the row of a worker that has just started; its lease length is `lease_s` seconds.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn register_worker(
        &self,
        worker: &WorkerRow,
        lease_s: f64,
    ) -> Result<(), StoreError> {
        self.query(
            statements::REGISTER_WORKER,
            &[
                (&worker.id.uuid(), Type::UUID),
                (&worker.name, Type::TEXT),
                (&worker.host, Type::TEXT),
                (&worker.pid, Type::INT4),
                (&worker.version, Type::TEXT),
                (&worker.queues, Type::TEXT_ARRAY),
                (&worker.slots, Type::INT4),
                (&lease_s, Type::FLOAT8),
                (&worker.state, Type::TEXT),
            ],
        )
        .await?;
        Ok(())
    }

    /// Notes that a worker ends, and why.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn end_worker(&self, worker: WorkerId, reason: &str) -> Result<(), StoreError> {
        self.query(statements::END_WORKER, &[(&worker.uuid(), Type::UUID), (&reason, Type::TEXT)])
            .await?;
        Ok(())
    }

    /// Lists a worker again that was taken for dead.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn reopen_worker(&self, worker: WorkerId) -> Result<(), StoreError> {
        self.query(statements::REOPEN_WORKER, &[(&worker.uuid(), Type::UUID)]).await?;
        Ok(())
    }

    /// Workers that have not ended, oldest first.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn live_workers(&self) -> Result<Vec<WorkerRow>, StoreError> {
        self.workers(false).await
    }

    /// Workers, oldest first; those that have ended only with `ended`.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn workers(&self, ended: bool) -> Result<Vec<WorkerRow>, StoreError> {
        let rows = self.query(statements::LIVE_WORKERS, &[(&ended, Type::BOOL)]).await?;
        Ok(rows
            .iter()
            .map(|row| WorkerRow {
                id: WorkerId::from_uuid(row.get::<_, Uuid>("id")),
                name: row.get("name"),
                host: row.get("host"),
                pid: row.get("pid"),
                version: row.get("version"),
                queues: row.get("queues"),
                slots: row.get("slots"),
                state: row.get("state"),
                executing: row.get("executing"),
                started_at: row.get("started_at"),
                heartbeat_at: row.get("heartbeat_at"),
                heartbeat_age_s: row.get("heartbeat_age_s"),
                silent: row.get("silent"),
                asked: row.get("asked"),
                ended_at: row.get("ended_at"),
                exit_reason: row.get("exit_reason"),
            })
            .collect())
    }
}
