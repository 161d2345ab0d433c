//! How soon the items of a killed worker run again, and what its keeper costs.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use futures::stream::{FuturesUnordered, StreamExt};
use holdfast::clock::{Clock, SystemClock};
use holdfast::execute::command::{CommandExecutor, CommandSpec, Otherwise};
use holdfast::execute::keeper::{self, Keeper};
use holdfast::execute::spawn::LocalSpawner;
use holdfast::execute::spawner::Spawner;
use holdfast::execute::{ExecutionEnd, Executor, Job};
use holdfast::model::{Attempt, BatchId, FencingToken, ItemRef, LeaseId, Position, Reporter};
use rustix::process::{Pid, Signal, kill_process};
use time::OffsetDateTime;
use tokio_util::sync::CancellationToken;

use crate::support::fleet::{Fleet, LONG, Submission, now, until};
use crate::support::invariants::assert_invariants;

/// Kills a worker with two items 50 times; how long it took each time until both began again.
async fn recoveries(settings: &str, with_its_guard: bool) -> Vec<Duration> {
    let fleet = Fleet::new(&format!("{settings}\n[retry]\nmax_crashes = 250\n")).await;
    let start = || fleet.start_with(&["--slots", "2"]);
    let mut workers = [start(), start()];
    let mut times = Vec::new();
    for _ in 0..50 {
        for worker in &workers {
            worker.ready().await;
        }
        // Long enough for the one that is left to judge expiries (F4).
        let pause = if with_its_guard { Duration::from_secs(6) } else { Duration::ZERO };
        tokio::time::sleep(pause).await;
        let body = "[ $HOLDFAST_ATTEMPT -gt 1 ] || exec sleep 300";
        let batch = fleet.submit(Submission::new(2, body)).await;
        fleet.noted(batch, "start", 2).await;
        let holder = "SELECT worker_id FROM holdfast.leases WHERE batch_id = $1 LIMIT 1";
        let holder: uuid::Uuid = fleet.value(batch, holder).await;
        let first = workers[0].id().await.uuid() == holder;
        let victim = &mut workers[usize::from(!first)];
        let held: i64 = fleet
            .value(
                batch,
                "SELECT count(DISTINCT worker_id) FROM holdfast.leases WHERE batch_id = $1",
            )
            .await;

        let killed = now();
        if with_its_guard {
            victim.kill();
            *victim = start();
        } else {
            let pid = Pid::from_raw(victim.worker_pid().await).unwrap();
            kill_process(pid, Signal::KILL).unwrap();
        }
        let wanted = if held == 1 { 4 } else { 3 };
        fleet.noted(batch, "start", wanted).await;
        let last = fleet.marks().into_iter().rfind(|m| m.batch == batch && m.what == "start");
        times.push(last.unwrap().at.saturating_sub(killed));
        assert_invariants(&fleet.sql, batch).await;
        if held == 1 {
            fleet.ended(batch).await;
        } else {
            fleet.control(batch, holdfast::store::ControlVerb::Cancel).await;
        }
        until("the batch is gone", LONG, async || Fleet::processes_of(batch).is_empty()).await;
    }
    times.sort_unstable();
    times
}

fn report(what: &str, times: &[Duration]) {
    let at = |share: usize| times[(times.len() * share / 100).min(times.len() - 1)];
    eprintln!(
        "{what}: {} kills, p50 {:?}, p99 {:?}, least {:?}",
        times.len(),
        at(50),
        at(99),
        times[0]
    );
}

#[tokio::test]
#[ignore = "takes minutes: make long"]
async fn long_items_of_a_crashed_worker_run_again_at_once() {
    let often = "[worker]\nrestarts = 1000000\nrestart_reset = '10ms'\n";
    let times = recoveries(often, false).await;

    report("kill -9 of a worker to the start of its items elsewhere, lease 60 s", &times);
    assert!(times[times.len() / 2] < Duration::from_secs(2), "{times:?}");
}

#[tokio::test]
#[ignore = "takes minutes: make long"]
async fn long_items_of_a_lost_machine_run_again_after_their_lease() {
    let lease = "[lease]\nttl = '5s'\nkill_grace = '300ms'\nslack = '300ms'\n";
    let times = recoveries(lease, true).await;

    report("kill -9 of guard and worker to the start of their items elsewhere, lease 5 s", &times);
    assert!(times[times.len() / 2] < Duration::from_secs(7), "{times:?}");
}

fn job(lease: LeaseId) -> Job {
    Job {
        item: ItemRef::new(BatchId::generate(), Position::new(0)),
        key: "key".to_owned(),
        queue: "queue".parse().unwrap(),
        attempt: Attempt::new(1),
        retries: 0,
        lease,
        token: FencingToken::new(1),
        input_json: "1".to_owned(),
        criteria: Vec::new(),
        deadline: OffsetDateTime::UNIX_EPOCH,
        traceparent: None,
        reporter: Reporter::default(),
    }
}

/// Executions of `true` per second, 16 at once.
async fn rate(spawner: Arc<dyn Spawner>, lease: LeaseId, executions: usize) -> f64 {
    let scratch = tempfile::tempdir().unwrap();
    let spec = CommandSpec {
        argv: vec!["true".to_owned()],
        timeout: LONG,
        env: BTreeMap::new(),
        env_pass: Vec::new(),
        cwd: Some("/".into()),
        workspace: false,
        success: vec![0],
        retry: Vec::new(),
        permanent: Vec::new(),
        otherwise: Otherwise::Permanent,
        result_bytes: 1024,
        log_bytes: 4096,
        error_chars: 100,
        kill_grace: LONG,
    };
    let root = scratch.path().to_owned();
    let executor =
        CommandExecutor::new(spec, None, [], root, spawner, Arc::new(SystemClock)).unwrap();
    let (job, stop) = (job(lease), CancellationToken::new());
    let began = SystemClock.now();
    let mut running = FuturesUnordered::new();
    for _ in 0..executions {
        if running.len() == 16 {
            assert_eq!(running.next().await, Some(ExecutionEnd::Succeeded));
        }
        running.push(async { executor.execute(&job, &stop).await.end });
    }
    while let Some(end) = running.next().await {
        assert_eq!(end, ExecutionEnd::Succeeded);
    }
    let took = SystemClock.now().since(began);
    f64::from(u32::try_from(executions).unwrap()) / took.as_secs_f64()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "takes a minute, and wants a machine of its own: make long"]
async fn long_the_keeper_costs_little() {
    let (mut process, link) = keeper::start(Path::new(env!("CARGO_BIN_EXE_holdfast"))).unwrap();
    let keeper = Arc::new(Keeper::connect(link, LONG).unwrap());
    let lease = LeaseId::generate();
    keeper.trust(lease, Some(SystemClock.now() + LONG * 60));
    let local: Arc<LocalSpawner> = Arc::new(LocalSpawner::new().unwrap());
    let mut ratios = Vec::new();
    for round in 0..7 {
        let without = rate(Arc::clone(&local) as _, lease, 2_000).await;
        let with = rate(Arc::clone(&keeper) as _, lease, 2_000).await;
        eprintln!("round {round}: {without:.0}/s without a keeper, {with:.0}/s with one");
        ratios.push(with / without);
    }
    process.kill().unwrap();
    process.wait().unwrap();
    ratios.sort_by(f64::total_cmp);
    eprintln!("`true`, 16 at once: {:.2} of the rate without a keeper (median)", ratios[3]);
    assert!(ratios[3] > 0.7, "{ratios:?}");
}
