//! Results stored before their check: stage, conclude, recheck, and what takes them back.

use std::time::Duration;

use holdfast::model::{
    Conclusion, Evidence, Family, Finding, History, Hold, ItemStatus, Leaf, LeaseId,
    MAX_CHECK_LOSSES, Position, Settlement, Verdict, WorkerId,
};
use holdfast::store::{
    ClaimAnswer, Concluding, ControlVerb, HandInAnswer, ReapDisposition, Recheck, RecheckRequest,
    StageAnswer, Staging,
};
use uuid::Uuid;

use crate::support::fixture::{
    BatchSpec, Bed, TTL, everything, failed, forged, positions, publish, succeeded, verdict,
};
use crate::support::invariants::assert_invariants;
use HandInAnswer::{Applied, Cancelled, Lost};
use StageAnswer::{Moved, Staged};

fn record(command: &str) -> Evidence {
    Evidence { command: command.to_owned(), ..Evidence::default() }
}

fn refused(recheck: &Recheck) -> ClaimAnswer {
    match recheck {
        Recheck::Granted(holds) => panic!("granted {holds:?}"),
        Recheck::Nothing(answer) => *answer,
    }
}

/// A lease expires while its item is under check; whoever rechecks it gets it under a new one.
async fn lose_check(bed: &Bed, hold: &Hold) {
    bed.expire(hold.lease()).await;
    let taken = bed.reap(hold.item().batch()).await;
    assert_eq!(taken[0].disposition, ReapDisposition::Rechecked);
}

#[tokio::test]
async fn a_staged_item_stays_in_its_lease_and_leaves_the_running_count() {
    let bed = Bed::new().await;
    let batch = bed.batch_of(BatchSpec { items: 4, max_running: Some(2), ..Default::default() });
    let batch = batch.await;
    let holds = bed.claim(batch, 2).await;
    assert_eq!(bed.refused(batch).await, ClaimAnswer::Capped);
    bed.expire(holds[0].lease()).await;

    let answers = bed.stage(&holds[..1], &[record("make"), record("make check")]).await;

    assert_eq!(answers, [Staged]);
    let counts = bed.counts(batch).await;
    assert_eq!((counts.executing, counts.checking, counts.waiting), (1, 1, 0));
    assert_eq!(bed.statuses(batch).await[..2], [ItemStatus::Checking, ItemStatus::Leased]);
    let left: f64 = bed
        .value(
            batch,
            "SELECT extract(epoch FROM expires_at - clock_timestamp())::float8
               FROM holdfast.leases WHERE batch_id = $1",
        )
        .await;
    assert!(left > 30.0, "a stage renews its lease: {left}");
    assert!(bed.store.export_page(&everything(batch, 0)).await.unwrap().rows.is_empty());
    assert_invariants(&bed.sql, batch).await;
    assert_eq!(positions(&bed.claim(batch, 5).await), [2], "the slot of the cap is free again");
    assert_invariants(&bed.sql, batch).await;
}

#[tokio::test]
async fn a_checked_item_is_published_with_its_stored_result_and_its_verdict() {
    let bed = Bed::new().await;
    let batch = bed.batch(5).await;
    let holds = bed.claim(batch, 5).await;
    bed.stage(&holds, &[record("make check")]).await;
    let ends = [
        publish(Finding::Holds),
        publish(Finding::DoesNotHold),
        publish(Finding::Unchecked),
        publish(Finding::Holds),
        Conclusion::Publish(None),
    ];
    let items: Vec<Concluding<'_>> =
        holds.iter().zip(&ends).map(|(hold, conclusion)| Concluding { hold, conclusion }).collect();

    assert_eq!(bed.store.conclude(batch, TTL, &items).await.unwrap(), [Applied; 5]);

    let rows = "SELECT status, result::text, attempt, lease_id, staged_lease_id, worker_id,
                       verdict_class, verdict::text FROM holdfast.outcomes ORDER BY position";
    let rows = bed.sql.query(rows, &[]).await.unwrap();
    let classes: Vec<Option<&str>> = rows.iter().map(|row| row.get("verdict_class")).collect();
    assert_eq!(classes, [Some("holds"), Some("fails"), Some("unverified"), Some("holds"), None]);
    for row in &rows {
        assert_eq!((row.get::<_, &str>(0), row.get::<_, &str>(1)), ("succeeded", "\"done\""));
        assert_eq!(row.get::<_, i32>("attempt"), 1);
        assert_eq!(row.get::<_, Uuid>("lease_id"), holds[0].lease().uuid());
        assert_eq!(row.get::<_, Uuid>("staged_lease_id"), holds[0].lease().uuid());
        assert_eq!(row.get::<_, Uuid>("worker_id"), bed.worker.uuid());
    }
    let stored: serde_json::Value = serde_json::from_str(rows[0].get("verdict")).unwrap();
    assert_eq!(Verdict::from_json(&stored), Ok(verdict(Finding::Holds)));
    let evidence: i64 =
        bed.value(batch, "SELECT count(*) FROM holdfast.evidence WHERE batch_id = $1").await;
    assert_eq!(evidence, 5, "kept with the items");
    let counts = bed.counts(batch).await;
    assert_eq!((counts.succeeded, counts.checking, counts.executing), (5, 0, 0));
    assert!(bed.store.end_batch(batch).await.unwrap());
    assert_invariants(&bed.sql, batch).await;
}

#[tokio::test]
async fn a_repeated_stage_finds_itself_applied_wherever_the_item_went() {
    let bed = Bed::new().await;
    let batch = bed.batch(4).await;
    let holds = bed.claim(batch, 4).await;
    let evidence = [record("make")];
    assert_eq!(bed.stage(&holds, &evidence).await, [Staged; 4]);

    assert_eq!(bed.stage(&holds, &evidence).await, [Staged; 4]);
    bed.conclude(&holds[0], &publish(Finding::Holds)).await;
    bed.conclude(&holds[1], &Conclusion::Recheck(History::FRESH)).await;
    bed.conclude(&holds[2], &Conclusion::Recheck(History::FRESH)).await;
    for hold in bed.recheck(batch, 2).await {
        if hold.item() == holds[2].item() {
            bed.conclude(&hold, &Conclusion::Publish(None)).await;
        }
    }

    assert_eq!(bed.stage(&holds, &evidence).await, [Moved, Moved, Moved, Staged]);
    assert_eq!(bed.counts(batch).await.checking, 2, "a repeat counts nothing");
    let evidence: i64 =
        bed.value(batch, "SELECT count(*) FROM holdfast.evidence WHERE batch_id = $1").await;
    assert_eq!(evidence, 4);
    lose_check(&bed, &holds[3]).await;
    assert_eq!(bed.stage(&holds[3..], &[]).await, [Moved]);
    assert_invariants(&bed.sql, batch).await;
}

#[tokio::test]
async fn only_the_holder_stages() {
    let bed = Bed::new().await;
    let batch = bed.batch(3).await;
    let holds = bed.claim(batch, 2).await;
    let token = holds[0].token().get();

    for forgery in [
        forged(&holds[0], LeaseId::generate(), token),
        forged(&holds[0], holds[0].lease(), token + 1),
    ] {
        assert_eq!(bed.stage_one(&forgery, None).await, StageAnswer::Lost);
    }
    bed.finish(&holds[1]).await;
    assert_eq!(bed.stage(&holds, &[]).await, [Staged, StageAnswer::Lost], "the rest commits");

    let straggler = bed.claim_one(batch).await;
    bed.expire(straggler.lease()).await;
    bed.reap(batch).await;
    let heir = bed.claim_one(batch).await;
    assert_eq!(bed.stage_one(&straggler, None).await, StageAnswer::Lost);
    assert_eq!(bed.stage_one(&heir, None).await, Staged);
    assert_eq!(bed.stage_one(&straggler, None).await, StageAnswer::Lost);
    assert_eq!(bed.counts(batch).await.checking, 2);
    assert_invariants(&bed.sql, batch).await;
}

#[tokio::test]
async fn a_position_named_twice_stages_nothing() {
    let bed = Bed::new().await;
    let batch = bed.batch(1).await;
    let hold = bed.claim_one(batch).await;
    let settlement = succeeded();
    let staging =
        || Staging { hold: &hold, settlement: &settlement, evidence: &[], workspace: None };

    let twice = bed.store.stage(batch, bed.worker, TTL, &[staging(), staging()]).await;

    assert!(twice.unwrap_err().is_lasting());
    assert_eq!(bed.counts(batch).await.executing, 1);
    assert_invariants(&bed.sql, batch).await;
}

#[tokio::test]
async fn only_the_holder_concludes() {
    let bed = Bed::new().await;
    let batch = bed.batch(2).await;
    let holds = bed.claim(batch, 2).await;
    bed.stage(&holds[..1], &[]).await;
    let (straggler, unstaged) = (&holds[0], &holds[1]);
    let end = publish(Finding::Holds);
    assert_eq!(bed.conclude(unstaged, &end).await, Lost, "nothing of it is stored");
    let forgery = forged(straggler, straggler.lease(), straggler.token().get() + 1);
    assert_eq!(bed.conclude(&forgery, &end).await, Lost);

    bed.expire(straggler.lease()).await;
    bed.reap(batch).await;
    assert_eq!(bed.conclude(straggler, &end).await, Lost, "it waits for another check");
    let heir = bed.recheck(batch, 1).await.remove(0);
    assert_eq!(bed.conclude(straggler, &publish(Finding::DoesNotHold)).await, Lost);
    assert_eq!(bed.conclude(&heir, &end).await, Applied);
    assert_eq!(bed.conclude(&heir, &end).await, Applied, "a repeat finds itself applied");
    assert_eq!(bed.conclude(straggler, &end).await, Lost);

    let class: String =
        bed.value(batch, "SELECT verdict_class FROM holdfast.outcomes WHERE batch_id = $1").await;
    assert_eq!(class, "holds");
    assert_eq!(bed.counts(batch).await.succeeded, 1);
    assert_invariants(&bed.sql, batch).await;
}

#[tokio::test]
async fn an_expired_lease_nobody_took_back_may_still_stage_and_conclude() {
    let bed = Bed::new().await;
    let batch = bed.batch(1).await;
    let hold = bed.claim_one(batch).await;

    bed.expire(hold.lease()).await;
    assert_eq!(bed.stage_one(&hold, None).await, Staged);
    bed.expire(hold.lease()).await;
    assert_eq!(bed.conclude(&hold, &publish(Finding::Holds)).await, Applied);
}

#[tokio::test]
async fn a_lost_check_is_repeated_outside_every_cap_and_never_executed_again() {
    let bed = Bed::new().await;
    let spec = BatchSpec { items: 3, max_running: Some(1), max_attempts: 1, ..Default::default() };
    let batch = bed.batch_of(spec).await;
    let hold = bed.claim_one(batch).await;
    bed.stage_one(&hold, None).await;
    let _running = bed.claim_one(batch).await;
    bed.silence(bed.worker).await;

    bed.expire(hold.lease()).await;
    let taken = bed.reap(batch).await;

    assert_eq!(taken[0].disposition, ReapDisposition::Rechecked);
    assert_eq!(bed.statuses(batch).await[0], ItemStatus::Checking);
    let counts = bed.counts(batch).await;
    assert_eq!((counts.executing, counts.checking, counts.waiting), (1, 1, 0));
    assert_invariants(&bed.sql, batch).await;
    bed.control(batch, ControlVerb::Pause).await;
    let recheck = bed.recheck(batch, 5).await.remove(0);
    assert_eq!(recheck.item(), hold.item());
    assert!(recheck.token() > hold.token() && recheck.lease() != hold.lease());
    let history = recheck.history();
    assert_eq!((history.attempts(), history.crashes(), history.check_losses()), (0, 0, 1));
    assert_eq!(bed.statuses(batch).await[0], ItemStatus::Checking);
    assert_eq!(refused(&bed.try_recheck(batch, 5).await), ClaimAnswer::Empty);
    assert_invariants(&bed.sql, batch).await;

    assert_eq!(bed.conclude(&recheck, &publish(Finding::Holds)).await, Applied);
    let item = &bed.store.items(batch, None, Position::new(0), 1).await.unwrap()[0];
    assert_eq!((item.status, item.attempt), (ItemStatus::Succeeded, Some(1)));
    let attempts: i64 =
        bed.value(batch, "SELECT count(*) FROM holdfast.attempts WHERE batch_id = $1").await;
    assert_eq!(attempts, 0);
    assert_invariants(&bed.sql, batch).await;
}

#[tokio::test]
async fn a_claim_takes_no_recheck_and_a_recheck_no_retry() {
    let bed = Bed::new().await;
    let batch = bed.batch(2).await;
    let holds = bed.claim(batch, 2).await;
    bed.stage(&holds[..1], &[]).await;
    bed.expire(holds[0].lease()).await;
    let mut taken: Vec<_> = bed.reap(batch).await.iter().map(|r| r.disposition).collect();
    taken.sort_by_key(|disposition| *disposition == ReapDisposition::Rechecked);
    assert_eq!(taken, [ReapDisposition::Requeued, ReapDisposition::Rechecked]);
    assert_invariants(&bed.sql, batch).await;

    assert_eq!(positions(&bed.claim(batch, 5).await), [1]);
    assert_eq!(positions(&bed.recheck(batch, 5).await), [0]);
    assert_invariants(&bed.sql, batch).await;
}

#[tokio::test]
async fn a_check_lost_three_times_ends_with_the_stored_result_and_no_verdict() {
    let bed = Bed::new().await;
    let batch = bed.batch(1).await;
    let first = bed.claim_one(batch).await;
    bed.stage_one(&first, None).await;
    let mut hold = first;
    for loss in 1..=MAX_CHECK_LOSSES {
        bed.expire(hold.lease()).await;
        let taken = bed.reap(batch).await;
        assert_invariants(&bed.sql, batch).await;
        if loss < MAX_CHECK_LOSSES {
            assert_eq!(taken[0].disposition, ReapDisposition::Rechecked, "{loss}");
            hold = bed.recheck(batch, 1).await.remove(0);
            assert_eq!(hold.history().check_losses(), loss);
        } else {
            assert_eq!(taken[0].disposition, ReapDisposition::Published);
        }
    }

    assert!(bed.is_ended(batch).await, "the sweep that ended the item ended the batch");
    let row = bed
        .sql
        .query_one(
            "SELECT status, result::text, lease_id, verdict_class, attempt FROM holdfast.outcomes",
            &[],
        )
        .await
        .unwrap();
    assert_eq!((row.get::<_, &str>(0), row.get::<_, &str>(1)), ("succeeded", "\"done\""));
    assert_eq!((row.get::<_, Option<Uuid>>(2), row.get::<_, Option<&str>>(3)), (None, None));
    assert_eq!(row.get::<_, i32>(4), 1);
    assert_eq!(bed.conclude(&hold, &publish(Finding::Holds)).await, Lost);
}

#[tokio::test]
async fn a_recheck_is_left_for_a_while_to_workers_that_see_its_volume() {
    let bed = Bed::new().await;
    let batch = bed.batch(3).await;
    let holds = bed.claim(batch, 3).await;
    let volume = Uuid::new_v4();
    let here = format!("{volume}/{}", Uuid::new_v4());
    let elsewhere = format!("{}/{}", Uuid::new_v4(), Uuid::new_v4());
    for (hold, workspace) in holds.iter().zip([Some(&elsewhere), Some(&here), None]) {
        bed.stage_one(hold, workspace.map(String::as_str)).await;
    }
    bed.expire(holds[0].lease()).await;
    bed.reap(batch).await;
    let queues = ["q".to_owned()];
    let long = Duration::from_secs(30);
    let ask = async |want: u32, foreign: Duration| {
        let request =
            RecheckRequest { volume: Some(volume), foreign, ..bed.recheck_request(batch, want) };
        bed.store.recheck(&request).await.unwrap()
    };
    let Recheck::Granted(mine) = ask(9, long).await else { panic!("granted nothing") };
    assert_eq!(positions(&mine), [1, 2]);
    let staged = bed.store.staged_items(batch, &[Position::new(1)]).await.unwrap();
    assert_eq!(staged[0].workspace, Some(here));
    let found = bed.store.recheck_batches(&queues, Some(volume), long).await.unwrap();
    assert_eq!(found, []);
    assert_eq!(refused(&ask(9, long).await), ClaimAnswer::Empty);
    assert_invariants(&bed.sql, batch).await;

    let found = bed.store.recheck_batches(&queues, None, Duration::ZERO).await.unwrap();
    assert_eq!(found.iter().map(|found| found.id).collect::<Vec<_>>(), [batch]);
    let Recheck::Granted(late) = ask(9, Duration::ZERO).await else { panic!("granted nothing") };
    assert_eq!(positions(&late), [0], "it was not lost when others passed it over");
    assert_invariants(&bed.sql, batch).await;
}

#[tokio::test]
async fn a_full_backlog_holds_claims_back_and_nothing_else() {
    let bed = Bed::new().await;
    let spec = BatchSpec { items: 6, max_checking: 2, ..BatchSpec::default() };
    let batch = bed.batch_of(spec).await;
    let holds = bed.claim(batch, 3).await;

    assert_eq!(bed.stage(&holds, &[]).await, [Staged; 3], "what runs may exceed it");
    assert_eq!(bed.refused(batch).await, ClaimAnswer::Backlog);
    let ranked = bed.store.rank_batches(&["q".into()], &[], TTL, 9).await.unwrap();
    assert_eq!(ranked, []);

    bed.conclude(&holds[0], &Conclusion::Publish(None)).await;
    assert_eq!(bed.refused(batch).await, ClaimAnswer::Backlog);
    bed.conclude(&holds[1], &Conclusion::Publish(None)).await;
    assert_eq!(bed.claim(batch, 9).await.len(), 3);
    assert_invariants(&bed.sql, batch).await;
}

#[tokio::test]
async fn an_item_under_check_counts_in_the_live_window() {
    let bed = Bed::new().await;
    let batch = bed.batch_of(BatchSpec { items: 6, max_live: 2, ..BatchSpec::default() }).await;
    let holds = bed.claim(batch, 2).await;
    bed.stage(&holds, &[]).await;

    assert_eq!(bed.refused(batch).await, ClaimAnswer::Window);
    bed.conclude(&holds[0], &Conclusion::Recheck(History::FRESH)).await;
    assert_eq!(bed.refused(batch).await, ClaimAnswer::Window, "also while it waits for another");
    bed.conclude(&holds[1], &Conclusion::Publish(None)).await;
    assert_eq!(bed.claim(batch, 9).await.len(), 1);
}

#[tokio::test]
async fn a_check_given_back_keeps_what_its_holder_says_of_it() {
    let bed = Bed::new().await;
    let batch = bed.batch(2).await;
    let holds = bed.claim(batch, 2).await;
    bed.stage(&holds, &[]).await;
    let lost = Conclusion::Recheck(holds[1].history().plus_check_loss());

    assert_eq!(bed.conclude(&holds[0], &Conclusion::Recheck(History::FRESH)).await, Applied);
    assert_eq!(bed.conclude(&holds[0], &Conclusion::Recheck(History::FRESH)).await, Applied);
    assert_eq!(bed.conclude(&holds[1], &lost).await, Applied);

    assert_invariants(&bed.sql, batch).await;
    let again = bed.recheck(batch, 2).await;
    let losses: Vec<u8> = again.iter().map(|hold| hold.history().check_losses()).collect();
    assert_eq!((positions(&again), losses), (vec![0, 1], vec![0, 1]));
}

#[tokio::test]
async fn an_unanswered_recheck_is_given_back_by_its_lease_and_counts_nothing() {
    let bed = Bed::new().await;
    let batch = bed.batch(2).await;
    let holds = bed.claim(batch, 2).await;
    bed.stage(&holds, &[]).await;
    bed.expire(holds[0].lease()).await;
    bed.reap(batch).await;
    let lost = bed.recheck(batch, 2).await;

    assert_eq!(bed.store.give_back(batch, lost[0].lease(), 0).await.unwrap(), 2);
    assert_eq!(bed.store.give_back(batch, lost[0].lease(), 0).await.unwrap(), 0);

    assert_eq!(bed.conclude(&lost[0], &Conclusion::Publish(None)).await, Lost);
    assert_invariants(&bed.sql, batch).await;
    let again = bed.recheck(batch, 2).await;
    assert!(again.iter().all(|hold| hold.history() == lost[0].history()), "{again:?}");
}

#[tokio::test]
async fn a_cancel_ends_checks_and_the_sweeps_clear_what_is_left() {
    let bed = Bed::new().await;
    let batch = bed.batch(6).await;
    let holds = bed.claim(batch, 4).await;
    bed.stage(&holds[..3], &[]).await;
    bed.conclude(&holds[0], &publish(Finding::Holds)).await;
    bed.conclude(&holds[1], &Conclusion::Recheck(History::FRESH)).await;

    bed.control(batch, ControlVerb::Cancel).await;

    assert_eq!(bed.stage_one(&holds[3], None).await, StageAnswer::Cancelled);
    assert_eq!(bed.conclude(&holds[2], &publish(Finding::Holds)).await, Cancelled);
    assert_eq!(bed.conclude(&holds[0], &publish(Finding::Holds)).await, Applied, "it was before");
    assert_eq!(refused(&bed.try_recheck(batch, 1).await), ClaimAnswer::Closed);
    let queues = ["q".to_owned()];
    let found = bed.store.recheck_batches(&queues, None, Duration::ZERO).await.unwrap();
    assert_eq!(found, []);
    let counts = bed.counts(batch).await;
    assert_eq!((counts.succeeded, counts.cancelled, counts.checking), (1, 5, 0));
    assert_eq!(bed.statuses(batch).await[1..4], [ItemStatus::Cancelled; 3]);
    assert_invariants(&bed.sql, batch).await;
    while bed.store.clear_cancelled(batch, 1).await.unwrap() {}
    for table in ["staged_outcomes", "waiting", "leases"] {
        let left = format!("SELECT count(*) FROM holdfast.{table} WHERE batch_id = $1");
        assert_eq!(bed.value::<i64>(batch, &left).await, 0, "{table}");
    }
    assert_invariants(&bed.sql, batch).await;
}

#[tokio::test]
async fn only_what_the_staged_attempt_recorded_is_evidence() {
    let bed = Bed::new().await;
    let batch = bed.batch(1).await;
    let update =
        "UPDATE holdfast.items SET acceptance_criteria = $2::text::json WHERE batch_id = $1";
    let criteria = r#"["file:a\u0000b exists", " tests_passed:make ", 3]"#;
    bed.run(update, &[&batch.uuid(), &criteria]).await;
    let earlier = "INSERT INTO holdfast.evidence (batch_id, position, lease_id, seq, record)
                   VALUES ($1, 0, gen_random_uuid(), 0, '{\"command\": \"of another attempt\"}')";
    bed.run(earlier, &[&batch.uuid()]).await;
    let hold = bed.claim_one(batch).await;
    let evidence =
        [Evidence { output_tail: "a\0b".into(), ..record("make") }, record("make check")];
    bed.stage(std::slice::from_ref(&hold), &evidence).await;
    lose_check(&bed, &hold).await;
    let again = bed.recheck(batch, 1).await;

    let staged = bed.store.staged_items(batch, &[again[0].item().position()]).await.unwrap();

    assert_eq!(staged[0].evidence.as_deref(), Some(&evidence[..]));
    let effective = ["file:a\0b exists".to_owned(), "tests_passed:make".to_owned()];
    assert_eq!(staged[0].criteria.as_deref(), Some(&effective[..]));
    let leaves = vec![Leaf::new(&effective[0], Family::FileExists, Finding::Unchecked, "NUL")];
    let end = Conclusion::Publish(Verdict::new(leaves));
    assert_eq!(bed.conclude(&again[0], &end).await, Applied, "also with a NUL in its criterion");
    assert_invariants(&bed.sql, batch).await;
}

#[tokio::test]
async fn a_failure_needs_no_check_and_a_retry_of_it_leaves_checked_items_alone() {
    let bed = Bed::new().await;
    let batch = bed.batch(2).await;
    let holds = bed.claim(batch, 2).await;
    bed.stage(&holds[..1], &[]).await;
    bed.conclude(&holds[0], &publish(Finding::DoesNotHold)).await;
    bed.hand_in_one(&holds[1], &Settlement { error: Some("no".into()), ..failed() }).await;

    bed.retry(batch).await;

    assert_eq!(bed.statuses(batch).await, [ItemStatus::Succeeded, ItemStatus::Queued]);
    let again = bed.claim_one(batch).await;
    assert_eq!(again.item(), holds[1].item());
    assert_eq!(bed.stage_one(&again, None).await, Staged);
    assert_eq!(bed.conclude(&again, &publish(Finding::Holds)).await, Applied);
    assert_invariants(&bed.sql, batch).await;
}

#[tokio::test]
async fn a_lease_of_another_worker_is_rechecked_by_any() {
    let bed = Bed::new().await;
    let batch = bed.batch(1).await;
    let hold = bed.claim_one(batch).await;
    bed.stage_one(&hold, None).await;
    lose_check(&bed, &hold).await;
    let heir = WorkerId::generate();
    let request = RecheckRequest { worker: heir, ..bed.recheck_request(batch, 1) };

    let Recheck::Granted(holds) = bed.store.recheck(&request).await.unwrap() else {
        panic!("granted nothing")
    };
    bed.conclude(&holds[0], &publish(Finding::Holds)).await;

    let row = bed.sql.query_one("SELECT * FROM holdfast.outcomes", &[]).await.unwrap();
    assert_eq!(row.get::<_, Uuid>("worker_id"), bed.worker.uuid(), "who executed it");
    assert_eq!(row.get::<_, Uuid>("lease_id"), request.lease.uuid(), "what published it");
    assert_eq!(row.get::<_, Uuid>("staged_lease_id"), hold.lease().uuid());
}
