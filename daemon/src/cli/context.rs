//! What most commands begin with: settings, a runtime, a database of a known schema.

use std::future::Future;

use super::Global;
use super::exit::{CliError, Exit};
use crate::config::{Settings, Sources};
use crate::store::{Database, migrate};
use crate::supervise::database_options;

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
    runtime.block_on(command)
}

/// The database of a client command, its schema checked.
pub(super) async fn connect(settings: &Settings) -> Result<Database, CliError> {
    let database = Database::new(database_options(settings, "holdfast")?)?;
    migrate::check(&database).await?;
    Ok(database)
}
