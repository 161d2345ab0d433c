//! Prometheus and its tool: what looks at metrics, rules and expressions as operators do.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// `prometheus` or `promtool`, where `make setup` puts it or in PATH; none on a machine without it.
pub(crate) fn program(name: &str) -> Option<PathBuf> {
    // target/debug/holdfast: beside the profile's folder.
    let target = Path::new(env!("CARGO_BIN_EXE_holdfast")).ancestors().nth(2).unwrap();
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = [target.join("prometheus")].into_iter().chain(std::env::split_paths(&path));
    let found = folders.map(|folder| folder.join(name)).find(|file| file.is_file());
    if found.is_none() {
        eprintln!("skipped: there is no {name}");
    }
    found
}

/// What `promtool check metrics` says of an exposition: nothing, if it is as it should be.
pub(crate) fn check_metrics(promtool: &Path, exposition: &str) -> String {
    let mut command = Command::new(promtool);
    command.args(["check", "metrics"]).stdin(Stdio::piped());
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(exposition.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8(said).unwrap();
    assert!(output.status.success() || !said.is_empty(), "{}", output.status);
    said
}

/// The value of a series of an exposition; none where it is not there.
pub(crate) fn find(exposition: &str, series: &str) -> Option<f64> {
    let value = |line: &str| line.strip_prefix(series)?.strip_prefix(' ')?.parse().ok();
    exposition.lines().find_map(value)
}

/// The value of a series that is there.
pub(crate) fn value(exposition: &str, series: &str) -> f64 {
    find(exposition, series).unwrap_or_else(|| panic!("no {series} in\n{exposition}"))
}

/// The names and types of an exposition's metrics, in its order.
pub(crate) fn types(exposition: &str) -> Vec<(&str, &str)> {
    exposition.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' ')).collect()
}
