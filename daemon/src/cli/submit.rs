//! `holdfast submit`.

use std::fs::File;
use std::io::{self, IsTerminal, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::Args;
use indicatif::ProgressBar;
use serde_json::json;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use super::Global;
use super::context::{block_on, caller, connect, load_settings};
use super::exit::{CliError, Exit};
use super::output::{count, print_json, print_line, progress_bar, remark};
use super::watch;
use super::worker::client_telemetry;
use crate::config::Settings;
use crate::model::QueueName;
use crate::store::{Database, Stored};
use crate::submit::{Admitted, Form, NewBatch, Problem, Submission, SubmitError};
use crate::telemetry::trace::TraceContext;

/// Submit a batch: all of its items, or nothing.
#[derive(Args, Debug)]
#[command(
    long_about = "\
Submit a batch: all of its items, or nothing.

Each line of the input is a JSON object: {\"key\": \"…\", \"input\": any JSON value}, and optionally
\"acceptance_criteria\": [\"…\"] and \"not_before\": \"2026-01-31T08:00:00Z\". With --lines each line is an
item as it stands, its key and its input. Everything is checked before anything is stored; all bad
lines are named. Items wait in a temporary file meanwhile, in TMPDIR.",
    after_help = "\
Exit codes: 0 stored, or stored before under the same --key; 65 bad lines; 66 the file cannot be
read; 73 the --key was used before with other content; 75 the database is unreachable; 78 no such
queue. With --watch those of `holdfast watch`.

Examples:
  holdfast submit items.jsonl --queue review --title 'Nightly review'
  find /usr/share/doc -type f | holdfast submit - --lines --queue checksum --watch
  holdfast submit items.jsonl --queue review --key nightly-2026-01-31 --max-running 4"
)]
pub(super) struct SubmitArguments {
    /// The items; - for standard input.
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// The queue whose settings run the items; it must be configured.
    #[arg(long, value_name = "QUEUE")]
    queue: QueueName,
    /// Take each line as an item, its key and its input.
    #[arg(long)]
    lines: bool,
    /// A title for people.
    #[arg(long, value_name = "TEXT")]
    title: Option<String>,
    /// Submission key: a repeat of the same submission under it returns the first batch.
    #[arg(long, value_name = "KEY")]
    key: Option<String>,
    /// Whose batch it is.
    #[arg(long, value_name = "OWNER", env = "HOLDFAST_OWNER", default_value = "default")]
    owner: String,
    /// Let all items share the workspace of this name.
    #[arg(long, value_name = "THREAD")]
    thread: Option<String>,
    /// Items executing at once, over all workers; the queue's own cap holds as well.
    #[arg(long, value_name = "N")]
    max_running: Option<i32>,
    /// Items waiting for another attempt or held at once.
    #[arg(long, value_name = "N")]
    max_live: Option<i32>,
    /// Attempts of an item before it fails.
    #[arg(long, value_name = "N")]
    max_attempts: Option<i32>,
    /// -100 to 100; higher is served first.
    #[arg(long, value_name = "N", default_value_t = 0, allow_negative_numbers = true)]
    priority: i16,
    /// Start no item before this time (RFC 3339, such as 2026-01-31T08:00:00Z).
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    not_before: Option<OffsetDateTime>,
    /// Only check the input; needs no database.
    #[arg(long, conflicts_with = "watch")]
    dry_run: bool,
    /// Follow the batch to its end.
    #[arg(long)]
    watch: bool,
    /// The span this submit belongs to (W3C trace context); without it the variable TRACEPARENT.
    #[arg(long, value_name = "TRACEPARENT")]
    traceparent: Option<TraceContext>,
}

fn parse_time(text: &str) -> Result<OffsetDateTime, String> {
    OffsetDateTime::parse(text, &Rfc3339)
        .map_err(|_| "not a time such as 2026-01-31T08:00:00Z or 2026-01-31T09:00:00+01:00".into())
}

impl SubmitArguments {
    fn batch(&self) -> NewBatch {
        NewBatch {
            owner: self.owner.clone(),
            title: self.title.clone(),
            submission_key: self.key.clone(),
            thread: self.thread.clone(),
            max_running: self.max_running,
            max_live: self.max_live,
            max_attempts: self.max_attempts,
            priority: self.priority,
            not_before: self.not_before,
            ..NewBatch::in_queue(self.queue.clone())
        }
    }
}

pub(super) fn run(global: &Global, arguments: &SubmitArguments) -> Result<Exit, CliError> {
    let settings = load_settings(global)?;
    let batch = arguments.batch();
    batch.validate(&settings.limits).map_err(|problems| wrong_flags(&problems))?;
    let form = if arguments.lines { Form::Lines } else { Form::Jsonl };
    let submission = Submission::to_queue(batch, form, &settings)?;
    let input = Input::open(&arguments.file)?;
    block_on(submit(global.json, arguments, settings, submission, input))
}

/// What is out of range can only have come from a flag.
pub(super) fn wrong_flags(problems: &[Problem]) -> CliError {
    let wrong: Vec<String> = problems
        .iter()
        .map(|problem| {
            let flag = match problem.field() {
                Some("submission_key") => "key".to_owned(),
                field => field.unwrap_or_default().replace('_', "-"),
            };
            format!("--{flag} {}", problem.message())
        })
        .collect();
    CliError::new(Exit::Usage, wrong.join("\n"))
}

async fn submit(
    json: bool,
    arguments: &SubmitArguments,
    settings: Settings,
    submission: Submission,
    input: Input,
) -> Result<Exit, CliError> {
    let settings = Arc::new(settings);
    // A database that cannot be used is better noticed before a long read than after it.
    let database = if arguments.dry_run { None } else { Some(connect(&settings).await?) };
    let admitted = read(submission, input, &settings, json).await?;
    let items = admitted.record().item_count;
    let Some(database) = database else {
        print_valid(&arguments.queue, items, json)?;
        return Ok(Exit::Done);
    };
    let telemetry = client_telemetry(&settings)?;
    let caller = caller(arguments.traceparent.as_ref());
    let stored = store(admitted, &database, caller.as_ref(), json).await;
    let printed = match &stored {
        Ok(stored) => print_stored(&arguments.queue, items, *stored, json),
        Err(_) => Ok(()),
    };
    telemetry.shutdown().await;
    let stored = stored?;
    printed?;
    if arguments.watch {
        return watch::follow(&database, stored.batch(), None, json).await;
    }
    Ok(Exit::Done)
}

/// Reads and validates a whole input.
pub(super) async fn read(
    submission: Submission,
    input: Input,
    settings: &Arc<Settings>,
    json: bool,
) -> Result<Admitted, CliError> {
    let bar = input.bar(json);
    let (settings, shown) = (Arc::clone(settings), bar.clone());
    let Input { name, reader, .. } = input;
    let read = tokio::task::spawn_blocking(move || {
        submission.read(reader, &settings, None, &mut |progress| shown.set_position(progress.bytes))
    });
    let read = read.await;
    bar.finish_and_clear();
    match read {
        Ok(Ok(admitted)) => Ok(admitted),
        Ok(Err(error @ SubmitError::Unreadable(_))) => {
            Err(CliError::from(error).context(format!("read {name}")))
        }
        Ok(Err(error)) => Err(error.into()),
        Err(died) => Err(CliError::new(Exit::Internal, format!("read {name}: {died}"))),
    }
}

/// Stores what was read.
pub(super) async fn store(
    admitted: Admitted,
    database: &Database,
    caller: Option<&TraceContext>,
    json: bool,
) -> Result<Stored, CliError> {
    let items = u64::from(admitted.record().item_count.unsigned_abs());
    let bar = progress_bar(
        json,
        Some(items),
        "storing [{bar:40}] {human_pos}/{human_len} items, {eta} left",
    );
    let stored = admitted.store(database, caller, |sent| bar.set_position(sent)).await;
    bar.finish_and_clear();
    Ok(stored?)
}

fn print_valid(queue: &QueueName, items: i32, json: bool) -> Result<(), CliError> {
    if json {
        return print_json(&json!({
            "batch": null, "queue": queue, "items": items, "created": false, "dry_run": true,
        }));
    }
    print_line(&format!("valid  queue {queue}  {} items  (nothing was stored)", count(items)))
}

fn print_stored(queue: &QueueName, items: i32, stored: Stored, json: bool) -> Result<(), CliError> {
    let batch = stored.batch();
    let created = matches!(stored, Stored::Created(_));
    if json {
        return print_json(
            &json!({"batch": batch, "queue": queue, "items": items, "created": created}),
        );
    }
    let known = if created { "" } else { "  (stored before under this key)" };
    print_line(&format!("batch {batch}  queue {queue}  {} items{known}", count(items)))
}

/// Where the items come from.
pub(super) struct Input {
    name: String,
    reader: Box<dyn Read + Send>,
    /// Of a regular file.
    bytes: Option<u64>,
}

impl Input {
    pub(super) fn open(file: &Path) -> Result<Self, CliError> {
        if file.as_os_str() == "-" {
            let stdin = io::stdin();
            if stdin.is_terminal() {
                remark("reading items from the terminal; Ctrl-D ends them");
            }
            let name = "standard input".to_owned();
            return Ok(Self { name, reader: Box::new(stdin), bytes: None });
        }
        let name = file.display().to_string();
        let unreadable =
            |error| CliError::new(Exit::UnreadableInput, format!("read {name}: {error}"));
        let opened = File::open(file).map_err(unreadable)?;
        let metadata = opened.metadata().map_err(unreadable)?;
        let bytes = metadata.is_file().then_some(metadata.len());
        Ok(Self { name, reader: Box::new(opened), bytes })
    }

    fn bar(&self, json: bool) -> ProgressBar {
        let template = if self.bytes.is_some() {
            "reading [{bar:40}] {bytes}/{total_bytes}, {bytes_per_sec}"
        } else {
            "{spinner} reading {bytes}, {bytes_per_sec}"
        };
        progress_bar(json, self.bytes, template)
    }
}
