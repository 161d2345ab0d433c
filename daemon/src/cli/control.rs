//! `holdfast cancel`, `holdfast pause` and `holdfast resume`.

use std::time::Duration;

use clap::Args;
use serde_json::json;
use tracing::Instrument;

use super::Global;
use super::context::{Owner, actor, block_on, caller, connect, load_settings, unknown_batch};
use super::exit::{CliError, Exit};
use super::output::{print_error, print_json, print_line};
use super::worker::client_telemetry;
use crate::model::BatchId;
use crate::store::{ControlAnswer, ControlVerb, Database, Event, FlightError};
use crate::telemetry::trace;

/// End batches now: nothing of them is published any more, what runs is stopped.
///
/// What has ended stays and can be exported. A batch that is cancelled already stays so.
#[derive(Args, Debug)]
#[command(after_help = "\
Exit codes: 73 a batch has ended by itself; 77 no such batch.

Examples:
  holdfast cancel 0194b2c8-7d1e-7c3a-9a53-0d6f5f3f2a11
  holdfast batches --state queued --json | jq -r .id | xargs holdfast cancel")]
pub(super) struct CancelArguments {
    #[command(flatten)]
    batches: Batches,
}

/// Stop handing out items of batches; what runs goes on to its end.
#[derive(Args, Debug)]
#[command(after_help = "\
Exit codes: 73 a batch has ended or is cancelled; 77 no such batch.

Examples:
  holdfast pause 0194b2c8-7d1e-7c3a-9a53-0d6f5f3f2a11
  holdfast pause 0194b2c8-7d1e-7c3a-9a53-0d6f5f3f2a11 --owner ana --json")]
pub(super) struct PauseArguments {
    #[command(flatten)]
    batches: Batches,
}

/// Let paused batches go on.
#[derive(Args, Debug)]
#[command(after_help = "\
Exit codes: 73 a batch has ended or is cancelled; 77 no such batch.

Examples:
  holdfast resume 0194b2c8-7d1e-7c3a-9a53-0d6f5f3f2a11
  holdfast batches --state paused --json | jq -r .id | xargs holdfast resume")]
pub(super) struct ResumeArguments {
    #[command(flatten)]
    batches: Batches,
}

#[derive(Args, Debug)]
struct Batches {
    /// The batches' ids.
    #[arg(value_name = "BATCH", required = true)]
    batches: Vec<BatchId>,
    #[command(flatten)]
    owner: Owner,
}

pub(super) fn run_cancel(global: &Global, arguments: &CancelArguments) -> Result<Exit, CliError> {
    run(global, &arguments.batches, ControlVerb::Cancel)
}

pub(super) fn run_pause(global: &Global, arguments: &PauseArguments) -> Result<Exit, CliError> {
    run(global, &arguments.batches, ControlVerb::Pause)
}

pub(super) fn run_resume(global: &Global, arguments: &ResumeArguments) -> Result<Exit, CliError> {
    run(global, &arguments.batches, ControlVerb::Resume)
}

/// Controls one batch after the other. One that refuses does not keep the others from it; the exit
/// code is that of the first one that did.
fn run(global: &Global, arguments: &Batches, verb: ControlVerb) -> Result<Exit, CliError> {
    let settings = load_settings(global)?;
    block_on(async {
        let database = connect(&settings).await?;
        let telemetry = client_telemetry(&settings)?;
        let controlled = control_all(&database, arguments, verb, global.json).await;
        telemetry.shutdown().await;
        controlled
    })
}

async fn control_all(
    database: &Database,
    arguments: &Batches,
    verb: ControlVerb,
    json: bool,
) -> Result<Exit, CliError> {
    let caller = caller(None);
    let mut exit = Exit::Done;
    for batch in &arguments.batches {
        let span = trace::control_span(verb.as_str(), *batch, caller.as_ref());
        let controlled = control(database, *batch, arguments.owner.name(), verb);
        match controlled.instrument(span.clone()).await {
            Ok(answer) => print_answer(*batch, verb, answer, json)?,
            Err(error) => {
                trace::failed(&span, "refused");
                if error.exit() == Exit::Unreachable {
                    return Err(error);
                }
                print_error(&error, json);
                exit = if exit == Exit::Done { error.exit() } else { exit };
            }
        }
    }
    Ok(exit)
}

/// What a control that was not refused came to.
#[derive(Clone, Copy)]
enum Controlled {
    Changed,
    Unchanged,
}

async fn control(
    database: &Database,
    batch: BatchId,
    owner: Option<&str>,
    verb: ControlVerb,
) -> Result<Controlled, CliError> {
    let actor = actor();
    let answer = persist(async || database.control_batch(batch, owner, verb, &actor).await).await?;
    let changed = match answer {
        ControlAnswer::Applied => Controlled::Changed,
        ControlAnswer::Unchanged => Controlled::Unchanged,
        ControlAnswer::Ended => {
            let reason = match verb {
                ControlVerb::Cancel => "it has ended already",
                ControlVerb::Pause | ControlVerb::Resume => "it has ended or is cancelled",
            };
            let message = format!("cannot {} batch {batch}: {reason}", verb.as_str());
            return Err(CliError::new(Exit::Conflict, message));
        }
        ControlAnswer::Unknown => return Err(unknown_batch(batch)),
    };
    tell_workers(database, batch, verb).await;
    Ok(changed)
}

/// Only a hint: without it the workers find out when they look next.
async fn tell_workers(database: &Database, batch: BatchId, verb: ControlVerb) {
    let event = match verb {
        ControlVerb::Pause => return,
        ControlVerb::Cancel => Event::Cancelled(batch),
        ControlVerb::Resume => match database.batch(batch, None).await {
            Ok(Some(batch)) => Event::Work(batch.queue),
            Ok(None) | Err(_) => return,
        },
    };
    drop(database.notify(&event).await);
}

fn print_answer(
    batch: BatchId,
    verb: ControlVerb,
    answer: Controlled,
    json: bool,
) -> Result<(), CliError> {
    let changed = matches!(answer, Controlled::Changed);
    if json {
        return print_json(&json!({"batch": batch, "verb": verb.as_str(), "changed": changed}));
    }
    let state = match verb {
        ControlVerb::Cancel => "cancelled",
        ControlVerb::Pause => "paused",
        ControlVerb::Resume => "open",
    };
    let already = if changed { "" } else { " already" };
    print_line(&format!("batch {batch} is {state}{already}"))
}

/// How often a protocol call is made that does no harm when repeated, and how long after each other.
const TRIES: u32 = 5;
const BETWEEN_TRIES: Duration = Duration::from_millis(300);

/// Repeats a call whose answer never came, or that waited too long for a lock.
pub(super) async fn persist<T>(
    call: impl AsyncFn() -> Result<T, FlightError>,
) -> Result<T, CliError> {
    let mut tries = 1;
    loop {
        match call().await {
            Ok(answer) => return Ok(answer),
            Err(failed) if tries == TRIES || failed.is_lasting() => return Err(failed.into()),
            Err(FlightError::NotSent(error)) => return Err(error.into()),
            Err(FlightError::Unknown(_) | FlightError::RolledBack(_)) => {
                tries += 1;
                tokio::time::sleep(BETWEEN_TRIES).await;
            }
        }
    }
}
