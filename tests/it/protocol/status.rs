//! The derived status: SQL and Rust state one rule, and pages by status agree with both.

use std::collections::HashMap;
use std::time::Duration;

use holdfast::model::{BatchId, Conclusion, Finding, History, Hold, ItemStatus, Place, Position};
use holdfast::store::{Claim, ControlVerb, Recheck, Vouched};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::support::fixture::{BatchSpec, Bed, TTL, again, everything, failed, publish, succeeded};
use crate::support::invariants::assert_invariants;

/// The status of every item, by the tables and the Rust rule.
async fn derived(bed: &Bed, batch: BatchId) -> Vec<ItemStatus> {
    let id = batch.uuid();
    let row = bed
        .sql
        .query_one(
            "SELECT b.control, b.item_count, b.max_live, p.next_position, p.deferred
               FROM holdfast.batches b, holdfast.current_progress(b.id) p WHERE b.id = $1",
            &[&id],
        )
        .await
        .unwrap();
    let cancelled = row.get::<_, &str>("control") == "cancelled";
    let (items, cursor): (i32, i32) = (row.get("item_count"), row.get("next_position"));
    let mut places = HashMap::new();
    let waiting = "SELECT position FROM holdfast.waiting WHERE batch_id = $1";
    for row in bed.sql.query(waiting, &[&id]).await.unwrap() {
        places.insert(row.get::<_, i32>(0), (Place::Waiting, false));
    }
    let mut live = i32::try_from(places.len()).unwrap() - row.get::<_, i32>("deferred");
    let leases = "SELECT positions, started FROM holdfast.leases WHERE batch_id = $1";
    for row in bed.sql.query(leases, &[&id]).await.unwrap() {
        let started: Vec<i32> = row.get(1);
        for position in row.get::<_, Vec<i32>>(0) {
            places.insert(position, (Place::Held, started.contains(&position)));
            live += 1;
        }
    }
    let staged = "SELECT position FROM holdfast.staged_outcomes WHERE batch_id = $1";
    for row in bed.sql.query(staged, &[&id]).await.unwrap() {
        places.insert(row.get(0), (Place::Staged, false));
    }
    if cancelled {
        places = (0..items).map(|position| (position, (Place::Cancelled, false))).collect();
    }
    let outcomes = "SELECT position, status FROM holdfast.outcomes WHERE batch_id = $1";
    for row in bed.sql.query(outcomes, &[&id]).await.unwrap() {
        let ended =
            if row.get::<_, &str>(1) == "failed" { Place::Failed } else { Place::Succeeded };
        places.insert(row.get(0), (ended, false));
    }
    let room = (row.get::<_, i32>("max_live") - live).max(0);
    (0..items)
        .map(|position| {
            let (place, started) = places.get(&position).copied().unwrap_or((Place::Fresh, false));
            ItemStatus::of(place, started, position < cursor + room)
        })
        .collect()
}

/// One random step on a batch; `held` is what somebody may still hand in, `staged` what somebody may
/// still conclude.
async fn step(
    bed: &Bed,
    batch: BatchId,
    rng: &mut StdRng,
    held: &mut Vec<Hold>,
    staged: &mut Vec<Hold>,
) {
    match rng.random_range(0..15) {
        0..=3 => {
            if let Claim::Granted { holds, .. } = bed.try_claim(batch, rng.random_range(1..6)).await
            {
                held.extend(holds);
            }
        }
        4..=6 if !held.is_empty() => {
            let hold = held.swap_remove(rng.random_range(0..held.len()));
            let settled = match rng.random_range(0..3) {
                0 => succeeded(),
                1 => failed(),
                _ => again(History::FRESH, Duration::from_secs(rng.random_range(0..2) * 600)),
            };
            bed.hand_in_one(&hold, &settled).await;
        }
        7 if !held.is_empty() => {
            let hold = &held[rng.random_range(0..held.len())];
            let started = (0..40).filter(|_| rng.random_bool(0.5)).map(Position::new).collect();
            let (lease, token) = (hold.lease(), hold.token());
            let beat = [Vouched { batch, lease, token, started, reports: None }];
            bed.store.renew(bed.worker, TTL, "running", 1, &beat).await.unwrap();
        }
        8 => {
            bed.retry(batch).await;
        }
        10..=11 if !held.is_empty() => {
            let hold = held.swap_remove(rng.random_range(0..held.len()));
            bed.stage_one(&hold, None).await;
            staged.push(hold);
        }
        12..=13 if !staged.is_empty() => {
            let hold = staged.swap_remove(rng.random_range(0..staged.len()));
            let conclusion = match rng.random_range(0..3) {
                0 => publish(Finding::Holds),
                1 => Conclusion::Publish(None),
                _ => Conclusion::Recheck(hold.history()),
            };
            bed.conclude(&hold, &conclusion).await;
        }
        14 => {
            if let Recheck::Granted(holds) = bed.try_recheck(batch, 2).await {
                staged.extend(holds);
            }
        }
        _ => {
            let verbs = [ControlVerb::Pause, ControlVerb::Resume, ControlVerb::Resume];
            bed.control(batch, verbs[rng.random_range(0..3)]).await;
        }
    }
}

/// Every page by status lists what the page of all items says.
async fn assert_pages_agree(bed: &Bed, batch: BatchId, all: &[ItemStatus], rng: &mut StdRng) {
    for status in ItemStatus::ALL {
        let (from, limit) = (rng.random_range(0..45), rng.random_range(1..50));
        let page = bed.store.items(batch, Some(status), Position::new(from), limit).await.unwrap();
        assert!(page.iter().all(|item| item.status == status));
        let listed: Vec<i32> = page.iter().map(|item| item.position.get()).collect();
        let expected: Vec<i32> = (from..40)
            .filter(|position| all[usize::try_from(*position).unwrap()] == status)
            .take(usize::try_from(limit).unwrap())
            .collect();
        assert_eq!(listed, expected, "{status} from {from}, {limit} at most");
    }
}

#[tokio::test]
async fn sql_and_rust_derive_the_same_status_in_random_states() {
    let bed = Bed::new().await;
    for seed in 0..12 {
        let mut rng = StdRng::seed_from_u64(seed);
        let spec = BatchSpec { items: 40, max_live: rng.random_range(3..20), ..Default::default() };
        let batch = bed.batch_of(spec).await;
        if seed % 2 == 0 {
            bed.defer(batch, 5, 15, 600.0).await;
        }
        let (mut held, mut staged) = (Vec::new(), Vec::new());
        for n in 0..35 {
            step(&bed, batch, &mut rng, &mut held, &mut staged).await;
            if n % 5 == 0 {
                let expected = derived(&bed, batch).await;
                assert_eq!(bed.statuses(batch).await, expected, "seed {seed}, step {n}");
                assert_pages_agree(&bed, batch, &expected, &mut rng).await;
            }
        }
        assert_invariants(&bed.sql, batch).await;
        bed.control(batch, ControlVerb::Cancel).await;
        let expected = derived(&bed, batch).await;
        assert_eq!(bed.statuses(batch).await, expected, "seed {seed}, cancelled");
        assert_pages_agree(&bed, batch, &expected, &mut rng).await;
    }
}

#[tokio::test]
async fn pages_end_at_the_ends_of_a_batch() {
    let bed = Bed::new().await;
    let batch = bed.batch(3).await;
    let at = |from: i32| Position::new(from);
    for (from, expected) in [(0, 3), (2, 1), (3, 0), (i32::MAX, 0)] {
        let all = bed.store.items(batch, None, at(from), 1_000).await.unwrap();
        let queued =
            bed.store.items(batch, Some(ItemStatus::Queued), at(from), 1_000).await.unwrap();
        let pending =
            bed.store.items(batch, Some(ItemStatus::Pending), at(from), 1_000).await.unwrap();
        let exported = bed.store.export_page(&everything(batch, from)).await.unwrap().rows;
        assert_eq!(
            [all.len(), queued.len(), pending.len(), exported.len()],
            [expected, expected, 0, 0],
            "nothing has ended"
        );
    }
    let nowhere = BatchId::generate();
    for status in ItemStatus::ALL.map(Some).into_iter().chain([None]) {
        assert!(bed.store.items(nowhere, status, at(0), 10).await.unwrap().is_empty());
    }
}

#[tokio::test]
async fn a_cancelled_item_shows_nothing_of_the_lease_it_was_in() {
    let bed = Bed::new().await;
    let batch = bed.batch(2).await;
    let holds = bed.claim(batch, 2).await;
    bed.hand_in_one(&holds[0], &again(History::FRESH, Duration::ZERO)).await;
    bed.control(batch, ControlVerb::Cancel).await;
    let shown = async || {
        let items = bed.store.items(batch, None, Position::new(0), 2).await.unwrap();
        items.into_iter().map(|item| serde_json::to_string(&item).unwrap()).collect::<Vec<_>>()
    };
    let before = shown().await;

    while bed.store.clear_cancelled(batch, 10).await.unwrap() {}

    assert_eq!(before, shown().await, "clearing away is not seen");
}

#[tokio::test]
async fn sql_and_rust_count_the_same_histories() {
    let bed = Bed::new().await;
    let mut rng = StdRng::seed_from_u64(1);
    for _ in 0..200 {
        let packed: i64 = rng.random_range(0..1 << 48) | (rng.random_range(0..2) * 0xff);
        let history = History::from_packed(packed);
        let row = bed
            .sql
            .query_one(
                "SELECT array_agg(holdfast.history_count($1, n) ORDER BY n),
                        array_agg(holdfast.history_plus($1, n) ORDER BY n)
                   FROM generate_series(0, 5) n",
                &[&packed],
            )
            .await
            .unwrap();
        let counts = [
            history.attempts(),
            history.crashes(),
            history.interruptions(),
            history.admissions(),
            history.check_losses(),
            history.retries(),
        ];
        let plus = [
            history.plus_attempt(),
            history.plus_crash(),
            history.plus_interruption(),
            history.plus_admission(),
            history.plus_check_loss(),
            history.plus_retry(),
        ];
        assert_eq!(row.get::<_, Vec<i32>>(0), counts.map(i32::from));
        assert_eq!(row.get::<_, Vec<i64>>(1), plus.map(History::packed));
    }
}
