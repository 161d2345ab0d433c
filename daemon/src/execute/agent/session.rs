//! One session of a model: its turns, its tools, its budgets.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use rand::Rng;
use reqwest::Method;
use serde_json::{Value, json};
use tokio::task::spawn_blocking;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use super::chat::{Reply, ToolCall, tool_message};
use super::ending::{Ended, Stop, of_failure, stop, told};
use super::tools::{Tool, schemas};
use super::transcript::Transcript;
use super::{AgentExecutor, files, prompt};
use crate::clock::BootInstant;
use crate::config::Redirects;
use crate::execute::http::item_headers;
use crate::execute::upstream::call::{CallLimits, Failure, call, error_text, invalid, is_error};
use crate::execute::upstream::exchange::{Bounds, Outgoing};
use crate::execute::upstream::secret::Secrets;
use crate::execute::upstream::usage::Usage;
use crate::execute::{ExecutionEnd, Executor, Job, Noted, Spent};
use crate::model::evidence::MAX_COMMAND_CHARS;
use crate::model::{Evidence, StopReason};
use crate::workspace::Holder;

/// The most records kept of one attempt; the oldest go first.
const MAX_EVIDENCE: usize = 200;
/// The longest wait for another try of a call within a session; a longer one ends it.
const LONGEST_WAIT: Duration = Duration::from_mins(1);
/// The first wait after a try that went wrong, doubled with each.
const FIRST_WAIT: Duration = Duration::from_secs(1);
/// Answers in a row that the server cut off in the middle of a call.
const MAX_CUT_CALLS: u32 = 2;
/// What stands for the result of a tool that the model's window has no room for.
const FORGOTTEN: &str = "[an earlier result, left out for want of room]";
/// Bytes of text that a token stands for, by estimate: ten of them.
const TEN_BYTES_PER_TOKEN: u64 = 35;

/// The answer to a call of a tool.
struct Answered {
    text: String,
    /// Whether the call could be understood.
    valid: bool,
}

pub(super) struct Session<'a> {
    agent: &'a AgentExecutor,
    job: &'a Job,
    stop: &'a CancellationToken,
    secrets: &'a Secrets,
    holder: Option<Arc<Holder>>,
    transcript: Transcript<'a>,
    messages: Vec<Value>,
    evidence: VecDeque<Evidence>,
    recorded: u64,
    spent: Spent,
    turn: u32,
    invalid_calls: u32,
    cut_calls: u32,
    empty_answers: u32,
    /// The last call, and how often it came in a row.
    repeated: (String, u32),
    forgot: bool,
    text: String,
    cut_short: bool,
    /// When its budget of time is spent, and when its queue's timeout is over.
    time_is_up: BootInstant,
    deadline: BootInstant,
}

impl<'a> Session<'a> {
    pub(super) fn new(
        agent: &'a AgentExecutor,
        job: &'a Job,
        stop: &'a CancellationToken,
        secrets: &'a Secrets,
        holder: Option<Arc<Holder>>,
    ) -> Self {
        let now = agent.clock.now();
        let spec = &agent.spec;
        let task = prompt::task(&job.input_json, &job.criteria, holder.is_some());
        Self {
            agent,
            job,
            stop,
            secrets,
            holder,
            transcript: Transcript::new(&*agent.ledger, job, spec.transcript_bytes),
            messages: vec![agent.system.message(), task],
            evidence: VecDeque::new(),
            recorded: 0,
            spent: Spent { model: spec.model.clone(), calls: 0, usage: None },
            turn: 0,
            invalid_calls: 0,
            cut_calls: 0,
            empty_answers: 0,
            repeated: (String::new(), 0),
            forgot: false,
            text: String::new(),
            cut_short: false,
            time_is_up: now + spec.max_time,
            deadline: now + spec.timeout,
        }
    }

    /// Runs to its end.
    ///
    /// # Errors
    /// Never for what the model does: a failure is of the call that began nothing.
    pub(super) async fn run(mut self) -> Result<Ended, Failure> {
        let spec = &self.agent.spec;
        let start = json!({"type": "start", "system_sha256": self.agent.system.sha256,
            "model": spec.model, "tools": spec.tools});
        let stop = match self.note(start).await {
            Ok(()) => loop {
                if let Err(stop) = self.turn().await {
                    break stop;
                }
            },
            Err(stop) => stop,
        };
        let end = json!({"type": "end", "stop_reason": stop.reason.as_str(), "turns": self.turn,
            "calls": self.spent.calls, "usage": self.spent.usage});
        let reason = match self.transcript.end(&end).await {
            Noted::Lost if stop.reason != StopReason::Stopped => StopReason::LeaseLost,
            Noted::Stored | Noted::Lost | Noted::Unknown => stop.reason,
        };
        Ok(Ended {
            end: stop.end.filter(|_| reason == stop.reason),
            reason,
            text: self.text,
            cut_short: self.cut_short,
            error: stop.error,
            evidence: self.evidence.into(),
            workspace: self.holder.map(|holder| holder.id()),
        })
    }

    /// One call of the model and what it asks for.
    async fn turn(&mut self) -> Result<(), Stop> {
        self.check_budgets()?;
        self.make_room()?;
        self.turn += 1;
        let reply = self.ask().await?;
        self.account(&reply).await;
        let calls = reply.calls.clone();
        self.messages.push(reply.message.clone());
        if !reply.text.is_empty() {
            self.text.clone_from(&reply.text);
        }
        let mut results = Vec::new();
        let decided = if calls.is_empty() {
            self.without_calls(&reply)
        } else {
            self.empty_answers = 0;
            self.run_calls(&reply, &calls, &mut results).await
        };
        let note = json!({"type": "turn", "turn": self.turn, "text": reply.text,
            "finish_reason": reply.finish_reason, "calls": results, "usage": reply.usage});
        self.note(note).await?;
        decided
    }

    fn check_budgets(&self) -> Result<(), Stop> {
        self.check_time()?;
        let spec = &self.agent.spec;
        if self.turn >= spec.max_turns {
            return Err(stop(StopReason::MaxTurns));
        }
        let used = self.spent.usage.and_then(|usage| usage.total_tokens).unwrap_or(0);
        if used >= spec.max_tokens {
            return Err(stop(StopReason::MaxTokens));
        }
        Ok(())
    }

    /// Asked before every call and every tool.
    fn check_time(&self) -> Result<(), Stop> {
        let now = self.agent.clock.now();
        if self.stop.is_cancelled() {
            Err(stop(StopReason::Stopped))
        } else if now >= self.deadline {
            Err(stop(StopReason::Deadline))
        } else if now >= self.time_is_up {
            Err(stop(StopReason::MaxTime))
        } else {
            Ok(())
        }
    }

    /// What is left of the time.
    fn left(&self) -> Duration {
        self.time_is_up.min(self.deadline).since(self.agent.clock.now())
    }

    /// Where the history outgrows the model's window, the older half of the results is forgotten,
    /// once.
    fn make_room(&mut self) -> Result<(), Stop> {
        let window = self.agent.spec.context_window;
        if window == 0 || self.estimate() <= window {
            return Ok(());
        }
        if !self.forgot {
            self.forgot = true;
            let is_result = |message: &&mut Value| message["role"] == "tool";
            let results = self.messages.iter().filter(|message| message["role"] == "tool").count();
            // The newest stays: it is what the model works on.
            let oldest = self.messages.iter_mut().filter(is_result).take(results.saturating_sub(1));
            oldest.for_each(|message| message["content"] = FORGOTTEN.into());
        }
        if self.estimate() <= window { Ok(()) } else { Err(stop(StopReason::ContextOverflow)) }
    }

    fn estimate(&self) -> u64 {
        let bytes: usize = self.messages.iter().map(|message| message.to_string().len()).sum();
        bytes as u64 * 10 / TEN_BYTES_PER_TOKEN
    }

    /// Calls the model, some times where that may help.
    async fn ask(&mut self) -> Result<Reply, Stop> {
        let body = Bytes::from(self.request().to_string());
        let mut tried = 0;
        loop {
            tried += 1;
            let failure = match self.ask_once(body.clone(), tried).await {
                Ok(reply) => return Ok(reply),
                Err(failure) => failure,
            };
            self.check_time()?;
            let wait = match failure.end {
                ExecutionEnd::Retryable | ExecutionEnd::Lost => {
                    let most = FIRST_WAIT * 2_u32.saturating_pow(tried - 1);
                    Some(most.mul_f64(rand::rng().random_range(0.0..=1.0)))
                }
                ExecutionEnd::Deferred(wait) => Some(wait),
                ExecutionEnd::Succeeded
                | ExecutionEnd::Permanent
                | ExecutionEnd::TimedOut
                | ExecutionEnd::Stopped
                | ExecutionEnd::NotAdmitted => None,
            };
            match wait.filter(|wait| *wait <= LONGEST_WAIT && *wait < self.left()) {
                Some(wait) if tried < self.agent.spec.call_tries => {
                    tokio::select! {
                        () = self.stop.cancelled() => return Err(stop(StopReason::Stopped)),
                        () = sleep(wait) => {}
                    }
                }
                Some(_) | None => return Err(of_failure(failure)),
            }
        }
    }

    fn request(&self) -> Value {
        let spec = &self.agent.spec;
        let mut body = Value::Object(spec.parameters.clone());
        body["model"] = spec.model.clone().into();
        body["messages"] = self.messages.clone().into();
        if !spec.tools.is_empty() {
            body["tools"] = schemas(&spec.tools, spec.tool_timeout.as_secs().max(1)).into();
            body["tool_choice"] = "auto".into();
        }
        body
    }

    async fn ask_once(&self, body: Bytes, tried: u32) -> Result<Reply, Failure> {
        let (agent, job) = (self.agent, self.job);
        let (batch, position) = (job.item.batch(), job.item.position());
        // Another attempt, and every turn, sends another body.
        let key = format!("hf-{batch}-{position}-a{}-t{}", job.attempt, self.turn);
        let outgoing = Outgoing {
            method: Method::POST,
            url: agent.url.clone(),
            plain: agent.headers.clone(),
            own: item_headers(job, &key),
            secrets: self.secrets,
            body,
        };
        let spec = &agent.spec;
        let limits = CallLimits {
            max_wait: spec.max_wait.min(self.left()),
            total: self.left(),
            bounds: Bounds {
                header: spec.header_timeout,
                idle: spec.idle_timeout,
                bytes: spec.response_bytes,
                redirects: Redirects::None,
            },
        };
        let answer = call(&agent.reached, &outgoing, &limits, &*agent.clock, self.stop).await?;
        let text = self.secrets.redact(String::from_utf8_lossy(&answer.body).into_owned());
        let tried = u16::try_from(tried).unwrap_or(u16::MAX);
        let body: Value =
            serde_json::from_str(&text).map_err(|_| invalid("the answer is not JSON", tried))?;
        if is_error(&body, "choices") {
            let what = format!("the answer is an error: {}", error_text(&body));
            return Err(invalid(&what, tried));
        }
        Reply::of(&body, self.turn)
            .ok_or_else(|| invalid("the answer is not a chat completion", tried))
    }

    /// Sums what was used; what no answer says stays unknown.
    async fn account(&mut self, reply: &Reply) {
        self.spent.calls += 1;
        if let Some(model) = &reply.model {
            self.spent.model.clone_from(model);
        }
        if let Some(usage) = reply.usage {
            let mut sum: Usage = self.spent.usage.unwrap_or_default();
            sum.add(usage);
            self.spent.usage = Some(sum);
        }
        self.agent.ledger.spend(self.job, &self.spent).await;
    }

    /// What an answer without calls means: a report, or nothing.
    fn without_calls(&mut self, reply: &Reply) -> Result<(), Stop> {
        if reply.finish_reason == "content_filter" {
            return Err(stop(StopReason::ContentFilter));
        }
        if !reply.text.is_empty() {
            self.cut_short = reply.finish_reason == "length";
            return Err(stop(StopReason::Completed));
        }
        if reply.finish_reason == "length" {
            return Err(stop(StopReason::OutputLimit));
        }
        self.empty_answers += 1;
        if self.empty_answers > 1 {
            return Err(stop(StopReason::EmptyResponse));
        }
        // An empty message has no place in a history: servers refuse it.
        self.messages.pop();
        self.messages.push(prompt::nudge());
        Ok(())
    }

    /// Runs the calls of one answer in their order, and answers each.
    async fn run_calls(
        &mut self,
        reply: &Reply,
        calls: &[ToolCall],
        results: &mut Vec<Value>,
    ) -> Result<(), Stop> {
        let mut cut = false;
        for called in calls {
            self.check_time()?;
            self.check_repeats(called)?;
            let answered = self.run_call(called, reply.finish_reason == "length").await?;
            results.push(json!({"id": called.id, "name": called.name,
                "arguments": called.arguments, "result": answered.text}));
            self.messages.push(tool_message(&called.id, &answered.text));
            if answered.valid {
                self.invalid_calls = 0;
                continue;
            }
            cut |= reply.finish_reason == "length";
            self.invalid_calls += 1;
            if self.invalid_calls >= self.agent.spec.max_invalid_calls {
                return Err(stop(StopReason::InvalidToolCalls));
            }
        }
        self.cut_calls = if cut { self.cut_calls + 1 } else { 0 };
        if self.cut_calls >= MAX_CUT_CALLS {
            return Err(stop(StopReason::OutputLimit));
        }
        Ok(())
    }

    fn check_repeats(&mut self, called: &ToolCall) -> Result<(), Stop> {
        let this = format!("{} {}", called.name, called.arguments);
        let times = if self.repeated.0 == this { self.repeated.1 + 1 } else { 1 };
        self.repeated = (this, times);
        if times >= self.agent.spec.max_repeats {
            Err(stop(StopReason::RepeatedCall))
        } else {
            Ok(())
        }
    }

    async fn run_call(&mut self, called: &ToolCall, cut: bool) -> Result<Answered, Stop> {
        let parsed = Tool::parse(&called.name, &called.arguments, &self.agent.spec.tools);
        let tool = match parsed {
            Ok(tool) => tool,
            Err(what) => {
                let hint = if cut { "; your answer was cut off, make it shorter" } else { "" };
                return Ok(Answered { text: format!("Error: {what}{hint}"), valid: false });
            }
        };
        let (text, writes) = match tool {
            Tool::Shell { command, timeout_s } => (self.shell(command, timeout_s).await?, true),
            Tool::Read { path, offset, limit } => {
                let limit = limit.unwrap_or(files::MOST_SHOWN);
                let read = move |dir: &cap_std::fs::Dir, prefix: &str| {
                    files::read(dir, prefix, &path, offset, limit)
                };
                (self.file(read).await, false)
            }
            Tool::Write { path, content, append } => {
                let write = move |dir: &cap_std::fs::Dir, prefix: &str| {
                    files::write(dir, prefix, &path, &content, append)
                };
                (self.file(write).await, true)
            }
        };
        if writes {
            self.check_quota().await?;
        }
        Ok(Answered { text, valid: true })
    }

    /// Works on a file of the workspace, off the runtime.
    async fn file(
        &self,
        work: impl FnOnce(&cap_std::fs::Dir, &str) -> Result<String, String> + Send + 'static,
    ) -> String {
        let (Some(holder), Some(gate)) = (self.holder.clone(), self.agent.gate.clone()) else {
            return "Error: there is no workspace".to_owned();
        };
        let done =
            spawn_blocking(move || work(holder.roots().workspace(), gate.virtual_prefix())).await;
        match done {
            Ok(Ok(text)) => text,
            Ok(Err(what)) => format!("Error: {what}"),
            Err(panic) => format!("Error: {panic}"),
        }
    }

    async fn check_quota(&self) -> Result<(), Stop> {
        let Some(holder) = self.holder.clone() else { return Ok(()) };
        let spec = &self.agent.spec;
        let (bytes, files) = (spec.workspace_bytes as u64, u64::from(spec.workspace_files));
        let counted =
            spawn_blocking(move || files::exceeds(holder.roots().workspace(), bytes, files)).await;
        match counted {
            Ok(Ok(true)) => Err(stop(StopReason::WorkspaceQuota)),
            Ok(Ok(false) | Err(_)) | Err(_) => Ok(()),
        }
    }

    /// Runs a command as the `command` executor does, and records how it really ended.
    async fn shell(&mut self, command: String, timeout_s: Option<u64>) -> Result<String, Stop> {
        let most = self.agent.spec.tool_timeout;
        let asked = timeout_s.map_or(most, Duration::from_secs).min(most);
        let timeout = asked.min(self.left()).max(Duration::from_millis(1));
        let Ok(executor) = (self.agent.shells)(timeout) else {
            return Ok("Error: no shell can be started".to_owned());
        };
        let job = Job { input_json: Value::from(command.as_str()).to_string(), ..self.job.clone() };
        let execution = executor.execute(&job, self.stop).await;
        let (text, marker) = told(&execution, timeout);
        for record in execution.evidence {
            self.record(record, &command, marker.clone());
        }
        if execution.end == ExecutionEnd::Stopped {
            return Err(stop(StopReason::Stopped));
        }
        Ok(text)
    }

    fn record(&mut self, record: Evidence, command: &str, marker: Option<String>) {
        if self.evidence.len() == MAX_EVIDENCE {
            self.evidence.pop_front();
        }
        let kept: String = command.chars().take(MAX_COMMAND_CHARS).collect();
        self.evidence.push_back(Evidence {
            seq: self.recorded,
            turn: Some(u64::from(self.turn)),
            tool: "shell".to_owned(),
            command_truncated: kept.len() < command.len(),
            command: kept,
            status_marker: marker,
            ..record
        });
        self.recorded += 1;
    }

    async fn note(&mut self, entry: Value) -> Result<(), Stop> {
        match self.transcript.note(entry).await {
            Noted::Lost => Err(stop(StopReason::LeaseLost)),
            Noted::Stored | Noted::Unknown => Ok(()),
        }
    }
}
