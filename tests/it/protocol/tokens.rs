//! Tokens rise, whatever happens to the server (F2), and every step runs under read committed (L2).

use std::collections::HashSet;

use futures::future::join_all;
use holdfast::model::FencingToken;
use holdfast::store::{Claim, ClaimAnswer, ControlAnswer, ControlVerb, HandInAnswer, RetryAnswer};
use tokio_postgres::error::SqlState;

use crate::support::fixture::{Bed, TTL, failed, forged, granted, succeeded};
use crate::support::invariants::assert_invariants;

/// Lets the next claim see another timeline or system, and ends the wait that begins then (F7).
async fn move_to(bed: &Bed, moved: &str) {
    bed.run(&format!("UPDATE holdfast.control SET {moved}"), &[]).await;
    let batch = bed.batch(1).await;
    assert_eq!(bed.refused(batch).await, ClaimAnswer::Settling);
    bed.run("UPDATE holdfast.control SET quiet_until = '-infinity'", &[]).await;
}

async fn next_token(bed: &Bed) -> FencingToken {
    let batch = bed.batch(1).await;
    bed.claim_one(batch).await.token()
}

async fn epoch(bed: &Bed) -> i64 {
    bed.sql.query_one("SELECT epoch FROM holdfast.control", &[]).await.unwrap().get(0)
}

#[tokio::test]
async fn another_timeline_or_system_raises_the_epoch_once() {
    let bed = Bed::new().await;
    let mut before = next_token(&bed).await;
    for moved in ["timeline = timeline + 1", "system_identifier = 1"] {
        let old_epoch = epoch(&bed).await;
        move_to(&bed, moved).await;

        let after = next_token(&bed).await;

        assert!(after > before, "{moved}");
        let raised = epoch(&bed).await;
        assert!(raised > old_epoch, "{moved}");
        assert!(next_token(&bed).await > after);
        assert_eq!(epoch(&bed).await, raised, "not again");
        before = after;
    }
    let known = "SELECT c.timeline = 1 AND c.system_identifier = s.system_identifier
                   FROM holdfast.control c, pg_control_system() s";
    assert!(bed.sql.query_one(known, &[]).await.unwrap().get::<_, bool>(0));
}

#[tokio::test]
async fn a_sequence_that_lost_its_wal_does_not_repeat_a_token() {
    let bed = Bed::new().await;
    let mut tokens = Vec::new();
    for _ in 0..5 {
        tokens.push(next_token(&bed).await);
    }
    for _ in 0..3 {
        bed.sql.query_one("SELECT setval('holdfast.token_seq', 1, false)", &[]).await.unwrap();
        move_to(&bed, "timeline = timeline + 1").await;
        tokens.push(next_token(&bed).await);
        tokens.push(next_token(&bed).await);
    }
    assert!(tokens.is_sorted_by(|a, b| a < b), "{tokens:?}");
}

#[tokio::test]
async fn an_epoch_is_raised_before_its_31_bits_are_used_up() {
    let bed = Bed::new().await;
    let mut tokens = vec![next_token(&bed).await];
    for _ in 0..2 {
        let old_epoch = epoch(&bed).await;
        let far = "SELECT setval('holdfast.token_seq', last_value + 1999999990)
                     FROM holdfast.token_seq";
        bed.sql.query_one(far, &[]).await.unwrap();
        for _ in 0..20 {
            tokens.push(next_token(&bed).await);
        }
        assert!(epoch(&bed).await > old_epoch);
    }
    assert!(tokens.is_sorted_by(|a, b| a < b), "{tokens:?}");
}

#[tokio::test]
async fn claimers_that_meet_a_new_timeline_together_raise_the_epoch_once() {
    let bed = Bed::new().await;
    let before = next_token(&bed).await;
    let mut batches = Vec::new();
    for _ in 0..12 {
        batches.push(bed.batch(1).await);
    }
    bed.run("UPDATE holdfast.control SET timeline = 7", &[]).await;

    let claims = async || join_all(batches.iter().map(|batch| bed.try_claim(*batch, 1))).await;
    for claim in claims().await {
        assert!(matches!(claim, Claim::Nothing(ClaimAnswer::Settling, Some(_))), "{claim:?}");
    }
    bed.run("UPDATE holdfast.control SET quiet_until = '-infinity'", &[]).await;
    let claims = claims().await;

    let tokens: HashSet<i64> =
        claims.into_iter().map(|claim| granted(claim)[0].token().get()).collect();
    assert_eq!(tokens.len(), 12);
    let raised = epoch(&bed).await;
    assert!(tokens.iter().all(|token| *token > before.get() && token >> 31 == raised));
}

#[tokio::test]
async fn a_token_of_an_older_epoch_is_no_fence_for_a_newer_lease() {
    let bed = Bed::new().await;
    let batch = bed.batch(1).await;
    let old = bed.claim_one(batch).await;
    bed.expire(old.lease()).await;
    bed.reap(batch).await;
    move_to(&bed, "timeline = 7").await;
    let new = bed.claim_one(batch).await;

    assert_eq!(bed.finish(&old).await, HandInAnswer::Lost);
    let low = forged(&new, new.lease(), new.token().get() & 0x7fff_ffff);
    assert_eq!(bed.finish(&low).await, HandInAnswer::Lost);
    assert_eq!(bed.finish(&new).await, HandInAnswer::Applied);
}

#[tokio::test]
async fn claims_wait_for_the_longest_lease_at_work_until_lost_claims_are_over() {
    let bed = Bed::new().await;
    let batch = bed.batch(2).await;
    let before = bed.claim_one(batch).await;
    // At work when this state was written, by the newest heartbeat in it, however long ago that is;
    // one that was silent by then, and one that had ended.
    let worker = "INSERT INTO holdfast.workers (id, name, host, pid, version, queues, slots, state,
                      lease_s, heartbeat_at, ended_at)
                  SELECT gen_random_uuid(), 'w', 'h', 1, 'v', '{}', 1, 'running', $1,
                         now() - make_interval(secs => $2), $3::timestamptz";
    bed.run("UPDATE holdfast.workers SET heartbeat_at = now() - interval '1 day'", &[]).await;
    let ended = Some(time::OffsetDateTime::now_utc());
    for (lease, silent, ended) in
        [(100.0, 86_400.0 + 90.0, None), (200.0, 86_400.0 + 201.0, None), (300.0, 0.0, ended)]
    {
        bed.run(worker, &[&lease, &silent, &ended]).await;
    }
    bed.run("UPDATE holdfast.control SET timeline = timeline + 1", &[]).await;

    let Claim::Nothing(ClaimAnswer::Settling, Some(wait)) = bed.try_claim(batch, 1).await else {
        panic!("claims wait")
    };
    assert!((90.0..=100.0).contains(&wait.as_secs_f64()), "{wait:?}");
    assert_eq!(bed.refused(batch).await, ClaimAnswer::Settling, "until it is over");
    // Everything else goes on.
    assert!(bed.store.renew(bed.worker, TTL, "running", 1, &[]).await.unwrap().known);
    assert_eq!(bed.finish(&before).await, HandInAnswer::Applied);
    // The wait of a clock that was set back ends with the longest lease, as leases do.
    bed.run("UPDATE holdfast.control SET quiet_until = now() + interval '1 hour'", &[]).await;
    bed.store.tidy(10).await.unwrap();
    let Claim::Nothing(ClaimAnswer::Settling, Some(wait)) = bed.try_claim(batch, 1).await else {
        panic!("claims wait")
    };
    assert!(wait.as_secs_f64() <= 200.0, "{wait:?}");

    bed.run("UPDATE holdfast.control SET quiet_until = now()", &[]).await;
    let _held = bed.claim_one(batch).await;
    assert_invariants(&bed.sql, batch).await;
}

#[tokio::test]
async fn an_epoch_that_is_raised_for_its_bits_alone_lets_nobody_wait() {
    let bed = Bed::new().await;
    let old_epoch = epoch(&bed).await;
    let far =
        "SELECT setval('holdfast.token_seq', last_value + 2000000000) FROM holdfast.token_seq";
    bed.sql.query_one(far, &[]).await.unwrap();
    next_token(&bed).await;
    assert!(epoch(&bed).await > old_epoch);
}

/// Lets every new session of this database begin its transactions in some other way.
async fn with_default(bed: &Bed, setting: &str) {
    let name: String =
        bed.sql.query_one("SELECT current_database()::text", &[]).await.unwrap().get(0);
    bed.sql.batch_execute(&format!("ALTER DATABASE {name} SET {setting}")).await.unwrap();
}

#[tokio::test]
async fn the_protocol_does_not_depend_on_the_default_isolation_level() {
    let mut bed = Bed::new().await;
    let batch = bed.batch(4).await;
    with_default(&bed, "default_transaction_isolation = 'repeatable read'").await;
    with_default(&bed, "default_transaction_read_only = on").await;
    bed.store = bed.store_that_waits(TTL);

    let holds = bed.claim(batch, 3).await;
    assert_eq!(bed.finish(&holds[0]).await, HandInAnswer::Applied);
    assert_eq!(bed.hand_in_one(&holds[1], &failed()).await, HandInAnswer::Applied);
    assert!(bed.store.renew(bed.worker, TTL, "running", 1, &[]).await.unwrap().known);
    bed.expire(holds[2].lease()).await;
    assert_eq!(bed.reap(batch).await.len(), 1);
    assert!(matches!(bed.retry(batch).await, RetryAnswer::Moved { items: 1, .. }));
    assert_eq!(bed.control(batch, ControlVerb::Pause).await, ControlAnswer::Applied);
    assert!(!bed.store.end_batch(batch).await.unwrap());
    assert_invariants(&bed.sql, batch).await;
}

#[tokio::test]
async fn a_claimer_that_waited_sees_what_its_predecessor_took_whatever_the_default_is() {
    let mut bed = Bed::new().await;
    let batch = bed.batch(2).await;
    with_default(&bed, "default_transaction_isolation = 'repeatable read'").await;
    bed.store = bed.store_that_waits(TTL);
    let mut other = bed.db.client().await;
    let first = other
        .build_transaction()
        .isolation_level(tokio_postgres::IsolationLevel::ReadCommitted)
        .start()
        .await
        .unwrap();
    first.query_one("SELECT holdfast.lock_parent($1)", &[&batch.uuid()]).await.unwrap();
    let cursor = "INSERT INTO holdfast.progress (batch_id, seq, next_position, succeeded)
                  VALUES ($1, 1, 1, 1)";

    let (claim, ()) = tokio::join!(bed.try_claim(batch, 2), async {
        bed.until_waiting_for_locks(1).await;
        first.execute(cursor, &[&batch.uuid()]).await.unwrap();
        first.commit().await.unwrap();
    });

    assert_eq!(crate::support::fixture::positions(&granted(claim)), [1]);
}

#[tokio::test]
async fn every_step_refuses_to_run_on_an_old_snapshot() {
    let bed = Bed::new().await;
    let batch = bed.batch(2).await;
    let hold = bed.claim_one(batch).await;
    let (id, lease, token) = (batch.uuid(), hold.lease().uuid(), hold.token().get());
    let calls = [
        format!("claim('{id}', gen_random_uuid(), gen_random_uuid(), 1, 60, NULL)"),
        format!(
            "hand_in('{id}', '{id}', 60, '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}',
             '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}',
             '{{}}')"
        ),
        format!("give_back('{id}', '{lease}', 5)"),
        "renew(gen_random_uuid(), 60, 'x', 0, '{}', '{}', '{}', '{}')".to_owned(),
        format!("reap('{id}', true, 3, 5, 1, 1)"),
        format!("clear_cancelled('{id}', 10)"),
        format!("end_batch('{id}')"),
        format!("control_batch('{id}', NULL, 'pause', 'x')"),
        format!("retry_failed('{id}', NULL, NULL, 0, 10, 'x')"),
        format!("is_current('{id}', '{lease}', 0, {token})"),
    ];
    for call in &calls {
        for level in ["REPEATABLE READ", "SERIALIZABLE"] {
            let begin = format!("BEGIN ISOLATION LEVEL {level}");
            bed.sql.batch_execute(&begin).await.unwrap();
            let refused = bed.sql.query(&format!("SELECT holdfast.{call}"), &[]).await;
            bed.sql.batch_execute("ROLLBACK").await.unwrap();
            let error = refused.expect_err(call);
            assert_eq!(error.code(), Some(&SqlState::INVALID_TRANSACTION_STATE), "{error:?}");
        }
        bed.sql.batch_execute("BEGIN").await.unwrap();
        bed.sql
            .query(&format!("SELECT holdfast.{call}"), &[])
            .await
            .unwrap_or_else(|error| panic!("{call}: {error:?}"));
        bed.sql.batch_execute("ROLLBACK").await.unwrap();
    }
    assert_invariants(&bed.sql, batch).await;
}

#[tokio::test]
async fn every_step_waits_for_its_commit_to_be_durable() {
    let mut bed = Bed::new().await;
    let batch = bed.batch(1).await;
    bed.sql
        .batch_execute(
            "CREATE TABLE seen (level text);
             CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
                 INSERT INTO seen SELECT current_setting('synchronous_commit');
                 RETURN NULL; END $$;
             CREATE TRIGGER t AFTER INSERT ON holdfast.leases
                 FOR EACH STATEMENT EXECUTE FUNCTION note();
             CREATE TRIGGER t AFTER INSERT ON holdfast.outcomes
                 FOR EACH STATEMENT EXECUTE FUNCTION note();",
        )
        .await
        .unwrap();
    with_default(&bed, "synchronous_commit = off").await;
    bed.store = bed.store_that_waits(TTL);

    let Claim::Granted { holds, .. } = bed.try_claim(batch, 1).await else { panic!("one item") };
    bed.hand_in(&holds, &succeeded()).await;

    let seen = bed.sql.query("SELECT level FROM seen", &[]).await.unwrap();
    assert_eq!(seen.iter().map(|row| row.get(0)).collect::<Vec<&str>>(), ["on", "on"]);
}
