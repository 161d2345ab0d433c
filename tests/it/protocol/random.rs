//! Random steps of many workers on a few small batches, against a record of what was acknowledged.

use std::cell::{Cell, RefCell};
use std::collections::HashSet;
use std::future::Future;
use std::time::Duration;

use futures::future::join_all;
use holdfast::model::{
    BatchId, Conclusion, Disposition, Evidence, Finding, Hold, LeaseId, Position, Settlement,
};
use holdfast::store::{
    Claim, Concluding, ControlAnswer, ControlVerb, FlightError, HandIn, HandInAnswer, ReapPolicy,
    Recheck, RenewAnswer, StageAnswer, Staging, Vouched,
};
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};

use crate::support::fixture::{BatchSpec, Bed, REAP, TTL, again, failed, publish, succeeded};
use crate::support::invariants::{assert_invariants, assert_no_deadlock};

/// Without `HOLDFAST_TEST_SEED`.
const SEED: u64 = 20_260_729;
/// Without `HOLDFAST_TEST_SECONDS`.
const SECONDS: u64 = 5;
const ACTORS: u64 = 8;

/// A lease's right to one item, as it was acknowledged.
type Ack = (BatchId, Position, LeaseId);

struct World {
    bed: Bed,
    batches: Vec<BatchId>,
    /// What workers hold, or believe they do: nothing leaves but by a hand-in.
    leases: RefCell<Vec<Vec<Hold>>>,
    /// The same of items whose results are stored.
    under_check: RefCell<Vec<Vec<Hold>>>,
    staged: RefCell<HashSet<Ack>>,
    published: RefCell<HashSet<Ack>>,
    returned: RefCell<HashSet<Ack>>,
    cancelled: RefCell<HashSet<BatchId>>,
    /// Claims whose answer never came.
    lost: RefCell<Vec<(BatchId, LeaseId)>>,
    steps: Cell<u32>,
    over: Cell<bool>,
}

impl World {
    async fn new() -> Self {
        let bed = Bed::new().await;
        let spec = BatchSpec { items: 40, max_attempts: 6, ..BatchSpec::default() };
        let batches = vec![
            bed.batch_of(BatchSpec { max_running: Some(7), ..spec }).await,
            bed.batch_of(BatchSpec { max_live: 9, items: 150, ..spec }).await,
            bed.batch_of(BatchSpec { items: 400, max_checking: 20, ..spec }).await,
            bed.batch_of(BatchSpec { items: 200, max_live: 15, ..spec }).await,
        ];
        bed.defer(batches[1], 10, 60, 0.7).await;
        bed.defer(batches[3], 0, 200, 0.3).await;
        Self {
            bed,
            batches,
            leases: RefCell::default(),
            under_check: RefCell::default(),
            staged: RefCell::default(),
            published: RefCell::default(),
            returned: RefCell::default(),
            cancelled: RefCell::default(),
            lost: RefCell::default(),
            steps: Cell::new(0),
            over: Cell::new(false),
        }
    }

    async fn act(&self, mut rng: StdRng) {
        while !self.over.get() {
            self.steps.set(self.steps.get() + 1);
            let batch = self.batches[rng.random_range(0..self.batches.len())];
            match rng.random_range(0..100) {
                0..=34 => self.claim(batch, rng.random_range(1..7)).await,
                35..=52 => self.hand_in(&mut rng).await,
                53..=58 => self.stage(&mut rng).await,
                59..=65 => self.conclude(&mut rng).await,
                66..=69 => self.recheck(batch, rng.random_range(1..5)).await,
                70..=75 => self.renew(&mut rng).await,
                76..=80 => self.give_back(&mut rng).await,
                81..=87 => self.expire_and_reap(batch, rng.random_bool(0.8)).await,
                88..=90 => self.retry(batch).await,
                91..=93 => drop(self.control(batch, ControlVerb::Pause).await),
                94..=95 => drop(until_answered(|| self.bed.store.end_batch(batch)).await),
                96 => drop(self.bed.store.tidy(20).await),
                97 => self.clear(batch, 2).await,
                98 if rng.random_bool(0.3) => self.cancel(batch).await,
                _ => assert_invariants(&self.bed.sql, batch).await,
            }
            if rng.random_bool(0.2) {
                self.control(batch, ControlVerb::Resume).await;
            }
        }
    }

    async fn claim(&self, batch: BatchId, want: u32) {
        let was_cancelled = self.cancelled.borrow().contains(&batch);
        let request = self.bed.request(batch, want);
        match self.bed.store.claim(&request).await {
            Ok(Claim::Granted { holds, .. }) => {
                assert!(!was_cancelled, "claimed from a cancelled batch");
                self.leases.borrow_mut().push(holds);
            }
            Ok(Claim::Nothing(..)) => {}
            // Never adopted, only given back, and once more at the next heartbeat (F6).
            Err(unknown) if unknown.is_unknown() => {
                self.give_back_lease(batch, request.lease).await;
                self.lost.borrow_mut().push((batch, request.lease));
            }
            Err(nothing_happened) => assert!(!nothing_happened.is_lasting(), "{nothing_happened}"),
        }
    }

    async fn give_back_lease(&self, batch: BatchId, lease: LeaseId) {
        until_answered(|| self.bed.store.give_back(batch, lease, 5)).await;
    }

    async fn control(&self, batch: BatchId, verb: ControlVerb) -> ControlAnswer {
        until_answered(|| self.bed.store.control_batch(batch, None, verb, "tester")).await
    }

    async fn retry(&self, batch: BatchId) {
        let from = Position::new(0);
        let store = &self.bed.store;
        until_answered(|| store.retry_failed(batch, None, None, from, 10, "tester")).await;
    }

    async fn clear(&self, batch: BatchId, limit: i32) {
        until_answered(|| self.bed.store.clear_cancelled(batch, limit)).await;
    }

    /// Takes some lease, hands some of its items in, maybe twice, and puts the rest back.
    async fn hand_in(&self, rng: &mut StdRng) {
        let Some(holds) = take_some(&self.leases, rng) else { return };
        let ends: Vec<Settlement> = holds
            .iter()
            .map(|hold| match rng.random_range(0..6) {
                0..=2 => succeeded(),
                3 => failed(),
                _ => again(hold.history(), Duration::from_millis(rng.random_range(0..30))),
            })
            .collect();
        let first = self.hand_in_all(&holds, &ends).await;
        if rng.random_bool(0.3) {
            let second = self.hand_in_all(&holds, &ends).await;
            for (first, second) in first.iter().zip(&second) {
                let kept = *first == HandInAnswer::Applied;
                assert_eq!(kept, *second == HandInAnswer::Applied, "{first:?}, then {second:?}");
            }
        }
    }

    async fn hand_in_all(&self, holds: &[Hold], ends: &[Settlement]) -> Vec<HandInAnswer> {
        let batch = holds[0].item().batch();
        let was_cancelled = self.cancelled.borrow().contains(&batch);
        let items: Vec<HandIn<'_>> =
            holds.iter().zip(ends).map(|(hold, settlement)| HandIn { hold, settlement }).collect();
        let answers =
            until_answered(|| self.bed.store.hand_in(batch, self.bed.worker, TTL, &items)).await;
        for ((hold, end), answer) in holds.iter().zip(ends).zip(&answers) {
            if *answer != HandInAnswer::Applied {
                continue;
            }
            let ack = (batch, hold.item().position(), hold.lease());
            let list = match end.disposition {
                Disposition::Succeed | Disposition::Fail => &self.published,
                Disposition::Again { .. } => &self.returned,
            };
            let new = list.borrow_mut().insert(ack);
            assert!(!(new && was_cancelled), "{ack:?} was applied after its batch was cancelled");
        }
        answers
    }

    /// Stages some items of some lease, maybe twice: those that are held are under check now.
    async fn stage(&self, rng: &mut StdRng) {
        let Some(holds) = take_some(&self.leases, rng) else { return };
        let batch = holds[0].item().batch();
        let was_cancelled = self.cancelled.borrow().contains(&batch);
        let settlement = succeeded();
        let evidence = vec![Evidence::default(); rng.random_range(0..3)];
        let items: Vec<Staging<'_>> = holds
            .iter()
            .map(|hold| Staging {
                hold,
                settlement: &settlement,
                evidence: &evidence,
                workspace: None,
            })
            .collect();
        let mut answers = Vec::new();
        for _ in 0..rng.random_range(1..3) {
            let before = answers;
            let worker = self.bed.worker;
            answers = until_answered(|| self.bed.store.stage(batch, worker, TTL, &items)).await;
            for (before, now) in before.iter().zip(&answers) {
                let lost = |answer| matches!(answer, StageAnswer::Lost);
                assert!(
                    lost(*before) == lost(*now) || *now == StageAnswer::Cancelled,
                    "{before:?}, then {now:?}"
                );
            }
        }
        let mut under_check = Vec::new();
        for (hold, answer) in holds.into_iter().zip(answers) {
            if matches!(answer, StageAnswer::Staged | StageAnswer::Moved) {
                let ack = (batch, hold.item().position(), hold.lease());
                let new = self.staged.borrow_mut().insert(ack);
                assert!(!(new && was_cancelled), "{ack:?} was staged in a cancelled batch");
            }
            if answer == StageAnswer::Staged {
                under_check.push(hold);
            }
        }
        if !under_check.is_empty() {
            self.under_check.borrow_mut().push(under_check);
        }
    }

    /// Publishes some items under check, or gives them back, maybe twice.
    async fn conclude(&self, rng: &mut StdRng) {
        let Some(holds) = take_some(&self.under_check, rng) else { return };
        let ends: Vec<Conclusion> = holds
            .iter()
            .map(|hold| match rng.random_range(0..5) {
                0 => Conclusion::Publish(None),
                1 => publish(Finding::DoesNotHold),
                2 => Conclusion::Recheck(hold.history().plus_check_loss()),
                3 => publish(Finding::Unchecked),
                _ => publish(Finding::Holds),
            })
            .collect();
        let first = self.conclude_all(&holds, &ends).await;
        if rng.random_bool(0.3) {
            let second = self.conclude_all(&holds, &ends).await;
            for ((first, second), end) in first.iter().zip(&second).zip(&ends) {
                let kept = (*first == HandInAnswer::Applied) == (*second == HandInAnswer::Applied);
                // What is given back may be on its way again, and leaves no trace then.
                let gone = matches!(end, Conclusion::Recheck(_)) && *first == HandInAnswer::Applied;
                assert!(kept || gone, "{first:?}, then {second:?}");
            }
        }
    }

    async fn conclude_all(&self, holds: &[Hold], ends: &[Conclusion]) -> Vec<HandInAnswer> {
        let batch = holds[0].item().batch();
        let was_cancelled = self.cancelled.borrow().contains(&batch);
        let items: Vec<Concluding<'_>> = holds
            .iter()
            .zip(ends)
            .map(|(hold, conclusion)| Concluding { hold, conclusion })
            .collect();
        let answers = until_answered(|| self.bed.store.conclude(batch, TTL, &items)).await;
        for ((hold, end), answer) in holds.iter().zip(ends).zip(&answers) {
            if *answer == HandInAnswer::Applied && matches!(end, Conclusion::Publish(_)) {
                let ack = (batch, hold.item().position(), hold.lease());
                let new = self.published.borrow_mut().insert(ack);
                assert!(!(new && was_cancelled), "{ack:?} was published in a cancelled batch");
            }
        }
        answers
    }

    async fn recheck(&self, batch: BatchId, want: u32) {
        let was_cancelled = self.cancelled.borrow().contains(&batch);
        let request = self.bed.recheck_request(batch, want);
        match self.bed.store.recheck(&request).await {
            Ok(Recheck::Granted(holds)) => {
                assert!(!was_cancelled, "rechecks of a cancelled batch");
                self.under_check.borrow_mut().push(holds);
            }
            Ok(Recheck::Nothing(_)) => {}
            Err(unknown) if unknown.is_unknown() => {
                self.give_back_lease(batch, request.lease).await;
                self.lost.borrow_mut().push((batch, request.lease));
            }
            Err(nothing_happened) => assert!(!nothing_happened.is_lasting(), "{nothing_happened}"),
        }
    }

    async fn renew(&self, rng: &mut StdRng) {
        let beat: Vec<Vouched> = {
            let leases = self.leases.borrow();
            let wanted = leases.iter().filter(|_| rng.random_bool(0.3)).take(20);
            wanted
                .map(|holds| Vouched {
                    batch: holds[0].item().batch(),
                    lease: holds[0].lease(),
                    token: holds[0].token(),
                    started: holds.iter().map(|hold| hold.item().position()).collect(),
                    reports: None,
                })
                .collect()
        };
        let cancelled = self.cancelled.borrow().clone();
        let store = &self.bed.store;
        let renewal =
            until_answered(|| store.renew(self.bed.worker, TTL, "running", 0, &beat)).await;
        for state in renewal.leases {
            let batch = beat.iter().find(|vouched| vouched.lease == state.lease).unwrap().batch;
            assert!(state.answer != RenewAnswer::Renewed || !cancelled.contains(&batch));
        }
    }

    /// Gives a lease back whose holds stay where they are: their hand-in comes from a straggler.
    async fn give_back(&self, rng: &mut StdRng) {
        let lease = {
            let leases = self.leases.borrow();
            if leases.is_empty() {
                return;
            }
            let hold = &leases[rng.random_range(0..leases.len())][0];
            (hold.item().batch(), hold.lease())
        };
        self.give_back_lease(lease.0, lease.1).await;
    }

    async fn expire_and_reap(&self, batch: BatchId, some: bool) {
        let expire = "UPDATE holdfast.leases SET expires_at = clock_timestamp()
                       WHERE batch_id = $1 AND (NOT $2 OR lease_id::text < '7')";
        // Rows are locked in no order here, as no part of the program does it.
        let locked = format!(
            "WITH o AS (SELECT FROM holdfast.leases WHERE batch_id = $1
                         ORDER BY lease_id FOR NO KEY UPDATE) {expire}
                        AND (SELECT count(*) >= 0 FROM o)"
        );
        self.bed.run(&locked, &[&batch.uuid(), &some]).await;
        let policy = ReapPolicy { charge: some, ..REAP };
        until_answered(|| self.bed.store.reap(batch, &policy)).await;
    }

    async fn cancel(&self, batch: BatchId) {
        // The rest of the test needs batches that go on.
        if self.cancelled.borrow().len() >= 2 {
            return;
        }
        if self.control(batch, ControlVerb::Cancel).await != ControlAnswer::Ended {
            self.cancelled.borrow_mut().insert(batch);
        }
    }

    /// Nobody else acts any more: takes everything back and finishes it.
    async fn finish_all(&self, batch: BatchId) {
        self.control(batch, ControlVerb::Resume).await;
        while !self.bed.is_ended(batch).await {
            self.expire_and_reap(batch, false).await;
            if let Recheck::Granted(holds) = self.bed.try_recheck(batch, 100).await {
                let ends: Vec<Conclusion> = holds.iter().map(|_| publish(Finding::Holds)).collect();
                let answers = self.conclude_all(&holds, &ends).await;
                assert!(answers.iter().all(|answer| *answer == HandInAnswer::Applied));
            }
            if let Claim::Granted { holds, .. } = self.bed.try_claim(batch, 100).await {
                let ends: Vec<Settlement> = holds.iter().map(|_| succeeded()).collect();
                let answers = self.hand_in_all(&holds, &ends).await;
                assert!(answers.iter().all(|answer| *answer == HandInAnswer::Applied));
            }
            self.bed.store.end_batch(batch).await.unwrap();
        }
        while self.bed.store.clear_cancelled(batch, 100).await.unwrap() {}
    }

    /// What the database has of a batch, by its lease ids.
    async fn stored(&self, batch: BatchId, rows: &str) -> HashSet<Ack> {
        let rows = self.bed.sql.query(rows, &[&batch.uuid()]).await.unwrap();
        let acks = rows
            .iter()
            .map(|row| (batch, Position::new(row.get(0)), LeaseId::from_uuid(row.get(1))));
        let count = rows.len();
        let acks: HashSet<Ack> = acks.collect();
        assert_eq!(acks.len(), count, "nothing is stored twice under one lease");
        acks
    }

    async fn compare_with_record(&self, batch: BatchId) {
        let published = "
            SELECT position, lease_id FROM holdfast.outcomes
             WHERE batch_id = $1 AND lease_id IS NOT NULL
            UNION ALL
            SELECT position, lease_id FROM holdfast.attempts
             WHERE batch_id = $1 AND by_holder AND ending = 'retried'";
        let returned = "
            SELECT position, lease_id FROM holdfast.attempts
             WHERE batch_id = $1 AND by_holder AND ending <> 'retried'";
        let of = |list: &RefCell<HashSet<Ack>>| -> HashSet<Ack> {
            list.borrow().iter().filter(|ack| ack.0 == batch).copied().collect()
        };
        let staged = "
            SELECT position, staged_lease_id FROM holdfast.outcomes
             WHERE batch_id = $1 AND staged_lease_id IS NOT NULL";
        let staged = self.stored(batch, staged).await;
        if self.cancelled.borrow().contains(&batch) {
            assert!(staged.is_subset(&of(&self.staged)), "staged before the cancel");
        } else {
            assert_eq!(staged, of(&self.staged), "what was staged ends as it was");
        }
        assert_eq!(self.stored(batch, published).await, of(&self.published), "published");
        assert_eq!(self.stored(batch, returned).await, of(&self.returned), "returned");
    }
}

/// Takes some lease out of a list, and puts what it does not want of it back.
fn take_some(list: &RefCell<Vec<Vec<Hold>>>, rng: &mut StdRng) -> Option<Vec<Hold>> {
    let mut leases = list.borrow_mut();
    if leases.is_empty() {
        return None;
    }
    let count = leases.len();
    let mut holds = leases.swap_remove(rng.random_range(0..count));
    holds.shuffle(rng);
    let rest = holds.split_off(rng.random_range(1..=holds.len()));
    if !rest.is_empty() {
        leases.push(rest);
    }
    Some(holds)
}

/// Repeats a call until the server answers; nothing it carries is at fault.
async fn until_answered<T, F: Future<Output = Result<T, FlightError>>>(call: impl Fn() -> F) -> T {
    loop {
        match call().await {
            Ok(answer) => return answer,
            Err(error) => assert!(!error.is_lasting(), "{error:?}"),
        }
    }
}

fn from_environment(variable: &str, default: u64) -> u64 {
    std::env::var(variable).map_or(default, |text| text.parse().unwrap())
}

/// Acts for some seconds while `meanwhile` goes on, then ends every batch and compares.
async fn act_and_compare(meanwhile: impl AsyncFn(&World, StdRng)) {
    let seed = from_environment("HOLDFAST_TEST_SEED", SEED);
    let seconds = from_environment("HOLDFAST_TEST_SECONDS", SECONDS);
    eprintln!("HOLDFAST_TEST_SEED={seed}"); // shown when the test fails
    let world = World::new().await;
    let actors = (0..ACTORS).map(|n| world.act(StdRng::seed_from_u64(seed + n)));
    let rng = StdRng::seed_from_u64(seed + ACTORS);
    tokio::join!(join_all(actors), meanwhile(&world, rng), async {
        tokio::time::sleep(Duration::from_secs(seconds)).await;
        world.over.set(true);
    });
    eprintln!(
        "{} steps, {} staged, {} published, {} returned, {} cancelled, {} claims lost",
        world.steps.get(),
        world.staged.borrow().len(),
        world.published.borrow().len(),
        world.returned.borrow().len(),
        world.cancelled.borrow().len(),
        world.lost.borrow().len(),
    );

    for (batch, lease) in world.lost.take() {
        world.give_back_lease(batch, lease).await;
    }
    for batch in &world.batches {
        assert_invariants(&world.bed.sql, *batch).await;
        world.finish_all(*batch).await;
        assert_invariants(&world.bed.sql, *batch).await;
        let counts = world.bed.counts(*batch).await;
        assert_eq!(counts.unfinished(), 0);
        let cancelled = world.cancelled.borrow().contains(batch);
        assert!(cancelled || counts.cancelled == 0);
        world.compare_with_record(*batch).await;
    }
    assert_no_deadlock(&world.bed.sql).await;
}

#[tokio::test]
async fn random_interleavings_keep_every_promise() {
    act_and_compare(async |_, _| {}).await;
}

#[tokio::test]
async fn random_interleavings_keep_every_promise_while_sessions_die() {
    act_and_compare(async |world, mut rng| {
        while !world.over.get() {
            let end = ["pg_terminate_backend", "pg_cancel_backend"][rng.random_range(0..2)];
            let some = format!(
                "SELECT {end}(pid) FROM pg_stat_activity
                  WHERE datname = current_database() AND application_name = 'holdfast-test'
                    AND state <> 'idle' ORDER BY random() LIMIT 2"
            );
            world.bed.sql.query(&some, &[]).await.unwrap();
            tokio::time::sleep(Duration::from_millis(rng.random_range(1..20))).await;
        }
    })
    .await;
}
