//! `holdfast doctor`.

mod finding;
mod judge;

use std::time::Duration;

use clap::Args;
use serde_json::json;

use self::finding::{Finding, Severity};
use self::judge::{Judge, unseen};
use super::Global;
use super::context::{block_on, load_settings};
use super::exit::{CliError, Exit};
use super::output::{plain, print_json, print_line, progress_bar};
use crate::clock::{Clock, SystemClock};
use crate::config::Settings;
use crate::model::BatchId;
use crate::store::{Database, FlightError, Look, ToVerify, migrate};
use crate::supervise::database_options;

/// How long one look may take.
const LOOK: Duration = Duration::from_secs(5);
/// How long one look of a verification may take.
const VERIFY: Duration = Duration::from_mins(1);
/// Positions of one look of a verification: what the server keeps in memory at once.
const POSITIONS: i32 = 20_000;
/// Batches listed at a time.
const BATCHES: i64 = 500;
/// Faults of one batch that are shown.
const FAULTS: usize = 20;

/// Look for what is wrong, or will be: with the server, its settings, the schema, leases, workers.
///
/// Changes nothing: each look is a read-only transaction of five seconds at most, and one that fails
/// is a finding itself. Every finding says what it means and what to do.
#[derive(Args, Debug)]
#[command(after_help = "\
Exit codes: 0 nothing, or notes; 10 warnings, the worst of what was found; 20 faults that stop work
or endanger results. With --json one document with the findings, worst first.

Examples:
  holdfast doctor
  holdfast doctor --older-than 1m
  holdfast doctor --verify --json | jq '.findings[] | select(.severity == \"critical\")'")]
pub(super) struct DoctorArguments {
    /// Compare the counts and places of all items of all batches as well; reads every outcome.
    #[arg(long)]
    verify: bool,
    /// Transactions open for longer are findings.
    #[arg(long, value_name = "DURATION", default_value = "5m", value_parser = humantime::parse_duration)]
    older_than: Duration,
}

pub(super) fn run(global: &Global, arguments: &DoctorArguments) -> Result<Exit, CliError> {
    let settings = load_settings(global)?;
    block_on(async {
        let database = Database::new(database_options(&settings, "holdfast doctor")?)?;
        let mut findings = examine(&database, &settings, arguments, global.json).await;
        findings.sort_by(|a, b| b.severity.cmp(&a.severity).then(a.name.cmp(b.name)));
        let worst = findings.iter().map(|finding| finding.severity).max();
        print(&findings, worst, global.json)?;
        Ok(match worst {
            None | Some(Severity::Note) => Exit::Done,
            Some(Severity::Warning) => Exit::Warnings,
            Some(Severity::Critical) => Exit::Faults,
        })
    })
}

async fn examine(
    database: &Database,
    settings: &Settings,
    arguments: &DoctorArguments,
    json: bool,
) -> Vec<Finding> {
    let judge = Judge { older_than: arguments.older_than };
    let server = match database.look(Look::Server, LOOK).await {
        Ok(facts) => facts,
        Err(failed) => return vec![judge::unreachable(&failed)],
    };
    let mut findings: Vec<Finding> = server.iter().filter_map(|fact| judge.fact(fact)).collect();
    match database.pools_transactions(LOOK).await {
        Ok(false) => {}
        Ok(true) => findings.extend(judge::pooled(settings.database.listen_url.is_some())),
        Err(failed) => findings.push(judge::pooler_failed(&failed)),
    }
    let clock = SystemClock;
    let (asked, asked_wall) = (clock.now(), clock.wall());
    match database.clock(LOOK).await {
        Ok(theirs) => findings.extend(judge::clock(theirs - asked_wall, clock.now().since(asked))),
        Err(failed) => findings.push(unseen("clock", &failed)),
    }
    match database.look(Look::Holders, LOOK).await {
        Ok(facts) => findings.extend(facts.iter().filter_map(|fact| judge.fact(fact))),
        Err(failed) => findings.push(unseen("vacuum", &failed)),
    }
    if let Err(wrong) = migrate::check(database).await {
        // Looks at tables that may not be there would only say so once more.
        findings.push(judge::schema(&wrong));
        return findings;
    }
    for (look, name) in [(Look::Tables, "tables"), (Look::Leases, "leases"), (Look::State, "state")]
    {
        match database.look(look, LOOK).await {
            Ok(facts) => findings.extend(facts.iter().filter_map(|fact| judge.fact(fact))),
            Err(failed) => findings.push(unseen(name, &failed)),
        }
    }
    if arguments.verify
        && let Err(failed) = verify(database, json, &mut findings).await
    {
        findings.push(unseen("all batches", &failed));
    }
    findings
}

/// Verifies batch after batch, each in steps, so that no snapshot is held for long and neither side
/// keeps more than a step in memory.
async fn verify(
    database: &Database,
    json: bool,
    findings: &mut Vec<Finding>,
) -> Result<(), FlightError> {
    let bar = progress_bar(json, None, "verifying {spinner} {human_pos} batches");
    let mut after: Option<BatchId> = None;
    loop {
        let batches = database.batches_to_verify(after, BATCHES, VERIFY).await?;
        let Some(last) = batches.last() else { break };
        after = Some(last.id);
        for batch in batches {
            match faults_of(database, batch).await {
                Ok(faults) if faults.is_empty() => {}
                Ok(faults) => findings.push(judge::inconsistent(batch.id, &faults)),
                Err(failed) => findings.push(judge::unverified(batch.id, &failed)),
            }
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    Ok(())
}

async fn faults_of(database: &Database, batch: ToVerify) -> Result<Vec<String>, FlightError> {
    let mut faults = database.verify_counts(batch.id, VERIFY).await?;
    let mut from = 0;
    while from < batch.items && faults.len() < FAULTS {
        let to = from.saturating_add(POSITIONS);
        faults.extend(database.verify_places(batch.id, from, to, VERIFY).await?);
        from = to;
    }
    faults.truncate(FAULTS);
    Ok(faults)
}

fn print(findings: &[Finding], worst: Option<Severity>, json: bool) -> Result<(), CliError> {
    if json {
        let worst = worst.map_or("ok", Severity::as_str);
        return print_json(&json!({"worst": worst, "findings": findings}));
    }
    if findings.is_empty() {
        return print_line("nothing found");
    }
    for finding in findings {
        print_line(&format!(
            "{}: {}: {}",
            finding.severity.as_str(),
            finding.name,
            plain(&finding.what)
        ))?;
        print_line(&format!("  means: {}", finding.meaning))?;
        print_line(&format!("  to do: {}", plain(&finding.remedy)))?;
    }
    Ok(())
}
