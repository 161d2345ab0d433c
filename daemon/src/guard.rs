//! The guard: the main process of a worker, which outlives it.
//!
//! It starts a [keeper](crate::execute::keeper) and the worker, which is this program again, passes
//! signals on, reaps orphans, and ends as the worker ended. A worker that crashed is started again;
//! once nothing of it is left, its leases are released (P4), so that its items run again at once and
//! not a lease later. The guard reaches the database for that alone.
//!
//! ```text
//! guard ─┬─ keeper ─┬─ execution ── …        ends executions at their deadline, and when the
//!        │          └─ orphans               worker or the guard is gone
//!        └─ worker                            dies with the guard
//! ```
//!
//! Nothing is proven dead by a name or a number: the keeper ends with success only without a child
//! left, and when it was killed itself, its children became the guard's, which kills them until it
//! has none.

mod generation;
mod manager;
mod news;
mod release;
mod report;
mod seat;

use std::io;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use rand::Rng;
use rustix::process::{getpid, set_child_subreaper};
use signal_hook::consts::{SIGCHLD, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook_tokio::Signals;
use tokio::task::JoinSet;
use tracing::{error, info, warn};

use self::generation::Generation;
use self::manager::Manager;
use self::news::News;
use crate::clock::{BootInstant, Clock, SystemClock};
use crate::config::Settings;

pub(crate) use self::news::count as count_news;
pub use self::report::{Report, Reporter};
pub use self::seat::Seat;

/// The exit status of a program that has a fault of its own, and of one that panicked: crashes.
const FAULTS: [i32; 2] = [70, 101];
/// The exit status of a worker that left leases behind when it was told to end at once.
const FORCED: i32 = 4;

/// The pause before a crashed worker is started again; doubled with each crash in a row.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);
/// How long a release may hold up the end of the guard.
const LAST_RELEASE: Duration = Duration::from_secs(5);

/// What a guard does for its worker.
pub struct Guard {
    /// Checked settings, as the worker has them.
    pub settings: Arc<Settings>,
    /// Whether a crashed worker is started again and its leases released. Else its end is the guard's.
    pub restarts: bool,
}

impl Guard {
    /// Guards workers until one ends in order, a signal ends it, or it crashes too often in a row;
    /// the exit status.
    ///
    /// Run it on a runtime of one thread, from the main thread: the worker gets KILL when the thread
    /// that started it ends.
    ///
    /// # Errors
    /// When the system refuses signals, processes or file descriptors.
    pub async fn run(self) -> io::Result<u8> {
        set_child_subreaper(Some(getpid()))?;
        rustix::thread::set_name(c"holdfast-guard")?;
        let mut signals =
            Signals::new([SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGCHLD])?;
        let mut manager = Manager::of_process();
        self.mind_the_watchdog(&manager);
        let mut releases = JoinSet::new();
        let news = News::default();
        let mut crashes = Crashes::new(&self.settings);
        let status = loop {
            let started = SystemClock.now();
            let generation = Generation::start(self.restarts, &news)?;
            manager.worker_started();
            let worker = generation.worker();
            let ending = generation.run(&mut signals, &mut manager).await;
            let crashed = ending.crashed();
            if crashed {
                error!(%worker, ending = %ending, proven = ending.proven, "the worker crashed");
            }
            if self.restarts && (crashed || ending.status() == FORCED) {
                if ending.proven {
                    let settings = Arc::clone(&self.settings);
                    releases.spawn(release::release(settings, worker, crashed, news.clone()));
                } else {
                    warn!(%worker, "something of it may still run: its leases are left to lapse");
                }
            }
            if !self.restarts || !crashed || ending.asked {
                break ending.status();
            }
            let Some(pause) = crashes.count(started, SystemClock.now()) else {
                error!(crashes = crashes.in_a_row, "the worker crashes again and again: giving up");
                break FAULTS[0];
            };
            info!(?pause, "starting the worker again");
            if !rest(&mut signals, &manager, pause).await {
                break ending.status();
            }
        };
        // Nothing is lost without it but time: the lease rules.
        let released = async { while releases.join_next().await.is_some() {} };
        tokio::select! {
            () = released => {}
            _ = rest(&mut signals, &manager, LAST_RELEASE) => warn!("leases are left to lapse"),
        }
        Ok(u8::try_from(status).unwrap_or(u8::MAX))
    }

    /// A hung worker has to be gone before its leases are granted again, even when it hangs just before
    /// a heartbeat.
    fn mind_the_watchdog(&self, manager: &Manager) {
        let ttl = self.settings.lease.ttl;
        let Some(watchdog) = manager.watchdog() else { return };
        if watchdog > ttl * 2 / 3 {
            warn!(
                ?watchdog,
                ?ttl,
                "the service manager's watchdog is longer than two thirds of a lease"
            );
        }
    }
}

/// Waits before the next start; false when a signal asked for the end meanwhile.
async fn rest(signals: &mut Signals, manager: &Manager, pause: Duration) -> bool {
    let asked = async {
        let mut beats = tokio::time::interval(Duration::from_secs(1));
        loop {
            tokio::select! {
                signal = signals.next() => match signal {
                    Some(signal) if !generation::asks_to_end(signal) => {}
                    Some(_) | None => return,
                },
                _ = beats.tick() => manager.alive(),
            }
        }
    };
    tokio::time::timeout(pause, asked).await.is_err()
}

/// Crashes in a row.
struct Crashes {
    limit: u32,
    reset: Duration,
    in_a_row: u32,
}

impl Crashes {
    fn new(settings: &Settings) -> Self {
        let worker = &settings.worker;
        Self { limit: worker.restarts, reset: worker.restart_reset, in_a_row: 0 }
    }

    /// Counts the crash of a worker that lived from then to then; the pause before the next start, or
    /// none when there were too many in a row.
    fn count(&mut self, started: BootInstant, crashed: BootInstant) -> Option<Duration> {
        if crashed.since(started) >= self.reset {
            self.in_a_row = 0;
        }
        self.in_a_row += 1;
        if self.in_a_row > self.limit {
            return None;
        }
        let doubled = FIRST_PAUSE.saturating_mul(2u32.saturating_pow(self.in_a_row - 1));
        Some(doubled.min(LONGEST_PAUSE).mul_f64(rand::rng().random_range(0.5..=1.0)))
    }
}

#[cfg(test)]
mod tests {
    use super::generation::{End, Ending};
    use super::*;

    fn at(seconds: u64) -> BootInstant {
        BootInstant::from_nanos(seconds * 1_000_000_000)
    }

    #[test]
    fn crashes_in_a_row_pause_longer_and_end() {
        let mut crashes = Crashes { limit: 12, reset: Duration::from_mins(1), in_a_row: 0 };
        let mut longest = Duration::ZERO;
        for n in 0..12 {
            let pause = crashes.count(at(n), at(n + 1)).unwrap();
            assert!(pause <= LONGEST_PAUSE && pause >= FIRST_PAUSE / 2, "{pause:?}");
            longest = longest.max(pause);
        }
        assert!(longest >= LONGEST_PAUSE / 2, "{longest:?}");
        assert_eq!(crashes.count(at(20), at(21)), None);
    }

    #[test]
    fn a_worker_that_lived_ends_the_row() {
        let mut crashes = Crashes { limit: 1, reset: Duration::from_mins(1), in_a_row: 0 };
        for n in 0..5 {
            assert!(crashes.count(at(100 * n), at(100 * n + 60)).unwrap() <= FIRST_PAUSE);
        }
        assert_eq!(crashes.count(at(900), at(959)), None);
        let mut never = Crashes { limit: 0, reset: Duration::ZERO, in_a_row: 0 };
        assert_eq!(never.count(at(0), at(9)), None);
    }

    #[test]
    fn what_a_worker_ended_of_tells_a_crash_from_an_end() {
        let ending =
            |end, passed| Ending { end, passed, asked: passed, keeper_failed: false, proven: true };
        for (end, passed, crashed, status) in [
            (End::Exit(0), false, false, 0),
            (End::Exit(4), false, false, 4),
            (End::Exit(78), false, false, 78),
            (End::Exit(75), false, false, 75),
            (End::Exit(70), false, true, 70),
            (End::Exit(101), false, true, 101),
            (End::Signal(9), false, true, 137),
            (End::Signal(SIGTERM), true, false, 143),
            (End::Signal(SIGHUP), true, false, 129),
        ] {
            let ending = ending(end, passed);
            assert_eq!((ending.crashed(), ending.status()), (crashed, status), "{ending:?}");
        }
        let failed = Ending { keeper_failed: true, ..ending(End::Signal(9), true) };
        assert!(failed.crashed());
    }
}
