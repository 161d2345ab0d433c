//! A root, batches with principals, a provider that counts, and a command executor on them.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use holdfast::clock::SystemClock;
use holdfast::config::{Access, Permission};
use holdfast::execute::command::{CommandExecutor, CommandSpec, Otherwise};
use holdfast::execute::spawn::LocalSpawner;
use holdfast::execute::{Execution, Executor, Job};
use holdfast::model::{
    Attempt, BatchId, FencingToken, ItemRef, LeaseId, Position, Principal, Reporter,
};
use holdfast::workspace::{
    BatchIdentity, Cleaned, Gate, Holder, LocalWorkspaces, Opening, Permit, Refusal, Used,
    Workspaces,
};
use tempfile::TempDir;
use time::OffsetDateTime;
use time::macros::datetime;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

pub(super) const EVER: OffsetDateTime = datetime!(9999-01-01 0:00 UTC);

/// The real workspaces, and how often somebody asked for one.
pub(super) struct Counting {
    real: LocalWorkspaces,
    opens: AtomicUsize,
}

impl Workspaces for Counting {
    fn acquire(
        &self,
        permit: Permit<'_>,
        position: Position,
        opening: Opening<'_>,
    ) -> Result<Holder, Refusal> {
        self.opens.fetch_add(1, Ordering::Relaxed);
        self.real.acquire(permit, position, opening)
    }

    fn volume(&self) -> io::Result<Option<Uuid>> {
        self.real.volume()
    }

    fn untouched(&self, before: OffsetDateTime) -> io::Result<Vec<Used>> {
        self.real.untouched(before)
    }

    fn clean(
        &self,
        unused: &[Used],
        before: OffsetDateTime,
        stop: &CancellationToken,
    ) -> io::Result<Cleaned> {
        self.real.clean(unused, before, stop)
    }

    fn virtual_prefix(&self) -> &str {
        self.real.virtual_prefix()
    }
}

/// A root of one test's own.
pub(super) struct Bench {
    folder: TempDir,
    pub(super) workspaces: Arc<Counting>,
}

impl Bench {
    pub(super) fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let real = LocalWorkspaces::new(folder.path().join("root"), "/mnt/user-data".to_owned());
        Self { folder, workspaces: Arc::new(Counting { real, opens: AtomicUsize::new(0) }) }
    }

    pub(super) fn root(&self) -> PathBuf {
        self.folder.path().join("root")
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// How often a workspace was opened.
    pub(super) fn opens(&self) -> usize {
        self.workspaces.opens.load(Ordering::Relaxed)
    }

    /// Removes everything that nobody holds, at any age.
    pub(super) fn clean(&self) -> Cleaned {
        let unused = self.workspaces.untouched(EVER).unwrap();
        self.workspaces.clean(&unused, EVER, &CancellationToken::new()).unwrap()
    }

    /// Removes the one place that there is, when nobody holds it any more. A process that another
    /// test is just starting has a copy of every descriptor, for an instant.
    pub(super) fn clean_when_free(&self) {
        for _ in 0..6_000 {
            match self.clean() {
                Cleaned { removed: 1, held: 0, failed: 0 } => return,
                Cleaned { removed: 0, held: 1, failed: 0 } => {
                    std::thread::sleep(Duration::from_millis(10));
                }
                other => panic!("{other:?}"),
            }
        }
        panic!("the place is held after a minute");
    }

    /// The door of a batch under a role: `worker` may use workspaces, `reader` may not.
    pub(super) fn gate(&self, role: &str) -> Arc<Gate> {
        gate(Arc::<Counting>::clone(&self.workspaces), role, Some("t"))
    }

    /// Runs a command as an item with these criteria.
    pub(super) async fn run(&self, spec: CommandSpec, role: &str, criteria: &[&str]) -> Execution {
        let executor = CommandExecutor::new(
            spec,
            Some(self.gate(role)),
            [],
            self.folder.path().join("scratch"),
            Arc::new(LocalSpawner::new().unwrap()),
            Arc::new(SystemClock),
        );
        executor.unwrap().execute(&job(criteria), &CancellationToken::new()).await
    }
}

pub(super) fn gate(workspaces: Arc<dyn Workspaces>, role: &str, thread: Option<&str>) -> Arc<Gate> {
    let roles = [("worker", vec![Permission::Workspace]), ("reader", Vec::new())];
    let roles = roles.into_iter().map(|(name, list)| (name.to_owned(), list)).collect();
    let access = Access { role: "worker".to_owned(), roles };
    let identity = BatchIdentity {
        batch: BatchId::generate(),
        owner: "ann".to_owned(),
        thread: thread.map(str::to_owned),
        principal: Some(Principal { owner: "ann".to_owned(), role: role.to_owned() }),
    };
    Arc::new(Gate::new(workspaces, Arc::new(access), identity))
}

/// The workspaces of another process's test, below its root.
pub(super) fn below(root: &Path) -> Arc<dyn Workspaces> {
    Arc::new(LocalWorkspaces::new(root.to_owned(), "/mnt/user-data".to_owned()))
}

pub(super) fn sh(script: &str) -> CommandSpec {
    CommandSpec {
        argv: ["sh", "-c", script, "sh", "{input}"].map(str::to_owned).to_vec(),
        timeout: Duration::from_mins(1),
        env: BTreeMap::new(),
        env_pass: Vec::new(),
        cwd: None,
        workspace: false,
        success: vec![0],
        retry: vec![75],
        permanent: vec![],
        otherwise: Otherwise::Retry,
        result_bytes: 1024 * 1024,
        log_bytes: 4096,
        error_chars: 4000,
        kill_grace: Duration::from_secs(1),
    }
}

fn job(criteria: &[&str]) -> Job {
    Job {
        item: ItemRef::new(BatchId::generate(), Position::new(0)),
        key: "the key".to_owned(),
        queue: "queue".parse().unwrap(),
        attempt: Attempt::new(1),
        retries: 0,
        lease: LeaseId::generate(),
        token: FencingToken::new(12),
        input_json: r#""the input""#.to_owned(),
        criteria: criteria.iter().map(|&text| text.to_owned()).collect(),
        deadline: OffsetDateTime::UNIX_EPOCH,
        traceparent: None,
        reporter: Reporter::default(),
    }
}
