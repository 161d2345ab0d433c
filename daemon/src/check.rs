//! Acceptance checks: deterministic code decides what code can decide of an item's criteria, after
//! its execution completed. What it cannot decide stays unchecked, and it prefers that to a guess.
//!
//! The rules are `acceptance.md` 1.3 to 1.6; comments cite its numbers. Nothing here changes an
//! outcome, and everything here blocks: callers run it off the async runtime.

mod files;
mod match_command;
mod options;
mod overlap;
mod parse;
mod reason;
mod roots;
mod scope;
mod shapes;
mod shell;
mod tests_passed;

use std::panic::{AssertUnwindSafe, catch_unwind};

pub use files::READ_CAP_BYTES;
pub use parse::{Criterion, FileCriterion, needs_workspace, parse_file};
pub use reason::Reason;
pub use roots::Roots;
pub use scope::Directories;

use self::reason::Answer;
use self::scope::Scope;
use crate::model::criteria::normalize;
use crate::model::{Evidence, Leaf, Verdict};

/// The directory below which an item finds its workspace, outputs and uploads by default, whatever
/// their real place is.
pub const DEFAULT_VIRTUAL_PREFIX: &str = "/mnt/user-data";

/// What a check may look at.
#[derive(Clone, Copy, Debug)]
pub struct CheckInput<'a> {
    /// The item's criteria.
    pub criteria: &'a [String],
    /// What was recorded of the current attempt's commands, oldest first.
    pub evidence: &'a [Evidence],
    /// The opened workspace, or why there is none.
    pub workspace: Workspace<'a>,
    /// Where the item's directories are, by which the text of its commands is judged; none when
    /// unknown. Nothing is opened by these paths.
    pub directories: Option<&'a Directories>,
    /// The directory below which the item's commands and criteria find `workspace`, `outputs` and
    /// `uploads`. Default [`DEFAULT_VIRTUAL_PREFIX`].
    pub virtual_prefix: &'a str,
}

/// The use of the workspace that a check was granted.
#[derive(Clone, Copy, Debug)]
pub enum Workspace<'a> {
    /// Granted, and held open for this check.
    Open(&'a Roots),
    /// There is none, or it cannot be seen from here.
    Unknown,
    /// Denied, for this reason: nothing was acquired and nothing is read.
    Denied(&'a str),
}

/// Checks every criterion. Blocking, for at most 20 bounded reads.
///
/// None without a usable criterion.
#[must_use]
pub fn run(input: &CheckInput<'_>) -> Option<Verdict> {
    Verdict::new(judge(input).into_iter().map(|(leaf, _)| leaf).collect())
}

/// Like [`run`], with the reason of each leaf.
#[must_use]
pub fn judge(input: &CheckInput<'_>) -> Vec<(Leaf, Reason)> {
    let scope = Scope::new(input.directories, input.virtual_prefix);
    normalize(input.criteria)
        .unwrap_or_default()
        .iter()
        .map(|text| {
            let criterion = Criterion::parse(text);
            let answer = contained(|| answer(criterion, input, &scope));
            let family = criterion.family();
            (Leaf::new(text, family, answer.reason.finding(), &answer.detail()), answer.reason)
        })
        .collect()
}

fn answer(criterion: Criterion<'_>, input: &CheckInput<'_>, scope: &Scope<'_>) -> Answer {
    match (criterion, input.workspace) {
        (Criterion::Undecidable, _) => Reason::Undecidable.into(),
        (Criterion::TestsPassed { command }, _) => {
            tests_passed::judge(command, input.evidence, scope)
        }
        (Criterion::File(file), Workspace::Open(roots)) => {
            files::judge(file, roots, input.virtual_prefix)
        }
        (Criterion::File(_), Workspace::Unknown) => {
            Answer::with(Reason::OutsideScope, "no workspace is known here")
        }
        (Criterion::File(_), Workspace::Denied(why)) => Answer::with(Reason::Denied, why),
    }
}

/// A fault in one leaf must not cost the others their answers.
fn contained(answer: impl FnOnce() -> Answer) -> Answer {
    // Nothing that the closure reaches is used again after a panic, apart from what is only read.
    catch_unwind(AssertUnwindSafe(answer)).unwrap_or_else(|_| Reason::Crashed.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_leaf_that_crashes_is_unchecked() {
        let answer = contained(|| panic!("a fault of the checker"));

        assert_eq!(answer.reason, Reason::Crashed);
        assert!(!answer.reason.finding().checked());
    }
}
