//! Every statement prepares on the migrated schema; migrations go up, down and up again.

use std::time::Duration;

use holdfast::store::migrate::{self, MigrationStatus, SchemaError};
use holdfast::store::statements;
use tokio_postgres::Client;

use crate::support::TestDb;
use crate::support::fixture::Bed;

#[tokio::test]
async fn every_statement_has_its_header_and_prepares() {
    let db = TestDb::fresh().await;
    let client = db.client().await;
    assert!(!statements::ALL.is_empty());
    for (name, sql) in statements::ALL {
        let mut lines = sql.lines();
        let first = lines.next().unwrap();
        assert!(first.starts_with(&format!("-- {name}: ")), "{name}: {first}");
        let second = lines.next().unwrap();
        assert!(second.starts_with("-- locks: "), "{name}: {second}");
        assert!(second.contains("   fence: ") && second.contains("   rows: "), "{name}: {second}");
        client.prepare(sql).await.unwrap_or_else(|error| panic!("{name}: {error:?}"));
    }
}

/// Everything in the schema but the ledger's rows, as text.
async fn schema_of(client: &Client) -> Vec<String> {
    let everything = "
        SELECT format('%s %s', c.relkind, c.oid::regclass) FROM pg_class c
         WHERE c.relnamespace = to_regnamespace('holdfast') AND c.relname !~ '^schema_migrations'
        UNION ALL
        SELECT format('%s.%s %s %s %s', a.attrelid::regclass, a.attname, a.atttypid::regtype,
                      a.attnotnull, pg_get_expr(d.adbin, d.adrelid))
          FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid AND c.relkind IN ('r', 'v')
          LEFT JOIN pg_attrdef d ON (d.adrelid, d.adnum) = (a.attrelid, a.attnum)
         WHERE c.relnamespace = to_regnamespace('holdfast') AND a.attnum > 0
           AND NOT a.attisdropped AND c.relname !~ '^schema_migrations'
        UNION ALL
        SELECT pg_get_indexdef(i.indexrelid) FROM pg_index i JOIN pg_class c ON c.oid = i.indrelid
         WHERE c.relnamespace = to_regnamespace('holdfast') AND c.relname !~ '^schema_migrations'
        UNION ALL
        SELECT pg_get_constraintdef(x.oid) FROM pg_constraint x
         WHERE x.connamespace = to_regnamespace('holdfast')
           AND x.conrelid <> to_regclass('holdfast.schema_migrations')
        UNION ALL
        SELECT pg_get_functiondef(p.oid) FROM pg_proc p
         WHERE p.pronamespace = to_regnamespace('holdfast')
        ORDER BY 1";
    client.query(everything, &[]).await.unwrap().iter().map(|row| row.get(0)).collect()
}

fn versions(done: &[MigrationStatus]) -> Vec<i64> {
    done.iter().map(|status| status.version).collect()
}

#[tokio::test]
async fn migrations_go_down_to_the_ledger_and_up_to_the_same_schema() {
    let db = TestDb::fresh().await;
    let client = db.client().await;
    let all: Vec<i64> = versions(&migrate::status(db.url()).await.unwrap());
    let before = schema_of(&client).await;
    assert!(migrate::up(db.url(), None).await.unwrap().is_empty(), "nothing is missing");

    let down = migrate::down(db.url(), 0).await.unwrap();

    assert_eq!(versions(&down), all.iter().rev().copied().collect::<Vec<_>>());
    assert_eq!(schema_of(&client).await, Vec::<String>::new());
    let status = migrate::status(db.url()).await.unwrap();
    assert!(status.iter().all(|migration| !migration.applied));
    let ledger = "SELECT to_regclass('holdfast.schema_migrations') IS NOT NULL";
    assert!(client.query_one(ledger, &[]).await.unwrap().get::<_, bool>(0));

    assert_eq!(versions(&migrate::up(db.url(), None).await.unwrap()), all);
    assert_eq!(schema_of(&client).await, before);
}

#[tokio::test]
async fn each_migration_can_be_taken_back_by_itself() {
    let db = TestDb::fresh().await;
    let client = db.client().await;
    let newest = migrate::newest();
    let mut schemas = vec![schema_of(&client).await];
    for version in (0..newest).rev() {
        let done = migrate::down(db.url(), version).await.unwrap();
        assert_eq!(versions(&done), [version + 1]);
        schemas.push(schema_of(&client).await);
    }
    for version in 1..=newest {
        schemas.pop();
        let done = migrate::up(db.url(), Some(version)).await.unwrap();
        assert_eq!(versions(&done), [version]);
        assert_eq!(&schema_of(&client).await, schemas.last().unwrap(), "version {version}");
    }
}

#[tokio::test]
async fn of_two_migrations_at_once_one_does_the_work() {
    let db = TestDb::fresh().await;
    let all: Vec<i64> = versions(&migrate::status(db.url()).await.unwrap());
    migrate::down(db.url(), 0).await.unwrap();

    let (one, other) = tokio::join!(migrate::up(db.url(), None), migrate::up(db.url(), None));

    let mut done = Vec::new();
    for run in [one, other] {
        match run {
            Ok(applied) => done.push(versions(&applied)),
            Err(SchemaError::Busy) => done.push(Vec::new()),
            Err(error) => panic!("{error:?}"),
        }
    }
    done.sort_unstable();
    assert_eq!(done, [Vec::new(), all]);
}

#[tokio::test]
async fn a_migration_that_waits_for_a_lock_lets_readers_pass() {
    let bed = Bed::new().await;
    let batch = bed.batch(1).await;
    let mut other = bed.db.client().await;
    let reader = other.transaction().await.unwrap();
    reader.query("SELECT FROM holdfast.items LIMIT 1", &[]).await.unwrap();

    let (done, ()) = tokio::join!(migrate::down(bed.db.url(), 0), async {
        bed.until_waiting_for_locks(1).await;
        // It waits for the reader; whoever comes after waits for it, but not for good.
        let late =
            bed.value::<i64>(batch, "SELECT count(*) FROM holdfast.items WHERE batch_id = $1");
        let late = tokio::time::timeout(Duration::from_secs(20), late).await;
        assert_eq!(late.expect("passed"), 1);
        reader.commit().await.unwrap();
    });

    assert_eq!(done.unwrap().len(), usize::try_from(migrate::newest()).unwrap());
}

#[tokio::test]
async fn a_schema_outside_the_known_range_is_refused_by_name_of_the_command() {
    let bed = Bed::new().await;
    assert_eq!(migrate::check(&bed.store).await.unwrap(), migrate::newest());
    migrate::down(bed.db.url(), 3).await.unwrap();
    let old = migrate::check(&bed.store).await.unwrap_err().to_string();
    assert!(old.contains("too old") && old.contains("holdfast migrate up"), "{old}");

    migrate::up(bed.db.url(), None).await.unwrap();
    let future = "INSERT INTO holdfast.schema_migrations
                  SELECT 9999, description, installed_on, success, checksum, execution_time
                    FROM holdfast.schema_migrations LIMIT 1";
    bed.run(future, &[]).await;
    let new = migrate::check(&bed.store).await.unwrap_err().to_string();
    assert!(new.contains("too new"), "{new}");
    assert!(matches!(migrate::up(bed.db.url(), None).await, Err(SchemaError::Mismatch(_))));
}

#[tokio::test]
async fn sequences_hand_out_their_numbers_in_order() {
    let db = TestDb::fresh().await;
    let client = db.client().await;
    let cached =
        "SELECT count(*) FROM pg_sequences WHERE schemaname = 'holdfast' AND cache_size > 1";
    assert_eq!(client.query_one(cached, &[]).await.unwrap().get::<_, i64>(0), 0);
}
