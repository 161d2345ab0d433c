//! One guarded worker of a test: its signals, its end, its log, its health server.
//!
//! The process that a test starts is the guard. Signals go to it, as a service manager sends them, and
//! killing it is the death of the whole worker: its lease has to expire. The worker and the keeper are
//! its children, and are killed or frozen by name.

use std::fs;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::Child;

use holdfast::model::WorkerId;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::fleet::{LONG, until};

/// One worker with its guard. Dropped, the guard is killed, and everything else goes with it.
pub(crate) struct WorkerProcess {
    child: Child,
    log: PathBuf,
    ended: bool,
}

impl WorkerProcess {
    pub(super) const fn new(child: Child, log: PathBuf) -> Self {
        Self { child, log, ended: false }
    }

    /// The guard.
    pub(crate) fn pid(&self) -> i32 {
        i32::try_from(self.child.id()).unwrap()
    }

    /// The last start of a worker by the guard, once it is logged.
    fn start(&self) -> Option<Value> {
        self.log().into_iter().rfind(|line| line["message"] == "guarding a worker")
    }

    async fn started(&self) -> Value {
        let mut start = None;
        until("the guard starts a worker", LONG, async || {
            start = self.start();
            start.is_some()
        })
        .await;
        start.unwrap()
    }

    /// The identity of the worker that was started last.
    pub(crate) async fn id(&self) -> WorkerId {
        self.started().await["worker"].as_str().unwrap().parse().unwrap()
    }

    async fn child_pid(&self, name: &str) -> i32 {
        i32::try_from(self.started().await[name].as_i64().unwrap()).unwrap()
    }

    /// The worker that was started last.
    pub(crate) async fn worker_pid(&self) -> i32 {
        self.child_pid("worker_pid").await
    }

    /// The keeper of that worker.
    pub(crate) async fn keeper_pid(&self) -> i32 {
        self.child_pid("keeper_pid").await
    }

    /// To the guard.
    pub(crate) fn signal(&self, signal: Signal) {
        assert!(!self.ended, "nobody to signal any more");
        kill_process(Pid::from_raw(self.pid()).unwrap(), signal).unwrap();
    }

    /// To the worker alone.
    pub(crate) async fn signal_worker(&self, signal: Signal) {
        kill_process(Pid::from_raw(self.worker_pid().await).unwrap(), signal).unwrap();
    }

    /// `kill -9` of the guard: nobody releases anything.
    pub(crate) fn kill(&mut self) {
        self.signal(Signal::KILL);
        self.child.wait().unwrap();
        self.ended = true;
    }

    /// Its exit status, once it has ended.
    pub(crate) fn try_exit_status(&mut self) -> Option<i32> {
        let status = self.child.try_wait().unwrap()?;
        self.ended = true;
        Some(status.code().unwrap_or_else(|| panic!("{status}")))
    }

    /// Whether it has ended, however it did.
    pub(crate) fn has_ended(&mut self) -> bool {
        self.ended |= self.child.try_wait().unwrap().is_some();
        self.ended
    }

    /// Waits for its end; its exit status.
    pub(crate) async fn exit_status(&mut self) -> i32 {
        let mut status = None;
        until("the worker ends", LONG, async || {
            status = self.try_exit_status();
            status.is_some()
        })
        .await;
        status.unwrap()
    }

    /// The lines of its log so far.
    pub(crate) fn log(&self) -> Vec<Value> {
        let text = fs::read_to_string(&self.log).unwrap();
        // The last one may be under way.
        let whole = text.rfind('\n').map_or("", |end| &text[..end]);
        let parsed = |line| serde_json::from_str(line).unwrap_or_else(|_| panic!("{line}"));
        whole.lines().map(parsed).collect()
    }

    /// Asks its health server for `path`: status and body; none when nobody answers.
    pub(crate) async fn get(&self, path: &str) -> Option<(u16, String)> {
        let address: SocketAddr = self.log().iter().rev().find_map(|line| {
            let said = line["message"].as_str().unwrap_or_default();
            // The worker's words, or the exporter's.
            let serves =
                ["serving health and metrics", "serving metrics and health"].contains(&said);
            serves.then(|| line["address"].as_str().unwrap().parse().unwrap())
        })?;
        let mut stream = TcpStream::connect(address).await.ok()?;
        let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\n\r\n");
        stream.write_all(request.as_bytes()).await.ok()?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.ok()?;
        let (head, body) = answer.split_once("\r\n\r\n")?;
        Some((head.split(' ').nth(1)?.parse().ok()?, body.to_owned()))
    }

    /// Waits until it claims.
    pub(crate) async fn ready(&self) {
        let ready = async || self.get("/readyz").await.is_some_and(|(status, _)| status == 200);
        until("the worker is ready", LONG, ready).await;
    }
}

impl Drop for WorkerProcess {
    fn drop(&mut self) {
        if !self.ended {
            // Of a stopped process, too.
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}
