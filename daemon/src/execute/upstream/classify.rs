//! What an answer means for its item: the table of classes, by status and structured code.

use std::time::Duration;

use regex::Regex;
use reqwest::StatusCode;
use reqwest::header::HeaderMap;
use serde_json::Value;
use time::OffsetDateTime;

use super::retry_after::retry_after;
use crate::model::StopReason;

/// What an answer means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::execute) enum Class {
    /// It did what it should.
    Done,
    /// No further attempt would help.
    Permanent(StopReason),
    /// Another attempt may succeed, and this one counts.
    Transient,
    /// Too many requests: everybody waits, and the attempt does not count.
    Throttled(Option<Duration>),
    /// The credentials or the account are refused: nobody goes on with them, and the attempt does
    /// not count.
    Paused,
    /// The upstream does not have the model, at least now.
    ModelMissing,
}

/// An error as an answer's body tells it.
#[derive(Debug, Default)]
pub(in crate::execute) struct ErrorBody {
    codes: Vec<String>,
    message: String,
}

/// Patterns that an operator gave for messages of one upstream.
#[derive(Debug, Default)]
pub(in crate::execute) struct Patterns {
    pub(super) context_overflow: Vec<Regex>,
    pub(super) too_large: Vec<Regex>,
}

const CONTEXT_OVERFLOW: [&str; 4] = [
    "context_length_exceeded",
    "context_window_exceeded",
    "exceed_context_size_error",
    "string_above_max_length",
];
const TOO_LARGE: [&str; 2] = ["request_too_large", "request_too_large_for_limit"];
const NO_FUNDS: [&str; 6] = [
    "insufficient_quota",
    "billing_hard_limit_reached",
    "billing_not_active",
    "billing_error",
    "account_deactivated",
    "access_terminated",
];
const NO_MODEL: [&str; 2] = ["model_not_found", "model_not_available"];

impl ErrorBody {
    /// The `error` member of a JSON body, or the body itself where it has the members of one.
    pub(in crate::execute) fn of(body: Option<&Value>) -> Self {
        let Some(body) = body else { return Self::default() };
        let error = body.get("error").filter(|error| !error.is_null()).unwrap_or(body);
        if let Some(text) = error.as_str() {
            return Self { codes: vec![text.to_owned()], message: text.to_owned() };
        }
        let text = |name: &str| error.get(name).and_then(Value::as_str).map(str::to_owned);
        Self {
            codes: ["code", "type"].iter().filter_map(|name| text(name)).collect(),
            message: text("message").unwrap_or_default(),
        }
    }

    fn is_one_of(&self, codes: &[&str]) -> bool {
        self.codes.iter().any(|code| codes.contains(&code.as_str()))
    }

    fn fits(&self, patterns: &[Regex]) -> bool {
        patterns.iter().any(|pattern| pattern.is_match(&self.message))
    }
}

/// What an answer means. `body` is its JSON, where it is JSON.
pub(in crate::execute) fn classify(
    status: StatusCode,
    headers: &HeaderMap,
    body: Option<&Value>,
    patterns: &Patterns,
    now: OffsetDateTime,
) -> Class {
    if status.is_success() {
        return Class::Done;
    }
    let class = by_status(status, headers, &ErrorBody::of(body), patterns, now);
    let told = headers.get("x-should-retry").map(|told| told.as_bytes().to_ascii_lowercase());
    match (class, told.as_deref()) {
        // What is wrong with the upstream or our credentials is no matter of this request.
        (Class::Paused | Class::ModelMissing | Class::Done, _) => class,
        (Class::Permanent(_), Some(b"true")) => Class::Transient,
        (Class::Transient | Class::Throttled(_), Some(b"false")) => {
            Class::Permanent(StopReason::Rejected)
        }
        (class, _) => class,
    }
}

fn by_status(
    status: StatusCode,
    headers: &HeaderMap,
    error: &ErrorBody,
    patterns: &Patterns,
    now: OffsetDateTime,
) -> Class {
    let asked = retry_after(headers, now);
    // A proxy may dress a refusal as an error of the server: the code decides before the status.
    if error.is_one_of(&CONTEXT_OVERFLOW) || error.fits(&patterns.context_overflow) {
        return Class::Permanent(StopReason::ContextOverflow);
    }
    match status.as_u16() {
        413 | 429 if error.is_one_of(&TOO_LARGE) || error.fits(&patterns.too_large) => {
            Class::Permanent(StopReason::TooLargeForLimit)
        }
        401..=403 => Class::Paused,
        429 if error.is_one_of(&NO_FUNDS) => Class::Paused,
        404 if error.is_one_of(&NO_MODEL) => Class::ModelMissing,
        429 | 529 => Class::Throttled(asked),
        503 if asked.is_some() => Class::Throttled(asked),
        408 | 409 | 425 | 500.. => Class::Transient,
        _ => Class::Permanent(StopReason::Rejected),
    }
}

#[cfg(test)]
mod tests {
    use reqwest::header::{HeaderName, HeaderValue};
    use serde_json::json;

    use super::*;

    fn class_of(status: u16, headers: &[(&str, &str)], body: &Value) -> Class {
        let headers = headers.iter().map(|(name, value)| {
            let name: HeaderName = name.parse().unwrap();
            (name, HeaderValue::from_str(value).unwrap())
        });
        let patterns = Patterns {
            context_overflow: vec![Regex::new("prompt is too long").unwrap()],
            too_large: vec![Regex::new("^Request too large for").unwrap()],
        };
        let status = StatusCode::from_u16(status).unwrap();
        let now = OffsetDateTime::UNIX_EPOCH;
        classify(status, &headers.collect(), Some(body), &patterns, now)
    }

    fn code(code: &str) -> Value {
        json!({"error": {"code": code, "message": "…"}})
    }

    #[test]
    fn every_row_of_the_table() {
        let none = json!({});
        for (status, class) in [
            (200, Class::Done),
            (204, Class::Done),
            (304, Class::Permanent(StopReason::Rejected)),
            (400, Class::Permanent(StopReason::Rejected)),
            (401, Class::Paused),
            (402, Class::Paused),
            (403, Class::Paused),
            (404, Class::Permanent(StopReason::Rejected)),
            (405, Class::Permanent(StopReason::Rejected)),
            (408, Class::Transient),
            (409, Class::Transient),
            (410, Class::Permanent(StopReason::Rejected)),
            (413, Class::Permanent(StopReason::Rejected)),
            (415, Class::Permanent(StopReason::Rejected)),
            (422, Class::Permanent(StopReason::Rejected)),
            (425, Class::Transient),
            (429, Class::Throttled(None)),
            (500, Class::Transient),
            (502, Class::Transient),
            (503, Class::Transient),
            (504, Class::Transient),
            (520, Class::Transient),
            (524, Class::Transient),
            (529, Class::Throttled(None)),
        ] {
            assert_eq!(class_of(status, &[], &none), class, "{status}");
        }
        let waits = [("retry-after", "2")];
        let wait = Some(Duration::from_secs(2));
        assert_eq!(class_of(503, &waits, &none), Class::Throttled(wait));
        assert_eq!(class_of(429, &waits, &none), Class::Throttled(wait));
        assert_eq!(class_of(500, &waits, &none), Class::Transient);
    }

    #[test]
    fn codes_decide_before_the_status() {
        for overflow in CONTEXT_OVERFLOW {
            for status in [400, 413, 500, 502] {
                let class = class_of(status, &[], &code(overflow));
                assert_eq!(
                    class,
                    Class::Permanent(StopReason::ContextOverflow),
                    "{status} {overflow}"
                );
            }
        }
        assert_eq!(class_of(429, &[], &code("insufficient_quota")), Class::Paused);
        let by_type = json!({"error": {"type": "insufficient_quota"}});
        assert_eq!(class_of(429, &[], &by_type), Class::Paused);
        let too_large = Class::Permanent(StopReason::TooLargeForLimit);
        assert_eq!(class_of(429, &[], &code("request_too_large")), too_large);
        assert_eq!(class_of(404, &[], &code("model_not_found")), Class::ModelMissing);
        assert_eq!(class_of(404, &[], &json!({"code": "model_not_found"})), Class::ModelMissing);
        assert_eq!(class_of(404, &[], &json!({"error": "model_not_found"})), Class::ModelMissing);
    }

    #[test]
    fn messages_count_only_where_an_operator_gave_a_pattern() {
        let message = |text: &str| json!({"error": {"message": text, "code": "other"}});
        let overflow = class_of(500, &[], &message("your prompt is too long"));
        assert_eq!(overflow, Class::Permanent(StopReason::ContextOverflow));
        let too_large = class_of(429, &[], &message("Request too large for m: 9 of 5"));
        assert_eq!(too_large, Class::Permanent(StopReason::TooLargeForLimit));
        for text in ["429 context_length_exceeded", "insufficient_quota", "model_not_found"] {
            assert_eq!(class_of(500, &[], &message(text)), Class::Transient, "{text}");
        }
    }

    #[test]
    fn the_upstream_may_say_whether_to_try_again() {
        let none = json!({});
        let told = |status, told| class_of(status, &[("x-should-retry", told)], &none);
        assert_eq!(told(400, "true"), Class::Transient);
        assert_eq!(told(500, "false"), Class::Permanent(StopReason::Rejected));
        assert_eq!(told(429, "False"), Class::Permanent(StopReason::Rejected));
        assert_eq!(told(500, "true"), Class::Transient);
        assert_eq!(told(500, "perhaps"), Class::Transient);
        assert_eq!(told(401, "false"), Class::Paused);
        assert_eq!(told(200, "true"), Class::Done);
    }
}
