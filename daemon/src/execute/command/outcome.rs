//! What the end of a process, or its absence, means for the item.

use std::io;

use rustix::io::Errno;
use time::OffsetDateTime;

use super::capture::{self, Tail};
use super::process::{Cause, Ended};
use super::{CommandSpec, Otherwise};
use crate::execute::spawner::{Exit, SpawnError};
use crate::execute::{Execution, ExecutionEnd};
use crate::model::{LogTail, StopReason};
use crate::workspace::Refusal;

/// Why there was no process.
#[derive(Debug)]
pub(super) enum Obstacle {
    /// It was stopped before it started.
    Stopped,
    /// The input is not the JSON it should be.
    Input(serde_json::Error),
    /// An argument of the item's data cannot be passed.
    NulInArgument,
    /// Its private directory could not be made.
    Scratch(io::Error),
    /// The spawner could not start it.
    Spawn(SpawnError),
    /// There is no workspace for it.
    Workspace(Refusal),
}

/// When an execution began and ended.
type Times = (OffsetDateTime, OffsetDateTime);

pub(super) fn of_obstacle(
    spec: &CommandSpec,
    obstacle: &Obstacle,
    (started_at, ended_at): Times,
) -> Execution {
    let (end, cause) = match obstacle {
        Obstacle::Stopped => (ExecutionEnd::Stopped, "it was stopped".to_owned()),
        Obstacle::Input(error) => (ExecutionEnd::Permanent, format!("its input: {error}")),
        Obstacle::NulInArgument => {
            (ExecutionEnd::Permanent, "an argument would hold a NUL character".to_owned())
        }
        Obstacle::Scratch(error) => {
            (ExecutionEnd::NotAdmitted, format!("no private directory: {error}"))
        }
        Obstacle::Workspace(refusal @ Refusal::Denied(_)) => {
            (ExecutionEnd::Permanent, refusal.to_string())
        }
        Obstacle::Workspace(refusal @ Refusal::Unseen(_)) => {
            (ExecutionEnd::NotAdmitted, refusal.to_string())
        }
        Obstacle::Workspace(refusal @ Refusal::Failed(error)) => {
            (ExecutionEnd::NotAdmitted, format!("{refusal}: {error}"))
        }
        Obstacle::Spawn(SpawnError::System(error)) => {
            (ExecutionEnd::NotAdmitted, error.to_string())
        }
        Obstacle::Spawn(SpawnError::WorkingDirectory(error)) => {
            (of_start_failure(error), format!("its working directory: {error}"))
        }
        Obstacle::Spawn(SpawnError::Program(error)) => {
            let hint = match Errno::from_io_error(error) {
                Some(Errno::TOOBIG) => "; a larger input fits {input_file} or standard input",
                _ => "",
            };
            (of_start_failure(error), format!("{error}{hint}"))
        }
    };
    let stop_reason =
        if end == ExecutionEnd::Stopped { StopReason::Stopped } else { StopReason::CannotStart };
    let error = format!("cannot start {}: {cause}", spec.argv[0]);
    Execution {
        error: Some(capture::bounded(&error, "", spec.error_chars)),
        ..Execution::new(end, stop_reason, started_at, ended_at)
    }
}

/// Whether another attempt may find the program and its directory in better order.
fn of_start_failure(error: &io::Error) -> ExecutionEnd {
    match Errno::from_io_error(error) {
        Some(Errno::AGAIN | Errno::NOMEM | Errno::MFILE | Errno::NFILE | Errno::TXTBSY) => {
            ExecutionEnd::NotAdmitted
        }
        // A device or a network file system that does not answer now.
        Some(Errno::IO | Errno::STALE | Errno::TIMEDOUT | Errno::INTR) | None => {
            ExecutionEnd::Retryable
        }
        // Not there, not executable, not a program, too many arguments: as it will be next time.
        Some(_) => ExecutionEnd::Permanent,
    }
}

pub(super) fn of_process(
    spec: &CommandSpec,
    ended: Ended,
    (started_at, ended_at): Times,
) -> Execution {
    let Ended { cause, exit, stdout, stderr, recording: _ } = ended;
    let (end, stop_reason, what) = match (cause, &exit) {
        (Cause::TimedOut, _) => {
            let limit = humantime::format_duration(spec.timeout);
            (ExecutionEnd::TimedOut, StopReason::TimedOut, format!("timed out after {limit}"))
        }
        (Cause::Stopped, _) | (Cause::Exited, Ok(Exit::Fenced)) => {
            (ExecutionEnd::Stopped, StopReason::Stopped, "stopped".to_owned())
        }
        (Cause::Exited, Ok(Exit::Status(status))) => {
            let end = of_status(spec, *status);
            let succeeded = end == ExecutionEnd::Succeeded;
            let stop_reason =
                if succeeded { StopReason::Completed } else { StopReason::ExitStatus };
            (end, stop_reason, format!("exit status {status}"))
        }
        (Cause::Exited, Ok(Exit::Signal(number))) => {
            let name = signal_hook::low_level::signal_name(*number).unwrap_or("no name");
            (
                ExecutionEnd::Retryable,
                StopReason::Signal,
                format!("ended by signal {number} ({name})"),
            )
        }
        (Cause::Exited, Err(error)) => {
            (ExecutionEnd::Lost, StopReason::Lost, format!("exit status lost: {error}"))
        }
    };
    let (exit_status, signal) = match exit {
        Ok(Exit::Status(status)) => (Some(status), None),
        Ok(Exit::Signal(number)) => (None, Some(number)),
        Ok(Exit::Fenced) | Err(_) => (None, None),
    };
    let error = (end != ExecutionEnd::Succeeded)
        .then(|| capture::bounded(&what, &stderr.to_text(), spec.error_chars));
    let output_bytes = stdout.total();
    let (output, output_truncated) = stdout.into_text();
    Execution {
        output,
        output_bytes,
        output_truncated,
        error,
        log: log_tail(stderr, spec.log_bytes),
        exit_status,
        signal,
        ..Execution::new(end, stop_reason, started_at, ended_at)
    }
}

/// The end of standard error, of at most `limit` bytes.
fn log_tail(stderr: Tail, limit: usize) -> LogTail {
    let size_bytes = i64::try_from(stderr.total()).unwrap_or(i64::MAX);
    let (text, truncated) = stderr.into_bounded_text(limit);
    LogTail { text, size_bytes, truncated }
}

fn of_status(spec: &CommandSpec, status: i32) -> ExecutionEnd {
    if spec.success.contains(&status) {
        ExecutionEnd::Succeeded
    } else if spec.permanent.contains(&status) {
        ExecutionEnd::Permanent
    } else if spec.retry.contains(&status) || spec.otherwise == Otherwise::Retry {
        ExecutionEnd::Retryable
    } else {
        ExecutionEnd::Permanent
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::capture::Head;
    use super::super::tests::spec;
    use super::*;

    const TIMES: Times = (OffsetDateTime::UNIX_EPOCH, OffsetDateTime::UNIX_EPOCH);

    fn ended(cause: Cause, exit: io::Result<Exit>) -> Ended {
        let (stdout, stderr) = (Head::new(4), Tail::new(0));
        let mut ended = Ended { cause, exit, stdout, stderr, recording: None };
        ended.stdout.push(b"output");
        ended.stderr.push(b"it said why\n");
        ended
    }

    fn of(cause: Cause, exit: Exit) -> Execution {
        of_process(&spec(&["p"]), ended(cause, Ok(exit)), TIMES)
    }

    fn of_start(error: SpawnError) -> Execution {
        of_obstacle(&spec(&["p"]), &Obstacle::Spawn(error), TIMES)
    }

    #[test]
    fn exit_statuses_mean_what_the_queue_says() {
        let mut spec = spec(&["p"]);
        spec.success = vec![0, 10];
        for (otherwise, other) in [
            (Otherwise::Retry, ExecutionEnd::Retryable),
            (Otherwise::Permanent, ExecutionEnd::Permanent),
        ] {
            spec.otherwise = otherwise;
            for (status, end) in [
                (0, ExecutionEnd::Succeeded),
                (10, ExecutionEnd::Succeeded),
                (75, ExecutionEnd::Retryable),
                (2, ExecutionEnd::Permanent),
                (1, other),
                (126, other),
                (127, other),
                (255, other),
            ] {
                let process = ended(Cause::Exited, Ok(Exit::Status(status)));
                let execution = of_process(&spec, process, TIMES);
                assert_eq!(execution.end, end, "{status}");
                assert_eq!((execution.exit_status, execution.signal), (Some(status), None));
            }
        }
    }

    #[test]
    fn every_end_of_a_process_has_its_reason() {
        let success = of(Cause::Exited, Exit::Status(0));
        assert_eq!((success.stop_reason, success.error), (StopReason::Completed, None));
        assert_eq!((success.output.as_str(), success.output_truncated), ("outp", true));
        assert_eq!(success.output_bytes, 6);

        for (cause, exit, end, stop_reason, error) in [
            (
                Cause::Exited,
                Exit::Status(3),
                ExecutionEnd::Retryable,
                StopReason::ExitStatus,
                "exit status 3: it said why",
            ),
            (
                Cause::Exited,
                Exit::Signal(9),
                ExecutionEnd::Retryable,
                StopReason::Signal,
                "ended by signal 9 (SIGKILL): it said why",
            ),
            (
                Cause::TimedOut,
                Exit::Signal(15),
                ExecutionEnd::TimedOut,
                StopReason::TimedOut,
                "timed out after 30s: it said why",
            ),
            (
                Cause::TimedOut,
                Exit::Status(0),
                ExecutionEnd::TimedOut,
                StopReason::TimedOut,
                "timed out after 30s: it said why",
            ),
            (
                Cause::Stopped,
                Exit::Status(0),
                ExecutionEnd::Stopped,
                StopReason::Stopped,
                "stopped: it said why",
            ),
        ] {
            let execution = of(cause, exit);
            assert_eq!((execution.end, execution.stop_reason), (end, stop_reason));
            assert_eq!(execution.error.as_deref(), Some(error));
            assert_eq!(execution.output, "outp");
        }
    }

    #[test]
    fn a_lost_exit_status_is_no_success() {
        let lost = ended(Cause::Exited, Err(Errno::CHILD.into()));
        let execution = of_process(&spec(&["p"]), lost, TIMES);
        assert_eq!((execution.end, execution.exit_status), (ExecutionEnd::Lost, None));
    }

    #[test]
    fn what_could_not_start_is_told_apart() {
        use ExecutionEnd::{NotAdmitted, Permanent, Retryable};
        let program: fn(io::Error) -> SpawnError = SpawnError::Program;
        let directory: fn(io::Error) -> SpawnError = SpawnError::WorkingDirectory;
        let system: fn(io::Error) -> SpawnError = SpawnError::System;
        for (errno, make, end) in [
            (Errno::NOENT, program, Permanent),
            (Errno::ACCESS, program, Permanent),
            (Errno::NOEXEC, program, Permanent),
            (Errno::TOOBIG, program, Permanent),
            (Errno::NOENT, directory, Permanent),
            (Errno::TXTBSY, program, NotAdmitted),
            (Errno::NOMEM, program, NotAdmitted),
            (Errno::AGAIN, system, NotAdmitted),
            (Errno::MFILE, system, NotAdmitted),
            (Errno::NFILE, system, NotAdmitted),
            (Errno::IO, program, Retryable),
        ] {
            let execution = of_start(make(errno.into()));
            assert_eq!(execution.end, end, "{errno}");
            assert_eq!(execution.stop_reason, StopReason::CannotStart);
            let error = execution.error.unwrap();
            assert!(error.starts_with("cannot start p: "), "{error}");
            assert!(error.contains(&io::Error::from(errno).to_string()), "{error}");
        }
        let full = of_obstacle(&spec(&["p"]), &Obstacle::Scratch(Errno::NOSPC.into()), TIMES);
        assert_eq!((full.end, full.stop_reason), (NotAdmitted, StopReason::CannotStart));
        assert!(full.error.unwrap().contains("No space left"));
        let nul = of_obstacle(&spec(&["p"]), &Obstacle::NulInArgument, TIMES);
        assert_eq!((nul.end, nul.stop_reason), (Permanent, StopReason::CannotStart));
    }

    #[test]
    fn error_texts_stay_within_their_limit() {
        let mut spec = spec(&["p"]);
        spec.error_chars = 20;
        spec.timeout = Duration::from_millis(1500);
        let timed_out = ended(Cause::TimedOut, Ok(Exit::Status(0)));
        let error = of_process(&spec, timed_out, TIMES).error.unwrap();
        assert_eq!(error, "timed out after 1s 5");
    }
}
