//! `holdfast show` and `holdfast batches`.

use clap::Args;

use super::Global;
use super::context::{OneBatch, Owner, block_on, connect, load_settings};
use super::exit::{CliError, Exit};
use super::output::{
    NOTHING, brief, count, or_dash, pairs, plain, print_json, print_text, remark, table, time,
};
use crate::model::{BatchId, Counts, QueueName, VerdictCounts};
use crate::store::{BatchFilter, BatchRow};

/// Show one batch: its parameters, its state, and how many items are where.
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  holdfast show 0194b2c8-7d1e-7c3a-9a53-0d6f5f3f2a11
  holdfast show 0194b2c8-7d1e-7c3a-9a53-0d6f5f3f2a11 --json | jq .counts")]
pub(super) struct ShowArguments {
    #[command(flatten)]
    batch: OneBatch,
}

pub(super) fn run_show(global: &Global, arguments: &ShowArguments) -> Result<Exit, CliError> {
    let settings = load_settings(global)?;
    block_on(async {
        let database = connect(&settings).await?;
        let batch = arguments.batch.find(&database).await?;
        if global.json {
            print_json(&batch)?;
        } else {
            print_text(&describe(&batch))?;
        }
        Ok(Exit::Done)
    })
}

fn describe(batch: &BatchRow) -> String {
    let text =
        |text: &Option<String>| or_dash(text.as_deref().map(|text| plain(text).into_owned()));
    let unlimited = || "unlimited".to_owned();
    pairs(&[
        ("batch", batch.id.to_string()),
        ("state", batch.state.clone()),
        ("items", describe_counts(&batch.counts, batch.item_count)),
        ("verdicts", describe_verdicts(&batch.verdicts)),
        ("queue", batch.queue.clone()),
        ("owner", plain(&batch.owner).into_owned()),
        ("title", text(&batch.title)),
        ("key", text(&batch.submission_key)),
        ("thread", text(&batch.thread)),
        ("priority", batch.priority.to_string()),
        ("max running", batch.max_running.map_or_else(unlimited, count)),
        ("max live", count(batch.max_live)),
        ("max checking", count(batch.max_checking)),
        ("max attempts", count(batch.max_attempts)),
        ("not before", or_dash(batch.not_before.map(time))),
        ("submitted", time(batch.created_at)),
        ("ended", or_dash(batch.finished_at.map(time))),
    ])
}

/// The counts that are not zero, in the order of an item's life.
fn describe_counts(counts: &Counts, total: i32) -> String {
    let named = [
        (counts.fresh, "never claimed"),
        (counts.waiting, "waiting"),
        (counts.executing, "executing"),
        (counts.checking, "checking"),
        (counts.succeeded, "succeeded"),
        (counts.failed, "failed"),
        (counts.cancelled, "cancelled"),
    ];
    let parts: Vec<String> = named
        .into_iter()
        .filter(|(number, _)| *number > 0)
        .map(|(number, name)| format!("{} {name}", count(number)))
        .collect();
    format!("{}: {}", count(total), parts.join(", "))
}

/// The counts that are not zero; items without a verdict are in none.
fn describe_verdicts(counts: &VerdictCounts) -> String {
    let named = [(counts.holds, "hold"), (counts.fails, "fail"), (counts.unverified, "UNVERIFIED")];
    let parts: Vec<String> = named
        .into_iter()
        .filter(|(number, _)| *number > 0)
        .map(|(number, name)| format!("{} {name}", count(number)))
        .collect();
    if parts.is_empty() { NOTHING.to_owned() } else { parts.join(", ") }
}

/// List batches, newest first.
#[derive(Args, Debug)]
#[command(after_help = "\
With --json one object a line.

Examples:
  holdfast batches --state running
  holdfast batches --queue review --owner ana --limit 10
  holdfast batches --before 0194b2c8-7d1e-7c3a-9a53-0d6f5f3f2a11")]
pub(super) struct BatchesArguments {
    /// In this state only.
    #[arg(long, value_name = "STATE", value_parser =
        ["queued", "running", "paused", "finished", "cancelled"])]
    state: Option<String>,
    /// Of this queue only.
    #[arg(long, value_name = "QUEUE")]
    queue: Option<QueueName>,
    #[command(flatten)]
    owner: Owner,
    /// How many to list at most.
    #[arg(long, value_name = "N", default_value_t = 50,
        value_parser = clap::value_parser!(i64).range(1..=1000))]
    limit: i64,
    /// Only those submitted before this one: the last of the page before.
    #[arg(long, value_name = "BATCH")]
    before: Option<BatchId>,
}

pub(super) fn run_batches(global: &Global, arguments: &BatchesArguments) -> Result<Exit, CliError> {
    let settings = load_settings(global)?;
    let filter = BatchFilter {
        owner: arguments.owner.owner.clone(),
        queue: arguments.queue.as_ref().map(ToString::to_string),
        state: arguments.state.clone(),
        before: arguments.before,
    };
    block_on(async {
        let database = connect(&settings).await?;
        let batches = database.batches(&filter, arguments.limit).await?;
        if global.json {
            batches.iter().try_for_each(print_json)?;
            return Ok(Exit::Done);
        }
        print_text(&list(&batches))?;
        if let Some(last) = batches.last()
            && i64::try_from(batches.len()).is_ok_and(|listed| listed == arguments.limit)
        {
            remark(&format!("there may be more: --before {}", last.id));
        }
        Ok(Exit::Done)
    })
}

fn list(batches: &[BatchRow]) -> String {
    let rows: Vec<[String; 10]> = batches
        .iter()
        .map(|batch| {
            let title = batch.title.as_deref().unwrap_or(NOTHING);
            [
                batch.id.to_string(),
                batch.state.clone(),
                batch.queue.clone(),
                brief(&batch.owner, 24),
                count(batch.item_count),
                count(batch.item_count - batch.counts.unfinished()),
                count(batch.counts.failed),
                describe_verdicts(&batch.verdicts),
                time(batch.created_at),
                brief(title, 60),
            ]
        })
        .collect();
    table(
        [
            "batch",
            "state",
            "queue",
            "owner",
            "items",
            "ended",
            "failed",
            "verdicts",
            "submitted",
            "title",
        ],
        &rows,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verdicts_are_counted_apart() {
        let counts = VerdictCounts { holds: 2, fails: 0, unverified: 1 };
        assert_eq!(describe_verdicts(&counts), "2 hold, 1 UNVERIFIED");
        assert_eq!(describe_verdicts(&VerdictCounts::default()), "-");
    }

    #[test]
    fn only_counts_that_say_something_are_shown() {
        let counts = Counts { fresh: 1_500, succeeded: 3, failed: 1, ..Counts::default() };
        assert_eq!(
            describe_counts(&counts, counts.total()),
            "1,504: 1,500 never claimed, 3 succeeded, 1 failed"
        );
    }
}
