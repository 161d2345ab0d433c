//! `holdfast prune`.

use std::sync::Arc;
use std::time::Duration;

use clap::{Args, ValueEnum};
use serde_json::json;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::Global;
use super::context::{Owner, actor, block_on, connect, load_settings};
use super::control::persist;
use super::exit::{CliError, Exit};
use super::output::{NOTHING, pairs, print_json, print_text, progress_bar, remark, time};
use super::worker::workspaces;
use crate::clock::SystemClock;
use crate::config::Settings;
use crate::model::BatchId;
use crate::store::{Database, FlightError, Old, Prunable, PrunePlan};
use crate::supervise::{Cleaning, CleaningError};

/// Batches that are looked up at once.
const PAGE: i64 = 500;
/// How long one chunk should take: nobody waits for it, but the server has other things to do.
const TARGET: Duration = Duration::from_millis(200);
/// How often a chunk is tried again.
const TRIES: u32 = 6;
/// Positions or rows in a chunk.
const FIRST_CHUNK: i32 = 1_000;
const LEAST_CHUNK: i32 = 10;
const MOST_CHUNK: i32 = 20_000;

/// Remove what is old, in chunks: ended batches with everything of them, and more.
///
/// Without --yes it only shows what it would remove. A batch is gone for everybody at once, also its
/// submission key, under which the same can be submitted anew; its rows are cleared away then, and by
/// the next prune where this one is interrupted. Claims, hand-ins and heartbeats never wait for it.
#[derive(Args, Debug)]
#[command(after_help = "\
Kinds: batches (with items, outcomes, attempts, evidence, progress), evidence (what was recorded of
the executions of batches that stay), workers (rows of those that ended), audit (entries of the audit
log), workspaces (directories below this machine's workspace.root of batches that this database does
not have, or that ended so long ago). Default: batches and workers.

Exit codes: 130 interrupted; what is done stays done.

Examples:
  holdfast prune --older-than 30d
  holdfast prune --older-than 30d --state cancelled --owner ana --yes
  holdfast prune --older-than 90d --kind audit --kind evidence --yes --json")]
pub(super) struct PruneArguments {
    /// What ended at least this long ago, such as 12h or 30d.
    #[arg(long, value_name = "DURATION", value_parser = humantime::parse_duration)]
    older_than: Duration,
    /// What to remove; repeat it for more.
    #[arg(long = "kind", value_name = "KIND")]
    kinds: Vec<Kind>,
    /// Only batches with this end: finished or cancelled; repeat it for more.
    #[arg(long = "state", value_name = "STATE")]
    states: Vec<State>,
    #[command(flatten)]
    owner: Owner,
    /// Only batches in this queue.
    #[arg(long, value_name = "QUEUE")]
    queue: Option<String>,
    /// Do it.
    #[arg(long)]
    yes: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Kind {
    Batches,
    Evidence,
    Workers,
    Audit,
    Workspaces,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum State {
    Finished,
    Cancelled,
}

impl PruneArguments {
    /// What is asked for, and whether only some of the batches are.
    fn kinds(&self) -> Result<Vec<Kind>, CliError> {
        let of_some = self.owner.name().is_some() || self.queue.is_some();
        if self.kinds.is_empty() {
            let all = vec![Kind::Batches, Kind::Workers];
            return Ok(if of_some { vec![Kind::Batches] } else { all });
        }
        let of_nobody = |kind: &&Kind| !matches!(kind, Kind::Batches | Kind::Evidence);
        match self.kinds.iter().find(of_nobody) {
            Some(kind) if of_some => {
                let kind =
                    kind.to_possible_value().map_or_else(String::new, |v| v.get_name().to_owned());
                let wrong = format!("--kind {kind} is of no owner and no queue; give it by itself");
                Err(CliError::new(Exit::Usage, wrong))
            }
            Some(_) | None => Ok(self.kinds.clone()),
        }
    }

    fn batches(&self) -> Prunable {
        let states = if self.states.is_empty() {
            vec![State::Finished, State::Cancelled]
        } else {
            self.states.clone()
        };
        let word = |state: &State| match state {
            State::Finished => "finished".to_owned(),
            State::Cancelled => "cancelled".to_owned(),
        };
        Prunable {
            age: self.older_than,
            owner: self.owner.owner.clone(),
            queue: self.queue.clone(),
            states: states.iter().map(word).collect(),
        }
    }
}

pub(super) fn run(global: &Global, arguments: &PruneArguments) -> Result<Exit, CliError> {
    let settings = load_settings(global)?;
    let kinds = arguments.kinds()?;
    block_on(async {
        let database = connect(&settings).await?;
        let prune = Prune {
            cleaning: cleaning(&settings, &database, arguments.older_than)?,
            database,
            what: arguments.batches(),
            kinds,
            json: global.json,
        };
        if arguments.yes { prune.act().await } else { prune.show().await }?;
        Ok(Exit::Done)
    })
}

/// The clean-up of workspaces, as a worker of this machine does it.
fn cleaning(settings: &Settings, database: &Database, age: Duration) -> Result<Cleaning, CliError> {
    let mut workspace = settings.workspace.clone();
    workspace.retention = age;
    Ok(Cleaning {
        database: database.clone(),
        workspaces: workspaces(settings)?,
        clock: Arc::new(SystemClock),
        settings: workspace,
    })
}

struct Prune {
    database: Database,
    cleaning: Cleaning,
    what: Prunable,
    kinds: Vec<Kind>,
    json: bool,
}

/// What was removed.
#[derive(Clone, Copy, Debug, Default)]
struct Removed {
    batches: u64,
    rows: i64,
    evidence: i64,
    workers: i64,
    audit: i64,
    workspaces: usize,
    workspaces_held: usize,
}

impl Removed {
    fn document(&self) -> serde_json::Value {
        json!({
            "batches": self.batches,
            "rows": self.rows,
            "evidence": self.evidence,
            "workers": self.workers,
            "audit": self.audit,
            "workspaces": self.workspaces,
            "workspaces_held": self.workspaces_held,
        })
    }
}

impl Prune {
    fn does(&self, kind: Kind) -> bool {
        self.kinds.contains(&kind)
    }

    async fn show(&self) -> Result<(), CliError> {
        let plan = self.database.prune_plan(&self.what).await?;
        let unused = if self.does(Kind::Workspaces) {
            Some(self.cleaning.unused().await.map_err(files)?)
        } else {
            None
        };
        if self.json {
            return print_json(&self.document(&plan, unused));
        }
        let of =
            |kind, count: i64| if self.does(kind) { count.to_string() } else { NOTHING.to_owned() };
        let oldest =
            plan.oldest.map_or_else(String::new, |at| format!(", the oldest of {}", time(at)));
        print_text(&pairs(&[
            ("batches", of(Kind::Batches, plan.batches)),
            (
                "their items",
                of(Kind::Batches, plan.items) + if self.does(Kind::Batches) { &oldest } else { "" },
            ),
            (
                "evidence",
                if self.does(Kind::Evidence) { "of these batches" } else { NOTHING }.to_owned(),
            ),
            ("workers", of(Kind::Workers, plan.workers)),
            ("audit entries", of(Kind::Audit, plan.audit)),
            (
                "workspaces",
                unused.map_or_else(
                    || NOTHING.to_owned(),
                    |unused| format!("of {unused} batches and threads"),
                ),
            ),
            ("left from before", plan.left_over.to_string()),
        ]))?;
        remark("nothing was removed; give --yes to do it");
        Ok(())
    }

    fn document(&self, plan: &PrunePlan, workspaces: Option<usize>) -> serde_json::Value {
        let of = |kind, count: i64| self.does(kind).then_some(count);
        json!({
            "dry_run": true,
            "batches": of(Kind::Batches, plan.batches),
            "items": of(Kind::Batches, plan.items),
            "workers": of(Kind::Workers, plan.workers),
            "audit": of(Kind::Audit, plan.audit),
            "workspaces": workspaces,
            "left_over": plan.left_over,
        })
    }

    async fn act(&self) -> Result<(), CliError> {
        let mut removed = Removed::default();
        if self.does(Kind::Evidence) && !self.does(Kind::Batches) {
            self.evidence(&mut removed).await?;
        }
        if self.does(Kind::Batches) {
            self.batches(&mut removed).await?;
        }
        let age = self.what.age;
        if self.does(Kind::Workers) {
            let some = async |limit| self.database.prune_workers(age, limit).await;
            removed.workers = all(some).await?;
        }
        if self.does(Kind::Audit) {
            let some = async |limit| self.database.prune_audit(age, limit).await;
            removed.audit = all(some).await?;
        }
        if self.does(Kind::Workspaces) {
            let cleaned = self.cleaning.clean(&CancellationToken::new()).await.map_err(files)?;
            removed.workspaces = cleaned.removed;
            removed.workspaces_held = cleaned.held;
        }
        self.note(&removed).await?;
        self.tell(&removed)
    }

    /// What an earlier prune left, then batch after batch: out of everybody's sight, then away.
    async fn batches(&self, removed: &mut Removed) -> Result<(), CliError> {
        let plan = self.database.prune_plan(&self.what).await?;
        let left = self.database.removed_batches().await?;
        let positions = |old: &[Old]| old.iter().map(|old| i64::from(old.items)).sum::<i64>();
        let all = u64::try_from(plan.items + positions(&left)).unwrap_or(0);
        let bar =
            progress_bar(self.json, Some(all), "pruning [{bar:40}] {human_pos}/{human_len} items");
        let mut pace = Pace::new();
        for old in left {
            removed.rows += self.clear(old.batch, &mut pace, &bar).await?;
        }
        let actor = actor();
        let mut after = None;
        loop {
            let page = self.database.prunable_batches(&self.what, after, PAGE).await?;
            let Some(last) = page.last() else { break };
            after = Some(last.batch);
            for old in &page {
                let remove =
                    async || self.database.remove_batch(old.batch, self.what.age, &actor).await;
                // A try whose answer was lost may have been the one: then it is left from before.
                if persist(remove).await? {
                    removed.batches += 1;
                    removed.rows += self.clear(old.batch, &mut pace, &bar).await?;
                }
            }
        }
        for old in self.database.removed_batches().await? {
            removed.rows += self.clear(old.batch, &mut pace, &bar).await?;
        }
        bar.finish_and_clear();
        Ok(())
    }

    async fn clear(
        &self,
        batch: BatchId,
        pace: &mut Pace,
        bar: &indicatif::ProgressBar,
    ) -> Result<i64, CliError> {
        let mut rows = 0;
        loop {
            let some = async |limit| self.database.clear_removed(batch, limit).await;
            let cleared = pace.keep(some).await?;
            rows += cleared.rows;
            bar.inc(cleared.positions);
            if cleared.done {
                return Ok(rows);
            }
        }
    }

    async fn evidence(&self, removed: &mut Removed) -> Result<(), CliError> {
        let mut after = None;
        let mut pace = Pace::new();
        loop {
            let page = self.database.prunable_batches(&self.what, after, PAGE).await?;
            let Some(last) = page.last() else { return Ok(()) };
            after = Some(last.batch);
            for old in &page {
                loop {
                    let age = self.what.age;
                    let some = async |limit: i32| {
                        self.database.prune_evidence(old.batch, age, limit.into()).await
                    };
                    let rows = pace.keep(some).await?;
                    removed.evidence += rows;
                    if rows == 0 {
                        break;
                    }
                }
            }
        }
    }

    async fn note(&self, removed: &Removed) -> Result<(), CliError> {
        let kinds: Vec<String> = self
            .kinds
            .iter()
            .filter_map(|kind| kind.to_possible_value().map(|value| value.get_name().to_owned()))
            .collect();
        let detail = json!({
            "kinds": kinds, "older_than_s": self.what.age.as_secs(), "owner": self.what.owner,
            "queue": self.what.queue, "removed": removed.document(),
        });
        Ok(self.database.note_audit(&actor(), "prune", &detail).await?)
    }

    fn tell(&self, removed: &Removed) -> Result<(), CliError> {
        if self.json {
            return print_json(&removed.document());
        }
        print_text(&pairs(&[
            ("batches", format!("{}, with {} rows", removed.batches, removed.rows)),
            ("evidence", removed.evidence.to_string()),
            ("workers", removed.workers.to_string()),
            ("audit entries", removed.audit.to_string()),
            (
                "workspaces",
                format!("{}; {} are in use", removed.workspaces, removed.workspaces_held),
            ),
        ]))
    }
}

/// The size of the next chunk, by how long the last one took.
struct Pace {
    chunk: i32,
}

impl Pace {
    const fn new() -> Self {
        Self { chunk: FIRST_CHUNK }
    }

    /// Removes a chunk, then leaves the server as long to others. One that took too long is tried
    /// again, smaller.
    async fn keep<T>(
        &mut self,
        some: impl AsyncFn(i32) -> Result<T, FlightError>,
    ) -> Result<T, CliError> {
        for _ in 0..TRIES {
            let began = Instant::now();
            match some(self.chunk).await {
                Ok(done) => {
                    let took = began.elapsed();
                    self.adapt(took);
                    tokio::time::sleep(took.min(TARGET)).await;
                    return Ok(done);
                }
                Err(failed) if failed.is_lasting() => return Err(failed.into()),
                Err(FlightError::NotSent(error)) => return Err(error.into()),
                Err(FlightError::Unknown(_) | FlightError::RolledBack(_)) => {
                    self.adapt(Duration::MAX);
                    tokio::time::sleep(TARGET).await;
                }
            }
        }
        some(self.chunk).await.map_err(CliError::from)
    }

    fn adapt(&mut self, took: Duration) {
        if took > TARGET {
            self.chunk = (self.chunk / 2).max(LEAST_CHUNK);
        } else if took < TARGET / 4 {
            self.chunk = (self.chunk * 2).min(MOST_CHUNK);
        }
    }
}

/// Removes chunk after chunk until there is none; how many rows.
async fn all(some: impl AsyncFn(i64) -> Result<i64, FlightError>) -> Result<i64, CliError> {
    let mut rows = 0;
    let mut pace = Pace::new();
    loop {
        let removed = pace.keep(async |limit: i32| some(limit.into()).await).await?;
        rows += removed;
        if removed == 0 {
            return Ok(rows);
        }
    }
}

fn files(error: CleaningError) -> CliError {
    match error {
        CleaningError::Store(error) => error.into(),
        error @ CleaningError::Files(_) => {
            CliError::new(Exit::Output, format!("workspaces: {error}"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_grow_while_they_are_quick_and_shrink_when_they_are_not() {
        let mut pace = Pace::new();
        for _ in 0..20 {
            pace.adapt(Duration::from_millis(1));
        }
        assert_eq!(pace.chunk, MOST_CHUNK);
        pace.adapt(Duration::from_millis(100));
        assert_eq!(pace.chunk, MOST_CHUNK);
        for _ in 0..20 {
            pace.adapt(Duration::from_secs(3));
        }
        assert_eq!(pace.chunk, LEAST_CHUNK);
    }
}
