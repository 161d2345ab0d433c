//! Evidence: what an executor recorded of one command it ran, kept for the acceptance check.

use serde::{Deserialize, Serialize};
use time::OffsetDateTime;

/// How many scalar values of a command are recorded.
pub const MAX_COMMAND_CHARS: usize = 500;

/// How many scalar values of the end of an output are recorded.
pub const MAX_TAIL_CHARS: usize = 1000;

/// The status of a command that ended well; every other one is a failure or unknown.
pub const SUCCESS: &str = "success";

/// The status of a command that did not.
pub const FAILURE: &str = "error";

/// One executed command, as its executor saw it end; never what a model says about it.
///
/// Members that a stored record lacks read as unknown, and what is unknown proves nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Evidence {
    /// Its number within the attempt, from 0, oldest first.
    pub seq: u64,
    /// The turn of the agent that asked for it; none for a command executor.
    pub turn: Option<u64>,
    /// The tool that ran it: `shell`, or `command` for a command executor.
    pub tool: String,
    /// The command, at most [`MAX_COMMAND_CHARS`].
    pub command: String,
    /// Whether the command was longer.
    pub command_truncated: bool,
    /// When it began; for display only.
    #[serde(with = "time::serde::rfc3339::option")]
    pub started_at: Option<OffsetDateTime>,
    /// How long it ran, in milliseconds.
    pub duration_ms: u64,
    /// Its exit status; none when a signal ended it or it never ran.
    pub exit_code: Option<i32>,
    /// The signal that ended it.
    pub signal: Option<i32>,
    /// Whether it was ended for taking too long.
    pub timed_out: bool,
    /// [`SUCCESS`], or another word for a failure; none or blank is unknown.
    pub status: Option<String>,
    /// The exit marker at the end of its output, if the tool leaves one: `Exit Code: 1`.
    pub status_marker: Option<String>,
    /// The last [`MAX_TAIL_CHARS`] of its output.
    pub output_tail: String,
    /// How many bytes it really printed.
    pub output_bytes: u64,
    /// Whether more was printed than was captured.
    pub output_truncated: bool,
    /// Whether its shell outlives it, so that earlier commands could have changed what it means;
    /// none is unknown.
    pub shell_persistent: Option<bool>,
    /// Its working directory: relative to the workspace, `.` for that itself; absolute where the
    /// queue names another; empty for a private one that is gone.
    pub cwd: String,
    /// SHA-256 of the captured output, in hexadecimal.
    pub output_sha256: String,
}

/// The command text of an argument vector, cut at [`MAX_COMMAND_CHARS`], and whether it was cut.
///
/// Arguments are joined by single blanks. One that has white space, a command separator or nothing
/// at all stands in double quotes, because no shell split it.
#[must_use]
pub fn command_text(argv: &[String]) -> (String, bool) {
    let mut text = String::new();
    for word in argv {
        if !text.is_empty() {
            text.push(' ');
        }
        if word.is_empty() || word.contains(|c: char| c.is_whitespace() || ";&|".contains(c)) {
            text.extend(["\"", word, "\""]);
        } else {
            text.push_str(word);
        }
    }
    match text.char_indices().nth(MAX_COMMAND_CHARS) {
        None => (text, false),
        Some((end, _)) => {
            text.truncate(end);
            (text, true)
        }
    }
}

/// The last [`MAX_TAIL_CHARS`] of an output.
#[must_use]
pub fn output_tail(output: &str) -> &str {
    output
        .char_indices()
        .rev()
        .nth(MAX_TAIL_CHARS - 1)
        .map_or(output, |(start, _)| &output[start..])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text_of(argv: &[&str]) -> (String, bool) {
        command_text(&argv.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>())
    }

    #[test]
    fn words_no_shell_split_stand_in_double_quotes() {
        assert_eq!(text_of(&["pytest", "-k", "a and b", ""]).0, r#"pytest -k "a and b" """#);
        assert_eq!(text_of(&["echo", ";", "make"]).0, r#"echo ";" make"#);
    }

    #[test]
    fn a_command_is_cut_at_500_characters_and_says_so() {
        assert_eq!(text_of(&[&"é".repeat(500)]), ("é".repeat(500), false));
        assert_eq!(text_of(&[&"é".repeat(501)]), ("é".repeat(500), true));
    }

    #[test]
    fn the_tail_is_the_last_1000_characters() {
        assert_eq!(output_tail("short"), "short");
        let long = format!("a{}", "é".repeat(1000));
        assert_eq!(output_tail(&long), "é".repeat(1000));
    }

    #[test]
    fn a_record_reads_back_the_same_and_missing_members_are_unknown() {
        let json = r#"{"seq":3,"turn":5,"tool":"shell","command":"cargo test -q",
            "command_truncated":false,"started_at":"2026-11-30T17:20:11.120Z","duration_ms":8140,
            "exit_code":101,"signal":null,"timed_out":false,"status":"error",
            "status_marker":"Exit Code: 101","output_tail":"boom","output_bytes":48213,
            "output_truncated":true,"shell_persistent":false,"cwd":".","output_sha256":"00"}"#;
        let record: Evidence = serde_json::from_str(json).unwrap();

        let stored = serde_json::to_string(&record).unwrap();

        assert_eq!(record.exit_code, Some(101));
        assert_eq!(serde_json::from_str::<Evidence>(&stored).unwrap(), record);
        let bare: Evidence = serde_json::from_str(r#"{"command":"make"}"#).unwrap();
        assert_eq!((bare.status, bare.shell_persistent), (None, None));
    }
}
