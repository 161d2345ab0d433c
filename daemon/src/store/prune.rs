//! Removal of what is old: ended batches with everything of them, evidence, workers, audit entries.
//! All of it in chunks, and none of it in the way of a claim.

use std::time::Duration;

use time::OffsetDateTime;
use tokio_postgres::types::{ToSql, Type};
use uuid::Uuid;

use super::{Database, FlightError, StoreError, statements};
use crate::model::BatchId;

/// Which batches are old.
#[derive(Clone, Debug)]
pub struct Prunable {
    /// Ended at least this long ago.
    pub age: Duration,
    /// Of this owner only.
    pub owner: Option<String>,
    /// Of this queue only.
    pub queue: Option<String>,
    /// With these ends only: `finished`, `cancelled`.
    pub states: Vec<String>,
}

/// What a prune would remove.
#[derive(Clone, Debug)]
pub struct PrunePlan {
    /// Batches.
    pub batches: i64,
    /// Their items.
    pub items: i64,
    /// When the first of them ended.
    pub oldest: Option<OffsetDateTime>,
    /// Rows of workers that ended and hold nothing.
    pub workers: i64,
    /// Entries of the audit log.
    pub audit: i64,
    /// Removed batches of which rows are left.
    pub left_over: i64,
}

/// A batch, and how many of its positions are to be cleared away.
#[derive(Clone, Copy, Debug)]
pub struct Old {
    /// The batch.
    pub batch: BatchId,
    /// Positions.
    pub items: i32,
}

/// What one chunk of clearing away came to.
#[derive(Clone, Copy, Debug)]
pub struct Cleared {
    /// Rows removed.
    pub rows: i64,
    /// Positions whose rows went.
    pub positions: u64,
    /// Whether nothing of the batch is left.
    pub done: bool,
}

impl Database {
    /// What a prune would remove now.
    ///
    /// # Errors
    /// See [`StoreError`].
    ///
    /// # Panics
    /// Never: aggregates answer one row.
    pub async fn prune_plan(&self, what: &Prunable) -> Result<PrunePlan, StoreError> {
        let age = what.age.as_secs_f64();
        let parameters: [(&(dyn ToSql + Sync), Type); 4] = [
            (&age, Type::FLOAT8),
            (&what.owner, Type::TEXT),
            (&what.queue, Type::TEXT),
            (&what.states, Type::TEXT_ARRAY),
        ];
        let rows = self.query(statements::PRUNE_PLAN, &parameters).await?;
        let row = rows.first().expect("aggregates answer one row");
        Ok(PrunePlan {
            batches: row.get("batches"),
            items: row.get("items"),
            oldest: row.get("oldest"),
            workers: row.get("workers"),
            audit: row.get("audit"),
            left_over: row.get("left_over"),
        })
    }

    /// Batches to be removed, by id after `after`, at most `limit`.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn prunable_batches(
        &self,
        what: &Prunable,
        after: Option<BatchId>,
        limit: i64,
    ) -> Result<Vec<Old>, StoreError> {
        let (age, after) = (what.age.as_secs_f64(), after.map(BatchId::uuid));
        let parameters: [(&(dyn ToSql + Sync), Type); 6] = [
            (&age, Type::FLOAT8),
            (&what.owner, Type::TEXT),
            (&what.queue, Type::TEXT),
            (&what.states, Type::TEXT_ARRAY),
            (&after, Type::UUID),
            (&limit, Type::INT8),
        ];
        let rows = self.query(statements::PRUNABLE_BATCHES, &parameters).await?;
        Ok(rows.iter().map(|row| old(row.get(0), row.get(1))).collect())
    }

    /// Makes a batch unknown to everybody that ended at least `age` ago; whether it is now. What is
    /// left of it is cleared away by [`Database::clear_removed`].
    ///
    /// # Errors
    /// Repeating it is safe.
    pub async fn remove_batch(
        &self,
        batch: BatchId,
        age: Duration,
        actor: &str,
    ) -> Result<bool, FlightError> {
        let rows = self
            .flight(
                statements::REMOVE_BATCH,
                &[
                    (&batch.uuid(), Type::UUID),
                    (&age.as_secs_f64(), Type::FLOAT8),
                    (&actor, Type::TEXT),
                ],
            )
            .await?;
        Ok(rows.first().is_some_and(|row| row.get("removed")))
    }

    /// Removed batches of which rows are left, oldest first.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn removed_batches(&self) -> Result<Vec<Old>, StoreError> {
        let rows = self.query(statements::REMOVED_BATCHES, &[]).await?;
        Ok(rows.iter().map(|row| old(row.get(0), row.get(1))).collect())
    }

    /// Clears away what a removed batch has at its next `limit` positions, or as many rows of its
    /// history. Holds no lock that anybody waits for.
    ///
    /// # Errors
    /// Repeating it is safe.
    ///
    /// # Panics
    /// Never: the function always answers a row.
    pub async fn clear_removed(&self, batch: BatchId, limit: i32) -> Result<Cleared, FlightError> {
        let rows = self
            .flight(statements::CLEAR_REMOVED, &[(&batch.uuid(), Type::UUID), (&limit, Type::INT4)])
            .await?;
        let row = rows.first().expect("a protocol function always answers a row");
        let positions: i32 = row.get("positions");
        Ok(Cleared {
            rows: row.get("removed"),
            positions: u64::from(positions.unsigned_abs()),
            done: row.get("done"),
        })
    }

    /// Removes a chunk of the evidence of a batch that ended at least `age` ago; how many rows.
    ///
    /// # Errors
    /// Repeating it is safe.
    pub async fn prune_evidence(
        &self,
        batch: BatchId,
        age: Duration,
        limit: i64,
    ) -> Result<i64, FlightError> {
        let parameters: [(&(dyn ToSql + Sync), Type); 3] =
            [(&batch.uuid(), Type::UUID), (&age.as_secs_f64(), Type::FLOAT8), (&limit, Type::INT8)];
        self.removed_by(statements::PRUNE_EVIDENCE, &parameters).await
    }

    /// Removes a chunk of the workers that ended at least `age` ago and hold nothing; how many rows.
    ///
    /// # Errors
    /// Repeating it is safe.
    pub async fn prune_workers(&self, age: Duration, limit: i64) -> Result<i64, FlightError> {
        let parameters: [(&(dyn ToSql + Sync), Type); 2] =
            [(&age.as_secs_f64(), Type::FLOAT8), (&limit, Type::INT8)];
        self.removed_by(statements::PRUNE_WORKERS, &parameters).await
    }

    /// Removes a chunk of the audit log's entries at least `age` old; how many rows.
    ///
    /// # Errors
    /// Repeating it is safe.
    pub async fn prune_audit(&self, age: Duration, limit: i64) -> Result<i64, FlightError> {
        let parameters: [(&(dyn ToSql + Sync), Type); 2] =
            [(&age.as_secs_f64(), Type::FLOAT8), (&limit, Type::INT8)];
        self.removed_by(statements::PRUNE_AUDIT, &parameters).await
    }

    async fn removed_by(
        &self,
        sql: &str,
        parameters: &[(&(dyn ToSql + Sync), Type)],
    ) -> Result<i64, FlightError> {
        let rows = self.flight(sql, parameters).await?;
        Ok(rows.first().map_or(0, |row| row.get("removed")))
    }
}

fn old(batch: Uuid, items: i32) -> Old {
    Old { batch: BatchId::from_uuid(batch), items }
}
