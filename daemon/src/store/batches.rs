//! Batches, as they are chosen, worked on and shown.

use std::time::Duration;

use serde::Serialize;
use time::OffsetDateTime;
use tokio_postgres::Row;
use tokio_postgres::types::Type;
use uuid::Uuid;

use super::{Database, StoreError, statements};
use crate::model::{BatchId, Counts, Principal, VerdictCounts};

/// A batch worth claiming from, as ranked by the database.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankedBatch {
    /// The batch.
    pub id: BatchId,
    /// Its queue.
    pub queue: String,
    /// Its owner.
    pub owner: String,
    /// Priority with ageing; a higher rank is served first.
    pub rank: i32,
    /// How many of its items were held by workers.
    pub held: i64,
    /// How many items of all batches of its owner were.
    pub held_by_owner: i64,
}

/// What a worker has to know of a batch to run its items.
#[derive(Clone, Debug)]
pub struct BatchWork {
    /// Its queue.
    pub queue: String,
    /// Its owner.
    pub owner: String,
    /// The queue's settings, as they were at submit.
    pub spec_json: String,
    /// Charged attempts after which an item fails.
    pub max_attempts: u16,
    /// Trace context of the submit.
    pub traceparent: Option<String>,
    /// The thread whose workspace its items share.
    pub thread: Option<String>,
    /// On whose behalf it was submitted; none where nothing readable is stored.
    pub principal: Option<Principal>,
}

/// One batch with its counts, as shown.
#[derive(Clone, Debug, Serialize)]
pub struct BatchRow {
    /// The batch.
    pub id: BatchId,
    /// Its owner.
    pub owner: String,
    /// Its queue.
    pub queue: String,
    /// Its title.
    pub title: Option<String>,
    /// The thread whose workspace its items share.
    pub thread: Option<String>,
    /// The key it was submitted under.
    pub submission_key: Option<String>,
    /// `queued`, `running`, `paused`, `finished` or `cancelled`.
    pub state: String,
    /// The number of items.
    pub item_count: i32,
    /// -100 to 100; higher first.
    pub priority: i32,
    /// How many items may run at once; none means no cap of its own.
    pub max_running: Option<i32>,
    /// How many items may be waiting or held at once.
    pub max_live: i32,
    /// Charged attempts after which an item fails.
    pub max_attempts: i32,
    /// How many items may be under check before claims are held back.
    pub max_checking: i32,
    /// How many items are where.
    pub counts: Counts,
    /// How many of them have which verdict; no part of their progress.
    pub verdicts: VerdictCounts,
    /// Nothing is claimed before it.
    #[serde(with = "time::serde::rfc3339::option")]
    pub not_before: Option<OffsetDateTime>,
    /// When it was submitted.
    #[serde(with = "time::serde::rfc3339")]
    pub created_at: OffsetDateTime,
    /// When it ended.
    #[serde(with = "time::serde::rfc3339::option")]
    pub finished_at: Option<OffsetDateTime>,
}

impl BatchRow {
    /// Whether nothing of it will change any more, but for an explicit retry.
    #[must_use]
    pub const fn is_finished(&self) -> bool {
        self.finished_at.is_some()
    }

    /// Whether it was cancelled: an item without an outcome has ended then.
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        self.state == "cancelled"
    }
}

/// Which batches a list shows.
#[derive(Clone, Debug, Default)]
pub struct BatchFilter {
    /// Of this owner only.
    pub owner: Option<String>,
    /// Of this queue only.
    pub queue: Option<String>,
    /// In this state only.
    pub state: Option<String>,
    /// Older than this one: the last of the page before.
    pub before: Option<BatchId>,
}

impl Database {
    /// Open batches of these queues with something to claim now, best first.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn rank_batches(
        &self,
        queues: &[String],
        except: &[BatchId],
        ageing: Duration,
        limit: usize,
    ) -> Result<Vec<RankedBatch>, StoreError> {
        let except: Vec<Uuid> = except.iter().map(|id| id.uuid()).collect();
        let rows = self
            .query(
                statements::RANK_BATCHES,
                &[
                    (&queues, Type::TEXT_ARRAY),
                    (&except, Type::UUID_ARRAY),
                    (&ageing.as_secs_f64(), Type::FLOAT8),
                    (&i64::try_from(limit).unwrap_or(i64::MAX), Type::INT8),
                ],
            )
            .await?;
        Ok(rows
            .iter()
            .map(|row| RankedBatch {
                id: BatchId::from_uuid(row.get("id")),
                queue: row.get("queue"),
                owner: row.get("owner"),
                rank: row.get("rank"),
                held: row.get("held"),
                held_by_owner: row.get("held_by_owner"),
            })
            .collect())
    }

    /// How long until an item or a batch of these queues that waits for its time may be claimed.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn next_due(&self, queues: &[String]) -> Result<Option<Duration>, StoreError> {
        let rows = self.query(statements::NEXT_DUE, &[(&queues, Type::TEXT_ARRAY)]).await?;
        let seconds = rows.first().and_then(|row| row.get::<_, Option<f64>>(0));
        Ok(seconds.map(|seconds| Duration::try_from_secs_f64(seconds).unwrap_or_default()))
    }

    /// What a worker has to know of a batch; none when it is gone.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn batch_work(&self, batch: BatchId) -> Result<Option<BatchWork>, StoreError> {
        let rows = self.query(statements::BATCH_WORK, &[(&batch.uuid(), Type::UUID)]).await?;
        Ok(rows.first().map(|row| BatchWork {
            queue: row.get(0),
            owner: row.get(1),
            spec_json: row.get(2),
            max_attempts: u16::try_from(row.get::<_, i32>(3)).unwrap_or(u16::MAX),
            traceparent: row.get(4),
            thread: row.get(5),
            principal: row
                .get::<_, Option<&str>>(6)
                .and_then(|stored| serde_json::from_str(stored).ok()),
        }))
    }

    /// One batch of `owner`, or of anyone when none is given.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn batch(
        &self,
        batch: BatchId,
        owner: Option<&str>,
    ) -> Result<Option<BatchRow>, StoreError> {
        let rows = self
            .query(statements::BATCH_BY_ID, &[(&batch.uuid(), Type::UUID), (&owner, Type::TEXT)])
            .await?;
        Ok(rows.first().map(batch_row))
    }

    /// A page of batches, newest first.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn batches(
        &self,
        filter: &BatchFilter,
        limit: i64,
    ) -> Result<Vec<BatchRow>, StoreError> {
        let before = filter.before.map(BatchId::uuid);
        let rows = self
            .query(
                statements::BATCHES_PAGE,
                &[
                    (&filter.owner, Type::TEXT),
                    (&filter.queue, Type::TEXT),
                    (&filter.state, Type::TEXT),
                    (&before, Type::UUID),
                    (&limit, Type::INT8),
                ],
            )
            .await?;
        Ok(rows.iter().map(batch_row).collect())
    }

    /// Whether an unfinished batch has nothing left: the look after a finish, without a lock.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn is_exhausted(&self, batch: BatchId) -> Result<bool, StoreError> {
        let rows = self.query(statements::COUNTS, &[(&batch.uuid(), Type::UUID)]).await?;
        Ok(rows.first().is_some_and(|row| row.get(0)))
    }
}

fn batch_row(row: &Row) -> BatchRow {
    BatchRow {
        id: BatchId::from_uuid(row.get("id")),
        owner: row.get("owner"),
        queue: row.get("queue"),
        title: row.get("title"),
        thread: row.get("thread"),
        submission_key: row.get("submission_key"),
        state: row.get("state"),
        item_count: row.get("item_count"),
        priority: row.get("priority"),
        max_running: row.get("max_running"),
        max_live: row.get("max_live"),
        max_attempts: row.get("max_attempts"),
        counts: Counts {
            fresh: row.get("fresh"),
            waiting: row.get("waiting"),
            executing: row.get("executing"),
            checking: row.get("checking"),
            succeeded: row.get("succeeded"),
            failed: row.get("failed"),
            cancelled: row.get("cancelled"),
        },
        max_checking: row.get("max_checking"),
        verdicts: VerdictCounts {
            holds: row.get("verdict_holds"),
            fails: row.get("verdict_fails"),
            unverified: row.get("verdict_unverified"),
        },
        not_before: row.get("not_before"),
        created_at: row.get("created_at"),
        finished_at: row.get("finished_at"),
    }
}
