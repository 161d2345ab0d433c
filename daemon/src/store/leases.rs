//! Lease rows, to be looked at.

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
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it so")]
fn as_text<S: serde::Serializer>(token: &FencingToken, to: S) -> Result<S::Ok, S::Error> {
    to.collect_str(token)
}

impl Database {
    /// Leases of an owner, a queue or of all, the first to expire first, at most `limit`.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn leases(
        &self,
        owner: Option<&str>,
        queue: Option<&str>,
        limit: i64,
    ) -> Result<Vec<LeaseRow>, StoreError> {
        let rows = self
            .query(
                statements::LEASES_PAGE,
                &[(&owner, Type::TEXT), (&queue, Type::TEXT), (&limit, Type::INT8)],
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
            })
            .collect())
    }
}
