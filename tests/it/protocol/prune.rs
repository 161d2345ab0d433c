//! Removal of what is old.

use std::time::Duration;

use holdfast::model::{BatchId, Evidence};
use holdfast::store::{ControlVerb, HandInAnswer, Prunable};

use crate::support::fixture::{BatchSpec, Bed, failed, succeeded};
use crate::support::invariants::assert_invariants;

const NOW: Duration = Duration::ZERO;

fn everything() -> Prunable {
    Prunable {
        age: NOW,
        owner: None,
        queue: None,
        states: vec!["finished".into(), "cancelled".into()],
    }
}

/// Rows of a batch in all tables.
const ROWS: &str = "
    SELECT (SELECT count(*) FROM holdfast.batches WHERE id = $1)
         + (SELECT count(*) FROM holdfast.items WHERE batch_id = $1)
         + (SELECT count(*) FROM holdfast.outcomes WHERE batch_id = $1)
         + (SELECT count(*) FROM holdfast.attempts WHERE batch_id = $1)
         + (SELECT count(*) FROM holdfast.evidence WHERE batch_id = $1)
         + (SELECT count(*) FROM holdfast.staged_outcomes WHERE batch_id = $1)
         + (SELECT count(*) FROM holdfast.waiting WHERE batch_id = $1)
         + (SELECT count(*) FROM holdfast.leases WHERE batch_id = $1)
         + (SELECT count(*) FROM holdfast.progress WHERE batch_id = $1)
         + (SELECT count(*) FROM holdfast.progress_deltas WHERE batch_id = $1)
         + (SELECT count(*) FROM holdfast.removed_batches WHERE id = $1)";

async fn ended(bed: &Bed, items: i32) -> BatchId {
    let batch = bed.batch(items).await;
    let holds = bed.claim(batch, 200).await;
    bed.hand_in(&holds, &succeeded()).await;
    assert!(bed.store.end_batch(batch).await.unwrap());
    batch
}

async fn clear(bed: &Bed, batch: BatchId, limit: i32) -> u32 {
    let mut chunks = 1;
    while !bed.store.clear_removed(batch, limit).await.unwrap().done {
        chunks += 1;
    }
    chunks
}

#[tokio::test]
async fn a_removed_batch_is_gone_at_once_and_cleared_away_in_chunks() {
    let bed = Bed::new().await;
    let (batch, other) = (bed.batch(10).await, ended(&bed, 3).await);
    let holds = bed.claim(batch, 10).await;
    bed.stage(&holds[..2], &[Evidence::default()]).await;
    for hold in &holds[..2] {
        bed.conclude(hold, &crate::support::fixture::publish(holdfast::model::Finding::Holds))
            .await;
    }
    bed.hand_in(&holds[2..], &failed()).await;
    assert!(bed.store.end_batch(batch).await.unwrap());
    bed.retry(batch).await;
    let again = bed.claim(batch, 10).await;
    assert!(!bed.store.remove_batch(batch, NOW, "t").await.unwrap(), "it goes on");
    bed.hand_in(&again, &succeeded()).await;
    assert!(bed.store.end_batch(batch).await.unwrap());

    assert!(!bed.store.remove_batch(batch, Duration::from_hours(1), "t").await.unwrap(), "young");
    assert!(bed.store.remove_batch(batch, NOW, "t").await.unwrap());

    assert!(bed.store.batch(batch, None).await.unwrap().is_none());
    assert!(bed.value::<i64>(batch, ROWS).await > 20);
    let first = bed.store.clear_removed(batch, 4).await.unwrap();
    assert_eq!((first.positions, first.done), (4, false));
    assert_eq!(
        bed.store.removed_batches().await.unwrap()[0].items,
        6,
        "where the next one goes on"
    );
    assert!(clear(&bed, batch, 4).await >= 4);
    assert_eq!(bed.value::<i64>(batch, ROWS).await, 0);
    assert!(bed.store.clear_removed(batch, 4).await.unwrap().done);
    assert_eq!(bed.finish(&again[0]).await, HandInAnswer::Lost, "for whoever comes late");
    assert!(bed.value::<i64>(other, ROWS).await >= 9, "the other one is whole");
    assert_invariants(&bed.sql, other).await;
    assert!(!bed.store.remove_batch(batch, NOW, "t").await.unwrap());
}

#[tokio::test]
async fn only_what_has_ended_is_prunable_by_age_owner_and_end() {
    let bed = Bed::new().await;
    let finished = ended(&bed, 1).await;
    let spec = BatchSpec { items: 2, owner: "bob", ..BatchSpec::default() };
    let cancelled = bed.batch_of(spec).await;
    let _held = bed.claim_one(cancelled).await;
    bed.control(cancelled, ControlVerb::Cancel).await;
    let running = bed.batch(2).await;
    let found = async |what: &Prunable| {
        let found = bed.store.prunable_batches(what, None, 10).await.unwrap();
        found.iter().map(|old| old.batch).collect::<Vec<_>>()
    };

    assert_eq!(found(&everything()).await, [finished], "what it left is not cleared away yet");
    assert!(!bed.store.remove_batch(cancelled, NOW, "t").await.unwrap());
    while bed.store.clear_cancelled(cancelled, 100).await.unwrap() {}

    assert_eq!(found(&everything()).await, [finished, cancelled]);
    let of = |owner: &str| Prunable { owner: Some(owner.into()), ..everything() };
    assert_eq!(found(&of("bob")).await, [cancelled]);
    assert_eq!(
        found(&Prunable { states: vec!["finished".into()], ..everything() }).await,
        [finished]
    );
    assert_eq!(found(&Prunable { age: Duration::from_hours(1), ..everything() }).await, []);
    assert_eq!(found(&Prunable { queue: Some("r".into()), ..everything() }).await, []);
    let after = bed.store.prunable_batches(&everything(), Some(finished), 10).await.unwrap();
    assert_eq!(after[0].batch, cancelled);
    let plan = bed.store.prune_plan(&everything()).await.unwrap();
    assert_eq!((plan.batches, plan.items), (2, 3));
    assert!(!bed.store.remove_batch(running, NOW, "t").await.unwrap());
}

#[tokio::test]
async fn evidence_goes_with_the_age_of_its_batch_and_not_while_checks_need_it() {
    let bed = Bed::new().await;
    let batch = bed.batch(2).await;
    let holds = bed.claim(batch, 2).await;
    bed.stage(&holds, &[Evidence::default(), Evidence::default()]).await;
    assert_eq!(bed.store.prune_evidence(batch, NOW, 100).await.unwrap(), 0);
    for hold in &holds {
        bed.conclude(hold, &crate::support::fixture::publish(holdfast::model::Finding::Holds))
            .await;
    }
    assert!(bed.store.end_batch(batch).await.unwrap());

    assert_eq!(bed.store.prune_evidence(batch, Duration::from_hours(1), 100).await.unwrap(), 0);
    assert_eq!(bed.store.prune_evidence(batch, NOW, 3).await.unwrap(), 3);
    assert_eq!(bed.store.prune_evidence(batch, NOW, 3).await.unwrap(), 1);

    assert_eq!(bed.counts(batch).await.succeeded, 2);
    assert_invariants(&bed.sql, batch).await;
}

#[tokio::test]
async fn workers_go_once_they_have_ended_and_hold_nothing() {
    let bed = Bed::new().await;
    let batch = bed.batch(1).await;
    let hold = bed.claim_one(batch).await;
    assert_eq!(bed.store.prune_workers(NOW, 10).await.unwrap(), 0, "it lives");
    bed.store.end_worker(bed.worker, "forced").await.unwrap();
    assert_eq!(bed.store.prune_workers(NOW, 10).await.unwrap(), 0, "its lease has to lapse");
    bed.finish(&hold).await;
    assert_eq!(bed.store.prune_workers(Duration::from_hours(1), 10).await.unwrap(), 0);
    assert_eq!(bed.store.prune_workers(NOW, 10).await.unwrap(), 1);

    bed.store.note_audit("t", "x", &serde_json::json!({"n": 1})).await.unwrap();
    assert_eq!(bed.store.prune_audit(Duration::from_hours(1), 10).await.unwrap(), 0);
    assert_eq!(bed.store.prune_audit(NOW, 10).await.unwrap(), 1);
}

#[tokio::test]
async fn claims_go_on_while_a_large_batch_is_removed_and_while_another_prune_is_at_it() {
    let bed = Bed::new().await;
    let large = bed.batch_of(BatchSpec { items: 50_000, ..BatchSpec::default() }).await;
    bed.run(
        "INSERT INTO holdfast.outcomes (batch_id, position, status, token, attempt, worker_id,
                finished_at, stop_reason)
         SELECT $1, g, 'succeeded', 1, 1, $1, clock_timestamp(), 'completed'
           FROM generate_series(0, 49999) g",
        &[&large.uuid()],
    )
    .await;
    bed.run(
        "UPDATE holdfast.batches SET finished_at = clock_timestamp() - interval '2 h' WHERE id = $1",
        &[&large.uuid()],
    )
    .await;
    let work = bed.batch(400).await;
    // No claim waits for a lock of a prune: it gives up after less than a chunk takes.
    let hasty = bed.store_that_waits(Duration::from_millis(100));
    assert!(bed.store.remove_batch(large, Duration::from_hours(1), "t").await.unwrap());

    let clearing = async {
        let mut rows = 0;
        loop {
            let (one, other) = tokio::join!(
                bed.store.clear_removed(large, 2_000),
                bed.store.clear_removed(large, 2_000)
            );
            let (one, other) = (one.unwrap(), other.unwrap());
            rows += one.rows + other.rows;
            if one.done && other.done {
                return rows;
            }
        }
    };
    let claiming = async {
        let mut done = 0;
        while done < 400 {
            let claim = hasty.claim(&bed.request(work, 10)).await.unwrap();
            let holds = crate::support::fixture::granted(claim);
            assert!(
                bed.hand_in(&holds, &succeeded()).await.iter().all(|a| *a == HandInAnswer::Applied)
            );
            done += holds.len();
        }
    };
    let (rows, ()) = tokio::join!(clearing, claiming);

    assert!(rows >= 100_000, "{rows}");
    assert_eq!(bed.value::<i64>(large, ROWS).await, 0);
    assert_invariants(&bed.sql, work).await;
}

#[tokio::test]
async fn every_table_with_rows_of_a_batch_is_cleared_with_it() {
    let bed = Bed::new().await;
    // A batch that ended has none of these; the audit log has an age of its own.
    let without = ["leases", "waiting", "staged_outcomes", "audit_log"];
    let uncleared = "
        SELECT c.table_name::text FROM information_schema.columns c
         WHERE c.table_schema = 'holdfast' AND c.column_name = 'batch_id'
           AND NOT c.table_name = ANY ($1)
           AND pg_get_functiondef('holdfast.clear_removed(uuid, integer)'::regprocedure)
               NOT LIKE '%DELETE FROM holdfast.' || c.table_name || ' %'";
    let rows = bed.sql.query(uncleared, &[&without.as_slice()]).await.unwrap();
    let tables: Vec<&str> = rows.iter().map(|row| row.get(0)).collect();
    assert!(tables.is_empty(), "{tables:?}");
}
