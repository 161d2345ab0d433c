//! The effective settings for people and programs: each value with its source, secrets redacted.

use std::fmt;

use serde::Serialize;
use serde_json::Value;

use super::Settings;
use super::error::Origin;
use super::layers::{KeyPath, show};

/// Every key with its value and source, in the order of the keys. Displays as one line a key;
/// serialises as a list.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(transparent)]
pub struct Report {
    entries: Vec<ReportEntry>,
}

/// One key of a [`Report`].
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ReportEntry {
    /// The key path, such as `lease.ttl`.
    pub key: String,
    /// The value in effect, as it would be written; secrets as `***`.
    pub value: Value,
    /// Where the value came from.
    #[serde(serialize_with = "as_text")]
    pub origin: Origin,
}

fn as_text<S: serde::Serializer>(origin: &Origin, to: S) -> Result<S::Ok, S::Error> {
    to.collect_str(origin)
}

impl Report {
    /// The entries.
    #[must_use]
    pub fn entries(&self) -> &[ReportEntry] {
        &self.entries
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let setting = |entry: &ReportEntry| format!("{} = {}", entry.key, entry.value);
        let width = self.entries.iter().map(|e| setting(e).chars().count()).max().unwrap_or(0);
        for entry in &self.entries {
            writeln!(f, "{:width$}  # {}", setting(entry), entry.origin, width = width.min(60))?;
        }
        Ok(())
    }
}

/// What `holdfast config show` prints: the settings in effect and where each came from. It holds no
/// passwords, and of a queue's own variables only the names.
///
/// # Panics
/// Never: settings serialise to tables with text keys.
#[must_use]
pub fn check_report(settings: &Settings) -> Report {
    let tree = serde_json::to_value(settings).expect("settings serialise to tables with text keys");
    let mut report = Report { entries: Vec::new() };
    report.add(settings, &mut KeyPath::new(), tree);
    report
}

impl Report {
    fn add(&mut self, settings: &Settings, path: &mut KeyPath, value: Value) {
        let value = match value {
            // An empty table of variables is a value to show; having no queues is not.
            Value::Object(table) if !table.is_empty() || path.len() == 1 => {
                for (key, below) in table {
                    path.push(key);
                    self.add(settings, path, below);
                    path.pop();
                }
                return;
            }
            Value::String(_) if is_variable(path) => "***".into(),
            // The name as configured, without the version of the stored shape.
            Value::String(tag) if path.last().is_some_and(|key| key == "executor") => {
                tag.split('/').next().into()
            }
            value @ (Value::Null
            | Value::Bool(_)
            | Value::Number(_)
            | Value::String(_)
            | Value::Array(_)
            | Value::Object(_)) => value,
        };
        let origin = settings.origins.of(path).unwrap_or(Origin::Default);
        self.entries.push(ReportEntry { key: show(path), value, origin });
    }
}

/// Whether the key is `queues.NAME.env.VARIABLE`.
fn is_variable(path: &[String]) -> bool {
    matches!(path, [_, _, table, _] if table == "env")
}
