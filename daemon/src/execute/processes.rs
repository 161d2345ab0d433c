//! What `/proc` says of processes.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::FileExt;

use rustix::process::{Pid, Signal, kill_process, pidfd_open, pidfd_send_signal};

/// How much of a process's environment is looked at.
const ENVIRONMENT_BYTES: u64 = 1024 * 1024;

/// One process, as its `stat` has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Process {
    /// Its id, and when it started, in clock ticks since boot: together they name one process.
    pub(crate) id: (Pid, u64),
    pub(crate) parent: i32,
    pub(crate) group: i32,
    pub(crate) session: i32,
    /// Whether it has ended, and only waits to be reaped.
    pub(crate) ended: bool,
}

impl Process {
    /// None when there is no such process.
    pub(crate) fn read(pid: Pid) -> Option<Self> {
        let stat = fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero())).ok()?;
        Self::parse(pid, &stat)
    }

    fn parse(pid: Pid, stat: &str) -> Option<Self> {
        // pid (name) state parent group session …, where the name may hold anything
        let (_, after_name) = stat.rsplit_once(") ")?;
        let fields: Vec<&str> = after_name.split(' ').collect();
        let number = |n: usize| fields.get(n).and_then(|field: &&str| field.parse().ok());
        Some(Self {
            id: (pid, fields.get(19)?.parse().ok()?),
            parent: number(1)?,
            group: number(2)?,
            session: number(3)?,
            ended: matches!(*fields.first()?, "Z" | "X"),
        })
    }

    /// Kills this process, and none that got its id later.
    pub(crate) fn kill(&self) {
        let (pid, _) = self.id;
        let Ok(pidfd) = pidfd_open(pid, rustix::process::PidfdFlags::empty()) else { return };
        // The descriptor stands for whatever has the id now: is that still the same?
        if Self::read(pid).is_some_and(|now| now.id == self.id) {
            // Not there, or not ours to kill: nothing can be done about either.
            let _ = pidfd_send_signal(pidfd, Signal::KILL);
        }
    }

    /// The value of a variable in the environment that it started with; none when it cannot be read.
    pub(crate) fn variable(&self, name: &str) -> Option<String> {
        let file = File::open(format!("/proc/{}/environ", self.id.0.as_raw_nonzero())).ok()?;
        let mut all = Vec::new();
        file.take(ENVIRONMENT_BYTES).read_to_end(&mut all).ok()?;
        let value = all.split(|byte| *byte == 0).find_map(|line| {
            line.strip_prefix(name.as_bytes()).and_then(|rest| rest.strip_prefix(b"="))
        })?;
        String::from_utf8(value.to_vec()).ok()
    }
}

/// Every process there is.
pub(crate) fn all() -> Vec<Process> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    entries
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter_map(Pid::from_raw)
        .filter_map(Process::read)
        .collect()
}

/// What descends from `roots`, without them.
pub(crate) fn descendants(roots: &[Pid]) -> Vec<Process> {
    let all = all();
    let mut known: HashSet<i32> = roots.iter().map(|pid| pid.as_raw_nonzero().get()).collect();
    let mut found = Vec::new();
    loop {
        let before = found.len();
        for process in &all {
            let pid = process.id.0.as_raw_nonzero().get();
            if known.contains(&process.parent) && known.insert(pid) {
                found.push(*process);
            }
        }
        if found.len() == before {
            return found;
        }
    }
}

/// Kills a child of this process that nobody has reaped yet: its id is its own.
pub(crate) fn kill_child(pid: Pid) {
    let _ = kill_process(pid, Signal::KILL);
}

/// The children of one thread. What the kernel hands to a subreaper becomes a child of its first
/// thread; if that starts no process itself, they are all orphans.
pub(crate) struct Children {
    list: Option<File>,
    buffer: Vec<u8>,
}

impl Children {
    /// Those of the calling thread.
    pub(crate) fn of_this_thread() -> Self {
        let thread = rustix::thread::gettid().as_raw_nonzero();
        // A kernel without CONFIG_PROC_CHILDREN has no such file.
        let list = File::open(format!("/proc/self/task/{thread}/children")).ok();
        Self { list, buffer: vec![0; 4096] }
    }

    /// Their ids, zombies included; `known` are children of other threads.
    pub(crate) fn list(&mut self, known: impl Fn(Pid) -> bool) -> Vec<Pid> {
        match &self.list {
            Some(list) => {
                read_list(list, &mut self.buffer).unwrap_or_else(|_| children_by_scan(known))
            }
            None => children_by_scan(known),
        }
    }
}

fn read_list(list: &File, buffer: &mut [u8]) -> io::Result<Vec<Pid>> {
    let first = list.read_at(buffer, 0)?;
    if first == 0 {
        return Ok(Vec::new());
    }
    let mut text = buffer[..first].to_vec();
    loop {
        match list.read_at(buffer, u64::try_from(text.len()).unwrap_or(u64::MAX))? {
            0 => break,
            more => text.extend_from_slice(&buffer[..more]),
        }
    }
    let text = String::from_utf8_lossy(&text);
    Ok(text.split_whitespace().filter_map(|pid| Pid::from_raw(pid.parse().ok()?)).collect())
}

fn children_by_scan(known: impl Fn(Pid) -> bool) -> Vec<Pid> {
    let own = rustix::process::getpid().as_raw_nonzero().get();
    let ours = all().into_iter().filter(|process| process.parent == own);
    ours.map(|process| process.id.0).filter(|pid| !known(*pid)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stat_is_read_whatever_the_name_holds() {
        let pid = Pid::from_raw(42).unwrap();
        let stat = "42 (a) b) S (c) Z 7 8 9 0 -1 4194560 0 0 0 0 0 0 0 0 20 0 1 0 123456 0 0\n";
        let expected = Process { id: (pid, 123_456), parent: 7, group: 8, session: 9, ended: true };
        assert_eq!(Process::parse(pid, stat), Some(expected));
        assert_eq!(Process::parse(pid, "42 (a) S 1"), None);
        assert_eq!(Process::parse(pid, ""), None);
    }

    #[test]
    fn this_process_is_found_with_what_it_started_with() {
        let own = Process::read(rustix::process::getpid()).unwrap();
        assert!(!own.ended);
        assert_eq!(own.variable("PATH"), std::env::var("PATH").ok());
        assert_eq!(own.variable("PAT"), None);
        assert!(all().contains(&own));
        let parent = Pid::from_raw(own.parent).unwrap();
        assert!(descendants(&[parent]).contains(&own));
    }
}
