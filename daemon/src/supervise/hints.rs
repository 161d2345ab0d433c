//! Hints of other processes: work there is, batches that were cancelled.

use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use tracing::{debug, info};

use super::Worker;
use crate::leases::StopCause;
use crate::store::{Event, Listener};

impl Worker {
    /// Listens for hints, and reconnects when the connection is gone: polling goes on meanwhile.
    pub(super) async fn listen(&self, stop: &CancellationToken) {
        let mut options = self.parts.database.options().clone();
        if let Some(url) = &self.parts.settings.database.listen_url {
            url.expose().clone_into(&mut options.url);
        }
        let mut pause = Duration::from_millis(500);
        while !stop.is_cancelled() {
            let connected = tokio::select! {
                () = stop.cancelled() => return,
                connected = Listener::connect(&options) => connected,
            };
            match connected {
                Ok(mut listener) => {
                    pause = Duration::from_millis(500);
                    self.wakeups.listening.store(true, Ordering::Relaxed);
                    // Something may have been told while nobody listened.
                    self.wakeups.told.notify_one();
                    tokio::select! {
                        () = stop.cancelled() => return,
                        () = self.heed(&mut listener) => {}
                    }
                    self.wakeups.listening.store(false, Ordering::Relaxed);
                }
                Err(failed) => debug!(error = %failed, "cannot listen; polling goes on"),
            }
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(pause.mul_f64(rand::random_range(0.5..1.0))) => {}
            }
            pause = (pause * 2).min(Duration::from_secs(30));
        }
    }

    async fn heed(&self, listener: &mut Listener) {
        while let Some(event) = listener.next().await {
            match event {
                Event::Work(queue) => {
                    if self.parts.queues.iter().any(|served| served.as_str() == queue) {
                        self.wakeups.told.notify_one();
                    }
                }
                Event::Cancelled(batch) => {
                    let stopped = self.leases.stop_batch(batch, StopCause::Cancelled);
                    if !stopped.is_empty() {
                        info!(%batch, items = stopped.len(), "the batch was cancelled: ending its executions");
                    }
                }
            }
        }
    }
}
