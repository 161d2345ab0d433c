//! The leases this process holds: their trust deadlines, and the stop token of every item.
//!
//! Shared by the stages of a worker; it decides nothing about the database.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use crate::clock::{BootInstant, Clock};
use crate::model::{BatchId, FencingToken, ItemRef, LeaseId, Position, ProgressReport, QueueName};
use crate::store::{Reports, Vouched};

/// Why an execution was told to stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StopCause {
    /// Its batch was cancelled.
    Cancelled,
    /// Its lease is no longer there: reaped or superseded.
    Lost,
    /// The trust deadline passed without a renewal (F5).
    Fenced,
    /// The worker drains and its grace is over.
    Drained,
}

/// Whether an execution has to stop: a token to await, and the cause once it is cancelled.
#[derive(Clone, Debug, Default)]
pub struct StopSignal {
    token: CancellationToken,
    cause: Arc<Mutex<Option<StopCause>>>,
}

impl StopSignal {
    /// The token to hand to an executor.
    #[must_use]
    pub const fn token(&self) -> &CancellationToken {
        &self.token
    }

    /// Why it was cancelled; none while it is not.
    #[must_use]
    pub fn cause(&self) -> Option<StopCause> {
        *lock(&self.cause)
    }

    /// Stops the execution; the first cause stays.
    fn stop(&self, cause: StopCause) {
        lock(&self.cause).get_or_insert(cause);
        self.token.cancel();
    }
}

/// What a worker knows of a lease it has been granted.
#[derive(Clone, Debug)]
pub struct Grant {
    /// Its batch.
    pub batch: BatchId,
    /// The lease.
    pub lease: LeaseId,
    /// Its token.
    pub token: FencingToken,
    /// Its queue, for metrics.
    pub queue: QueueName,
    /// When the claim was asked for: trust counts from there (F5).
    pub asked_at: BootInstant,
}

struct Held {
    grant: Grant,
    trusted_until: BootInstant,
    items: HashMap<Position, HeldItem>,
    handing_in: usize,
    /// Raised with every report that says something new, and what of them is stored.
    reported: u64,
    stored: u64,
}

#[derive(Default)]
struct HeldItem {
    doing: Doing,
    stop: StopSignal,
    report: Option<ProgressReport>,
}

/// What is being done with an item.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Doing {
    /// Nothing yet: it waits for its execution, or for its check.
    #[default]
    Nothing,
    Executing,
    Checking,
}

impl Doing {
    const fn as_str(self) -> &'static str {
        match self {
            Self::Nothing => "nothing",
            Self::Executing => "executing",
            Self::Checking => "checking",
        }
    }
}

/// A lease that is held, for people to look at.
#[derive(Clone, Debug)]
pub struct HeldLease {
    /// The lease as it was granted.
    pub grant: Grant,
    /// How much longer it is trusted; zero when it is not any more.
    pub trusted_for: Duration,
    /// Whether a hand-in of something in it is on its way.
    pub handing_in: bool,
    /// Its items: where, what is being done, and why that was told to stop.
    pub items: Vec<(Position, &'static str, Option<StopCause>)>,
}

/// Is told until when a lease is trusted, before anything runs under it and whenever that moves; none
/// when it is no longer held. Called under the lock of the table: it must not wait.
pub type TrustWatch = Arc<dyn Fn(LeaseId, Option<BootInstant>) + Send + Sync>;

/// The table of leases held.
pub struct Leases {
    clock: Arc<dyn Clock>,
    trust: Duration,
    watch: Option<TrustWatch>,
    held: Mutex<HashMap<LeaseId, Held>>,
    /// Nothing begins any more; changed under the lock of the table.
    closed: AtomicBool,
    /// Batches whose cancel was told, and when: a claim may have been on its way. Used under the lock
    /// of the table.
    cancelled: Mutex<HashMap<BatchId, BootInstant>>,
}

/// A lease as this process knows it, to be compared with its row.
#[derive(Clone, Debug)]
pub struct Known {
    /// Its batch.
    pub batch: BatchId,
    /// The lease.
    pub lease: LeaseId,
    /// Its token.
    pub token: FencingToken,
    /// The positions that are vouched for.
    pub positions: HashSet<Position>,
}

/// A lease of which something was stopped because it was no longer trusted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fenced {
    /// Its queue.
    pub queue: QueueName,
    /// How many items that were.
    pub items: usize,
}

impl Leases {
    /// An empty table; `trust` is how long a lease is trusted from the moment it is asked for:
    /// its length less the margin (F5).
    #[must_use]
    pub fn new(clock: Arc<dyn Clock>, trust: Duration) -> Self {
        Self {
            clock,
            trust,
            watch: None,
            held: Mutex::default(),
            closed: AtomicBool::new(false),
            cancelled: Mutex::default(),
        }
    }

    /// The same, with `watch` told of every trust deadline.
    #[must_use]
    pub fn watched_by(self, watch: Option<TrustWatch>) -> Self {
        Self { watch, ..self }
    }

    fn tell(&self, lease: LeaseId, trusted_until: Option<BootInstant>) {
        if let Some(watch) = &self.watch {
            watch(lease, trusted_until);
        }
    }

    /// Enters a lease that a claim granted.
    pub fn enter(&self, grant: Grant, positions: impl IntoIterator<Item = Position>) {
        let trusted_until = grant.asked_at + self.trust;
        let items = positions.into_iter().map(|p| (p, HeldItem::default())).collect();
        let lease = grant.lease;
        let held = Held { grant, trusted_until, items, handing_in: 0, reported: 0, stored: 0 };
        let mut table = self.table();
        if lock(&self.cancelled).contains_key(&held.grant.batch) {
            held.stop(StopCause::Cancelled);
        } else if self.closed.load(Ordering::Relaxed) {
            held.stop(StopCause::Drained);
        }
        self.tell(lease, Some(trusted_until));
        table.insert(lease, held);
    }

    /// Lets nothing begin any more: what is held and has not begun is stopped, and so is what comes
    /// later. What runs goes on.
    pub fn close(&self) {
        let table = self.table();
        self.closed.store(true, Ordering::Relaxed);
        let items = table.values().flat_map(|held| held.items.values());
        items
            .filter(|item| item.doing == Doing::Nothing)
            .for_each(|item| item.stop.stop(StopCause::Drained));
    }

    /// Whether nothing begins any more.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Relaxed)
    }

    /// Moves a lease's trust deadline forward after a renewal or hand-in asked for at `asked_at`; a
    /// reply later than the deadline extends nothing (F5). Answers how much trust was left.
    pub fn extend(&self, lease: LeaseId, asked_at: BootInstant) -> Option<Duration> {
        let now = self.clock.now();
        let mut table = self.table();
        let held = table.get_mut(&lease)?;
        let left = held.trusted_until.since(now);
        if !left.is_zero() {
            held.trusted_until = held.trusted_until.max(asked_at + self.trust);
            self.tell(lease, Some(held.trusted_until));
        }
        Some(left)
    }

    /// How long a lease is trusted from the moment it is asked for.
    #[must_use]
    pub const fn trust(&self) -> Duration {
        self.trust
    }

    /// The stop signal of an item; one that is already stopped when the item is not held.
    #[must_use]
    pub fn stop_signal(&self, lease: LeaseId, position: Position) -> StopSignal {
        let found = self
            .table()
            .get(&lease)
            .and_then(|held| held.items.get(&position))
            .map(|item| item.stop.clone());
        found.unwrap_or_else(|| {
            let stopped = StopSignal::default();
            stopped.stop(StopCause::Lost);
            stopped
        })
    }

    /// Whether an item may begin now: it is held, not stopped, and its lease is trusted. Notes that
    /// its execution has begun.
    #[must_use]
    pub fn begin(&self, lease: LeaseId, position: Position) -> bool {
        self.begin_doing(lease, position, Doing::Executing)
    }

    /// The same for its check.
    #[must_use]
    pub fn begin_check(&self, lease: LeaseId, position: Position) -> bool {
        self.begin_doing(lease, position, Doing::Checking)
    }

    /// Notes that an execution has ended and its check is to come: to a drain it is an item that has
    /// not begun.
    pub fn await_check(&self, lease: LeaseId, position: Position) {
        let mut table = self.table();
        let item = table.get_mut(&lease).and_then(|held| held.items.get_mut(&position));
        if let Some(item) = item {
            item.doing = Doing::Nothing;
            if self.closed.load(Ordering::Relaxed) {
                item.stop.stop(StopCause::Drained);
            }
        }
    }

    fn begin_doing(&self, lease: LeaseId, position: Position, doing: Doing) -> bool {
        let now = self.clock.now();
        let mut table = self.table();
        let Some(held) = table.get_mut(&lease) else { return false };
        if now >= held.trusted_until {
            return false;
        }
        match held.items.get_mut(&position) {
            Some(item) if !item.stop.token.is_cancelled() => {
                item.doing = doing;
                true
            }
            Some(_) | None => false,
        }
    }

    /// Notes that a hand-in of these items is on its way: its lease may vanish with it.
    pub fn hand_in_begins(&self, leases: impl IntoIterator<Item = LeaseId>) {
        let mut table = self.table();
        for lease in leases {
            if let Some(held) = table.get_mut(&lease) {
                held.handing_in += 1;
            }
        }
    }

    /// Notes that a hand-in of these items was answered, or given up.
    pub fn hand_in_ends(&self, leases: impl IntoIterator<Item = LeaseId>) {
        let mut table = self.table();
        for lease in leases {
            if let Some(held) = table.get_mut(&lease) {
                held.handing_in -= 1;
            }
        }
    }

    /// Takes an item out: it was handed in, refused, or will never be. The lease goes with the last.
    pub fn leave(&self, lease: LeaseId, position: Position) {
        let mut table = self.table();
        if let Some(held) = table.get_mut(&lease) {
            held.items.remove(&position);
            if held.items.is_empty() {
                table.remove(&lease);
                self.tell(lease, None);
            }
        }
    }

    /// What a heartbeat vouches for.
    #[must_use]
    pub fn vouched(&self) -> Vec<Vouched> {
        let table = self.table();
        table
            .values()
            .map(|held| Vouched {
                batch: held.grant.batch,
                lease: held.grant.lease,
                token: held.grant.token,
                started: held
                    .items
                    .iter()
                    .filter(|(_, item)| item.doing == Doing::Executing)
                    .map(|(position, _)| *position)
                    .collect(),
                reports: held.new_reports(),
            })
            .collect()
    }

    /// Notes how far an execution says it has come; the next heartbeat takes it along.
    pub fn report(&self, lease: LeaseId, position: Position, report: ProgressReport) {
        let mut table = self.table();
        let Some(held) = table.get_mut(&lease) else { return };
        if let Some(item) = held.items.get_mut(&position)
            && item.report.as_ref() != Some(&report)
        {
            item.report = Some(report);
            held.reported += 1;
        }
    }

    /// Notes which reports of a lease a heartbeat has stored.
    pub fn reports_stored(&self, lease: LeaseId, version: u64) {
        if let Some(held) = self.table().get_mut(&lease) {
            held.stored = held.stored.max(version);
        }
    }

    /// Stops everything under a lease that is gone, unless a hand-in under way explains it; the
    /// items stopped.
    pub fn lose(&self, lease: LeaseId, cause: StopCause) -> Vec<ItemRef> {
        match self.table().get(&lease) {
            Some(held) if held.handing_in == 0 || cause != StopCause::Lost => held.stop(cause),
            Some(_) | None => Vec::new(),
        }
    }

    /// Stops everything of a batch that was cancelled, and what claims under way still bring of it;
    /// the items stopped.
    pub fn cancel_batch(&self, batch: BatchId) -> Vec<ItemRef> {
        let now = self.clock.now();
        let table = self.table();
        let mut cancelled = lock(&self.cancelled);
        // A claim whose answer takes longer than its trust begins nothing anyway.
        cancelled.retain(|_, told| now.since(*told) <= self.trust);
        cancelled.insert(batch, now);
        let of_batch = table.values().filter(|held| held.grant.batch == batch);
        of_batch.flat_map(|held| held.stop(StopCause::Cancelled)).collect()
    }

    /// What is known of a lease whose row holds more positions than that, though no hand-in is under
    /// way; none when nothing was forgotten.
    #[must_use]
    pub fn forgetful(&self, lease: LeaseId, row_holds: usize) -> Option<Known> {
        let table = self.table();
        let held = table.get(&lease)?;
        (held.handing_in == 0 && row_holds > held.items.len()).then(|| Known {
            batch: held.grant.batch,
            lease,
            token: held.grant.token,
            positions: held.items.keys().copied().collect(),
        })
    }

    /// Stops everything; the items stopped.
    pub fn stop_all(&self, cause: StopCause) -> Vec<ItemRef> {
        self.table().values().flat_map(|held| held.stop(cause)).collect()
    }

    /// Stops everything under leases whose trust deadline has passed; the leases with something to
    /// stop.
    pub fn fence_expired(&self) -> Vec<Fenced> {
        let now = self.clock.now();
        let table = self.table();
        let expired = table.values().filter(|held| now >= held.trusted_until);
        expired
            .map(|held| Fenced {
                queue: held.grant.queue.clone(),
                items: held.stop(StopCause::Fenced).len(),
            })
            .filter(|fenced| fenced.items > 0)
            .collect()
    }

    /// Everything that is held, for people to look at.
    #[must_use]
    pub fn held(&self) -> Vec<HeldLease> {
        let now = self.clock.now();
        let look = |held: &Held| HeldLease {
            grant: held.grant.clone(),
            trusted_for: held.trusted_until.since(now),
            handing_in: held.handing_in > 0,
            items: held
                .items
                .iter()
                .map(|(position, item)| (*position, item.doing.as_str(), item.stop.cause()))
                .collect(),
        };
        self.table().values().map(look).collect()
    }

    /// Whether a lease is held though its trust deadline has passed.
    #[must_use]
    pub fn is_overdue(&self, lease: LeaseId) -> bool {
        let now = self.clock.now();
        self.table().get(&lease).is_some_and(|held| now >= held.trusted_until)
    }

    /// How many leases and how many items are held.
    #[must_use]
    pub fn size(&self) -> (usize, usize) {
        let table = self.table();
        (table.len(), table.values().map(|held| held.items.len()).sum())
    }

    /// How many executions have begun and not ended.
    #[must_use]
    pub fn executing(&self) -> usize {
        let table = self.table();
        let items = table.values().flat_map(|held| held.items.values());
        items.filter(|item| item.doing == Doing::Executing).count()
    }

    /// The queue of a lease; none when it is not held.
    #[must_use]
    pub fn queue_of(&self, lease: LeaseId) -> Option<QueueName> {
        self.table().get(&lease).map(|held| held.grant.queue.clone())
    }

    fn table(&self) -> MutexGuard<'_, HashMap<LeaseId, Held>> {
        lock(&self.held)
    }
}

impl Held {
    /// What is said of its items, where that is not stored yet.
    fn new_reports(&self) -> Option<Reports> {
        (self.reported > self.stored).then(|| {
            let said = |(position, item): (&Position, &HeldItem)| {
                let report = serde_json::to_value(item.report.as_ref()?).ok()?;
                Some((position.to_string(), report))
            };
            let reports: serde_json::Map<_, _> = self.items.iter().filter_map(said).collect();
            let json = serde_json::Value::Object(reports).to_string();
            Reports { version: self.reported, json }
        })
    }

    /// Stops what is not stopped yet.
    fn stop(&self, cause: StopCause) -> Vec<ItemRef> {
        let mut stopped = Vec::new();
        for (position, item) in &self.items {
            if !item.stop.token.is_cancelled() {
                item.stop.stop(cause);
                stopped.push(ItemRef::new(self.grant.batch, *position));
            }
        }
        stopped
    }
}

/// Nothing under these locks can panic half way, so a poisoned one is still whole.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use time::OffsetDateTime;

    use super::*;

    #[derive(Default)]
    struct TestClock(AtomicU64);

    impl TestClock {
        fn to(&self, seconds: u64) {
            self.0.store(seconds * 1_000_000_000, Ordering::SeqCst);
        }
    }

    impl Clock for TestClock {
        fn now(&self) -> BootInstant {
            BootInstant::from_nanos(self.0.load(Ordering::SeqCst))
        }

        fn wall(&self) -> OffsetDateTime {
            OffsetDateTime::UNIX_EPOCH
        }
    }

    fn setup() -> (Arc<TestClock>, Leases, LeaseId, BatchId) {
        let clock = Arc::new(TestClock::default());
        let leases = Leases::new(clock.clone(), Duration::from_secs(45));
        let (lease, batch) = (LeaseId::generate(), BatchId::generate());
        let grant = Grant {
            batch,
            lease,
            token: FencingToken::new(7),
            queue: "q".parse().unwrap(),
            asked_at: clock.now(),
        };
        leases.enter(grant, [Position::new(0), Position::new(1)]);
        (clock, leases, lease, batch)
    }

    #[test]
    fn trust_counts_from_before_the_question_and_a_late_reply_extends_nothing() {
        let (clock, leases, lease, _) = setup();

        clock.to(20);
        let asked_at = clock.now();
        clock.to(30);
        leases.extend(lease, asked_at);
        clock.to(64);
        assert!(leases.fence_expired().is_empty());
        assert!(leases.begin(lease, Position::new(0)));

        let asked_at = clock.now();
        clock.to(65);
        leases.extend(lease, asked_at);
        let fenced = leases.fence_expired();
        assert_eq!(fenced.iter().map(|lease| lease.items).collect::<Vec<_>>(), [2]);
        assert_eq!(leases.stop_signal(lease, Position::new(0)).cause(), Some(StopCause::Fenced));
    }

    #[test]
    fn reports_go_out_once_and_again_only_when_they_say_something_new() {
        let (_, leases, lease, _) = setup();
        let reports = || leases.vouched().remove(0).reports;
        let say = |percent| {
            leases.report(lease, Position::new(1), ProgressReport::new(Some(percent), "x"));
        };
        assert!(reports().is_none());

        say(10);
        say(20);
        let first = reports().unwrap();
        let said: serde_json::Value = serde_json::from_str(&first.json).unwrap();
        assert_eq!(said, serde_json::json!({"1": {"percent": 20, "message": "x"}}));
        assert!(reports().is_some(), "not stored yet");
        leases.reports_stored(lease, first.version);
        say(20);
        assert!(reports().is_none());

        say(30);
        leases.reports_stored(lease, first.version);
        assert!(reports().unwrap().json.contains("30"));
        leases.report(LeaseId::generate(), Position::new(1), ProgressReport::default());
        leases.report(lease, Position::new(9), ProgressReport::default());
        assert_eq!(reports().unwrap().version, first.version + 1);
    }

    #[test]
    fn an_item_does_not_begin_beyond_its_deadline_nor_after_a_stop() {
        let (_, leases, lease, batch) = setup();
        leases.cancel_batch(batch);
        assert!(!leases.begin(lease, Position::new(0)));

        let (clock, leases, lease, _) = setup();
        clock.to(45);
        assert!(!leases.begin(lease, Position::new(0)));
    }

    #[test]
    fn a_claim_that_a_cancel_overtook_begins_nothing() {
        let (clock, leases, _, batch) = setup();
        let grant = |batch| Grant {
            batch,
            lease: LeaseId::generate(),
            token: FencingToken::new(8),
            queue: "q".parse().unwrap(),
            asked_at: clock.now(),
        };

        leases.cancel_batch(batch);
        let (late, other) = (grant(batch), grant(BatchId::generate()));
        let position = Position::new(2);
        leases.enter(late.clone(), [position]);
        leases.enter(other.clone(), [position]);

        assert_eq!(leases.stop_signal(late.lease, position).cause(), Some(StopCause::Cancelled));
        assert!(!leases.begin(late.lease, position));
        assert!(leases.begin(other.lease, position));
    }

    #[test]
    fn a_row_that_holds_more_than_is_known_was_forgotten_unless_a_hand_in_explains_it() {
        let (_, leases, lease, _) = setup();
        leases.leave(lease, Position::new(0));

        assert!(leases.forgetful(lease, 1).is_none());
        let known = leases.forgetful(lease, 2).unwrap();
        leases.hand_in_begins([lease]);

        assert_eq!(known.positions, HashSet::from([Position::new(1)]));
        assert!(leases.forgetful(lease, 2).is_none());
    }

    #[test]
    fn after_the_close_nothing_begins_and_what_runs_goes_on() {
        let (clock, leases, lease, batch) = setup();
        assert!(leases.begin(lease, Position::new(0)));

        leases.close();
        let later = LeaseId::generate();
        let grant = Grant {
            batch,
            lease: later,
            token: FencingToken::new(8),
            queue: "q".parse().unwrap(),
            asked_at: clock.now(),
        };
        leases.enter(grant, [Position::new(2)]);

        assert_eq!(leases.stop_signal(lease, Position::new(0)).cause(), None);
        for (lease, position) in [(lease, 1), (later, 2)] {
            let position = Position::new(position);
            assert_eq!(leases.stop_signal(lease, position).cause(), Some(StopCause::Drained));
            assert!(!leases.begin(lease, position));
        }
    }

    #[test]
    fn a_lease_that_vanishes_with_its_own_hand_in_is_not_lost() {
        let (_, leases, lease, _) = setup();

        leases.hand_in_begins([lease]);
        assert!(leases.lose(lease, StopCause::Lost).is_empty());
        leases.hand_in_ends([lease]);

        assert_eq!(leases.lose(lease, StopCause::Lost).len(), 2);
    }

    #[test]
    fn the_lease_goes_with_its_last_item() {
        let (_, leases, lease, _) = setup();

        leases.leave(lease, Position::new(0));
        assert_eq!(leases.size(), (1, 1));
        leases.leave(lease, Position::new(1));

        assert_eq!(leases.size(), (0, 0));
        assert_eq!(leases.stop_signal(lease, Position::new(1)).cause(), Some(StopCause::Lost));
    }
}
