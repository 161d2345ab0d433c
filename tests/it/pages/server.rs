//! A Prometheus of a test's own, with the rules of this repository.

use std::fs::{self, File};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use holdfast::execute::spawn::spawn_with_death_signal;
use rustix::process::Signal;
use serde_json::Value;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::support::fleet::{LONG, until};
use crate::support::prometheus::program;

/// Scrapes and evaluates every second.
pub(super) struct Prometheus {
    child: Child,
    address: SocketAddr,
    _folder: TempDir,
}

/// A port that nobody listens on at the moment.
pub(super) fn free_address() -> SocketAddr {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap()
}

impl Prometheus {
    /// Scrapes `workers` and `exporter`; none on a machine without Prometheus.
    pub(super) async fn start(workers: &[SocketAddr], exporter: SocketAddr) -> Option<Self> {
        let program = program("prometheus")?;
        let folder = tempfile::tempdir().unwrap();
        let config = folder.path().join("prometheus.yml");
        fs::write(&config, configuration(workers, exporter)).unwrap();
        let address = free_address();
        let mut command = Command::new(program);
        command
            .arg(format!("--config.file={}", config.display()))
            .arg(format!("--storage.tsdb.path={}", folder.path().join("data").display()))
            .arg(format!("--web.listen-address={address}"))
            .arg("--log.level=warn")
            .env("GOMAXPROCS", "1")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(folder.path().join("log")).unwrap());
        let child = spawn_with_death_signal(&mut command, Signal::KILL).unwrap();
        let server = Self { child, address, _folder: folder };
        let ready =
            async || server.get("/-/ready").await.is_some_and(|body| body.contains("Ready"));
        until("Prometheus is ready", LONG, ready).await;
        Some(server)
    }

    async fn get(&self, path: &str) -> Option<String> {
        let mut stream = TcpStream::connect(self.address).await.ok()?;
        // 1.0: the answer comes in one piece.
        let request = format!("GET {path} HTTP/1.0\r\nHost: x\r\n\r\n");
        stream.write_all(request.as_bytes()).await.ok()?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.ok()?;
        Some(answer.split_once("\r\n\r\n")?.1.to_owned())
    }

    async fn api(&self, path: &str) -> Result<Value, String> {
        let body = self.get(path).await.ok_or("Prometheus does not answer")?;
        let mut answer: Value = serde_json::from_str(&body).map_err(|error| error.to_string())?;
        if answer["status"] == "success" {
            Ok(answer["data"].take())
        } else {
            Err(answer["error"].to_string())
        }
    }

    /// The series that an expression answers now.
    pub(super) async fn query(&self, expression: &str) -> Result<Vec<Value>, String> {
        let path = format!("/api/v1/query?query={}", escaped(expression));
        let mut data = self.api(&path).await.map_err(|error| format!("{expression}: {error}"))?;
        let result = data["result"].take();
        Ok(result.as_array().cloned().unwrap_or_else(|| vec![result]))
    }

    /// Whether an expression answers anything.
    pub(super) async fn holds(&self, expression: &str) -> bool {
        !self.query(expression).await.unwrap().is_empty()
    }

    /// Its rules, as it read them.
    pub(super) async fn rules(&self) -> Vec<Value> {
        let mut data = self.api("/api/v1/rules").await.unwrap();
        let Value::Array(groups) = data["groups"].take() else { panic!("{data}") };
        groups.iter().flat_map(|group| group["rules"].as_array().unwrap().clone()).collect()
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn configuration(workers: &[SocketAddr], exporter: SocketAddr) -> String {
    let rules = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/prometheus/rules.yaml");
    let job = |name: &str, targets: &[SocketAddr]| {
        let targets: Vec<String> = targets.iter().map(|target| format!("\"{target}\"")).collect();
        format!(
            "  - job_name: {name}\n    static_configs:\n      - targets: [{}]\n        labels: \
             {{namespace: test}}\n",
            targets.join(", ")
        )
    };
    format!(
        "global: {{scrape_interval: 1s, evaluation_interval: 1s}}\nrule_files: [\"{}\"]\n\
         scrape_configs:\n{}{}",
        rules.display(),
        job("holdfast-worker", workers),
        job("holdfast-exporter", &[exporter])
    )
}

fn escaped(text: &str) -> String {
    text.bytes().fold(String::new(), |mut escaped, byte| {
        if byte.is_ascii_alphanumeric() {
            escaped.push(char::from(byte));
        } else {
            escaped.extend(['%'].into_iter().chain(format!("{byte:02X}").chars()));
        }
        escaped
    })
}
