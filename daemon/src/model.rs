//! Ids, statuses, places, histories and the values that travel between stages; pure, no I/O.

mod batch;
pub mod criteria;
pub mod evidence;
mod history;
mod hold;
mod ids;
mod new_item;
mod place;
mod principal;
mod settlement;
mod status;
pub mod verdict;
mod worker;

pub use batch::{BatchControl, Counts, VerdictCounts};
pub use evidence::Evidence;
pub use history::History;
pub use hold::Hold;
pub use ids::{Attempt, BatchId, FencingToken, ItemRef, LeaseId, Position, QueueName, WorkerId};
pub use new_item::NewItem;
pub use place::{ItemEvent, PLACES, Place, sources};
pub use principal::Principal;
pub use settlement::{
    AttemptEnding, Conclusion, Disposition, MAX_CHECK_LOSSES, PublishedResult, Settlement,
};
pub use status::ItemStatus;
pub use verdict::{Family, Finding, Leaf, Verdict, VerdictClass};
pub use worker::WorkerState;
