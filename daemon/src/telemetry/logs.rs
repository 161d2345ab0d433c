//! Log lines: text for people, JSON for machines. Either way every line inside a lease carries the
//! ids of its item, lease and trace, flat beside the fields of the event.

use std::error::Error;
use std::fmt;
use std::sync::{Arc, OnceLock};

use opentelemetry::trace::TraceContextExt;
use serde::Serializer;
use serde_json::{Map, Value};
use tracing::dispatcher::WeakDispatch;
use tracing::field::{Field, Visit};
use tracing::{Dispatch, Event, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::fmt::format::{JsonFields, Writer};
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormattedFields};
use tracing_subscriber::registry::{LookupSpan, Scope, SpanRef};

use super::names;

/// How log lines look. Default `text`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// `time LEVEL target: message key=value …`.
    #[default]
    Text,
    /// One JSON object per line.
    Json,
}

/// The dispatcher a [`Line`] belongs to, needed to ask for the trace of a span.
#[derive(Clone, Debug, Default)]
pub(super) struct OwnDispatch(Arc<OnceLock<WeakDispatch>>);

impl<S: Subscriber> Layer<S> for OwnDispatch {
    fn on_register_dispatch(&self, dispatch: &Dispatch) {
        // Registered a second time, it is the same subscriber: the first handle serves as well.
        let _ = self.0.set(dispatch.downgrade());
    }
}

/// Writes one event as one line.
pub(super) struct Line {
    pub(super) format: LogFormat,
    pub(super) dispatch: OwnDispatch,
}

impl<S> FormatEvent<S, JsonFields> for Line
where
    S: Subscriber + for<'a> LookupSpan<'a>,
{
    fn format_event(
        &self,
        ctx: &FmtContext<'_, S, JsonFields>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let mut time = String::new();
        SystemTime.format_time(&mut Writer::new(&mut time))?;
        let mut fields = Fields::default();
        event.record(&mut fields);
        let mut spans = Map::new();
        for span in ctx.event_scope().into_iter().flat_map(Scope::from_root) {
            collect_span(&span, &mut spans);
        }
        for (name, value) in spans {
            fields.add_missing(&name, value);
        }
        if let Some(span) = ctx.event_scope().and_then(|mut spans| spans.next()) {
            self.collect_trace(&span, &mut fields);
        }
        let meta = event.metadata();
        // An event of the `log` crate has its target in a field.
        let target = fields.log_target.take().unwrap_or_else(|| meta.target().to_owned());
        let head = Head { time: &time, level: meta.level().as_str(), target: &target };
        match self.format {
            LogFormat::Text => text_line(&mut writer, &head, &fields),
            LogFormat::Json => json_line(&mut writer, &head, &fields),
        }
    }
}

impl Line {
    fn collect_trace<'a, S: LookupSpan<'a>>(&self, span: &SpanRef<'a, S>, fields: &mut Fields) {
        let context = self
            .dispatch
            .0
            .get()
            .and_then(WeakDispatch::upgrade)
            .and_then(|own| tracing_opentelemetry::get_otel_context(&span.id(), &own));
        let Some(context) = context else { return };
        let span = context.span();
        let ids = span.span_context();
        if ids.is_valid() {
            fields.add_missing("trace_id", ids.trace_id().to_string().into());
            fields.add_missing("span_id", ids.span_id().to_string().into());
        }
    }
}

/// Adds a span's fields under the names they have in logs; those of inner spans win.
fn collect_span<'a, S: LookupSpan<'a>>(span: &SpanRef<'a, S>, into: &mut Map<String, Value>) {
    let extensions = span.extensions();
    let Some(json) = extensions.get::<FormattedFields<JsonFields>>() else { return };
    let Ok(fields) = serde_json::from_str::<Map<String, Value>>(json) else { return };
    for (name, value) in fields {
        if let Some(name) = names::in_logs(&name) {
            into.insert(name.to_owned(), value);
        }
    }
}

struct Head<'a> {
    time: &'a str,
    level: &'a str,
    target: &'a str,
}

/// The message and the fields of an event, in the order they were given.
#[derive(Default)]
struct Fields {
    message: String,
    log_target: Option<String>,
    rest: Vec<(String, Value)>,
}

impl Fields {
    fn add(&mut self, field: &Field, value: Value) {
        match (field.name(), value) {
            ("message", Value::String(text)) => self.message = text,
            ("log.target", Value::String(text)) => self.log_target = Some(text),
            (name, _) if name.starts_with("log.") => {}
            (name, value) => self.rest.push((name.to_owned(), value)),
        }
    }

    fn add_missing(&mut self, name: &str, value: Value) {
        if !self.rest.iter().any(|(taken, _)| taken == name) {
            self.rest.push((name.to_owned(), value));
        }
    }
}

impl Visit for Fields {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.add(field, value.into());
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.add(field, value.into());
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.add(field, value.into());
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.add(field, value.into());
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.add(field, value.into());
    }

    /// An error is shown with its whole chain of causes.
    fn record_error(&mut self, field: &Field, value: &(dyn Error + 'static)) {
        let mut text = value.to_string();
        let mut cause = value.source();
        while let Some(error) = cause {
            text = format!("{text}: {error}");
            cause = error.source();
        }
        self.add(field, text.into());
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.add(field, format!("{value:?}").into());
    }
}

fn json_line(writer: &mut Writer<'_>, head: &Head<'_>, fields: &Fields) -> fmt::Result {
    let fixed = [
        ("timestamp", Value::from(head.time)),
        ("level", head.level.into()),
        ("target", head.target.into()),
        ("message", fields.message.as_str().into()),
    ];
    let mut line = Vec::new();
    serde_json::Serializer::new(&mut line)
        .collect_map(
            fixed
                .iter()
                .map(|(name, value)| (*name, value))
                .chain(fields.rest.iter().map(|(name, value)| (name.as_str(), value))),
        )
        .map_err(|_| fmt::Error)?;
    writeln!(writer, "{}", String::from_utf8(line).map_err(|_| fmt::Error)?)
}

fn text_line(writer: &mut Writer<'_>, head: &Head<'_>, fields: &Fields) -> fmt::Result {
    write!(writer, "{} {:>5} {}: ", head.time, head.level, head.target)?;
    write_visible(writer, &fields.message)?;
    for (name, value) in &fields.rest {
        match value.as_str() {
            Some(text) if is_one_word(text) => write!(writer, " {name}={text}")?,
            // Debug escapes control characters too, so that text of a job cannot forge a line.
            Some(text) => write!(writer, " {name}={text:?}")?,
            None => write!(writer, " {name}={value}")?,
        }
    }
    writeln!(writer)
}

fn is_one_word(text: &str) -> bool {
    let odd = |c: char| c.is_whitespace() || c.is_control() || c == '"' || c == '=';
    !text.is_empty() && !text.contains(odd)
}

/// Writes `text` with its control characters escaped, so that it stays on its line.
fn write_visible(writer: &mut Writer<'_>, text: &str) -> fmt::Result {
    for c in text.chars() {
        if c.is_control() {
            write!(writer, "{}", c.escape_default())?;
        } else {
            writer.write_char(c)?;
        }
    }
    Ok(())
}

#[cfg(test)]
pub(super) mod tests {
    use std::io::{self, Write};
    use std::sync::Mutex;

    use super::*;
    use crate::model::{
        BatchId, FencingToken, History, Hold, ItemRef, LeaseId, Position, QueueName,
    };
    use crate::telemetry::trace::{self, Origins};
    use crate::telemetry::{LogSettings, TraceSettings, subscriber};

    #[derive(Clone, Default)]
    struct Sink(Arc<Mutex<Vec<u8>>>);

    impl Write for Sink {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    pub(in super::super) fn lines_of(
        level: &str,
        format: LogFormat,
        work: impl FnOnce(),
    ) -> Vec<String> {
        let sink = Sink::default();
        let writer = sink.clone();
        let logs = LogSettings { level: level.to_owned(), format };
        let (subscriber, _guard) =
            subscriber(&logs, &TraceSettings::none(), move || writer.clone()).unwrap();
        tracing::subscriber::with_default(subscriber, work);
        let text = String::from_utf8(sink.0.lock().unwrap().clone()).unwrap();
        text.lines().map(str::to_owned).collect()
    }

    fn json_of(work: impl FnOnce()) -> Value {
        let lines = lines_of("info", LogFormat::Json, work);
        assert_eq!(lines.len(), 1, "{lines:?}");
        serde_json::from_str(&lines[0]).unwrap()
    }

    fn hold() -> (QueueName, Hold) {
        let item = ItemRef::new(BatchId::generate(), Position::new(7));
        let token = FencingToken::new(9_007_199_254_740_993);
        let hold = Hold::new(item, LeaseId::generate(), token, History::default());
        ("checksum".parse().unwrap(), hold)
    }

    #[test]
    fn a_line_inside_a_lease_carries_its_ids() {
        let (queue, hold) = hold();

        let line = json_of(|| {
            let lease = trace::lease_span(&queue, &hold, Origins::default());
            let process = trace::process_span(&lease, &queue, None);
            process.in_scope(|| tracing::info!(pid = 42, "command started"));
        });

        assert_eq!(line["level"], "INFO");
        assert_eq!(line["message"], "command started");
        assert_eq!(line["pid"], 42);
        assert_eq!(line["queue"], "checksum");
        assert_eq!(line["batch"], hold.item().batch().to_string());
        assert_eq!(line["position"], 7);
        assert_eq!(line["lease"], hold.lease().to_string());
        assert_eq!(line["token"], "9007199254740993", "digits kept: a string");
        assert_eq!(line["attempt"], 1);
        let members: Vec<&String> = line.as_object().unwrap().keys().collect();
        assert!(members.iter().all(|name| !name.contains('.')), "{members:?}");
    }

    #[test]
    fn a_text_line_carries_them_too() {
        let (queue, hold) = hold();

        let lines = lines_of("info", LogFormat::Text, || {
            let lease = trace::lease_span(&queue, &hold, Origins::default());
            trace::check_span(&lease, &queue, 2).in_scope(|| tracing::info!("checking"));
        });

        let (batch, lease) = (hold.item().batch(), hold.lease());
        for id in [
            format!(" batch={batch}"),
            format!(" lease={lease}"),
            " position=7".to_owned(),
            " token=9007199254740993".to_owned(),
            " queue=checksum".to_owned(),
        ] {
            assert!(lines[0].contains(&id), "{id}: {lines:?}");
        }
        assert!(!lines[0].contains("wait_s") && !lines[0].contains("criteria"), "{lines:?}");
    }

    #[test]
    fn the_ids_are_there_at_every_log_level() {
        let (queue, hold) = hold();

        let lines = lines_of("warn", LogFormat::Json, || {
            let lease = trace::lease_span(&queue, &hold, Origins::default());
            lease.in_scope(|| {
                tracing::info!("left out");
                tracing::warn!("lease lost");
            });
        });

        assert_eq!(lines.len(), 1, "{lines:?}");
        assert!(lines[0].contains(&hold.lease().to_string()), "{}", lines[0]);
    }

    #[test]
    fn the_time_is_utc_in_rfc_3339() {
        let line = json_of(|| tracing::info!("hello"));

        let text = line["timestamp"].as_str().unwrap();
        assert!(text.ends_with('Z'), "{text}");
        let format = &time::format_description::well_known::Rfc3339;
        time::OffsetDateTime::parse(text, format).unwrap();
    }

    #[test]
    fn an_error_is_logged_with_its_causes() {
        #[derive(Debug, thiserror::Error)]
        #[error("renew lease")]
        struct Outer(#[source] io::Error);

        let error = Outer(io::Error::other("connection reset"));
        let line = json_of(|| tracing::warn!(error = &error as &dyn Error, "heartbeat failed"));

        assert_eq!(line["error"], "renew lease: connection reset");
    }

    #[test]
    fn a_field_of_the_event_wins_over_one_of_its_spans() {
        let (queue, hold) = hold();

        let line = json_of(|| {
            trace::lease_span(&queue, &hold, Origins::default())
                .in_scope(|| tracing::warn!(token = "5", "refused"));
        });

        assert_eq!(line["token"], "5");
    }

    #[test]
    fn a_text_line_stays_one_line_whatever_a_job_says() {
        let evil = "done\n2026-01-01T00:00:00Z ERROR forged: \u{9b}31m";

        let lines = lines_of("info", LogFormat::Text, || tracing::info!(output = evil, "{evil}"));

        assert_eq!(lines.len(), 1, "{lines:?}");
        assert!(!lines[0].contains(char::is_control), "{:?}", lines[0]);
    }

    #[test]
    fn a_text_line_reads_as_words_and_pairs() {
        let lines = lines_of("info", LogFormat::Text, || {
            tracing::info!(target: "holdfast::claim", queue = "a", held = 3, why = "no slot", "idle");
        });

        let (_, rest) = lines[0].split_once(' ').unwrap();
        assert_eq!(rest, " INFO holdfast::claim: idle queue=a held=3 why=\"no slot\"");
    }
}
