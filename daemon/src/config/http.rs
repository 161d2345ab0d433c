//! Settings of the `http` executor.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::reference::{SecretRef, header_problems};
use super::sections::Limits;
use super::units;

/// Settings of the `http` executor. Units, ranges and defaults: `config/default.toml`. Secrets are
/// references.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HttpSpec {
    /// Where requests go; placeholders are item data.
    pub url: String,
    /// GET, HEAD, POST, PUT, PATCH or DELETE. Default POST.
    pub method: String,
    /// Headers with their values, in which placeholders are item data. Default none.
    pub headers: BTreeMap<String, String>,
    /// Headers whose values are secrets. Default none.
    pub secret_headers: BTreeMap<String, SecretRef>,
    /// Secret sent as `Authorization: Bearer …`. Default none.
    pub api_key: SecretRef,
    /// The request's body, in which placeholders are item data. Default `{input}`; never sent with
    /// GET and HEAD.
    pub body: String,
    /// The body's content type. Placeholders in a body of JSON are JSON, else text. Default
    /// `application/json`.
    pub content_type: String,
    /// What a successful answer has to be. Default anything.
    #[serde(deserialize_with = "units::word")]
    pub expect: Expect,
    /// Which redirects are followed. Default none.
    #[serde(deserialize_with = "units::word")]
    pub redirects: Redirects,
    /// Name of the `[upstreams.NAME]` with its limits; empty means the URL's origin, without limits.
    pub upstream: String,
    /// Model, where the upstream has limits for each. Default none.
    pub model: String,
    /// How long an item may wait for its turn under the limits. 0 to 30 d, default 10 min.
    #[serde(with = "units::duration")]
    pub max_wait: Duration,
    /// Bound of a connection, with name resolution and TLS. 10 ms to 10 min, default 5 s.
    #[serde(with = "units::duration")]
    pub connect_timeout: Duration,
    /// Bound of the wait for the answer's headers. 10 ms to 24 h, default 5 min.
    #[serde(with = "units::duration")]
    pub header_timeout: Duration,
    /// Bound of a gap within the answer. 10 ms to 24 h, default 1 min.
    #[serde(with = "units::duration")]
    pub idle_timeout: Duration,
    /// Bound of one execution, without the wait for its turn. 10 ms to 30 d, default 10 min.
    #[serde(with = "units::duration")]
    pub timeout: Duration,
    /// Bytes of an answer after decompression; a longer one fails its item. 1 KiB to 1 GiB, default
    /// 16 MiB.
    #[serde(with = "units::size")]
    pub response_bytes: usize,
    /// Items of one batch executing at once; none means unlimited. Up to 1,000,000, default none.
    #[serde(with = "units::unlimited")]
    pub max_running: Option<NonZeroU32>,
    /// Bytes of a stored result. 1 KiB to `limits.result_bytes`; in the configuration 0, the
    /// default, stands for that limit.
    #[serde(with = "units::size")]
    pub result_bytes: usize,
}

macro_rules! words {
    ($(#[$meta:meta])* $name:ident { $($(#[$doc:meta])* $variant:ident = $word:literal),* $(,)? }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
        pub enum $name {
            $($(#[$doc])* #[serde(rename = $word)] $variant),*
        }

        impl FromStr for $name {
            type Err = String;

            fn from_str(text: &str) -> Result<Self, String> {
                match text {
                    $($word => Ok(Self::$variant),)*
                    _ => Err(format!("{text:?} is not one of {}", [$($word),*].join(", "))),
                }
            }
        }
    };
}

words! {
    /// What a successful answer has to be.
    Expect {
        /// Anything.
        Any = "any",
        /// JSON; anything else is tried once more, then fails.
        Json = "json",
    }
}

words! {
    /// Which redirects are followed, at most five of them.
    Redirects {
        /// None: one fails its item.
        None = "none",
        /// Those to the same scheme, host and port.
        SameOrigin = "same_origin",
        /// All whose target is allowed; secrets and the headers of the item stay with the origin.
        Any = "any",
    }
}

const METHODS: [&str; 6] = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"];

impl HttpSpec {
    /// Requests to `url` with every other setting at its default.
    #[must_use]
    pub fn new(url: impl Into<String>, limits: &Limits) -> Self {
        Self { url: url.into(), result_bytes: limits.result_bytes, ..Self::defaults() }
    }

    /// What a queue is where its configuration says nothing.
    pub(super) fn defaults() -> Self {
        Self {
            url: String::new(),
            method: "POST".to_owned(),
            headers: BTreeMap::new(),
            secret_headers: BTreeMap::new(),
            api_key: SecretRef::default(),
            body: "{input}".to_owned(),
            content_type: "application/json".to_owned(),
            expect: Expect::Any,
            redirects: Redirects::None,
            upstream: String::new(),
            model: String::new(),
            max_wait: Duration::from_mins(10),
            connect_timeout: Duration::from_secs(5),
            header_timeout: Duration::from_mins(5),
            idle_timeout: Duration::from_mins(1),
            timeout: Duration::from_mins(10),
            response_bytes: 16 << 20,
            max_running: None,
            result_bytes: 0,
        }
    }

    /// Everything wrong with these settings, each with its key below the queue's.
    pub(super) fn problems(&self, limits: &Limits) -> Vec<(&'static str, String)> {
        let mut found = Vec::new();
        let mut wrong = |key, what: String| found.push((key, what));
        let has_secrets = !self.api_key.is_none() || !self.secret_headers.is_empty();
        if let Err(what) = check_url(&self.url, has_secrets) {
            wrong("url", what);
        }
        if !METHODS.contains(&self.method.as_str()) {
            wrong("method", format!("must be one of {}", METHODS.join(", ")));
        }
        header_problems(&self.headers, &self.secret_headers, &self.api_key, &mut wrong);
        if self.content_type.is_empty() || self.content_type.contains(['\r', '\n', '\0']) {
            wrong("content_type", "must be a content type such as application/json".into());
        }
        common_problems(&Common::from(self), limits, &mut wrong);
        found
    }
}

/// What both kinds of queues with an upstream have.
pub(super) struct Common {
    pub(super) max_wait: Duration,
    pub(super) connect_timeout: Duration,
    pub(super) header_timeout: Duration,
    pub(super) idle_timeout: Duration,
    pub(super) timeout: Duration,
    pub(super) response_bytes: usize,
    pub(super) max_running: Option<NonZeroU32>,
    pub(super) result_bytes: usize,
}

impl From<&HttpSpec> for Common {
    fn from(spec: &HttpSpec) -> Self {
        Self {
            max_wait: spec.max_wait,
            connect_timeout: spec.connect_timeout,
            header_timeout: spec.header_timeout,
            idle_timeout: spec.idle_timeout,
            timeout: spec.timeout,
            response_bytes: spec.response_bytes,
            max_running: spec.max_running,
            result_bytes: spec.result_bytes,
        }
    }
}

pub(super) fn common_problems(
    common: &Common,
    limits: &Limits,
    wrong: &mut impl FnMut(&'static str, String),
) {
    let (short, day) = (Duration::from_millis(10), Duration::from_hours(24));
    let times = [
        ("max_wait", common.max_wait, Duration::ZERO..=30 * day, "0s to 30d"),
        ("connect_timeout", common.connect_timeout, short..=Duration::from_mins(10), "10ms to 10m"),
        ("header_timeout", common.header_timeout, short..=day, "10ms to 24h"),
        ("idle_timeout", common.idle_timeout, short..=day, "10ms to 24h"),
        ("timeout", common.timeout, short..=30 * day, "10ms to 30d"),
    ];
    for (key, time, range, shown) in times {
        if !range.contains(&time) {
            wrong(key, format!("must be {shown}"));
        }
    }
    if !(1 << 10..=1 << 30).contains(&common.response_bytes) {
        wrong("response_bytes", "must be 1KiB to 1GiB".into());
    }
    if common.max_running.is_some_and(|cap| cap.get() > 1_000_000) {
        wrong("max_running", "must be 0 to 1000000".into());
    }
    if common.result_bytes < 1024 || common.result_bytes > limits.result_bytes {
        let most = units::size::show(limits.result_bytes);
        wrong("result_bytes", format!("must be 1KiB to limits.result_bytes, {most}"));
    }
}

/// Submitters choose the data of an item, never where a secret goes: the host is the operator's,
/// unless the whole URL is the item's and no secret is sent.
pub(super) fn check_url(url: &str, has_secrets: bool) -> Result<(), String> {
    if is_placeholder(url) {
        return if has_secrets {
            Err("must not be made of item data where secrets are sent".into())
        } else {
            Ok(())
        };
    }
    let rest = url
        .strip_prefix("https://")
        .or_else(|| url.strip_prefix("http://"))
        .ok_or("must begin with http:// or https://, or be {input} or {input.NAME}")?;
    let host = rest.split(['/', '?', '#']).next().unwrap_or_default();
    if host.is_empty() || host.contains(['{', '}']) {
        return Err("must name a host, without placeholders".into());
    }
    if host.contains('@') {
        return Err("must not hold a user or password: use `api_key` or `secret_headers`".into());
    }
    url::Url::parse(url).map(drop).map_err(|error| format!("is not a URL: {error}"))
}

/// `{input}` or `{input.NAME}`, and nothing else.
fn is_placeholder(text: &str) -> bool {
    text == "{input}"
        || text
            .strip_prefix("{input.")
            .and_then(|rest| rest.strip_suffix('}'))
            .is_some_and(|name| !name.is_empty() && !name.contains(['{', '}']))
}
