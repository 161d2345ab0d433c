//! Interleavings that broke earlier designs and that no other file looks at.

use std::cell::Cell;

use futures::future::join_all;
use holdfast::model::{BatchId, Finding, Hold};
use holdfast::store::{Claim, HandInAnswer, RenewAnswer, StageAnswer, Vouched, statements};
use tokio_postgres::types::Type;
use tokio_postgres::{Client, Transaction};

use crate::support::TestDb;
use crate::support::fixture::{BatchSpec, Bed, TTL, publish, succeeded};
use crate::support::invariants::{assert_invariants, assert_no_deadlock};

#[tokio::test]
async fn a_delta_draws_its_number_under_the_lock() {
    let bed = Bed::new().await;
    let batch = bed.batch(2).await;
    let holds = bed.claim(batch, 2).await;
    bed.finish(&holds[0]).await;
    let drawn = async || -> i64 {
        let last = "SELECT last_value FROM holdfast.delta_seq";
        bed.sql.query_one(last, &[]).await.unwrap().get(0)
    };
    let before = drawn().await;
    let mut other = bed.db.client().await;
    let control = other.transaction().await.unwrap();
    control.query_one("SELECT holdfast.lock_parent($1)", &[&batch.uuid()]).await.unwrap();

    // Drawn before, it could be folded over: whoever has the lock may count up to a later one.
    let (answer, ()) = tokio::join!(bed.finish(&holds[1]), async {
        bed.until_waiting_for_locks(1).await;
        assert_eq!(drawn().await, before, "drawn without the lock");
        control.commit().await.unwrap();
    });

    assert_eq!(answer, HandInAnswer::Applied);
    assert_eq!(drawn().await, before + 1);
    assert_invariants(&bed.sql, batch).await;
}

#[tokio::test]
async fn workers_that_finish_and_claim_at_once_do_not_wait_for_each_other() {
    let bed = Bed::new().await;
    let batch = bed.batch(400).await;
    let rounds = async |worker: usize| {
        let mut held = Vec::new();
        for _ in 0..40 {
            bed.hand_in(&held, &succeeded()).await;
            held = match bed.try_claim(batch, 1 + u32::try_from(worker % 3).unwrap()).await {
                Claim::Granted { holds, .. } => holds,
                Claim::Nothing(..) => Vec::new(),
            };
        }
        bed.hand_in(&held, &succeeded()).await;
    };

    join_all((0..6).map(rounds)).await;

    assert_invariants(&bed.sql, batch).await;
    assert_no_deadlock(&bed.sql).await;
    assert_eq!(bed.counts(batch).await.executing, 0);
}

#[tokio::test]
async fn a_heartbeat_of_many_leases_against_a_grouped_hand_in() {
    let bed = Bed::new().await;
    let spec = BatchSpec { items: 4_000, max_live: 4_000, ..BatchSpec::default() };
    let batch = bed.batch_of(spec).await;
    for _ in 0..25 {
        let mut leases: Vec<Vec<Hold>> = Vec::new();
        for _ in 0..12 {
            leases.push(bed.claim(batch, 3).await);
        }
        let beat: Vec<Vouched> = leases
            .iter()
            .map(|holds| Vouched {
                batch,
                lease: holds[0].lease(),
                token: holds[0].token(),
                started: Vec::new(),
                reports: None,
            })
            .collect();
        let mut groups: [Vec<Hold>; 3] = Default::default();
        for holds in leases {
            for (group, hold) in groups.iter_mut().zip(holds) {
                group.push(hold);
            }
        }
        let beats = async || {
            for _ in 0..6 {
                let renewal = bed.store.renew(bed.worker, TTL, "running", 0, &beat).await.unwrap();
                let answers = renewal.leases.iter().map(|state| state.answer);
                assert!(answers.into_iter().all(|answer| answer != RenewAnswer::Cancelled));
            }
        };
        let done = succeeded();
        let hand_ins = join_all(groups.iter().map(|group| bed.hand_in(group, &done)));
        let (answers, (), ()) = tokio::join!(hand_ins, beats(), beats());

        assert!(answers.iter().flatten().all(|answer| *answer == HandInAnswer::Applied));
    }
    assert_invariants(&bed.sql, batch).await;
    assert_no_deadlock(&bed.sql).await;
}

#[tokio::test]
async fn counts_never_run_backwards_beside_those_who_fold_and_prune_them() {
    let bed = Bed::new().await;
    let batch = bed.batch(400).await;
    let done = Cell::new(false);
    let work = async {
        while let Claim::Granted { holds, .. } = bed.try_claim(batch, 8).await {
            for hold in &holds {
                bed.finish(hold).await;
            }
            // What the next claim has folded is gone for whoever looks for it late.
            let last = bed.try_claim(batch, 1).await;
            bed.store.tidy(1_000).await.unwrap();
            if let Claim::Granted { holds, .. } = last {
                bed.hand_in(&holds, &succeeded()).await;
            }
        }
        done.set(true);
    };
    let look = async || {
        let (mut looks, mut succeeded) = (0, 0);
        while !done.get() {
            let counts = bed.counts(batch).await;
            assert!(counts.succeeded >= succeeded, "{counts:?} after {succeeded}");
            succeeded = counts.succeeded;
            looks += 1;
        }
        assert!(looks > 10, "{looks} looks");
    };

    tokio::join!(work, look(), look());

    assert_eq!(bed.counts(batch).await.succeeded, 400);
}

#[tokio::test]
async fn steps_under_locks_answer_ids_and_no_payload() {
    let db = TestDb::fresh().await;
    let client = db.client().await;
    let small = [
        Type::UUID,
        Type::INT4,
        Type::INT8,
        Type::BOOL,
        Type::FLOAT8,
        Type::TIMESTAMPTZ,
        Type::INT4_ARRAY,
        Type::INT8_ARRAY,
        Type::FLOAT8_ARRAY,
    ];
    let words = ["answer", "disposition", "control_batch"];
    for (name, sql) in statements::ALL {
        let locks = sql.lines().nth(1).unwrap();
        if !locks.contains("parent") {
            continue;
        }
        for column in client.prepare(sql).await.unwrap().columns() {
            let fits = small.contains(column.type_()) || words.contains(&column.name());
            assert!(fits, "{name} answers {} as {}", column.name(), column.type_());
        }
    }
}

/// Holds up whoever writes a row of this table for the first item, after it has locked its lease: by a
/// row of the same key that is rolled back.
async fn hold_up<'a>(other: &'a mut Client, table: &str, batch: BatchId) -> Transaction<'a> {
    let (columns, values) = match table {
        "staged_outcomes" => (
            "staged_lease_id, staged_token, attempt, worker_id, ended_at, stop_reason",
            "gen_random_uuid(), 1, 1, gen_random_uuid(), now(), ''",
        ),
        _ => (
            "status, token, attempt, worker_id, finished_at, stop_reason",
            "'failed', 1, 1, gen_random_uuid(), now(), ''",
        ),
    };
    let transaction = other.transaction().await.unwrap();
    let insert = format!(
        "INSERT INTO holdfast.{table} (batch_id, position, {columns}) VALUES ($1, 0, {values})"
    );
    transaction.execute(&insert, &[&batch.uuid()]).await.unwrap();
    transaction
}

#[tokio::test]
async fn a_finish_behind_its_own_workers_delayed_stage_leaves_it_under_check() {
    let bed = Bed::new().await;
    let batch = bed.batch(2).await;
    let holds = bed.claim(batch, 2).await;
    let mut other = bed.db.client().await;
    let delay = hold_up(&mut other, "staged_outcomes", batch).await;
    let finish = async {
        bed.until_waiting_for_locks(1).await;
        bed.hand_in(&holds, &succeeded()).await
    };
    let release = async {
        bed.until_waiting_for_locks(2).await;
        delay.rollback().await.unwrap();
    };

    let (staged, finished, ()) = tokio::join!(bed.stage_one(&holds[0], None), finish, release);

    assert_eq!(staged, StageAnswer::Staged);
    assert_eq!(finished, [HandInAnswer::Lost, HandInAnswer::Applied], "its sibling ends");
    let counts = bed.counts(batch).await;
    assert_eq!((counts.checking, counts.executing, counts.succeeded), (1, 0, 1));
    assert_invariants(&bed.sql, batch).await;
    assert_eq!(bed.conclude(&holds[0], &publish(Finding::Holds)).await, HandInAnswer::Applied);
    assert_invariants(&bed.sql, batch).await;
}

#[tokio::test]
async fn a_conclusion_behind_its_own_workers_delayed_stage_publishes_it() {
    let bed = Bed::new().await;
    let batch = bed.batch(1).await;
    let hold = bed.claim_one(batch).await;
    let mut other = bed.db.client().await;
    let delay = hold_up(&mut other, "staged_outcomes", batch).await;
    let conclude = async {
        bed.until_waiting_for_locks(1).await;
        bed.conclude(&hold, &publish(Finding::Holds)).await
    };
    let release = async {
        bed.until_waiting_for_locks(2).await;
        delay.rollback().await.unwrap();
    };

    let (staged, concluded, ()) = tokio::join!(bed.stage_one(&hold, None), conclude, release);

    assert_eq!((staged, concluded), (StageAnswer::Staged, HandInAnswer::Applied));
    assert_eq!(bed.counts(batch).await.succeeded, 1);
    assert_invariants(&bed.sql, batch).await;
}

#[tokio::test]
async fn a_repeated_stage_behind_what_ends_its_item_stores_nothing() {
    // A finish of an item whose first stage never arrived, and the conclusion of one that did.
    for was_staged in [false, true] {
        let bed = Bed::new().await;
        let batch = bed.batch(2).await;
        let holds = bed.claim(batch, 2).await;
        if was_staged {
            assert_eq!(bed.stage_one(&holds[0], None).await, StageAnswer::Staged);
        }
        let mut other = bed.db.client().await;
        let delay = hold_up(&mut other, "outcomes", batch).await;
        let end = async {
            if was_staged {
                bed.conclude(&holds[0], &publish(Finding::Holds)).await
            } else {
                bed.finish(&holds[0]).await
            }
        };
        let repeat = async {
            bed.until_waiting_for_locks(1).await;
            bed.stage_one(&holds[0], None).await
        };
        let release = async {
            bed.until_waiting_for_locks(2).await;
            delay.rollback().await.unwrap();
        };

        let (ended, repeated, ()) = tokio::join!(end, repeat, release);

        assert_eq!(ended, HandInAnswer::Applied);
        let expected = if was_staged { StageAnswer::Moved } else { StageAnswer::Lost };
        assert_eq!(repeated, expected);
        let counts = bed.counts(batch).await;
        assert_eq!((counts.checking, counts.executing, counts.succeeded), (0, 1, 1));
        assert_invariants(&bed.sql, batch).await;
    }
}
