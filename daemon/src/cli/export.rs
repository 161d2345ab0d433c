//! `holdfast export`.

use std::fs::{self, File, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use clap::Args;
use indicatif::ProgressBar;
use serde_json::json;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use tempfile::NamedTempFile;

use super::Global;
use super::context::{Interrupt, OneBatch, block_on, connect, load_settings};
use super::exit::{CliError, Exit};
use super::output::{count, output_error, print_json, print_line, progress_bar, remark};
use crate::export::{ENDED, Export};
use crate::model::{ItemStatus, VerdictClass};
use crate::store::BatchRow;

/// Write the ended items of a batch as JSON lines, in the order of their positions.
#[derive(Args, Debug)]
#[command(
    long_about = "\
Write the ended items of a batch as JSON lines, in the order of their positions.

Every line has these members in this order, null where there is nothing to say: key, position,
status, attempt, result, result_truncated, result_size, error, stop_reason, started_at, finished_at,
acceptance_criteria, acceptance_verdict. Results are as they were stored, digit for digit. Items that
have not ended are left out, and counted on standard error.",
    after_help = "\
With --output the file appears, or is replaced, when it is complete and on disk; nothing is left of
a failed export. On standard output a failed export ends with an exit code that is not 0: 74 when
it cannot be written, 75 when the database is gone, 141 when the reader went away.

Examples:
  holdfast export 0194b2c8-7d1e-7c3a-9a53-0d6f5f3f2a11 --output results.jsonl
  holdfast export 0194b2c8-7d1e-7c3a-9a53-0d6f5f3f2a11 --status failed | jq -r .error
  holdfast export 0194b2c8-7d1e-7c3a-9a53-0d6f5f3f2a11 --verdict fails --verdict unverified
  holdfast export 0194b2c8-7d1e-7c3a-9a53-0d6f5f3f2a11 | gzip > results.jsonl.gz"
)]
pub(super) struct ExportArguments {
    #[command(flatten)]
    batch: OneBatch,
    /// Write this file instead of standard output.
    #[arg(long, short, value_name = "FILE")]
    output: Option<PathBuf>,
    /// In this status only: succeeded, failed or cancelled; repeat it for more.
    #[arg(long = "status", value_name = "STATUS", value_parser = parse_status)]
    statuses: Vec<ItemStatus>,
    /// With a verdict of this class only: holds, fails, unverified or none; repeat it for more.
    #[arg(long = "verdict", value_name = "CLASS")]
    verdicts: Vec<VerdictClass>,
}

fn parse_status(text: &str) -> Result<ItemStatus, String> {
    ENDED
        .into_iter()
        .find(|status| status.as_str() == text)
        .ok_or_else(|| "an export has items that are succeeded, failed or cancelled".to_owned())
}

pub(super) fn run(global: &Global, arguments: &ExportArguments) -> Result<Exit, CliError> {
    let settings = load_settings(global)?;
    block_on(async {
        let database = connect(&settings).await?;
        let batch = arguments.batch.find(&database).await?;
        let all = arguments.statuses.is_empty();
        let statuses = if all { &ENDED } else { arguments.statuses.as_slice() };
        let any = arguments.verdicts.is_empty();
        let verdicts = if any { &VerdictClass::ALL } else { arguments.verdicts.as_slice() };
        let mut export = Export::new(database, &batch, statuses, verdicts);
        let bar = progress_bar(
            global.json || arguments.output.is_none(),
            Some(u64::from(batch.item_count.unsigned_abs())),
            "exporting [{bar:40}] {human_pos}/{human_len} items, {eta} left",
        );
        let written = match &arguments.output {
            None => to_stdout(&mut export).await,
            Some(file) => to_file(&mut export, file, &bar).await,
        };
        bar.finish_and_clear();
        written?;
        report(global, arguments, &batch, &export)
    })
}

/// What is left out is said, so that nobody takes a part for the whole.
fn report(
    global: &Global,
    arguments: &ExportArguments,
    batch: &BatchRow,
    export: &Export,
) -> Result<Exit, CliError> {
    let unfinished = if arguments.statuses.is_empty() && arguments.verdicts.is_empty() {
        batch.item_count - export.written()
    } else {
        batch.counts.unfinished()
    };
    if unfinished > 0 {
        remark(&format!(
            "{} of {} items had not ended and are not in the export",
            count(unfinished),
            count(batch.item_count)
        ));
    }
    let Some(file) = &arguments.output else { return Ok(Exit::Done) };
    if global.json {
        print_json(&json!({
            "batch": batch.id, "file": file, "items": export.written(), "unfinished": unfinished,
        }))?;
    } else {
        print_line(&format!("wrote {} items to {}", count(export.written()), file.display()))?;
    }
    Ok(Exit::Done)
}

/// Blocks on the writes: this is the main thread, and connections are served by others.
pub(super) async fn to_stdout(export: &mut Export) -> Result<(), CliError> {
    let mut out = io::stdout();
    while let Some(lines) = export.next_lines().await? {
        out.write_all(&lines).map_err(output_error)?;
    }
    out.flush().map_err(output_error)
}

/// Writes beside the file and renames when all is there. Whatever ends it early, an interrupt
/// included, removes what was written.
pub(super) async fn to_file(
    export: &mut Export,
    file: &Path,
    bar: &ProgressBar,
) -> Result<(), CliError> {
    let failed =
        |error: io::Error| CliError::new(Exit::Output, format!("{}: {error}", file.display()));
    let mut interrupt = Interrupt::on(&[SIGINT, SIGTERM, SIGHUP])?;
    let target = target(file).map_err(failed)?;
    let folder = target.parent().filter(|folder| !folder.as_os_str().is_empty());
    let folder = folder.unwrap_or(Path::new("."));
    let mut part = tempfile::Builder::new()
        .prefix(".holdfast-export-")
        // As any new file has it: the umask takes from it.
        .permissions(Permissions::from_mode(0o666))
        .tempfile_in(folder)
        .map_err(failed)?;
    let written = tokio::select! {
        written = write_all(export, &mut part, bar, &failed) => written,
        () = interrupt.wait() => Err(CliError::new(Exit::Interrupted, "interrupted; nothing is left of the export")),
    };
    written?;
    part.as_file().sync_all().map_err(failed)?;
    part.persist(&target).map_err(|error| failed(error.error))?;
    // The new name is on disk with its folder.
    File::open(folder).and_then(|folder| folder.sync_all()).map_err(failed)
}

async fn write_all(
    export: &mut Export,
    part: &mut NamedTempFile,
    bar: &ProgressBar,
    failed: &impl Fn(io::Error) -> CliError,
) -> Result<(), CliError> {
    while let Some(lines) = export.next_lines().await? {
        part.write_all(&lines).map_err(failed)?;
        bar.set_position(u64::from(export.passed().unsigned_abs()));
    }
    Ok(())
}

/// Refuses a file that could not be written in the end, before any work is done for it.
pub(super) fn check_target(file: &Path) -> Result<(), CliError> {
    let failed =
        |error: io::Error| CliError::new(Exit::Output, format!("{}: {error}", file.display()));
    let target = target(file).map_err(failed)?;
    let folder = target.parent().filter(|folder| !folder.as_os_str().is_empty());
    tempfile::tempfile_in(folder.unwrap_or(Path::new("."))).map_err(failed)?;
    Ok(())
}

/// The file to replace: behind a link the one it leads to, and nothing that is no regular file.
fn target(file: &Path) -> io::Result<PathBuf> {
    match fs::metadata(file) {
        Ok(metadata) if metadata.is_file() => fs::canonicalize(file),
        Ok(_) => Err(io::Error::other("is there and is not a regular file")),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(file.to_owned()),
        Err(error) => Err(error),
    }
}
