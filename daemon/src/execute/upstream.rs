//! Calls of services: what the `http` and the `agent` executor share.
//!
//! One call is one request with its bounds (`exchange`), behind the limits of the whole fleet
//! (`Admission`), and what it means is read from its status and its structured error code, never
//! from text (`classify`).

mod address;
pub(super) mod call;
pub(super) mod classify;
mod client;
pub(super) mod exchange;
pub mod limits;
pub(super) mod retry_after;
pub(super) mod secret;
pub mod usage;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use regex::Regex;
use reqwest::Url;

pub use self::limits::{
    Grant, GrantRequest, SharedLimits, SharedLimitsError, UnsharedLimits, UpstreamKey,
};

use self::classify::Patterns;
use self::client::Clients;
use self::limits::{Admission, Rates};
use crate::clock::Clock;
use crate::config::Upstream;

/// What all executors of this process that call upstreams share: connections, and the process's
/// part of the fleet's limits.
pub struct Upstreams {
    settings: HashMap<String, Arc<Policy>>,
    unnamed: Arc<Policy>,
    clients: Clients,
    admission: Admission,
}

/// The settings of one upstream, ready for use.
pub(super) struct Policy {
    pub(super) settings: Upstream,
    pub(super) patterns: Patterns,
}

/// An upstream as one executor uses it.
pub(super) struct Reached {
    upstreams: Arc<Upstreams>,
    /// None where it has no name: the origin of each request stands for it.
    name: Option<String>,
    model: String,
    policy: Arc<Policy>,
    client: reqwest::Client,
}

impl Reached {
    fn key(&self, url: &Url) -> UpstreamKey {
        let upstream = self.name.clone().unwrap_or_else(|| url.origin().ascii_serialization());
        UpstreamKey { upstream, model: self.model.clone() }
    }
}

impl Upstreams {
    /// Upstreams with these settings by name; the limits of the fleet come from `shared`.
    ///
    /// # Errors
    /// A pattern that cannot be read.
    pub fn new<'a>(
        settings: impl IntoIterator<Item = (&'a String, &'a Upstream)>,
        shared: Arc<dyn SharedLimits>,
        clock: Arc<dyn Clock>,
    ) -> Result<Self, regex::Error> {
        let settings = settings.into_iter().map(|(name, upstream)| {
            let policy = Policy::new(upstream.clone())?;
            Ok((name.clone(), Arc::new(policy)))
        });
        Ok(Self {
            settings: settings.collect::<Result<_, regex::Error>>()?,
            unnamed: Arc::new(Policy::new(Upstream::default())?),
            clients: Clients::default(),
            admission: Admission::new(shared, clock),
        })
    }

    /// The upstream of a queue: by its name, else by the origin of each request.
    ///
    /// # Errors
    /// A sentence on why there is none.
    pub(super) fn reach(
        self: &Arc<Self>,
        name: &str,
        model: &str,
        connect_timeout: Duration,
    ) -> Result<Reached, String> {
        let (name, policy) = match name {
            "" => (None, &self.unnamed),
            name => {
                let policy = self.settings.get(name).ok_or_else(|| {
                    format!("this worker's configuration has no [upstreams.{name}]")
                })?;
                (Some(name.to_owned()), policy)
            }
        };
        let client = self
            .clients
            .get(connect_timeout, &policy.settings.allow_networks)
            .map_err(|error| format!("no HTTP client: {error}"))?;
        let (upstreams, policy) = (Arc::clone(self), Arc::clone(policy));
        Ok(Reached { upstreams, name, model: model.to_owned(), policy, client })
    }
}

impl Policy {
    fn new(settings: Upstream) -> Result<Self, regex::Error> {
        let read = |patterns: &[String]| -> Result<Vec<Regex>, regex::Error> {
            patterns.iter().map(|pattern| Regex::new(pattern)).collect()
        };
        let patterns = Patterns {
            context_overflow: read(&settings.context_overflow_patterns)?,
            too_large: read(&settings.too_large_patterns)?,
        };
        Ok(Self { settings, patterns })
    }

    pub(super) const fn rates(&self) -> Rates {
        Rates {
            requests_per_minute: self.settings.requests_per_minute,
            max_in_flight: self.settings.max_in_flight,
        }
    }
}
