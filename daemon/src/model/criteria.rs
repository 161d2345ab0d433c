//! Acceptance criteria as they are stored: normalization and neutralization.
//!
//! One function, [`normalize`], makes the effective list out of what was submitted. Storing,
//! admission and checking all use it; it is a fixed point, so normalizing a stored list changes
//! nothing and no consumer has to know whether another came before it.

use std::borrow::Cow;
use std::sync::LazyLock;

use regex::{Captures, Regex};
use serde_json::value::RawValue;

/// How many criteria of one item are kept; the rest of a list is dropped.
pub const MAX_CRITERIA: usize = 20;

/// How many Unicode scalar values of one criterion are kept.
pub const MAX_CRITERION_CHARS: usize = 500;

/// Tag names that are made inert wherever they could open or close a tag: the ones by which agent
/// frameworks mark text as their own. A new tag of our own prompts belongs here too.
pub const BLOCKED_TAGS: [&str; 40] = [
    "system-reminder",
    "system_reminder",
    "memory",
    "current_date",
    "think",
    "analysis",
    "role",
    "soul",
    "self_update",
    "thinking_style",
    "clarification_system",
    "critical_reminders",
    "response_style",
    "citations",
    "uploaded_files",
    "current_uploads",
    "subagent_system",
    "skill_system",
    "skill_index",
    "available_skills",
    "disabled_skills",
    "memory_tool_system",
    "todo_list_system",
    "durable_context_data",
    "slash_skill_activation",
    "mcp_routing_hints",
    "available-deferred-tools",
    "goal_continuation",
    "background_task_event",
    "file_editing_workflow",
    "guidelines",
    "output_format",
    "working_directory",
    "tool_restrictions",
    "system",
    "instruction",
    "important",
    "override",
    "ignore",
    "prompt",
];

/// Constant texts that fence user input in prompts, and what each becomes.
const MARKERS: [(&str, &str); 2] = [
    ("--- BEGIN USER INPUT ---", "[BEGIN USER INPUT]"),
    ("--- END USER INPUT ---", "[END USER INPUT]"),
];

/// A list of criteria that is no list.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("acceptance criteria are neither a list nor null")]
pub struct NotAList;

/// The effective criteria of a list, in its order; `None` where nothing usable is left.
///
/// Each text is trimmed, [neutralized](neutralize), cut at [`MAX_CRITERION_CHARS`] and trimmed
/// until nothing changes; empty ones are skipped, and the first [`MAX_CRITERIA`] others are kept.
pub fn normalize<T: AsRef<str>>(texts: impl IntoIterator<Item = T>) -> Option<Vec<String>> {
    let kept: Vec<String> = texts
        .into_iter()
        .map(|text| normalize_one(text.as_ref()))
        .filter(|text| !text.is_empty())
        .take(MAX_CRITERIA)
        .collect();
    (!kept.is_empty()).then_some(kept)
}

/// [`normalize`] on JSON text: null, or a list of anything, of which only the strings count.
///
/// # Errors
/// [`NotAList`] for any other value, and for a list that is not well-formed JSON.
pub fn normalize_json(json: &str) -> Result<Option<Vec<String>>, NotAList> {
    // Raw entries, because a number among them may be one that no number type holds.
    let entries: Option<Vec<&RawValue>> = serde_json::from_str(json).map_err(|_| NotAList)?;
    let strings = entries.iter().flatten().filter(|entry| entry.get().starts_with('"'));
    // A string with a lone surrogate is no text and is skipped like any other non-string.
    Ok(normalize(strings.filter_map(|entry| serde_json::from_str::<String>(entry.get()).ok())))
}

fn normalize_one(text: &str) -> String {
    let mut text = Cow::Borrowed(trim(text));
    // Every round but the last escapes a bracket or a marker or shortens the text, so this ends.
    // A cut can shorten a harmless longer name to a blocked one, so one round is not enough.
    loop {
        let inert = neutralize(&text);
        let next = trim(cut(&inert));
        if next == text {
            return text.into_owned();
        }
        text = Cow::Owned(next.to_owned());
    }
}

/// The same text with [`BLOCKED_TAGS`] and the two input markers made inert; blank text as it is.
///
/// A blocked tag is `<`, white space, `/`, white space (all three optional), a blocked name in any
/// letter case, a word boundary, and everything up to and including the next `>` or the end of the
/// text. Every `<` and `>` in that stretch becomes `&lt;` and `&gt;`.
#[must_use]
pub fn neutralize(text: &str) -> Cow<'_, str> {
    let mut text = if text.contains('<') {
        TAG.replace_all(text, |tag: &Captures<'_>| tag[0].replace('<', "&lt;").replace('>', "&gt;"))
    } else {
        Cow::Borrowed(text)
    };
    for (marker, inert) in MARKERS {
        if text.contains(marker) {
            text = Cow::Owned(text.replace(marker, inert));
        }
    }
    text
}

/// White space at both ends removed: Unicode's, and the four separators U+001C to U+001F.
fn trim(text: &str) -> &str {
    text.trim_matches(|c: char| c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c))
}

fn cut(text: &str) -> &str {
    text.char_indices().nth(MAX_CRITERION_CHARS).map_or(text, |(end, _)| &text[..end])
}

static TAG: LazyLock<Regex> = LazyLock::new(|| {
    // Case-insensitive matching folds U+017F and U+212A to `s` and `k`, but not the two Turkish
    // letters to `i`.
    let names = BLOCKED_TAGS.map(|name| regex::escape(name).replace('i', "[iİı]")).join("|");
    // `\b` would take combining marks and connector punctuation for parts of a word, so the
    // boundary is spelled out: the name is followed by the end of the tag or by a non-word
    // character. That without case: a combining iota (U+0345) folds to a letter.
    let tag = format!(
        r"(?i)<[\s\x1C-\x1F]*/?[\s\x1C-\x1F]*(?:{names})(?:(?-i:[^>_\p{{L}}\p{{N}}])[^>]*)?(?:>|\z)"
    );
    Regex::new(&tag).expect("the pattern is constant but for escaped names")
});

#[cfg(test)]
mod tests {
    use std::fs;

    use proptest::prelude::*;
    use serde::Deserialize;
    use serde::de::DeserializeOwned;
    use serde_json::Value;

    use super::*;

    #[derive(Deserialize)]
    struct Vector<I, E> {
        id: String,
        input: I,
        expected: E,
        note: String,
    }

    fn vectors<I: DeserializeOwned, E: DeserializeOwned>(name: &str) -> Vec<Vector<I, E>> {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/vectors/acceptance");
        let text = fs::read_to_string(format!("{folder}/{name}")).unwrap();
        let vectors: Vec<_> = text.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
        assert!(!vectors.is_empty(), "{name} has no vectors");
        vectors
    }

    #[test]
    fn neutralization_gives_the_answers_of_the_vectors() {
        for v in vectors::<String, String>("neutralize.jsonl") {
            assert_eq!(neutralize(&v.input), v.expected, "{}: {}", v.id, v.note);
        }
    }

    #[test]
    fn normalization_gives_the_answers_of_the_vectors() {
        for v in vectors::<Value, Option<Vec<String>>>("normalize.jsonl") {
            let stored = normalize_json(&v.input.to_string()).unwrap();
            assert_eq!(stored, v.expected, "{}: {}", v.id, v.note);
            assert_eq!(normalize(stored.iter().flatten()), stored, "{}: no fixed point", v.id);
        }
    }

    #[test]
    fn the_list_of_blocked_names_is_complete_and_has_no_name_twice() {
        let distinct: std::collections::HashSet<_> = BLOCKED_TAGS.iter().collect();
        assert_eq!(distinct.len(), 40);
    }

    #[test]
    fn every_blocked_name_is_escaped_in_any_letter_case() {
        for name in BLOCKED_TAGS {
            for spelled in [name.to_owned(), name.to_uppercase(), name.replace('i', "\u{130}")] {
                let inert = neutralize(&format!("a<{spelled}>b")).into_owned();
                assert_eq!(inert, format!("a&lt;{spelled}&gt;b"));
            }
        }
    }

    #[test]
    fn a_longer_name_is_left_alone_unless_a_blocked_one_ends_inside_it_at_a_word_boundary() {
        for harmless in ["<systems>", "<system_x>", "<prompt2>", "<souls/>"] {
            assert_eq!(neutralize(harmless), harmless);
        }
        assert_eq!(neutralize("<system-reminders>"), "&lt;system-reminders&gt;");
    }

    #[test]
    fn a_name_followed_by_a_combining_mark_is_blocked() {
        // The second is the one mark that folds to a letter.
        for mark in ['\u{301}', '\u{345}'] {
            assert_eq!(neutralize(&format!("<system{mark}>")), format!("&lt;system{mark}&gt;"));
        }
    }

    #[test]
    fn only_strings_of_a_list_count_whatever_the_others_are() {
        let list = r#"[1e999, "kept", {"a": [1e999]}, "\ud800", null, "too"]"#;
        let kept = Some(vec!["kept".to_owned(), "too".to_owned()]);
        assert_eq!(normalize_json(list), Ok(kept));
    }

    #[test]
    fn what_is_neither_a_list_nor_null_is_refused() {
        for json in [r#""text""#, "{}", "1", "true", "[1", ""] {
            assert_eq!(normalize_json(json), Err(NotAList), "{json}");
        }
        assert_eq!(normalize_json("null"), Ok(None));
    }

    #[test]
    fn a_megabyte_of_openers_is_normalized_at_once() {
        let text = "<system ".repeat(131_072);
        let stored = normalize([&text]).unwrap();
        assert_eq!(stored[0].chars().count(), MAX_CRITERION_CHARS);
        assert!(!stored[0].contains('<'));
    }

    /// Text in which tags, markers, blanks and cuts are likely.
    fn criterion() -> impl Strategy<Value = String> {
        let part = prop_oneof![
            Just("<".to_owned()),
            Just(">".to_owned()),
            Just("</ ".to_owned()),
            Just("<system".to_owned()),
            Just("<SY\u{17f}tem_reminder".to_owned()),
            Just("<memor".to_owned()),
            Just("y".to_owned()),
            Just("--- BEGIN USER INPUT ---".to_owned()),
            Just("--- END ".to_owned()),
            Just("USER INPUT ---".to_owned()),
            Just("\u{1c}\u{a0} ".to_owned()),
            "\\PC{0,4}",
            (470_usize..500).prop_map(|n| "x".repeat(n)),
        ];
        proptest::collection::vec(part, 0..12).prop_map(|parts| parts.concat())
    }

    proptest! {
        #[test]
        fn normalization_is_a_fixed_point(list in proptest::collection::vec(criterion(), 0..24)) {
            let stored = normalize(&list);
            for text in stored.iter().flatten() {
                prop_assert!(text.chars().count() <= MAX_CRITERION_CHARS);
                prop_assert!(!TAG.is_match(text));
            }
            prop_assert!(stored.iter().flatten().count() <= MAX_CRITERIA);
            prop_assert_eq!(normalize(stored.iter().flatten()), stored);
        }

        #[test]
        fn neutralization_is_a_fixed_point(text in criterion()) {
            let once = neutralize(&text).into_owned();
            prop_assert_eq!(neutralize(&once), once.as_str());
        }
    }
}
