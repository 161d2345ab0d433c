use std::ops::RangeInclusive;

use indicatif::HumanCount;
use time::OffsetDateTime;

use crate::config::Limits;
use crate::model::QueueName;
use crate::submit::report::Problem;
use crate::submit::validate::{chars_rule, key_rule};

const CAPS: RangeInclusive<i32> = 1..=1_000_000;
const PRIORITIES: RangeInclusive<i32> = -100..=100;

const SUBMISSION_KEY_CHARS: usize = 512;
const NAME_CHARS: usize = 128;

/// What a submitter says about a batch as a whole. `None` leaves a choice to the queue's settings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewBatch {
    /// Whose batch it is: 1 to 128 of `A-Z`, `a-z`, `0-9`, `.`, `_`, `-` and `@`, not `.` or `..`
    /// (it names a directory).
    pub owner: String,
    /// The lane whose executor runs the items.
    pub queue: QueueName,
    /// For people: 1 to `limits.title_chars` characters (default 256), no control characters.
    pub title: Option<String>,
    /// Under which a repeated submission returns the first batch: 1 to 512 characters, no control
    /// character below U+0020 but the tab.
    pub submission_key: Option<String>,
    /// Names the workspace that the items share: 1 to 128 of `A-Z`, `a-z`, `0-9`, `.`, `_` and
    /// `-`, not `.` or `..`.
    pub thread: Option<String>,
    /// How many items may execute at once, over all workers: 1 to 1,000,000.
    pub max_running: Option<i32>,
    /// How many items may be waiting or held at once: 1 to 1,000,000.
    pub max_live: Option<i32>,
    /// How many charged attempts an item gets: 1 to `limits.max_attempts` (default 100).
    pub max_attempts: Option<i32>,
    /// How many items may be checking before claims are held back: 1 to 1,000,000.
    pub max_checking: Option<i32>,
    /// Batches of a higher priority are claimed first: -100 to 100, default 0.
    pub priority: i16,
    /// No item starts earlier.
    pub not_before: Option<OffsetDateTime>,
}

impl NewBatch {
    /// A batch of the owner `default` that leaves everything else to its queue.
    #[must_use]
    pub fn in_queue(queue: QueueName) -> Self {
        Self {
            owner: "default".to_owned(),
            queue,
            title: None,
            submission_key: None,
            thread: None,
            max_running: None,
            max_live: None,
            max_attempts: None,
            max_checking: None,
            priority: 0,
            not_before: None,
        }
    }

    /// Checks every parameter against its range.
    ///
    /// # Errors
    /// One problem for each parameter out of its range, which names it.
    pub fn validate(&self, limits: &Limits) -> Result<(), Vec<Problem>> {
        let attempts = 1..=i32::from(limits.max_attempts);
        let rules = [
            ("owner", name_rule(&self.owner, "._-@")),
            ("title", optional(self.title.as_deref(), |title| title_rule(title, limits))),
            (
                "submission_key",
                optional(self.submission_key.as_deref(), |key| key_rule(key, SUBMISSION_KEY_CHARS)),
            ),
            ("thread", optional(self.thread.as_deref(), |thread| name_rule(thread, "._-"))),
            ("max_running", optional(self.max_running, |cap| range_rule(cap, CAPS))),
            ("max_live", optional(self.max_live, |cap| range_rule(cap, CAPS))),
            ("max_attempts", optional(self.max_attempts, |count| range_rule(count, attempts))),
            ("max_checking", optional(self.max_checking, |cap| range_rule(cap, CAPS))),
            ("priority", range_rule(self.priority.into(), PRIORITIES)),
        ];
        let problems: Vec<Problem> = rules
            .into_iter()
            .filter_map(|(field, rule)| Some(Problem::in_field(field, rule.err()?)))
            .collect();
        if problems.is_empty() { Ok(()) } else { Err(problems) }
    }
}

fn optional<T>(value: Option<T>, rule: impl FnOnce(T) -> Result<(), String>) -> Result<(), String> {
    value.map_or(Ok(()), rule)
}

fn title_rule(title: &str, limits: &Limits) -> Result<(), String> {
    if title.is_empty() {
        return Err("is empty".to_owned());
    }
    if let Some(control) = title.chars().find(|c| c.is_control()) {
        return Err(format!("holds the control character U+{:04X}", u32::from(control)));
    }
    chars_rule(title, limits.title_chars)
}

/// The rule for names of directories: ASCII letters, digits and the characters of `also`.
fn name_rule(name: &str, also: &str) -> Result<(), String> {
    let allowed = |c: char| c.is_ascii_alphanumeric() || also.contains(c);
    if name.is_empty() || name.len() > NAME_CHARS || !name.chars().all(allowed) {
        let also: Vec<String> = also.chars().map(|c| format!("`{c}`")).collect();
        let also = also.join(" ");
        return Err(format!("is not 1 to {NAME_CHARS} of A-Z a-z 0-9 {also}"));
    }
    if name == "." || name == ".." {
        return Err(format!("is `{name}`, which names no directory of its own"));
    }
    Ok(())
}

fn range_rule(value: i32, range: RangeInclusive<i32>) -> Result<(), String> {
    if range.contains(&value) {
        return Ok(());
    }
    let (from, to) = range.into_inner();
    Err(format!("is {value}; it must be {from} to {}", HumanCount(to.unsigned_abs().into())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Settings;

    fn batch() -> NewBatch {
        NewBatch::in_queue("checksum".parse().unwrap())
    }

    fn refused(change: impl FnOnce(&mut NewBatch)) -> Vec<String> {
        let mut batch = batch();
        change(&mut batch);
        batch
            .validate(&Settings::defaults().limits)
            .unwrap_err()
            .iter()
            .map(ToString::to_string)
            .collect()
    }

    #[test]
    fn every_parameter_is_accepted_at_both_ends_of_its_range() {
        let smallest = NewBatch {
            owner: "a".to_owned(),
            title: Some("t".to_owned()),
            submission_key: Some("k".to_owned()),
            thread: Some("...".to_owned()),
            max_running: Some(1),
            max_live: Some(1),
            max_attempts: Some(1),
            max_checking: Some(1),
            priority: -100,
            ..batch()
        };
        let largest = NewBatch {
            owner: "Az09._-@".repeat(16),
            title: Some("é".repeat(256)),
            submission_key: Some("é".repeat(512)),
            thread: Some("Az09_._-".repeat(16)),
            max_running: Some(1_000_000),
            max_live: Some(1_000_000),
            max_attempts: Some(100),
            max_checking: Some(1_000_000),
            priority: 100,
            ..batch()
        };
        for batch in [batch(), smallest, largest] {
            assert_eq!(batch.validate(&Settings::defaults().limits), Ok(()));
        }
    }

    #[test]
    fn names_of_directories_cannot_leave_theirs() {
        for bad in ["", ".", "..", "a/b", "a b", "é", "a\0", &"x".repeat(129)] {
            assert_eq!(refused(|b| b.owner = bad.to_owned()).len(), 1, "{bad}");
            assert_eq!(refused(|b| b.thread = Some(bad.to_owned())).len(), 1, "{bad}");
        }
        assert_eq!(
            refused(|b| b.thread = Some("a@b".to_owned())),
            ["\"thread\": is not 1 to 128 of A-Z a-z 0-9 `.` `_` `-`"]
        );
    }

    #[test]
    fn texts_are_neither_empty_nor_too_long_nor_of_several_lines() {
        for bad in ["", "a\nb", &"é".repeat(257)] {
            assert_eq!(refused(|b| b.title = Some(bad.to_owned())).len(), 1, "{bad:?}");
        }
        for bad in ["", "a\nb", &"é".repeat(513)] {
            assert_eq!(refused(|b| b.submission_key = Some(bad.to_owned())).len(), 1, "{bad:?}");
        }
    }

    #[test]
    fn each_parameter_out_of_range_is_named() {
        let problems = refused(|b| {
            b.max_running = Some(0);
            b.max_live = Some(-1);
            b.max_attempts = Some(101);
            b.max_checking = Some(1_000_001);
            b.priority = -101;
        });
        assert_eq!(
            problems,
            [
                "\"max_running\": is 0; it must be 1 to 1,000,000",
                "\"max_live\": is -1; it must be 1 to 1,000,000",
                "\"max_attempts\": is 101; it must be 1 to 100",
                "\"max_checking\": is 1000001; it must be 1 to 1,000,000",
                "\"priority\": is -101; it must be -100 to 100",
            ]
        );
    }

    #[test]
    fn configured_limits_hold() {
        let mut limits = Settings::defaults().limits;
        limits.max_attempts = 5;
        limits.title_chars = 3;
        let batch = |title: &str, attempts| NewBatch {
            title: Some(title.to_owned()),
            max_attempts: Some(attempts),
            ..batch()
        };
        assert_eq!(batch("abc", 5).validate(&limits), Ok(()));
        assert_eq!(batch("abcd", 6).validate(&limits).unwrap_err().len(), 2);
    }
}
