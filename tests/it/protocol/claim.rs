//! Claims: what is taken, in which order, and within which bounds.

use std::cell::Cell;
use std::time::Duration;

use futures::future::join_all;
use holdfast::model::{History, ItemStatus};
use holdfast::store::{Claim, ClaimAnswer, ClaimRequest, ControlVerb, FlightError, HandInAnswer};

use crate::support::fixture::{
    BatchSpec, Bed, again, failed, granted, positions, refusal, succeeded,
};
use crate::support::invariants::{assert_invariants, assert_no_deadlock};

const MINUTE: Duration = Duration::from_mins(1);

#[tokio::test]
async fn fresh_items_are_claimed_in_order_and_once() {
    let bed = Bed::new().await;
    let batch = bed.batch(5).await;

    let first = bed.claim(batch, 2).await;
    let rest = bed.claim(batch, 10).await;

    assert_eq!((positions(&first), positions(&rest)), (vec![0, 1], vec![2, 3, 4]));
    assert!(rest[0].token() > first[0].token());
    assert_eq!(bed.refused(batch).await, ClaimAnswer::Empty);
    assert_eq!(bed.statuses(batch).await, [ItemStatus::Leased; 5]);
    assert_eq!(bed.counts(batch).await.executing, 5);
    assert_invariants(&bed.sql, batch).await;
}

#[tokio::test]
async fn a_due_retry_is_claimed_before_fresh_items_and_keeps_its_history() {
    let bed = Bed::new().await;
    let batch = bed.batch(3).await;
    let hold = bed.claim_one(batch).await;
    bed.hand_in_one(&hold, &again(hold.history(), Duration::ZERO)).await;

    let holds = bed.claim(batch, 2).await;

    assert_eq!(positions(&holds), [0, 1]);
    assert_eq!((holds[0].history().attempts(), holds[0].attempt().get()), (1, 2));
    assert_eq!((holds[1].history(), holds[1].attempt().get()), (History::FRESH, 1));
    assert_invariants(&bed.sql, batch).await;
}

#[tokio::test]
async fn a_retry_that_is_not_due_is_left_and_its_time_is_told() {
    let bed = Bed::new().await;
    let batch = bed.batch(2).await;
    for (hold, minutes) in bed.claim(batch, 2).await.iter().zip([2, 1]) {
        bed.hand_in_one(hold, &again(hold.history(), minutes * MINUTE)).await;
    }

    let claim = bed.try_claim(batch, 1).await;

    let Claim::Nothing(ClaimAnswer::Empty, Some(ready_in)) = claim else { panic!("{claim:?}") };
    assert!(ready_in <= MINUTE && ready_in > MINUTE / 2, "{ready_in:?}");
    assert_eq!(bed.statuses(batch).await, [ItemStatus::Queued; 2]);
}

#[tokio::test]
async fn the_live_window_bounds_what_is_held_and_what_waits_together() {
    let bed = Bed::new().await;
    let batch = bed.batch_of(BatchSpec { items: 9, max_live: 3, ..BatchSpec::default() }).await;

    let holds = bed.claim(batch, 9).await;
    assert_eq!(positions(&holds), [0, 1, 2]);
    assert_eq!(bed.refused(batch).await, ClaimAnswer::Window);

    bed.hand_in(&holds[..1], &again(History::FRESH, MINUTE)).await;
    let claim = bed.try_claim(batch, 9).await;
    let Claim::Nothing(ClaimAnswer::Window, Some(ready_in)) = claim else { panic!("{claim:?}") };
    assert!(ready_in <= MINUTE && ready_in > MINUTE / 2, "{ready_in:?}");

    bed.hand_in(&holds[1..], &succeeded()).await;
    assert_eq!(positions(&bed.claim(batch, 9).await), [3, 4]);
    assert_eq!(bed.refused(batch).await, ClaimAnswer::Window);
    assert_invariants(&bed.sql, batch).await;
}

#[tokio::test]
async fn twenty_claimers_never_exceed_a_running_cap_of_three() {
    let bed = Bed::new().await;
    let spec = BatchSpec { items: 60, max_running: Some(3), ..BatchSpec::default() };
    let batch = bed.batch_of(spec).await;
    let (running, ended) = (Cell::new(0), Cell::new(0));

    join_all((0..20).map(|n| {
        let (bed, running, ended) = (&bed, &running, &ended);
        async move {
            while ended.get() < 60 {
                let Claim::Granted { holds, .. } = bed.try_claim(batch, 1 + n % 4).await else {
                    tokio::task::yield_now().await;
                    continue;
                };
                running.set(running.get() + holds.len());
                assert!(running.get() <= 3, "{} run", running.get());
                assert_invariants(&bed.sql, batch).await;
                // Counted down before the database can know.
                running.set(running.get() - holds.len());
                ended.set(ended.get() + holds.len());
                let answers = bed.hand_in(&holds, &succeeded()).await;
                assert!(answers.iter().all(|answer| *answer == HandInAnswer::Applied));
            }
        }
    }))
    .await;

    let most = "SELECT max(executing) FROM holdfast.progress WHERE batch_id = $1";
    assert_eq!(bed.value::<i32>(batch, most).await, 3, "the cap is used");
    assert_eq!(bed.counts(batch).await.succeeded, 60);
    assert_invariants(&bed.sql, batch).await;
    assert_no_deadlock(&bed.sql).await;
}

#[tokio::test]
async fn an_item_with_two_crashes_gets_a_lease_of_its_own_in_its_turn() {
    let bed = Bed::new().await;
    let batch = bed.batch(5).await;
    let two_crashes = History::FRESH.plus_attempt().plus_attempt().plus_crash().plus_crash();
    let holds = bed.claim(batch, 5).await;
    for hold in &holds {
        bed.hand_in_one(hold, &again(History::FRESH, Duration::ZERO)).await;
    }
    let crashed = "UPDATE holdfast.waiting SET history = $2 WHERE batch_id = $1 AND position = 2";
    bed.run(crashed, &[&batch.uuid(), &two_crashes.packed()]).await;

    let mut leases = Vec::new();
    for _ in 0..3 {
        let Claim::Granted { holds, alone, .. } = bed.try_claim(batch, 10).await else {
            panic!("something is due")
        };
        leases.push((positions(&holds), alone));
    }

    assert_eq!(leases, [(vec![0, 1], false), (vec![2], true), (vec![3, 4], false)]);
    assert_invariants(&bed.sql, batch).await;
}

#[tokio::test]
async fn a_lone_item_is_not_joined_by_fresh_ones() {
    let bed = Bed::new().await;
    let batch = bed.batch(3).await;
    let hold = bed.claim_one(batch).await;
    bed.hand_in_one(&hold, &again(hold.history().plus_crash().plus_crash(), Duration::ZERO)).await;

    let claim = bed.try_claim(batch, 10).await;

    assert!(
        matches!(claim, Claim::Granted { ref holds, alone: true, .. } if positions(holds) == [0])
    );
}

#[tokio::test]
async fn a_claimer_goes_away_while_another_has_the_ticket() {
    let bed = Bed::new().await;
    let batch = bed.batch(1).await;
    let mut other = bed.db.client().await;
    let held = other.transaction().await.unwrap();
    held.query_one("SELECT holdfast.try_ticket($1)", &[&batch.uuid()]).await.unwrap();

    assert_eq!(bed.refused(batch).await, ClaimAnswer::Contended);

    held.rollback().await.unwrap();
    assert_eq!(positions(&bed.claim(batch, 1).await), [0]);
}

#[tokio::test]
async fn of_two_claimers_at_once_one_gets_the_items() {
    let bed = Bed::new().await;
    let batch = bed.batch(100).await;
    for round in 0..100 {
        let pair = tokio::join!(bed.try_claim(batch, 1), bed.try_claim(batch, 1));
        let taken: Vec<i32> = [pair.0, pair.1]
            .into_iter()
            .flat_map(|claim| match claim {
                Claim::Granted { holds, .. } => positions(&holds),
                Claim::Nothing(ClaimAnswer::Contended | ClaimAnswer::Empty, _) => Vec::new(),
                Claim::Nothing(answer, _) => panic!("{answer:?}"),
            })
            .collect();
        assert!(!taken.is_empty() || round > 49, "somebody gets the ticket");
        assert!(taken.len() < 2 || taken[0] != taken[1], "{taken:?}");
    }
    assert_invariants(&bed.sql, batch).await;
}

#[tokio::test]
async fn a_claim_says_why_a_batch_is_closed() {
    let bed = Bed::new().await;
    let [paused, cancelled, early] = [bed.batch(1).await, bed.batch(1).await, bed.batch(1).await];
    bed.control(paused, ControlVerb::Pause).await;
    bed.control(cancelled, ControlVerb::Cancel).await;
    let later = "UPDATE holdfast.batches SET not_before = clock_timestamp() + interval '1 min'
                  WHERE id = $1";
    bed.run(later, &[&early.uuid()]).await;
    let unknown = holdfast::model::BatchId::generate();

    assert_eq!(bed.refused(paused).await, ClaimAnswer::Closed);
    assert_eq!(bed.refused(cancelled).await, ClaimAnswer::Closed);
    assert_eq!(bed.refused(unknown).await, ClaimAnswer::Unknown);
    let claim = bed.try_claim(early, 1).await;
    assert!(
        matches!(claim, Claim::Nothing(ClaimAnswer::NotBefore, Some(ready)) if ready <= MINUTE)
    );
    bed.run("UPDATE holdfast.batches SET not_before = clock_timestamp()", &[]).await;
    assert_eq!(positions(&bed.claim(early, 1).await), [0]);
}

#[tokio::test]
async fn claims_can_be_switched_off_for_the_whole_database() {
    let bed = Bed::new().await;
    let batch = bed.batch(1).await;
    bed.run("UPDATE holdfast.control SET claims_enabled = false", &[]).await;
    assert_eq!(bed.refused(batch).await, ClaimAnswer::ClaimsOff);

    bed.run("UPDATE holdfast.control SET claims_enabled = true", &[]).await;
    assert_eq!(positions(&bed.claim(batch, 1).await), [0]);
}

#[tokio::test]
async fn a_claim_that_finds_nothing_left_ends_the_batch() {
    let bed = Bed::new().await;
    let batch = bed.batch(1).await;
    let hold = bed.claim_one(batch).await;
    bed.hand_in_one(&hold, &failed()).await;
    assert!(!bed.is_ended(batch).await);

    assert_eq!(bed.refused(batch).await, ClaimAnswer::Closed);

    assert!(bed.is_ended(batch).await);
    assert_invariants(&bed.sql, batch).await;
}

#[tokio::test]
async fn a_lease_id_used_twice_is_refused_and_changes_nothing() {
    let bed = Bed::new().await;
    let batch = bed.batch(4).await;
    let request = bed.request(batch, 2);
    let first = granted(bed.store.claim(&request).await.unwrap());

    let second = bed.store.claim(&request).await;

    assert!(matches!(second, Err(ref error @ FlightError::RolledBack(_)) if error.is_lasting()));
    assert_eq!(bed.counts(batch).await.executing, 2);
    assert_invariants(&bed.sql, batch).await;
    bed.hand_in(&first, &succeeded()).await;
    assert_eq!(positions(&bed.claim(batch, 4).await), [2, 3]);
}

#[tokio::test]
async fn a_claim_wants_at_least_one_item() {
    let bed = Bed::new().await;
    let batch = bed.batch(4).await;
    let none = ClaimRequest { want: 0, ..bed.request(batch, 1) };

    assert!(bed.store.claim(&none).await.is_err());
    let unsaid = "SELECT answer FROM holdfast.claim($1, gen_random_uuid(), $2, NULL, 60, NULL)";
    assert!(bed.sql.query_one(unsaid, &[&batch.uuid(), &bed.worker.uuid()]).await.is_err());

    assert_eq!(bed.counts(batch).await.fresh, 4);
}

#[tokio::test]
async fn a_batch_that_is_deleted_while_its_claim_waits_grants_nothing() {
    let bed = Bed::new().await;
    let batch = bed.batch(1).await;
    let mut other = bed.db.client().await;
    let held = other.transaction().await.unwrap();
    held.query_one("SELECT holdfast.lock_parent($1)", &[&batch.uuid()]).await.unwrap();

    let request = bed.request(batch, 1);
    let (claimed, ()) = tokio::join!(bed.store.claim(&request), async {
        bed.until_waiting_for_locks(1).await;
        held.execute("DELETE FROM holdfast.batches WHERE id = $1", &[&batch.uuid()]).await.unwrap();
        held.commit().await.unwrap();
    });

    assert!(matches!(claimed, Err(FlightError::RolledBack(_))), "{claimed:?}");
    let leases: i64 =
        bed.value(batch, "SELECT count(*) FROM holdfast.leases WHERE batch_id = $1").await;
    assert_eq!(leases, 0);
    assert_eq!(refusal(&bed.try_claim(batch, 1).await), ClaimAnswer::Unknown);
}

#[tokio::test]
async fn a_lease_of_256_items_shrinks_as_they_are_handed_in() {
    let bed = Bed::new().await;
    let batch = bed.batch(300).await;
    let holds = bed.claim(batch, 256).await;
    assert_eq!(holds.len(), 256);

    for group in holds.chunks(60) {
        assert_eq!(
            bed.hand_in(group, &succeeded()).await,
            vec![HandInAnswer::Applied; group.len()]
        );
        assert_invariants(&bed.sql, batch).await;
    }

    assert_eq!(bed.counts(batch).await.succeeded, 256);
    let leases: i64 =
        bed.value(batch, "SELECT count(*) FROM holdfast.leases WHERE batch_id = $1").await;
    assert_eq!(leases, 0);
}
