//! The connection breaks around the COMMIT of a finish.

use crate::support::TestDb;
use crate::support::fleet::{Fleet, Submission, patient_database};
use crate::support::invariants::{assert_invariants, assert_no_deadlock};
use crate::support::proxy::Proxy;

/// Batches and items of each, in which one finish hands in one item.
const BATCHES: usize = 8;
const ITEMS: usize = 25;

#[tokio::test]
async fn an_item_ends_once_with_its_result_wherever_its_finish_is_cut() {
    let db = TestDb::fresh().await;
    let proxy = Proxy::before(db.url()).await;
    let (sql, direct) = (db.client().await, patient_database(db.url()));
    let mut fleet = Fleet::at(proxy.url().to_owned(), sql, Some(db), "");
    fleet.database = direct;
    let worker = fleet.start_with(&["--slots", "8"]);
    worker.ready().await;

    proxy.cut_first_tries("holdfast.hand_in", 1);
    let one_by_one = Submission {
        max_running: Some(1),
        ..Submission::new(ITEMS, "echo \"$input $HOLDFAST_TOKEN\"")
    };
    let mut batches = Vec::new();
    for _ in 0..BATCHES {
        batches.push(fleet.submit(one_by_one.clone()).await);
    }
    for batch in &batches {
        fleet.ended(*batch).await;
    }

    assert_eq!(proxy.cuts_made(), BATCHES * ITEMS, "every finish was cut once");
    for batch in batches {
        // The commands ran once, too: nothing that was finished is ever repeated.
        fleet.assert_each_ran_once(batch).await;
        assert_eq!(fleet.attempts(batch).await, []);
        let select = "SELECT position, token, result FROM holdfast.outcomes WHERE batch_id = $1";
        for row in fleet.sql.query(select, &[&batch.uuid()]).await.unwrap() {
            let (position, token): (i32, i64) = (row.get(0), row.get(1));
            let result: serde_json::Value = row.get(2);
            assert_eq!(result, format!("{position} {token}\n"), "{batch}/{position}");
        }
        assert_invariants(&fleet.sql, batch).await;
    }
    assert_no_deadlock(&fleet.sql).await;
}
