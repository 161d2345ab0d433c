//! Our side: the library's own submit, worker and control, in this process.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use async_trait::async_trait;
use tokio::sync::{Notify, mpsc, watch};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use holdfast::clock::{BootInstant, Clock, SystemClock};
use holdfast::config::{CommandSpec, QueueSpec, Settings};
use holdfast::execute::{Execution, ExecutionEnd, Executor, Job};
use holdfast::health::{HealthLimits, HealthState};
use holdfast::model::{BatchId, QueueName, StopReason, WorkerId};
use holdfast::store::{
    BatchWork, ControlAnswer, ControlVerb, Database, Event, StoreError, Stored, migrate,
};
use holdfast::submit::{Admitted, Form, NewBatch, Submission};
use holdfast::supervise::{
    Ended, Executors, StopRequest, Worker, WorkerParts, WorkspaceCheckers, database_options,
};
use holdfast::telemetry::{BuildInfo, Metrics};
use holdfast::workspace::{Gate, LocalWorkspaces};

use super::server::{Connection, now};

const QUEUE: &str = "bench";

/// One database of Holdfast's.
pub(crate) struct Holdfast {
    settings: Settings,
    database: Database,
    url: String,
}

/// A worker under way.
pub(crate) struct Running {
    stop: watch::Sender<StopRequest>,
    task: JoinSet<Result<Ended, StoreError>>,
}

impl Holdfast {
    /// Default settings, but for the number of slots.
    pub(crate) fn new(url: &str, slots: u16) -> Result<Self> {
        let mut settings = Settings::defaults();
        settings.database.url = Some(url.parse().map_err(anyhow::Error::msg)?);
        settings.worker.execution_slots = slots;
        settings.check()?;
        let database = Database::new(database_options(&settings, "holdfast bench")?)?;
        Ok(Self { settings, database, url: url.to_owned() })
    }

    /// Validates and spools a batch of which `max_live` items may be waiting or held, as a submit
    /// does.
    pub(crate) async fn read(&self, jsonl: Vec<u8>, max_live: u32) -> Result<Admitted> {
        let settings = self.settings.clone();
        let max_live = max_live.max(settings.batch.max_live);
        let batch =
            NewBatch { max_live: Some(i32::try_from(max_live)?), ..NewBatch::in_queue(queue()) };
        let command = CommandSpec::new(vec!["true".into()], &settings.limits);
        let submission = Submission::with_spec(batch, Form::Jsonl, QueueSpec::Command(command));
        let read = move || submission.read(&*jsonl, &settings, None, &mut |_| ());
        Ok(tokio::task::spawn_blocking(read).await??)
    }

    /// Stores a batch and tells the workers, as a submit does.
    pub(crate) async fn store(&self, admitted: Admitted) -> Result<BatchId> {
        match admitted.store(&self.database, None, |_| ()).await? {
            Stored::Created(batch) => Ok(batch),
            Stored::Existing(batch) => anyhow::bail!("batch {batch} was there before"),
        }
    }

    /// Starts a worker whose items `executor` runs.
    pub(crate) fn work(&self, executor: Arc<dyn Executor>) -> Running {
        let clock: Arc<dyn Clock> = Arc::new(SystemClock);
        let build = BuildInfo::current(migrate::OLDEST, migrate::newest());
        let limits = HealthLimits::for_lease(self.settings.lease.ttl);
        let worker = Worker::new(WorkerParts {
            settings: Arc::new(self.settings.clone()),
            database: self.database.clone(),
            clock: Arc::clone(&clock),
            metrics: Arc::new(Metrics::new([queue()], &build)),
            health: Arc::new(HealthState::new(clock, limits)),
            executors: Arc::new(Only(executor)),
            workspaces: Arc::new(LocalWorkspaces::new("/nonexistent".into(), String::new())),
            checkers: Arc::new(WorkspaceCheckers),
            queues: vec![queue()],
            id: WorkerId::generate(),
            trust_watch: None,
        });
        let (stop, stopped) = watch::channel(StopRequest::Run);
        let mut task = JoinSet::new();
        task.spawn(worker.run(stopped));
        Running { stop, task }
    }

    /// Waits until a batch has ended.
    pub(crate) async fn until_ended(&self, batch: BatchId) -> Result<()> {
        loop {
            let row = self.database.batch(batch, None).await?.context("the batch is gone")?;
            if row.is_finished() {
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    /// Checks that a batch has `items` outcomes, all successes, and nothing else anywhere.
    pub(crate) async fn verify(&self, batch: BatchId, items: u32) -> Result<()> {
        let counts = self.database.batch(batch, None).await?.context("the batch is gone")?.counts;
        ensure!(i64::from(counts.succeeded) == i64::from(items), "counted {counts:?}");
        let connection = Connection::open(&self.url, |_| ()).await?;
        let outcomes: i64 = connection
            .client
            .query_one(
                "SELECT count(*) FROM holdfast.outcomes WHERE batch_id = $1 AND status = 'succeeded'",
                &[&batch.uuid()],
            )
            .await?
            .get(0);
        connection.close().await;
        ensure!(outcomes == i64::from(items), "{outcomes} outcomes of {items} items");
        Ok(())
    }

    /// Cancels a batch: how long the database took for it, as its caller sees it.
    pub(crate) async fn cancel(&self, batch: BatchId) -> Result<Duration> {
        let begun = now();
        let answer = self.database.control_batch(batch, None, ControlVerb::Cancel, "bench").await?;
        let took = now().since(begun);
        ensure!(answer == ControlAnswer::Applied, "the cancel answered {answer:?}");
        self.database.notify(&Event::Cancelled(batch)).await?;
        Ok(took)
    }
}

impl Running {
    /// Drains the worker; it must have nothing to stop.
    pub(crate) async fn stop(mut self) -> Result<()> {
        self.stop.send_replace(StopRequest::Drain(Duration::from_secs(10)));
        let ended = self.task.join_next().await.context("the worker's task is gone")???;
        ensure!(ended == Ended::default(), "the worker ended as {ended:?}");
        Ok(())
    }
}

fn queue() -> QueueName {
    QUEUE.parse().expect("a queue's name")
}

/// One executor for every batch.
struct Only(Arc<dyn Executor>);

impl Executors for Only {
    fn executor(
        &self,
        _: &BatchWork,
        _: &Arc<Gate>,
    ) -> Result<(Arc<dyn Executor>, Duration), String> {
        Ok((Arc::clone(&self.0), Duration::from_hours(1)))
    }
}

fn execution(end: ExecutionEnd) -> Execution {
    let now = SystemClock.wall();
    Execution::new(end, StopReason::Completed, now, now)
}

/// Does nothing, and counts.
pub(crate) struct Noop {
    goal: u64,
    executions: AtomicU64,
    reached: Notify,
}

impl Noop {
    pub(crate) fn new(goal: u32) -> Self {
        Self { goal: goal.into(), executions: AtomicU64::new(0), reached: Notify::new() }
    }

    /// Waits until as many items were executed as there are.
    pub(crate) async fn reached(&self) {
        self.reached.notified().await;
    }

    /// How many were.
    pub(crate) fn executions(&self) -> u64 {
        self.executions.load(Ordering::Relaxed)
    }
}

#[async_trait]
impl Executor for Noop {
    async fn execute(&self, _: &Job, _: &CancellationToken) -> Execution {
        if self.executions.fetch_add(1, Ordering::Relaxed) + 1 == self.goal {
            self.reached.notify_one();
        }
        execution(ExecutionEnd::Succeeded)
    }
}

/// Does nothing, and says when it began.
pub(crate) struct Clocked(pub(crate) mpsc::UnboundedSender<BootInstant>);

#[async_trait]
impl Executor for Clocked {
    async fn execute(&self, _: &Job, _: &CancellationToken) -> Execution {
        let _ = self.0.send(now());
        execution(ExecutionEnd::Succeeded)
    }
}

/// Runs until it is told to stop; says that it began, and when it was told.
pub(crate) struct Endless {
    pub(crate) began: mpsc::UnboundedSender<()>,
    pub(crate) stopped: mpsc::UnboundedSender<BootInstant>,
}

#[async_trait]
impl Executor for Endless {
    async fn execute(&self, _: &Job, stop: &CancellationToken) -> Execution {
        let _ = self.began.send(());
        stop.cancelled().await;
        let _ = self.stopped.send(now());
        execution(ExecutionEnd::Stopped)
    }
}
