//! The state of the world: the database, the workers with their guards, and what is on its way.
//!
//! Time is counted down, not up: a history may be as long as it likes and the states stay finite.

use super::rules::Faults;

/// Positions of the batch; a smaller batch leaves the last ones out.
pub(super) const ITEMS: usize = 2;

pub(super) type LeaseId = u8;
pub(super) type Token = u8;

/// Where an item is (I1). An item in a lease is `Held`; the lease's row says in which.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Place {
    /// Not of this batch.
    Outside,
    Fresh,
    Held,
    Waiting,
    /// Waiting, with a stored result: to be checked, not executed.
    Recheck,
    Ended,
}

/// A row of `leases`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Row {
    pub(super) id: LeaseId,
    pub(super) token: Token,
    /// The start of the worker process that holds it.
    pub(super) owner: u8,
    pub(super) holds: [bool; ITEMS],
    /// Ticks of the database clock to the expiry.
    pub(super) left: u8,
}

/// What a hand-in wants done with an item.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Kind {
    Publish,
    Stage,
    /// Its execution was ended: another attempt, or failed when they are spent.
    Again,
}

/// One item of a hand-in, with the fence (F3).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Entry {
    pub(super) lease: LeaseId,
    pub(super) token: Token,
    pub(super) position: usize,
    pub(super) kind: Kind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Answer {
    Applied,
    Lost,
    Cancelled,
}

/// A transaction of a hand-in before its commit.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct HandIn {
    pub(super) entries: Vec<Entry>,
    /// Whether it has the shared parent lock, and what it read of the batch's control state.
    pub(super) locked: bool,
    pub(super) saw_cancelled: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Database {
    pub(super) timeline: u8,
    /// The timeline that `control` knows.
    pub(super) known: u8,
    pub(super) epoch: u8,
    pub(super) sequence: u8,
    /// The sequence's value at the raise of the epoch.
    pub(super) base: u8,
    pub(super) cancelled: bool,
    pub(super) finished: bool,
    pub(super) places: [Place; ITEMS],
    pub(super) tries: [u8; ITEMS],
    pub(super) staged: [bool; ITEMS],
    /// How often an outcome was published; the primary key would refuse the second (P1).
    pub(super) outcomes: [u8; ITEMS],
    pub(super) leases: Vec<Row>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Life {
    Up,
    /// Stopped by a signal: it sends and reads nothing. Its guard goes on.
    Frozen,
    Dead,
}

/// What a worker, or the guard it left behind, has of one item of a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Work {
    Absent,
    Running,
    /// Being killed; gone after so many ticks.
    Dying(u8),
    Killed,
    Done,
    Checking,
    Checked,
    /// Handed in, not answered.
    Sent(Kind),
}

impl Work {
    pub(super) const fn is_executing(self) -> bool {
        matches!(self, Self::Running | Self::Dying(_))
    }
}

/// A lease as its worker knows it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Holding {
    pub(super) id: LeaseId,
    pub(super) token: Token,
    /// Ticks to the trust deadline (F5).
    pub(super) trust: u8,
    /// It was told that the lease is gone: only executions that are dying are left of it.
    pub(super) lost: bool,
    pub(super) items: [Work; ITEMS],
}

/// What a claim was granted: its token, and what is to be done with each position.
pub(super) type Grant = (Token, [Work; ITEMS]);

/// The answer to a claim, on its way.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Claim {
    pub(super) id: LeaseId,
    /// Ticks that its lease is still trusted.
    pub(super) trust: u8,
    pub(super) grant: Grant,
}

/// The answer to a heartbeat, on its way.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Renewal {
    /// Ticks that what it renewed is still trusted.
    pub(super) trust: u8,
    pub(super) answers: Vec<(LeaseId, Answer)>,
}

/// A hand-in at the server, or its answer on its way.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Handing {
    Begun(HandIn),
    Answered(Vec<(Entry, Answer)>),
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Worker {
    pub(super) life: Life,
    /// Which start of a worker process this is.
    pub(super) start: u8,
    pub(super) holdings: Vec<Holding>,
    pub(super) claim: Option<Claim>,
    pub(super) hand_in: Option<Handing>,
    pub(super) renewal: Option<Renewal>,
    /// Claims whose answer did not come, to be given back.
    pub(super) lost_claims: Vec<LeaseId>,
}

impl Worker {
    pub(super) fn holding(&mut self, id: LeaseId) -> Option<&mut Holding> {
        self.holdings.iter_mut().find(|holding| holding.id == id)
    }

    /// Forgets leases of which nothing is left. A dead worker's guard keeps them until it has
    /// released them.
    pub(super) fn tidy(&mut self) {
        let dead = self.life == Life::Dead;
        self.holdings.retain(|h| h.items.iter().any(|i| *i != Work::Absent) || (dead && !h.lost));
    }

    fn refers_to(&self, id: LeaseId) -> bool {
        let sent = match &self.hand_in {
            Some(Handing::Begun(begun)) => begun.entries.iter().any(|entry| entry.lease == id),
            Some(Handing::Answered(answers)) => answers.iter().any(|(e, _)| e.lease == id),
            None => false,
        };
        let renewed = self.renewal.iter().flat_map(|renewal| &renewal.answers);
        sent || self.holdings.iter().any(|holding| holding.id == id)
            || self.claim.as_ref().is_some_and(|claim| claim.id == id)
            || renewed.into_iter().any(|(vouched, _)| *vouched == id)
            || self.lost_claims.contains(&id)
    }

    pub(super) fn busy_slots(&self) -> usize {
        let items = self.holdings.iter().flat_map(|holding| holding.items);
        items.filter(|item| *item != Work::Absent).count()
    }
}

/// A statement whose sender no longer waits for it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Late {
    Claim { owner: u8, id: LeaseId },
    HandIn(Vec<Entry>),
}

/// A promise that a step has just broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Broken {
    /// P2: an outcome came from a lease that does not hold the item.
    StalePublished,
    /// P5: something was published after the cancel had returned.
    PublishedAfterCancel,
    /// P6: an item with a stored result was executed again.
    PaidTwice,
    /// F3: finished work was refused though its lease held the item.
    WorkThrownAway,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct State {
    pub(super) db: Database,
    /// What a failover or a restored snapshot brings back.
    pub(super) old: Option<Box<Database>>,
    pub(super) workers: Vec<Worker>,
    pub(super) late: Vec<Late>,
    /// Ticks that the clocks of the reapers and of the database have agreed (F4).
    pub(super) agreed: u8,
    /// Ticks for which claims wait after a failover.
    pub(super) settling: u8,
    /// An item whose lease a reaper saw expired, where it does not look again.
    pub(super) seen: Option<usize>,
    pub(super) faults: Faults,
    /// Starts of worker processes.
    pub(super) starts: u8,
    /// The highest epoch ever: Unix time, which no failover takes back either.
    pub(super) unix_time: u8,
    pub(super) highest_token: Token,
    /// Whether a token was not higher than all before it (F2).
    pub(super) token_fell: bool,
    /// Items whose result was stored once.
    pub(super) paid: [bool; ITEMS],
    pub(super) broken: Option<Broken>,
}

impl State {
    /// An id for a lease that nothing refers to: as good as a random one, and the states stay few.
    pub(super) fn new_id(&self) -> LeaseId {
        (1..=LeaseId::MAX).find(|id| !self.refers_to(*id)).expect("a few leases")
    }

    fn refers_to(&self, id: LeaseId) -> bool {
        let old = self.old.iter().flat_map(|old| &old.leases);
        let row = self.db.leases.iter().chain(old).any(|row| row.id == id);
        let late = self.late.iter().any(|late| match late {
            Late::Claim { id: of_claim, .. } => *of_claim == id,
            Late::HandIn(entries) => entries.iter().any(|entry| entry.lease == id),
        });
        row || late || self.workers.iter().any(|worker| worker.refers_to(id))
    }

    /// How many executions of an item there are at this moment.
    pub(super) fn executions(&self, position: usize) -> usize {
        let holdings = self.workers.iter().flat_map(|worker| &worker.holdings);
        holdings.filter(|holding| holding.items[position].is_executing()).count()
    }
}
