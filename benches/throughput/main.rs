//! Holdfast beside hand-written SQL: submit, drain, start latency and cancel, in one run on one
//! private `PostgreSQL` with fsync and `synchronous_commit` on.
//!
//! Both sides take turns in every round, so that every figure has a ratio of its own round: the
//! disk of a shared machine changes its pace by a factor of ten. A run that loses an item fails.

mod items;
mod machine;
mod ours;
mod raw;
mod report;
mod scenarios;
mod server;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::{Parser, ValueEnum};

use holdfast::embedded::{self, DataDir, EmbeddedOptions, EmbeddedPostgres};
use holdfast::telemetry::{self, LogFormat, LogSettings, TraceSettings};

use crate::report::Report;

/// Measures Holdfast beside hand-written SQL, on a private PostgreSQL.
#[derive(Debug, Parser)]
struct Arguments {
    /// Rounds; medians and the spread over them are printed.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// What to measure, separated by commas.
    #[arg(long, value_delimiter = ',', default_value = "submit,drain,latency,cancel")]
    only: Vec<Scenario>,
    /// Items of a submit.
    #[arg(long, default_value_t = 100_000)]
    submit_items: u32,
    /// Items of a drain; fewer where a worker has few slots: 500 for each.
    #[arg(long, default_value_t = 50_000)]
    items: u32,
    /// Bytes of an item's input, as JSON text.
    #[arg(long, default_value_t = 300, value_parser = clap::value_parser!(u32).range(8..=60_000))]
    input_bytes: u32,
    /// Execution slots of the worker that drains, each measured by itself.
    #[arg(long, value_delimiter = ',', default_value = "16,256,1024",
          value_parser = clap::value_parser!(u16).range(1..=4096))]
    slots: Vec<u16>,
    /// Batches of one item for the start latency.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..))]
    latency_batches: u32,
    /// Items of a batch that is cancelled.
    #[arg(long, default_value_t = 1_000_000)]
    cancel_items: u32,
    /// The folder of initdb and postgres.
    #[arg(long, value_name = "DIR", env = embedded::PG_BIN_VARIABLE)]
    pg_bin: Option<PathBuf>,
    /// One JSON document instead of a table.
    #[arg(long)]
    json: bool,
    /// Given by `cargo bench`.
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Scenario {
    Submit,
    Drain,
    Latency,
    Cancel,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match measure(&arguments).and_then(|report| report.print(arguments.json)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("throughput: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn measure(arguments: &Arguments) -> Result<Report> {
    // It outlives the runtime, and goes with its data at the end of this function.
    let postgres = EmbeddedPostgres::start(&EmbeddedOptions {
        pg_bin: arguments.pg_bin.clone(),
        extra_settings: server::settings(),
        ..EmbeddedOptions::new(DataDir::Ephemeral)
    })?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        let telemetry = as_in_a_worker()?;
        let server = server::Server::prepare(&postgres).await.context("prepare the server")?;
        let mut report = Report::new(machine::describe(&postgres));
        for round in 0..arguments.rounds {
            eprintln!("round {} of {}", round + 1, arguments.rounds);
            let mut bench = scenarios::Bench { server: &server, report: &mut report, round };
            for scenario in &arguments.only {
                match scenario {
                    Scenario::Submit => bench.submit(arguments).await.context("submit")?,
                    Scenario::Drain => bench.drain(arguments).await.context("drain")?,
                    Scenario::Latency => bench.latency(arguments).await.context("latency")?,
                    Scenario::Cancel => bench.cancel(arguments).await.context("cancel")?,
                }
            }
        }
        telemetry.shutdown().await;
        Ok(report)
    })
}

/// Spans cost what they cost in a worker without a collector; only warnings are printed.
fn as_in_a_worker() -> Result<telemetry::TelemetryGuard> {
    let logs = LogSettings { level: "warn".into(), format: LogFormat::Text };
    Ok(telemetry::init(&logs, &TraceSettings::none())?)
}
