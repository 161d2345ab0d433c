//! Things that people name.

use super::exit::{CliError, Exit};
use crate::model::WorkerId;
use crate::store::{Database, WorkerRow};

/// The workers that are named by their ids or their names. A name stands for all that have it and have
/// not ended; every one has to be that of some worker.
pub(super) async fn workers_named(
    database: &Database,
    named: &[String],
) -> Result<Vec<WorkerRow>, CliError> {
    let all = database.workers(true).await?;
    let mut found: Vec<WorkerRow> = Vec::new();
    for name in named {
        let id: Option<WorkerId> = name.parse().ok();
        let is_meant =
            |row: &&WorkerRow| Some(row.id) == id || (row.ended_at.is_none() && row.name == *name);
        let meant: Vec<WorkerRow> = all.iter().filter(is_meant).cloned().collect();
        if meant.is_empty() {
            return Err(CliError::new(Exit::Denied, format!("no worker {name:?}")));
        }
        found.extend(meant);
    }
    found.sort_by_key(|row| row.id);
    found.dedup_by_key(|row| row.id);
    Ok(found)
}
