//! The server of one run of the tests.

use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};

use holdfast::embedded::{DataDir, EmbeddedOptions, EmbeddedPostgres};
use holdfast::store::migrate;
use tokio::runtime::{Builder, Runtime};
use tokio_util::task::TaskTracker;

use super::connect;

const TEMPLATE: &str = "template_migrated";

/// A private server with a migrated template, shared by every test of this process. It lives in a
/// static, so it is never dropped: the server ends with the process, its folder by `cleaner`.
pub(super) struct Cluster {
    server: EmbeddedPostgres,
    copies: AtomicU32,
    discarded: Sender<String>,
    _cleaner: Child,
}

impl Cluster {
    pub(super) async fn shared() -> &'static Self {
        static CLUSTER: OnceLock<Cluster> = OnceLock::new();
        tokio::task::spawn_blocking(|| CLUSTER.get_or_init(Self::start)).await.unwrap()
    }

    fn start() -> Self {
        let options = EmbeddedOptions {
            fsync: false,
            extra_settings: vec![("max_connections".into(), "400".into())],
            ..EmbeddedOptions::new(DataDir::Ephemeral)
        };
        let server = EmbeddedPostgres::start(&options).unwrap_or_else(|error| panic!("{error}"));
        let cleaner = clean_up_after_us(&server);
        let admin = server.url("postgres");
        runtime().block_on(async {
            execute(&admin, &format!("CREATE DATABASE {TEMPLATE}")).await;
            migrate::up(&server.url(TEMPLATE), None).await.unwrap();
            // A rule taken out of the protocol, to see which test misses it.
            if let Ok(mutation) = std::env::var("HOLDFAST_TEST_MUTATION") {
                execute(&server.url(TEMPLATE), &mutation).await;
            }
        });
        let (discarded, names) = mpsc::channel();
        std::thread::spawn(move || drop_databases(&admin, &names));
        Self { server, copies: AtomicU32::new(0), discarded, _cleaner: cleaner }
    }

    pub(super) fn url(&self, database: &str) -> String {
        self.server.url(database)
    }

    pub(super) async fn create_database(&self) -> String {
        let name = format!("t_{}", self.copies.fetch_add(1, Ordering::Relaxed));
        // Twice as fast here as the default, which logs every page; 14 knows no other way.
        let strategy = if self.server.version().major() > 14 { "STRATEGY file_copy" } else { "" };
        let create = format!("CREATE DATABASE {name} TEMPLATE {TEMPLATE} {strategy}");
        execute(&self.url("postgres"), &create).await;
        name
    }

    pub(super) fn discard_database(&self, name: String) {
        // Without a receiver its thread failed, and said so; the folder goes with the run anyway.
        let _ = self.discarded.send(name);
    }
}

async fn execute(url: &str, statements: &str) {
    let connections = TaskTracker::new();
    let client = connect(url, &connections).await;
    client.batch_execute(statements).await.unwrap_or_else(|error| panic!("{statements}: {error}"));
    drop(client);
    connections.close();
    connections.wait().await;
}

/// Drops databases that their tests are done with, whoever is still connected to them.
fn drop_databases(admin: &str, names: &Receiver<String>) {
    let runtime = runtime();
    for name in names {
        runtime.block_on(execute(admin, &format!("DROP DATABASE {name} WITH (FORCE)")));
    }
}

/// A shell that waits for the end of this process, however it ends, then for the server's, and
/// removes their folder.
fn clean_up_after_us(server: &EmbeddedPostgres) -> Child {
    let script = r#"
        cat
        for _ in $(seq 200); do [ -e "$1/postmaster.pid" ] || break; sleep 0.05; done
        rm -rf -- "$2""#;
    Command::new("sh")
        .args(["-c", script, "sh"])
        .args([server.data_dir(), server.run_dir()])
        .current_dir("/")
        .process_group(0) // an interrupt typed at the terminal is for the tests alone
        .stdin(Stdio::piped()) // held open by this process until its end
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

fn runtime() -> Runtime {
    Builder::new_current_thread().enable_all().build().unwrap()
}
