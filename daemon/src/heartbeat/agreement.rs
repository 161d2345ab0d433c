//! Whether the database's clock goes as the boot-time clock of this process does (F4).

use std::collections::VecDeque;
use std::time::Duration;

use time::OffsetDateTime;

use crate::clock::BootInstant;
use crate::store::ServerReading;

/// What two clocks may differ by after a while: their drift, and one step too small to matter.
const DRIFT: f64 = 0.01;
const STEP_S: f64 = 0.5;

/// The readings of about one lease, as far back as they agree.
#[derive(Debug)]
pub(super) struct Agreement {
    ttl: Duration,
    /// When the time of agreement began.
    since: Option<BootInstant>,
    /// Of one lease, the oldest first, and the last one before: what a lease that is alive was
    /// renewed by. A step is looked for within it, whatever drift has come together over days.
    readings: VecDeque<ServerReading>,
    disturbed_at: Option<OffsetDateTime>,
}

/// How two readings go together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Compared {
    Agree,
    /// The answer was so late that it may hide a step, or seem one.
    Unclear,
    Differ,
}

impl Agreement {
    pub(super) const fn new(ttl: Duration) -> Self {
        Self { ttl, since: None, readings: VecDeque::new(), disturbed_at: None }
    }

    /// When, by the database's clock, its start, its timeline or its clock itself last changed.
    pub(super) const fn disturbed_at(&self) -> Option<OffsetDateTime> {
        self.disturbed_at
    }

    /// Takes the reading of a heartbeat; a step, a restart or a failover begins the time of agreement
    /// anew.
    pub(super) fn note(&mut self, reading: ServerReading) {
        match self.compared(&reading) {
            Compared::Agree => {}
            // It says nothing. When all are late, though, one of them has to do.
            Compared::Unclear if self.is_recent(reading.answered_at) => return,
            Compared::Unclear | Compared::Differ => self.disturb(&reading),
        }
        self.since.get_or_insert(reading.asked_at);
        self.readings.push_back(reading);
        let is_old = |kept: &ServerReading| reading.asked_at.since(kept.asked_at) >= self.ttl;
        while self.readings.get(1).is_some_and(is_old) {
            self.readings.pop_front();
        }
    }

    /// Whether expiries may be judged by this reading, taken just before.
    pub(super) fn allows(&mut self, reading: &ServerReading) -> bool {
        let compared = self.compared(reading);
        if compared == Compared::Differ {
            self.disturb(reading);
        }
        compared == Compared::Agree && self.is_long_enough(reading.answered_at)
    }

    /// Whether the readings have agreed for one lease, and the last one is recent.
    pub(super) fn is_long_enough(&self, now: BootInstant) -> bool {
        self.since.is_some_and(|since| now.since(since) >= self.ttl) && self.is_recent(now)
    }

    /// Two missed beats are too many.
    fn is_recent(&self, now: BootInstant) -> bool {
        self.readings.back().is_some_and(|last| now.since(last.asked_at) <= self.ttl * 2 / 3)
    }

    fn disturb(&mut self, reading: &ServerReading) {
        self.disturbed_at = Some(reading.now);
        self.since = None;
        self.readings.clear();
    }

    fn compared(&self, reading: &ServerReading) -> Compared {
        let earlier = self.readings.iter();
        earlier.map(|then| compare(then, reading)).max().unwrap_or(Compared::Agree)
    }
}

fn compare(then: &ServerReading, now: &ServerReading) -> Compared {
    if (then.started, then.timeline) != (now.started, now.timeline) {
        return Compared::Differ;
    }
    let ours = now.asked_at.since(then.asked_at).as_secs_f64()
        - then.asked_at.since(now.asked_at).as_secs_f64();
    let ahead = (now.now - then.now).as_seconds_f64() - ours;
    let slack = DRIFT * ours.abs() + STEP_S;
    // The server read its clock at some moment between question and answer.
    let late = |reading: &ServerReading| reading.answered_at.since(reading.asked_at).as_secs_f64();
    if ahead.abs() <= slack {
        Compared::Agree
    } else if ahead - late(now) <= slack && ahead + late(then) >= -slack {
        Compared::Unclear
    } else {
        Compared::Differ
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TTL: Duration = Duration::from_mins(1);

    fn at(seconds: u64) -> BootInstant {
        BootInstant::from_nanos(seconds * 1_000_000_000)
    }

    /// Asked at `ours`, answered `late` seconds later, when the server's clock says `theirs`.
    fn reading(ours: u64, late: u64, theirs: i64) -> ServerReading {
        ServerReading {
            asked_at: at(ours),
            answered_at: at(ours + late),
            now: OffsetDateTime::UNIX_EPOCH + time::Duration::seconds(theirs),
            started: OffsetDateTime::UNIX_EPOCH,
            timeline: 1,
        }
    }

    fn agreed(readings: &[(u64, i64)]) -> Agreement {
        let mut agreement = Agreement::new(TTL);
        for (ours, theirs) in readings {
            agreement.note(reading(*ours, 0, *theirs));
        }
        agreement
    }

    fn for_a_lease() -> Agreement {
        agreed(&[(0, 100), (20, 120), (40, 140), (60, 160)])
    }

    #[test]
    fn expiries_are_judged_after_one_lease_of_agreement() {
        let mut agreement = agreed(&[(0, 100), (20, 120)]);
        assert!(!agreement.is_long_enough(at(20)));
        assert!(!agreement.allows(&reading(30, 0, 130)));

        let mut agreement = agreed(&[(0, 100), (20, 120), (40, 140)]);
        assert!(!agreement.is_long_enough(at(59)));
        assert!(agreement.is_long_enough(at(60)));
        assert!(agreement.allows(&reading(60, 0, 160)));
        assert_eq!(agreement.disturbed_at(), None);
        assert!(!agreement.is_long_enough(at(81)), "the last reading is too old");
        assert!(!agreement.allows(&reading(81, 0, 181)));
    }

    #[test]
    fn a_step_a_restart_and_a_failover_begin_it_anew() {
        let changed = [
            reading(80, 0, 183),
            reading(80, 0, 177),
            ServerReading { timeline: 2, ..reading(80, 0, 180) },
            ServerReading {
                started: OffsetDateTime::UNIX_EPOCH + time::Duration::SECOND,
                ..reading(80, 0, 180)
            },
        ];
        for last in changed {
            let mut agreement = for_a_lease();
            agreement.note(last);
            assert!(!agreement.is_long_enough(at(80)), "{last:?}");
            assert_eq!(agreement.disturbed_at(), Some(last.now), "{last:?}");

            // Before a heartbeat has seen it.
            let mut agreement = for_a_lease();
            assert!(!agreement.allows(&last), "{last:?}");
            assert!(!agreement.is_long_enough(at(80)), "{last:?}");
            assert_eq!(agreement.disturbed_at(), Some(last.now), "{last:?}");
        }
    }

    #[test]
    fn a_step_is_seen_after_days_of_agreement() {
        let mut agreement = Agreement::new(TTL);
        for beat in 0..20_000 {
            // A drift of one second in ten thousand is none.
            let mut drifted = reading(20 * beat, 0, i64::try_from(20 * beat).unwrap());
            drifted.now += Duration::from_millis(2 * beat);
            agreement.note(drifted);
        }
        assert_eq!(agreement.disturbed_at(), None);
        assert!(agreement.readings.len() <= 5, "{}", agreement.readings.len());

        assert!(agreement.allows(&reading(400_000, 0, 400_000 + 40)));
        assert!(!agreement.allows(&reading(400_000, 0, 400_000 + 40 + 5)));
    }

    #[test]
    fn small_steps_that_come_together_within_a_lease_are_one() {
        let mut agreement = for_a_lease();
        agreement.note(reading(80, 0, 180));
        let steps = [(100, 400), (120, 800), (140, 1_200)];
        for (ours, ahead) in steps {
            let theirs = i64::try_from(ours).unwrap() + 100;
            let mut stepped = reading(ours, 0, theirs);
            stepped.now += time::Duration::milliseconds(ahead);
            agreement.note(stepped);
        }
        assert!(agreement.disturbed_at().is_some());
    }

    #[test]
    fn a_late_answer_hides_no_step_and_is_none() {
        // It was slow on its way there, or on its way back: who knows.
        for theirs in [162, 170] {
            let mut agreement = for_a_lease();
            let late = reading(61, 10, theirs);
            assert!(!agreement.allows(&late));
            agreement.note(late);
            assert_eq!(agreement.disturbed_at(), None);
            assert!(agreement.allows(&reading(75, 0, 175)), "an answer in time says it");
        }
        let mut agreement = for_a_lease();
        assert!(!agreement.allows(&reading(61, 2, 170)));
        assert!(agreement.disturbed_at().is_some(), "it was not that late");

        // When all are late, the time of agreement begins anew with one of them.
        let mut agreement = for_a_lease();
        for ours in [80, 110, 140, 170, 200] {
            agreement.note(reading(ours, 3, i64::try_from(ours).unwrap() + 103));
        }
        assert!(agreement.disturbed_at().is_some());
        assert!(agreement.is_long_enough(at(200)));
    }
}
