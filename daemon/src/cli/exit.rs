use std::fmt;
use std::process::ExitCode;

use crate::config::ConfigError;
use crate::store::migrate::SchemaError;
use crate::store::{FlightError, StoreError, SubmissionError};

/// How the program ends; the numbers follow `sysexits.h` where it has one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// Done.
    Done,
    /// A batch ended with failed items.
    FailedItems,
    /// The command line is wrong.
    Usage,
    /// A worker ended in order, but stopped executions for it.
    Stopped,
    /// A worker ended at once; leases may lapse.
    Forced,
    /// The input has faults.
    BadInput,
    /// The input cannot be read.
    UnreadableInput,
    /// The schema is too old or too new.
    Schema,
    /// A fault of this program.
    Internal,
    /// The submission key stands for other content, or the batch is in a state that forbids it.
    Conflict,
    /// The output cannot be written.
    Output,
    /// The database is unreachable.
    Unreachable,
    /// No such batch, or not yours.
    Denied,
    /// The configuration is wrong.
    Configuration,
    /// Interrupted at a terminal while waiting; nothing was changed by that.
    Interrupted,
}

impl Exit {
    /// The number.
    #[must_use]
    pub const fn code(self) -> u8 {
        match self {
            Self::Done => 0,
            Self::FailedItems => 1,
            Self::Usage => 2,
            Self::Stopped => 3,
            Self::Forced => 4,
            Self::BadInput => 65,
            Self::UnreadableInput => 66,
            Self::Schema => 69,
            Self::Internal => 70,
            Self::Conflict => 73,
            Self::Output => 74,
            Self::Unreachable => 75,
            Self::Denied => 77,
            Self::Configuration => 78,
            Self::Interrupted => 130,
        }
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit.code())
    }
}

/// What ended a command, with everything a person needs to see, and its exit code.
#[derive(Debug)]
pub struct CliError {
    exit: Exit,
    message: anyhow::Error,
}

impl CliError {
    /// An error of this kind.
    pub fn new(exit: Exit, message: impl fmt::Display) -> Self {
        Self { exit, message: anyhow::anyhow!("{message}") }
    }

    /// The exit code it calls for.
    #[must_use]
    pub const fn exit(&self) -> Exit {
        self.exit
    }

    /// Says what was being done.
    #[must_use]
    pub fn context(self, doing: impl fmt::Display) -> Self {
        Self { exit: self.exit, message: self.message.context(doing.to_string()) }
    }

    pub(super) fn caused(
        exit: Exit,
        error: impl std::error::Error + Send + Sync + 'static,
    ) -> Self {
        Self { exit, message: anyhow::Error::new(error) }
    }
}

impl fmt::Display for CliError {
    /// The whole chain of causes, in one line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#}", self.message)
    }
}

impl From<ConfigError> for CliError {
    fn from(error: ConfigError) -> Self {
        Self::caused(Exit::Configuration, error)
    }
}

impl From<StoreError> for CliError {
    fn from(error: StoreError) -> Self {
        let exit = match &error {
            StoreError::Unreachable(_) | StoreError::TimedOut => Exit::Unreachable,
            StoreError::Refused(_) => Exit::Internal,
            StoreError::Schema(_) => Exit::Schema,
        };
        Self::caused(exit, error)
    }
}

impl From<FlightError> for CliError {
    fn from(error: FlightError) -> Self {
        let exit = match &error {
            FlightError::NotSent(_) | FlightError::Unknown(_) => Exit::Unreachable,
            FlightError::RolledBack(_) => Exit::Internal,
        };
        Self::caused(exit, error)
    }
}

impl From<SchemaError> for CliError {
    fn from(error: SchemaError) -> Self {
        let exit = match &error {
            SchemaError::Unreachable(_) => Exit::Unreachable,
            SchemaError::Busy => Exit::Conflict,
            SchemaError::Failed { .. } => Exit::Internal,
            SchemaError::Mismatch(_) => Exit::Schema,
        };
        Self::caused(exit, error)
    }
}

impl From<SubmissionError> for CliError {
    fn from(error: SubmissionError) -> Self {
        match error {
            SubmissionError::Store(error) => error.into(),
            SubmissionError::Conflict { .. } => Self::caused(Exit::Conflict, error),
            SubmissionError::Spool(_) => Self::caused(Exit::Output, error),
        }
    }
}
