//! What an item's data makes of a queue's request.

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use reqwest::Url;
use serde_json::Value;
use serde_json::value::RawValue;

use crate::execute::Job;

/// What stands for item data.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Slot {
    Input,
    /// One member of an input that is an object.
    Member(String),
    Key,
    Position,
    Attempt,
    Batch,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Part {
    Text(String),
    Slot(Slot),
}

/// A text with slots.
#[derive(Clone, Debug)]
pub(super) struct Template(Vec<Part>);

/// How data is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// As JSON, a text with its quotes.
    Json,
    /// A text as its characters, anything else as JSON.
    Text,
    /// The same, percent-encoded.
    Url,
}

/// Data that a request cannot be made of. No attempt would help.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Unfit {
    /// The template names a member of the input that is not there.
    #[error("the input has no member `{0}`")]
    NoMember(String),
    /// The input is not the JSON it should be.
    #[error("the input is not JSON: {0}")]
    NotJson(String),
    /// The data makes no URL.
    #[error("the input is not an http or https URL")]
    NotAUrl,
    /// A value would be no header.
    #[error("header {0}: the item's data cannot be in a header")]
    NotAHeader(String),
}

impl Template {
    /// Every other use of braces stays as it is.
    pub(super) fn parse(text: &str) -> Self {
        let (mut parts, mut plain, mut rest) = (Vec::new(), String::new(), text);
        while let Some(next) = rest.chars().next() {
            if let Some((slot, length)) = slot(rest) {
                if !plain.is_empty() {
                    parts.push(Part::Text(std::mem::take(&mut plain)));
                }
                parts.push(Part::Slot(slot));
                rest = &rest[length..];
            } else {
                plain.push(next);
                rest = &rest[next.len_utf8()..];
            }
        }
        if !plain.is_empty() {
            parts.push(Part::Text(plain));
        }
        Self(parts)
    }

    /// Whether the data is all of it.
    pub(super) fn is_data(&self) -> bool {
        matches!(self.0.as_slice(), [Part::Slot(_)])
    }

    pub(super) fn render(&self, job: &Job, form: Form) -> Result<String, Unfit> {
        let mut text = String::new();
        for part in &self.0 {
            match part {
                Part::Text(plain) => text.push_str(plain),
                Part::Slot(slot) => text.push_str(&written(&json_of(slot, job)?, form)?),
            }
        }
        Ok(text)
    }

    /// The URL: data within it stays one segment, or one value of the query.
    pub(super) fn url(&self, job: &Job) -> Result<Url, Unfit> {
        let form = if self.is_data() { Form::Text } else { Form::Url };
        let url = Url::parse(&self.render(job, form)?).map_err(|_| Unfit::NotAUrl)?;
        let fits = matches!(url.scheme(), "http" | "https")
            && url.has_host()
            && url.username().is_empty()
            && url.password().is_none();
        if fits { Ok(url) } else { Err(Unfit::NotAUrl) }
    }
}

fn slot(text: &str) -> Option<(Slot, usize)> {
    let end = text.strip_prefix('{')?.find('}')?;
    let name = &text[1..=end];
    let slot = match name {
        "input" => Slot::Input,
        "key" => Slot::Key,
        "position" => Slot::Position,
        "attempt" => Slot::Attempt,
        "batch" => Slot::Batch,
        name => {
            let member = name.strip_prefix("input.").filter(|member| !member.is_empty())?;
            Slot::Member(member.to_owned())
        }
    };
    Some((slot, end + 2))
}

fn json_of(slot: &Slot, job: &Job) -> Result<String, Unfit> {
    Ok(match slot {
        Slot::Input => job.input_json.clone(),
        Slot::Member(name) => member(&job.input_json, name)?,
        Slot::Key => Value::from(job.key.as_str()).to_string(),
        Slot::Position => job.item.position().to_string(),
        Slot::Attempt => job.attempt.to_string(),
        Slot::Batch => Value::from(job.item.batch().to_string()).to_string(),
    })
}

/// The member as it was submitted, digit for digit.
fn member(input: &str, name: &str) -> Result<String, Unfit> {
    let members: std::collections::HashMap<String, Box<RawValue>> =
        serde_json::from_str(input).map_err(|_| Unfit::NoMember(name.to_owned()))?;
    let found = members.get(name).ok_or_else(|| Unfit::NoMember(name.to_owned()))?;
    Ok(found.get().to_owned())
}

fn written(json: &str, form: Form) -> Result<String, Unfit> {
    if form == Form::Json {
        return Ok(json.to_owned());
    }
    let text = if json.trim_start().starts_with('"') {
        serde_json::from_str(json).map_err(|error| Unfit::NotJson(error.to_string()))?
    } else {
        json.to_owned()
    };
    match form {
        // A segment of dots walks up the path, encoded or not.
        Form::Url if !text.is_empty() && text.bytes().all(|b| b == b'.') => Err(Unfit::NotAUrl),
        Form::Url => Ok(encoded(&text)),
        Form::Json | Form::Text => Ok(text),
    }
}

/// Encoded, but for what no URL gives a meaning.
fn encoded(text: &str) -> String {
    const ENCODED: &AsciiSet =
        &NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'~').remove(b'.');
    utf8_percent_encode(text, ENCODED).to_string()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::tests::job;
    use super::*;

    fn rendered(template: &str, input: &str, form: Form) -> Result<String, Unfit> {
        Template::parse(template).render(&job(input), form)
    }

    fn url(template: &str, input: &str) -> Result<String, Unfit> {
        Template::parse(template).url(&job(input)).map(String::from)
    }

    #[test]
    fn a_body_of_json_takes_data_as_json_digit_for_digit() {
        let body = r#"{"n": {input.n}, "text": {input.text}, "id": {key}, "at": [{position}]}"#;
        let input = r#"{"n": 1.50, "text": "a\n\"b"}"#;
        assert_eq!(
            rendered(body, input, Form::Json).unwrap(),
            r#"{"n": 1.50, "text": "a\n\"b", "id": "the key", "at": [7]}"#
        );
        assert_eq!(rendered("{input}", r#" {"a":1} "#, Form::Json).unwrap(), r#" {"a":1} "#);
    }

    #[test]
    fn a_body_of_text_takes_texts_as_their_characters() {
        assert_eq!(rendered("<{input}>", r#""a\nb""#, Form::Text).unwrap(), "<a\nb>");
        assert_eq!(rendered("{input.n}", r#"{"n":[1]}"#, Form::Text).unwrap(), "[1]");
    }

    #[test]
    fn data_in_a_url_stays_where_it_is() {
        let template = "https://h/items/{input}/x?k={key}";
        let of = |input: &str| url(template, &Value::from(input).to_string());
        assert_eq!(of("a/b?c#d").unwrap(), "https://h/items/a%2Fb%3Fc%23d/x?k=the%20key");
        assert_eq!(of("ü v1.2").unwrap(), "https://h/items/%C3%BC%20v1.2/x?k=the%20key");
        for dots in [".", ".."] {
            assert_eq!(of(dots), Err(Unfit::NotAUrl), "{dots}");
        }
    }

    #[test]
    fn a_url_that_is_data_must_be_one_and_carries_no_password() {
        let of = |input: &str| url("{input.url}", &serde_json::json!({ "url": input }).to_string());
        assert_eq!(of("http://h/a?b#c").unwrap(), "http://h/a?b#c");
        for bad in ["", "h", "file:///etc/passwd", "http://u:p@h/", "http://u@h/", "gopher://h"] {
            assert_eq!(of(bad), Err(Unfit::NotAUrl), "{bad}");
        }
        assert_eq!(url("{input.url}", "1"), Err(Unfit::NoMember("url".into())));
        assert_eq!(url("{input.url}", "{}"), Err(Unfit::NoMember("url".into())));
    }

    #[test]
    fn other_braces_stay_and_data_is_never_expanded_again() {
        for text in ["{", "{}", "{inputs}", "{input.}", "{\"a\": 1}", "}{"] {
            assert_eq!(rendered(text, "0", Form::Text).unwrap(), text);
        }
        assert_eq!(rendered("{input}{attempt}", r#""{key}""#, Form::Text).unwrap(), "{key}2");
    }

    proptest! {
        #[test]
        fn no_data_changes_the_host_or_adds_to_the_path(input in ".{0,40}") {
            let input = Value::from(input).to_string();
            if let Ok(url) = Template::parse("https://host/a/{input}/z?q={input}").url(&job(&input)) {
                prop_assert_eq!(url.host_str(), Some("host"));
                let segments: Vec<&str> = url.path_segments().unwrap().collect();
                prop_assert_eq!((segments.len(), segments[0], segments[2]), (3, "a", "z"));
                prop_assert_eq!(url.query_pairs().count(), 1);
                prop_assert!(url.fragment().is_none());
            }
        }
    }
}
