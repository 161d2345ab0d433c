//! What happens when a part of a worker panics: what it had in hand is lost to the other parts, so
//! the worker must not go on as if it lived.

use tokio_util::sync::CancellationToken;
use tracing::error;

/// Raised by the first part that panics. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Fault {
    raised: CancellationToken,
}

struct RaisedByPanic<'a> {
    fault: &'a Fault,
    part: &'static str,
}

impl Drop for RaisedByPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            error!(part = self.part, "a part of this worker panicked: the worker ends");
            self.fault.raised.cancel();
        }
    }
}

impl Fault {
    /// Runs a part of the worker; when it panics the fault is raised, and the panic goes on.
    ///
    /// # Cancel safety
    /// That of `work`.
    pub async fn watch<F: Future>(self, part: &'static str, work: F) -> F::Output {
        let _raised_by_panic = RaisedByPanic { fault: &self, part };
        work.await
    }

    /// Whether a part has panicked.
    #[must_use]
    pub fn is_raised(&self) -> bool {
        self.raised.is_cancelled()
    }

    /// Waits until a part has panicked.
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn raised(&self) {
        self.raised.cancelled().await;
    }
}

#[cfg(test)]
mod tests {
    use tokio::task::JoinSet;

    use super::*;

    #[tokio::test]
    async fn a_part_that_panics_is_noticed_and_one_that_ends_is_not() {
        let fault = Fault::default();
        let mut parts = JoinSet::new();

        parts.spawn(fault.clone().watch("ends", async {}));
        assert!(parts.join_next().await.unwrap().is_ok());
        assert!(!fault.is_raised());

        parts.spawn(fault.clone().watch("panics", async { panic!("a fault of its own") }));
        assert!(parts.join_next().await.unwrap().unwrap_err().is_panic());
        fault.raised().await;
    }
}
