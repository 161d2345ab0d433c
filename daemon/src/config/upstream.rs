//! Tables `[upstreams.NAME]`: what this worker may send to a service, and how fast.

use std::num::NonZeroU32;
use std::time::Duration;

use ipnet::IpNet;
use regex::Regex;
use serde::{Deserialize, Serialize};

use super::units;

/// One upstream. Units, ranges and defaults: `config/default.toml`. Unlike a queue's settings these
/// are the worker's: a change counts for running batches too.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Upstream {
    /// Requests of the whole fleet in any minute, for each model; none means unlimited. Up to
    /// 1,000,000, default none.
    #[serde(with = "units::unlimited")]
    pub requests_per_minute: Option<NonZeroU32>,
    /// Requests of the whole fleet under way at once, for each model; none means unlimited. Up to
    /// 1,000,000, default none.
    #[serde(with = "units::unlimited")]
    pub max_in_flight: Option<NonZeroU32>,
    /// Networks that may be reached beside public addresses. Default none.
    pub allow_networks: Vec<IpNet>,
    /// First pause after the upstream refused its credentials or the account, doubled while it goes
    /// on. 100 ms to 24 h, default 1 min.
    #[serde(with = "units::duration")]
    pub pause_min: Duration,
    /// Longest pause; not below `pause_min`. 100 ms to 24 h, default 15 min.
    #[serde(with = "units::duration")]
    pub pause_max: Duration,
    /// Patterns of error messages that mean that the input does not fit the model. Default none.
    pub context_overflow_patterns: Vec<String>,
    /// Patterns of error messages that mean that one request is larger than the limit. Default none.
    pub too_large_patterns: Vec<String>,
}

impl Default for Upstream {
    fn default() -> Self {
        Self {
            requests_per_minute: None,
            max_in_flight: None,
            allow_networks: Vec::new(),
            pause_min: Duration::from_mins(1),
            pause_max: Duration::from_mins(15),
            context_overflow_patterns: Vec::new(),
            too_large_patterns: Vec::new(),
        }
    }
}

impl Upstream {
    /// Everything wrong with these settings, each with its key below the upstream's.
    pub(super) fn problems(&self) -> Vec<(&'static str, String)> {
        let mut found = Vec::new();
        let mut wrong = |key, what: String| found.push((key, what));
        for (key, limit) in [
            ("requests_per_minute", self.requests_per_minute),
            ("max_in_flight", self.max_in_flight),
        ] {
            if limit.is_some_and(|limit| limit.get() > 1_000_000) {
                wrong(key, "must be 0 to 1000000".into());
            }
        }
        let times = Duration::from_millis(100)..=Duration::from_hours(24);
        for (key, time) in [("pause_min", self.pause_min), ("pause_max", self.pause_max)] {
            if !times.contains(&time) {
                wrong(key, "must be 100ms to 24h".into());
            }
        }
        if self.pause_min > self.pause_max {
            wrong("pause_min", "is above `pause_max`".into());
        }
        for (key, patterns) in [
            ("context_overflow_patterns", &self.context_overflow_patterns),
            ("too_large_patterns", &self.too_large_patterns),
        ] {
            for pattern in patterns {
                if let Err(error) = Regex::new(pattern) {
                    wrong(key, format!("{pattern:?} is not a pattern: {error}"));
                }
            }
        }
        found
    }
}
