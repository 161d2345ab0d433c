//! The database as the executors of upstreams use it: the fleet's limits, and what they note.

use std::time::Duration;

use async_trait::async_trait;
use tracing::debug;

use crate::execute::upstream::{Grant, GrantRequest, SharedLimits, SharedLimitsError, UpstreamKey};
use crate::execute::{Job, Ledger, Noted, Spent};
use crate::model::WorkerId;
use crate::store::{Database, RequestsWanted, SpentRow};

/// How often a note is tried while the database does not answer.
const TRIES: u32 = 3;
/// The pause between two tries.
const BETWEEN_TRIES: Duration = Duration::from_millis(250);

/// The limits of upstreams in the database.
pub struct FleetLimits {
    database: Database,
    worker: WorkerId,
}

impl FleetLimits {
    /// The limits as this worker takes part in them.
    #[must_use]
    pub const fn new(database: Database, worker: WorkerId) -> Self {
        Self { database, worker }
    }
}

fn failed(error: impl std::error::Error + Send + Sync + 'static) -> SharedLimitsError {
    SharedLimitsError(Box::new(error))
}

#[async_trait]
impl SharedLimits for FleetLimits {
    async fn grant(&self, request: &GrantRequest<'_>) -> Result<Grant, SharedLimitsError> {
        let wanted = RequestsWanted {
            upstream: &request.key.upstream,
            model: &request.key.model,
            worker: self.worker,
            using: request.using,
            want: request.want,
            spacing: request.spacing,
            horizon: request.horizon,
            cap: request.max_in_flight,
            valid: request.valid,
        };
        let granted = self.database.grant_requests(&wanted).await.map_err(failed)?;
        Ok(Grant {
            granted: granted.granted,
            first_in: granted.first_in,
            blocked_for: granted.blocked_for,
            pauses: granted.pauses,
            retry_in: granted.retry_in,
        })
    }

    async fn block(&self, key: &UpstreamKey, wait: Duration) -> Result<(), SharedLimitsError> {
        self.database.block_upstream(&key.upstream, &key.model, wait).await.map_err(failed)
    }

    async fn pause(
        &self,
        key: &UpstreamKey,
        first: Duration,
        longest: Duration,
    ) -> Result<(u32, Duration), SharedLimitsError> {
        let (upstream, model) = (&key.upstream, &key.model);
        self.database.pause_upstream(upstream, model, first, longest).await.map_err(failed)
    }

    async fn resume(&self, key: &UpstreamKey) -> Result<(), SharedLimitsError> {
        self.database.resume_upstream(&key.upstream, &key.model).await.map_err(failed)
    }
}

/// The ledgers of executors in the database.
pub struct FleetLedger(Database);

impl FleetLedger {
    /// Ledgers in this database.
    #[must_use]
    pub const fn new(database: Database) -> Self {
        Self(database)
    }
}

#[async_trait]
impl Ledger for FleetLedger {
    async fn spend(&self, job: &Job, spent: &Spent) {
        let usage = spent.usage.unwrap_or_default();
        let tokens = [
            usage.input_tokens,
            usage.output_tokens,
            usage.total_tokens,
            usage.cached_tokens,
            usage.reasoning_tokens,
        ];
        let row = SpentRow {
            model: spent.model.replace('\0', "\u{fffd}"),
            calls: i32::try_from(spent.calls).unwrap_or(i32::MAX),
            tokens: tokens.map(|count| count.map(|count| i64::try_from(count).unwrap_or(i64::MAX))),
        };
        if let Err(error) = self.0.note_spent(job.item, job.lease, job.token, &row).await {
            debug!(item = %job.item, %error, "what an attempt used is not noted");
        }
    }

    async fn note(&self, job: &Job, seq: u32, entry: &serde_json::Value) -> Noted {
        let text = entry.to_string();
        for attempt in 1..=TRIES {
            match self.0.note_turn(job.item, job.lease, job.token, seq, &text).await {
                Ok(true) => return Noted::Stored,
                Ok(false) => return Noted::Lost,
                Err(error) => {
                    debug!(item = %job.item, seq, %error, "a turn is not noted");
                    if attempt < TRIES {
                        tokio::time::sleep(BETWEEN_TRIES).await;
                    }
                }
            }
        }
        Noted::Unknown
    }
}
