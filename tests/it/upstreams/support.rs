//! Executors as a worker makes them, on a scripted upstream that they may reach.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use holdfast::clock::SystemClock;
use holdfast::config::{HttpSpec, Settings, Upstream as UpstreamSettings};
use holdfast::execute::http::HttpExecutor;
use holdfast::execute::upstream::{UnsharedLimits, Upstreams};
use holdfast::execute::{Execution, Executor, Job, Ledger, Noted, Spent};
use holdfast::model::{Attempt, BatchId, FencingToken, ItemRef, LeaseId, Position, Reporter};
use serde_json::Value;
use time::OffsetDateTime;
use tokio_util::sync::CancellationToken;

/// How long a test waits before it fails.
pub(super) const PATIENCE: Duration = Duration::from_mins(1);

/// The name under which executors reach what a test serves.
pub(super) const LOCAL: &str = "local";

pub(super) fn job(input_json: &str) -> Job {
    Job {
        item: ItemRef::new(BatchId::generate(), Position::new(7)),
        key: "the key".to_owned(),
        queue: "queue".parse().unwrap(),
        attempt: Attempt::new(1),
        retries: 0,
        lease: LeaseId::generate(),
        token: FencingToken::new(12),
        input_json: input_json.to_owned(),
        criteria: Vec::new(),
        deadline: OffsetDateTime::UNIX_EPOCH,
        traceparent: None,
        reporter: Reporter::default(),
    }
}

/// Settings of an upstream on this machine.
pub(super) fn local() -> UpstreamSettings {
    UpstreamSettings {
        allow_networks: vec!["127.0.0.0/8".parse().unwrap()],
        ..UpstreamSettings::default()
    }
}

/// The upstreams of a process that shares nothing.
pub(super) fn upstreams(settings: UpstreamSettings) -> Arc<Upstreams> {
    let named = BTreeMap::from([(LOCAL.to_owned(), settings)]);
    let limits = Arc::new(UnsharedLimits::default());
    Arc::new(Upstreams::new(&named, limits, Arc::new(SystemClock)).unwrap())
}

/// What executors noted.
#[derive(Default)]
pub(super) struct Notes {
    spent: Mutex<Vec<Spent>>,
    turns: Mutex<Vec<Value>>,
    /// From this line on the item is lost.
    pub(super) lost_from: Option<u32>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Notes {
    pub(super) fn spent(&self) -> Option<Spent> {
        lock(&self.spent).last().cloned()
    }

    pub(super) fn turns(&self) -> Vec<Value> {
        lock(&self.turns).clone()
    }
}

#[async_trait]
impl Ledger for Notes {
    async fn spend(&self, _: &Job, spent: &Spent) {
        lock(&self.spent).push(spent.clone());
    }

    async fn note(&self, _: &Job, seq: u32, entry: &Value) -> Noted {
        if self.lost_from.is_some_and(|from| seq >= from) {
            return Noted::Lost;
        }
        lock(&self.turns).push(entry.clone());
        Noted::Stored
    }
}

/// A queue of requests, and what they noted.
pub(super) struct Queue {
    executor: HttpExecutor,
    pub(super) notes: Arc<Notes>,
    pub(super) stop: CancellationToken,
}

impl Queue {
    pub(super) fn new(spec: HttpSpec, upstreams: &Arc<Upstreams>) -> Self {
        let notes = Arc::new(Notes::default());
        let ledger = Arc::<Notes>::clone(&notes);
        let clock = Arc::new(SystemClock);
        let executor = HttpExecutor::new(spec, upstreams, ledger, 4000, clock).unwrap();
        Self { executor, notes, stop: CancellationToken::new() }
    }

    pub(super) async fn run(&self, job: &Job) -> Execution {
        let execution = tokio::time::timeout(PATIENCE, self.executor.execute(job, &self.stop));
        execution.await.expect("the execution never ended")
    }
}

/// A queue that may reach this machine, as these settings have it otherwise.
pub(super) fn spec(url: String) -> HttpSpec {
    HttpSpec { upstream: LOCAL.to_owned(), ..HttpSpec::new(url, &Settings::defaults().limits) }
}

/// Runs one item at this URL.
pub(super) async fn run(spec: HttpSpec) -> Execution {
    Queue::new(spec, &upstreams(local())).run(&job(r#"{"a": 1}"#)).await
}
