//! Directories of items in whole workers: how long they live, and who gets none.

use serde_json::json;

use crate::support::fleet::{Fleet, LONG, Submission, until};

const CLEANS_AT_ONCE: &str = "[workspace]\nretention = '0s'\nclean_interval = '100ms'\n";

/// Items with a criterion about a file.
fn items(keys: &[&str]) -> Vec<serde_json::Value> {
    let item = |key: &&str| json!({"key": key, "input": key, "acceptance_criteria": ["file:a.txt exists"]});
    keys.iter().map(item).collect()
}

#[tokio::test]
async fn directories_live_as_long_as_their_batch_and_go_after_it() {
    let fleet = Fleet::new(CLEANS_AT_ONCE).await;
    let _worker = fleet.start();
    let body = "echo x >a.txt; [ $input = quick ] || until [ -e $MARKS.go ]; do sleep 0.05; done";
    let long = fleet.submit(Submission::of(items(&["quick", "slow"]), body)).await;
    fleet.noted(long, "end", 1).await;
    fleet.noted(long, "start", 2).await;
    let short = fleet.submit(Submission::of(items(&["quick"]), body)).await;
    fleet.ended(short).await;

    let owner = fleet.workspaces().join("default");
    let [long_at, short_at] = [long, short].map(|batch| owner.join(batch.to_string()));
    until("the ended batch is cleaned", LONG, async || !short_at.exists()).await;

    assert!(long_at.join("0/workspace/a.txt").exists(), "its batch has not ended");
    assert!(long_at.join("1/workspace/a.txt").exists(), "it is held");
    fleet.touch("marks.go");
    fleet.ended(long).await;
    until("everything is cleaned", LONG, async || !owner.exists()).await;
    assert!(fleet.outcomes(long).await.iter().all(|outcome| outcome.succeeded));
}

#[tokio::test]
async fn a_role_that_may_not_use_workspaces_gets_none_and_the_work_is_done() {
    let fleet = Fleet::new("[access.roles]\nsubmitter = []\n").await;
    let _worker = fleet.start();
    let body = "[ -z \"$HOLDFAST_WORKSPACE\" ] || exit 1";

    let batch = fleet.submit(Submission::of(items(&["a", "b"]), body)).await;
    fleet.ended(batch).await;

    fleet.assert_each_ran_once(batch).await;
    assert!(!fleet.workspaces().exists());
    let denied = "SELECT count(*) FROM holdfast.outcomes
                   WHERE batch_id = $1 AND status = 'succeeded' AND verdict_class = 'unverified'
                     AND verdict->'leaves'->0->>'detail' LIKE '%submitter may not use workspaces%'";
    assert_eq!(fleet.value::<i64>(batch, denied).await, 2, "the leaf says why it is unchecked");
}
