//! Health and metrics over HTTP.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use holdfast::clock::{Clock, SystemClock};
use holdfast::health::{HealthLimits, HealthServer, HealthState};
use holdfast::model::WorkerState;
use holdfast::telemetry::labels::DbErrorClass;
use holdfast::telemetry::{BuildInfo, Metrics};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

struct Running {
    address: SocketAddr,
    health: Arc<HealthState>,
    stop: CancellationToken,
    server: JoinSet<()>,
}

async fn start(limits: HealthLimits) -> Running {
    let health = Arc::new(HealthState::new(Arc::new(SystemClock), limits));
    let metrics = Arc::new(Metrics::new(["a".parse().unwrap()], &BuildInfo::current(1, 1)));
    let listen = "127.0.0.1:0".parse().unwrap();
    let bound = HealthServer::bind(listen, health.clone(), metrics).await.unwrap();
    let address = bound.address().unwrap();
    let stop = CancellationToken::new();
    let mut server = JoinSet::new();
    server.spawn(bound.run(stop.clone()));
    Running { address, health, stop, server }
}

async fn start_running() -> Running {
    let running = start(HealthLimits::for_lease(Duration::from_mins(1))).await;
    running.health.database_ok();
    running.health.schema_checked(true);
    running.health.set_state(WorkerState::Running);
    running
}

impl Running {
    /// Sends one request and reads to the end of the connection.
    async fn ask(&self, request: &str) -> String {
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer
    }

    async fn get(&self, path: &str) -> (u16, String) {
        let answer = self.ask(&format!("GET {path} HTTP/1.1\r\nHost: x\r\n\r\n")).await;
        let (_, body) = answer.split_once("\r\n\r\n").unwrap();
        (status(&answer), body.to_owned())
    }
}

fn status(answer: &str) -> u16 {
    answer.split(' ').nth(1).unwrap_or_else(|| panic!("{answer:?}")).parse().unwrap()
}

#[tokio::test]
async fn a_running_worker_answers_every_probe() {
    let worker = start_running().await;

    for path in ["/livez", "/readyz", "/startupz"] {
        assert_eq!(
            worker.get(path).await,
            (200, "{\"failing\":[],\"ok\":true}\n".to_owned()),
            "{path}"
        );
    }
}

#[tokio::test]
async fn readiness_names_each_failing_check_and_recovers() {
    let worker = start(HealthLimits {
        answer: Duration::ZERO,
        ..HealthLimits::for_lease(Duration::from_mins(1))
    })
    .await;
    worker.health.schema_checked(false);
    worker.health.database_failed(DbErrorClass::Connection);

    let (code, body) = worker.get("/readyz").await;

    assert_eq!(code, 503);
    let body: serde_json::Value = serde_json::from_str(&body).unwrap();
    let failing: Vec<&str> = body["failing"]
        .as_array()
        .unwrap()
        .iter()
        .map(|failing| failing["check"].as_str().unwrap())
        .collect();
    assert_eq!(failing, ["state", "database", "schema"]);
    assert_eq!(body["failing"][1]["detail"], "no answer yet: connection");
    assert_eq!(worker.get("/startupz").await.0, 503);
    assert_eq!(worker.get("/livez").await.0, 200);
}

#[tokio::test]
async fn a_draining_worker_is_alive_and_not_ready() {
    let worker = start_running().await;

    worker.health.set_state(WorkerState::Draining);

    assert_eq!(worker.get("/livez").await.0, 200);
    assert_eq!(worker.get("/startupz").await.0, 200);
    let (code, body) = worker.get("/readyz").await;
    assert_eq!(code, 503);
    assert!(body.contains("draining"), "{body}");
}

#[tokio::test]
async fn a_hung_runtime_is_not_alive() {
    let limits =
        HealthLimits { tick: Duration::ZERO, ..HealthLimits::for_lease(Duration::from_mins(1)) };
    let worker = start(limits).await;

    let (code, body) = worker.get("/livez").await;

    assert_eq!(code, 503);
    assert!(body.contains("runtime"), "{body}");
}

#[tokio::test]
async fn metrics_show_the_state_while_the_database_is_away() {
    let worker = start_running().await;
    worker.health.database_failed(DbErrorClass::Connection);

    let answer = worker.ask("GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n").await;

    assert_eq!(status(&answer), 200);
    assert!(answer.contains("content-type: text/plain; version=0.0.4\r\n"), "{answer:.400}");
    assert!(answer.contains("\nholdfast_db_up 0\n"));
    assert!(answer.contains("\nholdfast_worker_state{state=\"running\"} 1\n"));
    assert!(answer.contains("\nprocess_open_fds "));
}

#[tokio::test]
async fn only_reading_is_allowed() {
    let worker = start_running().await;

    for path in ["/livez", "/readyz", "/startupz", "/metrics"] {
        let head = worker.ask(&format!("HEAD {path} HTTP/1.1\r\nHost: x\r\n\r\n")).await;
        assert_eq!(status(&head), 200, "{path}");
        assert!(head.ends_with("\r\n\r\n"), "no body: {path}");
        for method in ["POST", "PUT", "DELETE", "OPTIONS", "TRACE"] {
            let answer = worker.ask(&format!("{method} {path} HTTP/1.1\r\nHost: x\r\n\r\n")).await;
            assert_eq!(status(&answer), 405, "{method} {path}");
        }
    }
    assert_eq!(worker.get("/").await.0, 404);
    assert_eq!(worker.get("/metrics/x").await.0, 404);
}

#[tokio::test]
async fn a_request_that_never_ends_is_cut_off() {
    let worker = start_running().await;
    let mut slow = TcpStream::connect(worker.address).await.unwrap();
    slow.write_all(b"GET /livez HTTP/1.1\r\nHost: ").await.unwrap();

    let mut rest = Vec::new();
    let ended = timeout(Duration::from_secs(10), slow.read_to_end(&mut rest)).await;

    assert!(ended.is_ok(), "the server closed it");
    assert_eq!(worker.get("/livez").await.0, 200);
}

#[tokio::test]
async fn huge_headers_are_refused() {
    let worker = start_running().await;
    let mut stream = TcpStream::connect(worker.address).await.unwrap();
    let request = format!("GET /livez HTTP/1.1\r\nX: {}\r\n\r\n", "y".repeat(20_000));
    stream.write_all(request.as_bytes()).await.unwrap();

    let mut answer = [0; 12];
    stream.read_exact(&mut answer).await.unwrap();

    assert_eq!(&answer, b"HTTP/1.1 431");
}

#[tokio::test]
async fn idle_connections_cannot_shut_the_probes_out() {
    let worker = start_running().await;
    let mut idle = Vec::new();
    for _ in 0..80 {
        idle.push(TcpStream::connect(worker.address).await.unwrap());
    }

    let answer = timeout(Duration::from_secs(10), worker.get("/livez")).await;

    assert_eq!(answer.unwrap().0, 200);
}

#[tokio::test]
async fn open_connections_cannot_hold_up_shutdown() {
    let mut worker = start_running().await;
    let idle = TcpStream::connect(worker.address).await.unwrap();
    let mut half = TcpStream::connect(worker.address).await.unwrap();
    half.write_all(b"GET /metrics HTTP/1.1\r\n").await.unwrap();
    // Both are being served once a later one was answered.
    assert_eq!(worker.get("/livez").await.0, 200);
    let clock = SystemClock;
    let told = clock.now();

    worker.stop.cancel();
    timeout(Duration::from_secs(10), worker.server.join_next()).await.unwrap().unwrap().unwrap();

    let took = clock.now().since(told);
    assert!(took < Duration::from_millis(1_500), "{took:?}");
    assert!(TcpStream::connect(worker.address).await.is_err(), "no longer listening");
    drop((idle, half));
}
