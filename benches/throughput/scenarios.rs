//! What is measured, one round at a time.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tokio::sync::mpsc;

use super::Arguments;
use super::items::{self, Item};
use super::ours::{Clocked, Endless, Holdfast, Noop};
use super::raw::{self, Done};
use super::report::{Report, quantile};
use super::server::{Connection, Server, now};

/// A latency is measured on idle processes.
pub(crate) async fn idle() {
    tokio::time::sleep(Duration::from_millis(rand::random_range(5..25))).await;
}

/// Executions under way when a batch is cancelled.
const RUNNING: u16 = 16;

/// One round.
pub(crate) struct Bench<'a> {
    pub(crate) server: &'a Server<'a>,
    pub(crate) report: &'a mut Report,
    pub(crate) round: u32,
}

impl Bench<'_> {
    /// Whether the baseline comes first in this round.
    const fn raw_first(&self) -> bool {
        self.round % 2 == 1
    }

    /// Submits of one batch against COPY of the same bytes into a table with the same indexes.
    pub(crate) async fn submit(&mut self, arguments: &Arguments) -> Result<()> {
        self.report.note("commit of one row", "ms", self.server.flush_ms().await?);
        let items = items::make(arguments.submit_items, arguments.input_bytes);
        if self.raw_first() {
            self.raw_copy(&items).await?;
        }
        let url = self.server.fresh("submit").await?;
        let holdfast = Holdfast::new(&url, 1)?;
        let lines = items::jsonl(&items);
        let begun = now();
        let admitted = holdfast.read(lines, 1).await?;
        let read = now();
        let batch = holdfast.store(admitted).await?;
        let stored = now();
        drop(holdfast);
        let connection = Connection::open(&url, |_| ()).await?;
        let sql = "SELECT count(*) FROM holdfast.items WHERE batch_id = $1";
        let found: i64 = connection.client.query_one(sql, &[&batch.uuid()]).await?.get(0);
        connection.close().await;
        ensure!(found == i64::from(arguments.submit_items), "{found} items were stored");
        self.server.discard("submit").await?;
        if !self.raw_first() {
            self.raw_copy(&items).await?;
        }
        let rate = |took: Duration| f64::from(arguments.submit_items) / took.as_secs_f64();
        self.report.note("submit, from the spool", "items/s", rate(stored.since(read)));
        self.report.note("submit, validated and spooled", "items/s", rate(stored.since(begun)));
        for name in ["submit, from the spool", "submit, validated and spooled"] {
            self.report.compare(&format!("{name} / raw COPY"), name, "raw COPY");
        }
        Ok(())
    }

    async fn raw_copy(&mut self, items: &[Item]) -> Result<()> {
        let url = self.server.fresh("raw_copy").await?;
        let connection = Connection::open(&url, |_| ()).await?;
        raw::prepare(&connection.client).await?;
        let took = raw::copy_items(&connection.client, items).await?;
        connection.close().await;
        self.server.discard("raw_copy").await?;
        #[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
        let rate = items.len() as f64 / took.as_secs_f64();
        self.report.note("raw COPY", "items/s", rate);
        Ok(())
    }

    /// One batch of items that do nothing, one worker.
    pub(crate) async fn drain(&mut self, arguments: &Arguments) -> Result<()> {
        self.report.note("commit of one row", "ms", self.server.flush_ms().await?);
        let items = items::make(arguments.items, arguments.input_bytes);
        if self.raw_first() {
            self.raw_drains(&items).await?;
        }
        for slots in &arguments.slots {
            let count = arguments.items.min(500 * u32::from(*slots));
            let share = &items[..usize::try_from(count)?];
            self.our_drain(*slots, share, count).await?;
        }
        if !self.raw_first() {
            self.raw_drains(&items).await?;
        }
        for slots in &arguments.slots {
            for base in [RAW_DELETED, RAW_KEPT] {
                let name = drain_name(*slots);
                self.report.compare(&format!("{name} / {base}"), &name, base);
            }
        }
        Ok(())
    }

    async fn our_drain(&mut self, slots: u16, items: &[Item], count: u32) -> Result<()> {
        let url = self.server.fresh("drain").await?;
        let holdfast = Holdfast::new(&url, slots)?;
        let admitted = holdfast.read(items::jsonl(items), 4 * u32::from(slots)).await?;
        let batch = holdfast.store(admitted).await?;
        let before = self.server.reading("drain").await?;
        let noop = Arc::new(Noop::new(count));
        let begun = now();
        let worker = holdfast.work(Arc::clone(&noop) as _);
        noop.reached().await;
        holdfast.until_ended(batch).await?;
        let took = now().since(begun);
        let wal = self.server.wal().await?;
        worker.stop().await?;
        ensure!(noop.executions() == u64::from(count), "{} executions", noop.executions());
        // Read before the check below adds to them.
        drop(holdfast);
        let costs = self.server.costs(&before, wal, count).await?;
        Holdfast::new(&url, slots)?.verify(batch, count).await?;
        self.server.discard("drain").await?;
        let rate = f64::from(count) / took.as_secs_f64();
        self.report.note_with_costs(&drain_name(slots), "items/s", rate, costs);
        Ok(())
    }

    async fn raw_drains(&mut self, items: &[Item]) -> Result<()> {
        for (done, name) in [(Done::Deleted, RAW_DELETED), (Done::Kept, RAW_KEPT)] {
            let url = self.server.fresh("raw_drain").await?;
            let connection = Connection::open(&url, |_| ()).await?;
            raw::prepare(&connection.client).await?;
            raw::fill(&connection.client, items).await?;
            connection.close().await;
            let before = self.server.reading("raw_drain").await?;
            let took = raw::drain(&url, done, items.len()).await?;
            let wal = self.server.wal().await?;
            let count = u32::try_from(items.len())?;
            let costs = self.server.costs(&before, wal, count).await?;
            self.server.discard("raw_drain").await?;
            let rate = f64::from(count) / took.as_secs_f64();
            self.report.note_with_costs(name, "items/s", rate, costs);
        }
        Ok(())
    }

    /// Batches of one item, one after the other, to an idle worker that listens.
    pub(crate) async fn latency(&mut self, arguments: &Arguments) -> Result<()> {
        let count = arguments.latency_batches;
        if self.raw_first() {
            self.raw_latency(count).await?;
        }
        let url = self.server.fresh("latency").await?;
        let holdfast = Holdfast::new(&url, 16)?;
        let (sender, mut began) = mpsc::unbounded_channel();
        let worker = holdfast.work(Arc::new(Clocked(sender)));
        let mut took = Vec::new();
        // The first one waits for the worker's start.
        for n in 0..=count {
            let admitted = holdfast.read(b"{\"key\":\"k\",\"input\":1}".into(), 1).await?;
            idle().await;
            let begun = now();
            let batch = holdfast.store(admitted).await?;
            let start = began.recv().await.context("the worker is gone")?;
            if n > 0 {
                took.push(start.since(begun).as_secs_f64() * 1e3);
            }
            holdfast.until_ended(batch).await?;
            holdfast.verify(batch, 1).await?;
        }
        worker.stop().await?;
        drop(holdfast);
        self.server.discard("latency").await?;
        if !self.raw_first() {
            self.raw_latency(count).await?;
        }
        for (name, raw, q) in
            [("start, p50", "raw start, p50", 0.5), ("start, p99", "raw start, p99", 0.99)]
        {
            self.report.note(name, "ms", quantile(&mut took, q));
            self.report.compare(&format!("{name} / raw"), name, raw);
        }
        Ok(())
    }

    async fn raw_latency(&mut self, count: u32) -> Result<()> {
        let url = self.server.fresh("raw_latency").await?;
        let connection = Connection::open(&url, |_| ()).await?;
        raw::prepare(&connection.client).await?;
        connection.close().await;
        let mut took = raw::latencies(&url, count).await?;
        self.server.discard("raw_latency").await?;
        self.report.note("raw start, p50", "ms", quantile(&mut took, 0.5));
        self.report.note("raw start, p99", "ms", quantile(&mut took, 0.99));
        Ok(())
    }

    /// Cancels a large batch of which some items run.
    pub(crate) async fn cancel(&mut self, arguments: &Arguments) -> Result<()> {
        let url = self.server.fresh("cancel").await?;
        let holdfast = Holdfast::new(&url, RUNNING)?;
        let lines = items::jsonl(&items::make(arguments.cancel_items, 8));
        let admitted = holdfast.read(lines, 1).await?;
        let batch = holdfast.store(admitted).await?;
        let (began, mut begun) = mpsc::unbounded_channel();
        let (stopped, mut told) = mpsc::unbounded_channel();
        let worker = holdfast.work(Arc::new(Endless { began, stopped }));
        for _ in 0..RUNNING {
            begun.recv().await.context("the worker is gone")?;
        }
        idle().await;
        let asked = now();
        let took = holdfast.cancel(batch).await?;
        let mut last = asked;
        for _ in 0..RUNNING {
            last = last.max(told.recv().await.context("the worker is gone")?);
        }
        worker.stop().await?;
        drop(holdfast);
        self.server.discard("cancel").await?;
        self.report.note("cancel, in the database", "ms", took.as_secs_f64() * 1e3);
        self.report.note(
            "cancel, until the last was told",
            "ms",
            last.since(asked).as_secs_f64() * 1e3,
        );
        Ok(())
    }
}

const RAW_DELETED: &str = "raw drain, rows deleted";
const RAW_KEPT: &str = "raw drain, results kept";

fn drain_name(slots: u16) -> String {
    format!("drain, {slots} slots")
}
