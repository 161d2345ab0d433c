//! Who is charged for an expired lease: its worker, unless the database was away.

use std::time::Duration;

use holdfast::clock::SystemClock;
use holdfast::model::{BatchId, WorkerId};
use holdfast::store::ClaimRequest;
use time::OffsetDateTime;

use crate::support::fixture::{Bed, granted};

/// Leases so short that the server has run for longer.
const LEASE_S: f64 = 0.1;

async fn now(bed: &Bed) -> OffsetDateTime {
    bed.sql.query_one("SELECT clock_timestamp()", &[]).await.unwrap().get(0)
}

async fn was_away(bed: &Bed, batch: BatchId, disturbed_at: Option<OffsetDateTime>) -> bool {
    bed.store.before_reap(batch, disturbed_at, &SystemClock).await.unwrap().was_away
}

/// A worker that was at work from `started` to its last heartbeat, in leases before `now`, and holds
/// an item whose lease has expired by then. A last heartbeat of none is yet to come: the worker lives.
async fn worker(
    bed: &Bed,
    batch: BatchId,
    now: OffsetDateTime,
    (started, last): (f64, Option<f64>),
) {
    let id = WorkerId::generate();
    bed.register(id).await;
    let ago = |leases: f64| now - time::Duration::seconds_f64(leases * LEASE_S);
    let history = "UPDATE holdfast.workers SET lease_s = $2, started_at = $3, heartbeat_at = $4
                    WHERE id = $1";
    let heartbeat = ago(last.unwrap_or(-36_000.0));
    bed.run(history, &[&id.uuid(), &LEASE_S, &ago(started), &heartbeat]).await;
    let request = ClaimRequest { worker: id, ..bed.request(batch, 1) };
    let holds = granted(bed.store.claim(&request).await.unwrap());
    if last.is_some() {
        let expire = "UPDATE holdfast.leases SET expires_at = $2 WHERE lease_id = $1";
        bed.run(expire, &[&holds[0].lease().uuid(), &now]).await;
    }
}

async fn away_after(workers: &[(f64, Option<f64>)]) -> bool {
    let bed = Bed::new().await;
    // The one that every bed has is not of this fleet.
    bed.run("DELETE FROM holdfast.workers", &[]).await;
    let batch = bed.batch(100).await;
    let now = now(&bed).await;
    for of_fleet in workers {
        worker(&bed, batch, now, *of_fleet).await;
    }
    was_away(&bed, batch, None).await
}

const LIVES: Option<f64> = None;

#[tokio::test]
async fn workers_are_excused_when_more_than_half_and_three_at_least_fell_silent_together() {
    let silent = |last: f64| (1_000.0, Some(last));
    for (away, why, fleet) in [
        (false, "one of one", vec![silent(1.0)]),
        (false, "two of two", vec![silent(1.0), silent(1.1)]),
        (true, "three of three", vec![silent(1.0), silent(1.1), silent(1.3)]),
        (
            true,
            "three of five",
            vec![silent(1.0), silent(1.1), silent(1.3), (1_000.0, LIVES), (1_000.0, LIVES)],
        ),
        (
            false,
            "three of six",
            [vec![silent(1.0), silent(1.1), silent(1.3)], vec![(1_000.0, LIVES); 3]].concat(),
        ),
        (false, "three, one after the other", vec![silent(1.0), silent(2.0), silent(3.0)]),
        (
            false,
            "one that was started anew each time",
            vec![(1.5, Some(1.4)), (1.3, Some(1.2)), (1.1, Some(1.0))],
        ),
    ] {
        assert_eq!(away_after(&fleet).await, away, "{why}");
    }
}

#[tokio::test]
async fn workers_are_excused_when_the_database_changed_since_they_were_last_heard() {
    let bed = Bed::new().await;
    let batch = bed.batch(9).await;
    let now = now(&bed).await;
    worker(&bed, batch, now, (1_000.0, Some(1.0))).await;
    let away = async |disturbed_at| was_away(&bed, batch, disturbed_at).await;

    assert!(!away(None).await);
    assert!(!away(Some(now - Duration::from_hours(1))).await, "long before its renewal");
    assert!(away(Some(now)).await, "its clock, start or timeline changed");

    // Another timeline raised the epoch, whoever asks.
    let raise = "UPDATE holdfast.control SET epoch = extract(epoch FROM clock_timestamp()) + 1";
    bed.run(raise, &[]).await;
    assert!(away(None).await);
}

#[tokio::test]
async fn leases_within_their_time_are_no_evidence() {
    let bed = Bed::new().await;
    let batch = bed.batch(9).await;
    let now = now(&bed).await;
    worker(&bed, batch, now, (1_000.0, LIVES)).await;

    assert!(!was_away(&bed, batch, Some(now)).await);
}
