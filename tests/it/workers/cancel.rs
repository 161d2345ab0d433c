//! Cancel while commands run.

use std::time::Duration;

use holdfast::store::{ControlVerb, Event};

use crate::support::fleet::{Fleet, LONG, SHORT_LEASE, Submission, now, until};
use crate::support::invariants::assert_invariants;

/// Notes TERM, and is gone; half of them stay, and have to be killed.
const TELLS: &str = "trap 'mark term; [ $((input % 2)) = 0 ] && exit 0' TERM
while :; do sleep 300 & wait $!; done";

/// Cancels a batch of running commands; how long it took until the last of them had its TERM.
async fn cancel_while_running(fleet: &Fleet, notify: bool) -> Duration {
    let worker = fleet.start();
    worker.ready().await;
    let batch = fleet.submit(Submission::new(8, TELLS)).await;
    fleet.noted(batch, "start", 8).await;

    let asked = now();
    fleet.control(batch, ControlVerb::Cancel).await;
    if notify {
        fleet.database.notify(&Event::Cancelled(batch)).await.unwrap();
    }
    fleet.noted(batch, "term", 8).await;
    let last = fleet.marks().into_iter().filter(|mark| mark.what == "term").map(|mark| mark.at);
    let took = last.max().unwrap().saturating_sub(asked);

    // The worker lives, its slots are free, and what the cancel left behind is cleared away.
    let next = fleet.submit(Submission::new(16, "sleep 0.2")).await;
    fleet.ended(next).await;
    fleet.assert_each_ran_once(next).await;
    let leases = "SELECT count(*) FROM holdfast.leases WHERE batch_id = $1";
    until("the leases are cleared away", LONG, async || {
        fleet.value::<i64>(batch, leases).await == 0
    })
    .await;
    let row = fleet.row(batch).await;
    assert_eq!((row.state.as_str(), row.counts.cancelled), ("cancelled", 8), "{row:?}");
    assert_eq!(fleet.count(batch, "end"), 0);
    assert_eq!(fleet.outcomes(batch).await, []);
    assert_eq!(fleet.attempts(batch).await, []);
    assert_invariants(&fleet.sql, batch).await;
    took
}

#[tokio::test]
async fn running_commands_are_told_at_once_where_notifications_work() {
    // With a lease this long no heartbeat is in time for it.
    let fleet = Fleet::new("[lease]\nttl = '60s'\nkill_grace = '500ms'\n").await;

    let took = cancel_while_running(&fleet, true).await;

    eprintln!("with notifications the last TERM came {took:?} after the cancel");
    let machine = Duration::from_secs(1); // it may be busy with other tests
    assert!(took < Duration::from_millis(250) + machine, "{took:?}");
}

#[tokio::test]
async fn running_commands_are_told_by_a_heartbeat_where_notifications_do_not_work() {
    let nowhere = "[database]\nlisten_url = 'postgres://postgres@127.0.0.1:1/nowhere'\n";
    let fleet = Fleet::new(&format!("{SHORT_LEASE}{nowhere}")).await;

    let took = cancel_while_running(&fleet, true).await;

    eprintln!("with heartbeats the last TERM came {took:?} after the cancel");
    let machine = Duration::from_secs(2); // it may be busy with other tests
    assert!(took < Duration::from_secs(2) / 3 + machine, "{took:?}");
}
