//! Recovers what expired: in every worker, no leader. A fast sweep looks at workers that fell
//! silent, a full sweep, by one worker of the fleet at a time, at everything.

use std::sync::Arc;
use std::time::Duration;

use rand::Rng;
use time::OffsetDateTime;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use crate::clock::Clock;
use crate::model::{BatchId, Position, QueueName};
use crate::store::{
    Database, Event, FlightError, ReapDisposition, ReapPolicy, Reaped, ServerReading, StoreError,
};
use crate::telemetry::Metrics;
use crate::telemetry::labels::{DbErrorClass, ReaperOutcome, RecoveryDisposition, RetryReason};
use crate::telemetry::trace::{self, TraceContext};

/// Rows of each kind that one step of clearing away or pruning touches.
const CHUNK: i32 = 5_000;

/// How often the sweeps run.
#[derive(Clone, Copy, Debug)]
pub struct SweepPolicy {
    /// Between fast sweeps.
    pub fast: Duration,
    /// Between full sweeps of the whole fleet.
    pub full: Duration,
    /// How what is taken back is judged.
    pub reap: ReapPolicy,
}

/// Who says how this process stands to expiries (F4).
pub trait Judge: Sync {
    /// Whether they may be judged at the moment.
    fn may_reap(&self) -> bool;
    /// Whether they may be judged by this reading of the server's clock, taken just before.
    fn may_reap_by(&self, server: &ServerReading) -> bool;
    /// When, by its own clock, the database last changed under this process.
    fn disturbed_at(&self) -> Option<OffsetDateTime>;
}

/// Why a sweep stopped early; the next one goes on.
#[derive(Debug, thiserror::Error)]
enum SweepError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Flight(#[from] FlightError),
}

impl SweepError {
    fn class(&self) -> DbErrorClass {
        match self {
            Self::Store(error) => error.class(),
            Self::Flight(error) => error.class(),
        }
    }
}

/// The reaper of one worker.
pub struct Reaper {
    database: Database,
    clock: Arc<dyn Clock>,
    metrics: Arc<Metrics>,
    policy: SweepPolicy,
}

impl Reaper {
    /// A reaper that has not swept yet.
    #[must_use]
    pub fn new(
        database: Database,
        clock: Arc<dyn Clock>,
        metrics: Arc<Metrics>,
        policy: SweepPolicy,
    ) -> Self {
        Self { database, clock, metrics, policy }
    }

    /// Sweeps until `stop`, as `judge` allows; `recovered` is called when something became
    /// claimable.
    pub async fn run(&self, stop: &CancellationToken, judge: &impl Judge, recovered: impl Fn()) {
        loop {
            let pause = self.policy.fast.mul_f64(rand::rng().random_range(0.9..1.1));
            let swept = async {
                tokio::time::sleep(pause).await;
                let may_reap = judge.may_reap();
                self.sweep(judge, &recovered).await.map(|()| may_reap)
            };
            // Each step is whole, whoever waits for its answer: the end need not wait.
            let swept = tokio::select! {
                () = stop.cancelled() => return,
                swept = swept => swept,
            };
            let outcome = match swept {
                Ok(true) => ReaperOutcome::Ok,
                Ok(false) => ReaperOutcome::Skipped,
                Err(failed) => {
                    self.metrics.db_error(failed.class());
                    debug!(error = %failed, "a sweep stopped early");
                    ReaperOutcome::Error
                }
            };
            self.metrics.reaper_run(outcome, self.clock.wall());
        }
    }

    async fn sweep(&self, judge: &impl Judge, recovered: &impl Fn()) -> Result<(), SweepError> {
        if judge.may_reap() {
            for batch in self.database.batches_of_silent_workers().await? {
                self.skip_refused(batch, self.reap(batch, judge, recovered).await)?;
            }
        }
        if self.database.take_sweep(self.policy.full).await? {
            self.full_sweep(judge, recovered).await?;
        }
        Ok(())
    }

    async fn full_sweep(
        &self,
        judge: &impl Judge,
        recovered: &impl Fn(),
    ) -> Result<(), SweepError> {
        if judge.may_reap() {
            for batch in self.database.batches_with_expired_leases().await? {
                self.skip_refused(batch, self.reap(batch, judge, recovered).await)?;
            }
        }
        for batch in self.database.exhausted_batches().await? {
            let ended = self.database.end_batch(batch).await.map_err(SweepError::from);
            if self.skip_refused(batch, ended)? == Some(true) {
                info!(%batch, "ended a batch with nothing left");
            }
        }
        for batch in self.database.batches_with_leftovers().await? {
            while self.database.clear_cancelled(batch, CHUNK).await? {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
        self.database.tidy(i64::from(CHUNK)).await?;
        Ok(())
    }

    /// A batch that the server refuses to touch now must not keep the others from their recovery.
    fn skip_refused<T>(
        &self,
        batch: BatchId,
        swept: Result<T, SweepError>,
    ) -> Result<Option<T>, SweepError> {
        match swept {
            Err(SweepError::Flight(refused @ FlightError::RolledBack(_))) => {
                self.metrics.db_error(refused.class());
                warn!(%batch, error = %refused, "a sweep left a batch out");
                Ok(None)
            }
            swept => swept.map(Some),
        }
    }

    async fn reap(
        &self,
        batch: BatchId,
        judge: &impl Judge,
        recovered: &impl Fn(),
    ) -> Result<(), SweepError> {
        let before = self.database.before_reap(batch, judge.disturbed_at(), &*self.clock).await?;
        // A clock that was set forward since the last heartbeat makes every lease look expired.
        if !judge.may_reap_by(&before.server) {
            debug!(%batch, "the database's clock cannot be judged by: its leases are left alone");
            return Ok(());
        }
        // It decides who is charged and nothing else.
        let was_away = before.was_away;
        let charge = self.policy.reap.charge && !was_away;
        let taken = self.database.reap(batch, &ReapPolicy { charge, ..self.policy.reap }).await?;
        if taken.is_empty() {
            return Ok(());
        }
        if was_away {
            info!(%batch, items = taken.len(), "the database was away: their expiry is not charged");
        }
        let work = self.database.batch_work(batch).await?;
        let queue = work.and_then(|work| work.queue.parse::<QueueName>().ok());
        if let Some(queue) = queue {
            let ended: Vec<_> = taken.iter().map(|reaped| (reaped.item, reaped.token)).collect();
            let span = trace::recover_span(&queue, &ended);
            let poison = self.poisoned(batch, &taken).await;
            span.in_scope(|| self.note(&queue, &taken, &poison));
            // Only a hint: without it the other workers find out by polling.
            drop(self.database.notify(&Event::Work(queue.to_string())).await);
        }
        recovered();
        Ok(())
    }

    /// Of items that failed now, those whose worker crashed too often with them.
    async fn poisoned(&self, batch: BatchId, taken: &[Reaped]) -> Vec<Position> {
        let failed = taken.iter().filter(|item| item.disposition == ReapDisposition::Failed);
        let failed: Vec<Position> = failed.map(|item| item.item.position()).collect();
        if failed.is_empty() {
            return failed;
        }
        // Only to count them.
        let ends = self.database.taken_back(batch, &failed).await.unwrap_or_default();
        ends.iter().filter(|end| end.poison).map(|end| end.position).collect()
    }

    fn note(&self, queue: &QueueName, taken: &[Reaped], poison: &[Position]) {
        let traced = TraceContext::current().is_some();
        for reaped in taken {
            let ended = TraceContext::of_hold(reaped.item, reaped.token);
            let disposition = RecoveryDisposition::from(reaped.disposition);
            let poison = poison.contains(&reaped.item.position());
            self.metrics.lease_expired(queue, reaped.late);
            self.metrics.taken_back(queue, disposition, poison, 1, RetryReason::LeaseExpired);
            warn!(
                batch = %reaped.item.batch(), position = %reaped.item.position(),
                lease = %reaped.lease, token = %reaped.token,
                // That of the attempt that ended, of which nobody may say more.
                trace_id = traced.then(|| tracing::field::display(ended.trace_id())), disposition = disposition.as_str(),
                "took back an expired lease"
            );
        }
    }
}
