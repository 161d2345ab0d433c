//! The tools of a model: what they are called, what they take, and how their results are shown.

use serde::Deserialize;
use serde_json::{Value, json};

/// How much of a result a model sees, in bytes and lines.
const SHOWN_BYTES: usize = 16 * 1024;
const SHOWN_LINES: usize = 400;
/// The longest command, in bytes.
const COMMAND_BYTES: usize = 16 * 1024;

/// A call that can be made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Tool {
    Shell { command: String, timeout_s: Option<u64> },
    Read { path: String, offset: u64, limit: Option<u64> },
    Write { path: String, content: String, append: bool },
}

#[derive(Deserialize)]
struct ShellArguments {
    command: String,
    #[serde(default)]
    timeout_s: Option<f64>,
}

#[derive(Deserialize)]
struct ReadArguments {
    path: String,
    #[serde(default)]
    offset: Option<u64>,
    #[serde(default)]
    limit: Option<u64>,
}

#[derive(Deserialize)]
struct WriteArguments {
    path: String,
    content: String,
    #[serde(default)]
    append: Option<bool>,
}

impl Tool {
    /// Reads a call. Nothing is ever made up for what is missing or cut off: the answer says what is
    /// wrong, and the model may correct itself.
    pub(super) fn parse(name: &str, arguments: &str, offered: &[String]) -> Result<Self, String> {
        if !offered.iter().any(|tool| tool == name) {
            return Err(format!("there is no tool {name:?}; there are: {}", offered.join(", ")));
        }
        let wrong =
            |error: serde_json::Error| format!("the arguments of {name} are wrong: {error}");
        let tool = match name {
            "shell" => {
                let read: ShellArguments = serde_json::from_str(arguments).map_err(wrong)?;
                // Whole seconds, at least one.
                #[expect(
                    clippy::cast_possible_truncation,
                    clippy::cast_sign_loss,
                    reason = "a cast of floats saturates, and what is below one becomes one"
                )]
                let timeout_s = read.timeout_s.map(|seconds| (seconds.ceil() as u64).max(1));
                Self::Shell { command: read.command, timeout_s }
            }
            "read_file" => {
                let read: ReadArguments = serde_json::from_str(arguments).map_err(wrong)?;
                Self::Read { path: read.path, offset: read.offset.unwrap_or(0), limit: read.limit }
            }
            _ => {
                let read: WriteArguments = serde_json::from_str(arguments).map_err(wrong)?;
                let append = read.append.unwrap_or(false);
                Self::Write { path: read.path, content: read.content, append }
            }
        };
        match &tool {
            Self::Shell { command, .. } if command.trim().is_empty() => {
                Err("the command is empty".to_owned())
            }
            Self::Shell { command, .. } if command.len() > COMMAND_BYTES => {
                Err(format!("the command has more than {COMMAND_BYTES} bytes: write it to a file"))
            }
            Self::Shell { .. } | Self::Read { .. } | Self::Write { .. } => Ok(tool),
        }
    }
}

/// The tools as a server is told of them.
pub(super) fn schemas(offered: &[String], longest_s: u64) -> Vec<Value> {
    let of = |name: &str, description: &str, properties: Value, required: &[&str]| {
        json!({"type": "function", "function": {"name": name, "description": description,
            "parameters": {"type": "object", "properties": properties, "required": required}}})
    };
    let schema = |name: &String| match name.as_str() {
        "shell" => of(
            name,
            "Runs a command with `sh -c` in the workspace, in a fresh process, and shows what it \
             prints and its exit code.",
            json!({"command": {"type": "string"},
                "timeout_s": {"type": "integer", "minimum": 1, "maximum": longest_s}}),
            &["command"],
        ),
        "read_file" => of(
            name,
            "Shows a file of the workspace from byte `offset` on, at most 16384 bytes.",
            json!({"path": {"type": "string"}, "offset": {"type": "integer", "minimum": 0},
                "limit": {"type": "integer", "minimum": 1, "maximum": 16384}}),
            &["path"],
        ),
        _ => of(
            name,
            "Writes a file of the workspace, or appends to it; makes the directories above it.",
            json!({"path": {"type": "string"}, "content": {"type": "string"},
                "append": {"type": "boolean"}}),
            &["path", "content"],
        ),
    };
    offered.iter().map(schema).collect()
}

/// A result as a model sees it: cut in the middle, a fifth from its beginning and the rest from its
/// end, where failures are; the last line is never cut.
pub(super) fn shown(output: &str, last_line: &str) -> String {
    let lines = output.split_inclusive('\n').count();
    if output.len() <= SHOWN_BYTES && lines <= SHOWN_LINES {
        return joined(output, last_line);
    }
    let head = head_of(output, SHOWN_BYTES / 5, SHOWN_LINES / 5);
    let tail = tail_of(output, SHOWN_BYTES - SHOWN_BYTES / 5, SHOWN_LINES - SHOWN_LINES / 5);
    let left_out = output.len() - head.len() - tail.len();
    let separator = if head.ends_with('\n') { "" } else { "\n" };
    joined(&format!("{head}{separator}[… {left_out} bytes left out …]\n{tail}"), last_line)
}

fn joined(output: &str, last_line: &str) -> String {
    let separator = if output.is_empty() || output.ends_with('\n') { "" } else { "\n" };
    format!("{output}{separator}{last_line}")
}

fn head_of(text: &str, bytes: usize, lines: usize) -> &str {
    let by_lines: usize = text.split_inclusive('\n').take(lines).map(str::len).sum();
    &text[..text.floor_char_boundary(by_lines.min(bytes))]
}

fn tail_of(text: &str, bytes: usize, lines: usize) -> &str {
    let count = text.split_inclusive('\n').count();
    let by_lines: usize =
        text.split_inclusive('\n').skip(count.saturating_sub(lines)).map(str::len).sum();
    let start = text.len() - by_lines.min(bytes);
    &text[text.ceil_char_boundary(start)..]
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parse(name: &str, arguments: &str) -> Result<Tool, String> {
        let offered = ["shell", "read_file", "write_file"].map(str::to_owned);
        Tool::parse(name, arguments, &offered)
    }

    #[test]
    fn calls_are_read_and_what_is_wrong_is_said() {
        let shell = parse("shell", r#"{"command": "ls", "timeout_s": 2.5, "why": "x"}"#).unwrap();
        assert_eq!(shell, Tool::Shell { command: "ls".into(), timeout_s: Some(3) });
        let read = parse("read_file", r#"{"path": "a", "offset": null}"#).unwrap();
        assert_eq!(read, Tool::Read { path: "a".into(), offset: 0, limit: None });
        for (name, arguments) in [
            ("shell", r#"{"command": "rm -rf /t"#),
            ("shell", "{}"),
            ("shell", r#"{"command": ["ls"]}"#),
            ("shell", r#"{"command": " "}"#),
            ("shell", ""),
            ("write_file", r#"{"path": "a"}"#),
            ("read_file", r#"{"path": "a", "offset": -1}"#),
            ("Shell", "{}"),
            ("", "{}"),
        ] {
            assert!(parse(name, arguments).is_err(), "{name} {arguments}");
        }
        let long = json!({"command": "x".repeat(COMMAND_BYTES + 1)}).to_string();
        assert!(parse("shell", &long).is_err());
        let none = Tool::parse("shell", r#"{"command":"ls"}"#, &["read_file".to_owned()]);
        assert!(none.unwrap_err().contains("there are: read_file"));
    }

    #[test]
    fn the_end_of_a_long_result_is_kept_and_its_last_line_always() {
        let lines: Vec<String> = (0..100_000).map(|n| format!("line {n}\n")).collect();
        let output = lines.concat();
        let shown = shown(&output, "Exit Code: 101");
        assert!(shown.len() <= SHOWN_BYTES + 100);
        assert!(shown.starts_with("line 0\n"));
        assert!(shown.ends_with("line 99999\nExit Code: 101"));
        assert!(shown.contains(" bytes left out …]\n"));
    }

    proptest! {
        #[test]
        fn every_result_is_bounded(output in "(?s).{0,3000}", times in 1_usize..40) {
            let shown = shown(&output.repeat(times), "Exit Code: 0");
            prop_assert!(shown.len() <= SHOWN_BYTES + 100);
            prop_assert!(shown.lines().count() <= SHOWN_LINES + 3);
            prop_assert!(shown.ends_with("Exit Code: 0"));
        }
    }
}
