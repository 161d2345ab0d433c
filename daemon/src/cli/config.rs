//! `holdfast config`.

use clap::{Args, Subcommand};
use serde_json::json;

use super::Global;
use super::context::load_settings;
use super::exit::{CliError, Exit};
use super::output::{plain, print_json, print_line, print_text};
use crate::config::{Settings, check_report};

/// Look at the configuration; starts nothing and reaches no database.
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  holdfast config check --config holdfast.toml
  holdfast config show")]
pub(super) struct ConfigArguments {
    #[command(subcommand)]
    command: ConfigCommand,
}

#[derive(Debug, Subcommand)]
enum ConfigCommand {
    /// Check all sources together: file, environment, flags.
    ///
    /// Everything that is wrong is named with its source; the exit code is 78 then.
    #[command(after_help = "\
Examples:
  holdfast config check
  holdfast config check --config holdfast.toml --json")]
    Check,
    /// Show every setting in effect and where it came from; secrets are left out.
    #[command(after_help = "\
Examples:
  holdfast config show
  HOLDFAST__LEASE__TTL=90s holdfast config show --json")]
    Show,
}

pub(super) fn run(global: &Global, arguments: &ConfigArguments) -> Result<Exit, CliError> {
    let settings = load_settings(global)?;
    match arguments.command {
        ConfigCommand::Check => check(&settings, global.json)?,
        ConfigCommand::Show if global.json => print_json(&check_report(&settings))?,
        ConfigCommand::Show => {
            let report = check_report(&settings).to_string();
            report.lines().try_for_each(|line| print_line(&plain(line)))?;
        }
    }
    Ok(Exit::Done)
}

fn check(settings: &Settings, json: bool) -> Result<(), CliError> {
    let queues: Vec<&str> = settings.queues.keys().map(crate::model::QueueName::as_str).collect();
    let has_database = settings.database.url.is_some();
    if json {
        return print_json(&json!({"valid": true, "database": has_database, "queues": queues}));
    }
    let database = if has_database { "set" } else { "not set" };
    let queues = if queues.is_empty() { "none".to_owned() } else { queues.join(", ") };
    print_text(&format!("the configuration is valid\ndatabase: {database}\nqueues: {queues}\n"))
}
