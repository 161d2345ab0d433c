//! What a normalized criterion asks for. One parser of file criteria serves both admission and the
//! check, so no spelling that the check recognizes can pass admission unseen.

use crate::model::Family;
use crate::model::verdict::is_white;

/// One normalized criterion, understood.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Criterion<'a> {
    /// Something about a file.
    File(FileCriterion<'a>),
    /// That a test command ran and passed.
    TestsPassed {
        /// The command, untrimmed, on one line.
        command: &'a str,
    },
    /// Nothing code can decide.
    Undecidable,
}

/// A criterion about a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileCriterion<'a> {
    /// One of the three file families.
    pub family: Family,
    /// The path as written, untrimmed.
    pub path: &'a str,
}

impl<'a> Criterion<'a> {
    /// Understands one normalized criterion; letter case does not matter.
    #[must_use]
    pub fn parse(text: &'a str) -> Self {
        if let Some(file) = parse_file(text) {
            return Self::File(file);
        }
        match strip_prefix(text, "tests_passed:").and_then(rest_of_line) {
            Some(command) => Self::TestsPassed { command },
            None => Self::Undecidable,
        }
    }

    /// Its family.
    #[must_use]
    pub const fn family(&self) -> Family {
        match self {
            Self::File(file) => file.family,
            Self::TestsPassed { .. } => Family::TestsPassed,
            Self::Undecidable => Family::Undecidable,
        }
    }
}

/// Whether any of these normalized criteria is about a file, so that its check needs the workspace.
pub fn needs_workspace<T: AsRef<str>>(criteria: impl IntoIterator<Item = T>) -> bool {
    criteria.into_iter().any(|criterion| parse_file(criterion.as_ref()).is_some())
}

/// The file criterion a text is: `file:PATH exists`, `file:PATH non-empty` or `file_written:PATH`.
#[must_use]
pub fn parse_file(text: &str) -> Option<FileCriterion<'_>> {
    if let Some(body) = strip_prefix(text, "file_written:") {
        return rest_of_line(body).map(|path| FileCriterion { family: Family::FileWritten, path });
    }
    let body = strip_prefix(text, "file:")?;
    [("exists", Family::FileExists), ("non-empty", Family::FileNonEmpty)].into_iter().find_map(
        |(mode, family)| {
            let path = shortest_path(strip_suffix(body, mode)?)?;
            Some(FileCriterion { family, path })
        },
    )
}

/// The shortest path before a gap of white space: at least one character, none a line break.
fn shortest_path(path_and_gap: &str) -> Option<&str> {
    let trimmed = path_and_gap.trim_end_matches(is_white);
    // Nothing but white space: its first character is the path, if a gap is left.
    let first = path_and_gap.chars().next()?.len_utf8();
    let path = if trimmed.is_empty() { &path_and_gap[..first] } else { trimmed };
    if path.len() == path_and_gap.len() {
        return None;
    }
    rest_of_line(path)
}

fn rest_of_line(text: &str) -> Option<&str> {
    (!text.is_empty() && !text.contains('\n')).then_some(text)
}

fn strip_prefix<'a>(text: &'a str, prefix: &str) -> Option<&'a str> {
    let mut rest = text.chars();
    prefix.chars().all(|wanted| rest.next().map(fold) == Some(wanted)).then_some(rest.as_str())
}

fn strip_suffix<'a>(text: &'a str, suffix: &str) -> Option<&'a str> {
    let mut rest = text.chars();
    suffix
        .chars()
        .rev()
        .all(|wanted| rest.next_back().map(fold) == Some(wanted))
        .then_some(rest.as_str())
}

/// A letter without its case; wide, as everywhere criteria are read: dotless and dotted i count as
/// i, the long s as s, the Kelvin sign as k.
const fn fold(c: char) -> char {
    match c {
        '\u{131}' | '\u{130}' => 'i',
        '\u{17f}' => 's',
        '\u{212a}' => 'k',
        other => other.to_ascii_lowercase(),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn file(text: &str) -> Option<(Family, &str)> {
        parse_file(text).map(|file| (file.family, file.path))
    }

    #[test]
    fn turkish_and_long_letters_count_as_their_plain_ones() {
        for spelling in ["file:a exısts", "file:a EXİSTS", "file:a exiſts", "fİle:a ExISTS"] {
            assert_eq!(file(spelling), Some((Family::FileExists, "a")), "{spelling}");
        }
        let tests = "teſts_paſſed:make";
        assert_eq!(Criterion::parse(tests), Criterion::TestsPassed { command: "make" });
    }

    #[test]
    fn a_blank_path_needs_a_gap_of_its_own() {
        assert_eq!(file("file: exists"), None);
        assert_eq!(file("file:  exists"), Some((Family::FileExists, " ")));
        assert_eq!(file("file:\n exists"), None);
        assert_eq!(file("file: \n exists"), Some((Family::FileExists, " ")));
    }

    #[test]
    fn a_command_with_a_line_break_or_nothing_in_it_is_undecidable() {
        assert_eq!(Criterion::parse("tests_passed:"), Criterion::Undecidable);
        assert_eq!(Criterion::parse("tests_passed:a\nb"), Criterion::Undecidable);
    }

    #[test]
    fn only_file_criteria_need_the_workspace() {
        assert!(!needs_workspace(["reads well", "tests_passed:make", "file:a"]));
        assert!(needs_workspace(["reads well", "fıle_wrıtten:a"]));
    }

    proptest! {
        #[test]
        fn admission_and_check_agree_on_any_text(text in "(?s).{0,40}|(?i)file:.{0,9}exists") {
            let about_a_file = matches!(Criterion::parse(&text), Criterion::File(_));

            prop_assert_eq!(needs_workspace([&text]), about_a_file);
        }
    }
}
