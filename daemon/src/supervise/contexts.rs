//! What a worker knows of the batches it runs: their executors and retry policies.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

use super::checker::Checkers;
use super::scratch::ScratchRoot;
use super::upstreams::{FleetLedger, FleetLimits};
use crate::attempt::{BatchContext, RetryPolicy};
use crate::clock::{Clock, SystemClock};
use crate::config::{self, Access, AgentSpec, HttpSpec, QueueSpec, Retry, Settings};
use crate::execute::agent::{AgentExecutor, SHELL_ARGV};
use crate::execute::command::{CommandExecutor, CommandSpec, InvalidCommand, Otherwise};
use crate::execute::http::HttpExecutor;
use crate::execute::spawner::Spawner;
use crate::execute::upstream::{SharedLimits, UnsharedLimits, Upstreams};
use crate::execute::{Execution, ExecutionEnd, Executor, Job, Ledger, NoLedger};
use crate::model::{BatchId, QueueName, StopReason, WorkerId};
use crate::store::{BatchWork, Database};
use crate::workspace::{BatchIdentity, Gate, Workspaces};

/// Makes what runs the items of a batch from its stored settings.
pub trait Executors: Send + Sync {
    /// The executor of a batch, and how long one execution may take. `gate` leads to the
    /// workspaces of its items.
    ///
    /// # Errors
    /// A sentence on why this worker cannot run it.
    fn executor(
        &self,
        work: &BatchWork,
        gate: &Arc<Gate>,
    ) -> Result<(Arc<dyn Executor>, Duration), String>;
}

/// Batches whose contexts are kept; beyond it the least is forgotten and read again.
const KEPT: usize = 1024;

pub(super) struct Contexts {
    database: Database,
    executors: Arc<dyn Executors>,
    checkers: Arc<dyn Checkers>,
    workspaces: Arc<dyn Workspaces>,
    access: Arc<Access>,
    retry: Retry,
    known: Mutex<HashMap<BatchId, Arc<BatchContext>>>,
}

impl Contexts {
    pub(super) fn new(
        database: Database,
        executors: Arc<dyn Executors>,
        checkers: Arc<dyn Checkers>,
        workspaces: Arc<dyn Workspaces>,
        settings: &Settings,
    ) -> Self {
        Self {
            database,
            executors,
            checkers,
            workspaces,
            access: Arc::new(settings.access.clone()),
            retry: settings.retry.clone(),
            known: Mutex::default(),
        }
    }

    /// The context of a batch. One that cannot be read or run gives its items back.
    pub(super) async fn get(&self, batch: BatchId, queue: &QueueName) -> Arc<BatchContext> {
        if let Some(known) = self.known().get(&batch) {
            return Arc::clone(known);
        }
        match self.database.batch_work(batch).await {
            Ok(Some(work)) => {
                let context = Arc::new(self.context(batch, queue, &work));
                let mut known = self.known();
                if known.len() >= KEPT {
                    known.clear();
                }
                known.insert(batch, Arc::clone(&context));
                context
            }
            Ok(None) => self.unrunnable(queue, "the batch is gone".to_owned()),
            Err(failed) => {
                debug!(%batch, error = %failed, "a batch could not be read");
                self.unrunnable(queue, format!("the batch could not be read: {failed}"))
            }
        }
    }

    fn context(&self, batch: BatchId, queue: &QueueName, work: &BatchWork) -> BatchContext {
        let gate = Arc::new(Gate::new(
            Arc::clone(&self.workspaces),
            Arc::clone(&self.access),
            BatchIdentity {
                batch,
                owner: work.owner.clone(),
                thread: work.thread.clone(),
                principal: work.principal.clone(),
            },
        ));
        let (executor, timeout) = self.executors.executor(work, &gate).unwrap_or_else(|reason| {
            warn!(%batch, reason, "this worker cannot run the batch");
            (Arc::new(Unrunnable(reason)), Duration::ZERO)
        });
        BatchContext {
            queue: queue.clone(),
            executor,
            checker: Some(self.checkers.checker(&gate)),
            timeout,
            retry: self.policy(work.max_attempts),
            submitted: work.traceparent.as_deref().and_then(|text| text.parse().ok()),
        }
    }

    fn unrunnable(&self, queue: &QueueName, reason: String) -> Arc<BatchContext> {
        Arc::new(BatchContext {
            queue: queue.clone(),
            executor: Arc::new(Unrunnable(reason)),
            checker: None,
            timeout: Duration::ZERO,
            retry: self.policy(u16::MAX),
            submitted: None,
        })
    }

    fn policy(&self, max_attempts: u16) -> RetryPolicy {
        RetryPolicy {
            max_attempts,
            backoff_base: self.retry.backoff_base,
            backoff_max: self.retry.backoff_max,
            max_interruptions: self.retry.max_interruptions,
            max_admissions: self.retry.max_admissions,
        }
    }

    fn known(&self) -> std::sync::MutexGuard<'_, HashMap<BatchId, Arc<BatchContext>>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Stands in for an executor that this worker cannot make.
struct Unrunnable(String);

#[async_trait]
impl Executor for Unrunnable {
    async fn execute(&self, _job: &Job, _stop: &CancellationToken) -> Execution {
        let now = SystemClock.wall();
        Execution {
            error: Some(self.0.clone()),
            ..Execution::new(ExecutionEnd::NotAdmitted, StopReason::CannotRun, now, now)
        }
    }
}

/// What starts the processes of executions.
struct Processes {
    settings: Arc<Settings>,
    spawner: Arc<dyn Spawner>,
    scratch: ScratchRoot,
    clock: Arc<dyn Clock>,
}

impl Processes {
    fn command(
        &self,
        spec: config::CommandSpec,
        gate: Option<Arc<Gate>>,
    ) -> Result<CommandExecutor, InvalidCommand> {
        CommandExecutor::new(
            command_spec(spec, &self.settings),
            gate,
            std::env::vars_os(),
            self.scratch.path().to_owned(),
            Arc::clone(&self.spawner),
            Arc::clone(&self.clock),
        )
    }
}

/// The executors that queues can name.
pub struct CommandExecutors {
    settings: Arc<Settings>,
    processes: Arc<Processes>,
    upstreams: Arc<Upstreams>,
    ledger: Arc<dyn Ledger>,
    clock: Arc<dyn Clock>,
}

impl CommandExecutors {
    /// Executors bounded by these settings, which start their processes through `spawner`. Limits of
    /// upstreams are those of this process alone, until it is [part of a fleet](Self::in_fleet).
    ///
    /// # Errors
    /// When there is no place for the private directories of executions.
    pub fn new(
        settings: Arc<Settings>,
        spawner: Arc<dyn Spawner>,
        clock: Arc<dyn Clock>,
    ) -> io::Result<Self> {
        let scratch = ScratchRoot::create(&*clock)?;
        let upstreams = upstreams(&settings, Arc::new(UnsharedLimits::default()), &clock)?;
        let ledger = Arc::new(NoLedger);
        let processes = Processes {
            settings: Arc::clone(&settings),
            spawner,
            scratch,
            clock: Arc::clone(&clock),
        };
        Ok(Self { settings, processes: Arc::new(processes), upstreams, ledger, clock })
    }

    /// The same as a part of the fleet on this database: its limits of upstreams are shared, and what
    /// executions use is noted there.
    ///
    /// # Errors
    /// When the settings of an upstream cannot be used.
    pub fn in_fleet(self, database: &Database, worker: WorkerId) -> io::Result<Self> {
        let limits = FleetLimits::new(database.clone(), worker);
        let upstreams = upstreams(&self.settings, Arc::new(limits), &self.clock)?;
        let ledger = Arc::new(FleetLedger::new(database.clone()));
        Ok(Self { upstreams, ledger, ..self })
    }
}

impl CommandExecutors {
    /// What runs items by these settings, and how long one execution may take. Without a `gate`
    /// it has no workspaces to give.
    ///
    /// # Errors
    /// A sentence on what is wrong with them.
    pub fn of_spec(
        &self,
        spec: QueueSpec,
        gate: Option<&Arc<Gate>>,
    ) -> Result<(Arc<dyn Executor>, Duration), String> {
        match spec {
            QueueSpec::Command(spec) => self.command(spec, gate),
            QueueSpec::Http(spec) => self.http(spec),
            QueueSpec::Agent(spec) => self.agent(spec, gate),
        }
    }

    fn command(
        &self,
        spec: config::CommandSpec,
        gate: Option<&Arc<Gate>>,
    ) -> Result<(Arc<dyn Executor>, Duration), String> {
        let timeout = spec.timeout;
        let executor = self.processes.command(spec, gate.cloned());
        Ok((Arc::new(executor.map_err(|error| error.to_string())?), timeout))
    }

    /// An agent's commands run as those of a queue with `workspace = true` and every other setting
    /// at its default.
    fn agent(
        &self,
        mut spec: AgentSpec,
        gate: Option<&Arc<Gate>>,
    ) -> Result<(Arc<dyn Executor>, Duration), String> {
        let timeout = spec.timeout;
        spec.result_bytes = spec.result_bytes.min(self.settings.limits.result_bytes);
        let argv = SHELL_ARGV.map(str::to_owned).to_vec();
        let shell = config::CommandSpec {
            env: spec.env.clone(),
            env_pass: spec.env_pass.clone(),
            workspace: true,
            retry: Vec::new(),
            result_bytes: spec.tool_output,
            ..config::CommandSpec::new(argv, &self.settings.limits)
        };
        let (processes, behind) = (Arc::clone(&self.processes), gate.cloned());
        let shells = move |timeout: Duration| {
            processes.command(config::CommandSpec { timeout, ..shell.clone() }, behind.clone())
        };
        let executor = AgentExecutor::new(
            spec,
            &self.upstreams,
            Box::new(shells),
            gate.cloned(),
            Arc::clone(&self.ledger),
            self.settings.limits.error_chars,
            Arc::clone(&self.clock),
        )
        .map_err(|error| error.to_string())?;
        Ok((Arc::new(executor), timeout))
    }

    fn http(&self, mut spec: HttpSpec) -> Result<(Arc<dyn Executor>, Duration), String> {
        let timeout = spec.timeout;
        spec.result_bytes = spec.result_bytes.min(self.settings.limits.result_bytes);
        let executor = HttpExecutor::new(
            spec,
            &self.upstreams,
            Arc::clone(&self.ledger),
            self.settings.limits.error_chars,
            Arc::clone(&self.clock),
        )
        .map_err(|error| error.to_string())?;
        Ok((Arc::new(executor), timeout))
    }
}

fn upstreams(
    settings: &Settings,
    shared: Arc<dyn SharedLimits>,
    clock: &Arc<dyn Clock>,
) -> io::Result<Arc<Upstreams>> {
    let upstreams = Upstreams::new(&settings.upstreams, shared, Arc::clone(clock));
    upstreams.map(Arc::new).map_err(io::Error::other)
}

impl Executors for CommandExecutors {
    fn executor(
        &self,
        work: &BatchWork,
        gate: &Arc<Gate>,
    ) -> Result<(Arc<dyn Executor>, Duration), String> {
        let spec = QueueSpec::from_json(&work.spec_json).map_err(|error| error.to_string());
        spec.and_then(|spec| self.of_spec(spec, Some(gate)))
            .map_err(|error| format!("its queue's settings: {error}"))
    }
}

/// The settings of a queue, bounded by those of this worker.
fn command_spec(spec: config::CommandSpec, settings: &Settings) -> CommandSpec {
    let statuses = |list: Vec<u8>| list.into_iter().map(i32::from).collect();
    CommandSpec {
        argv: spec.argv,
        timeout: spec.timeout,
        env: spec.env,
        env_pass: spec.env_pass,
        cwd: spec.cwd.map(Into::into),
        workspace: spec.workspace,
        success: statuses(spec.success),
        retry: statuses(spec.retry),
        permanent: statuses(spec.permanent),
        otherwise: match spec.otherwise {
            config::Otherwise::Retry => Otherwise::Retry,
            config::Otherwise::Permanent => Otherwise::Permanent,
        },
        result_bytes: spec.result_bytes.min(settings.limits.result_bytes),
        log_bytes: settings.limits.log_bytes,
        error_chars: settings.limits.error_chars,
        kill_grace: settings.lease.kill_grace,
    }
}
