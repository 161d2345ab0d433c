//! Acceptance criteria and checks, against the vectors and beyond them.
//!
//! `HOLDFAST_VECTORS=DIR cargo test acceptance_vectors` runs other vectors of the same format; a
//! file that DIR lacks is not run.

mod corner_cases;
mod fuzz;
mod paths;
mod properties;
mod support;

use std::path::PathBuf;

use holdfast::check::{
    CheckInput, DEFAULT_VIRTUAL_PREFIX, Directories, Workspace, judge, parse_file, run,
};
use holdfast::model::criteria::{neutralize, normalize_json};
use holdfast::model::{Evidence, Verdict};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use support::{Entry, Tree};

const FILES: [&str; 6] = [
    "normalize.jsonl",
    "neutralize.jsonl",
    "parse_file.jsonl",
    "tests_passed.jsonl",
    "files.jsonl",
    "verdict_validate.jsonl",
];

#[derive(Deserialize)]
#[serde(bound = "I: DeserializeOwned, E: DeserializeOwned")]
struct Vector<I, E> {
    id: String,
    input: I,
    expected: E,
    note: String,
}

/// Where the vectors are, and whether they are the repository's own.
fn directory() -> (PathBuf, bool) {
    match std::env::var_os("HOLDFAST_VECTORS") {
        Some(directory) => (directory.into(), false),
        None => (PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/vectors/acceptance"), true),
    }
}

fn vectors<I: DeserializeOwned, E: DeserializeOwned>(file: &str) -> Vec<Vector<I, E>> {
    let (directory, ours) = directory();
    let path = directory.join(file);
    if !ours && !path.exists() {
        return Vec::new();
    }
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let vectors: Vec<_> = text
        .lines()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{file}: {e}: {line}")))
        .collect();
    assert!(!vectors.is_empty(), "{file} is empty");
    vectors
}

/// Compares every vector's answer and names all that differ.
fn assert_answers<I, E>(file: &str, answer: impl Fn(&I) -> E)
where
    I: DeserializeOwned,
    E: DeserializeOwned + PartialEq + std::fmt::Debug,
{
    let wrong: Vec<String> = vectors::<I, E>(file)
        .into_iter()
        .filter_map(|v| {
            let answer = answer(&v.input);
            (answer != v.expected)
                .then(|| format!("{} ({}): {answer:?}, not {:?}", v.id, v.note, v.expected))
        })
        .collect();
    assert!(wrong.is_empty(), "{file}:\n{}", wrong.join("\n"));
}

#[test]
fn acceptance_vectors_are_there() {
    let (directory, ours) = directory();
    let there = FILES.iter().filter(|file| directory.join(file).exists()).count();

    assert!(there > 0 && (!ours || there == FILES.len()), "{there} in {}", directory.display());
}

#[test]
fn acceptance_vectors_normalize() {
    assert_answers("normalize.jsonl", |list: &Value| {
        normalize_json(&list.to_string()).unwrap_or_default()
    });
}

#[test]
fn acceptance_vectors_neutralize() {
    assert_answers("neutralize.jsonl", |text: &String| neutralize(text).into_owned());
}

#[test]
fn acceptance_vectors_parse_file() {
    assert_answers("parse_file.jsonl", |text: &String| {
        parse_file(text).map_or(
            Value::Null,
            |file| json!({ "family": file.family.as_str(), "path": file.path }),
        )
    });
}

#[derive(Deserialize)]
struct TestsPassed {
    criterion: String,
    executions: Vec<Evidence>,
    roots: Option<RootPaths>,
}

#[derive(Deserialize)]
struct RootPaths {
    #[serde(rename = "workspace_path")]
    workspace: String,
    #[serde(rename = "outputs_path")]
    outputs: String,
    #[serde(rename = "uploads_path")]
    uploads: String,
}

#[test]
fn acceptance_vectors_tests_passed() {
    assert_answers("tests_passed.jsonl", |input: &TestsPassed| {
        let directories = input.roots.as_ref().map(|roots| Directories {
            workspace: roots.workspace.clone(),
            outputs: roots.outputs.clone(),
            uploads: roots.uploads.clone(),
        });
        let leaves = judge(&CheckInput {
            criteria: std::slice::from_ref(&input.criterion),
            evidence: &input.executions,
            workspace: Workspace::Unknown,
            directories: directories.as_ref(),
            virtual_prefix: DEFAULT_VIRTUAL_PREFIX,
        });
        let [(leaf, reason)] = leaves.as_slice() else { panic!("{} leaves", leaves.len()) };
        json!({
            "family": leaf.family().as_str(),
            "checked": leaf.finding().checked(),
            "holds": leaf.finding().holds(),
            "reason": reason.as_str(),
        })
    });
}

#[derive(Deserialize)]
struct Files {
    tree: Vec<Entry>,
    criteria: Vec<String>,
}

#[test]
fn acceptance_vectors_files() {
    assert_answers("files.jsonl", |input: &Files| {
        let tree = Tree::new(&input.tree);
        let criteria: Vec<String> = input.criteria.iter().map(|text| tree.fill_in(text)).collect();
        let roots = tree.roots();
        let check = CheckInput { criteria: &criteria, ..tree.check(&roots) };
        let verdict = run(&check).expect("usable criteria").to_json();
        let leaves: Vec<Value> = judge(&check)
            .iter()
            .map(|(leaf, reason)| {
                json!({
                    "criterion": tree.take_out(leaf.criterion()),
                    "family": leaf.family().as_str(),
                    "checked": leaf.finding().checked(),
                    "holds": leaf.finding().holds(),
                    "reason": reason.as_str(),
                })
            })
            .collect();
        let unchecked: Vec<String> = verdict["unchecked"]
            .as_array()
            .expect("a list")
            .iter()
            .map(|text| tree.take_out(text.as_str().expect("a text")))
            .collect();
        json!({ "leaves": leaves, "all_hold": verdict["all_hold"], "unchecked": unchecked })
    });
}

#[test]
fn acceptance_vectors_verdict_validate() {
    assert_answers("verdict_validate.jsonl", |stored: &Value| {
        Verdict::from_json(stored).map_or(Value::Null, |verdict| verdict.to_json())
    });
}
