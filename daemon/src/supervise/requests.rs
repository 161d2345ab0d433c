//! What is asked of a running worker: by an operator in its row, or by a signal on its machine.

use tokio_util::sync::CancellationToken;
use tracing::info;

use super::Worker;
use crate::model::{Asked, WorkerState};

impl Worker {
    /// Waits until an operator asks for a drain.
    pub(super) async fn asked_to_drain(&self) {
        let mut asked = self.heartbeat.asked();
        if asked.wait_for(|asked| *asked == Some(Asked::Drain)).await.is_ok() {
            info!("an operator asks for a drain");
        }
    }

    /// Is quiet while anybody wants that, until `stop`.
    pub(super) async fn heed_requests(&self, stop: &CancellationToken) {
        let (mut asked, mut told) = (self.heartbeat.asked(), self.quiet.clone());
        let mut told_by_nobody = false;
        loop {
            let by_operator = *asked.borrow_and_update() == Some(Asked::Quiet);
            let here = *told.borrow_and_update();
            self.be_quiet(by_operator || here);
            tokio::select! {
                () = stop.cancelled() => return,
                changed = asked.changed() => if changed.is_err() { return },
                changed = told.changed(), if !told_by_nobody => told_by_nobody = changed.is_err(),
            }
        }
    }

    fn be_quiet(&self, quiet: bool) {
        use WorkerState::{Quiet, Running};
        let (from, to) = if quiet { (Running, Quiet) } else { (Quiet, Running) };
        // A worker that drains stays at that.
        if self.parts.health.change_state(from, to) {
            info!(state = to.as_str(), "asked to be so");
            self.announce(to);
            self.wakeups.told.notify_one();
        }
    }
}
