use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::Place;

/// An item's status: always derived from where it is, never stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ItemStatus {
    /// Beyond the live window.
    Pending,
    /// May be claimed, now or at its `ready_at`.
    Queued,
    /// In a lease, not started.
    Leased,
    /// In a lease, started.
    Running,
    /// Executed; its acceptance check is outstanding.
    Checking,
    /// Ended well.
    Succeeded,
    /// Ended badly.
    Failed,
    /// Ended by the cancellation of its batch.
    Cancelled,
}

impl ItemStatus {
    /// Every status, in the order of an item's life.
    pub const ALL: [Self; 8] = [
        Self::Pending,
        Self::Queued,
        Self::Leased,
        Self::Running,
        Self::Checking,
        Self::Succeeded,
        Self::Failed,
        Self::Cancelled,
    ];

    /// The status of an item at a place. `started`: its lease says that its execution has begun.
    /// `in_window`: it is nearer to the cursor than the live window has room. The SQL function
    /// `items_at` states the same; a test compares.
    #[must_use]
    pub const fn of(place: Place, started: bool, in_window: bool) -> Self {
        match place {
            Place::Fresh if in_window => Self::Queued,
            Place::Fresh => Self::Pending,
            Place::Waiting => Self::Queued,
            Place::Held if started => Self::Running,
            Place::Held => Self::Leased,
            Place::Staged => Self::Checking,
            Place::Succeeded => Self::Succeeded,
            Place::Failed => Self::Failed,
            Place::Cancelled => Self::Cancelled,
        }
    }

    /// The word used everywhere: in SQL, JSON and on the command line.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Pending => "pending",
            Self::Queued => "queued",
            Self::Leased => "leased",
            Self::Running => "running",
            Self::Checking => "checking",
            Self::Succeeded => "succeeded",
            Self::Failed => "failed",
            Self::Cancelled => "cancelled",
        }
    }
}

impl fmt::Display for ItemStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Why a text is no item status.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not an item status")]
pub struct UnknownStatus(String);

impl FromStr for ItemStatus {
    type Err = UnknownStatus;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::ALL
            .into_iter()
            .find(|status| status.as_str() == text)
            .ok_or_else(|| UnknownStatus(text.to_owned()))
    }
}
