//! One worker process of a test: its signals, its end, its log, its health server.

use std::fs;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::Child;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::fleet::{LONG, until};

/// One worker process. Dropped, it is killed, and the kernel kills its commands with it.
pub(crate) struct WorkerProcess {
    child: Child,
    log: PathBuf,
    ended: bool,
}

impl WorkerProcess {
    pub(super) const fn new(child: Child, log: PathBuf) -> Self {
        Self { child, log, ended: false }
    }

    pub(crate) fn pid(&self) -> i32 {
        i32::try_from(self.child.id()).unwrap()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        assert!(!self.ended, "nobody to signal any more");
        kill_process(Pid::from_raw(self.pid()).unwrap(), signal).unwrap();
    }

    /// `kill -9`.
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
        let address: SocketAddr = self.log().iter().find_map(|line| {
            let serves = line["message"] == "serving health and metrics";
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
