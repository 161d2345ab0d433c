//! What `holdfast doctor` looks at: read-only, each look in a transaction and under a timeout of its
//! own. What it means is judged elsewhere.

use std::time::Duration;

use time::OffsetDateTime;
use tokio::time::Instant;
use tokio_postgres::Row;
use tokio_postgres::types::{ToSql, Type};
use uuid::Uuid;

use super::connect::Database;
use super::error::StoreError;
use super::flight::{FlightError, FlightLimits, flight};
use super::statements;
use crate::model::BatchId;

/// One thing that a look found.
#[derive(Clone, Debug, PartialEq)]
pub struct Fact {
    /// What kind of thing.
    pub kind: String,
    /// What it is about; may be empty.
    pub subject: String,
    /// A number that belongs to it, by its kind: seconds, rows, transactions, a ratio.
    pub amount: f64,
    /// What to compare it with, by its kind.
    pub beside: f64,
}

/// Where to look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Look {
    /// The server, apart from the schema.
    Server,
    /// What holds vacuum back.
    Holders,
    /// Dead rows, and how tables are vacuumed.
    Tables,
    /// Leases.
    Leases,
    /// Switches, sequences, sweeps, workers.
    State,
}

impl Look {
    const fn statement(self) -> &'static str {
        match self {
            Self::Server => statements::DOCTOR_SERVER,
            Self::Holders => statements::DOCTOR_HOLDERS,
            Self::Tables => statements::DOCTOR_TABLES,
            Self::Leases => statements::DOCTOR_LEASES,
            Self::State => statements::DOCTOR_STATE,
        }
    }
}

/// A batch to be verified.
#[derive(Clone, Copy, Debug)]
pub struct ToVerify {
    /// Its id.
    pub id: BatchId,
    /// How many items it has.
    pub items: i32,
}

impl Database {
    /// Looks at one thing, for at most `limit`.
    ///
    /// # Errors
    /// See [`FlightError`].
    pub async fn look(&self, at: Look, limit: Duration) -> Result<Vec<Fact>, FlightError> {
        let rows = self.read_only(at.statement(), &[], limit).await?;
        Ok(rows
            .iter()
            .map(|row| Fact {
                kind: row.get("kind"),
                subject: row.get::<_, Option<String>>("subject").unwrap_or_default(),
                amount: row.get::<_, Option<f64>>("amount").unwrap_or_default(),
                beside: row.get::<_, Option<f64>>("beside").unwrap_or_default(),
            })
            .collect())
    }

    /// The database's clock.
    ///
    /// # Errors
    /// See [`FlightError`].
    pub async fn clock(&self, limit: Duration) -> Result<OffsetDateTime, FlightError> {
        let rows = self.read_only("SELECT clock_timestamp()", &[], limit).await?;
        Ok(rows[0].get(0))
    }

    /// Whether two transactions of one connection may run on two sessions of the server, as behind a
    /// pooler of transactions.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn pools_transactions(&self, limit: Duration) -> Result<bool, StoreError> {
        let (one, other) = (self.connection().await?, self.connection().await?);
        let looked = async {
            let session = "SELECT pg_backend_pid()";
            let first: i32 = one.query_typed(session, &[]).await?[0].get(0);
            // As long as this transaction keeps the session that the pooler gave out last, the
            // other connection is given another one.
            other.batch_execute("BEGIN").await?;
            let kept: i32 = other.query_typed(session, &[]).await?[0].get(0);
            let second: i32 = one.query_typed(session, &[]).await?[0].get(0);
            other.batch_execute("ROLLBACK").await?;
            Ok(first != second || kept == first)
        };
        match tokio::time::timeout(limit, looked).await {
            Ok(Ok(pooled)) => Ok(pooled),
            Ok(Err(error)) => Err(StoreError::from_driver(error)),
            Err(_) => {
                // In the middle of a transaction, perhaps: not for the pool again.
                drop(deadpool_postgres::Object::take(other));
                Err(StoreError::TimedOut)
            }
        }
    }

    /// Batches after one, by id.
    ///
    /// # Errors
    /// See [`FlightError`].
    pub async fn batches_to_verify(
        &self,
        after: Option<BatchId>,
        most: i64,
        limit: Duration,
    ) -> Result<Vec<ToVerify>, FlightError> {
        let after = after.map_or(Uuid::nil(), BatchId::uuid);
        let params: [(&(dyn ToSql + Sync), Type); 2] = [(&after, Type::UUID), (&most, Type::INT8)];
        let rows = self.read_only(statements::VERIFY_BATCHES, &params, limit).await?;
        let batch = |row: &Row| ToVerify { id: BatchId::from_uuid(row.get(0)), items: row.get(1) };
        Ok(rows.iter().map(batch).collect())
    }

    /// What is wrong with the counts of a batch.
    ///
    /// # Errors
    /// See [`FlightError`].
    pub async fn verify_counts(
        &self,
        batch: BatchId,
        limit: Duration,
    ) -> Result<Vec<String>, FlightError> {
        let params: [(&(dyn ToSql + Sync), Type); 1] = [(&batch.uuid(), Type::UUID)];
        let rows = self.read_only(statements::VERIFY_COUNTS, &params, limit).await?;
        Ok(rows.iter().map(|row| row.get(0)).collect())
    }

    /// What is wrong with the places of the items at `from..to` of a batch (I1), the first few.
    ///
    /// # Errors
    /// See [`FlightError`].
    pub async fn verify_places(
        &self,
        batch: BatchId,
        from: i32,
        to: i32,
        limit: Duration,
    ) -> Result<Vec<String>, FlightError> {
        let params: [(&(dyn ToSql + Sync), Type); 3] =
            [(&batch.uuid(), Type::UUID), (&from, Type::INT4), (&to, Type::INT4)];
        let rows = self.read_only(statements::VERIFY_PLACES, &params, limit).await?;
        Ok(rows.iter().map(|row| row.get(0)).collect())
    }

    pub(super) async fn read_only(
        &self,
        sql: &str,
        params: &[(&(dyn ToSql + Sync), Type)],
        limit: Duration,
    ) -> Result<Vec<Row>, FlightError> {
        let limits = FlightLimits::read_only(limit);
        let client = self.connection().await.map_err(FlightError::NotSent)?;
        flight(client, &limits, Instant::now() + limits.answer, sql, params).await
    }
}
