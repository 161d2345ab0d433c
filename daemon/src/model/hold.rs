use super::{Attempt, FencingToken, History, ItemRef, LeaseId, WorkerId};

/// What is known of the attempt of an item before the one that is held, for its trace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PreviousAttempt {
    /// The token of the lease it ran under.
    pub token: FencingToken,
    /// How it ended: a word of [`AttemptEnding`](super::AttemptEnding), or `staged` where only its
    /// check was lost.
    pub ending: String,
    /// The worker that ran it.
    pub worker: WorkerId,
}

/// One item of a lease, as its worker has it: the right to publish one outcome, once.
///
/// Not `Clone`: finishing consumes it.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a dropped hold keeps its item unavailable until the worker gives it back"]
pub struct Hold {
    item: ItemRef,
    lease: LeaseId,
    token: FencingToken,
    history: History,
}

impl Hold {
    /// The hold on `item` under a lease that a claim has just granted.
    pub const fn new(item: ItemRef, lease: LeaseId, token: FencingToken, history: History) -> Self {
        Self { item, lease, token, history }
    }

    /// The item held.
    #[must_use]
    pub const fn item(&self) -> ItemRef {
        self.item
    }

    /// The lease it is held under.
    #[must_use]
    pub const fn lease(&self) -> LeaseId {
        self.lease
    }

    /// The fencing token of that lease.
    #[must_use]
    pub const fn token(&self) -> FencingToken {
        self.token
    }

    /// What happened to the item before this attempt.
    #[must_use]
    pub const fn history(&self) -> History {
        self.history
    }

    /// The number of this attempt.
    #[must_use]
    pub fn attempt(&self) -> Attempt {
        Attempt::new(u16::from(self.history.attempts()) + 1)
    }
}
