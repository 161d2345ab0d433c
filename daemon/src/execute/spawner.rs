//! The seam between an executor and whatever starts its processes: the
//! [`Keeper`](super::keeper::Keeper) of a guarded worker, or [`LocalSpawner`](super::spawn::LocalSpawner),
//! whose children are this process's own.

use std::ffi::CString;
use std::io;
use std::sync::Arc;

use async_trait::async_trait;
use tokio::net::unix::pipe;

use crate::model::LeaseId;

/// What to start.
#[derive(Clone, Debug)]
pub struct SpawnRequest {
    /// The lease it runs under: it ends when that is no longer trusted (F5).
    pub lease: LeaseId,
    /// Paths to execute; the first that can be is taken, as `execvp` goes through `PATH`.
    pub programs: Arc<[CString]>,
    /// The argument vector, program name first.
    pub argv: Vec<CString>,
    /// The whole environment, as `NAME=value`.
    pub env: Vec<CString>,
    /// The working directory.
    pub cwd: CString,
    /// Whether standard input is a pipe; else it is `/dev/null`.
    pub pipe_stdin: bool,
}

/// A started process and our ends of its pipes.
pub struct Spawned {
    /// The process.
    pub running: Box<dyn Running>,
    /// Its standard input, when asked for.
    pub stdin: Option<pipe::Sender>,
    /// Its standard output.
    pub stdout: pipe::Receiver,
    /// Its standard error.
    pub stderr: pipe::Receiver,
}

/// Why a process could not be started. Nothing of it is left.
#[derive(Debug, thiserror::Error)]
pub enum SpawnError {
    /// The system refused a process, memory or a file descriptor.
    #[error("no process could be made")]
    System(#[source] io::Error),
    /// The working directory cannot be entered.
    #[error("the working directory cannot be entered")]
    WorkingDirectory(#[source] io::Error),
    /// None of the paths can be executed.
    #[error("the program cannot be executed")]
    Program(#[source] io::Error),
}

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// By itself, with this status, 0 to 255.
    Status(i32),
    /// By this signal.
    Signal(i32),
    /// The keeper ended it: its lease was no longer trusted (F5).
    Fenced,
}

/// Starts processes.
#[async_trait]
pub trait Spawner: Send + Sync {
    /// Starts a process as the leader of a session and process group of its own, with every signal
    /// at its default, none blocked, and no file descriptor but its standard three.
    ///
    /// # Errors
    /// As [`SpawnError`] tells them apart.
    ///
    /// # Cancel safety
    /// Safe: a process whose future was dropped is killed.
    async fn spawn(&self, request: SpawnRequest) -> Result<Spawned, SpawnError>;
}

/// A started process, the leader of its group. Dropped before [`Running::end`], its group is killed
/// and a zombie may stay.
#[async_trait]
pub trait Running: Send + Sync {
    /// Waits until the leader has exited. Others of its group may still run.
    ///
    /// # Cancel safety
    /// Safe: the exit status is kept for [`Running::end`].
    async fn exited(&self);

    /// Asks every process of the group to end (TERM, then CONT for those that are stopped).
    fn terminate(&self);

    /// Kills what is left of it, waits until that is gone and says how the leader ended. What a
    /// [`Keeper`](super::keeper::Keeper) started is gone down to the last descendant, and one that
    /// cannot be killed is waited for.
    ///
    /// # Errors
    /// When somebody else has taken the exit status; the group is gone all the same.
    ///
    /// # Cancel safety
    /// Not safe: the exit status may be lost.
    async fn end(&mut self) -> io::Result<Exit>;
}
