//! The `command` executor: one process per attempt.
//!
//! The program and its arguments come from the queue; an item's data reaches them as whole words or
//! parts of words, never through a shell. The process gets an environment, a directory and a process
//! group of its own, and when [`CommandExecutor::execute`] returns, the group is gone.

mod capture;
mod environment;
mod outcome;
mod process;
mod record;
mod scratch;
mod template;

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{CString, OsString};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tokio::task::spawn_blocking;
use tokio_util::sync::CancellationToken;
use tracing::Instrument;

use self::environment::Environment;
use self::outcome::Obstacle;
use self::process::{Ended, Limits};
use self::record::{Ran, evidence};
use self::scratch::Scratch;
use self::template::{Template, Values};
use super::spawner::{Exit, SpawnRequest, Spawner};
use super::{Execution, Executor, Job};
use crate::check::needs_workspace;
use crate::clock::Clock;
use crate::model::evidence::command_text;
use crate::telemetry::trace;
use crate::workspace::{Gate, Holder, Refusal, WorkspaceId};

/// How a queue runs its commands.
#[derive(Clone, Debug)]
pub struct CommandSpec {
    /// The program and its arguments, at least the program. In the arguments `{input}`,
    /// `{input_file}`, `{key}`, `{position}` and `{attempt}` stand for the item's data; data that
    /// looks like one of them is left as it is, and so is every other use of braces. An argument
    /// made of data may begin with `-`: put `--` before it where the program knows that.
    ///
    /// With neither `{input}` nor `{input_file}` the input comes on standard input, otherwise that
    /// is `/dev/null`. An input that is a JSON string is its own characters, every other value is
    /// the JSON text as it was submitted.
    pub argv: Vec<String>,
    /// How long one execution may take.
    pub timeout: Duration,
    /// Variables set for every execution.
    pub env: BTreeMap<String, String>,
    /// Names of variables passed on from the worker's own environment, where they are set. Nothing
    /// else of it is; `PATH` has a default.
    pub env_pass: Vec<String>,
    /// The working directory, absolute; none for the item's workspace where it has one, else for a
    /// private one that is empty and removed afterwards.
    pub cwd: Option<PathBuf>,
    /// Whether every item has a workspace; else only those with a criterion about a file.
    pub workspace: bool,
    /// Exit statuses that mean success, each 0 to 255 and in one list only.
    pub success: Vec<i32>,
    /// Exit statuses after which another attempt may succeed.
    pub retry: Vec<i32>,
    /// Exit statuses after which no attempt would.
    pub permanent: Vec<i32>,
    /// What every other exit status means.
    pub otherwise: Otherwise,
    /// How much of standard output is kept, in bytes, before and after it was made text.
    pub result_bytes: usize,
    /// How much of the end of standard error is kept with the attempt, in bytes.
    pub log_bytes: usize,
    /// How long an error text may be, in characters.
    pub error_chars: usize,
    /// How long the process group has from TERM to KILL.
    pub kill_grace: Duration,
}

/// What an exit status in none of the lists means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Otherwise {
    /// Another attempt may succeed.
    Retry,
    /// No further attempt would help.
    Permanent,
}

/// Why a [`CommandSpec`] cannot be used. The operator has to change the queue.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidCommand {
    /// The argument vector or its first word is empty.
    #[error("argv names no program")]
    NoProgram,
    /// The program would be chosen by whoever submits items.
    #[error("the program `{0}` is made of item data")]
    ProgramFromData(String),
    /// A text that must reach the process as it is holds a NUL character.
    #[error("`{0}` holds a NUL character")]
    Nul(String),
    /// Not a name of a variable.
    #[error("`{0}` is not a name of an environment variable")]
    VariableName(String),
    /// A variable that is set by the executor, or meant for the worker alone.
    #[error("the environment variable `{0}` is reserved")]
    ReservedVariable(String),
    /// A directory would depend on where the worker was started.
    #[error("the directory `{}` is not absolute", .0.display())]
    RelativeDirectory(PathBuf),
    /// Outside 0 to 255.
    #[error("{0} is not an exit status: they go from 0 to 255")]
    ExitStatus(i32),
    /// In more than one list, or twice in one.
    #[error("exit status {0} is listed twice")]
    ExitStatusTwice(i32),
}

/// Runs the items of one queue as commands.
pub struct CommandExecutor {
    spec: CommandSpec,
    gate: Option<Arc<Gate>>,
    template: Template,
    environment: Environment,
    programs: Arc<[CString]>,
    scratch_root: PathBuf,
    spawner: Arc<dyn Spawner>,
    clock: Arc<dyn Clock>,
}

impl CommandExecutor {
    /// Prepares the commands of one queue.
    ///
    /// `gate` leads to the workspaces of the batch; without one its items have none.
    /// `worker_env` is the worker's environment, from which only [`CommandSpec::env_pass`] is taken.
    /// Below `scratch_root` (absolute, made when missing) every execution has a directory of its own
    /// while it runs; what a killed worker left there is for the caller to remove.
    ///
    /// # Errors
    /// When `spec` cannot be used as it is.
    pub fn new(
        spec: CommandSpec,
        gate: Option<Arc<Gate>>,
        worker_env: impl IntoIterator<Item = (OsString, OsString)>,
        scratch_root: PathBuf,
        spawner: Arc<dyn Spawner>,
        clock: Arc<dyn Clock>,
    ) -> Result<Self, InvalidCommand> {
        check_statuses(&spec)?;
        check_directory(&scratch_root)?;
        spec.cwd.as_deref().map_or(Ok(()), check_directory)?;
        let template = Template::parse(&spec.argv)?;
        let environment = Environment::new(&spec.env, &spec.env_pass, worker_env)?;
        let programs = environment.programs(&spec.argv[0]);
        Ok(Self { spec, gate, template, environment, programs, scratch_root, spawner, clock })
    }

    async fn attempt(&self, job: &Job, stop: &CancellationToken) -> Result<Done, Obstacle> {
        if stop.is_cancelled() {
            return Err(Obstacle::Stopped);
        }
        let input = input_text(&job.input_json).map_err(Obstacle::Input)?;
        let holder = self.workspace(job).await.map_err(Obstacle::Workspace)?;
        let file = self.template.uses_input_file().then_some(input.as_bytes());
        let scratch = Scratch::create(&self.scratch_root, file).await.map_err(Obstacle::Scratch)?;
        let done = self.run(job, &input, &scratch, holder.as_ref(), stop).await;
        scratch.remove().await;
        done
    }

    /// The workspace, where the queue or the criteria need one. Criteria alone do not keep a batch
    /// from running that may not use it: their leaves say so.
    async fn workspace(&self, job: &Job) -> Result<Option<Holder>, Refusal> {
        let by_criteria = needs_workspace(&job.criteria);
        let Some(gate) = self.gate.clone().filter(|_| self.spec.workspace || by_criteria) else {
            return Ok(None);
        };
        let position = job.item.position();
        let made = spawn_blocking(move || gate.make(position)).await;
        match made.map_err(|panic| Refusal::Failed(io::Error::other(panic))).flatten() {
            Ok(holder) => Ok(Some(holder)),
            Err(Refusal::Denied(_)) if !self.spec.workspace => Ok(None),
            Err(refusal) => Err(refusal),
        }
    }

    async fn run(
        &self,
        job: &Job,
        input: &str,
        scratch: &Scratch,
        holder: Option<&Holder>,
        stop: &CancellationToken,
    ) -> Result<Done, Obstacle> {
        let deadline = self.clock.now() + self.spec.timeout;
        let values = Values { job, input, input_file: scratch.input_file() };
        let workspace = holder.map(|holder| Path::new(&holder.directories().workspace));
        let cwd = self.spec.cwd.as_deref().or(workspace).unwrap_or(scratch.path());
        let argv = self.template.render(&values).map_err(|_| Obstacle::NulInArgument)?;
        let ran = (!job.criteria.is_empty()).then(|| Ran {
            command: command_text(&texts(&argv)),
            cwd: match (&self.spec.cwd, holder) {
                (Some(cwd), _) => cwd.display().to_string(),
                (None, Some(_)) => ".".to_owned(),
                (None, None) => String::new(),
            },
        });
        let request = SpawnRequest {
            lease: job.lease,
            programs: Arc::clone(&self.programs),
            argv,
            env: self.environment.of(job, scratch.path(), holder.map(Holder::directories)),
            cwd: CString::new(cwd.as_os_str().as_bytes())
                .expect("new() refuses directories with NUL, and the system gives none"),
            pipe_stdin: self.template.leaves_input_to_stdin(),
        };
        let program = Path::new(&self.spec.argv[0]).file_name().unwrap_or_default();
        let exec = trace::exec_span(&program.to_string_lossy());
        let spawned = self.spawner.spawn(request).instrument(exec.clone()).await;
        let spawned = spawned.map_err(|failed| {
            trace::failed(&exec, "not_started");
            Obstacle::Spawn(failed)
        })?;
        let limits = Limits {
            deadline,
            kill_grace: self.spec.kill_grace,
            result_bytes: self.spec.result_bytes,
            log_bytes: self.spec.log_bytes,
            record: ran.is_some(),
        };
        let ended = process::run(spawned, input.as_bytes(), &limits, stop, self.clock.as_ref())
            .instrument(exec.clone())
            .await;
        match ended.exit {
            Ok(Exit::Status(status)) => trace::exec_ended(&exec, Some(status), None),
            Ok(Exit::Signal(signal)) => trace::exec_ended(&exec, None, Some(signal)),
            Ok(Exit::Fenced) => trace::failed(&exec, "fenced"),
            Err(_) => trace::failed(&exec, "exit_unknown"),
        }
        Ok(Done { ended, ran, workspace: holder.map(Holder::id) })
    }
}

/// A process after its end, and what it ran in.
struct Done {
    ended: Ended,
    /// What is recorded as evidence, if that is wanted.
    ran: Option<Ran>,
    workspace: Option<WorkspaceId>,
}

fn texts(argv: &[CString]) -> Vec<String> {
    argv.iter().map(|word| word.to_string_lossy().into_owned()).collect()
}

#[async_trait]
impl Executor for CommandExecutor {
    async fn execute(&self, job: &Job, stop: &CancellationToken) -> Execution {
        let started_at = self.clock.wall();
        let done = self.attempt(job, stop).await;
        let times = (started_at, self.clock.wall());
        let execution = match done {
            Ok(Done { mut ended, ran, workspace }) => {
                let exit = ended.exit.as_ref().ok().copied();
                let evidence = ran
                    .zip(ended.recording.take())
                    .map(|(ran, printed)| evidence(ran, printed, ended.cause, exit, times));
                Execution {
                    evidence: evidence.into_iter().collect(),
                    workspace,
                    ..outcome::of_process(&self.spec, ended, times)
                }
            }
            Err(obstacle) => outcome::of_obstacle(&self.spec, &obstacle, times),
        };
        tracing::debug!(
            stop_reason = %execution.stop_reason,
            exit_status = execution.exit_status,
            signal = execution.signal,
            output_bytes = execution.output_bytes,
            "command ended"
        );
        execution
    }
}

/// The characters of a JSON string; any other JSON as it is.
fn input_text(json: &str) -> Result<Cow<'_, str>, serde_json::Error> {
    if json.trim_start().starts_with('"') {
        serde_json::from_str(json).map(Cow::Owned)
    } else {
        Ok(Cow::Borrowed(json))
    }
}

fn check_directory(path: &Path) -> Result<(), InvalidCommand> {
    if !path.is_absolute() {
        return Err(InvalidCommand::RelativeDirectory(path.to_owned()));
    }
    if path.as_os_str().as_bytes().contains(&0) {
        return Err(InvalidCommand::Nul(path.display().to_string()));
    }
    Ok(())
}

fn check_statuses(spec: &CommandSpec) -> Result<(), InvalidCommand> {
    let mut seen = BTreeSet::new();
    for &status in spec.success.iter().chain(&spec.retry).chain(&spec.permanent) {
        if !(0..=255).contains(&status) {
            return Err(InvalidCommand::ExitStatus(status));
        }
        if !seen.insert(status) {
            return Err(InvalidCommand::ExitStatusTwice(status));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use time::OffsetDateTime;

    use super::*;
    use crate::clock::SystemClock;
    use crate::execute::spawner::{SpawnError, Spawned};
    use crate::model::{
        Attempt, BatchId, FencingToken, ItemRef, LeaseId, Position, Reporter, StopReason,
    };

    pub(super) fn job(input_json: &str) -> Job {
        Job {
            item: ItemRef::new(BatchId::generate(), Position::new(7)),
            key: "the key".to_owned(),
            queue: "queue".parse().unwrap(),
            attempt: Attempt::new(2),
            retries: 0,
            lease: LeaseId::generate(),
            token: FencingToken::new(9_007_199_254_740_993),
            input_json: input_json.to_owned(),
            criteria: Vec::new(),
            deadline: OffsetDateTime::UNIX_EPOCH,
            traceparent: None,
            reporter: Reporter::default(),
        }
    }

    pub(super) fn spec(argv: &[&str]) -> CommandSpec {
        CommandSpec {
            argv: argv.iter().map(|&word| word.to_owned()).collect(),
            timeout: Duration::from_secs(30),
            env: BTreeMap::new(),
            env_pass: Vec::new(),
            cwd: None,
            workspace: false,
            success: vec![0],
            retry: vec![75],
            permanent: vec![2],
            otherwise: Otherwise::Retry,
            result_bytes: 1024,
            log_bytes: 1024,
            error_chars: 200,
            kill_grace: Duration::from_secs(1),
        }
    }

    struct NoSpawner;

    #[async_trait]
    impl Spawner for NoSpawner {
        async fn spawn(&self, _: SpawnRequest) -> Result<Spawned, SpawnError> {
            unreachable!("nothing is to be started here")
        }
    }

    fn refused(spec: CommandSpec, scratch_root: &str) -> Option<InvalidCommand> {
        let clock = Arc::new(SystemClock);
        CommandExecutor::new(spec, None, [], scratch_root.into(), Arc::new(NoSpawner), clock).err()
    }

    #[test]
    fn a_string_is_its_characters_and_other_json_is_kept() {
        for (json, text) in [
            (r#""a\n\"\u00e9\ud83d\ude00""#, "a\n\"é😀"),
            (r#" "x" "#, "x"),
            (r#""""#, ""),
            ("1.50e+400", "1.50e+400"),
            (r#"{ "b": 1, "a": "\u0041" }"#, r#"{ "b": 1, "a": "\u0041" }"#),
            ("null", "null"),
        ] {
            assert_eq!(input_text(json).unwrap(), text, "{json}");
        }
        assert!(input_text(r#""\ud800""#).is_err());
    }

    #[test]
    fn impossible_settings_are_refused() {
        let root = "/tmp/x";
        assert_eq!(refused(spec(&["true"]), root), None);
        assert_eq!(refused(spec(&[]), root), Some(InvalidCommand::NoProgram));
        let relative = Some(InvalidCommand::RelativeDirectory("x".into()));
        assert_eq!(refused(spec(&["true"]), "x"), relative);
        let cwd = Some("x".into());
        assert_eq!(refused(CommandSpec { cwd, ..spec(&["true"]) }, root), relative);
        let cwd = Some("/x\0".into());
        let nul = Some(InvalidCommand::Nul("/x\0".to_owned()));
        assert_eq!(refused(CommandSpec { cwd, ..spec(&["true"]) }, root), nul);
        for status in [-1, 256] {
            let success = vec![0, status];
            let refused = refused(CommandSpec { success, ..spec(&["true"]) }, root);
            assert_eq!(refused, Some(InvalidCommand::ExitStatus(status)));
        }
        let success = vec![0, 75];
        let refused = refused(CommandSpec { success, ..spec(&["true"]) }, root);
        assert_eq!(refused, Some(InvalidCommand::ExitStatusTwice(75)));
    }

    #[tokio::test]
    async fn a_stop_before_the_start_starts_nothing() {
        let root = tempfile::tempdir().unwrap();
        let (spawner, clock) = (Arc::new(NoSpawner), Arc::new(SystemClock));
        let path = root.path().to_owned();
        let executor =
            CommandExecutor::new(spec(&["true"]), None, [], path, spawner, clock).unwrap();
        let stop = CancellationToken::new();
        stop.cancel();

        let execution = executor.execute(&job("1"), &stop).await;

        assert_eq!(execution.end, crate::execute::ExecutionEnd::Stopped);
        assert_eq!(execution.stop_reason, StopReason::Stopped);
    }
}
