//! The server's process: made, started, and ended by a thread of its own.
//!
//! The kernel ends the server when the thread that started it ends, which a crash or `SIGKILL` of
//! this process does too; so that thread does nothing else and stays until the server is to stop.

use std::fmt::Write as _;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus};
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process, test_kill_process};

use super::EmbeddedError;
use super::account::{Account, command};
use super::binaries::Binaries;
use super::folders::{already_running, make_owned};
use crate::clock::{Clock, SystemClock};
use crate::execute::spawn::spawn_with_death_signal;

/// The superuser of every private server.
pub(super) const SUPERUSER: &str = "postgres";

/// How the names of folders begin in which `initdb` is at work; the rest is the process's id.
const UNFINISHED: &str = "postgres.new.";

/// For `initdb`, and for the server until it takes connections. Both take a second or two; with
/// every core compiling, ten times that.
const START_LIMIT: Duration = Duration::from_mins(1);

/// How long a killed process's server may still need to end before its data counts as in use.
const PREDECESSOR_LIMIT: Duration = Duration::from_secs(10);

/// How long an orderly stop, which writes a checkpoint, may take before a hard one.
const STOP_LIMIT: Duration = Duration::from_secs(30);

/// How long a hard stop may take before `SIGKILL`.
const HARD_STOP_LIMIT: Duration = Duration::from_secs(10);

/// How often a state of the server is looked at while one waits for it.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// How much of the log an error quotes.
const QUOTED_BYTES: u64 = 4096;

/// A log this long is begun anew at the next start.
const LONGEST_LOG: u64 = 16 << 20;

/// All that the thread needs to know.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) binaries: Binaries,
    pub(super) account: Option<Account>,
    pub(super) data: PathBuf,
    pub(super) log: PathBuf,
    /// Whether the data must survive a crash of the machine.
    pub(super) durable: bool,
    pub(super) settings: Vec<(String, String)>,
}

/// A running server. Dropped, it stops the server and waits for its end.
#[derive(Debug)]
pub(super) struct Server {
    pid: u32,
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Makes the data folder when there is none, starts the server, and returns when it takes
    /// connections.
    pub(super) fn start(plan: Plan) -> Result<Self, EmbeddedError> {
        let (report, started) = mpsc::channel();
        let (stop, stopped) = mpsc::channel();
        let thread = thread::Builder::new()
            .name("postgres".to_owned())
            .spawn(move || serve(&plan, &report, &stopped))
            .map_err(EmbeddedError::Thread)?;
        let pid = started.recv().expect("the thread reports before it ends")?;
        Ok(Self { pid, stop: Some(stop), thread: Some(thread) })
    }

    pub(super) const fn pid(&self) -> u32 {
        self.pid
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop = None; // the thread waits for this end of the channel to go
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn serve(plan: &Plan, report: &Sender<Result<u32, EmbeddedError>>, stopped: &Receiver<()>) {
    match plan.make_data().and_then(|()| plan.start_server()) {
        Ok(mut server) => {
            let _ = report.send(Ok(server.id()));
            let _ = stopped.recv();
            end(&mut server);
        }
        Err(error) => {
            let _ = report.send(Err(error));
        }
    }
}

impl Plan {
    /// Runs `initdb`, unless the data is there already. It works in a folder that gets its name
    /// only when complete, so that a run that was cut short is never taken for data.
    fn make_data(&self) -> Result<(), EmbeddedError> {
        match fs::read_to_string(self.data.join("PG_VERSION")) {
            Ok(holds) => return self.check_version(holds.trim()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(source) => {
                return Err(EmbeddedError::Folder { path: self.data.clone(), source });
            }
        }
        let home = self.data.parent().unwrap_or(Path::new("/"));
        remove_unfinished(home);
        // Of a name that no one else has: the initdb of a killed process may still be at work.
        let unfinished = home.join(format!("{UNFINISHED}{}", std::process::id()));
        let failed = |source| EmbeddedError::Folder { path: unfinished.clone(), source };
        make_owned(&unfinished, self.account.as_ref()).map_err(failed)?;

        let mut initdb = command(&self.binaries.dir.join("initdb"), self.account.as_ref());
        initdb.args(["--auth=trust", "--locale=C.UTF-8", "--encoding=UTF8", "--username"]);
        initdb.arg(SUPERUSER).arg("--pgdata").arg(&unfinished);
        if !self.durable {
            initdb.arg("--no-sync");
        }
        let (log, begin) = self.open_log()?;
        initdb.stdout(clone(&log, &self.log)?).stderr(log);
        let mut child = spawn_with_death_signal(&mut initdb, Signal::INT)
            .map_err(|error| self.not_started(&error.to_string(), begin))?;
        match wait(&mut child, START_LIMIT) {
            Some(status) if status.success() => {}
            Some(status) => return Err(self.not_started(&format!("initdb: {status}"), begin)),
            None => {
                end(&mut child);
                return Err(self.not_started("initdb took longer than a minute", begin));
            }
        }
        fs::rename(&unfinished, &self.data).map_err(failed)?;
        if self.durable {
            File::open(home).and_then(|home| home.sync_all()).map_err(failed)?;
        }
        Ok(())
    }

    fn check_version(&self, holds: &str) -> Result<(), EmbeddedError> {
        if holds == self.binaries.version.major().to_string() {
            return Ok(());
        }
        Err(EmbeddedError::OtherVersion {
            data: self.data.clone(),
            holds: holds.to_owned(),
            found: self.binaries.version.clone(),
            bin: self.binaries.dir.clone(),
        })
    }

    /// Starts the server, once more for as long as the server of a killed process is still ending
    /// on the same data.
    fn start_server(&self) -> Result<Child, EmbeddedError> {
        let clock = SystemClock;
        let give_up = clock.now() + PREDECESSOR_LIMIT;
        loop {
            let (log, begin) = self.open_log()?;
            let mut postgres = command(&self.binaries.dir.join("postgres"), self.account.as_ref());
            postgres.arg("-D").arg(&self.data);
            for (name, value) in &self.settings {
                postgres.arg("-c").arg(format!("{name}={value}"));
            }
            postgres.stdout(clone(&log, &self.log)?).stderr(log);
            let mut child = spawn_with_death_signal(&mut postgres, Signal::INT)
                .map_err(|error| self.not_started(&error.to_string(), begin))?;
            match self.until_ready(&mut child) {
                Ok(()) => return Ok(child),
                Err(reason) => {
                    end(&mut child);
                    let tail = self.log_since(begin);
                    if !tail.contains("\"postmaster.pid\" already exists") {
                        return Err(self.not_started(&reason, begin));
                    }
                    if clock.now() >= give_up {
                        return Err(already_running(&self.data));
                    }
                    thread::sleep(Duration::from_millis(100));
                }
            }
        }
    }

    fn until_ready(&self, child: &mut Child) -> Result<(), String> {
        let ready = poll(START_LIMIT, || {
            if let Ok(Some(status)) = child.try_wait() {
                return Some(Err(format!("postgres: {status}")));
            }
            let file = ServerFile::read(&self.data)?;
            (file.pid.unsigned_abs() == child.id() && file.ready).then_some(Ok(()))
        });
        ready.unwrap_or_else(|| Err("it was not ready after a minute".to_owned()))
    }

    /// The log to append to, and where this start begins in it.
    fn open_log(&self) -> Result<(File, u64), EmbeddedError> {
        let opened = || -> io::Result<(File, u64)> {
            // Ours alone: the log quotes statements, and with them people's data.
            let log = OpenOptions::new().create(true).append(true).mode(0o600).open(&self.log)?;
            if log.metadata()?.len() > LONGEST_LOG {
                log.set_len(0)?;
            }
            let begin = log.metadata()?.len();
            Ok((log, begin))
        };
        opened().map_err(|source| EmbeddedError::Folder { path: self.log.clone(), source })
    }

    fn log_since(&self, begin: u64) -> String {
        let read = || -> io::Result<String> {
            let mut log = File::open(&self.log)?;
            let last = log.metadata()?.len().saturating_sub(QUOTED_BYTES);
            log.seek(SeekFrom::Start(begin.max(last)))?;
            let mut text = Vec::new();
            log.read_to_end(&mut text)?;
            Ok(String::from_utf8_lossy(&text).trim().to_owned())
        };
        read().unwrap_or_default()
    }

    fn not_started(&self, reason: &str, begin: u64) -> EmbeddedError {
        EmbeddedError::NotStarted {
            version: self.binaries.version.clone(),
            data: self.data.clone(),
            account: self.account.as_ref().map_or(String::new(), |a| format!(" as {}", a.name)),
            reason: format!("{reason}\n{}", self.log_since(begin)),
        }
    }
}

fn clone(log: &File, path: &Path) -> Result<File, EmbeddedError> {
    log.try_clone().map_err(|source| EmbeddedError::Folder { path: path.to_owned(), source })
}

/// What a killed process left of the making of its data; what cannot go now goes another time.
fn remove_unfinished(home: &Path) {
    for entry in fs::read_dir(home).into_iter().flatten().flatten() {
        if entry.file_name().to_string_lossy().starts_with(UNFINISHED) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

/// Ends a child that may have ended by itself: orderly, then hard, then for certain.
fn end(child: &mut Child) {
    for (signal, limit) in [(Signal::INT, STOP_LIMIT), (Signal::QUIT, HARD_STOP_LIMIT)] {
        // Not yet waited for, its id cannot have passed to another process.
        if child.try_wait().is_ok_and(|ended| ended.is_some()) {
            return;
        }
        let _ = kill_process(Pid::from_child(child), signal);
        if wait(child, limit).is_some() {
            return;
        }
    }
    let _ = child.kill();
    let _ = child.wait();
}

fn wait(child: &mut Child, limit: Duration) -> Option<ExitStatus> {
    poll(limit, || child.try_wait().ok().flatten())
}

fn poll<T>(limit: Duration, mut look: impl FnMut() -> Option<T>) -> Option<T> {
    let clock = SystemClock;
    let deadline = clock.now() + limit;
    loop {
        if let Some(seen) = look() {
            return Some(seen);
        }
        if clock.now() >= deadline {
            return None;
        }
        thread::sleep(LOOK_EVERY);
    }
}

/// What a server says of itself in `postmaster.pid`.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ServerFile {
    pid: i32,
    port: u16,
    socket: PathBuf,
    ready: bool,
}

impl ServerFile {
    pub(super) fn read(data: &Path) -> Option<Self> {
        Self::parse(&fs::read_to_string(data.join("postmaster.pid")).ok()?)
    }

    /// Lines: pid, data folder, start time, port, socket folder, address, shared memory, status.
    fn parse(text: &str) -> Option<Self> {
        let mut lines = text.lines();
        let pid = lines.next()?.parse().ok()?;
        let port = lines.nth(2)?.parse().ok()?;
        let socket = PathBuf::from(lines.next()?);
        // A standby that takes connections says "standby".
        let ready =
            lines.nth(2).is_some_and(|status| ["ready", "standby"].contains(&status.trim()));
        Some(Self { pid, port, socket, ready })
    }

    pub(super) fn is_alive(&self) -> bool {
        let answer = Pid::from_raw(self.pid).map(test_kill_process);
        matches!(answer, Some(Ok(()) | Err(rustix::io::Errno::PERM)))
    }

    pub(super) fn url(&self, database: &str) -> String {
        url(&self.socket, self.port, database)
    }
}

/// The address of a database behind the socket in a folder.
pub(super) fn url(socket: &Path, port: u16, database: &str) -> String {
    let folder = encode(socket.as_os_str().as_bytes());
    format!("postgres://{SUPERUSER}@{folder}:{port}/{}", encode(database.as_bytes()))
}

fn encode(text: &[u8]) -> String {
    let mut encoded = String::new();
    for &byte in text {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            encoded.push(char::from(byte));
        } else {
            write!(encoded, "%{byte:02X}").expect("writing to a string cannot fail");
        }
    }
    encoded
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_file_is_ready_only_when_it_says_so() {
        let begun = "41\n/data\n1790000000\n5433\n/tmp/x/socket\n";
        let starting = format!("{begun}\n  123 456\nstarting\n");
        let ready = format!("{begun}\n  123 456\nready   \n");
        let standby = format!("{begun}\n  123 456\nstandby \n");
        let parsed = |ready| {
            Some(ServerFile { pid: 41, port: 5433, socket: PathBuf::from("/tmp/x/socket"), ready })
        };

        assert_eq!(ServerFile::parse(begun), parsed(false));
        assert_eq!(ServerFile::parse(&starting), parsed(false));
        assert_eq!(ServerFile::parse(&ready), parsed(true));
        assert_eq!(ServerFile::parse(&standby), parsed(true));
        assert_eq!(ServerFile::parse("41\n"), None);
    }

    #[test]
    fn addresses_keep_odd_folders_and_names_whole() {
        let address = url(Path::new("/tmp/a b%/s"), 5432, "t/1?x");
        let config: tokio_postgres::Config = address.parse().unwrap();

        assert_eq!(config.get_hosts(), [tokio_postgres::config::Host::Unix("/tmp/a b%/s".into())]);
        assert_eq!(config.get_dbname(), Some("t/1?x"));
        assert_eq!(config.get_user(), Some(SUPERUSER));
        assert_eq!(config.get_ports(), [5432]);
    }
}
