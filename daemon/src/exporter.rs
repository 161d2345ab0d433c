//! Gauges of the whole database: collected on an interval, apart from the scrapes, over one connection.
//!
//! A scrape asks nobody, so it answers at once while the database is away: with how long ago
//! everything was collected, and without the gauges that are no longer known.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use crate::clock::{BootInstant, Clock, sleep_until};
use crate::health::{Failing, Probed};
use crate::store::{Database, FlightError};
use crate::telemetry::labels::Collector;
use crate::telemetry::metrics::GlobalMetrics;

/// How often a collection may fail in a row before its gauges are left out.
const MISSED: u32 = 3;
/// A collection under way for longer than its parts may take hangs.
const PATIENCE: Duration = Duration::from_secs(30);

/// How long gauges are shown after their last collection, at this interval.
#[must_use]
pub fn stale_after(interval: Duration) -> Duration {
    interval * MISSED
}

/// Collects for one process.
pub struct Exporter {
    database: Database,
    metrics: Arc<GlobalMetrics>,
    clock: Arc<dyn Clock>,
    interval: Duration,
    timeout: Duration,
    progress: Mutex<Progress>,
}

/// How far the loop is; what the probes look at.
struct Progress {
    /// When a part was last begun or ended.
    turned: BootInstant,
    /// Whether a collection has ended, however.
    begun: bool,
    /// Whether the last one failed: it is said once.
    failing: bool,
}

impl Exporter {
    /// An exporter that has not collected yet: every `interval`, each part for at most `timeout`.
    #[must_use]
    pub fn new(
        database: Database,
        metrics: Arc<GlobalMetrics>,
        clock: Arc<dyn Clock>,
        interval: Duration,
        timeout: Duration,
    ) -> Self {
        let progress = Progress { turned: clock.now(), begun: false, failing: false };
        Self { database, metrics, clock, interval, timeout, progress: Mutex::new(progress) }
    }

    /// Collects until `stop`, at once for the first time.
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub async fn run(&self, stop: &CancellationToken) {
        let collections = async {
            loop {
                let next = self.clock.now() + self.interval;
                self.collect().await;
                sleep_until(&*self.clock, next).await;
            }
        };
        stop.run_until_cancelled(collections).await;
    }

    /// Collects every part; without the database it tries for the first alone.
    pub async fn collect(&self) {
        let mut failed = None;
        for part in Collector::ALL.iter().copied() {
            if failed.as_ref().is_some_and(is_outage) {
                self.metrics.collection_failed(part);
                continue;
            }
            self.turn();
            let began = self.clock.now();
            match self.database.collect(part, self.timeout).await {
                Ok(collected) => {
                    let now = self.clock.now();
                    self.metrics.collected(&collected, now.since(began), now);
                    self.metrics.db_up(true);
                }
                Err(error) => {
                    self.metrics.collection_failed(part);
                    self.metrics.db_up(!is_outage(&error));
                    self.say(part, &error);
                    failed = Some(error);
                }
            }
        }
        self.turn();
        let mut progress = self.progress();
        progress.begun = true;
        if failed.is_none() {
            self.metrics.collected_all(self.clock.wall());
            if std::mem::take(&mut progress.failing) {
                info!("everything is collected again");
            }
        }
    }

    /// Says once that collections fail.
    fn say(&self, part: Collector, error: &FlightError) {
        let error = error as &dyn std::error::Error;
        if std::mem::replace(&mut self.progress().failing, true) {
            debug!(collector = part.as_str(), error, "a collection failed");
        } else {
            warn!(collector = part.as_str(), error, "a collection failed");
        }
    }

    fn turn(&self) {
        let now = self.clock.now();
        self.progress().turned = now;
    }

    fn progress(&self) -> std::sync::MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether the other parts would fail as well.
fn is_outage(error: &FlightError) -> bool {
    match error {
        FlightError::NotSent(_) | FlightError::Unknown(_) => true,
        FlightError::RolledBack(_) => false,
    }
}

impl Probed for Exporter {
    fn not_alive(&self) -> Vec<Failing> {
        let silence = self.clock.now().since(self.progress().turned);
        let limit = self.interval + self.timeout + PATIENCE;
        let stuck = (silence > limit).then(|| Failing {
            check: "collection",
            detail: format!("nothing begun for {:.1} s", silence.as_secs_f64()),
        });
        stuck.into_iter().collect()
    }

    /// It answers scrapes whatever becomes of the database: ready is what has tried once.
    fn not_ready(&self) -> Vec<Failing> {
        self.not_started().into_iter().chain(self.not_alive()).collect()
    }

    fn not_started(&self) -> Vec<Failing> {
        let waiting = (!self.progress().begun)
            .then(|| Failing { check: "collection", detail: "not tried yet".to_owned() });
        waiting.into_iter().collect()
    }

    fn exposition(&self) -> Result<String, prometheus::Error> {
        self.metrics.encode(self.clock.now())
    }
}
