//! Hand-ins by the holder: outcomes, next attempts, groups, repeats.

use std::time::Duration;

use holdfast::model::{
    AttemptEnding, Disposition, History, Hold, ItemStatus, PublishedResult, Settlement,
};
use holdfast::store::{ClaimAnswer, ControlVerb, FlightError, HandIn, HandInAnswer};

use crate::support::fixture::{Bed, TTL, again, failed, positions, succeeded};
use crate::support::invariants::assert_invariants;
use HandInAnswer::{Applied, Cancelled, Lost};

const MINUTE: Duration = Duration::from_mins(1);

#[tokio::test]
async fn a_finish_publishes_the_outcome_under_its_lease_and_frees_the_item() {
    let bed = Bed::new().await;
    let batch = bed.batch(2).await;
    let hold = bed.claim_one(batch).await;
    let settled = Settlement {
        result: PublishedResult {
            json: Some("{\"a\": 1.0}".into()),
            truncated: true,
            size_bytes: 9,
        },
        ..succeeded()
    };

    assert_eq!(bed.hand_in_one(&hold, &settled).await, Applied);

    let row = bed
        .sql
        .query_one("SELECT *, result::text AS text FROM holdfast.outcomes", &[])
        .await
        .unwrap();
    assert_eq!(row.get::<_, &str>("status"), "succeeded");
    assert_eq!(row.get::<_, i64>("token"), hold.token().get());
    assert_eq!(row.get::<_, uuid::Uuid>("lease_id"), hold.lease().uuid());
    assert_eq!(row.get::<_, uuid::Uuid>("worker_id"), bed.worker.uuid());
    assert_eq!(row.get::<_, i32>("attempt"), 1);
    assert_eq!(row.get::<_, &str>("text"), "{\"a\": 1.0}", "as it was written");
    assert_eq!(
        (row.get::<_, bool>("result_truncated"), row.get::<_, i64>("result_size")),
        (true, 9)
    );
    assert_eq!(row.get::<_, &str>("stop_reason"), "completed");
    assert_eq!(bed.statuses(batch).await, [ItemStatus::Succeeded, ItemStatus::Queued]);
    assert_eq!(bed.counts(batch).await.executing, 0);
    assert_invariants(&bed.sql, batch).await;
}

#[tokio::test]
async fn an_item_given_another_attempt_waits_with_its_history() {
    let bed = Bed::new().await;
    let batch = bed.batch(1).await;
    let hold = bed.claim_one(batch).await;

    assert_eq!(bed.hand_in_one(&hold, &again(hold.history(), MINUTE)).await, Applied);

    let item = &bed.store.items(batch, None, hold.item().position(), 1).await.unwrap()[0];
    assert_eq!((item.status, item.attempt), (ItemStatus::Queued, Some(2)));
    assert_eq!(item.error.as_deref(), Some("it broke"));
    let ready_in: f64 = bed
        .value(
            batch,
            "SELECT extract(epoch FROM ready_at - clock_timestamp())::float8
               FROM holdfast.waiting WHERE batch_id = $1",
        )
        .await;
    assert!(ready_in <= 60.0 && ready_in > 30.0, "{ready_in}");
    let attempt = bed.sql.query_one("SELECT * FROM holdfast.attempts", &[]).await.unwrap();
    assert_eq!(attempt.get::<_, uuid::Uuid>("lease_id"), hold.lease().uuid());
    assert_eq!((attempt.get::<_, i32>("attempt"), attempt.get::<_, &str>("ending")), (1, "error"));
    assert!(attempt.get::<_, bool>("charged") && attempt.get::<_, bool>("by_holder"));
    assert_eq!(attempt.get::<_, Option<i32>>("exit_status"), Some(1));
    assert_eq!(bed.refused(batch).await, ClaimAnswer::Empty);
    assert_invariants(&bed.sql, batch).await;
}

#[tokio::test]
async fn every_ending_and_every_outcome_can_be_stored() {
    let bed = Bed::new().await;
    let batch = bed.batch(8).await;
    for (ending, hold) in AttemptEnding::ALL.into_iter().zip(bed.claim(batch, 8).await) {
        let settled = Settlement {
            disposition: Disposition::Again {
                ending,
                charged: false,
                delay: Duration::ZERO,
                history: hold.history(),
            },
            started_at: None,
            signal: Some(9),
            ..failed()
        };
        assert_eq!(bed.hand_in_one(&hold, &settled).await, Applied, "{ending:?}");
    }
    for hold in bed.claim(batch, 8).await {
        assert_eq!(bed.hand_in_one(&hold, &failed()).await, Applied);
    }
    assert_eq!(bed.counts(batch).await.failed, 8);
    assert_invariants(&bed.sql, batch).await;
}

#[tokio::test]
async fn what_a_lease_keeps_keeps_its_own_histories() {
    let bed = Bed::new().await;
    let batch = bed.batch(4).await;
    // Histories of 1, 2 and 3 interruptions, and one fresh item.
    let three = bed.claim(batch, 3).await;
    let mut interrupted = History::FRESH;
    for hold in &three {
        interrupted = interrupted.plus_interruption();
        let settled = Settlement {
            disposition: Disposition::Again {
                ending: AttemptEnding::Interrupted,
                charged: false,
                delay: Duration::ZERO,
                history: interrupted,
            },
            ..failed()
        };
        bed.hand_in_one(hold, &settled).await;
    }
    let holds = bed.claim(batch, 4).await;
    assert_eq!(positions(&holds), [0, 1, 2, 3]);

    bed.finish(&holds[1]).await;
    bed.finish(&holds[3]).await;

    let kept =
        bed.sql.query_one("SELECT positions, histories FROM holdfast.leases", &[]).await.unwrap();
    assert_eq!(kept.get::<_, Vec<i32>>(0), [0, 2]);
    let histories: Vec<u8> = kept
        .get::<_, Vec<i64>>(1)
        .into_iter()
        .map(|packed| History::from_packed(packed).interruptions())
        .collect();
    assert_eq!(histories, [1, 3]);
    assert_invariants(&bed.sql, batch).await;
}

#[tokio::test]
async fn one_group_may_publish_and_give_back_together() {
    let bed = Bed::new().await;
    let batch = bed.batch(4).await;
    let holds = bed.claim(batch, 4).await;
    let ends = [succeeded(), failed(), again(History::FRESH, MINUTE)];
    let items: Vec<HandIn<'_>> =
        holds.iter().zip(&ends).map(|(hold, settlement)| HandIn { hold, settlement }).collect();

    let answers = bed.store.hand_in(batch, bed.worker, TTL, &items).await.unwrap();

    assert_eq!(answers, [Applied; 3]);
    let counts = bed.counts(batch).await;
    assert_eq!((counts.succeeded, counts.failed, counts.waiting, counts.executing), (1, 1, 1, 1));
    assert_invariants(&bed.sql, batch).await;
}

#[tokio::test]
async fn a_hand_in_over_several_leases_empties_one_and_shrinks_the_other() {
    let bed = Bed::new().await;
    let batch = bed.batch(5).await;
    let mut holds = bed.claim(batch, 2).await;
    let mut second = bed.claim(batch, 3).await;
    let kept = second.pop().unwrap();
    holds.append(&mut second);

    assert_eq!(bed.hand_in(&holds, &succeeded()).await, [Applied; 4]);

    assert_invariants(&bed.sql, batch).await;
    assert_eq!(bed.finish(&kept).await, Applied);
    assert_eq!(bed.counts(batch).await.succeeded, 5);
}

#[tokio::test]
async fn a_hand_in_renews_what_its_lease_keeps_and_never_shortens_it() {
    let bed = Bed::new().await;
    let batch = bed.batch(3).await;
    let holds = bed.claim(batch, 3).await;
    let left = "SELECT extract(epoch FROM expires_at - clock_timestamp())::float8
                  FROM holdfast.leases WHERE batch_id = $1";
    bed.expire(holds[0].lease()).await;

    bed.finish(&holds[0]).await;
    let renewed: f64 = bed.value(batch, left).await;
    assert!(renewed > 30.0, "{renewed}");

    let items = [HandIn { hold: &holds[1], settlement: &succeeded() }];
    bed.store.hand_in(batch, bed.worker, Duration::from_secs(1), &items).await.unwrap();
    let kept: f64 = bed.value(batch, left).await;
    assert!(kept > 30.0, "{kept}");
}

#[tokio::test]
async fn a_repeated_finish_finds_itself_applied_and_counts_nothing() {
    let bed = Bed::new().await;
    let batch = bed.batch(2).await;
    let holds = bed.claim(batch, 2).await;
    bed.hand_in(&holds[..1], &succeeded()).await;
    let deltas = "SELECT count(*) FROM holdfast.progress_deltas WHERE batch_id = $1";
    let before: i64 = bed.value(batch, deltas).await;

    assert_eq!(bed.hand_in(&holds[..1], &succeeded()).await, [Applied]);
    assert_eq!(bed.value::<i64>(batch, deltas).await, before);

    assert_eq!(bed.hand_in(&holds, &succeeded()).await, [Applied; 2], "half a repeat");
    assert_eq!(bed.counts(batch).await.succeeded, 2);
    assert_invariants(&bed.sql, batch).await;
}

#[tokio::test]
async fn a_repeated_return_finds_itself_applied_even_when_the_item_moved_on() {
    let bed = Bed::new().await;
    let batch = bed.batch(1).await;
    let first = bed.claim_one(batch).await;
    let returned = again(first.history(), Duration::ZERO);
    bed.hand_in_one(&first, &returned).await;

    assert_eq!(bed.hand_in_one(&first, &returned).await, Applied, "while it waits");
    let second = bed.claim_one(batch).await;
    assert_eq!(bed.hand_in_one(&first, &returned).await, Applied, "while it is held");
    assert_eq!(bed.finish(&second).await, Applied);
    assert_eq!(bed.hand_in_one(&first, &returned).await, Applied, "when it has ended");

    let attempts: i64 =
        bed.value(batch, "SELECT count(*) FROM holdfast.attempts WHERE batch_id = $1").await;
    assert_eq!((attempts, bed.counts(batch).await.succeeded), (1, 1));
    assert_invariants(&bed.sql, batch).await;
}

#[tokio::test]
async fn a_finish_repeated_after_a_cancel_finds_itself_applied() {
    let bed = Bed::new().await;
    let batch = bed.batch(3).await;
    let holds = bed.claim(batch, 3).await;
    bed.finish(&holds[0]).await;
    bed.hand_in_one(&holds[1], &again(History::FRESH, Duration::ZERO)).await;
    bed.control(batch, ControlVerb::Cancel).await;

    let answers = bed.hand_in(&holds, &succeeded()).await;

    assert_eq!(answers, [Applied, Applied, Cancelled]);
    assert_eq!(bed.counts(batch).await.succeeded, 1);
    assert_invariants(&bed.sql, batch).await;
}

#[tokio::test]
async fn a_hand_in_that_names_a_position_twice_is_refused_whole() {
    let bed = Bed::new().await;
    let batch = bed.batch(2).await;
    let holds = bed.claim(batch, 2).await;
    let ends = [succeeded(), again(History::FRESH, Duration::ZERO), failed()];
    for (one, other) in [(0, 0), (0, 1), (1, 1), (1, 2)] {
        let items = [
            HandIn { hold: &holds[0], settlement: &ends[one] },
            HandIn { hold: &holds[0], settlement: &ends[other] },
        ];
        let refused = bed.store.hand_in(batch, bed.worker, TTL, &items).await;
        assert!(
            matches!(refused, Err(ref error @ FlightError::RolledBack(_)) if error.is_lasting()),
            "{one} and {other}: {refused:?}"
        );
        assert_invariants(&bed.sql, batch).await;
    }
    assert_eq!(bed.hand_in(&holds, &succeeded()).await, [Applied; 2]);
}

#[tokio::test]
async fn what_cannot_be_stored_is_refused_with_its_whole_group() {
    let bed = Bed::new().await;
    let batch = bed.batch(2).await;
    let holds = bed.claim(batch, 2).await;
    let result = PublishedResult { json: Some("{no json".into()), truncated: false, size_bytes: 8 };
    for bad in [
        Settlement { result, ..succeeded() },
        Settlement { error: Some("a\0b".into()), ..failed() },
        again(History::FRESH, Duration::MAX),
    ] {
        let items = [
            HandIn { hold: &holds[0], settlement: &succeeded() },
            HandIn { hold: &holds[1], settlement: &bad },
        ];

        let refused = bed.store.hand_in(batch, bed.worker, TTL, &items).await;

        assert!(matches!(refused, Err(ref error) if error.is_lasting()), "{refused:?}");
        assert_eq!(bed.counts(batch).await.executing, 2);
        assert_invariants(&bed.sql, batch).await;
    }
    assert_eq!(bed.hand_in(&holds, &succeeded()).await, [Applied; 2]);
}

#[tokio::test]
async fn a_hand_in_without_a_kind_takes_no_item_out_of_its_lease() {
    let bed = Bed::new().await;
    let batch = bed.batch(1).await;
    let hold = bed.claim_one(batch).await;
    let unsaid = "
        SELECT * FROM holdfast.hand_in($1, $2, 60, ARRAY[$3::uuid], ARRAY[$4::bigint], ARRAY[0],
            ARRAY[NULL::text], ARRAY[1], ARRAY[now()], ARRAY[now()], ARRAY[NULL::text],
            ARRAY[false], ARRAY[0::bigint], ARRAY[NULL::text], ARRAY['x'], ARRAY[NULL::integer],
            ARRAY[NULL::integer], ARRAY[NULL::text], ARRAY[NULL::boolean],
            ARRAY[NULL::double precision], ARRAY[NULL::bigint])";

    let refused = bed
        .sql
        .query(
            unsaid,
            &[&batch.uuid(), &bed.worker.uuid(), &hold.lease().uuid(), &hold.token().get()],
        )
        .await;

    assert!(refused.is_err());
    assert_invariants(&bed.sql, batch).await;
    assert_eq!(bed.finish(&hold).await, Applied);
}

#[tokio::test]
async fn nothing_handed_in_changes_nothing() {
    let bed = Bed::new().await;
    let batch = bed.batch(1).await;
    let hold = bed.claim_one(batch).await;

    let none = bed.store.hand_in(batch, bed.worker, TTL, &[]).await.unwrap();

    assert!(none.is_empty());
    assert_eq!(bed.finish(&hold).await, Applied);
}

#[tokio::test]
async fn a_hold_of_another_batch_is_lost() {
    let bed = Bed::new().await;
    let [batch, other] = [bed.batch(1).await, bed.batch(1).await];
    let hold = bed.claim_one(batch).await;
    let items = [HandIn { hold: &hold, settlement: &succeeded() }];
    let nowhere = holdfast::model::BatchId::generate();

    for wrong in [other, nowhere] {
        let answers = bed.store.hand_in(wrong, bed.worker, TTL, &items).await.unwrap();
        assert_eq!(answers, [Lost]);
    }

    assert_invariants(&bed.sql, other).await;
    assert_eq!(bed.finish(&hold).await, Applied);
}

#[tokio::test]
async fn the_last_finish_leaves_the_batch_to_be_ended_once() {
    let bed = Bed::new().await;
    let batch = bed.batch(1).await;
    let hold: Hold = bed.claim_one(batch).await;
    assert!(!bed.store.is_exhausted(batch).await.unwrap());
    assert!(!bed.store.end_batch(batch).await.unwrap());

    bed.finish(&hold).await;

    assert!(bed.store.is_exhausted(batch).await.unwrap());
    assert!(bed.store.end_batch(batch).await.unwrap());
    assert!(!bed.store.end_batch(batch).await.unwrap());
    assert!(!bed.store.is_exhausted(batch).await.unwrap());
    assert!(bed.is_ended(batch).await);
    assert_invariants(&bed.sql, batch).await;
}
