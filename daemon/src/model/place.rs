//! Where an item is (I1), and which step may take it from where.

/// The one place an item is in. `Fresh` means at or beyond the batch's cursor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Place {
    /// Never claimed: at or beyond the cursor.
    Fresh,
    /// In `waiting`: between two attempts, deferred, or waiting for a recheck.
    Waiting,
    /// In the positions of exactly one lease.
    Held,
    /// In a lease, with its result stored for a check.
    Staged,
    /// In `outcomes`, succeeded.
    Succeeded,
    /// In `outcomes`, failed.
    Failed,
    /// Nowhere, in a cancelled batch.
    Cancelled,
}

/// A step that moves an item.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ItemEvent {
    /// A worker takes it under a lease.
    Claim,
    /// Its holder stores the result and asks for a check.
    Stage,
    /// Its holder publishes an outcome, or a next attempt.
    Finish,
    /// Its holder returns it unfinished.
    GiveBack,
    /// The reaper takes it from an expired lease.
    Expire,
    /// A worker takes it to repeat a lost check.
    Recheck,
    /// An operator gives a failed item new attempts.
    Retry,
    /// Its batch is cancelled.
    Cancel,
}

/// Every place; the order of the diagram in `ARCHITECTURE.md`.
pub const PLACES: [Place; 7] = [
    Place::Fresh,
    Place::Waiting,
    Place::Held,
    Place::Staged,
    Place::Succeeded,
    Place::Failed,
    Place::Cancelled,
];

/// The places an event may take an item from. Rust and SQL both follow this table.
#[must_use]
pub const fn sources(event: ItemEvent) -> &'static [Place] {
    use Place::{Failed, Fresh, Held, Staged, Waiting};
    match event {
        ItemEvent::Claim => &[Fresh, Waiting],
        ItemEvent::Stage => &[Held],
        ItemEvent::Finish | ItemEvent::GiveBack | ItemEvent::Expire => &[Held, Staged],
        ItemEvent::Recheck => &[Waiting],
        ItemEvent::Retry => &[Failed],
        ItemEvent::Cancel => &[Fresh, Waiting, Held, Staged],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_is_left_only_by_a_retry_of_a_failed_item() {
        let events = [
            ItemEvent::Claim,
            ItemEvent::Stage,
            ItemEvent::Finish,
            ItemEvent::GiveBack,
            ItemEvent::Expire,
            ItemEvent::Recheck,
            ItemEvent::Cancel,
        ];
        for event in events {
            for end in [Place::Succeeded, Place::Failed, Place::Cancelled] {
                assert!(!sources(event).contains(&end), "{event:?} from {end:?}");
            }
        }
        assert_eq!(sources(ItemEvent::Retry), [Place::Failed]);
    }
}
