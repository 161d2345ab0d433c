//! `holdfast run`: a batch on this machine, in one line and without any set-up.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use indicatif::ProgressBar;
use sha2::{Digest, Sha256};
use tokio::sync::watch::channel;
use tokio::task::{JoinError, JoinSet};

use super::Global;
use super::context::{block_on, caller, connect, sources};
use super::dev::{private_workspaces, start_server};
use super::exit::{CliError, Exit, Status};
use super::output::remark;
use super::submit::{Input, read, store, wrong_flags};
use super::watch::{Display, to_the_end};
use super::worker::{
    executors, guarded, init_telemetry, keeper, keeper_is_gone, trust_watch, workspaces,
};
use super::{export, watch};
use crate::clock::{Clock, SystemClock};
use crate::config::{CommandSpec, QueueSpec, Settings};
use crate::embedded::{self, DataDir};
use crate::execute::keeper::Keeper;
use crate::export::{ENDED, Export};
use crate::guard::Seat;
use crate::health::{HealthLimits, HealthState};
use crate::model::{QueueName, VerdictClass, WorkerId};
use crate::store::{BatchRow, Database, StoreError, migrate};
use crate::submit::{Form, NewBatch, Submission};
use crate::supervise::signals::StopSignals;
use crate::supervise::{Ended, StopRequest, Worker, WorkerParts, WorkspaceCheckers};
use crate::telemetry::{BuildInfo, Metrics};

/// The one queue of a private database.
const QUEUE: &str = "run";

/// A short lease, since nobody else is there to be slow: an interrupted run goes on soon.
const LEASE: [(&str, &str); 3] =
    [("lease.ttl", "10s"), ("lease.kill_grace", "1s"), ("lease.slack", "500ms")];

/// Runs a command on each item of a file, on this machine, and prints the results as JSON lines.
///
/// The words after -- are the command; it is started without a shell. {input} in them is the item's
/// input, `{input_file}` a file that holds it, {key}, {position} and {attempt} what they say; with
/// neither of the first two the input comes on standard input. What a command prints is its result.
/// A failed command is tried again, with backoff.
#[derive(Args, Debug)]
#[command(after_help = "\
A private PostgreSQL keeps the state. Without --key it is gone at the end. With --key it is kept in
the state folder of this user (root: /var/lib/holdfast), one folder below `run` for each key, until
somebody removes it: started again with the same key, items, command, --timeout and --max-attempts, an
interrupted run goes on where it was, and one that is complete prints its results again. INT and TERM
stop what runs and give it back.

Exit codes: 0 all items succeeded; 1 items failed; 65 bad lines; 66 the file cannot be read; 73 the
--key was used before with other content; 130 interrupted.

Examples:
  find . -name '*.jpg' | holdfast run --lines -- sha256sum {input}
  holdfast run items.jsonl --key nightly --slots 8 --output results.jsonl -- ./analyse.py
  seq 100 | holdfast run --lines -- sh -c 'echo $(($1 * $1))' sh {input}")]
pub(super) struct RunArguments {
    /// The items, as `holdfast submit` takes them; - for standard input.
    #[arg(value_name = "FILE", default_value = "-")]
    file: PathBuf,
    /// Take each line as an item, its key and its input.
    #[arg(long)]
    lines: bool,
    /// Keep the state under this key, to go on after an interrupt.
    #[arg(long, value_name = "KEY")]
    key: Option<String>,
    /// Commands at once [default: the number of processors].
    #[arg(long, value_name = "N")]
    slots: Option<u16>,
    /// Attempts of an item before it fails [default: the key `batch.max_attempts`, 3].
    #[arg(long, value_name = "N")]
    max_attempts: Option<i32>,
    /// How long one command may take, such as 90s or 2h.
    #[arg(long, value_name = "DURATION", default_value = "1h", value_parser = humantime::parse_duration)]
    timeout: Duration,
    /// Write the results to this file when they are complete, instead of to standard output.
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// The folder of initdb and postgres.
    #[arg(long, value_name = "DIR", env = embedded::PG_BIN_VARIABLE)]
    pg_bin: Option<PathBuf>,
    /// The command and its arguments.
    #[arg(last = true, required = true, value_name = "CMD")]
    command: Vec<String>,
}

pub(super) fn run(global: &Global, arguments: &RunArguments) -> Result<Status, CliError> {
    let draft = Arc::new(settings(global, arguments, None)?);
    guarded(&draft, false, |seat| start(global, arguments, seat))
}

fn start(global: &Global, arguments: &RunArguments, seat: Seat) -> Result<Exit, CliError> {
    // Before the server: a wrong flag or a missing file costs nothing.
    if let Some(file) = &arguments.output {
        export::check_target(file)?;
    }
    if global.database_url.is_some() {
        remark(
            "`holdfast run` keeps its state in a private database; the URL that is set is not used",
        );
    }
    let draft = settings(global, arguments, None)?;
    let submission = submission(&draft, arguments)?;
    let input = Input::open(&arguments.file)?;
    let data = match &arguments.key {
        None => DataDir::Ephemeral,
        Some(key) => DataDir::State(embedded::default_state_dir()?.join("run").join(folder(key))),
    };
    let server = start_server(data.clone(), arguments.pg_bin.as_deref())?;
    let mut settings = settings(global, arguments, Some(server.url("postgres")))?;
    let workspaces = private_workspaces(&mut settings, &data)?;
    // The server outlives the runtime, so that the worker can hand in to its end.
    let ended = block_on(all(&Arc::new(settings), seat, submission, input, arguments, global.json));
    drop((server, workspaces));
    ended
}

/// A folder name for any key.
fn folder(key: &str) -> String {
    let digest = Sha256::digest(key);
    let (half, _) = digest.split_first_chunk::<16>().expect("SHA-256 has 32 bytes");
    format!("{:032x}", u128::from_be_bytes(*half))
}

fn settings(
    global: &Global,
    arguments: &RunArguments,
    url: Option<String>,
) -> Result<Settings, CliError> {
    let mut sources = sources(global);
    for (key, value) in LEASE {
        sources = sources.with_flag("holdfast run", key, value);
    }
    let processors = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let slots = arguments.slots.unwrap_or_else(|| u16::try_from(processors).unwrap_or(u16::MAX));
    sources = sources
        .with_flag("--slots", "worker.execution_slots", slots)
        // Whoever stops it does not want to wait: what runs is stopped and given back.
        .with_flag("holdfast run", "drain.grace", "0s")
        .with_flag("holdfast run", "health.listen", "")
        .with_flag("holdfast run", "log.level", "warn");
    if let Some(url) = url {
        sources = sources.with_flag("holdfast run", "database.url", url);
    }
    Ok(Settings::load(&sources)?)
}

fn submission(settings: &Settings, arguments: &RunArguments) -> Result<Submission, CliError> {
    let queue: QueueName = QUEUE.parse().expect("the queue of `holdfast run` has a valid name");
    let batch = NewBatch {
        submission_key: arguments.key.clone(),
        max_attempts: arguments.max_attempts,
        ..NewBatch::in_queue(queue)
    };
    batch.validate(&settings.limits).map_err(|problems| wrong_flags(&problems))?;
    let spec = CommandSpec {
        timeout: arguments.timeout,
        ..CommandSpec::new(arguments.command.clone(), &settings.limits)
    };
    let form = if arguments.lines { Form::Lines } else { Form::Jsonl };
    Ok(Submission::with_spec(batch, form, QueueSpec::Command(spec)))
}

/// Submits, works, follows, prints.
async fn all(
    settings: &Arc<Settings>,
    seat: Seat,
    submission: Submission,
    input: Input,
    arguments: &RunArguments,
    json: bool,
) -> Result<Exit, CliError> {
    migrate::up(settings.database_url()?.expose(), None).await?;
    let database = connect(settings).await?;
    let admitted = read(submission, input, settings, json).await?;
    let metrics = metrics();
    let telemetry = init_telemetry(settings, &seat.worker.to_string(), metrics.spans_dropped())?;
    let caller = caller(None);
    let batch = store(admitted, &database, caller.as_ref(), json).await?.batch();

    let keeper = keeper(settings, seat.link)?;
    let worker = worker(settings, &database, &keeper, metrics, seat.worker)?;
    let (stop, stopped) = channel(StopRequest::Run);
    let mut working = JoinSet::new();
    working.spawn(worker.run(stopped));
    let signals = StopSignals::take()
        .map_err(|error| CliError::new(Exit::Internal, format!("take the signals: {error}")))?;
    let clock = SystemClock;
    let mut display = Display::new(false);
    let keeper_lost = keeper.lost();
    let ended: Option<BatchRow> = tokio::select! {
        ended = to_the_end(&database, batch, None, &mut display) => Some(ended?),
        worked = working.join_next() => {
            could_go_on(worked)?;
            None
        }
        () = signals.forward(&clock, &settings.drain, &stop) => None,
        () = keeper_lost.cancelled() => return Err(keeper_is_gone()),
    };
    display.close();
    // Nothing runs any more when the batch has ended.
    stop.send_modify(|asked| *asked = (*asked).max(StopRequest::Drain(Duration::from_secs(5))));
    while working.join_next().await.is_some() {}
    telemetry.shutdown().await;
    let Some(ended) = ended else {
        remark(match &arguments.key {
            Some(_) => "interrupted; the same command goes on where it was",
            None => "interrupted; nothing is kept without --key",
        });
        return Ok(Exit::Interrupted);
    };
    let mut results = Export::new(database, &ended, &ENDED, &VerdictClass::ALL);
    match &arguments.output {
        None => export::to_stdout(&mut results).await?,
        Some(file) => export::to_file(&mut results, file, &ProgressBar::hidden()).await?,
    }
    Ok(watch::exit_of(&ended))
}

/// Why the worker ended before its batch did, unless it was asked to.
fn could_go_on(
    worked: Option<Result<Result<Ended, StoreError>, JoinError>>,
) -> Result<(), CliError> {
    let faulty = match worked {
        None => false,
        Some(Err(_)) => true,
        Some(Ok(ended)) => ended?.faulty,
    };
    if faulty {
        return Err(CliError::new(Exit::Internal, "a part of the worker panicked"));
    }
    Ok(())
}

fn metrics() -> Arc<Metrics> {
    let queue = QUEUE.parse().expect("the queue of `holdfast run` has a valid name");
    let build = BuildInfo::current(migrate::OLDEST, migrate::newest());
    Arc::new(Metrics::new([queue], &build))
}

fn worker(
    settings: &Arc<Settings>,
    database: &Database,
    keeper: &Arc<Keeper>,
    metrics: Arc<Metrics>,
    id: WorkerId,
) -> Result<Worker, CliError> {
    let clock: Arc<dyn Clock> = Arc::new(SystemClock);
    let queue: QueueName = QUEUE.parse().expect("the queue of `holdfast run` has a valid name");
    let limits = HealthLimits::for_lease(settings.lease.ttl);
    Ok(Worker::new(WorkerParts {
        settings: Arc::clone(settings),
        database: database.clone(),
        clock: Arc::clone(&clock),
        metrics,
        health: Arc::new(HealthState::new(Arc::clone(&clock), limits)),
        executors: Arc::new(executors(settings, &clock, keeper)?),
        workspaces: workspaces(settings)?,
        checkers: Arc::new(WorkspaceCheckers),
        queues: vec![queue],
        id,
        trust_watch: Some(trust_watch(keeper)),
    }))
}
