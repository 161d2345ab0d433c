//! Sending spans to an OTLP collector, without ever making work wait for it.

use std::sync::atomic::{AtomicBool, Ordering};
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
    BatchSpanProcessor, Sampler, SamplingResult, SdkTracerProvider, ShouldSample, Span, SpanData,
    SpanExporter, SpanProcessor,
};
use tracing::Metadata;

use super::TraceSettings;
use super::trace::{Ids, is_uneventful};

/// How long one export may take, and how long shutting down waits for the last one.
pub(super) const EXPORT_LIMIT: Duration = Duration::from_secs(3);

/// A provider that batches spans in a bounded queue on a thread of its own and drops what does not
/// fit. Must run inside the runtime.
pub(super) fn provider(
    endpoint: &str,
    settings: &TraceSettings,
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
        .with_span_processor(Eventful(
            BatchSpanProcessor::builder(Reporting::new(exporter)).build(),
        ))
        .with_id_generator(Ids::default())
        .with_sampler(HeadSampler::new(settings.sample_ratio))
        .with_resource(resource)
        .build())
}

/// Decides at the head of a trace: as the parent did; else keeps what is linked to something that
/// was kept, because a lease is a root and its submit is only linked; else by ratio.
#[derive(Clone, Debug)]
struct HeadSampler(Sampler);

impl HeadSampler {
    fn new(ratio: f64) -> Self {
        Self(Sampler::ParentBased(Box::new(Sampler::TraceIdRatioBased(ratio))))
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
        let linked = links.iter().any(|link| link.span_context.is_sampled());
        let sampler = if linked && !has_parent { &Sampler::AlwaysOn } else { &self.0 };
        sampler.should_sample(parent, trace_id, name, kind, attributes, links)
    }
}

/// Passes on the spans in which something happened.
#[derive(Debug)]
struct Eventful<P>(P);

impl<P: SpanProcessor> SpanProcessor for Eventful<P> {
    fn on_start(&self, span: &mut Span, context: &Context) {
        self.0.on_start(span, context);
    }

    fn on_end(&self, span: SpanData) {
        if !is_uneventful(&span.attributes) {
            self.0.on_end(span);
        }
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.0.force_flush()
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.0.shutdown_with_timeout(timeout)
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.0.set_resource(resource);
    }
}

/// Logs when the collector stops taking spans and when it takes them again, once each: what the
/// exporter says itself about every failed batch, [`is_repetition`] leaves out.
#[derive(Debug)]
struct Reporting<E> {
    exporter: E,
    failing: AtomicBool,
}

impl<E> Reporting<E> {
    fn new(exporter: E) -> Self {
        Self { exporter, failing: AtomicBool::new(false) }
    }
}

impl<E: SpanExporter> SpanExporter for Reporting<E> {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        let result = self.exporter.export(batch).await;
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
            let exporter = Reporting::new(Scripted(Mutex::new(script)));
            for _ in 0..rounds {
                let _ = futures::executor::block_on(exporter.export(Vec::new()));
            }
        });

        assert_eq!(lines.len(), 2, "{lines:?}");
        assert!(lines[0].contains("spans are being lost"), "{lines:?}");
        assert!(lines[1].contains("spans are delivered again"), "{lines:?}");
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
