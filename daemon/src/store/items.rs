//! Items, as they are executed, shown and exported.

use serde::Serialize;
use serde_json::value::RawValue;
use time::OffsetDateTime;
use tokio_postgres::Row;
use tokio_postgres::types::{ToSql, Type};
use tracing::debug;

use super::{Database, StoreError, statements};
use crate::model::{
    BatchId, FencingToken, History, Hold, ItemRef, ItemStatus, LeaseId, Position, PreviousAttempt,
    Verdict, VerdictClass, WorkerId,
};

/// What an execution needs of an item.
#[derive(Clone, Debug)]
pub struct ItemInput {
    /// Its position.
    pub position: Position,
    /// Its key.
    pub key: String,
    /// Its input, JSON text as submitted.
    pub input_json: String,
    /// Its acceptance criteria, JSON text of a list; none where there are none.
    pub criteria_json: Option<String>,
    /// The attempt before, if there was one.
    pub previous: Option<PreviousAttempt>,
}

/// One item with its derived status, as shown.
#[derive(Clone, Debug, Serialize)]
pub struct ItemRow {
    /// Its position.
    pub position: Position,
    /// Its key.
    pub key: String,
    /// Its status.
    pub status: ItemStatus,
    /// The attempt it is at, or ended with; none when it was cancelled before one.
    pub attempt: Option<i32>,
    /// The earliest time of its next attempt, while it waits.
    #[serde(with = "time::serde::rfc3339::option")]
    pub ready_at: Option<OffsetDateTime>,
    /// The worker that holds it or ended it.
    pub worker_id: Option<WorkerId>,
    /// The lease it is in, or that published it.
    pub lease_id: Option<LeaseId>,
    /// That lease's token, as text.
    pub token: Option<String>,
    /// When its execution began.
    #[serde(with = "time::serde::rfc3339::option")]
    pub started_at: Option<OffsetDateTime>,
    /// When it ended.
    #[serde(with = "time::serde::rfc3339::option")]
    pub finished_at: Option<OffsetDateTime>,
    /// What went wrong last.
    pub error: Option<String>,
    /// The named reason it ended.
    pub stop_reason: Option<String>,
    /// Its acceptance criteria, as they are stored.
    pub acceptance_criteria: Option<Box<RawValue>>,
    /// What its check found; none also where what is stored is no verdict.
    pub acceptance_verdict: Option<Verdict>,
}

/// An attempt of an item that did not end in its outcome, as shown.
#[derive(Clone, Debug, Serialize)]
pub struct AttemptRow {
    /// Its number, from 1; one that was not charged leaves its number to the next.
    pub attempt: i32,
    /// The token of the lease it ran under, as text.
    pub token: String,
    /// The worker that ran it.
    pub worker_id: WorkerId,
    /// When its execution began; none when it never did.
    #[serde(with = "time::serde::rfc3339::option")]
    pub started_at: Option<OffsetDateTime>,
    /// When it ended.
    #[serde(with = "time::serde::rfc3339")]
    pub ended_at: OffsetDateTime,
    /// How it ended: a word of [`AttemptEnding`](crate::model::AttemptEnding).
    pub ending: String,
    /// Whether it counts against the batch's attempts.
    pub charged: bool,
    /// What went wrong.
    pub error: Option<String>,
    /// The named reason it ended.
    pub stop_reason: Option<String>,
    /// The exit status of a command.
    pub exit_status: Option<i32>,
    /// The signal that ended a command.
    pub signal: Option<i32>,
}

/// Which ended items an export reads.
#[derive(Clone, Debug)]
pub struct ExportRange {
    /// Of this batch.
    pub batch: BatchId,
    /// Whether it is cancelled: an item without an outcome has ended then.
    pub cancelled: bool,
    /// Of these statuses; only the three last ones of [`ItemStatus::ALL`] occur.
    pub statuses: Vec<ItemStatus>,
    /// With verdicts of these classes; [`VerdictClass::None`] for those without one.
    pub verdicts: Vec<VerdictClass>,
    /// From this position on.
    pub from: Position,
    /// Over this many positions, at most.
    pub positions: i32,
    /// Up to about this many bytes; the row that passes it is the last.
    pub bytes: i64,
}

/// A page of an export.
#[derive(Clone, Debug)]
pub struct ExportPage {
    /// The ended items, in position order.
    pub rows: Vec<ExportRow>,
    /// Where the next page begins.
    pub next: Position,
}

/// One ended item, as exported.
#[derive(Clone, Debug)]
pub struct ExportRow {
    /// Its position.
    pub position: Position,
    /// Its key.
    pub key: String,
    /// Its acceptance criteria, JSON text.
    pub criteria_json: Option<String>,
    /// How it ended.
    pub status: ItemStatus,
    /// The attempt it ended with; none without an outcome.
    pub attempt: Option<i32>,
    /// Its result, JSON text without line breaks.
    pub result_json: Option<String>,
    /// Whether the result was cut.
    pub result_truncated: bool,
    /// How many bytes the execution really produced.
    pub result_size: i64,
    /// What went wrong.
    pub error: Option<String>,
    /// The named reason it ended.
    pub stop_reason: Option<String>,
    /// When its last execution began.
    pub started_at: Option<OffsetDateTime>,
    /// When it ended.
    pub finished_at: Option<OffsetDateTime>,
    /// What its check found; none also where what is stored is no verdict.
    pub verdict: Option<Verdict>,
}

impl Database {
    /// Keys and inputs of claimed positions.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn item_inputs(
        &self,
        batch: BatchId,
        positions: &[Position],
    ) -> Result<Vec<ItemInput>, StoreError> {
        let positions: Vec<i32> = positions.iter().map(|p| p.get()).collect();
        let rows = self
            .query(
                statements::ITEM_INPUTS,
                &[(&batch.uuid(), Type::UUID), (&positions, Type::INT4_ARRAY)],
            )
            .await?;
        Ok(rows
            .iter()
            .map(|row| ItemInput {
                position: Position::new(row.get(0)),
                key: row.get(1),
                input_json: row.get(2),
                criteria_json: row.get(3),
                previous: row.get::<_, Option<i64>>(4).map(|token| PreviousAttempt {
                    token: FencingToken::new(token),
                    ending: row.get(5),
                    worker: WorkerId::from_uuid(row.get(6)),
                }),
            })
            .collect())
    }

    /// What a lease still holds, by its row; nothing when the lease is gone.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn held_by(
        &self,
        batch: BatchId,
        lease: LeaseId,
        token: FencingToken,
    ) -> Result<Vec<(Hold, bool)>, StoreError> {
        let params: [(&(dyn ToSql + Sync), Type); 3] =
            [(&batch.uuid(), Type::UUID), (&lease.uuid(), Type::UUID), (&token.get(), Type::INT8)];
        let rows = self.query(statements::HELD_BY, &params).await?;
        let holds = rows.iter().map(|row| {
            let item = ItemRef::new(batch, Position::new(row.get(0)));
            (Hold::new(item, lease, token, History::from_packed(row.get(1))), row.get(2))
        });
        Ok(holds.collect())
    }

    /// A page of items from a position on, of one status or of all, in position order.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn items(
        &self,
        batch: BatchId,
        status: Option<ItemStatus>,
        from: Position,
        limit: i32,
    ) -> Result<Vec<ItemRow>, StoreError> {
        let id = batch.uuid();
        let from = from.get();
        let rows = match status {
            None => {
                self.query(
                    statements::ITEMS_PAGE,
                    &[(&id, Type::UUID), (&from, Type::INT4), (&limit, Type::INT4)],
                )
                .await?
            }
            Some(status) => {
                self.query(
                    statements::ITEMS_PAGE_STATUS,
                    &[
                        (&id, Type::UUID),
                        (&from, Type::INT4),
                        (&limit, Type::INT4),
                        (&status.as_str(), Type::TEXT),
                    ],
                )
                .await?
            }
        };
        Ok(rows.iter().map(item_row).collect())
    }

    /// A page of items whose verdict is of one class, in position order; of one status or of all.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn items_with_verdict(
        &self,
        batch: BatchId,
        class: VerdictClass,
        status: Option<ItemStatus>,
        from: Position,
        limit: i32,
    ) -> Result<Vec<ItemRow>, StoreError> {
        let succeeded = status == Some(ItemStatus::Succeeded);
        if status.is_some() && !succeeded {
            // Nothing else has a verdict.
            return match class {
                VerdictClass::None => self.items(batch, status, from, limit).await,
                VerdictClass::Holds | VerdictClass::Fails | VerdictClass::Unverified => {
                    Ok(Vec::new())
                }
            };
        }
        let class = (class != VerdictClass::None).then(|| class.as_str());
        let rows = self
            .query(
                statements::ITEMS_PAGE_VERDICT,
                &[
                    (&batch.uuid(), Type::UUID),
                    (&from.get(), Type::INT4),
                    (&limit, Type::INT4),
                    (&class, Type::TEXT),
                    (&succeeded, Type::BOOL),
                ],
            )
            .await?;
        Ok(rows.iter().map(item_row).collect())
    }

    /// Where the item of a key is.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn position_of_key(
        &self,
        batch: BatchId,
        key: &str,
    ) -> Result<Option<Position>, StoreError> {
        let rows = self
            .query(statements::POSITION_OF_KEY, &[(&batch.uuid(), Type::UUID), (&key, Type::TEXT)])
            .await?;
        Ok(rows.first().map(|row| Position::new(row.get(0))))
    }

    /// The attempts of an item that did not end in its outcome, oldest first.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn attempts_of_item(
        &self,
        batch: BatchId,
        position: Position,
    ) -> Result<Vec<AttemptRow>, StoreError> {
        let rows = self
            .query(
                statements::ATTEMPTS_OF_ITEM,
                &[(&batch.uuid(), Type::UUID), (&position.get(), Type::INT4)],
            )
            .await?;
        Ok(rows.iter().map(attempt_row).collect())
    }

    /// A page of ended items with their outcomes.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn export_page(&self, range: &ExportRange) -> Result<ExportPage, StoreError> {
        let statuses: Vec<&str> = range.statuses.iter().map(|status| status.as_str()).collect();
        let verdicts: Vec<&str> = range.verdicts.iter().map(|class| class.as_str()).collect();
        let without_outcome = range.cancelled.then_some(ItemStatus::Cancelled.as_str());
        let from = range.from.get();
        let positions = range.positions.min(i32::MAX - from);
        let rows = self
            .query(
                statements::EXPORT_PAGE,
                &[
                    (&range.batch.uuid(), Type::UUID),
                    (&from, Type::INT4),
                    (&positions, Type::INT4),
                    (&range.bytes, Type::INT8),
                    (&statuses, Type::TEXT_ARRAY),
                    (&without_outcome, Type::TEXT),
                    (&verdicts, Type::TEXT_ARRAY),
                ],
            )
            .await?;
        // The server stops at the row that passes the bytes, if there is one.
        let bytes: i64 = rows.iter().map(|row| i64::from(row.get::<_, i32>(12))).sum();
        let rows: Vec<ExportRow> = rows.iter().map(export_row).collect();
        let next = match rows.last() {
            Some(last) if bytes >= range.bytes => last.position.get() + 1,
            Some(_) | None => from + positions,
        };
        Ok(ExportPage { rows, next: Position::new(next) })
    }
}

fn export_row(row: &Row) -> ExportRow {
    ExportRow {
        position: Position::new(row.get(0)),
        key: row.get(1),
        criteria_json: row.get(2),
        status: status_of(row.get(3)),
        attempt: row.get(4),
        result_json: row.get(5),
        result_truncated: row.get(6),
        result_size: row.get(7),
        error: row.get(8),
        stop_reason: row.get(9),
        started_at: row.get(10),
        finished_at: row.get(11),
        verdict: row.get::<_, Option<&str>>(13).and_then(read_verdict),
    }
}

/// A stored verdict. What is none must not keep its item from being shown.
fn read_verdict(json: &str) -> Option<Verdict> {
    let value = serde_json::from_str(json).ok()?;
    match Verdict::from_json(&value) {
        Ok(verdict) => Some(verdict),
        Err(invalid) => {
            debug!(error = %invalid, "a stored verdict is not shown");
            None
        }
    }
}

fn attempt_row(row: &Row) -> AttemptRow {
    AttemptRow {
        attempt: row.get("attempt"),
        token: row.get::<_, i64>("token").to_string(),
        worker_id: WorkerId::from_uuid(row.get("worker_id")),
        started_at: row.get("started_at"),
        ended_at: row.get("ended_at"),
        ending: row.get("ending"),
        charged: row.get("charged"),
        error: row.get("error"),
        stop_reason: row.get("stop_reason"),
        exit_status: row.get("exit_status"),
        signal: row.get("signal"),
    }
}

fn status_of(word: &str) -> ItemStatus {
    word.parse().expect("the database derives the statuses of ItemStatus, and a test compares them")
}

fn item_row(row: &Row) -> ItemRow {
    ItemRow {
        position: Position::new(row.get("item_position")),
        key: row.get("key"),
        status: status_of(row.get("status")),
        attempt: row.get("attempt"),
        ready_at: row.get("ready_at"),
        worker_id: row.get::<_, Option<_>>("worker_id").map(WorkerId::from_uuid),
        lease_id: row.get::<_, Option<_>>("lease_id").map(LeaseId::from_uuid),
        token: row.get::<_, Option<i64>>("token").map(|token| token.to_string()),
        started_at: row.get("started_at"),
        finished_at: row.get("finished_at"),
        error: row.get("error"),
        stop_reason: row.get("stop_reason"),
        acceptance_criteria: row
            .get::<_, Option<String>>("criteria_json")
            .and_then(|json| RawValue::from_string(json).ok()),
        acceptance_verdict: row.get::<_, Option<&str>>("verdict_json").and_then(read_verdict),
    }
}
