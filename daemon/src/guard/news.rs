//! What a guard tells the worker that it guards: what became of the items of the one before. A guard
//! serves no metrics; its worker counts it.

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, PoisonError};

use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, BufReader};
use tracing::debug;

use crate::model::QueueName;
use crate::store::{DeadLease, ReapDisposition, TakenBack};
use crate::telemetry::Metrics;
use crate::telemetry::labels::RetryReason;

/// Items of one queue that became the same.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Released {
    queue: String,
    became: ReapDisposition,
    /// Whether they failed because their worker crashed too often with them.
    poison: bool,
    items: usize,
}

impl Released {
    /// What became of `items` of the leases of one batch, by what is known of those that do not wait
    /// for their next attempt.
    pub(super) fn of(leases: &[DeadLease], items: usize, ends: &[TakenBack]) -> Vec<Self> {
        let Some(DeadLease { queue, .. }) = leases.first() else { return Vec::new() };
        let some = |became, poison, items| Self { queue: queue.clone(), became, poison, items };
        let ended = ends.iter().map(|end| some(end.disposition, end.poison, 1));
        let again = items.saturating_sub(ends.len());
        let again = (again > 0).then(|| some(ReapDisposition::Requeued, false, again));
        again.into_iter().chain(ended).collect()
    }
}

/// The way to the worker there is now; without one, what is told waits for the next.
#[derive(Clone, Debug, Default)]
pub(super) struct News(Arc<Mutex<Inner>>);

#[derive(Debug, Default)]
struct Inner {
    to: Option<UnixStream>,
    untold: Vec<Released>,
}

impl News {
    /// A new worker listens at the other end of `to`, which does not block.
    pub(super) fn go_to(&self, to: UnixStream) {
        let mut inner = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        inner.to = Some(to);
        inner.tell();
    }

    pub(super) fn tell(&self, released: Vec<Released>) {
        let mut inner = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        inner.untold.extend(released);
        inner.tell();
    }
}

impl Inner {
    fn tell(&mut self) {
        let Some(to) = &mut self.to else { return };
        let told = self.untold.iter().try_for_each(|released| {
            let line = serde_json::to_string(released)? + "\n";
            to.write_all(line.as_bytes())
        });
        match told {
            Ok(()) => self.untold.clear(),
            // It has ended, or does not read: the next one hears it.
            Err(_) => self.to = None,
        }
    }
}

/// Counts what the guard tells, until it is gone.
///
/// # Cancel safety
/// Dropped, it counts nothing more; what was told meanwhile is lost.
pub(crate) async fn count(from: UnixStream, metrics: &Metrics) {
    let heard = async {
        from.set_nonblocking(true)?;
        let mut lines = BufReader::new(tokio::net::UnixStream::from_std(from)?).lines();
        while let Some(line) = lines.next_line().await? {
            let Released { queue, became, poison, items } = serde_json::from_str(&line)?;
            if let Ok(queue) = queue.parse::<QueueName>() {
                metrics.taken_back(&queue, became.into(), poison, items, RetryReason::WorkerDied);
            }
        }
        std::io::Result::Ok(())
    };
    if let Err(error) = heard.await {
        debug!(%error, "the guard is not heard any more");
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;
    use crate::model::{BatchId, FencingToken, LeaseId, Position};

    fn released(items: usize) -> Released {
        let became = ReapDisposition::Requeued;
        Released { queue: "q".to_owned(), became, poison: false, items }
    }

    fn heard(mut from: UnixStream) -> Vec<Released> {
        let mut text = String::new();
        from.read_to_string(&mut text).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    #[test]
    fn what_no_worker_heard_is_told_to_the_next() {
        let news = News::default();
        news.tell(vec![released(1)]);
        let (to, gone) = UnixStream::pair().unwrap();
        drop(gone);
        news.go_to(to);
        news.tell(vec![released(2)]);
        let (to, from) = UnixStream::pair().unwrap();

        news.go_to(to);
        news.tell(vec![released(3)]);
        drop(news);

        assert_eq!(heard(from), [released(1), released(2), released(3)]);
    }

    #[test]
    fn items_that_did_not_end_wait_for_their_next_attempt() {
        let lease = DeadLease {
            batch: BatchId::generate(),
            queue: "q".to_owned(),
            lease: LeaseId::generate(),
            token: FencingToken::new(1),
            positions: (0..3).map(Position::new).collect(),
        };
        let failed = TakenBack {
            position: Position::new(1),
            disposition: ReapDisposition::Failed,
            poison: true,
        };

        let news = Released::of(&[lease], 3, &[failed]);

        let poisoned = Released { became: ReapDisposition::Failed, poison: true, ..released(1) };
        assert_eq!(news, [released(2), poisoned]);
    }
}
