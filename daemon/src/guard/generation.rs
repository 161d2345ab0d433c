//! One worker with its keeper, from their start to the end of everything they started.

use std::fmt;
use std::io;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command};
use std::time::Duration;

use futures::StreamExt;
use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitOptions, WaitStatus, kill_process, wait};
use signal_hook::consts::{SIGCHLD, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook_tokio::Signals;
use tokio::time::{sleep, timeout};
use tracing::{debug, info, warn};

use super::FAULTS;
use super::manager::Manager;
use super::news::News;
use super::report::Reports;
use super::seat;
use crate::execute::keeper;
use crate::execute::processes::{Children, kill_child};
use crate::execute::spawn::spawn_with_death_signal;
use crate::model::WorkerId;

/// This program, even when its file was replaced meanwhile: guard, keeper and worker are of one build.
const PROGRAM: &str = "/proc/self/exe";

/// How long the keeper has to end what a dead worker left. One that takes longer is frozen, or waits for
/// a process that the kernel cannot end.
const KEEPER_PATIENCE: Duration = Duration::from_secs(5);
/// How long the guard waits for the end of what a dead keeper left.
const ORPHAN_PATIENCE: Duration = Duration::from_secs(10);

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    Exit(i32),
    Signal(i32),
}

impl End {
    fn of(status: WaitStatus) -> Self {
        match status.terminating_signal() {
            Some(signal) => Self::Signal(signal),
            None => Self::Exit(status.exit_status().unwrap_or(FAULTS[0])),
        }
    }
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exit(status) => write!(f, "exit status {status}"),
            Self::Signal(signal) => {
                let name = signal_hook::low_level::signal_name(*signal).unwrap_or("no name");
                write!(f, "signal {signal} ({name})")
            }
        }
    }
}

/// How a generation ended.
#[expect(
    clippy::struct_excessive_bools,
    reason = "four facts that have nothing to do with each other"
)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Ending {
    /// How its worker did.
    pub(super) end: End,
    /// Whether a signal that asks for the end was passed on.
    pub(super) asked: bool,
    /// Whether it died of a signal that was passed on and that it does not handle, or not yet.
    pub(super) passed: bool,
    /// Whether the keeper ended first: then the worker was killed.
    pub(super) keeper_failed: bool,
    /// Whether nothing of it runs any more.
    pub(super) proven: bool,
}

impl Ending {
    pub(super) fn crashed(&self) -> bool {
        match self.end {
            _ if self.keeper_failed => true,
            End::Exit(status) => FAULTS.contains(&status),
            End::Signal(_) => !self.passed,
        }
    }

    /// The exit status that says so, as shells have it.
    pub(super) fn status(&self) -> i32 {
        match self.end {
            End::Exit(status) => status,
            End::Signal(signal) => 128 + signal,
        }
    }
}

impl fmt::Display for Ending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.keeper_failed { f.write_str("its keeper ended") } else { self.end.fmt(f) }
    }
}

/// A worker and its keeper.
pub(super) struct Generation {
    id: WorkerId,
    worker: Pid,
    keeper: Pid,
    reports: Reports,
    takes_orders: bool,
    /// Whether the worker has handled no order yet, and dies of one.
    deaf: bool,
}

impl Generation {
    /// Starts both. A worker that takes `orders` gets none before its first report; it hears the
    /// `news`.
    pub(super) fn start(orders: bool, news: &News) -> io::Result<Self> {
        let (keeper, link) = keeper::start(Path::new(PROGRAM))?;
        let (reports, report) = Reports::pair()?;
        let (to, from) = UnixStream::pair()?;
        to.set_nonblocking(true)?;
        let id = WorkerId::generate();
        let mut arguments = std::env::args_os();
        let mut command = Command::new(PROGRAM);
        command.arg0(arguments.next().unwrap_or_else(|| "holdfast".into())).args(arguments);
        seat::give(&mut command, id, &link, &report, &from)?;
        let worker = spawn_with_death_signal(&mut command, Signal::KILL)?;
        let (keeper, worker) = (pid(&keeper), pid(&worker));
        let guard = rustix::process::getpid();
        info!(
            worker = %id, guard_pid = guard.as_raw_nonzero(), worker_pid = worker.as_raw_nonzero(),
            keeper_pid = keeper.as_raw_nonzero(), "guarding a worker"
        );
        news.go_to(to);
        // Here the guard's ends of the link close: the keeper must see the worker's end close.
        Ok(Self { id, worker, keeper, reports, takes_orders: orders, deaf: orders })
    }

    pub(super) const fn worker(&self) -> WorkerId {
        self.id
    }

    /// Passes signals on until worker and keeper have ended; then ends what they left.
    pub(super) async fn run(mut self, signals: &mut Signals, manager: &mut Manager) -> Ending {
        let mut worker: Option<End> = None;
        let mut keeper: Option<End> = None;
        let mut passed = Vec::new();
        let mut keeper_failed = false;
        loop {
            while let Some((pid, end)) = reap() {
                if pid == self.worker {
                    worker = Some(end);
                } else if pid == self.keeper {
                    keeper = Some(end);
                } else {
                    debug!(pid = pid.as_raw_nonzero(), "reaped an orphan");
                }
            }
            let next = match (worker, keeper) {
                (Some(end), Some(kept)) => {
                    let proven = kept == End::Exit(0) || end_orphans().await;
                    let asked = passed.iter().any(|signal| asks_to_end(*signal));
                    let passed = matches!(end, End::Signal(signal) if passed.contains(&signal));
                    return Ending { end, asked, passed, keeper_failed, proven };
                }
                (None, Some(kept)) => {
                    // With success it ends when the worker has closed the link, on its way out.
                    if kept != End::Exit(0) && !keeper_failed {
                        warn!("the keeper ended: ending its worker");
                        keeper_failed = true;
                        // It can run nothing more, and what it ran is gone or is hunted down here.
                        let _ = kill_process(self.worker, Signal::KILL);
                    }
                    self.next(signals, manager).await
                }
                (Some(_), None) => {
                    let next = timeout(KEEPER_PATIENCE, signals.next()).await;
                    next.unwrap_or_else(|_| {
                        warn!("the keeper does not end: ending it");
                        let _ = kill_process(self.keeper, Signal::KILL);
                        None
                    })
                }
                (None, None) => self.next(signals, manager).await,
            };
            if let Some(signal) = next
                && signal != SIGCHLD
                && worker.is_none()
            {
                if asks_to_end(signal) {
                    manager.stopping();
                } else if self.deaf && is_order(signal) {
                    debug!(signal, "the worker is not up yet: the signal is dropped");
                    continue;
                } else if signal == SIGHUP && self.takes_orders {
                    manager.reloading();
                }
                if !passed.contains(&signal) {
                    passed.push(signal);
                }
                // Not reaped yet: the id is its own.
                if let Some(signal) = Signal::from_named_raw(signal) {
                    let _ = kill_process(self.worker, signal);
                }
            }
        }
    }
}

impl Generation {
    /// Waits for the next signal; passes what the worker reports on to the manager meanwhile.
    async fn next(&mut self, signals: &mut Signals, manager: &mut Manager) -> Option<i32> {
        loop {
            tokio::select! {
                signal = signals.next() => return signal,
                report = self.reports.next() => {
                    self.deaf = false;
                    manager.worker_alive(&report);
                }
            }
        }
    }
}

/// Whether a signal asks a worker for something else than its end.
const fn is_order(signal: i32) -> bool {
    matches!(signal, SIGHUP | SIGUSR1 | SIGUSR2)
}

/// Whether a signal ends a worker, at once or after its drain.
pub(super) const fn asks_to_end(signal: i32) -> bool {
    matches!(signal, SIGTERM | SIGINT | SIGQUIT)
}

fn pid(child: &Child) -> Pid {
    Pid::from_child(child)
}

/// Reaps a child that has ended.
fn reap() -> Option<(Pid, End)> {
    loop {
        match wait(WaitOptions::NOHANG) {
            Ok(Some((pid, status))) => return Some((pid, End::of(status))),
            Err(Errno::INTR) => {}
            Ok(None) | Err(_) => return None,
        }
    }
}

/// Kills what became a child of this process, until there is none left; false when some do not end.
async fn end_orphans() -> bool {
    let mut children = Children::of_this_thread();
    let gone = async {
        let mut pause = Duration::from_millis(1);
        loop {
            while reap().is_some() {}
            let left = children.list(|_| false);
            if left.is_empty() {
                return;
            }
            left.into_iter().for_each(kill_child);
            sleep(pause).await;
            pause = (pause * 2).min(Duration::from_millis(50));
        }
    };
    timeout(ORPHAN_PATIENCE, gone).await.is_ok()
}
