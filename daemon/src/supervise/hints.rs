//! Hints of other processes: work there is, batches that were cancelled.

use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use tracing::{debug, info};

use super::Worker;
use crate::store::{DatabaseOptions, Event, Listener, StoreError};

/// How long a notification may take to come back, if it comes back at all.
const ECHO: Duration = Duration::from_secs(2);

/// The pause after the first try that failed; doubled with each, up to the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// When to listen again where nothing arrives: each try leaves a pooler with a session that listens
/// for nobody.
const DEAF: Duration = Duration::from_mins(10);

impl Worker {
    /// Listens for hints, and reconnects when the connection is gone: polling goes on meanwhile.
    pub(super) async fn listen(&self, stop: &CancellationToken) {
        let mut options = self.parts.database.options().clone();
        if let Some(url) = &self.parts.settings.database.listen_url {
            url.expose().clone_into(&mut options.url);
        }
        let mut pause = FIRST_PAUSE;
        while !stop.is_cancelled() {
            let heard = tokio::select! {
                () = stop.cancelled() => return,
                heard = self.connect_and_hear(&options) => heard,
            };
            let wait = match heard {
                Ok(Some(mut listener)) => {
                    self.listens(true);
                    // Something may have been told while nobody listened.
                    self.wakeups.told.notify_one();
                    tokio::select! {
                        () = stop.cancelled() => return,
                        () = self.heed_all(&mut listener) => {}
                    }
                    self.listens(false);
                    pause = FIRST_PAUSE;
                    pause
                }
                Ok(None) => {
                    info!(
                        "notifications do not arrive, as behind a transaction pooler; polling goes on: set database.listen_url"
                    );
                    DEAF
                }
                Err(failed) => {
                    debug!(error = %failed, "cannot listen; polling goes on");
                    pause = (pause * 2).min(LONGEST_PAUSE);
                    pause
                }
            };
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(wait.mul_f64(rand::random_range(0.5..1.0))) => {}
            }
        }
    }

    fn listens(&self, up: bool) {
        self.wakeups.listening.store(up, Ordering::Relaxed);
        self.parts.metrics.listening(up);
    }

    /// A listener that hears what is told; none when nothing arrives. Behind a transaction pooler
    /// it does not, whatever LISTEN was answered: the session that listens is another client's by
    /// then.
    async fn connect_and_hear(
        &self,
        options: &DatabaseOptions,
    ) -> Result<Option<Listener>, StoreError> {
        let mut listener = Listener::connect(options).await?;
        let echo = Event::Echo(self.id);
        self.parts.database.notify(&echo).await?;
        let hears = async {
            while let Some(event) = listener.next().await {
                if event == echo {
                    return true;
                }
                self.heed(event);
            }
            false
        };
        let hears = tokio::time::timeout(ECHO, hears).await.unwrap_or(false);
        Ok(hears.then_some(listener))
    }

    async fn heed_all(&self, listener: &mut Listener) {
        while let Some(event) = listener.next().await {
            self.heed(event);
        }
    }

    fn heed(&self, event: Event) {
        match event {
            Event::Work(queue) => {
                if self.parts.queues.iter().any(|served| served.as_str() == queue) {
                    self.wakeups.told.notify_one();
                }
            }
            Event::Cancelled(batch) => {
                let stopped = self.leases.cancel_batch(batch);
                if !stopped.is_empty() {
                    info!(%batch, items = stopped.len(), "the batch was cancelled: ending its executions");
                }
            }
            Event::Asked(worker) if worker == self.id => self.heartbeat.beat_soon(),
            Event::Asked(_) | Event::Echo(_) => {}
        }
    }
}
