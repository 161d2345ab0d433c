//! `holdfast leases`.

mod revoke;

use std::time::Duration;

use clap::{Args, Subcommand};

use super::Global;
use super::context::{Owner, block_on, connect, load_settings};
use super::exit::{CliError, Exit};
use super::find::workers_named;
use super::output::{brief, or_dash, print_json, print_text, remark, table};
use crate::model::LeaseId;
use crate::store::{LeaseFilter, LeaseRow};

/// A lease that has been expired for this long should have been taken back.
const OVERDUE: Duration = Duration::from_secs(15);

/// Look at leases, and take them from workers: who holds how many items of which batch, until when.
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  holdfast leases list
  holdfast leases list --queue review --json | jq 'select(.expired)'
  holdfast leases expire --worker worker-3 --reason INC-17")]
pub(super) struct LeasesArguments {
    #[command(subcommand)]
    command: LeasesCommand,
}

#[derive(Debug, Subcommand)]
enum LeasesCommand {
    List(ListArguments),
    /// Take leases from their workers: from now on these can neither renew them nor hand in anything
    /// under them. Their items run again when the leases expire, as they would if the workers had
    /// died.
    ///
    /// Without --yes it only shows what it would do. A worker that lives ends the executions with its
    /// next heartbeat. Nothing is charged to the items: it counts as an interruption, like a drain.
    #[command(after_help = "\
Exit codes: 73 a lease changed meanwhile; 77 no such lease or worker.

Examples:
  holdfast leases expire 5f0c7a3e-8f6e-4f0f-9d5c-3d0a4c1b2e6f --reason INC-17
  holdfast leases expire --worker worker-3 --reason 'hangs, INC-17' --yes")]
    Expire {
        #[command(flatten)]
        chosen: Chosen,
    },
    /// Give the items of leases back at once, where their worker can run nothing of them any more.
    ///
    /// That is so when a lease has expired and its worker has ended or has been silent for two leases.
    /// Else somebody has to say so: with --worker-is-gone, whoever gives it vouches that every process
    /// of the worker and of what it ran has ended; an item runs twice at once where that is wrong.
    /// Without --yes it only shows what it would do.
    #[command(after_help = "\
Exit codes: 73 a worker may be alive, or a lease changed meanwhile; 77 no such lease or worker.

Examples:
  holdfast leases release 5f0c7a3e-8f6e-4f0f-9d5c-3d0a4c1b2e6f --reason INC-17 --yes
  holdfast leases release --worker worker-3 --worker-is-gone --reason 'its machine burnt' --yes")]
    Release {
        #[command(flatten)]
        chosen: Chosen,
        /// Vouch that nothing of the worker runs any more.
        #[arg(long)]
        worker_is_gone: bool,
    },
}

/// List leases, the first to expire first. With --json one object a line.
///
/// The margin is the time left until a lease expires: it is renewed when a third of it is used up, so
/// it stays above two thirds of it where all is well. An overdue one expired 15 s ago or more and
/// should have been taken back.
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  holdfast leases list --overdue
  holdfast leases list --owner ana --limit 10000 --json")]
struct ListArguments {
    #[command(flatten)]
    owner: Owner,
    /// Only of batches in this queue.
    #[arg(long, value_name = "QUEUE")]
    queue: Option<String>,
    /// Only of this worker: its id, or its name.
    #[arg(long, value_name = "WORKER")]
    worker: Option<String>,
    /// Only those that should have been taken back.
    #[arg(long)]
    overdue: bool,
    /// How many to list at most.
    #[arg(long, value_name = "N", default_value_t = 1_000, value_parser = clap::value_parser!(i64).range(1..))]
    limit: i64,
}

/// Leases that something is done about.
#[derive(Args, Clone, Debug)]
struct Chosen {
    /// The leases' ids.
    #[arg(value_name = "LEASE", required_unless_present = "worker", conflicts_with = "worker")]
    leases: Vec<LeaseId>,
    /// All leases of this worker: its id, or its name.
    #[arg(long, value_name = "WORKER")]
    worker: Option<String>,
    /// Why, for the audit log.
    #[arg(long, value_name = "TEXT")]
    reason: String,
    #[command(flatten)]
    owner: Owner,
    /// Do it.
    #[arg(long)]
    yes: bool,
}

pub(super) fn run(global: &Global, arguments: &LeasesArguments) -> Result<Exit, CliError> {
    match &arguments.command {
        LeasesCommand::List(arguments) => list(global, arguments),
        LeasesCommand::Expire { chosen } => revoke::expire(global, chosen),
        LeasesCommand::Release { chosen, worker_is_gone } => {
            revoke::release(global, chosen, *worker_is_gone)
        }
    }
}

fn list(global: &Global, arguments: &ListArguments) -> Result<Exit, CliError> {
    let settings = load_settings(global)?;
    let limit = arguments.limit;
    block_on(async {
        let database = connect(&settings).await?;
        let workers = match &arguments.worker {
            Some(worker) => Some(workers_named(&database, std::slice::from_ref(worker)).await?),
            None => None,
        };
        let filter = LeaseFilter {
            owner: arguments.owner.owner.clone(),
            queue: arguments.queue.clone(),
            workers: workers.map(|rows| rows.iter().map(|row| row.id).collect()),
            overdue: arguments.overdue.then_some(OVERDUE),
            leases: None,
        };
        // One more than asked for tells whether there are more.
        let mut leases = database.leases(&filter, limit.saturating_add(1)).await?;
        let most = usize::try_from(limit).unwrap_or(usize::MAX);
        let more = leases.len() > most;
        leases.truncate(most);
        if global.json {
            leases.iter().try_for_each(print_json)?;
        } else {
            print_text(&text(&leases))?;
        }
        if more {
            remark(&format!("there are more than these {limit}; see --limit"));
        }
        Ok(Exit::Done)
    })
}

fn text(leases: &[LeaseRow]) -> String {
    let rows: Vec<[String; 9]> = leases
        .iter()
        .map(|lease| {
            [
                lease.lease.to_string(),
                lease.batch.to_string(),
                brief(&lease.owner, 32),
                lease.queue.clone(),
                lease.token.to_string(),
                or_dash(lease.worker_name.as_ref().map(|name| brief(name, 32))),
                format!("{}/{}", lease.started, lease.items),
                format!("{:.1} s", lease.margin_s),
                mark(lease).to_owned(),
            ]
        })
        .collect();
    let header = ["lease", "batch", "owner", "queue", "token", "worker", "started", "margin", ""];
    table(header, &rows)
}

fn mark(lease: &LeaseRow) -> &'static str {
    let overdue = lease.margin_s < -OVERDUE.as_secs_f64();
    match (lease.revoked_at.is_some(), lease.expired, overdue) {
        (true, _, true) => "revoked, overdue",
        (true, true, false) => "revoked, expired",
        (true, false, false) => "revoked",
        (false, _, true) => "overdue",
        (false, true, false) => "expired",
        (false, false, false) => "",
    }
}
