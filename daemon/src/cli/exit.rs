use std::fmt;
use std::process::ExitCode;

use serde_json::{Value, json};
use tokio_postgres::error::SqlState;

use crate::config::{ConfigError, UnknownQueue};
use crate::store::migrate::SchemaError;
use crate::store::{FlightError, StoreError, SubmissionError};
use crate::submit::{Problem, SubmitError};

/// How the program ends; the numbers follow `sysexits.h` where it has one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// Done.
    Done,
    /// A batch ended with failed items, or a criterion does not hold.
    FailedItems,
    /// The command line is wrong.
    Usage,
    /// A worker ended in order, but stopped executions for it.
    Stopped,
    /// A worker ended at once; leases may lapse.
    Forced,
    /// `doctor` found nothing worse than warnings.
    Warnings,
    /// `doctor` found what stops work or endangers results.
    Faults,
    /// No criterion fails, but at least one is UNVERIFIED.
    Unverified,
    /// The input has faults.
    BadInput,
    /// The input cannot be read.
    UnreadableInput,
    /// The schema is too old or too new, or could not be moved.
    Schema,
    /// A fault of this program.
    Internal,
    /// The submission key stands for other content, the batch is in a state that forbids it, or
    /// another migration is running.
    Conflict,
    /// The output cannot be written.
    Output,
    /// The database is unreachable, or too busy: the same may succeed later.
    Unreachable,
    /// No such batch or item, or not yours; the database lets this user not in.
    Denied,
    /// The configuration is wrong.
    Configuration,
    /// Interrupted at a terminal while waiting; nothing was changed by that.
    Interrupted,
    /// The reader of the output has gone, as after `| head`; what it did not read is missing. Said
    /// by this code alone, the one a shell shows for a program that a broken pipe ended.
    ReaderGone,
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
            Self::Warnings => 10,
            Self::Faults => 20,
            Self::Unverified => 5,
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
            Self::ReaderGone => 141,
        }
    }
}

/// The exit status of the program: one of its own, or that of the worker it guarded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Status(pub(super) u8);

impl From<Exit> for Status {
    fn from(exit: Exit) -> Self {
        Self(exit.code())
    }
}

impl From<Status> for ExitCode {
    fn from(status: Status) -> Self {
        Self::from(status.0)
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
    problems: Option<Value>,
}

impl CliError {
    /// An error of this kind.
    pub fn new(exit: Exit, message: impl fmt::Display) -> Self {
        Self { exit, message: anyhow::anyhow!("{message}"), problems: None }
    }

    /// The exit code it calls for.
    #[must_use]
    pub const fn exit(&self) -> Exit {
        self.exit
    }

    /// Says what was being done.
    #[must_use]
    pub fn context(self, doing: impl fmt::Display) -> Self {
        Self { message: self.message.context(doing.to_string()), ..self }
    }

    /// The same as a document for programs: `error`, `exit_code`, and what is wrong with the input
    /// or the configuration, one by one, as `problems`.
    pub(super) fn document(&self) -> Value {
        let mut document = json!({"error": self.to_string(), "exit_code": self.exit.code()});
        if let Some(problems) = &self.problems {
            document["problems"] = problems.clone();
        }
        document
    }

    pub(super) fn caused(
        exit: Exit,
        error: impl std::error::Error + Send + Sync + 'static,
    ) -> Self {
        Self { exit, message: anyhow::Error::new(error), problems: None }
    }

    /// An error with the whole chain of its causes, each said once.
    pub(super) fn chain(error: &(dyn std::error::Error + 'static)) -> String {
        let mut said = String::new();
        let mut next = Some(error);
        while let Some(cause) = next {
            // The driver puts words of its own around what the server said.
            let words = match cause.downcast_ref::<tokio_postgres::Error>() {
                Some(error) => error.as_db_error().map(|db| db.message().to_owned()),
                None => None,
            };
            let words = words.unwrap_or_else(|| cause.to_string());
            if said.is_empty() {
                said = words;
            } else if !said.contains(&words) {
                said = format!("{said}: {words}");
            }
            next = cause.source();
        }
        said
    }

    fn with_problems(self, problems: Value) -> Self {
        Self { problems: Some(problems), ..self }
    }
}

impl fmt::Display for CliError {
    /// The whole chain of causes, each said once.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&Self::chain(self.message.as_ref()))
    }
}

impl From<ConfigError> for CliError {
    fn from(error: ConfigError) -> Self {
        let problems = error
            .problems()
            .iter()
            .map(|problem| {
                let origins: Vec<String> =
                    problem.origins.iter().map(ToString::to_string).collect();
                json!({"key": problem.key, "message": problem.what, "origins": origins})
            })
            .collect();
        Self::caused(Exit::Configuration, error).with_problems(problems)
    }
}

impl From<UnknownQueue> for CliError {
    fn from(error: UnknownQueue) -> Self {
        Self::caused(Exit::Configuration, error)
    }
}

impl From<StoreError> for CliError {
    fn from(error: StoreError) -> Self {
        let exit = match &error {
            StoreError::Unreachable(_) | StoreError::TimedOut => Exit::Unreachable,
            StoreError::Refused(error) => exit_of_state(error.code().map(SqlState::code)),
            StoreError::Schema(_) => Exit::Schema,
        };
        Self::caused(exit, error)
    }
}

impl From<FlightError> for CliError {
    fn from(error: FlightError) -> Self {
        match error {
            FlightError::NotSent(error) => error.into(),
            FlightError::RolledBack(_) if error.is_lasting() => Self::caused(Exit::Internal, error),
            // A lock or a statement took too long: the same may succeed later.
            FlightError::RolledBack(_) | FlightError::Unknown(_) => {
                Self::caused(Exit::Unreachable, error)
            }
        }
    }
}

impl From<SubmissionError> for CliError {
    fn from(error: SubmissionError) -> Self {
        match error {
            SubmissionError::Store(error) => error.into(),
            SubmissionError::Conflict { .. } => Self::caused(Exit::Conflict, error),
            SubmissionError::Spool(_) => Self::caused(Exit::Output, error),
            SubmissionError::Unknown { .. } => Self::caused(Exit::Unreachable, error),
        }
    }
}

impl From<SubmitError> for CliError {
    fn from(error: SubmitError) -> Self {
        match &error {
            SubmitError::Invalid(report) => {
                let problems = report.problems().iter().map(problem_document).collect();
                Self::caused(Exit::BadInput, error).with_problems(problems)
            }
            SubmitError::Unreadable(_) => Self::caused(Exit::UnreadableInput, error),
            SubmitError::Spool(_) => Self::caused(Exit::Output, error),
        }
    }
}

impl From<SchemaError> for CliError {
    fn from(error: SchemaError) -> Self {
        let exit = match &error {
            SchemaError::Unreachable(error) => match error.as_database_error() {
                Some(db) => exit_of_state(db.code().as_deref()),
                None => Exit::Unreachable,
            },
            SchemaError::Busy => Exit::Conflict,
            SchemaError::Failed { .. } | SchemaError::Mismatch(_) => Exit::Schema,
        };
        Self::caused(exit, error)
    }
}

fn problem_document(problem: &Problem) -> Value {
    json!({"line": problem.line(), "field": problem.field(), "message": problem.message()})
}

/// What the server's refusal means for who typed the command.
fn exit_of_state(state: Option<&str>) -> Exit {
    match state {
        // Wrong user or password, no right to connect or to a table.
        Some("42501") => Exit::Denied,
        Some(state) if state.starts_with("28") => Exit::Denied,
        // No such database.
        Some("3D000") => Exit::Configuration,
        // Shutting down, starting, out of connections, cancelled for taking too long.
        Some(state) if ["57", "53", "08"].iter().any(|class| state.starts_with(class)) => {
            Exit::Unreachable
        }
        Some(_) | None => Exit::Internal,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cause_is_said_once() {
        let error = CliError::new(Exit::Internal, "inner: the cause").context("doing it");
        assert_eq!(error.to_string(), "doing it: inner: the cause");
        let error = CliError::new(Exit::Internal, "the cause").context("no: the cause");
        assert_eq!(error.to_string(), "no: the cause");
    }

    #[test]
    fn refusals_are_told_apart_by_who_can_help() {
        assert_eq!(exit_of_state(Some("28P01")), Exit::Denied);
        assert_eq!(exit_of_state(Some("42501")), Exit::Denied);
        assert_eq!(exit_of_state(Some("3D000")), Exit::Configuration);
        assert_eq!(exit_of_state(Some("57P03")), Exit::Unreachable);
        assert_eq!(exit_of_state(Some("57014")), Exit::Unreachable);
        assert_eq!(exit_of_state(Some("22P02")), Exit::Internal);
        assert_eq!(exit_of_state(None), Exit::Internal);
    }
}
