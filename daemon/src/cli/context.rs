//! What most commands begin with: settings, a runtime, a database of a known schema.

use std::future::Future;

use std::time::Duration;

use clap::Args;
use futures::StreamExt;
use signal_hook_tokio::Signals;

use super::Global;
use super::exit::{CliError, Exit};
use crate::config::{Settings, Sources};
use crate::model::BatchId;
use crate::store::{BatchRow, Database, migrate};
use crate::supervise::database_options;
use crate::telemetry::trace::TraceContext;

/// The settings from all layers, with the flags that every command takes.
pub(super) fn load_settings(global: &Global) -> Result<Settings, CliError> {
    Ok(Settings::load(&sources(global))?)
}

/// The layers of the settings, for commands that add flags of their own.
pub(super) fn sources(global: &Global) -> Sources {
    let mut sources = Sources::of_process();
    if let Some(file) = &global.config {
        sources = sources.with_file(file, "--config");
    }
    if let Some(url) = &global.database_url {
        sources = sources.with_flag("--database-url", "database.url", url.as_str());
    }
    sources
}

/// Runs a command's future on a runtime of its own.
pub(super) fn block_on<T>(
    command: impl Future<Output = Result<T, CliError>>,
) -> Result<T, CliError> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(|error| CliError::new(Exit::Internal, format!("start the runtime: {error}")))?;
    let done = runtime.block_on(command);
    // A read that its file system never answers ends with the process.
    runtime.shutdown_timeout(Duration::from_secs(2));
    done
}

/// The place of this command in the trace of whoever calls it: as a flag says, else as `TRACEPARENT`
/// does. What that holds is not ours; where it is no place, there is none.
pub(super) fn caller(flag: Option<&TraceContext>) -> Option<TraceContext> {
    flag.cloned().or_else(|| std::env::var("TRACEPARENT").ok()?.parse().ok())
}

/// The database of a client command, its schema checked.
pub(super) async fn connect(settings: &Settings) -> Result<Database, CliError> {
    let database = Database::new(database_options(settings, "holdfast")?)?;
    migrate::check(&database).await?;
    Ok(database)
}

/// Whose batches a command looks at.
#[derive(Args, Clone, Debug)]
pub(super) struct Owner {
    /// Only what belongs to this owner; anyone's without it.
    #[arg(long, value_name = "OWNER", env = "HOLDFAST_OWNER")]
    pub(super) owner: Option<String>,
}

impl Owner {
    pub(super) fn name(&self) -> Option<&str> {
        self.owner.as_deref()
    }
}

/// One batch.
#[derive(Args, Clone, Debug)]
pub(super) struct OneBatch {
    /// The batch's id.
    #[arg(value_name = "BATCH")]
    pub(super) batch: BatchId,
    #[command(flatten)]
    pub(super) owner: Owner,
}

impl OneBatch {
    /// The batch as it is now.
    pub(super) async fn find(&self, database: &Database) -> Result<BatchRow, CliError> {
        let found = database.batch(self.batch, self.owner.name()).await?;
        found.ok_or_else(|| unknown_batch(self.batch))
    }
}

/// The same answer for a batch that is not there and for one of another owner.
pub(super) fn unknown_batch(batch: BatchId) -> CliError {
    CliError::new(Exit::Denied, format!("no batch {batch}, or not one of this owner"))
}

/// Who changed something, for the audit log: this user on this machine.
pub(super) fn actor() -> String {
    let machine = rustix::system::uname();
    let user = rustix::process::getuid().as_raw();
    format!("cli: user {user} on {}", machine.nodename().to_string_lossy())
}

/// Signals that end a command, so that it can leave things in order.
pub(super) struct Interrupt(Signals);

impl Interrupt {
    /// Takes these signals over: from here on they no longer end the process by themselves.
    pub(super) fn on(signals: &[i32]) -> Result<Self, CliError> {
        Signals::new(signals)
            .map(Self)
            .map_err(|error| CliError::new(Exit::Internal, format!("take the signals: {error}")))
    }

    /// Waits for one of them.
    ///
    /// # Cancel safety
    /// Safe: a later call sees it.
    pub(super) async fn wait(&mut self) {
        if self.0.next().await.is_none() {
            std::future::pending::<()>().await;
        }
    }
}
