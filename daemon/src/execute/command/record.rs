//! What a process printed and how it ended, recorded as evidence for the acceptance check.

use sha2::{Digest, Sha256};
use time::OffsetDateTime;

use super::capture::Tail;
use super::process::Cause;
use crate::execute::spawner::Exit;
use crate::model::Evidence;
use crate::model::evidence::{FAILURE, SUCCESS, output_tail};

/// One of a process's two streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stream {
    Out,
    Error,
}

/// Both streams of a process as they came, in bounded memory.
#[derive(Debug, Default)]
pub(super) struct Recording {
    tail: Tail,
    bytes: u64,
    digest: Sha256,
    /// Where the last bytes came from, while their line goes on.
    open_line: Option<Stream>,
}

impl Recording {
    pub(super) fn push(&mut self, stream: Stream, bytes: &[u8]) {
        let Some(last) = bytes.last() else { return };
        // What one stream left of a line must not join what the other says.
        if self.open_line.is_some_and(|open| open != stream) {
            self.tail.push(b"\n");
        }
        self.open_line = (*last != b'\n').then_some(stream);
        self.tail.push(bytes);
        self.bytes += bytes.len() as u64;
        self.digest.update(bytes);
    }
}

/// What ran.
pub(super) struct Ran {
    /// The command as text, and whether it was cut.
    pub(super) command: (String, bool),
    /// Its directory, as evidence names it.
    pub(super) cwd: String,
}

/// The record of a command: its status is that of the process, whatever the queue makes of it, and
/// what no process says is unknown.
pub(super) fn evidence(
    ran: Ran,
    recording: Recording,
    cause: Cause,
    exit: Option<Exit>,
    (started_at, ended_at): (OffsetDateTime, OffsetDateTime),
) -> Evidence {
    let (exit_code, signal) = match exit {
        Some(Exit::Status(status)) => (Some(status), None),
        Some(Exit::Signal(signal)) => (None, Some(signal)),
        None => (None, None),
    };
    let status = exit.map(|exit| match (cause, exit) {
        (Cause::Exited, Exit::Status(0)) => SUCCESS,
        (Cause::Exited | Cause::TimedOut | Cause::Stopped, _) => FAILURE,
    });
    let Recording { tail, bytes, digest, .. } = recording;
    let (printed, truncated) = tail.into_raw_text();
    let (command, command_truncated) = ran.command;
    Evidence {
        seq: 0,
        turn: None,
        tool: "command".to_owned(),
        command,
        command_truncated,
        started_at: Some(started_at),
        duration_ms: u64::try_from((ended_at - started_at).whole_milliseconds()).unwrap_or(0),
        exit_code,
        signal,
        timed_out: cause == Cause::TimedOut,
        status: status.map(str::to_owned),
        status_marker: None,
        output_tail: output_tail(&printed).to_owned(),
        output_bytes: bytes,
        output_truncated: truncated,
        shell_persistent: Some(false),
        cwd: ran.cwd,
        output_sha256: digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect(),
    }
}

#[cfg(test)]
mod tests {
    use time::Duration;

    use super::*;

    fn of(recording: Recording, cause: Cause, exit: Option<Exit>) -> Evidence {
        let ran = Ran { command: ("make check".to_owned(), false), cwd: ".".to_owned() };
        let began = OffsetDateTime::UNIX_EPOCH;
        evidence(ran, recording, cause, exit, (began, began + Duration::milliseconds(1500)))
    }

    #[test]
    fn the_status_is_that_of_the_process_and_unknown_without_one() {
        for (cause, exit, status, timed_out) in [
            (Cause::Exited, Some(Exit::Status(0)), Some("success"), false),
            (Cause::Exited, Some(Exit::Status(1)), Some("error"), false),
            (Cause::Exited, Some(Exit::Signal(9)), Some("error"), false),
            (Cause::TimedOut, Some(Exit::Status(0)), Some("error"), true),
            (Cause::Stopped, Some(Exit::Status(0)), Some("error"), false),
            (Cause::Exited, None, None, false),
        ] {
            let record = of(Recording::default(), cause, exit);
            assert_eq!((record.status.as_deref(), record.timed_out), (status, timed_out));
        }
        let record = of(Recording::default(), Cause::Exited, Some(Exit::Signal(9)));
        assert_eq!((record.exit_code, record.signal), (None, Some(9)));
        assert_eq!((record.duration_ms, record.shell_persistent), (1500, Some(false)));
    }

    #[test]
    fn the_end_of_both_streams_is_kept_and_no_line_is_joined() {
        let mut recording = Recording::default();
        recording.push(Stream::Out, b"10");
        recording.push(Stream::Out, b" passed");
        recording.push(Stream::Error, b" failed\n");
        recording.push(Stream::Out, b"OK\r\n");

        let record = of(recording, Cause::Exited, Some(Exit::Status(0)));

        assert_eq!(record.output_tail, "10 passed\n failed\nOK\r\n");
        assert_eq!((record.output_bytes, record.output_truncated), (21, false));
        let whole = Sha256::digest(b"10 passed failed\nOK\r\n");
        assert_eq!(record.output_sha256, format!("{whole:x}"));
    }

    #[test]
    fn the_last_thousand_characters_of_any_output_are_kept() {
        let mut recording = Recording::default();
        for n in 0..10_000 {
            recording.push(Stream::Out, format!("é{n}\n").as_bytes());
        }
        let record = of(recording, Cause::Exited, Some(Exit::Status(0)));
        assert_eq!(record.output_tail.chars().count(), 1000);
        assert!(record.output_tail.ends_with("é9998\né9999\n"));
        assert!(record.output_truncated);
    }
}
