//! Typed calls of the steps of acceptance checks: stage, conclude, recheck. Each is one transaction
//! in one flight (L3).

use std::time::Duration;

use time::OffsetDateTime;
use tokio_postgres::Row;
use tokio_postgres::types::{ToSql, Type};
use uuid::Uuid;

use super::flight::FlightError;
use super::protocol::{ClaimAnswer, HandInAnswer, answer_of, hand_in_answer, holds_of, one};
use super::{Database, StoreError, statements};
use crate::model::criteria::normalize_json;
use crate::model::{
    BatchId, Conclusion, Evidence, FencingToken, Hold, LeaseId, Position, PreviousAttempt,
    Settlement, Verdict, VerdictClass, WorkerId,
};

/// One completed execution whose check comes next.
#[derive(Debug)]
pub struct Staging<'a> {
    /// The right to stage it.
    pub hold: &'a Hold,
    /// Its success, as it will be published.
    pub settlement: &'a Settlement,
    /// What was recorded of its commands, oldest first.
    pub evidence: &'a [Evidence],
    /// The workspace it had, if any: its id as text, `VOLUME/PLACE`.
    pub workspace: Option<&'a str>,
}

/// What staging answers for one item.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StageAnswer {
    /// It is stored, by this call or by an earlier one, and still held: check it.
    Staged,
    /// It is stored, and the lease has lost it since: somebody else checks it.
    Moved,
    /// The lease no longer holds the item: nothing was stored (F3).
    Lost,
    /// The batch was cancelled (P5).
    Cancelled,
}

/// One staged item whose check is over.
#[derive(Debug)]
pub struct Concluding<'a> {
    /// The right to hand it in.
    pub hold: &'a Hold,
    /// What becomes of it.
    pub conclusion: &'a Conclusion,
}

/// What a worker asks of a recheck.
#[derive(Clone, Debug)]
pub struct RecheckRequest {
    /// The batch to take lost checks of.
    pub batch: BatchId,
    /// The lease they shall have (F1).
    pub lease: LeaseId,
    /// The worker.
    pub worker: WorkerId,
    /// Free check slots: the lease never holds more.
    pub want: u32,
    /// The lease's length.
    pub ttl: Duration,
    /// The volume this worker's workspaces are on.
    pub volume: Option<Uuid>,
    /// How long items on other volumes are left to workers that see those.
    pub foreign: Duration,
    /// Trace context of the lease.
    pub traceparent: Option<String>,
}

/// What a recheck answers.
#[derive(Debug)]
pub enum Recheck {
    /// Items, each held.
    Granted(Vec<Hold>),
    /// Nothing, and why.
    Nothing(ClaimAnswer),
}

/// A batch with lost checks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecheckBatch {
    /// The batch.
    pub id: BatchId,
    /// Its queue.
    pub queue: String,
}

/// What a repeated check needs of a staged item.
#[derive(Clone, Debug)]
pub struct StagedItem {
    /// Its position.
    pub position: Position,
    /// Its criteria, as they are effective; none when there is no usable one.
    pub criteria: Option<Vec<String>>,
    /// The workspace its execution had, if any: its id as text.
    pub workspace: Option<String>,
    /// What was recorded of the attempt that was staged, oldest first; none when it cannot be read.
    pub evidence: Option<Vec<Evidence>>,
    /// The attempt that was staged.
    pub previous: PreviousAttempt,
}

impl Database {
    /// Stores results of one batch before their checks; answers in the order given.
    ///
    /// # Errors
    /// After [`FlightError::Unknown`] repeat it: a repeat finds itself applied (F6).
    ///
    /// # Cancel safety
    /// Dropped after its first poll it may take effect; repeating it is safe.
    pub async fn stage(
        &self,
        batch: BatchId,
        worker: WorkerId,
        ttl: Duration,
        items: &[Staging<'_>],
    ) -> Result<Vec<StageAnswer>, FlightError> {
        let columns = StageColumns::new(items);
        let rows = self
            .flight(
                statements::STAGE,
                &columns.params(&batch.uuid(), &worker.uuid(), &ttl.as_secs_f64()),
            )
            .await?;
        let holds = items.iter().map(|item| item.hold);
        Ok(holds
            .map(|hold| match answer_of(&rows, hold) {
                Some("staged") => StageAnswer::Staged,
                Some("moved") => StageAnswer::Moved,
                Some("cancelled") => StageAnswer::Cancelled,
                Some(_) | None => StageAnswer::Lost,
            })
            .collect())
    }

    /// Publishes checked items of one batch, or gives them back for another check; answers in the
    /// order given.
    ///
    /// # Errors
    /// After [`FlightError::Unknown`] repeat it: a repeat finds itself applied (F6).
    ///
    /// # Cancel safety
    /// Dropped after its first poll it may take effect; repeating it is safe.
    pub async fn conclude(
        &self,
        batch: BatchId,
        ttl: Duration,
        items: &[Concluding<'_>],
    ) -> Result<Vec<HandInAnswer>, FlightError> {
        let columns = ConcludeColumns::new(items);
        let rows = self
            .flight(statements::CONCLUDE, &columns.params(&batch.uuid(), &ttl.as_secs_f64()))
            .await?;
        Ok(items.iter().map(|item| hand_in_answer(&rows, item.hold)).collect())
    }

    /// Takes lost checks of one batch under a new lease.
    ///
    /// # Errors
    /// After [`FlightError::Unknown`] the lease may exist: it is never adopted, only given back (F6).
    ///
    /// # Cancel safety
    /// Dropped after its first poll, it may take effect: give its lease back.
    pub async fn recheck(&self, request: &RecheckRequest) -> Result<Recheck, FlightError> {
        let rows = self
            .flight(
                statements::RECHECK,
                &[
                    (&request.batch.uuid(), Type::UUID),
                    (&request.lease.uuid(), Type::UUID),
                    (&request.worker.uuid(), Type::UUID),
                    (&i32::try_from(request.want).unwrap_or(i32::MAX), Type::INT4),
                    (&request.ttl.as_secs_f64(), Type::FLOAT8),
                    (&request.volume.map(|id| id.to_string()), Type::TEXT),
                    (&request.foreign.as_secs_f64(), Type::FLOAT8),
                    (&request.traceparent, Type::TEXT),
                ],
            )
            .await?;
        let row = one(&rows);
        Ok(match row.get::<_, &str>("answer") {
            "granted" => Recheck::Granted(holds_of(request.batch, request.lease, row)),
            "empty" => Recheck::Nothing(ClaimAnswer::Empty),
            "closed" => Recheck::Nothing(ClaimAnswer::Closed),
            "contended" => Recheck::Nothing(ClaimAnswer::Contended),
            "claims_off" => Recheck::Nothing(ClaimAnswer::ClaimsOff),
            _ => Recheck::Nothing(ClaimAnswer::Unknown),
        })
    }

    /// Batches of these queues, paused ones too, with checks that were lost and may be repeated by
    /// a worker that sees this volume.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn recheck_batches(
        &self,
        queues: &[String],
        volume: Option<Uuid>,
        foreign: Duration,
    ) -> Result<Vec<RecheckBatch>, StoreError> {
        let rows = self
            .query(
                statements::RECHECK_BATCHES,
                &[
                    (&queues, Type::TEXT_ARRAY),
                    (&volume.map(|id| id.to_string()), Type::TEXT),
                    (&foreign.as_secs_f64(), Type::FLOAT8),
                ],
            )
            .await?;
        Ok(rows
            .iter()
            .map(|row| RecheckBatch { id: BatchId::from_uuid(row.get(0)), queue: row.get(1) })
            .collect())
    }

    /// What checks of staged positions need.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn staged_items(
        &self,
        batch: BatchId,
        positions: &[Position],
    ) -> Result<Vec<StagedItem>, StoreError> {
        let positions: Vec<i32> = positions.iter().map(|p| p.get()).collect();
        let rows = self
            .query(
                statements::STAGED_ITEMS,
                &[(&batch.uuid(), Type::UUID), (&positions, Type::INT4_ARRAY)],
            )
            .await?;
        Ok(rows.iter().map(staged_item).collect())
    }
}

fn staged_item(row: &Row) -> StagedItem {
    let criteria: Option<&str> = row.get(1);
    let records: Vec<&str> = row.get(2);
    StagedItem {
        position: Position::new(row.get(0)),
        workspace: row.get(3),
        criteria: criteria.and_then(|json| normalize_json(json).ok().flatten()),
        evidence: records.into_iter().map(|json| serde_json::from_str(json).ok()).collect(),
        previous: PreviousAttempt {
            token: FencingToken::new(row.get(4)),
            ending: "staged".to_owned(),
            worker: WorkerId::from_uuid(row.get(5)),
        },
    }
}

/// The parallel arrays of a staging.
#[derive(Default)]
struct StageColumns<'a> {
    lease: Vec<Uuid>,
    token: Vec<i64>,
    position: Vec<i32>,
    attempt: Vec<i32>,
    started: Vec<Option<OffsetDateTime>>,
    ended: Vec<OffsetDateTime>,
    result: Vec<Option<&'a str>>,
    truncated: Vec<bool>,
    size: Vec<i64>,
    reason: Vec<&'static str>,
    exit: Vec<Option<i32>>,
    signal: Vec<Option<i32>>,
    workspace: Vec<Option<&'a str>>,
    record_of: Vec<i32>,
    record_seq: Vec<i32>,
    record: Vec<String>,
}

impl<'a> StageColumns<'a> {
    fn new(items: &'a [Staging<'a>]) -> Self {
        let mut columns = Self::default();
        for (place, item) in (1..).zip(items) {
            columns.push(place, item);
        }
        columns
    }

    /// `place`: of the item in the arrays, from 1 on.
    fn push(&mut self, place: i32, item: &'a Staging<'a>) {
        let Staging { hold, settlement, evidence, workspace } = item;
        self.lease.push(hold.lease().uuid());
        self.token.push(hold.token().get());
        self.position.push(hold.item().position().get());
        self.attempt.push(i32::from(hold.attempt().get()));
        self.started.push(settlement.started_at);
        self.ended.push(settlement.ended_at);
        self.result.push(settlement.result.json.as_deref());
        self.truncated.push(settlement.result.truncated);
        self.size.push(settlement.result.size_bytes);
        self.reason.push(settlement.stop_reason.as_str());
        self.exit.push(settlement.exit_status);
        self.signal.push(settlement.signal);
        self.workspace.push(*workspace);
        for (seq, record) in (0..).zip(evidence.iter()) {
            self.record_of.push(place);
            self.record_seq.push(seq);
            self.record.push(
                serde_json::to_string(record).expect("texts, numbers and times of years to 9999"),
            );
        }
    }

    fn params<'p>(
        &'p self,
        batch: &'p Uuid,
        worker: &'p Uuid,
        ttl_s: &'p f64,
    ) -> [(&'p (dyn ToSql + Sync), Type); 19] {
        [
            (batch, Type::UUID),
            (worker, Type::UUID),
            (ttl_s, Type::FLOAT8),
            (&self.lease, Type::UUID_ARRAY),
            (&self.token, Type::INT8_ARRAY),
            (&self.position, Type::INT4_ARRAY),
            (&self.attempt, Type::INT4_ARRAY),
            (&self.started, Type::TIMESTAMPTZ_ARRAY),
            (&self.ended, Type::TIMESTAMPTZ_ARRAY),
            (&self.result, Type::TEXT_ARRAY),
            (&self.truncated, Type::BOOL_ARRAY),
            (&self.size, Type::INT8_ARRAY),
            (&self.reason, Type::TEXT_ARRAY),
            (&self.exit, Type::INT4_ARRAY),
            (&self.signal, Type::INT4_ARRAY),
            (&self.workspace, Type::TEXT_ARRAY),
            (&self.record_of, Type::INT4_ARRAY),
            (&self.record_seq, Type::INT4_ARRAY),
            (&self.record, Type::TEXT_ARRAY),
        ]
    }
}

/// The parallel arrays of a conclusion.
#[derive(Default)]
struct ConcludeColumns {
    lease: Vec<Uuid>,
    token: Vec<i64>,
    position: Vec<i32>,
    kind: Vec<&'static str>,
    verdict: Vec<Option<String>>,
    class: Vec<Option<&'static str>>,
    history: Vec<Option<i64>>,
}

impl ConcludeColumns {
    fn new(items: &[Concluding<'_>]) -> Self {
        let mut columns = Self::default();
        for item in items {
            columns.push(item.hold, item.conclusion);
        }
        columns
    }

    fn push(&mut self, hold: &Hold, conclusion: &Conclusion) {
        self.lease.push(hold.lease().uuid());
        self.token.push(hold.token().get());
        self.position.push(hold.item().position().get());
        let (kind, verdict, history) = match conclusion {
            Conclusion::Publish(verdict) => ("publish", verdict.as_ref(), None),
            Conclusion::Recheck(history) => ("recheck", None, Some(history.packed())),
        };
        self.kind.push(kind);
        self.class.push(class_column(verdict));
        self.verdict.push(verdict.map(|verdict| verdict.to_json().to_string()));
        self.history.push(history);
    }

    fn params<'p>(
        &'p self,
        batch: &'p Uuid,
        ttl_s: &'p f64,
    ) -> [(&'p (dyn ToSql + Sync), Type); 9] {
        [
            (batch, Type::UUID),
            (ttl_s, Type::FLOAT8),
            (&self.lease, Type::UUID_ARRAY),
            (&self.token, Type::INT8_ARRAY),
            (&self.position, Type::INT4_ARRAY),
            (&self.kind, Type::TEXT_ARRAY),
            (&self.verdict, Type::TEXT_ARRAY),
            (&self.class, Type::TEXT_ARRAY),
            (&self.history, Type::INT8_ARRAY),
        ]
    }
}

/// The class as it is stored: null for no verdict.
fn class_column(verdict: Option<&Verdict>) -> Option<&'static str> {
    match VerdictClass::of(verdict) {
        VerdictClass::None => None,
        class @ (VerdictClass::Holds | VerdictClass::Fails | VerdictClass::Unverified) => {
            Some(class.as_str())
        }
    }
}
