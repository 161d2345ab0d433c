//! What workers count of what really happens.

use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;

use crate::support::fleet::{Fleet, LONG, SHORT, SHORT_LEASE, Submission, until};
use crate::support::prometheus::{self, find, value};
use crate::support::proxy::{Proxy, Weather};
use crate::support::worker_process::WorkerProcess;

/// The metrics of a worker; nothing while it does not answer.
async fn metrics(worker: &WorkerProcess) -> String {
    worker.get("/metrics").await.map(|(_, text)| text).unwrap_or_default()
}

/// Waits until series are above zero, all at once.
async fn counted(worker: &WorkerProcess, series: &[&str]) {
    let above = |text: &str, series: &str| find(text, &format!("holdfast_{series}")) > Some(0.0);
    until(&series.join(", "), LONG, async || {
        let text = metrics(worker).await;
        series.iter().all(|series| above(&text, series))
    })
    .await;
}

/// A series of the one queue.
fn of(text: &str, name: &str, labels: &str) -> f64 {
    value(text, &format!("holdfast_{name}{{{labels}}}"))
}

#[tokio::test]
async fn a_worker_counts_its_claims_renewals_executions_and_checks() {
    let fleet = Fleet::new(SHORT_LEASE).await;
    let worker = fleet.start();
    worker.ready().await;
    let checked = (0..4).map(
        |n| json!({"key": format!("k{n}"), "input": n, "acceptance_criteria": ["is well written"]}),
    );
    // Succeeds, fails for good, fails until its attempts are spent, takes too long.
    let body = "case $input in 0) true;; 1) exit 7;; 2) exit 3;; *) sleep 30;; esac";
    let some = Submission {
        permanent: vec![7],
        max_attempts: 2,
        timeout: SHORT * 2 / 3,
        ..Submission::of(checked, body)
    };
    let some = fleet.submit(some).await;
    // Long enough for a heartbeat or two.
    let long = fleet.submit(Submission::new(1, "sleep 3")).await;
    fleet.ended(some).await;
    fleet.ended(long).await;

    counted(
        &worker,
        &[
            r#"lease_renewals_total{outcome="ok",queue="work"}"#,
            r#"lease_renewal_margin_ratio_count{queue="work"}"#,
            "lease_renewal_duration_seconds_count",
            "lease_renewal_lateness_seconds_count",
            r#"reaper_runs_total{outcome="ok"}"#,
            "reaper_last_success_timestamp_seconds",
            "runtime_lag_seconds_count",
            "notify_listener_up",
            r#"wakeups_total{source="local"}"#,
            r#"wakeups_total{source="poll"}"#,
            r#"wakeups_total{source="notify"}"#,
            r#"db_pool_connections{pool="main",state="idle"}"#,
            r#"db_pool_connections{pool="heartbeat",state="idle"}"#,
        ],
    )
    .await;
    let text = metrics(&worker).await;
    for (name, labels, expected) in [
        // Five items, two of which were tried again.
        ("leases_granted_total", r#"queue="work""#, 7.0),
        ("leases_released_total", r#"queue="work",reason="settled""#, 7.0),
        ("leases_held", r#"queue="work""#, 0.0),
        ("item_wait_seconds_count", r#"queue="work""#, 7.0),
        ("executions_started_total", r#"queue="work""#, 7.0),
        ("executions_running", r#"queue="work""#, 0.0),
        ("executions_total", r#"outcome="succeeded",queue="work""#, 2.0),
        ("executions_total", r#"outcome="failed",queue="work""#, 3.0),
        ("executions_total", r#"outcome="timed_out",queue="work""#, 2.0),
        ("execution_duration_seconds_count", r#"queue="work""#, 7.0),
        ("item_retries_total", r#"queue="work",reason="error""#, 1.0),
        ("item_retries_total", r#"queue="work",reason="timeout""#, 1.0),
        ("items_finished_total", r#"outcome="succeeded",queue="work""#, 2.0),
        ("items_finished_total", r#"outcome="failed",queue="work""#, 3.0),
        ("items_poisoned_total", r#"queue="work",reason="max_attempts""#, 2.0),
        ("checks_total", r#"queue="work",verdict="unverified""#, 1.0),
        ("worker_slots", r#"kind="execution",state="busy""#, 0.0),
        ("worker_slots", r#"kind="execution",state="idle""#, 16.0),
        ("worker_slots", r#"kind="check",state="idle""#, 4.0),
        ("checks_pending", r#"state="waiting""#, 0.0),
        ("db_pool_connections_limit", r#"pool="heartbeat""#, 1.0),
        ("worker_state", r#"state="running""#, 1.0),
    ] {
        assert_eq!(of(&text, name, labels), expected, "{name}{{{labels}}}\n{text}");
    }
    for name in [
        r#"claims_total{outcome="granted",queue="work"}"#,
        r#"claim_duration_seconds_count{outcome="granted"}"#,
        "parent_lock_wait_seconds_count",
        "finish_group_items_count",
        "finish_duration_seconds_count",
        "check_duration_seconds_count",
        "check_wait_seconds_count",
        "config_last_reload_successful",
        r#"schema_version_supported{bound="min"}"#,
    ] {
        assert!(value(&text, &format!("holdfast_{name}")) > 0.0, "{name}");
    }
    let offset = value(&text, "holdfast_db_clock_offset_seconds");
    assert!(offset.abs() < 5.0, "one machine has one clock: {offset}");
    if let Some(promtool) = prometheus::program("promtool") {
        assert_eq!(prometheus::check_metrics(&promtool, &text), "");
    }
}

#[tokio::test]
async fn a_worker_cut_off_counts_its_self_fence_and_the_heir_what_it_recovered() {
    let fleet = Fleet::new(SHORT_LEASE).await;
    let proxy = Proxy::before(fleet.url()).await;
    let cut_off = fleet.start_at(proxy.url(), &[], &[]);
    cut_off.ready().await;
    let body = "[ $HOLDFAST_ATTEMPT -gt 1 ] || sleep 300";
    let batch = fleet.submit(Submission::new(2, body)).await;
    fleet.noted(batch, "start", 2).await;
    let heir = fleet.start();
    heir.ready().await;

    proxy.set(Weather::BlackHole);
    fleet.ended(batch).await;
    counted(
        &cut_off,
        &[
            r#"self_fences_total{reason="renewal_deadline"}"#,
            r#"lease_renewals_total{outcome="error",queue="work"}"#,
            r#"executions_total{outcome="lost",queue="work"}"#,
            r#"db_errors_total{class="statement_timeout"}"#,
        ],
    )
    .await;
    assert_eq!(value(&metrics(&cut_off).await, "holdfast_db_up"), 0.0);
    counted(
        &heir,
        &[
            r#"leases_expired_total{queue="work"}"#,
            r#"leases_recovered_total{disposition="requeued",queue="work"}"#,
            r#"item_retries_total{queue="work",reason="lease_expired"}"#,
            "lease_recovery_delay_seconds_count",
        ],
    )
    .await;

    // What it hands in when it is back is refused.
    proxy.set(Weather::Fair);
    proxy.reset_all();
    counted(
        &cut_off,
        &[
            r#"leases_lost_total{queue="work",reason="db_unreachable"}"#,
            r#"fence_rejections_total{op="release",reason="token"}"#,
        ],
    )
    .await;
    // Each in a hand-in of its own.
    until("both are refused", LONG, async || {
        let text = metrics(&cut_off).await;
        let lost = r#"queue="work",reason="db_unreachable""#;
        let held = of(&text, "leases_held", r#"queue="work""#);
        (of(&text, "leases_lost_total", lost), held) == (2.0, 0.0)
    })
    .await;
}

#[tokio::test]
async fn what_a_guard_released_is_counted_by_the_worker_it_starts_again() {
    let settings = "[retry]\nmax_crashes = 2\nbackoff_base = '10ms'\n";
    let fleet = Fleet::new(settings).await;
    let worker = fleet.start();
    worker.ready().await;
    let batch = fleet.submit(Submission::new(2, "sleep 300")).await;
    fleet.noted(batch, "start", 2).await;
    let kill_worker = async |starts| {
        let pid = worker.worker_pid().await;
        kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
        until("another one", LONG, async || worker.worker_pid().await != pid).await;
        worker.ready().await;
        if starts > 0 {
            fleet.noted(batch, "start", starts).await;
        }
    };

    kill_worker(4).await;
    counted(
        &worker,
        &[
            r#"leases_recovered_total{disposition="requeued",queue="work"}"#,
            r#"item_retries_total{queue="work",reason="worker_died"}"#,
        ],
    )
    .await;
    let text = metrics(&worker).await;
    let again = r#"disposition="requeued",queue="work""#;
    assert_eq!(of(&text, "leases_recovered_total", again), 2.0);
    assert_eq!(of(&text, "leases_expired_total", r#"queue="work""#), 0.0, "none had to expire");

    // Twice with each: poison.
    kill_worker(0).await;
    fleet.ended(batch).await;
    counted(&worker, &[r#"items_poisoned_total{queue="work",reason="max_crashes"}"#]).await;
    let text = metrics(&worker).await;
    let poison = r#"queue="work",reason="max_crashes""#;
    assert_eq!(of(&text, "items_poisoned_total", poison), 2.0);
    let failed = r#"disposition="failed",queue="work""#;
    assert_eq!(of(&text, "leases_recovered_total", failed), 2.0);
}
