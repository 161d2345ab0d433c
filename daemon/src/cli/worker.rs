//! `holdfast worker`.

use std::sync::Arc;

use clap::Args;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::info;

use super::Global;
use super::context::{block_on, sources};
use super::exit::{CliError, Exit};
use crate::clock::{Clock, SystemClock};
use crate::config::{LogFormat, Settings};
use crate::embedded;
use crate::execute::spawn::LocalSpawner;
use crate::health::{HealthLimits, HealthServer, HealthState};
use crate::store::{Database, migrate};
use crate::supervise::signals::StopSignals;
use crate::supervise::{
    CommandExecutors, Ended, StopRequest, Worker, WorkerParts, WorkspaceCheckers, database_options,
};
use crate::telemetry::{self, BuildInfo, LogSettings, Metrics, TraceSettings};
use crate::workspace::{LocalWorkspaces, Workspaces};

/// Claims and executes items of its queues until told to stop.
#[derive(Args, Debug)]
#[command(after_help = "\
Signals: the first TERM drains (INT: for a short while); a second one, 2 s later or more, stops what
runs and gives it back; a third ends at once and lets leases lapse.

Exit codes: 0 drained; 3 executions were stopped; 4 leases may lapse; 70 a part of it panicked;
69, 75, 78 could not start.

Examples:
  holdfast worker --config holdfast.toml
  holdfast worker --queue checksum --queue resize --slots 8
  holdfast worker --health 127.0.0.1:0 --log-format json")]
pub(super) struct WorkerArguments {
    /// A queue to serve; repeat it for more. Else worker.queues, else all that are configured.
    #[arg(long = "queue", value_name = "QUEUE")]
    queues: Vec<String>,
    /// Executions at once [default: the key `worker.execution_slots`].
    #[arg(long, value_name = "N")]
    slots: Option<u16>,
    /// Address of /livez, /readyz, /startupz and /metrics; port 0 takes a free one, empty for none.
    #[arg(long, value_name = "ADDRESS")]
    health: Option<String>,
    /// Log level, or a filter such as `info,holdfast::claim=debug`.
    #[arg(long, value_name = "LEVEL")]
    log_level: Option<String>,
    /// Log format: text or json.
    #[arg(long, value_name = "FORMAT")]
    log_format: Option<String>,
}

pub(super) fn run(global: &Global, arguments: WorkerArguments) -> Result<Exit, CliError> {
    let settings = settings(global, arguments)?;
    block_on(serve(Arc::new(settings)))
}

fn settings(global: &Global, arguments: WorkerArguments) -> Result<Settings, CliError> {
    let mut sources = sources(global);
    if !arguments.queues.is_empty() {
        sources = sources.with_flag("--queue", "worker.queues", arguments.queues);
    }
    if let Some(slots) = arguments.slots {
        sources = sources.with_flag("--slots", "worker.execution_slots", slots);
    }
    let texts = [
        ("--health", "health.listen", arguments.health),
        ("--log-level", "log.level", arguments.log_level),
        ("--log-format", "log.format", arguments.log_format),
    ];
    for (flag, key, value) in texts {
        if let Some(value) = value {
            sources = sources.with_flag(flag, key, value);
        }
    }
    Ok(Settings::load(&sources)?)
}

/// Runs one worker as this process: telemetry, health, signals around it.
pub(super) async fn serve(settings: Arc<Settings>) -> Result<Exit, CliError> {
    let queues = settings.served_queues();
    if queues.is_empty() {
        return Err(CliError::new(
            Exit::Configuration,
            "queues: none is configured, so this worker would serve nothing; add a [queues.NAME] section",
        ));
    }
    let database = Database::new(database_options(&settings, "holdfast worker")?)?;
    let clock: Arc<dyn Clock> = Arc::new(SystemClock);
    let executors = executors(&settings, &clock)?;
    for (name, spec) in &settings.queues {
        // What cannot run is better noticed now than with the first item.
        executors.of_spec(spec.clone(), None).map_err(|error| {
            CliError::new(Exit::Configuration, format!("queues.{name}: {error}"))
        })?;
    }
    let build = BuildInfo::current(migrate::OLDEST, migrate::newest());
    let metrics = Arc::new(Metrics::new(queues.iter().cloned(), &build));
    let limits = HealthLimits::for_lease(settings.lease.ttl);
    let health = Arc::new(HealthState::new(Arc::clone(&clock), limits));
    let worker = Worker::new(WorkerParts {
        settings: Arc::clone(&settings),
        database: database.clone(),
        clock: Arc::clone(&clock),
        metrics: Arc::clone(&metrics),
        health: Arc::clone(&health),
        executors: Arc::new(executors),
        workspaces: workspaces(&settings)?,
        checkers: Arc::new(WorkspaceCheckers),
        queues,
    });
    let telemetry = init_telemetry(&settings, &worker.id().to_string())?;
    let signals = StopSignals::take()
        .map_err(|error| CliError::new(Exit::Internal, format!("take the signals: {error}")))?;
    migrate::check(&database).await?;
    health.schema_checked(true);

    let serving = CancellationToken::new();
    let mut health_server = tokio::task::JoinSet::new();
    if let Some(address) = settings.health.listen {
        let server = HealthServer::bind(address, health, metrics).await.map_err(|error| {
            CliError::new(Exit::Configuration, format!("health.listen {address}: {error}"))
        })?;
        let bound = server.address().map_err(|error| CliError::new(Exit::Internal, error))?;
        info!(address = %bound, "serving health and metrics");
        health_server.spawn(server.run(serving.clone()));
    }
    let (stop, stopped) = watch::channel(StopRequest::Run);
    let ended = tokio::select! {
        ended = worker.run(stopped) => ended,
        () = signals.forward(&*clock, &settings.drain, &stop) => Ok(Ended::default()),
    };
    serving.cancel();
    while health_server.join_next().await.is_some() {}
    telemetry.shutdown().await;
    Ok(exit_of(ended?))
}

/// What runs the queues' items in this process.
pub(super) fn executors(
    settings: &Arc<Settings>,
    clock: &Arc<dyn Clock>,
) -> Result<CommandExecutors, CliError> {
    let system =
        |error| CliError::new(Exit::Internal, format!("prepare to start commands: {error}"));
    let spawner = Arc::new(LocalSpawner::new().map_err(system)?);
    CommandExecutors::new(Arc::clone(settings), spawner, Arc::clone(clock)).map_err(system)
}

/// Where the items of this process have their files.
pub(super) fn workspaces(settings: &Settings) -> Result<Arc<dyn Workspaces>, CliError> {
    let workspace = &settings.workspace;
    let root = match &workspace.root {
        Some(root) => root.into(),
        None => embedded::default_state_dir()?.join("workspaces"),
    };
    Ok(Arc::new(LocalWorkspaces::new(root, workspace.virtual_prefix.clone())))
}

/// Sets up logs and traces of this process.
pub(super) fn init_telemetry(
    settings: &Settings,
    instance: &str,
) -> Result<telemetry::TelemetryGuard, CliError> {
    let logs = LogSettings {
        level: settings.log.level.clone(),
        format: match settings.log.format {
            LogFormat::Text => telemetry::LogFormat::Text,
            LogFormat::Json => telemetry::LogFormat::Json,
        },
    };
    let endpoint = settings.telemetry.otlp_endpoint.as_ref();
    let traces = TraceSettings {
        otlp_endpoint: endpoint.map(|url| url.expose().to_owned()),
        sample_ratio: settings.telemetry.sample_ratio,
        service_name: settings.telemetry.service_name.clone(),
        instance_id: instance.to_owned(),
    };
    telemetry::init(&logs, &traces)
        .map_err(|error| CliError::new(Exit::Configuration, format!("telemetry: {error}")))
}

const fn exit_of(ended: Ended) -> Exit {
    if ended.faulty {
        Exit::Internal
    } else if ended.forced {
        Exit::Forced
    } else if ended.stopped > 0 {
        Exit::Stopped
    } else {
        Exit::Done
    }
}
