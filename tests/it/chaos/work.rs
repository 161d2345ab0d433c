//! The work of a run: what its items do and note, and how batches of them are submitted.

use std::collections::HashMap;
use std::fs;
use std::io::Cursor;
use std::path::{Path, PathBuf};
use std::time::Duration;

use holdfast::config::{CommandSpec, QueueSpec, Settings};
use holdfast::model::{BatchId, FencingToken, ItemRef, Position};
use holdfast::store::{BatchRecord, Database, Stored, SubmissionError};
use holdfast::submit::{Form, NewBatch, SubmitLimits, read_items};
use rand::Rng;
use rand::rngs::StdRng;
use tokio::sync::mpsc;

use super::history::{Note, NoteKind, Right};
use crate::support::fleet::QUEUE;

/// What an item does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Nothing.
    Quick,
    /// Some time, in milliseconds.
    Slow(u16),
    /// Fails for good.
    Fails,
    /// Fails in its first attempts, this many.
    Flaky(u8),
    /// Some time, in milliseconds, and does not mind TERM.
    Stubborn(u16),
    /// Leaves children behind.
    Brood,
    /// Leaves one behind that has a session of its own.
    Runaway,
    /// Prints much before it has a result; of that nothing is kept but the last.
    Loud,
}

impl Kind {
    /// One as they come: most are short, some outlast a lease.
    pub(super) fn any(random: &mut StdRng) -> Self {
        match random.random_range(0..100) {
            0..40 => Self::Quick,
            40..68 => Self::Slow(random.random_range(50..1_500)),
            68..74 => Self::Slow(random.random_range(3_000..7_000)),
            74..80 => Self::Fails,
            80..87 => Self::Flaky(random.random_range(1..3)),
            87..91 => Self::Stubborn(random.random_range(500..5_000)),
            91..96 => Self::Brood,
            96..98 => Self::Runaway,
            _ => Self::Loud,
        }
    }

    /// Whether it ends well, some day.
    pub(super) const fn succeeds(self) -> bool {
        !matches!(self, Self::Fails)
    }

    fn input(self) -> String {
        let seconds = |ms: u16| f64::from(ms) / 1_000.0;
        match self {
            Self::Quick => "quick 0".to_owned(),
            Self::Slow(ms) => format!("slow {}", seconds(ms)),
            Self::Fails => "fails 0".to_owned(),
            Self::Flaky(attempts) => format!("flaky {attempts}"),
            Self::Stubborn(ms) => format!("stubborn {}", seconds(ms)),
            Self::Brood => "brood 0".to_owned(),
            Self::Runaway => "runaway 0".to_owned(),
            Self::Loud => "loud 0".to_owned(),
        }
    }
}

/// What every item runs. It holds a lock of the item's for as long as anything of it lives: children
/// inherit it, so that the next execution finds what is left of this one.
const SCRIPT: &str = r#"
kind=${1% *}; arg=${1#* }
note() {
    read -r up _ </proc/uptime
    echo "$1 $HOLDFAST_BATCH_ID $HOLDFAST_POSITION $HOLDFAST_ATTEMPT $HOLDFAST_LEASE_ID $HOLDFAST_TOKEN $$ $up" >>"$CHAOS/notes"
}
result() { echo "$HOLDFAST_LEASE_ID $HOLDFAST_TOKEN"; note end; }
note start
exec 9>>"$CHAOS/locks/$HOLDFAST_BATCH_ID.$HOLDFAST_POSITION"
flock -n 9 || note overlap
case $kind in
slow) sleep "$arg" ;;
fails) result; exit 1 ;;
flaky) [ "$HOLDFAST_ATTEMPT" -gt "$arg" ] || exit 75 ;;
stubborn) trap '' TERM; sleep "$arg" ;;
brood) sleep 90 & (sleep 60; note late) & sleep 0.1 ;;
runaway) setsid sh -c 'sleep 60' & sleep 0.1 ;;
loud) head -c 200000 /dev/zero >&2 ;;
esac
result
"#;

/// The folder in which executions note what they do, and what is in it.
pub(super) struct Ledger {
    folder: PathBuf,
}

impl Ledger {
    pub(super) fn in_folder(folder: &Path) -> Self {
        fs::create_dir(folder.join("locks")).unwrap();
        Self { folder: folder.to_owned() }
    }

    /// What was noted so far.
    pub(super) fn notes(&self) -> Vec<Note> {
        let text = fs::read_to_string(self.folder.join("notes")).unwrap_or_default();
        text.lines().map(parse).collect()
    }

    /// The processes that are of an execution, alive at this moment.
    pub(super) fn processes(&self) -> Vec<String> {
        let mark = format!("CHAOS={}\0", self.folder.display());
        let all = fs::read_dir("/proc").unwrap().flatten();
        let ours = all.filter(|process| {
            let environment = fs::read(process.path().join("environ")).unwrap_or_default();
            environment.windows(mark.len()).any(|window| window == mark.as_bytes())
        });
        ours.map(|process| {
            let argv = fs::read(process.path().join("cmdline")).unwrap_or_default();
            let argv = String::from_utf8_lossy(&argv).replace('\0', " ");
            format!(
                "{}: {}",
                process.file_name().display(),
                argv.chars().take(60).collect::<String>()
            )
        })
        .collect()
    }

    fn spec_json(&self) -> String {
        let argv = ["sh", "-c", SCRIPT, "sh", "{input}"].map(str::to_owned);
        let limits = &Settings::defaults().limits;
        let mut spec = CommandSpec::new(argv.to_vec(), limits);
        spec.env.insert("CHAOS".to_owned(), self.folder.to_str().unwrap().to_owned());
        spec.timeout = Duration::from_mins(2);
        spec.permanent = vec![1];
        QueueSpec::Command(spec).to_json()
    }
}

fn parse(line: &str) -> Note {
    let words: Vec<&str> = line.split(' ').collect();
    let [kind, batch, position, attempt, lease, token, pid, at] = words[..] else {
        panic!("a note of its own shape: {line:?}")
    };
    let kind = match kind {
        "start" => NoteKind::Start,
        "overlap" => NoteKind::Overlap,
        "end" => NoteKind::End,
        "late" => NoteKind::Late,
        _ => panic!("a note of its own kind: {line:?}"),
    };
    Note {
        kind,
        item: ItemRef::new(batch.parse().unwrap(), Position::new(position.parse().unwrap())),
        right: Right {
            lease: lease.parse().unwrap(),
            token: FencingToken::new(token.parse().unwrap()),
        },
        attempt: attempt.parse().unwrap(),
        pid: pid.parse().unwrap(),
        at: Duration::from_secs_f64(at.parse().unwrap()),
    }
}

/// A batch on its way, submitted until it is acknowledged.
#[derive(Clone, Debug)]
pub(super) struct Submission {
    pub(super) key: String,
    pub(super) kinds: Vec<Kind>,
    pub(super) max_running: Option<i32>,
    /// How many submit it at once.
    pub(super) racing: usize,
    spec_json: String,
}

/// How long one try of a submit may take before it is given up, to be repeated.
const TRY: Duration = Duration::from_secs(8);

impl Submission {
    pub(super) fn any(ledger: &Ledger, number: usize, most: usize, random: &mut StdRng) -> Self {
        let items = random.random_range(1..=most);
        Self {
            key: format!("batch-{number}"),
            kinds: (0..items).map(|_| Kind::any(random)).collect(),
            max_running: random.random_bool(0.2).then(|| random.random_range(1..5)),
            racing: if random.random_bool(0.3) { random.random_range(2..4) } else { 1 },
            spec_json: ledger.spec_json(),
        }
    }

    /// Every batch that it was said to be, by each who submits it.
    pub(super) async fn submit(&self, database: &Database) -> Vec<BatchId> {
        let all = (0..self.racing).map(|_| self.submit_until_acknowledged(database));
        futures::future::join_all(all).await
    }

    async fn submit_until_acknowledged(&self, database: &Database) -> BatchId {
        loop {
            match tokio::time::timeout(TRY, self.try_once(database)).await {
                Ok(Ok(stored)) => return stored.batch(),
                Ok(Err(SubmissionError::Conflict { existing })) => {
                    panic!("{}: the same content, refused for {existing}", self.key)
                }
                // Whatever became of it: a repeat under the same key tells.
                Ok(Err(_)) | Err(_) => tokio::time::sleep(Duration::from_millis(200)).await,
            }
        }
    }

    async fn try_once(&self, database: &Database) -> Result<Stored, SubmissionError> {
        let lines: Vec<String> = (0..)
            .zip(&self.kinds)
            .map(|(n, kind)| {
                format!("{}\n", serde_json::json!({"key": format!("k{n}"), "input": kind.input()}))
            })
            .collect();
        let input = Cursor::new(lines.concat());
        let limits = SubmitLimits::default();
        let mut spooled = read_items(input, Form::Jsonl, &limits, None, &mut |_| ()).unwrap();
        let batch = NewBatch::in_queue(QUEUE.parse().unwrap());
        let record = BatchRecord {
            id: BatchId::generate(),
            owner: batch.owner.clone(),
            queue: QUEUE.to_owned(),
            title: None,
            thread: None,
            submission_key: Some(self.key.clone()),
            digest: spooled.digest(&batch, None),
            spec_json: self.spec_json.clone(),
            item_count: i32::try_from(self.kinds.len()).unwrap(),
            has_not_before: false,
            max_running: self.max_running,
            max_live: 1_000,
            max_checking: 64,
            // More than any run's faults use up.
            max_attempts: 100,
            priority: 0,
            not_before: None,
            traceparent: None,
            principal: None,
        };
        let items: Vec<_> = spooled.items().unwrap().map(Result::unwrap).collect();
        let (send, receive) = mpsc::channel(1);
        send.send(Ok(items)).await.unwrap();
        drop(send);
        database.store_batch(&record, receive, |_| ()).await
    }
}

/// How many executions of each item were noted.
pub(super) fn executions(notes: &[Note]) -> HashMap<ItemRef, usize> {
    let mut counts = HashMap::new();
    for note in notes.iter().filter(|note| note.kind == NoteKind::Start) {
        *counts.entry(note.item).or_default() += 1;
    }
    counts
}
