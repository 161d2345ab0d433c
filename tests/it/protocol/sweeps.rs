//! Where the sweeps look, and the housekeeping that runs beside everything else.

use std::cell::Cell;
use std::time::Duration;

use futures::future::join_all;
use holdfast::model::{BatchId, History, WorkerId};
use holdfast::store::{Claim, ClaimRequest, ControlVerb};

use crate::support::fixture::{BatchSpec, Bed, TTL, again, granted, succeeded};
use crate::support::invariants::{assert_invariants, assert_no_deadlock};

#[tokio::test]
async fn the_fast_sweep_finds_expired_leases_of_silent_workers_alone() {
    let bed = Bed::new().await;
    let silent = WorkerId::generate();
    bed.register(silent).await;
    let claim_as = async |worker: WorkerId, expired: bool| {
        let batch = bed.batch(1).await;
        let request = ClaimRequest { worker, ..bed.request(batch, 1) };
        let holds = granted(bed.store.claim(&request).await.unwrap());
        if expired {
            bed.expire(holds[0].lease()).await;
        }
        batch
    };
    let found = claim_as(silent, true).await;
    claim_as(silent, false).await;
    let living = claim_as(bed.worker, true).await;
    bed.silence(silent).await;

    assert_eq!(bed.store.batches_of_silent_workers().await.unwrap(), [found]);

    let mut expired = bed.store.batches_with_expired_leases().await.unwrap();
    expired.sort_unstable();
    assert_eq!(expired, [found, living], "the full sweep finds both");
    bed.control(living, ControlVerb::Cancel).await;
    assert_eq!(bed.store.batches_with_expired_leases().await.unwrap(), [found]);
}

#[tokio::test]
async fn one_worker_of_the_fleet_gets_the_full_sweep() {
    let bed = Bed::new().await;
    for _ in 0..20 {
        let turns = join_all((0..10).map(|_| bed.store.take_sweep(Duration::from_mins(1))));
        let turns = turns.await.into_iter().filter(|turn| *turn.as_ref().unwrap()).count();
        assert_eq!(turns, 1);
        assert!(!bed.store.take_sweep(Duration::from_mins(1)).await.unwrap());
        bed.run("UPDATE holdfast.sweep SET taken_at = taken_at - interval '1 hour'", &[]).await;
    }
}

#[tokio::test]
async fn a_batch_whose_last_worker_died_before_ending_it_is_found() {
    let bed = Bed::new().await;
    let [left, running] = [bed.batch(1).await, bed.batch(2).await];
    for batch in [left, running] {
        let hold = bed.claim_one(batch).await;
        bed.finish(&hold).await;
    }

    assert_eq!(bed.store.exhausted_batches().await.unwrap(), [left]);

    bed.store.end_batch(left).await.unwrap();
    assert!(bed.store.exhausted_batches().await.unwrap().is_empty());
}

#[tokio::test]
async fn an_expiry_beyond_its_lease_is_cut_and_others_stay() {
    let bed = Bed::new().await;
    let batch = bed.batch(3).await;
    let [far, near, past] =
        [bed.claim_one(batch).await, bed.claim_one(batch).await, bed.claim_one(batch).await];
    let stepped = "UPDATE holdfast.leases SET expires_at = clock_timestamp() + interval '1 hour'
                    WHERE lease_id = $1";
    bed.run(stepped, &[&far.lease().uuid()]).await;
    bed.expire(past.lease()).await;

    bed.store.tidy(100).await.unwrap();

    let left = async |hold: &holdfast::model::Hold| {
        let left = "SELECT extract(epoch FROM expires_at - clock_timestamp())::float8
                      FROM holdfast.leases WHERE lease_id = $1";
        let row = bed.sql.query_one(left, &[&hold.lease().uuid()]).await.unwrap();
        row.get::<_, f64>(0)
    };
    for hold in [&far, &near] {
        let left = left(hold).await;
        assert!(left > 30.0 && left <= TTL.as_secs_f64(), "{left}");
    }
    assert!(left(&past).await < 0.0);
}

#[tokio::test]
async fn a_dead_worker_is_closed_when_it_holds_nothing_any_more() {
    let bed = Bed::new().await;
    let [idle, holding] = [WorkerId::generate(), WorkerId::generate()];
    for worker in [idle, holding] {
        bed.register(worker).await;
        bed.silence(worker).await;
    }
    let batch = bed.batch(1).await;
    let request = ClaimRequest { worker: holding, ..bed.request(batch, 1) };
    granted(bed.store.claim(&request).await.unwrap());

    bed.store.tidy(100).await.unwrap();

    let mut live: Vec<WorkerId> =
        bed.store.live_workers().await.unwrap().iter().map(|worker| worker.id).collect();
    live.sort_unstable();
    let mut expected = [bed.worker, holding];
    expected.sort_unstable();
    assert_eq!(live, expected);
}

/// Makes every progress row but the newest old enough to be pruned.
async fn age(bed: &Bed) {
    bed.run(
        "UPDATE holdfast.progress SET recorded_at = recorded_at - interval '1 minute'
          WHERE recorded_at > clock_timestamp() - interval '30 seconds'",
        &[],
    )
    .await;
}

#[tokio::test]
async fn pruning_keeps_the_newest_row_and_unfolded_deltas() {
    let bed = Bed::new().await;
    let batch = bed.batch(30).await;
    for _ in 0..10 {
        let holds = bed.claim(batch, 2).await;
        bed.hand_in(&holds, &succeeded()).await;
    }
    age(&bed).await;
    let before = bed.counts(batch).await;
    let rows = "SELECT count(*) FROM holdfast.progress WHERE batch_id = $1";
    let deltas = "SELECT count(*) FROM holdfast.progress_deltas WHERE batch_id = $1";

    for _ in 0..20 {
        bed.store.tidy(3).await.unwrap();
        assert_eq!(bed.counts(batch).await, before);
    }

    assert_eq!(bed.value::<i64>(batch, deltas).await, 1, "the one after the last claim");
    assert!(bed.value::<i64>(batch, rows).await < 6, "most of one minute's rows");
    assert_invariants(&bed.sql, batch).await;
}

#[tokio::test]
async fn pruning_beside_claims_and_hand_ins_loses_no_count() {
    let bed = Bed::new().await;
    let batches: [BatchId; 2] = [bed.batch(600).await, bed.batch(600).await];
    let working = Cell::new(6);
    let work = join_all((0..6).map(|n| {
        let (bed, working) = (&bed, &working);
        async move {
            let batch = batches[n % 2];
            loop {
                match bed.try_claim(batch, 3).await {
                    Claim::Granted { holds, .. } => {
                        let (back, done) =
                            holds.split_at(usize::from(holds[0].history() == History::FRESH));
                        bed.hand_in(back, &again(History::FRESH.plus_admission(), Duration::ZERO))
                            .await;
                        bed.hand_in(done, &succeeded()).await;
                    }
                    Claim::Nothing(..) if bed.counts(batch).await.unfinished() == 0 => break,
                    Claim::Nothing(..) => tokio::task::yield_now().await,
                }
            }
            working.set(working.get() - 1);
        }
    }));
    let prune = async {
        while working.get() > 0 {
            age(&bed).await;
            bed.store.tidy(50).await.unwrap();
            for batch in batches {
                assert_invariants(&bed.sql, batch).await;
            }
        }
    };
    tokio::join!(work, prune);

    for batch in batches {
        assert_eq!(bed.counts(batch).await.succeeded, 600);
        assert_invariants(&bed.sql, batch).await;
    }
    assert_no_deadlock(&bed.sql).await;
}

async fn ranked(bed: &Bed, except: &[BatchId]) -> Vec<BatchId> {
    let ageing = Duration::from_mins(10);
    let ranking = bed.store.rank_batches(&["q".to_owned()], except, ageing, 32).await.unwrap();
    ranking.into_iter().map(|batch| batch.id).collect()
}

#[tokio::test]
async fn a_ranking_names_what_a_claim_would_get_something_from() {
    let bed = Bed::new().await;
    let spec = BatchSpec { items: 4, ..BatchSpec::default() };
    let [open, paused, early] =
        [bed.batch_of(spec).await, bed.batch_of(spec).await, bed.batch_of(spec).await];
    let capped = bed.batch_of(BatchSpec { max_running: Some(1), ..spec }).await;
    let full = bed.batch_of(BatchSpec { max_live: 1, ..spec }).await;
    let deferred = bed.batch_of(BatchSpec { max_live: 1, ..spec }).await;
    bed.control(paused, ControlVerb::Pause).await;
    let later = "UPDATE holdfast.batches SET not_before = now() + interval '1 h' WHERE id = $1";
    bed.run(later, &[&early.uuid()]).await;
    drop(bed.claim_one(capped).await);
    let hold = bed.claim_one(full).await;
    bed.hand_in_one(&hold, &again(History::FRESH, Duration::from_mins(10))).await;
    bed.defer(deferred, 0, 3, 3_600.0).await;
    let held = bed.claim_one(deferred).await;
    assert_eq!(ranked(&bed, &[]).await, [open]);

    let due = "UPDATE holdfast.waiting SET ready_at = clock_timestamp() WHERE batch_id = $1";
    bed.run(due, &[&full.uuid()]).await;
    bed.run(due, &[&deferred.uuid()]).await;
    let mut found = ranked(&bed, &[]).await;
    found.sort_unstable();
    assert_eq!(
        found,
        [open, full],
        "a due retry fits into a full window, a due fresh one does not"
    );
    assert_eq!(ranked(&bed, &[open]).await, [full]);

    bed.finish(&held).await;
    assert!(ranked(&bed, &[]).await.contains(&deferred));
    let other = bed.store.rank_batches(&["other".to_owned()], &[], TTL, 32).await.unwrap();
    assert!(other.is_empty());
}
