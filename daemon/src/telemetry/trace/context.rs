use std::fmt;
use std::str::FromStr;

use opentelemetry::trace::{SpanContext, SpanId, TraceContextExt, TraceFlags, TraceId, TraceState};
use sha2::{Digest, Sha256};
use tracing::Span;
use tracing_opentelemetry::OpenTelemetrySpanExt;

use crate::model::{FencingToken, ItemRef};

/// A place in a trace, as it travels: the `traceparent` of W3C Trace Context, version 00.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceContext(SpanContext);

/// A text that is no `traceparent` of version 00. What it was is not said: it came from outside.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a traceparent of version 00")]
pub struct InvalidTraceparent;

impl TraceContext {
    /// The context of `span`; none when spans are not exported.
    #[must_use]
    pub fn of(span: &Span) -> Option<Self> {
        let context = span.context();
        let span = context.span();
        span.span_context().is_valid().then(|| Self(span.span_context().clone()))
    }

    /// The context of the span this code runs in, for the environment or the headers of what it
    /// starts; none when spans are not exported.
    #[must_use]
    pub fn current() -> Option<Self> {
        Self::of(&Span::current())
    }

    /// The place of the `lease` span of one hold, which is the same everywhere and at any time. Not
    /// sampled, because that is not known here.
    #[expect(clippy::missing_panics_doc, reason = "ruled out by what is given")]
    #[must_use]
    pub fn of_hold(item: ItemRef, token: FencingToken) -> Self {
        let digest = Sha256::new()
            .chain_update(item.batch().uuid().as_bytes())
            .chain_update(item.position().get().to_be_bytes())
            .chain_update(token.get().to_be_bytes())
            .finalize();
        let (trace, rest) = digest.split_first_chunk().expect("a digest has 32 bytes");
        let span = rest.first_chunk().expect("of which 16 are left");
        let state = TraceState::NONE;
        let (trace, span) = (TraceId::from_bytes(*trace), SpanId::from_bytes(*span));
        Self(SpanContext::new(trace, span, TraceFlags::default(), true, state))
    }

    /// The trace.
    #[must_use]
    pub fn trace_id(&self) -> TraceId {
        self.0.trace_id()
    }

    pub(super) fn span_context(&self) -> &SpanContext {
        &self.0
    }
}

impl FromStr for TraceContext {
    type Err = InvalidTraceparent;

    /// Accepts the shape of version 00 only: 55 characters, lower-case hex, ids that are not zero.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let hex =
            |part: &str| part.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b));
        let parts: Vec<&str> = text.split('-').collect();
        let [version @ "00", trace, span, flags] = parts[..] else {
            return Err(InvalidTraceparent);
        };
        let shape = [version, trace, span, flags].map(str::len);
        if shape != [2, 32, 16, 2] || ![trace, span, flags].into_iter().all(hex) {
            return Err(InvalidTraceparent);
        }
        let flags = u8::from_str_radix(flags, 16).map_err(|_| InvalidTraceparent)?;
        let context = SpanContext::new(
            TraceId::from_hex(trace).map_err(|_| InvalidTraceparent)?,
            SpanId::from_hex(span).map_err(|_| InvalidTraceparent)?,
            // Only the sampled flag has a meaning in version 00.
            TraceFlags::new(flags) & TraceFlags::SAMPLED,
            true,
            TraceState::NONE,
        );
        if context.is_valid() { Ok(Self(context)) } else { Err(InvalidTraceparent) }
    }
}

impl fmt::Display for TraceContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(context) = self;
        let flags = context.trace_flags() & TraceFlags::SAMPLED;
        write!(f, "00-{}-{}-{flags:02x}", context.trace_id(), context.span_id())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{BatchId, Position};

    const VALID: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

    #[test]
    fn a_valid_traceparent_survives_unchanged() {
        for text in [VALID, "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"] {
            assert_eq!(text.parse::<TraceContext>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn each_hold_has_a_place_of_its_own_that_can_be_found_again() {
        let batch = BatchId::from_uuid("0190d0a4-7c1e-7000-8000-000000000001".parse().unwrap());
        let place = |position, token| {
            let item = ItemRef::new(batch, Position::new(position));
            TraceContext::of_hold(item, FencingToken::new(token)).to_string()
        };

        // Workers of all versions must agree on it.
        assert_eq!(place(3, 77), "00-4f7afb3afe9c048753df6799ec509823-3af7606736fc1ddd-00");
        assert_ne!(place(3, 78), place(3, 77));
        assert_ne!(place(4, 77), place(3, 77));
    }

    #[test]
    fn unknown_flags_are_dropped() {
        let text = VALID.replace("-01", "-ff");
        assert_eq!(text.parse::<TraceContext>().unwrap().to_string(), VALID);
    }

    #[test]
    fn anything_else_is_refused() {
        for text in [
            "",
            "00",
            "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "01-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "00-00000000000000000000000000000000-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
            "00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b716920333-001",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-1",
            "00-+af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-x",
            " 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\n",
        ] {
            assert_eq!(text.parse::<TraceContext>(), Err(InvalidTraceparent), "{text:?}");
        }
    }
}
