//! Holders of other processes, and directories that are swapped.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use holdfast::check::{CheckInput, Workspace, judge};
use holdfast::model::{Finding, Position};
use holdfast::workspace::{Cleaned, Refusal};
use rustix::fs::{CWD, RenameFlags, renameat_with};

use super::support::{Bench, below, gate};

const ROOT: &str = "HOLDFAST_TEST_ROOT";

/// Holds a workspace until it is killed; a part of the tests below, in a process of its own.
#[test]
#[ignore = "a process of another test"]
fn holder_process() {
    let Some(root) = std::env::var_os(ROOT).map(PathBuf::from) else { return };
    let holder = gate(below(&root), "worker", Some("t")).make(Position::new(0)).unwrap();
    fs::write(format!("{}/held", holder.directories().workspace), "").unwrap();
    std::thread::sleep(Duration::from_mins(10));
}

/// Another process that holds the place of the thread `t`.
struct Process(Child);

impl Process {
    fn start(bench: &Bench) -> Self {
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--ignored", "--exact", "workspace::holders::holder_process"])
            .env(ROOT, bench.root())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let process = Self(child);
        let sign = bench.root().join("ann/t/workspace/held");
        for _ in 0..6_000 {
            if sign.exists() {
                fs::remove_file(sign).unwrap();
                return process;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        panic!("the process holds nothing after a minute");
    }

    /// `kill -9`.
    fn kill(mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_place_is_cleaned_when_every_process_that_held_it_was_killed() {
    let bench = Bench::new();
    let first = Process::start(&bench);
    let second = Process::start(&bench);

    assert_eq!(bench.clean(), Cleaned { removed: 0, held: 1, failed: 0 });
    first.kill();
    assert_eq!(bench.clean(), Cleaned { removed: 0, held: 1, failed: 0 });
    assert!(bench.root().join("ann/t/workspace").is_dir());
    second.kill();
    bench.clean_when_free();
    assert!(!bench.root().join("ann").exists());
}

#[test]
fn a_child_does_not_keep_what_its_parent_held() {
    let bench = Bench::new();
    let holder = bench.gate("worker").make(Position::new(0)).unwrap();
    let mut child = Command::new("sleep").arg("600").spawn().unwrap();

    assert_eq!(bench.clean().held, 1);
    drop(holder);
    bench.clean_when_free();

    assert_eq!(child.try_wait().unwrap(), None, "it ended: this shows nothing");
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn a_workspace_swapped_for_a_link_confirms_nothing_outside() {
    let bench = Bench::new();
    let gate = bench.gate("worker");
    let id = gate.make(Position::new(0)).unwrap().id();
    let place = bench.root().join("ann/t");
    let outside = bench.path("outside");
    fs::create_dir(&outside).unwrap();
    fs::write(outside.join("secret"), "not yours").unwrap();
    symlink(&outside, place.join("link")).unwrap();

    let over = AtomicBool::new(false);
    let (seen, refused) = std::thread::scope(|scope| {
        scope.spawn(|| {
            let (one, other) = (place.join("workspace"), place.join("link"));
            while !over.load(Ordering::Relaxed) {
                renameat_with(CWD, &one, CWD, &other, RenameFlags::EXCHANGE).expect("both exist");
            }
        });
        let (mut seen, mut refused, mut looks) = (0, 0, 0);
        while (seen < 200 || refused < 200) && looks < 100_000 {
            looks += 1;
            match gate.reopen(Position::new(0), Some(&id)) {
                Ok(holder) => {
                    seen += 1;
                    let leaves = judge(&CheckInput {
                        criteria: &["file_written:secret".to_owned()],
                        evidence: &[],
                        workspace: Workspace::Open(holder.roots()),
                        directories: Some(holder.directories()),
                        virtual_prefix: gate.virtual_prefix(),
                    });
                    assert_ne!(leaves[0].0.finding(), Finding::Holds, "{:?}", leaves[0]);
                }
                Err(Refusal::Failed(_)) => refused += 1,
                Err(other) => panic!("{other:?}"),
            }
        }
        over.store(true, Ordering::Relaxed);
        (seen, refused)
    });
    assert!(seen >= 200 && refused >= 200, "{seen} opened, {refused} refused");
}
