//! Metrics as they are scraped.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use holdfast::clock::BootInstant;
use holdfast::model::{QueueName, WorkerState};
use holdfast::telemetry::labels::{
    ClaimOutcome, Collector, DbErrorClass, DbPool, ExecutionOutcome, FenceOp, FenceReason,
    ItemOutcome, LostReason, PoisonReason, ReaperOutcome, RecoveryDisposition, RefundReason,
    ReleaseReason, RenewalOutcome, RetryReason, SelfFenceReason, SlotKind, WakeupSource,
};
use holdfast::telemetry::metrics::{
    Collected, ControlFacts, GlobalMetrics, MAX_QUEUES, PoolUse, QueueLoad, RenewalTiming,
    ServerFacts, TableRows, WorkerCounts,
};
use holdfast::telemetry::{BuildInfo, Metrics};
use time::OffsetDateTime;

use crate::support::prometheus::{self, find, types, value};

fn queue(name: &str) -> QueueName {
    name.parse().unwrap()
}

fn build() -> BuildInfo {
    BuildInfo {
        version: "1.2.3".to_owned(),
        revision: "0123abc".to_owned(),
        schema_min: 1,
        schema_max: 2,
    }
}

fn metrics() -> Metrics {
    Metrics::new([queue("resize"), queue("checksum")], &build())
}

const STALE: Duration = Duration::from_secs(45);

fn at(seconds: u64) -> BootInstant {
    BootInstant::from_nanos(seconds * 1_000_000_000)
}

/// The exporter's, of an empty database that was looked at once.
fn global() -> GlobalMetrics {
    let metrics = GlobalMetrics::new([queue("resize"), queue("checksum")], &build(), STALE);
    let control = ControlFacts { claims_enabled: false, epoch: 0, schema_version: 0 };
    let server = ServerFacts { timeline: 0, oldest_transaction: None, notify_queue_usage: 0.0 };
    for part in [
        Collected::Queues(Vec::new()),
        Collected::Workers(WorkerCounts::default()),
        Collected::Control(control),
        Collected::Tables(Vec::new()),
        Collected::Server(server),
    ] {
        metrics.collected(&part, Duration::ZERO, at(0));
    }
    metrics
}

/// What worker and exporter show before anything has happened.
fn expositions() -> [(&'static str, String); 2] {
    [("worker", metrics().encode().unwrap()), ("exporter", global().encode(at(0)).unwrap())]
}

/// The exposition without the values of the process metrics, which differ at every scrape.
fn stable(exposition: &str) -> String {
    let lines = exposition.lines().filter(|line| !line.starts_with("process_"));
    lines.fold(String::new(), |text, line| text + line + "\n")
}

/// `HOLDFAST_BLESS=1` rewrites the files: look at the difference before committing it.
#[test]
fn the_expositions_are_the_golden_files() {
    for (process, exposition) in expositions() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden");
        let path = format!("{folder}/metrics-{process}.txt");
        let now = stable(&exposition);

        if std::env::var_os("HOLDFAST_BLESS").is_some() {
            std::fs::write(&path, &now).unwrap();
        }

        let golden = std::fs::read_to_string(&path).unwrap();
        let missing = |a: &str, b: &str| {
            let known: Vec<&str> = b.lines().collect();
            a.lines().filter(|line| !known.contains(line)).map(str::to_owned).collect::<Vec<_>>()
        };
        assert_eq!(missing(&golden, &now), Vec::<String>::new(), "no longer exported");
        assert_eq!(missing(&now, &golden), Vec::<String>::new(), "not in {path}");
        assert_eq!(now, golden);
    }
}

#[test]
fn every_metric_is_named_by_the_rules() {
    let exposition = expositions().map(|(_, exposition)| exposition).concat();

    let types = types(&exposition);
    assert!(types.len() > 60, "{}", types.len());
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
    let constant = [
        "holdfast_build_info{",
        "holdfast_schema_version_supported{",
        "holdfast_config_last_reload_successful",
    ];
    for (_, exposition) in expositions() {
        for line in stable(&exposition).lines().filter(|line| !line.starts_with('#')) {
            let one = constant.iter().any(|name| line.starts_with(name));
            assert_ne!(one, line.ends_with(" 0"), "{line}");
        }
    }
}

#[test]
#[expect(clippy::too_many_lines, reason = "one line for each event")]
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
    metrics.lease_expired(&q, Duration::from_secs(3));
    let (expired, died) = (RetryReason::LeaseExpired, RetryReason::WorkerDied);
    metrics.taken_back(&q, RecoveryDisposition::Requeued, false, 1, expired);
    metrics.taken_back(&q, RecoveryDisposition::Requeued, false, 3, died);
    metrics.taken_back(&q, RecoveryDisposition::Failed, true, 2, died);
    metrics.taken_back(&q, RecoveryDisposition::Published, false, 1, died);
    metrics.items_poisoned(&q, PoisonReason::MaxAttempts, 1);
    metrics.parent_lock_waited(ms(30));
    metrics.item_waited(&q, Duration::from_secs(50));
    metrics.db_clock_offset(-1.5);
    metrics.listening(true);
    metrics.runtime_lag(ms(70));
    metrics.config_reloaded(false);
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
        (r#"leases_expired_total{queue="resize"}"#, 1.0),
        (r#"leases_recovered_total{disposition="requeued",queue="resize"}"#, 4.0),
        (r#"leases_recovered_total{disposition="failed",queue="resize"}"#, 2.0),
        (r#"leases_recovered_total{disposition="published",queue="resize"}"#, 1.0),
        (r#"item_retries_total{queue="resize",reason="lease_expired"}"#, 1.0),
        (r#"item_retries_total{queue="resize",reason="worker_died"}"#, 3.0),
        (r#"items_poisoned_total{queue="resize",reason="max_crashes"}"#, 2.0),
        (r#"items_poisoned_total{queue="resize",reason="max_attempts"}"#, 1.0),
        (r#"items_finished_total{outcome="failed",queue="resize"}"#, 2.0),
        (r#"lease_recovery_delay_seconds_bucket{le="5"}"#, 1.0),
        (r#"parent_lock_wait_seconds_bucket{le="0.05"}"#, 1.0),
        (r#"item_wait_seconds_bucket{queue="resize",le="30"}"#, 0.0),
        (r#"item_wait_seconds_bucket{queue="resize",le="60"}"#, 1.0),
        ("db_clock_offset_seconds", -1.5),
        ("notify_listener_up", 1.0),
        (r#"runtime_lag_seconds_bucket{le="0.1"}"#, 1.0),
        ("config_last_reload_successful", 0.0),
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
        (r#"items_finished_total{outcome="succeeded",queue="resize"}"#, 5.0),
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

    metrics.leases_granted(&queue("somebody-elses"), 3);

    let text = metrics.encode().unwrap();
    assert!(!text.contains("somebody-elses"));
    assert!((value(&text, r#"holdfast_leases_granted_total{queue="_other"}"#) - 3.0).abs() < 0.1);
}

#[test]
fn queues_beyond_the_limit_count_as_other() {
    let build = BuildInfo::current(1, 1);
    let queues = (0..MAX_QUEUES + 10).map(|n| queue(&format!("q{n:03}")));
    let metrics = Metrics::new(queues, &build);

    metrics.leases_granted(&queue("q049"), 1);
    metrics.leases_granted(&queue("q050"), 1);

    let text = metrics.encode().unwrap();
    assert!((value(&text, r#"holdfast_leases_granted_total{queue="q049"}"#) - 1.0).abs() < 0.1);
    assert!((value(&text, r#"holdfast_leases_granted_total{queue="_other"}"#) - 1.0).abs() < 0.1);
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
fn promtool_finds_no_fault_in_the_expositions() {
    let Some(promtool) = prometheus::program("promtool") else { return };

    for (process, exposition) in expositions() {
        let faults = prometheus::check_metrics(&promtool, &exposition);

        assert_eq!(faults, "", "{process}");
    }
}

#[test]
fn every_part_is_shown_in_its_series() {
    let metrics = global();
    let since = |seconds| Some(OffsetDateTime::from_unix_timestamp(seconds).unwrap());
    let load = QueueLoad {
        pending: 1,
        queued: 2,
        executing: 7,
        running: 3,
        checking: 5,
        active: 6,
        overdue: 4,
        open: 2,
        paused: 1,
        ready_since: since(1_000),
        checking_since: since(2_000),
    };
    // Started, by a heartbeat that came before the hand-in.
    let elsewhere = QueueLoad { executing: 2, running: 3, ready_since: since(900), ..load };
    let queues = ["resize", "a", "b"].map(str::to_owned);
    let table = |name: &str| TableRows { table: name.to_owned(), live: 10, dead: 30 };
    let control = ControlFacts { claims_enabled: true, epoch: 1_700_000_000, schema_version: 16 };
    let server =
        ServerFacts { timeline: 3, oldest_transaction: since(50), notify_queue_usage: 0.25 };

    for part in [
        Collected::Queues(queues.into_iter().zip([load, load, elsewhere]).collect()),
        Collected::Workers(WorkerCounts { live: 3, draining: 2, stale: 1 }),
        Collected::Control(control),
        Collected::Tables(vec![table("leases"), table("a_table_of_others")]),
        Collected::Server(server),
    ] {
        metrics.collected(&part, Duration::from_millis(20), at(5));
    }
    metrics.collection_failed(Collector::Tables);
    metrics.collected_all(since(3_000).unwrap());
    metrics.db_up(true);

    let text = metrics.encode(at(5)).unwrap();
    assert!(!text.contains("a_table_of_others"), "{text}");
    for (series, expected) in [
        (r#"items{queue="resize",state="pending"}"#, 1.0),
        (r#"items{queue="resize",state="queued"}"#, 2.0),
        (r#"items{queue="resize",state="leased"}"#, 4.0),
        (r#"items{queue="resize",state="running"}"#, 3.0),
        (r#"items{queue="resize",state="checking"}"#, 5.0),
        (r#"items{queue="checksum",state="queued"}"#, 0.0),
        (r#"items{queue="_other",state="queued"}"#, 4.0),
        (r#"items{queue="_other",state="leased"}"#, 3.0),
        (r#"items{queue="_other",state="running"}"#, 6.0),
        (r#"leases_active{queue="resize"}"#, 6.0),
        (r#"leases_overdue{queue="_other"}"#, 8.0),
        (r#"queue_oldest_ready_timestamp_seconds{queue="resize"}"#, 1_000.0),
        (r#"queue_oldest_ready_timestamp_seconds{queue="_other"}"#, 900.0),
        (r#"queue_oldest_ready_timestamp_seconds{queue="checksum"}"#, 0.0),
        (r#"queue_oldest_checking_timestamp_seconds{queue="resize"}"#, 2_000.0),
        (r#"batches{state="open"}"#, 6.0),
        (r#"batches{state="paused"}"#, 3.0),
        (r#"workers{state="live"}"#, 3.0),
        (r#"workers{state="draining"}"#, 2.0),
        (r#"workers{state="stale"}"#, 1.0),
        ("claims_enabled", 1.0),
        ("lease_epoch", 1_700_000_000.0),
        ("schema_version", 16.0),
        (r#"schema_version_supported{bound="max"}"#, 2.0),
        ("db_timeline", 3.0),
        ("db_oldest_transaction_timestamp_seconds", 50.0),
        ("notify_queue_usage_ratio", 0.25),
        (r#"table_live_tuples{table="leases"}"#, 10.0),
        (r#"table_dead_tuples{table="leases"}"#, 30.0),
        (r#"exporter_collect_duration_seconds{collector="queues"}"#, 0.02),
        (r#"exporter_collect_errors_total{collector="tables"}"#, 1.0),
        ("exporter_last_success_timestamp_seconds", 3_000.0),
        ("db_up", 1.0),
    ] {
        let got = value(&text, &format!("holdfast_{series}"));
        assert!((got - expected).abs() < f64::EPSILON, "{series}: {got}");
    }
}

#[test]
fn what_is_no_longer_known_is_left_out_and_what_says_so_is_not() {
    let metrics = global();
    let counts = WorkerCounts { live: 3, ..WorkerCounts::default() };

    metrics.collected(&Collected::Workers(counts), Duration::ZERO, at(30));

    let text = metrics.encode(at(46)).unwrap();
    assert_eq!(find(&text, "holdfast_claims_enabled"), None);
    assert!(!text.contains("holdfast_items"), "{text}");
    assert_eq!(find(&text, r#"holdfast_workers{state="live"}"#), Some(3.0));
    let text = metrics.encode(at(76)).unwrap();
    assert!(!text.contains("holdfast_workers"), "{text}");
    for series in ["holdfast_exporter_last_success_timestamp_seconds", "holdfast_db_up"] {
        assert_eq!(find(&text, series), Some(0.0), "{series}");
    }
}

/// What operators look at: alert rules, dashboards, pages.
fn deployed() -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy");
    let mut text = String::new();
    for (folder, kind) in [("prometheus", "yaml"), ("grafana", "json"), ("runbooks", "md")] {
        for file in std::fs::read_dir(root.join(folder)).into_iter().flatten() {
            let path = file.unwrap().path();
            if path.extension().is_some_and(|extension| extension == kind) {
                // A line break in a text of JSON must not become part of a name.
                text += &std::fs::read_to_string(path).unwrap().replace("\\n", " ");
                text += "\n";
            }
        }
    }
    text
}

/// The metrics that a text names, recorded ones (`level:name`) and labels not among them.
fn named(text: &str, known: &BTreeSet<String>) -> BTreeSet<String> {
    let words = text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_' || c == ':'));
    let ours = words.filter(|word| word.starts_with("holdfast_"));
    let base = |word: &str| {
        let series = ["_bucket", "_count", "_sum"].iter().find_map(|end| word.strip_suffix(end));
        series.filter(|name| known.contains(*name)).unwrap_or(word).to_owned()
    };
    ours.map(base).collect()
}

#[test]
fn every_metric_is_looked_at_and_what_is_looked_at_is_there() {
    let text = deployed();
    assert!(!text.is_empty());
    let exported = expositions().map(|(_, exposition)| exposition).concat();
    let known: BTreeSet<String> = types(&exported)
        .into_iter()
        .map(|(name, _)| name.to_owned())
        .filter(|name| name.starts_with("holdfast_"))
        .collect();

    let used = named(&text, &known);

    let unused: Vec<_> = known.difference(&used).collect();
    assert!(unused.is_empty(), "no alert, panel or page uses {unused:#?}");
    // The label that a group of pods has in Kubernetes is no metric.
    let unknown: Vec<_> =
        used.difference(&known).filter(|name| *name != "holdfast_group").collect();
    assert!(unknown.is_empty(), "an alert, panel or page uses {unknown:#?}, which nobody exports");
}
