//! `holdfast migrate`.

use std::io::{self, BufRead, IsTerminal, Write};

use clap::{Args, Subcommand};
use serde_json::json;

use super::Global;
use super::context::{block_on, load_settings};
use super::exit::{CliError, Exit};
use super::output::{print_json, print_line, print_text, table};
use crate::store::migrate::{self, MigrationStatus, OLDEST};

/// Move the schema of the database, one migration at a time.
#[derive(Args, Debug)]
#[command(after_help = "\
Exit codes: 69 what is applied is not what this program would apply, `status` found a version that
this program does not work with, or a migration failed and was rolled back; 73 another migration is running; 75 the database is unreachable.

Examples:
  holdfast migrate status
  holdfast migrate up
  holdfast migrate down --to 8 --yes")]
pub(super) struct MigrateArguments {
    #[command(subcommand)]
    command: MigrateCommand,
}

#[derive(Debug, Subcommand)]
enum MigrateCommand {
    /// Apply what is missing.
    #[command(after_help = "\
Examples:
  holdfast migrate up
  holdfast migrate up --to 9 --database-url postgres://localhost/holdfast")]
    Up {
        /// Go no further than this version.
        #[arg(long, value_name = "VERSION", value_parser = clap::value_parser!(i64).range(1..))]
        to: Option<i64>,
    },
    /// Take back what is applied, newest first, and the data in it: one migration, or more.
    #[command(after_help = "\
Examples:
  holdfast migrate down
  holdfast migrate down --to 8 --yes")]
    Down {
        /// Take back everything above this version; 0 for all of it.
        #[arg(long, value_name = "VERSION", value_parser = clap::value_parser!(i64).range(0..))]
        to: Option<i64>,
        /// Do not ask.
        #[arg(long)]
        yes: bool,
    },
    /// Show what is applied, and whether this program works with it.
    #[command(after_help = "\
Examples:
  holdfast migrate status
  holdfast migrate status --json")]
    Status,
}

pub(super) fn run(global: &Global, arguments: &MigrateArguments) -> Result<Exit, CliError> {
    let settings = load_settings(global)?;
    let url = settings.database_url()?.expose();
    let json = global.json;
    block_on(async {
        match arguments.command {
            MigrateCommand::Up { to } => up(url, to, json).await?,
            MigrateCommand::Down { to, yes } => down(url, to, yes, json).await?,
            MigrateCommand::Status => return status(url, json).await,
        }
        Ok(Exit::Done)
    })
}

async fn up(url: &str, to: Option<i64>, json: bool) -> Result<(), CliError> {
    let newest = migrate::newest();
    if let Some(to) = to.filter(|to| *to > newest) {
        let wrong = format!("--to {to}: the newest version this program knows is {newest}");
        return Err(CliError::new(Exit::Usage, wrong));
    }
    let moved = migrate::up(url, to).await?;
    print_moved(&moved, "applied", "nothing to apply", json)
}

async fn down(url: &str, to: Option<i64>, yes: bool, json: bool) -> Result<(), CliError> {
    let mut applied: Vec<MigrationStatus> =
        migrate::status(url).await?.into_iter().filter(|migration| migration.applied).collect();
    applied.sort_by_key(|migration| std::cmp::Reverse(migration.version));
    let to = to.or_else(|| applied.get(1).map(|below| below.version)).unwrap_or(0);
    let doomed: Vec<String> = applied
        .iter()
        .take_while(|migration| migration.version > to)
        .map(|migration| format!("{} {}", migration.version, migration.name))
        .collect();
    if !doomed.is_empty() && !yes {
        confirm(&doomed.join(", "))?;
    }
    let moved = if doomed.is_empty() { Vec::new() } else { migrate::down(url, to).await? };
    print_moved(&moved, "took back", "nothing to take back", json)
}

/// Asks at a terminal; elsewhere it takes the flag.
fn confirm(doomed: &str) -> Result<(), CliError> {
    let question = format!("this takes back {doomed}, and drops the data in it");
    if !io::stdin().is_terminal() {
        let wrong = format!("{question}; give --yes to do that without being asked");
        return Err(CliError::new(Exit::Usage, wrong));
    }
    drop(write!(io::stderr().lock(), "{question}. Go on? Type yes: "));
    let mut answer = String::new();
    drop(io::stdin().lock().read_line(&mut answer));
    if answer.trim() == "yes" {
        Ok(())
    } else {
        Err(CliError::new(Exit::Usage, "nothing was changed"))
    }
}

fn print_moved(
    moved: &[MigrationStatus],
    verb: &str,
    nothing: &str,
    json: bool,
) -> Result<(), CliError> {
    if json {
        return print_json(&json!({"changed": moved}));
    }
    if moved.is_empty() {
        return print_line(nothing);
    }
    moved.iter().try_for_each(|migration| {
        print_line(&format!("{verb} {} {}", migration.version, migration.name))
    })
}

async fn status(url: &str, json: bool) -> Result<Exit, CliError> {
    let migrations = migrate::status(url).await?;
    let newest = migrate::newest();
    let version =
        migrations.iter().filter(|m| m.applied).map(|m| m.version).max().unwrap_or_default();
    let supported = (OLDEST..=newest).contains(&version);
    let exit = if supported { Exit::Done } else { Exit::Schema };
    if json {
        print_json(&json!({
            "version": version, "supported": supported, "oldest_supported": OLDEST,
            "newest_supported": newest, "migrations": migrations,
        }))?;
        return Ok(exit);
    }
    let rows: Vec<[String; 3]> = migrations
        .iter()
        .map(|m| {
            let state = if m.applied { "applied" } else { "missing" };
            [m.version.to_string(), state.to_owned(), m.name.clone()]
        })
        .collect();
    let verdict = if supported { "works" } else { "does not work" };
    print_text(&table(["version", "state", "name"], &rows))?;
    print_line(&format!(
        "this program {verdict} with version {version}; it needs {OLDEST} to {newest}"
    ))?;
    Ok(exit)
}
