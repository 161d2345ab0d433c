//! The metrics of a worker: declared once, at zero, and recorded through typed methods.
//!
//! A lease, in a name here, is one item's hold. Everything is what this process did itself; a
//! scrape asks nobody, so it answers while the database is away.

mod families;
mod groups;

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use prometheus::{IntCounter, IntCounterVec, IntGaugeVec, Registry, TextEncoder};
use time::OffsetDateTime;

use self::families::Families;
use self::groups::{Checks, Claiming, Database, Execution, Leases, Recovery};
use super::labels::{
    CheckErrorReason, CheckState, ClaimOutcome, ConnectionState, DbErrorClass, DbPool,
    ExecutionOutcome, FenceOp, FenceReason, ItemOutcome, LostReason, ReaperOutcome,
    RecoveryDisposition, RefundReason, ReleaseReason, RenewalOutcome, RetryReason, SelfFenceReason,
    SlotKind, SlotState, WakeupSource,
};
use super::names;
use crate::model::{QueueName, VerdictClass, WorkerState};

/// Most queues with a label of their own; the rest count as `_other`.
pub const MAX_QUEUES: usize = 50;

/// What `holdfast_build_info` says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BuildInfo {
    /// Version of the program.
    pub version: String,
    /// The commit it was built from, or `unknown`.
    pub revision: String,
    /// The oldest schema version it works with.
    pub schema_min: i64,
    /// The newest schema version it works with.
    pub schema_max: i64,
}

impl BuildInfo {
    /// This program, which works with schemas from `schema_min` to `schema_max`. The commit is
    /// taken from `HOLDFAST_REVISION` at build time.
    #[must_use]
    pub fn current(schema_min: i64, schema_max: i64) -> Self {
        let revision = option_env!("HOLDFAST_REVISION").unwrap_or("unknown");
        Self {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            revision: revision.to_owned(),
            schema_min,
            schema_max,
        }
    }
}

/// How a connection pool is used at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolUse {
    /// Connections lent to callers.
    pub used: usize,
    /// Connections open and free.
    pub idle: usize,
    /// Callers waiting for one.
    pub pending: usize,
    /// Most connections it may open.
    pub limit: usize,
}

/// How long after its planned time a renewal was sent, and how long it took.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RenewalTiming {
    /// From the planned time to the sending.
    pub lateness: Duration,
    /// From the sending to the answer.
    pub took: Duration,
}

type Sampler = Box<dyn Fn(&Metrics) + Send + Sync>;

/// Every metric of this process, in a registry of its own.
pub struct Metrics {
    registry: Registry,
    queues: BTreeSet<QueueName>,
    samplers: Mutex<Vec<Sampler>>,
    leases: Leases,
    recovery: Recovery,
    claiming: Claiming,
    execution: Execution,
    checks: Checks,
    database: Database,
    telemetry_dropped: IntCounterVec,
    worker_state: IntGaugeVec,
}

impl Metrics {
    /// All metrics at zero, with a `queue` label for each of `queues`; beyond [`MAX_QUEUES`] (in
    /// the order of their names) and for any other queue the label is `_other`.
    #[must_use]
    pub fn new(queues: impl IntoIterator<Item = QueueName>, build: &BuildInfo) -> Self {
        let mut queues: BTreeSet<QueueName> = queues.into_iter().collect();
        if queues.len() > MAX_QUEUES {
            tracing::warn!(
                queues = queues.len(),
                "only {MAX_QUEUES} queues have metrics of their own"
            );
            queues = queues.into_iter().take(MAX_QUEUES).collect();
        }
        let labels: Vec<&str> =
            queues.iter().map(QueueName::as_str).chain([names::OTHER_QUEUE]).collect();
        let queue = ("queue", labels.as_slice());
        let registry = Registry::new();
        let f = Families(&registry);
        f.process();
        declare_build_info(&f, build);
        Self {
            leases: Leases::declare(&f, queue),
            recovery: Recovery::declare(&f, queue),
            claiming: Claiming::declare(&f, queue),
            execution: Execution::declare(&f, queue),
            checks: Checks::declare(&f, queue),
            database: Database::declare(&f),
            telemetry_dropped: f.counters(
                names::TELEMETRY_DROPPED,
                "Telemetry thrown away: the queue to the collector was full, or it took none.",
                &[("signal", &[SPANS])],
            ),
            worker_state: f.gauges(
                names::WORKER_STATE,
                "1 for the state this worker is in.",
                &[("state", &WORKER_STATES)],
            ),
            samplers: Mutex::default(),
            queues,
            registry,
        }
    }

    fn queue<'a>(&'a self, queue: &'a QueueName) -> &'a str {
        if self.queues.contains(queue) { queue.as_str() } else { names::OTHER_QUEUE }
    }

    /// A claim has granted `items`.
    pub fn leases_granted(&self, queue: &QueueName, items: usize) {
        let queue = self.queue(queue);
        self.leases.granted.with_label_values(&[queue]).inc_by(count(items));
        self.leases.held.with_label_values(&[queue]).add(level(items));
    }

    /// An item was given up. Every granted item ends in one call of this or of
    /// [`lease_released`](Self::lease_released); the items held are the difference.
    pub fn lease_lost(&self, queue: &QueueName, reason: LostReason) {
        let queue = self.queue(queue);
        self.leases.lost.with_label_values(&[queue, reason.as_str()]).inc();
        self.leases.held.with_label_values(&[queue]).dec();
    }

    /// An item left its lease on purpose: handed in, whether it ended or waits for another attempt,
    /// or given back.
    pub fn lease_released(&self, queue: &QueueName, reason: ReleaseReason) {
        let queue = self.queue(queue);
        self.leases.released.with_label_values(&[queue, reason.as_str()]).inc();
        self.leases.held.with_label_values(&[queue]).dec();
    }

    /// Renewing one lease ended. `left` is the share of the lease, as it was before the renewal, that
    /// was still left when it committed: 0 to 1, about two thirds when all is well; none when it did
    /// not commit.
    pub fn lease_renewal(&self, queue: &QueueName, outcome: RenewalOutcome, left: Option<f64>) {
        let queue = self.queue(queue);
        self.leases.renewals.with_label_values(&[queue, outcome.as_str()]).inc();
        if let Some(left) = left {
            self.leases.renewal_margin.with_label_values(&[queue]).observe(left);
        }
    }

    /// One renewal statement, which covers every lease of the worker, was answered.
    pub fn renewal_statement(&self, timing: RenewalTiming) {
        self.leases.renewal_lateness.observe(timing.lateness.as_secs_f64());
        self.leases.renewal_duration.observe(timing.took.as_secs_f64());
    }

    /// Counts the spans that no collector got.
    #[must_use]
    pub fn spans_dropped(&self) -> IntCounter {
        self.telemetry_dropped.with_label_values(&[SPANS])
    }

    /// The worker stopped its own work.
    pub fn self_fenced(&self, reason: SelfFenceReason) {
        self.leases.self_fences.with_label_values(&[reason.as_str()]).inc();
    }

    /// The fence refused a write.
    pub fn fence_rejected(&self, op: FenceOp, reason: FenceReason) {
        self.leases.fence_rejections.with_label_values(&[op.as_str(), reason.as_str()]).inc();
    }

    /// An attempt was not charged.
    pub fn attempt_refunded(&self, queue: &QueueName, reason: RefundReason) {
        self.leases.attempt_refunds.with_label_values(&[self.queue(queue), reason.as_str()]).inc();
    }

    /// A sweep took `items` of an expired lease back, `delay` after its expiry, and did the same
    /// with all of them. Call it once per lease and disposition.
    pub fn leases_recovered(
        &self,
        queue: &QueueName,
        disposition: RecoveryDisposition,
        items: usize,
        delay: Duration,
    ) {
        let queue = self.queue(queue);
        self.recovery.expired.with_label_values(&[queue]).inc_by(count(items));
        self.recovery
            .recovered
            .with_label_values(&[queue, disposition.as_str()])
            .inc_by(count(items));
        for _ in 0..items {
            self.recovery.delay.observe(delay.as_secs_f64());
        }
    }

    /// A sweep of the reaper ended at `now`.
    pub fn reaper_run(&self, outcome: ReaperOutcome, now: OffsetDateTime) {
        self.recovery.runs.with_label_values(&[outcome.as_str()]).inc();
        if outcome == ReaperOutcome::Ok {
            self.recovery.last_success.set(now.unix_timestamp());
        }
    }

    /// A claim call ended. A throttled one is counted, not timed.
    pub fn claim(&self, queue: &QueueName, outcome: ClaimOutcome, took: Duration) {
        self.claiming.claims.with_label_values(&[self.queue(queue), outcome.as_str()]).inc();
        if outcome != ClaimOutcome::Throttled {
            self.claiming
                .duration
                .with_label_values(&[outcome.as_str()])
                .observe(took.as_secs_f64());
        }
    }

    /// The claim loop woke up.
    pub fn woken(&self, source: WakeupSource) {
        self.claiming.wakeups.with_label_values(&[source.as_str()]).inc();
    }

    /// How the slots of a budget are used now.
    pub fn slots(&self, kind: SlotKind, busy: usize, idle: usize) {
        for (state, slots) in [(SlotState::Busy, busy), (SlotState::Idle, idle)] {
            self.claiming
                .slots
                .with_label_values(&[kind.as_str(), state.as_str()])
                .set(level(slots));
        }
    }

    /// An execution began. It ends in one call of [`execution_ended`](Self::execution_ended).
    pub fn execution_started(&self, queue: &QueueName) {
        let queue = self.queue(queue);
        self.execution.started.with_label_values(&[queue]).inc();
        self.execution.running.with_label_values(&[queue]).inc();
    }

    /// An execution ended.
    pub fn execution_ended(&self, queue: &QueueName, outcome: ExecutionOutcome, took: Duration) {
        let queue = self.queue(queue);
        self.execution.running.with_label_values(&[queue]).dec();
        self.execution.ended.with_label_values(&[queue, outcome.as_str()]).inc();
        self.execution.duration.with_label_values(&[queue]).observe(took.as_secs_f64());
    }

    /// Items were put back for another attempt.
    pub fn items_retried(&self, queue: &QueueName, reason: RetryReason, items: usize) {
        self.execution
            .retries
            .with_label_values(&[self.queue(queue), reason.as_str()])
            .inc_by(count(items));
    }

    /// The end of `items` was committed.
    pub fn items_finished(&self, queue: &QueueName, outcome: ItemOutcome, items: usize) {
        self.execution
            .finished
            .with_label_values(&[self.queue(queue), outcome.as_str()])
            .inc_by(count(items));
    }

    /// A checked item was published.
    pub fn check_published(&self, queue: &QueueName, class: VerdictClass) {
        self.checks.published.with_label_values(&[self.queue(queue), class.as_str()]).inc();
    }

    /// A check gave no verdict.
    pub fn check_failed(&self, reason: CheckErrorReason) {
        self.checks.errors.with_label_values(&[reason.as_str()]).inc();
    }

    /// A check began, so long after its result was stored.
    pub fn check_waited(&self, waited: Duration) {
        self.checks.wait.observe(waited.as_secs_f64());
    }

    /// A check ended, or is no longer waited for.
    pub fn check_ended(&self, took: Duration) {
        self.checks.duration.observe(took.as_secs_f64());
    }

    /// How many items wait for their check, and how many are checked now.
    pub fn checks_pending(&self, waiting: usize, running: usize) {
        for (state, items) in [(CheckState::Waiting, waiting), (CheckState::Running, running)] {
            self.checks.pending.with_label_values(&[state.as_str()]).set(level(items));
        }
    }

    /// A batch of `items` was accepted.
    pub fn items_submitted(&self, queue: &QueueName, items: usize) {
        self.execution.submitted.with_label_values(&[self.queue(queue)]).inc_by(count(items));
    }

    /// Whether the database answered when last asked.
    pub fn db_up(&self, up: bool) {
        self.database.up.set(i64::from(up));
    }

    /// How a pool is used now.
    pub fn db_pool(&self, pool: DbPool, now: PoolUse) {
        let pool = pool.as_str();
        for (state, n) in [(ConnectionState::Used, now.used), (ConnectionState::Idle, now.idle)] {
            self.database.pool_connections.with_label_values(&[pool, state.as_str()]).set(level(n));
        }
        self.database.pool_limit.with_label_values(&[pool]).set(level(now.limit));
        self.database.pool_pending.with_label_values(&[pool]).set(level(now.pending));
    }

    /// The database answered with an error, or not at all.
    pub fn db_error(&self, class: DbErrorClass) {
        self.database.errors.with_label_values(&[class.as_str()]).inc();
    }

    /// One transaction handed `items` in.
    pub fn finish_group(&self, items: usize, took: Duration) {
        // A group holds at most a few hundred items: exact as a float.
        self.database
            .finish_group_items
            .observe(f64::from(u32::try_from(items).unwrap_or(u32::MAX)));
        self.database.finish_duration.observe(took.as_secs_f64());
    }

    /// The state the worker is in now.
    pub fn worker_state(&self, now: WorkerState) {
        for state in WORKER_STATES {
            self.worker_state.with_label_values(&[state]).set(i64::from(state == now.as_str()));
        }
    }

    /// Has `sample` set gauges from what they describe, at every scrape. It must not wait.
    pub fn at_scrape(&self, sample: impl Fn(&Self) + Send + Sync + 'static) {
        self.samplers.lock().unwrap_or_else(PoisonError::into_inner).push(Box::new(sample));
    }

    /// Everything, in the text format 0.0.4.
    ///
    /// # Errors
    /// A metric is malformed, which the tests rule out.
    pub fn encode(&self) -> Result<String, prometheus::Error> {
        for sample in self.samplers.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            sample(self);
        }
        TextEncoder::new().encode_to_string(&self.registry.gather())
    }
}

/// The states a scrape can meet: every one but `exited`.
/// The one kind of telemetry that can be thrown away: logs and metrics wait for nobody.
const SPANS: &str = "spans";

const WORKER_STATES: [&str; 7] = [
    WorkerState::Starting.as_str(),
    WorkerState::Running.as_str(),
    WorkerState::Quiet.as_str(),
    WorkerState::Draining.as_str(),
    WorkerState::Cancelling.as_str(),
    WorkerState::Releasing.as_str(),
    WorkerState::Fenced.as_str(),
];

fn declare_build_info(f: &Families<'_>, build: &BuildInfo) {
    let (min, max) = (build.schema_min.to_string(), build.schema_max.to_string());
    let values = [build.version.as_str(), build.revision.as_str(), min.as_str(), max.as_str()];
    f.gauges(
        names::BUILD_INFO,
        "Constant 1, with the program that runs and the schema versions it works with.",
        &[
            ("version", &values[0..1]),
            ("revision", &values[1..2]),
            ("schema_min", &values[2..3]),
            ("schema_max", &values[3..4]),
        ],
    )
    .with_label_values(&values)
    .set(1);
}

fn count(items: usize) -> u64 {
    u64::try_from(items).unwrap_or(u64::MAX)
}

fn level(items: usize) -> i64 {
    i64::try_from(items).unwrap_or(i64::MAX)
}

impl std::fmt::Debug for Metrics {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Metrics").field("queues", &self.queues).finish_non_exhaustive()
    }
}
