//! What a guard hands to the worker that it starts.

use std::io;
use std::os::fd::AsRawFd;
use std::process::Command;

use rustix::io::FdFlags;

use crate::execute::keeper::Link;
use crate::execute::spawn::inherited_socket;
use crate::model::WorkerId;

/// Names the worker and the descriptors of its link; set by the guard alone.
const VARIABLE: &str = "HOLDFAST_GUARDED";

/// The place of a worker below its guard.
#[derive(Debug)]
pub struct Seat {
    /// The identity under which the worker works.
    pub worker: WorkerId,
    /// The way to its keeper.
    pub link: Link,
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
        let [parent, worker, launch, control] = parts[..] else { return Err(wrong()) };
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
        }))
    }

    /// Lets `command` start in this place.
    pub(super) fn give(&self, command: &mut Command) -> io::Result<()> {
        let Link { launch, control } = &self.link;
        for socket in [launch, control] {
            rustix::io::fcntl_setfd(socket, FdFlags::empty())?;
        }
        let (launch, control) = (launch.as_raw_fd(), control.as_raw_fd());
        let own = rustix::process::getpid().as_raw_nonzero();
        command.env(VARIABLE, format!("{own} {} {launch} {control}", self.worker));
        Ok(())
    }
}
