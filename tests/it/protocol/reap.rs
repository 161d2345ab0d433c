//! Expired leases: what is taken back, how it is judged, and what is left alone (F4).

use std::time::Duration;

use holdfast::model::{AttemptEnding, Disposition, History, ItemStatus, Settlement};
use holdfast::store::{Claim, ControlVerb, ReapDisposition, ReapPolicy, Reaped};

use crate::support::fixture::{BatchSpec, Bed, REAP, TTL, again, positions, succeeded};
use crate::support::invariants::assert_invariants;

const FORGIVING: ReapPolicy = ReapPolicy { charge: false, ..REAP };

fn is_requeued(reaped: &Reaped) -> bool {
    reaped.disposition == ReapDisposition::Requeued
}

#[tokio::test]
async fn an_expiry_is_charged_and_its_item_waits_for_the_next_attempt() {
    let bed = Bed::new().await;
    let batch = bed.batch(3).await;
    let holds = bed.claim(batch, 2).await;
    bed.expire(holds[0].lease()).await;

    let taken = bed.reap(batch).await;

    assert_eq!(taken.len(), 2);
    assert!(taken.iter().all(|reaped| is_requeued(reaped) && reaped.lease == holds[0].lease()));
    assert!(taken.iter().all(|reaped| reaped.token == holds[0].token()));
    assert!(taken[0].late >= Duration::from_secs(1) && taken[0].late < TTL);
    let attempt = bed.sql.query("SELECT * FROM holdfast.attempts", &[]).await.unwrap();
    assert_eq!(attempt.len(), 2);
    assert_eq!(attempt[0].get::<_, &str>("ending"), "expired");
    assert!(attempt[0].get::<_, bool>("charged") && !attempt[0].get::<_, bool>("by_holder"));
    assert_invariants(&bed.sql, batch).await;

    let again = bed.claim(batch, 3).await;
    assert_eq!(positions(&again), [0, 1, 2]);
    assert_eq!((again[0].history().attempts(), again[0].history().crashes()), (1, 0), "it lives");
}

#[tokio::test]
async fn an_expiry_whose_worker_fell_silent_counts_as_a_crash() {
    let bed = Bed::new().await;
    let batch = bed.batch(1).await;
    let hold = bed.claim_one(batch).await;
    bed.expire(hold.lease()).await;
    bed.silence(bed.worker).await;

    bed.reap(batch).await;

    let history = bed.claim_one(batch).await.history();
    assert_eq!((history.attempts(), history.crashes()), (1, 1));
}

#[tokio::test]
async fn a_lease_within_its_time_is_left_alone() {
    let bed = Bed::new().await;
    let batch = bed.batch(2).await;
    let _alive = bed.claim_one(batch).await;
    let expired = bed.claim_one(batch).await;
    bed.silence(bed.worker).await;
    bed.expire(expired.lease()).await;

    let taken = bed.reap(batch).await;

    assert_eq!(taken.iter().map(|reaped| reaped.lease).collect::<Vec<_>>(), [expired.lease()]);
    assert_eq!(bed.statuses(batch).await, [ItemStatus::Leased, ItemStatus::Queued]);
    assert!(bed.reap(batch).await.is_empty());
    assert_invariants(&bed.sql, batch).await;
}

#[tokio::test]
async fn spent_attempts_fail_the_item_under_no_lease_and_end_its_batch() {
    let bed = Bed::new().await;
    let batch = bed.batch_of(BatchSpec { max_attempts: 2, ..BatchSpec::default() }).await;
    for _ in 0..2 {
        let hold = bed.claim_one(batch).await;
        bed.expire(hold.lease()).await;
        bed.reap(batch).await;
    }

    let row = bed.sql.query_one("SELECT * FROM holdfast.outcomes", &[]).await.unwrap();
    assert_eq!(row.get::<_, Option<uuid::Uuid>>("lease_id"), None);
    assert_eq!((row.get::<_, &str>("status"), row.get::<_, i32>("attempt")), ("failed", 2));
    assert_eq!(row.get::<_, &str>("stop_reason"), "lease_expired");
    assert_eq!(row.get::<_, &str>("error"), "the lease expired in attempt 2 of 2");
    assert!(bed.is_ended(batch).await, "by the reaper itself");
    assert_eq!(bed.counts(batch).await.failed, 1);
    assert_invariants(&bed.sql, batch).await;
}

#[tokio::test]
async fn three_crashes_fail_an_item_as_poison_and_the_third_runs_alone() {
    let bed = Bed::new().await;
    let batch =
        bed.batch_of(BatchSpec { items: 2, max_attempts: 10, ..BatchSpec::default() }).await;
    bed.silence(bed.worker).await;
    let mut lone = Vec::new();
    for _ in 0..3 {
        let Claim::Granted { mut holds, alone, .. } = bed.try_claim(batch, 1).await else {
            panic!("item 0 is due")
        };
        lone.push(alone);
        if alone {
            // Its worker may die of what it waits for: then it is not charged.
            bed.expire(holds[0].lease()).await;
            bed.reap(batch).await;
            let Claim::Granted { holds: again, alone: true, .. } = bed.try_claim(batch, 1).await
            else {
                panic!("item 0 is due again, to run alone")
            };
            assert_eq!((again[0].history().crashes(), again[0].history().attempts()), (2, 2));
            assert!(!bed.store.mark_begun(&holds[0]).await.unwrap(), "it lost it");
            assert!(bed.store.mark_begun(&again[0]).await.unwrap());
            holds = again;
        }
        bed.expire(holds[0].lease()).await;
        bed.reap(batch).await;
    }

    assert_eq!(lone, [false, false, true]);
    let row = bed.sql.query_one("SELECT * FROM holdfast.outcomes", &[]).await.unwrap();
    assert_eq!((row.get::<_, i32>("position"), row.get::<_, i32>("attempt")), (0, 3));
    assert_eq!(row.get::<_, &str>("stop_reason"), "poison");
    assert_eq!(row.get::<_, &str>("error"), "poison: its worker died with it 3 times");
    assert_invariants(&bed.sql, batch).await;
}

#[tokio::test]
async fn a_mass_expiry_interrupts_free_of_charge_five_times() {
    let bed = Bed::new().await;
    let batch = bed.batch_of(BatchSpec { max_attempts: 2, ..BatchSpec::default() }).await;
    bed.silence(bed.worker).await;
    let mut histories = Vec::new();
    for _ in 0..6 {
        let hold = bed.claim_one(batch).await;
        histories.push((hold.history().interruptions(), hold.history().attempts()));
        bed.expire(hold.lease()).await;
        let taken = bed.store.reap(batch, &FORGIVING).await.unwrap();
        assert!(is_requeued(&taken[0]));
    }
    assert_eq!(histories, [(0, 0), (1, 0), (2, 0), (3, 0), (4, 0), (5, 0)]);
    let charged: Vec<bool> = bed
        .sql
        .query("SELECT charged FROM holdfast.attempts ORDER BY token", &[])
        .await
        .unwrap()
        .iter()
        .map(|row| row.get(0))
        .collect();
    assert_eq!(charged, [false, false, false, false, false, true]);

    let last = bed.claim_one(batch).await;
    assert_eq!((last.history().attempts(), last.history().crashes()), (1, 0));
    bed.expire(last.lease()).await;
    let last = bed.store.reap(batch, &FORGIVING).await.unwrap();
    assert!(!is_requeued(&last[0]), "and then it ends");
    assert!(bed.is_ended(batch).await);
    assert_invariants(&bed.sql, batch).await;
}

#[tokio::test]
async fn what_is_left_of_a_lease_is_taken_back_with_its_histories() {
    let bed = Bed::new().await;
    let batch = bed.batch(4).await;
    let first = bed.claim_one(batch).await;
    let seen = History::FRESH.plus_admission();
    let settled = Settlement {
        disposition: Disposition::Again {
            ending: AttemptEnding::NotAdmitted,
            charged: false,
            delay: Duration::ZERO,
            history: seen,
        },
        ..succeeded()
    };
    bed.hand_in_one(&first, &settled).await;
    let holds = bed.claim(batch, 4).await;
    bed.finish(&holds[2]).await;
    bed.expire(holds[0].lease()).await;

    let mut taken: Vec<i32> =
        bed.reap(batch).await.iter().map(|reaped| reaped.item.position().get()).collect();

    taken.sort_unstable();
    assert_eq!(taken, [0, 1, 3]);
    let mut holds = bed.claim(batch, 4).await;
    holds.sort_by_key(|hold| hold.item().position());
    assert_eq!(holds[0].history(), seen.plus_attempt());
    assert_eq!(holds[1].history(), History::FRESH.plus_attempt());
    assert_invariants(&bed.sql, batch).await;
}

#[tokio::test]
async fn paused_batches_are_recovered_and_cancelled_ones_are_not() {
    let bed = Bed::new().await;
    let [paused, cancelled] = [bed.batch(1).await, bed.batch(1).await];
    for (batch, verb) in [(paused, ControlVerb::Pause), (cancelled, ControlVerb::Cancel)] {
        let hold = bed.claim_one(batch).await;
        bed.control(batch, verb).await;
        bed.expire(hold.lease()).await;
    }

    assert_eq!(bed.reap(paused).await.len(), 1);
    assert!(bed.reap(cancelled).await.is_empty());
    assert!(bed.reap(holdfast::model::BatchId::generate()).await.is_empty());

    assert_eq!(bed.statuses(paused).await, [ItemStatus::Queued]);
    assert_eq!(bed.statuses(cancelled).await, [ItemStatus::Cancelled]);
    assert_invariants(&bed.sql, paused).await;
    assert_invariants(&bed.sql, cancelled).await;
}

#[tokio::test]
async fn a_reaper_goes_away_while_another_has_the_ticket() {
    let bed = Bed::new().await;
    let batch = bed.batch(1).await;
    let hold = bed.claim_one(batch).await;
    bed.expire(hold.lease()).await;
    let mut other = bed.db.client().await;
    let held = other.transaction().await.unwrap();
    held.query_one("SELECT holdfast.try_ticket($1)", &[&batch.uuid()]).await.unwrap();

    assert!(bed.reap(batch).await.is_empty());

    held.rollback().await.unwrap();
    assert_eq!(bed.reap(batch).await.len(), 1);
}

#[tokio::test]
async fn a_first_expiry_is_ready_at_once_and_later_ones_back_off_within_their_bound() {
    let bed = Bed::new().await;
    let spec = BatchSpec { items: 60, max_attempts: 100, ..BatchSpec::default() };
    let batch = bed.batch_of(spec).await;
    let policy = ReapPolicy {
        backoff_base: Duration::from_secs(100),
        backoff_max: Duration::from_mins(5),
        ..REAP
    };
    let longest =
        "SELECT coalesce(max(extract(epoch FROM ready_at - clock_timestamp())), 0)::float8
                     FROM holdfast.waiting WHERE batch_id = $1";
    let mut bounds = Vec::new();
    for attempts in 0..5 {
        let holds = bed.claim(batch, 60).await;
        assert_eq!(holds.len(), 60);
        assert_eq!(holds[0].history().attempts(), attempts);
        bed.expire(holds[0].lease()).await;
        bed.store.reap(batch, &policy).await.unwrap();
        bounds.push(bed.value::<f64>(batch, longest).await);
        let ready = "UPDATE holdfast.waiting SET ready_at = clock_timestamp() WHERE batch_id = $1";
        bed.run(ready, &[&batch.uuid()]).await;
    }
    let seen = |n: usize, low: f64, high: f64| {
        assert!(low <= bounds[n] && bounds[n] <= high, "{bounds:?}");
    };
    seen(0, -10.0, 0.0);
    seen(1, 60.0, 100.0);
    seen(2, 120.0, 200.0);
    seen(3, 180.0, 300.0);
    seen(4, 180.0, 300.0);
}

#[tokio::test]
async fn an_item_that_keeps_failing_by_itself_is_no_crash() {
    let bed = Bed::new().await;
    let batch = bed.batch(1).await;
    for _ in 0..2 {
        let hold = bed.claim_one(batch).await;
        bed.hand_in_one(&hold, &again(hold.history(), Duration::ZERO)).await;
    }
    let claim = bed.try_claim(batch, 1).await;
    assert!(matches!(claim, Claim::Granted { alone: false, .. }), "{claim:?}");
}
