//! `holdfast watch`.

use std::collections::VecDeque;
use std::io::{self, IsTerminal};
use std::time::Duration;

use clap::Args;
use indicatif::ProgressBar;
use serde::Serialize;
use signal_hook::consts::SIGINT;

use super::Global;
use super::context::{Interrupt, OneBatch, block_on, connect, load_settings, unknown_batch};
use super::exit::{CliError, Exit};
use super::output::{count, print_json, print_line, progress_bar, remark};
use crate::clock::{BootInstant, Clock, SystemClock};
use crate::model::{BatchId, Counts};
use crate::store::{BatchRow, Database};

/// Follow a batch to its end.
///
/// At a terminal it shows a progress bar; elsewhere a line on standard error whenever something has
/// changed, every two seconds at most; with --json a line of counts on standard output for every
/// change. It waits while the database is away, and while the batch is paused.
#[derive(Args, Debug)]
#[command(after_help = "\
Exit codes: 0 all items succeeded; 1 the batch ended with failed items, or was cancelled; 130
interrupted: the batch goes on.

Examples:
  holdfast watch 0194b2c8-7d1e-7c3a-9a53-0d6f5f3f2a11
  holdfast watch 0194b2c8-7d1e-7c3a-9a53-0d6f5f3f2a11 --json | jq .counts.failed")]
pub(super) struct WatchArguments {
    #[command(flatten)]
    batch: OneBatch,
}

pub(super) fn run(global: &Global, arguments: &WatchArguments) -> Result<Exit, CliError> {
    let settings = load_settings(global)?;
    block_on(async {
        let database = connect(&settings).await?;
        let OneBatch { batch, owner } = &arguments.batch;
        follow(&database, *batch, owner.name(), global.json).await
    })
}

/// How often the counts are read.
const REFRESH: Duration = Duration::from_millis(500);
/// Longest pause while the database is away.
const AWAY: Duration = Duration::from_secs(5);
/// Shortest time between two lines where no terminal shows a bar.
const BETWEEN_LINES: Duration = Duration::from_secs(2);

/// Follows a batch to its end, until an interrupt.
pub(super) async fn follow(
    database: &Database,
    batch: BatchId,
    owner: Option<&str>,
    json: bool,
) -> Result<Exit, CliError> {
    let mut interrupt = Interrupt::on(&[SIGINT])?;
    let mut display = Display::new(json);
    let ended = tokio::select! {
        ended = to_the_end(database, batch, owner, &mut display) => Some(ended),
        () = interrupt.wait() => None,
    };
    display.close();
    let Some(ended) = ended else {
        remark(&format!("the batch goes on; look again with: holdfast watch {batch}"));
        return Ok(Exit::Interrupted);
    };
    summary(&ended?, json)
}

/// Shows a batch until it has ended.
pub(super) async fn to_the_end(
    database: &Database,
    batch: BatchId,
    owner: Option<&str>,
    display: &mut Display,
) -> Result<BatchRow, CliError> {
    let mut seen = false;
    let mut pause = REFRESH;
    loop {
        match database.batch(batch, owner).await {
            Ok(Some(row)) => {
                seen = true;
                pause = REFRESH;
                display.show(&row)?;
                if row.is_finished() {
                    return Ok(row);
                }
            }
            Ok(None) => return Err(unknown_batch(batch)),
            Err(error) if seen && error.is_outage() => {
                display.away();
                pause = (pause * 2).min(AWAY);
            }
            Err(error) => return Err(error.into()),
        }
        tokio::time::sleep(pause).await;
    }
}

fn summary(batch: &BatchRow, json: bool) -> Result<Exit, CliError> {
    let Counts { succeeded, failed, cancelled, .. } = batch.counts;
    if !json {
        let end = if batch.is_cancelled() { "was cancelled" } else { "has ended" };
        let mut parts = vec![format!("{} succeeded", count(succeeded))];
        parts.extend((failed > 0).then(|| format!("{} failed", count(failed))));
        parts.extend((cancelled > 0).then(|| format!("{} cancelled", count(cancelled))));
        print_line(&format!("batch {} {end}: {}", batch.id, parts.join(", ")))?;
    }
    Ok(exit_of(batch))
}

/// How a batch that has ended ends the command that waited for it.
pub(super) const fn exit_of(batch: &BatchRow) -> Exit {
    let all_well = batch.counts.failed == 0 && batch.counts.cancelled == 0;
    if all_well { Exit::Done } else { Exit::FailedItems }
}

/// What is seen of a batch while it is followed.
pub(super) struct Display {
    json: bool,
    bar: Option<ProgressBar>,
    clock: SystemClock,
    pace: Pace,
    shown: Option<(String, Counts)>,
    shown_at: Option<BootInstant>,
    away: bool,
}

/// One look at a batch, for programs.
#[derive(Serialize)]
struct Look<'a> {
    batch: BatchId,
    state: &'a str,
    items: i32,
    ended: i32,
    counts: &'a Counts,
    items_per_second: Option<f64>,
    seconds_left: Option<u64>,
}

impl Display {
    pub(super) fn new(json: bool) -> Self {
        let at_terminal = !json && io::stderr().is_terminal();
        let bar = at_terminal.then(|| progress_bar(json, Some(0), "[{wide_bar}]\n{wide_msg}"));
        let clock = SystemClock;
        Self { json, bar, clock, pace: Pace::default(), shown: None, shown_at: None, away: false }
    }

    fn show(&mut self, batch: &BatchRow) -> Result<(), CliError> {
        let now = self.clock.now();
        let ended = batch.item_count - batch.counts.unfinished();
        self.pace.note(now, ended);
        if std::mem::take(&mut self.away) && self.bar.is_none() {
            remark("the database is back");
        }
        if let Some(bar) = &self.bar {
            bar.set_length(u64::from(batch.item_count.unsigned_abs()));
            bar.set_position(u64::from(ended.unsigned_abs()));
            bar.set_message(self.describe(batch));
            return Ok(());
        }
        let seen = (batch.state.clone(), batch.counts);
        if self.shown.as_ref() == Some(&seen) {
            return Ok(());
        }
        if self.json {
            print_json(&Look {
                batch: batch.id,
                state: &batch.state,
                items: batch.item_count,
                ended,
                counts: &batch.counts,
                items_per_second: self.pace.per_second(),
                seconds_left: self.pace.left(batch.counts.unfinished()).map(|left| left.as_secs()),
            })?;
        } else {
            let soon = self.shown_at.is_some_and(|at| now.since(at) < BETWEEN_LINES);
            if soon && !batch.is_finished() {
                return Ok(());
            }
            remark(&self.describe(batch));
        }
        self.shown = Some(seen);
        self.shown_at = Some(now);
        Ok(())
    }

    /// One line about a batch.
    fn describe(&self, batch: &BatchRow) -> String {
        let counts = &batch.counts;
        let ended = batch.item_count - counts.unfinished();
        let mut parts = vec![
            format!("{}/{}", count(ended), count(batch.item_count)),
            format!("{} failed", count(counts.failed)),
        ];
        if !batch.is_finished() {
            parts.push(format!("{} running", count(counts.executing)));
            parts.push(format!("{} waiting", count(counts.waiting)));
            parts.extend(self.pace.per_second().map(|rate| format!("{rate:.1}/s")));
            let left = self.pace.left(counts.unfinished());
            parts.extend(left.map(|left| format!("{} left", humantime::format_duration(left))));
        }
        if batch.state == "paused" {
            parts.push(format!("paused; go on with: holdfast resume {}", batch.id));
        }
        parts.join(", ")
    }

    fn away(&mut self) {
        const AWAY: &str = "the database is away; waiting for it";
        match &self.bar {
            Some(bar) => bar.set_message(AWAY),
            None if !self.away => remark(AWAY),
            None => {}
        }
        self.away = true;
    }

    pub(super) fn close(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// How fast items end, over the last half minute.
#[derive(Default)]
struct Pace(VecDeque<(BootInstant, i32)>);

impl Pace {
    const WINDOW: Duration = Duration::from_secs(30);

    fn note(&mut self, now: BootInstant, ended: i32) {
        // A retry takes ended items back: what was seen before says nothing about the rate then.
        if self.0.back().is_some_and(|(_, before)| ended < *before) {
            self.0.clear();
        }
        self.0.push_back((now, ended));
        while self.0.len() > 2 && now.since(self.0[1].0) >= Self::WINDOW {
            self.0.pop_front();
        }
    }

    /// Items a second; none before any ended.
    fn per_second(&self) -> Option<f64> {
        let ((from, before), (to, after)) = (self.0.front()?, self.0.back()?);
        let seconds = to.since(*from).as_secs_f64();
        (seconds > 0.0 && after > before).then(|| f64::from(after - before) / seconds)
    }

    /// How long `unfinished` items take at this rate, in whole seconds.
    fn left(&self, unfinished: i32) -> Option<Duration> {
        let seconds = (f64::from(unfinished) / self.per_second()?).ceil();
        Duration::try_from_secs_f64(seconds).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> BootInstant {
        BootInstant::from_nanos(seconds * 1_000_000_000)
    }

    #[test]
    fn the_pace_is_that_of_the_last_half_minute() {
        let mut pace = Pace::default();
        pace.note(at(0), 0);
        assert_eq!(pace.per_second(), None);
        pace.note(at(10), 1_000);
        assert_eq!(pace.per_second(), Some(100.0));
        for seconds in 11..=60 {
            pace.note(at(seconds), 1_000 + i32::try_from(seconds).unwrap());
        }
        assert_eq!(pace.per_second(), Some(1.0));
        assert_eq!(pace.left(90), Some(Duration::from_secs(90)));
    }

    #[test]
    fn a_standstill_has_no_pace() {
        let mut pace = Pace::default();
        pace.note(at(0), 5);
        pace.note(at(10), 5);
        assert_eq!((pace.per_second(), pace.left(1)), (None, None));
    }

    #[test]
    fn a_retry_begins_anew() {
        let mut pace = Pace::default();
        pace.note(at(0), 0);
        pace.note(at(10), 100);
        pace.note(at(20), 50);
        assert_eq!(pace.per_second(), None);
        pace.note(at(21), 52);
        assert_eq!(pace.per_second(), Some(2.0));
    }
}
