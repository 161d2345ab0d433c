//! The token epoch (F2), as an operator sees and raises it.

use std::time::Duration;

use time::OffsetDateTime;
use tokio_postgres::types::Type;

use super::connect::Database;
use super::error::StoreError;
use super::flight::FlightError;
use super::statements;
use crate::model::FencingToken;

/// What a raise of the epoch would find and do.
#[derive(Clone, Debug)]
pub struct RecoveryPlan {
    /// The epoch now.
    pub epoch: i64,
    /// What a raise now would make of it, at least.
    pub next_epoch: i64,
    /// The token of the last claim, by the epoch and the sequence.
    pub last_token: FencingToken,
    /// The highest token of a lease that is there; none without leases.
    pub highest_held: Option<FencingToken>,
    /// Whether claims are granted at all.
    pub claims_enabled: bool,
    /// For how long claims wait yet after a raise (F7); zero when they do not.
    pub settles_in: Duration,
    /// When the epoch or the switch last changed.
    pub changed_at: OffsetDateTime,
    /// Whether system identifier or timeline are others than at the last raise: the next claim then
    /// raises the epoch by itself.
    pub moved: bool,
    /// When the server started.
    pub server_started: OffsetDateTime,
    /// Leases.
    pub leases: i64,
    /// Items in them.
    pub items_held: i64,
    /// Leases past their expiry.
    pub leases_expired: i64,
    /// Workers whose heartbeat is younger than their lease.
    pub live_workers: i64,
    /// Batches that have not ended.
    pub unfinished_batches: i64,
}

/// A raised epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Raised {
    /// The epoch now.
    pub epoch: i64,
    /// For how long claims wait from now (F7).
    pub settles_in: Duration,
}

impl Database {
    /// What a raise of the epoch would find and do; changes nothing.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn recovery_plan(&self) -> Result<RecoveryPlan, StoreError> {
        let rows = self.query(statements::RECOVERY_PLAN, &[]).await?;
        let row = rows
            .first()
            .ok_or_else(|| StoreError::Schema("the row of holdfast.control is missing".into()))?;
        Ok(RecoveryPlan {
            epoch: row.get("epoch"),
            next_epoch: row.get("next_epoch"),
            last_token: FencingToken::new(row.get("last_token")),
            highest_held: row.get::<_, Option<i64>>("highest_held").map(FencingToken::new),
            claims_enabled: row.get("claims_enabled"),
            settles_in: seconds(row.get("settles_in_s")),
            changed_at: row.get("changed_at"),
            moved: row.get("moved"),
            server_started: row.get("server_started"),
            leases: row.get("leases"),
            items_held: row.get("items_held"),
            leases_expired: row.get("leases_expired"),
            live_workers: row.get("live_workers"),
            unfinished_batches: row.get("unfinished_batches"),
        })
    }

    /// Raises the epoch from `seen`, above all tokens before and above `above`; none when it is not
    /// `seen` any more.
    ///
    /// # Errors
    /// Repeating it is safe: what was raised already is not raised again.
    pub async fn raise_epoch(
        &self,
        seen: i64,
        above: Option<FencingToken>,
        actor: &str,
    ) -> Result<Option<Raised>, FlightError> {
        let params: [(&(dyn tokio_postgres::types::ToSql + Sync), Type); 3] = [
            (&seen, Type::INT8),
            (&above.map(FencingToken::get), Type::INT8),
            (&actor, Type::TEXT),
        ];
        let rows = self.flight(statements::RAISE_EPOCH, &params).await?;
        Ok(rows.first().map(|row| Raised {
            epoch: row.get("epoch"),
            settles_in: seconds(row.get("settles_in_s")),
        }))
    }
}

fn seconds(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).unwrap_or_default()
}
