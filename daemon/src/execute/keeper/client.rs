//! The worker's side: starts its executions through the keeper, and tells it until when their leases
//! are trusted.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::Duration;

use async_trait::async_trait;
use rustix::io::Errno;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::{error, warn};

use super::Link;
use super::wire::{self, ExecutionId, Failure, Launch, Order, Report};
use crate::clock::BootInstant;
use crate::execute::spawn::{OurEnds, TheirEnds, pipes};
use crate::execute::spawner::{Exit, Running, SpawnError, SpawnRequest, Spawned, Spawner};
use crate::model::LeaseId;

/// How long a launch waits when the keeper has too many before it.
const FULL: Duration = Duration::from_millis(1);

/// Starts processes through the keeper of this worker.
pub struct Keeper {
    launch: OwnedFd,
    grace: Duration,
    next: AtomicU64,
    state: Arc<State>,
}

struct State {
    known: Mutex<Known>,
    orders: mpsc::Sender<Order>,
    lost: CancellationToken,
}

#[derive(Default)]
struct Known {
    leases: HashMap<LeaseId, BootInstant>,
    executions: HashMap<ExecutionId, Entry>,
}

struct Entry {
    lease: LeaseId,
    /// What the keeper was told at the launch.
    trusted_until: BootInstant,
    progress: watch::Sender<Progress>,
    /// Nobody waits for it any more: it is ended as soon as it can be named.
    abandoned: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Progress {
    Starting,
    Failed(Failure),
    Running,
    Exited,
    Gone(Exit),
    /// The keeper is gone.
    Lost,
}

impl Keeper {
    /// Talks to the keeper at the other end of `link`; executions have `grace` from TERM, when their
    /// lease is no longer trusted, to KILL.
    ///
    /// # Errors
    /// When the system has no thread left.
    pub fn connect(link: Link, grace: Duration) -> io::Result<Self> {
        let Link { launch, control } = link;
        let (orders, incoming) = mpsc::channel();
        let state =
            Arc::new(State { known: Mutex::default(), orders, lost: CancellationToken::new() });
        let outgoing = control.try_clone()?;
        std::thread::Builder::new().name("keeper-orders".to_owned()).spawn(move || {
            // A frozen keeper makes this wait, and nobody else.
            while incoming.recv().is_ok_and(|order| wire::send_order(&outgoing, order).is_ok()) {}
        })?;
        let heard = Arc::clone(&state);
        std::thread::Builder::new().name("keeper-reports".to_owned()).spawn(move || {
            while let Ok(Some(report)) = wire::next_report(&control) {
                heard.note(report);
            }
            heard.note_loss();
        })?;
        Ok(Self { launch, grace, next: AtomicU64::new(1), state })
    }

    /// Tells until when a lease is trusted; none when it is no longer held. Nothing is started under
    /// a lease that this has not heard of.
    pub fn trust(&self, lease: LeaseId, until: Option<BootInstant>) {
        let mut known = self.state.known();
        match until {
            None => drop(known.leases.remove(&lease)),
            Some(until) => {
                known.leases.insert(lease, until);
                if known.executions.values().any(|entry| entry.lease == lease) {
                    self.state.order(Order::Extend(lease, until));
                }
            }
        }
    }

    /// Cancelled when the keeper is gone, and with it everything it started: this worker can run
    /// nothing more.
    #[must_use]
    pub fn lost(&self) -> CancellationToken {
        self.state.lost.clone()
    }

    /// Enters an execution before its launch is sent.
    fn enter(&self, lease: LeaseId) -> Result<Kept, SpawnError> {
        let mut known = self.state.known();
        let Some(&trusted_until) = known.leases.get(&lease) else {
            return Err(failed("its lease is not held"));
        };
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let (progress, watched) = watch::channel(Progress::Starting);
        let entry = Entry { lease, trusted_until, progress, abandoned: false };
        known.executions.insert(id, entry);
        let state = Arc::clone(&self.state);
        Ok(Kept { id, trusted_until, sent: false, progress: watched, state })
    }

    async fn launch(&self, launch: &Launch, stdio: &TheirEnds) -> io::Result<()> {
        let bytes = launch.encode()?;
        let mut ends = vec![stdio.stdout.as_fd(), stdio.stderr.as_fd()];
        ends.extend(stdio.stdin.as_ref().map(AsFd::as_fd));
        loop {
            match wire::send_launch(&self.launch, &bytes, &ends) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                // Descriptors on their way count, too.
                Err(error) if Errno::from_io_error(&error) == Some(Errno::TOOMANYREFS) => {}
                sent => return sent,
            }
            tokio::time::sleep(FULL).await;
        }
    }
}

#[async_trait]
impl Spawner for Keeper {
    async fn spawn(&self, request: SpawnRequest) -> Result<Spawned, SpawnError> {
        let (theirs, ours) = pipes(request.pipe_stdin).map_err(SpawnError::System)?;
        let mut kept = self.enter(request.lease)?;
        let launch = Launch {
            id: kept.id,
            trusted_until: kept.trusted_until,
            grace_ns: u64::try_from(self.grace.as_nanos()).unwrap_or(u64::MAX),
            request,
        };
        self.launch(&launch, &theirs).await.map_err(|error| {
            match Errno::from_io_error(&error) {
                Some(Errno::TOOBIG) => SpawnError::Program(error),
                _ => SpawnError::System(error),
            }
        })?;
        kept.sent = true;
        drop(theirs);
        match kept.wait(|progress| *progress != Progress::Starting).await {
            Progress::Failed(Failure::System(errno)) => {
                Err(SpawnError::System(io::Error::from_raw_os_error(errno)))
            }
            Progress::Failed(Failure::WorkingDirectory(errno)) => {
                Err(SpawnError::WorkingDirectory(io::Error::from_raw_os_error(errno)))
            }
            Progress::Failed(Failure::Program(errno)) => {
                Err(SpawnError::Program(io::Error::from_raw_os_error(errno)))
            }
            Progress::Failed(Failure::TooLate) => Err(failed("its lease is no longer trusted")),
            // Whether it was started is not known, so this must not look like an answer.
            Progress::Lost => std::future::pending().await,
            Progress::Starting | Progress::Running | Progress::Exited | Progress::Gone(_) => {
                let OurEnds { stdin, stdout, stderr } = ours;
                Ok(Spawned { running: Box::new(kept), stdin, stdout, stderr })
            }
        }
    }
}

fn failed(why: &'static str) -> SpawnError {
    SpawnError::System(io::Error::other(why))
}

impl State {
    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn order(&self, order: Order) {
        // Without a keeper there is nothing to order, and everything is noted as lost.
        let _ = self.orders.send(order);
    }

    fn note(&self, report: Report) {
        let mut known = self.known();
        let Known { leases, executions } = &mut *known;
        let (id, progress) = match report {
            Report::Started(id) => (id, Progress::Running),
            Report::Failed(id, failure) => (id, Progress::Failed(failure)),
            Report::Exited(id) => (id, Progress::Exited),
            Report::Gone(id, exit) => (id, Progress::Gone(exit)),
        };
        let Some(entry) = executions.get(&id) else { return };
        if progress == Progress::Running {
            // A renewal answered meanwhile went out before the keeper knew of this execution.
            if let Some(&until) = leases.get(&entry.lease).filter(|u| **u > entry.trusted_until) {
                self.order(Order::Extend(entry.lease, until));
            }
            if entry.abandoned {
                self.order(Order::End(id));
            }
        }
        if progress == Progress::Gone(Exit::Fenced) {
            warn!(id, "the keeper ended an execution: its lease was no longer trusted");
        }
        entry.progress.send_replace(progress);
        if matches!(progress, Progress::Failed(_) | Progress::Gone(_)) {
            executions.remove(&id);
        }
    }

    fn note_loss(&self) {
        let executions = std::mem::take(&mut self.known().executions);
        error!(executions = executions.len(), "the keeper is gone, and what it started with it");
        for entry in executions.into_values() {
            entry.progress.send_replace(Progress::Lost);
        }
        self.lost.cancel();
    }
}

/// An execution, while anybody waits for it.
struct Kept {
    id: ExecutionId,
    trusted_until: BootInstant,
    /// Whether the keeper will hear of it.
    sent: bool,
    progress: watch::Receiver<Progress>,
    state: Arc<State>,
}

impl Kept {
    async fn wait(&mut self, until: impl FnMut(&Progress) -> bool) -> Progress {
        // The sender goes after its last word.
        self.progress.wait_for(until).await.map_or(Progress::Lost, |progress| *progress)
    }
}

#[async_trait]
impl Running for Kept {
    async fn exited(&self) {
        let mut progress = self.progress.clone();
        let ended = |progress: &Progress| matches!(progress, Progress::Exited | Progress::Gone(_));
        if progress.wait_for(ended).await.is_err() {
            // The keeper is gone: its end cannot be proven here.
            std::future::pending::<()>().await;
        }
    }

    fn terminate(&self) {
        self.state.order(Order::Terminate(self.id));
    }

    async fn end(&mut self) -> io::Result<Exit> {
        if !matches!(*self.progress.borrow(), Progress::Gone(_)) {
            self.state.order(Order::End(self.id));
        }
        match self.wait(|progress| matches!(progress, Progress::Gone(_))).await {
            Progress::Gone(exit) => Ok(exit),
            // Its end is not proven: it must not be handed in.
            Progress::Lost
            | Progress::Starting
            | Progress::Running
            | Progress::Exited
            | Progress::Failed(_) => std::future::pending().await,
        }
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        let mut known = self.state.known();
        if !self.sent {
            known.executions.remove(&self.id);
        } else if let Some(entry) = known.executions.get_mut(&self.id) {
            entry.abandoned = true;
            self.state.order(Order::End(self.id));
        }
    }
}
