//! What a run ran on: figures of different machines do not compare.

use std::fs;

use serde::Serialize;

use holdfast::clock::{Clock, SystemClock};
use holdfast::embedded::EmbeddedPostgres;

/// The machine, the server and the moment.
#[derive(Debug, Serialize)]
pub(crate) struct Machine {
    pub(crate) date: String,
    pub(crate) cores: usize,
    pub(crate) processor: String,
    pub(crate) kernel: String,
    pub(crate) load_at_start: String,
    pub(crate) postgresql: String,
    pub(crate) server_settings: Vec<String>,
}

/// Looks at them.
pub(crate) fn describe(postgres: &EmbeddedPostgres) -> Machine {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let processors = read("/proc/cpuinfo");
    let processor = processors.lines().find_map(|line| line.strip_prefix("model name"));
    let load = read("/proc/loadavg");
    let settings = super::server::settings();
    Machine {
        date: SystemClock.wall().date().to_string(),
        cores: std::thread::available_parallelism().map_or(0, usize::from),
        processor: processor
            .map_or("unknown", |name| name.trim_start_matches([' ', '\t', ':']))
            .to_owned(),
        kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
        load_at_start: load.split(' ').take(3).collect::<Vec<_>>().join(" "),
        postgresql: postgres.version().to_string(),
        server_settings: settings.iter().map(|(name, value)| format!("{name} = {value}")).collect(),
    }
}
