//! Gives the items of a dead worker back, once nothing of it runs any more.

use std::sync::Arc;
use std::time::Duration;

use tracing::{debug, info, warn};

use super::news::{News, Released};
use crate::clock::{Clock, SystemClock};
use crate::config::Settings;
use crate::model::{Position, WorkerId};
use crate::store::{Database, DatabaseOptions, DeadLease, FlightError, ReapPolicy, StoreError};
use crate::supervise::database_options;

/// The pause after a try that failed; doubled with each.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
/// A claim that the worker sent last may be granted after its death: so much later is looked again.
const LATE_CLAIM: Duration = Duration::from_secs(1);

#[derive(Debug, thiserror::Error)]
enum ReleaseError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Flight(#[from] FlightError),
}

/// Releases the leases of a worker that is proven dead, with all it started; tries until its leases
/// have lapsed by themselves. A crash is charged to the items, another end is an interruption.
pub(super) async fn release(settings: Arc<Settings>, worker: WorkerId, crashed: bool, news: News) {
    let give_up = SystemClock.now() + settings.lease.ttl;
    let mut pause = FIRST_PAUSE;
    let mut looks = 0;
    let mut database = None;
    while SystemClock.now() < give_up {
        match try_release(&settings, worker, crashed, &mut database, &news).await {
            Ok(items) => {
                if items > 0 {
                    info!(%worker, items, crashed, "released the items of a dead worker");
                }
                looks += 1;
                if looks == 2 {
                    return;
                }
                tokio::time::sleep(LATE_CLAIM).await;
            }
            Err(error) => {
                debug!(%worker, %error, "a dead worker's leases are not released yet");
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(LONGEST_PAUSE);
            }
        }
    }
    warn!(%worker, "the leases of a dead worker were left to lapse");
}

/// One pass over everything the worker held; how many items that were.
async fn try_release(
    settings: &Settings,
    worker: WorkerId,
    crashed: bool,
    database: &mut Option<Database>,
    news: &News,
) -> Result<usize, ReleaseError> {
    let database = match database {
        Some(database) => database,
        None => database.insert(connect(settings)?),
    };
    let policy = ReapPolicy {
        charge: crashed,
        max_crashes: settings.retry.max_crashes,
        max_interruptions: settings.retry.max_interruptions,
        backoff_base: settings.retry.backoff_base,
        backoff_max: settings.retry.backoff_max,
    };
    let mut items = 0;
    let mut busy = 0;
    loop {
        let leases = database.leases_of_worker(worker).await?;
        let Some(first) = leases.first() else { break };
        for batch in leases.chunk_by(|a, b| a.batch == b.batch) {
            let released = database.release_dead(worker, batch, &policy).await?;
            if released > 0 {
                news.tell(what_became(database, batch, released).await);
            }
            items += released;
        }
        // Whoever has the ticket of a batch now lets go of it soon (L4).
        busy += 1;
        if busy > 200 {
            debug!(batch = %first.batch, "leases stay busy");
            break;
        }
        if busy > 1 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
    database.end_worker(worker, if crashed { "crashed" } else { "forced" }).await?;
    Ok(items)
}

/// What became of items of these leases, of one batch. Only to count them.
async fn what_became(database: &Database, leases: &[DeadLease], items: usize) -> Vec<Released> {
    let Some(DeadLease { batch, .. }) = leases.first() else { return Vec::new() };
    let positions: Vec<Position> =
        leases.iter().flat_map(|lease| lease.positions.iter().copied()).collect();
    let ends = database.taken_back(*batch, &positions).await.unwrap_or_default();
    Released::of(leases, items, &ends)
}

fn connect(settings: &Settings) -> Result<Database, StoreError> {
    let options = database_options(settings, "holdfast guard")
        .map_err(|error| StoreError::Schema(error.to_string()))?;
    Database::new(DatabaseOptions { pool_size: 1, ..options })
}
