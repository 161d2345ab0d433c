//! What waits for its hand-in: the end of an execution, a result to be checked, the end of a check.

use tokio::sync::oneshot;
use tracing::Span;

use crate::capacity::Slot;
use crate::model::{
    AttemptEnding, Conclusion, Disposition, Evidence, Hold, LogTail, PublishedResult, QueueName,
    Settlement, StopReason, VerdictClass,
};
use crate::store::FlightError;
use crate::telemetry::labels::FenceOp;
use crate::telemetry::trace::{self, Settle};

/// One item that came to an end, with what is freed when that is stored.
pub struct Finished {
    /// The right to hand it in.
    pub hold: Hold,
    /// What becomes of it.
    pub settlement: Settlement,
    /// Its queue.
    pub queue: QueueName,
    /// Its slot, in use until the hand-in is answered; none when it never began.
    pub slot: Option<Slot>,
    /// Its lease's span, open until then.
    pub span: Span,
    /// Whether it was stopped because its lease was no longer trusted (F5).
    pub fenced: bool,
}

/// One item that succeeded, to be stored before its check.
pub struct Staged {
    /// The same as for an item that needs none.
    pub finished: Finished,
    /// What was recorded of its commands, oldest first.
    pub evidence: Vec<Evidence>,
    /// The workspace it had, if any: its id as text.
    pub workspace: Option<String>,
}

/// One item whose check is over.
pub struct Concluded {
    /// The right to hand it in.
    pub hold: Hold,
    /// What becomes of it.
    pub conclusion: Conclusion,
    /// Its queue.
    pub queue: QueueName,
    /// Its lease's span.
    pub span: Span,
}

/// The transaction by which something is handed in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Step {
    Finish,
    Stage,
    Conclude,
}

pub(super) enum Ending {
    Finish(Settlement),
    Stage {
        settlement: Settlement,
        evidence: Vec<Evidence>,
        workspace: Option<String>,
        /// Gets the right back when it is stored.
        done: oneshot::Sender<Hold>,
    },
    Conclude(Conclusion),
}

impl Ending {
    /// What it does with its item, and why, for its span.
    fn settles(&self) -> (Settle, &'static str) {
        match self {
            Self::Finish(settlement) => {
                let verb = match &settlement.disposition {
                    Disposition::Succeed => Settle::Complete,
                    Disposition::Fail => Settle::Fail,
                    Disposition::Again { ending, .. } => match ending {
                        AttemptEnding::Interrupted | AttemptEnding::Unstarted => Settle::Release,
                        AttemptEnding::Error
                        | AttemptEnding::TimedOut
                        | AttemptEnding::Signal
                        | AttemptEnding::Expired
                        | AttemptEnding::NotAdmitted
                        | AttemptEnding::Retried => Settle::Fail,
                    },
                };
                (verb, settlement.stop_reason.as_str())
            }
            Self::Stage { settlement, .. } => (Settle::Complete, settlement.stop_reason.as_str()),
            Self::Conclude(Conclusion::Publish(Some(verdict))) => {
                (Settle::Verdict, verdict.class().as_str())
            }
            Self::Conclude(Conclusion::Publish(None)) => {
                (Settle::Verdict, VerdictClass::None.as_str())
            }
            Self::Conclude(Conclusion::Recheck(_)) => (Settle::Release, "unchecked"),
        }
    }
}

pub(super) struct Pending {
    pub(super) hold: Hold,
    pub(super) ending: Ending,
    pub(super) queue: QueueName,
    pub(super) slot: Option<Slot>,
    /// Its lease's span.
    pub(super) span: Span,
    pub(super) fenced: bool,
    /// That of this hand-in.
    pub(super) settle: Span,
}

impl Pending {
    fn new(hold: Hold, ending: Ending, queue: QueueName, slot: Option<Slot>, span: Span) -> Self {
        let (verb, reason) = ending.settles();
        let settle = trace::settle_span(&span, &queue, verb, reason);
        Self { hold, ending, queue, slot, span, fenced: false, settle }
    }
}

impl From<Finished> for Pending {
    fn from(finished: Finished) -> Self {
        let Finished { hold, settlement, queue, slot, span, fenced } = finished;
        let ending = Ending::Finish(settlement);
        Self { fenced, ..Self::new(hold, ending, queue, slot, span) }
    }
}

impl From<Concluded> for Pending {
    fn from(concluded: Concluded) -> Self {
        let Concluded { hold, conclusion, queue, span } = concluded;
        Self::new(hold, Ending::Conclude(conclusion), queue, None, span)
    }
}

impl Staged {
    pub(super) fn pending(self, done: oneshot::Sender<Hold>) -> Pending {
        let Self { finished, evidence, workspace } = self;
        // What succeeded was not stopped.
        let Finished { hold, settlement, queue, slot, span, fenced: _ } = finished;
        Pending::new(
            hold,
            Ending::Stage { settlement, evidence, workspace, done },
            queue,
            slot,
            span,
        )
    }
}

/// The stop reason of an item whose outcome the database refused to store.
const UNSTORABLE: StopReason = StopReason::Unstorable;

impl Pending {
    pub(super) const fn step(&self) -> Step {
        match self.ending {
            Ending::Finish(_) => Step::Finish,
            Ending::Stage { .. } => Step::Stage,
            Ending::Conclude(_) => Step::Conclude,
        }
    }

    /// How much of it goes over the wire, about.
    pub(super) fn bytes(&self) -> usize {
        let of = |settlement: &Settlement| {
            let result = settlement.result.json.as_ref().map_or(0, String::len);
            result + settlement.error.as_ref().map_or(0, String::len)
        };
        match &self.ending {
            Ending::Finish(settlement) => of(settlement),
            Ending::Stage { settlement, evidence, .. } => {
                let records = evidence.iter().map(|e| 500 + e.command.len() + e.output_tail.len());
                of(settlement) + records.sum::<usize>()
            }
            Ending::Conclude(Conclusion::Publish(Some(verdict))) => verdict.leaves().len() * 800,
            Ending::Conclude(_) => 0,
        }
    }

    /// Leaves out what the database refused to store; false when nothing of it is left to try.
    pub(super) fn reduce(&mut self, refused: &FlightError) -> bool {
        let less = match &mut self.ending {
            Ending::Finish(settlement) if settlement.stop_reason == UNSTORABLE => return false,
            Ending::Finish(settlement) => Ending::Finish(Settlement {
                disposition: Disposition::Fail,
                result: PublishedResult::default(),
                error: Some(format!("the outcome could not be stored: {refused}")),
                stop_reason: UNSTORABLE,
                log: LogTail::default(),
                ..settlement.clone()
            }),
            // A success without its check is worth more than none.
            Ending::Stage { settlement, .. } => Ending::Finish(settlement.clone()),
            Ending::Conclude(Conclusion::Publish(Some(_))) => {
                Ending::Conclude(Conclusion::Publish(None))
            }
            Ending::Conclude(Conclusion::Publish(None) | Conclusion::Recheck(_)) => return false,
        };
        self.ending = less;
        true
    }

    /// Whether the item can run elsewhere at once.
    pub(super) const fn is_given_back(&self) -> bool {
        matches!(
            &self.ending,
            Ending::Finish(Settlement {
                disposition: Disposition::Again {
                    ending: AttemptEnding::Interrupted | AttemptEnding::Unstarted,
                    ..
                },
                ..
            })
        )
    }

    /// What the fence refuses with it.
    pub(super) const fn fence_op(&self) -> FenceOp {
        match &self.ending {
            Ending::Finish(settlement) => match settlement.disposition {
                Disposition::Succeed => FenceOp::Complete,
                Disposition::Fail => FenceOp::Fail,
                Disposition::Again { .. } => FenceOp::Release,
            },
            Ending::Stage { .. } | Ending::Conclude(Conclusion::Publish(_)) => FenceOp::Complete,
            Ending::Conclude(Conclusion::Recheck(_)) => FenceOp::Release,
        }
    }
}
