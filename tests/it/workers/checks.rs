//! Checks: their own capacity, their own end, and what a crash leaves of them.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use holdfast::attempt::{CheckRequest, Checker};
use holdfast::clock::{Clock, SystemClock};
use holdfast::config::{Settings, Sources};
use holdfast::execute::spawn::LocalSpawner;
use holdfast::health::{HealthLimits, HealthState};
use holdfast::model::{BatchId, ItemStatus, Position, QueueName, Verdict, VerdictClass, WorkerId};
use holdfast::store::{ControlVerb, Database, ItemRow, ReapDisposition};
use holdfast::supervise::{
    Checkers, CommandExecutors, StopRequest, Worker, WorkerParts, database_options,
};
use holdfast::telemetry::{BuildInfo, Metrics};
use holdfast::workspace::{Gate, LocalWorkspaces};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde_json::json;

use crate::support::fixture::BatchSpec;
use crate::support::fleet::{Fleet, LONG, QUEUE, SHORT, SHORT_LEASE, Submission, until};
use crate::support::invariants::assert_invariants;
use crate::support::scene::{Held, Log, Scene, What, found};

const MOMENT: Duration = Duration::from_millis(500);

/// Rounds in which the server's sessions see every statement for the first time.
const WARM_UP: usize = 5;

/// Long enough that the claim loop has come to rest, which a submit stirs up, before one ends.
const EXECUTION: Duration = Duration::from_millis(150);

/// Six items with a criterion that no code can judge.
const SIX: BatchSpec = BatchSpec {
    items: 6,
    owner: "alice",
    max_running: None,
    max_live: 1_000,
    max_checking: 64,
    max_attempts: 3,
    criteria: Some(r#"["well written"]"#),
};

/// From the end of each execution to the start of the one that got its slot.
fn gaps(log: &Log, cap: usize) -> Vec<Duration> {
    let (starts, ends) = (log.times(What::Start), log.times(What::End));
    starts[cap..].iter().zip(&ends).map(|(start, end)| start.since(*end)).collect()
}

fn median<'a>(rounds: impl Iterator<Item = &'a Vec<Duration>>) -> f64 {
    let mut times: Vec<Duration> = rounds.flatten().copied().collect();
    times.sort_unstable();
    times[times.len() / 2].as_secs_f64()
}

/// The ratio of the medians, and the least it may really be: what 99 of 100 other draws of the same
/// rounds exceed. The busier the machine, the further apart they are.
fn ratio(with: &[Vec<Duration>], without: &[Vec<Duration>]) -> (f64, f64) {
    let mut rng = StdRng::seed_from_u64(1);
    let mut drawn = |rounds: &[Vec<Duration>]| {
        let picks: Vec<usize> = rounds.iter().map(|_| rng.random_range(0..rounds.len())).collect();
        median(picks.into_iter().map(|pick| &rounds[pick]))
    };
    let mut ratios: Vec<f64> = (0..1_000).map(|_| drawn(with) / drawn(without)).collect();
    ratios.sort_unstable_by(f64::total_cmp);
    (median(with.iter()) / median(without.iter()), ratios[10])
}

/// Six items under a cap of three: the second three start while the first three are checked, and as
/// soon as without criteria.
async fn second_three_start_while_the_first_are_checked(scene: &Scene, spec: BatchSpec) {
    let (mut with, mut without) = (Vec::new(), Vec::new());
    for round in 0..WARM_UP + 20 {
        scene.log.clear();
        scene.held.set_open(false);
        let before = scene.held.ended.load(Ordering::SeqCst);
        let batch = scene.submit(spec).await;
        scene.until("all six start", || scene.log.count(What::Start) == 6).await;
        let ended = scene.held.ended.load(Ordering::SeqCst) - before;
        assert_eq!(ended, 0, "no check ended before the last execution began");
        scene.until("all six are checked", || scene.held.running() == 6).await;
        let counts = scene.bed.counts(batch).await;
        assert_eq!((counts.checking, counts.executing), (6, 0));
        let checked = gaps(&scene.log, 3);
        scene.held.set_open(true);
        scene.ended(batch).await;

        scene.log.clear();
        let batch = scene.submit(BatchSpec { criteria: None, ..spec }).await;
        // Looked at in the same way: whatever polls takes part in what is measured.
        scene.until("all six start", || scene.log.count(What::Start) == 6).await;
        scene.ended(batch).await;
        if round >= WARM_UP {
            with.push(checked);
            without.push(gaps(&scene.log, 3));
        }
    }
    let (ratio, least) = ratio(&with, &without);
    let (with, without) = (median(with.iter()), median(without.iter()));
    eprintln!(
        "execution ended to next started: {:.1} ms with, {:.1} ms without criteria; ratio \
         {ratio:.3}, at least {least:.3}",
        with * 1e3,
        without * 1e3
    );
    assert!(least < 1.1, "ratio {ratio}, at least {least}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_check_takes_no_execution_slot_of_its_process() {
    let scene = Scene::new(EXECUTION, Held::default(), |settings| {
        settings.worker.execution_slots = 3;
        settings.worker.check_slots = 8;
    })
    .await;
    second_three_start_while_the_first_are_checked(&scene, SIX).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_check_takes_no_place_in_the_running_cap_of_its_batch() {
    let scene = Scene::new(EXECUTION, Held::default(), |settings| {
        settings.worker.check_slots = 8;
    })
    .await;
    let spec = BatchSpec { max_running: Some(3), ..SIX };
    second_three_start_while_the_first_are_checked(&scene, spec).await;
}

/// With a full backlog nothing more starts; nothing is lost or left unchecked.
async fn full_backlog(scene: &Scene, spec: BatchSpec, most: usize) {
    let batch = scene.submit(spec).await;
    scene.until("checks wait", || scene.log.count(What::End) >= 2).await;
    tokio::time::sleep(MOMENT).await;
    let started = scene.log.count(What::Start);
    assert!(started <= most, "{started} started before a check ended");

    scene.held.set_open(true);
    scene.ended(batch).await;

    assert_eq!(scene.log.count(What::Start), 12, "each once");
    let row = scene.bed.store.batch(batch, None).await.unwrap().unwrap();
    assert_eq!((row.counts.succeeded, row.verdicts.unverified), (12, 12));
    assert_invariants(&scene.bed.sql, batch).await;
}

#[tokio::test]
async fn a_full_backlog_of_the_process_stops_its_claims() {
    let scene = Scene::new(Duration::from_millis(20), Held::default(), |settings| {
        settings.worker.execution_slots = 2;
        settings.worker.check_slots = 1;
        settings.worker.check_backlog = 1;
    })
    .await;
    // Two under check or waiting for it, exceeded by what was executed by then.
    full_backlog(&scene, BatchSpec { items: 12, ..SIX }, 4).await;
}

#[tokio::test]
async fn a_full_backlog_of_the_batch_stops_its_claims() {
    let scene = Scene::new(Duration::from_millis(20), Held::default(), |settings| {
        settings.worker.execution_slots = 2;
    })
    .await;
    full_backlog(&scene, BatchSpec { items: 12, max_checking: 2, ..SIX }, 4).await;
}

#[tokio::test]
async fn items_without_criteria_are_not_checked_and_failures_neither() {
    let scene = Scene::new(Duration::ZERO, Held::default(), |_| {}).await;
    let batch = scene.submit(BatchSpec { criteria: None, ..SIX }).await;
    scene.ended(batch).await;
    let useless = scene.submit(BatchSpec { criteria: Some(r#"["  ", 7]"#), ..SIX }).await;
    scene.ended(useless).await;

    assert_eq!(scene.held.begun.load(Ordering::SeqCst), 0);
    for batch in [batch, useless] {
        let staged: i64 = scene
            .bed
            .value(
                batch,
                "SELECT count(staged_lease_id) FROM holdfast.outcomes WHERE batch_id = $1",
            )
            .await;
        assert_eq!(staged, 0);
    }
}

#[tokio::test]
async fn a_cancel_waits_for_the_read_in_progress_and_publishes_nothing() {
    let mut scene = Scene::new(Duration::ZERO, Held::default(), |settings| {
        settings.worker.check_slots = 1;
    })
    .await;
    let batch = scene.submit(BatchSpec { items: 3, ..SIX }).await;
    scene.until("a check is under way", || scene.held.running() == 1).await;

    scene.bed.control(batch, ControlVerb::Cancel).await;
    scene.bed.control(batch, ControlVerb::Cancel).await;
    scene.ask(StopRequest::Drain(Duration::ZERO));
    scene.ask(StopRequest::Cancel);
    tokio::time::sleep(MOMENT).await;
    assert_eq!(scene.held.running(), 1, "it is not cut loose");
    scene.held.set_open(true);
    let ended = scene.end().await;

    assert!(!ended.forced, "{ended:?}");
    assert_eq!(scene.held.begun.load(Ordering::SeqCst), 1, "what waited was never begun");
    let counts = scene.bed.counts(batch).await;
    assert_eq!((counts.succeeded, counts.cancelled), (0, 3));
    assert_invariants(&scene.bed.sql, batch).await;
}

#[tokio::test]
async fn a_drain_gives_waiting_checks_back_and_waits_for_the_one_that_runs() {
    let mut scene = Scene::new(Duration::ZERO, Held::default(), |settings| {
        settings.worker.check_slots = 1;
    })
    .await;
    let batch = scene.submit(BatchSpec { items: 2, ..SIX }).await;
    scene.until("both have run", || scene.log.count(What::End) == 2).await;
    until("both are staged", LONG, async || scene.bed.counts(batch).await.checking == 2).await;
    scene.until("one is checked", || scene.held.running() == 1).await;

    scene.ask(StopRequest::Drain(LONG));
    let rechecks = "SELECT count(*) FROM holdfast.waiting WHERE batch_id = $1 AND recheck";
    until("the other is given back", LONG, async || {
        scene.bed.value::<i64>(batch, rechecks).await == 1
    })
    .await;
    assert_eq!(scene.held.running(), 1);
    assert_invariants(&scene.bed.sql, batch).await;
    scene.held.set_open(true);
    let ended = scene.end().await;

    assert!(!ended.forced, "{ended:?}");
    let row = scene.bed.store.batch(batch, None).await.unwrap().unwrap();
    assert_eq!((row.counts.succeeded, row.counts.checking), (1, 1));
    assert_eq!(row.verdicts.unverified, 1);
    let again = scene.bed.recheck(batch, 1).await.remove(0);
    assert_eq!((again.history().check_losses(), again.history().attempts()), (0, 0));
    assert_eq!(scene.log.count(What::Start), 2);
}

#[tokio::test]
async fn a_lease_lost_during_its_check_publishes_nothing_and_the_check_is_repeated() {
    let scene = Scene::new(Duration::ZERO, Held::default(), |_| {}).await;
    let batch = scene.submit(BatchSpec { items: 1, ..SIX }).await;
    scene.until("it is checked", || scene.held.running() == 1).await;

    let expire = "UPDATE holdfast.leases SET expires_at = clock_timestamp() - interval '1 s'
                   WHERE batch_id = $1";
    scene.bed.run(expire, &[&batch.uuid()]).await;
    let taken = scene.bed.reap(batch).await;
    assert_eq!(taken[0].disposition, ReapDisposition::Rechecked);
    scene.until("it is checked again", || scene.held.begun.load(Ordering::SeqCst) == 2).await;
    scene.held.set_open(true);
    scene.ended(batch).await;

    let lease: uuid::Uuid =
        scene.bed.value(batch, "SELECT lease_id FROM holdfast.outcomes WHERE batch_id = $1").await;
    assert_ne!(lease, taken[0].lease.uuid());
    assert_eq!(scene.log.count(What::Start), 1);
    assert_invariants(&scene.bed.sql, batch).await;
}

/// The one item of a batch whose check gave nothing: succeeded, without a verdict.
async fn has_no_verdict(scene: &Scene, batch: BatchId) {
    let item: ItemRow =
        scene.bed.store.items(batch, None, Position::new(0), 1).await.unwrap().remove(0);
    assert_eq!((item.status, item.attempt), (ItemStatus::Succeeded, Some(1)));
    assert_eq!(item.acceptance_verdict, None);
    assert_eq!(item.acceptance_criteria.unwrap().get(), r#"["well written"]"#);
    assert_eq!(scene.log.count(What::Start), 1, "a check never causes a retry");
}

#[tokio::test]
async fn a_checker_that_fails_leaves_the_item_succeeded_without_a_verdict() {
    let held = Held::failing();
    held.set_open(true);
    let scene = Scene::new(Duration::ZERO, held, |_| {}).await;
    let batch = scene.submit(BatchSpec { items: 1, ..SIX }).await;
    scene.ended(batch).await;
    has_no_verdict(&scene, batch).await;
}

#[tokio::test]
async fn a_check_that_does_not_end_costs_its_verdict_and_keeps_its_slot() {
    let scene = Scene::new(Duration::ZERO, Held::default(), |settings| {
        settings.worker.check_slots = 1;
        settings.worker.check_timeout = Duration::from_secs(1);
    })
    .await;
    let batch = scene.submit(BatchSpec { items: 1, ..SIX }).await;
    scene.ended(batch).await;
    has_no_verdict(&scene, batch).await;

    let next = scene.submit(BatchSpec { items: 1, ..SIX }).await;
    until("the next waits", LONG, async || scene.bed.counts(next).await.checking == 1).await;
    tokio::time::sleep(MOMENT).await;
    assert_eq!(scene.held.begun.load(Ordering::SeqCst), 1, "the read has not ended");
    scene.held.set_open(true);
    scene.ended(next).await;
    let row = scene.bed.store.batch(next, None).await.unwrap().unwrap();
    assert_eq!(row.verdicts.unverified, 1);
}

#[tokio::test]
async fn verdicts_are_shown_filtered_and_counted_and_a_broken_one_reads_as_none() {
    let held = Held::default();
    held.set_open(true);
    let scene = Scene::new(Duration::ZERO, held, |_| {}).await;
    let batch = scene.submit(SIX).await;
    scene.ended(batch).await;
    let broken = "UPDATE holdfast.outcomes SET verdict = '{\"leaves\": 3}' WHERE position = 4";
    scene.bed.run(broken, &[]).await;
    let none =
        "UPDATE holdfast.outcomes SET verdict = NULL, verdict_class = NULL WHERE position = 5";
    scene.bed.run(none, &[]).await;

    let store = &scene.bed.store;
    let all = store.items(batch, None, Position::new(0), 10).await.unwrap();
    let shown: Vec<bool> = all.iter().map(|item| item.acceptance_verdict == found()).collect();
    assert_eq!(shown, [true, true, true, true, false, false]);
    for (class, status, expected) in [
        (VerdictClass::Unverified, None, vec![0, 1, 2, 3, 4]),
        (VerdictClass::Unverified, Some(ItemStatus::Succeeded), vec![0, 1, 2, 3, 4]),
        (VerdictClass::Unverified, Some(ItemStatus::Failed), vec![]),
        (VerdictClass::Holds, None, vec![]),
        (VerdictClass::None, None, vec![5]),
        (VerdictClass::None, Some(ItemStatus::Succeeded), vec![5]),
        (VerdictClass::None, Some(ItemStatus::Queued), vec![]),
    ] {
        let from = Position::new(0);
        let items = store.items_with_verdict(batch, class, status, from, 10).await.unwrap();
        let listed: Vec<i32> = items.iter().map(|item| item.position.get()).collect();
        assert_eq!(listed, expected, "{class} {status:?}");
    }
}

/// Set in a process that is such a worker: the folder of its settings, and its database.
const FOLDER: &str = "HOLDFAST_TEST_FOLDER";
const DATABASE: &str = "HOLDFAST_TEST_DATABASE";

/// Checks that wait until there is a file `open`, and leave a file when they begin.
struct WaitsForFile(PathBuf);

impl Checker for WaitsForFile {
    fn check(&self, request: &CheckRequest) -> Option<Verdict> {
        fs::write(self.0.join(format!("checking-{}", request.item.position())), "").unwrap();
        while !self.0.join("open").exists() {
            std::thread::sleep(Duration::from_millis(10));
        }
        found()
    }
}

struct WaitForFile(PathBuf);

impl Checkers for WaitForFile {
    fn checker(&self, _: &Arc<Gate>) -> Arc<dyn Checker> {
        Arc::new(WaitsForFile(self.0.clone()))
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "a process of its own that other tests start"]
async fn a_worker_whose_checks_wait_for_a_file() {
    let (Ok(folder), Ok(url)) = (std::env::var(FOLDER), std::env::var(DATABASE)) else { return };
    let folder = Path::new(&folder);
    let sources = Sources::none()
        .with_file(folder.join("holdfast.toml"), "--config")
        .with_flag("--database-url", "database.url", url)
        .with_flag("--check-slots", "worker.check_slots", 1);
    let settings = Arc::new(Settings::load(&sources).unwrap());
    let clock: Arc<dyn Clock> = Arc::new(SystemClock);
    let spawner = Arc::new(LocalSpawner::new().unwrap());
    let executors = CommandExecutors::new(Arc::clone(&settings), spawner, Arc::clone(&clock));
    let queue: QueueName = QUEUE.parse().unwrap();
    let limits = HealthLimits::for_lease(settings.lease.ttl);
    let metrics = Metrics::new([queue.clone()], &BuildInfo::current(1, 1));
    let worker = Worker::new(WorkerParts {
        database: Database::new(database_options(&settings, "held").unwrap()).unwrap(),
        settings,
        clock: Arc::clone(&clock),
        metrics: Arc::new(metrics),
        health: Arc::new(HealthState::new(clock, limits)),
        executors: Arc::new(executors.unwrap()),
        checkers: Arc::new(WaitForFile(folder.to_owned())),
        workspaces: Arc::new(LocalWorkspaces::new(
            folder.join("workspaces"),
            "/mnt/user-data".to_owned(),
        )),
        queues: vec![queue],
        id: WorkerId::generate(),
        trust_watch: None,
    });
    let (_stop, stopped) = tokio::sync::watch::channel(StopRequest::Run);
    worker.run(stopped).await.unwrap();
}

pub(super) fn judged(items: usize, body: &str) -> Submission {
    let item =
        |n| json!({"key": format!("k{n}"), "input": n, "acceptance_criteria": ["well written"]});
    Submission::of((0..items).map(item), body)
}

/// A worker that may judge expiries.
async fn heir(fleet: &Fleet) -> crate::support::worker_process::WorkerProcess {
    let heir = fleet.start();
    heir.ready().await;
    tokio::time::sleep(SHORT + SHORT / 3).await;
    heir
}

/// Every item succeeded in this attempt, with the verdict that a real checker gives.
async fn succeeded_in(fleet: &Fleet, batch: BatchId, attempt: i32) {
    let row = fleet.ended(batch).await;
    assert_eq!(row.counts.succeeded, row.item_count);
    assert_eq!(row.verdicts.unverified, row.item_count);
    for item in fleet.database.items(batch, None, Position::new(0), 100).await.unwrap() {
        assert_eq!((item.status, item.attempt), (ItemStatus::Succeeded, Some(attempt)));
        let verdict = item.acceptance_verdict.unwrap();
        assert_eq!(verdict.class(), VerdictClass::Unverified);
        assert_eq!(verdict.leaves()[0].criterion(), "well written");
    }
    assert_invariants(&fleet.sql, batch).await;
}

#[tokio::test]
async fn after_a_crash_while_running_the_item_runs_again() {
    let fleet = Fleet::new(SHORT_LEASE).await;
    let mut holder = fleet.start();
    holder.ready().await;
    let batch = fleet.submit(judged(1, "[ $HOLDFAST_ATTEMPT -gt 1 ] || exec sleep 300")).await;
    fleet.noted(batch, "start", 1).await;
    let _heir = heir(&fleet).await;

    holder.kill();

    succeeded_in(&fleet, batch, 2).await;
    assert_eq!((fleet.count(batch, "start"), fleet.count(batch, "end")), (2, 1));
    let attempts = fleet.attempts(batch).await;
    assert_eq!(attempts.len(), 1);
    assert_eq!(attempts[0].brief(), (1, "expired", true));
}

#[tokio::test]
async fn after_a_crash_while_staged_or_checking_only_the_check_runs_again() {
    let fleet = Fleet::new(SHORT_LEASE).await;
    let mut holder = fleet.start_held("workers::checks::a_worker_whose_checks_wait_for_a_file");
    // One check slot: one item is checked, the other waits with its stored result.
    let batch = fleet.submit(judged(2, "true")).await;
    until("both are staged", LONG, async || fleet.row(batch).await.counts.checking == 2).await;
    until("one is checked", LONG, async || {
        fleet.is_there("checking-0") || fleet.is_there("checking-1")
    })
    .await;
    assert!(!(fleet.is_there("checking-0") && fleet.is_there("checking-1")), "one at a time");
    let _heir = heir(&fleet).await;

    holder.kill();

    succeeded_in(&fleet, batch, 1).await;
    fleet.assert_each_ran_once(batch).await;
    assert_eq!(fleet.attempts(batch).await.len(), 0);
    let history = "SELECT count(*) FROM holdfast.outcomes
                    WHERE batch_id = $1 AND lease_id <> staged_lease_id";
    assert_eq!(fleet.value::<i64>(batch, history).await, 2, "published by another lease");
}

#[tokio::test]
async fn after_a_crash_after_the_verdict_nothing_happens_again() {
    let fleet = Fleet::new(SHORT_LEASE).await;
    let mut holder = fleet.start();
    holder.ready().await;
    let batch = fleet.submit(judged(1, "true")).await;
    succeeded_in(&fleet, batch, 1).await;

    holder.kill();
    let _heir = heir(&fleet).await;

    succeeded_in(&fleet, batch, 1).await;
    fleet.assert_each_ran_once(batch).await;
    assert_eq!(fleet.attempts(batch).await.len(), 0);
}
