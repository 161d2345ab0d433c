//! One run: workers, servers and a plan of faults; then the check of what became of it all.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use holdfast::clock::{Clock, SystemClock};
use holdfast::model::{BatchId, Position};
use holdfast::store::{ControlAnswer, ControlVerb, Database, DatabaseOptions, Event, RetryAnswer};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use rustix::process::{Pid, Signal, kill_process};
use tokio::task::JoinSet;
use tokio_postgres::Client;

use super::history::{Fault, History, NoteKind, Promise, Violation};
use super::plan::{Kind, Planned, Step, WORKERS, Who, plan};
use super::servers::{Replication, Servers};
use super::witness;
use super::work::{Ledger, Submission, executions};
use crate::support::fleet::{Fleet, QUEUE, now, until};
use crate::support::invariants::violations_of;
use crate::support::proxy::{Proxy, Weather};
use crate::support::worker_process::WorkerProcess;

/// A lease of [`super::plan::LEASE`], with as much slack as that allows: the machine has other
/// things to do. Budgets that no run uses up, so that what fails has failed by itself, and a guard that
/// never gives its worker up.
const SETTINGS: &str = "
[lease]
ttl = '4s'
kill_grace = '200ms'
slack = '700ms'
[retry]
max_crashes = 250
max_interruptions = 250
backoff_base = '50ms'
backoff_max = '500ms'
[drain]
grace = '2s'
release = '1s'
[worker]
restarts = 1000000
restart_reset = '10ms'
[database]
connect_timeout = '2s'
";

/// Batches that are open at once, at most: what comes on top waits for the next run.
const OPEN_BATCHES: i64 = 10;

/// Items of one batch, at most.
const ITEMS: usize = 25;

/// How long everything may take to end when nothing disturbs it any more.
const SETTLE: Duration = Duration::from_mins(3);

/// How long a worker may take from a first signal to its end.
const BOUNDED_STOP: Duration = Duration::from_secs(20);

/// The library that lies about the time, where Debian and its kin keep it.
fn faketime() -> Option<PathBuf> {
    let folders = fs::read_dir("/usr/lib").ok()?.flatten();
    let found = folders.map(|folder| folder.path().join("faketime/libfaketime.so.1"));
    found.filter(|library| library.exists()).min()
}

/// What a run is, before it runs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Orders {
    pub(super) seed: u64,
    pub(super) length: Duration,
}

struct Member {
    proxy: Proxy,
    process: Option<WorkerProcess>,
    started: Duration,
    /// Was told to end.
    leaving: bool,
    /// What its wall clock is told to add.
    clock: PathBuf,
}

/// Promises, and when they were made.
#[derive(Default)]
struct Promised {
    batches: Vec<(Duration, Promise)>,
    cancels: Vec<(Duration, BatchId)>,
}

struct Run {
    fleet: Fleet,
    ledger: Ledger,
    crew: Vec<Member>,
    /// The way of those who submit and control.
    client: Proxy,
    database: Database,
    tasks: JoinSet<()>,
    promised: Arc<Mutex<Promised>>,
    /// Between losing touch with its standby and the failover, the primary promises in vain.
    in_vain: Vec<(Duration, Duration)>,
    link_stalled: Option<Duration>,
    hoard: Vec<Client>,
    parent_lock: Option<Client>,
    faults: BTreeMap<Kind, usize>,
    random: StdRng,
    submitted: usize,
    servers: Servers,
}

/// Runs it to its end; panics with the seed and the shortest history of whatever breaks a promise.
pub(super) async fn run(orders: Orders) {
    let Orders { seed, length } = orders;
    eprintln!(
        "chaos: seed {seed}, {length:?}; again with make chaos SECONDS={} SEED={seed}",
        length.as_secs()
    );
    let mut run = Run::prepare(seed).await;
    let began = SystemClock.now();
    let prepared = now();
    for planned in plan(seed, length) {
        let at = began + planned.at;
        let wait = at.since(SystemClock.now());
        tokio::time::sleep(wait).await;
        run.step(planned).await;
        while run.tasks.try_join_next().is_some_and(|ended| ended.is_ok()) {}
        run.revive().await;
    }
    let disturbed = now();
    run.heal().await;
    let unsettled = run.settle().await;
    eprintln!(
        "chaos: faults for {:?}, settled {:?} later",
        disturbed.saturating_sub(prepared),
        now().saturating_sub(disturbed)
    );
    let report = run.judge(unsettled).await;
    report.print(seed);
}

impl Run {
    async fn prepare(seed: u64) -> Self {
        let mut servers = Servers::new().await;
        witness::install(&servers.client().await).await;
        if !servers.use_small_disk().await {
            eprintln!("chaos: no disk can be mounted here, so none gets full");
        }
        servers.attach_standby().await;
        let url = servers.url();
        let fleet = Fleet::at(url.clone(), servers.client().await, None, SETTINGS);
        let ledger = Ledger::in_folder(fleet.folder());
        let client = Proxy::before(&url).await;
        let database = Database::new(DatabaseOptions {
            url: client.url().to_owned(),
            application: "client".to_owned(),
            pool_size: 8,
            connect_timeout: Duration::from_secs(2),
            lock_timeout: Duration::from_secs(2),
            statement_timeout: Duration::from_secs(4),
            heartbeat_timeout: Duration::from_secs(2),
        })
        .unwrap();
        let mut crew = Vec::new();
        for n in 0..WORKERS {
            let clock = fleet.folder().join(format!("clock-{n}"));
            fs::write(&clock, "+0\n").unwrap();
            let proxy = Proxy::before(&url).await;
            crew.push(Member { proxy, process: None, started: now(), leaving: false, clock });
        }
        let mut run = Self {
            fleet,
            ledger,
            crew,
            client,
            database,
            tasks: JoinSet::new(),
            promised: Arc::default(),
            in_vain: Vec::new(),
            link_stalled: None,
            hoard: Vec::new(),
            parent_lock: None,
            faults: BTreeMap::new(),
            random: StdRng::seed_from_u64(seed),
            submitted: 0,
            servers,
        };
        for n in 0..WORKERS {
            run.start(n).await;
        }
        run
    }

    async fn step(&mut self, planned: Planned) {
        let done = self.perform(planned.step).await;
        if let Some(kind) = planned.begins.filter(|_| done) {
            *self.faults.entry(kind).or_default() += 1;
        }
    }

    /// Whether there was anything to do it to.
    async fn perform(&mut self, step: Step) -> bool {
        match step {
            Step::Signal(who, n, signal) => return self.signal(who, n, signal),
            Step::Start(n) => self.start(n).await,
            Step::CrashServer(signal) => self.servers.crash(signal).await,
            Step::StopServer => self.servers.stop().await,
            Step::StartServer => self.servers.start().await,
            Step::CrashBackend => self.servers.crash_backend().await,
            Step::Replicate(how) => self.servers.replicate(how).await,
            Step::StallLink => self.link_stalled = Some(self.servers.stall_link().await),
            Step::FailOver => return self.fail_over().await,
            Step::AttachStandby => self.servers.attach_standby().await,
            Step::Weather(n, weather) => self.crew[n].proxy.set(weather),
            Step::CutCommits(n) => {
                let seed = self.random.random();
                self.proxy(n).cut_first_tries("", seed);
            }
            Step::SpareCommits(n) => self.proxy(n).spare_commits(),
            Step::TakeConnections => self.take_connections().await,
            Step::FreeConnections => self.hoard.clear(),
            Step::FillDisk => return self.servers.fill_disk(),
            Step::EmptyDisk => self.servers.empty_disk(),
            Step::JumpClock(n, seconds) => return self.jump_clock(n, seconds),
            Step::LockBatch => return self.lock_batch().await,
            Step::UnlockBatch => self.parent_lock = None,
            Step::Submit => self.submit().await,
            Step::Pause(drawn) => return self.control(drawn, ControlVerb::Pause),
            Step::Cancel(drawn) => return self.control(drawn, ControlVerb::Cancel),
            Step::Resume => self.resume_all(),
            Step::Retry(drawn) => return self.retry(drawn),
        }
        true
    }

    fn proxy(&self, n: usize) -> &Proxy {
        self.crew.get(n).map_or(&self.client, |member| &member.proxy)
    }

    fn signal(&mut self, who: Who, n: usize, signal: Signal) -> bool {
        let member = &mut self.crew[n];
        let Some(process) = member.process.as_mut() else { return false };
        if process.has_ended() {
            return false;
        }
        member.leaving |= signal == Signal::TERM;
        let pid = match who {
            Who::Guard => process.pid(),
            Who::Worker => child_of(process.pid(), "holdfast-worker"),
            Who::Keeper => child_of(process.pid(), "holdfast-keeper"),
        };
        // It may have ended this moment.
        kill_process(Pid::from_raw(pid).unwrap(), signal).is_ok()
    }

    /// Starts a worker unless it runs; one that was told to end gets the time that it may take.
    async fn start(&mut self, n: usize) {
        let member = &mut self.crew[n];
        if let Some(process) = &mut member.process {
            if member.leaving {
                let ended = async || process.has_ended();
                until("a worker that was told to end does so", BOUNDED_STOP, ended).await;
            }
            if !process.has_ended() {
                return;
            }
        }
        let mut variables = Vec::new();
        let faketime = faketime();
        if let Some(library) = &faketime {
            variables.extend([
                ("LD_PRELOAD", library.to_str().unwrap()),
                ("FAKETIME_TIMESTAMP_FILE", member.clock.to_str().unwrap()),
                ("FAKETIME_NO_CACHE", "1"),
                ("FAKETIME_DONT_FAKE_MONOTONIC", "1"),
            ]);
        }
        let url = member.proxy.url();
        member.process = Some(self.fleet.start_at(url, &["--slots", "4"], &variables));
        member.leaving = false;
        member.started = now();
    }

    /// Starts what ended by itself, as a service manager does: a worker that finds no database.
    async fn revive(&mut self) {
        for n in 0..WORKERS {
            let member = &mut self.crew[n];
            let ended = member.process.as_mut().is_some_and(WorkerProcess::has_ended);
            if ended && now().saturating_sub(member.started) > Duration::from_secs(1) {
                self.start(n).await;
            }
        }
    }

    async fn fail_over(&mut self) -> bool {
        if !self.servers.has_standby() {
            return false;
        }
        self.hoard.clear();
        self.parent_lock = None;
        self.servers.fail_over().await;
        let url = self.servers.url();
        for member in &self.crew {
            member.proxy.lead_to(&url);
        }
        self.client.lead_to(&url);
        if let Some(from) = self.link_stalled.take() {
            // Those who were told a moment ago may note it a moment later.
            self.in_vain.push((from, now() + Duration::from_secs(1)));
        }
        true
    }

    async fn take_connections(&mut self) {
        for member in &self.crew {
            member.proxy.reset_all();
        }
        while self.hoard.len() < 100 {
            let Some(client) = self.servers.try_client().await else { return };
            self.hoard.push(client);
        }
    }

    fn jump_clock(&self, n: usize, seconds: i32) -> bool {
        fs::write(&self.crew[n].clock, format!("{seconds:+}\n")).unwrap();
        faketime().is_some()
    }

    async fn lock_batch(&mut self) -> bool {
        let Some(client) = self.servers.try_client().await else { return false };
        let lock = "BEGIN; SET LOCAL lock_timeout = '1s';
            SELECT pg_advisory_xact_lock(1212564301, lock_no) FROM (
                SELECT lock_no FROM holdfast.batches WHERE finished_at IS NULL
                 ORDER BY id DESC LIMIT 1) b";
        let locked = client.batch_execute(lock).await.is_ok();
        self.parent_lock = Some(client);
        locked
    }

    async fn submit(&mut self) {
        let open = "SELECT count(*) FROM holdfast.batches WHERE finished_at IS NULL";
        let Some(client) = self.servers.try_client().await else { return };
        let Ok(row) = client.query_one(open, &[]).await else { return };
        if row.get::<_, i64>(0) >= OPEN_BATCHES {
            return;
        }
        let submission = Submission::any(&self.ledger, self.submitted, ITEMS, &mut self.random);
        self.submitted += 1;
        let (database, promised) = (self.database.clone(), Arc::clone(&self.promised));
        self.tasks.spawn(async move {
            let answers = submission.submit(&database).await;
            let batch = answers[0];
            let promise = Promise {
                batch,
                kinds: submission.kinds,
                answers,
                cancelled: false,
                at_risk: false,
            };
            lock(&promised).batches.push((now(), promise));
            database.notify(&Event::Work(QUEUE.to_owned())).await.ok();
        });
    }

    /// One of the newest batches.
    fn recent(&self, drawn: usize) -> Option<BatchId> {
        let promised = lock(&self.promised);
        let count = promised.batches.len();
        let at = count.checked_sub(1 + drawn % count.max(1))?;
        Some(promised.batches[at].1.batch)
    }

    fn control(&mut self, drawn: usize, verb: ControlVerb) -> bool {
        let Some(batch) = self.recent(drawn) else { return false };
        let (database, promised) = (self.database.clone(), Arc::clone(&self.promised));
        self.tasks.spawn(async move {
            loop {
                match database.control_batch(batch, None, verb, "chaos").await {
                    Ok(ControlAnswer::Applied | ControlAnswer::Unchanged) => break,
                    Ok(ControlAnswer::Ended | ControlAnswer::Unknown) => return,
                    Err(_) => tokio::time::sleep(Duration::from_millis(200)).await,
                }
            }
            if verb == ControlVerb::Cancel {
                lock(&promised).cancels.push((now(), batch));
                database.notify(&Event::Cancelled(batch)).await.ok();
            }
        });
        true
    }

    fn resume_all(&mut self) {
        let batches: Vec<BatchId> =
            lock(&self.promised).batches.iter().map(|(_, promise)| promise.batch).collect();
        let database = self.database.clone();
        self.tasks.spawn(async move {
            for batch in batches {
                while database
                    .control_batch(batch, None, ControlVerb::Resume, "chaos")
                    .await
                    .is_err()
                {
                    tokio::time::sleep(Duration::from_millis(200)).await;
                }
            }
        });
    }

    fn retry(&mut self, drawn: usize) -> bool {
        let Some(batch) = self.recent(drawn * 2) else { return false };
        let database = self.database.clone();
        self.tasks.spawn(async move {
            let mut from = Some(Position::new(0));
            while let Some(position) = from {
                let chunk = database.retry_failed(batch, None, None, position, 5, "chaos");
                match chunk.await {
                    Ok(RetryAnswer::Moved { next, .. }) => from = next,
                    Ok(RetryAnswer::Cancelled | RetryAnswer::Unknown) => return,
                    Err(_) => tokio::time::sleep(Duration::from_millis(200)).await,
                }
            }
            database.notify(&Event::Work(QUEUE.to_owned())).await.ok();
        });
        true
    }

    /// Ends every fault that still goes on.
    async fn heal(&mut self) {
        self.hoard.clear();
        self.parent_lock = None;
        self.servers.empty_disk();
        if !self.servers.is_up() {
            self.servers.start().await;
        }
        self.servers.replicate(Replication::Asynchronous).await;
        self.client.set(Weather::Fair);
        self.client.spare_commits();
        for n in 0..WORKERS {
            self.crew[n].proxy.set(Weather::Fair);
            self.crew[n].proxy.spare_commits();
            for who in [Who::Guard, Who::Worker, Who::Keeper] {
                self.signal(who, n, Signal::CONT);
            }
            self.start(n).await;
        }
        let submits = async { while self.tasks.join_next().await.is_some() {} };
        tokio::time::timeout(SETTLE, submits).await.expect("what was submitted is acknowledged");
        self.resume_all();
        while self.tasks.join_next().await.is_some() {}
    }

    /// Waits for the ends of all batches, then of all workers. What does not end is a violation.
    async fn settle(&mut self) -> Vec<Violation> {
        let mut found = Vec::new();
        let of_run = |fault, text| Violation { fault, item: None, text };
        let sql = self.servers.client().await;
        let open = "SELECT count(*) FROM holdfast.batches WHERE finished_at IS NULL OR leftovers";
        let ended = async {
            while sql.query_one(open, &[]).await.unwrap().get::<_, i64>(0) > 0 {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        };
        if tokio::time::timeout(SETTLE, ended).await.is_err() {
            found.push(of_run(Fault::Unfinished, format!("batches after {SETTLE:?} of peace")));
        }
        for member in &mut self.crew {
            let process = member.process.as_mut().expect("it was started");
            process.signal(Signal::TERM);
        }
        for member in &mut self.crew {
            let process = member.process.as_mut().expect("it was started");
            let began = now();
            while !process.has_ended() && now().saturating_sub(began) < BOUNDED_STOP {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            if !process.has_ended() {
                found.push(of_run(Fault::Unfinished, "a worker after its signal".to_owned()));
            }
        }
        let began = now();
        while !self.ledger.processes().is_empty()
            && now().saturating_sub(began) < Duration::from_secs(3)
        {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        for process in self.ledger.processes() {
            found.push(of_run(Fault::Leftover, process));
        }
        found
    }

    async fn judge(mut self, mut violations: Vec<Violation>) -> Report {
        let sql = self.servers.client().await;
        let mut history = witness::history(&sql).await;
        history.notes = self.ledger.notes();
        history.lossy = !self.in_vain.is_empty();
        history.promises = self.promises();
        violations.extend(history.violations());
        let of_run = |fault, text| Violation { fault, item: None, text };
        for batch in history.batches.keys() {
            let broken = violations_of(&sql, *batch).await.into_iter();
            violations.extend(broken.map(|text| of_run(Fault::Lost, format!("{batch}: {text}"))));
        }
        drop(sql);
        let logs = self.servers.logs();
        for line in logs.lines().filter(|line| line.contains("deadlock detected")) {
            violations.push(of_run(Fault::Unfinished, line.to_owned()));
        }
        let workers = self.worker_logs();
        for line in workers.lines().filter(|line| line.contains("panicked")) {
            violations.push(of_run(Fault::Unfinished, line.to_owned()));
        }
        let refusals = ["nothing was published", "a lease is gone"];
        let refusals = refusals.map(|text| workers.matches(text).count()).iter().sum();
        let faults = std::mem::take(&mut self.faults);
        self.tasks.shutdown().await;
        self.crew.clear();
        self.servers.end().await;
        Report { history, violations, faults, refusals }
    }

    /// What was promised for good.
    fn promises(&self) -> Vec<Promise> {
        let mut promised = lock(&self.promised);
        let in_vain =
            |at: Duration| self.in_vain.iter().any(|(from, until)| (*from..*until).contains(&at));
        let cancels = std::mem::take(&mut promised.cancels);
        let mut promises = Vec::new();
        for (at, mut promise) in promised.batches.drain(..) {
            promise.at_risk = in_vain(at);
            promise.cancelled =
                cancels.iter().any(|(at, batch)| *batch == promise.batch && !in_vain(*at));
            promises.push(promise);
        }
        promises
    }

    fn worker_logs(&self) -> String {
        let files = fs::read_dir(self.fleet.folder()).unwrap().flatten();
        let logs = files.filter(|file| file.file_name().to_string_lossy().ends_with(".log"));
        logs.map(|log| fs::read_to_string(log.path()).unwrap_or_default()).collect()
    }
}

/// The child of a guard that has this name; the guard itself while it has none.
fn child_of(guard: i32, name: &str) -> i32 {
    let children = fs::read_to_string(format!("/proc/{guard}/task/{guard}/children"));
    let children = children.unwrap_or_default();
    let named = children.split_whitespace().find(|pid| {
        fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|comm| comm.trim() == name)
    });
    named.map_or(guard, |pid| pid.parse().unwrap())
}

fn lock(promised: &Mutex<Promised>) -> MutexGuard<'_, Promised> {
    promised.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Report {
    history: History,
    violations: Vec<Violation>,
    faults: BTreeMap<Kind, usize>,
    refusals: usize,
}

impl Report {
    /// Prints what happened; panics when something is broken.
    fn print(&self, seed: u64) {
        let history = &self.history;
        let ran = executions(&history.notes);
        let executed: usize = ran.values().sum();
        let recovered = history.recoveries();
        let overlaps = history.notes.iter().filter(|note| note.kind == NoteKind::Overlap).count();
        eprintln!(
            "chaos: seed {seed}: {} batches, {} items, {executed} executions, {} outcomes, \
             {recovered} recoveries, {} fence refusals, {overlaps} overlaps, {} violations",
            history.batches.len(),
            history.promises.iter().map(|promise| promise.kinds.len()).sum::<usize>(),
            history.outcomes.len(),
            self.refusals,
            self.violations.len(),
        );
        let counts: Vec<String> =
            self.faults.iter().map(|(kind, count)| format!("{kind:?} {count}")).collect();
        eprintln!("chaos: {}", counts.join(", "));
        if self.violations.is_empty() {
            return;
        }
        let mut by_fault: BTreeMap<Fault, usize> = BTreeMap::new();
        for violation in &self.violations {
            *by_fault.entry(violation.fault).or_default() += 1;
        }
        let mut told = format!("seed {seed}: {by_fault:?}\n");
        for violation in self.violations.iter().filter(|found| found.item.is_none()).take(20) {
            writeln!(told, "{:?}: {}", violation.fault, violation.text).expect("to a string");
        }
        if let Some(shortest) = history.explained(&self.violations).first() {
            writeln!(told, "the shortest history that shows a fault:\n{shortest}")
                .expect("to a string");
        }
        panic!("{told}");
    }
}
