use tokio_postgres::error::SqlState;

use crate::telemetry::labels::DbErrorClass;

/// What a plain query can answer instead of rows.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// No connection, or it broke: the same call may succeed later.
    #[error("the database is unreachable")]
    Unreachable(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// No answer within the time allowed: the same call may succeed later.
    #[error("the database did not answer in time")]
    TimedOut,
    /// The server refused the statement.
    #[error("the database refused the statement: {}", refusal(.0))]
    Refused(#[source] tokio_postgres::Error),
    /// The schema is missing, too old or too new for this program.
    #[error("{0}")]
    Schema(String),
}

impl StoreError {
    /// Sorts a driver error by what the caller can do next.
    #[must_use]
    pub fn from_driver(error: tokio_postgres::Error) -> Self {
        match error.code() {
            Some(state) if is_outage(state) => Self::Unreachable(Box::new(error)),
            Some(_) => Self::Refused(error),
            None => Self::Unreachable(Box::new(error)),
        }
    }

    /// Whether the same call may succeed later without anybody doing anything.
    #[must_use]
    pub const fn is_outage(&self) -> bool {
        matches!(self, Self::Unreachable(_) | Self::TimedOut)
    }

    /// The class of the error, for the metric of database errors.
    #[must_use]
    pub fn class(&self) -> DbErrorClass {
        match self {
            Self::Unreachable(error) => class_of(&**error),
            Self::TimedOut => DbErrorClass::StatementTimeout,
            Self::Refused(error) => DbErrorClass::of_sqlstate(error.code().map(SqlState::code)),
            Self::Schema(_) => DbErrorClass::Other,
        }
    }
}

impl From<deadpool_postgres::PoolError> for StoreError {
    fn from(error: deadpool_postgres::PoolError) -> Self {
        match error {
            deadpool_postgres::PoolError::Backend(error) => Self::from_driver(error),
            deadpool_postgres::PoolError::Timeout(_) => Self::TimedOut,
            other @ (deadpool_postgres::PoolError::Closed
            | deadpool_postgres::PoolError::NoRuntimeSpecified
            | deadpool_postgres::PoolError::PostCreateHook(_)) => {
                Self::Unreachable(Box::new(other))
            }
        }
    }
}

/// The class of what kept an answer away: the server may have said why.
pub(super) fn class_of(error: &(dyn std::error::Error + 'static)) -> DbErrorClass {
    if let Some(error) = error.downcast_ref::<tokio_postgres::Error>() {
        DbErrorClass::of_sqlstate(error.code().map(SqlState::code))
    } else if let Some(error) = error.downcast_ref::<StoreError>() {
        error.class()
    } else {
        DbErrorClass::Connection
    }
}

/// The server is going away, starting, or out of connections.
fn is_outage(state: &SqlState) -> bool {
    [
        SqlState::ADMIN_SHUTDOWN,
        SqlState::CRASH_SHUTDOWN,
        SqlState::CANNOT_CONNECT_NOW,
        SqlState::TOO_MANY_CONNECTIONS,
        SqlState::READ_ONLY_SQL_TRANSACTION,
    ]
    .contains(state)
        || state.code().starts_with("08")
}

/// What the server said, in one line: the driver's own text is only `db error`.
pub(super) fn refusal(error: &tokio_postgres::Error) -> String {
    error
        .as_db_error()
        .map_or_else(|| error.to_string(), |db| format!("{} ({})", db.message(), db.code().code()))
}
