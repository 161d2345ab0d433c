//! The terminal write: groups what completed and hands it in, fenced, until the database answers.
//!
//! One hand-in per batch and step is on its way at a time; what completes meanwhile joins the next. A
//! slot is free only when its item was applied or refused.

mod pending;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rand::Rng;
use tokio::sync::{Notify, oneshot};
use tokio_util::task::TaskTracker;
use tracing::{Instrument, debug, error, warn};

pub use self::pending::{Concluded, Finished, Staged};

use self::pending::{Ending, Pending, Step};
use crate::clock::{BootInstant, Clock};
use crate::fault::Fault;
use crate::leases::Leases;
use crate::model::{AttemptEnding, BatchId, Conclusion, Disposition, Hold, VerdictClass, WorkerId};
use crate::store::{
    Concluding, Database, Event, FlightError, HandIn, HandInAnswer, StageAnswer, Staging,
};
use crate::telemetry::Metrics;
use crate::telemetry::labels::{FenceReason, ItemOutcome, LostReason, ReleaseReason};
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
    pending: Mutex<HashMap<(BatchId, Step), Vec<Pending>>>,
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
        self.enqueue(finished.into());
    }

    /// Stores a success whose check comes next. Answers with the right to conclude it; none when it
    /// is no longer held, and nothing is left to do. The slot is free from then on.
    ///
    /// # Cancel safety
    /// Dropped, the item is staged all the same, and nobody checks it until its lease lapses.
    pub async fn stage(&self, staged: Staged) -> Option<Hold> {
        let (done, held) = oneshot::channel();
        self.enqueue(staged.pending(done));
        held.await.ok()
    }

    /// Takes an item over whose check is over. Never waits.
    pub fn conclude(&self, concluded: Concluded) {
        self.enqueue(concluded.into());
    }

    fn enqueue(&self, item: Pending) {
        let key = (item.hold.item().batch(), item.step());
        let first = {
            let mut pending = self.shared.pending();
            let under_way = pending.contains_key(&key);
            pending.entry(key).or_default().push(item);
            !under_way
        };
        if first {
            let shared = Arc::clone(&self.shared);
            let hand_ins = async move { shared.drain(key).await };
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
    fn pending(&self) -> MutexGuard<'_, HashMap<(BatchId, Step), Vec<Pending>>> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Hands in group after group of one batch and step until nothing of it is pending.
    async fn drain(&self, key: (BatchId, Step)) {
        tokio::time::sleep(self.grouping.delay).await;
        let (batch, step) = key;
        loop {
            let Some(group) = self.next_group(key) else { break };
            self.hand_in(batch, group).await;
            // What is staged has not ended: nothing can have ended with it.
            if step != Step::Stage && self.pending().get(&key).is_none_or(Vec::is_empty) {
                self.end_if_exhausted(batch).await;
            }
        }
    }

    /// The next group; none, and the batch is forgotten, when nothing is pending.
    fn next_group(&self, key: (BatchId, Step)) -> Option<Vec<Pending>> {
        let mut pending = self.pending();
        let waiting = pending.get_mut(&key)?;
        if waiting.is_empty() {
            pending.remove(&key);
            return None;
        }
        let mut bytes = 0;
        let fits = waiting.iter().take(self.grouping.items).take_while(|item| {
            bytes += item.bytes();
            bytes <= self.grouping.bytes
        });
        let count = fits.count().max(1);
        Some(waiting.drain(..count).collect())
    }

    /// Hands a group in until every item of it is answered. A group that the database refuses for
    /// what it holds is taken apart, so that one item cannot keep the others.
    async fn hand_in(&self, batch: BatchId, group: Vec<Pending>) {
        let mut queue = vec![group];
        while let Some(mut group) = queue.pop() {
            let mut leases: Vec<_> = group.iter().map(|item| item.hold.lease()).collect();
            leases.sort_unstable();
            leases.dedup();
            self.leases.hand_in_begins(leases.iter().copied());
            match self.hand_in_until_answered(batch, &group).await {
                Ok(answered) => self.settle(group, &answered).await,
                Err(refused) if group.len() > 1 => {
                    warn!(%batch, items = group.len(), error = %refused, "a hand-in was refused; taking its items one by one");
                    queue.extend(group.into_iter().map(|item| vec![item]));
                }
                Err(refused) => {
                    let item = &mut group[0];
                    if item.reduce(&refused) {
                        queue.push(group);
                    } else {
                        // Nothing of it can be stored: its lease lapses, and the reaper judges.
                        item.settle.in_scope(|| {
                            error!(error = %refused, "an item cannot be handed in");
                        });
                        trace::failed(&item.settle, "unstorable");
                        self.let_go(item, LostReason::Expired);
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
        group: &[Pending],
    ) -> Result<Answered, FlightError> {
        let mut pause = Duration::from_millis(50);
        let mut may_be_a_repeat = false;
        loop {
            let asked_at = self.clock.now();
            match self.send(batch, group).await {
                Ok(answers) => {
                    self.metrics.finish_group(group.len(), self.clock.now().since(asked_at));
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

    /// Sends a group, all of one step, once.
    async fn send(
        &self,
        batch: BatchId,
        group: &[Pending],
    ) -> Result<Vec<HandInAnswer>, FlightError> {
        let (mut finishes, mut stages, mut conclusions) = (Vec::new(), Vec::new(), Vec::new());
        for Pending { hold, ending, .. } in group {
            match ending {
                Ending::Finish(settlement) => finishes.push(HandIn { hold, settlement }),
                Ending::Stage { settlement, evidence, workspace, .. } => stages.push(Staging {
                    hold,
                    settlement,
                    evidence,
                    workspace: workspace.as_deref(),
                }),
                Ending::Conclude(conclusion) => conclusions.push(Concluding { hold, conclusion }),
            }
        }
        if !stages.is_empty() {
            let answers = self.database.stage(batch, self.worker, self.ttl, &stages).await?;
            return Ok(answers.into_iter().map(staged).collect());
        }
        if !conclusions.is_empty() {
            return self.database.conclude(batch, self.ttl, &conclusions).await;
        }
        self.database.hand_in(batch, self.worker, self.ttl, &finishes).await
    }

    /// Takes note of the answers and frees the slots.
    async fn settle(&self, group: Vec<Pending>, answered: &Answered) {
        let mut for_others = None;
        let (mut freed, mut to_check) = (Vec::new(), Vec::new());
        for (mut item, answer) in group.into_iter().zip(&answered.answers) {
            let lease = item.hold.lease();
            freed.extend(item.slot.take());
            match answer {
                HandInAnswer::Applied => {
                    // A repeat that finds itself applied has extended nothing now (F5).
                    if !answered.may_be_a_repeat {
                        self.leases.extend(lease, answered.asked_at);
                    }
                    trace::settled(&item.settle, None);
                    if let Ending::Stage { done, .. } = item.ending {
                        to_check.push((done, item.hold));
                        continue;
                    }
                    self.note_applied(&item);
                    // What this worker will not claim itself: it is given back, or it frees a
                    // place under a cap while the worker drains.
                    if item.is_given_back() || self.leases.is_closed() {
                        for_others = Some(item.queue.clone());
                    }
                }
                HandInAnswer::Lost => self.note_lost(&item, FenceReason::Token),
                HandInAnswer::Cancelled => self.note_lost(&item, FenceReason::Cancelled),
            }
            self.leases.leave(lease, item.hold.item().position());
        }
        // Whatever is next to be executed goes first, then the checks.
        drop(freed);
        self.settled.notify_one();
        for (done, hold) in to_check {
            if let Err(hold) = done.send(hold) {
                self.leases.leave(hold.lease(), hold.item().position());
            }
        }
        if let Some(queue) = for_others {
            // Only a hint: without it the other workers find out by polling.
            drop(self.database.notify(&Event::Work(queue.to_string())).await);
        }
    }

    fn note_applied(&self, item: &Pending) {
        let (outcome, reason) = match &item.ending {
            Ending::Finish(settlement) => match &settlement.disposition {
                Disposition::Succeed => (Some(ItemOutcome::Succeeded), ReleaseReason::Settled),
                Disposition::Fail => (Some(ItemOutcome::Failed), ReleaseReason::Settled),
                Disposition::Again { .. } if item.fenced => (None, ReleaseReason::SelfFenced),
                Disposition::Again { ending: AttemptEnding::Unstarted, .. } => {
                    (None, ReleaseReason::DrainUnstarted)
                }
                Disposition::Again { ending: AttemptEnding::Interrupted, .. } => {
                    (None, ReleaseReason::DrainInterrupted)
                }
                Disposition::Again { .. } => (None, ReleaseReason::Settled),
            },
            Ending::Conclude(Conclusion::Publish(verdict)) => {
                self.metrics.check_published(&item.queue, VerdictClass::of(verdict.as_ref()));
                (Some(ItemOutcome::Succeeded), ReleaseReason::Settled)
            }
            Ending::Stage { .. } | Ending::Conclude(Conclusion::Recheck(_)) => {
                (None, ReleaseReason::DrainInterrupted)
            }
        };
        if let Some(outcome) = outcome {
            self.metrics.items_finished(&item.queue, outcome, 1);
        }
        self.metrics.lease_released(&item.queue, reason);
        trace::lease_released(&item.span, reason);
    }

    /// The attempt publishes nothing (F3): counted, and logged with its token.
    fn note_lost(&self, item: &Pending, reason: FenceReason) {
        let lost = match reason {
            FenceReason::Cancelled => LostReason::Cancelled,
            FenceReason::Token if item.fenced => LostReason::DbUnreachable,
            FenceReason::Token => LostReason::Superseded,
        };
        self.metrics.fence_rejected(item.fence_op(), reason);
        trace::settled(&item.settle, Some(reason));
        self.metrics.lease_lost(&item.queue, lost);
        trace::lease_lost(&item.span, lost);
        item.settle.in_scope(|| match reason {
            FenceReason::Cancelled => debug!("the batch was cancelled; nothing was published"),
            FenceReason::Token => {
                warn!("the lease no longer holds the item; nothing was published");
            }
        });
    }

    fn let_go(&self, item: &Pending, reason: LostReason) {
        self.metrics.lease_lost(&item.queue, reason);
        trace::lease_lost(&item.span, reason);
        self.leases.leave(item.hold.lease(), item.hold.item().position());
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

/// A stage in the words of the other hand-ins: what has moved on is lost to its holder.
const fn staged(answer: StageAnswer) -> HandInAnswer {
    match answer {
        StageAnswer::Staged => HandInAnswer::Applied,
        StageAnswer::Moved | StageAnswer::Lost => HandInAnswer::Lost,
        StageAnswer::Cancelled => HandInAnswer::Cancelled,
    }
}
