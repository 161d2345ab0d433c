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
mod report;
mod settlement;
mod status;
mod stop_reason;
pub mod verdict;
mod worker;

pub use batch::{BatchControl, Counts, VerdictCounts};
pub use evidence::Evidence;
pub use history::History;
pub use hold::{Hold, PreviousAttempt};
pub use ids::{Attempt, BatchId, FencingToken, ItemRef, LeaseId, Position, QueueName, WorkerId};
pub use new_item::NewItem;
pub use place::{ItemEvent, PLACES, Place, sources};
pub use principal::Principal;
pub use report::{MAX_MESSAGE_CHARS, ProgressReport, Reporter};
pub use settlement::{
    AttemptEnding, Conclusion, Disposition, LogTail, MAX_CHECK_LOSSES, PublishedResult, Settlement,
};
pub use status::ItemStatus;
pub use stop_reason::StopReason;
pub use verdict::{Family, Finding, Leaf, Verdict, VerdictClass};
pub use worker::{Asked, WorkerState};
