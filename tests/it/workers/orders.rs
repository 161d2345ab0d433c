//! What is asked of running workers: by signals, by an operator's command, by a service manager that
//! watches them.

use std::fs;
use std::os::unix::net::UnixDatagram;
use std::time::Duration;

use holdfast::model::{Asked, WorkerId};
use holdfast::store::{Event, LeaseFilter, Revocation, RevokeAnswer};
use rustix::process::Signal;
use serde_json::Value;

use crate::support::fleet::{Fleet, LONG, SHORT_LEASE, Submission, until};
use crate::support::invariants::assert_invariants;
use crate::support::proxy::Proxy;
use crate::support::worker_process::WorkerProcess;

/// What a service manager hears.
struct Ear {
    socket: UnixDatagram,
    path: String,
}

impl Ear {
    fn new(fleet: &Fleet) -> Self {
        let path = fleet.file("notify").to_str().unwrap().to_owned();
        let socket = UnixDatagram::bind(&path).unwrap();
        socket.set_nonblocking(true).unwrap();
        Self { socket, path }
    }

    /// What was said since the last call.
    fn hear(&self) -> Vec<String> {
        let mut text = [0; 4096];
        let mut lines = Vec::new();
        while let Ok(size) = self.socket.recv(&mut text) {
            let text = String::from_utf8(text[..size].to_vec()).unwrap();
            lines.extend(text.lines().map(str::to_owned));
        }
        lines
    }

    /// Waits until this is said; everything said until then.
    async fn hears(&self, line: &str) -> Vec<String> {
        let mut heard = Vec::new();
        until(line, LONG, async || {
            heard.extend(self.hear());
            heard.iter().any(|said| said == line)
        })
        .await;
        heard
    }
}

async fn logged(worker: &WorkerProcess, message: &str, times: usize) -> Vec<Value> {
    let lines = || {
        let of_message = |line: &Value| line["message"] == message;
        worker.log().into_iter().filter(of_message).collect::<Vec<_>>()
    };
    until(message, LONG, async || lines().len() >= times).await;
    lines()
}

async fn in_state(fleet: &Fleet, id: WorkerId, state: &str) {
    let select = "SELECT state FROM holdfast.workers WHERE id = $1";
    until(state, LONG, async || {
        let row = fleet.sql.query_one(select, &[&id.uuid()]).await.unwrap();
        row.get::<_, &str>(0) == state
    })
    .await;
}

#[tokio::test]
async fn a_service_manager_hears_of_start_life_reload_and_end_and_of_no_life_where_there_is_none() {
    let fleet = Fleet::new(SHORT_LEASE).await;
    let ear = Ear::new(&fleet);
    let variables = [("NOTIFY_SOCKET", ear.path.as_str()), ("WATCHDOG_USEC", "1500000")];
    let mut worker = fleet.start_at(fleet.url(), &[], &variables);

    let said = ear.hears("READY=1").await;
    assert!(said.iter().any(|line| line.starts_with("STATUS=running: 0 items")), "{said:?}");
    ear.hear();
    ear.hears("WATCHDOG=1").await;

    // A reload: RELOADING, then READY once it is done.
    worker.signal(Signal::HUP);
    let said = ear.hears("READY=1").await;
    assert!(said.contains(&"RELOADING=1".to_owned()), "{said:?}");
    assert!(said.iter().any(|line| line.starts_with("MONOTONIC_USEC=")), "{said:?}");

    // A worker that hangs gives no sign of life, whatever its guard does.
    worker.signal_worker(Signal::STOP).await;
    until("silence", LONG, async || {
        ear.hear();
        tokio::time::sleep(Duration::from_secs(2)).await;
        ear.hear().is_empty()
    })
    .await;
    worker.signal_worker(Signal::CONT).await;
    ear.hears("WATCHDOG=1").await;

    // A worker that is started again speaks for itself.
    worker.signal_worker(Signal::KILL).await;
    logged(&worker, "guarding a worker", 2).await;
    worker.ready().await;
    ear.hear();
    ear.hears("WATCHDOG=1").await;

    worker.signal(Signal::TERM);
    ear.hears("STOPPING=1").await;
    assert_eq!(worker.exit_status().await, 0);
}

#[tokio::test]
async fn signs_of_life_do_not_end_with_the_database() {
    let fleet = Fleet::new(SHORT_LEASE).await;
    let ear = Ear::new(&fleet);
    let proxy = Proxy::before(fleet.url()).await;
    let variables = [("NOTIFY_SOCKET", ear.path.as_str())];
    let mut worker = fleet.start_at(proxy.url(), &[], &variables);
    ear.hears("READY=1").await;
    worker.ready().await;

    proxy.go_away();
    logged(&worker, "a heartbeat was not answered: claiming nothing until one is", 1).await;
    for _ in 0..3 {
        ear.hear();
        ear.hears("WATCHDOG=1").await;
    }
    proxy.come_back();
    worker.ready().await;

    worker.signal(Signal::TERM);
    ear.hears("STOPPING=1").await;
    assert_eq!(worker.exit_status().await, 0);
}

#[tokio::test]
async fn signals_reload_dump_and_quiet_a_worker() {
    let fleet = Fleet::new("").await;
    let worker = fleet.start();
    worker.ready().await;
    let id = fleet.id_of(&worker).await;
    let running = fleet
        .submit(Submission::new(1, "mark begun; while [ ! -e \"$MARKS.go\" ]; do sleep 0.05; done"))
        .await;
    fleet.noted(running, "begun", 1).await;

    worker.signal(Signal::USR1);
    let dump = logged(&worker, "how this worker stands", 1).await;
    let dump: Value = serde_json::from_str(dump[0]["state"].as_str().unwrap()).unwrap();
    assert_eq!(dump["state"], "running");
    let lease = &dump["leases"][0];
    assert_eq!(lease["batch"], running.to_string());
    assert!(lease["trusted_for_s"].as_f64().unwrap() > 10.0, "{dump}");
    assert_eq!(
        (&lease["items"][0]["position"], &lease["items"][0]["doing"]),
        (&0.into(), &"executing".into())
    );

    worker.signal(Signal::USR2);
    in_state(&fleet, id, "quiet").await;
    let next = fleet.submit(Submission::new(1, "true")).await;
    fs::write(fleet.file("marks.go"), "").unwrap();
    assert_eq!(fleet.ended(running).await.counts.succeeded, 1, "what it held goes on");
    assert_eq!(fleet.count(next, "start"), 0);
    worker.signal(Signal::USR2);
    assert_eq!(fleet.ended(next).await.counts.succeeded, 1);

    let file = fleet.file("holdfast.toml");
    let before = fs::read_to_string(&file).unwrap();
    fs::write(&file, format!("{before}\n[claim]\ncandidates = 3\n")).unwrap();
    worker.signal(Signal::HUP);
    logged(&worker, "reloaded the configuration", 1).await;
    let later = logged(&worker, "settings that change with the next start of this worker", 1).await;
    assert!(later[0]["keys"].to_string().contains("claim.candidates"), "{later:?}");

    fs::write(&file, format!("{before}\n[claim]\ncandidates = 'many'\n")).unwrap();
    worker.signal(Signal::HUP);
    let refused =
        logged(&worker, "the configuration was not reloaded: all stays as it was", 1).await;
    assert!(refused[0]["error"].to_string().contains("claim.candidates"), "{refused:?}");
    let last = fleet.submit(Submission::new(1, "true")).await;
    assert_eq!(fleet.ended(last).await.counts.succeeded, 1, "it works on");
}

#[tokio::test]
async fn an_operator_quiets_a_worker_lets_it_go_on_and_drains_it() {
    let fleet = Fleet::new("").await;
    let mut worker = fleet.start();
    worker.ready().await;
    let id = fleet.id_of(&worker).await;
    let ask = async |asked: Option<Asked>| {
        let done = fleet.database.ask_workers(&[id], asked, "tester", Some("why")).await.unwrap();
        fleet.database.notify(&Event::Asked(id)).await.unwrap();
        done
    };

    assert_eq!(ask(Some(Asked::Quiet)).await, [id]);
    in_state(&fleet, id, "quiet").await;
    let batch = fleet.submit(Submission::new(1, "true")).await;
    assert_eq!(ask(None).await, [id]);
    assert_eq!(fleet.ended(batch).await.counts.succeeded, 1);

    assert_eq!(ask(Some(Asked::Drain)).await, [id]);
    assert_eq!(worker.exit_status().await, 0);
    assert_eq!(ask(Some(Asked::Quiet)).await, [], "it has ended");
    let reason = "SELECT exit_reason FROM holdfast.workers WHERE id = $1";
    let row = fleet.sql.query_one(reason, &[&id.uuid()]).await.unwrap();
    assert_eq!(row.get::<_, &str>(0), "drained");
}

/// The first run notes that it lives until it is killed; the second one ends at once.
const LIVES: &str = r#"
    if mkdir "$MARKS.$HOLDFAST_BATCH_ID" 2>/dev/null; then
        while :; do mark live; sleep 0.05; done
    fi"#;

#[tokio::test]
async fn what_an_operator_takes_from_a_living_worker_runs_again_only_after_it_ended_there() {
    let fleet = Fleet::new(SHORT_LEASE).await;
    let worker = fleet.start();
    worker.ready().await;
    let batch = fleet.submit(Submission::new(1, LIVES)).await;
    fleet.noted(batch, "live", 3).await;
    let leases = fleet.database.leases(&LeaseFilter::default(), 10).await.unwrap();
    assert_eq!(leases.len(), 1);

    let how = Revocation::AtExpiry;
    let answers = fleet.database.revoke(&leases, how, "tester", "why").await.unwrap();

    assert!(matches!(answers[0], RevokeAnswer::Revoked { .. }), "{answers:?}");
    assert_eq!(fleet.ended(batch).await.counts.succeeded, 1);
    logged(&worker, "a lease is gone: ending its executions", 1).await;
    let marks = fleet.marks();
    let last = marks.iter().rfind(|mark| mark.what == "live").unwrap();
    let again = marks.iter().rfind(|mark| mark.what == "start").unwrap();
    assert!(again.token > last.token && again.at >= last.at, "{last:?} beside {again:?}");
    let attempts = fleet.attempts(batch).await;
    assert_eq!(attempts.len(), 1, "{attempts:?}");
    assert_eq!(attempts[0].brief(), (1, "interrupted", false));
    assert_invariants(&fleet.sql, batch).await;
}
