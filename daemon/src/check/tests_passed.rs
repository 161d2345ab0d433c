//! `tests_passed`: whether the recorded executions prove that a command ran and passed. The newest
//! execution that may have been it decides (`acceptance.md` 1.6, decision order).

use super::match_command::{Ending, Match, Run, match_command};
use super::reason::{Answer, Reason};
use super::scope::{Scope, is_redirected, may_divert};
use super::shapes::Shapes;
use crate::model::Evidence;
use crate::model::evidence::SUCCESS;

/// Judges a command by the recorded executions, oldest first.
pub(super) fn judge(command: &str, executions: &[Evidence], scope: &Scope<'_>) -> Answer {
    // 1 to 3: an older proof does not outlive a newer execution that cannot be told apart from it.
    for execution in executions.iter().rev() {
        match match_command(command, &execution.command, ending(execution), scope) {
            Match::No => {}
            // 4: a cut command may go on in any way.
            Match::Unprovable | Match::Proven(_) if execution.command_truncated => {
                return Reason::Truncated.into();
            }
            Match::Unprovable => return Reason::Unprovable.into(),
            Match::Proven(run) => return judge_run(execution, &run, scope),
        }
    }
    Reason::NoMatch.into()
}

/// Steps 5 to 10, for an execution that provably was the command.
fn judge_run(execution: &Evidence, run: &Run, scope: &Scope<'_>) -> Answer {
    // 5: a shell with a past may have changed what the command means, for better or worse.
    match execution.shell_persistent {
        Some(false) => {}
        Some(true) => return Reason::PersistentShell.into(),
        None => return Reason::UnknownShell.into(),
    }
    let foreign = || run.earlier().iter().filter(|segment| !scope.is_silent(segment));
    match ending(execution) {
        Ending::Success => {}
        Ending::Unknown => return Reason::UnknownStatus.into(),
        // A run in another directory, or one that never came, says nothing of the tests.
        Ending::Failure if foreign().any(may_divert) => return Reason::Unattributable.into(),
        Ending::Failure => return failed(execution), // 6
    }
    // 7
    if is_redirected(run.last()) {
        return Reason::Redirected.into();
    }
    if foreign().next().is_some() {
        return Reason::Unattributable.into();
    }
    // 8 to 10
    let shapes = Shapes::of(&execution.output_tail);
    if shapes.fail {
        Reason::FailSummary.into()
    } else if shapes.pass && !shapes.zero {
        Reason::PassSummary.into()
    } else {
        Reason::NoSummary.into()
    }
}

/// Only a plain lower-case word counts: what is spelled in another way was written by something
/// whose words are not known.
fn ending(execution: &Evidence) -> Ending {
    match execution.status.as_deref().map(str::trim) {
        Some(SUCCESS) => Ending::Success,
        Some(word) if !word.is_empty() && !word.contains(char::is_uppercase) => Ending::Failure,
        Some(_) | None => Ending::Unknown,
    }
}

fn failed(execution: &Evidence) -> Answer {
    match execution.status_marker.as_deref().map(str::trim) {
        Some(marker) if !marker.is_empty() => Answer::with(Reason::ExitMarker, marker),
        Some(_) | None => Reason::FailedStatus.into(),
    }
}
