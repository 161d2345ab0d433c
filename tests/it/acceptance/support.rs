//! An item's directories built from a description.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use holdfast::check::{CheckInput, DEFAULT_VIRTUAL_PREFIX, Directories, Roots, Workspace};
use proptest::prelude::ProptestConfig;
use rustix::fs::{CWD, FileType, Mode, mknodat};
use serde::Deserialize;
use tempfile::TempDir;

/// Runs a property this many times, or as often as `PROPTEST_CASES` says.
pub(crate) fn usually(cases: u32) -> ProptestConfig {
    let config = ProptestConfig::default();
    if std::env::var_os("PROPTEST_CASES").is_some() {
        config
    } else {
        ProptestConfig { cases, ..config }
    }
}

/// Stands for the directory of the test in vectors.
const ROOT: &str = "{ROOT}";

/// One thing in a tree.
#[derive(Deserialize)]
pub(crate) struct Entry {
    path: String,
    #[serde(rename = "type")]
    kind: Kind,
    text: Option<String>,
    hex: Option<String>,
    size: Option<usize>,
    fill: Option<String>,
    target: Option<String>,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Kind {
    File,
    Dir,
    Fifo,
    Symlink,
}

/// `workspace`, `outputs` and `uploads` below a directory of its own.
pub(crate) struct Tree {
    _directory: TempDir,
    root: PathBuf,
    directories: Directories,
}

impl Tree {
    /// The three directories and what is described.
    pub(crate) fn new(entries: &[Entry]) -> Self {
        let directory = TempDir::new().expect("a temporary directory");
        let root = directory.path().canonicalize().expect("it exists");
        let named = |name: &str| {
            let path = root.join(name);
            fs::create_dir(&path).expect("a new directory");
            path.to_str().expect("UTF-8").to_owned()
        };
        let directories = Directories {
            workspace: named("workspace"),
            outputs: named("outputs"),
            uploads: named("uploads"),
        };
        let tree = Self { _directory: directory, root, directories };
        for entry in entries {
            tree.add(entry);
        }
        tree
    }

    fn add(&self, entry: &Entry) {
        let path = self.root.join(&entry.path);
        let parent = path.parent().expect("below the root");
        fs::create_dir_all(parent).expect("parents");
        match entry.kind {
            Kind::File => fs::write(&path, entry.content()).expect("a file"),
            Kind::Dir => fs::create_dir_all(&path).expect("a directory"),
            Kind::Fifo => fifo(&path),
            Kind::Symlink => {
                let target = self.fill_in(entry.target.as_deref().expect("a link's target"));
                symlink(target, &path).expect("a link");
            }
        }
    }

    /// Opens the roots.
    pub(crate) fn roots(&self) -> Roots {
        Roots::open(&self.directories).expect("the directories exist")
    }

    /// A check of nothing yet, in these directories.
    pub(crate) fn check<'a>(&'a self, roots: &'a Roots) -> CheckInput<'a> {
        CheckInput {
            criteria: &[],
            evidence: &[],
            workspace: Workspace::Open(roots),
            directories: Some(&self.directories),
            virtual_prefix: DEFAULT_VIRTUAL_PREFIX,
        }
    }

    /// A path in the tree.
    pub(crate) fn path(&self, path: &str) -> PathBuf {
        self.root.join(path)
    }

    /// The text with the directory's name for `{ROOT}`.
    pub(crate) fn fill_in(&self, text: &str) -> String {
        text.replace(ROOT, self.root.to_str().expect("UTF-8"))
    }

    /// The text with `{ROOT}` for the directory's name.
    pub(crate) fn take_out(&self, text: &str) -> String {
        text.replace(self.root.to_str().expect("UTF-8"), ROOT)
    }
}

impl Entry {
    fn content(&self) -> Vec<u8> {
        if let Some(text) = &self.text {
            return text.clone().into_bytes();
        }
        if let Some(hex) = &self.hex {
            let byte = |at| u8::from_str_radix(&hex[at..at + 2], 16).expect("hexadecimal");
            return (0..hex.len()).step_by(2).map(byte).collect();
        }
        let fill = self.fill.as_deref().expect("text, hex or fill");
        fill.bytes().cycle().take(self.size.expect("a size")).collect()
    }
}

/// Makes a FIFO.
pub(crate) fn fifo(path: &Path) {
    mknodat(CWD, path, FileType::Fifo, Mode::from_raw_mode(0o600), 0).expect("a fifo");
}
