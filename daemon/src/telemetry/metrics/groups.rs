//! The metrics by subject: what each is called, says and may be labelled with.

use prometheus::{Gauge, Histogram, HistogramVec, IntCounterVec, IntGauge, IntGaugeVec};

use super::families::{Axis, Families, buckets};
use crate::model::VerdictClass;
use crate::telemetry::labels::{
    CheckErrorReason, CheckState, ClaimOutcome, ConnectionState, DbErrorClass, DbPool,
    ExecutionOutcome, FenceOp, FenceReason, ItemOutcome, LostReason, PoisonReason, ReaperOutcome,
    RecoveryDisposition, RefundReason, ReleaseReason, RenewalOutcome, RetryReason, SelfFenceReason,
    SlotKind, SlotState, WakeupSource,
};
use crate::telemetry::names;

/// What worker and exporter say of it in the same words.
pub(super) const DB_UP_HELP: &str = "Whether the database answered when last asked.";

/// Leases, as their holder sees them.
pub(super) struct Leases {
    pub(super) granted: IntCounterVec,
    pub(super) held: IntGaugeVec,
    pub(super) renewals: IntCounterVec,
    pub(super) renewal_duration: Histogram,
    pub(super) renewal_lateness: Histogram,
    pub(super) renewal_margin: HistogramVec,
    pub(super) lost: IntCounterVec,
    pub(super) released: IntCounterVec,
    pub(super) self_fences: IntCounterVec,
    pub(super) fence_rejections: IntCounterVec,
    pub(super) attempt_refunds: IntCounterVec,
}

impl Leases {
    pub(super) fn declare(f: &Families<'_>, queue: Axis<'_>) -> Self {
        Self {
            granted: f.counters(
                names::LEASES_GRANTED,
                "Items handed to this worker by a committed claim.",
                &[queue],
            ),
            held: f.gauges(
                names::LEASES_HELD,
                "Items this process holds under a lease now, in all stages.",
                &[queue],
            ),
            renewals: f.counters(
                names::LEASE_RENEWALS,
                "Lease renewals by end result.",
                &[queue, ("outcome", RenewalOutcome::VALUES)],
            ),
            renewal_duration: f.histogram(
                names::LEASE_RENEWAL_DURATION,
                "Round trip of one renewal statement.",
                buckets::DB,
            ),
            renewal_lateness: f.histogram(
                names::LEASE_RENEWAL_LATENESS,
                "How far after its planned time a renewal was sent.",
                buckets::LATE,
            ),
            renewal_margin: f.histograms(
                names::LEASE_RENEWAL_MARGIN,
                "Share of the lease still left when a renewal committed.",
                &[queue],
                buckets::RATIO,
            ),
            lost: f.counters(
                names::LEASES_LOST,
                "Items given up without being settled.",
                &[queue, ("reason", LostReason::VALUES)],
            ),
            released: f.counters(
                names::LEASES_RELEASED,
                "Items that left their lease on purpose.",
                &[queue, ("reason", ReleaseReason::VALUES)],
            ),
            self_fences: f.counters(
                names::SELF_FENCES,
                "Times this worker stopped its own work because it could not prove ownership.",
                &[("reason", SelfFenceReason::VALUES)],
            ),
            fence_rejections: f.counters(
                names::FENCE_REJECTIONS,
                "Writes refused by the fence.",
                &[("op", FenceOp::VALUES), ("reason", FenceReason::VALUES)],
            ),
            attempt_refunds: f.counters(
                names::ATTEMPT_REFUNDS,
                "Attempts not charged to the item.",
                &[queue, ("reason", RefundReason::VALUES)],
            ),
        }
    }
}

/// The reaper.
pub(super) struct Recovery {
    pub(super) expired: IntCounterVec,
    pub(super) recovered: IntCounterVec,
    pub(super) delay: Histogram,
    pub(super) runs: IntCounterVec,
    pub(super) last_success: IntGauge,
}

impl Recovery {
    pub(super) fn declare(f: &Families<'_>, queue: Axis<'_>) -> Self {
        Self {
            expired: f.counters(
                names::LEASES_EXPIRED,
                "Items of expired leases that were taken back.",
                &[queue],
            ),
            recovered: f.counters(
                names::LEASES_RECOVERED,
                "What became of items taken back: of expired leases, and of a worker that crashed, which its guard released.",
                &[queue, ("disposition", RecoveryDisposition::VALUES)],
            ),
            delay: f.histogram(
                names::LEASE_RECOVERY_DELAY,
                "Time from the expiry of a lease to its recovery.",
                buckets::RECOVERY,
            ),
            runs: f.counters(
                names::REAPER_RUNS,
                "Sweeps of the reaper.",
                &[("outcome", ReaperOutcome::VALUES)],
            ),
            last_success: f.gauge(
                names::REAPER_LAST_SUCCESS,
                "When this process last completed a sweep, 0 when never.",
            ),
        }
    }
}

/// Claims and the slots they fill.
pub(super) struct Claiming {
    pub(super) claims: IntCounterVec,
    pub(super) duration: HistogramVec,
    pub(super) lock_wait: Histogram,
    pub(super) item_wait: HistogramVec,
    pub(super) wakeups: IntCounterVec,
    pub(super) slots: IntGaugeVec,
}

impl Claiming {
    pub(super) fn declare(f: &Families<'_>, queue: Axis<'_>) -> Self {
        Self {
            claims: f.counters(
                names::CLAIMS,
                "Claim calls.",
                &[queue, ("outcome", ClaimOutcome::VALUES)],
            ),
            duration: f.histograms(
                names::CLAIM_DURATION,
                "Length of the whole claim transaction.",
                &[("outcome", &["granted", "empty", "contended", "error"])],
                buckets::DB,
            ),
            lock_wait: f.histogram(
                names::PARENT_LOCK_WAIT,
                "Wait for the parent lock of a batch, by claims and hand-ins.",
                buckets::DB,
            ),
            item_wait: f.histograms(
                names::ITEM_WAIT,
                "How long an item was next in line before it was granted: since its batch was last served, since its next attempt was due.",
                &[queue],
                buckets::WAIT,
            ),
            wakeups: f.counters(
                names::WAKEUPS,
                "What woke the claim loop.",
                &[("source", WakeupSource::VALUES)],
            ),
            slots: f.gauges(
                names::WORKER_SLOTS,
                "Slots of this process; busy and idle together are the capacity.",
                &[("kind", SlotKind::VALUES), ("state", SlotState::VALUES)],
            ),
        }
    }
}

/// Executions, and what becomes of items.
pub(super) struct Execution {
    pub(super) started: IntCounterVec,
    pub(super) ended: IntCounterVec,
    pub(super) duration: HistogramVec,
    pub(super) running: IntGaugeVec,
    pub(super) retries: IntCounterVec,
    pub(super) finished: IntCounterVec,
    pub(super) poisoned: IntCounterVec,
}

impl Execution {
    pub(super) fn declare(f: &Families<'_>, queue: Axis<'_>) -> Self {
        Self {
            started: f.counters(names::EXECUTIONS_STARTED, "Executions begun.", &[queue]),
            ended: f.counters(
                names::EXECUTIONS,
                "Executions ended.",
                &[queue, ("outcome", ExecutionOutcome::VALUES)],
            ),
            duration: f.histograms(
                names::EXECUTION_DURATION,
                "Start to end of one execution.",
                &[queue],
                buckets::EXECUTION,
            ),
            running: f.gauges(
                names::EXECUTIONS_RUNNING,
                "Executions in flight in this process.",
                &[queue],
            ),
            retries: f.counters(
                names::ITEM_RETRIES,
                "Items put back for another attempt.",
                &[queue, ("reason", RetryReason::VALUES)],
            ),
            finished: f.counters(
                names::ITEMS_FINISHED,
                "Items whose end was committed by this process.",
                &[queue, ("outcome", ItemOutcome::VALUES)],
            ),
            poisoned: f.counters(
                names::ITEMS_POISONED,
                "Items that failed because their attempts are spent, or their worker crashed with them too often.",
                &[queue, ("reason", PoisonReason::VALUES)],
            ),
        }
    }
}

/// The database as a client sees it.
pub(super) struct Database {
    pub(super) up: IntGauge,
    pub(super) pool_connections: IntGaugeVec,
    pub(super) pool_limit: IntGaugeVec,
    pub(super) pool_pending: IntGaugeVec,
    pub(super) errors: IntCounterVec,
    pub(super) clock_offset: Gauge,
    pub(super) listener_up: IntGauge,
    pub(super) finish_group_items: Histogram,
    pub(super) finish_duration: Histogram,
}

impl Database {
    pub(super) fn declare(f: &Families<'_>) -> Self {
        Self {
            up: f.gauge(names::DB_UP, DB_UP_HELP),
            pool_connections: f.gauges(
                names::DB_POOL_CONNECTIONS,
                "Open connections of a pool.",
                &[("pool", DbPool::VALUES), ("state", ConnectionState::VALUES)],
            ),
            pool_limit: f.gauges(
                names::DB_POOL_LIMIT,
                "Most connections a pool may open.",
                &[("pool", DbPool::VALUES)],
            ),
            pool_pending: f.gauges(
                names::DB_POOL_PENDING,
                "Callers waiting for a connection of a pool.",
                &[("pool", DbPool::VALUES)],
            ),
            errors: f.counters(
                names::DB_ERRORS,
                "Database errors by class.",
                &[("class", DbErrorClass::VALUES)],
            ),
            clock_offset: f.float_gauge(
                names::DB_CLOCK_OFFSET,
                "The wall clock of this process less the database's, at the last heartbeat.",
            ),
            listener_up: f.gauge(
                names::LISTENER_UP,
                "Whether notifications arrive; without them this process polls more often.",
            ),
            finish_group_items: f.histogram(
                names::FINISH_GROUP_ITEMS,
                "Items handed in by one transaction.",
                buckets::GROUP,
            ),
            finish_duration: f.histogram(
                names::FINISH_DURATION,
                "Length of the transaction that hands items in.",
                buckets::DB,
            ),
        }
    }
}

/// Acceptance checks.
pub(super) struct Checks {
    pub(super) published: IntCounterVec,
    pub(super) errors: IntCounterVec,
    pub(super) duration: Histogram,
    pub(super) wait: Histogram,
    pub(super) pending: IntGaugeVec,
}

impl Checks {
    pub(super) fn declare(f: &Families<'_>, queue: Axis<'_>) -> Self {
        let classes = VerdictClass::ALL.map(VerdictClass::as_str);
        Self {
            published: f.counters(
                names::CHECKS,
                "Items published after their check, by the class of their verdict.",
                &[queue, ("verdict", &classes)],
            ),
            errors: f.counters(
                names::CHECK_ERRORS,
                "Checks that gave no verdict.",
                &[("reason", CheckErrorReason::VALUES)],
            ),
            duration: f.histogram(names::CHECK_DURATION, "Length of one check.", buckets::DB),
            wait: f.histogram(
                names::CHECK_WAIT,
                "Time from a stored result to the begin of its check.",
                buckets::RECOVERY,
            ),
            pending: f.gauges(
                names::CHECKS_PENDING,
                "Items that wait for their check, or are checked, in this process.",
                &[("state", CheckState::VALUES)],
            ),
        }
    }
}
