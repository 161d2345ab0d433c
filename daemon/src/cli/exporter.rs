//! `holdfast exporter`.

use std::sync::Arc;

use clap::Args;
use signal_hook::consts::{SIGINT, SIGTERM};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tracing::info;

use super::Global;
use super::context::{Interrupt, block_on, sources};
use super::exit::{CliError, Exit};
use super::worker::init_logs;
use crate::clock::{Clock, SystemClock};
use crate::config::Settings;
use crate::exporter::{Exporter, stale_after};
use crate::health::HealthServer;
use crate::store::{Database, DatabaseOptions, migrate};
use crate::supervise::database_options;
use crate::telemetry::BuildInfo;
use crate::telemetry::metrics::GlobalMetrics;

/// Serve gauges of the whole database to Prometheus until told to stop.
#[derive(Args, Debug)]
#[command(after_help = "\
It reads on an interval, apart from the scrapes, over one connection, and counts no items: ten million
of them cost what one does. While the database is away it answers all the same; gauges that were not
collected three times in a row are left out, and holdfast_exporter_last_success_timestamp_seconds says
since when. Every instance says the same: use `max` over them, never `sum`. Queues of the
configuration have a label of their own, all others together `_other`.

It needs no more than to read: USAGE on the schema, SELECT on its tables, EXECUTE on its functions,
and pg_read_all_stats to see transactions of other users.

/livez and /readyz do not depend on the database.

Exit codes: 0 ended by TERM or INT; 78 the configuration is wrong, or its address is in use.

Examples:
  holdfast exporter --config holdfast.toml
  holdfast exporter --listen 0.0.0.0:9465 --database-url postgres://viewer@db/holdfast
  holdfast exporter --listen 127.0.0.1:0 --log-format json")]
pub(super) struct ExporterArguments {
    /// Address of /metrics, /livez, /readyz and /startupz; port 0 takes a free one [default: the key
    /// `exporter.listen`].
    #[arg(long, value_name = "ADDRESS")]
    listen: Option<String>,
    /// Time between two collections [default: the key `exporter.interval`].
    #[arg(long, value_name = "DURATION")]
    interval: Option<String>,
    /// Log level, or a filter such as `info,holdfast::exporter=debug`.
    #[arg(long, value_name = "LEVEL")]
    log_level: Option<String>,
    /// Log format: text or json.
    #[arg(long, value_name = "FORMAT")]
    log_format: Option<String>,
}

pub(super) fn run(global: &Global, arguments: ExporterArguments) -> Result<Exit, CliError> {
    let settings = settings(global, arguments)?;
    block_on(serve(&settings))
}

fn settings(global: &Global, arguments: ExporterArguments) -> Result<Settings, CliError> {
    let mut sources = sources(global);
    for (flag, key, value) in [
        ("--listen", "exporter.listen", arguments.listen),
        ("--interval", "exporter.interval", arguments.interval),
        ("--log-level", "log.level", arguments.log_level),
        ("--log-format", "log.format", arguments.log_format),
    ] {
        if let Some(value) = value {
            sources = sources.with_flag(flag, key, value);
        }
    }
    Ok(Settings::load(&sources)?)
}

async fn serve(settings: &Settings) -> Result<Exit, CliError> {
    let options = database_options(settings, "holdfast exporter")?;
    let database = Database::new(DatabaseOptions { pool_size: 1, ..options })?;
    let telemetry = init_logs(settings)?;
    let mut interrupt = Interrupt::on(&[SIGTERM, SIGINT])?;
    let build = BuildInfo::current(migrate::OLDEST, migrate::newest());
    let interval = settings.exporter.interval;
    let metrics =
        GlobalMetrics::new(settings.queues.keys().cloned(), &build, stale_after(interval));
    let clock: Arc<dyn Clock> = Arc::new(SystemClock);
    let exporter = Arc::new(Exporter::new(
        database,
        Arc::new(metrics),
        clock,
        interval,
        settings.exporter.timeout,
    ));

    let address = settings.exporter.listen.ok_or_else(|| {
        CliError::new(Exit::Configuration, "exporter.listen is empty: there is nothing to serve on")
    })?;
    let server = HealthServer::of(address, exporter.clone()).await.map_err(|error| {
        CliError::new(Exit::Configuration, format!("exporter.listen {address}: {error}"))
    })?;
    let bound = server.address().map_err(|error| CliError::new(Exit::Internal, error))?;
    info!(address = %bound, "serving metrics and health");
    let stop = CancellationToken::new();
    let mut tasks = JoinSet::new();
    tasks.spawn(server.run(stop.clone()));
    let stopped = stop.clone();
    tasks.spawn(async move { exporter.run(&stopped).await });
    tokio::select! {
        () = interrupt.wait() => info!("stopping"),
        // Neither ends by itself.
        _ = tasks.join_next() => {
            return Err(CliError::new(Exit::Internal, "a part of the exporter ended"));
        }
    }
    stop.cancel();
    while tasks.join_next().await.is_some() {}
    telemetry.shutdown().await;
    Ok(Exit::Done)
}
