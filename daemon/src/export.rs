//! Ended items as JSON lines, in position order and constant memory; no lock, no write.
//!
//! One line an item, each one object that ends with LF and has all of these members in this order,
//! null where there is nothing to say:
//!
//! | member | holds |
//! |---|---|
//! | `key`, `position` | which item, as text and as number |
//! | `status` | `succeeded`, `failed` or `cancelled` |
//! | `attempt` | the number of the attempt it ended with |
//! | `result` | any JSON value, as it was stored, digit for digit |
//! | `result_truncated`, `result_size` | whether it was cut, and the bytes there were before |
//! | `error`, `stop_reason` | what went wrong, and the named reason of the end |
//! | `started_at`, `finished_at` | RFC 3339, by the clock of the worker |
//! | `acceptance_criteria` | the list of texts |
//! | `acceptance_verdict` | what the checks found; null where nothing was checked |
//!
//! Each page is a statement of its own, so an export holds no snapshot and no session for as long
//! as its reader takes. An item that ends behind the page being read is left out.

use serde::Serialize;
use time::OffsetDateTime;

use crate::model::{ItemStatus, Position, VerdictClass};
use crate::store::{BatchRow, Database, ExportRange, ExportRow, StoreError};

/// The statuses in which an item has ended.
pub const ENDED: [ItemStatus; 3] =
    [ItemStatus::Succeeded, ItemStatus::Failed, ItemStatus::Cancelled];

/// Bytes of a page, at which the last row may still pass them: what an export holds at a time.
const PAGE_BYTES: i64 = 1 << 20;
/// Positions that a page looks at: more than fit for a start, since most results are small.
const PAGE_POSITIONS: std::ops::RangeInclusive<i32> = 16..=2_000;

/// An export under way.
pub struct Export {
    database: Database,
    range: ExportRange,
    item_count: i32,
    written: i32,
}

impl Export {
    /// Begins an export of the ended items of `batch` that are in one of `statuses` and have a
    /// verdict of one of the classes.
    #[must_use]
    pub fn new(
        database: Database,
        batch: &BatchRow,
        statuses: &[ItemStatus],
        verdicts: &[VerdictClass],
    ) -> Self {
        let range = ExportRange {
            batch: batch.id,
            cancelled: batch.is_cancelled(),
            statuses: statuses.to_vec(),
            verdicts: verdicts.to_vec(),
            from: Position::new(0),
            positions: *PAGE_POSITIONS.end(),
            bytes: PAGE_BYTES,
        };
        Self { database, range, item_count: batch.item_count, written: 0 }
    }

    /// The next lines; none at the end.
    ///
    /// # Errors
    /// See [`StoreError`]; the same page can be asked for again.
    ///
    /// # Cancel safety
    /// Safe: the next call reads the same page.
    pub async fn next_lines(&mut self) -> Result<Option<Vec<u8>>, StoreError> {
        while self.range.from.get() < self.item_count {
            let page = self.database.export_page(&self.range).await?;
            let passed = page.next.get() - self.range.from.get();
            self.range.from = page.next;
            // As many as fitted, with room to find out that more do.
            self.range.positions =
                passed.saturating_mul(2).clamp(*PAGE_POSITIONS.start(), *PAGE_POSITIONS.end());
            if !page.rows.is_empty() {
                let mut lines = Vec::new();
                page.rows.iter().for_each(|row| write_line(&mut lines, row));
                self.written += i32::try_from(page.rows.len()).unwrap_or(i32::MAX);
                return Ok(Some(lines));
            }
        }
        Ok(None)
    }

    /// How many items the lines so far are.
    #[must_use]
    pub const fn written(&self) -> i32 {
        self.written
    }

    /// How many positions were passed so far, of all there are in the batch.
    #[must_use]
    pub fn passed(&self) -> i32 {
        self.range.from.get().min(self.item_count)
    }
}

/// Writes one item as one line.
pub fn write_line(out: &mut Vec<u8>, row: &ExportRow) {
    let mut line = Line { out, first: true };
    line.value("key", &row.key);
    line.value("position", row.position);
    line.value("status", row.status);
    line.value("attempt", row.attempt);
    line.json("result", row.result_json.as_deref());
    line.value("result_truncated", row.result_truncated);
    line.value("result_size", row.result_size);
    line.value("error", &row.error);
    line.value("stop_reason", &row.stop_reason);
    line.value("started_at", Time(row.started_at));
    line.value("finished_at", Time(row.finished_at));
    line.json("acceptance_criteria", row.criteria_json.as_deref());
    line.value("acceptance_verdict", &row.verdict);
    line.out.extend_from_slice(b"}\n");
}

#[derive(Serialize)]
#[serde(transparent)]
struct Time(#[serde(with = "time::serde::rfc3339::option")] Option<OffsetDateTime>);

struct Line<'a> {
    out: &'a mut Vec<u8>,
    first: bool,
}

impl Line<'_> {
    fn name(&mut self, name: &str) {
        self.out.push(if self.first { b'{' } else { b',' });
        self.first = false;
        self.out.push(b'"');
        self.out.extend_from_slice(name.as_bytes());
        self.out.extend_from_slice(b"\":");
    }

    fn value(&mut self, name: &str, value: impl Serialize) {
        self.name(name);
        serde_json::to_writer(&mut *self.out, &value)
            .expect("texts, numbers and times of years up to 9999 are JSON");
    }

    /// JSON text as it is. A line break in it can only be white space between its parts: inside a
    /// string it is escaped.
    fn json(&mut self, name: &str, json: Option<&str>) {
        self.name(name);
        let json = json.unwrap_or("null").bytes();
        self.out.extend(json.map(|byte| if matches!(byte, b'\n' | b'\r') { b' ' } else { byte }));
    }
}

#[cfg(test)]
mod tests {
    use time::macros::datetime;

    use super::*;
    use crate::model::{Family, Finding, Leaf, Verdict};

    fn cancelled() -> ExportRow {
        ExportRow {
            position: Position::new(7),
            key: "a\nb".into(),
            criteria_json: None,
            status: ItemStatus::Cancelled,
            attempt: None,
            result_json: None,
            result_truncated: false,
            result_size: 0,
            error: None,
            stop_reason: None,
            started_at: None,
            finished_at: None,
            verdict: None,
        }
    }

    fn line(row: &ExportRow) -> String {
        let mut out = Vec::new();
        write_line(&mut out, row);
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn a_line_has_every_member_in_the_stated_order() {
        let row = ExportRow {
            criteria_json: Some(r#"["file_exists:a"]"#.into()),
            status: ItemStatus::Failed,
            attempt: Some(3),
            result_json: Some(r#"{"n": 12345678901234567890.10}"#.into()),
            result_truncated: true,
            result_size: 2_000_000,
            error: Some("no \"luck\"".into()),
            stop_reason: Some("exit_status".into()),
            started_at: Some(datetime!(2026-01-02 03:04:05.678901 UTC)),
            finished_at: Some(datetime!(2026-01-02 03:04:06 UTC)),
            ..cancelled()
        };
        assert_eq!(
            line(&row),
            concat!(
                r#"{"key":"a\nb","position":7,"status":"failed","attempt":3,"#,
                r#""result":{"n": 12345678901234567890.10},"result_truncated":true,"#,
                r#""result_size":2000000,"error":"no \"luck\"","stop_reason":"exit_status","#,
                r#""started_at":"2026-01-02T03:04:05.678901Z","#,
                r#""finished_at":"2026-01-02T03:04:06Z","#,
                r#""acceptance_criteria":["file_exists:a"],"acceptance_verdict":null}"#,
                "\n"
            )
        );
    }

    #[test]
    fn nulls_are_explicit() {
        assert_eq!(
            line(&cancelled()),
            concat!(
                r#"{"key":"a\nb","position":7,"status":"cancelled","attempt":null,"result":null,"#,
                r#""result_truncated":false,"result_size":0,"error":null,"stop_reason":null,"#,
                r#""started_at":null,"finished_at":null,"acceptance_criteria":null,"#,
                r#""acceptance_verdict":null}"#,
                "\n"
            )
        );
    }

    #[test]
    fn a_verdict_is_an_object_on_the_same_line() {
        let leaf = Leaf::new("a\nb", Family::Undecidable, Finding::Unchecked, "");
        let row = ExportRow { verdict: Verdict::new(vec![leaf]), ..cancelled() };
        let line = line(&row);
        assert_eq!(line.matches('\n').count(), 1);
        let value: serde_json::Value = serde_json::from_str(&line).unwrap();
        assert_eq!(value["acceptance_verdict"]["unchecked"], serde_json::json!(["a\nb"]));
    }

    #[test]
    fn a_result_cannot_break_its_line() {
        let row = ExportRow { result_json: Some("[\n  1,\r\n  \"\\n\"\n]".into()), ..cancelled() };
        let line = line(&row);
        assert_eq!(line.matches(['\n', '\r']).count(), 1);
        let value: serde_json::Value = serde_json::from_str(&line).unwrap();
        assert_eq!(value["result"], serde_json::json!([1, "\n"]));
    }
}
