//! How a worker stands, for its guard and for people. No inputs, no results, no secrets.

use std::sync::Arc;

use serde_json::{Value, json};

use super::Worker;
use crate::capacity::{CheckSlots, Slots};
use crate::clock::Clock;
use crate::health::HealthState;
use crate::heartbeat::Heartbeat;
use crate::leases::{HeldLease, Leases};
use crate::model::{Asked, WorkerId, WorkerState};
use crate::store::Database;

/// A look at a running worker.
#[derive(Clone)]
pub struct View {
    pub(super) id: WorkerId,
    pub(super) health: Arc<HealthState>,
    pub(super) heartbeat: Arc<Heartbeat>,
    pub(super) leases: Arc<Leases>,
    pub(super) slots: Slots,
    pub(super) checks: CheckSlots,
    pub(super) database: Database,
    pub(super) clock: Arc<dyn Clock>,
}

/// The few numbers that say most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Summary {
    /// What it is doing.
    pub state: WorkerState,
    /// Leases it holds.
    pub leases: usize,
    /// Items in them.
    pub items: usize,
    /// Execution slots that are free.
    pub free: usize,
    /// Execution slots.
    pub slots: usize,
}

impl Worker {
    /// A look at it, that lasts as long as the process.
    #[must_use]
    pub fn view(&self) -> View {
        View {
            id: self.id,
            health: Arc::clone(&self.parts.health),
            heartbeat: Arc::clone(&self.heartbeat),
            leases: Arc::clone(&self.leases),
            slots: self.slots.clone(),
            checks: self.checks.clone(),
            database: self.parts.database.clone(),
            clock: Arc::clone(&self.parts.clock),
        }
    }
}

impl View {
    /// Whether its loops go round: the one that watches trust deadlines and the one of heartbeats,
    /// whatever the database says to these.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        self.health.not_alive().is_empty()
    }

    /// The few numbers that say most.
    #[must_use]
    pub fn summary(&self) -> Summary {
        let (leases, items) = self.leases.size();
        let state = self.health.state();
        Summary { state, leases, items, free: self.slots.free(), slots: self.slots.total() }
    }

    /// Everything that may be looked at.
    #[must_use]
    pub fn dump(&self) -> Value {
        let summary = self.summary();
        let (connections, idle, waiting) = self.database.pool_status();
        let failing: Vec<_> =
            self.health.not_ready().into_iter().chain(self.health.not_alive()).collect();
        json!({
            "worker": self.id,
            "state": summary.state.as_str(),
            "asked": (*self.heartbeat.asked().borrow()).map(Asked::as_str),
            "heartbeats_answered": self.heartbeat.is_healthy(),
            "may_reap": self.heartbeat.may_reap(),
            "failing": failing,
            "slots": {"total": summary.slots, "free": summary.free},
            "check_slots": {
                "total": self.checks.slots().total(),
                "free": self.checks.slots().free(),
                "pending": self.checks.pending(),
            },
            "connections": {"open": connections, "idle": idle, "waiting": waiting},
            "leases": self.leases.held().iter().map(|held| self.lease(held)).collect::<Vec<_>>(),
        })
    }

    fn lease(&self, held: &HeldLease) -> Value {
        let grant = &held.grant;
        let item = |(position, doing, stop): &(_, _, Option<_>)| json!({"position": position, "doing": doing, "stop": stop.map(|stop| format!("{stop:?}"))});
        json!({
            "lease": grant.lease,
            "batch": grant.batch,
            "token": grant.token.to_string(),
            "queue": grant.queue.as_str(),
            "age_s": self.clock.now().since(grant.asked_at).as_secs_f64(),
            "trusted_for_s": held.trusted_for.as_secs_f64(),
            "handing_in": held.handing_in,
            "items": held.items.iter().map(item).collect::<Vec<_>>(),
        })
    }
}
