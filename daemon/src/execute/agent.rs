//! The `agent` executor: a model with tools works on an item in its workspace.
//!
//! The model is any server of chat completions. What it says decides what happens next and nothing
//! else: its report is the item's result, and whether the criteria hold is judged from the files and
//! from what was recorded of the commands, by their real exit statuses.

mod chat;
mod ending;
mod files;
mod prompt;
mod session;
mod tools;
mod transcript;

use std::io;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use reqwest::Url;
use reqwest::header::{CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue};
use tokio::task::spawn_blocking;
use tokio_util::sync::CancellationToken;

use self::ending::Ended;
use self::prompt::System;
use self::session::Session;
use super::command::{CommandExecutor, InvalidCommand};
use super::http::{InvalidHttp, SecretHeaders, failed, no_secret};
use super::upstream::call::Failure;
use super::upstream::{Reached, Upstreams};
use super::{Execution, ExecutionEnd, Executor, Job, Ledger};
use crate::check::needs_workspace;
use crate::clock::Clock;
use crate::config::AgentSpec;
use crate::model::StopReason;
use crate::workspace::{Gate, Holder, Refusal};

/// Makes what runs shell commands, with a bound of time for each.
pub type Shells = dyn Fn(Duration) -> Result<CommandExecutor, InvalidCommand> + Send + Sync;

/// What a shell command runs as: the command with both streams as one, in the order of the writes.
pub const SHELL_ARGV: [&str; 5] = ["sh", "-c", "exec sh -c \"$1\" 2>&1", "sh", "{input}"];

/// Has a model work on the items of one queue.
pub struct AgentExecutor {
    spec: AgentSpec,
    url: Url,
    headers: HeaderMap,
    secrets: SecretHeaders,
    system: System,
    reached: Reached,
    shells: Box<Shells>,
    gate: Option<Arc<Gate>>,
    ledger: Arc<dyn Ledger>,
    error_chars: usize,
    clock: Arc<dyn Clock>,
}

impl AgentExecutor {
    /// Prepares the agents of one queue. `shells` makes what runs their commands: argument vectors
    /// [`SHELL_ARGV`], in the item's workspace behind `gate`. An error text has at most `error_chars`
    /// characters.
    ///
    /// # Errors
    /// When `spec` cannot be used as it is.
    pub fn new(
        spec: AgentSpec,
        upstreams: &Arc<Upstreams>,
        shells: Box<Shells>,
        gate: Option<Arc<Gate>>,
        ledger: Arc<dyn Ledger>,
        error_chars: usize,
        clock: Arc<dyn Clock>,
    ) -> Result<Self, InvalidHttp> {
        let wrong = |error: &dyn ToString| InvalidHttp(error.to_string());
        let base = spec.base_url.trim_end_matches('/');
        let url = Url::parse(&format!("{base}/chat/completions")).map_err(|error| wrong(&error))?;
        let mut headers = HeaderMap::new();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        for (name, value) in &spec.headers {
            let name: HeaderName = name.parse().map_err(|error| wrong(&error))?;
            headers.insert(name, value.parse().map_err(|error| wrong(&error))?);
        }
        let secrets = SecretHeaders::new(&spec.secret_headers, &spec.api_key)
            .map_err(|error| wrong(&error))?;
        let reached = upstreams
            .reach(&spec.upstream, &spec.model, spec.connect_timeout)
            .map_err(InvalidHttp)?;
        shells(spec.tool_timeout).map_err(|error| wrong(&error))?;
        let system = System::new(&spec.instructions);
        Ok(Self {
            spec,
            url,
            headers,
            secrets,
            system,
            reached,
            shells,
            gate,
            ledger,
            error_chars,
            clock,
        })
    }

    async fn attempt(&self, job: &Job, stop: &CancellationToken) -> Result<Ended, Failure> {
        if stop.is_cancelled() {
            return Err(Failure::stopped());
        }
        let secrets = self.secrets.read().map_err(|error| no_secret(&error))?;
        let holder = self.workspace(job).await?;
        Session::new(self, job, stop, &secrets, holder).run().await
    }

    async fn workspace(&self, job: &Job) -> Result<Option<Arc<Holder>>, Failure> {
        let needs = !self.spec.tools.is_empty() || needs_workspace(&job.criteria);
        let Some(gate) = self.gate.clone().filter(|_| needs) else { return Ok(None) };
        let position = job.item.position();
        let made = spawn_blocking(move || gate.make(position)).await;
        match made.map_err(|panic| Refusal::Failed(io::Error::other(panic))).flatten() {
            Ok(holder) => Ok(Some(Arc::new(holder))),
            Err(Refusal::Denied(_)) if self.spec.tools.is_empty() => Ok(None),
            Err(refusal @ Refusal::Denied(_)) => {
                let error = refusal.to_string();
                Err(Failure::new(ExecutionEnd::Permanent, StopReason::CannotStart, error))
            }
            Err(refusal @ (Refusal::Unseen(_) | Refusal::Failed(_))) => {
                let error = refusal.to_string();
                Err(Failure::new(ExecutionEnd::NotAdmitted, StopReason::CannotStart, error))
            }
        }
    }

    /// What the end of a session means for the item: only a report is a success, and a budget that
    /// was spent once would be spent again.
    fn end_of(&self, reason: StopReason) -> ExecutionEnd {
        if reason == StopReason::Completed {
            ExecutionEnd::Succeeded
        } else if matches!(reason, StopReason::Stopped | StopReason::LeaseLost) {
            ExecutionEnd::Stopped
        } else if self.spec.retry_on.iter().any(|listed| listed == reason.as_str()) {
            ExecutionEnd::Retryable
        } else {
            ExecutionEnd::Permanent
        }
    }
}

#[async_trait]
impl Executor for AgentExecutor {
    async fn execute(&self, job: &Job, stop: &CancellationToken) -> Execution {
        let started_at = self.clock.wall();
        let ended = self.attempt(job, stop).await;
        let ended_at = self.clock.wall();
        let ended = match ended {
            Ok(ended) => ended,
            Err(failure) => return failed(failure, self.error_chars, (started_at, ended_at)),
        };
        let end = ended.end.unwrap_or_else(|| self.end_of(ended.reason));
        let mut output = ended.text;
        let output_bytes = output.len() as u64;
        let cut = output.len() > self.spec.result_bytes;
        output.truncate(output.floor_char_boundary(self.spec.result_bytes));
        let error = (end != ExecutionEnd::Succeeded).then(|| {
            let separator = if ended.error.is_empty() { "" } else { ": " };
            let text = format!("{}{separator}{}", ended.reason, ended.error);
            text.chars().take(self.error_chars).collect()
        });
        Execution {
            output,
            output_bytes,
            output_truncated: cut || ended.cut_short,
            error,
            evidence: ended.evidence,
            workspace: ended.workspace,
            ..Execution::new(end, ended.reason, started_at, ended_at)
        }
    }
}
