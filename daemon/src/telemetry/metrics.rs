//! The metrics of a worker: declared once, at zero, and recorded through typed methods.
//!
//! A lease, in a name here, is one item's hold. Everything is what this process did itself; a
//! scrape asks nobody, so it answers while the database is away.

mod families;
mod global;
mod groups;

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use prometheus::{
    Histogram, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Registry, TextEncoder,
};
use time::OffsetDateTime;

pub use self::global::{
    Collected, ControlFacts, GlobalMetrics, QueueLoad, ServerFacts, TableRows, WorkerCounts,
};

use self::families::{Families, buckets};
use self::groups::{Checks, Claiming, Database, Execution, Leases, Recovery};
use super::labels::{
    Bound, CheckErrorReason, CheckState, ClaimOutcome, ConnectionState, DbErrorClass, DbPool,
    ExecutionOutcome, FenceOp, FenceReason, ItemOutcome, LostReason, PoisonReason, ReaperOutcome,
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
    runtime_lag: Histogram,
    config_reloaded: IntGauge,
}

impl Metrics {
    /// All metrics at zero, with a `queue` label for each of `queues`; beyond [`MAX_QUEUES`] (in
    /// the order of their names) and for any other queue the label is `_other`.
    #[must_use]
    pub fn new(queues: impl IntoIterator<Item = QueueName>, build: &BuildInfo) -> Self {
        let queues = labelled(queues);
        let labels = queue_labels(&queues);
        let queue = ("queue", labels.as_slice());
        let registry = Registry::new();
        let f = Families(&registry);
        f.process();
        declare_build(&f, build);
        let metrics = Self {
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
            runtime_lag: f.histogram(
                names::RUNTIME_LAG,
                "How late a timer of a second fires in this process.",
                buckets::LATE,
            ),
            config_reloaded: f.gauge(
                names::CONFIG_RELOADED,
                "Whether the configuration was applied when it was last read.",
            ),
            samplers: Mutex::default(),
            queues,
            registry,
        };
        // This process would not be there without it.
        metrics.config_reloaded(true);
        metrics
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

    /// A sweep took an item of an expired lease back, `delay` after its expiry. What became of it is
    /// told to [`taken_back`](Self::taken_back).
    pub fn lease_expired(&self, queue: &QueueName, delay: Duration) {
        self.recovery.expired.with_label_values(&[self.queue(queue)]).inc();
        self.recovery.delay.observe(delay.as_secs_f64());
    }

    /// This became of `items` that were taken back, for `why`. Of those that failed, `poison` says
    /// whether their worker crashed too often with them.
    pub fn taken_back(
        &self,
        queue: &QueueName,
        became: RecoveryDisposition,
        poison: bool,
        items: usize,
        why: RetryReason,
    ) {
        self.recovery
            .recovered
            .with_label_values(&[self.queue(queue), became.as_str()])
            .inc_by(count(items));
        match became {
            RecoveryDisposition::Requeued => self.items_retried(queue, why, items),
            RecoveryDisposition::Failed => {
                let reason =
                    if poison { PoisonReason::MaxCrashes } else { PoisonReason::MaxAttempts };
                self.items_poisoned(queue, reason, items);
                self.items_finished(queue, ItemOutcome::Failed, items);
            }
            RecoveryDisposition::Published => {
                self.items_finished(queue, ItemOutcome::Succeeded, items);
            }
            RecoveryDisposition::Rechecked => {}
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

    /// A claim or a hand-in waited so long for the parent lock of its batch.
    pub fn parent_lock_waited(&self, waited: Duration) {
        self.claiming.lock_wait.observe(waited.as_secs_f64());
    }

    /// An item that was granted had been next in line for so long.
    pub fn item_waited(&self, queue: &QueueName, waited: Duration) {
        let queue = self.queue(queue);
        self.claiming.item_wait.with_label_values(&[queue]).observe(waited.as_secs_f64());
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

    /// `items` failed, though another attempt would have been made but for this.
    pub fn items_poisoned(&self, queue: &QueueName, reason: PoisonReason, items: usize) {
        self.execution
            .poisoned
            .with_label_values(&[self.queue(queue), reason.as_str()])
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

    /// How far the wall clock of this process is ahead of the database's, in seconds.
    pub fn db_clock_offset(&self, ahead: f64) {
        self.database.clock_offset.set(ahead);
    }

    /// Whether notifications arrive now.
    pub fn listening(&self, up: bool) {
        self.database.listener_up.set(i64::from(up));
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

    /// A timer of a second fired so late.
    pub fn runtime_lag(&self, late: Duration) {
        self.runtime_lag.observe(late.as_secs_f64());
    }

    /// The configuration was read again, and applied or not.
    pub fn config_reloaded(&self, applied: bool) {
        self.config_reloaded.set(i64::from(applied));
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

/// The queues that have a label of their own: the first ones, in the order of their names.
fn labelled(queues: impl IntoIterator<Item = QueueName>) -> BTreeSet<QueueName> {
    let queues: BTreeSet<QueueName> = queues.into_iter().collect();
    if queues.len() > MAX_QUEUES {
        tracing::warn!(queues = queues.len(), "only {MAX_QUEUES} queues have metrics of their own");
    }
    queues.into_iter().take(MAX_QUEUES).collect()
}

/// Every value of the label `queue`.
fn queue_labels(queues: &BTreeSet<QueueName>) -> Vec<&str> {
    queues.iter().map(QueueName::as_str).chain([names::OTHER_QUEUE]).collect()
}

fn declare_build(f: &Families<'_>, build: &BuildInfo) {
    let supported = f.gauges(
        names::SCHEMA_SUPPORTED,
        "The schema versions this program works with.",
        &[("bound", Bound::VALUES)],
    );
    for (bound, version) in [(Bound::Min, build.schema_min), (Bound::Max, build.schema_max)] {
        supported.with_label_values(&[bound.as_str()]).set(version);
    }
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
