//! Keeps leases: one renewal of all of them every third of a lease, on a connection of its own; the
//! trust deadline; the stop signal on loss (F5).

mod forgotten;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rand::Rng;
use time::OffsetDateTime;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use crate::clock::{BootInstant, Clock};
use crate::health::HealthState;
use crate::leases::{Known, Leases, StopCause};
use crate::model::{BatchId, LeaseId, WorkerId};
use crate::store::{Database, FlightError, LeaseState, RenewAnswer, Renewal};
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
    lost_claims: Mutex<Vec<LostClaim>>,
    /// Leases whose rows hold more than is known of them here, by the last answer.
    forgetful: Mutex<Vec<Known>>,
    clock_guard: Mutex<ClockGuard>,
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
            lost_claims: Mutex::default(),
            forgetful: Mutex::default(),
            clock_guard: Mutex::new(ClockGuard::new(ttl)),
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
        let guard = self.clock_guard.lock().unwrap_or_else(PoisonError::into_inner);
        guard.agrees_long_enough(self.clock.now())
    }

    /// When, by the database's clock, its start, its timeline or its clock itself last changed under
    /// this process; none while they never did.
    #[must_use]
    pub fn disturbed_at(&self) -> Option<OffsetDateTime> {
        self.clock_guard.lock().unwrap_or_else(PoisonError::into_inner).disturbed_at
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
                crate::clock::sleep_until(&*self.clock, planned).await;
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
        loop {
            self.health.tick();
            let fenced = self.leases.fence_expired();
            if !fenced.is_empty() {
                self.metrics.self_fenced(SelfFenceReason::RenewalDeadline);
                warn!(
                    items = fenced.len(),
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
                    self.answered(asked_at, &renewal);
                    return;
                }
                Err(failed) => self.failed(&failed),
            }
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

    fn answered(&self, asked_at: BootInstant, renewal: &Renewal) {
        if !self.healthy.swap(true, Ordering::Relaxed) {
            info!("heartbeats are answered");
            self.recovered.notify_one();
        }
        self.health.database_ok();
        self.clock_guard.lock().unwrap_or_else(PoisonError::into_inner).sample(
            asked_at,
            renewal.database_now,
            renewal.server_started,
            renewal.timeline,
        );
        let known = |state: &LeaseState| self.leases.forgetful(state.lease, state.held);
        *self.forgetful() = renewal.leases.iter().filter_map(known).collect();
        for lease in &renewal.leases {
            self.lease_answered(asked_at, lease.lease, lease.answer);
        }
        self.listed.store(renewal.known, Ordering::Relaxed);
        self.answered.notify_one();
    }

    fn lease_answered(&self, asked_at: BootInstant, lease: LeaseId, answer: RenewAnswer) {
        let Some(queue) = self.leases.queue_of(lease) else { return };
        let (cause, outcome, lost) = match answer {
            RenewAnswer::Renewed => {
                let left = self.leases.extend(lease, asked_at).map(|trust| {
                    let margin = self.ttl.saturating_sub(self.leases.trust());
                    (trust + margin).as_secs_f64() / self.ttl.as_secs_f64()
                });
                self.metrics.lease_renewal(&queue, RenewalOutcome::Ok, left);
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

    fn forgetful(&self) -> std::sync::MutexGuard<'_, Vec<Known>> {
        self.forgetful.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Compares the database's clock with the boot-time clock of this process (F4).
#[derive(Debug)]
struct ClockGuard {
    ttl: Duration,
    since: Option<Sample>,
    last: Option<Sample>,
    disturbed_at: Option<OffsetDateTime>,
}

#[derive(Clone, Copy, Debug)]
struct Sample {
    at: BootInstant,
    database: OffsetDateTime,
    server_started: OffsetDateTime,
    timeline: i32,
}

impl ClockGuard {
    const fn new(ttl: Duration) -> Self {
        Self { ttl, since: None, last: None, disturbed_at: None }
    }

    /// Takes a reading; a disagreement, a restart or a failover begins the time of agreement anew.
    fn sample(
        &mut self,
        at: BootInstant,
        database: OffsetDateTime,
        server_started: OffsetDateTime,
        timeline: i32,
    ) {
        let now = Sample { at, database, server_started, timeline };
        let agrees = self.since.is_some_and(|since| {
            let ours = at.since(since.at).as_secs_f64();
            let theirs = (database - since.database).as_seconds_f64();
            since.server_started == server_started
                && since.timeline == timeline
                && (theirs - ours).abs() <= 0.01 * ours + 0.5
        });
        if !agrees {
            if self.since.is_some() {
                self.disturbed_at = Some(database);
            }
            self.since = Some(now);
        }
        self.last = Some(now);
    }

    /// Whether the readings have agreed for one lease, and the last one is recent: two missed beats
    /// are too many.
    fn agrees_long_enough(&self, now: BootInstant) -> bool {
        let (Some(since), Some(last)) = (self.since, self.last) else { return false };
        now.since(since.at) >= self.ttl && now.since(last.at) <= self.ttl * 2 / 3
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TTL: Duration = Duration::from_mins(1);

    fn at(seconds: u64) -> BootInstant {
        BootInstant::from_nanos(seconds * 1_000_000_000)
    }

    fn guard_fed(readings: &[(u64, i64, i64, i32)]) -> ClockGuard {
        let mut guard = ClockGuard::new(TTL);
        for (ours, theirs, started, timeline) in readings {
            guard.sample(
                at(*ours),
                OffsetDateTime::UNIX_EPOCH + time::Duration::seconds(*theirs),
                OffsetDateTime::UNIX_EPOCH + time::Duration::seconds(*started),
                *timeline,
            );
        }
        guard
    }

    #[test]
    fn expiries_are_judged_after_one_lease_of_agreement() {
        let guard = guard_fed(&[(0, 100, 1, 1), (20, 120, 1, 1)]);
        assert!(!guard.agrees_long_enough(at(20)));

        let guard = guard_fed(&[(0, 100, 1, 1), (20, 120, 1, 1), (40, 140, 1, 1)]);
        assert!(!guard.agrees_long_enough(at(59)));
        assert!(guard.agrees_long_enough(at(60)));
        assert_eq!(guard.disturbed_at, None);
        assert!(!guard.agrees_long_enough(at(81)), "the last reading is too old");
    }

    #[test]
    fn a_step_a_restart_and_a_failover_begin_it_anew() {
        for last in [(60, 163, 1, 1), (60, 160, 2, 1), (60, 160, 1, 2)] {
            let guard = guard_fed(&[(0, 100, 1, 1), (20, 120, 1, 1), (40, 140, 1, 1), last]);
            assert!(!guard.agrees_long_enough(at(60)), "{last:?}");
            let then = OffsetDateTime::UNIX_EPOCH + time::Duration::seconds(last.1);
            assert_eq!(guard.disturbed_at, Some(then), "{last:?}");
        }
    }
}
