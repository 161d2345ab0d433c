//! `holdfast workers`.

use clap::Args;

use super::Global;
use super::context::{block_on, connect, load_settings};
use super::exit::{CliError, Exit};
use super::output::{brief, print_json, print_text, table, time};
use crate::store::WorkerRow;

/// List the workers that have not ended, oldest first.
#[derive(Args, Debug)]
#[command(after_help = "\
A silent worker has sent no heartbeat for longer than its lease: what it held is being given to
others. With --json one object a line.

Examples:
  holdfast workers
  holdfast workers --json | jq 'select(.silent)'")]
pub(super) struct WorkersArguments {}

pub(super) fn run(global: &Global, _arguments: &WorkersArguments) -> Result<Exit, CliError> {
    let settings = load_settings(global)?;
    block_on(async {
        let database = connect(&settings).await?;
        let workers = database.live_workers().await?;
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
                if worker.silent { "silent".to_owned() } else { worker.state.clone() },
                format!("{}/{}", worker.executing, worker.slots),
                time(worker.heartbeat_at),
                worker.queues.join(","),
            ]
        })
        .collect();
    let header =
        ["worker", "name", "host", "pid", "version", "state", "slots", "heartbeat", "queues"];
    table(header, &rows)
}
