//! The history of a run, and what in it breaks a promise.
//!
//! Three witnesses: what the executions noted in a file as they ran, what triggers in the database
//! logged in its order, and what is stored at the end. None of them is the code under test.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fmt;
use std::time::Duration;

use holdfast::model::{BatchId, FencingToken, ItemRef, LeaseId};

use super::work::Kind;

/// Under which an execution runs and publishes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Right {
    pub(super) lease: LeaseId,
    pub(super) token: FencingToken,
}

impl fmt::Display for Right {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "lease {} token {}", self.lease, self.token)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NoteKind {
    /// Before anything else.
    Start,
    /// Something of another execution of this item still holds the item's lock.
    Overlap,
    /// Its own end, with the result printed.
    End,
    /// A child that nobody ended.
    Late,
}

/// What an execution noted. The order of notes is that of the file.
#[derive(Clone, Debug)]
pub(super) struct Note {
    pub(super) kind: NoteKind,
    pub(super) item: ItemRef,
    pub(super) right: Right,
    pub(super) attempt: i32,
    pub(super) pid: i32,
    /// Since boot, to a hundredth of a second.
    pub(super) at: Duration,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum EventKind {
    /// A lease that holds the item.
    Granted(Right),
    /// An outcome; by no lease when a sweep wrote it.
    Published(Option<Right>),
    /// The outcome is there no more.
    Withdrawn,
    /// The outcome is another one.
    Changed,
    /// An attempt that ended without an outcome: how, and whether its holder said so.
    Ended { right: Right, ending: String, by_holder: bool },
}

/// What the database did to an item, in the order in which it did.
#[derive(Clone, Debug)]
pub(super) struct Event {
    pub(super) item: ItemRef,
    pub(super) kind: EventKind,
    /// Since boot, about.
    pub(super) at: Duration,
    /// Where it comes among the events of its batch.
    pub(super) seq: i64,
}

/// An outcome at the end of the run.
#[derive(Clone, Debug)]
pub(super) struct Final {
    pub(super) succeeded: bool,
    pub(super) right: Option<Right>,
    pub(super) result: Option<String>,
    pub(super) stop_reason: String,
}

/// A batch at the end of the run.
#[derive(Clone, Debug)]
pub(super) struct BatchEnd {
    pub(super) finished: bool,
    pub(super) cancelled: bool,
    /// Where its cancel comes among the events of the batch.
    pub(super) cancelled_seq: Option<i64>,
    /// How many items are stored.
    pub(super) items: usize,
}

/// What somebody was told and may rely on.
#[derive(Clone, Debug)]
pub(super) struct Promise {
    pub(super) batch: BatchId,
    /// What its items do, by position.
    pub(super) kinds: Vec<Kind>,
    /// Ids that racing submits under the same key were answered.
    pub(super) answers: Vec<BatchId>,
    /// A cancel was acknowledged.
    pub(super) cancelled: bool,
    /// Acknowledged by a server that then lost the end of its log: nothing is promised of it.
    pub(super) at_risk: bool,
}

#[derive(Debug, Default)]
pub(super) struct History {
    pub(super) promises: Vec<Promise>,
    pub(super) notes: Vec<Note>,
    pub(super) events: Vec<Event>,
    pub(super) outcomes: HashMap<ItemRef, Final>,
    pub(super) batches: HashMap<BatchId, BatchEnd>,
    /// A server lost the end of its log: executions may be of grants that never happened.
    pub(super) lossy: bool,
}

/// What is broken. In the order of the promises.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Fault {
    /// P1: a second outcome, or another one, without a retry between them.
    PublishedTwice,
    /// P1: an outcome that changed.
    OutcomeChanged,
    /// P2: an outcome or the end of an attempt by someone who no longer held the item.
    Straggler,
    /// P3: two executions of one item at once.
    Overlap,
    /// P3: an execution under a right that was never granted, or a second one under the same right.
    Unfounded,
    /// P3: a process that outlived its execution.
    Leftover,
    /// P4: an item or a batch without an end.
    Unfinished,
    /// P5: something published after the cancel.
    AfterCancel,
    /// P8: something acknowledged that is not there.
    Lost,
    /// P8: an outcome that is gone without a retry.
    Vanished,
    /// F2: a token that did not rise.
    TokenFell,
    /// A result that its execution did not print, or an outcome that its execution did not come to.
    WrongResult,
    /// A grant of an item that has its outcome.
    GrantedAfterEnd,
}

#[derive(Clone, Debug)]
pub(super) struct Violation {
    pub(super) fault: Fault,
    pub(super) item: Option<ItemRef>,
    pub(super) text: String,
}

impl History {
    /// Everything that breaks a promise.
    pub(super) fn violations(&self) -> Vec<Violation> {
        let mut found = Found::default();
        let notes = group(&self.notes, |note| note.item);
        let events = group(&self.events, |event| event.item);
        for (item, notes) in &notes {
            let events = events.get(item).map_or(&[][..], Vec::as_slice);
            self.check_executions(*item, notes, events, &mut found);
        }
        for (item, events) in &events {
            self.check_events(*item, events, &mut found);
        }
        for promise in &self.promises {
            self.check_promise(promise, &notes, &mut found);
        }
        found.0
    }

    /// How many attempts were taken back from workers that lost them.
    pub(super) fn recoveries(&self) -> usize {
        let lost = self.events.iter().filter(|event| {
            matches!(&event.kind, EventKind::Ended { by_holder: false, ending, .. }
                if ending != "retried")
        });
        lost.count()
    }

    /// The items with something wrong, each with all that happened to it; the shortest first.
    pub(super) fn explained(&self, violations: &[Violation]) -> Vec<String> {
        let items: BTreeSet<ItemRef> = violations.iter().filter_map(|found| found.item).collect();
        let mut histories: Vec<Vec<String>> = items
            .into_iter()
            .map(|item| {
                let of_item = violations.iter().filter(|found| found.item == Some(item));
                let mut lines: Vec<String> =
                    of_item.map(|found| format!("{:?}: {}", found.fault, found.text)).collect();
                lines.extend(self.lines_of(item));
                lines
            })
            .collect();
        histories.sort_by_key(Vec::len);
        histories.into_iter().map(|lines| lines.join("\n")).collect()
    }

    fn lines_of(&self, item: ItemRef) -> Vec<String> {
        let notes = self.notes.iter().filter(|note| note.item == item).map(|note| {
            let Note { kind, right, attempt, pid, at, .. } = note;
            (*at, format!("execution {kind:?}, attempt {attempt}, pid {pid}, {right}"))
        });
        let events = self.events.iter().filter(|event| event.item == item);
        let events = events.map(|event| (event.at, format!("database {:?}", event.kind)));
        let mut lines: Vec<(Duration, String)> = notes.chain(events).collect();
        lines.sort_by_key(|(at, _)| *at);
        let first = lines.first().map_or(Duration::ZERO, |(at, _)| *at);
        let told = lines.into_iter().map(|(at, what)| {
            format!("  {item} {:8.2} s  {what}", at.saturating_sub(first).as_secs_f64())
        });
        told.collect()
    }

    fn check_executions(
        &self,
        item: ItemRef,
        notes: &[&Note],
        events: &[&Event],
        found: &mut Found,
    ) {
        let granted: HashSet<Right> = events
            .iter()
            .filter_map(|event| match &event.kind {
                EventKind::Granted(right) => Some(*right),
                EventKind::Published(_)
                | EventKind::Withdrawn
                | EventKind::Changed
                | EventKind::Ended { .. } => None,
            })
            .collect();
        let mut last: Option<Right> = None;
        let mut open: Vec<Right> = Vec::new();
        for note in notes {
            let right = note.right;
            match note.kind {
                NoteKind::Start => {
                    if !granted.contains(&right) && !self.lossy {
                        found.add(Fault::Unfounded, item, format!("runs under {right}"));
                    }
                    if open.contains(&right) || last == Some(right) {
                        found.add(Fault::Unfounded, item, format!("runs again under {right}"));
                    } else if last.is_some_and(|last| last.token >= right.token) {
                        found.add(Fault::TokenFell, item, format!("begins under {right}"));
                    }
                    last = Some(right);
                    open.push(right);
                }
                NoteKind::Overlap => {
                    found.add(Fault::Overlap, item, format!("{right} beside what was there"));
                }
                NoteKind::End => {
                    if last != Some(right) {
                        found.add(Fault::Overlap, item, format!("{right} outlived its successor"));
                    }
                    open.retain(|other| *other != right);
                }
                NoteKind::Late => found.add(Fault::Leftover, item, format!("a child of {right}")),
            }
        }
    }

    fn check_events(&self, item: ItemRef, events: &[&Event], found: &mut Found) {
        let cancelled = self.batches.get(&item.batch()).and_then(|batch| batch.cancelled_seq);
        let retried: HashSet<Right> = events
            .iter()
            .filter_map(|event| match &event.kind {
                EventKind::Ended { right, ending, .. } if ending == "retried" => Some(*right),
                EventKind::Ended { .. }
                | EventKind::Granted(_)
                | EventKind::Published(_)
                | EventKind::Withdrawn
                | EventKind::Changed => None,
            })
            .collect();
        let mut holder: Option<Right> = None;
        let mut last: Option<FencingToken> = None;
        let mut published: Option<Option<Right>> = None;
        for event in events {
            match &event.kind {
                EventKind::Granted(right) => {
                    if last.is_some_and(|last| last >= right.token) {
                        found.add(Fault::TokenFell, item, format!("granted {right}"));
                    }
                    if published.is_some() {
                        found.add(Fault::GrantedAfterEnd, item, format!("granted {right}"));
                    }
                    last = Some(right.token);
                    holder = Some(*right);
                }
                EventKind::Published(by) => {
                    if published.is_some() {
                        found.add(Fault::PublishedTwice, item, "without a retry".to_owned());
                    }
                    if cancelled.is_some_and(|cancelled| event.seq > cancelled) {
                        found.add(Fault::AfterCancel, item, "published".to_owned());
                    }
                    if let Some(right) = by.filter(|right| holder != Some(*right)) {
                        found.add(Fault::Straggler, item, format!("published by {right}"));
                    }
                    published = Some(*by);
                    holder = None;
                }
                EventKind::Withdrawn => {
                    let by = published.take().flatten();
                    if by.is_some_and(|right| !retried.contains(&right)) {
                        found.add(Fault::Vanished, item, "no retry took it away".to_owned());
                    }
                }
                EventKind::Changed => found.add(Fault::OutcomeChanged, item, String::new()),
                EventKind::Ended { ending, .. } if ending == "retried" => {}
                EventKind::Ended { right, ending, by_holder } => {
                    if *by_holder && holder != Some(*right) {
                        found.add(Fault::Straggler, item, format!("{ending} by {right}"));
                    }
                    if holder == Some(*right) {
                        holder = None;
                    }
                }
            }
        }
        let end = self.outcomes.get(&item).map(|end| end.right);
        if end != published {
            let text = format!("published {published:?}, stored {end:?}");
            found.add(Fault::Vanished, item, text);
        }
    }

    fn check_promise(
        &self,
        promise: &Promise,
        notes: &BTreeMap<ItemRef, Vec<&Note>>,
        found: &mut Found,
    ) {
        let id = promise.batch;
        if promise.answers.iter().any(|answer| *answer != id) && !promise.at_risk {
            let text = format!("one submission key, several batches: {:?}", promise.answers);
            found.of_batch(Fault::Lost, text);
        }
        let Some(batch) = self.batches.get(&id) else {
            if !promise.at_risk {
                found.of_batch(Fault::Lost, format!("batch {id} was acknowledged"));
            }
            return;
        };
        if batch.items != promise.kinds.len() {
            let (stored, sent) = (batch.items, promise.kinds.len());
            found.of_batch(Fault::Lost, format!("batch {id} has {stored} of {sent} items"));
        }
        if promise.cancelled && !batch.cancelled && !promise.at_risk {
            found.of_batch(Fault::Lost, format!("batch {id} was cancelled"));
        }
        if !batch.finished {
            found.of_batch(Fault::Unfinished, format!("batch {id}"));
        }
        for (position, kind) in (0..).zip(&promise.kinds) {
            let item = ItemRef::new(id, holdfast::model::Position::new(position));
            match self.outcomes.get(&item) {
                None if batch.cancelled => {}
                None => found.add(Fault::Unfinished, item, "no outcome".to_owned()),
                Some(end) => {
                    let notes = notes.get(&item).map_or(&[][..], Vec::as_slice);
                    check_result(item, *kind, end, notes, found);
                }
            }
        }
    }
}

/// An outcome is what its execution came to: its kind says how it ends, its notes that it did, and
/// its result names the right under which it printed it.
fn check_result(item: ItemRef, kind: Kind, end: &Final, notes: &[&Note], found: &mut Found) {
    let wrong = |text: String| (Fault::WrongResult, item, text);
    let mut add = |(fault, item, text)| found.add(fault, item, text);
    let Some(right) = end.right else {
        // The budget of attempts is larger than any run's faults.
        add(wrong(format!("given up: {}", end.stop_reason)));
        return;
    };
    if !notes.iter().any(|note| note.kind == NoteKind::End && note.right == right) {
        add(wrong(format!("{right} never came to its end")));
    }
    let expected = kind.succeeds();
    if end.succeeded != expected {
        add(wrong(format!("{kind:?} ended with {}", end.stop_reason)));
    }
    let printed = format!("{} {}\n", right.lease, right.token);
    if end.result.as_deref() != Some(&printed) && (expected || end.result.is_some()) {
        add(wrong(format!("{right} printed {:?}", end.result)));
    }
}

/// Violations as they are found.
#[derive(Default)]
struct Found(Vec<Violation>);

impl Found {
    fn add(&mut self, fault: Fault, item: ItemRef, text: String) {
        self.0.push(Violation { fault, item: Some(item), text });
    }

    fn of_batch(&mut self, fault: Fault, text: String) {
        self.0.push(Violation { fault, item: None, text });
    }
}

fn group<T>(all: &[T], item: impl Fn(&T) -> ItemRef) -> BTreeMap<ItemRef, Vec<&T>> {
    let mut groups: BTreeMap<ItemRef, Vec<&T>> = BTreeMap::new();
    for one in all {
        groups.entry(item(one)).or_default().push(one);
    }
    groups
}
