//! `holdfast check`.

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};

use clap::Args;

use super::Global;
use super::context::load_settings;
use super::exit::{CliError, Exit};
use super::output::{print_json, print_line, remark};
use crate::check::{self, CheckInput, Directories, Roots, Workspace};
use crate::model::verdict::LIMITATION;
use crate::model::{Evidence, Verdict, VerdictClass};

/// Checks acceptance criteria against a directory, as a worker does it after an execution.
#[derive(Args, Debug)]
#[command(after_help = "\
A criterion is `file:PATH exists`, `file:PATH non-empty`, `file_written:PATH`, `tests_passed:COMMAND` or
any other text, which no code can decide. Each gets one line: holds, does not hold, or UNVERIFIED, and
why. What holds was found so now: it is evidence, not acceptance of the task.

Exit codes: 0 everything holds; 1 something does not hold; 5 nothing does not hold, but something is
UNVERIFIED; 2, 66, 78 nothing was checked.

Examples:
  holdfast check . --criterion 'file:report.md non-empty' --criterion 'reads well'
  holdfast check /srv/items/7 --criterion 'file:/mnt/user-data/outputs/table.csv exists' --json
  holdfast check . --criterion 'tests_passed:make test' --evidence runs.jsonl")]
pub(super) struct CheckArguments {
    /// The directory that relative paths start from; or one that holds `workspace` and `outputs`, as
    /// those of items do.
    #[arg(value_name = "DIR")]
    directory: PathBuf,
    /// A criterion; repeat it for more, up to 20 count.
    #[arg(long = "criterion", value_name = "TEXT", required = true)]
    criteria: Vec<String>,
    /// Recorded executions by which `tests_passed` is judged, oldest first, one JSON object a line.
    #[arg(long, value_name = "FILE")]
    evidence: Option<PathBuf>,
}

pub(super) fn run(global: &Global, arguments: &CheckArguments) -> Result<Exit, CliError> {
    let virtual_prefix = load_settings(global)?.workspace.virtual_prefix;
    let unreadable = |path: &Path, error: &dyn std::fmt::Display| {
        CliError::new(Exit::UnreadableInput, format!("{}: {error}", path.display()))
    };
    let directory = &arguments.directory;
    let directories = directories(directory).map_err(|error| unreadable(directory, &error))?;
    let roots = Roots::open(&directories).map_err(|error| unreadable(directory, &error))?;
    let evidence = arguments.evidence.as_ref().map_or_else(
        || Ok(Vec::new()),
        |file| recorded(file).map_err(|error| unreadable(file, &error)),
    )?;
    let verdict = check::run(&CheckInput {
        criteria: &arguments.criteria,
        evidence: &evidence,
        workspace: Workspace::Open(&roots),
        directories: Some(&directories),
        virtual_prefix: &virtual_prefix,
    });
    let verdict = verdict.ok_or_else(|| CliError::new(Exit::Usage, "no criterion holds a text"))?;
    if global.json {
        print_json(&verdict)?;
    } else {
        verdict.leaves().iter().try_for_each(|leaf| print_line(&leaf.to_string()))?;
        remark(&verdict.compact());
        remark(LIMITATION);
    }
    Ok(exit_of(&verdict))
}

/// The directories meant: those of an item where this one looks like its place, else itself.
fn directories(directory: &Path) -> std::io::Result<Directories> {
    let directory = fs::canonicalize(directory)?;
    let path = |path: PathBuf| {
        path.into_os_string().into_string().map_err(|_| std::io::Error::other("not UTF-8"))
    };
    let [workspace, outputs, uploads] =
        ["workspace", "outputs", "uploads"].map(|name| directory.join(name));
    let workspace =
        if workspace.is_dir() && outputs.is_dir() { workspace } else { directory.clone() };
    Ok(Directories {
        workspace: path(workspace)?,
        outputs: path(outputs)?,
        uploads: path(uploads)?,
    })
}

fn recorded(file: &Path) -> std::io::Result<Vec<Evidence>> {
    let lines = BufReader::new(File::open(file)?).lines();
    lines.map(|line| Ok(serde_json::from_str(&line?)?)).collect()
}

fn exit_of(verdict: &Verdict) -> Exit {
    match verdict.class() {
        VerdictClass::Holds => Exit::Done,
        VerdictClass::Fails => Exit::FailedItems,
        VerdictClass::Unverified | VerdictClass::None => Exit::Unverified,
    }
}
