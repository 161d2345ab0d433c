//! One call of an upstream: its turn, its exchange, what the answer means for the item and for
//! everybody else who calls.

use std::time::Duration;

use rand::Rng;
use serde_json::Value;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use super::Reached;
use super::classify::{Class, classify};
use super::exchange::{Answer, Bounds, Outgoing, Trouble, exchange};
use super::limits::{Permit, Refused};
use crate::clock::Clock;
use crate::execute::ExecutionEnd;
use crate::model::StopReason;

/// The shortest wait after an upstream had too many requests.
const THROTTLE: Duration = Duration::from_secs(1);
/// The first pause of an upstream that cannot be connected to.
const DOWN: Duration = Duration::from_secs(1);
/// The pause of a model that an upstream does not have.
const NO_MODEL: Duration = Duration::from_secs(30);
/// How often in a row it is missed before its items fail.
const NO_MODEL_STRIKES: u32 = 3;
/// How much of an answer's body an error quotes, in characters.
const QUOTED_CHARS: usize = 1000;

/// How long a call may take.
#[derive(Clone, Debug)]
pub(in crate::execute) struct CallLimits {
    /// The wait for its turn.
    pub(in crate::execute) max_wait: Duration,
    /// The exchange.
    pub(in crate::execute) total: Duration,
    /// Its parts.
    pub(in crate::execute) bounds: Bounds,
}

/// A call that was not answered as it should be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::execute) struct Failure {
    /// What it means for the item.
    pub(in crate::execute) end: ExecutionEnd,
    /// The named reason.
    pub(in crate::execute) reason: StopReason,
    /// What went wrong, without secrets and URLs, not yet bounded.
    pub(in crate::execute) error: String,
}

impl Failure {
    pub(in crate::execute) fn new(
        end: ExecutionEnd,
        reason: StopReason,
        error: impl Into<String>,
    ) -> Self {
        Self { end, reason, error: error.into() }
    }

    pub(in crate::execute) fn stopped() -> Self {
        Self::new(ExecutionEnd::Stopped, StopReason::Stopped, "stopped")
    }
}

/// Calls the upstream once and answers what it said, of success alone.
///
/// When `stop` is cancelled the connection is closed before anything else is done.
///
/// # Cancel safety
/// Dropped, it closes its connection at once; its turn counts a little longer.
pub(in crate::execute) async fn call(
    reached: &Reached,
    outgoing: &Outgoing<'_>,
    limits: &CallLimits,
    clock: &dyn Clock,
    stop: &CancellationToken,
) -> Result<Answer, Failure> {
    let admission = &reached.upstreams.admission;
    let (key, rates) = (reached.key(&outgoing.url), reached.policy.rates());
    let admitted = tokio::select! {
        biased;
        () = stop.cancelled() => return Err(Failure::stopped()),
        admitted = admission.admit(&key, rates, limits.max_wait) => admitted,
    };
    let permit = admitted.map_err(|refused| refusal(refused, limits.max_wait))?;
    let allowed = &reached.policy.settings.allow_networks;
    let exchanged = {
        let exchanged =
            timeout(limits.total, exchange(&reached.client, outgoing, &limits.bounds, allowed));
        tokio::select! {
            biased;
            exchanged = exchanged => Some(exchanged),
            () = stop.cancelled() => None,
            never = admission.keep(&permit) => match never {},
        }
    };
    let called = match exchanged {
        None => Err(Failure::stopped()),
        Some(Err(_)) => {
            let limit = humantime::format_duration(limits.total);
            let error = format!("timed out after {limit}; it may have been executed");
            Err(Failure::new(ExecutionEnd::TimedOut, StopReason::TimedOut, error))
        }
        Some(Ok(Ok(answer))) => judge(reached, outgoing, &permit, answer, clock).await,
        Some(Ok(Err(trouble))) => Err(in_trouble(reached, &permit, trouble).await),
    };
    admission.release(permit).await;
    called.map_err(|failure| Failure { error: outgoing.secrets.redact(failure.error), ..failure })
}

fn refusal(refused: Refused, max_wait: Duration) -> Failure {
    match refused {
        Refused::Blocked(wait, pauses) => {
            let left = humantime::format_duration(Duration::from_secs(wait.as_secs() + 1));
            let (reason, what) = if pauses > 0 {
                (StopReason::UpstreamPaused, "is paused")
            } else {
                (StopReason::Throttled, "asked to wait")
            };
            deferred(wait, reason, format!("not sent: the upstream {what}, {left} left"))
        }
        Refused::Waited => {
            let limit = humantime::format_duration(max_wait);
            deferred(
                Duration::ZERO,
                StopReason::Throttled,
                format!("not sent: no turn within {limit}"),
            )
        }
    }
}

/// The item goes back free of charge for so long and up to a tenth longer, so that not all come at
/// once.
fn deferred(wait: Duration, reason: StopReason, error: String) -> Failure {
    let spread = wait / 10 + THROTTLE / 2;
    let wait = wait + spread.mul_f64(rand::rng().random_range(0.0..=1.0));
    Failure::new(ExecutionEnd::Deferred(wait), reason, error)
}

async fn judge(
    reached: &Reached,
    outgoing: &Outgoing<'_>,
    permit: &Permit,
    answer: Answer,
    clock: &dyn Clock,
) -> Result<Answer, Failure> {
    let admission = &reached.upstreams.admission;
    let settings = &reached.policy.settings;
    if answer.status.is_success() {
        admission.went_well(permit).await;
        return Ok(answer);
    }
    let json: Option<Value> = serde_json::from_slice(&answer.body).ok();
    let error = told(outgoing, &answer);
    let patterns = &reached.policy.patterns;
    match classify(answer.status, &answer.headers, json.as_ref(), patterns, clock.wall()) {
        Class::Done => Ok(answer),
        Class::Permanent(reason) => {
            admission.went_well(permit).await;
            Err(Failure::new(ExecutionEnd::Permanent, reason, error))
        }
        Class::Transient => {
            Err(Failure::new(ExecutionEnd::Retryable, StopReason::UpstreamError, error))
        }
        Class::Throttled(asked) => {
            let wait = asked.unwrap_or_default().max(THROTTLE);
            admission.throttled(permit, wait).await;
            Err(deferred(wait, StopReason::Throttled, error))
        }
        Class::Paused => {
            let (first, longest) = (settings.pause_min, settings.pause_max);
            let why = answer.status.as_str();
            let (_, wait) = admission.pause(permit, true, first, longest, why).await;
            Err(deferred(wait, StopReason::UpstreamPaused, error))
        }
        Class::ModelMissing => {
            if permit.pauses() + 1 >= NO_MODEL_STRIKES {
                return Err(Failure::new(
                    ExecutionEnd::Permanent,
                    StopReason::ModelNotFound,
                    error,
                ));
            }
            let why = "the model is not there";
            let (_, wait) = admission.pause(permit, false, NO_MODEL, NO_MODEL, why).await;
            Err(deferred(wait, StopReason::ModelNotFound, error))
        }
    }
}

/// The status, and what the body says in its own words.
fn told(outgoing: &Outgoing<'_>, answer: &Answer) -> String {
    let text = String::from_utf8_lossy(&answer.body);
    let clean = |c: char| if c.is_control() { ' ' } else { c };
    // Redacted before it is cut: half a secret is one too.
    let text = outgoing.secrets.redact(text.trim().chars().map(clean).collect());
    let text: String = text.chars().take(QUOTED_CHARS).collect();
    let separator = if text.is_empty() { "" } else { ": " };
    format!("HTTP {}{separator}{text}", answer.status)
}

async fn in_trouble(reached: &Reached, permit: &Permit, trouble: Trouble) -> Failure {
    let error = trouble.to_string();
    match trouble {
        Trouble::NotAllowed(_) => {
            Failure::new(ExecutionEnd::Permanent, StopReason::TargetRefused, error)
        }
        Trouble::TooLarge(_) => {
            Failure::new(ExecutionEnd::Permanent, StopReason::ResponseTooLarge, error)
        }
        Trouble::Redirect(_) => Failure::new(ExecutionEnd::Permanent, StopReason::Rejected, error),
        Trouble::Lost(_) => Failure::new(ExecutionEnd::Lost, StopReason::Lost, error),
        Trouble::NotSent(why) => {
            let longest = reached.policy.settings.pause_min.max(DOWN);
            let admission = &reached.upstreams.admission;
            let (_, wait) = admission.pause(permit, true, DOWN, longest, &why).await;
            deferred(wait, StopReason::UpstreamDown, error)
        }
    }
}

/// A success that is not what it should be: worth one more try, then it fails.
pub(in crate::execute) fn invalid(what: &str, attempt: u16) -> Failure {
    let end = if attempt <= 1 { ExecutionEnd::Retryable } else { ExecutionEnd::Permanent };
    Failure::new(end, StopReason::UpstreamError, what)
}

/// Whether a body is an error in spite of its status.
pub(in crate::execute) fn is_error(body: &Value, result: &str) -> bool {
    let error = body.get("error").is_some_and(|error| !error.is_null());
    error && body.get(result).is_none()
}

/// What an error object in a success says.
pub(in crate::execute) fn error_text(body: &Value) -> String {
    let quoted: String = body["error"].to_string().chars().take(QUOTED_CHARS).collect();
    quoted
}
