use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::clock::{BootInstant, Clock};
use crate::model::WorkerState;
use crate::telemetry::labels::DbErrorClass;

/// How old a sign of life may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HealthLimits {
    /// Since the loop that watches trust deadlines last ticked. Older is not alive: the runtime
    /// hangs.
    pub tick: Duration,
    /// Since the heartbeat loop last asked the database, whatever it said. Older is not alive: the
    /// loop is stuck, or no longer tries to reconnect.
    pub attempt: Duration,
    /// Since the database last answered a heartbeat. Older is not ready.
    pub answer: Duration,
}

impl HealthLimits {
    /// The limits for the smallest lease of a worker's queues. Ticks come every second at least, a
    /// heartbeat every third of a lease with tries of a sixth. A hung runtime shows soon enough for
    /// three failed probes to end the process before its leases can be granted again; a heartbeat
    /// loop that alone is stuck is no danger by then, for the trust deadline ends the work.
    #[must_use]
    pub fn for_lease(lease: Duration) -> Self {
        let floor = Duration::from_secs(3);
        Self {
            tick: (lease / 20).max(floor),
            attempt: lease.max(floor),
            answer: (lease / 2).max(floor),
        }
    }
}

/// One check that fails, and how.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Failing {
    /// Which check: `runtime`, `heartbeat`, `database`, `schema` or `state`.
    pub check: &'static str,
    /// What is wrong; never a text of the database or of a job.
    pub detail: String,
}

/// What the loops of a process report about themselves.
pub struct HealthState {
    clock: Arc<dyn Clock>,
    limits: HealthLimits,
    reports: Mutex<Reports>,
}

struct Reports {
    state: WorkerState,
    /// None until it was compared.
    schema_in_range: Option<bool>,
    ticked: BootInstant,
    asked: BootInstant,
    answered: Option<BootInstant>,
    /// How the last question failed; none when it was answered.
    error: Option<DbErrorClass>,
}

impl HealthState {
    /// A process that is starting now.
    #[must_use]
    pub fn new(clock: Arc<dyn Clock>, limits: HealthLimits) -> Self {
        let now = clock.now();
        Self {
            clock,
            limits,
            reports: Mutex::new(Reports {
                state: WorkerState::Starting,
                schema_in_range: None,
                ticked: now,
                asked: now,
                answered: None,
                error: None,
            }),
        }
    }

    /// The loop that watches trust deadlines went round: at least once a second.
    pub fn tick(&self) {
        let now = self.clock.now();
        self.reports().ticked = now;
    }

    /// The database answered the heartbeat loop.
    pub fn database_ok(&self) {
        let now = self.clock.now();
        let mut reports = self.reports();
        reports.asked = now;
        reports.answered = Some(now);
        reports.error = None;
    }

    /// The heartbeat loop asked the database and got no useful answer.
    pub fn database_failed(&self, class: DbErrorClass) {
        let now = self.clock.now();
        let mut reports = self.reports();
        reports.asked = now;
        reports.error = Some(class);
    }

    /// The schema was compared with what this program works with.
    pub fn schema_checked(&self, in_range: bool) {
        self.reports().schema_in_range = Some(in_range);
    }

    /// The process is in another state now.
    pub fn set_state(&self, state: WorkerState) {
        self.reports().state = state;
    }

    /// The same, but only from another one; whether it was in that.
    #[must_use]
    pub fn change_state(&self, from: WorkerState, to: WorkerState) -> bool {
        let mut reports = self.reports();
        let changes = reports.state == from;
        if changes {
            reports.state = to;
        }
        changes
    }

    /// The state the process is in.
    #[must_use]
    pub fn state(&self) -> WorkerState {
        self.reports().state
    }

    /// Whether the database answered when last asked.
    #[must_use]
    pub fn database_up(&self) -> bool {
        let reports = self.reports();
        reports.answered.is_some() && reports.error.is_none()
    }

    /// Why the process should be restarted; empty when it should not.
    #[must_use]
    pub fn not_alive(&self) -> Vec<Failing> {
        let now = self.clock.now();
        let reports = self.reports();
        let silence = now.since(reports.asked);
        let stuck = (silence > self.limits.attempt).then(|| Failing {
            check: "heartbeat",
            detail: format!("database not asked for {}", seconds(silence)),
        });
        stalled(&reports, now, self.limits.tick).into_iter().chain(stuck).collect()
    }

    /// Why the process claims nothing; empty when it does.
    #[must_use]
    pub fn not_ready(&self) -> Vec<Failing> {
        let now = self.clock.now();
        let reports = self.reports();
        let failing = [
            (reports.state != WorkerState::Running)
                .then(|| ("state", reports.state.as_str().to_owned())),
            unanswered(&reports, now, self.limits.answer).map(|detail| ("database", detail)),
            match reports.schema_in_range {
                Some(true) => None,
                Some(false) => Some(("schema", "not a version this program works with".to_owned())),
                None => Some(("schema", "not compared yet".to_owned())),
            },
        ];
        failing
            .into_iter()
            .flatten()
            .map(|(check, detail)| Failing { check, detail })
            .chain(stalled(&reports, now, self.limits.tick))
            .collect()
    }

    /// Why the process has not started yet; empty once it has.
    #[must_use]
    pub fn not_started(&self) -> Vec<Failing> {
        let state = self.state();
        let starting = (state == WorkerState::Starting)
            .then(|| Failing { check: "state", detail: state.as_str().to_owned() });
        starting.into_iter().collect()
    }

    fn reports(&self) -> MutexGuard<'_, Reports> {
        self.reports.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn stalled(reports: &Reports, now: BootInstant, limit: Duration) -> Option<Failing> {
    let silence = now.since(reports.ticked);
    (silence > limit)
        .then(|| Failing { check: "runtime", detail: format!("no tick for {}", seconds(silence)) })
}

fn unanswered(reports: &Reports, now: BootInstant, limit: Duration) -> Option<String> {
    let what = match reports.answered {
        Some(at) if now.since(at) <= limit => return None,
        Some(at) => format!("no answer for {}", seconds(now.since(at))),
        None => "no answer yet".to_owned(),
    };
    Some(match reports.error {
        Some(class) => format!("{what}: {}", class.as_str()),
        None => what,
    })
}

fn seconds(time: Duration) -> String {
    format!("{:.1} s", time.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use time::OffsetDateTime;

    use super::*;

    #[derive(Default)]
    struct HandClock(AtomicU64);

    impl HandClock {
        fn advance(&self, by: Duration) {
            self.0.fetch_add(u64::try_from(by.as_nanos()).unwrap(), Ordering::Relaxed);
        }
    }

    impl Clock for HandClock {
        fn now(&self) -> BootInstant {
            BootInstant::from_nanos(self.0.load(Ordering::Relaxed))
        }

        fn wall(&self) -> OffsetDateTime {
            OffsetDateTime::UNIX_EPOCH
        }
    }

    const LIMITS: HealthLimits = HealthLimits {
        tick: Duration::from_secs(3),
        attempt: Duration::from_mins(1),
        answer: Duration::from_secs(30),
    };

    fn running() -> (Arc<HandClock>, HealthState) {
        let clock = Arc::new(HandClock::default());
        let health = HealthState::new(clock.clone(), LIMITS);
        health.database_ok();
        health.schema_checked(true);
        health.set_state(WorkerState::Running);
        (clock, health)
    }

    fn checks(failing: Vec<Failing>) -> Vec<&'static str> {
        failing.into_iter().map(|failing| failing.check).collect()
    }

    #[test]
    fn a_starting_process_is_alive_but_neither_started_nor_ready() {
        let health = HealthState::new(Arc::new(HandClock::default()), LIMITS);

        assert_eq!(checks(health.not_alive()), Vec::<&str>::new());
        assert_eq!(checks(health.not_started()), ["state"]);
        assert_eq!(checks(health.not_ready()), ["state", "database", "schema"]);
    }

    #[test]
    fn a_running_process_is_all_three() {
        let (_, health) = running();

        for failing in [health.not_alive(), health.not_started(), health.not_ready()] {
            assert_eq!(failing, []);
        }
    }

    #[test]
    fn a_runtime_that_hangs_is_not_alive_until_it_ticks_again() {
        let (clock, health) = running();

        clock.advance(LIMITS.tick);
        assert_eq!(health.not_alive(), [], "at the limit");
        clock.advance(Duration::from_millis(100));
        assert_eq!(
            health.not_alive(),
            [Failing { check: "runtime", detail: "no tick for 3.1 s".to_owned() }]
        );
        assert_eq!(checks(health.not_ready()), ["runtime"]);
        health.tick();
        assert_eq!(health.not_alive(), []);
    }

    #[test]
    fn a_database_that_is_away_makes_unready_never_dead() {
        let (clock, health) = running();

        for _ in 0..600 {
            clock.advance(Duration::from_secs(1));
            health.tick();
            health.database_failed(DbErrorClass::Connection);
        }

        assert_eq!(health.not_alive(), []);
        assert!(!health.database_up());
        assert_eq!(
            health.not_ready(),
            [Failing { check: "database", detail: "no answer for 600.0 s: connection".to_owned() }]
        );
        health.database_ok();
        assert_eq!(health.not_ready(), []);
        assert!(health.database_up());
    }

    #[test]
    fn a_heartbeat_loop_that_no_longer_asks_is_not_alive() {
        let (clock, health) = running();

        clock.advance(LIMITS.attempt + Duration::from_secs(1));
        health.tick();

        assert_eq!(checks(health.not_alive()), ["heartbeat"]);
        health.database_failed(DbErrorClass::Connection);
        assert_eq!(health.not_alive(), []);
    }

    #[test]
    fn a_heartbeat_loop_at_its_slowest_stays_alive_and_ready() {
        let clock = Arc::new(HandClock::default());
        for lease in [5, 30, 60, 3600].map(Duration::from_secs) {
            let health = HealthState::new(clock.clone(), HealthLimits::for_lease(lease));
            health.database_ok();
            health.schema_checked(true);
            health.set_state(WorkerState::Running);

            clock.advance(lease / 3 + lease / 6);
            health.tick();

            assert_eq!(health.not_alive(), [], "{lease:?}");
            assert_eq!(health.not_ready(), [], "{lease:?}");
        }
    }

    #[test]
    fn only_running_is_ready_and_every_state_but_starting_has_started() {
        let (_, health) = running();

        for state in WorkerState::ALL {
            health.set_state(state);
            assert_eq!(health.not_ready().is_empty(), state == WorkerState::Running, "{state:?}");
            assert_eq!(
                health.not_started().is_empty(),
                state != WorkerState::Starting,
                "{state:?}"
            );
        }
    }

    #[test]
    fn a_foreign_schema_is_not_ready() {
        let (_, health) = running();

        health.schema_checked(false);

        assert_eq!(checks(health.not_ready()), ["schema"]);
    }

    #[test]
    fn a_hung_runtime_is_ended_before_its_leases_can_be_granted_again() {
        for (lease, probes) in [(30, 4 * 3 + 1), (60, 8 * 3 + 3), (120, 8 * 3 + 3)] {
            let lease = Duration::from_secs(lease);
            let limits = HealthLimits::for_lease(lease);
            let noticed = limits.tick + Duration::from_secs(probes);
            assert!(noticed < lease * 2 / 3, "{lease:?}: {noticed:?}");
        }
    }
}
