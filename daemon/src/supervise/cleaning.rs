//! Clean-up of workspaces by retention, in every worker; workers that share a root may all do it.

use std::collections::HashSet;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::spawn_blocking;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use crate::clock::Clock;
use crate::config;
use crate::model::BatchId;
use crate::store::{Database, StoreError};
use crate::workspace::{Cleaned, Used, Workspaces};

/// Batches and threads that are asked about and cleaned at once.
const CHUNK: usize = 256;

/// Why a clean-up stopped early; the next one goes on.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CleaningError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("the directories cannot be read")]
    Files(#[source] io::Error),
}

/// The clean-up of one worker.
pub(crate) struct Cleaning {
    pub(crate) database: Database,
    pub(crate) workspaces: Arc<dyn Workspaces>,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) settings: config::Workspace,
}

impl Cleaning {
    /// Cleans until `stop`.
    pub(super) async fn run(&self, stop: &CancellationToken) {
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(self.settings.clean_interval) => {}
            }
            match self.clean(stop).await {
                Ok(Cleaned { removed: 0, failed: 0, .. }) => {}
                Ok(Cleaned { removed, held, failed }) => {
                    info!(removed, held, failed, "cleaned workspaces");
                }
                Err(CleaningError::Store(failed)) => {
                    debug!(error = %failed, "workspaces are cleaned later");
                }
                Err(CleaningError::Files(error)) => {
                    warn!(%error, "workspaces cannot be cleaned");
                }
            }
        }
    }

    /// How many batches and threads have directories that a clean-up would look through now.
    pub(crate) async fn unused(&self) -> Result<usize, CleaningError> {
        let before = self.clock.wall() - self.settings.retention;
        let mut found = self.blocking(move |workspaces| workspaces.untouched(before)).await?;
        let mut unused = 0;
        while !found.is_empty() {
            let chunk = found.split_off(found.len().saturating_sub(CHUNK));
            unused += self.without_those_in_use(chunk).await?.len();
        }
        Ok(unused)
    }

    /// Cleans once, or until `stop`.
    pub(crate) async fn clean(&self, stop: &CancellationToken) -> Result<Cleaned, CleaningError> {
        let before = self.clock.wall() - self.settings.retention;
        let mut all = Cleaned::default();
        let mut found = self.blocking(move |workspaces| workspaces.untouched(before)).await?;
        while !stop.is_cancelled() {
            let chunk = found.split_off(found.len().saturating_sub(CHUNK));
            let unused = self.without_those_in_use(chunk).await?;
            let stop = stop.clone();
            let done = self.blocking(move |workspaces| workspaces.clean(&unused, before, &stop));
            all += done.await?;
            if found.is_empty() {
                break;
            }
        }
        Ok(all)
    }

    /// Waits for the work in any case: it is bounded by its own look at the stop token.
    async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce(&dyn Workspaces) -> io::Result<T> + Send + 'static,
    ) -> Result<T, CleaningError> {
        let workspaces = Arc::clone(&self.workspaces);
        let done = spawn_blocking(move || work(&*workspaces)).await;
        done.map_err(io::Error::other).flatten().map_err(CleaningError::Files)
    }

    async fn without_those_in_use(&self, found: Vec<Used>) -> Result<Vec<Used>, StoreError> {
        let (mut batches, mut threads) = (Vec::new(), Vec::new());
        for used in &found {
            match used {
                Used::Batch { batch, .. } => batches.push(*batch),
                Used::Thread { owner, thread } => threads.push((owner.as_str(), thread.as_str())),
            }
        }
        let within: Duration = self.settings.retention;
        let batches: HashSet<BatchId> = match batches.as_slice() {
            [] => HashSet::new(),
            batches => self.database.batches_in_use(batches, within).await?.into_iter().collect(),
        };
        let threads: HashSet<(String, String)> = match threads.as_slice() {
            [] => HashSet::new(),
            threads => self.database.threads_in_use(threads, within).await?.into_iter().collect(),
        };
        let in_use = |used: &Used| match used {
            Used::Batch { batch, .. } => batches.contains(batch),
            Used::Thread { owner, thread } => threads.contains(&(owner.clone(), thread.clone())),
        };
        Ok(found.into_iter().filter(|used| !in_use(used)).collect())
    }
}
