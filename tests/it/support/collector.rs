//! A collector of spans, in the process of the test.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{
    TraceService, TraceServiceServer,
};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::common::v1::{AnyValue, KeyValue};
use opentelemetry_proto::tonic::trace::v1::{ResourceSpans, Span};
use tokio::net::TcpListener;
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Response, Status};

#[derive(Clone, Default)]
pub(crate) struct Collector(Arc<Mutex<Vec<ResourceSpans>>>);

#[tonic::async_trait]
impl TraceService for Collector {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        self.0.lock().unwrap().extend(request.into_inner().resource_spans);
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

impl Collector {
    /// Starts a collector; the server ends with the runtime of the test.
    pub(crate) async fn start() -> (Self, SocketAddr, tokio::task::JoinSet<()>) {
        let collector = Self::default();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let service = TraceServiceServer::new(collector.clone());
        let mut server = tokio::task::JoinSet::new();
        server.spawn(async move {
            let incoming = TcpIncoming::from(listener);
            Server::builder().add_service(service).serve_with_incoming(incoming).await.unwrap();
        });
        (collector, address, server)
    }

    /// The last span of each name.
    pub(crate) fn spans(&self) -> HashMap<String, Span> {
        self.all().into_iter().map(|span| (span.name.clone(), span)).collect()
    }

    /// Every span received so far.
    pub(crate) fn all(&self) -> Vec<Span> {
        let received = self.0.lock().unwrap();
        let spans = received.iter().flat_map(|r| &r.scope_spans).flat_map(|s| &s.spans);
        spans.cloned().collect()
    }

    /// Those of a name, in the order in which they began.
    pub(crate) fn named(&self, name: &str) -> Vec<Span> {
        let mut spans = self.all();
        spans.retain(|span| span.name == name);
        spans.sort_by_key(|span| span.start_time_unix_nano);
        spans
    }

    /// The first sender.
    pub(crate) fn resource(&self) -> HashMap<String, String> {
        let received = self.0.lock().unwrap();
        texts(&received[0].resource.as_ref().unwrap().attributes)
    }
}

/// Attributes by name.
pub(crate) fn texts(attributes: &[KeyValue]) -> HashMap<String, String> {
    let text = |value: &Option<AnyValue>| match value.as_ref().and_then(|v| v.value.clone()) {
        Some(Value::StringValue(text)) => text,
        other => format!("{other:?}"),
    };
    attributes.iter().map(|a| (a.key.clone(), text(&a.value))).collect()
}

/// An id as it is written.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |text, byte| text + &format!("{byte:02x}"))
}
