use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use hyper_util::service::TowerToHyperService;
use prometheus::TEXT_FORMAT;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::{Failing, HealthState};
use crate::telemetry::Metrics;

/// Connections served at once; further ones wait.
const MAX_CONNECTIONS: usize = 64;
/// How long a client may take to send its request.
const HEADER_LIMIT: Duration = Duration::from_secs(2);
/// How long a connection may last; each serves one request.
const CONNECTION_LIMIT: Duration = Duration::from_secs(5);
/// How long a request in flight may go on after the server was told to stop.
const STOP_LIMIT: Duration = Duration::from_millis(500);
/// The most a request may have of line and headers, in bytes.
const MAX_HEADER: usize = 16 * 1024;
/// Pause after the system could not accept a connection.
const ACCEPT_PAUSE: Duration = Duration::from_secs(1);

/// What a process says of itself. Nothing of it may wait.
pub trait Probed: Send + Sync {
    /// Why it should be restarted; empty when it should not.
    fn not_alive(&self) -> Vec<Failing>;
    /// Why it does not do its work; empty when it does.
    fn not_ready(&self) -> Vec<Failing>;
    /// Why it has not started yet; empty once it has.
    fn not_started(&self) -> Vec<Failing>;
    /// Its metrics, in the text format 0.0.4.
    ///
    /// # Errors
    /// A metric is malformed.
    fn exposition(&self) -> Result<String, prometheus::Error>;
}

/// Serves health and metrics of one process, without asking the database.
#[derive(Debug)]
pub struct HealthServer {
    listener: TcpListener,
    app: Router,
}

type Shared = Arc<dyn Probed>;

/// A worker.
struct WorkerProbes {
    health: Arc<HealthState>,
    metrics: Arc<Metrics>,
}

impl Probed for WorkerProbes {
    fn not_alive(&self) -> Vec<Failing> {
        self.health.not_alive()
    }

    fn not_ready(&self) -> Vec<Failing> {
        self.health.not_ready()
    }

    fn not_started(&self) -> Vec<Failing> {
        self.health.not_started()
    }

    fn exposition(&self) -> Result<String, prometheus::Error> {
        self.metrics.worker_state(self.health.state());
        self.metrics.db_up(self.health.database_up());
        self.metrics.encode()
    }
}

impl HealthServer {
    /// Listens on `address` for a worker; port 0 takes a free one.
    ///
    /// # Errors
    /// The address cannot be listened on.
    pub async fn bind(
        address: SocketAddr,
        health: Arc<HealthState>,
        metrics: Arc<Metrics>,
    ) -> io::Result<Self> {
        Self::of(address, Arc::new(WorkerProbes { health, metrics })).await
    }

    /// The same for any process.
    ///
    /// # Errors
    /// The address cannot be listened on.
    pub async fn of(address: SocketAddr, process: Arc<dyn Probed>) -> io::Result<Self> {
        let listener = TcpListener::bind(address).await?;
        let app = Router::new()
            .route("/livez", get(livez))
            .route("/readyz", get(readyz))
            .route("/startupz", get(startupz))
            .route("/metrics", get(exposition))
            .with_state(process);
        Ok(Self { listener, app })
    }

    /// The address it listens on.
    ///
    /// # Errors
    /// The system does not tell.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Serves until `stop` is cancelled, and returns within half a second of it whatever its
    /// clients do. Stop it last: a draining worker still answers.
    ///
    /// # Cancel safety
    /// Safe: connections already accepted end by their own limits.
    pub async fn run(self, stop: CancellationToken) {
        let connections = TaskTracker::new();
        let free = Arc::new(Semaphore::new(MAX_CONNECTIONS));
        loop {
            let next = async {
                let slot = free.clone().acquire_owned().await;
                (self.listener.accept().await, slot)
            };
            let (accepted, slot) = tokio::select! {
                biased;
                () = stop.cancelled() => break,
                next = next => next,
            };
            match accepted {
                Ok((stream, _)) => {
                    let served = serve(stream, self.app.clone(), stop.clone());
                    connections.spawn(async move {
                        served.await;
                        drop(slot);
                    });
                }
                Err(error) => {
                    tracing::warn!(error = &error as &dyn std::error::Error, "accept a connection");
                    stop.run_until_cancelled(sleep(ACCEPT_PAUSE)).await;
                }
            }
        }
        connections.close();
        connections.wait().await;
    }
}

/// Serves one request. A client that breaks off is no news.
async fn serve(stream: TcpStream, app: Router, stop: CancellationToken) {
    let mut http = auto::Builder::new(TokioExecutor::new()).http1_only();
    http.http1()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_LIMIT)
        .keep_alive(false)
        .max_buf_size(MAX_HEADER);
    let request = http.serve_connection(TokioIo::new(stream), TowerToHyperService::new(app));
    let stopped = async {
        stop.cancelled().await;
        sleep(STOP_LIMIT).await;
    };
    tokio::select! {
        _ = timeout(CONNECTION_LIMIT, request) => {}
        () = stopped => {}
    }
}

async fn livez(State(process): State<Shared>) -> Response {
    verdict(&process.not_alive())
}

async fn readyz(State(process): State<Shared>) -> Response {
    verdict(&process.not_ready())
}

async fn startupz(State(process): State<Shared>) -> Response {
    verdict(&process.not_started())
}

async fn exposition(State(process): State<Shared>) -> Response {
    match process.exposition() {
        Ok(text) => ([(header::CONTENT_TYPE, TEXT_FORMAT)], text).into_response(),
        Err(error) => {
            tracing::error!(error = &error as &dyn std::error::Error, "encode the metrics");
            StatusCode::INTERNAL_SERVER_ERROR.into_response()
        }
    }
}

/// 200 or 503, and every check that fails.
fn verdict(failing: &[Failing]) -> Response {
    let status = if failing.is_empty() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    let body = serde_json::json!({ "ok": failing.is_empty(), "failing": failing }).to_string();
    let headers = [(header::CONTENT_TYPE, "application/json"), (header::CACHE_CONTROL, "no-store")];
    (status, headers, body + "\n").into_response()
}
