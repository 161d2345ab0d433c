//! What is printed: results to standard output, everything else to standard error.

use std::borrow::Cow;
use std::fmt::Write as _;
use std::io::{self, Write};

use indicatif::{HumanCount, ProgressBar, ProgressStyle};
use serde::Serialize;
use time::OffsetDateTime;
use time::macros::format_description;

use super::exit::{CliError, Exit};

/// Prints one JSON document and a line break to standard output.
pub(super) fn print_json(value: &impl Serialize) -> Result<(), CliError> {
    let text = serde_json::to_string(value)
        .map_err(|error| CliError::new(Exit::Internal, format!("write JSON: {error}")))?;
    print_line(&text)
}

/// Prints one line to standard output.
pub(super) fn print_line(line: &str) -> Result<(), CliError> {
    writeln!(io::stdout().lock(), "{line}").map_err(output_error)
}

/// Prints text that ends with its own line break to standard output.
pub(super) fn print_text(text: &str) -> Result<(), CliError> {
    io::stdout().lock().write_all(text.as_bytes()).map_err(output_error)
}

/// Why standard output takes no more. A reader that has gone away ends the command quietly.
#[expect(clippy::needless_pass_by_value, reason = "handed to map_err")]
pub(super) fn output_error(error: io::Error) -> CliError {
    let gone = error.kind() == io::ErrorKind::BrokenPipe;
    let exit = if gone { Exit::ReaderGone } else { Exit::Output };
    CliError::new(exit, format!("write to standard output: {error}"))
}

/// Prints a remark to standard error: what a program that reads the output need not see.
pub(super) fn remark(text: &str) {
    // Nobody is left to be told that standard error is gone.
    drop(writeln!(io::stderr().lock(), "{text}"));
}

/// Tells of an error on standard error, as text or as a JSON document.
pub(super) fn print_error(error: &CliError, json: bool) {
    if error.exit() == Exit::ReaderGone {
        return;
    }
    if json {
        return remark(&error.document().to_string());
    }
    let text = error.to_string();
    let lines: Vec<Cow<'_, str>> = text.lines().map(plain).collect();
    remark(&format!("holdfast: {}", lines.join("\n")));
}

/// Text that came from elsewhere, for a terminal: without power over it, on one line.
///
/// Control characters are escaped, and so are the marks that change the order of what is read and
/// the two Unicode line breaks.
pub(super) fn plain(text: &str) -> Cow<'_, str> {
    if !text.contains(is_unsafe) {
        return Cow::Borrowed(text);
    }
    let mut plain = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        if is_unsafe(c) { plain.extend(c.escape_default()) } else { plain.push(c) }
    }
    Cow::Owned(plain)
}

fn is_unsafe(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// [`plain`] text of at most `chars` characters, the end replaced by an ellipsis.
pub(super) fn brief(text: &str, chars: usize) -> String {
    let plain = plain(text);
    match plain.char_indices().nth(chars) {
        None => plain.into_owned(),
        Some(_) => plain.chars().take(chars - 1).chain(['…']).collect(),
    }
}

/// A number for people.
pub(super) fn count(number: i32) -> String {
    HumanCount(number.unsigned_abs().into()).to_string()
}

/// A time for people, to the second, in UTC.
pub(super) fn time(at: OffsetDateTime) -> String {
    let to_the_second = format_description!("[year]-[month]-[day] [hour]:[minute]:[second]Z");
    at.to_offset(time::UtcOffset::UTC).format(to_the_second).unwrap_or_default()
}

/// What is not there, for people.
pub(super) const NOTHING: &str = "-";

/// The text, or a dash.
pub(super) fn or_dash(text: Option<String>) -> String {
    text.unwrap_or_else(|| NOTHING.to_owned())
}

/// A table with aligned columns; the last column is as wide as it comes.
pub(super) fn table<const N: usize>(header: [&str; N], rows: &[[String; N]]) -> String {
    let width = |column: usize| {
        let cells = rows.iter().map(|row| row[column].chars().count());
        cells.chain([header[column].len()]).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..N).map(width).collect();
    let mut text = String::new();
    let mut line = |cells: [&str; N]| {
        let mut line = String::new();
        for (cell, width) in cells.iter().zip(&widths) {
            let _ = write!(line, "{cell:width$}  ");
        }
        text.push_str(line.trim_end());
        text.push('\n');
    };
    line(header);
    for row in rows {
        line(row.each_ref().map(String::as_str));
    }
    text
}

/// Names and values, one pair a line, aligned.
pub(super) fn pairs(pairs: &[(&str, String)]) -> String {
    let width = pairs.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    pairs.iter().fold(String::new(), |mut text, (name, value)| {
        let _ = writeln!(text, "{name:width$}  {value}");
        text
    })
}

/// A bar on standard error, if that is a terminal and the output is for people.
pub(super) fn progress_bar(json: bool, length: Option<u64>, template: &str) -> ProgressBar {
    if json {
        return ProgressBar::hidden();
    }
    let bar = length.map_or_else(ProgressBar::new_spinner, ProgressBar::new);
    let style = ProgressStyle::with_template(template).expect("templates are constant");
    bar.with_style(style.progress_chars("=> "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_has_no_power_over_a_terminal() {
        assert_eq!(plain("harmless é 漢"), "harmless é 漢");
        assert_eq!(plain("a\u{1b}[2Jb\r\nc\td"), "a\\u{1b}[2Jb\\r\\nc\\td");
        assert_eq!(plain("\u{9b}31m\u{7f}"), "\\u{9b}31m\\u{7f}");
        assert_eq!(plain("a\u{202e}b\u{2028}"), "a\\u{202e}b\\u{2028}");
    }

    #[test]
    fn brief_text_says_that_more_was_there() {
        assert_eq!(brief("12345", 5), "12345");
        assert_eq!(brief("123456", 5), "1234…");
        assert_eq!(brief("\n\n\n", 5), "\\n\\n…");
    }

    #[test]
    fn columns_are_aligned() {
        let rows = [["1".into(), "é".into(), String::new()], ["22".into(), "b".into(), "c".into()]];
        assert_eq!(table(["n", "key", "x"], &rows), "n   key  x\n1   é\n22  b    c\n");
    }

    #[test]
    fn times_are_in_utc() {
        let at = time::macros::datetime!(2026-01-02 03:04:05.6 +2);
        assert_eq!(time(at), "2026-01-02 01:04:05Z");
    }
}
