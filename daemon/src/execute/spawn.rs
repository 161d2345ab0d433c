//! Starting processes as children of this one, and ending everything they left in their group.
//!
//! A child is started as `posix_spawn` does it (`CLONE_VM | CLONE_VFORK`) and not by `fork`, which
//! copies the page tables of the worker: at 50 MB resident a fork starts 400 processes per second
//! where this starts 1,500. What the child needs besides (a session, a death signal, every signal at
//! its default) has no `posix_spawn` attribute, hence the code here.
//!
//! Needs Linux 5.4 (process file descriptors).

#![expect(unsafe_code, reason = "what a child does between clone and exec has no safe interface")]

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};
use std::ptr;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use async_trait::async_trait;
use rustix::io::Errno;
use rustix::process::{
    Pid, Signal, WaitId, WaitIdOptions, getpid, getppid, kill_process_group,
    set_parent_process_death_signal, test_kill_process_group, waitid,
};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::net::unix::pipe;
use tokio::sync::oneshot;

use super::processes::{self, Process};
use super::spawner::{Exit, Running, SpawnError, SpawnRequest, Spawned, Spawner};

/// Starts children of this process, from a thread of its own.
///
/// A child gets KILL when the *thread* that started it ends (`PR_SET_PDEATHSIG`), so that thread must
/// live as long as the child; a thread of the runtime need not.
#[derive(Debug)]
pub struct LocalSpawner {
    orders: mpsc::Sender<Order>,
}

impl LocalSpawner {
    /// Starts the thread. It ends with the last process started through it.
    ///
    /// # Errors
    /// When the system has no thread or file descriptor left.
    pub fn new() -> io::Result<Self> {
        keep_exit_statuses()?;
        let null = File::open("/dev/null")?;
        let (orders, incoming) = mpsc::channel();
        std::thread::Builder::new()
            .name("spawner".to_owned())
            .spawn(move || serve(&incoming, &null))?;
        Ok(Self { orders })
    }
}

#[async_trait]
impl Spawner for LocalSpawner {
    async fn spawn(&self, request: SpawnRequest) -> Result<Spawned, SpawnError> {
        let (theirs, ours) = pipes(request.pipe_stdin).map_err(SpawnError::System)?;
        let (reply, answer) = oneshot::channel();
        let lost = || SpawnError::System(io::Error::other("the spawner thread has ended"));
        self.orders.send(Order { request, stdio: theirs, reply }).map_err(|_| lost())?;
        let started = answer.await.map_err(|_| lost())??;

        let running = LocalRunning::watch(started, self.orders.clone());
        let running = running.map_err(SpawnError::System)?;
        let OurEnds { stdin, stdout, stderr } = ours;
        Ok(Spawned { running: Box::new(running), stdin, stdout, stderr })
    }
}

/// The child's ends of the pipes.
#[derive(Debug)]
pub(super) struct TheirEnds {
    pub(super) stdin: Option<OwnedFd>,
    pub(super) stdout: OwnedFd,
    pub(super) stderr: OwnedFd,
}

pub(super) struct OurEnds {
    pub(super) stdin: Option<pipe::Sender>,
    pub(super) stdout: pipe::Receiver,
    pub(super) stderr: pipe::Receiver,
}

pub(super) fn pipes(with_stdin: bool) -> io::Result<(TheirEnds, OurEnds)> {
    let (their_stdin, stdin) = if with_stdin {
        let (read, write) = io::pipe()?;
        (Some(above_stdio(read.into())?), Some(pipe::Sender::from_owned_fd(write.into())?))
    } else {
        (None, None)
    };
    let (stdout, their_stdout) = io::pipe()?;
    let (stderr, their_stderr) = io::pipe()?;
    let theirs = TheirEnds {
        stdin: their_stdin,
        stdout: above_stdio(their_stdout.into())?,
        stderr: above_stdio(their_stderr.into())?,
    };
    let stdout = pipe::Receiver::from_owned_fd(stdout.into())?;
    let stderr = pipe::Receiver::from_owned_fd(stderr.into())?;
    Ok((theirs, OurEnds { stdin, stdout, stderr }))
}

/// Moves a descriptor out of the way of the child's standard three, should this process run with
/// one of its own closed.
pub(super) fn above_stdio(fd: OwnedFd) -> io::Result<OwnedFd> {
    if fd.as_raw_fd() > 2 { Ok(fd) } else { Ok(rustix::io::fcntl_dupfd_cloexec(fd, 3)?) }
}

#[derive(Debug)]
struct Order {
    request: SpawnRequest,
    stdio: TheirEnds,
    reply: oneshot::Sender<Result<Started, SpawnError>>,
}

/// The spawner thread: one process after the other, until nobody can order any more.
fn serve(orders: &mpsc::Receiver<Order>, null: &File) {
    block_signals();
    let mut stack = ChildStack::new();
    for Order { request, stdio, reply } in orders {
        let stdin = stdio.stdin.as_ref().map_or(null.as_fd(), AsFd::as_fd);
        let fds = [stdin, stdio.stdout.as_fd(), stdio.stderr.as_fd()];
        let started = start(&request, fds, &mut stack);
        // Held any longer, our copies of the child's ends would keep its pipes from ending.
        drop(stdio);
        // Nobody waits for it any more: dropped unsent, it is killed.
        drop(reply.send(started));
    }
}

/// An unreaped child. Dropped as such, its group is killed.
#[derive(Debug)]
pub(super) struct Leader {
    pid: Pid,
    reaped: bool,
}

impl Leader {
    pub(super) const fn pid(&self) -> Pid {
        self.pid
    }

    /// Somebody else has reaped it: its id is no longer its own.
    pub(super) const fn disown(&mut self) {
        self.reaped = true;
    }

    pub(super) fn signal_group(&self, signal: Signal) {
        // As long as the leader is not reaped its id cannot be given to another group. The only
        // failures left are "nobody there" and "not permitted", and nothing can be done about them.
        let _ = kill_process_group(self.pid, signal);
    }

    pub(super) fn reap(&mut self, wait: WaitIdOptions) -> io::Result<Option<Exit>> {
        let status = loop {
            match waitid(WaitId::Pid(self.pid), WaitIdOptions::EXITED | wait) {
                Err(Errno::INTR) => {}
                Err(error) => {
                    self.reaped = true;
                    return Err(error.into());
                }
                Ok(None) => return Ok(None),
                Ok(Some(status)) => break status,
            }
        };
        self.reaped = true;
        if let Some(signal) = status.terminating_signal() {
            return Ok(Some(Exit::Signal(signal)));
        }
        let code =
            status.exit_status().ok_or_else(|| io::Error::other("neither exit nor signal"))?;
        Ok(Some(Exit::Status(code)))
    }

    pub(super) fn has_exited(&self) -> bool {
        let look = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        // An error says that somebody else reaped it.
        !matches!(waitid(WaitId::Pid(self.pid), look), Ok(None))
    }
}

impl Drop for Leader {
    fn drop(&mut self) {
        if !self.reaped {
            self.signal_group(Signal::KILL);
            let _ = self.reap(WaitIdOptions::NOHANG);
        }
    }
}

/// A process that was started.
#[derive(Debug)]
pub(super) struct Started {
    pub(super) leader: Leader,
    /// Readable once it has exited.
    pub(super) pidfd: OwnedFd,
}

struct LocalRunning {
    leader: Leader,
    pidfd: AsyncFd<OwnedFd>,
    /// Keeps the thread that started it alive.
    _orders: mpsc::Sender<Order>,
}

/// How long to wait for killed processes to end. Only one that is stuck in the kernel takes longer.
const GROUP_END: Duration = Duration::from_secs(1);

impl LocalRunning {
    fn watch(started: Started, orders: mpsc::Sender<Order>) -> io::Result<Self> {
        let Started { leader, pidfd } = started;
        // SAFETY: the descriptor is owned by the `AsyncFd`, and open until it drops it.
        let pidfd = unsafe { AsyncFd::register_with_interest(pidfd, Interest::READABLE) }?;
        Ok(Self { leader, pidfd, _orders: orders })
    }

    async fn group_gone(&self) {
        let group = self.leader.pid;
        let mut waited = Duration::ZERO;
        let mut pause = Duration::from_millis(1);
        loop {
            // As process 1, or as a subreaper, this process inherits the leader's orphans.
            let dead = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
            while let Ok(Some(_)) = waitid(WaitId::Pgid(Some(group)), dead) {}
            if test_kill_process_group(group) == Err(Errno::SRCH) {
                return;
            }
            // Process 1 may be slow to collect the dead, or never do it. A look at all processes
            // costs more than a few of these rounds.
            let lives = |p: &Process| p.group == group.as_raw_nonzero().get() && !p.ended;
            if pause > Duration::from_millis(4) && !processes::all().iter().any(lives) {
                return;
            }
            if waited >= GROUP_END {
                tracing::warn!(group = group.as_raw_nonzero(), "killed processes do not end");
                return;
            }
            tokio::time::sleep(pause).await;
            waited += pause;
            pause = (pause * 2).min(Duration::from_millis(50));
        }
    }
}

#[async_trait]
impl Running for LocalRunning {
    async fn exited(&self) {
        while let Ok(mut ready) = self.pidfd.readable().await {
            if self.leader.has_exited() {
                return;
            }
            ready.clear_ready();
        }
    }

    fn terminate(&self) {
        self.leader.signal_group(Signal::TERM);
        self.leader.signal_group(Signal::CONT);
    }

    async fn end(&mut self) -> io::Result<Exit> {
        // Before the leader is reaped: then its group's id is still its own.
        self.leader.signal_group(Signal::KILL);
        self.exited().await;
        let exit = self.leader.reap(WaitIdOptions::NOHANG);
        self.group_gone().await;
        exit?.ok_or_else(|| io::Error::other("the process has not exited"))
    }
}

/// A SIGCHLD that was ignored when this program was started would make the kernel throw away the
/// exit status of every child.
pub(super) fn keep_exit_statuses() -> io::Result<()> {
    // SAFETY: `sigaction` is called with valid pointers, and sets a disposition without a handler.
    // All-zero bytes are a valid `sigaction`: default disposition, no flags, empty mask.
    unsafe {
        let mut now: libc::sigaction = std::mem::zeroed();
        if libc::sigaction(libc::SIGCHLD, ptr::null(), &raw mut now) != 0 {
            return Err(io::Error::last_os_error());
        }
        let default: libc::sigaction = std::mem::zeroed();
        if now.sa_sigaction == libc::SIG_IGN
            && libc::sigaction(libc::SIGCHLD, &raw const default, ptr::null_mut()) != 0
        {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

/// Blocks every signal in this thread: a child that shares our memory must not run our handlers.
pub(super) fn block_signals() {
    // SAFETY: both calls get a valid pointer to a set of this frame.
    unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, ptr::null_mut());
    }
}

/// Where the child runs until it executes its program. One is enough: the thread waits meanwhile.
pub(super) struct ChildStack(Box<[u128]>);

impl ChildStack {
    pub(super) fn new() -> Self {
        Self(vec![0; 64 * 1024 / size_of::<u128>()].into_boxed_slice())
    }

    fn top(&mut self) -> *mut c_void {
        self.0.as_mut_ptr_range().end.cast()
    }
}

/// What the child does; made beforehand, because it must not allocate.
struct Plan<'a> {
    programs: &'a [*const c_char],
    argv: &'a [*const c_char],
    envp: &'a [*const c_char],
    cwd: &'a CStr,
    stdio: [RawFd; 3],
    parent: libc::pid_t,
    /// The step that failed, and its `errno`; written by the child, into our memory.
    failed: AtomicI32,
    errno: AtomicI32,
}

/// The size of a signal set in the kernel, where signals go from 1 to 64.
const SIGSET_BYTES: usize = 8;

const NOTHING: i32 = 0;
const SYSTEM: i32 = 1;
const WORKING_DIRECTORY: i32 = 2;
const PROGRAM: i32 = 3;

/// Starts a process; the calling thread waits until it executes its program, and blocks all signals.
pub(super) fn start(
    request: &SpawnRequest,
    stdio: [BorrowedFd<'_>; 3],
    stack: &mut ChildStack,
) -> Result<Started, SpawnError> {
    let programs: Vec<_> = request.programs.iter().map(|path| path.as_ptr()).collect();
    let plan = Plan {
        programs: &programs,
        argv: &null_terminated(&request.argv),
        envp: &null_terminated(&request.env),
        cwd: &request.cwd,
        stdio: stdio.map(|fd| fd.as_raw_fd()),
        // SAFETY: it has no preconditions.
        parent: unsafe { libc::getpid() },
        failed: AtomicI32::new(NOTHING),
        errno: AtomicI32::new(0),
    };
    let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::CLONE_PIDFD | libc::SIGCHLD;
    let argument = ptr::from_ref(&plan).cast_mut().cast();
    let mut pidfd: RawFd = -1;
    // SAFETY: `child` runs on a stack of its own, which nobody else uses: CLONE_VFORK suspends this
    // thread until the child has executed its program or ended. So `plan` outlives its use, too.
    // No handler of ours runs in it, as this thread blocks all signals. The child has its own table
    // of file descriptors, its own dispositions and working directory (no CLONE_FILES,
    // CLONE_SIGHAND, CLONE_FS).
    let pid = unsafe { libc::clone(child, stack.top(), flags, argument, &raw mut pidfd) };
    if pid < 0 {
        return Err(SpawnError::System(io::Error::last_os_error()));
    }
    let pid = Pid::from_raw(pid).expect("only the child would see zero");
    // SAFETY: the kernel has just made this descriptor for us (CLONE_PIDFD).
    let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
    let mut leader = Leader { pid, reaped: false };

    let error = io::Error::from_raw_os_error(plan.errno.load(Ordering::Acquire));
    let failure: fn(io::Error) -> SpawnError = match plan.failed.load(Ordering::Acquire) {
        NOTHING => return Ok(Started { leader, pidfd }),
        WORKING_DIRECTORY => SpawnError::WorkingDirectory,
        PROGRAM => SpawnError::Program,
        _ => SpawnError::System,
    };
    // It is on its way out, and has no descendants.
    let _ = leader.reap(WaitIdOptions::empty());
    Err(failure(error))
}

fn null_terminated(strings: &[CString]) -> Vec<*const c_char> {
    strings.iter().map(|text| text.as_ptr()).chain([ptr::null()]).collect()
}

/// The child. It shares our memory: no allocation, no lock, no panic, no destructor.
extern "C" fn child(plan: *mut c_void) -> c_int {
    // SAFETY: `start` passes a valid plan and is suspended.
    let plan = unsafe { &*plan.cast::<Plan<'_>>() };
    // SAFETY: this is the child of `start`, with a plan that `start` made.
    let failed = unsafe { become_program(plan) };
    // SAFETY: it returns a valid pointer, always.
    let errno = unsafe { *libc::__errno_location() };
    plan.errno.store(errno, Ordering::Release);
    plan.failed.store(failed, Ordering::Release);
    // SAFETY: it ends this process alone, and runs nothing of ours before.
    unsafe { libc::_exit(127) }
}

/// Executes the program; returns the step that failed, with its reason in `errno`.
///
/// # Safety
/// Only for a new process whose memory's other users are suspended; the pointers of `plan` must be
/// valid, its argument and environment vectors end in a null pointer.
unsafe fn become_program(plan: &Plan<'_>) -> i32 {
    // SAFETY: system calls on valid arguments, all of them async-signal-safe.
    unsafe {
        if libc::setsid() < 0
            || libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) < 0
            // Our parent may have died before it could be tied to us.
            || libc::getppid() != plan.parent
        {
            return SYSTEM;
        }
        for (target, &fd) in (0..).zip(&plan.stdio) {
            if libc::dup2(fd, target) < 0 {
                return SYSTEM;
            }
        }
        // Whatever this program inherited or a library opened without close-on-exec. Kernels before
        // 5.9 do not have the call; then the flag has to do.
        libc::syscall(libc::SYS_close_range, 3, libc::c_uint::MAX, 0);
        if libc::chdir(plan.cwd.as_ptr()) < 0 {
            return WORKING_DIRECTORY;
        }
        // What is ignored stays ignored over exec, such as SIGPIPE in every Rust program. What is
        // caught must be reset before a signal can arrive. The system call itself, because the C
        // library leaves out two signals of its own; zeroes are SIG_DFL in the kernel's layout.
        let default = [0_u64; 8];
        for signal in 1..=libc::SIGRTMAX() {
            let none = ptr::null_mut::<u64>();
            libc::syscall(libc::SYS_rt_sigaction, signal, default.as_ptr(), none, SIGSET_BYTES);
        }
        let mut empty: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut empty);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const empty, ptr::null_mut());

        let mut reason = libc::ENOENT;
        for &program in plan.programs {
            libc::execve(program, plan.argv.as_ptr(), plan.envp.as_ptr());
            match *libc::__errno_location() {
                // Not there: look on.
                libc::ENOENT | libc::ENOTDIR => {}
                // There, but not for us: look on, and say so if nothing better comes.
                libc::EACCES => reason = libc::EACCES,
                _ => return PROGRAM,
            }
        }
        *libc::__errno_location() = reason;
        PROGRAM
    }
}

/// Starts `command` so that the kernel sends `signal` to it when the *thread* that called this
/// ends, however it ends; call it from a thread that lives as long as the child should.
///
/// An identity set on `command` (`uid`, `gid`) is taken on first: changing it later would clear
/// the signal again.
///
/// # Errors
/// When the child cannot be started, or this process ended before the signal was set.
pub fn spawn_with_death_signal(command: &mut Command, signal: Signal) -> io::Result<Child> {
    let parent = getpid();
    let arm = move || {
        set_parent_process_death_signal(Some(signal))?;
        // A parent that ended before the line above sends nothing any more.
        if getppid() == Some(parent) { Ok(()) } else { Err(io::Error::from(Errno::SRCH)) }
    };
    // SAFETY: `arm` makes two system calls on values it owns. It takes no lock, allocates nothing
    // and touches no memory of other threads, so it is sound in the child of a threaded process.
    unsafe {
        command.pre_exec(arm);
    }
    command.spawn()
}

/// Takes over a socket that this program was started with.
///
/// # Errors
/// When the descriptor is none, or not of a socket.
pub fn inherited_socket(descriptor: RawFd) -> io::Result<OwnedFd> {
    let link = std::fs::read_link(format!("/proc/self/fd/{descriptor}"))?;
    if descriptor <= 2 || !link.to_string_lossy().starts_with("socket:") {
        return Err(io::Error::other("not a socket that was handed over"));
    }
    // SAFETY: it is open, as its link says. Nothing else in this program uses it: it was open before
    // the program began, and is named to this function alone.
    let socket = unsafe { OwnedFd::from_raw_fd(descriptor) };
    rustix::io::fcntl_setfd(&socket, rustix::io::FdFlags::CLOEXEC)?;
    Ok(socket)
}
