//! What a worker does beside its work: it reports to its guard, and heeds orders.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde_json::Value;
use tokio::sync::watch;
use tokio::time::Instant;
use tracing::{error, info, warn};

use crate::cli::exit::CliError;
use crate::config::{Settings, check_report};
use crate::guard::{Report, Reporter};
use crate::model::WorkerState;
use crate::supervise::View;
use crate::supervise::signals::{Order, OrderSignals};
use crate::telemetry::{LogLevel, Metrics};

/// How often the guard hears that the worker lives, and how often it is looked whether there is news.
const BEAT: Duration = Duration::from_secs(1);
const LOOK: Duration = Duration::from_millis(100);

/// How long after a dump the next one may come.
const BETWEEN_DUMPS: Duration = Duration::from_secs(1);

/// The settings that are taken from the file while the worker runs; all others with its next start.
const RELOADABLE: [&str; 1] = ["log.level"];

/// Reads the settings anew, as at the start.
pub(in crate::cli) type Reload = Box<dyn Fn() -> Result<Settings, CliError> + Send + Sync>;

/// Tells the guard that the worker lives, as long as it does.
pub(super) async fn report(view: View, reporter: Reporter, reloads: Arc<AtomicU64>) {
    let mut last: Option<(Report, Instant)> = None;
    loop {
        if view.is_alive() {
            let report = report_of(&view, reloads.load(Ordering::Relaxed));
            let is_due =
                last.as_ref().is_none_or(|(said, at)| *said != report || at.elapsed() >= BEAT);
            if is_due {
                reporter.tell(&report);
                last = Some((report, Instant::now()));
            }
        }
        tokio::time::sleep(LOOK).await;
    }
}

fn report_of(view: &View, reloads: u64) -> Report {
    let summary = view.summary();
    let ending = match summary.state {
        WorkerState::Starting | WorkerState::Running | WorkerState::Quiet | WorkerState::Fenced => {
            false
        }
        WorkerState::Draining
        | WorkerState::Cancelling
        | WorkerState::Releasing
        | WorkerState::Exited => true,
    };
    Report {
        state: summary.state.as_str().to_owned(),
        starting: summary.state == WorkerState::Starting,
        ending,
        leases: summary.leases,
        items: summary.items,
        free: summary.free,
        slots: summary.slots,
        reloads,
    }
}

/// Heeds the orders that come as signals.
pub(super) struct Orders {
    pub(super) signals: OrderSignals,
    pub(super) metrics: Arc<Metrics>,
    pub(super) reload: Reload,
    pub(super) settings: Arc<Settings>,
    pub(super) level: LogLevel,
    pub(super) view: View,
    pub(super) quiet: watch::Sender<bool>,
    pub(super) reloads: Arc<AtomicU64>,
}

impl Orders {
    /// Until the process ends.
    pub(super) async fn heed(mut self) {
        let mut dumped: Option<Instant> = None;
        loop {
            match self.signals.next().await {
                Order::Reload => self.read_anew(),
                Order::Quiet => {
                    self.quiet.send_modify(|quiet| *quiet = !*quiet);
                    info!(quiet = *self.quiet.borrow(), "received a signal: USR2");
                }
                Order::Dump => {
                    if dumped.is_none_or(|at| at.elapsed() >= BETWEEN_DUMPS) {
                        dumped = Some(Instant::now());
                        // Whoever asks wants it, whatever is logged otherwise.
                        warn!(target: "holdfast::dump", state = %self.view.dump(), "how this worker stands");
                    }
                }
            }
        }
    }

    fn read_anew(&mut self) {
        let mut applied = false;
        match (self.reload)() {
            Err(error) => {
                error!(%error, "the configuration was not reloaded: all stays as it was");
            }
            Ok(new) => {
                let (changed, later) = changes(&self.settings, &new);
                if let Err(error) = self.level.set(&new.log.level) {
                    error!(%error, "the configuration was not reloaded: all stays as it was");
                } else {
                    applied = true;
                    info!(?changed, "reloaded the configuration");
                    if !later.is_empty() {
                        warn!(keys = ?later, "settings that change with the next start of this worker");
                    }
                    let mut settings = Settings::clone(&self.settings);
                    settings.log.level = new.log.level;
                    self.settings = Arc::new(settings);
                }
            }
        }
        self.metrics.config_reloaded(applied);
        self.reloads.fetch_add(1, Ordering::Relaxed);
    }
}

/// The keys whose values differ: those that are taken over, and the others.
fn changes(old: &Settings, new: &Settings) -> (Vec<String>, Vec<String>) {
    let (old, new) = (check_report(old), check_report(new));
    let value = |report: &crate::config::Report, key: &str| -> Option<Value> {
        report.entries().iter().find(|entry| entry.key == key).map(|entry| entry.value.clone())
    };
    let mut keys: Vec<String> =
        old.entries().iter().chain(new.entries()).map(|entry| entry.key.clone()).collect();
    keys.sort_unstable();
    keys.dedup();
    keys.retain(|key| value(&old, key) != value(&new, key));
    keys.into_iter().partition(|key| RELOADABLE.contains(&key.as_str()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_changes_at_once_is_told_from_what_takes_a_start() {
        let old = Settings::defaults();
        let mut new = old.clone();
        assert_eq!(changes(&old, &new), (Vec::new(), Vec::new()));

        new.log.level = "debug".to_owned();
        new.worker.execution_slots += 1;

        let expected = (vec!["log.level".to_owned()], vec!["worker.execution_slots".to_owned()]);
        assert_eq!(changes(&old, &new), expected);
    }
}
