//! Positions that a lease's row holds and nobody here knows of: their attempt ended without a
//! hand-in, and heartbeats would keep them for as long as their siblings run.

use std::time::Duration;

use tracing::{debug, warn};

use super::Heartbeat;
use crate::leases::Known;
use crate::model::{
    AttemptEnding, Conclusion, Disposition, History, Hold, LogTail, PublishedResult, Settlement,
    StopReason,
};
use crate::store::{Concluding, FlightError, HandIn, StoreError};

/// Why forgotten positions stay where they are until the next heartbeat.
#[derive(Debug, thiserror::Error)]
enum NotGivenBack {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Flight(#[from] FlightError),
}

impl Heartbeat {
    /// Gives back what the last answer said is held beyond what is vouched for.
    pub(super) async fn give_back_forgotten(&self) {
        let forgetful = std::mem::take(&mut *self.forgetful());
        for known in forgetful {
            match self.give_back_rest(&known).await {
                Ok(0) => {}
                Ok(items) => {
                    warn!(lease = %known.lease, items, "gave back forgotten items of a lease");
                }
                Err(failed) => {
                    debug!(lease = %known.lease, error = %failed, "forgotten items are not given back yet");
                }
            }
        }
    }

    /// Reads the row, and gives back what it holds beyond what was known before: positions never
    /// enter a lease, so a hand-in meanwhile does not matter.
    async fn give_back_rest(&self, known: &Known) -> Result<usize, NotGivenBack> {
        let mut rest = self.database.held_by(known.batch, known.lease, known.token).await?;
        rest.retain(|(hold, _)| !known.positions.contains(&hold.item().position()));
        let (checked, executed): (Vec<_>, Vec<_>) =
            rest.into_iter().partition(|(_, under_check)| *under_check);
        Ok(self.give_back_checks(known, &checked).await?
            + self.give_back_executions(known, &executed).await?)
    }

    /// A stored result is checked again, never executed again.
    async fn give_back_checks(
        &self,
        known: &Known,
        rest: &[(Hold, bool)],
    ) -> Result<usize, FlightError> {
        if rest.is_empty() {
            return Ok(0);
        }
        let conclusions: Vec<Conclusion> =
            rest.iter().map(|(hold, _)| Conclusion::of_loss(hold.history())).collect();
        let items: Vec<Concluding<'_>> = rest
            .iter()
            .zip(&conclusions)
            .map(|((hold, _), conclusion)| Concluding { hold, conclusion })
            .collect();
        self.database.conclude(known.batch, self.ttl, &items).await?;
        Ok(items.len())
    }

    async fn give_back_executions(
        &self,
        known: &Known,
        rest: &[(Hold, bool)],
    ) -> Result<usize, NotGivenBack> {
        if rest.is_empty() {
            return Ok(0);
        }
        let work = self.database.batch_work(known.batch).await?;
        let max_attempts = work.map_or(u16::MAX, |work| work.max_attempts);
        let settlements: Vec<Settlement> =
            rest.iter().map(|(hold, _)| self.interrupted(hold.history(), max_attempts)).collect();
        let items: Vec<HandIn<'_>> = rest
            .iter()
            .zip(&settlements)
            .map(|((hold, _), settlement)| HandIn { hold, settlement })
            .collect();
        self.database.hand_in(known.batch, self.worker, self.ttl, &items).await?;
        Ok(items.len())
    }

    /// An interruption, free of charge while its bound lasts.
    fn interrupted(&self, history: History, max_attempts: u16) -> Settlement {
        let free = history.interruptions() < self.max_interruptions;
        let interrupted = history.plus_interruption();
        let after = if free { interrupted } else { interrupted.plus_attempt() };
        let disposition = if !free && u16::from(after.attempts()) >= max_attempts {
            Disposition::Fail
        } else {
            Disposition::Again {
                ending: AttemptEnding::Interrupted,
                charged: !free,
                delay: Duration::ZERO,
                history: after,
            }
        };
        Settlement {
            disposition,
            started_at: None,
            ended_at: self.clock.wall(),
            result: PublishedResult::default(),
            error: Some("its worker lost track of the attempt".to_owned()),
            stop_reason: StopReason::Forgotten,
            exit_status: None,
            signal: None,
            log: LogTail::default(),
        }
    }
}
