//! `holdfast dev`: everything on a private database, for a first look and for demos.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::Args;
use tempfile::TempDir;
use tokio::sync::watch;

use super::Global;
use super::context::{block_on, sources};
use super::exit::{CliError, Exit, Status};
use super::output::{print_json, print_line, remark};
use super::worker::{guarded, serve};
use crate::config::Settings;
use crate::embedded::{self, DataDir, EmbeddedError, EmbeddedOptions, EmbeddedPostgres};
use crate::guard::Seat;
use crate::store::migrate;
use crate::supervise::StopRequest;
use crate::supervise::signals::StopSignals;

/// Starts a private PostgreSQL, migrates it, and runs one worker on it until told to stop.
#[derive(Args, Debug)]
#[command(after_help = "\
The server listens on a socket that only its account and root can enter, and ends with this process.
Its address is printed as the first line of standard output; other commands take it with
--database-url. With --database-url no server is started.

Exit codes, beside those of `holdfast worker`: 73 another process runs a server on this data; 75 the
server does not start; 78 no server was found, or the folder cannot be used.

Examples:
  holdfast dev --config holdfast.toml
  holdfast dev --ephemeral --no-worker
  holdfast dev --pg-bin /usr/lib/postgresql/16/bin")]
pub(super) struct DevArguments {
    /// Keep nothing: the data goes when this process ends.
    #[arg(long)]
    ephemeral: bool,
    /// Where the data is kept [default: dev in the state folder of this user].
    #[arg(long, value_name = "DIR", conflicts_with = "ephemeral")]
    data: Option<PathBuf>,
    /// The folder of initdb and postgres.
    #[arg(long, value_name = "DIR", env = embedded::PG_BIN_VARIABLE)]
    pg_bin: Option<PathBuf>,
    /// Run no worker: only the database.
    #[arg(long)]
    no_worker: bool,
}

pub(super) fn run(global: &Global, arguments: &DevArguments) -> Result<Status, CliError> {
    let draft = Arc::new(Settings::load(&sources(global))?);
    guarded(&draft, false, |seat| start(global, arguments, seat))
}

fn start(global: &Global, arguments: &DevArguments, seat: Seat) -> Result<Exit, CliError> {
    // The server outlives the runtime, so that the worker can hand in to its end.
    if global.database_url.is_some() {
        let settings = Arc::new(Settings::load(&sources(global))?);
        return block_on(develop(settings, seat, arguments.no_worker, global.json));
    }
    let data = data(arguments)?;
    let server = start_server(data.clone(), arguments.pg_bin.as_deref())?;
    let sources = sources(global).with_flag("holdfast dev", "database.url", server.url("postgres"));
    let mut settings = Settings::load(&sources)?;
    let workspaces = private_workspaces(&mut settings, &data)?;
    let ended = block_on(develop(Arc::new(settings), seat, arguments.no_worker, global.json));
    drop((server, workspaces));
    ended
}

/// Puts the directories of items beside the private database that knows their batches, where the
/// configuration names no place. The folder in the answer goes when it is dropped.
pub(super) fn private_workspaces(
    settings: &mut Settings,
    data: &DataDir,
) -> Result<Option<TempDir>, CliError> {
    let root = &mut settings.workspace.root;
    if root.is_some() {
        return Ok(None);
    }
    let (folder, kept) = match data {
        DataDir::State(folder) => (std::path::absolute(folder), None),
        DataDir::Ephemeral => {
            let folder = TempDir::with_prefix("holdfast-workspaces-").map_err(no_place)?;
            (Ok(folder.path().to_owned()), Some(folder))
        }
    };
    let path = folder.map_err(no_place)?.join("workspaces").into_os_string().into_string();
    *root = Some(path.map_err(|_| no_place("the path of its folder is not UTF-8"))?);
    Ok(kept)
}

fn no_place(error: impl std::fmt::Display) -> CliError {
    CliError::new(Exit::Internal, format!("find a place for the items' directories: {error}"))
}

fn data(arguments: &DevArguments) -> Result<DataDir, CliError> {
    if arguments.ephemeral {
        return Ok(DataDir::Ephemeral);
    }
    let state = || embedded::default_state_dir().map(|state| state.join("dev"));
    Ok(DataDir::State(arguments.data.clone().map_or_else(state, Ok)?))
}

/// Starts a private server, and says so where that is not quite expected.
pub(super) fn start_server(
    data: DataDir,
    pg_bin: Option<&Path>,
) -> Result<EmbeddedPostgres, CliError> {
    let pg_bin = pg_bin.map(Path::to_owned);
    let server =
        EmbeddedPostgres::start(&EmbeddedOptions { pg_bin, ..EmbeddedOptions::new(data) })?;
    if let Some(account) = server.account() {
        remark(&format!("PostgreSQL refuses to run as root: it runs as {account}"));
    }
    Ok(server)
}

async fn develop(
    settings: Arc<Settings>,
    seat: Seat,
    no_worker: bool,
    json: bool,
) -> Result<Exit, CliError> {
    let url = settings.database_url()?.expose().to_owned();
    migrate::up(&url, None).await?;
    if json {
        print_json(&serde_json::json!({"database_url": url}))?;
    } else {
        print_line(&url)?;
    }
    if !no_worker {
        return serve(settings, seat, None).await;
    }
    let signals = StopSignals::take()
        .map_err(|error| CliError::new(Exit::Internal, format!("take the signals: {error}")))?;
    let (stop, mut stopped) = watch::channel(StopRequest::Run);
    let clock = crate::clock::SystemClock;
    tokio::select! {
        () = signals.forward(&clock, &settings.drain, &stop) => {}
        _ = stopped.wait_for(|asked| *asked > StopRequest::Run) => {}
    }
    Ok(Exit::Done)
}

impl From<EmbeddedError> for CliError {
    fn from(error: EmbeddedError) -> Self {
        let exit = match &error {
            EmbeddedError::NoServer { .. }
            | EmbeddedError::Unusable { .. }
            | EmbeddedError::NoAccount
            | EmbeddedError::NoHome
            | EmbeddedError::OtherVersion { .. }
            | EmbeddedError::Folder { .. } => Exit::Configuration,
            EmbeddedError::AlreadyRunning { .. } => Exit::Conflict,
            EmbeddedError::Thread(_) | EmbeddedError::NotStarted { .. } => Exit::Unreachable,
        };
        Self::caused(exit, error)
    }
}
