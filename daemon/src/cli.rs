//! The commands people type, and their output.

mod check;
mod config;
mod context;
mod control;
mod ctl;
mod dev;
mod doctor;
mod exit;
mod export;
mod exporter;
mod find;
mod items;
mod leases;
mod migrate;
mod output;
mod prune;
mod recover;
mod retry;
mod run;
mod show;
mod submit;
mod watch;
mod worker;
mod workers;

use clap::{Args, Parser, Subcommand};

pub use self::exit::{CliError, Exit, Status};

/// Arguments that every command takes.
#[derive(Args, Clone, Debug)]
pub struct Global {
    /// Configuration file; else `HOLDFAST_CONFIG`, else /etc/holdfast/holdfast.toml if it is there.
    #[arg(
        long,
        global = true,
        value_name = "FILE",
        env = "HOLDFAST_CONFIG",
        help_heading = "Common options"
    )]
    pub config: Option<std::path::PathBuf>,
    /// PostgreSQL connection URL; else the key database.url.
    #[arg(
        long,
        global = true,
        value_name = "URL",
        env = "HOLDFAST_DATABASE_URL",
        hide_env_values = true,
        help_heading = "Common options"
    )]
    pub database_url: Option<String>,
    /// Print JSON for programs instead of text for people.
    #[arg(long, global = true, help_heading = "Common options")]
    pub json: bool,
}

/// Runs batches of slow, costly items on any number of workers; PostgreSQL is all it needs.
#[derive(Debug, Parser)]
#[command(
    name = "holdfast",
    version,
    propagate_version = true,
    disable_help_subcommand = true,
    after_help = "\
Exit codes: 0 done; 1 ended with failed items, or a criterion that does not hold; 2 usage; 5 no more
than UNVERIFIED; 10 or 20 what doctor found; 65 bad input; 66 unreadable input; 69 schema not
supported; 70 internal error; 73 conflict; 74 output failed; 75 database unreachable; 77 denied; 78
configuration; 130 interrupted; 141 the reader of the output went away.

Examples:
  holdfast migrate up
  holdfast worker
  holdfast submit items.jsonl --queue review --watch
  holdfast export 0194b2c8-7d1e-7c3a-9a53-0d6f5f3f2a11 --output results.jsonl"
)]
struct Arguments {
    #[command(flatten)]
    global: Global,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Claim and execute items until told to stop.
    Worker(worker::WorkerArguments),
    /// Run everything on a private database.
    Dev(dev::DevArguments),
    /// Run a command on each item of a file, on this machine.
    Run(run::RunArguments),
    Submit(submit::SubmitArguments),
    Watch(watch::WatchArguments),
    Show(show::ShowArguments),
    Batches(show::BatchesArguments),
    Items(items::ItemsArguments),
    Item(items::ItemArguments),
    Export(export::ExportArguments),
    Exporter(exporter::ExporterArguments),
    Pause(control::PauseArguments),
    Resume(control::ResumeArguments),
    Cancel(control::CancelArguments),
    Retry(retry::RetryArguments),
    Workers(workers::WorkersArguments),
    Leases(leases::LeasesArguments),
    Ctl(ctl::CtlArguments),
    Prune(prune::PruneArguments),
    Doctor(doctor::DoctorArguments),
    Recover(recover::RecoverArguments),
    Check(check::CheckArguments),
    Migrate(migrate::MigrateArguments),
    Config(config::ConfigArguments),
    /// Start and end the executions of one worker; its guard starts it.
    #[command(hide = true, after_help = "Examples:\n  none: it is part of `holdfast worker`")]
    Keeper,
}

/// Parses the arguments, runs the command, and answers the exit code.
#[must_use]
pub fn main() -> std::process::ExitCode {
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(error) => return refuse(&error),
    };
    // The one TLS provider of the process, whoever opens a connection first.
    drop(rustls::crypto::ring::default_provider().install_default());
    let json = arguments.global.json;
    match run(arguments) {
        Ok(status) => status.into(),
        Err(error) => {
            output::print_error(&error, json);
            error.exit().into()
        }
    }
}

/// Help and versions are no errors; a wrong command line is one, as a document when that is what the
/// caller asked for.
fn refuse(error: &clap::Error) -> std::process::ExitCode {
    if !error.use_stderr() {
        drop(error.print());
        return Exit::Done.into();
    }
    let words = std::env::args_os().skip(1).take_while(|word| word != "--");
    if words.into_iter().any(|word| word == "--json") {
        let text = error.render().to_string();
        // What follows the first paragraphs is for people: usage, and where there is more to read.
        let said = ["\n\nUsage:", "\n\nFor more"]
            .iter()
            .fold(text.as_str(), |said, end| said.split(end).next().unwrap_or(said));
        let said = said.trim().trim_start_matches("error: ");
        output::print_error(&CliError::new(Exit::Usage, said), true);
    } else {
        drop(error.print());
    }
    Exit::Usage.into()
}

fn run(arguments: Arguments) -> Result<Status, CliError> {
    let global = &arguments.global;
    let exit = match arguments.command {
        Command::Worker(arguments) => return worker::run(global, arguments),
        Command::Dev(arguments) => return dev::run(global, &arguments),
        Command::Run(arguments) => return run::run(global, &arguments),
        Command::Submit(arguments) => submit::run(global, &arguments),
        Command::Watch(arguments) => watch::run(global, &arguments),
        Command::Show(arguments) => show::run_show(global, &arguments),
        Command::Batches(arguments) => show::run_batches(global, &arguments),
        Command::Items(arguments) => items::run_items(global, &arguments),
        Command::Item(arguments) => items::run_item(global, &arguments),
        Command::Export(arguments) => export::run(global, &arguments),
        Command::Exporter(arguments) => exporter::run(global, arguments),
        Command::Pause(arguments) => control::run_pause(global, &arguments),
        Command::Resume(arguments) => control::run_resume(global, &arguments),
        Command::Cancel(arguments) => control::run_cancel(global, &arguments),
        Command::Retry(arguments) => retry::run(global, &arguments),
        Command::Workers(arguments) => workers::run(global, &arguments),
        Command::Leases(arguments) => leases::run(global, &arguments),
        Command::Ctl(arguments) => ctl::run(global, &arguments),
        Command::Prune(arguments) => prune::run(global, &arguments),
        Command::Doctor(arguments) => doctor::run(global, &arguments),
        Command::Recover(arguments) => recover::run(global, &arguments),
        Command::Check(arguments) => check::run(global, &arguments),
        Command::Migrate(arguments) => migrate::run(global, &arguments),
        Command::Config(arguments) => config::run(global, &arguments),
        Command::Keeper => worker::keep(),
    }?;
    Ok(exit.into())
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::Arguments;

    #[test]
    fn every_help_has_examples() {
        fn look(command: &clap::Command) {
            let help = command.clone().render_long_help().to_string();
            assert!(help.contains("Examples:\n"), "{}", command.get_name());
            command.get_subcommands().for_each(look);
        }
        look(&Arguments::command());
    }

    #[test]
    fn the_arguments_are_consistent() {
        Arguments::command().debug_assert();
    }
}
