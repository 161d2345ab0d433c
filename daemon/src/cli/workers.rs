//! `holdfast workers`.

use clap::Args;

use super::Global;
use super::context::{block_on, connect, load_settings};
use super::exit::{CliError, Exit};
use super::output::{brief, print_json, print_text, table};
use crate::store::WorkerRow;

/// List the workers that have not ended, oldest first.
#[derive(Args, Debug)]
#[command(after_help = "\
A silent worker has sent no heartbeat for longer than its lease: what it held is being given to
others. With --json one object a line.

Examples:
  holdfast workers
  holdfast workers --all
  holdfast workers --json | jq 'select(.silent)'")]
pub(super) struct WorkersArguments {
    /// Those that have ended, too.
    #[arg(long)]
    all: bool,
}

pub(super) fn run(global: &Global, arguments: &WorkersArguments) -> Result<Exit, CliError> {
    let settings = load_settings(global)?;
    block_on(async {
        let database = connect(&settings).await?;
        let workers = database.workers(arguments.all).await?;
        if global.json {
            workers.iter().try_for_each(print_json)?;
        } else {
            print_text(&list(&workers))?;
        }
        Ok(Exit::Done)
    })
}

fn list(workers: &[WorkerRow]) -> String {
    let rows: Vec<[String; 9]> = workers
        .iter()
        .map(|worker| {
            [
                worker.id.to_string(),
                brief(&worker.name, 32),
                brief(&worker.host, 32),
                worker.pid.to_string(),
                brief(&worker.version, 16),
                state(worker),
                format!("{}/{}", worker.executing, worker.slots),
                format!("{:.0} s ago", worker.heartbeat_age_s.max(0.0)),
                worker.queues.join(","),
            ]
        })
        .collect();
    let header =
        ["worker", "name", "host", "pid", "version", "state", "slots", "heartbeat", "queues"];
    table(header, &rows)
}

fn state(worker: &WorkerRow) -> String {
    if worker.ended_at.is_some() {
        let reason = worker.exit_reason.as_deref();
        return reason.map_or_else(|| "ended".to_owned(), |reason| format!("ended: {reason}"));
    }
    let state = if worker.silent { "silent" } else { worker.state.as_str() };
    match worker.asked.as_deref() {
        Some("drain") if state != "draining" => format!("{state}, asked to drain"),
        Some("quiet") if state != "quiet" => format!("{state}, asked to be quiet"),
        Some(_) | None => state.to_owned(),
    }
}
