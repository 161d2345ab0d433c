//! The layers of a configuration: defaults, a file, the environment, flags; later ones win.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::io;
use std::path::PathBuf;

use figment::providers::{Format, Toml};
use figment::value::{Dict, Map, Value};
use figment::{Figment, Metadata, Profile, Provider};
use toml_edit::{ImDocument, TableLike};

use super::DEFAULTS;
use super::error::{ConfigError, Origin, Problem};

const PREFIX: &str = "HOLDFAST__";
const FILE_VARIABLE: &str = "HOLDFAST_CONFIG";
const SYSTEM_FILE: &str = "/etc/holdfast/holdfast.toml";

/// A key as its segments; a queue's name may hold a dot, so a joined text would not do.
pub(super) type KeyPath = Vec<String>;

/// The key as people write it: `queues."a.b".timeout`.
pub(super) fn show(path: &[String]) -> String {
    let bare = |s: &str| {
        !s.is_empty() && s.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_".contains(&b))
    };
    let quoted = |s: &String| if bare(s) { s.clone() } else { format!("{s:?}") };
    path.iter().map(quoted).collect::<Vec<_>>().join(".")
}

/// The file to read, and what named it: none is the default place, where it may be absent.
#[derive(Clone, Debug)]
struct File {
    path: PathBuf,
    named_by: Option<String>,
}

/// Where settings are read from, beside the compiled defaults.
#[derive(Clone, Debug, Default)]
pub struct Sources {
    file: Option<File>,
    variables: Vec<(String, OsString)>,
    flags: Vec<(String, String, Value)>,
}

impl Sources {
    /// The defaults alone: no file, no environment, no flags.
    #[must_use]
    pub fn none() -> Self {
        Self::default()
    }

    /// What this process was given: the environment, the file named by `HOLDFAST_CONFIG`, else
    /// `/etc/holdfast/holdfast.toml` where it exists.
    #[must_use]
    pub fn of_process() -> Self {
        let system_file = File { path: SYSTEM_FILE.into(), named_by: None };
        Self { file: Some(system_file), ..Self::default() }.with_variables(std::env::vars_os())
    }

    /// Reads this file, named by `flag`, in place of any other.
    #[must_use]
    pub fn with_file(mut self, file: impl Into<PathBuf>, flag: &str) -> Self {
        self.file = Some(File { path: file.into(), named_by: Some(format!("flag {flag}")) });
        self
    }

    /// Adds environment variables: those that begin with `HOLDFAST__`, those of OpenTelemetry that
    /// stand for a setting here, and `HOLDFAST_CONFIG` where it is not empty and no file was named
    /// yet. All others are left alone.
    #[must_use]
    pub fn with_variables<K: Into<OsString>, V: Into<OsString>>(
        mut self,
        variables: impl IntoIterator<Item = (K, V)>,
    ) -> Self {
        for (name, value) in variables {
            // A name that is not UTF-8 is none of ours.
            let (Ok(name), value) = (name.into().into_string(), value.into()) else { continue };
            if name.starts_with(PREFIX) || standard(&name, &value).is_some() {
                self.variables.push((name, value));
            } else if name == FILE_VARIABLE && !value.is_empty() && !self.names_a_file() {
                let named_by = Some(format!("environment variable {name}"));
                self.file = Some(File { path: value.into(), named_by });
            }
        }
        // Ours come last and win; of the standard ones the more special has the later name.
        self.variables
            .sort_by(|(a, _), (b, _)| (a.starts_with(PREFIX), a).cmp(&(b.starts_with(PREFIX), b)));
        self
    }

    fn names_a_file(&self) -> bool {
        self.file.as_ref().is_some_and(|file| file.named_by.is_some())
    }

    /// Sets a key such as `lease.ttl` from a command-line flag such as `--lease-ttl`.
    #[must_use]
    pub fn with_flag(mut self, flag: &str, key: &str, value: impl Into<Value>) -> Self {
        self.flags.push((flag.to_owned(), key.to_owned(), value.into()));
        self
    }
}

/// One source of values.
struct Layer {
    values: Dict,
    origins: Origins,
    /// The key and the text of an environment variable: it has no type of its own.
    text: Option<(KeyPath, String)>,
}

impl Provider for &Layer {
    fn metadata(&self) -> Metadata {
        Metadata::named("settings")
    }

    fn data(&self) -> Result<Map<Profile, Dict>, figment::Error> {
        Ok(Profile::Default.collect(self.values.clone()))
    }
}

/// All layers, lowest first.
pub(super) struct Layers(Vec<Layer>);

impl Layers {
    /// Reads every source.
    ///
    /// # Errors
    /// A named file that cannot be read, and a source that is no configuration at all.
    pub(super) fn read(sources: &Sources) -> Result<Self, ConfigError> {
        let mut layers = vec![Layer::defaults()];
        let mut problems = Vec::new();
        match sources.file.as_ref().map(Layer::file).transpose() {
            Ok(layer) => layers.extend(layer.flatten()),
            Err(problem) => problems.push(problem),
        }
        for (name, value) in &sources.variables {
            match Layer::variable(name, value.clone()) {
                Ok(layer) => layers.push(layer),
                Err(problem) => problems.push(problem),
            }
        }
        for (flag, key, value) in &sources.flags {
            let path: KeyPath = key.split('.').map(str::to_owned).collect();
            layers.push(Layer::single(&path, value.clone(), &Origin::Flag(flag.clone())));
        }
        ConfigError::check(problems).map(|()| Self(layers))
    }

    /// The values of all layers as one tree.
    pub(super) fn merged(&self) -> Value {
        let merged = self.0.iter().fold(Figment::new(), Figment::merge);
        merged.find_value("").expect("every layer is a table that was read before")
    }

    /// The default of a key.
    pub(super) fn default_of(&self, path: &[String]) -> Option<&Value> {
        let (last, tables) = path.split_last()?;
        let mut at = &self.0.first()?.values;
        for table in tables {
            at = at.get(table)?.as_dict()?;
        }
        at.get(last)
    }

    /// Every key and table of the defaults.
    pub(super) fn default_keys(&self) -> Vec<KeyPath> {
        fn walk(table: &Dict, path: &mut KeyPath, keys: &mut Vec<KeyPath>) {
            for (key, value) in table {
                path.push(key.clone());
                keys.push(path.clone());
                if let Some(below) = value.as_dict() {
                    walk(below, path, keys);
                }
                path.pop();
            }
        }
        let mut keys = vec![vec!["queues".to_owned()]];
        self.0.iter().take(1).for_each(|layer| walk(&layer.values, &mut Vec::new(), &mut keys));
        keys
    }

    /// The text of the environment variable that sets `path`, if its value is the one that counts.
    pub(super) fn text_of(&self, path: &[String]) -> Option<&str> {
        let setter = self.0.iter().rev().find(|layer| layer.origins.0.contains_key(path))?;
        let (key, text) = setter.text.as_ref()?;
        (key == path).then_some(text)
    }

    /// Where each value came from.
    pub(super) fn origins(&self) -> Origins {
        Origins(self.0.iter().flat_map(|layer| layer.origins.0.clone()).collect())
    }
}

impl Layer {
    fn defaults() -> Self {
        let values = Toml::from_str(DEFAULTS).expect("a test reads the compiled defaults");
        Self { values, origins: Origins::default(), text: None }
    }

    fn file(file: &File) -> Result<Option<Self>, Problem> {
        let origin = |line| Origin::File { path: file.path.clone(), line };
        let problem =
            |what, line| Problem { key: String::new(), what, origins: vec![origin(line)] };
        let text = match (std::fs::read_to_string(&file.path), &file.named_by) {
            (Ok(text), _) => text,
            (Err(e), None) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            (Err(e), None) => return Err(problem(format!("cannot be read: {e}"), None)),
            (Err(e), Some(named_by)) => {
                let what = format!("the file named by {named_by} cannot be read: {e}");
                return Err(problem(what, None));
            }
        };
        // The messages alone: the line they would quote may hold a password.
        let document = ImDocument::parse(text.as_str()).map_err(|e| {
            let line = e.span().map(|span| line_at(&text, span.start));
            problem(format!("not valid TOML: {}", e.message().replace('\n', ", ")), line)
        })?;
        let values = Toml::from_str(&text)
            .map_err(|e| problem(format!("not valid TOML: {}", e.message()), None))?;
        let mut origins = Origins::default();
        origins.add_file(&text, document.as_table(), &mut Vec::new(), &origin);
        Ok(Some(Self { values, origins, text: None }))
    }

    fn variable(name: &str, value: OsString) -> Result<Self, Problem> {
        let origin = Origin::Variable(name.to_owned());
        let value = value.into_string().map_err(|_| Problem {
            key: String::new(),
            what: "the value is not UTF-8".into(),
            origins: vec![origin.clone()],
        })?;
        let (path, value) = match standard(name, value.as_ref()) {
            Some((key, value)) => (key.split('.').map(str::to_owned).collect(), value.to_owned()),
            None => (variable_path(name), value),
        };
        let parsed = value.parse().expect("figment takes what it cannot parse for a text");
        let layer = Self::single(&path, parsed, &origin);
        Ok(Self { text: Some((path, value)), ..layer })
    }

    fn single(path: &[String], value: Value, origin: &Origin) -> Self {
        let mut origins = Origins::default();
        for depth in 1..path.len() {
            origins.0.insert(path[..depth].to_vec(), origin.clone());
        }
        origins.add_value(&value, &mut path.to_vec(), origin);
        let (first, below) = path.split_first().expect("a split text has at least one part");
        let nested =
            below.iter().rev().fold(value, |value, key| Dict::from([(key.clone(), value)]).into());
        Self { values: Dict::from([(first.clone(), nested)]), origins, text: None }
    }
}

/// The setting that a variable of the OpenTelemetry specification stands for, and its value; an empty
/// one counts as not set.
fn standard<'v>(name: &str, value: &'v OsStr) -> Option<(&'static str, &'v str)> {
    const ENDPOINT: &str = "telemetry.otlp_endpoint";
    let value = value.to_str().filter(|value| !value.is_empty())?;
    match name {
        "OTEL_EXPORTER_OTLP_ENDPOINT" | "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT" => {
            Some((ENDPOINT, value))
        }
        "OTEL_SDK_DISABLED" if value.eq_ignore_ascii_case("true") => Some((ENDPOINT, "")),
        "OTEL_TRACES_EXPORTER" if value == "none" => Some((ENDPOINT, "")),
        "OTEL_SERVICE_NAME" => Some(("telemetry.service_name", value)),
        "OTEL_TRACES_SAMPLER" => Some(("telemetry.sampler", value)),
        "OTEL_TRACES_SAMPLER_ARG" => Some(("telemetry.sample_ratio", value)),
        _ => None,
    }
}

/// `HOLDFAST__LEASE__TTL` is `lease.ttl`. What follows `QUEUES__NAME__ENV__` is the name of a
/// variable and stays as it is.
fn variable_path(name: &str) -> KeyPath {
    let mut path = KeyPath::new();
    let mut rest = Some(&name[PREFIX.len()..]);
    while let Some(at) = rest {
        if let [first, _, third] = path.as_slice()
            && (first.as_str(), third.as_str()) == ("queues", "env")
        {
            path.push(at.to_owned());
            break;
        }
        let (part, below) = at.split_once("__").map_or((at, None), |(p, b)| (p, Some(b)));
        path.push(part.to_ascii_lowercase());
        rest = below;
    }
    path
}

fn line_at(text: &str, offset: usize) -> usize {
    1 + text.get(..offset).unwrap_or(text).matches('\n').count()
}

/// Where each key and table that is not a default came from.
#[derive(Clone, Debug, Default)]
pub(super) struct Origins(BTreeMap<KeyPath, Origin>);

impl Origins {
    /// Where the value of exactly this key came from; none if it is the default.
    pub(super) fn of(&self, path: &[String]) -> Option<Origin> {
        self.0.get(path).cloned()
    }

    /// The same, or of the nearest table above it.
    pub(super) fn near(&self, path: &[String]) -> Option<Origin> {
        (1..=path.len()).rev().find_map(|depth| self.0.get(&path[..depth])).cloned()
    }

    fn add_value(&mut self, value: &Value, path: &mut KeyPath, origin: &Origin) {
        self.0.insert(path.clone(), origin.clone());
        for (key, below) in value.as_dict().into_iter().flatten() {
            path.push(key.clone());
            self.add_value(below, path, origin);
            path.pop();
        }
    }

    fn add_file(
        &mut self,
        text: &str,
        table: &dyn TableLike,
        path: &mut KeyPath,
        origin: &impl Fn(Option<usize>) -> Origin,
    ) {
        for (name, item) in table.iter() {
            let span = table.key(name).and_then(toml_edit::Key::span).or_else(|| item.span());
            path.push(name.to_owned());
            self.0.insert(path.clone(), origin(span.map(|span| line_at(text, span.start))));
            if let Some(below) = item.as_table_like() {
                self.add_file(text, below, path, origin);
            }
            path.pop();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_in_the_default_place_may_be_absent_but_not_unreadable() {
        let folder = tempfile::tempdir().unwrap();
        let at = |path: PathBuf| Sources {
            file: Some(File { path, named_by: None }),
            ..Sources::none()
        };
        let present = folder.path().join("holdfast.toml");
        std::fs::write(&present, "[log]\nlevel = 'warn'").unwrap();

        let absent =
            Layers::read(&at(folder.path().join("absent.toml"))).map(|layers| layers.0.len());
        assert_eq!(absent, Ok(1));
        assert_eq!(Layers::read(&at(present)).map(|layers| layers.0.len()), Ok(2));
        let unreadable = Layers::read(&at(folder.path().to_owned())).map(|layers| layers.0.len());
        assert!(unreadable.unwrap_err().to_string().starts_with("cannot be read: "));
    }

    #[test]
    fn variables_name_keys_in_any_case_and_a_queues_variables_as_they_are() {
        for (name, key) in [
            ("HOLDFAST__LEASE__TTL", "lease.ttl"),
            ("HOLDFAST__Lease__kill_grace", "lease.kill_grace"),
            ("HOLDFAST__QUEUES__Q__ENV_PASS", "queues.q.env_pass"),
            ("HOLDFAST__QUEUES__Q__ENV__A__b", "queues.q.env.A__b"),
            ("HOLDFAST__", "\"\""),
            ("HOLDFAST____TTL", "\"\".ttl"),
        ] {
            assert_eq!(show(&variable_path(name)), key, "{name}");
        }
    }
}
