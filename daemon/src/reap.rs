//! Recovers what expired: in every worker, no leader. A fast sweep looks at workers that fell
//! silent, a full sweep, by one worker of the fleet at a time, at everything.

use std::sync::Arc;
use std::time::Duration;

use rand::Rng;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use crate::clock::Clock;
use crate::model::{BatchId, QueueName};
use crate::store::{Database, Event, FlightError, ReapPolicy, Reaped, StoreError};
use crate::telemetry::Metrics;
use crate::telemetry::labels::{DbErrorClass, ReaperOutcome, RecoveryDisposition};
use crate::telemetry::trace;

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

    /// Sweeps until `stop`. `may_reap` says whether this process may judge expiries (F4); `recovered`
    /// is called when something became claimable.
    pub async fn run(
        &self,
        stop: &CancellationToken,
        may_reap: impl Fn() -> bool,
        recovered: impl Fn(),
    ) {
        loop {
            let pause = self.policy.fast.mul_f64(rand::rng().random_range(0.9..1.1));
            let swept = async {
                tokio::time::sleep(pause).await;
                self.sweep(may_reap(), &recovered).await
            };
            // Each step is whole, whoever waits for its answer: the end need not wait.
            let swept = tokio::select! {
                () = stop.cancelled() => return,
                swept = swept => swept,
            };
            let outcome = match swept {
                Ok(()) => ReaperOutcome::Ok,
                Err(failed) => {
                    self.metrics.db_error(failed.class());
                    debug!(error = %failed, "a sweep stopped early");
                    ReaperOutcome::Error
                }
            };
            self.metrics.reaper_run(outcome, self.clock.wall());
        }
    }

    async fn sweep(&self, may_reap: bool, recovered: &impl Fn()) -> Result<(), SweepError> {
        if may_reap {
            for batch in self.database.batches_of_silent_workers().await? {
                self.skip_refused(batch, self.reap(batch, recovered).await)?;
            }
        }
        if self.database.take_sweep(self.policy.full).await? {
            self.full_sweep(may_reap, recovered).await?;
        }
        Ok(())
    }

    async fn full_sweep(&self, may_reap: bool, recovered: &impl Fn()) -> Result<(), SweepError> {
        if may_reap {
            for batch in self.database.batches_with_expired_leases().await? {
                self.skip_refused(batch, self.reap(batch, recovered).await)?;
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

    async fn reap(&self, batch: BatchId, recovered: &impl Fn()) -> Result<(), SweepError> {
        let taken = self.database.reap(batch, &self.policy.reap).await?;
        if taken.is_empty() {
            return Ok(());
        }
        let work = self.database.batch_work(batch).await?;
        let queue = work.and_then(|work| work.queue.parse::<QueueName>().ok());
        if let Some(queue) = queue {
            let span = trace::recover_span(&queue);
            trace::item_count(&span, taken.len());
            span.in_scope(|| self.note(&queue, &taken));
            // Only a hint: without it the other workers find out by polling.
            drop(self.database.notify(&Event::Work(queue.to_string())).await);
        }
        recovered();
        Ok(())
    }

    fn note(&self, queue: &QueueName, taken: &[Reaped]) {
        for reaped in taken {
            let disposition = if reaped.requeued {
                RecoveryDisposition::Requeued
            } else {
                RecoveryDisposition::Failed
            };
            self.metrics.leases_recovered(queue, disposition, 1, reaped.late);
            warn!(
                batch = %reaped.item.batch(), position = %reaped.item.position(),
                lease = %reaped.lease, token = %reaped.token, requeued = reaped.requeued,
                "took back an expired lease"
            );
        }
    }
}
