//! Lease rows, to be looked at.

use std::time::Duration;

use serde::Serialize;
use time::OffsetDateTime;
use tokio_postgres::types::Type;
use uuid::Uuid;

use super::{Database, StoreError, statements};
use crate::model::{BatchId, FencingToken, LeaseId, WorkerId};

/// One lease, as its row says.
#[derive(Clone, Debug, Serialize)]
pub struct LeaseRow {
    /// Its batch.
    pub batch: BatchId,
    /// Who owns that.
    pub owner: String,
    /// The batch's queue.
    pub queue: String,
    /// The lease.
    pub lease: LeaseId,
    /// Its token; a string in JSON (F2).
    #[serde(serialize_with = "as_text")]
    pub token: FencingToken,
    /// The worker that holds it.
    pub worker: WorkerId,
    /// That worker's name; none when its row is gone.
    pub worker_name: Option<String>,
    /// Items in it.
    pub items: i32,
    /// Those whose execution has begun, by the last heartbeat.
    pub started: i32,
    /// When it was granted, by the database clock.
    #[serde(with = "time::serde::rfc3339")]
    pub granted_at: OffsetDateTime,
    /// When it expires unless it is renewed, by the database clock.
    #[serde(with = "time::serde::rfc3339")]
    pub expires_at: OffsetDateTime,
    /// Whether that has passed.
    pub expired: bool,
    /// Seconds until then; negative when it has passed.
    pub margin_s: f64,
    /// When an operator took it from its worker (F8).
    #[serde(with = "time::serde::rfc3339::option")]
    pub revoked_at: Option<OffsetDateTime>,
}

/// Which leases a list shows.
#[derive(Clone, Debug, Default)]
pub struct LeaseFilter {
    /// Of this owner's batches only.
    pub owner: Option<String>,
    /// Of batches in this queue only.
    pub queue: Option<String>,
    /// Held by these workers only.
    pub workers: Option<Vec<WorkerId>>,
    /// Expired for longer than this only.
    pub overdue: Option<Duration>,
    /// These only.
    pub leases: Option<Vec<LeaseId>>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it so")]
fn as_text<S: serde::Serializer>(token: &FencingToken, to: S) -> Result<S::Ok, S::Error> {
    to.collect_str(token)
}

impl Database {
    /// Leases, the first to expire first, at most `limit`.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn leases(
        &self,
        filter: &LeaseFilter,
        limit: i64,
    ) -> Result<Vec<LeaseRow>, StoreError> {
        let workers = filter.workers.as_ref();
        let workers: Option<Vec<Uuid>> =
            workers.map(|ids| ids.iter().map(|id| id.uuid()).collect());
        let leases = filter.leases.as_ref();
        let leases: Option<Vec<Uuid>> = leases.map(|ids| ids.iter().map(|id| id.uuid()).collect());
        let overdue_s = filter.overdue.map(|overdue| overdue.as_secs_f64());
        let rows = self
            .query(
                statements::LEASES_PAGE,
                &[
                    (&filter.owner, Type::TEXT),
                    (&filter.queue, Type::TEXT),
                    (&limit, Type::INT8),
                    (&workers, Type::UUID_ARRAY),
                    (&overdue_s, Type::FLOAT8),
                    (&leases, Type::UUID_ARRAY),
                ],
            )
            .await?;
        Ok(rows
            .iter()
            .map(|row| LeaseRow {
                batch: BatchId::from_uuid(row.get("batch_id")),
                owner: row.get("owner"),
                queue: row.get("queue"),
                lease: LeaseId::from_uuid(row.get::<_, Uuid>("lease_id")),
                token: FencingToken::new(row.get("token")),
                worker: WorkerId::from_uuid(row.get::<_, Uuid>("worker_id")),
                worker_name: row.get("worker"),
                items: row.get("items"),
                started: row.get("started"),
                granted_at: row.get("granted_at"),
                expires_at: row.get("expires_at"),
                expired: row.get("expired"),
                margin_s: row.get("margin_s"),
                revoked_at: row.get("revoked_at"),
            })
            .collect())
    }
}
