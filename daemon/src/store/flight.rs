//! The one-flight transaction (L3): `BEGIN; SET LOCAL …`, one statement, `COMMIT`, sent together.

use std::time::Duration;

use deadpool_postgres::Object;
use tokio::time::Instant;
use tokio_postgres::Row;
use tokio_postgres::error::SqlState;
use tokio_postgres::types::{ToSql, Type};

use super::error::{StoreError, class_of, refusal};
use crate::telemetry::labels::DbErrorClass;

/// Why a transaction did not count. What it means for the caller is decided by F6.
#[derive(Debug, thiserror::Error)]
pub enum FlightError {
    /// Nothing was sent: no connection could be had.
    #[error("no connection to the database")]
    NotSent(#[source] StoreError),
    /// The server rolled it back: nothing happened.
    #[error("the database rolled back: {}", refusal(.0))]
    RolledBack(#[source] tokio_postgres::Error),
    /// No answer: it may or may not have happened.
    #[error("the database's answer never came")]
    Unknown(#[source] Box<dyn std::error::Error + Send + Sync>),
}

impl FlightError {
    /// Whether the transaction may have happened all the same.
    #[must_use]
    pub const fn is_unknown(&self) -> bool {
        matches!(self, Self::Unknown(_))
    }

    /// Whether repeating it would only be refused again: what it carries is at fault, not the moment.
    #[must_use]
    pub fn is_lasting(&self) -> bool {
        let Self::RolledBack(error) = self else { return false };
        // Classes: data exception, constraint, program limit. What else may be refused, such as a
        // privilege that is missing for a while, must not cost a result that is there.
        error.code().is_some_and(|state| {
            ["22", "23", "54"].iter().any(|class| state.code().starts_with(class))
        })
    }

    /// The class of the error, for the metric of database errors.
    #[must_use]
    pub fn class(&self) -> DbErrorClass {
        match self {
            Self::NotSent(error) => error.class(),
            Self::RolledBack(error) => DbErrorClass::of_sqlstate(error.code().map(SqlState::code)),
            Self::Unknown(error) => class_of(&**error),
        }
    }
}

/// How long the parts of one flight may take on the server, and how long the client waits for it.
#[derive(Clone, Debug)]
pub(super) struct FlightLimits {
    begin: String,
    pub(super) answer: Duration,
}

impl FlightLimits {
    /// Limits for transactions that may wait `lock` for a lock and run for `statement` in all; the
    /// client waits `patience` longer than that.
    pub(super) fn new(lock: Duration, statement: Duration, patience: Duration) -> Self {
        let begin = format!(
            "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE; \
             SET LOCAL lock_timeout = {lock}; SET LOCAL statement_timeout = {statement}; \
             SET LOCAL idle_in_transaction_session_timeout = {statement}; \
             SELECT set_config('synchronous_commit', 'on', true) \
             WHERE current_setting('synchronous_commit') IN ('off', 'local', 'remote_write')",
            lock = lock.as_millis().max(1),
            statement = statement.as_millis().max(1),
        );
        Self { begin, answer: statement + patience }
    }

    /// Limits for looks that change nothing and wait for no lock to speak of.
    pub(super) fn read_only(statement: Duration) -> Self {
        let limit = statement.as_millis().max(1);
        let begin = format!(
            "BEGIN ISOLATION LEVEL READ COMMITTED READ ONLY; SET LOCAL lock_timeout = 500; \
             SET LOCAL statement_timeout = {limit}; \
             SET LOCAL idle_in_transaction_session_timeout = {limit}"
        );
        Self { begin, answer: statement + Duration::from_millis(500) }
    }
}

/// Sent before a COMMIT: a statement timeout that strikes while a commit waits for its synchronous
/// standby ends the wait, and the server reports success for what a failover will lose.
const UNHURRIED: &str = "SET LOCAL statement_timeout = 0";

/// Runs one protocol function as one transaction in one flight, answered until `deadline`.
///
/// The messages are queued before any answer is awaited, so nothing here depends on how soon
/// this process is scheduled again. A pipelined `COMMIT` after an error answers `ROLLBACK` and the
/// driver reports success: the flight counts only if every statement before it answered (F6).
///
/// # Cancel safety
/// Dropped after its first poll, the transaction runs to its end all the same.
pub(super) async fn flight(
    client: Object,
    limits: &FlightLimits,
    deadline: Instant,
    sql: &str,
    params: &[(&(dyn ToSql + Sync), Type)],
) -> Result<Vec<Row>, FlightError> {
    let sent = async {
        tokio::join!(
            client.batch_execute(&limits.begin),
            client.query_typed(sql, params),
            client.batch_execute(UNHURRIED),
            client.batch_execute("COMMIT"),
        )
    };
    let Ok(answers) = tokio::time::timeout_at(deadline, sent).await else {
        discard(client);
        return Err(FlightError::Unknown(Box::new(StoreError::TimedOut)));
    };
    let error = match answers {
        (Ok(()), Ok(rows), Ok(()), Ok(())) => return Ok(rows),
        (Ok(()), Err(error), _, _)
        | (Ok(()), Ok(_), Err(error), _)
        | (Ok(()), Ok(_), Ok(()), Err(error)) => error,
        (Err(error), _, _, _) => {
            // Without its BEGIN the statement would have run on its own.
            discard(client);
            return Err(FlightError::Unknown(Box::new(error)));
        }
    };
    if error.as_db_error().is_some_and(|db| !ends_connection(db)) {
        return Err(FlightError::RolledBack(error));
    }
    discard(client);
    Err(FlightError::Unknown(Box::new(error)))
}

/// A server that dies in the middle says so as an error of its own (FATAL), and whether the commit
/// had happened is not told by it.
fn ends_connection(error: &tokio_postgres::error::DbError) -> bool {
    !matches!(error.parsed_severity(), Some(tokio_postgres::error::Severity::Error))
}

/// Takes a connection of unknown state out of its pool.
fn discard(client: Object) {
    drop(Object::take(client));
}
