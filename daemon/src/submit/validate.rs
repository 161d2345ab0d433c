use std::borrow::Cow;
use std::fmt;

use indicatif::HumanCount;
use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::error::Category;
use serde_json::value::RawValue;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use crate::model::criteria;
use crate::submit::reader::SubmitLimits;

/// How deep the arrays and objects of a value may nest. Readers of JSON commonly stop at 128
/// levels (`PostgreSQL` at the end of its stack), and what carries the value adds some of its own.
pub const MAX_DEPTH: usize = 100;

/// A valid item, borrowed from its line where it can be.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Item<'a> {
    pub(super) key: Cow<'a, str>,
    /// JSON text as it was written.
    pub(super) input: Cow<'a, str>,
    /// JSON text of the normalized list.
    pub(super) criteria: Option<String>,
    pub(super) not_before: Option<OffsetDateTime>,
}

/// What is wrong with a line: the member, if one is to blame, and the reason.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Fault {
    pub(super) field: Option<&'static str>,
    pub(super) message: String,
}

impl Fault {
    fn line(message: impl Into<String>) -> Self {
        Self { field: None, message: message.into() }
    }

    fn of(field: &'static str, message: impl Into<String>) -> Self {
        Self { field: Some(field), message: message.into() }
    }
}

/// What a line holds: its item or all its faults. The key is known apart from them, so that it is
/// compared with other lines even when the rest is at fault.
pub(super) struct Checked<'a> {
    pub(super) key: Option<Cow<'a, str>>,
    input: Option<Cow<'a, str>>,
    criteria: Option<String>,
    not_before: Option<OffsetDateTime>,
    faults: Vec<Fault>,
}

impl<'a> Checked<'a> {
    fn failed(fault: Fault) -> Self {
        Self { key: None, input: None, criteria: None, not_before: None, faults: vec![fault] }
    }

    pub(super) fn item(self) -> Result<Item<'a>, Vec<Fault>> {
        match (self.key, self.input) {
            (Some(key), Some(input)) if self.faults.is_empty() => {
                Ok(Item { key, input, criteria: self.criteria, not_before: self.not_before })
            }
            _ => Err(self.faults),
        }
    }
}

/// Checks a line that is an item's key and input.
pub(super) fn plain<'a>(line: &'a str, limits: &SubmitLimits) -> Checked<'a> {
    if let Err(message) = key_rule(line, limits.key_chars) {
        return Checked::failed(Fault::line(format!("the line is the item's key: it {message}")));
    }
    let input = serde_json::to_string(line).expect("a string is JSON");
    let mut faults = Vec::new();
    if let Err(message) = size_rule(&input, limits.input_bytes) {
        faults.push(Fault::line(format!("the line is the item's input: it {message}")));
    }
    Checked {
        key: Some(line.into()),
        input: Some(input.into()),
        criteria: None,
        not_before: None,
        faults,
    }
}

/// Checks a line that is a JSON object.
pub(super) fn json<'a>(line: &'a str, limits: &SubmitLimits) -> Checked<'a> {
    let Members { key, input, criteria, not_before, fault } = match members(line) {
        Ok(members) => members,
        Err(fault) => return Checked::failed(fault),
    };
    let mut faults = Vec::from_iter(fault);
    for (field, raw) in [(KEY, key), (INPUT, input)] {
        if raw.is_none() {
            faults.push(Fault::of(field, "missing"));
        }
    }
    Checked {
        key: member(&mut faults, KEY, key, |raw| key_of(raw, limits)),
        input: member(&mut faults, INPUT, input, |raw| {
            size_rule(raw, limits.input_bytes).map(|()| raw.into())
        }),
        criteria: member(&mut faults, CRITERIA, criteria, criteria_of).flatten(),
        not_before: member(&mut faults, NOT_BEFORE, not_before, time_of).flatten(),
        faults,
    }
}

pub(super) const KEY: &str = "key";
const INPUT: &str = "input";
const CRITERIA: &str = "acceptance_criteria";
const NOT_BEFORE: &str = "not_before";

fn member<'a, T>(
    faults: &mut Vec<Fault>,
    field: &'static str,
    raw: Option<&'a RawValue>,
    parse: impl FnOnce(&'a str) -> Result<T, String>,
) -> Option<T> {
    let raw = raw?.get();
    match refuse_unstorable(raw).and_then(|()| parse(raw)) {
        Ok(value) => Some(value),
        Err(message) => {
            faults.push(Fault::of(field, message));
            None
        }
    }
}

/// The members of a line's object as they were written, and the first thing wrong with their names
/// (a line has room for a hundred thousand of them).
#[derive(Default)]
struct Members<'a> {
    key: Option<&'a RawValue>,
    input: Option<&'a RawValue>,
    criteria: Option<&'a RawValue>,
    not_before: Option<&'a RawValue>,
    fault: Option<Fault>,
}

fn members(line: &str) -> Result<Members<'_>, Fault> {
    if !line.trim_start_matches(JSON_BLANKS).starts_with('{') {
        let found: &RawValue = serde_json::from_str(line).map_err(|error| syntax(&error))?;
        return Err(Fault::line(format!(
            "expected an object, found {}; each line is one item",
            kind(found.get())
        )));
    }
    let mut json = serde_json::Deserializer::from_str(line);
    let members = json.deserialize_map(MembersVisitor).map_err(|error| syntax(&error))?;
    json.end().map_err(|error| syntax(&error))?;
    Ok(members)
}

const JSON_BLANKS: [char; 4] = [' ', '\t', '\n', '\r'];

/// The reason of a parse error, in terms of the physical line: the parser calls every line line 1.
fn syntax(error: &serde_json::Error) -> Fault {
    if error.classify() == Category::Eof {
        return Fault::line("the JSON text is not complete; each line is one whole object");
    }
    let text = error.to_string();
    let reason = text.rsplit_once(" at line ").map_or(text.as_str(), |(reason, _)| reason);
    Fault::line(format!("not JSON: {reason} near byte {}", error.column()))
}

struct MembersVisitor;

impl<'de> Visitor<'de> for MembersVisitor {
    type Value = Members<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut members = Members::default();
        while let Some(name) = map.next_key()? {
            let value = map.next_value()?;
            let (field, slot) = match name {
                Name::Key => (KEY, &mut members.key),
                Name::Input => (INPUT, &mut members.input),
                Name::Criteria => (CRITERIA, &mut members.criteria),
                Name::NotBefore => (NOT_BEFORE, &mut members.not_before),
                Name::Unknown(name) => {
                    members.fault.get_or_insert_with(|| unknown(&name));
                    continue;
                }
            };
            if slot.replace(value).is_some() {
                members.fault.get_or_insert_with(|| Fault::of(field, "given more than once"));
            }
        }
        Ok(members)
    }
}

fn unknown(name: &str) -> Fault {
    let name = shown(name);
    Fault::line(format!(
        "unknown member {name}; an item has {KEY}, {INPUT}, {CRITERIA} and {NOT_BEFORE}"
    ))
}

enum Name {
    Key,
    Input,
    Criteria,
    NotBefore,
    Unknown(String),
}

impl<'de> Deserialize<'de> for Name {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct NameVisitor;

        impl Visitor<'_> for NameVisitor {
            type Value = Name;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a member name")
            }

            fn visit_str<E>(self, name: &str) -> Result<Name, E> {
                Ok(match name {
                    KEY => Name::Key,
                    INPUT => Name::Input,
                    CRITERIA => Name::Criteria,
                    NOT_BEFORE => Name::NotBefore,
                    _ => Name::Unknown(name.to_owned()),
                })
            }
        }

        deserializer.deserialize_str(NameVisitor)
    }
}

/// Refuses what no later stage could carry: U+0000 and lone surrogates, however they are written,
/// and values nested deeper than [`MAX_DEPTH`]. `json` is well-formed.
fn refuse_unstorable(json: &str) -> Result<(), String> {
    if !json.starts_with(['[', '{']) && !json.contains('\\') {
        return Ok(());
    }
    let bytes = json.as_bytes();
    let mut depth = 0_usize;
    let mut in_string = false;
    let mut at = 0;
    while let Some(byte) = bytes.get(at) {
        match byte {
            b'"' => in_string = !in_string,
            b'\\' if bytes.get(at + 1) == Some(&b'u') => at += unicode_escape(json, at)? - 1,
            b'\\' => at += 1,
            b'[' | b'{' if !in_string => {
                depth += 1;
                if depth > MAX_DEPTH {
                    return Err(format!("is nested deeper than {MAX_DEPTH} levels"));
                }
            }
            b']' | b'}' if !in_string => depth -= 1,
            _ => {}
        }
        at += 1;
    }
    Ok(())
}

/// The length in bytes of the escaped character that begins at `at`: one `\uXXXX` or a pair.
fn unicode_escape(json: &str, at: usize) -> Result<usize, String> {
    let unit = |at: usize| {
        let digits = json.get(at..at + 6)?.strip_prefix("\\u")?;
        u16::from_str_radix(digits, 16).ok()
    };
    match (unit(at), unit(at + 6)) {
        (Some(0), _) => Err("holds \\u0000, which neither PostgreSQL text nor a program argument \
                             can carry"
            .to_owned()),
        (Some(0xD800..=0xDBFF), Some(0xDC00..=0xDFFF)) => Ok(12),
        (Some(lone @ 0xD800..=0xDFFF), _) => {
            Err(format!("holds the lone surrogate \\u{lone:04x}, which is no character"))
        }
        _ => Ok(6),
    }
}

fn key_of<'a>(raw: &'a str, limits: &SubmitLimits) -> Result<Cow<'a, str>, String> {
    let key = text(raw)?;
    key_rule(&key, limits.key_chars)?;
    Ok(key)
}

fn criteria_of(raw: &str) -> Result<Option<String>, String> {
    let list = criteria::normalize_json(raw).map_err(|_| expected("a list or null", raw))?;
    Ok(list.map(|list| serde_json::to_string(&list).expect("strings are JSON")))
}

fn time_of(raw: &str) -> Result<Option<OffsetDateTime>, String> {
    const WANTED: &str = "a time such as \"2030-01-31T08:00:00Z\" (RFC 3339) or null";
    if raw == "null" {
        return Ok(None);
    }
    let text = text(raw).map_err(|_| expected(WANTED, raw))?;
    let time = OffsetDateTime::parse(&text, &Rfc3339)
        .ok()
        .and_then(|time| time.checked_to_offset(time::UtcOffset::UTC))
        .ok_or_else(|| format!("expected {WANTED}, found {}", shown(&text)))?;
    // The database keeps microseconds.
    Ok(Some(time.truncate_to_microsecond()))
}

/// The string that `raw`, storable JSON, stands for.
fn text(raw: &str) -> Result<Cow<'_, str>, String> {
    match raw.strip_prefix('"').and_then(|rest| rest.strip_suffix('"')) {
        Some(plain) if !plain.contains('\\') => Ok(Cow::Borrowed(plain)),
        Some(_) => serde_json::from_str(raw).map(Cow::Owned).map_err(|error| error.to_string()),
        None => Err(expected("a string", raw)),
    }
}

/// The rule for keys of items and submissions: 1 to `max_chars` Unicode scalar values, no control
/// character below U+0020 but the tab. The error continues a sentence about the key.
pub(super) fn key_rule(key: &str, max_chars: usize) -> Result<(), String> {
    if key.is_empty() {
        return Err("is empty".to_owned());
    }
    if let Some(control) = key.chars().find(|c| *c < ' ' && *c != '\t') {
        return Err(format!("holds the control character U+{:04X}", u32::from(control)));
    }
    chars_rule(key, max_chars)
}

/// At most `max` Unicode scalar values.
pub(super) fn chars_rule(text: &str, max: usize) -> Result<(), String> {
    // A character has at least one byte, so most texts need no counting.
    let chars = if text.len() > max { text.chars().count() } else { 0 };
    if chars > max {
        return Err(format!("has {} characters; the limit is {}", grouped(chars), grouped(max)));
    }
    Ok(())
}

fn size_rule(json: &str, max: usize) -> Result<(), String> {
    if json.len() > max {
        return Err(format!(
            "has {} bytes of JSON text; the limit is {}",
            grouped(json.len()),
            grouped(max)
        ));
    }
    Ok(())
}

pub(super) fn grouped(number: usize) -> HumanCount {
    HumanCount(number as u64)
}

fn expected(wanted: &str, raw: &str) -> String {
    format!("expected {wanted}, found {}", kind(raw))
}

fn kind(json: &str) -> &'static str {
    match json.as_bytes().first() {
        Some(b'{') => "an object",
        Some(b'[') => "an array",
        Some(b'"') => "a string",
        Some(b't' | b'f') => "a boolean",
        Some(b'n') => "null",
        _ => "a number",
    }
}

/// A text of the submitter for a message: quoted, escaped, and not longer than a line.
fn shown(text: &str) -> String {
    const MOST: usize = 64;
    let dots = if text.chars().nth(MOST).is_some() { "..." } else { "" };
    format!("{:?}{dots}", text.chars().take(MOST).collect::<String>())
}

#[cfg(test)]
mod tests {
    use time::macros::datetime;

    use super::*;

    fn accepted(line: &str) -> Item<'_> {
        json(line, &SubmitLimits::default()).item().unwrap()
    }

    fn refused(line: &str) -> Vec<(Option<&'static str>, String)> {
        let faults = json(line, &SubmitLimits::default()).item().unwrap_err();
        faults.into_iter().map(|fault| (fault.field, fault.message)).collect()
    }

    #[test]
    fn an_input_is_kept_as_it_was_written() {
        for input in [
            "null",
            "12345678901234567890123456789.10",
            "1e999",
            "-0.0",
            r#""tab \t, quote \", \u00e9 and \ud83d\ude00""#,
            r#"{ "b" :1, "a": [ 9007199254740993 ], "b": 2 }"#,
        ] {
            let line = format!(r#" {{ "input" :  {input}  , "key":"k"}} "#);
            assert_eq!(accepted(&line).input, input);
        }
    }

    #[test]
    fn a_key_is_the_text_its_json_stands_for() {
        assert_eq!(accepted(r#"{"key":"\u0061\/\ud83d\ude00","input":1}"#).key, "a/\u{1f600}");
    }

    #[test]
    fn optional_members_may_be_absent_null_or_without_anything_usable() {
        for rest in [
            "",
            r#","acceptance_criteria":null,"not_before":null"#,
            r#","acceptance_criteria":[]"#,
            r#","acceptance_criteria":[1e999," "]"#,
        ] {
            let line = format!(r#"{{"key":"k","input":1{rest}}}"#);
            let item = accepted(&line);
            assert_eq!((item.criteria, item.not_before), (None, None), "{line}");
        }
    }

    #[test]
    fn criteria_are_normalized_and_times_are_kept_to_the_microsecond() {
        let line = r#"{"key":"k","input":1,"acceptance_criteria":[" a ",2,"<system>"],
            "not_before":"2030-01-31T08:00:00.123456789+02:00"}"#;
        let item = accepted(line);
        assert_eq!(item.criteria.as_deref(), Some(r#"["a","&lt;system&gt;"]"#));
        assert_eq!(item.not_before, Some(datetime!(2030-01-31 06:00:00.123456 UTC)));
    }

    #[test]
    fn what_is_wrong_with_a_member_is_said_with_its_name() {
        const NUL: &str = "holds \\u0000, which neither PostgreSQL text nor a program argument can \
                           carry";
        const TIME: &str =
            "expected a time such as \"2030-01-31T08:00:00Z\" (RFC 3339) or null, found";
        for (line, field, message) in [
            (r#"{"key":1,"input":1}"#, KEY, "expected a string, found a number"),
            (r#"{"key":null,"input":1}"#, KEY, "expected a string, found null"),
            (r#"{"key":{},"input":1}"#, KEY, "expected a string, found an object"),
            (r#"{"input":1}"#, KEY, "missing"),
            (r#"{"key":"","input":1}"#, KEY, "is empty"),
            (r#"{"key":"a\u0001b","input":1}"#, KEY, "holds the control character U+0001"),
            (r#"{"key":"a\u0000","input":1}"#, KEY, NUL),
            (r#"{"key":"a","key":"a","input":1}"#, KEY, "given more than once"),
            (r#"{"key":"a"}"#, INPUT, "missing"),
            (r#"{"key":"a","input":["\u0000"]}"#, INPUT, NUL),
            (r#"{"key":"a","input":{"\u0000":1}}"#, INPUT, NUL),
            (
                r#"{"key":"a","input":"\\\uD800x"}"#,
                INPUT,
                "holds the lone surrogate \\ud800, which is no character",
            ),
            (
                r#"{"key":"a","input":"\udc00\ud800"}"#,
                INPUT,
                "holds the lone surrogate \\udc00, which is no character",
            ),
            (
                r#"{"key":"a","input":"\ud800\ud800\udc00"}"#,
                INPUT,
                "holds the lone surrogate \\ud800, which is no character",
            ),
            (
                r#"{"key":"a","input":1,"acceptance_criteria":"x"}"#,
                CRITERIA,
                "expected a list or null, found a string",
            ),
            (r#"{"key":"a","input":1,"acceptance_criteria":["\u0000"]}"#, CRITERIA, NUL),
            (
                r#"{"key":"a","input":1,"not_before":true}"#,
                NOT_BEFORE,
                &format!("{TIME} a boolean"),
            ),
            (
                r#"{"key":"a","input":1,"not_before":"tomorrow"}"#,
                NOT_BEFORE,
                &format!("{TIME} \"tomorrow\""),
            ),
            (
                r#"{"key":"a","input":1,"not_before":"9999-12-31T23:59:59-01:00"}"#,
                NOT_BEFORE,
                &format!("{TIME} \"9999-12-31T23:59:59-01:00\""),
            ),
        ] {
            assert_eq!(refused(line), [(Some(field), message.to_owned())], "{line}");
        }
    }

    #[test]
    fn escapes_that_only_look_like_nul_or_a_surrogate_are_accepted() {
        for input in [r#""\\u0000""#, r#""\\\\ud800""#, r#""\u00300000""#] {
            let line = format!(r#"{{"key":"k","input":{input}}}"#);
            assert_eq!(accepted(&line).input, input);
        }
    }

    #[test]
    fn all_that_is_wrong_with_a_line_is_said_at_once() {
        let line = r#"{"key":7,"inputs":1,"acceptance_criteria":3,"not_before":"x","x":1}"#;
        let fields: Vec<_> = refused(line).into_iter().map(|(field, _)| field).collect();
        assert_eq!(fields, [None, Some(INPUT), Some(KEY), Some(CRITERIA), Some(NOT_BEFORE)]);
    }

    #[test]
    fn what_is_no_object_is_refused() {
        for (line, message) in [
            ("[1]", "expected an object, found an array; each line is one item"),
            ("\"a\"", "expected an object, found a string; each line is one item"),
            ("[", "the JSON text is not complete; each line is one whole object"),
            (r#"{"key":"a","#, "the JSON text is not complete; each line is one whole object"),
            ("hello", "not JSON: expected value near byte 1"),
            (r#"{"key":"a","input":1},"#, "not JSON: trailing characters near byte 22"),
            (r#"{"key":"a","input":01}"#, "not JSON: invalid number near byte 21"),
            (
                "{\"key\":\"a\",\"input\":\"\u{1}\"}",
                "not JSON: control character (\\u0000-\\u001F) found while parsing a string near \
                 byte 20",
            ),
            (
                r#"{"key":"a","input":1,"pri\nority":1}"#,
                "unknown member \"pri\\nority\"; an item has key, input, acceptance_criteria and \
                 not_before",
            ),
        ] {
            assert_eq!(refused(line), [(None, message.to_owned())], "{line}");
        }
    }

    #[test]
    fn nesting_is_bounded_and_never_overflows_the_stack() {
        let nested = |depth: usize| {
            format!(r#"{{"key":"k","input":{}{}}}"#, "[".repeat(depth), "]".repeat(depth))
        };
        accepted(&nested(MAX_DEPTH));
        let too_deep = [(Some(INPUT), "is nested deeper than 100 levels".to_owned())];
        assert_eq!(refused(&nested(MAX_DEPTH + 1)), too_deep);
        assert_eq!(refused(&nested(500_000)), too_deep);
        assert_eq!(refused(&"[".repeat(1_000_000)).len(), 1);
        assert_eq!(refused(&r#"{"a":"#.repeat(300_000)).len(), 1);
        // Brackets in a text are text.
        accepted(&format!(r#"{{"key":"k","input":["{}"]}}"#, "[".repeat(1000)));
    }

    #[test]
    fn sizes_are_accepted_up_to_their_limits() {
        let limits = SubmitLimits { key_chars: 3, input_bytes: 5, ..SubmitLimits::default() };
        let faults = |line: &str| json(line, &limits).item().map(drop);
        let fault = |field, message| Err(vec![Fault::of(field, message)]);

        assert_eq!(faults(r#"{"key":"ééé","input":12345}"#), Ok(()));
        let long_key = fault(KEY, "has 4 characters; the limit is 3");
        assert_eq!(faults(r#"{"key":"éééé","input":12345}"#), long_key);
        let long_input = fault(INPUT, "has 6 bytes of JSON text; the limit is 5");
        assert_eq!(faults(r#"{"key":"ééé","input":123456}"#), long_input);
    }

    #[test]
    fn a_plain_line_is_key_and_input() {
        let item = plain(" say \"é\" ", &SubmitLimits::default()).item().unwrap();
        assert_eq!((&*item.key, &*item.input), (" say \"é\" ", r#"" say \"é\" ""#));
    }

    #[test]
    fn a_plain_line_that_is_no_key_is_refused() {
        let limits = SubmitLimits { key_chars: 3, ..SubmitLimits::default() };
        for (line, message) in [
            ("four", "the line is the item's key: it has 4 characters; the limit is 3"),
            ("a\0", "the line is the item's key: it holds the control character U+0000"),
        ] {
            let faults = plain(line, &limits).item().unwrap_err();
            assert_eq!(faults, [Fault::line(message)]);
        }
    }

    #[test]
    fn long_texts_are_cut_in_messages() {
        let line = format!(r#"{{"key":"k","input":1,"{}":1}}"#, "x".repeat(1000));
        let [(_, message)] = refused(&line).try_into().unwrap();
        assert!(message.len() < 200, "{message}");
    }
}
