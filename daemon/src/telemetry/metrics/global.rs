//! What the exporter publishes of the whole database; read it with `max`, never with `sum` over
//! instances.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use prometheus::{Gauge, GaugeVec, IntCounterVec, IntGauge, IntGaugeVec, Registry, TextEncoder};
use time::OffsetDateTime;

use super::families::{Axis, Families};
use super::groups::DB_UP_HELP;
use super::{BuildInfo, declare_build, labelled, queue_labels};
use crate::clock::BootInstant;
use crate::model::QueueName;
use crate::telemetry::labels::{BatchState, Collector, ItemState, Table, WorkerPresence};
use crate::telemetry::names;

/// What a queue has to do, and what is held of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueLoad {
    /// Items beyond the live window, before their time, or of paused batches.
    pub pending: i64,
    /// Items that may be claimed, or are between two attempts.
    pub queued: i64,
    /// Items held by workers and not under check.
    pub executing: i64,
    /// Of these, the ones whose execution has begun.
    pub running: i64,
    /// Items under check.
    pub checking: i64,
    /// Items under leases that have not expired.
    pub active: i64,
    /// Items under leases that have expired.
    pub overdue: i64,
    /// Batches that are open.
    pub open: i64,
    /// Batches that are paused.
    pub paused: i64,
    /// Since when the first item that may be claimed is next in line.
    pub ready_since: Option<OffsetDateTime>,
    /// Since when the oldest item under check is.
    pub checking_since: Option<OffsetDateTime>,
}

impl QueueLoad {
    /// Both together.
    fn plus(self, other: Self) -> Self {
        let earlier = |a: Option<OffsetDateTime>, b| a.into_iter().chain(b).min();
        Self {
            pending: self.pending + other.pending,
            queued: self.queued + other.queued,
            executing: self.executing + other.executing,
            running: self.running + other.running,
            checking: self.checking + other.checking,
            active: self.active + other.active,
            overdue: self.overdue + other.overdue,
            open: self.open + other.open,
            paused: self.paused + other.paused,
            ready_since: earlier(self.ready_since, other.ready_since),
            checking_since: earlier(self.checking_since, other.checking_since),
        }
    }
}

/// Workers that have not ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorkerCounts {
    /// They work.
    pub live: i64,
    /// They end.
    pub draining: i64,
    /// They have sent no heartbeat for longer than their lease.
    pub stale: i64,
}

/// The switches and the schema.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ControlFacts {
    /// Whether claims are allowed.
    pub claims_enabled: bool,
    /// The epoch of fencing tokens.
    pub epoch: i64,
    /// The version of the schema.
    pub schema_version: i64,
}

/// Rows of one table, by its statistics.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TableRows {
    /// Its name.
    pub table: String,
    /// Rows that are there.
    pub live: i64,
    /// Rows that are not, and wait for vacuum.
    pub dead: i64,
}

/// The server.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ServerFacts {
    /// Its timeline.
    pub timeline: i64,
    /// When the oldest transaction that is open in this database began; none when no other is.
    pub oldest_transaction: Option<OffsetDateTime>,
    /// How full the queue of notifications is, 0 to 1.
    pub notify_queue_usage: f64,
}

/// One part of what is collected.
#[derive(Clone, Debug)]
pub enum Collected {
    /// What queues have to do, by their names.
    Queues(Vec<(String, QueueLoad)>),
    /// The workers.
    Workers(WorkerCounts),
    /// The switches and the schema.
    Control(ControlFacts),
    /// The tables.
    Tables(Vec<TableRows>),
    /// The server.
    Server(ServerFacts),
}

impl Collected {
    /// Which part it is.
    #[must_use]
    pub const fn collector(&self) -> Collector {
        match self {
            Self::Queues(_) => Collector::Queues,
            Self::Workers(_) => Collector::Workers,
            Self::Control(_) => Collector::Control,
            Self::Tables(_) => Collector::Tables,
            Self::Server(_) => Collector::Server,
        }
    }
}

/// The metrics of the exporter: gauges of the whole database, as they were last collected.
///
/// A part that was not collected for too long is left out of the scrape: nobody knows it any more, and
/// an old number looks like any other. What says so is always there.
pub struct GlobalMetrics {
    queues: BTreeSet<QueueName>,
    /// What is there at every scrape.
    always: Registry,
    up: IntGauge,
    duration: GaugeVec,
    errors: IntCounterVec,
    last_success: Gauge,
    parts: Parts,
    stale_after: Duration,
    collected_at: Mutex<HashMap<Collector, BootInstant>>,
}

struct Parts {
    queues: Part<Queues>,
    workers: Part<IntGaugeVec>,
    control: Part<Control>,
    tables: Part<Tables>,
    server: Part<Server>,
}

/// Gauges that come and go together.
struct Part<G> {
    registry: Registry,
    gauges: G,
}

impl<G> Part<G> {
    fn new(declare: impl FnOnce(&Families<'_>) -> G) -> Self {
        let registry = Registry::new();
        let gauges = declare(&Families(&registry));
        Self { registry, gauges }
    }
}

struct Queues {
    items: IntGaugeVec,
    active: IntGaugeVec,
    overdue: IntGaugeVec,
    oldest_ready: GaugeVec,
    oldest_checking: GaugeVec,
    batches: IntGaugeVec,
}

struct Control {
    claims_enabled: IntGauge,
    epoch: IntGauge,
    schema_version: IntGauge,
}

struct Tables {
    live: IntGaugeVec,
    dead: IntGaugeVec,
}

struct Server {
    timeline: IntGauge,
    oldest_transaction: Gauge,
    notify_queue_usage: Gauge,
}

impl GlobalMetrics {
    /// Nothing collected yet. `queues` have a label of their own, as in
    /// [`Metrics::new`](super::Metrics::new); a part is left out `stale_after` its last collection.
    #[must_use]
    pub fn new(
        queues: impl IntoIterator<Item = QueueName>,
        build: &BuildInfo,
        stale_after: Duration,
    ) -> Self {
        let queues = labelled(queues);
        let labels = queue_labels(&queues);
        let queue = ("queue", labels.as_slice());
        let always = Registry::new();
        let f = Families(&always);
        f.process();
        declare_build(&f, build);
        let collector = ("collector", Collector::VALUES);
        Self {
            up: f.gauge(names::DB_UP, DB_UP_HELP),
            duration: f.float_gauges(
                names::COLLECT_DURATION,
                "Length of the last collection.",
                &[collector],
            ),
            errors: f.counters(names::COLLECT_ERRORS, "Collections that failed.", &[collector]),
            last_success: f.float_gauge(
                names::COLLECT_LAST_SUCCESS,
                "When everything was last collected, 0 when never.",
            ),
            parts: Parts {
                queues: Part::new(|f| Queues::declare(f, queue)),
                workers: Part::new(|f| {
                    f.gauges(
                        names::WORKERS,
                        "Workers that have not ended.",
                        &[("state", WorkerPresence::VALUES)],
                    )
                }),
                control: Part::new(Control::declare),
                tables: Part::new(Tables::declare),
                server: Part::new(Server::declare),
            },
            stale_after,
            collected_at: Mutex::default(),
            queues,
            always,
        }
    }

    /// One part was collected at `now`, and that took so long.
    pub fn collected(&self, what: &Collected, took: Duration, now: BootInstant) {
        let parts = &self.parts;
        match what {
            Collected::Queues(loads) => parts.queues.gauges.set(&self.by_label(loads)),
            Collected::Workers(counts) => {
                for (state, workers) in [
                    (WorkerPresence::Live, counts.live),
                    (WorkerPresence::Draining, counts.draining),
                    (WorkerPresence::Stale, counts.stale),
                ] {
                    parts.workers.gauges.with_label_values(&[state.as_str()]).set(workers);
                }
            }
            Collected::Control(facts) => {
                let gauges = &parts.control.gauges;
                gauges.claims_enabled.set(i64::from(facts.claims_enabled));
                gauges.epoch.set(facts.epoch);
                gauges.schema_version.set(facts.schema_version);
            }
            Collected::Tables(tables) => {
                for rows in tables.iter().filter(|rows| Table::VALUES.contains(&&*rows.table)) {
                    let table = [rows.table.as_str()];
                    parts.tables.gauges.live.with_label_values(&table).set(rows.live);
                    parts.tables.gauges.dead.with_label_values(&table).set(rows.dead);
                }
            }
            Collected::Server(facts) => {
                let gauges = &parts.server.gauges;
                gauges.timeline.set(facts.timeline);
                gauges.oldest_transaction.set(unix(facts.oldest_transaction));
                gauges.notify_queue_usage.set(facts.notify_queue_usage);
            }
        }
        let collector = what.collector();
        self.duration.with_label_values(&[collector.as_str()]).set(took.as_secs_f64());
        self.collected_at().insert(collector, now);
    }

    /// A part could not be collected.
    pub fn collection_failed(&self, collector: Collector) {
        self.errors.with_label_values(&[collector.as_str()]).inc();
    }

    /// Everything was collected, by the wall clock at `now`.
    pub fn collected_all(&self, now: OffsetDateTime) {
        self.last_success.set(unix(Some(now)));
    }

    /// Whether the database answered when last asked.
    pub fn db_up(&self, up: bool) {
        self.up.set(i64::from(up));
    }

    /// What is known at `now`, in the text format 0.0.4.
    ///
    /// # Errors
    /// A metric is malformed, which the tests rule out.
    pub fn encode(&self, now: BootInstant) -> Result<String, prometheus::Error> {
        let fresh: Vec<Collector> = {
            let collected_at = self.collected_at();
            let fresh = |at: &BootInstant| now.since(*at) <= self.stale_after;
            collected_at.iter().filter(|(_, at)| fresh(at)).map(|(part, _)| *part).collect()
        };
        let parts = &self.parts;
        let mut families = self.always.gather();
        for (collector, registry) in [
            (Collector::Queues, &parts.queues.registry),
            (Collector::Workers, &parts.workers.registry),
            (Collector::Control, &parts.control.registry),
            (Collector::Tables, &parts.tables.registry),
            (Collector::Server, &parts.server.registry),
        ] {
            if fresh.contains(&collector) {
                families.extend(registry.gather());
            }
        }
        TextEncoder::new().encode_to_string(&families)
    }

    /// Loads by label: those of queues without one of their own together.
    fn by_label<'a>(&'a self, loads: &'a [(String, QueueLoad)]) -> HashMap<&'a str, QueueLoad> {
        let labels = queue_labels(&self.queues);
        // A queue without a batch is at zero.
        let mut by_label: HashMap<&str, QueueLoad> =
            labels.into_iter().map(|label| (label, QueueLoad::default())).collect();
        for (queue, load) in loads {
            let label =
                if by_label.contains_key(queue.as_str()) { queue } else { names::OTHER_QUEUE };
            let sum = by_label.entry(label).or_default();
            *sum = sum.plus(*load);
        }
        by_label
    }

    fn collected_at(&self) -> MutexGuard<'_, HashMap<Collector, BootInstant>> {
        self.collected_at.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Queues {
    fn declare(f: &Families<'_>, queue: Axis<'_>) -> Self {
        Self {
            items: f.gauges(
                names::ITEMS,
                "Items that have not ended; pending ones may not be claimed yet.",
                &[queue, ("state", ItemState::VALUES)],
            ),
            active: f.gauges(
                names::LEASES_ACTIVE,
                "Items held under leases that have not expired.",
                &[queue],
            ),
            overdue: f.gauges(
                names::LEASES_OVERDUE,
                "Items held under leases that have expired and that nobody took back.",
                &[queue],
            ),
            oldest_ready: f.float_gauges(
                names::OLDEST_READY,
                "Since when the first item that may be claimed is next in line, 0 when none may.",
                &[queue],
            ),
            oldest_checking: f.float_gauges(
                names::OLDEST_CHECKING,
                "Since when the oldest item under check is, 0 when none is.",
                &[queue],
            ),
            batches: f.gauges(
                names::BATCHES,
                "Batches that have not ended.",
                &[("state", BatchState::VALUES)],
            ),
        }
    }

    fn set(&self, loads: &HashMap<&str, QueueLoad>) {
        for (queue, load) in loads {
            // Started positions are noted with heartbeats, so they may be ahead or behind.
            let running = load.running.min(load.executing);
            for (state, items) in [
                (ItemState::Pending, load.pending),
                (ItemState::Queued, load.queued),
                (ItemState::Leased, load.executing - running),
                (ItemState::Running, running),
                (ItemState::Checking, load.checking),
            ] {
                self.items.with_label_values(&[queue, state.as_str()]).set(items);
            }
            self.active.with_label_values(&[queue]).set(load.active);
            self.overdue.with_label_values(&[queue]).set(load.overdue);
            self.oldest_ready.with_label_values(&[queue]).set(unix(load.ready_since));
            self.oldest_checking.with_label_values(&[queue]).set(unix(load.checking_since));
        }
        let all = loads.values().fold(QueueLoad::default(), |sum, load| sum.plus(*load));
        for (state, batches) in [(BatchState::Open, all.open), (BatchState::Paused, all.paused)] {
            self.batches.with_label_values(&[state.as_str()]).set(batches);
        }
    }
}

impl Control {
    fn declare(f: &Families<'_>) -> Self {
        Self {
            claims_enabled: f
                .gauge(names::CLAIMS_ENABLED, "Whether claims are allowed in this database."),
            epoch: f.gauge(names::LEASE_EPOCH, "The epoch of fencing tokens."),
            schema_version: f.gauge(names::SCHEMA_VERSION, "Version of the database's schema."),
        }
    }
}

impl Tables {
    fn declare(f: &Families<'_>) -> Self {
        let table = ("table", Table::VALUES);
        Self {
            live: f.gauges(names::TABLE_LIVE, "Live rows of a table, about.", &[table]),
            dead: f.gauges(
                names::TABLE_DEAD,
                "Dead rows of a table that wait for vacuum, about.",
                &[table],
            ),
        }
    }
}

impl Server {
    fn declare(f: &Families<'_>) -> Self {
        Self {
            timeline: f.gauge(
                names::DB_TIMELINE,
                "The server's timeline: it rises with every promotion and restore.",
            ),
            oldest_transaction: f.float_gauge(
                names::OLDEST_TRANSACTION,
                "When the oldest open transaction of this database began, 0 when none is open.",
            ),
            notify_queue_usage: f.float_gauge(
                names::NOTIFY_QUEUE_USAGE,
                "How full the server's queue of notifications is.",
            ),
        }
    }
}

/// Unix seconds; 0 for what is not.
fn unix(at: Option<OffsetDateTime>) -> f64 {
    at.map_or(0.0, |at| (at - OffsetDateTime::UNIX_EPOCH).as_seconds_f64())
}

impl std::fmt::Debug for GlobalMetrics {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GlobalMetrics").field("queues", &self.queues).finish_non_exhaustive()
    }
}
