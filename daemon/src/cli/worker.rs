//! `holdfast worker`.

mod duties;

use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use prometheus::IntCounter;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::info;

use self::duties::{Orders, Reload};
use super::Global;
use super::context::{block_on, sources};
use super::exit::{CliError, Exit, Status};
use crate::clock::{Clock, SystemClock};
use crate::config::{LogFormat, Settings};
use crate::embedded;
use crate::execute::keeper::{self, Keeper, Link};
use crate::execute::spawner::Spawner;
use crate::guard::{Guard, Seat, count_news};
use crate::health::{HealthLimits, HealthServer, HealthState};
use crate::leases::TrustWatch;
use crate::store::{Database, migrate};
use crate::supervise::signals::{OrderSignals, StopSignals};
use crate::supervise::{
    CommandExecutors, Ended, StopRequest, Worker, WorkerParts, WorkspaceCheckers, database_options,
};
use crate::telemetry::{self, BuildInfo, LogSettings, Metrics, TraceSettings};
use crate::workspace::{LocalWorkspaces, Workspaces};

/// Claims and executes items of its queues until told to stop.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
The main process is a guard, and the worker its child: whatever becomes of the worker, what it runs
ends with its lease. A worker that crashes is started again and its items released at once.

Signals: the first TERM drains (INT: for a short while); a second one, 2 s later or more, stops what
runs and gives it back; a third ends at once. HUP reads the configuration anew: log.level changes at
once, other settings with the next start, and a file with a fault changes nothing. USR1 writes down
what the worker holds, into its log. USR2 lets it claim nothing more, the next one lets it claim again.

Under systemd it says when it is ready, how it stands and when it ends, and gives signs of life to a
watchdog for as long as the worker does.

Exit codes: 0 drained; 3 executions were stopped; 4 ended at once; 69, 75, 78 could not start; 70
crashed too often in a row (worker.restarts).

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

/// How long a worker that ends waits for its last spans to be delivered, and how long a command.
const WORKER_FLUSH: Duration = Duration::from_secs(3);
const CLIENT_FLUSH: Duration = Duration::from_secs(1);

pub(super) fn run(global: &Global, arguments: WorkerArguments) -> Result<Status, CliError> {
    let read = {
        let global = global.clone();
        move || settings(&global, arguments.clone())
    };
    let settings = Arc::new(read()?);
    guarded(&settings, true, |seat| {
        block_on(serve(Arc::clone(&settings), seat, Some(Box::new(read))))
    })
}

/// Runs `command` below a guard: as the guard, which starts this program again, or in its seat.
/// Without a restart, the guard's end is the command's, whatever that was.
pub(super) fn guarded(
    settings: &Arc<Settings>,
    restarts: bool,
    command: impl FnOnce(Seat) -> Result<Exit, CliError>,
) -> Result<Status, CliError> {
    let system = |error| CliError::new(Exit::Internal, format!("guard this process: {error}"));
    if let Some(seat) = Seat::take().map_err(system)? {
        return command(seat).map(Status::from);
    }
    let telemetry = init_logs(settings)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let guard = Guard { settings: Arc::clone(settings), restarts };
    let status = runtime.and_then(|runtime| runtime.block_on(guard.run())).map_err(system)?;
    drop(telemetry);
    Ok(Status(status))
}

/// Is the keeper of a worker.
pub(super) fn keep() -> Result<Exit, CliError> {
    let kept = keeper::run();
    kept.map(|()| Exit::Done)
        .map_err(|error| CliError::new(Exit::Internal, format!("keep executions: {error}")))
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

/// Runs one worker as this process: telemetry, health, signals around it. Without `reload`, signals
/// that are orders have the effect that they have on any program.
pub(super) async fn serve(
    settings: Arc<Settings>,
    seat: Seat,
    reload: Option<Reload>,
) -> Result<Exit, CliError> {
    let queues = settings.served_queues();
    if queues.is_empty() {
        return Err(CliError::new(
            Exit::Configuration,
            "queues: none is configured, so this worker would serve nothing; add a [queues.NAME] section",
        ));
    }
    let database = Database::new(database_options(&settings, "holdfast worker")?)?;
    let clock: Arc<dyn Clock> = Arc::new(SystemClock);
    let Seat { worker: id, link, reporter, news } = seat;
    let keeper = keeper(&settings, link)?;
    let executors = executors(&settings, &clock, &keeper)?
        .in_fleet(&database, id)
        .map_err(|error| CliError::new(Exit::Configuration, format!("upstreams: {error}")))?;
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
        id,
        trust_watch: Some(trust_watch(&keeper)),
    });
    let (quiet, quieted) = watch::channel(false);
    let worker = worker.quieted_by(quieted);
    let telemetry = init_telemetry(&settings, &worker.id().to_string(), metrics.spans_dropped())?;
    let no_signals = |error| CliError::new(Exit::Internal, format!("take the signals: {error}"));
    let signals = StopSignals::take().map_err(no_signals)?;
    let (view, reloads) = (worker.view(), Arc::default());
    let mut beside = tokio::task::JoinSet::new();
    if let Some(reload) = reload {
        let orders = Orders {
            signals: OrderSignals::take().map_err(no_signals)?,
            metrics: Arc::clone(&metrics),
            reload,
            settings: Arc::clone(&settings),
            level: telemetry.log_level(),
            view: view.clone(),
            quiet,
            reloads: Arc::clone(&reloads),
        };
        beside.spawn(orders.heed());
    }
    beside.spawn(duties::report(view, reporter, reloads));
    migrate::check(&database).await?;
    health.schema_checked(true);

    let serving = CancellationToken::new();
    let mut beside = tokio::task::JoinSet::new();
    let (counted, stop) = (Arc::clone(&metrics), serving.clone());
    beside.spawn(async move {
        stop.run_until_cancelled(count_news(news, &counted)).await;
    });
    if let Some(address) = settings.health.listen {
        let server = HealthServer::bind(address, health, metrics).await.map_err(|error| {
            CliError::new(Exit::Configuration, format!("health.listen {address}: {error}"))
        })?;
        let bound = server.address().map_err(|error| CliError::new(Exit::Internal, error))?;
        info!(address = %bound, "serving health and metrics");
        beside.spawn(server.run(serving.clone()));
    }
    let (stop, stopped) = watch::channel(StopRequest::Run);
    let keeper_lost = keeper.lost();
    let ended = tokio::select! {
        ended = worker.run(stopped) => ended,
        () = signals.forward(&*clock, &settings.drain, &stop) => Ok(Ended::default()),
        () = keeper_lost.cancelled() => return Err(keeper_is_gone()),
    };
    serving.cancel();
    while beside.join_next().await.is_some() {}
    telemetry.shutdown().await;
    Ok(exit_of(ended?))
}

fn cannot_start_commands(error: &std::io::Error) -> CliError {
    CliError::new(Exit::Internal, format!("prepare to start commands: {error}"))
}

/// The way to the keeper of this process.
pub(super) fn keeper(settings: &Settings, link: Link) -> Result<Arc<Keeper>, CliError> {
    let keeper = Keeper::connect(link, settings.lease.kill_grace);
    keeper.map(Arc::new).map_err(|error| cannot_start_commands(&error))
}

/// What tells the keeper of every trust deadline.
pub(super) fn trust_watch(keeper: &Arc<Keeper>) -> TrustWatch {
    let keeper = Arc::clone(keeper);
    Arc::new(move |lease, until| keeper.trust(lease, until))
}

/// Its executions are gone or will be: this process ends at once, and the guard sees to the rest.
pub(super) fn keeper_is_gone() -> CliError {
    CliError::new(Exit::Internal, "the keeper of this worker is gone")
}

/// What runs the queues' items in this process.
pub(super) fn executors(
    settings: &Arc<Settings>,
    clock: &Arc<dyn Clock>,
    keeper: &Arc<Keeper>,
) -> Result<CommandExecutors, CliError> {
    let spawner = Arc::clone(keeper) as Arc<dyn Spawner>;
    CommandExecutors::new(Arc::clone(settings), spawner, Arc::clone(clock))
        .map_err(|error| cannot_start_commands(&error))
}

/// Sets up the logs of a process that has no traces, or none of its own.
pub(super) fn init_logs(settings: &Settings) -> Result<telemetry::TelemetryGuard, CliError> {
    start_telemetry(&log_settings(settings), &TraceSettings::none())
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
    dropped: IntCounter,
) -> Result<telemetry::TelemetryGuard, CliError> {
    let traces = TraceSettings {
        service_name: settings.telemetry.service_name.clone(),
        instance_id: instance.to_owned(),
        flush: WORKER_FLUSH,
        dropped,
        ..trace_settings(settings)
    };
    start_telemetry(&log_settings(settings), &traces)
}

/// Sends the spans of a client command, which logs nothing, where a worker's spans go.
pub(super) fn client_telemetry(settings: &Settings) -> Result<telemetry::TelemetryGuard, CliError> {
    let logs = LogSettings { level: "off".to_owned(), format: telemetry::LogFormat::Text };
    let traces = TraceSettings {
        service_name: "holdfast".to_owned(),
        instance_id: std::process::id().to_string(),
        flush: CLIENT_FLUSH,
        ..trace_settings(settings)
    };
    start_telemetry(&logs, &traces)
}

fn trace_settings(settings: &Settings) -> TraceSettings {
    let configured = &settings.telemetry;
    TraceSettings {
        otlp_endpoint: configured.otlp_endpoint.as_ref().map(|url| url.expose().to_owned()),
        sample_ratio: configured.sampler.ratio(configured.sample_ratio),
        sample_linked: configured.sampler.follows(),
        ..TraceSettings::none()
    }
}

fn log_settings(settings: &Settings) -> LogSettings {
    LogSettings {
        level: settings.log.level.clone(),
        format: match settings.log.format {
            LogFormat::Text => telemetry::LogFormat::Text,
            LogFormat::Json => telemetry::LogFormat::Json,
        },
    }
}

fn start_telemetry(
    logs: &LogSettings,
    traces: &TraceSettings,
) -> Result<telemetry::TelemetryGuard, CliError> {
    telemetry::init(logs, traces)
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
