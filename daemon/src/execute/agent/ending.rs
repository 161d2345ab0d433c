//! How sessions, calls and commands end, and what that is called.

use std::fmt::Write;
use std::time::Duration;

use super::tools::shown;
use crate::execute::upstream::call::Failure;
use crate::execute::{Execution, ExecutionEnd};
use crate::model::{Evidence, StopReason};
use crate::workspace::WorkspaceId;

/// How a session ended.
pub(super) struct Ended {
    /// What it means, where the reason alone does not say.
    pub(super) end: Option<ExecutionEnd>,
    pub(super) reason: StopReason,
    /// The report, or the last that the model said.
    pub(super) text: String,
    /// Whether the server cut the text off.
    pub(super) cut_short: bool,
    pub(super) error: String,
    pub(super) evidence: Vec<Evidence>,
    pub(super) workspace: Option<WorkspaceId>,
}

/// Why a session ends; without it, it goes on.
pub(super) struct Stop {
    pub(super) reason: StopReason,
    pub(super) end: Option<ExecutionEnd>,
    pub(super) error: String,
}

pub(super) const fn stop(reason: StopReason) -> Stop {
    Stop { reason, end: None, error: String::new() }
}

/// What a model is told of a command, and the marker of its exit status where it has one.
pub(super) fn told(execution: &Execution, timeout: Duration) -> (String, Option<String>) {
    let marker = execution.exit_status.map(|status| format!("Exit Code: {status}"));
    let last_line = match (execution.end, &marker, execution.signal) {
        (ExecutionEnd::TimedOut, _, _) => {
            format!("Timed out after {}", humantime::format_duration(timeout))
        }
        (_, Some(marker), _) => marker.clone(),
        (_, None, Some(signal)) => format!("Ended by signal {signal}"),
        (_, None, None) => format!("Error: {}", execution.error.as_deref().unwrap_or("not run")),
    };
    let mut output = execution.output.clone();
    if execution.output_truncated {
        let missing = execution.output_bytes.saturating_sub(output.len() as u64);
        write!(output, "\n[… {missing} bytes not captured …]\n").expect("a String takes any text");
        if let Some(record) = execution.evidence.first() {
            output.push_str(&record.output_tail);
        }
    }
    let marker = marker.filter(|_| execution.end != ExecutionEnd::TimedOut);
    (shown(&output, &last_line), marker)
}

/// How a call that failed for good ends the session.
pub(super) fn of_failure(failure: Failure) -> Stop {
    let Failure { end, reason, error } = failure;
    match (reason, end) {
        (StopReason::ContextOverflow, _) => Stop { reason, end: None, error },
        (_, ExecutionEnd::Stopped) => stop(StopReason::Stopped),
        (reason, ExecutionEnd::Deferred(_)) => Stop { reason, end: Some(end), error },
        (reason, end) => {
            let error = format!("{reason}: {error}");
            Stop { reason: StopReason::UpstreamError, end: Some(end), error }
        }
    }
}
