use std::fmt;
use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Seek, Write};
use std::path::Path;

use serde::Serialize;
use sha2::{Digest, Sha256};
use time::OffsetDateTime;

use crate::model::{NewItem, Position, QueueName};
use crate::submit::batch::NewBatch;
use crate::submit::validate::Item;

// One record an item, in position order; integers are little-endian:
//   u8 members present (bits below), key, input, criteria if present,
//   i64 microseconds since 1970 of not_before if present;
// each text is its u32 length in bytes and its UTF-8 bytes.
// The digest of a submission covers these bytes: a changed format needs a new `DIGEST_DOMAIN`, and
// a repeated submission from before the change is then taken for a different one.
const HAS_CRITERIA: u8 = 1;
const HAS_NOT_BEFORE: u8 = 2;

const DIGEST_DOMAIN: &[u8] = b"holdfast submission 1\n";

/// Writes validated items to an unnamed temporary file.
pub(super) struct SpoolWriter {
    file: BufWriter<File>,
    record: Vec<u8>,
    digest: Sha256,
    item_count: u32,
    bytes: u64,
    has_not_before: bool,
}

impl SpoolWriter {
    /// Opens a file in `dir`, or in the system's folder for temporary files.
    pub(super) fn create(dir: Option<&Path>) -> io::Result<Self> {
        let file = match dir {
            Some(dir) => tempfile::tempfile_in(dir),
            None => tempfile::tempfile(),
        }?;
        Ok(Self {
            file: BufWriter::with_capacity(64 * 1024, file),
            record: Vec::new(),
            digest: Sha256::new(),
            item_count: 0,
            bytes: 0,
            has_not_before: false,
        })
    }

    pub(super) fn push(&mut self, item: &Item<'_>) -> io::Result<()> {
        let mut present = 0;
        present |= if item.criteria.is_some() { HAS_CRITERIA } else { 0 };
        present |= if item.not_before.is_some() { HAS_NOT_BEFORE } else { 0 };

        self.record.clear();
        self.record.push(present);
        let texts = [Some(&*item.key), Some(&*item.input), item.criteria.as_deref()];
        for text in texts.into_iter().flatten() {
            let length = u32::try_from(text.len()).map_err(io::Error::other)?;
            self.record.extend_from_slice(&length.to_le_bytes());
            self.record.extend_from_slice(text.as_bytes());
        }
        if let Some(time) = item.not_before {
            self.record.extend_from_slice(&microseconds(time).to_le_bytes());
        }

        self.file.write_all(&self.record)?;
        self.digest.update(&self.record);
        self.item_count += 1;
        self.bytes += self.record.len() as u64;
        self.has_not_before |= item.not_before.is_some();
        Ok(())
    }

    pub(super) fn finish(self) -> io::Result<Spooled> {
        Ok(Spooled {
            file: self.file.into_inner().map_err(io::IntoInnerError::into_error)?,
            item_count: self.item_count,
            bytes: self.bytes,
            digest: self.digest.finalize().into(),
            has_not_before: self.has_not_before,
        })
    }
}

/// A batch's valid items in an unnamed temporary file, which is gone when this is dropped.
#[derive(Debug)]
pub struct Spooled {
    file: File,
    item_count: u32,
    bytes: u64,
    digest: [u8; 32],
    has_not_before: bool,
}

impl Spooled {
    /// How many items there are: at least 1, at most `i32::MAX`.
    #[must_use]
    pub const fn item_count(&self) -> u32 {
        self.item_count
    }

    /// The size of the file in bytes.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether any item has a time before which it must not start.
    #[must_use]
    pub const fn has_not_before(&self) -> bool {
        self.has_not_before
    }

    /// SHA-256 of what was submitted: the items in order (keys, inputs as written, criteria as
    /// normalized, times) and the batch's own parameters. The owner and the submission key are
    /// left out: under them the digest is looked up.
    ///
    /// `spec` is the execution spec if the submitter brings it along, as an inline queue does. Of
    /// a configured queue the name is enough; with its settings, a changed configuration would
    /// make a repeated submission a conflict.
    #[must_use]
    pub fn digest(&self, batch: &NewBatch, spec: Option<&str>) -> [u8; 32] {
        let parameters = Parameters {
            queue: &batch.queue,
            title: batch.title.as_deref(),
            thread: batch.thread.as_deref(),
            max_running: batch.max_running,
            max_live: batch.max_live,
            max_attempts: batch.max_attempts,
            max_checking: batch.max_checking,
            priority: batch.priority,
            not_before: batch.not_before.map(microseconds),
            spec,
        };
        // Only the parameters vary in length, so nothing in them can pass for something else.
        Sha256::new()
            .chain_update(DIGEST_DOMAIN)
            .chain_update(self.digest)
            .chain_update(parameters.json())
            .finalize()
            .into()
    }

    /// Reads the items in position order, from the first; as often as wanted.
    ///
    /// # Errors
    /// When the file cannot be rewound.
    pub fn items(&mut self) -> io::Result<SpooledItems<'_>> {
        self.file.rewind()?;
        Ok(SpooledItems {
            file: BufReader::with_capacity(64 * 1024, &self.file),
            next: 0,
            count: self.item_count,
        })
    }
}

/// The parameters of a batch that a repeated submission must repeat.
#[derive(Serialize)]
struct Parameters<'a> {
    queue: &'a QueueName,
    title: Option<&'a str>,
    thread: Option<&'a str>,
    max_running: Option<i32>,
    max_live: Option<i32>,
    max_attempts: Option<i32>,
    max_checking: Option<i32>,
    priority: i16,
    not_before: Option<i64>,
    spec: Option<&'a str>,
}

impl Parameters<'_> {
    fn json(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("numbers and strings are JSON")
    }
}

/// The items of a [`Spooled`], read through a bounded buffer. Ends after the first error.
pub struct SpooledItems<'a> {
    file: BufReader<&'a File>,
    next: u32,
    count: u32,
}

impl SpooledItems<'_> {
    fn read(&mut self) -> io::Result<NewItem> {
        let position = i32::try_from(self.next).map_err(io::Error::other)?;
        let [present] = self.array()?;
        Ok(NewItem {
            position: Position::new(position),
            key: self.text()?,
            input: self.text()?,
            criteria: (present & HAS_CRITERIA != 0).then(|| self.text()).transpose()?,
            not_before: (present & HAS_NOT_BEFORE != 0).then(|| self.time()).transpose()?,
        })
    }

    fn array<const N: usize>(&mut self) -> io::Result<[u8; N]> {
        let mut bytes = [0; N];
        self.file.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    fn text(&mut self) -> io::Result<String> {
        let length = u32::from_le_bytes(self.array()?);
        let mut bytes = vec![0; usize::try_from(length).map_err(io::Error::other)?];
        self.file.read_exact(&mut bytes)?;
        String::from_utf8(bytes).map_err(io::Error::other)
    }

    fn time(&mut self) -> io::Result<OffsetDateTime> {
        let micros = i64::from_le_bytes(self.array()?);
        OffsetDateTime::from_unix_timestamp_nanos(i128::from(micros) * 1000)
            .map_err(io::Error::other)
    }
}

impl Iterator for SpooledItems<'_> {
    type Item = io::Result<NewItem>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.next == self.count {
            return None;
        }
        let item = self.read();
        self.next = if item.is_ok() { self.next + 1 } else { self.count };
        Some(item)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let left = usize::try_from(self.count - self.next).ok();
        (left.map_or(0, |left| left.min(1)), left)
    }
}

impl fmt::Debug for SpooledItems<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SpooledItems").field("next", &self.next).finish_non_exhaustive()
    }
}

fn microseconds(time: OffsetDateTime) -> i64 {
    let micros = time.unix_timestamp_nanos().div_euclid(1000);
    i64::try_from(micros).expect("the years of `OffsetDateTime` are within 10,000 of 1970")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use time::macros::datetime;

    use super::*;

    fn item(key: &str) -> Item<'_> {
        Item { key: key.into(), input: "1".into(), criteria: None, not_before: None }
    }

    fn spool(items: &[Item<'_>]) -> Spooled {
        let mut spool = SpoolWriter::create(None).unwrap();
        for item in items {
            spool.push(item).unwrap();
        }
        spool.finish().unwrap()
    }

    fn batch() -> NewBatch {
        NewBatch::in_queue("checksum".parse().unwrap())
    }

    fn items() -> impl Strategy<Value = Vec<Item<'static>>> {
        let micros = -62_000_000_000_000_000_i64..253_000_000_000_000_000;
        let time = micros.prop_map(|micros| {
            OffsetDateTime::from_unix_timestamp_nanos(i128::from(micros) * 1000).unwrap()
        });
        let criteria = proptest::option::of(".*");
        let item = (".*", ".*", criteria, proptest::option::of(time)).prop_map(
            |(key, input, criteria, not_before)| Item {
                key: key.into(),
                input: input.into(),
                criteria,
                not_before,
            },
        );
        proptest::collection::vec(item, 0..20)
    }

    proptest! {
        #[test]
        fn what_is_read_is_what_was_written_in_its_order(items in items()) {
            let mut spooled = spool(&items);

            for _ in 0..2 {
                let read: Vec<_> = spooled.items().unwrap().map(Result::unwrap).collect();

                prop_assert_eq!(read.len(), items.len());
                for (index, (read, written)) in read.iter().zip(&items).enumerate() {
                    prop_assert_eq!(read.position.get(), i32::try_from(index).unwrap());
                    prop_assert_eq!(&read.key, &written.key);
                    prop_assert_eq!(&read.input, &written.input);
                    prop_assert_eq!(&read.criteria, &written.criteria);
                    prop_assert_eq!(read.not_before, written.not_before);
                }
            }
            prop_assert_eq!(spooled.item_count() as usize, items.len());
            prop_assert_eq!(spooled.bytes(), spooled.file.metadata().unwrap().len());
            prop_assert_eq!(spooled.has_not_before(), items.iter().any(|i| i.not_before.is_some()));
        }
    }

    #[test]
    fn the_digest_is_the_same_for_the_same_submission_only() {
        let digest = |items: &[Item<'_>]| spool(items).digest(&batch(), None);
        let first = digest(&[item("a"), item("b")]);
        assert_eq!(digest(&[item("a"), item("b")]), first);

        let time = Some(datetime!(2030-01-31 08:00 UTC));
        let others = [
            digest(&[item("b"), item("a")]),
            digest(&[item("a")]),
            digest(&[item("a"), item("b"), item("c")]),
            digest(&[item("a"), Item { input: "2".into(), ..item("b") }]),
            digest(&[item("a"), Item { criteria: Some("1".into()), ..item("b") }]),
            digest(&[item("a"), Item { not_before: time, ..item("b") }]),
        ];
        for (index, other) in others.iter().enumerate() {
            assert_ne!(*other, first);
            assert!(!others[..index].contains(other), "number {index} repeats another");
        }
    }

    #[test]
    fn the_digest_covers_the_parameters_of_the_batch_but_not_its_owner_and_key() {
        let spooled = spool(&[item("a")]);
        let digest = |change: fn(&mut NewBatch)| {
            let mut batch = batch();
            change(&mut batch);
            spooled.digest(&batch, None)
        };
        let plain = spooled.digest(&batch(), None);
        assert_eq!(digest(|b| b.owner = "other".to_owned()), plain);
        assert_eq!(digest(|b| b.submission_key = Some("other".to_owned())), plain);

        let others = [
            spooled.digest(&batch(), Some("{}")),
            digest(|b| b.queue = "other".parse().unwrap()),
            digest(|b| b.title = Some(String::new())),
            digest(|b| b.thread = Some(String::new())),
            digest(|b| b.max_running = Some(1)),
            digest(|b| b.max_live = Some(1)),
            digest(|b| b.max_attempts = Some(1)),
            digest(|b| b.max_checking = Some(1)),
            digest(|b| b.priority = 1),
            digest(|b| b.not_before = Some(datetime!(1970-01-01 00:00:00.000001 UTC))),
        ];
        for (index, other) in others.iter().enumerate() {
            assert_ne!(*other, plain);
            assert!(!others[..index].contains(other), "number {index} repeats another");
        }
    }

    #[test]
    fn a_file_that_was_cut_short_is_an_error_and_the_end() {
        let mut spooled = spool(&[item("a"), item("b"), item("c")]);
        spooled.file.set_len(spooled.bytes() / 2).unwrap();

        let read: Vec<_> = spooled.items().unwrap().collect();

        let [Ok(_), Err(error)] = &read[..] else { panic!("{read:?}") };
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
    }
}
