//! Slots. Execution slots: a claim asks for no more than are free, and a slot is free again only when
//! its item was handed in. Check slots: a budget of their own, with a bounded number of items that
//! wait for one.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

/// The execution slots of a process.
#[derive(Clone, Debug)]
pub struct Slots {
    permits: Arc<Semaphore>,
    freed: Arc<Notify>,
    in_line: Arc<AtomicUsize>,
    total: usize,
}

/// An item in line for all slots: until it is dropped none of them is free for anything else.
#[derive(Debug)]
pub struct InLine(Arc<AtomicUsize>);

/// One slot, or all of them, in use until it is dropped.
#[derive(Debug)]
pub struct Slot {
    // Dropped first, so that whoever is woken finds it free.
    permit: Option<OwnedSemaphorePermit>,
    freed: Arc<Notify>,
}

impl Slots {
    /// `total` slots, all free.
    #[must_use]
    pub fn new(total: usize) -> Self {
        Self {
            permits: Arc::new(Semaphore::new(total)),
            freed: Arc::default(),
            in_line: Arc::default(),
            total,
        }
    }

    /// How many there are.
    #[must_use]
    pub const fn total(&self) -> usize {
        self.total
    }

    /// How many are free now: none while an item is in line for all of them.
    #[must_use]
    pub fn free(&self) -> usize {
        if self.in_line.load(Ordering::Relaxed) > 0 { 0 } else { self.permits.available_permits() }
    }

    /// Keeps all slots for an item that runs alone, so that nothing joins it and no second one waits
    /// beside it.
    #[must_use]
    pub fn line_up(&self) -> InLine {
        self.in_line.fetch_add(1, Ordering::Relaxed);
        InLine(Arc::clone(&self.in_line))
    }

    /// As many slots as are free, at most `most`.
    #[must_use]
    pub fn take(&self, most: usize) -> Vec<Slot> {
        std::iter::from_fn(|| Arc::clone(&self.permits).try_acquire_owned().ok())
            .take(most.min(self.free()))
            .map(|permit| self.slot(permit))
            .collect()
    }

    /// Waits until every slot is free and takes them all: what an item needs that runs alone. It
    /// must hold none meanwhile, or two of them would wait for each other.
    ///
    /// # Cancel safety
    /// Safe: dropped, it takes none.
    pub async fn take_all(&self) -> Option<Slot> {
        let all = u32::try_from(self.total).unwrap_or(u32::MAX);
        let permit = Arc::clone(&self.permits).acquire_many_owned(all).await.ok()?;
        Some(self.slot(permit))
    }

    /// Waits for one slot, in the order in which it was asked for.
    ///
    /// # Cancel safety
    /// Safe: dropped, it takes none.
    pub async fn take_one(&self) -> Option<Slot> {
        let permit = Arc::clone(&self.permits).acquire_owned().await.ok()?;
        Some(self.slot(permit))
    }

    /// Waits until a slot is given back.
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn freed(&self) {
        self.freed.notified().await;
    }

    fn slot(&self, permit: OwnedSemaphorePermit) -> Slot {
        Slot { permit: Some(permit), freed: Arc::clone(&self.freed) }
    }
}

impl Drop for InLine {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        drop(self.permit.take());
        self.freed.notify_one();
    }
}

/// The check slots of a process, and how many items are in its care until they are checked.
#[derive(Clone, Debug)]
pub struct CheckSlots {
    slots: Slots,
    /// Whose turn it is among what was executed here: one at a time is in line for a slot, so that a
    /// lost check waits for one of them at most.
    turn: Arc<Semaphore>,
    pending: Arc<AtomicUsize>,
    backlog: usize,
    relieved: Arc<Notify>,
}

/// One item in the care of [`CheckSlots`], until it is dropped.
#[derive(Debug)]
pub struct PendingCheck {
    pending: Arc<AtomicUsize>,
    relieved: Arc<Notify>,
}

impl CheckSlots {
    /// `total` slots, all free, and room for `backlog` items that wait for one; `relieved` is
    /// notified when an item has left.
    #[must_use]
    pub fn new(total: usize, backlog: usize, relieved: Arc<Notify>) -> Self {
        Self {
            slots: Slots::new(total),
            turn: Arc::new(Semaphore::new(1)),
            pending: Arc::default(),
            backlog,
            relieved,
        }
    }

    /// The slots themselves.
    #[must_use]
    pub const fn slots(&self) -> &Slots {
        &self.slots
    }

    /// Takes an item into care: what it was executed for is never dropped, so this never fails.
    #[must_use]
    pub fn enter(&self) -> PendingCheck {
        self.pending.fetch_add(1, Ordering::Relaxed);
        PendingCheck { pending: Arc::clone(&self.pending), relieved: Arc::clone(&self.relieved) }
    }

    /// How many items are in care, waiting or checked.
    #[must_use]
    pub fn pending(&self) -> usize {
        self.pending.load(Ordering::Relaxed)
    }

    /// Whether nothing more should be claimed. Exceeded at most by what is executed already.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.pending() >= self.slots.total() + self.backlog
    }

    /// Waits for a slot for an item that was executed here.
    ///
    /// # Cancel safety
    /// Safe: dropped, it takes none and loses its place.
    pub async fn take(&self) -> Option<Slot> {
        let _turn = self.turn.acquire().await.ok()?;
        self.slots.take_one().await
    }

    /// Waits for a slot for a check that was lost: before what was executed here.
    ///
    /// # Cancel safety
    /// Safe: dropped, it takes none.
    pub async fn take_first(&self) -> Option<Slot> {
        self.slots.take_one().await
    }
}

impl Drop for PendingCheck {
    fn drop(&mut self) {
        self.pending.fetch_sub(1, Ordering::Relaxed);
        self.relieved.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_slots_are_taken_than_are_free() {
        let slots = Slots::new(3);

        let two = slots.take(2);
        let rest = slots.take(9);

        assert_eq!((two.len(), rest.len(), slots.free()), (2, 1, 0));
        drop(two);
        assert_eq!(slots.free(), 2);
    }

    #[test]
    fn nothing_is_taken_beside_an_item_in_line_for_all_slots() {
        let slots = Slots::new(3);
        let in_line = slots.line_up();
        assert_eq!((slots.free(), slots.take(1).len()), (0, 0));
        drop(in_line);
        assert_eq!(slots.free(), 3);
    }

    #[tokio::test]
    async fn items_that_run_alone_wait_for_the_others_and_for_each_other() {
        let slots = Slots::new(3);
        let other = slots.take(1);

        let first = slots.take_all();
        let second = slots.take_all();
        tokio::pin!(first, second);
        assert!(futures::poll!(first.as_mut()).is_pending());
        assert!(futures::poll!(second.as_mut()).is_pending());
        assert!(slots.take(1).is_empty(), "what is freed is kept for them");
        drop(other);
        let first = first.await;

        assert!(first.is_some());
        assert!(futures::poll!(second.as_mut()).is_pending());
        drop(first);
        assert!(second.await.is_some());
    }

    #[tokio::test]
    async fn a_lost_check_goes_before_all_but_one_that_wait() {
        let checks = CheckSlots::new(1, 9, Arc::default());
        let busy = checks.take().await;
        let (first, second, lost) = (checks.take(), checks.take(), checks.take_first());
        tokio::pin!(first, second, lost);
        assert!(futures::poll!(first.as_mut()).is_pending());
        assert!(futures::poll!(second.as_mut()).is_pending());
        assert!(futures::poll!(lost.as_mut()).is_pending());

        drop(busy);
        drop(first.await);

        assert!(futures::poll!(second.as_mut()).is_pending());
        drop(lost.await);
        assert!(second.await.is_some());
    }

    #[tokio::test]
    async fn a_full_backlog_is_relieved_by_what_leaves() {
        let relieved = Arc::new(Notify::new());
        let checks = CheckSlots::new(1, 1, Arc::clone(&relieved));
        let first = checks.enter();
        assert!(!checks.is_full());
        let (second, third) = (checks.enter(), checks.enter());
        assert_eq!((checks.pending(), checks.is_full()), (3, true));

        drop((second, third));
        relieved.notified().await;

        assert!(!checks.is_full());
        drop(first);
        assert_eq!(checks.pending(), 0);
    }
}
