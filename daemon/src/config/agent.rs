//! Settings of the `agent` executor.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::http::{Common, check_url, common_problems};
use super::queue::check_variable;
use super::reference::{SecretRef, header_problems};
use super::sections::Limits;
use super::units;

/// Settings of the `agent` executor. Units, ranges and defaults: `config/default.toml`. Secrets are
/// references. Prints without the values of `env`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AgentSpec {
    /// The server, up to and without `/chat/completions`.
    pub base_url: String,
    /// The model asked for.
    pub model: String,
    /// Secret sent as `Authorization: Bearer …`. Default none.
    pub api_key: SecretRef,
    /// Further headers. Default none.
    pub headers: BTreeMap<String, String>,
    /// Headers whose values are secrets. Default none.
    pub secret_headers: BTreeMap<String, SecretRef>,
    /// Members added to every request, as the server takes them. Default none.
    pub parameters: serde_json::Map<String, serde_json::Value>,
    /// The operator's own text after ours in the system message; the same for every item.
    pub instructions: String,
    /// What the model may do: `shell`, `read_file`, `write_file`. Default all three.
    pub tools: Vec<String>,
    /// Variables set for shell commands. Default none.
    pub env: BTreeMap<String, String>,
    /// Variables handed on to shell commands from the worker's environment. Default `PATH`, `HOME`,
    /// `LANG`, `LC_ALL`, `TZ`.
    pub env_pass: Vec<String>,
    /// Calls of the model in one execution. 1 to 1,000, default 30.
    pub max_turns: u32,
    /// Time of one execution, without waits for the upstream's turn. 1 s to 30 d, default 30 min.
    #[serde(with = "units::duration")]
    pub max_time: Duration,
    /// Tokens in and out, as the upstream counts them, over all turns. Default 400,000.
    pub max_tokens: u64,
    /// Tokens that the model can read at once; 0 means unknown. Default 0.
    pub context_window: u64,
    /// Time of one shell command. 100 ms to 24 h, default 2 min.
    #[serde(with = "units::duration")]
    pub tool_timeout: Duration,
    /// Bytes captured of one command's output. 1 KiB to 64 MiB, default 1 MiB.
    #[serde(with = "units::size")]
    pub tool_output: usize,
    /// Calls in a row that cannot be understood before it ends. 1 to 100, default 5.
    pub max_invalid_calls: u32,
    /// How often the same call may come in a row before it ends. 2 to 100, default 4.
    pub max_repeats: u32,
    /// Bytes of all files in the workspace. 1 MiB to 1 TiB, default 256 MiB.
    #[serde(with = "units::size")]
    pub workspace_bytes: usize,
    /// Files in the workspace. 1 to 10,000,000, default 20,000.
    pub workspace_files: u32,
    /// Bytes of the stored transcript of one execution. 1 KiB to 64 MiB, default 1 MiB.
    #[serde(with = "units::size")]
    pub transcript_bytes: usize,
    /// Tries of one call that the upstream did not answer well. 1 to 20, default 4.
    pub call_tries: u32,
    /// Stop reasons after which the item is tried again. Default none.
    pub retry_on: Vec<String>,
    /// Name of the `[upstreams.NAME]` with its limits; empty means the URL's origin, without limits.
    pub upstream: String,
    /// As in [`HttpSpec`](super::HttpSpec).
    #[serde(with = "units::duration")]
    pub max_wait: Duration,
    /// As in [`HttpSpec`](super::HttpSpec).
    #[serde(with = "units::duration")]
    pub connect_timeout: Duration,
    /// As in [`HttpSpec`](super::HttpSpec). Default 10 min.
    #[serde(with = "units::duration")]
    pub header_timeout: Duration,
    /// As in [`HttpSpec`](super::HttpSpec).
    #[serde(with = "units::duration")]
    pub idle_timeout: Duration,
    /// Bound of one execution, waits included. 10 ms to 30 d, default 1 h.
    #[serde(with = "units::duration")]
    pub timeout: Duration,
    /// As in [`HttpSpec`](super::HttpSpec).
    #[serde(with = "units::size")]
    pub response_bytes: usize,
    /// Items of one batch executing at once; none means unlimited. Up to 1,000,000, default none.
    #[serde(with = "units::unlimited")]
    pub max_running: Option<NonZeroU32>,
    /// Bytes of a stored report. 1 KiB to `limits.result_bytes`; in the configuration 0, the
    /// default, stands for that limit.
    #[serde(with = "units::size")]
    pub result_bytes: usize,
}

/// The tools there are.
pub(super) const TOOLS: [&str; 3] = ["shell", "read_file", "write_file"];

/// Stop reasons that name a budget or what a model did, after which a queue may ask for another
/// attempt.
pub(super) const RETRY_REASONS: [&str; 11] = [
    "content_filter",
    "context_overflow",
    "deadline",
    "empty_response",
    "invalid_tool_calls",
    "max_time",
    "max_tokens",
    "max_turns",
    "output_limit",
    "repeated_call",
    "workspace_quota",
];

impl AgentSpec {
    /// An agent on `model` at `base_url` with every other setting at its default.
    #[must_use]
    pub fn new(base_url: impl Into<String>, model: impl Into<String>, limits: &Limits) -> Self {
        Self {
            base_url: base_url.into(),
            model: model.into(),
            result_bytes: limits.result_bytes,
            ..Self::defaults()
        }
    }

    /// What a queue is where its configuration says nothing.
    pub(super) fn defaults() -> Self {
        let env_pass = ["PATH", "HOME", "LANG", "LC_ALL", "TZ"];
        Self {
            base_url: String::new(),
            model: String::new(),
            api_key: SecretRef::default(),
            headers: BTreeMap::new(),
            secret_headers: BTreeMap::new(),
            parameters: serde_json::Map::new(),
            instructions: String::new(),
            tools: TOOLS.map(str::to_owned).to_vec(),
            env: BTreeMap::new(),
            env_pass: env_pass.map(str::to_owned).to_vec(),
            max_turns: 30,
            max_time: Duration::from_mins(30),
            max_tokens: 400_000,
            context_window: 0,
            tool_timeout: Duration::from_mins(2),
            tool_output: 1 << 20,
            max_invalid_calls: 5,
            max_repeats: 4,
            workspace_bytes: 256 << 20,
            workspace_files: 20_000,
            transcript_bytes: 1 << 20,
            call_tries: 4,
            retry_on: Vec::new(),
            upstream: String::new(),
            max_wait: Duration::from_mins(10),
            connect_timeout: Duration::from_secs(5),
            header_timeout: Duration::from_mins(10),
            idle_timeout: Duration::from_mins(1),
            timeout: Duration::from_hours(1),
            response_bytes: 16 << 20,
            max_running: None,
            result_bytes: 0,
        }
    }

    /// Everything wrong with these settings, each with its key below the queue's.
    pub(super) fn problems(&self, limits: &Limits) -> Vec<(&'static str, String)> {
        let mut found = Vec::new();
        let mut wrong = |key, what: String| found.push((key, what));
        if let Err(what) = check_url(&self.base_url, true) {
            wrong("base_url", what);
        }
        if self.base_url.contains(['{', '}', '?', '#']) {
            wrong("base_url", "must be a plain URL without placeholders and query".into());
        }
        if self.model.is_empty() {
            wrong("model", "must name a model".into());
        }
        header_problems(&self.headers, &self.secret_headers, &self.api_key, &mut wrong);
        for ours in ["messages", "model", "stream", "tool_choice", "tools"] {
            if self.parameters.contains_key(ours) {
                wrong("parameters", format!("`{ours}` is the executor's own"));
            }
        }
        listed("tools", &self.tools, &TOOLS, &mut wrong);
        listed("retry_on", &self.retry_on, &RETRY_REASONS, &mut wrong);
        self.variable_problems(&mut wrong);
        self.budget_problems(&mut wrong);
        common_problems(&Common::from(self), limits, &mut wrong);
        found
    }

    /// Secrets stay out of the environment of what a model runs.
    fn variable_problems(&self, wrong: &mut impl FnMut(&'static str, String)) {
        let secrets = self.secret_headers.values().chain([&self.api_key]);
        let secrets: Vec<&str> = secrets.map(|secret| secret.env.as_str()).collect();
        for (key, names) in [
            ("env", self.env.keys().collect::<Vec<_>>()),
            ("env_pass", self.env_pass.iter().collect()),
        ] {
            for name in names {
                if let Err(what) = check_variable(name) {
                    wrong(key, what);
                } else if secrets.contains(&name.as_str()) {
                    wrong(key, format!("{name}: a secret must not reach the model's commands"));
                }
            }
        }
        if self.env.values().any(|value| value.contains('\0')) {
            wrong("env", "a value holds a NUL character".into());
        }
    }

    fn budget_problems(&self, wrong: &mut impl FnMut(&'static str, String)) {
        for (key, number, most) in [
            ("max_turns", self.max_turns, 1_000),
            ("max_invalid_calls", self.max_invalid_calls, 100),
            ("workspace_files", self.workspace_files, 10_000_000),
            ("call_tries", self.call_tries, 20),
        ] {
            if !(1..=most).contains(&number) {
                wrong(key, format!("must be 1 to {most}"));
            }
        }
        if !(2..=100).contains(&self.max_repeats) {
            wrong("max_repeats", "must be 2 to 100".into());
        }
        if self.max_tokens == 0 {
            wrong("max_tokens", "must be at least 1".into());
        }
        let day = Duration::from_hours(24);
        if !(Duration::from_secs(1)..=30 * day).contains(&self.max_time) {
            wrong("max_time", "must be 1s to 30d".into());
        }
        if !(Duration::from_millis(100)..=day).contains(&self.tool_timeout) {
            wrong("tool_timeout", "must be 100ms to 24h".into());
        }
        for (key, bytes, range, shown) in [
            ("tool_output", self.tool_output, 1 << 10..=64 << 20, "1KiB to 64MiB"),
            ("transcript_bytes", self.transcript_bytes, 1 << 10..=64 << 20, "1KiB to 64MiB"),
            ("workspace_bytes", self.workspace_bytes, 1 << 20..=1 << 40, "1MiB to 1024GiB"),
        ] {
            if !range.contains(&bytes) {
                wrong(key, format!("must be {shown}"));
            }
        }
    }
}

impl From<&AgentSpec> for Common {
    fn from(spec: &AgentSpec) -> Self {
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

fn listed(
    key: &'static str,
    found: &[String],
    known: &[&str],
    wrong: &mut impl FnMut(&'static str, String),
) {
    if let Some(word) = found.iter().find(|word| !known.contains(&word.as_str())) {
        wrong(key, format!("{word:?} is not one of {}", known.join(", ")));
    }
}
