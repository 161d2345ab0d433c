//! The keeper: a small process that starts a worker's executions and ends them with their leases,
//! whatever the worker does (P3, F5).
//!
//! It is a child of the guard and a sibling of the worker, and talks to the worker alone, over two
//! pairs of sockets. It holds the trust deadline of every execution: TERM when that passes, KILL a
//! grace later. When the worker's end of the sockets closes, or the guard is gone, it kills everything
//! and ends; it ends with success only when it has no children left, and as a subreaper every
//! descendant of an execution that lost its parent is one. It never waits for the worker and holds no
//! more than one entry for each execution.
//!
//! # Whose an orphan is
//!
//! A process that detached itself (`setsid`, a double fork) becomes a child of the keeper. It belongs to
//! the execution whose session or group it is in, else to the one named by `HOLDFAST_EXECUTION` in its
//! environment, else, when it was found below an execution that was being killed, to that one. One that
//! has left session and group, lost its parent *and* cannot be read (it erased its environment, or made
//! itself unreadable) is hidden: it is killed when no execution is left that ran when it was started, and
//! in any case with the worker. What another daemon starts on behalf of an execution (`at`, `systemd-run`,
//! a container engine) is no descendant, and is not ended.

mod client;
mod table;
mod wire;

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};
use rustix::process::{PidfdFlags, getpid, getppid, pidfd_open, set_child_subreaper};

use self::table::{Table, Terms};
use self::wire::{Failure, Launch, Report};
use super::spawn::{self, ChildStack, Started};
use super::spawner::SpawnError;
use crate::clock::{Clock, SystemClock};

pub use self::client::Keeper;

/// What `epoll` says of the sockets, the guard and the other thread; executions are numbered from below.
const CONTROL: u64 = u64::MAX;
const GUARD: u64 = u64::MAX - 1;
const WAKE: u64 = u64::MAX - 2;

/// How many orders are read before the clock is looked at again.
const ORDERS: usize = 64;
/// Clock ticks in `/proc`, per second, on every Linux.
const TICKS_PER_SECOND: u64 = 100;

/// The worker's ends of the sockets to its keeper.
#[derive(Debug)]
pub struct Link {
    /// Launches go out here.
    pub launch: OwnedFd,
    /// Orders go out here, reports come in.
    pub control: OwnedFd,
}

/// Starts a keeper as a child of this process, from `program`, which is this program; it ends when the
/// link is closed, and with this process.
///
/// # Errors
/// When the system has no process or file descriptor left.
pub fn start(program: &Path) -> io::Result<(Child, Link)> {
    let (launch, their_launch) = wire::pair()?;
    let (control, their_control) = wire::pair()?;
    let child = Command::new(program)
        .arg0("holdfast")
        .arg("keeper")
        .env_clear()
        .stdin(Stdio::from(their_launch))
        .stdout(Stdio::from(their_control))
        .spawn()?;
    Ok((child, Link { launch, control }))
}

struct Shared {
    table: Mutex<Table>,
    clock: SystemClock,
}

impl Shared {
    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Is the keeper, as [`start`] started it: launches on standard input, orders on standard output.
/// Returns when it has no children left.
///
/// # Errors
/// When it was not started so, or the system refuses what it needs.
pub fn run() -> io::Result<()> {
    spawn::block_signals();
    spawn::keep_exit_statuses()?;
    set_child_subreaper(Some(getpid()))?;
    rustix::thread::set_name(c"holdfast-keeper")?;
    let launch = io::stdin().as_fd().try_clone_to_owned()?;
    let control = io::stdout().as_fd().try_clone_to_owned()?;
    let guard = getppid().ok_or_else(|| io::Error::other("nobody to keep executions for"))?;
    let guard_alive = pidfd_open(guard, PidfdFlags::empty())?;
    if getppid() != Some(guard) {
        return Ok(()); // it ended meanwhile, and nothing runs yet
    }

    let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    let watch = |fd: &OwnedFd, data| {
        epoll::add(&epoll, fd, epoll::EventData::new_u64(data), epoll::EventFlags::IN)
    };
    watch(&control, CONTROL)?;
    watch(&guard_alive, GUARD)?;
    let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
    watch(&wake, WAKE)?;
    let name = uuid::Uuid::new_v4().simple().to_string();
    let table = Table::new(name, epoll.try_clone()?, control.try_clone()?, wake);
    let shared = Arc::new(Shared { table: Mutex::new(table), clock: SystemClock });
    let launcher = Arc::clone(&shared);
    std::thread::Builder::new()
        .name("launcher".to_owned())
        .spawn(move || serve_launches(&launcher, &launch))?;

    while keep(&shared, &epoll, &control)? {}
    let mut pause = Duration::from_micros(100);
    while !shared.table().close() {
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(20));
    }
    Ok(())
}

/// One round; false when the worker or the guard is gone.
fn keep(shared: &Shared, epoll: &OwnedFd, control: &OwnedFd) -> io::Result<bool> {
    let idle = shared.table().idle_for(shared.clock.now());
    let timeout = idle.map(|idle| Timespec::try_from(idle).unwrap_or_default());
    let mut buffer = [MaybeUninit::uninit(); 64];
    let events: &[epoll::Event] = match epoll::wait(epoll, &mut buffer, timeout.as_ref()) {
        Ok((events, _)) => events,
        Err(rustix::io::Errno::INTR) => &[],
        Err(error) => return Err(error.into()),
    };
    let mut table = shared.table();
    table.enforce(shared.clock.now());
    for event in events {
        match event.data.u64() {
            GUARD => return Ok(false),
            WAKE => table.woken(),
            CONTROL => {
                if !heed(&mut table, control)? {
                    return Ok(false);
                }
                table.flush();
            }
            id => table.leader_exited(id),
        }
    }
    if events.is_empty() {
        table.look_after();
    }
    Ok(true)
}

/// Reads orders that are there; false when the worker is gone.
fn heed(table: &mut Table, control: &OwnedFd) -> io::Result<bool> {
    for _ in 0..ORDERS {
        match wire::next_order(control) {
            Ok(Some(order)) => table.obey(order),
            Ok(None) => return Ok(false),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
            Err(error) => return Err(error),
        }
    }
    Ok(true)
}

/// Starts one process after the other, until the worker is gone. In a thread of its own: a program on a
/// file system that does not answer must not keep the others from being ended. Its children get KILL
/// when it ends, which is when this process does.
fn serve_launches(shared: &Shared, launches: &OwnedFd) {
    let Ok(null) = File::open("/dev/null") else { return };
    let mut stack = ChildStack::new();
    let mut buffer = Vec::new();
    loop {
        match wire::next_launch(launches, &mut buffer) {
            Ok(Some((launch, stdio))) => {
                let id = launch.id;
                if let Err(failure) = begin(shared, launch, &stdio, &null, &mut stack) {
                    shared.table().report(Report::Failed(id, failure));
                }
            }
            Ok(None) => break,
            // The worker and this process are of one program: it cannot happen. The launch is lost, and
            // the worker waits for it until its lease is; nothing runs that should not.
            Err(_) => {}
        }
    }
    // Its children must not die before this process has seen them do so.
    loop {
        std::thread::park();
    }
}

fn begin(
    shared: &Shared,
    launch: Launch,
    stdio: &[OwnedFd],
    null: &File,
    stack: &mut ChildStack,
) -> Result<(), Failure> {
    let Launch { id, trusted_until, grace_ns, mut request } = launch;
    let now = shared.clock.now();
    let mark = {
        let table = shared.table();
        if table.is_closing() || now >= trusted_until {
            return Err(Failure::TooLate);
        }
        table.mark(id)
    };
    request.env.push(CString::new(mark).expect("a mark holds no NUL"));
    let fds = match (request.pipe_stdin, stdio) {
        (true, [stdout, stderr, stdin]) => [stdin.as_fd(), stdout.as_fd(), stderr.as_fd()],
        (false, [stdout, stderr]) => [null.as_fd(), stdout.as_fd(), stderr.as_fd()],
        _ => return Err(Failure::System(libc::EMFILE)),
    };
    let terms = Terms {
        lease: request.lease,
        trusted_until,
        grace: Duration::from_nanos(grace_ns),
        started_tick: now.as_nanos() / (1_000_000_000 / TICKS_PER_SECOND),
    };
    let started: Started = spawn::start(&request, fds, stack).map_err(|error| failure(&error))?;
    shared.table().enter(id, terms, started);
    Ok(())
}

fn failure(error: &SpawnError) -> Failure {
    let number = |error: &io::Error| error.raw_os_error().unwrap_or(libc::EIO);
    match error {
        SpawnError::System(error) => Failure::System(number(error)),
        SpawnError::WorkingDirectory(error) => Failure::WorkingDirectory(number(error)),
        SpawnError::Program(error) => Failure::Program(number(error)),
    }
}
