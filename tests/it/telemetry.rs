//! Spans as a collector receives them.

use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use holdfast::clock::{Clock, SystemClock};
use holdfast::model::{
    BatchId, FencingToken, History, Hold, ItemRef, LeaseId, Position, QueueName, WorkerId,
};
use holdfast::telemetry::labels::{DbErrorClass, ExecutionOutcome, LostReason, ReleaseReason};
use holdfast::telemetry::trace::{self, Origins, Settle, TraceContext};
use holdfast::telemetry::{LogFormat, LogSettings, TelemetryError, TelemetryGuard, TraceSettings};
use opentelemetry_proto::tonic::trace::v1::Status as SpanStatus;
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use opentelemetry_proto::tonic::trace::v1::status::StatusCode;
use tokio::net::TcpListener;
use tracing::subscriber::DefaultGuard;

use crate::support::collector::{Collector, hex, texts};

const SUBMITTED: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

fn queue(name: &str) -> QueueName {
    name.parse().unwrap()
}

#[derive(Clone, Default)]
struct Sink(Arc<Mutex<Vec<u8>>>);

impl io::Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Exports the spans of this thread to `address` until the guards are used up.
fn exporting_to(address: SocketAddr, ratio: f64) -> (TelemetryGuard, DefaultGuard, Sink) {
    let logs = LogSettings { level: "info".to_owned(), format: LogFormat::Json };
    let sink = Sink::default();
    let lines = sink.clone();
    let traces = trace_settings(&format!("http://{address}"), ratio);
    let (subscriber, guard) =
        holdfast::telemetry::subscriber(&logs, &traces, move || lines.clone()).unwrap();
    (guard, tracing::subscriber::set_default(subscriber), sink)
}

fn trace_settings(endpoint: &str, sample_ratio: f64) -> TraceSettings {
    TraceSettings {
        otlp_endpoint: Some(endpoint.to_owned()),
        sample_ratio,
        sample_linked: true,
        service_name: "holdfast-worker".to_owned(),
        instance_id: "incarnation-1".to_owned(),
        flush: Duration::from_secs(3),
        ..TraceSettings::none()
    }
}

fn hold() -> Hold {
    let item = ItemRef::new(BatchId::generate(), Position::new(3));
    Hold::new(item, LeaseId::generate(), FencingToken::new(77), History::default())
}

#[tokio::test]
async fn a_lease_is_a_root_linked_to_its_submit_and_its_execution_is_its_child() {
    let (collector, address, _server) = Collector::start().await;
    let (guard, installed, sink) = exporting_to(address, 1.0);
    let (queue, hold) = (queue("checksum"), hold());
    let submitted: TraceContext = SUBMITTED.parse().unwrap();

    let claim = trace::claim_span(&queue, WorkerId::generate());
    trace::item_count(&claim, 1);
    let claimed = TraceContext::of(&claim).unwrap();
    let origins =
        Origins { submitted: Some(&submitted), claim: Some(&claimed), ..Origins::default() };
    let lease = trace::lease_span(&queue, &hold, origins);
    let process = trace::process_span(&lease, &queue, Some(&submitted));
    let passed_on = process.in_scope(|| {
        tracing::info!("command started");
        TraceContext::current().unwrap().to_string()
    });
    trace::execution_ended(&process, ExecutionOutcome::Failed);
    drop(process);
    let settle = trace::settle_span(&lease, &queue, Settle::Fail, "exit_status");
    drop(settle);
    trace::lease_released(&lease, ReleaseReason::Settled);
    drop((lease, claim));
    guard.shutdown().await;
    drop(installed);

    let spans = collector.spans();
    let (lease, process) = (&spans["lease checksum"], &spans["process checksum"]);
    assert_eq!(lease.parent_span_id, Vec::<u8>::new(), "a root");
    assert_eq!(lease.kind(), SpanKind::Internal);
    let links: Vec<String> = lease.links.iter().map(|link| hex(&link.span_id)).collect();
    assert_eq!(links, ["b7ad6b7169203331", &hex(&spans["claim checksum"].span_id)]);
    let attributes = texts(&lease.attributes);
    assert_eq!(attributes["messaging.message.conversation_id"], hold.item().batch().to_string());
    assert_eq!(attributes["holdfast.lease.id"], hold.lease().to_string());
    assert_eq!(attributes["holdfast.lease.token"], "77");
    assert_eq!(attributes["holdfast.lease.end_reason"], "settled");
    assert_eq!(attributes["holdfast.submit.trace_id"], "0af7651916cd43dd8448eb211c80319c");

    assert_eq!(process.parent_span_id, lease.span_id);
    assert_eq!(process.trace_id, lease.trace_id);
    assert_eq!(process.kind(), SpanKind::Consumer);
    assert_eq!(hex(&process.links[0].trace_id), "0af7651916cd43dd8448eb211c80319c");
    assert_eq!(process.status.as_ref().unwrap().code(), StatusCode::Error);
    assert_eq!(texts(&process.attributes)["error.type"], "failed");
    let place = format!("00-{}-{}-01", hex(&process.trace_id), hex(&process.span_id));
    assert_eq!(passed_on, place);
    assert_eq!(spans["fail checksum"].parent_span_id, lease.span_id);
    assert!(lease.end_time_unix_nano >= process.end_time_unix_nano, "ends after its execution");

    let resource = collector.resource();
    assert_eq!(resource["service.name"], "holdfast-worker");
    assert_eq!(resource["service.instance.id"], "incarnation-1");
    assert_eq!(resource["service.version"], env!("CARGO_PKG_VERSION"));

    let line: serde_json::Value = serde_json::from_slice(&sink.0.lock().unwrap()).unwrap();
    assert_eq!(line["trace_id"], hex(&process.trace_id));
    assert_eq!(line["span_id"], hex(&process.span_id));
}

#[tokio::test]
async fn a_submit_and_a_control_command_continue_the_callers_trace() {
    let (collector, address, _server) = Collector::start().await;
    let (guard, installed, _) = exporting_to(address, 1.0);
    let caller: TraceContext = SUBMITTED.parse().unwrap();
    let batch = BatchId::generate();

    drop(trace::send_span(&queue("checksum"), batch, Some(&caller)));
    drop(trace::control_span("cancel", batch, Some(&caller)));
    guard.shutdown().await;
    drop(installed);

    let spans = collector.spans();
    assert_eq!(spans["send checksum"].kind(), SpanKind::Producer);
    for name in ["send checksum", "control cancel"] {
        assert_eq!(hex(&spans[name].trace_id), "0af7651916cd43dd8448eb211c80319c", "{name}");
        assert_eq!(hex(&spans[name].parent_span_id), "b7ad6b7169203331", "{name}");
    }
}

#[tokio::test]
async fn a_claim_that_found_nothing_is_not_exported() {
    let (collector, address, _server) = Collector::start().await;
    let (guard, installed, _) = exporting_to(address, 1.0);

    let (empty, broken) = (queue("empty"), queue("broken"));
    let nothing = trace::claim_span(&empty, WorkerId::generate());
    trace::uneventful(&nothing);
    let failed = trace::claim_span(&broken, WorkerId::generate());
    trace::failed(&failed, DbErrorClass::Connection.as_str());
    drop((nothing, failed));
    guard.shutdown().await;
    drop(installed);

    let spans = collector.spans();
    assert_eq!(spans.keys().collect::<Vec<_>>(), ["claim broken"]);
    assert_eq!(spans["claim broken"].status.as_ref().unwrap().code(), StatusCode::Error);
}

#[tokio::test]
async fn a_lease_of_a_sampled_submit_is_kept_at_any_ratio() {
    let (collector, address, _server) = Collector::start().await;
    let (guard, installed, _) = exporting_to(address, 0.0);
    let submitted: TraceContext = SUBMITTED.parse().unwrap();

    for (name, submitted) in [("kept", Some(&submitted)), ("dropped", None)] {
        let queue = queue(name);
        let lease = trace::lease_span(&queue, &hold(), Origins { submitted, ..Origins::default() });
        drop(trace::process_span(&lease, &queue, submitted));
    }
    guard.shutdown().await;
    drop(installed);

    let mut names: Vec<String> = collector.spans().into_keys().collect();
    names.sort();
    assert_eq!(names, ["lease kept", "process kept"]);
}

#[tokio::test]
async fn a_lost_lease_is_an_error_and_a_cancelled_one_is_not() {
    let (collector, address, _server) = Collector::start().await;
    let (guard, installed, _) = exporting_to(address, 1.0);

    for (name, reason) in [("taken", LostReason::Expired), ("stopped", LostReason::Cancelled)] {
        let lease = trace::lease_span(&queue(name), &hold(), Origins::default());
        trace::lease_lost(&lease, reason);
    }
    guard.shutdown().await;
    drop(installed);

    let spans = collector.spans();
    let code = |name: &str| spans[name].status.as_ref().map(SpanStatus::code);
    assert_eq!(code("lease taken"), Some(StatusCode::Error));
    assert_ne!(code("lease stopped"), Some(StatusCode::Error));
    assert_eq!(texts(&spans["lease stopped"].attributes)["holdfast.lease.end_reason"], "cancelled");
}

/// A collector that takes the connection and never answers is worse than one that is not there.
#[tokio::test]
async fn a_dead_collector_delays_neither_work_nor_shutdown() {
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let refusing = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addresses = [silent.local_addr().unwrap(), refusing.local_addr().unwrap()];
    drop(refusing);
    let clock = SystemClock;

    for address in addresses {
        let (guard, installed, _) = exporting_to(address, 1.0);
        let queue = queue("checksum");
        let began = clock.now();
        // More than the queue of the exporter takes.
        for _ in 0..5_000 {
            drop(trace::lease_span(&queue, &hold(), Origins::default()));
        }
        let worked = clock.now();
        guard.shutdown().await;
        let ended = clock.now();
        drop(installed);

        // Would it wait for room, each of six exports would cost three seconds.
        assert!(worked.since(began) < Duration::from_secs(15), "{:?}", worked.since(began));
        assert!(ended.since(worked) < Duration::from_secs(6), "{:?}", ended.since(worked));
    }
}

#[tokio::test]
async fn without_an_endpoint_there_is_no_context_to_pass_on() {
    let logs = LogSettings { level: "info".to_owned(), format: LogFormat::Text };
    let traces = TraceSettings { otlp_endpoint: None, ..trace_settings("", 1.0) };
    let (subscriber, guard) = holdfast::telemetry::subscriber(&logs, &traces, io::sink).unwrap();
    let installed = tracing::subscriber::set_default(subscriber);

    let queue = queue("checksum");
    let lease = trace::lease_span(&queue, &hold(), Origins::default());
    assert_eq!(TraceContext::of(&lease), None);
    trace::lease_released(&lease, ReleaseReason::Settled);
    guard.shutdown().await;
    drop(installed);
}

#[tokio::test]
async fn settings_that_cannot_work_are_refused_without_repeating_a_password() {
    let info = LogSettings { level: "info".to_owned(), format: LogFormat::Text };
    for endpoint in ["collector:4317", "ftp://collector", "http://", "http://me:hunter2@collector"]
    {
        let traces = trace_settings(endpoint, 1.0);
        let refused = holdfast::telemetry::subscriber(&info, &traces, io::sink).err().unwrap();
        assert!(matches!(refused, TelemetryError::Endpoint), "{endpoint}: {refused:?}");
        assert!(!format!("{refused} {refused:?}").contains("hunter2"));
    }

    let loud = LogSettings { level: "holdfast=loud".to_owned(), ..info };
    let traces = TraceSettings { otlp_endpoint: None, ..trace_settings("", 1.0) };
    let refused = holdfast::telemetry::subscriber(&loud, &traces, io::sink).err().unwrap();
    assert!(matches!(refused, TelemetryError::Level { .. }), "{refused:?}");
}
