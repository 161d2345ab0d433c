use std::fmt;

use indicatif::HumanCount;

/// One reason why a submission is refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    line: Option<u64>,
    field: Option<&'static str>,
    message: String,
}

impl Problem {
    pub(super) const fn on_line(line: u64, field: Option<&'static str>, message: String) -> Self {
        Self { line: Some(line), field, message }
    }

    pub(super) const fn in_field(field: &'static str, message: String) -> Self {
        Self { line: None, field: Some(field), message }
    }

    pub(super) const fn overall(message: String) -> Self {
        Self { line: None, field: None, message }
    }

    /// The physical line of the input, from 1; none for what belongs to no single line.
    #[must_use]
    pub const fn line(&self) -> Option<u64> {
        self.line
    }

    /// The member of the line or the parameter of the batch (as in the API, with underscores).
    #[must_use]
    pub const fn field(&self) -> Option<&'static str> {
        self.field
    }

    /// What is wrong with it; free of control characters.
    #[must_use]
    pub fn message(&self) -> &str {
        &self.message
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(line) = self.line {
            write!(f, "line {line}: ")?;
        }
        if let Some(field) = self.field {
            write!(f, "\"{field}\": ")?;
        }
        f.write_str(&self.message)
    }
}

/// Why a submission is refused: the first problems in line order, and how many there are in all.
///
/// Its `Display` is one line a problem, then a line with the total.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    problems: Vec<Problem>,
    total: u64,
    keep: usize,
}

impl Report {
    /// An empty report that keeps the first `keep` problems and counts the others.
    pub(super) const fn keeping(keep: usize) -> Self {
        Self { problems: Vec::new(), total: 0, keep }
    }

    /// The problems that were kept.
    #[must_use]
    pub fn problems(&self) -> &[Problem] {
        &self.problems
    }

    /// How many problems there are, those that were only counted included.
    #[must_use]
    pub const fn total(&self) -> u64 {
        self.total
    }

    pub(super) const fn is_empty(&self) -> bool {
        self.total == 0
    }

    /// Adds a problem that stands on no earlier line than those added before.
    pub(super) fn add(&mut self, problem: Problem) {
        self.total += 1;
        if self.problems.len() < self.keep {
            self.problems.push(problem);
        }
    }

    /// Adds problems that were found late, sorted by line, each where it belongs.
    pub(super) fn merge(&mut self, late: impl ExactSizeIterator<Item = Problem>) {
        self.total += late.len() as u64;
        self.problems.extend(late.take(self.keep));
        // Stable, and what has no line comes last: it is about the input as a whole.
        self.problems.sort_by_key(|problem| problem.line.unwrap_or(u64::MAX));
        self.problems.truncate(self.keep);
    }
}

impl From<Vec<Problem>> for Report {
    fn from(problems: Vec<Problem>) -> Self {
        Self { total: problems.len() as u64, keep: problems.len(), problems }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for problem in &self.problems {
            writeln!(f, "{problem}")?;
        }
        let more = self.total - self.problems.len() as u64;
        if more > 0 {
            writeln!(f, "and {} more", HumanCount(more))?;
        }
        let noun = if self.total == 1 { "problem" } else { "problems" };
        write!(f, "{} {noun}; nothing was stored", HumanCount(self.total))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn on(line: u64) -> Problem {
        Problem::on_line(line, Some("key"), "wrong".to_owned())
    }

    #[test]
    fn a_report_names_the_first_problems_and_counts_the_rest() {
        let mut report = Report::keeping(2);
        for line in 1..=4314 {
            report.add(on(line));
        }
        let text = "line 1: \"key\": wrong\nline 2: \"key\": wrong\nand 4,312 more\n\
                    4,314 problems; nothing was stored";
        assert_eq!(report.to_string(), text);
    }

    #[test]
    fn late_problems_take_their_place_among_the_first() {
        let mut report = Report::keeping(3);
        for line in [2, 5, 9, 12] {
            report.add(on(line));
        }
        report.merge([3, 4, 20].map(on).into_iter());
        assert_eq!(report.problems(), [on(2), on(3), on(4)]);
        assert_eq!(report.total(), 7);
    }

    #[test]
    fn one_problem_of_a_batch_names_its_field() {
        let report = Report::from(vec![Problem::in_field("owner", "wrong".to_owned())]);
        assert_eq!(report.to_string(), "\"owner\": wrong\n1 problem; nothing was stored");
    }
}
