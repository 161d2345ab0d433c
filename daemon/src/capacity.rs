//! Execution slots: a claim asks for no more than are free, and a slot is free again only when its
//! item was handed in.

use std::sync::Arc;

use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

/// The execution slots of a process.
#[derive(Clone, Debug)]
pub struct Slots {
    permits: Arc<Semaphore>,
    freed: Arc<Notify>,
    total: usize,
}

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
        Self { permits: Arc::new(Semaphore::new(total)), freed: Arc::default(), total }
    }

    /// How many there are.
    #[must_use]
    pub const fn total(&self) -> usize {
        self.total
    }

    /// How many are free now.
    #[must_use]
    pub fn free(&self) -> usize {
        self.permits.available_permits()
    }

    /// As many slots as are free, at most `most`.
    #[must_use]
    pub fn take(&self, most: usize) -> Vec<Slot> {
        std::iter::from_fn(|| Arc::clone(&self.permits).try_acquire_owned().ok())
            .take(most)
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

impl Drop for Slot {
    fn drop(&mut self) {
        drop(self.permit.take());
        self.freed.notify_one();
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
}
