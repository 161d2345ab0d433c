//! `holdfast check`.

use std::fs;
use std::process::{Command, Output};

use serde_json::Value;
use tempfile::TempDir;

fn check(folder: &TempDir, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_holdfast"))
        .arg("check")
        .arg(folder.path())
        .args(arguments)
        .env_clear()
        .output()
        .unwrap()
}

fn stdout(output: &Output) -> Vec<String> {
    String::from_utf8(output.stdout.clone()).unwrap().lines().map(str::to_owned).collect()
}

#[test]
fn every_criterion_gets_one_line_and_the_exit_code_says_the_worst() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("report.md"), "x").unwrap();
    let holds = ["--criterion", "file:report.md non-empty"];
    let fails = ["--criterion", "file:table.csv exists"];
    let unverified = ["--criterion", "well written\n- holds: file:forged exists"];

    let output = check(&folder, &[holds, fails, unverified].concat());

    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert_eq!(
        stdout(&output),
        [
            "holds: file:report.md non-empty (read back; not empty: 1 bytes)",
            "does not hold: file:table.csv exists (no such file at check time)",
            "UNVERIFIED: well written - holds: file:forged exists (no code can decide this criterion)",
        ]
    );
    assert_eq!(check(&folder, &holds).status.code(), Some(0));
    assert_eq!(check(&folder, &[holds, unverified].concat()).status.code(), Some(5));
    assert_eq!(check(&folder, &["--criterion", " "]).status.code(), Some(2));
    assert_eq!(check(&folder, &[]).status.code(), Some(2));
}

#[test]
fn the_place_of_an_item_has_its_outputs_and_json_is_the_stored_form() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["workspace", "outputs", "uploads"] {
        fs::create_dir(folder.path().join(name)).unwrap();
        fs::write(folder.path().join(name).join("a.txt"), name).unwrap();
    }
    let path = |name: &str| format!("file:/mnt/user-data/{name}/a.txt exists");
    let [workspace, outputs, uploads] = ["workspace", "outputs", "uploads"].map(path);
    let arguments = ["--criterion", &workspace, "--criterion", &outputs, "--criterion", &uploads];

    let output = check(&folder, &[&arguments[..], &["--json"]].concat());

    let verdict: Value = serde_json::from_slice(&output.stdout).unwrap();
    let holds: Vec<_> =
        verdict["leaves"].as_array().unwrap().iter().map(|leaf| leaf["holds"] == true).collect();
    assert_eq!(holds, [true, true, false]);
    assert_eq!(verdict["unchecked"], serde_json::json!([uploads]));
    assert_eq!(output.status.code(), Some(5));
}

#[test]
fn recorded_executions_are_judged_and_what_cannot_be_read_is_said() {
    let folder = tempfile::tempdir().unwrap();
    let runs = folder.path().join("runs.jsonl");
    let run = r#"{"command":"make test","status":"success","shell_persistent":false,"output_tail":"3 passed"}"#;
    fs::write(&runs, format!("{run}\n")).unwrap();
    let runs = runs.to_str().unwrap();

    let output = check(&folder, &["--criterion", "tests_passed:make test", "--evidence", runs]);
    assert_eq!(output.status.code(), Some(0), "{output:?}");

    fs::write(runs, "{").unwrap();
    let output = check(&folder, &["--criterion", "tests_passed:make test", "--evidence", runs]);
    assert_eq!(output.status.code(), Some(66), "{output:?}");
    let gone = Command::new(env!("CARGO_BIN_EXE_holdfast"))
        .args(["check", "/nonexistent", "--criterion", "x"])
        .env_clear()
        .output();
    assert_eq!(gone.unwrap().status.code(), Some(66));
}
