//! Storing a batch: one transaction, items by binary COPY, the batch row last.

use std::error::Error;

use bytes::{BufMut, BytesMut};
use futures::pin_mut;
use time::OffsetDateTime;
use tokio::sync::mpsc;
use tokio_postgres::binary_copy::BinaryCopyInWriter;
use tokio_postgres::types::{IsNull, ToSql, Type, to_sql_checked};
use tokio_postgres::{Client, GenericClient};
use uuid::Uuid;

use super::{Database, StoreError, statements};
use crate::model::{BatchId, NewItem, Principal};

/// The row of a batch to be stored.
#[derive(Clone, Debug)]
pub struct BatchRecord {
    /// Its id, chosen by the submitter.
    pub id: BatchId,
    /// Its owner.
    pub owner: String,
    /// Its queue.
    pub queue: String,
    /// Its title.
    pub title: Option<String>,
    /// The thread whose workspace its items share.
    pub thread: Option<String>,
    /// The key under which a repeat finds it.
    pub submission_key: Option<String>,
    /// SHA-256 over everything that a repeat has to share.
    pub digest: [u8; 32],
    /// The queue's settings, as JSON text.
    pub spec_json: String,
    /// On whose behalf it is submitted.
    pub principal: Option<Principal>,
    /// How many items there are.
    pub item_count: i32,
    /// Whether an item has a time of its own.
    pub has_not_before: bool,
    /// How many may run at once; none for no cap.
    pub max_running: Option<i32>,
    /// How many may be waiting or held at once.
    pub max_live: i32,
    /// How many may be checking before claims are held back.
    pub max_checking: i32,
    /// Charged attempts after which an item fails.
    pub max_attempts: i32,
    /// -100 to 100.
    pub priority: i32,
    /// Nothing is claimed before it.
    pub not_before: Option<OffsetDateTime>,
    /// Trace context of the submit.
    pub traceparent: Option<String>,
}

/// What became of a submission.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stored {
    /// It is stored.
    Created(BatchId),
    /// The same submission was stored before, as this batch.
    Existing(BatchId),
}

impl Stored {
    /// The batch.
    #[must_use]
    pub const fn batch(self) -> BatchId {
        match self {
            Self::Created(id) | Self::Existing(id) => id,
        }
    }
}

/// Why a submission was not stored. Nothing of it exists then, but perhaps after
/// [`SubmissionError::Unknown`].
#[derive(Debug, thiserror::Error)]
pub enum SubmissionError {
    /// The key was used for another content.
    #[error("the submission key was used before, for batch {existing} with other content")]
    Conflict {
        /// The batch of that key.
        existing: BatchId,
    },
    /// The items could not be read back from the spool.
    #[error("read the spooled items")]
    Spool(#[source] std::io::Error),
    /// The answer to the commit never came.
    #[error(
        "the answer to the commit never came, so it is not known whether batch {batch} is stored; \
         `holdfast show {batch}` tells, and a repeat under the same submission key is safe"
    )]
    Unknown {
        /// The batch it would be.
        batch: BatchId,
        /// What came instead.
        #[source]
        source: StoreError,
    },
    /// The database.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Items on their way into the database, in order, a few at a time.
pub type ItemStream = mpsc::Receiver<std::io::Result<Vec<NewItem>>>;

const COPY_ITEMS: &str = "COPY holdfast.items \
    (batch_id, position, key, input, acceptance_criteria, not_before) FROM STDIN (FORMAT binary)";

/// A racing repeat waits for the first to commit, this long at most.
const BEGIN: &str = "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE; \
    SET LOCAL lock_timeout = '10s'; SET LOCAL idle_in_transaction_session_timeout = '60s'; \
    SELECT set_config('synchronous_commit', 'on', true) \
    WHERE current_setting('synchronous_commit') IN ('off', 'local', 'remote_write')";

impl Database {
    /// What an owner's submission key stands for: its batch, if the content is the same.
    ///
    /// # Errors
    /// [`SubmissionError::Conflict`] when the content differs.
    pub async fn find_submission(
        &self,
        owner: &str,
        key: &str,
        digest: &[u8; 32],
    ) -> Result<Option<BatchId>, SubmissionError> {
        let rows = self
            .query(statements::BATCH_BY_KEY, &[(&owner, Type::TEXT), (&key, Type::TEXT)])
            .await?;
        let Some(row) = rows.first() else { return Ok(None) };
        let existing = BatchId::from_uuid(row.get::<_, Uuid>(0));
        if row.get::<_, &[u8]>(1) == digest {
            Ok(Some(existing))
        } else {
            Err(SubmissionError::Conflict { existing })
        }
    }

    /// Stores a batch and its items in one transaction: all of it, or nothing. `stored` is told how
    /// many items were sent so far.
    ///
    /// # Errors
    /// See [`SubmissionError`].
    ///
    /// # Cancel safety
    /// Dropped, nothing is stored, unless its commit was already sent.
    pub async fn store_batch(
        &self,
        record: &BatchRecord,
        items: ItemStream,
        mut stored: impl FnMut(u64),
    ) -> Result<Stored, SubmissionError> {
        if let Some(key) = &record.submission_key
            && let Some(existing) = self.find_submission(&record.owner, key, &record.digest).await?
        {
            return Ok(Stored::Existing(existing));
        }
        let client = self.connection().await?;
        let inserted = insert(client.client(), record, items, &mut stored).await;
        match inserted {
            Ok(true) => {
                match client.batch_execute("COMMIT").await.map_err(StoreError::from_driver) {
                    Ok(()) => Ok(Stored::Created(record.id)),
                    Err(source) if source.is_outage() => {
                        Err(SubmissionError::Unknown { batch: record.id, source })
                    }
                    Err(refused) => Err(refused.into()),
                }
            }
            Ok(false) => {
                client.batch_execute("ROLLBACK").await.map_err(StoreError::from_driver)?;
                let key = record.submission_key.as_deref().unwrap_or_default();
                let existing = self.find_submission(&record.owner, key, &record.digest).await?;
                existing.map(Stored::Existing).ok_or_else(|| {
                    SubmissionError::Store(StoreError::Schema(
                        "a batch of this submission key vanished while it was looked at".into(),
                    ))
                })
            }
            Err(failed) => {
                // Whatever state the connection is in, the transaction ends with it.
                drop(deadpool_postgres::Object::take(client));
                Err(failed)
            }
        }
    }
}

/// Everything up to the commit; false when the submission key is taken.
async fn insert(
    client: &Client,
    record: &BatchRecord,
    mut items: ItemStream,
    stored: &mut impl FnMut(u64),
) -> Result<bool, SubmissionError> {
    let refused = StoreError::from_driver;
    client.batch_execute(BEGIN).await.map_err(refused)?;
    let sink = client.copy_in(COPY_ITEMS).await.map_err(refused)?;
    let types = [Type::UUID, Type::INT4, Type::TEXT, Type::JSON, Type::JSON, Type::TIMESTAMPTZ];
    let writer = BinaryCopyInWriter::new(sink, &types);
    pin_mut!(writer);
    let batch = record.id.uuid();
    let mut sent = 0;
    while let Some(chunk) = items.recv().await {
        for item in chunk.map_err(SubmissionError::Spool)? {
            let position = item.position.get();
            let criteria = item.criteria.as_deref().map(JsonText);
            let input = JsonText(&item.input);
            let row: [&(dyn ToSql + Sync); 6] =
                [&batch, &position, &item.key, &input, &criteria, &item.not_before];
            writer.as_mut().write(&row).await.map_err(refused)?;
            sent += 1;
        }
        stored(sent);
    }
    let copied = writer.finish().await.map_err(refused)?;
    if i64::try_from(copied).ok() != Some(i64::from(record.item_count)) {
        return Err(SubmissionError::Spool(std::io::Error::other(format!(
            "{copied} of {} items came back from the spool",
            record.item_count
        ))));
    }
    // Last, so that a racing repeat waits for a commit and not for a copy.
    let inserted = insert_batch(client, record).await.map_err(refused)?;
    if inserted {
        let id = [(&batch as &(dyn ToSql + Sync), Type::UUID)];
        client.query_typed(statements::FIRST_PROGRESS, &id).await.map_err(refused)?;
    }
    Ok(inserted)
}

async fn insert_batch(
    client: &Client,
    record: &BatchRecord,
) -> Result<bool, tokio_postgres::Error> {
    let principal = record
        .principal
        .as_ref()
        .map(|principal| serde_json::to_string(principal).expect("two texts"));
    let rows = client
        .query_typed(
            statements::INSERT_BATCH,
            &[
                (&record.id.uuid(), Type::UUID),
                (&record.owner, Type::TEXT),
                (&record.queue, Type::TEXT),
                (&record.title, Type::TEXT),
                (&record.thread, Type::TEXT),
                (&record.submission_key, Type::TEXT),
                (&record.digest.as_slice(), Type::BYTEA),
                (&record.spec_json, Type::TEXT),
                (&record.item_count, Type::INT4),
                (&record.has_not_before, Type::BOOL),
                (&record.max_running, Type::INT4),
                (&record.max_live, Type::INT4),
                (&record.max_checking, Type::INT4),
                (&record.max_attempts, Type::INT4),
                (&record.priority, Type::INT4),
                (&record.not_before, Type::TIMESTAMPTZ),
                (&record.traceparent, Type::TEXT),
                (&principal, Type::TEXT),
            ],
        )
        .await?;
    Ok(!rows.is_empty())
}

/// JSON text, sent as it is: its digits and spaces stay.
#[derive(Debug)]
struct JsonText<'a>(&'a str);

impl ToSql for JsonText<'_> {
    fn to_sql(
        &self,
        _ty: &Type,
        out: &mut BytesMut,
    ) -> Result<IsNull, Box<dyn Error + Sync + Send>> {
        out.put_slice(self.0.as_bytes());
        Ok(IsNull::No)
    }

    fn accepts(ty: &Type) -> bool {
        *ty == Type::JSON
    }

    to_sql_checked!();
}
