//! Tests of size, which take minutes: `make long`. `HOLDFAST_LONG_ITEMS` sets another size.

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use tempfile::TempDir;

use crate::support::TestDb;

mod recovery;
mod scrape;

const CONFIG: &str = "
[queues.true]
executor = 'command'
argv = ['true']
";

fn items() -> u64 {
    std::env::var("HOLDFAST_LONG_ITEMS").map_or(1_000_000, |text| text.parse().unwrap())
}

/// A folder with a configuration and that many items of 300-byte inputs.
fn prepare(items: u64) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("holdfast.toml"), CONFIG).unwrap();
    let mut file = BufWriter::new(File::create(folder.path().join("items.jsonl")).unwrap());
    let text = "x".repeat(290);
    for n in 0..items {
        writeln!(file, r#"{{"key":"item-{n}","input":"{n:08}{text}"}}"#).unwrap();
    }
    file.flush().unwrap();
    folder
}

fn holdfast(db: &TestDb, folder: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_holdfast"));
    command
        .args(arguments)
        .env("HOLDFAST_DATABASE_URL", db.url())
        .env("HOLDFAST_CONFIG", folder.join("holdfast.toml"))
        .stdin(Stdio::null());
    command
}

/// A number of the process's status, in KiB.
fn memory(pid: u32, field: &str) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find(|line| line.starts_with(field))?;
    line.split_whitespace().nth(1)?.parse().ok()
}

/// The worker that this guard guards.
fn worker_of(guard: u32) -> Option<u32> {
    let children = fs::read_to_string(format!("/proc/{guard}/task/{guard}/children")).ok()?;
    let pids = children.split_whitespace().filter_map(|pid| pid.parse().ok());
    let name = |pid: &u32| fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    pids.into_iter().find(|pid| name(pid).trim() == "holdfast-worker")
}

/// Waits for a process's end, and answers the most memory it was seen to use, in KiB.
fn peak_of(mut child: Child) -> u64 {
    let mut peak = 0;
    loop {
        peak = peak.max(memory(child.id(), "VmHWM").unwrap_or(0));
        if let Some(status) = child.try_wait().unwrap() {
            assert!(status.success(), "{status}");
            return peak;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[tokio::test]
#[ignore = "takes minutes: make long"]
async fn long_a_million_items_are_submitted_in_100_mib() {
    let db = TestDb::fresh().await;
    let folder = prepare(items());
    let file = folder.path().join("items.jsonl");
    let arguments = ["submit", file.to_str().unwrap(), "--queue", "true", "--json"];

    let child = holdfast(&db, folder.path(), &arguments).stdout(Stdio::null()).spawn().unwrap();
    let peak = peak_of(child);

    eprintln!("submit of {} items: peak {} MiB", items(), peak / 1024);
    assert!(peak < 100 * 1024, "{peak} KiB");
    let client = db.client().await;
    let stored = client.query_one("SELECT count(*) FROM holdfast.items", &[]).await.unwrap();
    assert_eq!(u64::try_from(stored.get::<_, i64>(0)).unwrap(), items());
}

#[tokio::test]
#[ignore = "takes minutes: make long"]
async fn long_a_workers_memory_stays_flat_over_a_million_items() {
    let db = TestDb::fresh().await;
    let folder = prepare(items());
    let file = folder.path().join("items.jsonl");
    let arguments = ["submit", file.to_str().unwrap(), "--queue", "true", "--json"];
    let submitted = holdfast(&db, folder.path(), &arguments).stdout(Stdio::null()).status();
    assert!(submitted.unwrap().success());
    let arguments = ["worker", "--slots", "64", "--health", ""];
    let mut worker =
        holdfast(&db, folder.path(), &arguments).stderr(Stdio::null()).spawn().unwrap();

    let client = db.client().await;
    let mut seen = Vec::new();
    loop {
        let row = client
            .query_one("SELECT succeeded, failed, item_count FROM holdfast.batch_status", &[])
            .await
            .unwrap();
        let (succeeded, failed, all): (i32, i32, i32) = (row.get(0), row.get(1), row.get(2));
        assert_eq!(failed, 0);
        let tenth = usize::try_from(i64::from(succeeded) * 10 / i64::from(all)).unwrap();
        if tenth > seen.len() {
            seen.push(worker_of(worker.id()).and_then(|pid| memory(pid, "VmRSS")).unwrap());
        }
        if succeeded == all {
            break;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    worker.kill().unwrap();
    worker.wait().unwrap();

    eprintln!("worker of 64 slots over {} items, MiB at each tenth: {:?}", items(), {
        seen.iter().map(|kib| kib / 1024).collect::<Vec<_>>()
    });
    let (first, last) = (seen[0], seen[seen.len() - 1]);
    assert!(last < 150 * 1024, "{last} KiB");
    assert!(last <= first + first / 4, "from {first} to {last} KiB");
}
