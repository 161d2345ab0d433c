//! What must agree in `deploy/`, without a server.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use super::runbook::pages;
use crate::support::prometheus::program;

const SECTIONS: [&str; 6] = ["Meaning", "Impact", "Diagnose", "Act", "Verify", "Prevent"];

fn root(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

fn read(path: &str) -> String {
    fs::read_to_string(root(path)).unwrap()
}

/// Every alert, with the page it names.
fn alerts() -> BTreeMap<String, String> {
    let rules = read("deploy/prometheus/rules.yaml");
    let parts = rules.split("- alert: ").skip(1);
    parts
        .map(|part| {
            let name = part.lines().next().unwrap();
            let runbook = part.lines().find_map(|line| line.trim().strip_prefix("runbook: "));
            (name.to_owned(), runbook.unwrap_or_else(|| panic!("{name} names no page")).to_owned())
        })
        .collect()
}

/// The panels of every dashboard.
pub(super) fn panels() -> Vec<(String, Value)> {
    let files = fs::read_dir(root("deploy/grafana")).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<_> = files.collect();
    files.sort();
    let mut panels = Vec::new();
    for file in files {
        let dashboard: Value = serde_json::from_str(&fs::read_to_string(&file).unwrap()).unwrap();
        let name = file.file_stem().unwrap().to_str().unwrap();
        for panel in dashboard["panels"].as_array().unwrap() {
            panels.push((name.to_owned(), panel.clone()));
        }
    }
    panels
}

/// The metrics that a text names, without what histograms add.
pub(super) fn metrics_in(text: &str) -> BTreeSet<String> {
    let words = text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_' || c == ':'));
    let metrics = words.filter(|word| word.starts_with("holdfast_"));
    metrics
        .map(|word| {
            let of = ["_bucket", "_count", "_sum"].iter().find_map(|end| word.strip_suffix(end));
            of.unwrap_or(word).to_owned()
        })
        .collect()
}

fn exported() -> BTreeSet<String> {
    let files = fs::read_dir(root("tests/golden")).unwrap().map(|entry| entry.unwrap().path());
    let text: String = files.map(|file| fs::read_to_string(file).unwrap()).collect();
    let names = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next());
    names.filter(|name| name.starts_with("holdfast_")).map(str::to_owned).collect()
}

#[test]
fn every_alert_has_a_page_and_every_page_an_alert() {
    let (alerts, pages) = (alerts(), pages());
    let list = fs::read_to_string(super::runbook::folder().join("README.md")).unwrap();
    for (alert, runbook) in &alerts {
        let page = pages.iter().find(|page| page.slug == *runbook);
        let page = page.unwrap_or_else(|| panic!("{alert}: there is no page {runbook}"));
        let titled = page.text.lines().nth(2).unwrap();
        assert!(titled.contains(&format!("`{alert}`")), "{runbook}.md does not name {alert}");
        let row = list.lines().find(|line| line.contains(&format!("`{alert}`")));
        assert!(row.unwrap().ends_with(&format!("[{runbook}]({runbook}.md) |")), "{alert}");
    }
    for page in &pages {
        let named = page.text.lines().nth(2).unwrap().split('`').skip(1).step_by(2);
        let named: Vec<&str> = named.collect();
        assert!(!named.is_empty(), "{}: no alert", page.slug);
        for alert in named {
            assert_eq!(alerts.get(alert), Some(&page.slug), "{}: {alert}", page.slug);
        }
    }
}

#[test]
fn every_page_says_all_there_is_to_say() {
    for page in pages() {
        let titles = page.text.lines().filter_map(|line| line.strip_prefix("## "));
        assert_eq!(titles.collect::<Vec<_>>(), SECTIONS, "{}", page.slug);
        for section in ["Diagnose", "Act", "Verify"] {
            let has = page.blocks.iter().any(|block| block.section == section);
            assert!(has, "{}: nothing to do under {section}", page.slug);
        }
        for link in page.text.split("](").skip(1) {
            let file = link.split(')').next().unwrap();
            assert!(super::runbook::folder().join(file).exists(), "{}: {file}", page.slug);
        }
    }
}

#[test]
fn every_panel_says_what_it_shows_and_names_a_page() {
    let pages: Vec<String> = pages().into_iter().map(|page| page.slug).collect();
    let panels = panels();
    assert!(panels.len() > 50, "{}", panels.len());
    for (dashboard, panel) in panels {
        let (title, about) = (&panel["title"], panel["description"].as_str().unwrap());
        let (text, runbook) = about.rsplit_once(" Runbook: ").unwrap();
        assert!(text.ends_with('.'), "{dashboard}: {title}: {text}");
        assert!(pages.iter().any(|page| page == runbook), "{dashboard}: {title}: {runbook}");
    }
}

#[test]
fn every_metric_is_used_and_every_used_one_is_there() {
    let mut used = metrics_in(&read("deploy/prometheus/rules.yaml"));
    for (_, panel) in panels() {
        for target in panel["targets"].as_array().unwrap() {
            used.extend(metrics_in(target["expr"].as_str().unwrap()));
        }
    }
    for page in pages() {
        for block in page.blocks {
            used.extend(metrics_in(&block.text));
        }
    }

    let exported = exported();
    let unknown: Vec<_> = used.difference(&exported).collect();
    let unused: Vec<_> = exported.difference(&used).collect();
    assert_eq!(unknown, Vec::<&String>::new(), "used, but exported by nobody");
    assert_eq!(unused, Vec::<&String>::new(), "exported, but no alert, panel or page uses it");
}

#[test]
fn promtool_finds_no_fault_in_rules_and_examples() {
    let Some(promtool) = program("promtool") else { return };
    for arguments in [
        ["check", "rules", "--lint=all", "--lint-fatal", "rules.yaml"],
        ["check", "config", "--lint=all", "--lint-fatal", "prometheus.yml"],
    ] {
        let mut command = Command::new(&promtool);
        let ran = command.args(arguments).current_dir(root("deploy/prometheus")).output().unwrap();
        let said = String::from_utf8_lossy(&ran.stderr);
        assert!(ran.status.success(), "{arguments:?}: {said}");
    }
}

#[test]
fn every_alert_is_tested_and_does_as_its_test_says() {
    let Some(promtool) = program("promtool") else { return };
    let files = fs::read_dir(root("deploy/prometheus/tests")).unwrap();
    let files: Vec<PathBuf> = files.map(|entry| entry.unwrap().path()).collect();
    let tests: String = files.iter().map(|file| fs::read_to_string(file).unwrap()).collect();
    for alert in alerts().keys() {
        let fires = format!("- alertname: {alert}\n");
        assert!(tests.contains(&fires), "no test lets {alert} fire");
        let quiet = format!("alertname: {alert}, eval_time: ");
        assert!(tests.contains(&quiet), "no test of {alert} where it does not fire");
    }

    let ran = Command::new(promtool).args(["test", "rules"]).args(files).output().unwrap();
    let said = [ran.stdout, ran.stderr].concat();
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&said));
}
