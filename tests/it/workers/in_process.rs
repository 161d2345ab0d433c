//! A worker in this process, with an executor and a clock of the test's own.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use holdfast::clock::{Clock, SystemClock};
use holdfast::config::Settings;
use holdfast::execute::{Execution, ExecutionEnd, Executor, Job};
use holdfast::health::{HealthLimits, HealthState};
use holdfast::model::{QueueName, StopReason, WorkerId};
use holdfast::store::{BatchWork, Database, StoreError, migrate};
use holdfast::supervise::{
    Ended, Executors, StopRequest, Worker, WorkerParts, WorkspaceCheckers, database_options,
};
use holdfast::telemetry::{BuildInfo, Metrics};
use holdfast::workspace::{Gate, LocalWorkspaces};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::support::fleet::{QUEUE, SHORT};

/// Settings with a lease of [`SHORT`] for a worker of `slots` slots.
pub(super) fn settings(url: &str, slots: u16) -> Settings {
    let mut settings = Settings::defaults();
    settings.database.url = Some(url.parse().unwrap());
    settings.database.pool_size = 4;
    settings.worker.execution_slots = slots;
    settings.lease.ttl = SHORT;
    settings.lease.kill_grace = Duration::from_millis(200);
    settings.lease.slack = Duration::from_millis(200);
    settings.check().unwrap();
    settings
}

/// A worker under way.
pub(super) struct InProcess {
    stop: watch::Sender<StopRequest>,
    task: JoinSet<Result<Ended, StoreError>>,
}

impl InProcess {
    pub(super) fn start(
        settings: Settings,
        executors: Arc<dyn Executors>,
        clock: Arc<dyn Clock>,
    ) -> Self {
        let queue: QueueName = QUEUE.parse().unwrap();
        let build = BuildInfo::current(migrate::OLDEST, migrate::newest());
        let limits = HealthLimits::for_lease(settings.lease.ttl);
        let database = Database::new(database_options(&settings, "holdfast test").unwrap());
        let worker = Worker::new(WorkerParts {
            settings: Arc::new(settings),
            database: database.unwrap(),
            clock: Arc::clone(&clock),
            metrics: Arc::new(Metrics::new([queue.clone()], &build)),
            health: Arc::new(HealthState::new(clock, limits)),
            executors,
            // Nothing here asks for a workspace.
            workspaces: Arc::new(LocalWorkspaces::new("/nonexistent".into(), "/mnt".to_owned())),
            checkers: Arc::new(WorkspaceCheckers),
            queues: vec![queue],
            id: WorkerId::generate(),
            trust_watch: None,
        });
        let (stop, stopped) = watch::channel(StopRequest::Run);
        let mut task = JoinSet::new();
        task.spawn(worker.run(stopped));
        Self { stop, task }
    }

    /// Waits for its end, by itself.
    pub(super) async fn ended(&mut self) -> Ended {
        self.task.join_next().await.unwrap().unwrap().unwrap()
    }

    /// Drains it.
    pub(super) async fn drain(mut self) -> Ended {
        self.stop.send_replace(StopRequest::Drain(Duration::from_secs(10)));
        self.ended().await
    }
}

/// One executor for every batch.
pub(super) struct Only(pub(super) Arc<dyn Executor>);

impl Executors for Only {
    fn executor(
        &self,
        _: &BatchWork,
        _: &Arc<Gate>,
    ) -> Result<(Arc<dyn Executor>, Duration), String> {
        Ok((Arc::clone(&self.0), Duration::from_hours(1)))
    }
}

/// Succeeds at once.
pub(super) struct Noop;

#[async_trait]
impl Executor for Noop {
    async fn execute(&self, _: &Job, _: &CancellationToken) -> Execution {
        execution(ExecutionEnd::Succeeded)
    }
}

pub(super) fn execution(end: ExecutionEnd) -> Execution {
    let now = SystemClock.wall();
    Execution::new(end, StopReason::Completed, now, now)
}
