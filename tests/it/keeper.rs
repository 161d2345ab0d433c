//! The keeper by itself: deadlines, whole trees, a worker that is gone, a keeper that was frozen.

use std::ffi::CString;
use std::fs;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::Child;
use std::time::Duration;

use holdfast::clock::{BootInstant, Clock, SystemClock};
use holdfast::execute::keeper::{self, Keeper};
use holdfast::execute::spawner::{Exit, Running, SpawnError, SpawnRequest, Spawned, Spawner};
use holdfast::model::LeaseId;
use rustix::net::{Shutdown, shutdown};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;
use uuid::Uuid;

use crate::support::fleet::{LONG, until};

/// A keeper, and a mark by which whatever it leaves behind is found.
struct Bench {
    process: Child,
    keeper: Keeper,
    control: OwnedFd,
    lease: LeaseId,
    mark: String,
    folder: TempDir,
}

/// From TERM to KILL.
const GRACE: Duration = Duration::from_millis(500);

impl Bench {
    fn new() -> Self {
        let (process, link) = keeper::start(Path::new(env!("CARGO_BIN_EXE_holdfast"))).unwrap();
        let control = link.control.try_clone().unwrap();
        let bench = Self {
            process,
            keeper: Keeper::connect(link, GRACE).unwrap(),
            control,
            lease: LeaseId::generate(),
            mark: Uuid::new_v4().to_string(),
            folder: tempfile::tempdir().unwrap(),
        };
        bench.trust(LONG * 10);
        bench
    }

    /// Trusts the lease for so long from now.
    fn trust(&self, time: Duration) -> BootInstant {
        let until = SystemClock.now() + time;
        self.keeper.trust(self.lease, Some(until));
        until
    }

    fn request(&self, script: &str) -> SpawnRequest {
        let text = |text: &str| CString::new(text).unwrap();
        SpawnRequest {
            lease: self.lease,
            programs: [text("/bin/sh")].into(),
            argv: vec![text("sh"), text("-c"), text(script)],
            env: vec![text(&format!("MARK={}", self.mark)), text("PATH=/usr/bin:/bin")],
            cwd: text(self.folder.path().to_str().unwrap()),
            pipe_stdin: false,
        }
    }

    async fn spawn(&self, script: &str) -> Box<dyn Running> {
        let Spawned { running, .. } = self.keeper.spawn(self.request(script)).await.unwrap();
        running
    }

    /// Living processes that have the mark in their environment.
    fn processes(&self) -> usize {
        let mark = format!("MARK={}", self.mark);
        let marked = |process: &fs::DirEntry| {
            let environment = fs::read(process.path().join("environ")).unwrap_or_default();
            environment.split(|byte| *byte == 0).any(|line| line == mark.as_bytes())
        };
        fs::read_dir("/proc").unwrap().flatten().filter(marked).count()
    }

    /// Waits until a script has made a file, and reads it.
    async fn file(&self, name: &str) -> String {
        let path = self.folder.path().join(name);
        let written = async || fs::read_to_string(&path).is_ok_and(|text| text.ends_with('\n'));
        until("the file is written", LONG, written).await;
        fs::read_to_string(path).unwrap().trim().to_owned()
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.process), signal).unwrap();
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn is_there(pid: &str) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with('Z'))
}

#[tokio::test]
async fn an_execution_that_is_no_longer_trusted_ends_although_nobody_asks() {
    let bench = Bench::new();
    let deadline = bench.trust(Duration::from_secs(2));
    let polite = "trap 'echo >term; exit 3' TERM; echo >polite; sleep 300 & wait";
    let mut polite = bench.spawn(polite).await;
    let stubborn = "trap '' TERM; (setsid sleep 300 &); echo >stubborn; sleep 300; sleep 300";
    let mut stubborn = bench.spawn(stubborn).await;
    bench.file("polite").await;
    bench.file("stubborn").await;

    let ends = tokio::join!(polite.exited(), stubborn.exited());
    let killed = SystemClock.now().since(deadline);
    let ends = (ends, polite.end().await.unwrap(), stubborn.end().await.unwrap());

    bench.file("term").await;
    assert_eq!((ends.1, ends.2), (Exit::Fenced, Exit::Fenced));
    assert!(killed >= GRACE, "both had ended {killed:?} after the deadline");
    assert_eq!(bench.processes(), 0);
    let refused = bench.keeper.spawn(bench.request("true")).await.map(|_| ()).unwrap_err();
    assert!(matches!(refused, SpawnError::System(_)), "{refused:?}");
}

#[tokio::test]
async fn an_execution_goes_on_for_as_long_as_its_lease_is_extended() {
    let bench = Bench::new();
    bench.trust(Duration::from_secs(2));
    let mut running = bench.spawn("sleep 4; exit 5").await;
    let renewals = async {
        loop {
            tokio::time::sleep(Duration::from_millis(300)).await;
            bench.trust(Duration::from_secs(2));
        }
    };

    tokio::select! {
        () = running.exited() => {}
        () = renewals => {}
    }

    assert_eq!(running.end().await.unwrap(), Exit::Status(5));
}

#[tokio::test]
async fn what_detached_itself_goes_with_its_own_execution_alone() {
    let bench = Bench::new();
    let detach = "(setsid sleep 300 & echo $! >NAME); echo >NAME.ready";
    let mut long = bench.spawn(&format!("{}; sleep 300", detach.replace("NAME", "long"))).await;
    let long_one = bench.file("long").await;
    let mut short = bench.spawn(&detach.replace("NAME", "short")).await;
    let short_one = bench.file("short").await;

    short.exited().await;
    assert_eq!(short.end().await.unwrap(), Exit::Status(0));

    assert!(!is_there(&short_one));
    assert!(is_there(&long_one));
    assert_eq!(long.end().await.unwrap(), Exit::Signal(9));
    assert!(!is_there(&long_one));
    assert_eq!(bench.processes(), 0);
}

#[tokio::test]
async fn what_hides_from_its_execution_goes_with_the_last_it_may_belong_to() {
    let bench = Bench::new();
    let hide = "(env -i setsid /bin/sh -c 'echo >up2; exec /bin/sleep 300' & echo $! >hidden); \
                while ! [ -s up2 ]; do sleep 0.01; done";
    let mut suspect = bench.spawn("echo >up; sleep 300").await;
    bench.file("up").await;
    let mut hides = bench.spawn(hide).await;
    let hidden = bench.file("hidden").await;

    hides.exited().await;
    assert_eq!(hides.end().await.unwrap(), Exit::Status(0));
    assert!(is_there(&hidden), "it may belong to the other");
    suspect.end().await.unwrap();
    until("it is gone", LONG, async || !is_there(&hidden)).await;

    // Found below an execution that is killed, it does not hide.
    let mut killed = bench.spawn("env -i setsid sleep 300 & echo $! >below; sleep 300").await;
    let below = bench.file("below").await;
    let mut other = bench.spawn("sleep 300").await;
    killed.end().await.unwrap();
    assert!(!is_there(&below));
    other.end().await.unwrap();
}

#[tokio::test]
async fn without_its_worker_a_keeper_ends_everything_and_then_itself() {
    let mut bench = Bench::new();
    let script = "sleep 300 & setsid sleep 300 & (setsid sleep 300 &); \
                  (env -i setsid sleep 300 & echo $! >hidden); sleep 300; sleep 300";
    let _running = bench.spawn(script).await;
    let hidden = bench.file("hidden").await;
    bench.signal(Signal::TERM);
    assert!(bench.process.try_wait().unwrap().is_none(), "signals are not for it");

    // As when the kernel closes what a killed worker had open.
    shutdown(&bench.control, Shutdown::Both).unwrap();
    let mut status = None;
    until("the keeper ends", LONG, async || {
        status = bench.process.try_wait().unwrap();
        status.is_some()
    })
    .await;

    assert!(status.unwrap().success(), "it has proved that nothing is left");
    assert_eq!(bench.processes(), 0);
    assert!(!is_there(&hidden));
    assert!(bench.keeper.lost().is_cancelled());
}

#[tokio::test]
async fn what_nobody_waits_for_any_more_is_ended() {
    let bench = Bench::new();
    drop(bench.spawn("(setsid sleep 300 & echo >up); sleep 300; sleep 300").await);
    let launching = bench.keeper.spawn(bench.request("(setsid sleep 300 &); sleep 300; sleep 300"));
    drop(tokio::time::timeout(Duration::ZERO, launching).await);

    until("nothing is left", LONG, async || bench.processes() == 0).await;
}

#[tokio::test]
async fn a_keeper_that_was_frozen_ends_what_is_overdue_before_it_hears_anything() {
    let bench = Bench::new();
    bench.trust(Duration::from_secs(1));
    let script = "(setsid sleep 300 & echo >up); trap '' TERM; sleep 300; sleep 300";
    let mut running = bench.spawn(script).await;
    bench.file("up").await;
    bench.signal(Signal::STOP);
    // What it would hear: its lease was extended in time.
    bench.trust(LONG);
    tokio::time::sleep(Duration::from_secs(1) + GRACE * 2).await;
    assert!(bench.processes() > 0);

    bench.signal(Signal::CONT);
    let exit = tokio::time::timeout(LONG, async {
        running.exited().await;
        running.end().await.unwrap()
    });

    assert_eq!(exit.await.unwrap(), Exit::Fenced);
    assert_eq!(bench.processes(), 0);
}

#[tokio::test]
async fn what_cannot_be_started_is_told_apart() {
    let bench = Bench::new();
    let no_program = SpawnRequest { programs: [c"/nowhere/x".into()].into(), ..bench.request("") };
    let no_folder = SpawnRequest { cwd: c"/nowhere".into(), ..bench.request("") };
    let mut argument = bench.request("exit 7");
    argument.argv.push(CString::new("x".repeat(100 * 1024)).unwrap());
    let mut too_long = bench.request("");
    too_long.argv.push(CString::new("x".repeat(200 * 1024)).unwrap());
    let unknown = SpawnRequest { lease: LeaseId::generate(), ..bench.request("") };

    let refused = async |request| bench.keeper.spawn(request).await.map(|_| ()).unwrap_err();
    assert!(matches!(refused(no_program).await, SpawnError::Program(_)));
    assert!(matches!(refused(no_folder).await, SpawnError::WorkingDirectory(_)));
    assert!(matches!(refused(too_long).await, SpawnError::Program(_)));
    assert!(matches!(refused(unknown).await, SpawnError::System(_)));
    let mut long = bench.keeper.spawn(argument).await.unwrap().running;
    long.exited().await;
    assert_eq!(long.end().await.unwrap(), Exit::Status(7));
}
