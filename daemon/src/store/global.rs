//! What the exporter collects: read-only, each look in a transaction and under a timeout of its own.

use std::time::Duration;

use tokio_postgres::Row;
use tokio_postgres::types::{ToSql, Type};

use super::flight::FlightError;
use super::protocol::one;
use super::{Database, statements};
use crate::telemetry::labels::{Collector, Table};
use crate::telemetry::metrics::{
    Collected, ControlFacts, QueueLoad, ServerFacts, TableRows, WorkerCounts,
};

impl Database {
    /// Collects one part, for at most `limit`. What it costs goes with the batches that have not
    /// ended and with what workers hold, not with how many items there are.
    ///
    /// # Errors
    /// See [`FlightError`].
    pub async fn collect(
        &self,
        part: Collector,
        limit: Duration,
    ) -> Result<Collected, FlightError> {
        let rows = match part {
            Collector::Queues => self.read_only(statements::GLOBAL_QUEUES, &[], limit).await?,
            Collector::Workers => self.read_only(statements::GLOBAL_WORKERS, &[], limit).await?,
            Collector::Control => self.read_only(statements::GLOBAL_CONTROL, &[], limit).await?,
            Collector::Tables => {
                let tables: [(&(dyn ToSql + Sync), Type); 1] = [(&Table::VALUES, Type::TEXT_ARRAY)];
                self.read_only(statements::GLOBAL_TABLES, &tables, limit).await?
            }
            Collector::Server => self.read_only(statements::GLOBAL_SERVER, &[], limit).await?,
        };
        Ok(match part {
            Collector::Queues => {
                Collected::Queues(rows.iter().map(|row| (row.get("queue"), load(row))).collect())
            }
            Collector::Workers => {
                let row = one(&rows);
                Collected::Workers(WorkerCounts {
                    live: row.get("live"),
                    draining: row.get("draining"),
                    stale: row.get("stale"),
                })
            }
            Collector::Control => {
                let row = one(&rows);
                Collected::Control(ControlFacts {
                    claims_enabled: row.get("claims_enabled"),
                    epoch: row.get("epoch"),
                    schema_version: row.get("schema_version"),
                })
            }
            Collector::Tables => {
                let table = |row: &Row| TableRows {
                    table: row.get("table"),
                    live: row.get("live"),
                    dead: row.get("dead"),
                };
                Collected::Tables(rows.iter().map(table).collect())
            }
            Collector::Server => {
                let row = one(&rows);
                Collected::Server(ServerFacts {
                    timeline: row.get("timeline"),
                    oldest_transaction: row.get("oldest_transaction"),
                    notify_queue_usage: row.get("notify_queue_usage"),
                })
            }
        })
    }
}

fn load(row: &Row) -> QueueLoad {
    QueueLoad {
        pending: row.get("pending"),
        queued: row.get("queued"),
        executing: row.get("executing"),
        running: row.get("running"),
        checking: row.get("checking"),
        active: row.get("active"),
        overdue: row.get("overdue"),
        open: row.get("open"),
        paused: row.get("paused"),
        ready_since: row.get("ready_since"),
        checking_since: row.get("checking_since"),
    }
}
