use std::time::Duration;

use time::OffsetDateTime;

use super::{History, StopReason, Verdict};

/// How an attempt that published no outcome ended. Source: `attempts.ending`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AttemptEnding {
    /// The execution failed and may be tried again.
    Error,
    /// It took longer than the queue's timeout.
    TimedOut,
    /// It ended by a signal that nobody here sent.
    Signal,
    /// Its lease expired and was taken back.
    Expired,
    /// The worker stopped it: drain, lost claim.
    Interrupted,
    /// It was returned before it started.
    Unstarted,
    /// It could not be started for want of a resource.
    NotAdmitted,
    /// An operator gave the failed item new attempts.
    Retried,
}

impl AttemptEnding {
    /// Every ending.
    pub const ALL: [Self; 8] = [
        Self::Error,
        Self::TimedOut,
        Self::Signal,
        Self::Expired,
        Self::Interrupted,
        Self::Unstarted,
        Self::NotAdmitted,
        Self::Retried,
    ];

    /// The word stored and shown.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Error => "error",
            Self::TimedOut => "timed_out",
            Self::Signal => "signal",
            Self::Expired => "expired",
            Self::Interrupted => "interrupted",
            Self::Unstarted => "unstarted",
            Self::NotAdmitted => "not_admitted",
            Self::Retried => "retried",
        }
    }
}

/// The payload of an outcome, bounded before it gets here.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PublishedResult {
    /// The result as JSON text without line breaks; none when the execution left none.
    pub json: Option<String>,
    /// Whether the result was cut to the limit.
    pub truncated: bool,
    /// How many bytes the execution really produced.
    pub size_bytes: i64,
}

/// The end of what an execution logged: standard error, for a command.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LogTail {
    /// The text, bounded; bytes that are not UTF-8, and NUL, became U+FFFD. What stands before it is
    /// missing where it is shorter than `size_bytes`.
    pub text: String,
    /// How many bytes were really logged.
    pub size_bytes: i64,
    /// Whether something before it is missing.
    pub truncated: bool,
}

/// What a hand-in does with an item.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Disposition {
    /// Publish the outcome `succeeded`.
    Succeed,
    /// Publish the outcome `failed`.
    Fail,
    /// Record the attempt and let the item wait for the next.
    Again {
        /// How this attempt ended.
        ending: AttemptEnding,
        /// Whether it was charged.
        charged: bool,
        /// From now until the item may be claimed.
        delay: Duration,
        /// The history the next attempt begins with.
        history: History,
    },
}

/// One item's end, ready to be handed in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settlement {
    /// What becomes of the item.
    pub disposition: Disposition,
    /// When the execution began; none when it never did.
    pub started_at: Option<OffsetDateTime>,
    /// When it ended.
    pub ended_at: OffsetDateTime,
    /// Its result, for an outcome.
    pub result: PublishedResult,
    /// What went wrong, bounded; none on success.
    pub error: Option<String>,
    /// The named reason it ended.
    pub stop_reason: StopReason,
    /// The exit status of a command.
    pub exit_status: Option<i32>,
    /// The signal that ended a command.
    pub signal: Option<i32>,
    /// The end of what it logged, kept with the attempt.
    pub log: LogTail,
}

/// Lost checks after which an item ends with its stored result and no verdict. The SQL function
/// `reap` states the same; a test compares.
pub const MAX_CHECK_LOSSES: u8 = 3;

/// What becomes of an item whose execution completed and was stored, when its check is over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Conclusion {
    /// Publish the stored outcome with what the check found; none when it could not be done.
    Publish(Option<Verdict>),
    /// Let the item wait for another check, which begins with this history.
    Recheck(History),
}

impl Conclusion {
    /// What becomes of an item whose check was lost: another one, or no verdict after too many.
    #[must_use]
    pub fn of_loss(history: History) -> Self {
        let history = history.plus_check_loss();
        if history.check_losses() >= MAX_CHECK_LOSSES {
            Self::Publish(None)
        } else {
            Self::Recheck(history)
        }
    }
}
