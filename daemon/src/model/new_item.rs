use time::OffsetDateTime;

use super::Position;

/// One valid item of a batch that is not stored yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewItem {
    /// Its position in the batch.
    pub position: Position,
    /// Its key, unique in the batch.
    pub key: String,
    /// JSON text, as it was written; without line breaks.
    pub input: String,
    /// JSON text of the normalized list, 1 to 20 strings; none if nothing usable was submitted.
    pub criteria: Option<String>,
    /// The earliest start, to the microsecond, in UTC.
    pub not_before: Option<OffsetDateTime>,
}
