//! The terminal write: groups what completed and hands it in, fenced, until the database answers.
//!
//! One hand-in per batch is on its way at a time; what completes meanwhile joins the next. A slot is
//! free only when its item was applied or refused.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rand::Rng;
use tokio::sync::Notify;
use tokio_util::task::TaskTracker;
use tracing::{Instrument, Span, debug, error, warn};

use crate::capacity::Slot;
use crate::clock::{BootInstant, Clock};
use crate::fault::Fault;
use crate::leases::Leases;
use crate::model::{AttemptEnding, BatchId, Disposition, Hold, QueueName, Settlement, WorkerId};
use crate::store::{Database, Event, FlightError, HandIn, HandInAnswer};
use crate::telemetry::Metrics;
use crate::telemetry::labels::{FenceOp, FenceReason, ItemOutcome, LostReason, ReleaseReason};
use crate::telemetry::trace;

/// How hand-ins are grouped.
#[derive(Clone, Copy, Debug)]
pub struct Grouping {
    /// How long the first of a group waits for others.
    pub delay: Duration,
    /// Items at which a group is full.
    pub items: usize,
    /// Bytes of results at which a group is full.
    pub bytes: usize,
}

/// One item that came to an end, with what is freed when that is stored.
pub struct Finished {
    /// The right to hand it in.
    pub hold: Hold,
    /// What becomes of it.
    pub settlement: Settlement,
    /// Its queue.
    pub queue: QueueName,
    /// Its slot, in use until the hand-in is answered; none when it never began.
    pub slot: Option<Slot>,
    /// Its lease's span, open until then.
    pub span: Span,
}

impl Finished {
    fn bytes(&self) -> usize {
        let result = self.settlement.result.json.as_ref().map_or(0, String::len);
        result + self.settlement.error.as_ref().map_or(0, String::len)
    }
}

/// Hands in what completes. Cheap to clone.
#[derive(Clone)]
pub struct Finisher {
    shared: Arc<Shared>,
}

/// The server's answer to a hand-in.
struct Answered {
    answers: Vec<HandInAnswer>,
    /// When the try was sent that was answered.
    asked_at: BootInstant,
    /// Whether an earlier try without an answer may have been the one that took effect.
    may_be_a_repeat: bool,
}

struct Shared {
    database: Database,
    clock: Arc<dyn Clock>,
    leases: Arc<Leases>,
    metrics: Arc<Metrics>,
    worker: WorkerId,
    ttl: Duration,
    grouping: Grouping,
    tracker: TaskTracker,
    fault: Fault,
    pending: Mutex<HashMap<BatchId, Vec<Finished>>>,
    /// Something was applied: the claim loop may look again, at once or when a retry is due.
    settled: Arc<Notify>,
}

impl Finisher {
    /// A finisher whose hand-ins run on `tracker` and raise `fault` when they panic; `settled` is
    /// notified after each.
    #[expect(clippy::too_many_arguments, reason = "wiring, called once")]
    #[must_use]
    pub fn new(
        database: Database,
        clock: Arc<dyn Clock>,
        leases: Arc<Leases>,
        metrics: Arc<Metrics>,
        worker: WorkerId,
        ttl: Duration,
        grouping: Grouping,
        tracker: TaskTracker,
        fault: Fault,
        settled: Arc<Notify>,
    ) -> Self {
        let pending = Mutex::default();
        Self {
            shared: Arc::new(Shared {
                database,
                clock,
                leases,
                metrics,
                worker,
                ttl,
                grouping,
                tracker,
                fault,
                pending,
                settled,
            }),
        }
    }

    /// Takes an item over; it is handed in soon. Never waits.
    pub fn submit(&self, finished: Finished) {
        let batch = finished.hold.item().batch();
        let first = {
            let mut pending = self.shared.pending();
            let under_way = pending.contains_key(&batch);
            pending.entry(batch).or_default().push(finished);
            !under_way
        };
        if first {
            let shared = Arc::clone(&self.shared);
            let hand_ins = async move { shared.drain_batch(batch).await };
            self.shared.tracker.spawn(self.shared.fault.clone().watch("hand-in", hand_ins));
        }
    }

    /// How many items wait for their hand-in or its answer.
    #[must_use]
    pub fn backlog(&self) -> usize {
        self.shared.pending().values().map(Vec::len).sum()
    }
}

impl Shared {
    fn pending(&self) -> MutexGuard<'_, HashMap<BatchId, Vec<Finished>>> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Hands in group after group of one batch until nothing of it is pending.
    async fn drain_batch(&self, batch: BatchId) {
        tokio::time::sleep(self.grouping.delay).await;
        loop {
            let Some(group) = self.next_group(batch) else { break };
            self.hand_in(batch, group).await;
            self.settled.notify_one();
            if self.pending().get(&batch).is_none_or(Vec::is_empty) {
                self.end_if_exhausted(batch).await;
            }
        }
    }

    /// The next group; none, and the batch is forgotten, when nothing is pending.
    fn next_group(&self, batch: BatchId) -> Option<Vec<Finished>> {
        let mut pending = self.pending();
        let waiting = pending.get_mut(&batch)?;
        if waiting.is_empty() {
            pending.remove(&batch);
            return None;
        }
        let mut bytes = 0;
        let fits = waiting.iter().take(self.grouping.items).take_while(|finished| {
            bytes += finished.bytes();
            bytes <= self.grouping.bytes
        });
        let count = fits.count().max(1);
        Some(waiting.drain(..count).collect())
    }

    /// Hands a group in until every item of it is answered. A group that the database refuses for
    /// what it holds is taken apart, so that one item cannot keep the others.
    async fn hand_in(&self, batch: BatchId, group: Vec<Finished>) {
        let mut queue = vec![group];
        while let Some(mut group) = queue.pop() {
            let mut leases: Vec<_> = group.iter().map(|f| f.hold.lease()).collect();
            leases.sort_unstable();
            leases.dedup();
            self.leases.hand_in_begins(leases.iter().copied());
            match self.hand_in_until_answered(batch, &group).await {
                Ok(answered) => self.settle(group, &answered).await,
                Err(refused) if group.len() > 1 => {
                    warn!(%batch, items = group.len(), error = %refused, "a hand-in was refused; taking its items one by one");
                    queue.extend(group.into_iter().map(|finished| vec![finished]));
                }
                Err(refused) => {
                    let finished = &mut group[0];
                    if finished.settlement.stop_reason == UNSTORABLE {
                        // Nothing of it can be stored: its lease lapses, and the reaper judges.
                        error!(item = %finished.hold.item(), error = %refused, "an item cannot be handed in");
                        self.let_go(finished, LostReason::Expired);
                    } else {
                        make_unstorable(&mut finished.settlement, &refused);
                        queue.push(group);
                    }
                }
            }
            // Not before its items have left: a heartbeat would take the lease for lost.
            self.leases.hand_in_ends(leases);
        }
    }

    /// Repeats a hand-in until the server answers (F6); the error is a refusal that repeating will
    /// not change.
    async fn hand_in_until_answered(
        &self,
        batch: BatchId,
        group: &[Finished],
    ) -> Result<Answered, FlightError> {
        let items: Vec<HandIn<'_>> =
            group.iter().map(|f| HandIn { hold: &f.hold, settlement: &f.settlement }).collect();
        let mut pause = Duration::from_millis(50);
        let mut may_be_a_repeat = false;
        loop {
            let asked_at = self.clock.now();
            let flight = self.database.hand_in(batch, self.worker, self.ttl, &items);
            match flight.await {
                Ok(answers) => {
                    self.metrics.finish_group(items.len(), self.clock.now().since(asked_at));
                    return Ok(Answered { answers, asked_at, may_be_a_repeat });
                }
                Err(refused) if refused.is_lasting() => return Err(refused),
                Err(failed) => {
                    may_be_a_repeat |= failed.is_unknown();
                    self.metrics.db_error(failed.class());
                    debug!(%batch, error = %failed, "a hand-in was not answered; repeating it");
                    let jitter = rand::rng().random_range(0.5..1.0);
                    tokio::time::sleep(pause.mul_f64(jitter)).await;
                    pause = (pause * 2).min(Duration::from_secs(2));
                }
            }
        }
    }

    /// Takes note of the answers and frees the slots.
    async fn settle(&self, group: Vec<Finished>, answered: &Answered) {
        let mut for_others = None;
        for (finished, answer) in group.iter().zip(&answered.answers) {
            let lease = finished.hold.lease();
            match answer {
                HandInAnswer::Applied => {
                    // A repeat that finds itself applied has extended nothing now (F5).
                    if !answered.may_be_a_repeat {
                        self.leases.extend(lease, answered.asked_at);
                    }
                    self.note_applied(finished);
                    // What this worker will not claim itself: it is given back, or it frees a
                    // place under a cap while the worker drains.
                    if is_given_back(&finished.settlement) || self.leases.is_closed() {
                        for_others = Some(finished.queue.clone());
                    }
                }
                HandInAnswer::Lost => self.note_lost(finished, FenceReason::Token),
                HandInAnswer::Cancelled => self.note_lost(finished, FenceReason::Cancelled),
            }
            self.leases.leave(lease, finished.hold.item().position());
        }
        drop(group);
        if let Some(queue) = for_others {
            // Only a hint: without it the other workers find out by polling.
            drop(self.database.notify(&Event::Work(queue.to_string())).await);
        }
    }

    fn note_applied(&self, finished: &Finished) {
        let (outcome, reason) = match &finished.settlement.disposition {
            Disposition::Succeed => (Some(ItemOutcome::Succeeded), ReleaseReason::Settled),
            Disposition::Fail => (Some(ItemOutcome::Failed), ReleaseReason::Settled),
            Disposition::Again { ending: AttemptEnding::Unstarted, .. } => {
                (None, ReleaseReason::DrainUnstarted)
            }
            Disposition::Again { ending: AttemptEnding::Interrupted, .. } => {
                (None, ReleaseReason::DrainInterrupted)
            }
            Disposition::Again { .. } => (None, ReleaseReason::Settled),
        };
        if let Some(outcome) = outcome {
            self.metrics.items_finished(&finished.queue, outcome, 1);
        }
        self.metrics.lease_released(&finished.queue, reason);
        trace::lease_released(&finished.span, reason);
    }

    /// The attempt publishes nothing (F3): counted, and logged with its token.
    fn note_lost(&self, finished: &Finished, reason: FenceReason) {
        let (op, lost) = match (&finished.settlement.disposition, reason) {
            (_, FenceReason::Cancelled) => (FenceOp::Complete, LostReason::Cancelled),
            (Disposition::Succeed, _) => (FenceOp::Complete, LostReason::Superseded),
            (Disposition::Fail, _) => (FenceOp::Fail, LostReason::Superseded),
            (Disposition::Again { .. }, _) => (FenceOp::Release, LostReason::Superseded),
        };
        self.metrics.fence_rejected(op, reason);
        self.metrics.lease_lost(&finished.queue, lost);
        trace::lease_lost(&finished.span, lost);
        finished.span.in_scope(|| match reason {
            FenceReason::Cancelled => debug!("the batch was cancelled; nothing was published"),
            FenceReason::Token | FenceReason::Expired | FenceReason::Epoch => {
                warn!("the lease no longer holds the item; nothing was published");
            }
        });
    }

    fn let_go(&self, finished: &Finished, reason: LostReason) {
        self.metrics.lease_lost(&finished.queue, reason);
        trace::lease_lost(&finished.span, reason);
        self.leases.leave(finished.hold.lease(), finished.hold.item().position());
    }

    /// The look after a finish: nothing left means the batch ends.
    async fn end_if_exhausted(&self, batch: BatchId) {
        match self.database.is_exhausted(batch).await {
            Ok(false) => {}
            Ok(true) => match self.database.end_batch(batch).in_current_span().await {
                Ok(ended) => debug!(%batch, ended, "a batch has nothing left"),
                Err(failed) => debug!(%batch, error = %failed, "left to the full sweep"),
            },
            Err(failed) => debug!(%batch, error = %failed, "left to the full sweep"),
        }
    }
}

/// Whether the item can run elsewhere at once.
const fn is_given_back(settlement: &Settlement) -> bool {
    matches!(
        settlement.disposition,
        Disposition::Again { ending: AttemptEnding::Interrupted | AttemptEnding::Unstarted, .. }
    )
}

/// The stop reason of an item whose outcome the database refused to store.
const UNSTORABLE: &str = "unstorable";

/// An outcome that can be stored instead of the one that cannot.
fn make_unstorable(settlement: &mut Settlement, refused: &FlightError) {
    settlement.disposition = Disposition::Fail;
    settlement.result = crate::model::PublishedResult::default();
    settlement.error = Some(format!("the outcome could not be stored: {refused}"));
    settlement.stop_reason = UNSTORABLE;
}
