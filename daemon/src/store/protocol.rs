//! Typed calls of the protocol's functions. Each is one transaction in one flight (L3).

use std::time::Duration;

use serde::{Deserialize, Serialize};
use time::OffsetDateTime;
use tokio_postgres::Row;
use tokio_postgres::types::{ToSql, Type};
use uuid::Uuid;

use super::Database;
use super::flight::FlightError;
use super::statements;
use crate::model::{
    Asked, BatchId, Disposition, FencingToken, History, Hold, ItemRef, LeaseId, Position,
    Settlement, WorkerId,
};
use crate::telemetry::labels::RecoveryDisposition;

/// What a worker asks of a claim.
#[derive(Clone, Debug)]
pub struct ClaimRequest {
    /// The batch to claim from.
    pub batch: BatchId,
    /// The lease the claim shall have (F1).
    pub lease: LeaseId,
    /// The worker.
    pub worker: WorkerId,
    /// Free slots: the lease never holds more.
    pub want: u32,
    /// The lease's length.
    pub ttl: Duration,
    /// Trace context of the lease, for links from later attempts.
    pub traceparent: Option<String>,
}

/// What a claim answers.
#[derive(Debug)]
pub enum Claim {
    /// Items, each held.
    Granted {
        /// The holds, in the order of their positions in the lease.
        holds: Vec<Hold>,
        /// The one item has taken its worker down before and runs by itself.
        alone: bool,
        /// For how long items were next in line, as far as that is known.
        waited: Vec<Duration>,
    },
    /// Nothing, and why; the duration until a look is worth while, where known.
    Nothing(ClaimAnswer, Option<Duration>),
}

/// Why a claim granted nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ClaimAnswer {
    /// Nothing is due.
    Empty,
    /// The live window is full.
    Window,
    /// `max_running` is reached.
    Capped,
    /// Too many items of the batch await their check.
    Backlog,
    /// The batch's own time has not come.
    NotBefore,
    /// Paused, cancelled or ended.
    Closed,
    /// Another claimer or reaper has the ticket (L4).
    Contended,
    /// Claims are switched off for the whole database.
    ClaimsOff,
    /// Claims wait for one lease after a failover or a restore (F7).
    Settling,
    /// No such batch.
    Unknown,
}

/// What a worker vouches for in a heartbeat: one lease.
#[derive(Clone, Debug)]
pub struct Vouched {
    /// Its batch.
    pub batch: BatchId,
    /// The lease.
    pub lease: LeaseId,
    /// Its token.
    pub token: FencingToken,
    /// Positions whose execution has begun.
    pub started: Vec<Position>,
    /// What its executions say of their progress, where that is not stored yet.
    pub reports: Option<Reports>,
}

/// What the executions of one lease say of their progress.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reports {
    /// Rises with every change.
    pub version: u64,
    /// An object of [`ProgressReport`](crate::model::ProgressReport)s by position, as JSON.
    pub json: String,
}

/// What a heartbeat says of one lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RenewAnswer {
    /// Its expiry was moved forward.
    Renewed,
    /// A hand-in holds the row and renews it itself.
    Busy,
    /// Its batch was cancelled.
    Cancelled,
    /// It is no longer there.
    Gone,
}

/// One lease's answer.
#[derive(Clone, Copy, Debug)]
pub struct LeaseState {
    /// The lease.
    pub lease: LeaseId,
    /// What became of it.
    pub answer: RenewAnswer,
    /// How many positions its row still holds.
    pub held: usize,
}

/// What a heartbeat answers.
#[derive(Debug)]
pub struct Renewal {
    /// One per lease vouched for.
    pub leases: Vec<LeaseState>,
    /// Whether the worker's row is there and not ended.
    pub known: bool,
    /// What an operator asks of the worker.
    pub asked: Option<Asked>,
    /// The database's clock.
    pub database_now: OffsetDateTime,
    /// When the server started.
    pub server_started: OffsetDateTime,
    /// The server's timeline.
    pub timeline: i32,
}

/// One item handed in: its hold, by reference, and what becomes of it.
#[derive(Debug)]
pub struct HandIn<'a> {
    /// The right to hand it in.
    pub hold: &'a Hold,
    /// What becomes of the item.
    pub settlement: &'a Settlement,
}

/// What a hand-in answers for one item.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HandInAnswer {
    /// It is stored, by this call or by an earlier one.
    Applied,
    /// The lease no longer holds the item: nothing was stored (F3).
    Lost,
    /// The batch was cancelled: nothing was stored (P5).
    Cancelled,
}

/// How the reaper judges what it takes back.
#[derive(Clone, Copy, Debug)]
pub struct ReapPolicy {
    /// Whether an expiry is charged; not during a mass expiry.
    pub charge: bool,
    /// Crashes after which an item fails as poison.
    pub max_crashes: u8,
    /// Interruptions free of charge.
    pub max_interruptions: u8,
    /// First backoff.
    pub backoff_base: Duration,
    /// Longest backoff.
    pub backoff_max: Duration,
}

/// What the reaper did with a position.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ReapDisposition {
    /// It waits for another attempt.
    Requeued,
    /// Its attempts are spent, or it is poison.
    Failed,
    /// It was executed: it waits for another check.
    Rechecked,
    /// It was executed and its check was lost too often: it ended with its result and no verdict.
    Published,
}

/// One position taken back.
#[derive(Clone, Copy, Debug)]
pub struct Reaped {
    /// The item.
    pub item: ItemRef,
    /// The lease it was in.
    pub lease: LeaseId,
    /// That lease's token.
    pub token: FencingToken,
    /// What became of it.
    pub disposition: ReapDisposition,
    /// How long after its expiry.
    pub late: Duration,
}

/// A control of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ControlVerb {
    /// Claims stop.
    Pause,
    /// Claims go on.
    Resume,
    /// Nothing is published any more.
    Cancel,
}

impl ControlVerb {
    /// The word used everywhere.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Pause => "pause",
            Self::Resume => "resume",
            Self::Cancel => "cancel",
        }
    }
}

/// What a control answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ControlAnswer {
    /// It is so now.
    Applied,
    /// It was so already.
    Unchanged,
    /// The batch has ended: there is nothing to control.
    Ended,
    /// No such batch, or another owner's.
    Unknown,
}

/// What one chunk of a retry answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RetryAnswer {
    /// Items moved, and where the next chunk begins, if there may be one.
    Moved {
        /// How many failed items got new attempts.
        items: i32,
        /// Where to go on; none at the end.
        next: Option<Position>,
    },
    /// The batch is cancelled.
    Cancelled,
    /// No such batch, or another owner's.
    Unknown,
}

impl From<ReapDisposition> for RecoveryDisposition {
    fn from(disposition: ReapDisposition) -> Self {
        match disposition {
            ReapDisposition::Requeued => Self::Requeued,
            ReapDisposition::Failed => Self::Failed,
            ReapDisposition::Rechecked => Self::Rechecked,
            ReapDisposition::Published => Self::Published,
        }
    }
}

impl Database {
    /// Claims items of one batch under a new lease.
    ///
    /// # Errors
    /// After [`FlightError::Unknown`] the lease may exist: it is never adopted, only given back (F6).
    ///
    /// # Cancel safety
    /// Dropped after its first poll, the claim may take effect: give its lease back.
    pub async fn claim(&self, request: &ClaimRequest) -> Result<Claim, FlightError> {
        let rows = self
            .flight(
                statements::CLAIM,
                &[
                    (&request.batch.uuid(), Type::UUID),
                    (&request.lease.uuid(), Type::UUID),
                    (&request.worker.uuid(), Type::UUID),
                    (&i32::try_from(request.want).unwrap_or(i32::MAX), Type::INT4),
                    (&request.ttl.as_secs_f64(), Type::FLOAT8),
                    (&request.traceparent, Type::TEXT),
                ],
            )
            .await?;
        let row = one(&rows);
        let ready_in = row
            .get::<_, Option<f64>>("ready_in_s")
            .map(|seconds| Duration::try_from_secs_f64(seconds).unwrap_or_default());
        let nothing = |answer| Ok(Claim::Nothing(answer, ready_in));
        match row.get::<_, &str>("answer") {
            "granted" => {
                let holds = holds_of(request.batch, request.lease, row);
                let waited = waits_of(holds.len(), row);
                Ok(Claim::Granted { holds, alone: row.get("alone"), waited })
            }
            "empty" => nothing(ClaimAnswer::Empty),
            "window" => nothing(ClaimAnswer::Window),
            "capped" => nothing(ClaimAnswer::Capped),
            "backlog" => nothing(ClaimAnswer::Backlog),
            "not_before" => nothing(ClaimAnswer::NotBefore),
            "closed" | "ended" => nothing(ClaimAnswer::Closed),
            "contended" => nothing(ClaimAnswer::Contended),
            "claims_off" => nothing(ClaimAnswer::ClaimsOff),
            "settling" => nothing(ClaimAnswer::Settling),
            _ => nothing(ClaimAnswer::Unknown),
        }
    }

    /// Says that the execution of an item that runs alone is about to begin: only then is it charged
    /// when its worker dies. Answers whether its lease still holds it.
    ///
    /// # Errors
    /// Repeating it is safe.
    pub async fn mark_begun(&self, hold: &Hold) -> Result<bool, FlightError> {
        let rows = self
            .flight(
                statements::MARK_BEGUN,
                &[
                    (&hold.item().batch().uuid(), Type::UUID),
                    (&hold.lease().uuid(), Type::UUID),
                    (&hold.token().get(), Type::INT8),
                    (&hold.item().position().get(), Type::INT4),
                ],
            )
            .await?;
        Ok(one(&rows).get("held"))
    }

    /// Hands in items of one batch; answers in the order given.
    ///
    /// # Errors
    /// After [`FlightError::Unknown`] repeat it: a repeat finds itself applied (F6).
    ///
    /// # Cancel safety
    /// Dropped after its first poll it may take effect; repeating it is safe.
    pub async fn hand_in(
        &self,
        batch: BatchId,
        worker: WorkerId,
        ttl: Duration,
        items: &[HandIn<'_>],
    ) -> Result<Vec<HandInAnswer>, FlightError> {
        let columns = HandInColumns::new(items);
        let rows = self
            .flight(
                statements::HAND_IN,
                &columns.params(&batch.uuid(), &worker.uuid(), &ttl.as_secs_f64()),
            )
            .await?;
        Ok(items.iter().map(|item| hand_in_answer(&rows, item.hold)).collect())
    }

    /// Gives a whole lease back whose claim was never answered; how many positions it held.
    ///
    /// # Errors
    /// Repeating it is safe.
    pub async fn give_back(
        &self,
        batch: BatchId,
        lease: LeaseId,
        max_interruptions: u8,
    ) -> Result<i32, FlightError> {
        let rows = self
            .flight(
                statements::GIVE_BACK,
                &[
                    (&batch.uuid(), Type::UUID),
                    (&lease.uuid(), Type::UUID),
                    (&i32::from(max_interruptions), Type::INT4),
                ],
            )
            .await?;
        Ok(one(&rows).get(0))
    }

    /// Sends one heartbeat on the connection reserved for it.
    ///
    /// # Errors
    /// Ask again until the trust deadline (F5).
    pub async fn renew(
        &self,
        worker: WorkerId,
        ttl: Duration,
        state: &str,
        executing: usize,
        leases: &[Vouched],
    ) -> Result<Renewal, FlightError> {
        let batches: Vec<Uuid> = leases.iter().map(|v| v.batch.uuid()).collect();
        let ids: Vec<Uuid> = leases.iter().map(|v| v.lease.uuid()).collect();
        let tokens: Vec<i64> = leases.iter().map(|v| v.token.get()).collect();
        let started: Vec<String> = leases.iter().map(|v| array_literal(&v.started)).collect();
        let rows = self
            .heartbeat_flight(
                statements::RENEW,
                &[
                    (&worker.uuid(), Type::UUID),
                    (&ttl.as_secs_f64(), Type::FLOAT8),
                    (&state, Type::TEXT),
                    (&i32::try_from(executing).unwrap_or(i32::MAX), Type::INT4),
                    (&batches, Type::UUID_ARRAY),
                    (&ids, Type::UUID_ARRAY),
                    (&tokens, Type::INT8_ARRAY),
                    (&started, Type::TEXT_ARRAY),
                ],
            )
            .await?;
        let first = one(&rows);
        Ok(Renewal {
            leases: rows.iter().filter_map(lease_state).collect(),
            known: first.get("known"),
            asked: first.get::<_, Option<&str>>("asked").and_then(Asked::of),
            database_now: first.get("database_now"),
            server_started: first.get("server_started"),
            timeline: first.get("timeline"),
        })
    }

    /// Takes back the expired leases of one batch.
    ///
    /// # Errors
    /// Repeating it is safe.
    pub async fn reap(
        &self,
        batch: BatchId,
        policy: &ReapPolicy,
    ) -> Result<Vec<Reaped>, FlightError> {
        let rows = self
            .flight(
                statements::REAP,
                &[
                    (&batch.uuid(), Type::UUID),
                    (&policy.charge, Type::BOOL),
                    (&i32::from(policy.max_crashes), Type::INT4),
                    (&i32::from(policy.max_interruptions), Type::INT4),
                    (&policy.backoff_base.as_secs_f64(), Type::FLOAT8),
                    (&policy.backoff_max.as_secs_f64(), Type::FLOAT8),
                ],
            )
            .await?;
        Ok(rows
            .iter()
            .map(|row| Reaped {
                item: ItemRef::new(batch, Position::new(row.get("item_position"))),
                lease: LeaseId::from_uuid(row.get("lease_id")),
                token: FencingToken::new(row.get("token")),
                disposition: match row.get::<_, &str>("disposition") {
                    "requeued" => ReapDisposition::Requeued,
                    "rechecked" => ReapDisposition::Rechecked,
                    "published" => ReapDisposition::Published,
                    _ => ReapDisposition::Failed,
                },
                late: Duration::try_from_secs_f64(row.get("late_s")).unwrap_or_default(),
            })
            .collect())
    }

    /// Clears away at most `limit` rows of each kind that a cancel left behind; whether another call
    /// may clear more now. Rows in use are left to the next sweep.
    ///
    /// # Errors
    /// Repeating it is safe.
    pub async fn clear_cancelled(&self, batch: BatchId, limit: i32) -> Result<bool, FlightError> {
        let rows = self
            .flight(
                statements::CLEAR_CANCELLED,
                &[(&batch.uuid(), Type::UUID), (&limit, Type::INT4)],
            )
            .await?;
        Ok(one(&rows).get(0))
    }

    /// Ends a batch with nothing left; whether this call did.
    ///
    /// # Errors
    /// Repeating it is safe.
    pub async fn end_batch(&self, batch: BatchId) -> Result<bool, FlightError> {
        let rows = self.flight(statements::END_BATCH, &[(&batch.uuid(), Type::UUID)]).await?;
        Ok(one(&rows).get(0))
    }

    /// Pauses, resumes or cancels a batch of `owner`, or of anyone when none is given.
    ///
    /// # Errors
    /// Repeating it is safe.
    pub async fn control_batch(
        &self,
        batch: BatchId,
        owner: Option<&str>,
        verb: ControlVerb,
        actor: &str,
    ) -> Result<ControlAnswer, FlightError> {
        let rows = self
            .flight(
                statements::CONTROL_BATCH,
                &[
                    (&batch.uuid(), Type::UUID),
                    (&owner, Type::TEXT),
                    (&verb.as_str(), Type::TEXT),
                    (&actor, Type::TEXT),
                ],
            )
            .await?;
        Ok(match one(&rows).get::<_, &str>(0) {
            "applied" => ControlAnswer::Applied,
            "unchanged" => ControlAnswer::Unchanged,
            "ended" => ControlAnswer::Ended,
            _ => ControlAnswer::Unknown,
        })
    }

    /// Gives at most `limit` failed items new attempts, from position `from` on; all when no
    /// positions are named.
    ///
    /// # Errors
    /// Repeating a chunk moves what is failed then.
    pub async fn retry_failed(
        &self,
        batch: BatchId,
        owner: Option<&str>,
        positions: Option<&[Position]>,
        from: Position,
        limit: i32,
        actor: &str,
    ) -> Result<RetryAnswer, FlightError> {
        let positions: Option<Vec<i32>> =
            positions.map(|list| list.iter().map(|p| p.get()).collect());
        let rows = self
            .flight(
                statements::RETRY_FAILED,
                &[
                    (&batch.uuid(), Type::UUID),
                    (&owner, Type::TEXT),
                    (&positions, Type::INT4_ARRAY),
                    (&from.get(), Type::INT4),
                    (&limit, Type::INT4),
                    (&actor, Type::TEXT),
                ],
            )
            .await?;
        let row = one(&rows);
        Ok(match row.get::<_, &str>("answer") {
            "applied" => RetryAnswer::Moved {
                items: row.get("moved"),
                next: row.get::<_, Option<i32>>("next_from").map(Position::new),
            },
            "cancelled" => RetryAnswer::Cancelled,
            _ => RetryAnswer::Unknown,
        })
    }
}

/// The one row that a function with one answer returns.
pub(super) fn one(rows: &[Row]) -> &Row {
    rows.first().expect("a protocol function always answers a row")
}

/// The holds of a lease that was just granted, in the order of its positions.
pub(super) fn holds_of(batch: BatchId, lease: LeaseId, row: &Row) -> Vec<Hold> {
    let token = FencingToken::new(row.get("token"));
    let positions: Vec<i32> = row.get("positions");
    let histories: Option<Vec<i64>> = row.get("histories");
    positions
        .into_iter()
        .enumerate()
        .map(|(index, position)| {
            let packed = histories.as_ref().map_or(0, |list| list[index]);
            let item = ItemRef::new(batch, Position::new(position));
            Hold::new(item, lease, token, History::from_packed(packed))
        })
        .collect()
}

/// For how long the items of a claim were next in line.
fn waits_of(items: usize, row: &Row) -> Vec<Duration> {
    let again: Vec<f64> = row.get::<_, Option<_>>("again_s").unwrap_or_default();
    let fresh = items.saturating_sub(again.len());
    let fresh = row.get::<_, Option<f64>>("fresh_s").map(|wait| std::iter::repeat_n(wait, fresh));
    let waits = again.into_iter().chain(fresh.into_iter().flatten());
    waits.map(|wait| Duration::try_from_secs_f64(wait).unwrap_or_default()).collect()
}

fn lease_state(row: &Row) -> Option<LeaseState> {
    let lease = LeaseId::from_uuid(row.get::<_, Option<Uuid>>("lease_id")?);
    let answer = match row.get::<_, &str>("answer") {
        "renewed" => RenewAnswer::Renewed,
        "busy" => RenewAnswer::Busy,
        "cancelled" => RenewAnswer::Cancelled,
        _ => RenewAnswer::Gone,
    };
    Some(LeaseState {
        lease,
        answer,
        held: usize::try_from(row.get::<_, i32>("held")).unwrap_or(0),
    })
}

/// The answer for one hold among rows of (lease, position, answer).
pub(super) fn answer_of<'r>(rows: &'r [Row], hold: &Hold) -> Option<&'r str> {
    let of_hold = |row: &&Row| {
        row.get::<_, Uuid>(0) == hold.lease().uuid()
            && row.get::<_, i32>(1) == hold.item().position().get()
    };
    rows.iter().find(of_hold).map(|row| row.get(2))
}

/// The same for a hand-in that publishes or gives back.
pub(super) fn hand_in_answer(rows: &[Row], hold: &Hold) -> HandInAnswer {
    match answer_of(rows, hold) {
        Some("applied") => HandInAnswer::Applied,
        Some("cancelled") => HandInAnswer::Cancelled,
        Some(_) | None => HandInAnswer::Lost,
    }
}

/// `{1,2,3}`: an array of arrays of different lengths has no type of its own.
fn array_literal(positions: &[Position]) -> String {
    let list: Vec<String> = positions.iter().map(ToString::to_string).collect();
    format!("{{{}}}", list.join(","))
}

/// The parallel arrays of a hand-in.
#[derive(Default)]
struct HandInColumns<'a> {
    lease: Vec<Uuid>,
    token: Vec<i64>,
    position: Vec<i32>,
    kind: Vec<&'static str>,
    attempt: Vec<i32>,
    started: Vec<Option<OffsetDateTime>>,
    ended: Vec<OffsetDateTime>,
    result: Vec<Option<&'a str>>,
    truncated: Vec<bool>,
    size: Vec<i64>,
    error: Vec<Option<&'a str>>,
    reason: Vec<&'static str>,
    exit: Vec<Option<i32>>,
    signal: Vec<Option<i32>>,
    ending: Vec<Option<&'static str>>,
    charged: Vec<Option<bool>>,
    delay: Vec<Option<f64>>,
    history: Vec<Option<i64>>,
}

impl<'a> HandInColumns<'a> {
    fn new(items: &'a [HandIn<'a>]) -> Self {
        let mut columns = Self::default();
        for item in items {
            columns.push(item.hold, item.settlement);
        }
        columns
    }

    fn push(&mut self, hold: &Hold, settlement: &'a Settlement) {
        self.lease.push(hold.lease().uuid());
        self.token.push(hold.token().get());
        self.position.push(hold.item().position().get());
        self.attempt.push(i32::from(hold.attempt().get()));
        self.started.push(settlement.started_at);
        self.ended.push(settlement.ended_at);
        self.result.push(settlement.result.json.as_deref());
        self.truncated.push(settlement.result.truncated);
        self.size.push(settlement.result.size_bytes);
        self.error.push(settlement.error.as_deref());
        self.reason.push(settlement.stop_reason.as_str());
        self.exit.push(settlement.exit_status);
        self.signal.push(settlement.signal);
        let (kind, again) = match &settlement.disposition {
            Disposition::Succeed => ("succeeded", None),
            Disposition::Fail => ("failed", None),
            Disposition::Again { ending, charged, delay, history } => {
                ("again", Some((ending.as_str(), *charged, delay.as_secs_f64(), history.packed())))
            }
        };
        self.kind.push(kind);
        self.ending.push(again.map(|a| a.0));
        self.charged.push(again.map(|a| a.1));
        self.delay.push(again.map(|a| a.2));
        self.history.push(again.map(|a| a.3));
    }

    fn params<'p>(
        &'p self,
        batch: &'p Uuid,
        worker: &'p Uuid,
        ttl_s: &'p f64,
    ) -> [(&'p (dyn ToSql + Sync), Type); 21] {
        [
            (batch, Type::UUID),
            (worker, Type::UUID),
            (ttl_s, Type::FLOAT8),
            (&self.lease, Type::UUID_ARRAY),
            (&self.token, Type::INT8_ARRAY),
            (&self.position, Type::INT4_ARRAY),
            (&self.kind, Type::TEXT_ARRAY),
            (&self.attempt, Type::INT4_ARRAY),
            (&self.started, Type::TIMESTAMPTZ_ARRAY),
            (&self.ended, Type::TIMESTAMPTZ_ARRAY),
            (&self.result, Type::TEXT_ARRAY),
            (&self.truncated, Type::BOOL_ARRAY),
            (&self.size, Type::INT8_ARRAY),
            (&self.error, Type::TEXT_ARRAY),
            (&self.reason, Type::TEXT_ARRAY),
            (&self.exit, Type::INT4_ARRAY),
            (&self.signal, Type::INT4_ARRAY),
            (&self.ending, Type::TEXT_ARRAY),
            (&self.charged, Type::BOOL_ARRAY),
            (&self.delay, Type::FLOAT8_ARRAY),
            (&self.history, Type::INT8_ARRAY),
        ]
    }
}
