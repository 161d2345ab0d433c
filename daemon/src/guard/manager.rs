//! The service manager's ear: states and signs of life, as `sd_notify(3)` has them.
//!
//! A sign of life is passed on only when the worker gave one, so the manager ends a guard whose worker
//! hangs: before its leases can be granted again, where the watchdog is no longer than the unit's. No
//! worker is no danger: while there is none, the guard speaks for itself.

use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use tracing::{debug, warn};

use super::report::Report;

/// What a manager sets for the process that it starts; none of its children may use it.
pub(super) const VARIABLES: [&str; 3] = ["NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"];

/// The way to the service manager, if one started this process and listens.
pub(super) struct Manager {
    way: Option<(UnixDatagram, SocketAddr)>,
    watchdog: Option<Duration>,
    ready: bool,
    stopping: bool,
    /// A reload is under way since the worker had done so many.
    reloading: Option<u64>,
    reloads: u64,
    status: String,
}

impl Manager {
    /// The manager that started this process.
    pub(super) fn of_process() -> Self {
        let variable = |name: &str| std::env::var_os(name);
        let way =
            variable(VARIABLES[0]).and_then(|socket| match connect(socket.as_encoded_bytes()) {
                Ok(way) => Some(way),
                Err(error) => {
                    warn!(%error, "the service manager cannot be told anything");
                    None
                }
            });
        let number = |name| variable(name).and_then(|text| text.to_str()?.parse::<u64>().ok());
        let own = u64::from(std::process::id());
        let watchdog = number(VARIABLES[1])
            .filter(|_| number(VARIABLES[2]).is_none_or(|pid| pid == own))
            .map(Duration::from_micros);
        Self {
            way,
            watchdog,
            ready: false,
            stopping: false,
            reloading: None,
            reloads: 0,
            status: String::new(),
        }
    }

    /// How long it waits for a sign of life; none when it does not.
    pub(super) const fn watchdog(&self) -> Option<Duration> {
        self.watchdog
    }

    /// A worker was started: it has one watchdog's time to give a sign of life.
    pub(super) fn worker_started(&mut self) {
        self.alive();
        self.reloads = 0;
        // It has read the configuration anew.
        self.reloading = self.reloading.map(|_| 0);
    }

    /// Nothing hangs, for there is no worker.
    pub(super) fn alive(&self) {
        self.send("WATCHDOG=1");
    }

    /// The worker gave a sign of life.
    pub(super) fn worker_alive(&mut self, report: &Report) {
        let mut lines = vec!["WATCHDOG=1".to_owned()];
        let status = report.to_string();
        if status != self.status {
            lines.push(format!("STATUS={status}"));
            self.status = status;
        }
        if !report.starting && !self.ready {
            self.ready = true;
            lines.push("READY=1".to_owned());
        }
        // A worker that was started meanwhile has done none, and has read the newest file.
        let began_anew = self.reloading == Some(0) && report.reloads == 0 && self.reloads == 0;
        self.reloads = report.reloads;
        if !report.starting
            && self.reloading.is_some_and(|before| report.reloads > before || began_anew)
        {
            self.reloading = None;
            lines.push("READY=1".to_owned());
        }
        if report.ending {
            self.ending(&mut lines);
        }
        self.send(&lines.join("\n"));
    }

    /// The configuration is to be read anew.
    pub(super) fn reloading(&mut self) {
        if self.reloading.is_some() {
            return;
        }
        self.reloading = Some(self.reloads);
        let now = clock_gettime(ClockId::Monotonic);
        let micros = i128::from(now.tv_sec) * 1_000_000 + i128::from(now.tv_nsec) / 1_000;
        self.send(&format!("RELOADING=1\nMONOTONIC_USEC={micros}"));
    }

    /// The end was asked for.
    pub(super) fn stopping(&mut self) {
        let mut lines = Vec::new();
        self.ending(&mut lines);
        self.send(&lines.join("\n"));
    }

    fn ending(&mut self, lines: &mut Vec<String>) {
        if !self.stopping {
            self.stopping = true;
            lines.push("STOPPING=1".to_owned());
        }
    }

    /// A manager that does not read in time misses a line, and the next one counts.
    fn send(&self, lines: &str) {
        let Some((socket, address)) = &self.way else { return };
        if lines.is_empty() {
            return;
        }
        if let Err(error) = socket.send_to_addr(lines.as_bytes(), address) {
            debug!(%error, "the service manager was not told");
        }
    }
}

/// A path, or a name in the abstract space of sockets, written with `@`.
fn connect(name: &[u8]) -> io::Result<(UnixDatagram, SocketAddr)> {
    let address = match name.split_first() {
        Some((b'@', name)) => SocketAddr::from_abstract_name(name)?,
        Some((b'/', _)) => {
            use std::os::unix::ffi::OsStrExt;
            SocketAddr::from_pathname(std::ffi::OsStr::from_bytes(name))?
        }
        Some(_) | None => {
            return Err(io::Error::other("NOTIFY_SOCKET names no socket of this system"));
        }
    };
    let socket = UnixDatagram::unbound()?;
    socket.set_nonblocking(true)?;
    Ok((socket, address))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A manager, and what it hears.
    fn listening() -> (Manager, UnixDatagram, tempfile::TempDir) {
        let folder = tempfile::TempDir::new().unwrap();
        let path = folder.path().join("notify");
        let ear = UnixDatagram::bind(&path).unwrap();
        ear.set_nonblocking(true).unwrap();
        let way = connect(path.as_os_str().as_encoded_bytes()).unwrap();
        let manager = Manager {
            way: Some(way),
            watchdog: None,
            ready: false,
            stopping: false,
            reloading: None,
            reloads: 0,
            status: String::new(),
        };
        (manager, ear, folder)
    }

    fn heard(ear: &UnixDatagram) -> Vec<String> {
        let mut text = [0; 4096];
        let mut lines = Vec::new();
        while let Ok(size) = ear.recv(&mut text) {
            let text = String::from_utf8(text[..size].to_vec()).unwrap();
            lines.extend(text.lines().map(str::to_owned));
        }
        lines
    }

    fn report(starting: bool, ending: bool, reloads: u64) -> Report {
        Report { starting, ending, reloads, ..Report::default() }
    }

    #[test]
    fn it_hears_of_the_start_of_life_and_of_the_end_once_each() {
        let (mut manager, ear, _folder) = listening();

        manager.worker_started();
        manager.worker_alive(&report(true, false, 0));
        let said = heard(&ear);
        assert_eq!(said.iter().filter(|line| *line == "WATCHDOG=1").count(), 2, "{said:?}");
        assert!(!said.contains(&"READY=1".to_owned()), "{said:?}");

        manager.worker_alive(&report(false, false, 0));
        manager.worker_alive(&report(false, false, 0));
        let said = heard(&ear);
        assert_eq!(said.iter().filter(|line| *line == "READY=1").count(), 1, "{said:?}");

        manager.stopping();
        manager.worker_alive(&report(false, true, 0));
        let said = heard(&ear);
        assert_eq!(said.iter().filter(|line| *line == "STOPPING=1").count(), 1, "{said:?}");
    }

    #[test]
    fn a_reload_ends_when_the_worker_has_done_it_or_was_started_anew() {
        let (mut manager, ear, _folder) = listening();
        manager.worker_alive(&report(false, false, 2));
        heard(&ear);

        manager.reloading();
        manager.reloading();
        let said = heard(&ear);
        assert_eq!(said[0], "RELOADING=1");
        assert!(said[1].strip_prefix("MONOTONIC_USEC=").unwrap().parse::<u64>().unwrap() > 0);
        assert_eq!(said.len(), 2);
        manager.worker_alive(&report(false, false, 2));
        assert!(!heard(&ear).contains(&"READY=1".to_owned()));
        manager.worker_alive(&report(false, false, 3));
        assert!(heard(&ear).contains(&"READY=1".to_owned()));

        manager.reloading();
        manager.worker_started();
        manager.worker_alive(&report(true, false, 0));
        heard(&ear);
        manager.worker_alive(&report(false, false, 0));
        assert!(heard(&ear).contains(&"READY=1".to_owned()));
    }

    #[test]
    fn sockets_have_paths_or_abstract_names() {
        assert!(connect(b"/run/notify").is_ok());
        assert!(connect(b"@holdfast/test").is_ok());
        assert!(connect(b"vsock:2:1234").is_err());
        assert!(connect(b"").is_err());
    }
}
