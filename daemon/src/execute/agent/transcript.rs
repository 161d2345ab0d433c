//! The transcript of an attempt: one line for each turn, bounded as a whole and in each text.

use std::fmt::Write;

use serde_json::{Value, json};

use crate::execute::{Job, Ledger, Noted};

/// The longest text of one line, in bytes.
const TEXT_BYTES: usize = 8 * 1024;

/// What of a transcript is kept back for its last line, in bytes.
const LAST_BYTES: usize = 512;

/// A transcript as it is written.
pub(super) struct Transcript<'a> {
    ledger: &'a dyn Ledger,
    job: &'a Job,
    seq: u32,
    left: usize,
    full: bool,
}

impl<'a> Transcript<'a> {
    pub(super) fn new(ledger: &'a dyn Ledger, job: &'a Job, bytes: usize) -> Self {
        Self { ledger, job, seq: 0, left: bytes.saturating_sub(LAST_BYTES), full: false }
    }

    /// Appends a line; one that does not fit any more says so in its place, once.
    pub(super) async fn note(&mut self, mut entry: Value) -> Noted {
        if self.full {
            return Noted::Stored;
        }
        bound(&mut entry);
        let length = entry.to_string().len();
        if length > self.left {
            self.full = true;
            return self.append(&json!({"type": "full"})).await;
        }
        self.left -= length;
        self.append(&entry).await
    }

    /// Appends the last line, which always fits.
    pub(super) async fn end(&mut self, entry: &Value) -> Noted {
        self.append(entry).await
    }

    async fn append(&mut self, entry: &Value) -> Noted {
        let noted = self.ledger.note(self.job, self.seq, entry).await;
        self.seq += 1;
        noted
    }
}

fn bound(entry: &mut Value) {
    match entry {
        Value::String(text) if text.len() > TEXT_BYTES => {
            let whole = text.len();
            text.truncate(text.floor_char_boundary(TEXT_BYTES));
            let left_out = whole - text.len();
            write!(text, "[… {left_out} bytes left out]").expect("a String takes any text");
        }
        Value::Array(list) => list.iter_mut().for_each(bound),
        Value::Object(members) => members.values_mut().for_each(bound),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use async_trait::async_trait;

    use super::*;
    use crate::execute::Spent;

    #[derive(Default)]
    struct Kept(Mutex<Vec<(u32, Value)>>);

    #[async_trait]
    impl Ledger for Kept {
        async fn spend(&self, _: &Job, _: &Spent) {}

        async fn note(&self, _: &Job, seq: u32, entry: &Value) -> Noted {
            self.0.lock().unwrap().push((seq, entry.clone()));
            Noted::Stored
        }
    }

    #[tokio::test]
    async fn a_transcript_is_bounded_and_keeps_its_end() {
        let kept = Kept::default();
        let job = crate::execute::http::tests::job("0");
        let mut transcript = Transcript::new(&kept, &job, 30_000);
        for _ in 0..10 {
            transcript.note(json!({"text": ["x".repeat(20_000)]})).await;
        }
        transcript.end(&json!({"type": "end"})).await;

        let kept = kept.0.into_inner().unwrap();
        let kinds: Vec<u32> = kept.iter().map(|(seq, _)| *seq).collect();
        assert_eq!(kinds, [0, 1, 2, 3, 4]);
        assert!(kept[0].1["text"][0].as_str().unwrap().ends_with("[… 11808 bytes left out]"));
        assert_eq!(kept[3].1, json!({"type": "full"}));
        assert_eq!(kept[4].1, json!({"type": "end"}));
    }
}
