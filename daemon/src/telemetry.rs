//! Every metric, span and log line of the daemon: their names, and the ways out.
//!
//! Ids go to spans and logs, never to metric labels; payloads and secrets go to none of them.

mod export;
pub mod labels;
pub mod logs;
pub mod metrics;
pub mod names;
pub mod trace;

use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use opentelemetry::trace::TracerProvider;
use opentelemetry_otlp::ExporterBuildError;
use opentelemetry_sdk::trace::SdkTracerProvider;
use prometheus::IntCounter;
use tracing::Subscriber;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::filter::{EnvFilter, FilterExt, ParseError, Targets, filter_fn};
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::fmt::format::JsonFields;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::{SubscriberInitExt, TryInitError};
use tracing_subscriber::{Layer, Registry, reload};

pub use self::logs::LogFormat;
pub use self::metrics::{BuildInfo, Metrics};

/// What is logged, and how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogSettings {
    /// A level (`info`), or directives by module (`info,holdfast::claim=debug`).
    pub level: String,
    /// The shape of a line.
    pub format: LogFormat,
}

/// Where spans go, and which.
#[derive(Clone, Debug)]
pub struct TraceSettings {
    /// URL of an OTLP collector that speaks gRPC; none exports nothing. Credentials do not belong
    /// here but into `OTEL_EXPORTER_OTLP_HEADERS`.
    pub otlp_endpoint: Option<String>,
    /// Share of traces kept, 0 to 1.
    pub sample_ratio: f64,
    /// Whether a trace is kept, whatever that share, when it is linked to one that was, or begins
    /// below one.
    pub sample_linked: bool,
    /// `service.name` of the spans, such as `holdfast-worker`.
    pub service_name: String,
    /// `service.instance.id` of the spans: new at every process start.
    pub instance_id: String,
    /// How long the end waits for the last spans to be delivered.
    pub flush: Duration,
    /// Counts the spans that were not.
    pub dropped: IntCounter,
}

impl TraceSettings {
    /// Spans that go nowhere.
    #[must_use]
    pub fn none() -> Self {
        Self {
            otlp_endpoint: None,
            sample_ratio: 0.0,
            sample_linked: false,
            service_name: String::new(),
            instance_id: String::new(),
            flush: Duration::ZERO,
            dropped: uncounted(),
        }
    }
}

/// Counts dropped spans in a process that has no metrics.
#[expect(clippy::missing_panics_doc, reason = "ruled out by what is given")]
#[must_use]
pub fn uncounted() -> IntCounter {
    IntCounter::new(names::TELEMETRY_DROPPED, "spans").expect("a valid name")
}

/// Why telemetry could not be set up. All of them are faults of the configuration.
#[derive(Debug, thiserror::Error)]
pub enum TelemetryError {
    /// The log level cannot be read.
    #[error("`{level}` is no log level")]
    Level {
        /// What was given.
        level: String,
        /// What is wrong with it.
        #[source]
        source: ParseError,
    },
    /// The endpoint has another form. It is not repeated here, for it may hold a password.
    #[error("the OTLP endpoint must be http:// or https:// and a host, without user and password")]
    Endpoint,
    /// The exporter cannot be built.
    #[error("prepare the export of spans")]
    Exporter {
        /// What is wrong.
        #[source]
        source: ExporterBuildError,
    },
    /// This process logs elsewhere already.
    #[error("install the log subscriber")]
    Installed {
        /// What was in the way.
        #[source]
        source: TryInitError,
    },
}

/// Ends the export of spans. Without [`shutdown`](Self::shutdown) the last of them are lost.
#[derive(Debug)]
#[must_use = "the last spans are delivered by its `shutdown`"]
pub struct TelemetryGuard {
    export: Option<Export>,
    level: LogLevel,
}

#[derive(Debug)]
struct Export {
    provider: SdkTracerProvider,
    queue: Arc<export::Queue>,
    flush: Duration,
}

/// Sets another level, or other directives, while the process runs. Cheap to clone.
#[derive(Clone)]
pub struct LogLevel(Arc<dyn Fn(EnvFilter) + Send + Sync>);

impl LogLevel {
    /// Logs by this level from now on.
    ///
    /// # Errors
    /// It cannot be read; nothing was changed.
    pub fn set(&self, level: &str) -> Result<(), TelemetryError> {
        (self.0)(log_filter(level)?);
        Ok(())
    }
}

impl fmt::Debug for LogLevel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("LogLevel")
    }
}

impl TelemetryGuard {
    /// The way to another level.
    #[must_use]
    pub fn log_level(&self) -> LogLevel {
        self.level.clone()
    }

    /// Delivers the spans still queued, for at most [`TraceSettings::flush`] and half a second; what
    /// a slow or dead collector has not taken by then is lost.
    ///
    /// # Cancel safety
    /// Safe: the delivery goes on without a waiter, and ends with the process.
    pub async fn shutdown(self) {
        let Some(Export { provider, queue, flush }) = self.export else { return };
        let (done, delivered) = tokio::sync::oneshot::channel();
        // It blocks. A thread of the runtime would make the runtime's end wait for it.
        let thread = std::thread::Builder::new().name("telemetry-flush".into()).spawn(move || {
            let _ = done.send(provider.shutdown_with_timeout(flush));
        });
        let limit = flush + Duration::from_millis(500);
        let in_time = thread.is_ok()
            && matches!(tokio::time::timeout(limit, delivered).await, Ok(Ok(Ok(()))));
        let left = queue.give_up();
        if !in_time || left > 0 {
            tracing::warn!(spans = left, "the last spans may not have reached the collector");
        }
    }
}

/// Sends logs to standard error and spans to the collector, for the whole process. Call it once,
/// inside the runtime.
///
/// # Errors
/// The settings cannot be used, or it was called before.
pub fn init(logs: &LogSettings, traces: &TraceSettings) -> Result<TelemetryGuard, TelemetryError> {
    let (subscriber, guard) = subscriber(logs, traces, io::stderr)?;
    subscriber.try_init().map_err(|source| TelemetryError::Installed { source })?;
    Ok(guard)
}

/// What [`init`] installs, with log lines going to `writer`, to be installed by the caller.
///
/// # Errors
/// The settings cannot be used.
pub fn subscriber<W>(
    logs: &LogSettings,
    traces: &TraceSettings,
    writer: W,
) -> Result<(impl Subscriber + Send + Sync + use<W>, TelemetryGuard), TelemetryError>
where
    W: for<'a> MakeWriter<'a> + Send + Sync + 'static,
{
    let (filter, handle) = reload::Layer::new(log_filter(&logs.level)?);
    let export = traces
        .otlp_endpoint
        .as_deref()
        .map(|endpoint| span_export(endpoint, traces))
        .transpose()?;
    let spans = export.as_ref().map(|export| {
        tracing_opentelemetry::layer()
            .with_tracer(export.provider.tracer(names::SCOPE))
            .with_location(false)
            .with_threads(false)
            .with_tracked_inactivity(false)
            .with_context_activation(false)
            // Spans of the exporter's own connection would feed themselves.
            .with_filter(Targets::new().with_target("holdfast", LevelFilter::INFO))
    });
    let dispatch = logs::OwnDispatch::default();
    let lines = tracing_subscriber::fmt::layer()
        .fmt_fields(JsonFields::new())
        .event_format(logs::Line { format: logs.format, dispatch: dispatch.clone() })
        .with_writer(writer)
        .with_filter(filter.and(filter_fn(|event| !export::is_repetition(event))));
    let subscriber = Registry::default().with(spans).with(dispatch).with(lines);
    let level = LogLevel(Arc::new(move |filter| {
        // It fails only where the subscriber is gone, and with it everything that it could filter.
        drop(handle.reload(filter));
    }));
    Ok((subscriber, TelemetryGuard { export, level }))
}

fn span_export(endpoint: &str, settings: &TraceSettings) -> Result<Export, TelemetryError> {
    let host = endpoint.strip_prefix("http://").or_else(|| endpoint.strip_prefix("https://"));
    // The user name and password of a URL would end up in messages of the exporter.
    if host.is_none_or(|host| host.is_empty() || host.contains('@')) {
        return Err(TelemetryError::Endpoint);
    }
    let queue = Arc::new(export::Queue::new(settings.dropped.clone()));
    let provider = export::provider(endpoint, settings, &queue)
        .map_err(|source| TelemetryError::Exporter { source })?;
    Ok(Export { provider, queue, flush: settings.flush })
}

/// The filter of log lines. Our spans pass at any level: a warning inside a lease needs its ids.
fn log_filter(level: &str) -> Result<EnvFilter, TelemetryError> {
    let spans = format!("{}=info", names::SPAN_TARGET).parse().expect("a target and a level");
    EnvFilter::builder()
        .parse(level)
        .map(|filter| filter.add_directive(spans))
        .map_err(|source| TelemetryError::Level { level: level.to_owned(), source })
}
