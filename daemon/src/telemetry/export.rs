//! Sending spans to an OTLP collector, without ever making work wait for it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use opentelemetry::trace::{Link, SpanKind, TraceContextExt, TraceId};
use opentelemetry::{Context, KeyValue};
use opentelemetry_otlp::tonic_types::transport::ClientTlsConfig;
use opentelemetry_otlp::{
    ExporterBuildError, SpanExporter as OtlpExporter, WithExportConfig, WithTonicConfig,
};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::{
    BatchConfigBuilder, BatchSpanProcessor, Sampler, SamplingResult, SdkTracerProvider,
    ShouldSample, Span, SpanData, SpanExporter, SpanProcessor,
};
use prometheus::IntCounter;
use tracing::Metadata;

use super::TraceSettings;
use super::trace::{Ids, is_uneventful};

/// How long one export may take.
const EXPORT_LIMIT: Duration = Duration::from_secs(3);

/// Spans that wait for the collector at most, unless this variable says otherwise.
const QUEUE_SPANS: usize = 2_048;
const QUEUE_VARIABLE: &str = "OTEL_BSP_MAX_QUEUE_SIZE";

/// How many spans wait for the collector, and how many were thrown away.
#[derive(Debug)]
pub(super) struct Queue {
    waiting: AtomicUsize,
    limit: usize,
    dropped: IntCounter,
}

impl Queue {
    pub(super) fn new(dropped: IntCounter) -> Self {
        let limit = std::env::var(QUEUE_VARIABLE).ok().and_then(|limit| limit.parse().ok());
        let limit = limit.filter(|limit| *limit > 0).unwrap_or(QUEUE_SPANS);
        Self { waiting: AtomicUsize::new(0), limit, dropped }
    }

    /// Whether one more span may wait. The queue of the processor has as many places, and would
    /// throw away without saying so.
    fn enter(&self) -> bool {
        let enters = |waiting| (waiting < self.limit).then_some(waiting + 1);
        let entered = self.waiting.try_update(Ordering::Relaxed, Ordering::Relaxed, enters).is_ok();
        if !entered {
            self.dropped.inc();
        }
        entered
    }

    fn leave(&self, spans: usize) {
        let leaves = |waiting: usize| Some(waiting.saturating_sub(spans));
        let _ = self.waiting.try_update(Ordering::Relaxed, Ordering::Relaxed, leaves);
    }

    /// What waits now is thrown away; how much that is.
    pub(super) fn give_up(&self) -> usize {
        let left = self.waiting.swap(0, Ordering::Relaxed);
        self.dropped.inc_by(u64::try_from(left).unwrap_or(u64::MAX));
        left
    }
}

/// A provider that batches spans in a bounded queue on a thread of its own and drops what does not
/// fit. Must run inside the runtime.
pub(super) fn provider(
    endpoint: &str,
    settings: &TraceSettings,
    queue: &Arc<Queue>,
) -> Result<SdkTracerProvider, ExporterBuildError> {
    let mut exporter =
        OtlpExporter::builder().with_tonic().with_endpoint(endpoint).with_timeout(EXPORT_LIMIT);
    if endpoint.starts_with("https://") {
        exporter = exporter.with_tls_config(ClientTlsConfig::new().with_native_roots());
    }
    let exporter = exporter.build()?;
    let resource = Resource::builder()
        .with_service_name(settings.service_name.clone())
        .with_attribute(KeyValue::new("service.instance.id", settings.instance_id.clone()))
        .with_attribute(KeyValue::new("service.version", env!("CARGO_PKG_VERSION")))
        .build();
    Ok(SdkTracerProvider::builder()
        .with_span_processor(Eventful {
            processor: BatchSpanProcessor::builder(Reporting::new(exporter, Arc::clone(queue)))
                .with_batch_config(
                    BatchConfigBuilder::default().with_max_queue_size(queue.limit).build(),
                )
                .build(),
            queue: Arc::clone(queue),
        })
        .with_id_generator(Ids::default())
        .with_sampler(HeadSampler::new(settings))
        .with_resource(resource)
        .build())
}

/// Decides at the head of a trace, by ratio. Where it follows: as the parent did, and it keeps what is
/// linked to something that was kept, because a lease is a root and its submit is only linked.
#[derive(Clone, Debug)]
struct HeadSampler {
    sampler: Sampler,
    follows: bool,
}

impl HeadSampler {
    fn new(settings: &TraceSettings) -> Self {
        let ratio = Sampler::TraceIdRatioBased(settings.sample_ratio);
        let follows = settings.sample_linked;
        let sampler = if follows { Sampler::ParentBased(Box::new(ratio)) } else { ratio };
        Self { sampler, follows }
    }
}

impl ShouldSample for HeadSampler {
    fn should_sample(
        &self,
        parent: Option<&Context>,
        trace_id: TraceId,
        name: &str,
        kind: &SpanKind,
        attributes: &[KeyValue],
        links: &[Link],
    ) -> SamplingResult {
        let has_parent = parent.is_some_and(Context::has_active_span);
        let linked = self.follows && links.iter().any(|link| link.span_context.is_sampled());
        let sampler = if linked && !has_parent { &Sampler::AlwaysOn } else { &self.sampler };
        sampler.should_sample(parent, trace_id, name, kind, attributes, links)
    }
}

/// Passes on the spans in which something happened, as long as there is room for them.
#[derive(Debug)]
struct Eventful<P> {
    processor: P,
    queue: Arc<Queue>,
}

impl<P: SpanProcessor> SpanProcessor for Eventful<P> {
    fn on_start(&self, span: &mut Span, context: &Context) {
        self.processor.on_start(span, context);
    }

    fn on_end(&self, span: SpanData) {
        if !is_uneventful(&span.attributes) && self.queue.enter() {
            self.processor.on_end(span);
        }
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.processor.force_flush()
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.processor.shutdown_with_timeout(timeout)
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.processor.set_resource(resource);
    }
}

/// Logs when the collector stops taking spans and when it takes them again, once each: what the
/// exporter says itself about every failed batch, [`is_repetition`] leaves out.
#[derive(Debug)]
struct Reporting<E> {
    exporter: E,
    queue: Arc<Queue>,
    failing: AtomicBool,
}

impl<E> Reporting<E> {
    fn new(exporter: E, queue: Arc<Queue>) -> Self {
        Self { exporter, queue, failing: AtomicBool::new(false) }
    }
}

impl<E: SpanExporter> SpanExporter for Reporting<E> {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        let spans = batch.len();
        let result = self.exporter.export(batch).await;
        // Only now: what the end finds under way is not delivered.
        self.queue.leave(spans);
        if result.is_err() {
            self.queue.dropped.inc_by(u64::try_from(spans).unwrap_or(u64::MAX));
        }
        let failed_before = self.failing.swap(result.is_err(), Ordering::Relaxed);
        match &result {
            Err(error) if !failed_before => {
                tracing::warn!(error = error as &dyn std::error::Error, "spans are being lost");
            }
            Ok(()) if failed_before => tracing::info!("spans are delivered again"),
            Ok(()) | Err(_) => {}
        }
        result
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.exporter.shutdown_with_timeout(timeout)
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.exporter.force_flush()
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.exporter.set_resource(resource);
    }
}

/// Whether an event is the exporter's own word about one more failed batch.
pub(super) fn is_repetition(event: &Metadata<'_>) -> bool {
    let name = event.name();
    event.target().starts_with("opentelemetry")
        && (name == "BatchSpanProcessor.ExportError" || name.starts_with("Export.Failed"))
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use opentelemetry_sdk::error::OTelSdkError;

    use super::*;
    use crate::telemetry::logs::{LogFormat, tests::lines_of};
    use crate::telemetry::uncounted;

    #[derive(Debug)]
    struct Scripted(Mutex<Vec<bool>>);

    impl SpanExporter for Scripted {
        async fn export(&self, _batch: Vec<SpanData>) -> OTelSdkResult {
            let works = self.0.lock().unwrap().remove(0);
            if works { Ok(()) } else { Err(OTelSdkError::InternalFailure("refused".to_owned())) }
        }
    }

    #[test]
    fn a_collector_that_fails_and_recovers_is_logged_once_each() {
        let lines = lines_of("info", LogFormat::Text, || {
            let script = vec![true, false, false, false, true, true];
            let rounds = script.len();
            let queue = Arc::new(Queue::new(uncounted()));
            let exporter = Reporting::new(Scripted(Mutex::new(script)), queue);
            for _ in 0..rounds {
                let _ = futures::executor::block_on(exporter.export(Vec::new()));
            }
        });

        assert_eq!(lines.len(), 2, "{lines:?}");
        assert!(lines[0].contains("spans are being lost"), "{lines:?}");
        assert!(lines[1].contains("spans are delivered again"), "{lines:?}");
    }

    #[test]
    fn a_full_queue_counts_what_it_does_not_take_and_the_end_what_is_left() {
        let dropped = uncounted();
        let queue = Queue { limit: 3, ..Queue::new(dropped.clone()) };

        let entered = (0..5).filter(|_| queue.enter()).count();
        assert_eq!((entered, dropped.get()), (3, 2));
        queue.leave(2);
        assert!(queue.enter());
        assert_eq!(queue.give_up(), 2);
        assert_eq!(dropped.get(), 4);
    }

    #[test]
    fn what_the_collector_refuses_is_counted() {
        let dropped = uncounted();
        let queue = Arc::new(Queue::new(dropped.clone()));
        let exporter = Reporting::new(Scripted(Mutex::new(vec![false])), Arc::clone(&queue));
        let span = SpanData {
            span_context: opentelemetry::trace::SpanContext::NONE,
            parent_span_id: opentelemetry::trace::SpanId::INVALID,
            parent_span_is_remote: false,
            span_kind: SpanKind::Internal,
            name: "lease".into(),
            start_time: opentelemetry::time::now(),
            end_time: opentelemetry::time::now(),
            attributes: Vec::new(),
            dropped_attributes_count: 0,
            events: opentelemetry_sdk::trace::SpanEvents::default(),
            links: opentelemetry_sdk::trace::SpanLinks::default(),
            status: opentelemetry::trace::Status::Unset,
            instrumentation_scope: opentelemetry::InstrumentationScope::default(),
        };
        assert!(queue.enter() && queue.enter());

        let _ = futures::executor::block_on(exporter.export(vec![span]));

        assert_eq!((dropped.get(), queue.give_up()), (1, 1));
    }

    #[test]
    fn what_the_exporter_repeats_about_each_batch_is_not_logged() {
        let lines = lines_of("info", LogFormat::Text, || {
            tracing::error!(
                name: "BatchSpanProcessor.ExportError",
                target: "opentelemetry_sdk",
                "refused"
            );
            tracing::warn!(
                name: "BatchSpanProcessor.SpanDroppingStarted",
                target: "opentelemetry_sdk",
                "the queue is full"
            );
        });

        assert_eq!(lines.len(), 1, "{lines:?}");
        assert!(lines[0].contains("the queue is full"), "{lines:?}");
    }
}
