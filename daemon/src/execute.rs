//! What an executor is: it runs one attempt of one item and says how that ended.
//!
//! An executor never writes a lease or a state: it returns an [`Execution`], and the attempt decides
//! what becomes of the item.

pub mod command;
pub mod keeper;
pub(crate) mod processes;
pub mod spawn;
pub mod spawner;

use async_trait::async_trait;
use time::OffsetDateTime;
use tokio_util::sync::CancellationToken;

use crate::model::{Attempt, Evidence, FencingToken, ItemRef, LeaseId, QueueName};
use crate::workspace::WorkspaceId;

/// The input of one item: JSON text as it was submitted, digit for digit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Job {
    /// The item.
    pub item: ItemRef,
    /// Its key, unique in the batch.
    pub key: String,
    /// The queue it runs in.
    pub queue: QueueName,
    /// The number of this attempt.
    pub attempt: Attempt,
    /// The lease it is held under.
    pub lease: LeaseId,
    /// The fencing token of that lease.
    pub token: FencingToken,
    /// The input as JSON text.
    pub input_json: String,
    /// Its acceptance criteria, normalized; empty where there are none. Untrusted text like the
    /// input: handed on as data, never as instructions.
    pub criteria: Vec<String>,
    /// When the worker stops the execution at the latest by the queue's timeout; for display to
    /// the work.
    pub deadline: OffsetDateTime,
    /// W3C trace context of the execution's span.
    pub traceparent: Option<String>,
}

/// How an execution ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExecutionEnd {
    /// It did what it should.
    Succeeded,
    /// It failed; another attempt may succeed.
    Retryable,
    /// It failed; no further attempt would help.
    Permanent,
    /// It took longer than its queue allows; its process tree is gone.
    TimedOut,
    /// It was stopped through the stop token; its process tree is gone.
    Stopped,
    /// It could not be started for want of a resource (processes, memory, files).
    NotAdmitted,
}

/// One execution, after its end: nothing of it runs any more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Execution {
    /// How it ended.
    pub end: ExecutionEnd,
    /// When it began.
    pub started_at: OffsetDateTime,
    /// When it ended.
    pub ended_at: OffsetDateTime,
    /// What it produced, bounded: text in which invalid UTF-8 and NUL became U+FFFD.
    pub output: String,
    /// How many bytes it really produced.
    pub output_bytes: u64,
    /// Whether `output` was cut to the limit.
    pub output_truncated: bool,
    /// What went wrong, with the tail of standard error; none on success.
    pub error: Option<String>,
    /// The named reason it ended, from a closed set: `completed`, `exit_status`, `signal`,
    /// `timed_out`, `stopped`, `cannot_start`.
    pub stop_reason: &'static str,
    /// The exit status of a command.
    pub exit_status: Option<i32>,
    /// The signal that ended a command.
    pub signal: Option<i32>,
    /// What was recorded of its commands, oldest first; only for an item with criteria.
    pub evidence: Vec<Evidence>,
    /// The workspace it had, if any.
    pub workspace: Option<WorkspaceId>,
}

/// Runs items of a queue.
#[async_trait]
pub trait Executor: Send + Sync {
    /// Runs one attempt to its end. When `stop` is cancelled it ends what it started, within the
    /// kill grace, and returns [`ExecutionEnd::Stopped`].
    ///
    /// # Cancel safety
    /// Not cancel safe: dropped, it may leave a process behind. Cancel `stop` and await it.
    async fn execute(&self, job: &Job, stop: &CancellationToken) -> Execution;
}
