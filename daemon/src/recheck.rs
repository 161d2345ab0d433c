//! Takes lost checks: slot first, then the claim, before anything that was executed here. What is
//! taken is checked again and never executed again.

use std::sync::Arc;
use std::time::Duration;

use rand::Rng;
use tokio::task::spawn_blocking;
use tokio_util::sync::CancellationToken;
use tracing::{Instrument, debug, warn};
use uuid::Uuid;

use crate::capacity::{CheckSlots, Slot};
use crate::clock::Clock;
use crate::leases::{Grant, Leases};
use crate::model::{BatchId, Hold, LeaseId, QueueName, WorkerId};
use crate::store::{ClaimAnswer, Database, FlightError, Recheck, RecheckBatch, RecheckRequest};
use crate::telemetry::Metrics;
use crate::telemetry::labels::ClaimOutcome;
use crate::telemetry::trace::{self, TraceContext};
use crate::workspace::Workspaces;

/// How lost checks are taken.
#[derive(Clone, Copy, Debug)]
pub struct RecheckPolicy {
    /// A lease's length.
    pub ttl: Duration,
    /// How often to look for them.
    pub poll_interval: Duration,
    /// How long those on volumes that are not seen from here are left to other workers.
    pub foreign: Duration,
}

/// Lost checks that were taken, each with its slot.
pub struct Retaken {
    /// Their batch.
    pub batch: BatchId,
    /// Its queue.
    pub queue: QueueName,
    /// The holds, each with a check slot.
    pub items: Vec<(Hold, Slot)>,
    /// Trace context of the claim.
    pub claim: Option<TraceContext>,
}

/// The loop of one worker that takes lost checks.
pub struct Rechecker {
    /// The database.
    pub database: Database,
    /// The clock of trust.
    pub clock: Arc<dyn Clock>,
    /// What this worker holds.
    pub leases: Arc<Leases>,
    /// The check slots.
    pub slots: CheckSlots,
    /// The metrics.
    pub metrics: Arc<Metrics>,
    /// Where items have their files.
    pub workspaces: Arc<dyn Workspaces>,
    /// This worker.
    pub worker: WorkerId,
    /// The queues it serves.
    pub queues: Vec<String>,
    /// How it takes them.
    pub policy: RecheckPolicy,
}

impl Rechecker {
    /// Takes lost checks until `stop`. `may_claim` says whether this is the time for it; `retaken`
    /// gets what was taken; `lost` gets claims whose answer never came (F6).
    pub async fn run(
        self,
        stop: &CancellationToken,
        may_claim: impl Fn() -> bool,
        retaken: impl Fn(Retaken),
        lost: impl Fn(BatchId, LeaseId),
    ) {
        loop {
            let pause = self.policy.poll_interval.mul_f64(rand::rng().random_range(0.5..1.0));
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(pause) => {}
            }
            if may_claim() {
                self.round(stop, &retaken, &lost).await;
            }
        }
    }

    /// Looks once at every batch that has lost checks.
    async fn round(
        &self,
        stop: &CancellationToken,
        retaken: &impl Fn(Retaken),
        lost: &impl Fn(BatchId, LeaseId),
    ) {
        let volume = self.volume().await;
        let found = self.database.recheck_batches(&self.queues, volume, self.policy.foreign).await;
        let batches = match found {
            Ok(batches) => batches,
            Err(failed) => {
                self.metrics.db_error(failed.class());
                debug!(error = %failed, "lost checks could not be looked for");
                return;
            }
        };
        for batch in batches {
            let Ok(queue) = batch.queue.parse::<QueueName>() else { continue };
            let first = tokio::select! {
                () = stop.cancelled() => return,
                first = self.slots.take_first() => first,
            };
            let Some(first) = first else { return };
            let mut slots = self.slots.slots().take(usize::MAX);
            slots.push(first);
            if let Err(failed) = self.take(&batch, queue, volume, slots, retaken, lost).await {
                self.metrics.db_error(failed.class());
                return;
            }
        }
    }

    async fn take(
        &self,
        batch: &RecheckBatch,
        queue: QueueName,
        volume: Option<Uuid>,
        slots: Vec<Slot>,
        retaken: &impl Fn(Retaken),
        lost: &impl Fn(BatchId, LeaseId),
    ) -> Result<(), FlightError> {
        let span = trace::claim_span(&queue, self.worker);
        let context = TraceContext::of(&span);
        let request = RecheckRequest {
            batch: batch.id,
            lease: LeaseId::generate(),
            worker: self.worker,
            want: u32::try_from(slots.len()).unwrap_or(u32::MAX),
            ttl: self.policy.ttl,
            volume,
            foreign: self.policy.foreign,
            traceparent: context.as_ref().map(ToString::to_string),
        };
        // Trust counts from before the question (F5).
        let asked_at = self.clock.now();
        let answer = self.database.recheck(&request).instrument(span.clone()).await;
        let took = self.clock.now().since(asked_at);
        match answer {
            Ok(Recheck::Granted(holds)) => {
                let Some(token) = holds.first().map(Hold::token) else { return Ok(()) };
                self.metrics.claim(&queue, ClaimOutcome::Granted, took);
                self.metrics.leases_granted(&queue, holds.len());
                trace::item_count(&span, holds.len());
                self.leases.enter(
                    Grant {
                        batch: batch.id,
                        lease: request.lease,
                        token,
                        queue: queue.clone(),
                        asked_at,
                    },
                    holds.iter().map(|hold| hold.item().position()),
                );
                let items = holds.into_iter().zip(slots).collect();
                retaken(Retaken { batch: batch.id, queue, items, claim: context });
                Ok(())
            }
            Ok(Recheck::Nothing(answer)) => {
                trace::uneventful(&span);
                let contended = answer == ClaimAnswer::Contended;
                let outcome = if contended { ClaimOutcome::Contended } else { ClaimOutcome::Empty };
                self.metrics.claim(&queue, outcome, took);
                Ok(())
            }
            Err(failed) => {
                self.metrics.claim(&queue, ClaimOutcome::Error, took);
                trace::failed(&span, "database");
                if failed.is_unknown() {
                    warn!(batch = %request.batch, lease = %request.lease, error = %failed, "lost checks were not granted in time: giving their lease back");
                    lost(request.batch, request.lease);
                }
                Err(failed)
            }
        }
    }

    /// The volume seen from here.
    async fn volume(&self) -> Option<Uuid> {
        let workspaces = Arc::clone(&self.workspaces);
        let seen = spawn_blocking(move || workspaces.volume()).await;
        match seen {
            Ok(Ok(volume)) => volume,
            Ok(Err(error)) => {
                debug!(%error, "the volume of the workspaces cannot be read");
                None
            }
            Err(_) => None,
        }
    }
}
