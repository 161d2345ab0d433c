//! Spans: one trace per lease, one `process` span per execution, and a few around them.
//!
//! A `lease` span is a root. The submit may be hours older and one batch fans out to thousands of
//! items, so it is joined to the submit by a link, not as its child. Without an exporter the spans
//! still give log lines their ids.
//!
//! A span is exported when it ends, so a worker that is killed exports none of what it held. The
//! ids of a `lease` span follow from its item and token ([`TraceContext::of_hold`]): whoever takes
//! the item back, and whoever holds it next, names them without having been told.

mod context;
mod ids;

use std::time::Duration;

use opentelemetry::trace::TraceContextExt;
use opentelemetry::{Context, KeyValue};
use tracing::{Span, info_span};
use tracing_opentelemetry::OpenTelemetrySpanExt;

pub use self::context::{InvalidTraceparent, TraceContext};
pub(super) use self::ids::Ids;
use super::labels::{ExecutionOutcome, FenceReason, LostReason, ReleaseReason};
use super::names;
use crate::model::{
    BatchId, FencingToken, Finding, Hold, ItemRef, PreviousAttempt, QueueName, Verdict,
    VerdictClass, WorkerId,
};

/// Links of one span at most; what is beyond it is counted only.
const LINKS: usize = 32;

/// What a `lease` span is linked to.
#[derive(Clone, Copy, Debug, Default)]
pub struct Origins<'a> {
    /// The batch's stored creation context.
    pub submitted: Option<&'a TraceContext>,
    /// The claim that granted it.
    pub claim: Option<&'a TraceContext>,
    /// The attempt of the item before this one.
    pub previous: Option<&'a PreviousAttempt>,
}

macro_rules! span {
    ($(parent: $parent:expr,)? $name:literal, $kind:literal, $display:expr, $($fields:tt)*) => {
        info_span!(
            target: names::SPAN_TARGET,
            $(parent: $parent,)?
            $name,
            { names::OTEL_NAME } = %$display,
            { names::OTEL_KIND } = $kind,
            { names::OTEL_STATUS } = tracing::field::Empty,
            { names::ERROR_TYPE } = tracing::field::Empty,
            { names::SYSTEM } = "holdfast",
            $($fields)*
        )
    };
}

/// The span of one item's lease, from its grant to its end: the root of the attempt's trace. It has
/// begun when this returns, with the ids of [`TraceContext::of_hold`].
#[must_use]
pub fn lease_span(queue: &QueueName, hold: &Hold, origins: Origins<'_>) -> Span {
    let Origins { submitted, claim, previous } = origins;
    let item = hold.item();
    let span = span!(
        parent: None, "lease", "internal", format_args!("lease {queue}"),
        { names::QUEUE } = queue.as_str(),
        { names::BATCH } = %item.batch(),
        { names::ITEM } = %item,
        { names::POSITION } = item.position().get(),
        { names::LEASE } = %hold.lease(),
        { names::TOKEN } = %hold.token(),
        { names::ATTEMPT } = hold.attempt().get(),
        { names::LEASE_END } = tracing::field::Empty,
        { names::SUBMIT_TRACE } = submitted.map(|context| tracing::field::display(context.trace_id())),
    );
    for context in submitted.into_iter().chain(claim) {
        link(&span, context);
    }
    if let Some(previous) = previous {
        // Its holder may be dead: what is known of its end is said here.
        let known = vec![
            KeyValue::new(names::TOKEN, previous.token.to_string()),
            KeyValue::new(names::ATTEMPT_ENDING, previous.ending.clone()),
            KeyValue::new(names::WORKER, previous.worker.to_string()),
        ];
        let context = TraceContext::of_hold(item, previous.token);
        span.add_link_with_attributes(context.span_context().clone(), known);
    }
    ids::begin_with(&TraceContext::of_hold(item, hold.token()), &span);
    span
}

/// The span of one execution, a child of its lease's span.
#[must_use]
pub fn process_span(lease: &Span, queue: &QueueName, submitted: Option<&TraceContext>) -> Span {
    let span = span!(
        parent: lease, "process", "consumer", format_args!("process {queue}"),
        { names::OPERATION } = "process",
        { names::QUEUE } = queue.as_str(),
        { names::EXECUTION_OUTCOME } = tracing::field::Empty,
    );
    if let Some(context) = submitted {
        link(&span, context);
    }
    span
}

/// The span of one command, a child of the execution's span this code runs in. `program` is the
/// name of its file, without folder or arguments.
#[must_use]
pub fn exec_span(program: &str) -> Span {
    span!(
        "exec",
        "internal",
        format_args!("exec {program}"),
        { names::EXECUTABLE } = program,
        { names::EXIT_CODE } = tracing::field::Empty,
        { names::EXIT_SIGNAL } = tracing::field::Empty,
    )
}

/// The command ended: with a status, or by a signal. What that means is said of its execution.
pub fn exec_ended(exec: &Span, status: Option<i32>, signal: Option<i32>) {
    exec.record(names::EXIT_CODE, status);
    exec.record(names::EXIT_SIGNAL, signal);
    end_now(exec);
}

/// The span of one check, from its wish for a slot to its end; a child of its lease's span.
#[must_use]
pub fn check_span(lease: &Span, queue: &QueueName, criteria: usize) -> Span {
    span!(
        parent: lease, "check", "internal", format_args!("check {queue}"),
        { names::QUEUE } = queue.as_str(),
        { names::CHECK_CRITERIA } = criteria,
        { names::CHECK_WAITED } = tracing::field::Empty,
        { names::CHECK_VERDICT } = tracing::field::Empty,
    )
}

/// The check has its slot, after this wait.
pub fn check_begins(check: &Span, waited: Duration) {
    check.record(names::CHECK_WAITED, waited.as_secs_f64());
}

/// The check ended, or was given up. Of a criterion that is not met the span tells the place in the
/// list; its text may be confidential.
pub fn check_ended(check: &Span, verdict: Option<&Verdict>) {
    check.record(names::CHECK_VERDICT, VerdictClass::of(verdict).as_str());
    let leaves = verdict.into_iter().flat_map(|verdict| (0_i64..).zip(verdict.leaves()));
    for (index, _) in leaves.filter(|(_, leaf)| leaf.finding() == Finding::DoesNotHold) {
        let place = vec![KeyValue::new(names::CRITERION_INDEX, index)];
        check.add_event("holdfast.check.criterion_failed", place);
    }
    end_now(check);
}

/// The span of one claim call. Say what it granted with [`item_count`], or that it went wrong with
/// [`failed`]; a claim that found nothing is [`uneventful`].
#[must_use]
pub fn claim_span(queue: &QueueName, worker: WorkerId) -> Span {
    span!(
        parent: None, "claim", "client", format_args!("claim {queue}"),
        { names::OPERATION } = "receive",
        { names::QUEUE } = queue.as_str(),
        { names::WORKER } = %worker,
        { names::ITEM_COUNT } = tracing::field::Empty,
    )
}

/// What a settlement does with an item.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Settle {
    /// Publishes a success.
    Complete,
    /// Publishes a failure, or records an attempt that failed.
    Fail,
    /// Gives the item back.
    Release,
    /// Publishes a success after its check.
    Verdict,
}

impl Settle {
    /// The first word of the span's name.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Complete => "complete",
            Self::Fail => "fail",
            Self::Release => "release",
            Self::Verdict => "verdict",
        }
    }
}

/// The span of handing one item in, from the wish to the answer; a child of its lease's span.
/// `reason` is from a closed set.
#[must_use]
pub fn settle_span(lease: &Span, queue: &QueueName, settle: Settle, reason: &'static str) -> Span {
    span!(
        parent: lease, "settle", "client", format_args!("{} {queue}", settle.as_str()),
        { names::OPERATION } = "settle",
        { names::QUEUE } = queue.as_str(),
        { names::SETTLE_REASON } = reason,
    )
}

/// The hand-in was answered; `refused` says why the fence did not let it pass. A cancel is no error.
pub fn settled(settle: &Span, refused: Option<FenceReason>) {
    if let Some(reason) = refused {
        let why = vec![KeyValue::new(names::SETTLE_REASON, reason.as_str())];
        settle.add_event("fence_rejected", why);
        if reason != FenceReason::Cancelled {
            failed(settle, "fence_rejected");
        }
    }
    end_now(settle);
}

/// The span of taking expired leases of one queue back, linked to those that ended with them.
#[must_use]
pub fn recover_span(queue: &QueueName, taken: &[(ItemRef, FencingToken)]) -> Span {
    let span = span!(
        parent: None, "recover", "internal", format_args!("recover {queue}"),
        { names::QUEUE } = queue.as_str(),
        { names::ITEM_COUNT } = taken.len(),
    );
    for &(item, token) in taken.iter().take(LINKS) {
        link(&span, &TraceContext::of_hold(item, token));
    }
    span
}

/// The span of a control command (`pause`, `resume`, `cancel`, `retry`), continuing the trace of
/// `caller`.
#[must_use]
pub fn control_span(verb: &'static str, batch: BatchId, caller: Option<&TraceContext>) -> Span {
    let span = span!(
        "control", "client", format_args!("control {verb}"),
        { names::CONTROL_VERB } = verb,
        { names::BATCH } = %batch,
        { names::ITEM_COUNT } = tracing::field::Empty,
    );
    continue_trace(&span, caller);
    span
}

/// The span of a submit, continuing the trace of `caller`: its context, stored with the batch, is
/// the creation context of every item.
#[must_use]
pub fn send_span(queue: &QueueName, batch: BatchId, caller: Option<&TraceContext>) -> Span {
    let span = span!(
        "send", "producer", format_args!("send {queue}"),
        { names::OPERATION } = "send",
        { names::QUEUE } = queue.as_str(),
        { names::BATCH } = %batch,
        { names::ITEM_COUNT } = tracing::field::Empty,
    );
    continue_trace(&span, caller);
    span
}

/// Links a span to work elsewhere. Do it before anything is logged inside the span: a sampled link
/// makes the sampler keep it.
pub fn link(span: &Span, to: &TraceContext) {
    span.add_link(to.span_context().clone());
}

/// A claim granted, a submit stored or a retry moved this many items.
pub fn item_count(span: &Span, items: usize) {
    span.record(names::ITEM_COUNT, items);
}

/// The item left its lease on purpose.
pub fn lease_released(lease: &Span, reason: ReleaseReason) {
    lease.record(names::LEASE_END, reason.as_str());
    end_now(lease);
}

/// The item was given up. Losing it to a cancel is no error.
pub fn lease_lost(lease: &Span, reason: LostReason) {
    lease.record(names::LEASE_END, reason.as_str());
    if reason != LostReason::Cancelled {
        failed(lease, reason.as_str());
    }
    end_now(lease);
}

/// The execution ended. Being stopped, by a cancel or a drain, is no error.
pub fn execution_ended(process: &Span, outcome: ExecutionOutcome) {
    process.record(names::EXECUTION_OUTCOME, outcome.as_str());
    match outcome {
        ExecutionOutcome::Failed | ExecutionOutcome::TimedOut | ExecutionOutcome::Lost => {
            failed(process, outcome.as_str());
        }
        ExecutionOutcome::Succeeded
        | ExecutionOutcome::Cancelled
        | ExecutionOutcome::Interrupted => {}
    }
    end_now(process);
}

/// What the span stands for went wrong. `error_type` is from a closed set, never a message.
pub fn failed(span: &Span, error_type: &'static str) {
    span.record(names::OTEL_STATUS, "ERROR");
    span.record(names::ERROR_TYPE, error_type);
}

/// Nothing happened in this span: it is not exported.
pub fn uneventful(span: &Span) {
    span.set_attribute(names::UNEVENTFUL, true);
}

/// An exported span ends when it was last left, not when it is dropped: leave it once more.
fn end_now(span: &Span) {
    span.in_scope(|| ());
}

fn continue_trace(span: &Span, caller: Option<&TraceContext>) {
    if let Some(caller) = caller {
        // Refused without an exporter, where nothing is lost by it.
        let _ =
            span.set_parent(Context::new().with_remote_span_context(caller.span_context().clone()));
    }
}

pub(super) fn is_uneventful(attributes: &[KeyValue]) -> bool {
    attributes.iter().any(|attribute| attribute.key.as_str() == names::UNEVENTFUL)
}
