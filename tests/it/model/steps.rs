//! The steps of the protocol. What happens under the parent lock is one step, since nothing that
//! matters to it comes between; where a rule about the lock is left out, a hand-in is three.
//!
//! A question and its service are one step too: a question on its way for long only shortens the
//! trust that its answer brings. Answers take as long as they like, and lost statements commit when
//! they like.

use super::Protocol;
use super::faults::Fault;
use super::rules::Rule;
use super::state::{
    Answer, Broken, Claim, Entry, Grant, HandIn, Handing, Holding, ITEMS, Kind, Late, LeaseId,
    Life, Place, Renewal, Row, State, Token, Work,
};

/// Length of a lease, in ticks.
pub(super) const LEASE: u8 = 3;
/// From the signal to the end of an execution, in ticks.
pub(super) const KILL_GRACE: u8 = 1;
/// How many ticks the clock of the first worker loses in the time of a lease.
const DRIFT: u8 = 1;

/// Something that happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Action {
    Tick,

    /// Asked and granted; the answer is on its way.
    Claim(usize),
    TakeClaim(usize),
    GiveBack(usize, LeaseId),
    Complete(usize, LeaseId, usize),
    EndCheck(usize, LeaseId, usize),
    /// Asked and committed; the answer is on its way.
    HandIn(usize),
    /// The same in parts, where a rule about its lock is left out.
    BeginHandIn(usize),
    LockHandIn(usize),
    CommitHandIn(usize),
    TakeHandIn(usize),
    /// Asked and committed; the answer is on its way.
    Renew(usize),
    TakeRenewal(usize),
    /// A look without the lock, where there is no second one under it: this item's lease expired.
    SeeExpired(usize),
    Reap(LeaseId),
    EndBatch,
    GuardReleases(usize, LeaseId),
    Restart(usize),
    Thaw(usize),
    ServeLate(usize),
    DropLate(usize),

    Fault(Fault),
}

impl Protocol {
    /// How long a worker trusts a lease, in ticks of true time.
    pub(super) fn trust(&self, worker: usize) -> u8 {
        let margin = KILL_GRACE + if self.has(Rule::MarginCoversKill) { DRIFT } else { 0 };
        LEASE - margin + if worker == 0 { DRIFT } else { 0 }
    }

    pub(super) fn apply(&self, s: &mut State, action: Action) {
        match action {
            Action::Tick => self.tick(s),
            Action::Claim(w) => {
                let (id, owner, trust) = (s.new_id(), s.workers[w].start, self.trust(w));
                let grant = self.grant(s, owner, id);
                s.workers[w].claim = grant.map(|grant| Claim { id, trust, grant });
            }
            Action::TakeClaim(w) => self.take_claim(s, w),
            Action::GiveBack(w, id) => {
                s.workers[w].lost_claims.retain(|lost| *lost != id);
                if !s.db.cancelled
                    && let Some(row) = take_row(s, id)
                {
                    self.release(s, row, false);
                }
            }
            Action::Complete(w, id, position) => {
                work(s, w, id)[position] = Work::Done;
            }
            Action::EndCheck(w, id, position) => {
                work(s, w, id)[position] = Work::Checked;
            }
            Action::HandIn(w) => {
                let entries = self.ended_items(s, w);
                mark_sent(s, w, &entries);
                let answers = self.hand_in(s, &entries, s.db.cancelled);
                s.workers[w].hand_in = Some(Handing::Answered(answers));
            }
            Action::BeginHandIn(w) => {
                let entries = self.ended_items(s, w);
                mark_sent(s, w, &entries);
                let locked = self.has(Rule::LookAfterLock);
                let saw_cancelled = s.db.cancelled;
                s.workers[w].hand_in =
                    Some(Handing::Begun(HandIn { entries, locked, saw_cancelled }));
            }
            Action::LockHandIn(w) => {
                if let Some(Handing::Begun(begun)) = &mut s.workers[w].hand_in {
                    begun.locked = true;
                }
            }
            Action::CommitHandIn(w) => {
                if let Some(Handing::Begun(begun)) = s.workers[w].hand_in.take() {
                    let answers = self.hand_in(s, &begun.entries, begun.saw_cancelled);
                    s.workers[w].hand_in = Some(Handing::Answered(answers));
                }
            }
            Action::TakeHandIn(w) => take_hand_in(s, w),
            Action::Renew(w) => self.renew(s, w),
            Action::TakeRenewal(w) => self.take_renewal(s, w),
            Action::SeeExpired(position) => s.seen = Some(position),
            Action::Reap(id) => {
                s.seen = None;
                let row = take_row(s, id).expect("there");
                self.release(s, row, true);
            }
            Action::EndBatch => s.db.finished = true,
            Action::GuardReleases(w, id) => {
                let holding = s.workers[w].holding(id).expect("held");
                let fence = (holding.id, holding.token);
                holding.lost = true;
                s.workers[w].tidy();
                let row =
                    s.db.leases.iter().find(|row| self.matches(**row, fence)).map(|row| row.id);
                if !s.db.cancelled
                    && let Some(row) = row.and_then(|id| take_row(s, id))
                {
                    self.release(s, row, true);
                }
            }
            Action::Restart(w) => {
                s.starts += 1;
                let worker = &mut s.workers[w];
                worker.life = Life::Up;
                worker.start = s.starts;
                worker.holdings.iter_mut().for_each(|holding| holding.lost = true);
                worker.tidy();
            }
            Action::Thaw(w) => s.workers[w].life = Life::Up,
            Action::ServeLate(n) => match s.late.remove(n) {
                Late::Claim { owner, id } => drop(self.grant(s, owner, id)),
                Late::HandIn(entries) => drop(self.hand_in(s, &entries, s.db.cancelled)),
            },
            Action::DropLate(n) => drop(s.late.remove(n)),
            Action::Fault(fault) => self.fault(s, fault),
        }
    }

    fn tick(&self, s: &mut State) {
        let old = s.old.iter_mut().flat_map(|old| &mut old.leases);
        s.db.leases.iter_mut().chain(old).for_each(|row| row.left = row.left.saturating_sub(1));
        s.agreed = LEASE.min(s.agreed + 1);
        s.settling = s.settling.saturating_sub(1);
        for worker in &mut s.workers {
            let guarded = worker.life == Life::Up || self.has(Rule::Guard);
            if let Some(claim) = &mut worker.claim {
                claim.trust = claim.trust.saturating_sub(1);
            }
            if let Some(renewal) = &mut worker.renewal {
                renewal.trust = renewal.trust.saturating_sub(1);
            }
            for holding in &mut worker.holdings {
                holding.trust = holding.trust.saturating_sub(1);
                for item in &mut holding.items {
                    *item = match *item {
                        Work::Dying(1) if holding.lost || worker.life == Life::Dead => Work::Absent,
                        Work::Dying(1) => Work::Killed,
                        Work::Dying(left) => Work::Dying(left - 1),
                        Work::Running if holding.trust == 0 && guarded => Work::Dying(KILL_GRACE),
                        Work::Running
                        | Work::Absent
                        | Work::Killed
                        | Work::Done
                        | Work::Checking
                        | Work::Checked
                        | Work::Sent(_) => *item,
                    };
                }
            }
            worker.tidy();
        }
    }

    fn matches(&self, row: Row, (id, token): (LeaseId, Token)) -> bool {
        row.token == token && (row.id == id || !self.has(Rule::LeaseIdInFence))
    }

    /// The claim function, under the exclusive lock.
    pub(super) fn grant(&self, s: &mut State, owner: u8, id: LeaseId) -> Option<Grant> {
        if s.db.finished || s.settling > 0 {
            return None;
        }
        if self.has(Rule::EpochInToken) && s.db.known != s.db.timeline {
            raise_epoch(s);
            s.db.known = s.db.timeline;
            if self.has(Rule::ClaimsSettle) {
                s.settling = LEASE;
                return None;
            }
        }
        let kinds = [Place::Recheck, Place::Waiting, Place::Fresh];
        let places = s.db.places;
        let due = kinds.map(|kind| (0..ITEMS).filter(move |position| places[*position] == kind));
        let taken: Vec<usize> = due.into_iter().flatten().take(self.bounds.claim_size).collect();
        if taken.is_empty() {
            return None;
        }
        s.db.sequence += 1;
        let token = if self.has(Rule::EpochInToken) {
            s.db.epoch * 16 + (s.db.sequence - s.db.base)
        } else {
            s.db.sequence
        };
        s.token_fell |= token <= s.highest_token;
        s.highest_token = s.highest_token.max(token);
        let mut row = Row { id, token, owner, holds: [false; ITEMS], left: LEASE };
        let mut items = [Work::Absent; ITEMS];
        for position in taken {
            let recheck = s.db.places[position] == Place::Recheck;
            items[position] = if recheck { Work::Checking } else { Work::Running };
            row.holds[position] = true;
            s.db.places[position] = Place::Held;
        }
        s.db.leases.push(row);
        Some((token, items))
    }

    fn take_claim(&self, s: &mut State, w: usize) {
        let claim = s.workers[w].claim.take().expect("answered");
        let (token, mut items) = claim.grant;
        let trust = if self.has(Rule::TrustFromAsking) { claim.trust } else { self.trust(w) };
        for (position, item) in items.iter_mut().enumerate() {
            if *item == Work::Running {
                if trust == 0 {
                    *item = Work::Killed;
                } else if s.paid[position] {
                    s.broken = Some(Broken::PaidTwice);
                }
            }
        }
        let holding = Holding { id: claim.id, token, trust, lost: false, items };
        s.workers[w].holdings.push(holding);
    }

    /// What has ended under the leases of a worker and is not handed in.
    pub(super) fn ended_items(&self, s: &State, w: usize) -> Vec<Entry> {
        let mut entries = Vec::new();
        for holding in s.workers[w].holdings.iter().filter(|holding| !holding.lost) {
            for (position, item) in holding.items.iter().enumerate() {
                let kind = match *item {
                    Work::Done if self.bounds.checks => Kind::Stage,
                    Work::Done | Work::Checked => Kind::Publish,
                    Work::Killed => Kind::Again,
                    Work::Absent
                    | Work::Running
                    | Work::Dying(_)
                    | Work::Checking
                    | Work::Sent(_) => continue,
                };
                entries.push(Entry { lease: holding.id, token: holding.token, position, kind });
            }
        }
        entries
    }

    /// The hand-in function, under the shared lock.
    fn hand_in(
        &self,
        s: &mut State,
        entries: &[Entry],
        saw_cancelled: bool,
    ) -> Vec<(Entry, Answer)> {
        let fenced = |s: &State, entry: &Entry| {
            if saw_cancelled {
                return Answer::Cancelled;
            }
            let held = s.db.leases.iter().any(|row| {
                self.matches(*row, (entry.lease, entry.token)) && row.holds[entry.position]
            });
            if held || !self.has(Rule::LostIsRefused) { Answer::Applied } else { Answer::Lost }
        };
        let mut answers: Vec<(Entry, Answer)> =
            entries.iter().map(|entry| (*entry, fenced(s, entry))).collect();
        let some_lost = answers.iter().any(|(_, answer)| *answer == Answer::Lost);
        if some_lost && !self.has(Rule::LostIsLeftOut) {
            if answers.iter().any(|(_, answer)| *answer == Answer::Applied) {
                s.broken = Some(Broken::WorkThrownAway);
            }
            for (_, answer) in &mut answers {
                *answer = Answer::Lost;
            }
        }
        for (entry, answer) in &answers {
            if *answer == Answer::Applied {
                self.settle(s, entry);
            }
        }
        answers
    }

    /// Stores what became of one item.
    fn settle(&self, s: &mut State, entry: &Entry) {
        let position = entry.position;
        let own = |row: &&mut Row| row.id == entry.lease && row.token == entry.token;
        let own = s.db.leases.iter_mut().find(own).filter(|row| row.holds[position]);
        if own.is_none() && entry.kind != Kind::Again {
            s.broken = Some(Broken::StalePublished);
        }
        if entry.kind == Kind::Stage {
            s.db.staged[position] = true;
            s.paid[position] = true;
            return;
        }
        for row in s.db.leases.iter_mut().filter(|row| {
            row.token == entry.token && (row.id == entry.lease || !self.has(Rule::LeaseIdInFence))
        }) {
            row.holds[position] = false;
        }
        s.db.leases.retain(|row| row.holds.contains(&true));
        if entry.kind == Kind::Publish {
            publish(s, position);
        } else {
            self.requeue(s, position, true);
        }
    }

    /// Extends what this worker still holds.
    fn renew(&self, s: &mut State, w: usize) {
        let mut answers = Vec::new();
        for holding in s.workers[w].holdings.iter().filter(|holding| !holding.lost) {
            let fence = (holding.id, holding.token);
            let row = s.db.leases.iter_mut().find(|row| self.matches(**row, fence));
            let answer = match row {
                _ if s.db.cancelled => Answer::Cancelled,
                Some(row) => {
                    row.left = LEASE;
                    Answer::Applied
                }
                None => Answer::Lost,
            };
            answers.push((holding.id, answer));
        }
        s.workers[w].renewal = Some(Renewal { trust: self.trust(w), answers });
    }

    fn take_renewal(&self, s: &mut State, w: usize) {
        let renewal = s.workers[w].renewal.take().expect("answered");
        let trust = if self.has(Rule::TrustFromAsking) { renewal.trust } else { self.trust(w) };
        let explained = s.workers[w].hand_in.is_some();
        for (id, answer) in renewal.answers {
            let Some(holding) = s.workers[w].holding(id) else { continue };
            match answer {
                // An answer after the deadline extends nothing.
                Answer::Applied if holding.trust == 0 => {}
                Answer::Applied => holding.trust = holding.trust.max(trust),
                // A hand-in under way may be what took the lease away.
                Answer::Lost if explained => {}
                Answer::Lost | Answer::Cancelled => lose(holding),
            }
        }
        s.workers[w].tidy();
    }

    /// What a lease held waits again, or failed, or is checked again.
    fn release(&self, s: &mut State, row: Row, charged: bool) {
        for position in (0..ITEMS).filter(|position| row.holds[*position]) {
            self.requeue(s, position, charged);
        }
    }

    fn requeue(&self, s: &mut State, position: usize, charged: bool) {
        s.db.tries[position] += u8::from(charged);
        if s.db.tries[position] >= self.bounds.attempts {
            publish(s, position);
        } else if s.db.staged[position] && self.has(Rule::StagedIsCheckedAgain) {
            s.db.places[position] = Place::Recheck;
        } else {
            s.db.places[position] = Place::Waiting;
        }
    }
}

fn mark_sent(s: &mut State, w: usize, entries: &[Entry]) {
    for entry in entries {
        work(s, w, entry.lease)[entry.position] = Work::Sent(entry.kind);
    }
}

fn take_hand_in(s: &mut State, w: usize) {
    let Some(Handing::Answered(answers)) = s.workers[w].hand_in.take() else { return };
    for (entry, answer) in answers {
        let Some(holding) = s.workers[w].holding(entry.lease) else { continue };
        if !matches!(holding.items[entry.position], Work::Sent(_)) {
            continue;
        }
        let after = match (answer, entry.kind) {
            (Answer::Applied, Kind::Stage) => Work::Checking,
            (Answer::Applied | Answer::Lost | Answer::Cancelled, _) => Work::Absent,
        };
        holding.items[entry.position] = after;
        if answer == Answer::Cancelled {
            lose(holding);
        }
    }
    s.workers[w].tidy();
    // The look after the finish.
    if all_ended(s) {
        s.db.finished = true;
    }
}

fn publish(s: &mut State, position: usize) {
    if s.db.cancelled {
        s.broken = Some(Broken::PublishedAfterCancel);
    }
    s.db.outcomes[position] += 1;
    s.db.staged[position] = false;
    s.db.places[position] = Place::Ended;
}

pub(super) fn raise_epoch(s: &mut State) {
    s.unix_time += 1;
    s.db.epoch = s.unix_time.max(s.db.epoch + 1);
    s.db.base = s.db.sequence;
}

fn take_row(s: &mut State, id: LeaseId) -> Option<Row> {
    let place = s.db.leases.iter().position(|row| row.id == id)?;
    Some(s.db.leases.remove(place))
}

fn work(s: &mut State, w: usize, id: LeaseId) -> &mut [Work; ITEMS] {
    &mut s.workers[w].holding(id).expect("held").items
}

/// The lease is gone: what runs is killed, the rest is dropped.
fn lose(holding: &mut Holding) {
    holding.lost = true;
    for item in &mut holding.items {
        *item = match *item {
            Work::Running => Work::Dying(KILL_GRACE),
            Work::Dying(left) => Work::Dying(left),
            Work::Absent
            | Work::Killed
            | Work::Done
            | Work::Checking
            | Work::Checked
            | Work::Sent(_) => Work::Absent,
        };
    }
}

pub(super) fn all_ended(s: &State) -> bool {
    s.db.places.iter().all(|place| matches!(place, Place::Ended | Place::Outside))
}
