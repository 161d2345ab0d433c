//! Where the sweeps look. What they find is only a hint: the protocol's functions re-check it.

use std::time::Duration;

use time::OffsetDateTime;
use tokio_postgres::types::{ToSql, Type};
use uuid::Uuid;

use super::{Database, StoreError, statements};
use crate::clock::{BootInstant, Clock};
use crate::model::BatchId;

/// What the server said of its clock and of itself at one moment between a question and its answer
/// (F4).
#[derive(Clone, Copy, Debug)]
pub struct ServerReading {
    /// When it was asked, by the boot-time clock of this process.
    pub asked_at: BootInstant,
    /// When its answer was there.
    pub answered_at: BootInstant,
    /// Its clock.
    pub now: OffsetDateTime,
    /// When it started.
    pub started: OffsetDateTime,
    /// Its timeline.
    pub timeline: i32,
}

/// What is looked at before the expired leases of a batch are taken back.
#[derive(Clone, Copy, Debug)]
pub struct BeforeReap {
    /// Whether they speak of a database that was away, so that nobody is charged for them.
    pub was_away: bool,
    /// The server's clock at this moment.
    pub server: ServerReading,
}

impl Database {
    /// Batches with expired leases of workers that fell silent: the fast sweep.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn batches_of_silent_workers(&self) -> Result<Vec<BatchId>, StoreError> {
        self.batch_ids(statements::SILENT_WORKERS_BATCHES).await
    }

    /// Whether it is this worker's turn to do the full sweep, `every` so often in the whole fleet.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn take_sweep(&self, every: Duration) -> Result<bool, StoreError> {
        let rows =
            self.query(statements::TAKE_SWEEP, &[(&every.as_secs_f64(), Type::FLOAT8)]).await?;
        Ok(!rows.is_empty())
    }

    /// Batches with a lease past its expiry, whatever its worker does.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn batches_with_expired_leases(&self) -> Result<Vec<BatchId>, StoreError> {
        self.batch_ids(statements::EXPIRED_BATCHES).await
    }

    /// What to know before the expired leases of a batch are taken back; `disturbed_at` is when this
    /// process last saw the database change.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn before_reap(
        &self,
        batch: BatchId,
        disturbed_at: Option<OffsetDateTime>,
        clock: &dyn Clock,
    ) -> Result<BeforeReap, StoreError> {
        let params: [(&(dyn ToSql + Sync), Type); 2] =
            [(&batch.uuid(), Type::UUID), (&disturbed_at, Type::TIMESTAMPTZ)];
        // With the connection at hand: waiting for one would blur when it was asked.
        let client = self.connection().await?;
        let asked_at = clock.now();
        let rows = self.query_on(client, statements::DATABASE_WAS_AWAY, &params).await?;
        let answered_at = clock.now();
        let row = rows
            .first()
            .ok_or_else(|| StoreError::Schema("the row of holdfast.control is missing".into()))?;
        Ok(BeforeReap {
            was_away: row.get(0),
            server: ServerReading {
                asked_at,
                answered_at,
                now: row.get(1),
                started: row.get(2),
                timeline: row.get(3),
            },
        })
    }

    /// Unfinished batches with nothing left.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn exhausted_batches(&self) -> Result<Vec<BatchId>, StoreError> {
        self.batch_ids(statements::EXHAUSTED_BATCHES).await
    }

    /// Cancelled batches with rows to clear away.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn batches_with_leftovers(&self) -> Result<Vec<BatchId>, StoreError> {
        self.batch_ids(statements::LEFTOVER_BATCHES).await
    }

    /// The housekeeping of a full sweep: expiries too far ahead, workers long dead, folded deltas
    /// and old progress rows, at most `chunk` rows of each.
    ///
    /// # Errors
    /// See [`StoreError`]; repeating it is safe.
    pub async fn tidy(&self, chunk: i64) -> Result<(), StoreError> {
        self.query(statements::CUT_FAR_EXPIRIES, &[]).await?;
        self.query(statements::CLOSE_DEAD_WORKERS, &[]).await?;
        self.query(statements::PRUNE_DELTAS, &[(&chunk, Type::INT8)]).await?;
        self.query(statements::PRUNE_PROGRESS, &[(&chunk, Type::INT8)]).await?;
        Ok(())
    }

    /// Of these batches, those that have not ended or ended less than `within` ago.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn batches_in_use(
        &self,
        batches: &[BatchId],
        within: Duration,
    ) -> Result<Vec<BatchId>, StoreError> {
        let batches: Vec<Uuid> = batches.iter().map(|batch| batch.uuid()).collect();
        let parameters: [(&(dyn ToSql + Sync), Type); 2] =
            [(&batches, Type::UUID_ARRAY), (&within.as_secs_f64(), Type::FLOAT8)];
        let rows = self.query(statements::BATCHES_IN_USE, &parameters).await?;
        Ok(rows.iter().map(|row| BatchId::from_uuid(row.get::<_, Uuid>(0))).collect())
    }

    /// Of these threads, each with its owner, those that have such a batch.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn threads_in_use(
        &self,
        threads: &[(&str, &str)],
        within: Duration,
    ) -> Result<Vec<(String, String)>, StoreError> {
        let (owners, names): (Vec<&str>, Vec<&str>) = threads.iter().copied().unzip();
        let parameters: [(&(dyn ToSql + Sync), Type); 3] = [
            (&owners, Type::TEXT_ARRAY),
            (&names, Type::TEXT_ARRAY),
            (&within.as_secs_f64(), Type::FLOAT8),
        ];
        let rows = self.query(statements::THREADS_IN_USE, &parameters).await?;
        Ok(rows.iter().map(|row| (row.get(0), row.get(1))).collect())
    }

    async fn batch_ids(&self, sql: &str) -> Result<Vec<BatchId>, StoreError> {
        let rows = self.query(sql, &[]).await?;
        Ok(rows.iter().map(|row| BatchId::from_uuid(row.get::<_, Uuid>(0))).collect())
    }
}
