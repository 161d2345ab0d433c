//! The tests' own databases.

use std::time::Duration;

use crate::support::TestDb;

#[tokio::test]
async fn every_test_has_a_migrated_database_of_its_own() {
    let (one, other) = tokio::join!(TestDb::fresh(), TestDb::fresh());
    one.client().await.batch_execute("CREATE TABLE mine (a integer)").await.unwrap();

    let seen =
        "SELECT to_regclass('mine') IS NOT NULL, to_regclass('holdfast.batches') IS NOT NULL";
    let by_one = one.client().await.query_one(seen, &[]).await.unwrap();
    let by_other = other.client().await.query_one(seen, &[]).await.unwrap();

    assert_ne!(one.url(), other.url());
    assert_eq!((by_one.get(0), by_one.get(1)), (true, true));
    assert_eq!((by_other.get(0), by_other.get(1)), (false, true));
}

#[tokio::test]
async fn a_database_goes_when_its_test_lets_go_of_it() {
    let kept = TestDb::fresh().await;
    let gone = TestDb::fresh().await;
    let client = kept.client().await;
    let name: String =
        gone.client().await.query_one("SELECT current_database()::text", &[]).await.unwrap().get(0);
    let _still_connected = gone.client().await;

    drop(gone);

    let exists = "SELECT EXISTS (SELECT FROM pg_database WHERE datname = $1)";
    let dropped = async {
        while client.query_one(exists, &[&name]).await.unwrap().get::<_, bool>(0) {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(30), dropped)
        .await
        .expect("dropped in the background");
}
