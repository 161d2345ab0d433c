//! The guard: no execution outlives its lease, whatever dies or freezes, and what a crashed worker held
//! runs again at once.

use std::fs;
use std::process::{Command, Stdio};
use std::time::Duration;

use holdfast::execute::spawn::spawn_with_death_signal;
use holdfast::model::BatchId;
use rustix::process::{Pid, Signal, kill_process};

use crate::support::fleet::{Fleet, LONG, Mark, SHORT_LEASE, Submission, now, until};
use crate::support::invariants::assert_invariants;
use crate::support::worker_process::WorkerProcess;

/// The first attempt notes every few moments that parts of it live: itself, a child in its group, one in
/// a session of its own, and one that has also lost its parent. It ignores TERM. The second attempt ends
/// at once.
const SPREADING: &str = r#"
    live='while :; do read -r up _ </proc/uptime; echo "$0 $HOLDFAST_BATCH_ID $HOLDFAST_POSITION \
$HOLDFAST_ATTEMPT $HOLDFAST_TOKEN $up" >>"$MARKS"; sleep 0.05; done'
    if [ $HOLDFAST_ATTEMPT = 1 ]; then
        trap '' TERM
        sh -c "$live" child &
        setsid sh -c "$live" session &
        (setsid sh -c "$live" daemon &)
        exec sh -c "$live" leader
    fi"#;

const PARTS: [&str; 4] = ["leader", "child", "session", "daemon"];

/// Submits one spreading item, and waits until all its parts live.
async fn spread(fleet: &Fleet) -> BatchId {
    let batch = fleet.submit(Submission::new(1, SPREADING)).await;
    for part in PARTS {
        fleet.noted(batch, part, 1).await;
    }
    assert!(Fleet::processes_of(batch).len() >= PARTS.len());
    batch
}

fn last(marks: &[Mark], is: impl Fn(&Mark) -> bool) -> &Mark {
    marks.iter().rfind(|mark| is(mark)).unwrap()
}

/// No part of the first attempt lived when the second one began: the time between.
fn assert_no_overlap(fleet: &Fleet) -> Duration {
    let marks = fleet.marks();
    let alive = last(&marks, |mark| mark.attempt == 1);
    let again = marks.iter().find(|mark| mark.attempt == 2 && mark.what == "start").unwrap();
    assert!(alive.at <= again.at, "{alive:?} beside {again:?}");
    again.at.saturating_sub(alive.at)
}

/// Waits until another worker was started, and is ready.
async fn started_again(worker: &WorkerProcess, before: i32) {
    until("a worker is started again", LONG, async || worker.worker_pid().await != before).await;
    worker.ready().await;
}

fn kill(pid: i32) {
    kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
}

fn is_there(pid: i32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with('Z'))
}

/// What a busy machine may add to times that are promised for an idle one.
const MACHINE: Duration = Duration::from_secs(5);

#[tokio::test]
async fn a_killed_worker_leaves_nothing_and_its_items_run_again_at_once() {
    // With a lease of a minute.
    let fleet = Fleet::new("").await;
    let worker = fleet.start();
    worker.ready().await;
    let batch = spread(&fleet).await;
    let (id, pid) = (fleet.id_of(&worker).await, worker.worker_pid().await);

    let killed = now();
    kill(pid);
    fleet.noted(batch, "end", 1).await;

    let again = last(&fleet.marks(), |mark| mark.what == "start").at.saturating_sub(killed);
    assert_no_overlap(&fleet);
    eprintln!("a killed worker's item ran again {again:?} after the kill");
    assert!(again < Duration::from_secs(2) + MACHINE, "{again:?}");
    let left = Fleet::processes_of(batch);
    assert!(left.iter().all(|(_, attempt)| *attempt != 1), "{left:?}");
    assert!(fleet.ended(batch).await.counts.succeeded == 1);
    let attempts = fleet.attempts(batch).await;
    assert_eq!(attempts.len(), 1, "{attempts:?}");
    assert_eq!((attempts[0].brief(), attempts[0].worker), ((1, "expired", true), id));
    started_again(&worker, pid).await;
    assert_ne!(fleet.id_of(&worker).await, id, "a worker's identity is new at every start");
    assert_invariants(&fleet.sql, batch).await;
}

#[tokio::test]
async fn what_a_frozen_worker_runs_is_dead_before_its_lease_is_granted_again() {
    let fleet = Fleet::new(SHORT_LEASE).await;
    let frozen = fleet.start();
    frozen.ready().await;
    let batch = spread(&fleet).await;
    let mut heir = fleet.start();
    heir.ready().await;

    frozen.signal_worker(Signal::STOP).await;
    fleet.noted(batch, "end", 1).await;
    let gap = assert_no_overlap(&fleet);
    frozen.signal_worker(Signal::CONT).await;

    eprintln!("the last sign of life came {gap:?} before the next attempt");
    assert_eq!(fleet.ended(batch).await.counts.succeeded, 1);
    let outcomes = fleet.outcomes(batch).await;
    assert_eq!(outcomes[0].worker, fleet.id_of(&heir).await, "the straggler publishes nothing");
    // It goes on as if nothing had been.
    heir.kill();
    let next = fleet.submit(Submission::new(2, "true")).await;
    assert_eq!(fleet.ended(next).await.counts.succeeded, 2);
    assert_invariants(&fleet.sql, batch).await;
}

#[tokio::test]
async fn with_its_guard_a_worker_dies_and_everything_it_runs() {
    let fleet = Fleet::new("").await;
    let mut worker = fleet.start();
    worker.ready().await;
    let batch = spread(&fleet).await;
    let (pid, keeper) = (worker.worker_pid().await, worker.keeper_pid().await);
    // Not even a frozen one stays.
    worker.signal_worker(Signal::STOP).await;

    worker.kill();

    let took = until("everything is gone", LONG, async || {
        !is_there(pid) && !is_there(keeper) && Fleet::processes_of(batch).is_empty()
    })
    .await;
    eprintln!("everything was gone {took:?} after the guard");
    assert_eq!(fleet.row(batch).await.counts.executing, 1, "nobody proved it: the lease rules");
    assert_invariants(&fleet.sql, batch).await;
}

#[tokio::test]
async fn without_its_keeper_a_worker_is_replaced_and_its_items_run_again() {
    let fleet = Fleet::new("").await;
    let worker = fleet.start();
    worker.ready().await;
    let batch = spread(&fleet).await;
    let pid = worker.worker_pid().await;

    kill(worker.keeper_pid().await);
    fleet.noted(batch, "end", 1).await;

    assert_no_overlap(&fleet);
    assert!(!is_there(pid));
    assert_eq!(fleet.ended(batch).await.counts.succeeded, 1);
    assert_invariants(&fleet.sql, batch).await;
}

/// Kills the worker it runs under: the one child of the keeper's parent that is named so.
const LETHAL: &str = r#"
    guard=$(sed -n 's/^PPid:\t//p' /proc/$PPID/status)
    for pid in $(cat /proc/$guard/task/$guard/children); do
        read -r name </proc/$pid/comm
        [ "$name" != holdfast-worker ] || kill -KILL $pid
    done
    sleep 300"#;

#[tokio::test]
async fn an_item_that_kills_its_worker_fails_in_the_end_and_the_others_do_not() {
    let fleet = Fleet::new("[retry]\nbackoff_max = '1s'\n").await;
    // What happens to run beside it is charged as well, until each of them runs alone.
    let worker = fleet.start_with(&["--slots", "4"]);
    worker.ready().await;
    let body = format!("[ $input != 2 ] || {{ {LETHAL}; }}");
    let batch = Submission { max_attempts: 20, ..Submission::new(5, &body) };
    let batch = fleet.submit(batch).await;

    let row = fleet.ended(batch).await;

    assert_eq!((row.counts.failed, row.counts.succeeded), (1, 4));
    for outcome in fleet.outcomes(batch).await {
        let lethal = outcome.position == 2;
        assert_eq!(outcome.succeeded, !lethal, "{outcome:?}");
        assert_eq!(outcome.stop_reason, if lethal { "poison" } else { "completed" });
    }
    let starts = fleet.marks();
    let starts = starts.iter().filter(|mark| mark.what == "start" && mark.position == 2);
    assert_eq!(starts.count(), 3);
    let attempts = fleet.attempts(batch).await;
    let charged = attempts.iter().filter(|lost| lost.position == 2 && lost.charged);
    assert_eq!(charged.count(), 2);
    assert_invariants(&fleet.sql, batch).await;
}

#[tokio::test]
async fn a_worker_that_crashes_again_and_again_is_given_up() {
    let fleet = Fleet::new("[worker]\nrestarts = 1\n").await;
    let mut worker = fleet.start();
    worker.ready().await;
    let pid = worker.worker_pid().await;
    kill(pid);
    started_again(&worker, pid).await;

    kill(worker.worker_pid().await);

    assert_eq!(worker.exit_status().await, 70);
}

/// A fleet's command as process 1 of a namespace of its own; none where that is not allowed.
fn in_a_namespace(fleet: &Fleet) -> Option<(std::process::Child, i32)> {
    let probe = Command::new("unshare").args(["--pid", "--fork", "true"]).output();
    if !probe.is_ok_and(|probe| probe.status.success()) {
        return None;
    }
    let log = fs::File::create(fleet.file("namespace.log")).unwrap();
    let mut command = Command::new("unshare");
    command
        .args(["--pid", "--fork", "--kill-child", "--mount-proc", env!("CARGO_BIN_EXE_holdfast")])
        .args(["worker", "--health", "", "--log-format", "json", "--config"])
        .arg(fleet.file("holdfast.toml"))
        .env("HOLDFAST_DATABASE_URL", fleet.url())
        .env("TMPDIR", fleet.file(""))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log);
    let child = spawn_with_death_signal(&mut command, Signal::KILL).unwrap();
    let unshare = child.id();
    let mut guard = None;
    while guard.is_none() {
        let children = format!("/proc/{unshare}/task/{unshare}/children");
        guard = fs::read_to_string(children).unwrap().trim().parse().ok();
        std::thread::sleep(Duration::from_millis(10));
    }
    Some((child, guard.unwrap()))
}

#[tokio::test]
async fn as_process_1_a_guard_reaps_orphans_and_passes_the_end_on() {
    let fleet = Fleet::new("").await;
    let Some((mut child, guard)) = in_a_namespace(&fleet) else {
        eprintln!("SKIPPED: no process namespace can be made here (it takes root)");
        return;
    };
    let batch = fleet.submit(Submission::new(2, "(setsid sleep 0.1 &); sleep 0.2")).await;
    assert_eq!(fleet.ended(batch).await.counts.succeeded, 2);
    // Whoever enters the namespace leaves its orphans to process 1.
    let target = guard.to_string();
    let entered = Command::new("nsenter")
        .args(["--target", &target, "--pid", "sh", "-c", "sleep 3 & sleep 2 & exit 0"])
        .status()
        .unwrap();
    assert!(entered.success());

    let children = || {
        let list = fs::read_to_string(format!("/proc/{guard}/task/{guard}/children")).unwrap();
        list.split_whitespace().count()
    };
    assert!(children() > 2, "the orphans are its children");
    until("only the worker and the keeper are left", LONG, async || children() == 2).await;

    kill_process(Pid::from_raw(guard).unwrap(), Signal::TERM).unwrap();
    let mut status = None;
    until("it ends", LONG, async || {
        status = child.try_wait().unwrap();
        status.is_some()
    })
    .await;
    assert_eq!(status.unwrap().code(), Some(0), "drained");
}
