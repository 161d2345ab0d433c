//! The check of a staged item: a slot of its own budget, the checker off the runtime, the verdict.
//!
//! A verdict never changes what became of the item. A check that was begun is waited for, whatever
//! asks it to stop: what it holds is released when its last read has ended, not before.

use std::sync::Arc;
use std::time::Duration;

use tokio::task::spawn_blocking;
use tokio::time::timeout;
use tracing::{Instrument, debug, warn};

use super::{Attempts, BatchContext, LapseOnPanic, lease_span};
use crate::capacity::{CheckSlots, PendingCheck, Slot};
use crate::execute::Execution;
use crate::finish::{Concluded, Finished, Staged};
use crate::leases::{StopCause, StopSignal};
use crate::model::{Conclusion, Evidence, History, Hold, ItemRef, Settlement, Verdict};
use crate::store::StagedItem;
use crate::telemetry::labels::CheckErrorReason;
use crate::telemetry::trace::{self, TraceContext};

/// What a check is asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckRequest {
    /// The item.
    pub item: ItemRef,
    /// Its criteria, as they are effective; at least one.
    pub criteria: Vec<String>,
    /// What was recorded of the attempt's commands, oldest first.
    pub evidence: Vec<Evidence>,
    /// The workspace its execution had, if any: its id as text.
    pub workspace: Option<String>,
}

/// Checks the items of one batch.
pub trait Checker: Send + Sync {
    /// The verdict on one item; none without a usable criterion. Blocking: it is called off the
    /// runtime, and releases what it holds before it returns.
    fn check(&self, request: &CheckRequest) -> Option<Verdict>;
}

/// How checks are run.
#[derive(Clone, Debug)]
pub struct CheckPolicy {
    /// The slots, apart from those of executions.
    pub slots: CheckSlots,
    /// How long one check may take before its item ends without a verdict.
    pub timeout: Duration,
}

/// A lost check that was granted to this worker.
pub struct Rechecked {
    /// The right to it.
    pub hold: Hold,
    /// Its check slot.
    pub slot: Slot,
    /// What is stored of it; none when it could not be read.
    pub staged: Option<StagedItem>,
}

/// How far a check came.
enum Came {
    /// It was never begun.
    NotBegun,
    /// To its end; none when the checker failed.
    Checked(Option<Verdict>),
}

impl Came {
    const fn verdict(&self) -> Option<&Verdict> {
        match self {
            Self::NotBegun => None,
            Self::Checked(verdict) => verdict.as_ref(),
        }
    }
}

impl Attempts {
    /// Stages a success, checks it and concludes it.
    pub(super) async fn stage_and_check(
        &self,
        batch: &BatchContext,
        finished: Finished,
        execution: Execution,
        criteria: Vec<String>,
        stop: &StopSignal,
    ) {
        // Before it is staged: what is claimed next already sees the backlog.
        let pending = self.checks.slots.enter();
        let (item, lease) = (finished.hold.item(), finished.hold.lease());
        let span = finished.span.clone();
        let workspace = execution.workspace.map(|id| id.to_string());
        let request = CheckRequest {
            item,
            criteria,
            evidence: execution.evidence.clone(),
            workspace: workspace.clone(),
        };
        let staged = Staged { finished, evidence: execution.evidence, workspace };
        let Some(hold) = self.finisher.stage(staged).await else { return };
        self.leases.await_check(lease, item.position());
        self.check(batch, hold, Some(request), None, pending, span, stop).await;
    }

    /// Repeats a check that was lost.
    ///
    /// # Cancel safety
    /// As [`run`](Self::run).
    pub async fn recheck(
        &self,
        batch: &BatchContext,
        claim: Option<TraceContext>,
        rechecked: Rechecked,
    ) {
        let previous = rechecked.staged.as_ref().map(|staged| &staged.previous);
        let span = lease_span(batch, &rechecked.hold, claim.as_ref(), previous);
        self.recheck_in(&span, batch, rechecked).instrument(span.clone()).await;
    }

    async fn recheck_in(&self, span: &tracing::Span, batch: &BatchContext, rechecked: Rechecked) {
        let Rechecked { hold, slot, staged } = rechecked;
        let _lapse = LapseOnPanic { leases: &self.leases, lease: hold.lease(), item: hold.item() };
        let stop = self.leases.stop_signal(hold.lease(), hold.item().position());
        let pending = self.checks.slots.enter();
        let Some(staged) = staged else {
            let conclusion = Conclusion::Recheck(hold.history());
            self.conclude(batch, hold, conclusion, span.clone());
            return;
        };
        let request = match (staged.criteria, staged.evidence) {
            (Some(criteria), Some(evidence)) => {
                let workspace = staged.workspace;
                Some(CheckRequest { item: hold.item(), criteria, evidence, workspace })
            }
            // What proves something may be in the part that cannot be read.
            (_, _) => None,
        };
        self.check(batch, hold, request, Some(slot), pending, span.clone(), &stop).await;
    }

    #[expect(clippy::too_many_arguments, reason = "two callers, each with all of it at hand")]
    async fn check(
        &self,
        batch: &BatchContext,
        hold: Hold,
        request: Option<CheckRequest>,
        slot: Option<Slot>,
        _pending: PendingCheck,
        span: tracing::Span,
        stop: &StopSignal,
    ) {
        let criteria = request.as_ref().map_or(0, |request| request.criteria.len());
        let check = trace::check_span(&span, &batch.queue, criteria);
        let asked_at = self.clock.now();
        let slot = if slot.is_some() {
            slot
        } else {
            tokio::select! {
                biased;
                () = stop.token().cancelled() => None,
                slot = self.checks.slots.take() => slot,
            }
        };
        let begins = slot.filter(|_| self.leases.begin_check(hold.lease(), hold.item().position()));
        let came = match (begins, &batch.checker, request) {
            (Some(slot), Some(checker), Some(request)) => {
                let waited = self.clock.now().since(asked_at);
                self.metrics.check_waited(waited);
                trace::check_begins(&check, waited);
                let asked = self.ask(Arc::clone(checker), request, slot);
                Came::Checked(asked.instrument(check.clone()).await)
            }
            (Some(_), Some(_), None) => {
                self.metrics.check_failed(CheckErrorReason::Internal);
                Came::Checked(None)
            }
            (Some(_), None, _) | (None, _, _) => Came::NotBegun,
        };
        trace::check_ended(&check, came.verdict());
        if let Some(conclusion) = conclusion(came, stop.cause(), hold.history()) {
            self.conclude(batch, hold, conclusion, span);
        } else {
            let cause = stop.cause().unwrap_or(StopCause::Lost);
            self.drop_hold(batch, &span, &hold, cause, true);
        }
    }

    /// Runs the checker to its end. One that takes too long keeps its slot, and what it holds, until
    /// it ends; its item does not wait for it.
    async fn ask(
        &self,
        checker: Arc<dyn Checker>,
        request: CheckRequest,
        slot: Slot,
    ) -> Option<Verdict> {
        let began = self.clock.now();
        let item = request.item;
        let span = tracing::Span::current();
        let checked = spawn_blocking(move || {
            let verdict = span.in_scope(|| checker.check(&request));
            drop(span);
            drop(slot);
            verdict
        });
        let ended = timeout(self.checks.timeout, checked).await;
        self.metrics.check_ended(self.clock.now().since(began));
        match ended {
            Ok(Ok(verdict)) => verdict,
            Ok(Err(panic)) => {
                self.metrics.check_failed(CheckErrorReason::Internal);
                warn!(%item, error = %panic, "a check failed: its item has no verdict");
                None
            }
            Err(_) => {
                self.metrics.check_failed(CheckErrorReason::Timeout);
                warn!(%item, "a check did not end in time: its item has no verdict");
                None
            }
        }
    }

    fn conclude(
        &self,
        batch: &BatchContext,
        hold: Hold,
        conclusion: Conclusion,
        span: tracing::Span,
    ) {
        match &conclusion {
            Conclusion::Publish(Some(verdict)) => debug!("{}", verdict.compact()),
            Conclusion::Publish(None) => debug!("there is no verdict"),
            Conclusion::Recheck(_) => debug!("the check is left to another worker"),
        }
        self.finisher.conclude(Concluded { hold, conclusion, queue: batch.queue.clone(), span });
    }
}

/// What becomes of a staged item; none when nothing of it can be published any more.
fn conclusion(came: Came, cause: Option<StopCause>, history: History) -> Option<Conclusion> {
    match (came, cause) {
        (_, Some(StopCause::Cancelled | StopCause::Lost)) => None,
        (Came::Checked(verdict), None | Some(StopCause::Drained)) => {
            Some(Conclusion::Publish(verdict))
        }
        // It ended after its lease was no longer trusted (F5).
        (Came::Checked(_), Some(StopCause::Fenced)) => Some(Conclusion::of_loss(history)),
        (Came::NotBegun, None | Some(StopCause::Fenced | StopCause::Drained)) => {
            Some(Conclusion::Recheck(history))
        }
    }
}

/// Whether a settled execution is checked: only one that did what it should.
pub(super) fn is_checked(settlement: &Settlement, criteria: &[String]) -> bool {
    settlement.disposition == crate::model::Disposition::Succeed && !criteria.is_empty()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Family, Finding, Leaf};

    fn verdict() -> Option<Verdict> {
        Verdict::new(vec![Leaf::new("x", Family::Undecidable, Finding::Unchecked, "")])
    }

    #[test]
    fn a_check_that_ended_is_published_also_during_a_drain() {
        for cause in [None, Some(StopCause::Drained)] {
            for found in [verdict(), None] {
                let concluded = conclusion(Came::Checked(found.clone()), cause, History::FRESH);
                assert_eq!(concluded, Some(Conclusion::Publish(found)), "{cause:?}");
            }
        }
    }

    #[test]
    fn a_lost_or_cancelled_item_publishes_nothing() {
        for cause in [StopCause::Lost, StopCause::Cancelled] {
            let checked = Came::Checked(verdict());
            assert_eq!(conclusion(checked, Some(cause), History::FRESH), None);
            assert_eq!(conclusion(Came::NotBegun, Some(cause), History::FRESH), None);
        }
    }

    #[test]
    fn a_check_that_outlived_its_trust_is_repeated_a_bounded_number_of_times() {
        let fenced =
            |history| conclusion(Came::Checked(verdict()), Some(StopCause::Fenced), history);
        let one = History::FRESH.plus_check_loss();
        assert_eq!(fenced(History::FRESH), Some(Conclusion::Recheck(one)));
        assert_eq!(fenced(one), Some(Conclusion::Recheck(one.plus_check_loss())));
        assert_eq!(fenced(one.plus_check_loss()), Some(Conclusion::Publish(None)));
    }

    #[test]
    fn a_check_that_never_began_is_given_back_free_of_charge() {
        let history = History::FRESH.plus_attempt();
        for cause in [None, Some(StopCause::Drained), Some(StopCause::Fenced)] {
            let concluded = conclusion(Came::NotBegun, cause, history);
            assert_eq!(concluded, Some(Conclusion::Recheck(history)), "{cause:?}");
        }
    }
}
