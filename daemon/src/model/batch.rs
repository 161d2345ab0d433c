use std::fmt;

use serde::{Deserialize, Serialize};

/// A batch's control state. Source: `batches.control`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum BatchControl {
    /// Items may be claimed.
    Open,
    /// Nothing new is claimed; running work goes on.
    Paused,
    /// Nothing is published any more.
    Cancelled,
}

impl BatchControl {
    /// The word used everywhere.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Open => "open",
            Self::Paused => "paused",
            Self::Cancelled => "cancelled",
        }
    }
}

impl fmt::Display for BatchControl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// How many items of a batch are where. The sum of all fields is the number of items.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    /// Never claimed.
    pub fresh: i32,
    /// Between two attempts.
    pub waiting: i32,
    /// In a lease without a stored result.
    pub executing: i32,
    /// Executed, check outstanding.
    pub checking: i32,
    /// Ended well.
    pub succeeded: i32,
    /// Ended badly.
    pub failed: i32,
    /// Ended by cancellation.
    pub cancelled: i32,
}

impl Counts {
    /// All items.
    #[must_use]
    pub const fn total(&self) -> i32 {
        self.unfinished() + self.succeeded + self.failed + self.cancelled
    }

    /// Items without an end.
    #[must_use]
    pub const fn unfinished(&self) -> i32 {
        self.fresh + self.waiting + self.executing + self.checking
    }
}

/// How many succeeded items of a batch have a verdict of each class; the others have none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VerdictCounts {
    /// Every criterion was checked and holds.
    pub holds: i32,
    /// At least one checked criterion does not hold.
    pub fails: i32,
    /// None failed, at least one was not checked.
    pub unverified: i32,
}
