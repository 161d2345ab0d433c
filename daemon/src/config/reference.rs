//! Secrets by reference: configuration, batches and logs hold where a secret is, never itself.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};

/// Where a secret is: in a variable of the worker's environment, or in a file that it can read.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SecretRef {
    /// Name of the variable; empty where it is in a file.
    pub env: String,
    /// Absolute path of the file, of which white space at the end is left out; read at every use, so
    /// that a new secret needs no restart. Empty where it is in a variable.
    pub file: String,
}

impl SecretRef {
    /// Whether it names nothing.
    #[must_use]
    pub const fn is_none(&self) -> bool {
        self.env.is_empty() && self.file.is_empty()
    }

    /// What is wrong with it, where it has to name one place.
    pub(super) fn problem(&self) -> Option<&'static str> {
        match (self.env.as_str(), self.file.as_str()) {
            ("", "") => Some("must name a variable, { env = \"NAME\" }, or { file = \"/PATH\" }"),
            (env, "") if env.contains(['=', '\0']) => Some("is not a variable's name"),
            ("", file) if !Path::new(file).is_absolute() => Some("must be an absolute path"),
            (_, "") | ("", _) => None,
            (_, _) => Some("must be either `env` or `file`"),
        }
    }
}

/// What is wrong with the headers of a queue; names are compared without case.
pub(super) fn header_problems(
    headers: &BTreeMap<String, String>,
    secrets: &BTreeMap<String, SecretRef>,
    api_key: &SecretRef,
    mut wrong: impl FnMut(&'static str, String),
) {
    const OURS: [&str; 11] = [
        "connection",
        "content-length",
        "content-type",
        "expect",
        "host",
        "idempotency-key",
        "te",
        "traceparent",
        "trailer",
        "transfer-encoding",
        "upgrade",
    ];
    let mut seen: Vec<String> = Vec::new();
    if !api_key.is_none() {
        seen.push("authorization".to_owned());
        if let Some(what) = api_key.problem() {
            wrong("api_key", what.to_owned());
        }
    }
    let names = headers.keys().map(|name| ("headers", name));
    for (key, name) in names.chain(secrets.keys().map(|name| ("secret_headers", name))) {
        let lower = name.to_ascii_lowercase();
        let token = |b: u8| b.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&b);
        if name.is_empty() || !name.bytes().all(token) {
            wrong(key, format!("{name:?} is not a header's name"));
        } else if OURS.contains(&lower.as_str()) || lower.starts_with("holdfast-") {
            wrong(key, format!("{name}: this header is the worker's own"));
        } else if seen.contains(&lower) {
            wrong(key, format!("{name}: this header is given twice"));
        }
        seen.push(lower);
    }
    if let Some((name, _)) = headers.iter().find(|(_, value)| value.contains(['\r', '\n', '\0'])) {
        wrong("headers", format!("{name}: a value must be one line"));
    }
    for (name, secret) in secrets {
        if let Some(what) = secret.problem() {
            wrong("secret_headers", format!("{name}: {what}"));
        }
    }
}
