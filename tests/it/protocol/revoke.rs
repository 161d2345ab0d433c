//! Leases that an operator takes from their holders (F8).

use std::time::Duration;

use holdfast::model::{AttemptEnding, Disposition, History, Hold, LeaseId, Settlement};
use holdfast::store::{
    DeadLease, HandInAnswer, LeaseFilter, LeaseRow, ReapPolicy, RenewAnswer, Revocation,
    RevokeAnswer, StageAnswer, Vouched,
};

use crate::support::fixture::{Bed, REAP, TTL, again, failed, positions, publish, succeeded};
use crate::support::invariants::assert_invariants;

impl Bed {
    async fn lease_rows(&self, leases: &[LeaseId]) -> Vec<LeaseRow> {
        let filter = LeaseFilter { leases: Some(leases.to_vec()), ..LeaseFilter::default() };
        self.store.leases(&filter, 100).await.unwrap()
    }

    async fn lease_row(&self, lease: LeaseId) -> LeaseRow {
        let mut rows = self.lease_rows(&[lease]).await;
        assert_eq!(rows.len(), 1, "{rows:?}");
        rows.pop().unwrap()
    }

    async fn revoke(&self, row: &LeaseRow, how: Revocation) -> RevokeAnswer {
        self.store.revoke(std::slice::from_ref(row), how, "tester", "why").await.unwrap()[0]
    }

    async fn is_current(&self, hold: &Hold) -> bool {
        let select = "SELECT holdfast.is_current($1, $2, $3, $4)";
        let (item, lease) = (hold.item(), hold.lease().uuid());
        let row = self
            .sql
            .query_one(
                select,
                &[&item.batch().uuid(), &lease, &item.position().get(), &hold.token().get()],
            )
            .await;
        row.unwrap().get(0)
    }

    async fn renewed(&self, hold: &Hold) -> RenewAnswer {
        let vouched = Vouched {
            batch: hold.item().batch(),
            lease: hold.lease(),
            token: hold.token(),
            started: Vec::new(),
            reports: None,
        };
        self.store.renew(self.worker, TTL, "running", 1, &[vouched]).await.unwrap().leases[0].answer
    }
}

fn interrupted(history: History) -> Settlement {
    let disposition = Disposition::Again {
        ending: AttemptEnding::Interrupted,
        charged: false,
        delay: Duration::ZERO,
        history,
    };
    Settlement { disposition, ..failed() }
}

#[tokio::test]
async fn a_revoked_lease_is_of_no_use_to_its_holder_and_never_lives_longer() {
    let bed = Bed::new().await;
    let batch = bed.batch(6).await;
    let holds = bed.claim(batch, 5).await;
    bed.stage(&holds[4..], &[]).await;
    let before = bed.lease_row(holds[0].lease()).await;
    assert!(bed.is_current(&holds[0]).await);

    let answer = bed.revoke(&before, Revocation::AtExpiry).await;

    let RevokeAnswer::Revoked { token, expires_in_s } = answer else { panic!("{answer:?}") };
    assert!(token > before.token, "tokens only rise (F2)");
    assert!(expires_in_s > 30.0, "{expires_in_s}");
    assert!(!bed.is_current(&holds[0]).await);
    assert_eq!(bed.renewed(&holds[0]).await, RenewAnswer::Gone);
    assert_eq!(bed.finish(&holds[0]).await, HandInAnswer::Lost);
    assert_eq!(bed.hand_in_one(&holds[1], &failed()).await, HandInAnswer::Lost);
    let error = again(History::FRESH, Duration::ZERO);
    assert_eq!(bed.hand_in_one(&holds[2], &error).await, HandInAnswer::Lost);
    let drained = interrupted(History::FRESH);
    assert_eq!(bed.hand_in_one(&holds[2], &drained).await, HandInAnswer::Lost);
    assert_eq!(bed.stage_one(&holds[3], None).await, StageAnswer::Lost);
    let holds_still = publish(holdfast::model::Finding::Holds);
    assert_eq!(bed.conclude(&holds[4], &holds_still).await, HandInAnswer::Lost);
    let after = bed.lease_row(holds[0].lease()).await;
    assert_eq!((after.expires_at, after.items), (before.expires_at, 5));
    assert!(after.revoked_at.is_some());
    assert!(bed.reap(batch).await.is_empty(), "not before its expiry: its worker may trust it");
    assert_eq!(positions(&bed.claim(batch, 9).await), [5]);
    assert_invariants(&bed.sql, batch).await;
}

#[tokio::test]
async fn at_its_expiry_its_items_run_again_uncharged_and_what_had_run_is_checked_again() {
    let bed = Bed::new().await;
    let batch = bed.batch(2).await;
    let holds = bed.claim(batch, 2).await;
    bed.stage(&holds[..1], &[]).await;
    let row = bed.lease_row(holds[0].lease()).await;
    bed.revoke(&row, Revocation::AtExpiry).await;
    // Not even its worker's death is charged: somebody else ended it.
    bed.silence(bed.worker).await;
    bed.expire(holds[0].lease()).await;

    assert_eq!(bed.reap(batch).await.len(), 2);

    let again = bed.claim_one(batch).await;
    let history = again.history();
    assert_eq!((history.attempts(), history.crashes(), history.interruptions()), (0, 0, 1));
    assert_eq!(positions(&bed.recheck(batch, 4).await), [0]);
    let attempt = "SELECT ending || ' ' || charged || ' ' || stop_reason FROM holdfast.attempts
                    WHERE batch_id = $1";
    assert_eq!(bed.value::<String>(batch, attempt).await, "interrupted false revoked");
    assert_eq!(bed.finish(&again).await, HandInAnswer::Applied);
    assert_eq!(bed.finish(&holds[1]).await, HandInAnswer::Lost, "the straggler publishes nothing");
    assert_invariants(&bed.sql, batch).await;
}

#[tokio::test]
async fn revocations_without_end_are_charged_in_the_end() {
    let bed = Bed::new().await;
    let batch = bed.batch(1).await;
    for n in 1..=7 {
        let hold = bed.claim_one(batch).await;
        let row = bed.lease_row(hold.lease()).await;
        bed.revoke(&row, Revocation::AtExpiry).await;
        bed.expire(hold.lease()).await;
        assert_eq!(bed.reap(batch).await.len(), 1, "{n}");
    }
    let history = bed.claim_one(batch).await.history();
    assert_eq!((history.attempts(), history.crashes()), (2, 0));
    assert_invariants(&bed.sql, batch).await;
}

#[tokio::test]
async fn at_once_takes_proof_or_somebodys_word() {
    let bed = Bed::new().await;
    let batch = bed.batch(1).await;
    let hold = bed.claim_one(batch).await;
    let row = bed.lease_row(hold.lease()).await;

    let at_once = async || bed.revoke(&row, Revocation::AtOnce).await;
    assert_eq!(at_once().await, RevokeAnswer::Refused, "neither expired nor silent");
    bed.expire(hold.lease()).await;
    assert_eq!(at_once().await, RevokeAnswer::Refused, "its worker lives");
    bed.silence(bed.worker).await;
    assert_eq!(bed.renewed(&hold).await, RenewAnswer::Renewed, "a refusal changes nothing");
    bed.silence(bed.worker).await;
    assert_eq!(at_once().await, RevokeAnswer::Refused, "not expired");
    bed.expire(hold.lease()).await;
    let answer = at_once().await;
    assert!(matches!(answer, RevokeAnswer::Revoked { .. }), "{answer:?}");
    assert_eq!(at_once().await, RevokeAnswer::Gone, "that token is nobody's any more");
    assert_eq!(bed.reap(batch).await.len(), 1);

    let hold = bed.claim_one(batch).await;
    let row = bed.lease_row(hold.lease()).await;
    let answer = bed.revoke(&row, Revocation::WorkerIsGone).await;
    let RevokeAnswer::Revoked { token, expires_in_s } = answer else { panic!("{answer:?}") };
    assert!(expires_in_s <= 0.0);
    let positions = vec![hold.item().position()];
    let lease = hold.lease();
    let dead = [DeadLease { batch, queue: "q".into(), lease, token, positions }];
    let policy = ReapPolicy { charge: false, ..REAP };
    assert_eq!(bed.store.release_dead(bed.worker, &dead, &policy).await.unwrap(), 1);
    let again = bed.claim_one(batch).await;
    assert_eq!(again.history().attempts(), 0);
    assert_eq!(bed.finish(&hold).await, HandInAnswer::Lost);
    assert_eq!(bed.finish(&again).await, HandInAnswer::Applied);
    assert_invariants(&bed.sql, batch).await;
}

#[tokio::test]
async fn several_leases_are_revoked_together_each_by_its_own_token_and_all_is_noted() {
    let bed = Bed::new().await;
    let batch = bed.batch(3).await;
    let mut leases = Vec::new();
    for _ in 0..3 {
        leases.push(bed.claim_one(batch).await);
    }
    let mut rows = bed.lease_rows(&[leases[0].lease(), leases[2].lease()]).await;
    rows[1].token = leases[1].token();

    let answers = bed.store.revoke(&rows, Revocation::AtExpiry, "ana", "INC-1").await.unwrap();

    assert!(matches!(answers[0], RevokeAnswer::Revoked { .. }), "{answers:?}");
    assert_eq!(answers[1], RevokeAnswer::Gone);
    let audit = "SELECT actor || ' ' || verb || ' ' || (detail ->> 'lease') || ' '
                        || (detail ->> 'reason') FROM holdfast.audit_log WHERE batch_id = $1";
    let expected = format!("ana expire_lease {} INC-1", rows[0].lease);
    assert_eq!(bed.value::<String>(batch, audit).await, expected);
    assert_eq!(bed.finish(&leases[1]).await, HandInAnswer::Applied);
    assert_eq!(bed.hand_in_one(&leases[2], &succeeded()).await, HandInAnswer::Applied);
    assert_invariants(&bed.sql, batch).await;
}
