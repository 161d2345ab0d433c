//! The `http` executor: one request per attempt.
//!
//! The request comes from the queue; an item's data fills its places and can change neither the host
//! nor the number of path segments. Every attempt of an item sends the same `Idempotency-Key`, and the
//! fencing token that lets a target refuse an older one.

mod template;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use reqwest::Method;
use reqwest::header::{
    AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue, InvalidHeaderName,
};
use serde_json::Value;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use tokio_util::sync::CancellationToken;

use self::template::{Form, Template, Unfit};
use super::upstream::call::{CallLimits, Failure, call, error_text, invalid, is_error};
use super::upstream::exchange::{Answer, Bounds, Outgoing};
use super::upstream::secret::{SecretError, Secrets};
use super::upstream::usage::Usage;
use super::upstream::{Reached, Upstreams};
use super::{Execution, ExecutionEnd, Executor, Job, Ledger, Spent};
use crate::clock::Clock;
use crate::config::{Expect, HttpSpec, SecretRef};
use crate::model::StopReason;

/// Sends the items of one queue to a service.
pub struct HttpExecutor {
    spec: HttpSpec,
    method: Method,
    url: Template,
    headers: Vec<(HeaderName, Template)>,
    secrets: SecretHeaders,
    body: Template,
    body_form: Form,
    limits: CallLimits,
    reached: Reached,
    ledger: Arc<dyn Ledger>,
    error_chars: usize,
    clock: Arc<dyn Clock>,
}

/// Headers whose values are secrets, by reference.
pub(super) struct SecretHeaders(Vec<(HeaderName, &'static str, SecretRef)>);

impl SecretHeaders {
    pub(super) fn new<'a>(
        headers: impl IntoIterator<Item = (&'a String, &'a SecretRef)>,
        api_key: &SecretRef,
    ) -> Result<Self, InvalidHeaderName> {
        let mut all = Vec::new();
        if !api_key.is_none() {
            all.push((AUTHORIZATION, "Bearer ", api_key.clone()));
        }
        for (name, secret) in headers {
            all.push((name.parse()?, "", secret.clone()));
        }
        Ok(Self(all))
    }

    /// The secrets as they are now.
    pub(super) fn read(&self) -> Result<Secrets, SecretError> {
        let mut secrets = Secrets::default();
        for (name, prefix, secret) in &self.0 {
            secrets.add(name.clone(), prefix, secret)?;
        }
        Ok(secrets)
    }
}

/// Why an [`HttpSpec`] cannot be used, as a sentence. The operator has to change the queue.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct InvalidHttp(pub(super) String);

impl HttpExecutor {
    /// Prepares the requests of one queue. What calls used is noted in `ledger`; an error text has
    /// at most `error_chars` characters.
    ///
    /// # Errors
    /// When `spec` cannot be used as it is.
    pub fn new(
        spec: HttpSpec,
        upstreams: &Arc<Upstreams>,
        ledger: Arc<dyn Ledger>,
        error_chars: usize,
        clock: Arc<dyn Clock>,
    ) -> Result<Self, InvalidHttp> {
        let wrong = |error: &dyn ToString| InvalidHttp(error.to_string());
        let method = spec.method.parse().map_err(|error| wrong(&error))?;
        let headers = spec.headers.iter().map(|(name, value)| {
            let name: HeaderName = name.parse().map_err(|error| wrong(&error))?;
            Ok((name, Template::parse(value)))
        });
        let headers = headers.collect::<Result<_, InvalidHttp>>()?;
        let secrets = SecretHeaders::new(&spec.secret_headers, &spec.api_key)
            .map_err(|error| wrong(&error))?;
        let reached = upstreams
            .reach(&spec.upstream, &spec.model, spec.connect_timeout)
            .map_err(InvalidHttp)?;
        let limits = CallLimits {
            max_wait: spec.max_wait,
            total: spec.timeout,
            bounds: Bounds {
                header: spec.header_timeout,
                idle: spec.idle_timeout,
                bytes: spec.response_bytes,
                redirects: spec.redirects,
            },
        };
        let (url, body) = (Template::parse(&spec.url), Template::parse(&spec.body));
        let body_form = if is_json(&spec.content_type) { Form::Json } else { Form::Text };
        Ok(Self {
            spec,
            method,
            url,
            headers,
            secrets,
            body,
            body_form,
            limits,
            reached,
            ledger,
            error_chars,
            clock,
        })
    }

    async fn attempt(&self, job: &Job, stop: &CancellationToken) -> Result<Done, Failure> {
        if stop.is_cancelled() {
            return Err(Failure::stopped());
        }
        let unfit = |unfit: Unfit| {
            Failure::new(ExecutionEnd::Permanent, StopReason::CannotStart, unfit.to_string())
        };
        let url = self.url.url(job).map_err(unfit)?;
        let plain = self.plain_headers(job).map_err(unfit)?;
        let body = self.body.render(job, self.body_form).map_err(unfit)?;
        let secrets = self.secrets.read().map_err(|error| no_secret(&error))?;
        let outgoing = Outgoing {
            method: self.method.clone(),
            url,
            plain,
            own: item_headers(job, &idempotency_key(job)),
            secrets: &secrets,
            body: Bytes::from(body),
        };
        let answer = call(&self.reached, &outgoing, &self.limits, &*self.clock, stop).await?;
        let json = self.json_of(&answer, job)?;
        if let Some(usage) = json.as_ref().and_then(Usage::of) {
            let model = json.as_ref().and_then(|json| json.get("model")?.as_str());
            let model = model.unwrap_or(&self.spec.model).to_owned();
            self.ledger.spend(job, &Spent { model, calls: 1, usage: Some(usage) }).await;
        }
        let text = String::from_utf8_lossy(&answer.body).replace('\0', "\u{fffd}");
        Ok(Done { text: secrets.redact(text), bytes: answer.body.len() })
    }

    /// The body as JSON, where that is wanted.
    fn json_of(&self, answer: &Answer, job: &Job) -> Result<Option<Value>, Failure> {
        let expected = self.spec.expect == Expect::Json;
        if !expected && self.spec.model.is_empty() {
            return Ok(None);
        }
        let json: Option<Value> = serde_json::from_slice(&answer.body).ok();
        match json {
            None if expected => Err(invalid("the answer is not JSON", job.attempt.get())),
            Some(body) if expected && is_error(&body, "result") => {
                let what = format!("the answer is an error: {}", error_text(&body));
                Err(invalid(&what, job.attempt.get()))
            }
            json => Ok(json),
        }
    }

    fn plain_headers(&self, job: &Job) -> Result<HeaderMap, Unfit> {
        let mut headers = HeaderMap::new();
        let content_type = HeaderValue::try_from(self.spec.content_type.as_str());
        if let Ok(content_type) = content_type {
            headers.insert(CONTENT_TYPE, content_type);
        }
        for (name, template) in &self.headers {
            let value = template.render(job, Form::Text)?;
            let value =
                HeaderValue::try_from(value).map_err(|_| Unfit::NotAHeader(name.to_string()))?;
            headers.insert(name.clone(), value);
        }
        Ok(headers)
    }

    fn done(&self, done: Done, (started_at, ended_at): Times) -> Execution {
        let Done { mut text, bytes } = done;
        let truncated = text.len() > self.spec.result_bytes;
        text.truncate(text.floor_char_boundary(self.spec.result_bytes));
        Execution {
            output: text,
            output_bytes: bytes as u64,
            output_truncated: truncated,
            ..Execution::new(ExecutionEnd::Succeeded, StopReason::Completed, started_at, ended_at)
        }
    }
}

type Times = (OffsetDateTime, OffsetDateTime);

/// A good answer.
struct Done {
    text: String,
    bytes: usize,
}

#[async_trait]
impl Executor for HttpExecutor {
    async fn execute(&self, job: &Job, stop: &CancellationToken) -> Execution {
        let started_at = self.clock.wall();
        let done = self.attempt(job, stop).await;
        let times = (started_at, self.clock.wall());
        match done {
            Ok(done) => self.done(done, times),
            Err(failure) => failed(failure, self.error_chars, times),
        }
    }
}

/// The execution that a failed call was.
pub(super) fn failed(
    failure: Failure,
    error_chars: usize,
    (started_at, ended_at): Times,
) -> Execution {
    let Failure { end, reason, error } = failure;
    let error = error.chars().take(error_chars).collect();
    Execution { error: Some(error), ..Execution::new(end, reason, started_at, ended_at) }
}

/// A worker that lacks a secret runs nothing with it; another may have it.
pub(super) fn no_secret(error: &SecretError) -> Failure {
    let wait = ExecutionEnd::Deferred(Duration::from_secs(10));
    Failure::new(wait, StopReason::CannotRun, error.to_string())
}

/// The same for every attempt, until an explicit retry asks for another execution.
fn idempotency_key(job: &Job) -> String {
    let (batch, position) = (job.item.batch(), job.item.position());
    match job.retries {
        0 => format!("hf-{batch}-{position}"),
        retries => format!("hf-{batch}-{position}-r{retries}"),
    }
}

/// What a target is told about the item.
pub(super) fn item_headers(job: &Job, idempotency_key: &str) -> HeaderMap {
    let (batch, position) = (job.item.batch(), job.item.position());
    let deadline = job.deadline.to_offset(time::UtcOffset::UTC).format(&Rfc3339);
    let own = [
        ("idempotency-key", Some(idempotency_key.to_owned())),
        ("x-client-request-id", Some(format!("hf-{batch}-{position}-{}", job.attempt))),
        ("holdfast-batch-id", Some(batch.to_string())),
        ("holdfast-position", Some(position.to_string())),
        ("holdfast-attempt", Some(job.attempt.to_string())),
        ("holdfast-lease-id", Some(job.lease.to_string())),
        ("holdfast-token", Some(job.token.to_string())),
        ("holdfast-deadline", deadline.ok()),
        ("traceparent", job.traceparent.clone()),
    ];
    let mut headers = HeaderMap::new();
    for (name, value) in own {
        let value = value.and_then(|value| HeaderValue::try_from(value).ok());
        headers.extend(value.map(|value| (HeaderName::from_static(name), value)));
    }
    headers
}

fn is_json(content_type: &str) -> bool {
    let essence = content_type.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    essence == "application/json" || essence.ends_with("+json")
}

#[cfg(test)]
pub(in crate::execute) mod tests {
    use super::*;
    use crate::model::{Attempt, BatchId, FencingToken, ItemRef, LeaseId, Position, Reporter};

    pub(in crate::execute) fn job(input_json: &str) -> Job {
        Job {
            item: ItemRef::new(BatchId::generate(), Position::new(7)),
            key: "the key".to_owned(),
            queue: "queue".parse().unwrap(),
            attempt: Attempt::new(2),
            retries: 0,
            lease: LeaseId::generate(),
            token: FencingToken::new(12),
            input_json: input_json.to_owned(),
            criteria: Vec::new(),
            deadline: OffsetDateTime::UNIX_EPOCH,
            traceparent: None,
            reporter: Reporter::default(),
        }
    }

    #[test]
    fn the_key_is_that_of_the_item_until_an_explicit_retry() {
        let job = job("0");
        let batch = job.item.batch();
        assert_eq!(idempotency_key(&job), format!("hf-{batch}-7"));
        let retried = Job { retries: 2, attempt: Attempt::new(1), ..job };
        assert_eq!(idempotency_key(&retried), format!("hf-{batch}-7-r2"));
    }

    #[test]
    fn json_is_known_by_its_type() {
        for json in ["application/json", "Application/JSON; charset=utf-8", "application/ld+json"] {
            assert!(is_json(json), "{json}");
        }
        for other in ["text/plain", "application/jsonl", ""] {
            assert!(!is_json(other), "{other}");
        }
    }
}
