//! Ids of spans: random, but for those that are to be known elsewhere.

use std::cell::Cell;

use opentelemetry::trace::{SpanId, TraceId};
use opentelemetry_sdk::trace::{IdGenerator, RandomIdGenerator};
use tracing::Span;
use tracing_opentelemetry::OpenTelemetrySpanExt;

use super::TraceContext;

thread_local! {
    /// The ids of the root that begins on this thread now.
    static NEXT: Cell<Option<(TraceId, SpanId)>> = const { Cell::new(None) };
}

/// Begins the root `span`, whose links are complete, in the place of `context`.
pub(super) fn begin_with(context: &TraceContext, span: &Span) {
    let ids = context.span_context();
    NEXT.set(Some((ids.trace_id(), ids.span_id())));
    // An exported span begins when it is first asked for its context.
    let _ = span.context();
    NEXT.set(None);
}

/// Makes the ids of exported spans.
#[derive(Debug, Default)]
pub(in crate::telemetry) struct Ids(RandomIdGenerator);

impl IdGenerator for Ids {
    fn new_trace_id(&self) -> TraceId {
        NEXT.get().map_or_else(|| self.0.new_trace_id(), |(trace, _)| trace)
    }

    fn new_span_id(&self) -> SpanId {
        NEXT.get().map_or_else(|| self.0.new_span_id(), |(_, span)| span)
    }
}
