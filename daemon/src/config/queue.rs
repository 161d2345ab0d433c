//! Queues: what runs their items and how. A batch keeps a copy of its queue's settings.

use std::collections::BTreeMap;
use std::fmt;
use std::num::NonZeroU32;
use std::path::Path;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::agent::AgentSpec;
use super::http::HttpSpec;
use super::sections::Limits;
use super::units;

/// A queue's settings as stored with each of its batches. The tag names the executor and the shape
/// of its settings, so that a worker never runs a batch whose settings it would misread.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "executor")]
pub enum QueueSpec {
    /// Runs a program for each item.
    #[serde(rename = "command/1")]
    Command(CommandSpec),
    /// Sends a request for each item.
    #[serde(rename = "http/1")]
    Http(HttpSpec),
    /// Has a model with tools work on each item.
    #[serde(rename = "agent/1")]
    Agent(AgentSpec),
}

impl QueueSpec {
    /// The executor's name as it is configured.
    #[must_use]
    pub const fn executor(&self) -> &'static str {
        match self {
            Self::Command(_) => "command",
            Self::Http(_) => "http",
            Self::Agent(_) => "agent",
        }
    }

    /// The `[upstreams.NAME]` it uses; none where it names none.
    #[must_use]
    pub fn upstream(&self) -> Option<&str> {
        let name = match self {
            Self::Command(_) => return None,
            Self::Http(http) => &http.upstream,
            Self::Agent(agent) => &agent.upstream,
        };
        Some(name.as_str()).filter(|name| !name.is_empty())
    }

    /// Everything wrong with these settings, each with its key below the queue's.
    pub(super) fn problems(&self, limits: &Limits) -> Vec<(&'static str, String)> {
        match self {
            Self::Command(command) => command.problems(limits),
            Self::Http(http) => http.problems(limits),
            Self::Agent(agent) => agent.problems(limits),
        }
    }

    /// The queue's cap on items of one batch executing at once; none means unlimited.
    #[must_use]
    pub const fn max_running(&self) -> Option<NonZeroU32> {
        match self {
            Self::Command(command) => command.max_running,
            Self::Http(http) => http.max_running,
            Self::Agent(agent) => agent.max_running,
        }
    }

    /// Bytes of a stored result.
    #[must_use]
    pub const fn result_bytes(&self) -> usize {
        match self {
            Self::Command(command) => command.result_bytes,
            Self::Http(http) => http.result_bytes,
            Self::Agent(agent) => agent.result_bytes,
        }
    }

    /// The settings as JSON: every key, always in the same order, so that equal settings are equal
    /// texts and can be compared by digest. [`QueueSpec::from_json`] reads it back without loss.
    ///
    /// # Panics
    /// Never: settings hold texts, numbers and maps with text keys.
    #[must_use]
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).expect("settings hold texts, numbers and maps with text keys")
    }

    /// Reads what [`QueueSpec::to_json`] wrote, members in any order.
    ///
    /// # Errors
    /// Another version of Holdfast wrote it: an executor, a shape or a key this one does not know.
    pub fn from_json(json: &str) -> Result<Self, serde_json::Error> {
        serde_json::from_str(json)
    }
}

/// Settings of the `command` executor. Units, ranges and defaults: `config/default.toml`. Prints
/// without the values of `env`.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CommandSpec {
    /// Program and arguments; placeholders in the arguments are the executor's to fill.
    pub argv: Vec<String>,
    /// How long one execution may take. 1 ms to 30 d, default 1 h.
    #[serde(with = "units::duration")]
    pub timeout: Duration,
    /// Variables set for the program; they win over `env_pass`. Default none.
    pub env: BTreeMap<String, String>,
    /// Variables handed on from the worker's environment. Default `PATH`, `HOME`, `LANG`, `LC_ALL`,
    /// `TZ`.
    pub env_pass: Vec<String>,
    /// Directory the program runs in; none means a private one for each execution.
    #[serde(with = "units::optional")]
    pub cwd: Option<String>,
    /// Whether every execution gets the workspace of its item; else only those do whose item has a
    /// criterion about a file. Default no.
    #[serde(default)]
    pub workspace: bool,
    /// Exit statuses of a success. Default 0.
    pub success: Vec<u8>,
    /// Exit statuses of a failure that another attempt may mend. Default 75.
    pub retry: Vec<u8>,
    /// Exit statuses of a failure that no attempt will mend. Default none.
    pub permanent: Vec<u8>,
    /// What every other exit status is. Default retry.
    #[serde(deserialize_with = "units::word")]
    pub otherwise: Otherwise,
    /// Items of one batch executing at once; none means unlimited. Up to 1,000,000, default none.
    #[serde(with = "units::unlimited")]
    pub max_running: Option<NonZeroU32>,
    /// Bytes of a stored result. 1 KiB to `limits.result_bytes`; in the configuration 0, the
    /// default, stands for that limit.
    #[serde(with = "units::size")]
    pub result_bytes: usize,
}

impl fmt::Debug for CommandSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = self.clone();
        shown.env.values_mut().for_each(|value| "***".clone_into(value));
        f.write_str(&QueueSpec::Command(shown).to_json())
    }
}

/// What an exit status means that no list names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Otherwise {
    /// Another attempt may mend it.
    Retry,
    /// No attempt will mend it.
    Permanent,
}

impl FromStr for Otherwise {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "retry" => Ok(Self::Retry),
            "permanent" => Ok(Self::Permanent),
            _ => Err(format!("{text:?} is not one of retry, permanent")),
        }
    }
}

/// What an exit status means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExitClass {
    /// The item succeeded.
    Success,
    /// It failed; another attempt may mend it.
    Retry,
    /// It failed for good.
    Permanent,
}

impl CommandSpec {
    /// A command with every other setting at its default.
    #[must_use]
    pub fn new(argv: Vec<String>, limits: &Limits) -> Self {
        Self { argv, result_bytes: limits.result_bytes, ..Self::defaults() }
    }

    /// What a queue is where its configuration says nothing.
    pub(super) fn defaults() -> Self {
        let env_pass = ["PATH", "HOME", "LANG", "LC_ALL", "TZ"];
        Self {
            argv: Vec::new(),
            timeout: Duration::from_hours(1),
            env: BTreeMap::new(),
            env_pass: env_pass.map(str::to_owned).to_vec(),
            cwd: None,
            workspace: false,
            success: vec![0],
            retry: vec![75],
            permanent: Vec::new(),
            otherwise: Otherwise::Retry,
            max_running: None,
            result_bytes: 0,
        }
    }

    /// What `status` means for the item.
    #[must_use]
    pub fn exit_class(&self, status: u8) -> ExitClass {
        if self.success.contains(&status) {
            ExitClass::Success
        } else if self.permanent.contains(&status) {
            ExitClass::Permanent
        } else if self.retry.contains(&status) || self.otherwise == Otherwise::Retry {
            ExitClass::Retry
        } else {
            ExitClass::Permanent
        }
    }

    /// Everything wrong with these settings, each with its key below the queue's.
    pub(super) fn problems(&self, limits: &Limits) -> Vec<(&'static str, String)> {
        let mut found = Vec::new();
        let mut wrong = |key, what: String| found.push((key, what));
        if let Err(what) = check_argv(&self.argv) {
            wrong("argv", what);
        }
        let (shortest, longest) = (Duration::from_millis(1), Duration::from_hours(30 * 24));
        if self.timeout < shortest || self.timeout > longest {
            wrong("timeout", "must be 1ms to 30d".into());
        }
        for (key, names) in [
            ("env", self.env.keys().collect::<Vec<_>>()),
            ("env_pass", self.env_pass.iter().collect()),
        ] {
            for name in names {
                if let Err(what) = check_variable(name) {
                    wrong(key, what);
                }
            }
        }
        if self.env.values().any(|value| value.contains('\0')) {
            wrong("env", "a value holds a NUL character".into());
        }
        if self.cwd.as_deref().is_some_and(|cwd| !Path::new(cwd).is_absolute()) {
            wrong("cwd", "must be an absolute path".into());
        }
        self.exit_status_problems(&mut wrong);
        if self.max_running.is_some_and(|cap| cap.get() > 1_000_000) {
            wrong("max_running", "must be 0 to 1000000".into());
        }
        if self.result_bytes < 1024 || self.result_bytes > limits.result_bytes {
            let most = units::size::show(limits.result_bytes);
            wrong("result_bytes", format!("must be 1KiB to limits.result_bytes, {most}"));
        }
        found
    }

    fn exit_status_problems(&self, wrong: &mut impl FnMut(&'static str, String)) {
        if self.success.is_empty() {
            wrong("success", "must hold at least one exit status".into());
        }
        let lists = [("success", &self.success), ("retry", &self.retry)];
        for (later, (key, statuses)) in
            [("retry", &self.retry), ("permanent", &self.permanent)].into_iter().enumerate()
        {
            for (other, taken) in &lists[..=later] {
                if let Some(status) = statuses.iter().find(|status| taken.contains(status)) {
                    wrong(key, format!("exit status {status} is in `{other}` too"));
                }
            }
        }
    }
}

fn check_argv(argv: &[String]) -> Result<(), String> {
    let program = argv.first().filter(|program| !program.is_empty());
    let program = program.ok_or("must be a list that begins with the name of a program")?;
    if argv.iter().any(|word| word.contains('\0')) {
        return Err("a word holds a NUL character".into());
    }
    // Submitters choose the data of an item, never the program.
    let placeholders = ["{input}", "{input_file}", "{key}", "{position}", "{attempt}"];
    if let Some(found) = placeholders.iter().find(|placeholder| program.contains(**placeholder)) {
        return Err(format!("the program's name must not hold the placeholder {found}"));
    }
    let name = Path::new(program).file_name().unwrap_or_default();
    let is_shell = ["sh", "bash", "dash", "ash", "ksh", "zsh"].iter().any(|shell| name == *shell);
    let script = argv.iter().skip_while(|word| !is_script_option(word)).nth(1);
    if let Some(script) = script.filter(|_| is_shell)
        && let Some(found) = ["{input}", "{key}"].iter().find(|data| script.contains(**data))
    {
        return Err(format!(
            "{found} in a shell's script would run what a submitter wrote; hand it over as an \
             argument: [\"{program}\", \"-c\", \"… \\\"$1\\\" …\", \"{program}\", \"{found}\"]"
        ));
    }
    Ok(())
}

/// `-c`, alone or at the end of others as in `-lc`.
fn is_script_option(word: &str) -> bool {
    word.starts_with('-') && !word.starts_with("--") && word.ends_with('c')
}

pub(super) fn check_variable(name: &str) -> Result<(), String> {
    if name.is_empty() || name.contains(['=', '\0']) {
        return Err(format!("{name:?} is not a variable's name"));
    }
    // The worker's own settings, the database's password among them, stay with the worker.
    if name.starts_with("HOLDFAST_") {
        return Err(format!("{name}: names that begin with HOLDFAST_ are the worker's own"));
    }
    Ok(())
}
