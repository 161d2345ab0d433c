//! What the end of a test runner's output says (`acceptance.md` 1.6, shapes).

use std::sync::LazyLock;

use regex::Regex;

use crate::model::evidence::MAX_TAIL_CHARS;

/// The summaries that an output tail carries.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Shapes {
    /// Something says that tests passed.
    pub(super) pass: bool,
    /// Something says that no test ran.
    pub(super) zero: bool,
    /// Something says that a test failed.
    pub(super) fail: bool,
}

fn pattern(text: &str) -> Regex {
    Regex::new(&format!("(?i){text}")).expect("a constant pattern")
}

/// A count and what it counts, on one line. A count is of ASCII digits, without a sign.
static COUNT: LazyLock<Regex> = LazyLock::new(|| {
    pattern(
        r"(?:^|[^\w+-])([0-9][0-9.,]*)[\s&&[^\n\r\x0B\x0C\x{85}\x{2028}\x{2029}]]+(passed|failed|errors?)\b",
    )
});
static OK_LINE: LazyLock<Regex> = LazyLock::new(|| pattern(r"^ok\s+\S"));
static BUILD_SUCCESS: LazyLock<Regex> = LazyLock::new(|| pattern(r"\bBUILD SUCCESS(?:FUL)?\b"));
static ALL_PASSED: LazyLock<Regex> = LazyLock::new(|| pattern(r"(\bnot\s+)?\ball tests passed\b"));
static CARGO_RESULT: LazyLock<Regex> = LazyLock::new(|| pattern(r"test result: (ok|FAILED)"));
static NO_TESTS: LazyLock<Regex> =
    LazyLock::new(|| pattern(r"\[no test files\]|\[no tests to run\]"));
static ZERO: LazyLock<Regex> = LazyLock::new(|| pattern(r"\bRan 0 tests\b|^OK \(0 tests\b"));
/// How many tests unittest ran, and how many of them it counts as not having passed in earnest.
static RAN: LazyLock<Regex> = LazyLock::new(|| pattern(r"^Ran ([0-9]+) tests?\b"));
static EXCUSED: LazyLock<Regex> =
    LazyLock::new(|| pattern(r"\b(?:skipped|expected failures)=([0-9]+)"));
static FAIL: LazyLock<Regex> = LazyLock::new(|| {
    pattern(
        r"^FAILED\b|^ERROR\s+\S|^FAIL\s+\S|(?-i:^not ok\b)|\bBUILD FAIL(?:URE|ED)\b|\b(?:Failures|Errors):\s*0*[1-9]",
    )
});
/// A test that TAP reports without having run it, or without minding how it ended.
static TAP_DIRECTIVE: LazyLock<Regex> = LazyLock::new(|| pattern(r"#\s*(?:skip|todo)"));
/// Colours and cursor movements, which would hide the word boundaries around them.
static TERMINAL: LazyLock<Regex> =
    LazyLock::new(|| Regex::new(r"\x1B\[[0-9;:?]*[ -/]*[@-~]").expect("a constant pattern"));

impl Shapes {
    /// Reads an output tail.
    pub(super) fn of(tail: &str) -> Self {
        let cut = tail.chars().nth(MAX_TAIL_CHARS - 1).is_some();
        let plain = TERMINAL.replace_all(tail, "");
        let mut found = Self::default();
        let mut tally = Tally::default();
        for (number, line) in plain.split('\n').enumerate() {
            let shapes = tally.read(line.strip_suffix('\r').unwrap_or(line));
            // A tail that was cut may begin inside a line: "10 failed" as "0 failed", "not ok" as
            // "ok". Its first line cannot prove a pass.
            found.pass |= shapes.pass && !(cut && number == 0);
            found.zero |= shapes.zero;
            found.fail |= shapes.fail;
        }
        found.zero |= tally.cargo_lines > 0 && !tally.cargo_passed
            || tally.packages_without_tests && !tally.packages_with_tests;
        found
    }
}

/// What only all lines together tell.
#[derive(Default)]
struct Tally {
    /// cargo prints one result for each test binary; some of them have no tests.
    cargo_lines: usize,
    cargo_passed: bool,
    /// go prints one line for each package; some of them have no tests.
    packages_with_tests: bool,
    packages_without_tests: bool,
    /// unittest says how many tests it ran before it says how many of them it skipped.
    ran: usize,
}

impl Tally {
    fn read(&mut self, line: &str) -> Shapes {
        let mut shapes = Shapes::default();
        let cargo = CARGO_RESULT.captures(line);
        let mut counted_passes = None;
        for count in COUNT.captures_iter(line) {
            let some = count[1].contains(|c: char| ('1'..='9').contains(&c));
            if count[2].eq_ignore_ascii_case("passed") {
                counted_passes = Some(counted_passes.unwrap_or(false) || some);
                shapes.pass |= some;
                shapes.zero |= !some && cargo.is_none();
            } else {
                shapes.fail |= some;
            }
        }
        if let Some(result) = cargo {
            let ok = result[1].eq_ignore_ascii_case("ok");
            self.cargo_lines += 1;
            self.cargo_passed |= counted_passes != Some(false);
            shapes.pass |= ok && counted_passes != Some(false);
            shapes.fail |= !ok;
        }
        if let Some(ran) = RAN.captures(line) {
            self.ran = ran[1].parse().unwrap_or(0);
        }
        let excused: Vec<usize> = EXCUSED
            .captures_iter(line)
            .map(|count| count[1].parse().unwrap_or(usize::MAX))
            .collect();
        let all_excused =
            !excused.is_empty() && self.ran <= excused.into_iter().fold(0, usize::saturating_add);
        let directive = TAP_DIRECTIVE.is_match(line);
        if NO_TESTS.is_match(line) {
            self.packages_without_tests = true;
        } else if OK_LINE.is_match(line) && !directive && !all_excused {
            self.packages_with_tests = true;
            shapes.pass = true;
        }
        shapes.zero |= ZERO.is_match(line);
        shapes.pass |= line.eq_ignore_ascii_case("ok")
            || BUILD_SUCCESS.is_match(line)
            || ALL_PASSED.captures_iter(line).any(|said| said.get(1).is_none());
        shapes.fail |= FAIL.is_match(line) && !(directive && line.starts_with("not ok"));
        shapes
    }
}

/// Whether a text could pass for a summary of any kind.
pub(super) fn carries_shape(text: &str) -> bool {
    Shapes::of(text) != Shapes::default()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The shapes as letters: p(ass), z(ero), f(ail).
    fn shapes(tail: &str) -> String {
        let shapes = Shapes::of(tail);
        [(shapes.pass, 'p'), (shapes.zero, 'z'), (shapes.fail, 'f')]
            .into_iter()
            .filter_map(|(is, letter)| is.then_some(letter))
            .collect()
    }

    #[test]
    fn a_count_is_ascii_digits_without_a_sign_on_the_same_line() {
        assert_eq!(shapes("3 passed"), "p");
        assert_eq!(shapes("03 passed"), "p");
        assert_eq!(shapes("1,000 passed"), "p");
        assert_eq!(shapes("=== 3 passed ==="), "p");
        for none in
            ["-3 passed", "+3 passed", "3\npassed", "3\rpassed", "\u{663} passed", "x3 passed"]
        {
            assert_eq!(shapes(none), "", "{none:?}");
        }
        assert_eq!(shapes("0 passed"), "z");
        assert_eq!(shapes("00 passed"), "z");
        assert_eq!(shapes("3 errors suppressed"), "f");
    }

    #[test]
    fn failures_in_other_words_are_failures() {
        for tail in [
            "ok 1 - a\nnot ok 2 - b",
            "3 passed\nBUILD FAILED",
            "Tests run: 3, Failures: 1, Errors: 0\nBUILD SUCCESS",
            "Tests run: 3, Failures: 0, Errors: 2\nBUILD SUCCESS",
        ] {
            assert_eq!(shapes(tail), "pf", "{tail:?}");
        }
        assert_eq!(shapes("Tests run: 3, Failures: 0, Errors: 0\nBUILD SUCCESS"), "p");
        assert_eq!(shapes("ok 1 - a\nnot ok 2 - b # TODO later"), "p");
    }

    #[test]
    fn skipped_tests_are_no_pass() {
        assert_eq!(shapes("OK (skipped=4)"), "");
        assert_eq!(shapes("Ran 4 tests in 0.1s\n\nOK (skipped=4)"), "");
        assert_eq!(shapes("Ran 4 tests in 0.1s\n\nOK (skipped=3, expected failures=1)"), "");
        assert_eq!(shapes("Ran 5 tests in 0.1s\n\nOK (skipped=4)"), "p");
        assert_eq!(shapes("Ran 0 tests in 0.0s\n\nOK"), "pz");
        assert_eq!(shapes("ok 1 # SKIP no network"), "");
        assert_eq!(shapes("not all tests passed"), "");
    }

    #[test]
    fn result_lines_of_cargo_are_summed() {
        let none = "test result: ok. 0 passed; 0 failed";
        let some = "test result: ok. 8 passed; 0 failed";
        assert_eq!(shapes(none), "z");
        assert_eq!(shapes(&format!("{some}\n\n{none}")), "p");
        assert_eq!(shapes(&format!("{none}\n{none}")), "z");
        assert_eq!(shapes("test result: ok"), "p");
    }

    #[test]
    fn packages_without_tests_veto_only_when_none_has_any() {
        assert_eq!(shapes("?   \tm/a\t[no test files]"), "z");
        assert_eq!(shapes("?   \tm/a\t[no test files]\nok  \tm/b\t0.1s"), "p");
        assert_eq!(shapes("ok  \tm/a\t0.1s [no tests to run]\nok  \tm/b\t0.1s"), "p");
        assert_eq!(shapes("ok  \tm/a\t0.1s [no tests to run]"), "z");
    }

    #[test]
    fn carriage_returns_and_colours_hide_nothing() {
        assert_eq!(shapes("Ran 4 tests\r\n\r\nOK\r\n"), "p");
        assert_eq!(shapes("\u{1b}[31m2 failed\u{1b}[0m, \u{1b}[32m5 passed\u{1b}[0m"), "pf");
    }

    #[test]
    fn the_first_line_of_a_cut_tail_proves_no_pass() {
        let padding = "x".repeat(MAX_TAIL_CHARS);
        assert_eq!(shapes(&format!("ok 3 - a\n{padding}")), "");
        assert_eq!(shapes(&format!("5 failed\n{padding}")), "f");
        assert_eq!(shapes(&format!("{padding}\nok 3 - a")), "p");
    }
}
