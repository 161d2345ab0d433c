//! One attempt's life: from the hold to what is handed in, and the check in between where an item has
//! criteria.

mod check;

use std::sync::Arc;
use std::time::Duration;

use rand::Rng;
use tracing::{Instrument, debug, error};

pub use self::check::{CheckPolicy, CheckRequest, Checker, Rechecked};

use self::check::is_checked;
use crate::capacity::{InLine, Slot, Slots};
use crate::clock::Clock;
use crate::execute::{Execution, ExecutionEnd, Executor, Job};
use crate::finish::{Finished, Finisher};
use crate::leases::{Leases, StopCause, StopSignal};
use crate::model::criteria::normalize_json;
use crate::model::{
    AttemptEnding, Disposition, History, Hold, ItemRef, LeaseId, LogTail, PreviousAttempt,
    PublishedResult, QueueName, Reporter, Settlement, StopReason,
};
use crate::store::{Database, ItemInput};
use crate::telemetry::Metrics;
use crate::telemetry::labels::{
    ExecutionOutcome, LostReason, PoisonReason, RefundReason, RetryReason,
};
use crate::telemetry::trace::{self, Origins, TraceContext};

/// The pause before a begin that was not answered is told again.
const TELL_AGAIN: Duration = Duration::from_millis(500);

/// When another attempt is made, and when no more.
#[derive(Clone, Copy, Debug)]
pub struct RetryPolicy {
    /// Charged attempts after which an item fails.
    pub max_attempts: u16,
    /// First backoff; doubled with every charged attempt, full jitter.
    pub backoff_base: Duration,
    /// Longest backoff.
    pub backoff_max: Duration,
    /// Interruptions free of charge.
    pub max_interruptions: u8,
    /// Admission failures free of charge.
    pub max_admissions: u8,
}

/// What all attempts of one batch share.
pub struct BatchContext {
    /// Their queue.
    pub queue: QueueName,
    /// What runs them.
    pub executor: Arc<dyn Executor>,
    /// What checks them; none while this worker does not know the batch.
    pub checker: Option<Arc<dyn Checker>>,
    /// How long one execution may take; for display to the work.
    pub timeout: Duration,
    /// When another attempt is made.
    pub retry: RetryPolicy,
    /// Trace context of the submit.
    pub submitted: Option<TraceContext>,
}

/// Runs attempts.
pub struct Attempts {
    database: Database,
    clock: Arc<dyn Clock>,
    leases: Arc<Leases>,
    slots: Slots,
    checks: CheckPolicy,
    metrics: Arc<Metrics>,
    finisher: Finisher,
}

/// What a claim took, ready to run: an item, its slot and its input.
pub struct Taken {
    /// The right to it.
    pub hold: Hold,
    /// Its slot.
    pub slot: Slot,
    /// Its key and input; none when it could not be read.
    pub input: Option<ItemInput>,
    /// It runs when everything else ended, and is in line for that.
    pub alone: Option<InLine>,
}

impl Attempts {
    /// Attempts that hand in through `finisher`.
    #[must_use]
    pub fn new(
        database: Database,
        clock: Arc<dyn Clock>,
        leases: Arc<Leases>,
        slots: Slots,
        checks: CheckPolicy,
        metrics: Arc<Metrics>,
        finisher: Finisher,
    ) -> Self {
        Self { database, clock, leases, slots, checks, metrics, finisher }
    }

    /// Runs one attempt to its hand-in.
    ///
    /// # Cancel safety
    /// Not cancel safe: a dropped attempt keeps its item until the lease lapses. Stop it through
    /// [`Leases`].
    pub async fn run(&self, batch: &BatchContext, claim: Option<TraceContext>, taken: Taken) {
        let previous = taken.input.as_ref().and_then(|input| input.previous.as_ref());
        let span = lease_span(batch, &taken.hold, claim.as_ref(), previous);
        self.run_in(&span, batch, taken).instrument(span.clone()).await;
    }

    async fn run_in(&self, span: &tracing::Span, batch: &BatchContext, taken: Taken) {
        let Taken { hold, slot, input, alone } = taken;
        let _lapse = LapseOnPanic { leases: &self.leases, lease: hold.lease(), item: hold.item() };
        let stop = self.leases.stop_signal(hold.lease(), hold.item().position());
        let mut slot = Some(slot);
        let is_alone = alone.is_some();
        if is_alone {
            drop(slot.take());
            slot = tokio::select! {
                () = stop.token().cancelled() => None,
                all = self.slots.take_all() => all,
            };
            drop(alone);
        }
        let criteria = input.as_ref().and_then(|input| input.criteria_json.as_deref());
        let criteria = effective(criteria);
        let ended = match input {
            Some(input)
                if self.leases.begin(hold.lease(), hold.item().position())
                    && (!is_alone || self.tell_begun(&hold, &stop).await) =>
            {
                Some(self.execute(batch, span, &hold, input, criteria.clone(), &stop).await)
            }
            Some(_) | None => None,
        };
        let settlement = match (&ended, stop.cause()) {
            (_, Some(cause @ (StopCause::Cancelled | StopCause::Lost))) => {
                self.drop_hold(batch, span, &hold, cause, ended.is_some());
                return;
            }
            (Some(execution), _) => self.settle(batch, &hold, execution),
            (None, _) => {
                self.metrics.attempt_refunded(&batch.queue, RefundReason::DrainUnstarted);
                unstarted(&*self.clock, hold.history())
            }
        };
        let is_checked = is_checked(&settlement, &criteria);
        // The keeper looks at the deadline as well, and may be first.
        let fenced =
            stop.cause() == Some(StopCause::Fenced) || self.leases.is_overdue(hold.lease());
        let (queue, span) = (batch.queue.clone(), span.clone());
        let finished = Finished { hold, settlement, queue, slot, span, fenced };
        match ended {
            Some(execution) if is_checked => {
                self.stage_and_check(batch, finished, execution, criteria, &stop).await;
            }
            Some(_) | None => self.finisher.submit(finished),
        }
    }

    /// Says that an item that runs alone begins, until it is answered: what is not known to have
    /// begun is not charged when its worker dies, and would be tried for ever.
    async fn tell_begun(&self, hold: &Hold, stop: &StopSignal) -> bool {
        while !stop.token().is_cancelled() {
            match self.database.mark_begun(hold).await {
                Ok(held) => return held,
                Err(failed) => debug!(error = %failed, "the begin of an item was not answered"),
            }
            tokio::time::sleep(TELL_AGAIN).await;
        }
        false
    }

    async fn execute(
        &self,
        batch: &BatchContext,
        lease: &tracing::Span,
        hold: &Hold,
        input: ItemInput,
        criteria: Vec<String>,
        stop: &StopSignal,
    ) -> Execution {
        let process = trace::process_span(lease, &batch.queue, batch.submitted.as_ref());
        let job = Job {
            item: hold.item(),
            key: input.key,
            queue: batch.queue.clone(),
            attempt: hold.attempt(),
            retries: hold.history().retries(),
            lease: hold.lease(),
            token: hold.token(),
            input_json: input.input_json,
            criteria,
            deadline: self.clock.wall() + batch.timeout,
            // Without an exporter here, the command goes on in the trace of the submit.
            traceparent: TraceContext::of(&process)
                .as_ref()
                .or(batch.submitted.as_ref())
                .map(ToString::to_string),
            reporter: self.reporter(hold),
        };
        self.metrics.execution_started(&batch.queue);
        let began = self.clock.now();
        let execution =
            batch.executor.execute(&job, stop.token()).instrument(process.clone()).await;
        // The keeper looks at the deadline as well, and may be first.
        let stopped = execution.end == ExecutionEnd::Stopped;
        let overdue = stopped && self.leases.is_overdue(hold.lease());
        let cause = stop.cause().or(overdue.then_some(StopCause::Fenced));
        let outcome = outcome(execution.end, cause);
        trace::execution_ended(&process, outcome);
        self.metrics.execution_ended(&batch.queue, outcome, self.clock.now().since(began));
        process.in_scope(|| debug!(reason = %execution.stop_reason, "an execution ended"));
        execution
    }

    /// Where the executor's reports go: to the lease table, and with the next heartbeat from there.
    fn reporter(&self, hold: &Hold) -> Reporter {
        let leases = Arc::clone(&self.leases);
        let (lease, position) = (hold.lease(), hold.item().position());
        Reporter::new(move |report| leases.report(lease, position, report))
    }

    /// Nothing can be published any more: the item leaves without a hand-in.
    fn drop_hold(
        &self,
        batch: &BatchContext,
        span: &tracing::Span,
        hold: &Hold,
        cause: StopCause,
        ran: bool,
    ) {
        let reason = if cause == StopCause::Cancelled {
            LostReason::Cancelled
        } else {
            LostReason::Superseded
        };
        self.metrics.lease_lost(&batch.queue, reason);
        trace::lease_lost(span, reason);
        debug!(ran, ?cause, "an attempt ends without publishing");
        self.leases.leave(hold.lease(), hold.item().position());
    }

    fn settle(&self, batch: &BatchContext, hold: &Hold, execution: &Execution) -> Settlement {
        let settlement = settlement(&batch.retry, hold.history(), execution);
        if settlement.disposition == Disposition::Fail && execution.end != ExecutionEnd::Permanent {
            self.metrics.items_poisoned(&batch.queue, PoisonReason::MaxAttempts, 1);
        }
        if let Disposition::Again { ending, charged, .. } = &settlement.disposition {
            let reason = match ending {
                AttemptEnding::TimedOut => RetryReason::Timeout,
                AttemptEnding::Interrupted | AttemptEnding::Unstarted => RetryReason::Interrupted,
                AttemptEnding::Expired => RetryReason::LeaseExpired,
                AttemptEnding::Error
                | AttemptEnding::Signal
                | AttemptEnding::NotAdmitted
                | AttemptEnding::Retried => RetryReason::Error,
            };
            self.metrics.items_retried(&batch.queue, reason, 1);
            if !charged {
                let refund = match ending {
                    AttemptEnding::Interrupted => RefundReason::DrainInterrupted,
                    AttemptEnding::Unstarted => RefundReason::DrainUnstarted,
                    AttemptEnding::Error
                    | AttemptEnding::TimedOut
                    | AttemptEnding::Signal
                    | AttemptEnding::Expired
                    | AttemptEnding::NotAdmitted
                    | AttemptEnding::Retried => RefundReason::Infrastructure,
                };
                self.metrics.attempt_refunded(&batch.queue, refund);
            }
        }
        settlement
    }
}

/// The span of one hold, and what is known of the item so far.
fn lease_span(
    batch: &BatchContext,
    hold: &Hold,
    claim: Option<&TraceContext>,
    previous: Option<&PreviousAttempt>,
) -> tracing::Span {
    let origins = Origins { submitted: batch.submitted.as_ref(), claim, previous };
    let span = trace::lease_span(&batch.queue, hold, origins);
    let before = previous.map(|previous| TraceContext::of_hold(hold.item(), previous.token));
    span.in_scope(|| {
        debug!(
            previous_trace_id = before.map(|place| tracing::field::display(place.trace_id())),
            previous_ending = previous.map(|previous| previous.ending.as_str()),
            "an item is held"
        );
    });
    span
}

/// Nobody would hand in the item of an attempt that panicked, and heartbeats would renew its lease
/// for ever: it is no longer vouched for, so that its lease lapses and the reaper judges.
struct LapseOnPanic<'a> {
    leases: &'a Leases,
    lease: LeaseId,
    item: ItemRef,
}

impl Drop for LapseOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            error!(item = %self.item, lease = %self.lease, "an attempt panicked: its lease lapses");
            self.leases.leave(self.lease, self.item.position());
        }
    }
}

/// The criteria in effect, of what is stored.
fn effective(criteria_json: Option<&str>) -> Vec<String> {
    // What is no list can only have come around the submit, and asks for nothing.
    criteria_json.and_then(|json| normalize_json(json).ok().flatten()).unwrap_or_default()
}

/// How an execution counts in the metrics.
const fn outcome(end: ExecutionEnd, cause: Option<StopCause>) -> ExecutionOutcome {
    match (end, cause) {
        (_, Some(StopCause::Cancelled)) => ExecutionOutcome::Cancelled,
        (_, Some(StopCause::Lost | StopCause::Fenced)) | (ExecutionEnd::Lost, _) => {
            ExecutionOutcome::Lost
        }
        (ExecutionEnd::Succeeded, _) => ExecutionOutcome::Succeeded,
        (ExecutionEnd::TimedOut, _) => ExecutionOutcome::TimedOut,
        (ExecutionEnd::Stopped, _) => ExecutionOutcome::Interrupted,
        (
            ExecutionEnd::Retryable
            | ExecutionEnd::Permanent
            | ExecutionEnd::NotAdmitted
            | ExecutionEnd::Deferred(_),
            _,
        ) => ExecutionOutcome::Failed,
    }
}

/// What becomes of an item after an execution (design: retry policy).
fn settlement(policy: &RetryPolicy, history: History, execution: &Execution) -> Settlement {
    let disposition = match execution.end {
        ExecutionEnd::Succeeded => Disposition::Succeed,
        ExecutionEnd::Permanent => Disposition::Fail,
        ExecutionEnd::Retryable | ExecutionEnd::Lost => {
            let ending = if execution.signal.is_some() {
                AttemptEnding::Signal
            } else {
                AttemptEnding::Error
            };
            charge(policy, history, ending)
        }
        ExecutionEnd::TimedOut => charge(policy, history, AttemptEnding::TimedOut),
        ExecutionEnd::Stopped => uncharged(
            policy,
            AttemptEnding::Interrupted,
            history,
            history.plus_interruption(),
            history.interruptions() < policy.max_interruptions,
            Duration::ZERO,
        ),
        ExecutionEnd::Deferred(wait) => at_least(
            wait,
            uncharged(
                policy,
                AttemptEnding::NotAdmitted,
                history,
                history.plus_admission(),
                history.admissions() < policy.max_admissions,
                wait,
            ),
        ),
        ExecutionEnd::NotAdmitted => uncharged(
            policy,
            AttemptEnding::NotAdmitted,
            history,
            history.plus_admission(),
            history.admissions() < policy.max_admissions,
            backoff(policy, u32::from(history.admissions())),
        ),
    };
    let keeps_result = matches!(disposition, Disposition::Succeed | Disposition::Fail);
    Settlement {
        disposition,
        started_at: Some(execution.started_at),
        ended_at: execution.ended_at,
        result: if keeps_result { result(execution) } else { PublishedResult::default() },
        error: execution.error.clone(),
        stop_reason: execution.stop_reason,
        exit_status: execution.exit_status,
        signal: execution.signal,
        log: execution.log.clone(),
    }
}

/// A charged ending: another attempt, or failed when they are spent.
fn charge(policy: &RetryPolicy, history: History, ending: AttemptEnding) -> Disposition {
    let spent = u16::from(history.attempts()) + 1;
    if spent >= policy.max_attempts {
        return Disposition::Fail;
    }
    Disposition::Again {
        ending,
        charged: true,
        delay: backoff(policy, u32::from(history.attempts())),
        history: history.plus_attempt(),
    }
}

/// An ending that is free of charge while its own bound lasts, and charged beyond it.
fn uncharged(
    policy: &RetryPolicy,
    ending: AttemptEnding,
    before: History,
    after: History,
    free: bool,
    delay: Duration,
) -> Disposition {
    if free {
        Disposition::Again { ending, charged: false, delay, history: after }
    } else {
        charge(policy, before, ending)
    }
}

/// The wait that an upstream asked for holds whether the attempt was charged or not.
fn at_least(wait: Duration, disposition: Disposition) -> Disposition {
    match disposition {
        Disposition::Again { ending, charged, delay, history } => {
            Disposition::Again { ending, charged, delay: delay.max(wait), history }
        }
        Disposition::Succeed | Disposition::Fail => disposition,
    }
}

/// `base * 2^n`, at most the longest, with full jitter.
fn backoff(policy: &RetryPolicy, n: u32) -> Duration {
    let doubled = policy.backoff_base.saturating_mul(2u32.saturating_pow(n.min(31)));
    doubled.min(policy.backoff_max).mul_f64(rand::rng().random_range(0.0..=1.0))
}

/// The output as a JSON string.
fn result(execution: &Execution) -> PublishedResult {
    PublishedResult {
        json: Some(serde_json::Value::from(execution.output.as_str()).to_string()),
        truncated: execution.output_truncated,
        size_bytes: i64::try_from(execution.output_bytes).unwrap_or(i64::MAX),
    }
}

/// An item that never began: given back free of charge, to be claimed at once.
fn unstarted(clock: &dyn Clock, history: History) -> Settlement {
    Settlement {
        disposition: Disposition::Again {
            ending: AttemptEnding::Unstarted,
            charged: false,
            delay: Duration::ZERO,
            history,
        },
        started_at: None,
        ended_at: clock.wall(),
        result: PublishedResult::default(),
        error: None,
        stop_reason: StopReason::Unstarted,
        exit_status: None,
        signal: None,
        log: LogTail::default(),
    }
}

#[cfg(test)]
mod tests {
    use time::OffsetDateTime;
    use tokio::task::JoinSet;
    use tokio_util::sync::CancellationToken;
    use tokio_util::task::TaskTracker;

    use super::*;
    use crate::capacity::CheckSlots;
    use crate::finish::Grouping;
    use crate::leases::Grant;
    use crate::model::{BatchId, FencingToken, Position, WorkerId};
    use crate::store::DatabaseOptions;
    use crate::telemetry::BuildInfo;

    const POLICY: RetryPolicy = RetryPolicy {
        max_attempts: 3,
        backoff_base: Duration::from_secs(1),
        backoff_max: Duration::from_mins(5),
        max_interruptions: 5,
        max_admissions: 50,
    };

    fn execution(end: ExecutionEnd) -> Execution {
        let at = OffsetDateTime::UNIX_EPOCH;
        Execution {
            output: "a\n\"b\"".into(),
            output_bytes: 5,
            ..Execution::new(end, StopReason::Completed, at, at)
        }
    }

    fn times(n: usize, step: fn(History) -> History) -> History {
        (0..n).fold(History::FRESH, |history, _| step(history))
    }

    struct Panics;

    #[async_trait::async_trait]
    impl Executor for Panics {
        async fn execute(&self, _: &Job, _: &CancellationToken) -> Execution {
            panic!("a fault of the executor")
        }
    }

    #[tokio::test]
    async fn the_item_of_an_attempt_that_panics_is_no_longer_vouched_for() {
        let clock: Arc<dyn Clock> = Arc::new(crate::clock::SystemClock);
        let leases = Arc::new(Leases::new(Arc::clone(&clock), Duration::from_secs(45)));
        let queue: QueueName = "q".parse().unwrap();
        let item = ItemRef::new(BatchId::generate(), Position::new(0));
        let (lease, token) = (LeaseId::generate(), FencingToken::new(7));
        let asked_at = clock.now();
        let grant = Grant { batch: item.batch(), lease, token, queue: queue.clone(), asked_at };
        leases.enter(grant, [item.position()]);
        let slots = Slots::new(1);
        let claimed = Taken {
            hold: Hold::new(item, lease, token, History::FRESH),
            slot: slots.take(1).remove(0),
            input: Some(ItemInput {
                position: item.position(),
                key: "k".into(),
                input_json: "1".into(),
                criteria_json: None,
                previous: None,
            }),
            alone: None,
        };
        let batch = BatchContext {
            queue,
            executor: Arc::new(Panics),
            checker: None,
            timeout: Duration::from_secs(1),
            retry: POLICY,
            submitted: None,
        };
        let attempts = attempts(clock, Arc::clone(&leases), slots.clone());

        let mut running = JoinSet::new();
        running.spawn(async move { attempts.run(&batch, None, claimed).await });
        let ended = running.join_next().await.unwrap();

        assert!(ended.unwrap_err().is_panic());
        assert_eq!((leases.size(), slots.free()), ((0, 0), 1));
    }

    /// Attempts whose hand-ins go nowhere.
    fn attempts(clock: Arc<dyn Clock>, leases: Arc<Leases>, slots: Slots) -> Attempts {
        let nowhere = DatabaseOptions {
            url: "postgres://nowhere".into(),
            application: "test".into(),
            pool_size: 1,
            connect_timeout: Duration::ZERO,
            lock_timeout: Duration::ZERO,
            statement_timeout: Duration::ZERO,
            heartbeat_timeout: Duration::ZERO,
        };
        let metrics = Arc::new(Metrics::new([], &BuildInfo::current(1, 1)));
        let database = Database::new(nowhere).unwrap();
        let finisher = Finisher::new(
            database.clone(),
            Arc::clone(&clock),
            Arc::clone(&leases),
            Arc::clone(&metrics),
            WorkerId::generate(),
            Duration::from_mins(1),
            Grouping { delay: Duration::ZERO, items: 1, bytes: 1 },
            TaskTracker::new(),
            crate::fault::Fault::default(),
            Arc::default(),
        );
        let checks = CheckPolicy {
            slots: CheckSlots::new(1, 1, Arc::default()),
            timeout: Duration::from_secs(1),
        };
        Attempts::new(database, clock, leases, slots, checks, metrics, finisher)
    }

    #[test]
    fn a_result_is_one_json_string_without_line_breaks() {
        let settled = settlement(&POLICY, History::FRESH, &execution(ExecutionEnd::Succeeded));

        assert_eq!(settled.result.json.as_deref(), Some(r#""a\n\"b\"""#));
        assert_eq!(settled.disposition, Disposition::Succeed);
    }

    #[test]
    fn failures_are_charged_until_the_attempts_are_spent() {
        let ended = execution(ExecutionEnd::Retryable);

        let first = settlement(&POLICY, History::FRESH, &ended).disposition;
        let last = settlement(&POLICY, times(2, History::plus_attempt), &ended).disposition;

        let Disposition::Again { ending, charged, delay, history } = first else {
            panic!("{first:?}")
        };
        assert_eq!((ending, charged, history.attempts()), (AttemptEnding::Error, true, 1));
        assert!(delay <= Duration::from_secs(1));
        assert_eq!(last, Disposition::Fail);
    }

    #[test]
    fn a_permanent_failure_is_not_tried_again() {
        let settled = settlement(&POLICY, History::FRESH, &execution(ExecutionEnd::Permanent));

        assert_eq!(settled.disposition, Disposition::Fail);
    }

    #[test]
    fn interruptions_are_free_five_times_and_charged_after() {
        let ended = execution(ExecutionEnd::Stopped);
        for n in 0..5 {
            let history = times(n, History::plus_interruption);
            let settled = settlement(&POLICY, history, &ended).disposition;
            let Disposition::Again { charged, history, delay, .. } = settled else {
                panic!("{settled:?}")
            };
            assert!(!charged && history.attempts() == 0 && delay.is_zero());
        }

        let sixth = settlement(&POLICY, times(5, History::plus_interruption), &ended).disposition;

        assert!(
            matches!(sixth, Disposition::Again { charged: true, history, .. } if history.attempts() == 1)
        );
    }

    #[test]
    fn what_could_not_be_admitted_backs_off_free_of_charge() {
        let ended = execution(ExecutionEnd::NotAdmitted);

        let first = settlement(&POLICY, History::FRESH, &ended).disposition;
        let beyond = settlement(&POLICY, times(50, History::plus_admission), &ended).disposition;

        assert!(matches!(first, Disposition::Again { charged: false, .. }));
        assert!(matches!(beyond, Disposition::Again { charged: true, .. }));
    }

    #[test]
    fn backoff_doubles_and_is_bounded() {
        for n in 0..40 {
            let bound = Duration::from_secs(1u64 << n.min(9)).min(POLICY.backoff_max);
            assert!(backoff(&POLICY, n) <= bound, "{n}");
        }
    }

    #[test]
    fn a_deferral_waits_as_long_as_asked_and_is_free_up_to_its_bound() {
        let wait = Duration::from_mins(20);
        let after =
            |history| settlement(&POLICY, history, &execution(ExecutionEnd::Deferred(wait)));
        let ending = AttemptEnding::NotAdmitted;
        let history = History::FRESH.plus_admission();
        assert_eq!(
            after(History::FRESH).disposition,
            Disposition::Again { ending, charged: false, delay: wait, history }
        );
        let often = times(50, History::plus_admission);
        let Disposition::Again { charged, delay, history, .. } = after(often).disposition else {
            panic!("it has attempts left");
        };
        assert!(charged && delay >= wait, "{delay:?}");
        assert_eq!(history.attempts(), 1);
    }
}
