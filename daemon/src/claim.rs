//! Slot first, then claim: chooses batches fairly and takes as much as there are free slots.

use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use rand::Rng;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use tracing::{Instrument, debug, warn};

use crate::capacity::{InLine, Slot, Slots};
use crate::clock::{BootInstant, Clock};
use crate::leases::{Grant, Leases};
use crate::model::{BatchId, Hold, LeaseId, QueueName, WorkerId};
use crate::store::{Claim, ClaimAnswer, ClaimRequest, Database, FlightError, RankedBatch};
use crate::telemetry::Metrics;
use crate::telemetry::labels::{ClaimOutcome, WakeupSource};
use crate::telemetry::trace::{self, TraceContext};

/// How batches are chosen and how much is claimed.
#[derive(Clone, Copy, Debug)]
pub struct ClaimPolicy {
    /// A lease's length.
    pub ttl: Duration,
    /// Items of one claim at most.
    pub most: usize,
    /// How long a ranking is used at most while there is work.
    pub rank_interval: Duration,
    /// How many batches a ranking keeps.
    pub candidates: usize,
    /// How long a batch waits for one more step of priority.
    pub ageing: Duration,
    /// How often to look for work without being told.
    pub poll_interval: Duration,
    /// The same while notifications arrive.
    pub notified_poll_interval: Duration,
}

/// Items that a claim took, each with its slot.
pub struct Granted {
    /// Their batch.
    pub batch: BatchId,
    /// Its queue.
    pub queue: QueueName,
    /// The holds, each with a slot.
    pub items: Vec<(Hold, Slot)>,
    /// The one item has taken its worker down before: it runs when the others ended.
    pub alone: Option<InLine>,
    /// Trace context of the claim.
    pub claim: Option<TraceContext>,
}

/// What may wake the claim loop.
#[derive(Debug, Default)]
pub struct Wakeups {
    /// Another process told of work, or heartbeats are answered again.
    pub told: Arc<Notify>,
    /// A hand-in of this process was answered.
    pub settled: Arc<Notify>,
    /// Whether notifications arrive.
    pub listening: std::sync::atomic::AtomicBool,
}

/// The claim loop of one worker.
pub struct Claimer {
    database: Database,
    clock: Arc<dyn Clock>,
    leases: Arc<Leases>,
    slots: Slots,
    metrics: Arc<Metrics>,
    wakeups: Arc<Wakeups>,
    worker: WorkerId,
    queue_names: Vec<String>,
    policy: ClaimPolicy,
    ranking: Vec<RankedBatch>,
    ranked_at: Option<BootInstant>,
    held_off: HashMap<BatchId, BootInstant>,
    /// Until when nothing is claimed at all, after a failover (F7).
    settles_at: Option<BootInstant>,
}

/// What one call of a claim came to.
enum Came {
    /// So many items.
    Granted(i64),
    /// The batch has nothing to give for now.
    Nothing,
    /// It has, but not at this moment.
    NothingYet,
    Failed,
}

impl Claimer {
    /// A claimer for these queues.
    #[expect(clippy::too_many_arguments, reason = "wiring, called once")]
    #[must_use]
    pub fn new(
        database: Database,
        clock: Arc<dyn Clock>,
        leases: Arc<Leases>,
        slots: Slots,
        metrics: Arc<Metrics>,
        wakeups: Arc<Wakeups>,
        worker: WorkerId,
        queues: &[QueueName],
        policy: ClaimPolicy,
    ) -> Self {
        Self {
            database,
            clock,
            leases,
            slots,
            metrics,
            wakeups,
            worker,
            queue_names: queues.iter().map(ToString::to_string).collect(),
            policy,
            ranking: Vec::new(),
            ranked_at: None,
            held_off: HashMap::new(),
            settles_at: None,
        }
    }

    /// Claims until `stop`. `may_claim` says whether this is the time for it; `granted` gets what
    /// was taken; `lost` gets claims whose answer never came (F6).
    pub async fn run(
        mut self,
        stop: &CancellationToken,
        may_claim: impl Fn() -> bool,
        granted: impl Fn(Granted),
        lost: impl Fn(BatchId, LeaseId),
    ) {
        while !stop.is_cancelled() {
            let took = if may_claim() && self.slots.free() > 0 && self.settles_in().is_none() {
                self.round(stop, &granted, &lost).await
            } else {
                false
            };
            if !took {
                self.wait(stop).await;
            }
        }
    }

    /// Claims once from each of the ranked batches, while slots are free; whether anything was taken.
    async fn round(
        &mut self,
        stop: &CancellationToken,
        granted: &impl Fn(Granted),
        lost: &impl Fn(BatchId, LeaseId),
    ) -> bool {
        self.rank_if_stale().await;
        fairest_first(&mut self.ranking);
        let now = self.clock.now();
        let mut turns: Vec<RankedBatch> = self.ranking.clone();
        turns.retain(|batch| self.held_off.get(&batch.id).is_none_or(|until| now >= *until));
        let mut took = false;
        for (turn, batch) in turns.iter().enumerate() {
            let free = self.slots.free();
            if free == 0 || stop.is_cancelled() {
                break;
            }
            let want = share(free, &turns[turn..]).min(self.policy.most);
            match self.claim(batch, want, granted, lost).await {
                Came::Granted(items) => {
                    took = true;
                    self.note_served(batch, items);
                }
                Came::Nothing => self.ranking.retain(|ranked| ranked.id != batch.id),
                Came::NothingYet => {}
                Came::Failed => break,
            }
        }
        took
    }

    /// Between two rankings the counts of what is held rise with what is claimed, so that batches
    /// and owners take turns.
    fn note_served(&mut self, batch: &RankedBatch, items: i64) {
        for ranked in &mut self.ranking {
            if ranked.id == batch.id {
                ranked.held += items;
            }
            if ranked.owner == batch.owner {
                ranked.held_by_owner += items;
            }
        }
    }

    async fn rank_if_stale(&mut self) {
        let now = self.clock.now();
        let fresh = self.ranked_at.is_some_and(|at| now.since(at) < self.policy.rank_interval);
        if fresh && !self.ranking.is_empty() {
            return;
        }
        // A ranking that came up empty is not repeated in a hurry.
        if fresh && self.ranked_at.is_some_and(|at| now.since(at) < Duration::from_millis(20)) {
            return;
        }
        self.held_off.retain(|_, until| now < *until);
        let except: Vec<BatchId> = self.held_off.keys().copied().collect();
        let ranked = self
            .database
            .rank_batches(&self.queue_names, &except, self.policy.ageing, self.policy.candidates)
            .await;
        match ranked {
            Ok(ranking) => {
                self.ranking = ranking;
                self.ranked_at = Some(now);
            }
            Err(failed) => {
                self.metrics.db_error(failed.class());
                debug!(error = %failed, "batches could not be ranked");
                self.ranking.clear();
            }
        }
    }

    async fn claim(
        &mut self,
        batch: &RankedBatch,
        want: usize,
        granted: &impl Fn(Granted),
        lost: &impl Fn(BatchId, LeaseId),
    ) -> Came {
        let Ok(queue) = batch.queue.parse::<QueueName>() else { return Came::Nothing };
        let slots = self.slots.take(want);
        let Some(want) = u32::try_from(slots.len()).ok().filter(|want| *want > 0) else {
            return Came::Failed;
        };
        let span = trace::claim_span(&queue, self.worker);
        let context = TraceContext::of(&span);
        let request = ClaimRequest {
            batch: batch.id,
            lease: LeaseId::generate(),
            worker: self.worker,
            want,
            ttl: self.policy.ttl,
            traceparent: context.as_ref().map(ToString::to_string),
        };
        // Trust counts from before the question (F5).
        let asked_at = self.clock.now();
        let answer = self.database.claim(&request).instrument(span.clone()).await;
        let took = self.clock.now().since(asked_at);
        match answer {
            Ok(Claim::Granted { holds, alone, waited }) => {
                let count = holds.len();
                for wait in waited {
                    self.metrics.item_waited(&queue, wait);
                }
                self.metrics.claim(&queue, ClaimOutcome::Granted, took);
                self.metrics.leases_granted(&queue, count);
                trace::item_count(&span, count);
                let first = holds.first().expect("a granted claim holds at least one item");
                self.leases.enter(
                    Grant {
                        batch: batch.id,
                        lease: request.lease,
                        token: first.token(),
                        queue: queue.clone(),
                        asked_at,
                    },
                    holds.iter().map(|hold| hold.item().position()),
                );
                let items = holds.into_iter().zip(slots).collect();
                let alone = alone.then(|| self.slots.line_up());
                granted(Granted { batch: batch.id, queue, items, alone, claim: context });
                Came::Granted(i64::try_from(count).unwrap_or(i64::MAX))
            }
            Ok(Claim::Nothing(answer, ready_in)) => {
                trace::uneventful(&span);
                self.metrics.claim(&queue, outcome(answer), took);
                self.hold_off(batch.id, answer, ready_in)
            }
            Err(failed) => {
                self.metrics.claim(&queue, ClaimOutcome::Error, took);
                self.metrics.db_error(failed.class());
                trace::failed(&span, "database");
                self.claim_failed(&request, &failed, lost);
                Came::Failed
            }
        }
    }

    fn claim_failed(
        &mut self,
        request: &ClaimRequest,
        failed: &FlightError,
        lost: &impl Fn(BatchId, LeaseId),
    ) {
        if failed.is_unknown() {
            warn!(batch = %request.batch, lease = %request.lease, error = %failed, "a claim was not answered: giving its lease back");
            lost(request.batch, request.lease);
        } else {
            debug!(batch = %request.batch, error = %failed, "a claim failed");
        }
        let pause = jittered(Duration::from_millis(500));
        self.held_off.insert(request.batch, self.clock.now() + pause);
    }

    /// When to ask a batch again that had nothing, and whether it keeps its place in the ranking.
    fn hold_off(
        &mut self,
        batch: BatchId,
        answer: ClaimAnswer,
        ready_in: Option<Duration>,
    ) -> Came {
        let poll = self.policy.poll_interval;
        let (pause, came) = match answer {
            ClaimAnswer::Contended => (jittered(Duration::from_millis(8)), Came::NothingYet),
            // Ended by what others finish; this process's own finish asks again at once.
            ClaimAnswer::Capped | ClaimAnswer::Window | ClaimAnswer::Backlog => {
                (jittered(poll.min(Duration::from_millis(250))), Came::NothingYet)
            }
            ClaimAnswer::Empty | ClaimAnswer::NotBefore => {
                (ready_in.map_or(poll, |ready| ready.min(poll)), Came::Nothing)
            }
            ClaimAnswer::Settling => {
                self.settles_at = Some(self.clock.now() + ready_in.unwrap_or(poll));
                return Came::Failed;
            }
            ClaimAnswer::Closed | ClaimAnswer::ClaimsOff | ClaimAnswer::Unknown => {
                (poll, Came::Nothing)
            }
        };
        self.held_off.insert(batch, self.clock.now() + pause);
        came
    }

    /// For how long claims wait yet after a failover (F7): of every batch, and by this clock, for the
    /// database's may be set meanwhile.
    fn settles_in(&mut self) -> Option<Duration> {
        let now = self.clock.now();
        self.settles_at = self.settles_at.filter(|until| now < *until);
        self.settles_at.map(|until| until.since(now))
    }

    /// When the next look is worth while without being told: a hold-off ends, or an item's time
    /// comes.
    async fn until_due(&mut self) -> Option<Duration> {
        if self.slots.free() == 0 {
            return None;
        }
        if let Some(settles_in) = self.settles_in() {
            return Some(settles_in);
        }
        let now = self.clock.now();
        self.held_off.retain(|_, until| now < *until);
        let held_off = self.held_off.values().map(|until| until.since(now)).min();
        if !self.ranking.is_empty() {
            return held_off;
        }
        let due = self.database.next_due(&self.queue_names).await.ok().flatten();
        held_off.into_iter().chain(due).min()
    }

    /// Waits until a look may be worth while.
    async fn wait(&mut self, stop: &CancellationToken) {
        let poll = if self.wakeups.listening.load(std::sync::atomic::Ordering::Relaxed) {
            self.policy.notified_poll_interval
        } else {
            self.policy.poll_interval
        };
        let pause = self.until_due().await.map_or(poll, |due| due.min(poll));
        // A little late rather than a little early: early finds nothing and asks again.
        let pause = pause.max(Duration::from_millis(1)).mul_f64(rand::rng().random_range(1.0..1.1));
        let wakeups = Arc::clone(&self.wakeups);
        tokio::select! {
            () = stop.cancelled() => return,
            () = wakeups.told.notified() => {
                self.metrics.woken(WakeupSource::Notify);
                self.held_off.clear();
                self.ranking.clear();
            }
            () = wakeups.settled.notified() => {
                self.metrics.woken(WakeupSource::Local);
                self.held_off.clear();
            }
            () = self.slots.freed() => self.metrics.woken(WakeupSource::Local),
            () = tokio::time::sleep(pause) => self.metrics.woken(WakeupSource::Poll),
        }
        // Nothing in it was worth while: it is asked for anew, however young it is.
        if self.ranking.is_empty() {
            self.ranked_at = None;
        }
    }
}

/// Higher ranks first, then the owner, then the batch with the fewest held.
fn fairest_first(ranking: &mut [RankedBatch]) {
    ranking.sort_by_key(|batch| (Reverse(batch.rank), batch.held_by_owner, batch.held));
}

/// How many of the free slots the first of these batches may take: its share among the owners of
/// its rank, and there among their batches. A lower rank gets what they leave.
fn share(free: usize, turns: &[RankedBatch]) -> usize {
    let Some(first) = turns.first() else { return 0 };
    let equals = turns.iter().take_while(|batch| batch.rank == first.rank);
    let owners: HashSet<&str> = equals.clone().map(|batch| batch.owner.as_str()).collect();
    let of_owner = equals.filter(|batch| batch.owner == first.owner).count();
    free.div_ceil(owners.len()).div_ceil(of_owner)
}

const fn outcome(answer: ClaimAnswer) -> ClaimOutcome {
    match answer {
        ClaimAnswer::Empty
        | ClaimAnswer::NotBefore
        | ClaimAnswer::Closed
        | ClaimAnswer::Unknown => ClaimOutcome::Empty,
        ClaimAnswer::Contended => ClaimOutcome::Contended,
        ClaimAnswer::Window
        | ClaimAnswer::Capped
        | ClaimAnswer::Backlog
        | ClaimAnswer::ClaimsOff
        | ClaimAnswer::Settling => ClaimOutcome::Throttled,
    }
}

fn jittered(pause: Duration) -> Duration {
    pause.mul_f64(rand::rng().random_range(0.25..1.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ranked(owner: &str, rank: i32, held: i64, held_by_owner: i64) -> RankedBatch {
        let (id, queue) = (BatchId::generate(), "q".to_owned());
        RankedBatch { id, queue, owner: owner.to_owned(), rank, held, held_by_owner }
    }

    #[test]
    fn the_owner_with_the_fewest_held_comes_first_within_a_rank() {
        let (urgent, idle) = (ranked("a", 1, 9, 9), ranked("b", 0, 0, 0));
        let (busy, busier) = (ranked("a", 0, 2, 9), ranked("a", 0, 7, 9));
        let mut ranking = [busier.clone(), idle.clone(), busy.clone(), urgent.clone()];

        fairest_first(&mut ranking);

        assert_eq!(ranking, [urgent, idle, busy, busier]);
    }

    #[test]
    fn free_slots_are_shared_among_owners_and_then_among_their_batches() {
        let one = ranked("one", 0, 0, 0);
        let turns = [one.clone(), ranked("many", 0, 0, 0), ranked("many", 0, 0, 0)];

        assert_eq!(share(16, &turns), 8);
        assert_eq!(share(8, &turns[1..]), 4);
        assert_eq!(share(4, &turns[2..]), 4);
        assert_eq!(share(1, &turns), 1);
        // Those of a lower rank have no share, only what is left.
        assert_eq!(share(16, &[ranked("one", 1, 0, 0), one]), 16);
    }
}
