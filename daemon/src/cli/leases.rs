//! `holdfast leases`.

use clap::{Args, Subcommand};

use super::Global;
use super::context::{Owner, block_on, connect, load_settings};
use super::exit::{CliError, Exit};
use super::output::{brief, or_dash, print_json, print_text, remark, table, time};
use crate::store::LeaseRow;

/// Look at leases: which worker holds how many items of which batch, and until when.
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  holdfast leases list
  holdfast leases list --queue review --json | jq 'select(.expired)'")]
pub(super) struct LeasesArguments {
    #[command(subcommand)]
    command: LeasesCommand,
}

#[derive(Debug, Subcommand)]
enum LeasesCommand {
    /// List leases, the first to expire first. With --json one object a line.
    #[command(after_help = "\
Examples:
  holdfast leases list
  holdfast leases list --owner ana --limit 10000 --json")]
    List {
        #[command(flatten)]
        owner: Owner,
        /// Only of batches in this queue.
        #[arg(long, value_name = "QUEUE")]
        queue: Option<String>,
        /// How many to list at most.
        #[arg(long, value_name = "N", default_value_t = 1_000, value_parser = clap::value_parser!(i64).range(1..))]
        limit: i64,
    },
}

pub(super) fn run(global: &Global, arguments: &LeasesArguments) -> Result<Exit, CliError> {
    let settings = load_settings(global)?;
    let LeasesCommand::List { owner, queue, limit } = &arguments.command;
    block_on(async {
        let database = connect(&settings).await?;
        // One more than asked for tells whether there are more.
        let mut leases =
            database.leases(owner.name(), queue.as_deref(), limit.saturating_add(1)).await?;
        let most = usize::try_from(*limit).unwrap_or(usize::MAX);
        let more = leases.len() > most;
        leases.truncate(most);
        if global.json {
            leases.iter().try_for_each(print_json)?;
        } else {
            print_text(&list(&leases))?;
        }
        if more {
            remark(&format!("there are more than these {limit}; see --limit"));
        }
        Ok(Exit::Done)
    })
}

fn list(leases: &[LeaseRow]) -> String {
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
                time(lease.expires_at),
                if lease.expired { "expired".to_owned() } else { String::new() },
            ]
        })
        .collect();
    let header = ["lease", "batch", "owner", "queue", "token", "worker", "started", "expires", ""];
    table(header, &rows)
}
