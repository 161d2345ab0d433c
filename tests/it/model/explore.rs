//! What may happen next, and what must always hold.

use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Mutex, PoisonError};

use stateright::{Model, Property};

use super::faults::Fault;
use super::rules::{Bounds, Rule};
use super::state::{
    Broken, Database, Handing, Holding, ITEMS, Late, Life, Place, State, Work, Worker,
};
use super::steps::{Action, LEASE, all_ended};

/// Steps within which a world left in peace has to end its batch.
const PATIENCE: usize = 400;

pub(super) const ONE_OUTCOME: &str = "P1 an item has at most one outcome";
pub(super) const NO_STRAGGLER: &str = "P2 a lease that was taken back publishes nothing";
pub(super) const NO_OVERLAP: &str = "P3 executions of an item do not overlap";
pub(super) const ENDS: &str = "P4 left in peace, every item and the batch end";
pub(super) const CANCEL_WINS: &str = "P5 nothing is published after a cancel";
pub(super) const PAID_ONCE: &str = "P6 an item with a stored result is not executed again";
pub(super) const TOKENS_RISE: &str = "F2 tokens rise";
pub(super) const NO_WASTE: &str = "F3 work that its lease still holds is published";

/// The protocol, with some rules left out, in a bounded world.
#[derive(Debug)]
pub(super) struct Protocol {
    pub(super) bounds: Bounds,
    without: Vec<Rule>,
    /// States from which the batch is known to end.
    ending: Mutex<HashSet<u64>>,
}

impl Protocol {
    pub(super) fn new(bounds: Bounds, without: &[Rule]) -> Self {
        Self { bounds, without: without.to_vec(), ending: Mutex::default() }
    }

    pub(super) fn has(&self, rule: Rule) -> bool {
        !self.without.contains(&rule)
    }

    fn steps(&self, s: &State) -> Vec<Action> {
        let mut steps = Vec::new();
        if s.broken.is_some() {
            return steps;
        }
        // The exclusive parent lock can be had.
        let free = s.workers.iter().all(|worker| !is_locked(worker));
        for (w, worker) in s.workers.iter().enumerate() {
            if let Some(Handing::Begun(begun)) = &worker.hand_in {
                let step = if begun.locked { Action::CommitHandIn } else { Action::LockHandIn };
                steps.push(step(w));
            }
            match worker.life {
                Life::Up => self.steps_of(s, w, free, &mut steps),
                Life::Frozen => steps.push(Action::Thaw(w)),
                Life::Dead => {
                    steps.push(Action::Restart(w));
                    for holding in worker.holdings.iter().filter(|holding| !holding.lost) {
                        let alive = holding.items.iter().any(|item| item.is_executing());
                        let proven = !alive || !self.has(Rule::ReleaseAfterProof);
                        if free && proven && self.has(Rule::Guard) {
                            steps.push(Action::GuardReleases(w, holding.id));
                        }
                    }
                }
            }
        }
        for (n, late) in s.late.iter().enumerate() {
            if free || matches!(late, Late::HandIn(_)) {
                steps.push(Action::ServeLate(n));
            }
            steps.push(Action::DropLate(n));
        }
        self.sweeps(s, free, &mut steps);
        self.faults(s, free, &mut steps);
        steps.push(Action::Tick);
        steps
    }

    fn steps_of(&self, s: &State, w: usize, free: bool, steps: &mut Vec<Action>) {
        let worker = &s.workers[w];
        if worker.claim.is_some() {
            steps.push(Action::TakeClaim(w));
        } else if free && s.settling == 0 && self.may_claim(s, w) {
            steps.push(Action::Claim(w));
        }
        for id in &worker.lost_claims {
            steps.push(Action::GiveBack(w, *id));
        }
        for holding in &worker.holdings {
            for position in 0..ITEMS {
                match holding.items[position] {
                    Work::Running => steps.push(Action::Complete(w, holding.id, position)),
                    Work::Checking => steps.push(Action::EndCheck(w, holding.id, position)),
                    Work::Absent
                    | Work::Dying(_)
                    | Work::Killed
                    | Work::Done
                    | Work::Checked
                    | Work::Sent(_) => {}
                }
            }
        }
        let in_parts = !self.has(Rule::CancelTakesLock) || !self.has(Rule::LookAfterLock);
        match &worker.hand_in {
            Some(Handing::Answered(_)) => steps.push(Action::TakeHandIn(w)),
            None if self.ended_items(s, w).is_empty() => {}
            None if in_parts => steps.push(Action::BeginHandIn(w)),
            None => steps.push(Action::HandIn(w)),
            Some(Handing::Begun(_)) => {}
        }
        let renews = |holding: &Holding| !holding.lost && holding.trust < self.trust(w);
        if worker.renewal.is_some() {
            steps.push(Action::TakeRenewal(w));
        } else if worker.holdings.iter().any(renews) {
            steps.push(Action::Renew(w));
        }
    }

    fn may_claim(&self, s: &State, w: usize) -> bool {
        s.workers[w].busy_slots() < self.bounds.slots && claimable(&s.db)
    }

    fn sweeps(&self, s: &State, free: bool, steps: &mut Vec<Action>) {
        if s.db.finished {
            return;
        }
        let may_judge = s.agreed == LEASE || !self.has(Rule::ClocksAgree);
        for row in s.db.leases.iter().filter(|_| may_judge && free) {
            let silent = !s.workers.iter().any(|w| w.start == row.owner && w.life == Life::Up);
            if !silent && !self.has(Rule::FullSweep) {
                continue;
            }
            if self.has(Rule::ExpiryLookedAtAgain) {
                if row.left == 0 {
                    steps.push(Action::Reap(row.id));
                }
            } else if s.seen.is_some_and(|position| row.holds[position]) {
                steps.push(Action::Reap(row.id));
            } else if row.left == 0 {
                steps.extend((0..ITEMS).filter(|p| row.holds[*p]).map(Action::SeeExpired));
            }
        }
        if free && all_ended(s) && self.has(Rule::FullSweep) {
            steps.push(Action::EndBatch);
        }
    }

    fn faults(&self, s: &State, free: bool, steps: &mut Vec<Action>) {
        let mut happens = |fault| steps.push(Action::Fault(fault));
        for (w, worker) in s.workers.iter().enumerate() {
            if worker.life == Life::Up && s.faults.lost_answers > 0 {
                let adopts = !self.has(Rule::NeverAdopt) && worker.lost_claims.is_empty();
                if worker.claim.is_none() && self.may_claim(s, w)
                    || worker.claim.is_some() && adopts
                {
                    happens(Fault::LoseClaim(w));
                }
                if worker.hand_in.is_none() && !self.ended_items(s, w).is_empty() {
                    happens(Fault::LoseHandIn(w));
                }
                if worker.renewal.is_some() {
                    happens(Fault::LoseRenewal(w));
                }
            }
            if worker.life == Life::Up && s.faults.freezes > 0 {
                happens(Fault::Freeze(w));
            }
            if worker.life != Life::Dead && s.faults.crashes > 0 {
                happens(Fault::Crash(w));
            }
        }
        if s.faults.clock_steps > 0 && !s.db.leases.is_empty() {
            happens(Fault::StepClock);
        }
        if s.faults.failovers + s.faults.restores > 0 && s.old.is_none() {
            happens(Fault::CopyDatabase);
        }
        if s.old.is_some() && s.faults.failovers > 0 {
            happens(Fault::FailOver);
        }
        if s.old.is_some() && s.faults.restores > 0 {
            happens(Fault::Restore);
        }
        if s.faults.cancels > 0 && !s.db.finished && (free || !self.has(Rule::CancelTakesLock)) {
            happens(Fault::Cancel);
        }
    }

    /// Whether the batch ends when no further fault happens and everyone does what is due: frozen
    /// workers stay frozen and dead ones dead, as long as one is left.
    fn ends(&self, from: &State) -> bool {
        let ending = || self.ending.lock().unwrap_or_else(PoisonError::into_inner);
        let mut s = from.clone();
        let mut seen = Vec::new();
        // One heartbeat of each worker in a tick is plenty.
        let mut renewed = vec![false; s.workers.len()];
        for _ in 0..PATIENCE {
            let hash = hash_of(&s);
            if s.db.finished || s.broken.is_some() || ending().contains(&hash) {
                ending().extend(seen);
                return true;
            }
            seen.push(hash);
            let nobody = s.workers.iter().all(|worker| worker.life != Life::Up);
            let due = |action: &Action| match *action {
                Action::Restart(_) | Action::Thaw(_) => nobody.then_some(0),
                Action::Renew(w) => (!renewed[w]).then_some(1),
                Action::SeeExpired(_) | Action::Reap(_) | Action::EndBatch => Some(2),
                Action::Claim(_) => Some(3),
                Action::Tick => Some(4),
                Action::ServeLate(_) | Action::Fault(_) => None,
                Action::TakeClaim(_)
                | Action::GiveBack(..)
                | Action::Complete(..)
                | Action::EndCheck(..)
                | Action::HandIn(_)
                | Action::BeginHandIn(_)
                | Action::LockHandIn(_)
                | Action::CommitHandIn(_)
                | Action::TakeHandIn(_)
                | Action::TakeRenewal(_)
                | Action::GuardReleases(..)
                | Action::DropLate(_) => Some(1),
            };
            let steps = self.steps(&s);
            let step = steps.into_iter().filter(|a| due(a).is_some()).min_by_key(|a| due(a));
            let Some(step) = step else { return false };
            if step == Action::Tick {
                renewed.fill(false);
            } else if let Action::Renew(w) = step {
                renewed[w] = true;
            }
            self.apply(&mut s, step);
        }
        false
    }
}

impl Model for Protocol {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        let mut places = [Place::Outside; ITEMS];
        places[..self.bounds.items].fill(Place::Fresh);
        let db = Database {
            timeline: 1,
            known: 1,
            epoch: 1,
            sequence: 0,
            base: 0,
            cancelled: false,
            finished: false,
            places,
            tries: [0; ITEMS],
            staged: [false; ITEMS],
            outcomes: [0; ITEMS],
            leases: Vec::new(),
        };
        let workers = (0..self.bounds.workers).map(|w| Worker {
            life: Life::Up,
            start: u8::try_from(w).expect("a few"),
            holdings: Vec::new(),
            claim: None,
            hand_in: None,
            renewal: None,
            lost_claims: Vec::new(),
        });
        vec![State {
            db,
            old: None,
            workers: workers.collect(),
            late: Vec::new(),
            agreed: LEASE,
            settling: 0,
            seen: None,
            faults: self.bounds.faults,
            starts: u8::try_from(self.bounds.workers).expect("a few"),
            unix_time: 1,
            highest_token: 0,
            token_fell: false,
            paid: [false; ITEMS],
            broken: None,
        }]
    }

    fn actions(&self, s: &State, actions: &mut Vec<Action>) {
        actions.extend(self.steps(s));
    }

    fn next_state(&self, last: &State, action: Action) -> Option<State> {
        let mut next = last.clone();
        self.apply(&mut next, action);
        Some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        let lossless = self.bounds.faults.failovers + self.bounds.faults.restores == 0;
        let mut properties = vec![
            Property::<Self>::always(ONE_OUTCOME, |_, s| s.db.outcomes.iter().all(|n| *n <= 1)),
            Property::<Self>::always(NO_STRAGGLER, |_, s| s.broken != Some(Broken::StalePublished)),
            Property::<Self>::always(NO_OVERLAP, |_, s| {
                (0..ITEMS).all(|position| s.executions(position) <= 1)
            }),
            Property::<Self>::always(CANCEL_WINS, |_, s| {
                s.broken != Some(Broken::PublishedAfterCancel)
            }),
            Property::<Self>::always(TOKENS_RISE, |_, s| !s.token_fell),
            Property::<Self>::always(NO_WASTE, |_, s| s.broken != Some(Broken::WorkThrownAway)),
            Property::<Self>::always(ENDS, Self::ends),
        ];
        if lossless {
            properties.push(Property::<Self>::always(PAID_ONCE, |_, s| {
                s.broken != Some(Broken::PaidTwice)
            }));
        }
        properties
    }
}

fn hash_of(s: &State) -> u64 {
    let mut hasher = DefaultHasher::new();
    s.hash(&mut hasher);
    hasher.finish()
}

fn claimable(db: &Database) -> bool {
    let open = |place| matches!(place, Place::Fresh | Place::Waiting | Place::Recheck);
    !db.finished && db.places.into_iter().any(open)
}

fn is_locked(worker: &Worker) -> bool {
    matches!(&worker.hand_in, Some(Handing::Begun(begun)) if begun.locked)
}
