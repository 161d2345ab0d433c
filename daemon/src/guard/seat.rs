//! What a guard hands to the worker that it starts.

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::process::Command;

use rustix::io::FdFlags;

use super::manager;
use super::report::Reporter;
use crate::execute::keeper::Link;
use crate::execute::spawn::inherited_socket;
use crate::model::WorkerId;

/// Names the worker and the descriptors of its links; set by the guard alone.
const VARIABLE: &str = "HOLDFAST_GUARDED";

/// The place of a worker below its guard.
#[derive(Debug)]
pub struct Seat {
    /// The identity under which the worker works.
    pub worker: WorkerId,
    /// The way to its keeper.
    pub link: Link,
    /// The way to its guard.
    pub reporter: Reporter,
    /// What the guard has to tell it.
    pub news: UnixStream,
}

impl Seat {
    /// Takes the place that this process was started in; none when no guard started it. Once.
    ///
    /// # Errors
    /// When the guard's variable is set, but not by a guard.
    pub fn take() -> io::Result<Option<Self>> {
        let Ok(text) = std::env::var(VARIABLE) else { return Ok(None) };
        let wrong = || io::Error::other(format!("{VARIABLE} is set, but by no guard"));
        let parts: Vec<&str> = text.split(' ').collect();
        let [parent, worker, launch, control, report, news] = parts[..] else {
            return Err(wrong());
        };
        // It stays in the environment of whatever this process starts otherwise.
        let of_parent = rustix::process::getppid().map(|pid| pid.as_raw_nonzero().to_string());
        if of_parent.as_deref() != Some(parent) {
            return Ok(None);
        }
        let socket = |text: &str| inherited_socket(text.parse().map_err(|_| wrong())?);
        rustix::thread::set_name(c"holdfast-worker")?;
        Ok(Some(Self {
            worker: worker.parse().map_err(|_| wrong())?,
            link: Link { launch: socket(launch)?, control: socket(control)? },
            reporter: Reporter::new(socket(report)?.into())?,
            news: socket(news)?.into(),
        }))
    }
}

/// Lets `command` start in the place of `worker`, with these ends of its ways.
pub(super) fn give(
    command: &mut Command,
    worker: WorkerId,
    link: &Link,
    report: &UnixDatagram,
    news: &UnixStream,
) -> io::Result<()> {
    let sockets = [link.launch.as_fd(), link.control.as_fd(), report.as_fd(), news.as_fd()];
    let own = rustix::process::getpid().as_raw_nonzero();
    let mut text = format!("{own} {worker}");
    for socket in sockets {
        rustix::io::fcntl_setfd(socket, FdFlags::empty())?;
        text = format!("{text} {}", socket.as_raw_fd());
    }
    command.env(VARIABLE, text);
    // The manager listens to the guard alone.
    for name in manager::VARIABLES {
        command.env_remove(name);
    }
    Ok(())
}
