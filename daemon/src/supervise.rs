//! Start order, signals, drain, stop order of a worker.

mod checker;
mod cleaning;
mod contexts;
mod hints;
mod requests;
mod scratch;
pub mod signals;
mod upstreams;
mod view;

use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use time::OffsetDateTime;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::{debug, info, warn};

pub use self::checker::{Checkers, WorkspaceCheckers};
pub(crate) use self::cleaning::{Cleaning, CleaningError};
pub use self::contexts::{CommandExecutors, Executors};
pub use self::upstreams::{FleetLedger, FleetLimits};
pub use self::view::{Summary, View};

use self::contexts::Contexts;
use crate::attempt::{Attempts, CheckPolicy, Rechecked, Taken};
use crate::capacity::{CheckSlots, Slots};
use crate::claim::{ClaimPolicy, Claimer, Granted, Wakeups};
use crate::clock::{Clock, sleep_until};
use crate::config::Settings;
use crate::fault::Fault;
use crate::finish::{Finisher, Grouping};
use crate::health::HealthState;
use crate::heartbeat::Heartbeat;
use crate::leases::{Leases, StopCause, TrustWatch};
use crate::model::{LeaseId, Position, QueueName, WorkerId, WorkerState};
use crate::reap::{Judge, Reaper, SweepPolicy};
use crate::recheck::{RecheckPolicy, Rechecker, Retaken};
use crate::store::{
    Database, DatabaseOptions, ItemInput, ReapPolicy, ServerReading, StagedItem, StoreError,
    WorkerRow, migrate,
};
use crate::telemetry::Metrics;
use crate::telemetry::labels::{DbPool, SlotKind};
use crate::telemetry::metrics::PoolUse;
use crate::workspace::Workspaces;

/// What a worker is asked to do about its end. Only ever raised.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum StopRequest {
    /// Go on.
    #[default]
    Run,
    /// Claim nothing more; end when what runs has ended, or this much later.
    Drain(Duration),
    /// Stop what runs, give it back, end.
    Cancel,
    /// End at once; leases lapse.
    Abort,
}

/// How long a lost check is left to workers that see the volume of its workspace.
const FOREIGN_RECHECK: Duration = Duration::from_secs(30);

/// The timer by which the lag of the runtime is seen.
const LAG_TIMER: Duration = Duration::from_secs(1);

/// How a worker ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ended {
    /// Executions that were stopped before their end.
    pub stopped: usize,
    /// Whether items were left in their leases, to lapse.
    pub forced: bool,
    /// Whether it ended because a part of it panicked.
    pub faulty: bool,
}

/// What a worker is made of.
pub struct WorkerParts {
    /// Checked settings.
    pub settings: Arc<Settings>,
    /// The database.
    pub database: Database,
    /// The clocks.
    pub clock: Arc<dyn Clock>,
    /// The metrics.
    pub metrics: Arc<Metrics>,
    /// What health answers.
    pub health: Arc<HealthState>,
    /// What runs the items of a batch.
    pub executors: Arc<dyn Executors>,
    /// Where items have their files.
    pub workspaces: Arc<dyn Workspaces>,
    /// What checks the items of a batch.
    pub checkers: Arc<dyn Checkers>,
    /// The queues to serve.
    pub queues: Vec<QueueName>,
    /// The identity of this start, where somebody else has to know it.
    pub id: WorkerId,
    /// Who else holds the trust deadlines of what runs.
    pub trust_watch: Option<TrustWatch>,
}

/// How the database is reached by these settings, as `application`.
///
/// # Errors
/// When no URL is set.
pub fn database_options(
    settings: &Settings,
    application: &str,
) -> Result<DatabaseOptions, crate::config::ConfigError> {
    Ok(DatabaseOptions {
        url: settings.database_url()?.expose().to_owned(),
        application: application.to_owned(),
        pool_size: usize::from(settings.database.pool_size),
        connect_timeout: settings.database.connect_timeout,
        lock_timeout: settings.database.lock_timeout,
        statement_timeout: settings.database.statement_timeout,
        heartbeat_timeout: settings.lease.try_timeout(),
    })
}

/// One worker: claims, executes, hands in, until it is asked to stop.
pub struct Worker {
    parts: WorkerParts,
    id: WorkerId,
    leases: Arc<Leases>,
    slots: Slots,
    checks: CheckSlots,
    wakeups: Arc<Wakeups>,
    attempts: Arc<Attempts>,
    finisher: Finisher,
    heartbeat: Arc<Heartbeat>,
    contexts: Arc<Contexts>,
    /// Whether somebody on this machine wants it quiet.
    quiet: watch::Receiver<bool>,
    fault: Fault,
    /// The claim loop, and attempts from the grant to the hand-in being taken over.
    running: TaskTracker,
    /// Hand-ins under way.
    finishing: TaskTracker,
}

impl Worker {
    /// Wires a worker; nothing runs yet.
    #[must_use]
    pub fn new(mut parts: WorkerParts) -> Self {
        parts.database = parts.database.observed_by(Arc::clone(&parts.metrics));
        let settings = Arc::clone(&parts.settings);
        let id = parts.id;
        let ttl = settings.lease.ttl;
        let leases = Leases::new(Arc::clone(&parts.clock), settings.lease.trust());
        let leases = Arc::new(leases.watched_by(parts.trust_watch.clone()));
        let slots = Slots::new(usize::from(settings.worker.execution_slots));
        let wakeups = Arc::new(Wakeups::default());
        let checks = CheckSlots::new(
            usize::from(settings.worker.check_slots),
            usize::try_from(settings.worker.check_backlog).unwrap_or(usize::MAX),
            Arc::clone(&wakeups.settled),
        );
        let finishing = TaskTracker::new();
        let fault = Fault::default();
        let finisher = Finisher::new(
            parts.database.clone(),
            Arc::clone(&parts.clock),
            Arc::clone(&leases),
            Arc::clone(&parts.metrics),
            id,
            ttl,
            Grouping {
                delay: settings.finish.group_delay,
                items: usize::from(settings.finish.group_items),
                bytes: settings.finish.group_bytes,
            },
            finishing.clone(),
            fault.clone(),
            Arc::clone(&wakeups.settled),
        );
        let attempts = Arc::new(Attempts::new(
            parts.database.clone(),
            Arc::clone(&parts.clock),
            Arc::clone(&leases),
            slots.clone(),
            CheckPolicy { slots: checks.clone(), timeout: settings.worker.check_timeout },
            Arc::clone(&parts.metrics),
            finisher.clone(),
        ));
        let heartbeat = Arc::new(Heartbeat::new(
            parts.database.clone(),
            Arc::clone(&parts.clock),
            Arc::clone(&leases),
            Arc::clone(&parts.metrics),
            Arc::clone(&parts.health),
            id,
            ttl,
            settings.retry.max_interruptions,
            Arc::clone(&wakeups.told),
        ));
        let contexts = Arc::new(Contexts::new(
            parts.database.clone(),
            Arc::clone(&parts.executors),
            Arc::clone(&parts.checkers),
            Arc::clone(&parts.workspaces),
            &settings,
        ));
        Self {
            parts,
            id,
            leases,
            slots,
            checks,
            wakeups,
            attempts,
            finisher,
            heartbeat,
            contexts,
            quiet: watch::channel(false).1,
            fault,
            running: TaskTracker::new(),
            finishing,
        }
    }

    /// The same, quiet while `quiet` says so: it claims nothing, and what it holds goes on.
    #[must_use]
    pub fn quieted_by(self, quiet: watch::Receiver<bool>) -> Self {
        Self { quiet, ..self }
    }

    /// This worker's id: new at every start.
    #[must_use]
    pub const fn id(&self) -> WorkerId {
        self.id
    }

    /// Runs until `stop` asks for an end, or until a part of it panics: then it stops what runs,
    /// gives back what it can, and ends.
    ///
    /// # Errors
    /// When the database cannot be reached at the start, or its sequences stand wrong.
    pub async fn run(self, mut stop: watch::Receiver<StopRequest>) -> Result<Ended, StoreError> {
        migrate::check_sequences(&self.parts.database).await?;
        self.register().await?;
        self.watch_gauges();
        let worker = Arc::new(self);
        let claiming = CancellationToken::new();
        let loops = CancellationToken::new();
        let mut tasks = JoinSet::new();
        worker.start(&mut tasks, &claiming, &loops);
        worker.enter(WorkerState::Running);
        let request = tokio::select! {
            request = wait_for(&mut stop, StopRequest::Drain(Duration::ZERO)) => request,
            () = worker.fault.raised() => StopRequest::Cancel,
            () = worker.asked_to_drain() => {
                StopRequest::Drain(worker.parts.settings.drain.grace)
            }
        };
        claiming.cancel();
        worker.leases.close();
        let ended = worker.wind_down(request, &mut stop).await;
        let ended = Ended { faulty: worker.fault.is_raised(), ..ended };
        loops.cancel();
        while tasks.join_next().await.is_some() {}
        let reason = match ended {
            Ended { faulty: true, .. } => "panicked",
            Ended { forced: true, .. } => "forced",
            Ended { .. } => "drained",
        };
        if let Err(failed) = worker.parts.database.end_worker(worker.id, reason).await {
            debug!(error = %failed, "this worker's row could not be closed");
        }
        worker.enter(WorkerState::Exited);
        info!(stopped = ended.stopped, forced = ended.forced, "worker ended");
        Ok(ended)
    }

    async fn register(&self) -> Result<(), StoreError> {
        let settings = &self.parts.settings;
        let host = host_name();
        let now = self.parts.clock.wall();
        let row = WorkerRow {
            id: self.id,
            name: settings.worker.name.clone().unwrap_or_else(|| host.clone()),
            host,
            pid: i32::try_from(std::process::id()).unwrap_or(0),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            queues: self.parts.queues.iter().map(ToString::to_string).collect(),
            slots: i32::try_from(self.slots.total()).unwrap_or(i32::MAX),
            state: WorkerState::Starting.as_str().to_owned(),
            executing: 0,
            started_at: now,
            heartbeat_at: now,
            heartbeat_age_s: 0.0,
            silent: false,
            asked: None,
            ended_at: None,
            exit_reason: None,
        };
        self.parts.database.register_worker(&row, settings.lease.ttl.as_secs_f64()).await?;
        info!(worker = %self.id, queues = ?row.queues, slots = row.slots, "worker started");
        Ok(())
    }

    /// Gauges that describe this worker are read at every scrape.
    fn watch_gauges(&self) {
        let (slots, checks) = (self.slots.clone(), self.checks.clone());
        let database = self.parts.database.clone();
        self.parts.metrics.at_scrape(move |metrics| {
            for (kind, slots) in [(SlotKind::Execution, &slots), (SlotKind::Check, checks.slots())]
            {
                let idle = slots.free();
                metrics.slots(kind, slots.total() - idle, idle);
            }
            let running = checks.slots().total() - checks.slots().free();
            metrics.checks_pending(checks.pending().saturating_sub(running), running);
            for (pool, (size, available, waiting), limit) in [
                (DbPool::Main, database.pool_status(), database.options().pool_size),
                (DbPool::Heartbeat, database.heartbeat_pool_status(), 1),
            ] {
                let used = size.saturating_sub(available);
                metrics.db_pool(pool, PoolUse { used, idle: available, pending: waiting, limit });
            }
        });
    }

    /// Notes how late a timer fires, until `stop`.
    async fn watch_lag(&self, stop: &CancellationToken) {
        let clock = &self.parts.clock;
        loop {
            let due = clock.now() + LAG_TIMER;
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(LAG_TIMER) => {}
            }
            self.parts.metrics.runtime_lag(clock.now().since(due));
        }
    }

    fn enter(&self, state: WorkerState) {
        self.parts.health.set_state(state);
        self.announce(state);
    }

    fn announce(&self, state: WorkerState) {
        self.parts.metrics.worker_state(state);
        // Its row says so soon.
        self.heartbeat.beat_soon();
    }

    fn start(
        self: &Arc<Self>,
        tasks: &mut JoinSet<()>,
        claiming: &CancellationToken,
        loops: &CancellationToken,
    ) {
        let mut part = |name, work: BoxFuture<'static, ()>| {
            tasks.spawn(self.fault.clone().watch(name, work));
        };
        let (worker, stop) = (Arc::clone(self), loops.clone());
        part("heartbeat", async move { worker.heartbeat.run(&stop).await }.boxed());
        let (worker, stop) = (Arc::clone(self), loops.clone());
        part("deadlines", async move { worker.heartbeat.watch_deadlines(&stop).await }.boxed());
        let (worker, stop) = (Arc::clone(self), loops.clone());
        part("give back", async move { worker.heartbeat.follow_up(&stop).await }.boxed());
        let (worker, stop) = (Arc::clone(self), loops.clone());
        part("listen", async move { worker.listen(&stop).await }.boxed());
        let (worker, stop) = (Arc::clone(self), loops.clone());
        part("lag", async move { worker.watch_lag(&stop).await }.boxed());
        let (worker, stop) = (Arc::clone(self), claiming.clone());
        part("requests", async move { worker.heed_requests(&stop).await }.boxed());
        let (worker, stop) = (Arc::clone(self), claiming.clone());
        part("sweep", async move { worker.sweep(&stop).await }.boxed());
        let (cleaning, stop) = (self.cleaning(), claiming.clone());
        part("clean-up", async move { cleaning.run(&stop).await }.boxed());
        // Among what runs: a drain waits for the claim under way and for what it grants.
        let (worker, stop) = (Arc::clone(self), claiming.clone());
        let claims = async move { worker.claim(&stop).await };
        self.running.spawn(self.fault.clone().watch("claim", claims));
        let (worker, stop) = (Arc::clone(self), claiming.clone());
        let rechecks = async move { worker.retake(&stop).await };
        self.running.spawn(self.fault.clone().watch("recheck", rechecks));
    }

    fn cleaning(&self) -> Cleaning {
        Cleaning {
            database: self.parts.database.clone(),
            workspaces: Arc::clone(&self.parts.workspaces),
            clock: Arc::clone(&self.parts.clock),
            settings: self.parts.settings.workspace.clone(),
        }
    }

    async fn claim(self: &Arc<Self>, stop: &CancellationToken) {
        let settings = &self.parts.settings;
        let claimer = Claimer::new(
            self.parts.database.clone(),
            Arc::clone(&self.parts.clock),
            Arc::clone(&self.leases),
            self.slots.clone(),
            Arc::clone(&self.parts.metrics),
            Arc::clone(&self.wakeups),
            self.id,
            &self.parts.queues,
            ClaimPolicy {
                ttl: settings.lease.ttl,
                most: usize::from(settings.worker.claim_max),
                rank_interval: settings.claim.rank_interval,
                candidates: usize::from(settings.claim.candidates),
                ageing: settings.claim.ageing,
                poll_interval: settings.worker.poll_interval,
                notified_poll_interval: settings.worker.notified_poll_interval,
            },
        );
        // A full backlog of checks holds back what would make it longer.
        let may_claim = || self.may_claim() && !self.checks.is_full();
        let granted = |granted: Granted| {
            let worker = Arc::clone(self);
            let begins = async move { worker.begin(granted).await };
            self.running.spawn(self.fault.clone().watch("begin", begins));
        };
        let lost = |batch, lease| self.heartbeat.claim_was_lost(batch, lease);
        claimer.run(stop, may_claim, granted, lost).await;
    }

    fn may_claim(&self) -> bool {
        self.heartbeat.is_healthy() && self.parts.health.state() == WorkerState::Running
    }

    /// Takes lost checks, also while the backlog is full: they are part of none.
    async fn retake(self: &Arc<Self>, stop: &CancellationToken) {
        let settings = &self.parts.settings;
        let rechecker = Rechecker {
            database: self.parts.database.clone(),
            clock: Arc::clone(&self.parts.clock),
            leases: Arc::clone(&self.leases),
            slots: self.checks.clone(),
            metrics: Arc::clone(&self.parts.metrics),
            workspaces: Arc::clone(&self.parts.workspaces),
            worker: self.id,
            queues: self.parts.queues.iter().map(ToString::to_string).collect(),
            policy: RecheckPolicy {
                ttl: settings.lease.ttl,
                poll_interval: settings.worker.poll_interval,
                foreign: FOREIGN_RECHECK,
            },
        };
        let retaken = |retaken: Retaken| {
            let worker = Arc::clone(self);
            self.running.spawn(async move { worker.check_again(retaken).await });
        };
        let lost = |batch, lease| self.heartbeat.claim_was_lost(batch, lease);
        rechecker.run(stop, || self.may_claim(), retaken, lost).await;
    }

    /// Reads what is stored of lost checks and starts each again.
    async fn check_again(self: Arc<Self>, retaken: Retaken) {
        let positions: Vec<Position> =
            retaken.items.iter().map(|(hold, _)| hold.item().position()).collect();
        let lease = retaken.items.first().map(|(hold, _)| hold.lease());
        let database = &self.parts.database;
        let (context, mut staged) = tokio::join!(
            self.contexts.get(retaken.batch, &retaken.queue),
            self.read_held(lease, &positions, || database.staged_items(retaken.batch, &positions)),
        );
        for (hold, slot) in retaken.items {
            let found = staged.iter().position(|item| item.position == hold.item().position());
            let staged: Option<StagedItem> = found.map(|index| staged.swap_remove(index));
            let attempts = Arc::clone(&self.attempts);
            let (context, claim) = (Arc::clone(&context), retaken.claim.clone());
            let rechecked = Rechecked { hold, slot, staged };
            self.running.spawn(async move { attempts.recheck(&context, claim, rechecked).await });
        }
    }

    /// Reads what was claimed and starts an attempt of each.
    async fn begin(self: Arc<Self>, granted: Granted) {
        let positions: Vec<Position> =
            granted.items.iter().map(|(hold, _)| hold.item().position()).collect();
        let lease = granted.items.first().map(|(hold, _)| hold.lease());
        let database = &self.parts.database;
        let (context, mut inputs): (_, Vec<ItemInput>) = tokio::join!(
            self.contexts.get(granted.batch, &granted.queue),
            self.read_held(lease, &positions, || database.item_inputs(granted.batch, &positions)),
        );
        let mut alone = granted.alone;
        for (hold, slot) in granted.items {
            let position = hold.item().position();
            let found = inputs.iter().position(|input| input.position == position);
            let taken = Taken {
                hold,
                slot,
                input: found.map(|index| inputs.swap_remove(index)),
                alone: alone.take(),
            };
            let attempts = Arc::clone(&self.attempts);
            let (context, claim) = (Arc::clone(&context), granted.claim.clone());
            self.running.spawn(async move { attempts.run(&context, claim, taken).await });
        }
    }

    /// Reads something of items that are held. While the database does not answer it is asked
    /// again, until they are told to stop; items of which nothing is read are given back.
    async fn read_held<T, F: Future<Output = Result<Vec<T>, StoreError>>>(
        &self,
        lease: Option<LeaseId>,
        positions: &[Position],
        read: impl Fn() -> F,
    ) -> Vec<T> {
        let Some(lease) = lease else { return Vec::new() };
        let stop = self.leases.stop_signal(lease, positions[0]);
        while !stop.token().is_cancelled() {
            match read().await {
                Ok(items) => return items,
                Err(failed) => {
                    self.parts.metrics.db_error(failed.class());
                    debug!(%lease, error = %failed, "claimed items could not be read");
                }
            }
            tokio::select! {
                () = stop.token().cancelled() => {}
                () = tokio::time::sleep(Duration::from_millis(250)) => {}
            }
        }
        Vec::new()
    }

    async fn sweep(&self, stop: &CancellationToken) {
        let settings = &self.parts.settings;
        let policy = SweepPolicy {
            fast: settings.reap.sweep_interval,
            full: settings.full_sweep_interval(),
            reap: ReapPolicy {
                charge: true,
                max_crashes: settings.retry.max_crashes,
                max_interruptions: settings.retry.max_interruptions,
                backoff_base: settings.retry.backoff_base,
                backoff_max: settings.retry.backoff_max,
            },
        };
        let reaper = Reaper::new(
            self.parts.database.clone(),
            Arc::clone(&self.parts.clock),
            Arc::clone(&self.parts.metrics),
            policy,
        );
        let recovered = || self.wakeups.told.notify_one();
        reaper.run(stop, &*self.heartbeat, recovered).await;
    }

    /// Draining, cancelling, releasing: from the request to nothing held.
    async fn wind_down(
        &self,
        request: StopRequest,
        stop: &mut watch::Receiver<StopRequest>,
    ) -> Ended {
        self.running.close();
        let mut stopped = 0;
        if let StopRequest::Drain(grace) = request {
            self.enter(WorkerState::Draining);
            let (leases, items) = self.leases.size();
            info!(leases, items, ?grace, "draining: claiming nothing more");
            tokio::select! {
                biased;
                () = self.all_handed_in() => {}
                _ = wait_for(stop, StopRequest::Cancel) => {}
                () = self.until(grace) => warn!("the drain's grace is over"),
            }
        }
        if !self.running.is_empty() {
            self.enter(WorkerState::Cancelling);
            stopped = self.leases.stop_all(StopCause::Drained).len();
            info!(items = stopped, "stopping executions");
            let limit = self.parts.settings.lease.kill_grace + Duration::from_secs(2);
            tokio::select! {
                () = self.running.wait() => {}
                _ = wait_for(stop, StopRequest::Abort) => {}
                () = self.until(limit) => warn!("executions did not end in time"),
            }
        }
        self.enter(WorkerState::Releasing);
        let released = async {
            self.all_handed_in().await;
            self.heartbeat.give_back_lost_claims().await;
        };
        tokio::select! {
            () = released => {}
            _ = wait_for(stop, StopRequest::Abort) => {}
            () = self.until(self.parts.settings.drain.release) => {}
        }
        let (leases, items) = self.leases.size();
        if items > 0 {
            warn!(leases, items, backlog = self.finisher.backlog(), "leases are left to lapse");
        }
        Ended { stopped, forced: items > 0, faulty: false }
    }

    /// Waits for what runs, then for what it hands in.
    async fn all_handed_in(&self) {
        self.running.wait().await;
        self.finishing.close();
        self.finishing.wait().await;
    }

    async fn until(&self, limit: Duration) {
        sleep_until(&*self.parts.clock, self.parts.clock.now() + limit).await;
    }
}

/// Heartbeats are what a process compares its clock with the database's by.
impl Judge for Heartbeat {
    fn may_reap(&self) -> bool {
        self.may_reap()
    }

    fn may_reap_by(&self, server: &ServerReading) -> bool {
        self.may_reap_by(server)
    }

    fn disturbed_at(&self) -> Option<OffsetDateTime> {
        self.disturbed_at()
    }
}

/// Waits until at least `request` is asked for, and answers what is.
async fn wait_for(stop: &mut watch::Receiver<StopRequest>, request: StopRequest) -> StopRequest {
    // The answer borrows from the channel: it must not be held over an await.
    let asked = stop.wait_for(|asked| *asked >= request).await.map(|asked| *asked);
    match asked {
        Ok(asked) => asked,
        // Whoever could ask is gone: wind down in order.
        Err(_) if request <= StopRequest::Cancel => StopRequest::Cancel,
        Err(_) => std::future::pending().await,
    }
}

fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}
