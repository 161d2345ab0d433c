//! A database with the protocol at hand: batches made by SQL, claims, hand-ins, expiries.

use std::time::Duration;

use holdfast::model::{
    AttemptEnding, BatchId, Conclusion, Counts, Disposition, Evidence, Family, Finding, History,
    Hold, ItemStatus, Leaf, LeaseId, LogTail, Position, PublishedResult, Settlement, StopReason,
    Verdict, VerdictClass, WorkerId,
};
use holdfast::store::{
    Claim, ClaimAnswer, ClaimRequest, Concluding, ControlAnswer, ControlVerb, Database,
    DatabaseOptions, ExportRange, FlightError, HandIn, HandInAnswer, ReapPolicy, Reaped, Recheck,
    RecheckRequest, RetryAnswer, StageAnswer, Staging, WorkerRow,
};
use time::OffsetDateTime;
use tokio_postgres::Client;

use super::TestDb;

/// The length of every lease that no test lets expire by itself.
pub(crate) const TTL: Duration = Duration::from_mins(1);

/// Everything is taken back with its charge, and may be claimed again at once.
pub(crate) const REAP: ReapPolicy = ReapPolicy {
    charge: true,
    max_crashes: 3,
    max_interruptions: 5,
    backoff_base: Duration::ZERO,
    backoff_max: Duration::ZERO,
};

/// A batch to be made.
#[derive(Clone, Copy)]
pub(crate) struct BatchSpec {
    pub(crate) items: i32,
    pub(crate) owner: &'static str,
    pub(crate) max_running: Option<i32>,
    pub(crate) max_live: i32,
    pub(crate) max_checking: i32,
    pub(crate) max_attempts: i32,
    /// The acceptance criteria of every item, as JSON text.
    pub(crate) criteria: Option<&'static str>,
}

impl Default for BatchSpec {
    fn default() -> Self {
        Self {
            items: 1,
            owner: "alice",
            max_running: None,
            max_live: 1_000,
            max_checking: 64,
            max_attempts: 3,
            criteria: None,
        }
    }
}

/// One test's database, with a registered worker.
pub(crate) struct Bed {
    pub(crate) store: Database,
    pub(crate) sql: Client,
    pub(crate) worker: WorkerId,
    pub(crate) db: TestDb,
}

impl Bed {
    pub(crate) async fn new() -> Self {
        let db = TestDb::fresh().await;
        let store = Database::new(options(&db)).unwrap();
        let sql = db.client().await;
        let worker = WorkerId::generate();
        let bed = Self { store, sql, worker, db };
        bed.register(worker).await;
        bed
    }

    /// The database with another limit on waiting for locks.
    pub(crate) fn store_that_waits(&self, lock_timeout: Duration) -> Database {
        Database::new(DatabaseOptions { lock_timeout, ..options(&self.db) }).unwrap()
    }

    /// The database with as many connections as a worker has, so that each is soon warm.
    pub(crate) fn store_of_a_worker(&self) -> Database {
        Database::new(DatabaseOptions { pool_size: 4, ..options(&self.db) }).unwrap()
    }

    pub(crate) async fn register(&self, worker: WorkerId) {
        let now = OffsetDateTime::UNIX_EPOCH; // the database writes its own times
        let row = WorkerRow {
            id: worker,
            name: "w".into(),
            host: "h".into(),
            pid: 1,
            version: "0".into(),
            queues: vec!["q".into()],
            slots: 16,
            state: "running".into(),
            executing: 0,
            started_at: now,
            heartbeat_at: now,
            heartbeat_age_s: 0.0,
            silent: false,
            asked: None,
            ended_at: None,
            exit_reason: None,
        };
        self.store.register_worker(&row, TTL.as_secs_f64()).await.unwrap();
    }

    pub(crate) async fn batch(&self, items: i32) -> BatchId {
        self.batch_of(BatchSpec { items, ..BatchSpec::default() }).await
    }

    pub(crate) async fn batch_of(&self, spec: BatchSpec) -> BatchId {
        let id = BatchId::generate();
        let insert = "
            WITH b AS (
                INSERT INTO holdfast.batches (id, owner, queue, content_digest, spec, item_count,
                    max_running, max_live, max_checking, max_attempts)
                VALUES ($1, $2, 'q', '', '{}', $3, $4, $5, $7, $6)
            ), p AS (
                INSERT INTO holdfast.progress (batch_id, seq, next_position) VALUES ($1, 0, 0)
            )
            INSERT INTO holdfast.items (batch_id, position, key, input, acceptance_criteria)
            SELECT $1, g, 'item-' || g, to_json(g), $8::text::json FROM generate_series(0, $3 - 1) g";
        self.sql
            .execute(
                insert,
                &[
                    &id.uuid(),
                    &spec.owner,
                    &spec.items,
                    &spec.max_running,
                    &spec.max_live,
                    &spec.max_attempts,
                    &spec.max_checking,
                    &spec.criteria,
                ],
            )
            .await
            .unwrap();
        id
    }

    /// Gives the items at `from..to` a time of their own, some seconds from now.
    pub(crate) async fn defer(&self, batch: BatchId, from: i32, to: i32, seconds: f64) {
        self.run(
            "UPDATE holdfast.items SET not_before = clock_timestamp() + make_interval(secs => $4)
              WHERE batch_id = $1 AND position >= $2 AND position < $3",
            &[&batch.uuid(), &from, &to, &seconds],
        )
        .await;
        self.run(
            "UPDATE holdfast.batches SET has_not_before = true WHERE id = $1",
            &[&batch.uuid()],
        )
        .await;
    }

    /// Runs one statement; how many rows it touched.
    pub(crate) async fn run(
        &self,
        sql: &str,
        params: &[&(dyn tokio_postgres::types::ToSql + Sync)],
    ) -> u64 {
        self.sql.execute(sql, params).await.unwrap_or_else(|error| panic!("{sql}: {error:?}"))
    }

    /// The one value of a statement whose only parameter is the batch.
    pub(crate) async fn value<T>(&self, batch: BatchId, sql: &str) -> T
    where
        T: for<'a> tokio_postgres::types::FromSql<'a>,
    {
        let row = self.sql.query_one(sql, &[&batch.uuid()]).await;
        row.unwrap_or_else(|error| panic!("{sql}: {error:?}")).get(0)
    }

    pub(crate) fn request(&self, batch: BatchId, want: u32) -> ClaimRequest {
        ClaimRequest {
            batch,
            lease: LeaseId::generate(),
            worker: self.worker,
            want,
            ttl: TTL,
            traceparent: None,
        }
    }

    pub(crate) async fn try_claim(&self, batch: BatchId, want: u32) -> Claim {
        self.store.claim(&self.request(batch, want)).await.unwrap()
    }

    pub(crate) async fn claim(&self, batch: BatchId, want: u32) -> Vec<Hold> {
        granted(self.try_claim(batch, want).await)
    }

    pub(crate) async fn claim_one(&self, batch: BatchId) -> Hold {
        self.claim(batch, 1).await.pop().unwrap()
    }

    /// Why a claim of this batch gets nothing.
    pub(crate) async fn refused(&self, batch: BatchId) -> ClaimAnswer {
        refusal(&self.try_claim(batch, 1).await)
    }

    /// Moves a lease's expiry into the past.
    pub(crate) async fn expire(&self, lease: LeaseId) {
        let expired = "UPDATE holdfast.leases SET expires_at = clock_timestamp() - interval '1 s'
                        WHERE lease_id = $1";
        assert_eq!(self.run(expired, &[&lease.uuid()]).await, 1, "no such lease");
    }

    /// Makes the last heartbeat of a worker an hour old.
    pub(crate) async fn silence(&self, worker: WorkerId) {
        let silent = "UPDATE holdfast.workers
                         SET heartbeat_at = clock_timestamp() - interval '1 hour' WHERE id = $1";
        assert_eq!(self.run(silent, &[&worker.uuid()]).await, 1, "no such worker");
    }

    pub(crate) async fn reap(&self, batch: BatchId) -> Vec<Reaped> {
        self.store.reap(batch, &REAP).await.unwrap()
    }

    /// Hands all in with the same settlement.
    pub(crate) async fn hand_in(&self, holds: &[Hold], settled: &Settlement) -> Vec<HandInAnswer> {
        let Some(first) = holds.first() else { return Vec::new() };
        let items: Vec<HandIn<'_>> =
            holds.iter().map(|hold| HandIn { hold, settlement: settled }).collect();
        self.store.hand_in(first.item().batch(), self.worker, TTL, &items).await.unwrap()
    }

    pub(crate) async fn hand_in_one(&self, hold: &Hold, settled: &Settlement) -> HandInAnswer {
        self.try_hand_in_one(hold, settled).await.unwrap()
    }

    pub(crate) async fn try_hand_in_one(
        &self,
        hold: &Hold,
        settled: &Settlement,
    ) -> Result<HandInAnswer, FlightError> {
        let items = [HandIn { hold, settlement: settled }];
        let answers = self.store.hand_in(hold.item().batch(), self.worker, TTL, &items).await?;
        Ok(answers[0])
    }

    pub(crate) async fn finish(&self, hold: &Hold) -> HandInAnswer {
        self.hand_in_one(hold, &succeeded()).await
    }

    /// Stages all with the same success and the same evidence.
    pub(crate) async fn stage(&self, holds: &[Hold], evidence: &[Evidence]) -> Vec<StageAnswer> {
        let Some(first) = holds.first() else { return Vec::new() };
        let settlement = succeeded();
        let items: Vec<Staging<'_>> = holds
            .iter()
            .map(|hold| Staging { hold, settlement: &settlement, evidence, workspace: None })
            .collect();
        self.store.stage(first.item().batch(), self.worker, TTL, &items).await.unwrap()
    }

    pub(crate) async fn stage_one(&self, hold: &Hold, workspace: Option<&str>) -> StageAnswer {
        let items = [Staging { hold, settlement: &succeeded(), evidence: &[], workspace }];
        self.store.stage(hold.item().batch(), self.worker, TTL, &items).await.unwrap()[0]
    }

    pub(crate) async fn conclude(&self, hold: &Hold, conclusion: &Conclusion) -> HandInAnswer {
        let items = [Concluding { hold, conclusion }];
        self.store.conclude(hold.item().batch(), TTL, &items).await.unwrap()[0]
    }

    pub(crate) fn recheck_request(&self, batch: BatchId, want: u32) -> RecheckRequest {
        RecheckRequest {
            batch,
            lease: LeaseId::generate(),
            worker: self.worker,
            want,
            ttl: TTL,
            volume: None,
            foreign: Duration::from_secs(30),
            traceparent: None,
        }
    }

    pub(crate) async fn try_recheck(&self, batch: BatchId, want: u32) -> Recheck {
        self.store.recheck(&self.recheck_request(batch, want)).await.unwrap()
    }

    pub(crate) async fn recheck(&self, batch: BatchId, want: u32) -> Vec<Hold> {
        match self.try_recheck(batch, want).await {
            Recheck::Granted(holds) => holds,
            Recheck::Nothing(answer) => panic!("granted nothing: {answer:?}"),
        }
    }

    pub(crate) async fn control(&self, batch: BatchId, verb: ControlVerb) -> ControlAnswer {
        self.store.control_batch(batch, None, verb, "tester").await.unwrap()
    }

    /// One chunk of a retry of everything.
    pub(crate) async fn retry(&self, batch: BatchId) -> RetryAnswer {
        let from = Position::new(0);
        self.store.retry_failed(batch, None, None, from, 1_000, "tester").await.unwrap()
    }

    pub(crate) async fn counts(&self, batch: BatchId) -> Counts {
        self.store.batch(batch, None).await.unwrap().unwrap().counts
    }

    /// Waits until so many statements of this database wait for locks.
    pub(crate) async fn until_waiting_for_locks(&self, count: i64) {
        let waiting = "SELECT count(*) FROM pg_locks l WHERE NOT l.granted AND l.pid IN
            (SELECT pid FROM pg_stat_activity WHERE datname = current_database())";
        let reached = async {
            while self.sql.query_one(waiting, &[]).await.unwrap().get::<_, i64>(0) < count {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), reached).await.expect("they wait");
    }

    pub(crate) async fn statuses(&self, batch: BatchId) -> Vec<ItemStatus> {
        let items = self.store.items(batch, None, Position::new(0), 1_000).await.unwrap();
        items.into_iter().map(|item| item.status).collect()
    }

    pub(crate) async fn is_ended(&self, batch: BatchId) -> bool {
        self.store.batch(batch, None).await.unwrap().unwrap().is_finished()
    }
}

fn options(db: &TestDb) -> DatabaseOptions {
    DatabaseOptions {
        url: db.url().to_owned(),
        application: "holdfast-test".into(),
        pool_size: 24,
        connect_timeout: Duration::from_secs(30),
        // Generous: a busy machine is no fault of the protocol.
        lock_timeout: Duration::from_secs(20),
        statement_timeout: Duration::from_secs(30),
        heartbeat_timeout: Duration::from_secs(20),
    }
}

pub(crate) fn granted(claim: Claim) -> Vec<Hold> {
    match claim {
        Claim::Granted { holds, .. } => holds,
        Claim::Nothing(answer, _) => panic!("granted nothing: {answer:?}"),
    }
}

pub(crate) fn refusal(claim: &Claim) -> ClaimAnswer {
    match claim {
        Claim::Granted { holds, .. } => panic!("granted {holds:?}"),
        Claim::Nothing(answer, _) => *answer,
    }
}

pub(crate) fn positions(holds: &[Hold]) -> Vec<i32> {
    holds.iter().map(|hold| hold.item().position().get()).collect()
}

/// The same right under another lease or token, as only a forger or a restored disk makes it.
pub(crate) fn forged(hold: &Hold, lease: LeaseId, token: i64) -> Hold {
    Hold::new(hold.item(), lease, holdfast::model::FencingToken::new(token), hold.history())
}

pub(crate) fn succeeded() -> Settlement {
    Settlement {
        disposition: Disposition::Succeed,
        started_at: Some(OffsetDateTime::now_utc()),
        ended_at: OffsetDateTime::now_utc(),
        result: PublishedResult { json: Some("\"done\"".into()), truncated: false, size_bytes: 4 },
        error: None,
        stop_reason: StopReason::Completed,
        exit_status: Some(0),
        signal: None,
        log: LogTail::default(),
    }
}

/// A verdict of one leaf.
pub(crate) fn verdict(finding: Finding) -> Verdict {
    Verdict::new(vec![Leaf::new("file:a exists", Family::FileExists, finding, "why")]).unwrap()
}

pub(crate) fn publish(finding: Finding) -> Conclusion {
    Conclusion::Publish(Some(verdict(finding)))
}

pub(crate) fn failed() -> Settlement {
    Settlement {
        disposition: Disposition::Fail,
        result: PublishedResult::default(),
        error: Some("it broke".into()),
        stop_reason: StopReason::ExitStatus,
        exit_status: Some(1),
        ..succeeded()
    }
}

/// A charged error, ready for the next attempt after `delay`.
pub(crate) fn again(history: History, delay: Duration) -> Settlement {
    Settlement {
        disposition: Disposition::Again {
            ending: AttemptEnding::Error,
            charged: true,
            delay,
            history: history.plus_attempt(),
        },
        ..failed()
    }
}

/// A page of an export from a position on.
pub(crate) fn everything(batch: BatchId, from: i32) -> ExportRange {
    ExportRange {
        batch,
        cancelled: false,
        statuses: ItemStatus::ALL.to_vec(),
        verdicts: VerdictClass::ALL.to_vec(),
        from: Position::new(from),
        positions: 1_000,
        bytes: 1 << 20,
    }
}
