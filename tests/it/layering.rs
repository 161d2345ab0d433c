//! Imports point one way: from the commands down to the model.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Which modules of the crate each module may name, besides itself. What every layer may use is not
/// repeated: the model, the clock, telemetry and the settings' types.
const ALLOWED: &[(&str, &[&str])] = &[
    ("main", &["cli"]),
    ("lib", &[]),
    ("model", &[]),
    ("clock", &[]),
    ("telemetry", &[]),
    ("config", &[]),
    ("embedded", &["execute"]),
    ("store", &[]),
    ("capacity", &[]),
    ("fault", &[]),
    ("leases", &["store"]),
    ("health", &[]),
    ("execute", &["check", "workspace"]),
    ("workspace", &["check"]),
    ("check", &[]),
    ("submit", &["store"]),
    ("claim", &["store", "capacity", "leases"]),
    ("heartbeat", &["store", "leases", "health"]),
    ("finish", &["store", "capacity", "fault", "leases"]),
    ("attempt", &["store", "capacity", "leases", "execute", "check", "finish", "heartbeat"]),
    ("reap", &["store"]),
    ("recheck", &["store", "capacity", "leases", "workspace"]),
    ("guard", &["store", "execute", "supervise"]),
    ("export", &["store"]),
    ("exporter", &["store", "health"]),
    (
        "supervise",
        &[
            "store",
            "capacity",
            "fault",
            "leases",
            "health",
            "execute",
            "claim",
            "heartbeat",
            "finish",
            "attempt",
            "reap",
            "recheck",
            "check",
            "workspace",
        ],
    ),
    (
        "cli",
        &[
            "store",
            "submit",
            "export",
            "exporter",
            "supervise",
            "health",
            "embedded",
            "execute",
            "attempt",
            "guard",
            "leases",
            "check",
            "workspace",
        ],
    ),
];

const EVERYWHERE: &[&str] = &["model", "clock", "telemetry", "config"];

/// The model knows nothing of the others, and the lowest layers not of each other's settings.
const PURE: &[&str] = &["model", "clock"];

#[test]
fn imports_point_one_way() {
    let allowed: BTreeMap<&str, &[&str]> = ALLOWED.iter().copied().collect();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("daemon/src");
    let mut wrong = Vec::new();
    let mut seen = 0;
    for file in rust_files(&root) {
        let module = top_module(&root, &file);
        let text = fs::read_to_string(&file).unwrap();
        // Tests of a module may reach further.
        let code = text.split("#[cfg(test)]").next().unwrap_or_default();
        for target in named_modules(code) {
            seen += 1;
            let fine = target == module
                || (EVERYWHERE.contains(&target.as_str()) && !PURE.contains(&module.as_str()))
                || allowed
                    .get(module.as_str())
                    .unwrap_or_else(|| panic!("{module} is new: say what it may use"))
                    .contains(&target.as_str());
            if !fine {
                wrong.push(format!("{} names {target}", file.display()));
            }
        }
    }
    assert!(seen > 100, "the imports were not found");
    assert_eq!(wrong, Vec::<String>::new());
}

fn rust_files(folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files.extend(rust_files(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
    files
}

fn top_module(root: &Path, file: &Path) -> String {
    let first = file.strip_prefix(root).unwrap().iter().next().unwrap().to_str().unwrap();
    first.trim_end_matches(".rs").to_owned()
}

/// The top modules that `crate::…` paths name, in `use` lines and elsewhere; comments left out.
fn named_modules(code: &str) -> Vec<String> {
    code.lines()
        .filter(|line| !line.trim_start().starts_with("//"))
        .flat_map(|line| line.split("crate::").skip(1))
        .map(|rest| {
            rest.chars().take_while(|c| c.is_ascii_lowercase() || *c == '_').collect::<String>()
        })
        .filter(|module| !module.is_empty())
        .collect()
}
