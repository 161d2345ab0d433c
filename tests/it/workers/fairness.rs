//! Caps, and who is served when there is too much to do.

use std::collections::HashSet;
use std::time::Duration;

use holdfast::model::BatchId;

use crate::support::fleet::{Fleet, LONG, Mark, Submission, most_at_once, now, until};
use crate::support::invariants::{assert_invariants, assert_no_deadlock};

#[tokio::test]
async fn a_cap_holds_over_all_workers_and_each_item_runs_once() {
    let fleet = Fleet::new("").await;
    let workers: Vec<_> = (0..8).map(|_| fleet.start_with(&["--slots", "4"])).collect();
    for worker in &workers {
        worker.ready().await;
    }
    let capped = Submission { max_running: Some(3), ..Submission::new(150, "sleep 0.05") };

    let batch = fleet.submit(capped).await;
    fleet.ended(batch).await;

    assert_eq!(most_at_once(&fleet.marks()), 3);
    fleet.assert_each_ran_once(batch).await;
    let outcomes = fleet.outcomes(batch).await;
    let served: HashSet<_> = outcomes.iter().map(|outcome| outcome.worker).collect();
    assert!(served.len() > 1, "one worker alone shows nothing");
    assert_invariants(&fleet.sql, batch).await;
    assert_no_deadlock(&fleet.sql).await;
}

/// Starts of other batches between the submit of one and the last end of its items.
fn overtaken_by(marks: &[Mark], batch: BatchId, submitted: Duration) -> usize {
    let last = marks.iter().rposition(|mark| mark.batch == batch).unwrap();
    let others = marks[..last].iter().filter(|mark| mark.batch != batch && mark.at >= submitted);
    others.filter(|mark| mark.what == "start").count()
}

#[tokio::test]
async fn a_small_batch_is_not_held_up_by_a_huge_one() {
    let fleet = Fleet::new("").await;
    let _workers = [fleet.start_with(&["--slots", "4"]), fleet.start_with(&["--slots", "4"])];
    let huge = fleet.submit(Submission::new(2_000, "sleep 0.2")).await;
    fleet.noted(huge, "end", 8).await;

    let submitted = now();
    let small = fleet.submit(Submission::new(10, "sleep 0.2")).await;
    let took =
        until("the small batch ends", LONG, async || fleet.row(small).await.is_finished()).await;

    let row = fleet.row(huge).await;
    assert!(row.counts.fresh > 1_000, "the huge one still runs: {row:?}");
    // One for one, beside what had begun before and what a worker takes in one go.
    let overtaken = overtaken_by(&fleet.marks(), small, submitted);
    eprintln!("10 items took {took:?}; {overtaken} of the huge batch began meanwhile");
    assert!(overtaken <= 10 + 2 * 8, "{overtaken} items of the huge batch began before");
    fleet.assert_each_ran_once(small).await;
}

#[tokio::test]
async fn an_owner_with_many_batches_does_not_hold_up_another() {
    let fleet = Fleet::new("").await;
    let _workers = [fleet.start_with(&["--slots", "4"]), fleet.start_with(&["--slots", "4"])];
    let mut many = Vec::new();
    for _ in 0..4 {
        let of_one = Submission { owner: "many", ..Submission::new(500, "sleep 0.2") };
        many.push(fleet.submit(of_one).await);
    }
    for batch in &many {
        fleet.noted(*batch, "end", 2).await;
    }

    let submitted = now();
    let one = Submission { owner: "one", ..Submission::new(20, "sleep 0.2") };
    let one = fleet.submit(one).await;
    fleet.ended(one).await;

    // By batches it would be four of the others for each of these, by owners it is one for one.
    let overtaken = overtaken_by(&fleet.marks(), one, submitted);
    eprintln!("{overtaken} items of the other owner began while 20 ran");
    assert!(overtaken <= 20 + 2 * 8, "{overtaken} items of the other owner began before");
    fleet.assert_each_ran_once(one).await;
}
