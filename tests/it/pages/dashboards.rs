//! Every expression of rules and dashboards, asked of a real Prometheus while real workers are busy and
//! things go wrong.

use std::collections::BTreeSet;
use std::time::Duration;

use rustix::process::Signal;
use serde_json::{Value, json};

use super::files::panels;
use super::world::World;
use crate::support::fleet::{Fleet, LONG, SHORT, SHORT_LEASE, Submission, now};
use crate::support::worker_process::WorkerProcess;

/// Panels that show nothing in this run, each with why.
const MAY_BE_EMPTY: [(&str, &str); 1] =
    [("Oldest result without its check", "a check here takes milliseconds")];

/// Kills the worker it runs under: the one child of the keeper's parent that is named so.
pub(super) const LETHAL: &str = r#"
    guard=$(sed -n 's/^PPid:\t//p' /proc/$PPID/status)
    for pid in $(cat /proc/$guard/task/$guard/children); do
        read -r name </proc/$pid/comm
        [ "$name" != holdfast-worker ] || kill -KILL $pid
    done
    sleep 300"#;

/// What Grafana would put in.
fn filled(expression: &str) -> String {
    let range = expression.replace("$__rate_interval", "1m").replace("$__range", "10m");
    let variables = ["$cluster", "$namespace", "$job", "$queue"];
    variables.iter().fold(range, |text, name| text.replace(name, ".*"))
}

/// Something that must have been seen to answer: where it stands, and its expression.
type Wanted = BTreeSet<(String, String)>;

async fn wanted(world: &World) -> Wanted {
    let mut wanted = Wanted::new();
    for (dashboard, panel) in panels() {
        let place = format!("{dashboard}: {}", panel["title"].as_str().unwrap());
        for target in panel["targets"].as_array().unwrap() {
            wanted.insert((place.clone(), filled(target["expr"].as_str().unwrap())));
        }
    }
    for rule in world.prometheus.rules().await {
        if rule["type"] == "recording" {
            let name = rule["name"].as_str().unwrap().to_owned();
            wanted.insert((format!("rule {name}"), name));
        }
    }
    for variable in ["namespace", "job"] {
        let expression = format!("group by ({variable}) (holdfast_build_info{{{variable}!=''}})");
        wanted.insert((format!("variable {variable}"), expression));
    }
    wanted
}

fn says_something(series: &[Value]) -> bool {
    series.iter().any(|series| series["value"][1].as_str().is_none_or(|value| value != "NaN"))
}

/// Takes out what answers by now; an error is one at any time.
async fn look(world: &World, missing: &mut Wanted) {
    for one in missing.clone() {
        let answer = world.prometheus.query(&one.1).await;
        if says_something(&answer.unwrap_or_else(|error| panic!("{}: {error}", one.0))) {
            missing.remove(&one);
        }
    }
}

async fn look_until(world: &World, missing: &mut Wanted, done: impl Fn(&Wanted) -> bool) {
    let began = now();
    while !done(missing) {
        assert!(now().saturating_sub(began) < LONG * 2, "still without an answer: {missing:#?}");
        look(world, missing).await;
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
}

fn checked(items: usize) -> Vec<Value> {
    let item = |n| json!({"key": format!("k{n}"), "input": n, "acceptance_criteria": ["file:report.md exists"]});
    (0..items).map(item).collect()
}

/// Work of every kind; the first batch lasts until the end.
async fn load(world: &World) {
    let fleet = &world.fleet;
    fleet.submit(Submission::new(3_000, "sleep 0.3")).await;
    let report = "echo x >\"$HOLDFAST_WORKSPACE/report.md\"";
    fleet.submit(Submission::of(checked(40), report)).await;
    fleet.submit(Submission::new(5, "[ $HOLDFAST_ATTEMPT -gt 1 ] || exit 75")).await;
    fleet.submit(Submission { permanent: vec![3], ..Submission::new(3, "exit 3") }).await;
    let late = Submission { timeout: Duration::from_millis(50), ..Submission::new(2, "sleep 9") };
    fleet.submit(late).await;
}

async fn freeze_beyond_its_lease(worker: &WorkerProcess) {
    worker.signal_worker(Signal::STOP).await;
    tokio::time::sleep(SHORT * 2).await;
    worker.signal_worker(Signal::CONT).await;
}

#[tokio::test]
async fn every_expression_answers_and_no_panel_is_empty() {
    let fleet = Fleet::new(&format!("{SHORT_LEASE}[retry]\nbackoff_max = '1s'\n")).await;
    let Some(world) = World::new(fleet).await else { return };
    let _steady = world.worker(0, &["--slots", "4"]).await;
    let shaky = world.worker(1, &["--slots", "4"]).await;
    let mut missing = wanted(&world).await;
    // Rules that fire, and those that do not: no expression is wrong.
    for rule in world.prometheus.rules().await {
        let expression = rule["query"].as_str().unwrap();
        world.prometheus.query(expression).await.unwrap();
        assert_eq!(rule["health"], "ok", "{rule}");
    }
    // Somebody's report.
    let report = "BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT txid_current()";
    world.fleet.sql.batch_execute(report).await.unwrap();

    load(&world).await;
    look_until(&world, &mut missing, |missing| missing.len() < 30).await;
    freeze_beyond_its_lease(&shaky).await;
    world.fleet.submit(Submission::new(1, LETHAL)).await;
    let pages: Vec<&str> = MAY_BE_EMPTY.iter().map(|(title, _)| *title).collect();
    let may_be_empty = |place: &str| pages.iter().any(|title| place.ends_with(title));
    look_until(&world, &mut missing, |missing| {
        missing.iter().all(|(place, _)| may_be_empty(place))
    })
    .await;

    for (title, why) in MAY_BE_EMPTY {
        assert!(panels().iter().any(|(_, panel)| panel["title"] == title), "{title}: {why}");
    }
}
