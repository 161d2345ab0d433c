//! Failover: what the old primary promised and the new one does not know of.

use std::time::Duration;

use holdfast::model::{BatchId, Hold, LeaseId, WorkerId};
use holdfast::store::{
    Claim, ClaimAnswer, ClaimRequest, Database, DatabaseOptions, HandIn, HandInAnswer,
};
use tokio_postgres::Client;

use super::servers::{Replication, Servers};
use crate::support::fixture::{TTL, granted, succeeded};
use crate::support::fleet::patient_database;

/// Claims from which the sequence writes to the log again, whatever it stood at: what it gave out
/// before is covered by an earlier record.
const MORE_THAN_LOGGED_AHEAD: usize = 40;

/// A primary and a standby, and a worker's calls to the one that is the primary.
struct Pair {
    servers: Servers,
    worker: WorkerId,
}

impl Pair {
    async fn new() -> Self {
        let mut servers = Servers::new().await;
        servers.attach_standby().await;
        Self { servers, worker: WorkerId::generate() }
    }

    fn database(&self) -> Database {
        patient_database(&self.servers.url())
    }

    /// Batches of one item each.
    async fn batches(&self, count: usize) -> Vec<BatchId> {
        let insert = "
            WITH b AS (
                INSERT INTO holdfast.batches (id, owner, queue, content_digest, spec, item_count,
                    max_live, max_checking, max_attempts)
                VALUES ($1, 'o', 'q', '', '{}', 1, 1000, 64, 3)
            ), p AS (
                INSERT INTO holdfast.progress (batch_id, seq, next_position) VALUES ($1, 0, 0)
            )
            INSERT INTO holdfast.items (batch_id, position, key, input) VALUES ($1, 0, 'k', '0')";
        let sql = self.servers.client().await;
        let mut batches = Vec::new();
        for _ in 0..count {
            let batch = BatchId::generate();
            sql.execute(insert, &[&batch.uuid()]).await.unwrap();
            batches.push(batch);
        }
        batches
    }

    fn request(&self, batch: BatchId) -> ClaimRequest {
        ClaimRequest {
            batch,
            lease: LeaseId::generate(),
            worker: self.worker,
            want: 1,
            ttl: TTL,
            traceparent: None,
        }
    }

    async fn claim(&self, database: &Database, batch: BatchId) -> Hold {
        granted(database.claim(&self.request(batch)).await.unwrap()).pop().unwrap()
    }

    async fn finish(&self, database: &Database, hold: &Hold) -> HandInAnswer {
        let settlement = succeeded();
        let items = [HandIn { hold, settlement: &settlement }];
        database.hand_in(hold.item().batch(), self.worker, TTL, &items).await.unwrap()[0]
    }

    /// Claims every batch on a primary that its standby hears nothing more of, then fails over.
    async fn claim_in_vain(&mut self, batches: &[BatchId]) -> Vec<Hold> {
        let old = self.database();
        self.servers.stall_link().await;
        let mut holds = Vec::new();
        for batch in batches {
            holds.push(self.claim(&old, *batch).await);
        }
        drop(old);
        self.servers.fail_over().await;
        holds
    }

    /// The new primary lets claims wait, for what runs under lost ones (F7); ends that wait.
    async fn settle(&self, database: &Database, batch: BatchId) {
        let answer = database.claim(&self.request(batch)).await.unwrap();
        assert!(matches!(answer, Claim::Nothing(ClaimAnswer::Settling, _)), "{answer:?}");
        let settle = "UPDATE holdfast.control SET quiet_until = '-infinity'";
        self.servers.client().await.batch_execute(settle).await.unwrap();
    }
}

/// What a fence by the counter alone would do: it knows a holder by item and token.
async fn finish_by_counter_alone(sql: &Client, hold: &Hold) -> u64 {
    let insert = "
        INSERT INTO holdfast.outcomes (batch_id, position, status, lease_id, token, attempt,
            worker_id, finished_at, stop_reason)
        SELECT l.batch_id, $2, 'succeeded', l.lease_id, l.token, 1, l.worker_id,
               clock_timestamp(), 'completed'
          FROM holdfast.leases l
         WHERE l.batch_id = $1 AND $2 = ANY (l.positions) AND l.token = $3";
    let (batch, position) = (hold.item().batch().uuid(), hold.item().position().get());
    sql.execute(insert, &[&batch, &position, &hold.token().get()]).await.unwrap()
}

#[tokio::test]
async fn a_holder_whose_grant_was_lost_is_refused() {
    let mut pair = Pair::new().await;
    let batches = pair.batches(MORE_THAN_LOGGED_AHEAD).await;

    let lost = pair.claim_in_vain(&batches).await;
    let new = pair.database();
    let highest = lost.iter().map(Hold::token).max().unwrap();
    pair.settle(&new, batches[0]).await;

    for old in &lost {
        let held = pair.claim(&new, old.item().batch()).await;
        // The new primary raised the epoch, so no token comes twice (F2).
        assert!(held.token() > highest, "{} after {highest}", held.token());
        assert_eq!(pair.finish(&new, old).await, HandInAnswer::Lost);
        assert_eq!(pair.finish(&new, &held).await, HandInAnswer::Applied);
    }
    drop(new);
    pair.servers.end().await;
}

#[tokio::test]
async fn with_a_counter_alone_the_lost_holder_would_be_taken_for_the_new_one() {
    let mut pair = Pair::new().await;
    let spare = pair.batches(1).await[0];
    let batches = pair.batches(MORE_THAN_LOGGED_AHEAD).await;

    let lost = pair.claim_in_vain(&batches).await;
    let (new, sql) = (pair.database(), pair.servers.client().await);
    // As if nobody raised the epoch.
    let never_raised = "CREATE OR REPLACE FUNCTION
        holdfast.raise_epoch_if_moved(p_lease_s double precision DEFAULT 0)
        RETURNS holdfast.control LANGUAGE sql AS 'SELECT * FROM holdfast.control'";
    sql.batch_execute(never_raised).await.unwrap();
    let next = pair.claim(&new, spare).await.token().get() + 1;
    let old = lost.iter().find(|hold| hold.token().get() == next);
    let old = old.expect("a number that was given out before the failover comes again");
    let held = pair.claim(&new, old.item().batch()).await;

    assert_eq!(held.token(), old.token(), "one token, two holders");
    assert_ne!(held.lease(), old.lease());
    // The lease id tells them apart (F1); the counter does not.
    assert_eq!(pair.finish(&new, old).await, HandInAnswer::Lost);
    assert_eq!(finish_by_counter_alone(&sql, old).await, 1, "the old holder's outcome is taken");
    drop((new, sql));
    pair.servers.end().await;
}

#[tokio::test]
async fn a_commit_that_its_standby_never_got_is_not_taken_for_one() {
    let mut pair = Pair::new().await;
    let batch = pair.batches(1).await[0];
    let hold = pair.claim(&pair.database(), batch).await;
    pair.servers.replicate(Replication::Synchronous).await;
    pair.servers.stall_link().await;
    let hurried = Database::new(DatabaseOptions {
        statement_timeout: Duration::from_millis(500),
        ..pair.database().options().clone()
    })
    .unwrap();

    let settlement = succeeded();
    let items = [HandIn { hold: &hold, settlement: &settlement }];
    // The primary has committed it by itself, and waits for its standby longer than a statement may
    // take. A server whose wait is cancelled reports success.
    let answer = hurried.hand_in(batch, pair.worker, TTL, &items).await;
    assert!(answer.is_err_and(|error| error.is_unknown()));

    pair.servers.fail_over().await;
    let new = pair.database();
    assert_eq!(pair.finish(&new, &hold).await, HandInAnswer::Applied);
    drop((new, hurried));
    pair.servers.end().await;
}
