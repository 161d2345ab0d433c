//! `holdfast items` and `holdfast item`.

use clap::Args;
use serde::Serialize;
use serde_json::value::RawValue;

use super::Global;
use super::context::{OneBatch, block_on, connect, load_settings};
use super::exit::{CliError, Exit};
use super::output::{
    NOTHING, brief, or_dash, pairs, plain, print_json, print_text, remark, table, time,
};
use crate::export::ENDED;
use crate::model::verdict::one_line;
use crate::model::{ItemStatus, Position, VerdictClass};
use crate::store::{AttemptRow, BatchRow, Database, ExportRange, ExportRow, ItemRow};

/// List items of a batch in the order of their positions, each with its status.
#[derive(Args, Debug)]
#[command(after_help = "\
With --json one object a line.

Examples:
  holdfast items 0194b2c8-7d1e-7c3a-9a53-0d6f5f3f2a11
  holdfast items 0194b2c8-7d1e-7c3a-9a53-0d6f5f3f2a11 --status failed --limit 200
  holdfast items 0194b2c8-7d1e-7c3a-9a53-0d6f5f3f2a11 --verdict fails
  holdfast items 0194b2c8-7d1e-7c3a-9a53-0d6f5f3f2a11 --from 1000 --json")]
pub(super) struct ItemsArguments {
    #[command(flatten)]
    batch: OneBatch,
    /// In this status only: pending, queued, leased, running, checking, succeeded, failed or
    /// cancelled.
    #[arg(long, value_name = "STATUS")]
    status: Option<ItemStatus>,
    /// With a verdict of this class only: holds, fails, unverified or none.
    #[arg(long, value_name = "CLASS")]
    verdict: Option<VerdictClass>,
    /// From this position on.
    #[arg(long, value_name = "POSITION", default_value_t = 0,
        value_parser = clap::value_parser!(i32).range(0..))]
    from: i32,
    /// How many to list at most.
    #[arg(long, value_name = "N", default_value_t = 50,
        value_parser = clap::value_parser!(i32).range(1..=10_000))]
    limit: i32,
}

pub(super) fn run_items(global: &Global, arguments: &ItemsArguments) -> Result<Exit, CliError> {
    let settings = load_settings(global)?;
    block_on(async {
        let database = connect(&settings).await?;
        let batch = arguments.batch.find(&database).await?;
        let mut from = arguments.from.min(batch.item_count);
        let mut left = arguments.limit;
        let mut rows = Vec::new();
        // Criteria and verdicts may be long: a part at a time.
        while left > 0 {
            let part = left.min(PART);
            let items = part_of(&database, &batch, arguments, from, part).await?;
            let count = i32::try_from(items.len()).unwrap_or(i32::MAX);
            if global.json {
                items.iter().try_for_each(print_json)?;
            } else {
                rows.extend(items.iter().map(row));
            }
            from = items.last().map_or(batch.item_count, |last| last.position.get() + 1);
            left -= count;
            if count < part {
                break;
            }
        }
        if global.json {
            return Ok(Exit::Done);
        }
        let header = ["position", "status", "attempt", "verdict", "time", "key", "error"];
        print_text(&table(header, &rows))?;
        if left == 0 && from < batch.item_count {
            remark(&format!("there may be more: --from {from}"));
        }
        Ok(Exit::Done)
    })
}

/// Items read at a time.
const PART: i32 = 200;

async fn part_of(
    database: &Database,
    batch: &BatchRow,
    arguments: &ItemsArguments,
    from: i32,
    limit: i32,
) -> Result<Vec<ItemRow>, CliError> {
    let (from, status) = (Position::new(from), arguments.status);
    Ok(match arguments.verdict {
        None => database.items(batch.id, status, from, limit).await?,
        Some(class) => database.items_with_verdict(batch.id, class, status, from, limit).await?,
    })
}

/// The word for an item's verdict, where it has one.
fn verdict_of(item: &ItemRow) -> String {
    or_dash(item.acceptance_verdict.as_ref().map(|verdict| verdict.class().to_string()))
}

fn row(item: &ItemRow) -> [String; 7] {
    [
        item.position.to_string(),
        item.status.to_string(),
        or_dash(item.attempt.map(|attempt| attempt.to_string())),
        verdict_of(item),
        or_dash(item.finished_at.or(item.started_at).or(item.ready_at).map(time)),
        brief(&item.key, 60),
        brief(item.error.as_deref().unwrap_or(NOTHING), 100),
    ]
}

/// Show one item: its input, its result, and every attempt.
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  holdfast item 0194b2c8-7d1e-7c3a-9a53-0d6f5f3f2a11 REQ-0042
  holdfast item 0194b2c8-7d1e-7c3a-9a53-0d6f5f3f2a11 --position 41 --json | jq .result")]
pub(super) struct ItemArguments {
    #[command(flatten)]
    batch: OneBatch,
    /// The item's key.
    #[arg(value_name = "KEY", required_unless_present = "position")]
    key: Option<String>,
    /// The item's position, in place of its key.
    #[arg(long, value_name = "POSITION", conflicts_with = "key",
        value_parser = clap::value_parser!(i32).range(0..))]
    position: Option<i32>,
}

/// Everything about one item.
struct Item {
    row: ItemRow,
    input_json: String,
    outcome: Option<ExportRow>,
    attempts: Vec<AttemptRow>,
}

pub(super) fn run_item(global: &Global, arguments: &ItemArguments) -> Result<Exit, CliError> {
    let settings = load_settings(global)?;
    block_on(async {
        let database = connect(&settings).await?;
        let batch = arguments.batch.find(&database).await?;
        let position = match (&arguments.key, arguments.position) {
            (Some(key), _) => position_of(&database, &batch, key).await?,
            (None, position) => Position::new(position.unwrap_or_default()),
        };
        let item = read(&database, &batch, position).await?;
        if global.json {
            print_json(&document(item)?)?;
        } else {
            print_text(&describe(&item, settings.limits.preview_chars))?;
        }
        Ok(Exit::Done)
    })
}

/// The position of the item with this key.
pub(super) async fn position_of(
    database: &Database,
    batch: &BatchRow,
    key: &str,
) -> Result<Position, CliError> {
    database.position_of_key(batch.id, key).await?.ok_or_else(|| {
        CliError::new(Exit::Denied, format!("no item with the key {key:?} in batch {}", batch.id))
    })
}

async fn read(database: &Database, batch: &BatchRow, position: Position) -> Result<Item, CliError> {
    let missing = || {
        let message = format!(
            "no item at position {position}: batch {} has {} items, from 0 on",
            batch.id, batch.item_count
        );
        CliError::new(Exit::Denied, message)
    };
    if position.get() >= batch.item_count {
        return Err(missing());
    }
    let row = database.items(batch.id, None, position, 1).await?.pop().ok_or_else(missing)?;
    let input = database.item_inputs(batch.id, &[position]).await?.pop().ok_or_else(missing)?;
    let range = ExportRange {
        batch: batch.id,
        cancelled: batch.is_cancelled(),
        statuses: ENDED.to_vec(),
        verdicts: VerdictClass::ALL.to_vec(),
        from: position,
        positions: 1,
        bytes: 1,
    };
    let outcome = database.export_page(&range).await?.rows.pop();
    let attempts = database.attempts_of_item(batch.id, position).await?;
    Ok(Item { row, input_json: input.input_json, outcome, attempts })
}

#[derive(Serialize)]
struct ItemDocument {
    #[serde(flatten)]
    row: ItemRow,
    input: Box<RawValue>,
    result: Option<Box<RawValue>>,
    result_truncated: bool,
    result_size: i64,
    /// The attempts that did not end in the outcome, oldest first.
    attempts: Vec<AttemptRow>,
}

fn document(item: Item) -> Result<ItemDocument, CliError> {
    let Item { row, input_json, outcome, attempts } = item;
    let (result, result_truncated, result_size) = match outcome {
        Some(outcome) => (outcome.result_json, outcome.result_truncated, outcome.result_size),
        None => (None, false, 0),
    };
    Ok(ItemDocument {
        row,
        input: verbatim(input_json)?,
        result: result.map(verbatim).transpose()?,
        result_truncated,
        result_size,
        attempts,
    })
}

/// Stored JSON as it is, digit for digit.
fn verbatim(json: String) -> Result<Box<RawValue>, CliError> {
    RawValue::from_string(json)
        .map_err(|error| CliError::new(Exit::Internal, format!("stored JSON is broken: {error}")))
}

fn describe(item: &Item, preview_chars: usize) -> String {
    let Item { row, input_json, outcome, attempts } = item;
    let result = outcome.as_ref().and_then(|outcome| outcome.result_json.as_deref());
    let size = outcome.as_ref().map(|outcome| {
        let cut = if outcome.result_truncated { ", cut when it was stored" } else { "" };
        format!("{} bytes{cut}", outcome.result_size)
    });
    let mut text = pairs(&[
        ("key", plain(&row.key).into_owned()),
        ("position", row.position.to_string()),
        ("status", row.status.to_string()),
        ("attempt", or_dash(row.attempt.map(|attempt| attempt.to_string()))),
        ("ready at", or_dash(row.ready_at.map(time))),
        ("started", or_dash(row.started_at.map(time))),
        ("ended", or_dash(row.finished_at.map(time))),
        ("worker", or_dash(row.worker_id.map(|id| id.to_string()))),
        ("lease", or_dash(row.lease_id.map(|id| id.to_string()))),
        ("token", or_dash(row.token.clone())),
        ("stop reason", or_dash(row.stop_reason.as_deref().map(|text| plain(text).into_owned()))),
        ("error", or_dash(row.error.as_deref().map(|text| plain(text).into_owned()))),
        ("input", brief(input_json, preview_chars)),
        ("result", or_dash(result.map(|json| brief(json, preview_chars)))),
        ("result size", or_dash(size)),
    ]);
    if let Some(verdict) = &row.acceptance_verdict {
        // One leaf is one line, whatever its criterion holds.
        text.extend(["\n", &verdict.to_string(), "\n"]);
    } else if let Some(criteria) = &row.acceptance_criteria {
        text.push_str("\nacceptance criteria, without a verdict:\n");
        let texts: Vec<String> = serde_json::from_str(criteria.get()).unwrap_or_default();
        for criterion in &texts {
            text.extend(["- ", &one_line(criterion), "\n"]);
        }
    }
    if !attempts.is_empty() {
        text.push_str("\nattempts that did not end it:\n");
        text.push_str(&list_attempts(attempts));
    }
    text
}

fn list_attempts(attempts: &[AttemptRow]) -> String {
    let rows: Vec<[String; 6]> = attempts
        .iter()
        .map(|attempt| {
            let how = match (attempt.exit_status, attempt.signal) {
                (Some(status), _) => format!("{}, status {status}", attempt.ending),
                (None, Some(signal)) => format!("{}, signal {signal}", attempt.ending),
                (None, None) => attempt.ending.clone(),
            };
            [
                attempt.attempt.to_string(),
                how,
                if attempt.charged { "yes".to_owned() } else { "no".to_owned() },
                time(attempt.ended_at),
                attempt.worker_id.to_string(),
                brief(attempt.error.as_deref().unwrap_or(NOTHING), 200),
            ]
        })
        .collect();
    table(["attempt", "ending", "charged", "ended", "worker", "error"], &rows)
}
