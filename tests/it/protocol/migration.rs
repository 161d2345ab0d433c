//! The migrations of acceptance checks over a database at work: up and down, every row, result and
//! count kept.

use std::collections::BTreeMap;
use std::time::Duration;

use holdfast::model::{BatchId, Conclusion, Evidence, Finding, History, Hold};
use holdfast::store::{ControlVerb, HandInAnswer, StageAnswer, migrate};

use crate::support::fixture::{BatchSpec, Bed, again, failed, positions, publish, succeeded};
use crate::support::invariants::assert_invariants;

/// The last version without checks.
const BEFORE: i64 = 9;

/// The columns of every table with rows of batches.
async fn columns(bed: &Bed) -> BTreeMap<String, String> {
    let rows = "SELECT table_name::text, string_agg(column_name, ', ' ORDER BY ordinal_position)
                  FROM information_schema.columns
                 WHERE table_schema = 'holdfast'
                   AND table_name IN ('batches', 'items', 'leases', 'waiting', 'outcomes',
                                      'attempts', 'progress', 'progress_deltas')
                 GROUP BY table_name";
    let rows = bed.sql.query(rows, &[]).await.unwrap();
    rows.iter().map(|row| (row.get(0), row.get(1))).collect()
}

/// Everything in these columns.
async fn contents(bed: &Bed, columns: &BTreeMap<String, String>) -> BTreeMap<String, Vec<String>> {
    let mut contents = BTreeMap::new();
    for (table, columns) in columns {
        let rows = format!("SELECT row({columns})::text FROM holdfast.{table} ORDER BY 1");
        let rows = bed.sql.query(&rows, &[]).await.unwrap();
        contents.insert(table.clone(), rows.iter().map(|row| row.get(0)).collect());
    }
    contents
}

/// Where the items of a batch are, as both versions count it.
async fn counts(bed: &Bed, batch: BatchId) -> String {
    bed.value(
        batch,
        "SELECT row(p.next_position, p.executing, p.checking, p.waiting, p.succeeded, p.failed,
                    p.cancelled)::text FROM holdfast.current_progress($1) p",
    )
    .await
}

/// A batch of ten: two succeeded, one failed, one waits, two held, the rest fresh.
async fn running_batch(bed: &Bed) -> (BatchId, Vec<Hold>) {
    let batch = bed.batch_of(BatchSpec { items: 10, ..BatchSpec::default() }).await;
    let mut holds = bed.claim(batch, 6).await;
    bed.hand_in(&holds[..2], &succeeded()).await;
    bed.hand_in_one(&holds[2], &failed()).await;
    bed.hand_in_one(&holds[3], &again(History::FRESH, Duration::from_mins(5))).await;
    (batch, holds.split_off(4))
}

async fn ended_batch(bed: &Bed) -> BatchId {
    let batch = bed.batch(3).await;
    let holds = bed.claim(batch, 3).await;
    bed.hand_in(&holds, &succeeded()).await;
    assert!(bed.store.end_batch(batch).await.unwrap());
    batch
}

#[tokio::test]
async fn every_row_result_and_count_is_kept_on_the_way_up_and_work_goes_on() {
    let bed = Bed::new().await;
    let (running, held) = running_batch(&bed).await;
    let ended = ended_batch(&bed).await;
    let cancelled = bed.batch(4).await;
    bed.claim(cancelled, 2).await;
    bed.control(cancelled, ControlVerb::Cancel).await;
    // Without anything under check the way down changes nothing, either.
    migrate::down(bed.db.url(), BEFORE).await.unwrap();
    let batches = [running, ended, cancelled];
    let columns = columns(&bed).await;
    let before = contents(&bed, &columns).await;
    let mut counted = Vec::new();
    for batch in batches {
        counted.push(counts(&bed, batch).await);
    }

    migrate::up(bed.db.url(), None).await.unwrap();

    assert_eq!(contents(&bed, &columns).await, before);
    for (batch, counted) in batches.into_iter().zip(counted) {
        assert_eq!(counts(&bed, batch).await, counted);
        assert_invariants(&bed.sql, batch).await;
    }
    assert_eq!(bed.finish(&held[0]).await, HandInAnswer::Applied);
    assert_eq!(bed.stage_one(&held[1], None).await, StageAnswer::Staged);
    bed.conclude(&held[1], &publish(Finding::Holds)).await;
    assert_eq!(positions(&bed.claim(running, 9).await), [6, 7, 8, 9]);
    assert_invariants(&bed.sql, running).await;
}

#[tokio::test]
async fn on_the_way_down_what_is_under_check_ends_with_its_stored_result() {
    let bed = Bed::new().await;
    let (running, held) = running_batch(&bed).await;
    let more = bed.claim(running, 4).await;
    // One published with a verdict, one waits for a recheck, one under check beside one that is
    // executed in the same lease, and a whole lease under check.
    bed.stage(&held, &[Evidence::default()]).await;
    bed.conclude(&held[0], &publish(Finding::Holds)).await;
    bed.conclude(&held[1], &Conclusion::Recheck(History::FRESH)).await;
    bed.stage(&more[..1], &[]).await;
    let last = ended_batch(&bed).await;
    let all_staged = bed.batch(2).await;
    let holds = bed.claim(all_staged, 2).await;
    bed.stage(&holds, &[]).await;
    for batch in [running, last, all_staged] {
        assert_invariants(&bed.sql, batch).await;
    }
    let results =
        "SELECT string_agg(position || ':' || status || ':' || coalesce(result::text, '-'),
                                     ' ' ORDER BY position)
                     FROM holdfast.outcomes WHERE batch_id = $1";
    let ended_before: String = bed.value(last, results).await;

    migrate::down(bed.db.url(), BEFORE).await.unwrap();

    let expected = "0:succeeded:\"done\" 1:succeeded:\"done\" 2:failed:- 4:succeeded:\"done\" \
                    5:succeeded:\"done\" 6:succeeded:\"done\"";
    assert_eq!(bed.value::<String>(running, results).await, expected);
    assert_eq!(bed.value::<String>(last, results).await, ended_before);
    assert_eq!(counts(&bed, running).await, "(10,3,0,1,5,1,0)");
    assert_eq!(counts(&bed, all_staged).await, "(2,0,0,0,2,0,0)");
    let ended = "SELECT finished_at IS NOT NULL FROM holdfast.batches WHERE id = $1";
    assert!(bed.value::<bool>(all_staged, ended).await, "with its last item");
    let left: Vec<i32> =
        bed.value(running, "SELECT positions FROM holdfast.leases WHERE batch_id = $1").await;
    assert_eq!(left, [7, 8, 9]);
    assert_eq!(bed.hand_in(&more[1..], &succeeded()).await, [HandInAnswer::Applied; 3]);
    assert_eq!(bed.finish(&more[0]).await, HandInAnswer::Lost, "it ended without its holder");

    migrate::up(bed.db.url(), None).await.unwrap();
    for batch in [running, last, all_staged] {
        assert_invariants(&bed.sql, batch).await;
    }
}
