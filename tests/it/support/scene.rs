//! A worker in the test's own process, whose executions take a given time and whose checks wait until
//! the test lets them go.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use holdfast::attempt::{CheckRequest, Checker};
use holdfast::clock::{BootInstant, Clock, SystemClock};
use holdfast::config::{Settings, Sources};
use holdfast::execute::{Execution, ExecutionEnd, Executor, Job};
use holdfast::health::{HealthLimits, HealthState};
use holdfast::model::{BatchId, Family, Finding, Leaf, QueueName, StopReason, Verdict, WorkerId};
use holdfast::store::{BatchWork, Event};
use holdfast::supervise::{Checkers, Ended, Executors, StopRequest, Worker, WorkerParts};
use holdfast::telemetry::{BuildInfo, Metrics};
use holdfast::workspace::{Gate, LocalWorkspaces};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::fixture::{BatchSpec, Bed};
use super::fleet::{LONG, until};

/// What an execution did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum What {
    Start,
    End,
}

/// What executions did, in the order in which they did.
#[derive(Clone, Default)]
pub(crate) struct Log(Arc<Mutex<Vec<(What, BootInstant)>>>);

impl Log {
    fn note(&self, what: What) {
        let now = SystemClock.now();
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push((what, now));
    }

    pub(crate) fn times(&self, what: What) -> Vec<BootInstant> {
        let log = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        log.iter().filter(|(noted, _)| *noted == what).map(|(_, at)| *at).collect()
    }

    pub(crate) fn count(&self, what: What) -> usize {
        self.times(what).len()
    }

    pub(crate) fn clear(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }
}

/// Executes by waiting.
#[derive(Clone)]
struct Waiting {
    log: Log,
    takes: Duration,
}

#[async_trait]
impl Executor for Waiting {
    async fn execute(&self, _: &Job, stop: &CancellationToken) -> Execution {
        let started_at = SystemClock.wall();
        self.log.note(What::Start);
        let stopped = tokio::time::timeout(self.takes, stop.cancelled()).await.is_ok();
        self.log.note(What::End);
        let (end, reason) = if stopped {
            (ExecutionEnd::Stopped, StopReason::Stopped)
        } else {
            (ExecutionEnd::Succeeded, StopReason::Completed)
        };
        Execution {
            output: "done".into(),
            output_bytes: 4,
            ..Execution::new(end, reason, started_at, SystemClock.wall())
        }
    }
}

impl Executors for Waiting {
    fn executor(
        &self,
        _: &BatchWork,
        _: &Arc<Gate>,
    ) -> Result<(Arc<dyn Executor>, Duration), String> {
        Ok((Arc::new(self.clone()), LONG))
    }
}

/// What every check finds.
pub(crate) fn found() -> Option<Verdict> {
    Verdict::new(vec![Leaf::new("well written", Family::Undecidable, Finding::Unchecked, "")])
}

/// Checks that wait.
#[derive(Default)]
pub(crate) struct Held {
    open: Mutex<bool>,
    changed: Condvar,
    pub(crate) begun: AtomicUsize,
    pub(crate) ended: AtomicUsize,
    panics: bool,
}

impl Held {
    /// Checks that fail once they are let go.
    pub(crate) fn failing() -> Self {
        Self { panics: true, ..Self::default() }
    }

    pub(crate) fn set_open(&self, open: bool) {
        *self.open.lock().unwrap_or_else(PoisonError::into_inner) = open;
        self.changed.notify_all();
    }

    /// Checks in progress.
    pub(crate) fn running(&self) -> usize {
        self.begun.load(Ordering::SeqCst) - self.ended.load(Ordering::SeqCst)
    }
}

impl Checker for Held {
    fn check(&self, _: &CheckRequest) -> Option<Verdict> {
        self.begun.fetch_add(1, Ordering::SeqCst);
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        while !*open {
            open = self.changed.wait(open).unwrap_or_else(PoisonError::into_inner);
        }
        drop(open);
        self.ended.fetch_add(1, Ordering::SeqCst);
        assert!(!self.panics, "a fault of the checker");
        found()
    }
}

struct HeldCheckers(Arc<Held>);

impl Checkers for HeldCheckers {
    fn checker(&self, _: &Arc<Gate>) -> Arc<dyn Checker> {
        Arc::<Held>::clone(&self.0)
    }
}

/// A worker, what its executions did, and the checks it waits for.
pub(crate) struct Scene {
    pub(crate) bed: Bed,
    pub(crate) log: Log,
    pub(crate) held: Arc<Held>,
    stop: watch::Sender<StopRequest>,
    tasks: JoinSet<Ended>,
}

impl Scene {
    /// Executions take `takes`; `change` changes the default settings.
    pub(crate) async fn new(
        takes: Duration,
        held: Held,
        change: impl FnOnce(&mut Settings),
    ) -> Self {
        let bed = Bed::new().await;
        let url = bed.db.url().to_owned();
        let sources = Sources::none().with_flag("--database-url", "database.url", url);
        let mut settings = Settings::load(&sources).unwrap();
        change(&mut settings);
        settings.check().unwrap();
        let (log, held) = (Log::default(), Arc::new(held));
        let clock: Arc<dyn Clock> = Arc::new(SystemClock);
        let queue: QueueName = "q".parse().unwrap();
        let metrics = Metrics::new([queue.clone()], &BuildInfo::current(1, 1));
        let limits = HealthLimits::for_lease(settings.lease.ttl);
        let worker = Worker::new(WorkerParts {
            settings: Arc::new(settings),
            database: bed.store_of_a_worker(),
            clock: Arc::clone(&clock),
            metrics: Arc::new(metrics),
            health: Arc::new(HealthState::new(clock, limits)),
            executors: Arc::new(Waiting { log: log.clone(), takes }),
            checkers: Arc::new(HeldCheckers(Arc::clone(&held))),
            workspaces: Arc::new(LocalWorkspaces::new(
                "/nonexistent/holdfast".into(),
                "/mnt/user-data".to_owned(),
            )),
            queues: vec![queue],
            id: WorkerId::generate(),
            trust_watch: None,
        });
        let (stop, stopped) = watch::channel(StopRequest::Run);
        let mut tasks = JoinSet::new();
        tasks.spawn(async move { worker.run(stopped).await.unwrap() });
        Self { bed, log, held, stop, tasks }
    }

    /// Stores a batch and tells the worker.
    pub(crate) async fn submit(&self, spec: BatchSpec) -> BatchId {
        let batch = self.bed.batch_of(spec).await;
        self.bed.store.notify(&Event::Work("q".to_owned())).await.unwrap();
        batch
    }

    pub(crate) async fn until(&self, what: &str, mut holds: impl FnMut() -> bool) {
        until(what, LONG, async || holds()).await;
    }

    pub(crate) async fn ended(&self, batch: BatchId) {
        until("the batch ends", LONG, async || self.bed.is_ended(batch).await).await;
    }

    pub(crate) fn ask(&self, request: StopRequest) {
        self.stop.send_replace(request);
    }

    /// Waits for the end of the worker.
    pub(crate) async fn end(&mut self) -> Ended {
        let ended = tokio::time::timeout(LONG, self.tasks.join_next()).await;
        ended.expect("it ends").unwrap().unwrap()
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        // The runtime waits for its threads.
        self.held.set_open(true);
    }
}
