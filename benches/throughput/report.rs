//! What was measured, as a table or as JSON: medians with their spread, and ratios of each round.

use std::io::Write as _;

use anyhow::Result;
use serde::Serialize;

use super::machine::Machine;
use super::server::Costs;

/// One figure over the rounds.
#[derive(Debug, Serialize)]
struct Series {
    name: String,
    unit: &'static str,
    rounds: Vec<f64>,
    median: f64,
    costs: Vec<Costs>,
}

/// One figure divided by another of the same round.
#[derive(Debug, Serialize)]
struct Ratio {
    name: String,
    of: String,
    to: String,
    rounds: Vec<f64>,
    median: f64,
}

/// All figures of a run.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    machine: Machine,
    method: &'static str,
    series: Vec<Series>,
    ratios: Vec<Ratio>,
}

const METHOD: &str = "both sides in turns, in every round a fresh database for each; medians, and \
    the least and the greatest of the rounds; ratios are of one round; WAL, transactions and \
    statements for each item, counted by the server";

impl Report {
    pub(crate) fn new(machine: Machine) -> Self {
        Self { machine, method: METHOD, series: Vec::new(), ratios: Vec::new() }
    }

    /// Notes a figure of this round.
    pub(crate) fn note(&mut self, name: &str, unit: &'static str, value: f64) {
        self.series(name, unit).push(value);
    }

    /// Notes a figure of this round, and what it cost the server.
    pub(crate) fn note_with_costs(
        &mut self,
        name: &str,
        unit: &'static str,
        value: f64,
        costs: Costs,
    ) {
        let series = self.series(name, unit);
        series.push(value);
        series.costs.push(costs);
    }

    /// Notes how two figures of this round compare.
    pub(crate) fn compare(&mut self, name: &str, of: &str, to: &str) {
        let last = |wanted: &str| {
            self.series.iter().find(|s| s.name == wanted).and_then(|s| s.rounds.last()).copied()
        };
        let (Some(ours), Some(theirs)) = (last(of), last(to)) else { return };
        let index = self.ratios.iter().position(|ratio| ratio.name == name).unwrap_or_else(|| {
            self.ratios.push(Ratio {
                name: name.to_owned(),
                of: of.to_owned(),
                to: to.to_owned(),
                rounds: Vec::new(),
                median: 0.0,
            });
            self.ratios.len() - 1
        });
        let ratio = &mut self.ratios[index];
        ratio.rounds.push(ours / theirs);
        ratio.median = median(&ratio.rounds);
    }

    fn series(&mut self, name: &str, unit: &'static str) -> &mut Series {
        let index = self.series.iter().position(|series| series.name == name);
        let index = index.unwrap_or_else(|| {
            self.series.push(Series {
                name: name.to_owned(),
                unit,
                rounds: Vec::new(),
                median: 0.0,
                costs: Vec::new(),
            });
            self.series.len() - 1
        });
        &mut self.series[index]
    }

    /// Writes everything to standard output.
    pub(crate) fn print(&self, json: bool) -> Result<()> {
        let mut out = std::io::stdout().lock();
        if json {
            serde_json::to_writer_pretty(&mut out, self)?;
            writeln!(out)?;
            return Ok(());
        }
        let machine = &self.machine;
        writeln!(
            out,
            "{}, {} cores ({}), Linux {}, load {}",
            machine.date, machine.cores, machine.processor, machine.kernel, machine.load_at_start
        )?;
        writeln!(
            out,
            "PostgreSQL {}, fsync and synchronous_commit on, {}",
            machine.postgresql,
            machine.server_settings.join(", ")
        )?;
        writeln!(out, "{}\n", self.method)?;
        writeln!(
            out,
            "| figure | unit | median | least - greatest | transactions | statements | WAL bytes |"
        )?;
        writeln!(out, "| --- | --- | ---: | ---: | ---: | ---: | ---: |")?;
        for series in &self.series {
            let (least, greatest) = spread(&series.rounds);
            writeln!(
                out,
                "| {} | {} | {} | {} - {} | {} |",
                series.name,
                series.unit,
                figure(series.median),
                figure(least),
                figure(greatest),
                costs(&series.costs),
            )?;
        }
        writeln!(out, "\n| ratio | median | least - greatest |\n| --- | ---: | ---: |")?;
        for ratio in &self.ratios {
            let (least, greatest) = spread(&ratio.rounds);
            writeln!(out, "| {} | {:.2} | {least:.2} - {greatest:.2} |", ratio.name, ratio.median)?;
        }
        Ok(())
    }
}

impl Series {
    fn push(&mut self, value: f64) {
        self.rounds.push(value);
        self.median = median(&self.rounds);
    }
}

fn costs(rounds: &[Costs]) -> String {
    if rounds.is_empty() {
        return "- | - | -".to_owned();
    }
    let of = |part: fn(&Costs) -> f64| median(&rounds.iter().map(part).collect::<Vec<_>>());
    format!(
        "{:.4} | {:.4} | {:.0}",
        of(|costs| costs.transactions),
        of(|costs| costs.statements),
        of(|costs| costs.wal_bytes)
    )
}

/// Three or four digits that mean something.
fn figure(value: f64) -> String {
    match value {
        value if value >= 100.0 => format!("{value:.0}"),
        value if value >= 10.0 => format!("{value:.1}"),
        value => format!("{value:.2}"),
    }
}

fn median(values: &[f64]) -> f64 {
    quantile(&mut values.to_vec(), 0.5)
}

fn spread(values: &[f64]) -> (f64, f64) {
    values.iter().fold((f64::INFINITY, f64::NEG_INFINITY), |(least, greatest), value| {
        (least.min(*value), greatest.max(*value))
    })
}

/// The value below which the share `q` of the values lies; zero where there are none.
pub(crate) fn quantile(values: &mut [f64], q: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "an index of a short list"
    )]
    let index = (q * values.len().saturating_sub(1) as f64).round() as usize;
    values.get(index).copied().unwrap_or(0.0)
}
