//! From the merged layers to typed settings, with every problem on the way, not only the first.

use std::collections::BTreeSet;

use figment::error::{Actual, Kind};
use figment::value::{Dict, Value};

use super::RawSettings;
use super::agent::AgentSpec;
use super::error::Problem;
use super::http::HttpSpec;
use super::layers::{KeyPath, Layers, Origins, show};
use super::queue::CommandSpec;

/// The executors, each with the table of the tree that its queues are read from: a queue's keys are
/// known by its executor.
const EXECUTORS: [(&str, &str); 3] =
    [("command", "queues"), ("http", "queues/http"), ("agent", "queues/agent")];

const ONE_OF: &str = "must be one of command, http, agent";

/// The problems found so far, and the keys they are about.
pub(super) struct Problems<'a> {
    origins: &'a Origins,
    list: Vec<Problem>,
    keys: BTreeSet<KeyPath>,
    unreadable: BTreeSet<KeyPath>,
}

impl<'a> Problems<'a> {
    pub(super) fn new(origins: &'a Origins) -> Self {
        let (keys, unreadable) = (BTreeSet::new(), BTreeSet::new());
        Self { origins, list: Vec::new(), keys, unreadable }
    }

    /// Notes what is wrong with the value of `path`, unless it could not even be read: then there
    /// is another in its place.
    pub(super) fn add(&mut self, path: &[String], what: impl Into<String>) {
        if !self.unreadable.contains(path) {
            self.note(&[path], &what.into());
        }
    }

    /// Notes that the values of these keys do not go together, unless one is wrong already.
    pub(super) fn add_about(&mut self, paths: &[&[String]], what: impl Into<String>) {
        if !paths.iter().any(|path| self.keys.contains(*path)) {
            self.note(paths, &what.into());
        }
    }

    /// Whether something is wrong with this table or below it.
    pub(super) fn touch(&self, table: &[String]) -> bool {
        self.keys.iter().any(|key| key.starts_with(table))
    }

    pub(super) fn into_list(self) -> Vec<Problem> {
        self.list
    }

    fn add_unreadable(&mut self, path: &[String], what: &str) {
        self.note(&[path], what);
        self.unreadable.insert(path.to_vec());
    }

    fn note(&mut self, paths: &[&[String]], what: &str) {
        let mut origins = Vec::new();
        for origin in paths.iter().filter_map(|path| self.origins.of(path)) {
            if !origins.contains(&origin) {
                origins.push(origin);
            }
        }
        origins.extend(self.origins.near(paths[0]).filter(|_| origins.is_empty()));
        // One problem is one line, whatever a key or value holds.
        let what = what.replace(char::is_control, " ");
        self.list.push(Problem { key: show(paths[0]), what, origins });
        self.keys.insert(paths[0].to_vec());
    }
}

/// Reads the settings. A key at fault is noted and takes its default, or goes where it has none, so
/// that the next fault is found as well.
pub(super) fn extract(layers: &Layers, problems: &mut Problems<'_>) -> Option<RawSettings> {
    let queue_defaults = [
        defaults(CommandSpec::defaults()),
        defaults(HttpSpec::defaults()),
        defaults(AgentSpec::defaults()),
    ];
    let mut tree = layers.merged();
    sort_queues(&mut tree, &queue_defaults, problems);
    loop {
        let error = match tree.deserialize::<RawSettings>() {
            Ok(raw) => return Some(raw),
            Err(error) => error,
        };
        let place = existing(&tree, &error.path);
        let executor =
            place.first().and_then(|first| EXECUTORS.iter().position(|(_, table)| first == table));
        let mut path = place.clone();
        if executor.is_some() {
            "queues".clone_into(&mut path[0]);
        }
        let keys = executor.map(|executor| &queue_defaults[executor]);
        let default = match (keys, path.as_slice()) {
            (Some(keys), [_, _, key]) => keys.get(key),
            (_, path) => layers.default_of(path),
        };
        // What looks like a number or a list in the environment may be meant as a text.
        let text =
            layers.text_of(&path).filter(|_| !matches!(at(&tree, &place), Some(Value::String(..))));
        if let Some(text) = text {
            put(&mut tree, &place, Some(text.into()));
            continue;
        }
        let what = describe(&error.kind, layers, &path, keys);
        problems.add_unreadable(&path, &what);
        if place.is_empty() || !put(&mut tree, &place, default.cloned()) {
            return None;
        }
    }
}

fn defaults(spec: impl serde::Serialize) -> Dict {
    Value::serialize(spec)
        .ok()
        .and_then(Value::into_dict)
        .expect("settings of a queue serialise to a table")
}

/// Gives every queue the settings it does not name, and puts it into the table of its executor.
fn sort_queues(tree: &mut Value, defaults: &[Dict; 3], problems: &mut Problems<'_>) {
    let mut sorted = [Dict::new(), Dict::new(), Dict::new()];
    let Some(Value::Dict(_, queues)) = at_mut(tree, &["queues".to_owned()]) else { return };
    for (name, value) in std::mem::take(queues) {
        // Anything but a table is a type error that the extraction reports.
        let Value::Dict(tag, mut queue) = value else {
            sorted[0].insert(name, value);
            continue;
        };
        let named = match queue.remove("executor") {
            Some(Value::String(_, executor)) => {
                EXECUTORS.iter().position(|(known, _)| executor == *known).ok_or(ONE_OF.to_owned())
            }
            Some(_) => Err(ONE_OF.to_owned()),
            None => Err(format!("is missing, {ONE_OF}")),
        };
        match named {
            Ok(executor) => {
                for (key, value) in &defaults[executor] {
                    queue.entry(key.clone()).or_insert_with(|| value.clone());
                }
                sorted[executor].insert(name, Value::Dict(tag, queue));
            }
            Err(what) => problems.add(&["queues".to_owned(), name, "executor".to_owned()], what),
        }
    }
    for ((_, table), queues) in EXECUTORS.into_iter().zip(sorted) {
        put(tree, &[table.to_owned()], Some(queues.into()));
    }
}

/// The part of an error's path that names a key: not the places in a list.
fn existing(tree: &Value, path: &[String]) -> KeyPath {
    let tables =
        (0..path.len()).take_while(|n| matches!(at(tree, &path[..*n]), Some(Value::Dict(..))));
    path[..tables.count()].to_vec()
}

fn at<'t>(tree: &'t Value, path: &[String]) -> Option<&'t Value> {
    path.iter().try_fold(tree, |tree, key| tree.as_dict()?.get(key))
}

fn at_mut<'t>(tree: &'t mut Value, path: &[String]) -> Option<&'t mut Value> {
    path.iter().try_fold(tree, |tree, key| match tree {
        Value::Dict(_, dict) => dict.get_mut(key),
        Value::String(..)
        | Value::Char(..)
        | Value::Bool(..)
        | Value::Num(..)
        | Value::Empty(..)
        | Value::Array(..) => None,
    })
}

/// Sets or removes a key; false where that changes nothing, so that the extraction cannot go on.
fn put(tree: &mut Value, path: &[String], value: Option<Value>) -> bool {
    let Some((key, tables)) = path.split_last() else { return false };
    let Some(Value::Dict(_, table)) = at_mut(tree, tables) else { return false };
    match value {
        Some(value) => table.insert(key.clone(), value.clone()) != Some(value),
        None => table.remove(key).is_some(),
    }
}

/// What is wrong, by kinds of values: a value itself may be a secret.
fn describe(kind: &Kind, layers: &Layers, path: &[String], keys: Option<&Dict>) -> String {
    match kind {
        Kind::InvalidType(found, wanted) => {
            format!("is {}, must be {}", found_kind(found), wanted_kind(wanted))
        }
        Kind::InvalidValue(_, wanted) => {
            format!("is out of range, must be {}", wanted_kind(wanted))
        }
        Kind::UnknownField(..) => {
            let hint = suggestion(path, layers, keys);
            hint.map_or("unknown key".into(), |key| format!("unknown key; did you mean `{key}`?"))
        }
        Kind::Message(what) => what.clone(),
        Kind::InvalidLength(..)
        | Kind::UnknownVariant(..)
        | Kind::MissingField(_)
        | Kind::DuplicateField(_)
        | Kind::ISizeOutOfRange(_)
        | Kind::USizeOutOfRange(_)
        | Kind::Unsupported(_)
        | Kind::UnsupportedKey(..) => kind.to_string(),
    }
}

fn found_kind(found: &Actual) -> &'static str {
    match found {
        Actual::Bool(_) => "a truth value",
        Actual::Unsigned(_) | Actual::Signed(_) => "a whole number",
        Actual::Float(_) => "a fraction",
        Actual::Char(_) | Actual::Str(_) => "a text",
        Actual::Seq => "a list",
        Actual::Map => "a table",
        Actual::Unit | Actual::Option => "nothing",
        Actual::Bytes(_)
        | Actual::NewtypeStruct
        | Actual::Enum
        | Actual::UnitVariant
        | Actual::NewtypeVariant
        | Actual::TupleVariant
        | Actual::StructVariant
        | Actual::Other(_) => "of another kind",
    }
}

fn wanted_kind(wanted: &str) -> &str {
    match wanted {
        "u8" => "a whole number, 0 to 255",
        "u16" => "a whole number, 0 to 65535",
        "u32" => "a whole number, 0 to 4294967295",
        "usize" => "a whole number, not negative",
        "f64" => "a number",
        "a string" => "a text",
        "a sequence" => "a list",
        wanted if wanted == "a map" || wanted.starts_with("struct ") => "a table",
        wanted => wanted,
    }
}

/// The known key that an unknown one was probably meant to be: one with the same last part, else
/// one that differs in a few letters.
fn suggestion(path: &[String], layers: &Layers, keys: Option<&Dict>) -> Option<String> {
    let mut known = layers.default_keys();
    if let (Some(keys), [queues, name, ..]) = (keys, path) {
        let keys = keys.keys().map(String::as_str).chain(["executor"]);
        known = keys.map(|key| vec![queues.clone(), name.clone(), key.to_owned()]).collect();
    }
    let mut same_end =
        known.iter().filter(|key| key.len() > path.len() && key.last() == path.last());
    if let (Some(key), None) = (same_end.next(), same_end.next()) {
        return Some(show(key));
    }
    let written = show(path);
    known
        .iter()
        .map(|key| show(key))
        .map(|key| (strsim::damerau_levenshtein(&key, &written), key))
        .filter(|(distance, _)| *distance <= 3 && distance * 2 < written.len())
        .min()
        .map(|(_, key)| key)
}
