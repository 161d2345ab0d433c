use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// How many characters of a message are kept.
pub const MAX_MESSAGE_CHARS: usize = 100;

/// How far an execution says it has come; for display only.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProgressReport {
    /// 0 to 100, where it can say.
    pub percent: Option<u8>,
    /// One line of at most [`MAX_MESSAGE_CHARS`]; none where it said nothing.
    pub message: Option<String>,
}

impl ProgressReport {
    /// A report within its bounds: a percentage above 100 is 100, control characters become blanks,
    /// a long message ends in an ellipsis.
    #[must_use]
    pub fn new(percent: Option<u8>, message: &str) -> Self {
        let mut text: String = message
            .trim()
            .chars()
            .take(MAX_MESSAGE_CHARS + 1)
            .map(|c| if c.is_control() { ' ' } else { c })
            .collect();
        if let Some((end, _)) = text.char_indices().nth(MAX_MESSAGE_CHARS) {
            text.truncate(end);
            text.pop();
            text.push('…');
        }
        Self {
            percent: percent.map(|percent| percent.min(100)),
            message: (!text.is_empty()).then_some(text),
        }
    }

    /// Reads a line as programs write it: `40`, `40%`, `40% page 4 of 10`, or a message alone.
    #[must_use]
    pub fn parse(line: &str) -> Self {
        let line = line.trim();
        let digits = line.bytes().take_while(u8::is_ascii_digit).count();
        let rest = &line[digits..];
        let (rest, marked) = rest.strip_prefix('%').map_or((rest, false), |rest| (rest, true));
        let ends = rest.is_empty() || rest.starts_with(char::is_whitespace);
        match line[..digits].parse::<u8>() {
            // A bare number with words after it is part of a sentence.
            Ok(percent) if ends && percent <= 100 && (marked || rest.is_empty()) => {
                Self::new(Some(percent), rest)
            }
            Ok(_) | Err(_) => Self::new(None, line),
        }
    }
}

/// Takes an execution's reports. Each replaces the one before; what is current goes out with the
/// next heartbeat, so reporting often costs nothing. Cloned, it reports for the same execution.
#[derive(Clone, Default)]
pub struct Reporter(Option<Arc<dyn Fn(ProgressReport) + Send + Sync>>);

impl Reporter {
    /// Reports to `take`, which must not wait.
    #[must_use]
    pub fn new(take: impl Fn(ProgressReport) + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(take)))
    }

    /// Says how far it has come: a percentage, 0 to 100, where there is one, and a line of text, which
    /// may be empty.
    pub fn report(&self, percent: Option<u8>, message: &str) {
        self.send(ProgressReport::new(percent, message));
    }

    /// The same for a report that was put together elsewhere.
    pub fn send(&self, report: ProgressReport) {
        if let Some(take) = &self.0 {
            take(report);
        }
    }
}

impl std::fmt::Debug for Reporter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Reporter")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str) -> (Option<u8>, Option<String>) {
        let report = ProgressReport::parse(line);
        (report.percent, report.message)
    }

    #[test]
    fn a_line_is_a_percentage_or_a_message_or_both() {
        let text = |text: &str| Some(text.to_owned());
        assert_eq!(parsed("40"), (Some(40), None));
        assert_eq!(parsed(" 100% "), (Some(100), None));
        assert_eq!(parsed("7% page 4 of 10"), (Some(7), text("page 4 of 10")));
        assert_eq!(parsed("12 files left"), (None, text("12 files left")));
        assert_eq!(parsed("101%"), (None, text("101%")));
        assert_eq!(parsed("999999999999"), (None, text("999999999999")));
        assert_eq!(parsed("5%off"), (None, text("5%off")));
        assert_eq!(parsed(""), (None, None));
    }

    #[test]
    fn a_report_stays_within_its_bounds() {
        let report = ProgressReport::new(Some(250), &"é\n".repeat(200));
        let message = report.message.unwrap();
        assert_eq!((report.percent, message.chars().count()), (Some(100), MAX_MESSAGE_CHARS));
        assert!(message.starts_with("é é ") && message.ends_with('…'), "{message}");
        assert_eq!(ProgressReport::new(None, &"x".repeat(100)).message, Some("x".repeat(100)));
    }
}
