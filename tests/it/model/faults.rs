//! What goes wrong.

use super::Protocol;
use super::rules::Rule;
use super::state::{Late, Life, State, Work};
use super::steps::{KILL_GRACE, LEASE, raise_epoch};

/// Something that goes wrong, or that an operator does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Fault {
    /// A claim without an answer: it commits at some time, or never.
    LoseClaim(usize),
    /// A hand-in without an answer, likewise.
    LoseHandIn(usize),
    LoseRenewal(usize),
    Freeze(usize),
    Crash(usize),
    StepClock,
    CopyDatabase,
    FailOver,
    Restore,
    Cancel,
}

impl Protocol {
    pub(super) fn fault(&self, s: &mut State, fault: Fault) {
        match fault {
            Fault::LoseClaim(w) => {
                s.faults.lost_answers -= 1;
                let (id, owner) = (s.new_id(), s.workers[w].start);
                if let Some(claim) = &s.workers[w].claim {
                    // Without F6 the answer is awaited all the same.
                    let id = claim.id;
                    s.workers[w].lost_claims.push(id);
                } else {
                    s.workers[w].lost_claims.push(id);
                    s.late.push(Late::Claim { owner, id });
                }
            }
            Fault::LoseHandIn(w) => {
                s.faults.lost_answers -= 1;
                let entries = self.ended_items(s, w);
                s.late.push(Late::HandIn(entries));
            }
            Fault::LoseRenewal(w) => {
                s.faults.lost_answers -= 1;
                s.workers[w].renewal = None;
            }
            Fault::Freeze(w) => {
                s.faults.freezes -= 1;
                s.workers[w].life = Life::Frozen;
            }
            Fault::Crash(w) => {
                s.faults.crashes -= 1;
                self.crash(s, w);
            }
            Fault::StepClock => {
                s.faults.clock_steps -= 1;
                s.agreed = 0;
                s.db.leases.iter_mut().for_each(|row| row.left = 0);
            }
            Fault::CopyDatabase => {
                s.old = Some(Box::new(s.db.clone()));
            }
            Fault::FailOver => {
                s.faults.failovers -= 1;
                bring_back_old(s);
                s.db.timeline += 1;
            }
            Fault::Restore => {
                s.faults.restores -= 1;
                bring_back_old(s);
                if self.has(Rule::EpochRaisedAfterRestore) {
                    raise_epoch(s);
                    s.settling = if self.has(Rule::ClaimsSettle) { LEASE } else { 0 };
                }
            }
            Fault::Cancel => {
                s.faults.cancels -= 1;
                s.db.cancelled = true;
                s.db.finished = true;
            }
        }
    }

    /// The process is gone; its guard ends its children.
    fn crash(&self, s: &mut State, w: usize) {
        let guarded = self.has(Rule::Guard);
        let worker = &mut s.workers[w];
        worker.life = Life::Dead;
        worker.claim = None;
        worker.hand_in = None;
        worker.renewal = None;
        worker.lost_claims.clear();
        for item in worker.holdings.iter_mut().flat_map(|holding| &mut holding.items) {
            *item = match *item {
                Work::Running if guarded => Work::Dying(KILL_GRACE),
                Work::Running => Work::Running,
                Work::Dying(left) => Work::Dying(left),
                Work::Absent
                | Work::Killed
                | Work::Done
                | Work::Checking
                | Work::Checked
                | Work::Sent(_) => Work::Absent,
            };
        }
        worker.tidy();
    }
}

/// Another server, or another disk, that lacks the last commits. Statements on their way are gone
/// with their connections.
fn bring_back_old(s: &mut State) {
    s.db = *s.old.take().expect("copied");
    s.late.clear();
    s.agreed = 0;
    s.seen = None;
}
