//! What is printed: results to standard output, everything else to standard error.

use std::io::{self, Write};

use serde::Serialize;

use super::exit::{CliError, Exit};

/// Prints one JSON document and a line break to standard output.
pub(super) fn print_json(value: &impl Serialize) -> Result<(), CliError> {
    let text = serde_json::to_string(value)
        .map_err(|error| CliError::new(Exit::Internal, format!("write JSON: {error}")))?;
    print_line(&text)
}

/// Prints one line to standard output. A reader that has gone away ends the command quietly.
pub(super) fn print_line(line: &str) -> Result<(), CliError> {
    let mut out = io::stdout().lock();
    match writeln!(out, "{line}") {
        Ok(()) => Ok(()),
        Err(error) => {
            Err(CliError::new(Exit::Output, format!("write to standard output: {error}")))
        }
    }
}

/// Tells of an error on standard error, as text or as a JSON document.
pub(super) fn print_error(error: &CliError, json: bool) {
    let mut err = io::stderr().lock();
    let written = if json {
        let document =
            serde_json::json!({"error": error.to_string(), "exit_code": error.exit().code()});
        writeln!(err, "{document}")
    } else {
        writeln!(err, "holdfast: {error}")
    };
    // Nobody is left to be told that standard error is gone.
    drop(written);
}
