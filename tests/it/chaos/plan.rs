//! Which faults come when: the same from the same seed.

use std::time::Duration;

use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use rustix::process::Signal;

use super::servers::Replication;
use crate::support::proxy::{Direction, Weather};

/// How many workers a run has.
pub(super) const WORKERS: usize = 3;

/// The length of a lease in a run.
pub(super) const LEASE: Duration = Duration::from_secs(4);

/// Which process of a worker a signal is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Who {
    /// The one that claims.
    Worker,
    /// The one that was started.
    Guard,
    /// The parent of all executions.
    Keeper,
}

/// One thing that is done to a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Step {
    Signal(Who, usize, Signal),
    /// Starts a worker unless it runs.
    Start(usize),
    /// Ends the server as a crash does; `StartServer` comes later.
    CrashServer(Signal),
    StopServer,
    StartServer,
    CrashBackend,
    Replicate(Replication),
    /// Lets nothing of the primary reach its standby any more.
    StallLink,
    FailOver,
    AttachStandby,
    Weather(usize, Weather),
    CutCommits(usize),
    SpareCommits(usize),
    /// Takes every connection that the server has left, after those of the workers were reset.
    TakeConnections,
    FreeConnections,
    FillDisk,
    EmptyDisk,
    /// Moves the wall clock of a worker to so many seconds from the real one.
    JumpClock(usize, i32),
    /// Holds the parent lock of the newest batch.
    LockBatch,
    UnlockBatch,
    Submit,
    /// Of one of the newest batches, by a number drawn.
    Pause(usize),
    Resume,
    Cancel(usize),
    Retry(usize),
}

/// What is counted: the kinds of faults, and what people do meanwhile.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kind {
    KillWorker,
    KillGuard,
    KillKeeper,
    FreezeWorker,
    FreezeGuard,
    FreezeKeeper,
    Drain,
    CrashServer,
    KillServer,
    RestartServer,
    CrashBackend,
    FailOver,
    FailOverLosingWal,
    Delay,
    Stall,
    BlackHole,
    HalfOpen,
    Reset,
    DropAfterBytes,
    CutCommits,
    CutSubmits,
    ExhaustConnections,
    FillDisk,
    JumpClock,
    LockBatch,
    Pause,
    Cancel,
    Retry,
}

impl Kind {
    pub(super) const ALL: [Self; 28] = [
        Self::KillWorker,
        Self::KillGuard,
        Self::KillKeeper,
        Self::FreezeWorker,
        Self::FreezeGuard,
        Self::FreezeKeeper,
        Self::Drain,
        Self::CrashServer,
        Self::KillServer,
        Self::RestartServer,
        Self::CrashBackend,
        Self::FailOver,
        Self::FailOverLosingWal,
        Self::Delay,
        Self::Stall,
        Self::BlackHole,
        Self::HalfOpen,
        Self::Reset,
        Self::DropAfterBytes,
        Self::CutCommits,
        Self::CutSubmits,
        Self::ExhaustConnections,
        Self::FillDisk,
        Self::JumpClock,
        Self::LockBatch,
        Self::Pause,
        Self::Cancel,
        Self::Retry,
    ];

    /// Whether it takes the server, which has one such fault at a time.
    const fn is_of_server(self) -> bool {
        matches!(
            self,
            Self::CrashServer
                | Self::KillServer
                | Self::RestartServer
                | Self::CrashBackend
                | Self::FailOver
                | Self::FailOverLosingWal
                | Self::ExhaustConnections
                | Self::FillDisk
        )
    }

    /// Whether it takes a worker, which has one such fault at a time.
    const fn is_of_worker(self) -> bool {
        matches!(
            self,
            Self::KillWorker
                | Self::KillGuard
                | Self::KillKeeper
                | Self::FreezeWorker
                | Self::FreezeGuard
                | Self::FreezeKeeper
                | Self::Drain
                | Self::Delay
                | Self::Stall
                | Self::BlackHole
                | Self::HalfOpen
                | Self::Reset
                | Self::DropAfterBytes
                | Self::CutCommits
        )
    }
}

/// One step, and the fault that begins with it, if one does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Planned {
    pub(super) at: Duration,
    pub(super) step: Step,
    pub(super) begins: Option<Kind>,
}

/// How long faults come one after the other on average, where time is not short.
const GAP: Duration = Duration::from_millis(1_400);

/// The steps of a run of this length, in their order. Every kind of fault comes equally often, once
/// at least.
pub(super) fn plan(seed: u64, length: Duration) -> Vec<Planned> {
    let mut random = StdRng::seed_from_u64(seed);
    let kinds = u32::try_from(Kind::ALL.len()).expect("there are few");
    let rounds = length.div_duration_f64(GAP * kinds).round().max(1.0);
    let gap = length.div_f64(rounds * f64::from(kinds));
    let mut planner = Planner::default();
    let mut at = Duration::ZERO;
    while at + gap * kinds / 2 < length {
        let mut deck = Kind::ALL;
        deck.shuffle(&mut random);
        for kind in deck {
            planner.deal(kind, at, &mut random);
            at += gap.mul_f64(random.random_range(0.5..1.5));
        }
    }
    let mut submit = Duration::ZERO;
    while submit < length {
        planner.step(submit, Step::Submit);
        submit += Duration::from_millis(random.random_range(300..1_500));
    }
    planner.steps.sort_by_key(|planned| planned.at);
    planner.steps
}

#[derive(Default)]
struct Planner {
    steps: Vec<Planned>,
    server_free: Duration,
    worker_free: [Duration; WORKERS],
}

#[expect(
    clippy::wildcard_enum_match_arm,
    reason = "each function deals some kinds, its last arm one"
)]
impl Planner {
    fn step(&mut self, at: Duration, step: Step) {
        self.steps.push(Planned { at, step, begins: None });
    }

    /// A fault from this step on.
    fn begin(&mut self, kind: Kind, at: Duration, step: Step) {
        self.steps.push(Planned { at, step, begins: Some(kind) });
    }

    /// Plans one fault, not before `at`, not before what it takes is free.
    fn deal(&mut self, kind: Kind, at: Duration, random: &mut StdRng) {
        if kind.is_of_server() {
            let from = at.max(self.server_free);
            self.server_free = from + self.deal_server(kind, from, random) + Duration::from_secs(1);
        } else if kind.is_of_worker() {
            let worker = random.random_range(0..WORKERS);
            let from = at.max(self.worker_free[worker]);
            let lasts = self.deal_worker(kind, worker, from, random);
            self.worker_free[worker] = from + lasts + Duration::from_millis(500);
        } else {
            self.deal_other(kind, at, random);
        }
    }

    /// How long it lasts.
    fn deal_server(&mut self, kind: Kind, at: Duration, random: &mut StdRng) -> Duration {
        let mut lasts = Duration::from_millis(random.random_range(200..3_000));
        let ends = at + lasts;
        match kind {
            Kind::CrashServer | Kind::KillServer | Kind::RestartServer => {
                let step = match kind {
                    Kind::CrashServer => Step::CrashServer(Signal::QUIT),
                    Kind::KillServer => Step::CrashServer(Signal::KILL),
                    _ => Step::StopServer,
                };
                self.begin(kind, at, step);
                self.step(ends, Step::StartServer);
            }
            Kind::CrashBackend => self.begin(kind, at, Step::CrashBackend),
            Kind::ExhaustConnections => {
                self.begin(kind, at, Step::TakeConnections);
                self.step(ends, Step::FreeConnections);
            }
            Kind::FillDisk => {
                self.begin(kind, at, Step::FillDisk);
                self.step(ends, Step::EmptyDisk);
            }
            Kind::FailOver => {
                self.step(at, Step::Replicate(Replication::Synchronous));
                lasts = Duration::from_secs(2);
                self.begin(kind, at + lasts, Step::FailOver);
                self.step(at + lasts + Duration::from_secs(1), Step::AttachStandby);
                lasts += Duration::from_secs(2);
            }
            _ => {
                self.step(at, Step::Replicate(Replication::Asynchronous));
                let second = Duration::from_secs(1);
                self.step(at + second, Step::StallLink);
                lasts = second + Duration::from_millis(random.random_range(200..1_500));
                self.begin(kind, at + lasts, Step::FailOver);
                self.step(at + lasts + second, Step::AttachStandby);
                lasts += second * 2;
            }
        }
        lasts
    }

    /// How long it lasts.
    fn deal_worker(
        &mut self,
        kind: Kind,
        worker: usize,
        at: Duration,
        random: &mut StdRng,
    ) -> Duration {
        // A keeper frozen for longer, beside a worker that is cut off, is outside the promise: there
        // is nobody left to end an execution.
        let most = if kind == Kind::FreezeKeeper { 0.6 } else { 2.0 };
        let frozen = LEASE.mul_f64(random.random_range(0.3..most));
        let short = Duration::from_millis(random.random_range(200..1_500));
        let weather_lasts = Duration::from_millis(random.random_range(300..6_000));
        let signal = |who, signal| Step::Signal(who, worker, signal);
        let weather = match kind {
            Kind::Delay => {
                Some(Weather::Delayed(Duration::from_millis(random.random_range(5..150))))
            }
            Kind::Stall => Some(Weather::Stalled),
            Kind::BlackHole => Some(Weather::BlackHole),
            Kind::HalfOpen => Some(Weather::HalfOpen(any_direction(random))),
            Kind::Reset => Some(Weather::Reset),
            Kind::DropAfterBytes => {
                Some(Weather::CutAfter(any_direction(random), random.random_range(0..4_000)))
            }
            _ => None,
        };
        if let Some(weather) = weather {
            self.begin(kind, at, Step::Weather(worker, weather));
            self.step(at + weather_lasts, Step::Weather(worker, Weather::Fair));
            return weather_lasts;
        }
        match kind {
            Kind::KillWorker | Kind::KillGuard | Kind::KillKeeper => {
                let who = match kind {
                    Kind::KillGuard => Who::Guard,
                    Kind::KillKeeper => Who::Keeper,
                    _ => Who::Worker,
                };
                self.begin(kind, at, signal(who, Signal::KILL));
                self.step(at + short, Step::Start(worker));
                short
            }
            Kind::Drain => {
                self.begin(kind, at, signal(Who::Guard, Signal::TERM));
                self.step(at + short * 2, Step::Start(worker));
                short * 2
            }
            Kind::CutCommits => {
                self.begin(kind, at, Step::CutCommits(worker));
                self.step(at + weather_lasts, Step::SpareCommits(worker));
                weather_lasts
            }
            _ => {
                let who = match kind {
                    Kind::FreezeGuard => Who::Guard,
                    Kind::FreezeKeeper => Who::Keeper,
                    _ => Who::Worker,
                };
                self.begin(kind, at, signal(who, Signal::STOP));
                self.step(at + frozen, signal(who, Signal::CONT));
                frozen
            }
        }
    }

    fn deal_other(&mut self, kind: Kind, at: Duration, random: &mut StdRng) {
        let lasts = Duration::from_millis(random.random_range(500..4_000));
        let drawn = random.random_range(0..6);
        let worker = random.random_range(0..WORKERS);
        match kind {
            Kind::CutSubmits => {
                self.begin(kind, at, Step::CutCommits(WORKERS));
                self.step(at + lasts, Step::SpareCommits(WORKERS));
            }
            Kind::JumpClock => {
                let seconds = random.random_range(-100_000..100_000);
                self.begin(kind, at, Step::JumpClock(worker, seconds));
            }
            Kind::LockBatch => {
                self.begin(kind, at, Step::LockBatch);
                self.step(at + lasts, Step::UnlockBatch);
            }
            Kind::Pause => {
                self.begin(kind, at, Step::Pause(drawn));
                self.step(at + lasts, Step::Resume);
            }
            Kind::Cancel => self.begin(kind, at, Step::Cancel(drawn)),
            _ => self.begin(kind, at, Step::Retry(drawn)),
        }
    }
}

fn any_direction(random: &mut StdRng) -> Direction {
    if random.random_bool(0.5) { Direction::ToServer } else { Direction::ToClient }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn a_seed_makes_one_plan_in_which_every_kind_comes() {
        let length = Duration::from_mins(5);

        let first = plan(7, length);

        assert_eq!(first, plan(7, length));
        assert_ne!(first, plan(8, length));
        assert!(first.is_sorted_by_key(|planned| planned.at));
        let mut counts: BTreeMap<Kind, usize> = BTreeMap::new();
        for kind in first.iter().filter_map(|planned| planned.begins) {
            *counts.entry(kind).or_default() += 1;
        }
        assert_eq!(counts.keys().copied().collect::<Vec<_>>(), Kind::ALL);
        assert!(counts.values().all(|count| *count == counts[&Kind::Retry]), "{counts:?}");
        let short = plan(7, Duration::from_secs(20));
        assert_eq!(
            short.iter().filter(|planned| planned.begins.is_some()).count(),
            Kind::ALL.len()
        );
    }

    #[test]
    fn a_frozen_worker_thaws_before_anything_else_befalls_it() {
        for seed in 0..50 {
            let mut frozen = [false; WORKERS];
            for planned in plan(seed, Duration::from_mins(2)) {
                if let Step::Signal(_, worker, signal) = planned.step {
                    assert_eq!(frozen[worker], signal == Signal::CONT, "{seed}: {planned:?}");
                    frozen[worker] = signal == Signal::STOP;
                }
            }
            assert_eq!(frozen, [false; WORKERS]);
        }
    }
}
