//! What is wrong with a configuration, and where each value came from.

use std::fmt;
use std::path::PathBuf;

/// Where a value came from.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Origin {
    /// The defaults compiled into the program.
    Default,
    /// A file, and the line of the key in it, from 1.
    File {
        /// The file as it was named.
        path: PathBuf,
        /// Line of the key, where it could be told.
        line: Option<usize>,
    },
    /// The environment variable of this name.
    Variable(String),
    /// The command-line flag of this name.
    Flag(String),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::File { path, line: None } => write!(f, "file {}", path.display()),
            Self::File { path, line: Some(line) } => {
                write!(f, "file {}, line {line}", path.display())
            }
            Self::Variable(name) => write!(f, "environment variable {name}"),
            Self::Flag(name) => write!(f, "flag {name}"),
        }
    }
}

/// One thing that is wrong. Prints as `key: what is wrong (source)`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// The key path, such as `lease.ttl`; empty where a whole source is unusable.
    pub key: String,
    /// What is wrong with it.
    pub what: String,
    /// Where the values behind it came from, without the defaults.
    pub origins: Vec<Origin>,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.key.is_empty() {
            write!(f, "{}: ", self.key)?;
        }
        f.write_str(&self.what)?;
        for (n, origin) in self.origins.iter().enumerate() {
            write!(f, "{}{origin}", if n == 0 { " (" } else { "; " })?;
        }
        if self.origins.is_empty() { Ok(()) } else { f.write_str(")") }
    }
}

/// A configuration that cannot be used. Names everything found wrong, one problem a line; no line
/// holds a secret. Exit code 78.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", .problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"))]
pub struct ConfigError {
    problems: Vec<Problem>,
}

impl ConfigError {
    pub(super) fn check(problems: Vec<Problem>) -> Result<(), Self> {
        if problems.is_empty() { Ok(()) } else { Err(Self::new(problems)) }
    }

    pub(super) fn new(problems: Vec<Problem>) -> Self {
        Self { problems }
    }

    pub(super) fn one(key: &str, what: &str) -> Self {
        Self { problems: vec![Problem { key: key.into(), what: what.into(), origins: Vec::new() }] }
    }

    /// The problems, at least one.
    #[must_use]
    pub fn problems(&self) -> &[Problem] {
        &self.problems
    }
}
