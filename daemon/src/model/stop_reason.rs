use std::fmt;

/// The named reason an attempt ended: a closed set. Source: `outcomes.stop_reason` and
/// `attempts.stop_reason`, where an older row may hold a word of another version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StopReason {
    /// It did what it should; the only reason of a success.
    Completed,
    /// A command ended with a status that its queue does not count as a success.
    ExitStatus,
    /// A signal ended a command that nobody here sent.
    Signal,
    /// A command used up a limit of its queue: processor time, or the size of a file.
    ResourceLimit,
    /// It took longer than its queue allows.
    TimedOut,
    /// It was told to stop: a drain, a lost lease, a cancelled batch.
    Stopped,
    /// It could not be started: program, directory, input, or a resource of the system.
    CannotStart,
    /// This worker cannot run the batch: it does not know its settings, or may not use them.
    CannotRun,
    /// How it ended is not known: who watched it is gone, or a connection broke after the request.
    Lost,
    /// Its deadline passed before it ended.
    Deadline,
    /// It waited longer for its first attempt than its queue allows.
    WaitedTooLong,
    /// It was given back before it started.
    Unstarted,
    /// Its worker lost track of it.
    Forgotten,
    /// The database refused what it left.
    Unstorable,
    /// Its lease was lost while it ran, and its last note was refused.
    LeaseLost,
    /// Its lease expired: the worker died, froze or was cut off.
    LeaseExpired,
    /// Its worker died, and whoever guarded that gave it back.
    WorkerDied,
    /// An operator took it from its worker.
    Revoked,
    /// It took its worker down too often.
    Poison,
    /// A budget of turns was used up.
    MaxTurns,
    /// A budget of time was used up.
    MaxTime,
    /// A budget of tokens was used up.
    MaxTokens,
    /// The request is larger than the model's context.
    ContextOverflow,
    /// The request alone is larger than a limit of its upstream.
    TooLargeForLimit,
    /// A model's answer was cut off before it said anything.
    OutputLimit,
    /// An upstream refused what was said.
    ContentFilter,
    /// A model asked for tools in no usable way, again and again.
    InvalidToolCalls,
    /// A model repeated one call.
    RepeatedCall,
    /// A model said nothing.
    EmptyResponse,
    /// A workspace grew beyond its quota.
    WorkspaceQuota,
    /// An upstream answered with an error, or not as it should.
    UpstreamError,
    /// An upstream refused the request as it is: another attempt gets the same answer.
    Rejected,
    /// An upstream does not have the model.
    ModelNotFound,
    /// An upstream asked to wait, or a limit of the fleet left no turn.
    Throttled,
    /// An upstream is paused: credentials, quota, or a model it does not know.
    UpstreamPaused,
    /// An upstream could not be reached; nothing was sent.
    UpstreamDown,
    /// A target that this queue must not reach.
    TargetRefused,
    /// A response was larger than its queue allows.
    ResponseTooLarge,
}

impl StopReason {
    /// Every reason.
    pub const ALL: [Self; 38] = [
        Self::Completed,
        Self::ExitStatus,
        Self::Signal,
        Self::ResourceLimit,
        Self::TimedOut,
        Self::Stopped,
        Self::CannotStart,
        Self::CannotRun,
        Self::Lost,
        Self::Deadline,
        Self::WaitedTooLong,
        Self::Unstarted,
        Self::Forgotten,
        Self::Unstorable,
        Self::LeaseLost,
        Self::LeaseExpired,
        Self::WorkerDied,
        Self::Revoked,
        Self::Poison,
        Self::MaxTurns,
        Self::MaxTime,
        Self::MaxTokens,
        Self::ContextOverflow,
        Self::TooLargeForLimit,
        Self::OutputLimit,
        Self::ContentFilter,
        Self::InvalidToolCalls,
        Self::RepeatedCall,
        Self::EmptyResponse,
        Self::WorkspaceQuota,
        Self::UpstreamError,
        Self::Rejected,
        Self::ModelNotFound,
        Self::Throttled,
        Self::UpstreamPaused,
        Self::UpstreamDown,
        Self::TargetRefused,
        Self::ResponseTooLarge,
    ];

    /// The word stored and shown.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Completed => "completed",
            Self::ExitStatus => "exit_status",
            Self::Signal => "signal",
            Self::ResourceLimit => "resource_limit",
            Self::TimedOut => "timed_out",
            Self::Stopped => "stopped",
            Self::CannotStart => "cannot_start",
            Self::CannotRun => "cannot_run",
            Self::Lost => "lost",
            Self::Deadline => "deadline",
            Self::WaitedTooLong => "waited_too_long",
            Self::Unstarted => "unstarted",
            Self::Forgotten => "forgotten",
            Self::Unstorable => "unstorable",
            Self::LeaseLost => "lease_lost",
            Self::LeaseExpired => "lease_expired",
            Self::WorkerDied => "worker_died",
            Self::Revoked => "revoked",
            Self::Poison => "poison",
            Self::MaxTurns => "max_turns",
            Self::MaxTime => "max_time",
            Self::MaxTokens => "max_tokens",
            Self::ContextOverflow => "context_overflow",
            Self::TooLargeForLimit => "too_large_for_limit",
            Self::OutputLimit => "output_limit",
            Self::ContentFilter => "content_filter",
            Self::InvalidToolCalls => "invalid_tool_calls",
            Self::RepeatedCall => "repeated_call",
            Self::EmptyResponse => "empty_response",
            Self::WorkspaceQuota => "workspace_quota",
            Self::UpstreamError => "upstream_error",
            Self::Rejected => "rejected",
            Self::ModelNotFound => "model_not_found",
            Self::Throttled => "throttled",
            Self::UpstreamPaused => "upstream_paused",
            Self::UpstreamDown => "upstream_down",
            Self::TargetRefused => "target_refused",
            Self::ResponseTooLarge => "response_too_large",
        }
    }
}

impl fmt::Display for StopReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_reason_has_a_word_of_its_own() {
        let words: BTreeSet<_> = StopReason::ALL.iter().map(|reason| reason.as_str()).collect();
        assert_eq!(words.len(), StopReason::ALL.len());
    }
}
