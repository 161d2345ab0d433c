//! The sections of the settings. Units, ranges and defaults: `config/default.toml`.

use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::secret::{DatabaseUrl, EndpointUrl};
use super::units;
use crate::model::QueueName;

/// Section `[database]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Database {
    /// `PostgreSQL` to use; none where no source gives one. Key: `database.url`.
    #[serde(with = "units::optional")]
    pub url: Option<DatabaseUrl>,
    /// Direct URL for LISTEN; none means `url`. Key: `database.listen_url`.
    #[serde(with = "units::optional")]
    pub listen_url: Option<DatabaseUrl>,
    /// Connections of one process. 2 to 1000, default 8. Key: `database.pool_size`.
    pub pool_size: u16,
    /// How long a new connection may take. 100 ms to 1 min, default 5 s.
    /// Key: `database.connect_timeout`.
    #[serde(with = "units::duration")]
    pub connect_timeout: Duration,
    /// Bound of one statement on the server. 100 ms to 1 min, default 5 s; heartbeats use
    /// [`Lease::try_timeout`] where that is less. Key: `database.statement_timeout`.
    #[serde(with = "units::duration")]
    pub statement_timeout: Duration,
    /// Bound of one wait for a lock. 10 ms to 1 min, default 2 s. Key: `database.lock_timeout`.
    #[serde(with = "units::duration")]
    pub lock_timeout: Duration,
}

/// Section `[lease]`, and the times derived from it (F5).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Lease {
    /// Validity of a claim without renewal. 500 ms to 1 h, default 60 s. Key: `lease.ttl`.
    #[serde(with = "units::duration")]
    pub ttl: Duration,
    /// Time between TERM and KILL. 0 to 5 min, default 10 s. Key: `lease.kill_grace`.
    #[serde(with = "units::duration")]
    pub kill_grace: Duration,
    /// Reserve for wake-up, the end of a process tree and small clock steps. 10 ms to 1 min,
    /// default 1 s. Key: `lease.slack`.
    #[serde(with = "units::duration")]
    pub slack: Duration,
}

const MARGIN: u32 = 4;
const HEARTBEAT: u32 = 3;
const TRY: u32 = 6;

// F5: `1.1 * lease/3 + 2 * lease/6 <= lease - margin`: a late heartbeat and two tries end before the
// worker has to stop. Here for a lease of 10 * MARGIN * HEARTBEAT * TRY.
const _: () = assert!(
    11 * MARGIN * TRY + 2 * 10 * MARGIN * HEARTBEAT
        <= 10 * MARGIN * HEARTBEAT * TRY - 10 * HEARTBEAT * TRY
);

impl Lease {
    /// What is left of the lease when a worker stops its work: a quarter.
    #[must_use]
    pub fn margin(&self) -> Duration {
        self.ttl / MARGIN
    }

    /// How long a worker trusts a lease from the moment it asked for it: all but the margin.
    #[must_use]
    pub fn trust(&self) -> Duration {
        self.ttl.saturating_sub(self.margin())
    }

    /// Time between two heartbeats, before jitter: a third.
    #[must_use]
    pub fn heartbeat(&self) -> Duration {
        self.ttl / HEARTBEAT
    }

    /// Bound of one try of a heartbeat, on both sides: a sixth.
    #[must_use]
    pub fn try_timeout(&self) -> Duration {
        self.ttl / TRY
    }

    /// What must fit in the margin, so that an execution is dead before its lease can be granted
    /// again: `kill_grace * 1.01 + 0.02 * ttl + slack`.
    #[must_use]
    pub fn needed_margin(&self) -> Duration {
        let hundredfold = self
            .kill_grace
            .saturating_mul(101) // may be out of range still
            .saturating_add(self.ttl.saturating_mul(2));
        (hundredfold / 100).saturating_add(self.slack)
    }
}

/// Section `[worker]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Worker {
    /// Queues to serve; empty means all that are configured. Key: `worker.queues`.
    #[serde(deserialize_with = "units::queue_names")]
    pub queues: Vec<QueueName>,
    /// Items executed at once. 1 to 4096, default 16. Key: `worker.execution_slots`.
    pub execution_slots: u16,
    /// Checks run at once. 1 to 4096, default 4. Key: `worker.check_slots`.
    pub check_slots: u16,
    /// Items that may wait for a check slot before nothing more is claimed. 0 to 100,000,
    /// default 64. Key: `worker.check_backlog`.
    pub check_backlog: u32,
    /// How long one check may take before its item ends without a verdict. 1 s to 1 h, default
    /// 1 min. Key: `worker.check_timeout`.
    #[serde(with = "units::duration")]
    pub check_timeout: Duration,
    /// How often an idle worker looks for work. 10 ms to 1 min, default 1 s.
    /// Key: `worker.poll_interval`.
    #[serde(with = "units::duration")]
    pub poll_interval: Duration,
    /// The same while notifications arrive. 10 ms to 5 min, default 5 s.
    /// Key: `worker.notified_poll_interval`.
    #[serde(with = "units::duration")]
    pub notified_poll_interval: Duration,
    /// Items one claim may take. 1 to 256, default 256. Key: `worker.claim_max`.
    pub claim_max: u16,
    /// Crashes in a row after each of which its guard starts a worker again. 0 to 1,000,000, default 10.
    /// Key: `worker.restarts`.
    pub restarts: u32,
    /// A worker that lived so long ends the row. 10 ms to 1 h, default 1 min.
    /// Key: `worker.restart_reset`.
    #[serde(with = "units::duration")]
    pub restart_reset: Duration,
    /// Name shown for this worker; none means the host's. Up to 128 characters.
    /// Key: `worker.name`.
    #[serde(with = "units::optional")]
    pub name: Option<String>,
}

/// Section `[claim]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Claim {
    /// How often open batches are ranked. 10 ms to 1 min, default 1 s. Key: `claim.rank_interval`.
    #[serde(with = "units::duration")]
    pub rank_interval: Duration,
    /// Batches kept from a ranking. 1 to 1000, default 32. Key: `claim.candidates`.
    pub candidates: u16,
    /// Waiting time worth one priority. 1 s to 30 d, default 10 min. Key: `claim.ageing`.
    #[serde(with = "units::duration")]
    pub ageing: Duration,
}

/// Section `[finish]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Finish {
    /// How long a result waits for others. 0 to 1 s, default 5 ms. Key: `finish.group_delay`.
    #[serde(with = "units::duration")]
    pub group_delay: Duration,
    /// Results that make a full group. 1 to 256, default 64. Key: `finish.group_items`.
    pub group_items: u16,
    /// Bytes of results that make a full group. 1 KiB to 64 MiB, default 1 MiB.
    /// Key: `finish.group_bytes`.
    #[serde(with = "units::size")]
    pub group_bytes: usize,
}

/// Section `[retry]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Retry {
    /// Pause before the second attempt, doubled from then on. 1 ms to 1 h, default 1 s.
    /// Key: `retry.backoff_base`.
    #[serde(with = "units::duration")]
    pub backoff_base: Duration,
    /// Upper end of the pause. 1 ms to 24 h, default 300 s. Key: `retry.backoff_max`.
    #[serde(with = "units::duration")]
    pub backoff_max: Duration,
    /// Interruptions that are not charged. 0 to 250, default 5. Key: `retry.max_interruptions`.
    pub max_interruptions: u8,
    /// Refused admissions that are not charged. 0 to 250, default 50.
    /// Key: `retry.max_admissions`.
    pub max_admissions: u8,
    /// Crashes after which an item fails. 1 to 250, default 3. Key: `retry.max_crashes`.
    pub max_crashes: u8,
}

/// Section `[drain]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Drain {
    /// How long running items may go on. 0 to 24 h, default 90 s. Key: `drain.grace`.
    #[serde(with = "units::duration")]
    pub grace: Duration,
    /// The same after an interrupt from a terminal, if shorter. 0 to 24 h, default 10 s.
    /// Key: `drain.interactive_grace`.
    #[serde(with = "units::duration")]
    pub interactive_grace: Duration,
    /// How long giving back may take. 100 ms to 5 min, default 5 s. Key: `drain.release`.
    #[serde(with = "units::duration")]
    pub release: Duration,
    /// Reserve below the service manager's limit. 0 to 10 min, default 15 s. Key: `drain.slack`.
    #[serde(with = "units::duration")]
    pub slack: Duration,
}

/// Section `[limits]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Limits {
    /// Items of one batch. 1 to 100,000,000, default 1,000,000. Key: `limits.items_per_batch`.
    pub items_per_batch: u32,
    /// Characters of a key. 1 to 512, default 512. Key: `limits.key_chars`.
    pub key_chars: usize,
    /// Bytes of an input. 1 KiB to 128 MiB, default 1 MiB. Key: `limits.input_bytes`.
    #[serde(with = "units::size")]
    pub input_bytes: usize,
    /// Bytes of one submitted line. 1 KiB to 512 MiB, default 8 MiB. Key: `limits.line_bytes`.
    #[serde(with = "units::size")]
    pub line_bytes: usize,
    /// Characters of a title. 1 to 1024, default 256. Key: `limits.title_chars`.
    pub title_chars: usize,
    /// Bytes of a stored result. 1 KiB to 128 MiB, default 1 MiB. Key: `limits.result_bytes`.
    #[serde(with = "units::size")]
    pub result_bytes: usize,
    /// Characters of a preview. 1 to 100,000, default 2000. Key: `limits.preview_chars`.
    pub preview_chars: usize,
    /// Bytes kept of the end of what an attempt logged. 0 to 1 MiB, default 4 KiB.
    /// Key: `limits.log_bytes`.
    #[serde(with = "units::size")]
    pub log_bytes: usize,
    /// Characters of a stored error. 100 to 100,000, default 4000. Key: `limits.error_chars`.
    pub error_chars: usize,
    /// The most attempts a batch may ask for. 1 to 100, default 100. Key: `limits.max_attempts`.
    pub max_attempts: u8,
}

/// Section `[batch]`: what a batch gets where its submitter says nothing.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BatchDefaults {
    /// Attempts of an item. 1 to `limits.max_attempts`, default 3. Key: `batch.max_attempts`.
    pub max_attempts: u8,
    /// Items waiting or held at once. 1 to 1,000,000, default 1000. Key: `batch.max_live`.
    pub max_live: u32,
    /// Items under check at once. 1 to 1,000,000, default 64. Key: `batch.max_checking`.
    pub max_checking: u32,
    /// Items executing at once; none means unlimited. Up to 1,000,000, default none.
    /// Key: `batch.max_running`.
    #[serde(with = "units::unlimited")]
    pub max_running: Option<NonZeroU32>,
}

/// Section `[reap]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Reap {
    /// Time between two fast sweeps. 50 ms to 1 min, default 1 s. Key: `reap.sweep_interval`.
    #[serde(with = "units::duration")]
    pub sweep_interval: Duration,
    /// Longest time between two full sweeps. 50 ms to 1 min, default 5 s.
    /// Key: `reap.full_sweep_max`.
    #[serde(with = "units::duration")]
    pub full_sweep_max: Duration,
}

/// Section `[log]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Log {
    /// Directives for `tracing_subscriber::EnvFilter`, checked. Default `info`. Key: `log.level`.
    pub level: String,
    /// How a line is written. Default text. Key: `log.format`.
    #[serde(deserialize_with = "units::word")]
    pub format: LogFormat,
}

/// How a line of the log is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
}

impl FromStr for LogFormat {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "text" => Ok(Self::Text),
            "json" => Ok(Self::Json),
            _ => Err(format!("{text:?} is not one of text, json")),
        }
    }
}

/// Section `[telemetry]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Telemetry {
    /// OTLP collector for traces (gRPC); none sends nothing. Key: `telemetry.otlp_endpoint`.
    #[serde(with = "units::optional")]
    pub otlp_endpoint: Option<EndpointUrl>,
    /// Which traces are kept. Default `parentbased_traceidratio`. Key: `telemetry.sampler`.
    #[serde(deserialize_with = "units::word")]
    pub sampler: Sampler,
    /// Share of traces that the samplers by ratio keep. 0 to 1, default 1.
    /// Key: `telemetry.sample_ratio`.
    pub sample_ratio: f64,
    /// This service's name. 1 to 128 characters, default `holdfast-worker`.
    /// Key: `telemetry.service_name`.
    pub service_name: String,
}

/// Which traces are kept, by the names of `OpenTelemetry`. What a trace is linked to counts as its
/// parent here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Sampler {
    /// All.
    AlwaysOn,
    /// None.
    AlwaysOff,
    /// A share of them.
    Traceidratio,
    /// All: the parent's, and those without one.
    ParentbasedAlwaysOn,
    /// Those whose parent is kept.
    ParentbasedAlwaysOff,
    /// Those whose parent is kept, and a share of the others.
    ParentbasedTraceidratio,
}

impl Sampler {
    /// The share of traces that is kept for their own sake.
    #[must_use]
    pub const fn ratio(self, configured: f64) -> f64 {
        match self {
            Self::AlwaysOn | Self::ParentbasedAlwaysOn => 1.0,
            Self::AlwaysOff | Self::ParentbasedAlwaysOff => 0.0,
            Self::Traceidratio | Self::ParentbasedTraceidratio => configured,
        }
    }

    /// Whether a trace is kept when what it is linked to is.
    #[must_use]
    pub const fn follows(self) -> bool {
        match self {
            Self::AlwaysOn | Self::AlwaysOff | Self::Traceidratio => false,
            Self::ParentbasedAlwaysOn
            | Self::ParentbasedAlwaysOff
            | Self::ParentbasedTraceidratio => true,
        }
    }
}

impl FromStr for Sampler {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "always_on" => Ok(Self::AlwaysOn),
            "always_off" => Ok(Self::AlwaysOff),
            "traceidratio" => Ok(Self::Traceidratio),
            "parentbased_always_on" => Ok(Self::ParentbasedAlwaysOn),
            "parentbased_always_off" => Ok(Self::ParentbasedAlwaysOff),
            "parentbased_traceidratio" => Ok(Self::ParentbasedTraceidratio),
            _ => Err(format!(
                "{text:?} is not one of always_on, always_off, traceidratio, \
                 parentbased_always_on, parentbased_always_off, parentbased_traceidratio"
            )),
        }
    }
}

/// Section `[health]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Health {
    /// Address of the health and metrics server; none turns it off. Port 0 takes any free one.
    /// Default `127.0.0.1:9464`. Key: `health.listen`.
    #[serde(serialize_with = "units::optional::serialize", deserialize_with = "units::address")]
    pub listen: Option<SocketAddr>,
}

/// Section `[exporter]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Exporter {
    /// Address of the exporter's metrics and health. Port 0 takes any free one. Default
    /// `127.0.0.1:9465`. Key: `exporter.listen`.
    #[serde(serialize_with = "units::optional::serialize", deserialize_with = "units::address")]
    pub listen: Option<SocketAddr>,
    /// Time between two collections. 1 s to 5 min, default 15 s. Key: `exporter.interval`.
    #[serde(with = "units::duration")]
    pub interval: Duration,
    /// How long one part of a collection may take. 100 ms to 1 min, default 5 s; not above
    /// `exporter.interval`. Key: `exporter.timeout`.
    #[serde(with = "units::duration")]
    pub timeout: Duration,
}
