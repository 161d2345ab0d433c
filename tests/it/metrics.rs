//! Metrics as they are scraped.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use holdfast::model::{QueueName, WorkerState};
use holdfast::telemetry::labels::{
    ClaimOutcome, DbErrorClass, DbPool, ExecutionOutcome, FenceOp, FenceReason, ItemOutcome,
    LostReason, ReaperOutcome, RecoveryDisposition, RefundReason, ReleaseReason, RenewalOutcome,
    RetryReason, SelfFenceReason, SlotKind, WakeupSource,
};
use holdfast::telemetry::metrics::{MAX_QUEUES, PoolUse, RenewalTiming};
use holdfast::telemetry::{BuildInfo, Metrics};
use time::OffsetDateTime;

use crate::support::prometheus;

fn queue(name: &str) -> QueueName {
    name.parse().unwrap()
}

fn metrics() -> Metrics {
    let build = BuildInfo {
        version: "1.2.3".to_owned(),
        revision: "0123abc".to_owned(),
        schema_min: 1,
        schema_max: 2,
    };
    Metrics::new([queue("resize"), queue("checksum")], &build)
}

/// The exposition without the values of the process metrics, which differ at every scrape.
fn stable(exposition: &str) -> String {
    let lines = exposition.lines().filter(|line| !line.starts_with("process_"));
    lines.fold(String::new(), |text, line| text + line + "\n")
}

fn value(exposition: &str, series: &str) -> f64 {
    let line = exposition.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
    line.unwrap_or_else(|| panic!("{series} is missing")).parse().unwrap()
}

/// `HOLDFAST_BLESS=1` rewrites the file: look at the difference before committing it.
#[test]
fn the_exposition_is_the_golden_file() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/metrics.txt");
    let now = stable(&metrics().encode().unwrap());

    if std::env::var_os("HOLDFAST_BLESS").is_some() {
        std::fs::write(path, &now).unwrap();
    }

    let golden = std::fs::read_to_string(path).unwrap();
    let missing = |a: &str, b: &str| {
        let known: Vec<&str> = b.lines().collect();
        a.lines().filter(|line| !known.contains(line)).map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(missing(&golden, &now), Vec::<String>::new(), "no longer exported");
    assert_eq!(missing(&now, &golden), Vec::<String>::new(), "not in the golden file");
    assert_eq!(now, golden);
}

#[test]
fn every_metric_is_named_by_the_rules() {
    let exposition = metrics().encode().unwrap();
    let types: Vec<(&str, &str)> = exposition
        .lines()
        .filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' '))
        .collect();

    assert!(types.len() > 40, "{}", types.len());
    for (name, kind) in types {
        assert!(exposition.contains(&format!("# HELP {name} ")), "{name} has no help");
        assert!(name.starts_with("holdfast_") || name.starts_with("process_"), "{name}");
        assert_eq!(kind == "counter", name.ends_with("_total"), "{name} is a {kind}");
        let unit = ["_seconds", "_ratio", "_items"].iter().any(|unit| name.ends_with(unit));
        assert!(kind != "histogram" || unit, "{name} has no base unit");
        for odd in ["_ms", "_milliseconds", "_minutes", "_kb", "_percent"] {
            assert!(!name.contains(odd), "{name}");
        }
    }
}

#[test]
fn every_series_but_the_constants_begins_at_zero() {
    let exposition = stable(&metrics().encode().unwrap());

    for line in exposition.lines().filter(|line| !line.starts_with('#')) {
        let one = line.starts_with("holdfast_build_info{");
        assert!(line.ends_with(if one { " 1" } else { " 0" }), "{line}");
    }
}

#[test]
fn every_event_is_recorded_in_its_series() {
    let metrics = metrics();
    let q = queue("resize");
    let ms = Duration::from_millis;

    metrics.leases_granted(&q, 5);
    metrics.lease_lost(&q, LostReason::Superseded);
    metrics.lease_released(&q, ReleaseReason::Settled);
    metrics.lease_renewal(&q, RenewalOutcome::Ok, Some(0.66));
    metrics.lease_renewal(&q, RenewalOutcome::Error, None);
    metrics.renewal_statement(RenewalTiming { lateness: ms(20), took: ms(3) });
    metrics.self_fenced(SelfFenceReason::RenewalDeadline);
    metrics.fence_rejected(FenceOp::Complete, FenceReason::Token);
    metrics.attempt_refunded(&q, RefundReason::DrainUnstarted);
    metrics.leases_recovered(&q, RecoveryDisposition::Requeued, 2, Duration::from_secs(3));
    metrics
        .reaper_run(ReaperOutcome::Ok, OffsetDateTime::from_unix_timestamp(1_700_000_000).unwrap());
    metrics.claim(&q, ClaimOutcome::Granted, ms(4));
    metrics.claim(&q, ClaimOutcome::Throttled, ms(4));
    metrics.woken(WakeupSource::Notify);
    metrics.slots(SlotKind::Execution, 3, 13);
    metrics.execution_started(&q);
    metrics.execution_started(&q);
    metrics.execution_ended(&q, ExecutionOutcome::TimedOut, Duration::from_secs(40));
    metrics.items_retried(&q, RetryReason::Timeout, 1);
    metrics.items_finished(&q, ItemOutcome::Succeeded, 4);
    metrics.items_submitted(&q, 1000);
    metrics.db_up(true);
    metrics.db_pool(DbPool::Main, PoolUse { used: 2, idle: 1, pending: 4, limit: 8 });
    metrics.db_error(DbErrorClass::LockTimeout);
    metrics.finish_group(64, ms(7));
    metrics.worker_state(WorkerState::Draining);

    let text = metrics.encode().unwrap();
    for (series, expected) in [
        (r#"leases_granted_total{queue="resize"}"#, 5.0),
        (r#"leases_held{queue="resize"}"#, 3.0),
        (r#"leases_lost_total{queue="resize",reason="superseded"}"#, 1.0),
        (r#"leases_released_total{queue="resize",reason="settled"}"#, 1.0),
        (r#"lease_renewals_total{outcome="ok",queue="resize"}"#, 1.0),
        (r#"lease_renewals_total{outcome="error",queue="resize"}"#, 1.0),
        (r#"lease_renewal_margin_ratio_bucket{queue="resize",le="0.65"}"#, 0.0),
        (r#"lease_renewal_margin_ratio_bucket{queue="resize",le="0.7"}"#, 1.0),
        (r#"lease_renewal_margin_ratio_count{queue="resize"}"#, 1.0),
        (r#"lease_renewal_lateness_seconds_bucket{le="0.01"}"#, 0.0),
        (r#"lease_renewal_lateness_seconds_bucket{le="0.05"}"#, 1.0),
        (r#"lease_renewal_duration_seconds_bucket{le="0.005"}"#, 1.0),
        (r#"self_fences_total{reason="renewal_deadline"}"#, 1.0),
        (r#"fence_rejections_total{op="complete",reason="token"}"#, 1.0),
        (r#"attempt_refunds_total{queue="resize",reason="drain_unstarted"}"#, 1.0),
        (r#"leases_expired_total{queue="resize"}"#, 2.0),
        (r#"leases_recovered_total{disposition="requeued",queue="resize"}"#, 2.0),
        (r#"lease_recovery_delay_seconds_bucket{le="5"}"#, 2.0),
        (r#"reaper_runs_total{outcome="ok"}"#, 1.0),
        ("reaper_last_success_timestamp_seconds", 1_700_000_000.0),
        (r#"claims_total{outcome="granted",queue="resize"}"#, 1.0),
        (r#"claims_total{outcome="throttled",queue="resize"}"#, 1.0),
        (r#"claim_duration_seconds_count{outcome="granted"}"#, 1.0),
        (r#"wakeups_total{source="notify"}"#, 1.0),
        (r#"worker_slots{kind="execution",state="busy"}"#, 3.0),
        (r#"worker_slots{kind="execution",state="idle"}"#, 13.0),
        (r#"executions_started_total{queue="resize"}"#, 2.0),
        (r#"executions_running{queue="resize"}"#, 1.0),
        (r#"executions_total{outcome="timed_out",queue="resize"}"#, 1.0),
        (r#"execution_duration_seconds_bucket{queue="resize",le="60"}"#, 1.0),
        (r#"item_retries_total{queue="resize",reason="timeout"}"#, 1.0),
        (r#"items_finished_total{outcome="succeeded",queue="resize"}"#, 4.0),
        (r#"items_submitted_total{queue="resize"}"#, 1000.0),
        ("db_up", 1.0),
        (r#"db_pool_connections{pool="main",state="used"}"#, 2.0),
        (r#"db_pool_connections{pool="main",state="idle"}"#, 1.0),
        (r#"db_pool_pending_requests{pool="main"}"#, 4.0),
        (r#"db_pool_connections_limit{pool="main"}"#, 8.0),
        (r#"db_errors_total{class="lock_timeout"}"#, 1.0),
        (r#"finish_group_items_bucket{le="64"}"#, 1.0),
        ("finish_duration_seconds_count", 1.0),
        (r#"worker_state{state="draining"}"#, 1.0),
        (r#"worker_state{state="starting"}"#, 0.0),
    ] {
        let got = value(&text, &format!("holdfast_{series}"));
        assert!((got - expected).abs() < f64::EPSILON, "{series}: {got}");
    }
}

#[test]
fn a_queue_that_is_not_configured_counts_as_other() {
    let metrics = metrics();

    metrics.items_submitted(&queue("somebody-elses"), 3);

    let text = metrics.encode().unwrap();
    assert!(!text.contains("somebody-elses"));
    assert!((value(&text, r#"holdfast_items_submitted_total{queue="_other"}"#) - 3.0).abs() < 0.1);
}

#[test]
fn queues_beyond_the_limit_count_as_other() {
    let build = BuildInfo::current(1, 1);
    let queues = (0..MAX_QUEUES + 10).map(|n| queue(&format!("q{n:03}")));
    let metrics = Metrics::new(queues, &build);

    metrics.items_submitted(&queue("q049"), 1);
    metrics.items_submitted(&queue("q050"), 1);

    let text = metrics.encode().unwrap();
    assert!((value(&text, r#"holdfast_items_submitted_total{queue="q049"}"#) - 1.0).abs() < 0.1);
    assert!((value(&text, r#"holdfast_items_submitted_total{queue="_other"}"#) - 1.0).abs() < 0.1);
    assert!(!text.contains("q050"));
}

#[test]
fn gauges_of_a_sampler_are_read_at_every_scrape() {
    let metrics = metrics();
    let busy = Arc::new(Mutex::new(1));
    let seen = busy.clone();
    metrics.at_scrape(move |metrics| metrics.slots(SlotKind::Check, *seen.lock().unwrap(), 0));
    let series = r#"holdfast_worker_slots{kind="check",state="busy"}"#;

    assert!((value(&metrics.encode().unwrap(), series) - 1.0).abs() < 0.1);
    *busy.lock().unwrap() = 4;
    assert!((value(&metrics.encode().unwrap(), series) - 4.0).abs() < 0.1);
}

#[test]
fn promtool_finds_no_fault_in_the_exposition() {
    let Some(promtool) = prometheus::program("promtool") else { return };

    let faults = prometheus::check_metrics(&promtool, &metrics().encode().unwrap());

    assert_eq!(faults, "");
}
