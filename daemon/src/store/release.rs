//! What a dead worker held, and its release by whoever has proved that nothing of it runs any more.

use tokio_postgres::Row;
use tokio_postgres::types::{ToSql, Type};
use uuid::Uuid;

use super::{Database, Event, FlightError, ReapDisposition, ReapPolicy, StoreError, statements};
use crate::model::{BatchId, FencingToken, LeaseId, Position, WorkerId};

/// A lease of a worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeadLease {
    /// Its batch.
    pub batch: BatchId,
    /// That batch's queue.
    pub queue: String,
    /// The lease.
    pub lease: LeaseId,
    /// Its token.
    pub token: FencingToken,
    /// The items it holds.
    pub positions: Vec<Position>,
}

/// An item that was taken back from a lease, and does not wait for its next attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TakenBack {
    /// Where it is in its batch.
    pub position: Position,
    /// What became of it.
    pub disposition: ReapDisposition,
    /// Whether it failed because its worker crashed too often with it.
    pub poison: bool,
}

impl Database {
    /// What a worker holds, leases of one batch after the other.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn leases_of_worker(&self, worker: WorkerId) -> Result<Vec<DeadLease>, StoreError> {
        let rows =
            self.query(statements::LEASES_OF_WORKER, &[(&worker.uuid(), Type::UUID)]).await?;
        Ok(rows
            .iter()
            .map(|row| DeadLease {
                batch: BatchId::from_uuid(row.get("batch_id")),
                queue: row.get("queue"),
                lease: LeaseId::from_uuid(row.get("lease_id")),
                token: FencingToken::new(row.get("token")),
                positions: positions_of(row),
            })
            .collect())
    }

    /// Of items that were taken back, those that ended with it or wait for another check; the others
    /// wait for their next attempt.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn taken_back(
        &self,
        batch: BatchId,
        positions: &[Position],
    ) -> Result<Vec<TakenBack>, StoreError> {
        let positions: Vec<i32> = positions.iter().map(|position| position.get()).collect();
        let params: [(&(dyn ToSql + Sync), Type); 2] =
            [(&batch.uuid(), Type::UUID), (&positions, Type::INT4_ARRAY)];
        let rows = self.query(statements::TAKEN_BACK, &params).await?;
        Ok(rows
            .iter()
            .map(|row| TakenBack {
                position: Position::new(row.get("position")),
                disposition: match row.get::<_, &str>("disposition") {
                    "failed" => ReapDisposition::Failed,
                    "published" => ReapDisposition::Published,
                    _ => ReapDisposition::Rechecked,
                },
                poison: row.get("poison"),
            })
            .collect())
    }

    /// Releases leases of one batch, and tells the workers. Only for leases of a worker of which
    /// nothing runs any more: their items may be claimed at once. With [`ReapPolicy::charge`] it counts
    /// as a crash of the worker. Answers how many items that were: none while somebody else has the
    /// batch's ticket (L4).
    ///
    /// # Errors
    /// Repeating it is safe.
    pub async fn release_dead(
        &self,
        worker: WorkerId,
        leases: &[DeadLease],
        policy: &ReapPolicy,
    ) -> Result<usize, FlightError> {
        let Some(DeadLease { batch, queue, .. }) = leases.first() else { return Ok(0) };
        let of_batch = || leases.iter().filter(|lease| lease.batch == *batch);
        let ids: Vec<Uuid> = of_batch().map(|lease| lease.lease.uuid()).collect();
        let tokens: Vec<i64> = of_batch().map(|lease| lease.token.get()).collect();
        let rows = self
            .flight(
                statements::RELEASE_DEAD,
                &[
                    (&batch.uuid(), Type::UUID),
                    (&worker.uuid(), Type::UUID),
                    (&ids, Type::UUID_ARRAY),
                    (&tokens, Type::INT8_ARRAY),
                    (&policy.charge, Type::BOOL),
                    (&i32::from(policy.max_crashes), Type::INT4),
                    (&i32::from(policy.max_interruptions), Type::INT4),
                    (&policy.backoff_base.as_secs_f64(), Type::FLOAT8),
                    (&policy.backoff_max.as_secs_f64(), Type::FLOAT8),
                ],
            )
            .await?;
        let items: i32 = rows.first().map_or(0, |row| row.get("items"));
        if items > 0 {
            // Only a hint: without it the other workers find out by polling.
            drop(self.notify(&Event::Work(queue.clone())).await);
        }
        Ok(usize::try_from(items).unwrap_or(0))
    }
}

fn positions_of(row: &Row) -> Vec<Position> {
    row.get::<_, Vec<i32>>("positions").into_iter().map(Position::new).collect()
}
