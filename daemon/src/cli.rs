//! The commands people type, and their output.

mod context;
mod dev;
mod exit;
mod output;
mod worker;

use clap::{Args, Parser, Subcommand};

pub use self::exit::{CliError, Exit};

/// Arguments that every command takes.
#[derive(Args, Clone, Debug)]
pub struct Global {
    /// Configuration file; else HOLDFAST_CONFIG, else /etc/holdfast/holdfast.toml if it is there.
    #[arg(long, global = true, value_name = "FILE", env = "HOLDFAST_CONFIG")]
    pub config: Option<std::path::PathBuf>,
    /// PostgreSQL connection URL; else the key database.url.
    #[arg(
        long,
        global = true,
        value_name = "URL",
        env = "HOLDFAST_DATABASE_URL",
        hide_env_values = true
    )]
    pub database_url: Option<String>,
    /// Print JSON for programs instead of text for people.
    #[arg(long, global = true)]
    pub json: bool,
}

/// Runs batches of slow, costly items on any number of workers; PostgreSQL is all it needs.
#[derive(Debug, Parser)]
#[command(
    name = "holdfast",
    version,
    propagate_version = true,
    disable_help_subcommand = true,
    after_help = "Exit codes: 0 done; 1 ended with failed items; 2 usage; 65 bad input; \
                  66 unreadable input; 69 schema not supported; 70 internal error; 73 conflict; \
                  74 output failed; 75 database unreachable; 77 denied; 78 configuration."
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
}

/// Parses the arguments, runs the command, and answers the exit code.
pub fn main() -> std::process::ExitCode {
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(error) => {
            drop(error.print());
            return if error.use_stderr() { Exit::Usage } else { Exit::Done }.into();
        }
    };
    // The one TLS provider of the process, whoever opens a connection first.
    drop(rustls::crypto::ring::default_provider().install_default());
    let json = arguments.global.json;
    match run(arguments) {
        Ok(exit) => exit.into(),
        Err(error) => {
            output::print_error(&error, json);
            error.exit().into()
        }
    }
}

fn run(arguments: Arguments) -> Result<Exit, CliError> {
    let global = &arguments.global;
    match arguments.command {
        Command::Worker(arguments) => worker::run(global, arguments),
        Command::Dev(arguments) => dev::run(global, &arguments),
    }
}
