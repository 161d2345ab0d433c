//! The database of a run: a primary and its standby, killed, cut off from each other, failed over.

use std::fs::{self, Permissions};
use std::io::Write;
use std::net::{Ipv4Addr, TcpListener};
use std::num::NonZeroU16;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use holdfast::clock::{Clock, SystemClock};
use holdfast::embedded::{DataDir, EmbeddedOptions, EmbeddedPostgres};
use holdfast::store::migrate;
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;
use tokio_postgres::{Client, NoTls};
use tokio_util::task::TaskTracker;

use crate::support::fleet::{LONG, now, until};
use crate::support::proxy::{Proxy, Weather};

/// How a primary keeps its standby.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Replication {
    /// A commit is acknowledged when the standby has it.
    Synchronous,
    /// The standby has it soon.
    Asynchronous,
}

/// How long a server may take from a crash of one of its processes until it takes connections again:
/// it waits for all others to end, synchronizes its data with the disk and replays its log, on a machine
/// that others use.
const RECOVERY: Duration = Duration::from_mins(5);

/// Room for the tables that grow, where a small disk can be made.
const SMALL_DISK: &str = "64m";

/// Servers that look like one: `url` leads to the primary of the moment.
pub(crate) struct Servers {
    // In the order of their ends.
    primary: Server,
    standby: Option<Server>,
    folder: TempDir,
    /// From the standby to the primary.
    link: Option<Proxy>,
    made: usize,
    connections: TaskTracker,
}

/// One server: its data and its place in the network stay when it is stopped.
struct Server {
    state: PathBuf,
    port: NonZeroU16,
    running: Option<EmbeddedPostgres>,
    /// The tablespace of the tables that grow, where there is one.
    tables: Option<PathBuf>,
    /// The small disk that it is on.
    small: Option<SmallDisk>,
}

impl Servers {
    /// One migrated server, durable, and no standby.
    pub(crate) async fn new() -> Self {
        // The account that the servers drop to must be able to pass through.
        let open = Permissions::from_mode(0o755);
        let folder = tempfile::Builder::new().permissions(open).tempdir().unwrap();
        let mut primary = Server::at(folder.path().join("server-0"));
        primary.start().await;
        let connections = TaskTracker::new();
        migrate::up(&primary.url(), None).await.unwrap();
        Self { primary, standby: None, folder, link: None, made: 1, connections }
    }

    /// The address of the primary.
    pub(crate) fn url(&self) -> String {
        self.primary.url()
    }

    /// The address of the standby.
    pub(crate) fn standby_url(&self) -> String {
        self.standby.as_ref().expect("a standby").url()
    }

    /// A connection to the primary, as soon as it takes one.
    pub(crate) async fn client(&self) -> Client {
        self.connected(&self.primary).await
    }

    /// A connection to the standby, as soon as it takes one.
    pub(crate) async fn standby_client(&self) -> Client {
        self.connected(self.standby.as_ref().expect("a standby")).await
    }

    async fn connected(&self, server: &Server) -> Client {
        let url = server.url();
        let began = SystemClock.now();
        loop {
            let refused = match self.try_connect(&url).await {
                Ok(client) => return client,
                Err(refused) => refused,
            };
            let gone = !server.is_alive();
            if gone || SystemClock.now().since(began) >= RECOVERY {
                let why = if gone { "has ended" } else { "takes no connections" };
                panic!(
                    "the server {why}: {refused:?}; the last it logged:\n{}",
                    server.last_logged()
                );
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    /// A connection to the primary, if there is one to be had now.
    pub(crate) async fn try_client(&self) -> Option<Client> {
        self.try_connect(&self.url()).await.ok()
    }

    async fn try_connect(&self, url: &str) -> Result<Client, tokio_postgres::Error> {
        // A server that is busy with its end may accept and say nothing.
        let mut config: tokio_postgres::Config = url.parse()?;
        config.connect_timeout(Duration::from_secs(10));
        let (client, connection) = config.connect(NoTls).await?;
        // Its error is the client's too, and every call reports it there.
        self.connections.spawn(async move { connection.await.ok() });
        Ok(client)
    }

    /// Whether the primary runs.
    pub(crate) const fn is_up(&self) -> bool {
        self.primary.running.is_some()
    }

    /// Ends the primary without a checkpoint, as a crash does, and waits until all of it is gone.
    pub(crate) async fn crash(&mut self, signal: Signal) {
        self.primary.crash(signal).await;
    }

    /// Stops the primary in order.
    pub(crate) async fn stop(&mut self) {
        self.primary.stop().await;
    }

    /// Starts the primary again.
    pub(crate) async fn start(&mut self) {
        self.primary.start().await;
    }

    /// Kills one process of the primary: it drops everybody and recovers.
    pub(crate) async fn crash_backend(&self) {
        let Some(client) = self.try_client().await else { return };
        let select = "SELECT pid FROM pg_stat_activity WHERE application_name = 'holdfast worker'
                       ORDER BY state_change DESC LIMIT 1";
        let Ok(Some(row)) = client.query_opt(select, &[]).await else { return };
        kill_process(Pid::from_raw(row.get(0)).unwrap(), Signal::KILL).ok();
    }

    /// Whether the server comes with what makes a standby; the smallest distributions do not.
    pub(crate) fn can_be_copied(&self) -> bool {
        self.primary.programs().join("pg_basebackup").exists()
    }

    /// Makes a standby of the primary, and waits until it follows.
    pub(crate) async fn attach_standby(&mut self) {
        let link = Proxy::before(&self.url()).await;
        let standby = Server::at(self.folder.path().join(format!("server-{}", self.made)));
        self.made += 1;
        self.standby = Some(self.copy_primary(standby, link.port()).await);
        self.link = Some(link);
        let client = self.client().await;
        until("the standby follows", LONG, async || {
            let select = "SELECT count(*) FROM pg_stat_replication WHERE state = 'streaming'";
            client.query_one(select, &[]).await.unwrap().get::<_, i64>(0) == 1
        })
        .await;
    }

    async fn copy_primary(&self, mut standby: Server, port: u16) -> Server {
        let data = standby.state.join("postgres");
        let owner = fs::metadata(self.primary.state.join("postgres")).unwrap();
        fs::create_dir(&standby.state).unwrap();
        fs::set_permissions(&standby.state, Permissions::from_mode(0o711)).unwrap();
        make_owned(&data, &owner);
        let mut copy = Command::new(self.primary.programs().join("pg_basebackup"));
        copy.arg("-D").arg(&data).args(["-R", "-X", "stream", "-c", "fast", "-d"]);
        copy.arg(format!("host=127.0.0.1 port={port} user=postgres application_name=standby"));
        if let Some(tables) = &self.primary.tables {
            // On a disk of its own, so that a full one stops one of them alone.
            let own = standby.place_for_tables(&owner).expect("what was mounted once can be again");
            copy.arg("-T").arg(format!("{}={}", tables.display(), own.display()));
        }
        copy.current_dir("/").env_clear().env("LC_ALL", "C.UTF-8").stdin(Stdio::null());
        if rustix::process::geteuid().is_root() {
            copy.uid(owner.uid()).gid(owner.gid());
        }
        let made = tokio::task::spawn_blocking(move || copy.output().unwrap()).await.unwrap();
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        standby.start().await;
        standby
    }

    /// Lets the standby tell the primary which rows its readers need; through a slot that is there, if
    /// one is named.
    pub(crate) async fn give_feedback(&self, slot: Option<&str>) {
        let client = self.standby_client().await;
        for (setting, value) in [
            ("hot_standby_feedback", "on"),
            ("wal_receiver_status_interval", "1s"),
            ("primary_slot_name", slot.unwrap_or_default()),
        ] {
            let alter = format!("ALTER SYSTEM SET {setting} = '{value}'");
            client.batch_execute(&alter).await.unwrap();
        }
        client.batch_execute("SELECT pg_reload_conf()").await.unwrap();
    }

    /// Whether there is a standby to fail over to.
    pub(crate) const fn has_standby(&self) -> bool {
        self.standby.is_some()
    }

    /// Whether the primary waits for its standby, from now on.
    pub(crate) async fn replicate(&self, how: Replication) {
        let names = match how {
            Replication::Synchronous => "ALTER SYSTEM SET synchronous_standby_names = '*'",
            Replication::Asynchronous => "ALTER SYSTEM RESET synchronous_standby_names",
        };
        let client = self.client().await;
        client.batch_execute(names).await.unwrap();
        client.batch_execute("SELECT pg_reload_conf()").await.unwrap();
        if how == Replication::Synchronous {
            let select = "SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'sync'";
            until("the standby is waited for", LONG, async || {
                client.query_one(select, &[]).await.unwrap().get::<_, i64>(0) == 1
            })
            .await;
            // Every backend looks at its settings between two statements.
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
        self.caught_up(&client).await;
    }

    /// Waits until the standby has all that is acknowledged now.
    async fn caught_up(&self, client: &Client) {
        if self.standby.is_none() {
            return;
        }
        let written = client.query_one("SELECT pg_current_wal_lsn()::text", &[]).await.unwrap();
        let written: String = written.get(0);
        let select = "SELECT count(*) FROM pg_stat_replication
                       WHERE flush_lsn >= ($1::text)::pg_lsn";
        until("the standby catches up", LONG, async || {
            client.query_one(select, &[&written]).await.unwrap().get::<_, i64>(0) == 1
        })
        .await;
    }

    /// Lets nothing reach the standby any more. What is acknowledged from the answered moment on may
    /// be lost with the primary.
    pub(crate) async fn stall_link(&self) -> Duration {
        let from = now();
        self.caught_up(&self.client().await).await;
        self.link.as_ref().expect("a standby").set(Weather::Stalled);
        from
    }

    /// Kills the primary and makes the standby the primary. What had not reached it is lost.
    pub(crate) async fn fail_over(&mut self) {
        let mut standby = self.standby.take().expect("a standby to fail over to");
        // So that none of its processes acknowledges anything any more.
        self.primary.crash(Signal::QUIT).await;
        // With all that is under way on it.
        self.link = None;
        std::mem::swap(&mut self.primary, &mut standby);
        let client = self.client().await;
        // Nobody is left to wait for; without this no transaction of the new primary ends.
        client
            .batch_execute("ALTER SYSTEM RESET synchronous_standby_names")
            .await
            .expect("a standby takes settings");
        client.batch_execute("SELECT pg_reload_conf()").await.unwrap();
        client.query_one("SELECT pg_promote()", &[]).await.unwrap();
        until("the standby is a primary", LONG, async || {
            let select = "SELECT NOT pg_is_in_recovery()
                             AND current_setting('synchronous_standby_names') = ''";
            client.query_one(select, &[]).await.unwrap().get(0)
        })
        .await;
    }

    /// Moves the tables that grow to a small disk, where one can be mounted.
    pub(crate) async fn use_small_disk(&mut self) -> bool {
        let owner = fs::metadata(self.primary.state.join("postgres")).unwrap();
        let Some(tables) = self.primary.place_for_tables(&owner) else { return false };
        let client = self.client().await;
        let create = format!("CREATE TABLESPACE small LOCATION '{}'", tables.display());
        client.batch_execute(&create).await.unwrap();
        for table in ["items", "outcomes", "attempts"] {
            let moves = format!("ALTER TABLE holdfast.{table} SET TABLESPACE small");
            client.batch_execute(&moves).await.unwrap();
        }
        true
    }

    /// Leaves no room on the primary's small disk; false when it has none.
    pub(crate) fn fill_disk(&self) -> bool {
        let Some(disk) = &self.primary.small else { return false };
        let Ok(mut balloon) = fs::File::create(disk.at.join("balloon")) else { return false };
        let block = vec![0; 1 << 16];
        while balloon.write_all(&block).is_ok() {}
        true
    }

    pub(crate) fn empty_disk(&self) {
        if let Some(disk) = &self.primary.small {
            fs::remove_file(disk.at.join("balloon")).ok();
        }
    }

    /// The logs of all servers there were.
    pub(crate) fn logs(&self) -> String {
        let logs = (0..self.made).map(|n| {
            let log = self.folder.path().join(format!("server-{n}/postgres.log"));
            fs::read_to_string(log).unwrap_or_default()
        });
        logs.collect()
    }

    /// Stops all.
    pub(crate) async fn end(mut self) {
        self.primary.stop().await;
        if let Some(mut standby) = self.standby.take() {
            standby.stop().await;
        }
    }
}

impl Server {
    fn at(state: PathBuf) -> Self {
        let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = NonZeroU16::new(free.local_addr().unwrap().port()).unwrap();
        Self { state, port, running: None, tables: None, small: None }
    }

    fn url(&self) -> String {
        format!("postgres://postgres@127.0.0.1:{}/postgres", self.port)
    }

    /// An empty folder on a small disk, for the tables that grow; none where none can be mounted.
    fn place_for_tables(&mut self, owner: &fs::Metadata) -> Option<PathBuf> {
        self.small = Some(SmallDisk::mount(&self.state.join("disk"), owner)?);
        let tables = self.state.join("disk/tables");
        make_owned(&tables, owner);
        self.tables = Some(tables.clone());
        Some(tables)
    }

    /// The folder of its programs.
    fn programs(&self) -> PathBuf {
        let pid = self.running.as_ref().expect("it runs").pid();
        let program = fs::read_link(format!("/proc/{pid}/exe")).unwrap();
        program.parent().unwrap().to_owned()
    }

    /// Whether its main process is there: a crash of another one it survives.
    fn is_alive(&self) -> bool {
        let stat = self.running.as_ref().map(|server| format!("/proc/{}/stat", server.pid()));
        let stat = stat.and_then(|stat| fs::read_to_string(stat).ok());
        stat.is_some_and(|stat| !stat.contains(") Z "))
    }

    fn last_logged(&self) -> String {
        let log = fs::read_to_string(self.state.join("postgres.log")).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(30)..].join("\n")
    }

    async fn start(&mut self) {
        let setting = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        let options = EmbeddedOptions {
            tcp_port: Some(self.port),
            extra_settings: vec![
                setting("max_connections", "60"),
                setting("wal_keep_size", "512MB"),
                setting("log_lock_waits", "on"),
            ],
            ..EmbeddedOptions::new(DataDir::State(self.state.clone()))
        };
        // A killed server's processes may hold its memory for a while on a busy machine.
        let mut refused = String::new();
        for _ in 0..1_000 {
            let options = options.clone();
            let started = tokio::task::spawn_blocking(move || EmbeddedPostgres::start(&options));
            match started.await.unwrap() {
                Ok(running) => {
                    self.running = Some(running);
                    return;
                }
                Err(error) => refused = error.to_string(),
            }
            assert!(refused.contains("still in use"), "{refused}");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        panic!("{refused}");
    }

    async fn crash(&mut self, signal: Signal) {
        let Some(running) = self.running.take() else { return };
        let pid = Pid::from_raw(i32::try_from(running.pid()).unwrap()).unwrap();
        kill_process(pid, signal).unwrap();
        tokio::task::spawn_blocking(move || {
            while fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero()))
                .is_ok_and(|stat| !stat.contains(") Z "))
            {
                std::thread::sleep(Duration::from_millis(5));
            }
            drop(running);
        })
        .await
        .unwrap();
    }

    async fn stop(&mut self) {
        let running = self.running.take();
        tokio::task::spawn_blocking(move || drop(running)).await.unwrap();
    }
}

/// A mounted file system in memory; unmounted when dropped, or when this process ends otherwise.
struct SmallDisk {
    at: PathBuf,
    guard: Child,
}

impl SmallDisk {
    /// None where this account may not mount.
    fn mount(at: &Path, owner: &fs::Metadata) -> Option<Self> {
        if !rustix::process::geteuid().is_root() {
            return None;
        }
        fs::create_dir(at).unwrap();
        let options = format!("size={SMALL_DISK},mode=700,uid={},gid={}", owner.uid(), owner.gid());
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &options, "holdfast-test"])
            .arg(at)
            .stderr(Stdio::null())
            .status();
        if !mounted.is_ok_and(|status| status.success()) {
            return None;
        }
        // Ends with its standard input, whose other end only this process has.
        let guard = Command::new("sh")
            .args(["-c", "cat; umount -l \"$1\"", "sh"])
            .arg(at)
            .current_dir("/")
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        Some(Self { at: at.to_owned(), guard })
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        drop(self.guard.stdin.take());
        self.guard.wait().ok();
    }
}

fn make_owned(folder: &Path, owner: &fs::Metadata) {
    fs::create_dir(folder).unwrap();
    fs::set_permissions(folder, Permissions::from_mode(0o700)).unwrap();
    if rustix::process::geteuid().is_root() {
        chown(folder, Some(owner.uid()), Some(owner.gid())).unwrap();
    }
}
