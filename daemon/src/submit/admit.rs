use std::io::{self, Read};
use std::path::Path;
use std::time::Duration;

use tokio::sync::mpsc;
use tracing::Instrument;

use crate::config::{Limits, QueueSpec, Settings, UnknownQueue};
use crate::model::{BatchId, NewItem, Principal, QueueName};
use crate::store::{BatchRecord, Database, Event, Stored, SubmissionError};
use crate::submit::batch::NewBatch;
use crate::submit::reader::{Form, Progress, SubmitError, SubmitLimits, read_items};
use crate::submit::report::Report;
use crate::submit::spool::Spooled;
use crate::telemetry::trace::{self, TraceContext};

/// Bytes of items that travel to the database together; two such chunks are ahead of it at most.
const CHUNK_BYTES: usize = 128 << 10;
const CHUNKS_AHEAD: usize = 2;

/// How often and how long after each other a batch is looked for whose commit was not answered.
const LOOKS: u32 = 10;
const BETWEEN_LOOKS: Duration = Duration::from_millis(500);

/// A batch to be submitted, its items not read yet.
#[derive(Clone, Debug)]
pub struct Submission {
    batch: NewBatch,
    form: Form,
    spec: QueueSpec,
    inline: bool,
}

impl Submission {
    /// A batch for a configured queue, whose settings are copied into it.
    ///
    /// # Errors
    /// The queue is not configured.
    pub fn to_queue(
        batch: NewBatch,
        form: Form,
        settings: &Settings,
    ) -> Result<Self, UnknownQueue> {
        let spec = settings.queue(&batch.queue)?.clone();
        Ok(Self { batch, form, spec, inline: false })
    }

    /// A batch that brings its queue's settings along; a repeat under its submission key must bring
    /// the same.
    #[must_use]
    pub const fn with_spec(batch: NewBatch, form: Form, spec: QueueSpec) -> Self {
        Self { batch, form, spec, inline: true }
    }

    /// Reads a whole input; validates it and the batch's parameters. Items wait in an unnamed file
    /// in `spool_dir` (none: the system's folder for temporary files). What the batch leaves open
    /// is filled in from the settings. Blocks the thread for as long as the input takes.
    ///
    /// # Errors
    /// See [`SubmitError`].
    pub fn read(
        self,
        input: impl Read,
        settings: &Settings,
        spool_dir: Option<&Path>,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Admitted, SubmitError> {
        self.batch
            .validate(&settings.limits)
            .map_err(|problems| SubmitError::Invalid(Report::from(problems)))?;
        let limits = SubmitLimits::from(&settings.limits);
        let spooled = read_items(input, self.form, &limits, spool_dir, progress)?;
        let queue = self.batch.queue.clone();
        Ok(Admitted { queue, record: self.record(&spooled, settings), spooled })
    }

    fn record(self, spooled: &Spooled, settings: &Settings) -> BatchRecord {
        let defaults = &settings.batch;
        let Self { batch, spec, inline, .. } = self;
        let spec_json = spec.to_json();
        let cap = |cap: std::num::NonZeroU32| i32::try_from(cap.get()).unwrap_or(i32::MAX);
        let asked = batch.max_running.or(defaults.max_running.map(cap));
        let default = |count: u32| i32::try_from(count).unwrap_or(i32::MAX);
        BatchRecord {
            id: BatchId::generate(),
            digest: spooled.digest(&batch, inline.then_some(spec_json.as_str())),
            spec_json,
            item_count: i32::try_from(spooled.item_count())
                .expect("Spooled holds at most i32::MAX items"),
            has_not_before: spooled.has_not_before(),
            max_running: asked.into_iter().chain(spec.max_running().map(cap)).min(),
            max_live: batch.max_live.unwrap_or_else(|| default(defaults.max_live)),
            max_checking: batch.max_checking.unwrap_or_else(|| default(defaults.max_checking)),
            max_attempts: batch.max_attempts.unwrap_or_else(|| defaults.max_attempts.into()),
            priority: batch.priority.into(),
            not_before: batch.not_before,
            traceparent: None,
            principal: Some(Principal {
                owner: batch.owner.clone(),
                role: settings.access.role.clone(),
            }),
            owner: batch.owner,
            queue: batch.queue.to_string(),
            title: batch.title,
            thread: batch.thread,
            submission_key: batch.submission_key,
        }
    }
}

impl From<&Limits> for SubmitLimits {
    fn from(limits: &Limits) -> Self {
        Self {
            items: limits.items_per_batch,
            line_bytes: limits.line_bytes,
            input_bytes: limits.input_bytes,
            key_chars: limits.key_chars,
            ..Self::default()
        }
    }
}

/// A valid batch, read to its end; nothing of it is stored yet. Dropped, it leaves nothing behind.
#[derive(Debug)]
pub struct Admitted {
    queue: QueueName,
    record: BatchRecord,
    spooled: Spooled,
}

impl Admitted {
    /// The batch as it will be stored.
    #[must_use]
    pub const fn record(&self) -> &BatchRecord {
        &self.record
    }

    /// Stores the batch in one transaction and tells the workers. `caller` is the trace the submit
    /// belongs to. `progress` is told how many items were sent so far.
    ///
    /// An unanswered commit is looked up before it is reported.
    ///
    /// # Errors
    /// See [`SubmissionError`].
    ///
    /// # Cancel safety
    /// Dropped, nothing is stored, unless its commit was already sent.
    pub async fn store(
        self,
        database: &Database,
        caller: Option<&TraceContext>,
        progress: impl FnMut(u64),
    ) -> Result<Stored, SubmissionError> {
        let Self { queue, mut record, spooled } = self;
        let span = trace::send_span(&queue, record.id, caller);
        record.traceparent = TraceContext::of(&span).as_ref().or(caller).map(ToString::to_string);
        let stored = store(database, &record, spooled, progress).instrument(span.clone()).await;
        match &stored {
            Ok(Stored::Created(_)) => {
                trace::item_count(&span, usize::try_from(record.item_count).unwrap_or_default());
                // Only a hint: without it the workers find the batch when they look next.
                drop(database.notify(&Event::Work(record.queue)).await);
            }
            Ok(Stored::Existing(_)) => {}
            Err(_) => trace::failed(&span, "not_stored"),
        }
        stored
    }
}

async fn store(
    database: &Database,
    record: &BatchRecord,
    spooled: Spooled,
    progress: impl FnMut(u64),
) -> Result<Stored, SubmissionError> {
    let (sender, items) = mpsc::channel(CHUNKS_AHEAD);
    // It ends when its receiver is gone, whatever became of the batch.
    let feeder = tokio::task::spawn_blocking(move || feed(spooled, &sender));
    let stored = database.store_batch(record, items, progress).await;
    drop(feeder.await);
    match stored {
        Err(SubmissionError::Unknown { batch, .. }) if exists(database, batch).await => {
            Ok(Stored::Created(batch))
        }
        stored => stored,
    }
}

/// Sends the items in chunks until they or the wish for them end.
fn feed(mut spooled: Spooled, to: &mpsc::Sender<io::Result<Vec<NewItem>>>) {
    let mut items = match spooled.items() {
        Ok(items) => items,
        Err(error) => return drop(to.blocking_send(Err(error))),
    };
    while let Some(chunk) = next_chunk(&mut items).transpose() {
        let failed = chunk.is_err();
        if to.blocking_send(chunk).is_err() || failed {
            return;
        }
    }
}

fn next_chunk(
    items: &mut impl Iterator<Item = io::Result<NewItem>>,
) -> io::Result<Option<Vec<NewItem>>> {
    let mut chunk = Vec::new();
    let mut bytes = 0;
    while bytes < CHUNK_BYTES
        && let Some(item) = items.next().transpose()?
    {
        bytes += item.key.len() + item.input.len() + item.criteria.as_ref().map_or(0, String::len);
        bytes += size_of::<NewItem>();
        chunk.push(item);
    }
    Ok((!chunk.is_empty()).then_some(chunk))
}

/// Whether a batch is there whose commit was not answered. The server may still be at work on it,
/// or restarting: it is looked for more than once.
async fn exists(database: &Database, batch: BatchId) -> bool {
    for look in 0..LOOKS {
        if look > 0 {
            tokio::time::sleep(BETWEEN_LOOKS).await;
        }
        if let Ok(Some(_)) = database.batch(batch, None).await {
            return true;
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;
    use std::num::NonZeroU32;

    use super::*;
    use crate::config::CommandSpec;

    fn read(batch: NewBatch, spec: QueueSpec, settings: &Settings, input: &str) -> Admitted {
        Submission::with_spec(batch, Form::Lines, spec)
            .read(Cursor::new(input.to_owned()), settings, None, &mut |_| {})
            .unwrap()
    }

    fn batch() -> NewBatch {
        NewBatch::in_queue("q".parse().unwrap())
    }

    fn spec(max_running: Option<u32>) -> QueueSpec {
        let command = CommandSpec::new(vec!["true".into()], &Settings::defaults().limits);
        QueueSpec::Command(CommandSpec {
            max_running: max_running.and_then(NonZeroU32::new),
            ..command
        })
    }

    #[test]
    fn what_a_batch_leaves_open_comes_from_the_settings() {
        let settings = Settings::defaults();
        let admitted = read(batch(), spec(None), &settings, "a\nb\n");

        let record = admitted.record();
        assert_eq!((record.item_count, record.max_attempts), (2, 3));
        assert_eq!((record.max_live, record.max_checking), (1000, 64));
        assert_eq!(record.max_running, None);
    }

    #[test]
    fn the_smallest_of_all_caps_on_running_items_holds() {
        let mut settings = Settings::defaults();
        let cap = |settings: &Settings, asked, queue| {
            let batch = NewBatch { max_running: asked, ..batch() };
            read(batch, spec(queue), settings, "a").record().max_running
        };

        assert_eq!(cap(&settings, Some(7), None), Some(7));
        assert_eq!(cap(&settings, Some(7), Some(3)), Some(3));
        assert_eq!(cap(&settings, Some(2), Some(3)), Some(2));
        assert_eq!(cap(&settings, None, Some(3)), Some(3));
        settings.batch.max_running = NonZeroU32::new(5);
        assert_eq!(cap(&settings, None, None), Some(5));
        assert_eq!(cap(&settings, Some(7), None), Some(7), "the default is for who says nothing");
    }

    #[test]
    fn only_settings_that_came_along_are_part_of_the_content() {
        let mut settings = Settings::defaults();
        settings.queues.insert("q".parse().unwrap(), spec(Some(1)));
        let digest = |submission: Submission, settings: &Settings| {
            submission.read(Cursor::new("a"), settings, None, &mut |_| {}).unwrap().record().digest
        };
        let configured = |settings: &Settings| {
            digest(Submission::to_queue(batch(), Form::Lines, settings).unwrap(), settings)
        };
        let brought =
            |spec: QueueSpec| digest(Submission::with_spec(batch(), Form::Lines, spec), &settings);
        let changed = {
            let mut settings = settings.clone();
            settings.queues.insert("q".parse().unwrap(), spec(Some(2)));
            configured(&settings)
        };

        assert_eq!(configured(&settings), changed);
        assert_ne!(brought(spec(Some(1))), brought(spec(Some(2))));
    }

    #[test]
    fn items_travel_in_order_and_in_chunks() {
        let lines: Vec<String> = (0..2_000).map(|n| format!("{n}{}", "x".repeat(300))).collect();
        let admitted = read(batch(), spec(None), &Settings::defaults(), &lines.join("\n"));
        let (sender, mut items) = mpsc::channel(1_000);

        feed(admitted.spooled, &sender);
        drop(sender);

        let mut chunks = Vec::new();
        while let Some(chunk) = items.blocking_recv() {
            chunks.push(chunk.unwrap());
        }
        assert!(chunks.len() > 5, "{}", chunks.len());
        let positions: Vec<i32> = chunks.iter().flatten().map(|item| item.position.get()).collect();
        assert_eq!(positions, (0..2_000).collect::<Vec<_>>());
    }

    #[test]
    fn parameters_out_of_range_are_problems_like_any_other() {
        let batch = NewBatch { owner: "a/b".into(), ..batch() };
        let refused = Submission::with_spec(batch, Form::Lines, spec(None)).read(
            Cursor::new("a"),
            &Settings::defaults(),
            None,
            &mut |_| {},
        );
        let Err(SubmitError::Invalid(report)) = refused else { panic!("{refused:?}") };
        assert_eq!(report.problems()[0].field(), Some("owner"));
    }
}
