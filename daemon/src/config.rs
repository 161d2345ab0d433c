//! Settings: layers read by figment into one checked [`Settings`].
//!
//! Defaults, a file, the environment and flags are merged in this order; every key is documented in
//! `config/default.toml`, which is the lowest layer. All that is wrong is found at once and named
//! with its source. Nothing else in the program reads the environment for settings.

mod access;
mod agent;
mod error;
mod extract;
mod http;
mod layers;
mod queue;
mod ranges;
mod reference;
mod report;
mod secret;
mod sections;
mod units;
mod upstream;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

pub use access::{Access, Permission, Workspace};
pub use agent::AgentSpec;
pub use error::{ConfigError, Origin, Problem};
pub use http::{Expect, HttpSpec, Redirects};
pub use layers::Sources;
pub use queue::{CommandSpec, ExitClass, Otherwise, QueueSpec};
pub use reference::SecretRef;
pub use report::{Report, ReportEntry, check_report};
pub use secret::{DatabaseUrl, EndpointUrl};
pub use sections::{
    BatchDefaults, Claim, Database, Drain, Exporter, Finish, Health, Lease, Limits, Log, LogFormat,
    Reap, Retry, Sampler, Telemetry, Worker,
};
pub use upstream::Upstream;

use crate::model::QueueName;
use extract::Problems;
use layers::{Layers, Origins};

const DEFAULTS: &str = include_str!("../../config/default.toml");

/// The settings of a process, checked. Prints without passwords.
///
/// The fields are open so that a command can set up what it starts (a private database, an inline
/// queue); [`Settings::check`] then looks again.
#[derive(Clone, Debug, Serialize)]
pub struct Settings {
    /// Section `[database]`.
    pub database: Database,
    /// Section `[lease]`.
    pub lease: Lease,
    /// Section `[worker]`.
    pub worker: Worker,
    /// Section `[claim]`.
    pub claim: Claim,
    /// Section `[finish]`.
    pub finish: Finish,
    /// Section `[retry]`.
    pub retry: Retry,
    /// Section `[drain]`.
    pub drain: Drain,
    /// Section `[limits]`.
    pub limits: Limits,
    /// Section `[batch]`.
    pub batch: BatchDefaults,
    /// Section `[reap]`.
    pub reap: Reap,
    /// Section `[access]`.
    pub access: Access,
    /// Section `[workspace]`.
    pub workspace: Workspace,
    /// Section `[log]`.
    pub log: Log,
    /// Section `[telemetry]`.
    pub telemetry: Telemetry,
    /// Section `[health]`.
    pub health: Health,
    /// Section `[exporter]`.
    pub exporter: Exporter,
    /// Tables `[upstreams.NAME]`.
    pub upstreams: BTreeMap<String, Upstream>,
    /// Tables `[queues.NAME]`.
    pub queues: BTreeMap<QueueName, QueueSpec>,
    #[serde(skip)]
    origins: Arc<Origins>,
}

/// The settings as the layers give them: of the right types, not checked.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawSettings {
    database: Database,
    lease: Lease,
    worker: Worker,
    claim: Claim,
    finish: Finish,
    retry: Retry,
    drain: Drain,
    limits: Limits,
    batch: BatchDefaults,
    reap: Reap,
    access: Access,
    workspace: Workspace,
    log: Log,
    telemetry: Telemetry,
    health: Health,
    exporter: Exporter,
    #[serde(default)]
    upstreams: BTreeMap<String, Upstream>,
    #[serde(default)]
    queues: BTreeMap<String, CommandSpec>,
    /// The extraction puts the queues of other executors here.
    #[serde(default, rename = "queues/http")]
    http_queues: BTreeMap<String, HttpSpec>,
    #[serde(default, rename = "queues/agent")]
    agent_queues: BTreeMap<String, AgentSpec>,
}

/// A queue that is not configured.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("queue `{name}` is not configured; {}", known_queues(.known))]
pub struct UnknownQueue {
    /// The name asked for.
    pub name: QueueName,
    /// The queues that are configured.
    pub known: Vec<QueueName>,
}

fn known_queues(known: &[QueueName]) -> String {
    let names: Vec<_> = known.iter().map(QueueName::as_str).collect();
    match names.as_slice() {
        [] => "there are no queues: add a [queues.NAME] to the configuration".into(),
        names => format!("configured are {}", names.join(", ")),
    }
}

impl Settings {
    /// Reads and checks all sources.
    ///
    /// # Errors
    /// Everything that is wrong, each problem with its key and source: a named file that cannot be
    /// read, unknown keys, values of the wrong kind or out of range, combinations that cannot work.
    pub fn load(sources: &Sources) -> Result<Self, ConfigError> {
        let layers = Layers::read(sources)?;
        let origins = Arc::new(layers.origins());
        let mut problems = Problems::new(&origins);
        let Some(raw) = extract::extract(&layers, &mut problems) else {
            return Err(ConfigError::new(problems.into_list()));
        };
        let settings = Self::from_raw(raw, Arc::clone(&origins), &mut problems);
        ranges::check(&settings, &mut problems);
        ConfigError::check(problems.into_list())?;
        Ok(settings)
    }

    /// The defaults alone: no database, no queues.
    ///
    /// # Panics
    /// Never: the compiled defaults are under test.
    #[must_use]
    pub fn defaults() -> Self {
        Self::load(&Sources::none()).expect("a test loads the compiled defaults")
    }

    /// Checks settings that were changed after they were loaded.
    ///
    /// # Errors
    /// Everything that is out of range or does not go together.
    pub fn check(&self) -> Result<(), ConfigError> {
        let mut problems = Problems::new(&self.origins);
        ranges::check(self, &mut problems);
        ConfigError::check(problems.into_list())
    }

    /// The database to use.
    ///
    /// # Errors
    /// No source gives one.
    pub fn database_url(&self) -> Result<&DatabaseUrl, ConfigError> {
        self.database.url.as_ref().ok_or_else(|| {
            let what = "is not set: give --database-url URL, the environment variable \
                        HOLDFAST__DATABASE__URL, or `url` in [database] of the configuration file";
            ConfigError::one("database.url", what)
        })
    }

    /// The settings of a queue, as a batch keeps them.
    ///
    /// # Errors
    /// There is no such queue; the error names those there are.
    pub fn queue(&self, name: &QueueName) -> Result<&QueueSpec, UnknownQueue> {
        self.queues.get(name).ok_or_else(|| UnknownQueue {
            name: name.clone(),
            known: self.queues.keys().cloned().collect(),
        })
    }

    /// The queues a worker with these settings serves: `worker.queues`, or all that are configured.
    #[must_use]
    pub fn served_queues(&self) -> Vec<QueueName> {
        if self.worker.queues.is_empty() {
            self.queues.keys().cloned().collect()
        } else {
            self.worker.queues.clone()
        }
    }

    /// Time between two full sweeps of the fleet: a sixth of the lease, at most
    /// `reap.full_sweep_max`.
    #[must_use]
    pub fn full_sweep_interval(&self) -> Duration {
        (self.lease.ttl / 6).min(self.reap.full_sweep_max)
    }

    /// How long the service manager has to wait after TERM: drain, kill grace, release and slack.
    #[must_use]
    pub fn stop_timeout(&self) -> Duration {
        self.drain.grace + self.lease.kill_grace + self.drain.release + self.drain.slack
    }

    fn from_raw(raw: RawSettings, origins: Arc<Origins>, problems: &mut Problems<'_>) -> Self {
        let default_bytes = raw.limits.result_bytes;
        let or_default = |bytes: &mut usize| {
            if *bytes == 0 {
                *bytes = default_bytes;
            }
        };
        let commands = raw.queues.into_iter().map(|(name, mut spec)| {
            or_default(&mut spec.result_bytes);
            (name, QueueSpec::Command(spec))
        });
        let https = raw.http_queues.into_iter().map(|(name, mut spec)| {
            or_default(&mut spec.result_bytes);
            (name, QueueSpec::Http(spec))
        });
        let agents = raw.agent_queues.into_iter().map(|(name, mut spec)| {
            or_default(&mut spec.result_bytes);
            (name, QueueSpec::Agent(spec))
        });
        let mut queues = BTreeMap::new();
        for (name, spec) in commands.chain(https).chain(agents) {
            match name.parse::<QueueName>() {
                Ok(name) => {
                    queues.insert(name, spec);
                }
                Err(error) => problems.add(&["queues".to_owned(), name], error.to_string()),
            }
        }
        Self {
            database: raw.database,
            lease: raw.lease,
            worker: raw.worker,
            claim: raw.claim,
            finish: raw.finish,
            retry: raw.retry,
            drain: raw.drain,
            limits: raw.limits,
            batch: raw.batch,
            reap: raw.reap,
            access: raw.access,
            workspace: raw.workspace,
            log: raw.log,
            telemetry: raw.telemetry,
            health: raw.health,
            exporter: raw.exporter,
            upstreams: raw.upstreams,
            queues,
            origins,
        }
    }
}

#[cfg(test)]
mod tests;
