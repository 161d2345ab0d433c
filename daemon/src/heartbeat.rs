//! Keeps leases: one renewal of all of them every third of a lease, on a connection of its own; the
//! trust deadline; the stop signal on loss (F5).

mod agreement;
mod forgotten;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rand::Rng;
use time::OffsetDateTime;
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use self::agreement::Agreement;
use crate::clock::{BootInstant, Clock};
use crate::health::HealthState;
use crate::leases::{Known, Leases, StopCause};
use crate::model::{Asked, BatchId, LeaseId, WorkerId};
use crate::store::{Database, FlightError, LeaseState, RenewAnswer, Renewal, ServerReading};
use crate::telemetry::Metrics;
use crate::telemetry::labels::{FenceOp, FenceReason, LostReason, RenewalOutcome, SelfFenceReason};
use crate::telemetry::metrics::RenewalTiming;

/// How often the trust deadlines are looked at. Part of the slack of F5.
const FENCE_TICK: Duration = Duration::from_millis(50);

/// The pause after the first try that was not answered; doubled with each, up to the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// A claim whose answer never came; it is given back until the database has said twice that nothing
/// of it is there, since the lost statement may commit late (F6).
#[derive(Clone, Copy, Debug)]
struct LostClaim {
    batch: BatchId,
    lease: LeaseId,
    confirmed: u8,
}

/// The heartbeat of one worker.
pub struct Heartbeat {
    database: Database,
    clock: Arc<dyn Clock>,
    leases: Arc<Leases>,
    metrics: Arc<Metrics>,
    health: Arc<HealthState>,
    worker: WorkerId,
    ttl: Duration,
    max_interruptions: u8,
    healthy: AtomicBool,
    /// Notified when heartbeats are answered again: claims may go on.
    recovered: Arc<Notify>,
    /// Notified at every answer, for what is done after it.
    answered: Notify,
    /// Whether this worker's row was there and open at the last answer.
    listed: AtomicBool,
    /// What an operator asked of this worker, by the last answer.
    asked: watch::Sender<Option<Asked>>,
    /// Notified when the next beat shall not wait for its time.
    soon: Notify,
    lost_claims: Mutex<Vec<LostClaim>>,
    /// Leases whose rows hold more than is known of them here, by the last answer.
    forgetful: Mutex<Vec<Known>>,
    agreement: Mutex<Agreement>,
}

impl Heartbeat {
    /// A heartbeat that has not beaten yet, for leases of length `ttl`.
    #[expect(clippy::too_many_arguments, reason = "wiring, called once")]
    #[must_use]
    pub fn new(
        database: Database,
        clock: Arc<dyn Clock>,
        leases: Arc<Leases>,
        metrics: Arc<Metrics>,
        health: Arc<HealthState>,
        worker: WorkerId,
        ttl: Duration,
        max_interruptions: u8,
        recovered: Arc<Notify>,
    ) -> Self {
        Self {
            database,
            clock,
            leases,
            metrics,
            health,
            worker,
            ttl,
            max_interruptions,
            healthy: AtomicBool::new(false),
            recovered,
            answered: Notify::new(),
            listed: AtomicBool::new(true),
            asked: watch::Sender::new(None),
            soon: Notify::new(),
            lost_claims: Mutex::default(),
            forgetful: Mutex::default(),
            agreement: Mutex::new(Agreement::new(ttl)),
        }
    }

    /// Whether the last try was answered: no claims while it was not.
    #[must_use]
    pub fn is_healthy(&self) -> bool {
        self.healthy.load(Ordering::Relaxed)
    }

    /// Whether this process may judge expiries: its clock and the database's agreed for one whole
    /// lease on the same server start and timeline (F4).
    #[must_use]
    pub fn may_reap(&self) -> bool {
        self.agreement().is_long_enough(self.clock.now())
    }

    /// Whether it may still, by a reading taken just before: the database's clock may have been set
    /// since the last heartbeat.
    #[must_use]
    pub fn may_reap_by(&self, server: &ServerReading) -> bool {
        self.agreement().allows(server)
    }

    /// When, by the database's clock, its start, its timeline or its clock itself last changed under
    /// this process; none while they never did.
    #[must_use]
    pub fn disturbed_at(&self) -> Option<OffsetDateTime> {
        self.agreement().disturbed_at()
    }

    /// What an operator asks of this worker, by the last answer.
    #[must_use]
    pub fn asked(&self) -> watch::Receiver<Option<Asked>> {
        self.asked.subscribe()
    }

    /// Beats now and not at its time: something is to be read or told.
    pub fn beat_soon(&self) {
        self.soon.notify_one();
    }

    /// Notes a claim whose answer never came.
    pub fn claim_was_lost(&self, batch: BatchId, lease: LeaseId) {
        self.lost_claims().push(LostClaim { batch, lease, confirmed: 0 });
    }

    /// Beats until `stop`; the first beat at once.
    pub async fn run(&self, stop: &CancellationToken) {
        let beats = async {
            let mut planned = self.clock.now();
            loop {
                self.beat(planned).await;
                let pause = (self.ttl / 3).mul_f64(rand::rng().random_range(0.9..1.0));
                planned = self.clock.now() + pause;
                tokio::select! {
                    () = crate::clock::sleep_until(&*self.clock, planned) => {}
                    () = self.soon.notified() => planned = self.clock.now(),
                }
            }
        };
        tokio::select! {
            () = stop.cancelled() => {}
            () = beats => {}
        }
    }

    /// Does until `stop` what an answered heartbeat calls for and no heartbeat may wait for: it
    /// takes connections that claims and hand-ins use as well.
    pub async fn follow_up(&self, stop: &CancellationToken) {
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                () = self.answered.notified() => {}
            }
            if !self.listed.load(Ordering::Relaxed) {
                self.reappear().await;
            }
            self.give_back_lost_claims().await;
            self.give_back_forgotten().await;
        }
    }

    /// Ends the executions of leases whose trust deadline passes, until `stop`.
    pub async fn watch_deadlines(&self, stop: &CancellationToken) {
        let mut looked = self.clock.now();
        loop {
            self.health.tick();
            let stood_still = self.clock.now().since(looked) >= self.ttl / 3;
            looked = self.clock.now();
            let fenced = self.leases.fence_expired();
            if !fenced.is_empty() {
                self.metrics.self_fenced(if stood_still {
                    SelfFenceReason::RuntimeStall
                } else {
                    SelfFenceReason::RenewalDeadline
                });
                for lease in &fenced {
                    self.metrics.lease_renewal(&lease.queue, RenewalOutcome::Error, None);
                }
                warn!(
                    items = fenced.iter().map(|lease| lease.items).sum::<usize>(),
                    "no renewal in time: ending what can no longer be trusted"
                );
            }
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(FENCE_TICK) => {}
            }
        }
    }

    /// One beat: tries until it is answered.
    async fn beat(&self, planned: BootInstant) {
        let mut pause = FIRST_PAUSE.min(self.ttl / 30);
        let mut renewed = RenewalOutcome::Ok;
        loop {
            let asked_at = self.clock.now();
            let vouched = self.leases.vouched();
            let state = self.health.state();
            let executing = self.leases.executing();
            let answer = self
                .database
                .renew(self.worker, self.ttl, state.as_str(), executing, &vouched)
                .await;
            let took = self.clock.now().since(asked_at);
            match answer {
                Ok(renewal) => {
                    self.metrics.renewal_statement(RenewalTiming {
                        lateness: asked_at.since(planned),
                        took,
                    });
                    let database_then = renewal.database_now + took / 2;
                    let ahead = self.clock.wall() - database_then;
                    self.metrics.db_clock_offset(ahead.as_seconds_f64());
                    self.answered(asked_at, asked_at + took, &renewal, renewed);
                    return;
                }
                Err(failed) => self.failed(&failed),
            }
            renewed = RenewalOutcome::Retried;
            tokio::time::sleep(pause.mul_f64(rand::random_range(0.5..1.0))).await;
            pause = (pause * 2).min(self.ttl / 6).min(LONGEST_PAUSE);
        }
    }

    fn failed(&self, failed: &FlightError) {
        self.metrics.db_error(failed.class());
        self.health.database_failed(failed.class());
        if self.healthy.swap(false, Ordering::Relaxed) {
            warn!(error = %failed, "a heartbeat was not answered: claiming nothing until one is");
        } else {
            debug!(error = %failed, "a heartbeat was not answered");
        }
    }

    fn answered(
        &self,
        asked_at: BootInstant,
        answered_at: BootInstant,
        renewal: &Renewal,
        renewed: RenewalOutcome,
    ) {
        if !self.healthy.swap(true, Ordering::Relaxed) {
            info!("heartbeats are answered");
            self.recovered.notify_one();
        }
        self.health.database_ok();
        self.agreement().note(ServerReading {
            asked_at,
            answered_at,
            now: renewal.database_now,
            started: renewal.server_started,
            timeline: renewal.timeline,
        });
        let known = |state: &LeaseState| self.leases.forgetful(state.lease, state.held);
        *self.forgetful() = renewal.leases.iter().filter_map(known).collect();
        for lease in &renewal.leases {
            self.lease_answered(asked_at, lease.lease, lease.answer, renewed);
        }
        self.listed.store(renewal.known, Ordering::Relaxed);
        self.asked.send_if_modified(|asked| std::mem::replace(asked, renewal.asked) != *asked);
        self.answered.notify_one();
    }

    fn lease_answered(
        &self,
        asked_at: BootInstant,
        lease: LeaseId,
        answer: RenewAnswer,
        renewed: RenewalOutcome,
    ) {
        let Some(queue) = self.leases.queue_of(lease) else { return };
        let (cause, outcome, lost) = match answer {
            RenewAnswer::Renewed => {
                let left = self.leases.extend(lease, asked_at).map(|trust| {
                    let margin = self.ttl.saturating_sub(self.leases.trust());
                    (trust + margin).as_secs_f64() / self.ttl.as_secs_f64()
                });
                self.metrics.lease_renewal(&queue, renewed, left);
                return;
            }
            // The hand-in that holds the row extends it.
            RenewAnswer::Busy => return,
            RenewAnswer::Cancelled => {
                (StopCause::Cancelled, RenewalOutcome::Cancelled, LostReason::Cancelled)
            }
            RenewAnswer::Gone => {
                (StopCause::Lost, RenewalOutcome::Rejected, LostReason::Superseded)
            }
        };
        let stopped = self.leases.lose(lease, cause);
        if stopped.is_empty() {
            return;
        }
        self.metrics.lease_renewal(&queue, outcome, None);
        if lost == LostReason::Superseded {
            self.metrics.fence_rejected(FenceOp::Renew, FenceReason::Token);
            warn!(%lease, items = stopped.len(), "a lease is gone: ending its executions");
        } else {
            info!(%lease, items = stopped.len(), "the batch was cancelled: ending its executions");
        }
    }

    /// The row of a worker that was silent for long has been closed: it lives.
    async fn reappear(&self) {
        match self.database.reopen_worker(self.worker).await {
            Ok(()) => info!("this worker was taken for dead and is listed again"),
            Err(failed) => debug!(error = %failed, "this worker's row could not be reopened"),
        }
    }

    /// Gives back the leases of claims whose answer never came.
    pub async fn give_back_lost_claims(&self) {
        let lost: Vec<LostClaim> = self.lost_claims().clone();
        for claim in lost {
            let given =
                self.database.give_back(claim.batch, claim.lease, self.max_interruptions).await;
            match given {
                Ok(moved) => {
                    if moved > 0 {
                        info!(batch = %claim.batch, lease = %claim.lease, items = moved, "gave back a lease whose claim was never answered");
                    }
                    let mut claims = self.lost_claims();
                    if let Some(entry) = claims.iter_mut().find(|e| e.lease == claim.lease) {
                        entry.confirmed += 1;
                    }
                    claims.retain(|entry| entry.confirmed < 2);
                }
                Err(failed) => debug!(error = %failed, "a lost claim is not given back yet"),
            }
        }
    }

    fn lost_claims(&self) -> std::sync::MutexGuard<'_, Vec<LostClaim>> {
        self.lost_claims.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn agreement(&self) -> std::sync::MutexGuard<'_, Agreement> {
        self.agreement.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn forgetful(&self) -> std::sync::MutexGuard<'_, Vec<Known>> {
        self.forgetful.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
