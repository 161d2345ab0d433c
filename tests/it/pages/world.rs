//! A fleet with its exporter and a Prometheus, as an operator has them.

use std::fs::File;
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use holdfast::execute::spawn::spawn_with_death_signal;
use rustix::process::Signal;
use tokio_postgres::{Client, NoTls};
use tokio_util::task::TaskTracker;

use super::files::metrics_in;
use super::server::{Prometheus, free_address};
use crate::support::fleet::{Fleet, LONG, now, until};
use crate::support::worker_process::WorkerProcess;

/// Addresses for workers, whether they run or not.
const PLACES: usize = 3;

/// Windows of expressions, where minutes are too long to wait for their end.
const SHORT_WINDOW: &str = "15s";

pub(super) struct World {
    pub(super) fleet: Fleet,
    pub(super) prometheus: Prometheus,
    places: Vec<SocketAddr>,
    exporter_at: SocketAddr,
    exporter: Option<Child>,
    sessions: TaskTracker,
}

impl World {
    /// None on a machine without Prometheus.
    pub(super) async fn new(fleet: Fleet) -> Option<Self> {
        let places: Vec<_> = (0..PLACES).map(|_| free_address()).collect();
        let exporter_at = free_address();
        let prometheus = Prometheus::start(&places, exporter_at).await?;
        let mut world = Self {
            fleet,
            prometheus,
            places,
            exporter_at,
            exporter: None,
            sessions: TaskTracker::new(),
        };
        world.start_exporter();
        Some(world)
    }

    pub(super) fn start_exporter(&mut self) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_holdfast"));
        command
            .args(["exporter", "--interval", "1s", "--listen", &self.exporter_at.to_string()])
            .args(["--database-url", self.fleet.url(), "--config"])
            .arg(self.fleet.file("holdfast.toml"))
            .env("HOLDFAST__EXPORTER__TIMEOUT", "1s")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(self.fleet.file("exporter.log")).unwrap());
        self.exporter = Some(spawn_with_death_signal(&mut command, Signal::KILL).unwrap());
    }

    /// A database session that somebody left open, and its process id.
    pub(super) async fn session(&self) -> (Client, i32) {
        let (client, connection) = tokio_postgres::connect(self.fleet.url(), NoTls).await.unwrap();
        // Its error is the client's too, and every call reports it there.
        self.sessions.spawn(async move { connection.await.ok() });
        let pid = client.query_one("SELECT pg_backend_pid()", &[]).await.unwrap().get(0);
        (client, pid)
    }

    pub(super) fn stop_exporter(&mut self) {
        if let Some(mut exporter) = self.exporter.take() {
            exporter.kill().unwrap();
            exporter.wait().unwrap();
        }
    }

    /// Starts a worker at one of the places that are scraped, and waits until it claims.
    pub(super) async fn worker(&self, place: usize, arguments: &[&str]) -> WorkerProcess {
        self.worker_at(self.fleet.url(), place, arguments).await
    }

    /// The same by another way to the database.
    pub(super) async fn worker_at(
        &self,
        url: &str,
        place: usize,
        arguments: &[&str],
    ) -> WorkerProcess {
        let address = self.places[place].to_string();
        let arguments = [&["--health", &address], arguments].concat();
        let worker = self.fleet.start_at(url, &arguments, &[]);
        worker.ready().await;
        // A rise is one from what was seen before.
        let seen =
            format!("holdfast_worker_state{{instance=\"{address}\",state=\"running\"}} == 1");
        until("it is scraped", LONG, async || self.prometheus.holds(&seen).await).await;
        worker
    }

    /// The expression of an alert.
    pub(super) async fn expression(&self, alert: &str) -> String {
        let rules = self.prometheus.rules().await;
        let rule = rules.iter().find(|rule| rule["name"] == alert);
        rule.unwrap_or_else(|| panic!("no alert {alert}"))["query"].as_str().unwrap().to_owned()
    }

    /// Waits until the expression of an alert answers something. Its own windows, but for one that
    /// compares with the past: there is not so much of that here.
    pub(super) async fn fires(&self, alert: &str) {
        let expression = self.expression(alert).await;
        let expression =
            if expression.contains("offset") { in_short_windows(&expression) } else { expression };
        let began = now();
        while !self.prometheus.holds(&expression).await {
            if now().saturating_sub(began) > LONG * 2 {
                let mut seen = Vec::new();
                for metric in metrics_in(&expression) {
                    seen.push(self.prometheus.query(&metric).await);
                }
                panic!("{alert} does not fire: {expression}\n{seen:#?}");
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        eprintln!("{alert}: {:?}", self.prometheus.query(&expression).await.unwrap());
    }

    /// Waits until it answers nothing in short windows: in its own ones that is a matter of minutes.
    pub(super) async fn ends(&self, alert: &str) {
        let expression = in_short_windows(&self.expression(alert).await);
        self.becomes_empty(alert, &expression).await;
    }

    pub(super) async fn becomes_empty(&self, what: &str, expression: &str) {
        until(&format!("{what} ends"), LONG, async || !self.prometheus.holds(expression).await)
            .await;
    }

    /// The exporter's view of the database is newer than this call.
    pub(super) async fn fresh(&self) {
        let age = "time() - max(holdfast_exporter_last_success_timestamp_seconds) < 3";
        until("the exporter collects", LONG, async || self.prometheus.holds(age).await).await;
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.stop_exporter();
        if std::thread::panicking() {
            let log = std::fs::read_to_string(self.fleet.file("exporter.log"));
            eprintln!("--- exporter\n{}", log.unwrap_or_default());
        }
    }
}

/// `[5m]` and `offset 10m` are as short as can be waited for; ages and thresholds stay.
pub(super) fn in_short_windows(expression: &str) -> String {
    let mut short = String::new();
    let mut rest = expression;
    while let Some(begin) = rest.find(['[']) {
        let end = begin + rest[begin..].find(']').unwrap();
        short += &rest[..begin];
        short.extend(["[", SHORT_WINDOW, "]"]);
        rest = &rest[end + 1..];
    }
    short += rest;
    short.replace("offset 10m", &format!("offset {SHORT_WINDOW}"))
}

#[test]
fn windows_are_shortened_and_nothing_else() {
    let expression =
        "time() - a > 120 and rate(b{c=\"d\"}[5m]) > 3 * increase(b[1h]) or e offset 10m";
    let short = "time() - a > 120 and rate(b{c=\"d\"}[15s]) > 3 * increase(b[15s]) or e offset 15s";
    assert_eq!(in_short_windows(expression), short);
}
