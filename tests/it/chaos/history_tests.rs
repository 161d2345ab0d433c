//! The checker finds every kind of fault in a history made by hand, and none in a good one.

use std::time::Duration;

use holdfast::model::{BatchId, FencingToken, ItemRef, LeaseId, Position};

use super::history::{
    BatchEnd, Event, EventKind, Fault, Final, History, Note, NoteKind, Promise, Right,
};
use super::work::Kind;

/// A history of one batch, written line by line.
struct Tale {
    history: History,
    batch: BatchId,
}

fn right(token: i64) -> Right {
    Right { lease: LeaseId::generate(), token: FencingToken::new(token) }
}

impl Tale {
    fn new(kinds: &[Kind]) -> Self {
        let batch = BatchId::generate();
        let mut history = History::default();
        history.promises.push(Promise {
            batch,
            kinds: kinds.to_vec(),
            answers: vec![batch],
            cancelled: false,
            at_risk: false,
        });
        history.batches.insert(
            batch,
            BatchEnd { finished: true, cancelled: false, cancelled_seq: None, items: kinds.len() },
        );
        Self { history, batch }
    }

    fn item(&self, position: i32) -> ItemRef {
        ItemRef::new(self.batch, Position::new(position))
    }

    fn event(&mut self, position: i32, kind: EventKind) {
        let seq = i64::try_from(self.history.events.len()).unwrap();
        let at = Duration::from_millis(seq.unsigned_abs());
        self.history.events.push(Event { item: self.item(position), kind, at, seq });
    }

    fn note(&mut self, position: i32, kind: NoteKind, right: Right) {
        let at = Duration::from_millis(self.history.notes.len().try_into().unwrap());
        let item = self.item(position);
        self.history.notes.push(Note { kind, item, right, attempt: 1, pid: 1, at });
    }

    fn granted(&mut self, right: Right) {
        self.event(0, EventKind::Granted(right));
    }

    fn ran(&mut self, right: Right) {
        self.note(0, NoteKind::Start, right);
        self.note(0, NoteKind::End, right);
    }

    fn ended(&mut self, right: Right, ending: &str, by_holder: bool) {
        self.event(0, EventKind::Ended { right, ending: ending.to_owned(), by_holder });
    }

    fn published(&mut self, right: Right) {
        self.event(0, EventKind::Published(Some(right)));
        let result = Some(format!("{} {}\n", right.lease, right.token));
        let stop_reason = "completed".to_owned();
        let item = self.item(0);
        let end = Final { succeeded: true, right: Some(right), result, stop_reason };
        self.history.outcomes.insert(item, end);
    }

    fn end(&mut self) -> &mut Final {
        let item = self.item(0);
        self.history.outcomes.get_mut(&item).unwrap()
    }

    fn stored(&mut self) -> &mut BatchEnd {
        self.history.batches.get_mut(&self.batch).unwrap()
    }

    fn faults(&self) -> Vec<Fault> {
        let mut faults: Vec<Fault> =
            self.history.violations().iter().map(|found| found.fault).collect();
        faults.sort_unstable();
        faults.dedup();
        faults
    }
}

/// One item that lost its first worker, and succeeded with the second.
fn good() -> (Tale, Right, Right) {
    let mut tale = Tale::new(&[Kind::Quick]);
    let (first, second) = (right(1), right(2));
    tale.granted(first);
    tale.note(0, NoteKind::Start, first);
    tale.ended(first, "expired", false);
    tale.granted(second);
    tale.ran(second);
    tale.published(second);
    (tale, first, second)
}

#[test]
fn a_good_history_has_no_fault() {
    let (tale, ..) = good();
    assert_eq!(tale.faults(), []);

    let mut retried = Tale::new(&[Kind::Quick]);
    let (first, second) = (right(1), right(2));
    retried.granted(first);
    retried.ran(first);
    retried.published(first);
    retried.ended(first, "retried", true);
    retried.event(0, EventKind::Withdrawn);
    retried.granted(second);
    retried.ran(second);
    retried.published(second);
    assert_eq!(retried.faults(), []);

    let mut cancelled = Tale::new(&[Kind::Quick, Kind::Quick]);
    cancelled.granted(first);
    cancelled.ran(first);
    cancelled.published(first);
    let after = i64::try_from(cancelled.history.events.len()).unwrap();
    *cancelled.stored() =
        BatchEnd { finished: true, cancelled: true, cancelled_seq: Some(after), items: 2 };
    assert_eq!(cancelled.faults(), []);
}

#[test]
fn two_outcomes_are_found() {
    let (mut tale, _, second) = good();
    tale.published(second);
    assert_eq!(tale.faults(), [Fault::PublishedTwice, Fault::Straggler]);

    let (mut tale, ..) = good();
    tale.event(0, EventKind::Changed);
    assert_eq!(tale.faults(), [Fault::OutcomeChanged]);
}

#[test]
fn stragglers_are_found() {
    let (mut tale, first, second) = good();
    // As if the first worker's outcome had been taken.
    tale.history.events.pop();
    tale.note(0, NoteKind::End, second);
    tale.published(first);
    assert!(tale.faults().contains(&Fault::Straggler), "{:?}", tale.faults());

    let (mut tale, first, second) = good();
    let published = tale.history.events.pop().unwrap();
    tale.ended(first, "error", true);
    tale.history.events.push(published);
    assert_eq!(tale.faults(), [Fault::Straggler], "of {second}");
}

#[test]
fn overlaps_are_found_by_lock_and_by_order() {
    let (mut tale, _, second) = good();
    tale.note(0, NoteKind::Overlap, second);
    assert_eq!(tale.faults(), [Fault::Overlap]);

    let (mut tale, first, _) = good();
    tale.note(0, NoteKind::End, first);
    assert_eq!(tale.faults(), [Fault::Overlap]);

    let (mut tale, first, _) = good();
    tale.note(0, NoteKind::Late, first);
    assert_eq!(tale.faults(), [Fault::Leftover]);
}

#[test]
fn executions_without_a_right_of_their_own_are_found() {
    let (mut tale, ..) = good();
    tale.note(0, NoteKind::Start, right(3));
    assert_eq!(tale.faults(), [Fault::Unfounded]);
    // Unless the server forgot what it had granted.
    tale.history.lossy = true;
    assert_eq!(tale.faults(), []);

    let (mut tale, _, second) = good();
    tale.ran(second);
    assert_eq!(tale.faults(), [Fault::Unfounded]);
}

#[test]
fn a_lossy_server_excuses_no_overlap() {
    // Of the first grant nothing is left: its execution had to be over before the second.
    let (mut tale, first, second) = good();
    tale.history.events.drain(..2);
    tale.history.lossy = true;
    assert_eq!(tale.faults(), []);
    tale.note(0, NoteKind::End, first);
    assert_eq!(tale.faults(), [Fault::Overlap], "{first} after {second}");

    let (mut tale, _, second) = good();
    tale.history.lossy = true;
    tale.note(0, NoteKind::Overlap, second);
    assert_eq!(tale.faults(), [Fault::Overlap]);
}

#[test]
fn tokens_that_do_not_rise_are_found() {
    let mut tale = Tale::new(&[Kind::Quick]);
    let (first, second) = (right(5), right(5));
    tale.granted(first);
    tale.note(0, NoteKind::Start, first);
    tale.ended(first, "expired", false);
    tale.granted(second);
    tale.ran(second);
    tale.published(second);
    assert_eq!(tale.faults(), [Fault::TokenFell]);
    assert_eq!(tale.history.violations().len(), 2, "both witnesses say so");
}

#[test]
fn what_does_not_end_is_found() {
    let (mut tale, ..) = good();
    tale.stored().finished = false;
    assert_eq!(tale.faults(), [Fault::Unfinished]);

    let tale = Tale::new(&[Kind::Quick]);
    assert_eq!(tale.faults(), [Fault::Unfinished]);
}

#[test]
fn what_comes_after_a_cancel_is_found() {
    let (mut tale, ..) = good();
    *tale.stored() = BatchEnd { finished: true, cancelled: true, cancelled_seq: Some(2), items: 1 };
    assert_eq!(tale.faults(), [Fault::AfterCancel]);
}

#[test]
fn what_was_acknowledged_and_is_gone_is_found() {
    let (mut tale, ..) = good();
    tale.history.batches.clear();
    assert_eq!(tale.faults(), [Fault::Lost]);
    tale.history.promises[0].at_risk = true;
    assert_eq!(tale.faults(), []);

    let (mut tale, ..) = good();
    tale.stored().items = 0;
    assert_eq!(tale.faults(), [Fault::Lost]);

    let (mut tale, ..) = good();
    tale.history.promises[0].answers.push(BatchId::generate());
    assert_eq!(tale.faults(), [Fault::Lost]);

    let (mut tale, ..) = good();
    tale.history.promises[0].cancelled = true;
    assert_eq!(tale.faults(), [Fault::Lost]);

    let (mut tale, ..) = good();
    tale.event(0, EventKind::Withdrawn);
    assert_eq!(tale.faults(), [Fault::Vanished]);

    let (mut tale, ..) = good();
    tale.history.outcomes.clear();
    assert_eq!(tale.faults(), [Fault::Unfinished, Fault::Vanished]);
}

#[test]
fn results_that_no_execution_came_to_are_found() {
    let (mut tale, ..) = good();
    tale.end().result = Some("of another\n".to_owned());
    assert_eq!(tale.faults(), [Fault::WrongResult]);

    let (mut tale, ..) = good();
    tale.end().succeeded = false;
    assert_eq!(tale.faults(), [Fault::WrongResult]);

    let (mut tale, ..) = good();
    tale.history.notes.pop();
    assert_eq!(tale.faults(), [Fault::WrongResult]);

    let (mut tale, ..) = good();
    tale.event(0, EventKind::Granted(right(9)));
    assert_eq!(tale.faults(), [Fault::GrantedAfterEnd]);
}

#[test]
fn the_shortest_history_comes_first() {
    let (mut tale, _, second) = good();
    tale.note(0, NoteKind::Overlap, second);
    let kinds = &mut tale.history.promises[0].kinds;
    kinds.push(Kind::Quick);
    tale.stored().items = 2;
    tale.note(1, NoteKind::Overlap, second);

    let violations = tale.history.violations();
    let explained = tale.history.explained(&violations);

    assert_eq!(explained.len(), 2);
    assert!(explained[0].lines().count() < explained[1].lines().count(), "{explained:?}");
    assert!(explained[1].contains("execution Overlap"), "{}", explained[1]);
    assert!(explained[1].contains("database Granted"), "{}", explained[1]);
}
