//! What an executor is: it runs one attempt of one item and says how that ended.
//!
//! An executor never writes a lease or a state: it returns an [`Execution`], and the attempt decides
//! what becomes of the item.

pub mod agent;
pub mod command;
pub mod http;
pub mod keeper;
pub(crate) mod processes;
pub mod spawn;
pub mod spawner;
pub mod upstream;

use std::time::Duration;

use async_trait::async_trait;
use time::OffsetDateTime;
use tokio_util::sync::CancellationToken;

use crate::model::{
    Attempt, Evidence, FencingToken, ItemRef, LeaseId, LogTail, QueueName, Reporter, StopReason,
};
use crate::workspace::WorkspaceId;
use upstream::usage::Usage;

/// One attempt at one item: what an executor is given.
#[derive(Clone, Debug)]
pub struct Job {
    /// The item.
    pub item: ItemRef,
    /// Its key, unique in the batch.
    pub key: String,
    /// The queue it runs in.
    pub queue: QueueName,
    /// The number of this attempt.
    pub attempt: Attempt,
    /// How often an explicit retry gave the item new attempts.
    pub retries: u8,
    /// The lease it is held under.
    pub lease: LeaseId,
    /// The fencing token of that lease.
    pub token: FencingToken,
    /// The input as JSON text, as it was submitted, digit for digit.
    pub input_json: String,
    /// Its acceptance criteria, normalized; empty where there are none. Untrusted text like the
    /// input: handed on as data, never as instructions.
    pub criteria: Vec<String>,
    /// When the worker stops the execution at the latest by the queue's timeout; for display to
    /// the work.
    pub deadline: OffsetDateTime,
    /// W3C trace context of the execution's span.
    pub traceparent: Option<String>,
    /// Takes reports of how far it has come.
    pub reporter: Reporter,
}

/// How an execution ended: its outcome class.
///
/// | class | ends | charged |
/// | --- | --- | --- |
/// | success | [`Succeeded`](Self::Succeeded) | |
/// | retryable | [`Retryable`](Self::Retryable), [`TimedOut`](Self::TimedOut), [`NotAdmitted`](Self::NotAdmitted) | yes, but for the last |
/// | permanent | [`Permanent`](Self::Permanent) | the item fails |
/// | interrupted | [`Stopped`](Self::Stopped) | no |
/// | lost | [`Lost`](Self::Lost) | yes |
///
/// An uncharged end is charged when it comes again and again (`retry.max_interruptions`,
/// `retry.max_admissions`). Where the lease itself is lost, nothing is handed in whatever the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExecutionEnd {
    /// It did what it should.
    Succeeded,
    /// It failed; another attempt may succeed.
    Retryable,
    /// It failed; no further attempt would help.
    Permanent,
    /// It took longer than its queue allows; nothing of it runs any more.
    TimedOut,
    /// It was stopped through the stop token; nothing of it runs any more.
    Stopped,
    /// It could not be started for want of a resource (processes, memory, files, an upstream).
    NotAdmitted,
    /// It may have done what it should, or a part of that: nobody saw how it ended. Nothing of it
    /// runs here any more.
    Lost,
    /// It did not come to its turn at what it needs: it may be tried again after this long at the
    /// earliest, and this attempt does not count.
    Deferred(Duration),
}

/// One execution, after its end: nothing of it runs any more.
///
/// Made by [`Execution::new`]; then whatever there is more to say is set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Execution {
    /// How it ended.
    pub end: ExecutionEnd,
    /// The named reason of that.
    pub stop_reason: StopReason,
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
    /// The end of what it logged: standard error, for a command.
    pub log: LogTail,
    /// The exit status of a command.
    pub exit_status: Option<i32>,
    /// The signal that ended a command.
    pub signal: Option<i32>,
    /// What was recorded of its commands, oldest first; only for an item with criteria.
    pub evidence: Vec<Evidence>,
    /// The workspace it had, if any.
    pub workspace: Option<WorkspaceId>,
}

impl Execution {
    /// An execution that left nothing but its end. An error is kept as it is: bound it before.
    #[must_use]
    pub fn new(
        end: ExecutionEnd,
        stop_reason: StopReason,
        started_at: OffsetDateTime,
        ended_at: OffsetDateTime,
    ) -> Self {
        Self {
            end,
            stop_reason,
            started_at,
            ended_at,
            output: String::new(),
            output_bytes: 0,
            output_truncated: false,
            error: None,
            log: LogTail::default(),
            exit_status: None,
            signal: None,
            evidence: Vec::new(),
            workspace: None,
        }
    }
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

/// What an execution used of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Spent {
    /// The model that answered, by its own word where it says one.
    pub model: String,
    /// How many calls were answered.
    pub calls: u32,
    /// Tokens, summed over the calls that said; none when none did.
    pub usage: Option<Usage>,
}

/// What became of a line of a transcript.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Noted {
    /// It is stored.
    Stored,
    /// The item is no longer held under the job's lease and token: nothing was stored.
    Lost,
    /// There was no answer.
    Unknown,
}

/// Where executors note what is kept beside results. Every write is fenced: a holder that lost its
/// lease writes nothing.
#[async_trait]
pub trait Ledger: Send + Sync {
    /// Notes what an attempt used, its sum so far. It may get lost: no item fails for it.
    async fn spend(&self, job: &Job, spent: &Spent);

    /// Appends to the transcript of an attempt; `seq` counts from 0.
    async fn note(&self, job: &Job, seq: u32, entry: &serde_json::Value) -> Noted;
}

/// Keeps nothing: for a program that embeds an executor without a database.
pub struct NoLedger;

#[async_trait]
impl Ledger for NoLedger {
    async fn spend(&self, _: &Job, _: &Spent) {}

    async fn note(&self, _: &Job, _: u32, _: &serde_json::Value) -> Noted {
        Noted::Stored
    }
}
