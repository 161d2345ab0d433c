//! Keeping, giving back and proving leases: `renew`, `give_back`, `is_current`.

use std::time::Duration;

use holdfast::model::ItemStatus::{Leased, Running};
use holdfast::model::{
    AttemptEnding, BatchId, Disposition, FencingToken, History, Hold, LeaseId, Settlement, WorkerId,
};
use holdfast::store::{ControlVerb, HandInAnswer, RenewAnswer, Renewal, Vouched};
use tokio_postgres::Client;

use crate::support::fixture::{Bed, TTL, again, failed, forged, positions, succeeded};
use crate::support::invariants::assert_invariants;

const EXPIRES_IN: &str = "SELECT extract(epoch FROM expires_at - clock_timestamp())::float8
                            FROM holdfast.leases WHERE batch_id = $1";

fn vouched(hold: &Hold) -> Vouched {
    let (batch, lease, token) = (hold.item().batch(), hold.lease(), hold.token());
    Vouched { batch, lease, token, started: Vec::new(), reports: None }
}

async fn renew(bed: &Bed, leases: &[Vouched]) -> Renewal {
    bed.store.renew(bed.worker, TTL, "running", 1, leases).await.unwrap()
}

async fn answer(bed: &Bed, lease: Vouched) -> (RenewAnswer, usize) {
    let renewal = renew(bed, &[lease]).await;
    (renewal.leases[0].answer, renewal.leases[0].held)
}

#[tokio::test]
async fn a_heartbeat_renews_each_lease_and_notes_what_has_started() {
    let bed = Bed::new().await;
    let [one, other] = [bed.batch(3).await, bed.batch(1).await];
    let holds = bed.claim(one, 3).await;
    let single = bed.claim_one(other).await;
    bed.expire(single.lease()).await;
    let started = vec![holds[2].item().position(), holds[0].item().position()];

    let renewal = renew(&bed, &[vouched(&single), Vouched { started, ..vouched(&holds[0]) }]).await;

    assert!(renewal.known);
    let answers: Vec<_> = [&single, &holds[0]]
        .map(|hold| renewal.leases.iter().find(|state| state.lease == hold.lease()).unwrap())
        .map(|state| (state.answer, state.held))
        .into();
    assert_eq!(answers, [(RenewAnswer::Renewed, 1), (RenewAnswer::Renewed, 3)]);
    assert!(bed.value::<f64>(other, EXPIRES_IN).await > 30.0);
    assert_eq!(bed.statuses(one).await, [Running, Leased, Running]);
    assert!(bed.reap(other).await.is_empty(), "it was renewed in time");
}

#[tokio::test]
async fn a_heartbeat_without_leases_still_tells_the_clock_and_beats() {
    let bed = Bed::new().await;
    bed.silence(bed.worker).await;

    let renewal = renew(&bed, &[]).await;

    assert!(renewal.known && renewal.leases.is_empty());
    let row = bed
        .sql
        .query_one(
            "SELECT clock_timestamp(), pg_postmaster_start_time(), state, executing,
                    heartbeat_at > clock_timestamp() - interval '1 min'
               FROM holdfast.workers",
            &[],
        )
        .await
        .unwrap();
    let now: time::OffsetDateTime = row.get(0);
    assert!((now - renewal.database_now).abs() < time::Duration::seconds(30));
    assert_eq!(renewal.server_started, row.get::<_, time::OffsetDateTime>(1));
    assert_eq!(renewal.timeline, 1);
    assert_eq!(
        (row.get::<_, &str>(2), row.get::<_, i32>(3), row.get::<_, bool>(4)),
        ("running", 1, true)
    );
}

#[tokio::test]
async fn a_worker_without_a_live_row_is_told_and_still_renews() {
    let bed = Bed::new().await;
    let batch = bed.batch(1).await;
    let hold = bed.claim_one(batch).await;
    bed.store.end_worker(bed.worker, "silent").await.unwrap();

    let renewal = renew(&bed, &[vouched(&hold)]).await;
    assert!(!renewal.known);
    assert_eq!(renewal.leases[0].answer, RenewAnswer::Renewed);

    bed.store.reopen_worker(bed.worker).await.unwrap();
    assert!(renew(&bed, &[]).await.known);
    let unknown = bed.store.renew(WorkerId::generate(), TTL, "running", 0, &[]).await.unwrap();
    assert!(!unknown.known);
}

#[tokio::test]
async fn a_lease_that_was_taken_back_is_gone_and_not_renewed() {
    let bed = Bed::new().await;
    let batch = bed.batch(1).await;
    let old = bed.claim_one(batch).await;
    bed.expire(old.lease()).await;
    bed.reap(batch).await;
    let new = bed.claim_one(batch).await;
    bed.expire(new.lease()).await;

    assert_eq!(answer(&bed, vouched(&old)).await, (RenewAnswer::Gone, 0));
    let forgery = forged(&new, new.lease(), old.token().get());
    assert_eq!(answer(&bed, vouched(&forgery)).await, (RenewAnswer::Gone, 0));
    assert!(bed.value::<f64>(batch, EXPIRES_IN).await < 0.0, "the holder's lease is untouched");

    assert_eq!(answer(&bed, vouched(&new)).await, (RenewAnswer::Renewed, 1));
}

#[tokio::test]
async fn a_lease_of_a_cancelled_batch_is_not_renewed() {
    let bed = Bed::new().await;
    let batch = bed.batch(1).await;
    let hold = bed.claim_one(batch).await;
    bed.expire(hold.lease()).await;
    bed.control(batch, ControlVerb::Cancel).await;

    assert_eq!(answer(&bed, vouched(&hold)).await.0, RenewAnswer::Cancelled);
    assert!(bed.value::<f64>(batch, EXPIRES_IN).await < 0.0);

    while bed.store.clear_cancelled(batch, 10).await.unwrap() {}
    assert_eq!(answer(&bed, vouched(&hold)).await.0, RenewAnswer::Cancelled);
}

#[tokio::test]
async fn a_heartbeat_passes_a_lease_that_a_hand_in_holds() {
    let bed = Bed::new().await;
    let batch = bed.batch(3).await;
    let held = bed.claim(batch, 2).await;
    let free = bed.claim_one(batch).await;
    let mut other = bed.db.client().await;
    let hand_in = other.transaction().await.unwrap();
    let lock = "SELECT FROM holdfast.leases WHERE lease_id = $1 FOR NO KEY UPDATE";
    hand_in.query(lock, &[&held[0].lease().uuid()]).await.unwrap();

    let renewal = renew(&bed, &[vouched(&held[0]), vouched(&free)]).await;

    let of = |hold: &Hold| {
        let state = renewal.leases.iter().find(|state| state.lease == hold.lease()).unwrap();
        (state.answer, state.held)
    };
    assert_eq!(of(&held[0]), (RenewAnswer::Busy, 2));
    assert_eq!(of(&free), (RenewAnswer::Renewed, 1));
    hand_in.rollback().await.unwrap();
    assert_eq!(answer(&bed, vouched(&held[0])).await, (RenewAnswer::Renewed, 2));
}

#[tokio::test]
async fn a_heartbeat_does_not_wait_for_the_batch() {
    let bed = Bed::new().await;
    let batch = bed.batch(1).await;
    let hold = bed.claim_one(batch).await;
    let mut other = bed.db.client().await;
    let control = other.transaction().await.unwrap();
    control.query_one("SELECT holdfast.lock_parent($1)", &[&batch.uuid()]).await.unwrap();

    assert_eq!(answer(&bed, vouched(&hold)).await, (RenewAnswer::Renewed, 1));
}

#[tokio::test]
async fn a_renewal_tells_how_much_of_the_lease_is_left() {
    let bed = Bed::new().await;
    let batch = bed.batch(3).await;
    let holds = bed.claim(batch, 3).await;
    bed.finish(&holds[1]).await;

    assert_eq!(answer(&bed, vouched(&holds[0])).await, (RenewAnswer::Renewed, 2));
    assert_invariants(&bed.sql, batch).await;
}

async fn give_back(bed: &Bed, batch: BatchId, lease: LeaseId) -> i32 {
    bed.store.give_back(batch, lease, 5).await.unwrap()
}

#[tokio::test]
async fn a_claim_without_an_answer_is_given_back_by_its_lease_alone() {
    let bed = Bed::new().await;
    let [batch, other] = [bed.batch(4).await, bed.batch(1).await];
    let request = bed.request(batch, 3);
    assert_eq!(give_back(&bed, batch, request.lease).await, 0, "the claim may yet commit");
    drop(bed.store.claim(&request).await.unwrap());

    assert_eq!(give_back(&bed, batch, LeaseId::generate()).await, 0);
    assert_eq!(give_back(&bed, other, request.lease).await, 0);
    assert_eq!(give_back(&bed, BatchId::generate(), request.lease).await, 0);
    assert_eq!(give_back(&bed, batch, request.lease).await, 3);
    assert_eq!(give_back(&bed, batch, request.lease).await, 0, "a repeat");

    assert_invariants(&bed.sql, batch).await;
    let holds = bed.claim(batch, 4).await;
    assert_eq!(positions(&holds), [0, 1, 2, 3]);
    let interruptions: Vec<u8> = holds.iter().map(|hold| hold.history().interruptions()).collect();
    assert_eq!(interruptions, [1, 1, 1, 0]);
}

#[tokio::test]
async fn lost_claims_are_free_five_times_and_charged_after() {
    let bed = Bed::new().await;
    let batch = bed.batch(1).await;
    let mut histories = Vec::new();
    for _ in 0..7 {
        let hold = bed.claim_one(batch).await;
        histories.push((hold.history().interruptions(), hold.history().attempts()));
        assert_eq!(give_back(&bed, batch, hold.lease()).await, 1);
    }
    assert_eq!(histories, [(0, 0), (1, 0), (2, 0), (3, 0), (4, 0), (5, 0), (6, 1)]);
    assert_invariants(&bed.sql, batch).await;
}

#[tokio::test]
async fn a_return_keeps_the_rest_of_each_history() {
    let bed = Bed::new().await;
    let batch = bed.batch(3).await;
    let first = bed.claim_one(batch).await;
    let history = History::FRESH.plus_attempt().plus_crash().plus_retry().plus_admission();
    let settled = Settlement {
        disposition: Disposition::Again {
            ending: AttemptEnding::NotAdmitted,
            charged: false,
            delay: Duration::ZERO,
            history,
        },
        ..failed()
    };
    bed.hand_in_one(&first, &settled).await;
    let mixed = bed.claim(batch, 3).await;
    bed.finish(&mixed[1]).await;

    assert_eq!(give_back(&bed, batch, mixed[0].lease()).await, 2);

    let holds = bed.claim(batch, 3).await;
    assert_eq!(positions(&holds), [0, 2]);
    assert_eq!(holds[0].history(), history.plus_interruption());
    assert_eq!(holds[1].history(), History::FRESH.plus_interruption());
    assert_invariants(&bed.sql, batch).await;
}

#[tokio::test]
async fn nothing_of_a_cancelled_batch_is_given_back() {
    let bed = Bed::new().await;
    let batch = bed.batch(2).await;
    let hold = bed.claim_one(batch).await;
    bed.control(batch, ControlVerb::Cancel).await;

    assert_eq!(give_back(&bed, batch, hold.lease()).await, 0);

    assert_eq!(bed.counts(batch).await.waiting, 0);
    assert_invariants(&bed.sql, batch).await;
}

async fn is_current(client: &Client, hold: &Hold) -> Result<bool, tokio_postgres::Error> {
    let ask = "SELECT holdfast.is_current($1, $2, $3, $4)";
    let (batch, position) = (hold.item().batch().uuid(), hold.item().position().get());
    let row = client
        .query_one(ask, &[&batch, &hold.lease().uuid(), &position, &hold.token().get()])
        .await?;
    Ok(row.get(0))
}

#[tokio::test]
async fn only_the_holder_is_current() {
    let bed = Bed::new().await;
    let batch = bed.batch(2).await;
    let old = bed.claim_one(batch).await;
    bed.expire(old.lease()).await;
    assert!(is_current(&bed.sql, &old).await.unwrap(), "expired, and not taken back");
    bed.reap(batch).await;
    let new = bed.claim_one(batch).await;
    let other = bed.claim_one(batch).await;

    assert!(is_current(&bed.sql, &new).await.unwrap());
    assert!(!is_current(&bed.sql, &old).await.unwrap());
    for forgery in [
        forged(&new, new.lease(), old.token().get()),
        forged(&new, old.lease(), new.token().get()),
        forged(&other, new.lease(), new.token().get()),
        Hold::new(new.item(), new.lease(), FencingToken::new(-1), History::FRESH),
    ] {
        assert!(!is_current(&bed.sql, &forgery).await.unwrap(), "{forgery:?}");
    }

    bed.finish(&new).await;
    assert!(!is_current(&bed.sql, &new).await.unwrap(), "it has ended");
    assert!(is_current(&bed.sql, &other).await.unwrap());
    bed.control(batch, ControlVerb::Cancel).await;
    assert!(!is_current(&bed.sql, &other).await.unwrap(), "its batch was cancelled");
}

#[tokio::test]
async fn who_is_current_stays_so_until_its_commit() {
    let bed = Bed::new().await;
    let batch = bed.batch(2).await;
    let holds = bed.claim(batch, 2).await;
    let mut client = bed.db.client().await;
    let work = client.transaction().await.unwrap();
    let current = "SELECT holdfast.is_current($1, $2, 0, $3)";
    let params: [&(dyn tokio_postgres::types::ToSql + Sync); 3] =
        [&batch.uuid(), &holds[0].lease().uuid(), &holds[0].token().get()];
    assert!(work.query_one(current, &params).await.unwrap().get::<_, bool>(0));
    bed.expire(holds[0].lease()).await;

    assert!(bed.reap(batch).await.is_empty(), "passed over");
    let impatient = bed.store_that_waits(Duration::from_millis(100));
    assert!(impatient.give_back(batch, holds[0].lease(), 5).await.is_err(), "given up");
    assert_eq!(answer(&bed, vouched(&holds[0])).await, (RenewAnswer::Renewed, 2));
    assert_eq!(bed.finish(&holds[1]).await, HandInAnswer::Applied, "nobody else gets that item");

    bed.expire(holds[0].lease()).await;
    let returned = again(History::FRESH, Duration::ZERO);
    let (answer, ()) = tokio::join!(bed.hand_in_one(&holds[0], &returned), async {
        bed.until_waiting_for_locks(1).await;
        work.commit().await.unwrap();
    });
    assert_eq!(answer, HandInAnswer::Applied);
    assert_invariants(&bed.sql, batch).await;
}

#[tokio::test]
async fn a_lease_is_taken_back_once_its_callers_have_committed() {
    let bed = Bed::new().await;
    let batch = bed.batch(1).await;
    let hold = bed.claim_one(batch).await;
    bed.sql.batch_execute("BEGIN").await.unwrap();
    assert!(is_current(&bed.sql, &hold).await.unwrap());
    bed.sql.batch_execute("COMMIT").await.unwrap();
    bed.expire(hold.lease()).await;

    assert_eq!(bed.reap(batch).await.len(), 1);
    assert!(!is_current(&bed.sql, &hold).await.unwrap());
}

#[tokio::test]
async fn nobody_is_current_by_an_old_snapshot() {
    let bed = Bed::new().await;
    let batch = bed.batch(1).await;
    let hold = bed.claim_one(batch).await;
    let client = bed.db.client().await;
    client.batch_execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1").await.unwrap();
    client.query("SELECT FROM holdfast.batches", &[]).await.unwrap();
    bed.control(batch, ControlVerb::Cancel).await;

    let refused = is_current(&client, &hold).await;

    assert!(refused.is_err(), "{refused:?}");
    assert_eq!(bed.hand_in_one(&hold, &succeeded()).await, HandInAnswer::Cancelled);
}

#[tokio::test]
async fn a_finish_that_empties_its_lease_waits_for_those_who_rely_on_it() {
    let bed = Bed::new().await;
    let batch = bed.batch(1).await;
    let hold = bed.claim_one(batch).await;
    let client = bed.db.client().await;
    client.batch_execute("BEGIN").await.unwrap();
    assert!(is_current(&client, &hold).await.unwrap());

    let (answer, ()) = tokio::join!(bed.finish(&hold), async {
        bed.until_waiting_for_locks(1).await;
        assert!(is_current(&client, &hold).await.unwrap(), "asked again, beside the finish");
        client.batch_execute("COMMIT").await.unwrap();
    });

    assert_eq!(answer, HandInAnswer::Applied);
    assert!(!is_current(&client, &hold).await.unwrap());
}
