//! Starting child processes: what a child must do between fork and exec.
#![expect(unsafe_code, reason = "pre_exec runs code between fork and exec; the crate's one place")]

use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};

use rustix::io::Errno;
use rustix::process::{Signal, getpid, getppid, set_parent_process_death_signal};

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
