//! `holdfast retry`.

use clap::Args;
use serde_json::json;
use tracing::Instrument;

use super::Global;
use super::context::{OneBatch, actor, block_on, caller, connect, load_settings, unknown_batch};
use super::control::persist;
use super::exit::{CliError, Exit};
use super::items::position_of;
use super::output::{count, print_json, print_line, progress_bar, remark};
use super::worker::client_telemetry;
use crate::model::Position;
use crate::store::{BatchRow, Database, Event, RetryAnswer};
use crate::telemetry::trace;

/// Items that get new attempts in one transaction, so that claims of the batch are not held up.
const CHUNK: i32 = 1_000;

/// Give failed items of a batch new attempts: some by their keys, or all.
///
/// Their attempts count from one again; what they failed with is kept among the attempts of the
/// item. An ended batch goes on; a paused one stays paused; a cancelled one refuses. Items that
/// have not failed are left alone.
#[derive(Args, Debug)]
#[command(after_help = "\
Exit codes: 73 the batch is cancelled; 77 no such batch, or no item with this key.

Examples:
  holdfast retry 0194b2c8-7d1e-7c3a-9a53-0d6f5f3f2a11 --all
  holdfast retry 0194b2c8-7d1e-7c3a-9a53-0d6f5f3f2a11 --key REQ-0042 --key REQ-0043")]
pub(super) struct RetryArguments {
    #[command(flatten)]
    batch: OneBatch,
    /// The item with this key; repeat it for more.
    #[arg(long = "key", value_name = "KEY", required_unless_present = "all")]
    keys: Vec<String>,
    /// All failed items.
    #[arg(long, conflicts_with = "keys")]
    all: bool,
}

pub(super) fn run(global: &Global, arguments: &RetryArguments) -> Result<Exit, CliError> {
    let settings = load_settings(global)?;
    block_on(async {
        let database = connect(&settings).await?;
        let batch = arguments.batch.find(&database).await?;
        let named = if arguments.all {
            None
        } else {
            Some(positions(&database, &batch, &arguments.keys).await?)
        };
        let owner = arguments.batch.owner.name();
        let telemetry = client_telemetry(&settings)?;
        let span = trace::control_span("retry", batch.id, caller(None).as_ref());
        let retried = retry(&database, &batch, owner, named.as_deref(), global.json);
        let retried = retried.instrument(span.clone()).await;
        match &retried {
            Ok(moved) => trace::item_count(&span, usize::try_from(*moved).unwrap_or_default()),
            Err(_) => trace::failed(&span, "refused"),
        }
        drop(span);
        telemetry.shutdown().await;
        let moved = retried?;
        if moved > 0 {
            // Only a hint: without it the workers find the items when they look next.
            drop(database.notify(&Event::Work(batch.queue.clone())).await);
        }
        let asked = named.map_or(moved, |named| i32::try_from(named.len()).unwrap_or(i32::MAX));
        if moved < asked {
            remark(&format!("{} of the named items had not failed", count(asked - moved)));
        }
        if global.json {
            print_json(&json!({"batch": batch.id, "items": moved}))?;
        } else {
            let noun = if moved == 1 { "item has" } else { "items have" };
            print_line(&format!("{} {noun} new attempts", count(moved)))?;
        }
        Ok(Exit::Done)
    })
}

/// All keys are looked up before anything is moved.
async fn positions(
    database: &Database,
    batch: &BatchRow,
    keys: &[String],
) -> Result<Vec<Position>, CliError> {
    let mut positions = Vec::with_capacity(keys.len());
    for key in keys {
        positions.push(position_of(database, batch, key).await?);
    }
    positions.sort_unstable();
    positions.dedup();
    Ok(positions)
}

/// Moves chunk by chunk, each item at most once: one that fails again meanwhile is behind.
async fn retry(
    database: &Database,
    batch: &BatchRow,
    owner: Option<&str>,
    positions: Option<&[Position]>,
    json: bool,
) -> Result<i32, CliError> {
    let failed = u64::from(batch.counts.failed.unsigned_abs());
    let bar = progress_bar(json, Some(failed), "retrying [{bar:40}] {human_pos}/{human_len} items");
    let actor = actor();
    let mut moved = 0;
    let mut from = Some(Position::new(0));
    while let Some(begin) = from {
        let chunk =
            async || database.retry_failed(batch.id, owner, positions, begin, CHUNK, &actor).await;
        match persist(chunk).await? {
            RetryAnswer::Moved { items, next } => {
                moved += items;
                from = next;
                bar.set_position(u64::from(moved.unsigned_abs()));
            }
            RetryAnswer::Cancelled => {
                let message = format!("cannot retry batch {}: it is cancelled", batch.id);
                return Err(CliError::new(Exit::Conflict, message));
            }
            RetryAnswer::Unknown => return Err(unknown_batch(batch.id)),
        }
    }
    bar.finish_and_clear();
    Ok(moved)
}
