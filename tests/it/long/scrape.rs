//! What a scrape costs beside ten million items.

use std::time::Duration;

use holdfast::clock::{Clock, SystemClock};
use holdfast::model::BatchId;

use crate::support::fleet::{Fleet, LONG, QUEUE, Submission, until};
use crate::support::prometheus::value;
use crate::support::worker_process::WorkerProcess;

/// Slots of the worker that runs beside it.
const SLOTS: usize = 64;
/// Batches that the items are in, half of them executed half way.
const BATCHES: i32 = 10;
/// How often each is scraped.
const SCRAPES: usize = 50;

fn items() -> i32 {
    std::env::var("HOLDFAST_LONG_ITEMS").map_or(10_000_000, |text| text.parse().unwrap())
}

/// Stores batches of a queue that nobody serves, half of them with outcomes of half their items.
async fn fill(fleet: &Fleet) {
    let each = items() / BATCHES;
    for n in 0..BATCHES {
        let done = if n % 2 == 0 { each / 2 } else { 0 };
        let id = BatchId::generate().uuid();
        let rows = "
            WITH b AS (
                INSERT INTO holdfast.batches (id, owner, queue, content_digest, spec, item_count,
                    max_live, max_checking, max_attempts)
                VALUES ($1, 'default', 'big', '', '{}', $2, 1000, 64, 3)
            ), p AS (
                INSERT INTO holdfast.progress (batch_id, seq, next_position, succeeded)
                VALUES ($1, 0, $3, $3)
            ), i AS (
                INSERT INTO holdfast.items (batch_id, position, key, input)
                SELECT $1, g, 'item-' || g, to_json(repeat('x', 100))
                  FROM generate_series(0, $2 - 1) g
            )
            INSERT INTO holdfast.outcomes (batch_id, position, status, token, attempt, worker_id,
                finished_at, result, stop_reason)
            SELECT $1, g, 'succeeded', 1, 1, $1, clock_timestamp(), '1', 'completed'
              FROM generate_series(0, $3 - 1) g";
        fleet.sql.execute(rows, &[&id, &each, &done]).await.unwrap();
    }
}

async fn scrape(process: &WorkerProcess) -> String {
    let (status, text) = process.get("/metrics").await.unwrap();
    assert_eq!(status, 200);
    text
}

/// The median and the longest of some scrapes, and the size of one.
async fn measure(process: &WorkerProcess) -> (Duration, Duration, usize) {
    let (mut took, mut size) = (Vec::new(), 0);
    for _ in 0..SCRAPES {
        let asked = SystemClock.now();
        size = scrape(process).await.len();
        took.push(SystemClock.now().since(asked));
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    took.sort_unstable();
    (took[SCRAPES / 2], took[SCRAPES - 1], size)
}

#[tokio::test]
#[ignore = "takes minutes: make long"]
async fn long_a_scrape_beside_ten_million_items_costs_what_one_beside_none_costs() {
    let queues: Vec<String> =
        (0..9).map(|n| format!("[queues.q{n}]\nexecutor = 'command'\nargv = ['true']\n")).collect();
    let queues = queues.concat();
    let fleet = Fleet::new(&format!("[exporter]\ninterval = '5s'\n{queues}")).await;
    let exporter = fleet.start_exporter();
    let collected = async |times: usize| {
        let last = "holdfast_exporter_last_success_timestamp_seconds";
        let mut seen = 0.0;
        for _ in 0..=times {
            until("it collects", LONG, async || value(&scrape(&exporter).await, last) > seen).await;
            seen = value(&scrape(&exporter).await, last);
        }
        let text = scrape(&exporter).await;
        let took = r#"holdfast_exporter_collect_duration_seconds{collector="queues"}"#;
        (text.clone(), value(&text, took))
    };
    let (_, empty) = collected(1).await;

    fill(&fleet).await;
    fleet.sql.batch_execute("ANALYZE holdfast.batches, holdfast.progress").await.unwrap();
    let worker = fleet.start_with(&["--slots", "64"]);
    worker.ready().await;
    let busy = fleet.submit(Submission::new(4 * SLOTS, "sleep 2")).await;
    fleet.noted(busy, "start", SLOTS).await;

    let (text, full) = collected(3).await;
    let (exporter_p50, exporter_max, exporter_size) = measure(&exporter).await;
    let (worker_p50, worker_max, worker_size) = measure(&worker).await;
    eprintln!(
        "{} items in {BATCHES} batches, {SLOTS} slots, 10 queues: the exporter's queues are \
         collected in {:.1} ms, of an empty database in {:.1} ms; its scrape takes {exporter_p50:?} \
         (at most {exporter_max:?}) and has {exporter_size} bytes, {} series; a worker's \
         {worker_p50:?} (at most {worker_max:?}), {worker_size} bytes, {} series",
        items(),
        full * 1000.0,
        empty * 1000.0,
        series(&text),
        series(&scrape(&worker).await),
    );
    let queued = r#"holdfast_items{queue="_other",state="queued"}"#;
    assert!((value(&text, queued) - f64::from(BATCHES * 1000)).abs() < 1.0, "{text}");
    let running = format!(r#"holdfast_items{{queue="{QUEUE}",state="running"}}"#);
    assert!(value(&text, &running) > 0.0, "{text}");
    // Nothing counts items: the sizes of tables do not show.
    assert!(full < 0.5, "{full} s");
    assert!(exporter_p50 < Duration::from_millis(100), "{exporter_p50:?}");
    assert!(worker_p50 < Duration::from_millis(200), "{worker_p50:?}");
}

fn series(exposition: &str) -> usize {
    exposition.lines().filter(|line| !line.starts_with('#')).count()
}
