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

/// Both streams of a process as they came, line by line, in bounded memory.
#[derive(Debug, Default)]
pub(super) struct Recording {
    tail: Tail,
    bytes: u64,
    digest: Sha256,
    /// The line that each stream has not ended yet. What one says must neither join nor split a
    /// line of the other: `not ` and `ok` apart would read as a pass.
    open: [Tail; 2],
}

impl Recording {
    pub(super) fn push(&mut self, stream: Stream, bytes: &[u8]) {
        self.bytes += bytes.len() as u64;
        self.digest.update(bytes);
        let open = &mut self.open[stream as usize];
        let ended = bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |last| last + 1);
        if ended > 0 {
            self.tail.push(&open.take());
        }
        self.tail.push(&bytes[..ended]);
        open.push(&bytes[ended..]);
    }

    /// The end of everything printed, and whether something is missing before it.
    fn into_text(mut self) -> (String, bool) {
        let [out, error] = self.open.each_mut().map(Tail::take);
        self.tail.push(&out);
        if !out.is_empty() && !error.is_empty() {
            self.tail.push(b"\n");
        }
        self.tail.push(&error);
        let cut_inside = self.open.iter().any(Tail::is_cut);
        let (text, cut) = self.tail.into_raw_text();
        (text, cut || cut_inside)
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
        Some(Exit::Fenced) | None => (None, None),
    };
    let status = exit.map(|exit| match (cause, exit) {
        (Cause::Exited, Exit::Status(0)) => SUCCESS,
        (Cause::Exited | Cause::TimedOut | Cause::Stopped, _) => FAILURE,
    });
    let (output_bytes, digest) = (recording.bytes, recording.digest.clone());
    let (printed, output_truncated) = recording.into_text();
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
        output_bytes,
        output_truncated,
        shell_persistent: Some(false),
        cwd: ran.cwd,
        output_sha256: format!("{:x}", digest.finalize()),
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
    fn the_end_of_both_streams_is_kept_and_no_line_is_joined_or_split() {
        let mut recording = Recording::default();
        for (stream, bytes) in [
            (Stream::Out, "not"),
            (Stream::Error, "a warn"),
            (Stream::Out, " "),
            (Stream::Error, "ing\nOK"),
            (Stream::Out, "ok 1\nok 2"),
        ] {
            recording.push(stream, bytes.as_bytes());
        }

        let record = of(recording, Cause::Exited, Some(Exit::Status(0)));

        assert_eq!(record.output_tail, "a warning\nnot ok 1\nok 2\nOK");
        assert_eq!((record.output_bytes, record.output_truncated), (25, false));
        let whole = Sha256::digest(b"nota warn ing\nOKok 1\nok 2");
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

    #[test]
    fn a_line_without_end_is_bounded_and_its_beginning_is_no_line() {
        let mut recording = Recording::default();
        recording.push(Stream::Out, b"not ");
        for _ in 0..4_000 {
            recording.push(Stream::Out, "ok 1 😀".as_bytes());
        }
        let record = of(recording, Cause::Exited, Some(Exit::Status(0)));
        assert_eq!(record.output_tail.chars().count(), 1000);
        assert!(record.output_truncated);
    }
}
