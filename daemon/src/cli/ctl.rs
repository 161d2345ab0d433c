//! `holdfast ctl`: what operators switch for the whole database, and ask of workers.

use clap::{Args, Subcommand};
use serde_json::json;

use super::Global;
use super::context::{actor, block_on, connect, load_settings};
use super::control::persist;
use super::exit::{CliError, Exit};
use super::find::workers_named;
use super::output::{brief, print_json, print_line, remark, time};
use crate::model::{Asked, WorkerId};
use crate::store::{Database, Event, WorkerRow};

/// Stop and start claims of all workers; quiet and drain single ones.
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  holdfast ctl stop-claims --reason 'INC-17: the target is overloaded'
  holdfast ctl start-claims --reason 'INC-17 is over'
  holdfast ctl quiet worker-3
  holdfast ctl drain --all --dry-run")]
pub(super) struct CtlArguments {
    #[command(subcommand)]
    command: CtlCommand,
}

#[derive(Debug, Subcommand)]
enum CtlCommand {
    /// Grant no claims any more, in the whole database; what runs goes on and is handed in.
    #[command(after_help = "\
Examples:
  holdfast ctl stop-claims --reason 'INC-17: the target is overloaded'
  holdfast ctl stop-claims --reason INC-17 --dry-run --json")]
    StopClaims(Switch),
    /// Grant claims again.
    #[command(after_help = "\
Examples:
  holdfast ctl start-claims --reason 'INC-17 is over'
  holdfast ctl start-claims --reason INC-17 --json")]
    StartClaims(Switch),
    /// Let workers claim nothing more; what they hold goes on. They see it within a moment, or with
    /// their next heartbeat.
    ///
    /// A worker that its guard starts again is not quiet any more.
    #[command(after_help = "\
Exit codes: 73 a worker has ended or drains; 77 no such worker.

Examples:
  holdfast ctl quiet worker-3 --reason 'reboot of its machine'
  holdfast ctl quiet --off worker-3")]
    Quiet {
        #[command(flatten)]
        chosen: Chosen,
        /// Let them claim again.
        #[arg(long)]
        off: bool,
    },
    /// Let workers drain and end, as TERM does: what runs has drain.grace to end. For good: a
    /// service manager that restarts only what failed does not start them again.
    #[command(after_help = "\
Exit codes: 73 a worker has ended or drains already; 77 no such worker.

Examples:
  holdfast ctl drain worker-3 --reason 'its machine goes'
  holdfast ctl drain --all --dry-run")]
    Drain {
        #[command(flatten)]
        chosen: Chosen,
    },
}

#[derive(Args, Clone, Debug)]
struct Switch {
    /// Why, for the audit log.
    #[arg(long, value_name = "TEXT")]
    reason: String,
    /// Only show what it would do.
    #[arg(long)]
    dry_run: bool,
}

#[derive(Args, Clone, Debug)]
struct Chosen {
    /// The workers: their ids, or their names.
    #[arg(value_name = "WORKER", required_unless_present = "all", conflicts_with = "all")]
    workers: Vec<String>,
    /// All that have not ended.
    #[arg(long)]
    all: bool,
    /// Why, for the audit log.
    #[arg(long, value_name = "TEXT")]
    reason: Option<String>,
    /// Only show what it would do.
    #[arg(long)]
    dry_run: bool,
}

pub(super) fn run(global: &Global, arguments: &CtlArguments) -> Result<Exit, CliError> {
    let settings = load_settings(global)?;
    block_on(async {
        let database = connect(&settings).await?;
        match &arguments.command {
            CtlCommand::StopClaims(switch) => claims(&database, false, switch, global.json).await,
            CtlCommand::StartClaims(switch) => claims(&database, true, switch, global.json).await,
            CtlCommand::Quiet { chosen, off } => {
                ask(&database, chosen, (!off).then_some(Asked::Quiet), global.json).await
            }
            CtlCommand::Drain { chosen } => {
                ask(&database, chosen, Some(Asked::Drain), global.json).await
            }
        }
    })
}

async fn claims(
    database: &Database,
    enabled: bool,
    switch: &Switch,
    json: bool,
) -> Result<Exit, CliError> {
    let before = database.claims_switch().await?;
    let changed = if switch.dry_run {
        before.enabled != enabled
    } else {
        let actor = actor();
        persist(async || database.switch_claims(enabled, &actor, &switch.reason).await).await?
    };
    let word = if enabled { "on" } else { "off" };
    if json {
        let answer = json!({"claims": word, "changed": changed, "dry_run": switch.dry_run});
        print_json(&answer)?;
        return Ok(Exit::Done);
    }
    if !changed {
        let since = before.changed.map_or_else(String::new, |change| {
            let why = change.reason.unwrap_or_default();
            format!(", since {} by {}: {why}", time(change.at), change.actor)
        });
        print_line(&format!("claims are {word} already{since}"))?;
    } else if switch.dry_run {
        print_line(&format!("claims would be {word}"))?;
        remark("nothing was changed");
    } else {
        print_line(&format!("claims are {word}"))?;
    }
    Ok(Exit::Done)
}

async fn ask(
    database: &Database,
    chosen: &Chosen,
    asked: Option<Asked>,
    json: bool,
) -> Result<Exit, CliError> {
    let workers = if chosen.all {
        database.live_workers().await?
    } else {
        workers_named(database, &chosen.workers).await?
    };
    let ids: Vec<WorkerId> = workers.iter().map(|worker| worker.id).collect();
    let done = if chosen.dry_run {
        let may = |worker: &&WorkerRow| {
            worker.ended_at.is_none() && worker.asked.as_deref() != Some(Asked::Drain.as_str())
        };
        workers.iter().filter(may).map(|worker| worker.id).collect()
    } else {
        let (actor, reason) = (actor(), chosen.reason.as_deref());
        let done =
            persist(async || database.ask_workers(&ids, asked, &actor, reason).await).await?;
        for worker in &done {
            // Only a hint: without it a worker sees it with its next heartbeat.
            drop(database.notify(&Event::Asked(*worker)).await);
        }
        done
    };
    let mut exit = Exit::Done;
    for worker in &workers {
        let is_done = done.contains(&worker.id);
        if !is_done {
            exit = Exit::Conflict;
        }
        print_answer(worker, asked, is_done, chosen.dry_run, json)?;
    }
    if chosen.dry_run {
        remark("nothing was changed");
    }
    Ok(exit)
}

fn print_answer(
    worker: &WorkerRow,
    asked: Option<Asked>,
    done: bool,
    dry_run: bool,
    json: bool,
) -> Result<(), CliError> {
    if json {
        let word = asked.map(Asked::as_str);
        return print_json(&json!({
            "worker": worker.id, "name": worker.name, "state": worker.state, "asked": word,
            "done": done, "dry_run": dry_run,
        }));
    }
    let what = match asked {
        Some(Asked::Quiet) => "to be quiet",
        Some(Asked::Drain) => "to drain",
        None => "to claim again",
    };
    let said = match (done, worker.ended_at) {
        (true, _) if dry_run => format!("would be asked {what}"),
        (true, _) => format!("is asked {what}"),
        (false, Some(_)) => "has ended".to_owned(),
        (false, None) => "drains already, or has ended".to_owned(),
    };
    print_line(&format!("worker {} ({}) {said}", worker.id, brief(&worker.name, 32)))
}
