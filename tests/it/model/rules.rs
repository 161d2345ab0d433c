//! What can be taken out of the protocol, and how large the world is in which it is looked at.

/// A rule of the protocol that can be left out, to see what breaks then. Numbers are those of
/// `store/locking.rs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Rule {
    /// L1: a cancel takes the exclusive parent lock.
    CancelTakesLock,
    /// L2: a hand-in reads the batch's state after it has the shared parent lock.
    LookAfterLock,
    /// F1: a hand-in and a renewal match the lease's random id, not the token alone.
    LeaseIdInFence,
    /// F2: the token contains an epoch that is raised when the timeline moved.
    EpochInToken,
    /// F7: claims wait for one lease after the epoch was raised.
    ClaimsSettle,
    /// F2: `recover raise-epoch` after a restored disk snapshot, which keeps its timeline.
    EpochRaisedAfterRestore,
    /// F3: a position that its lease no longer holds is refused.
    LostIsRefused,
    /// F3: the rest of its group is applied.
    LostIsLeftOut,
    /// F4, L2: the reaper looks again, under the lock, at the lease that it takes and at its expiry.
    ExpiryLookedAtAgain,
    /// F4: a reaper waits one lease after a step of the database clock, a restart or a failover.
    ClocksAgree,
    /// F5: the margin covers the kill grace and the drift of the clocks.
    MarginCoversKill,
    /// F5: trust counts from before the question was sent, not from the answer.
    TrustFromAsking,
    /// F5: the deadline is held by a process of its own, which a frozen or dead worker cannot stop.
    Guard,
    /// The guard of a dead worker releases its leases only when its children are gone.
    ReleaseAfterProof,
    /// F6: a claim whose answer did not come is never adopted.
    NeverAdopt,
    /// An expired lease is taken back whatever its worker does, and a batch with nothing left is
    /// ended by whoever sees it.
    FullSweep,
    /// An item with a stored result is checked again after an expiry, not executed again.
    StagedIsCheckedAgain,
}

/// The faults that may happen in one history, and how often.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Faults {
    /// Answers that do not come: the statement is lost, or commits whenever it likes.
    pub(super) lost_answers: u8,
    /// Workers frozen for as long as the history likes.
    pub(super) freezes: u8,
    /// Workers killed.
    pub(super) crashes: u8,
    /// Steps of the database clock, forward by a whole lease.
    pub(super) clock_steps: u8,
    /// Failovers to a standby that lacks the last commits.
    pub(super) failovers: u8,
    /// Disk snapshots put back, system identifier and timeline included.
    pub(super) restores: u8,
    /// Cancels of the batch.
    pub(super) cancels: u8,
}

/// A world to be looked at in full.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    pub(super) workers: usize,
    pub(super) items: usize,
    /// Positions that one claim takes, at most.
    pub(super) claim_size: usize,
    /// Items a worker holds at once.
    pub(super) slots: usize,
    /// Times an item may be taken back or given back before it fails.
    pub(super) attempts: u8,
    /// Whether results are staged and checked before they are published.
    pub(super) checks: bool,
    pub(super) faults: Faults,
}

impl Faults {
    const NONE: Self = Self {
        lost_answers: 0,
        freezes: 0,
        crashes: 0,
        clock_steps: 0,
        failovers: 0,
        restores: 0,
        cancels: 0,
    };
}

impl Bounds {
    /// Two workers and one item, which may be taken back once, and nothing goes wrong.
    pub(super) const SMALL: Self = Self {
        workers: 2,
        items: 1,
        claim_size: 1,
        slots: 1,
        attempts: 2,
        checks: false,
        faults: Faults::NONE,
    };
}
