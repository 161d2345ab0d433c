use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

macro_rules! uuid_id {
    ($(#[$meta:meta])* $name:ident, $new:ident) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(Uuid);

        impl $name {
            /// A new, unique id.
            #[must_use]
            pub fn generate() -> Self {
                Self(Uuid::$new())
            }

            /// Wraps an id read from the database.
            #[must_use]
            pub const fn from_uuid(id: Uuid) -> Self {
                Self(id)
            }

            /// The id as the database stores it.
            #[must_use]
            pub const fn uuid(self) -> Uuid {
                self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }

        impl FromStr for $name {
            type Err = uuid::Error;

            fn from_str(text: &str) -> Result<Self, Self::Err> {
                Uuid::parse_str(text).map(Self)
            }
        }
    };
}

uuid_id! {
    /// A batch. `UUIDv7`, so that ids sort by creation. Source: `batches.id`.
    BatchId, now_v7
}
uuid_id! {
    /// One lease: what one claim took. Random, chosen by the worker before it claims (F1).
    /// Source: `leases.lease_id`.
    LeaseId, new_v4
}
uuid_id! {
    /// One start of one worker process; never reused. Source: `workers.id`.
    WorkerId, now_v7
}

/// An item's dense position in its batch, from 0. Source: `items.position`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Position(i32);

impl Position {
    /// Wraps a position read from the database.
    #[must_use]
    pub const fn new(position: i32) -> Self {
        Self(position)
    }

    /// The raw number.
    #[must_use]
    pub const fn get(self) -> i32 {
        self.0
    }
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// An item is its batch and its position.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ItemRef {
    batch: BatchId,
    position: Position,
}

impl ItemRef {
    /// The item at `position` of `batch`.
    #[must_use]
    pub const fn new(batch: BatchId, position: Position) -> Self {
        Self { batch, position }
    }

    /// Its batch.
    #[must_use]
    pub const fn batch(self) -> BatchId {
        self.batch
    }

    /// Its position in the batch.
    #[must_use]
    pub const fn position(self) -> Position {
        self.position
    }
}

impl fmt::Display for ItemRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.batch, self.position)
    }
}

/// Rises with every claim in the database's life (F2). A string wherever JSON carries it.
/// Source: `leases.token`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FencingToken(i64);

impl FencingToken {
    /// Wraps a token read from the database.
    #[must_use]
    pub const fn new(token: i64) -> Self {
        Self(token)
    }

    /// The raw number.
    #[must_use]
    pub const fn get(self) -> i64 {
        self.0
    }
}

impl fmt::Display for FencingToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The number of an attempt, from 1: the charged attempts before it plus one, so that an attempt
/// that was given back leaves its number to the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Attempt(u16);

impl Attempt {
    /// Wraps an attempt number.
    #[must_use]
    pub const fn new(number: u16) -> Self {
        Self(number)
    }

    /// The raw number.
    #[must_use]
    pub const fn get(self) -> u16 {
        self.0
    }
}

impl fmt::Display for Attempt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The name of a queue: 1 to 64 of `a-z`, `0-9`, `-`, `_` and `.`, beginning with a letter or digit.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(transparent)]
pub struct QueueName(String);

/// Why a text is no queue name.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` is not a queue name: 1 to 64 of a-z, 0-9, `-`, `_`, `.`, beginning with a letter or digit"
)]
pub struct InvalidQueueName(String);

impl QueueName {
    /// The name as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for QueueName {
    type Err = InvalidQueueName;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let inner = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "-_.".contains(c);
        let first = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
        if text.len() <= 64 && text.starts_with(first) && text.chars().all(inner) {
            Ok(Self(text.to_owned()))
        } else {
            Err(InvalidQueueName(text.chars().take(80).collect()))
        }
    }
}

impl fmt::Display for QueueName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queue_names_are_checked() {
        for good in ["a", "checksum", "0-9_x.y"] {
            assert_eq!(good.parse::<QueueName>().unwrap().as_str(), good);
        }
        for bad in ["", "-a", "A", "a b", "é", &"x".repeat(65)] {
            assert!(bad.parse::<QueueName>().is_err(), "{bad}");
        }
    }
}
