//! Controls: what they change, what they refuse, and whose batches they see.

use std::time::Duration;

use holdfast::model::BatchId;
use holdfast::store::{Event, Listener};
use serde_json::json;

use super::{Cli, failed, succeeded};

#[tokio::test]
async fn controls_are_idempotent() {
    let cli = Cli::new().await;
    let batch = cli.submit(&["a", "b"]).await;
    let changed = async |verb: &str| {
        let answer = cli.run(&[verb, &batch, "--json"]).await.exited(0).json();
        assert_eq!((&answer["batch"], &answer["verb"]), (&json!(batch), &json!(verb)));
        answer["changed"].as_bool().unwrap()
    };

    assert!(changed("pause").await);
    assert!(!changed("pause").await);
    assert!(changed("resume").await);
    assert!(!changed("resume").await);
    assert!(changed("cancel").await);
    assert!(!changed("cancel").await);

    assert_eq!(cli.counts(&batch).await["cancelled"], 2);
    cli.run(&["pause", &batch]).await.exited(73).says("it has ended or is cancelled");
    cli.run(&["resume", &batch]).await.exited(73);
}

#[tokio::test]
async fn a_batch_that_has_ended_is_not_cancelled() {
    let cli = Cli::new().await;
    let batch = cli.submit(&["a"]).await;
    cli.fleet().drain(&batch, |_| succeeded("1")).await;
    for verb in ["cancel", "pause"] {
        cli.run(&[verb, &batch]).await.exited(73).says("has ended");
    }
    assert_eq!(cli.counts(&batch).await["succeeded"], 1);
}

#[tokio::test]
async fn one_batch_that_refuses_does_not_keep_the_others() {
    let cli = Cli::new().await;
    let ended = cli.submit(&["a"]).await;
    cli.fleet().drain(&ended, |_| succeeded("1")).await;
    let open = cli.submit(&["a"]).await;
    let unknown = BatchId::generate().to_string();

    let ran = cli.run(&["cancel", &ended, &unknown, &open]).await.exited(73);

    ran.says(&ended).says(&unknown);
    assert_eq!(cli.counts(&open).await["cancelled"], 1);
}

#[tokio::test]
async fn another_owners_batch_is_like_one_that_is_not_there() {
    let cli = Cli::new().await;
    let batch = cli.submit_with(&["a"], &["--owner", "ana"]).await;
    let unknown = BatchId::generate().to_string();
    let commands: [&[&str]; 10] = [
        &["show"],
        &["items"],
        &["item", "a"],
        &["export"],
        &["watch"],
        &["pause"],
        &["resume"],
        &["cancel"],
        &["retry", "--all"],
        &["retry", "--key", "a"],
    ];
    for command in commands {
        let (verb, rest) = command.split_first().unwrap();
        let run = async |batch: &str| {
            let arguments = [&[*verb, batch, "--owner", "ben"] as &[&str], rest].concat();
            let ran = cli.run(&arguments).await.exited(77);
            (ran.out.replace(batch, "ID"), ran.err.replace(batch, "ID"))
        };
        assert_eq!(run(&batch).await, run(&unknown).await, "{verb}");
    }
    let listed = async |owner: &str| {
        cli.run(&["batches", "--owner", owner, "--json"]).await.exited(0).lines().len()
    };
    assert_eq!((listed("ana").await, listed("ben").await), (1, 0));
    assert_eq!(cli.counts(&batch).await["cancelled"], 0);
    cli.run(&["cancel", &batch, "--owner", "ana"]).await.exited(0);
}

#[tokio::test]
async fn failed_items_get_new_attempts_by_key_or_all_together() {
    let cli = Cli::new().await;
    let batch = cli.submit(&["a", "b", "c", "d"]).await;
    let fleet = cli.fleet();
    fleet
        .drain(&batch, |hold| match hold.item().position().get() {
            0 => succeeded("1"),
            _ => failed("no luck"),
        })
        .await;

    let ran = cli.run(&["retry", &batch, "--key", "b", "--key", "a", "--key", "b", "--json"]).await;
    let ran = ran.exited(0).says("1 of the named items had not failed");
    assert_eq!(ran.json(), json!({"batch": batch, "items": 1}));
    let counts = cli.counts(&batch).await;
    assert_eq!((&counts["waiting"], &counts["failed"]), (&json!(1), &json!(2)));

    let ran = cli.run(&["retry", &batch, "--all"]).await.exited(0);
    assert_eq!(ran.out, "2 items have new attempts\n");
    let ran = cli.run(&["retry", &batch, "--all"]).await.exited(0);
    assert_eq!(ran.out, "0 items have new attempts\n");

    fleet.drain(&batch, |_| succeeded("2")).await;
    assert_eq!(cli.counts(&batch).await["succeeded"], 4);
    let item = cli.run(&["item", &batch, "b", "--json"]).await.exited(0).json();
    assert_eq!(item["attempt"], 1);
    assert_eq!(item["attempts"][0]["ending"], "retried");
    assert_eq!(item["attempts"][0]["error"], "no luck");
}

#[tokio::test]
async fn a_retry_moves_nothing_when_one_key_is_unknown() {
    let cli = Cli::new().await;
    let batch = cli.submit(&["a"]).await;
    cli.fleet().drain(&batch, |_| failed("no")).await;
    cli.run(&["retry", &batch, "--key", "a", "--key", "z"]).await.exited(77).says("\"z\"");
    assert_eq!(cli.counts(&batch).await["failed"], 1);
    cli.run(&["retry", &batch]).await.exited(2).says("--key");
}

#[tokio::test]
async fn a_retry_keeps_a_pause_and_refuses_on_a_cancelled_batch() {
    let cli = Cli::new().await;
    let batch = cli.submit(&["a", "b"]).await;
    let fleet = cli.fleet();
    fleet.hand_in(&fleet.claim(&batch, 1).await, |_| failed("no")).await;
    cli.run(&["pause", &batch]).await.exited(0);

    cli.run(&["retry", &batch, "--all"]).await.exited(0);

    let shown = cli.run(&["show", &batch, "--json"]).await.exited(0).json();
    assert_eq!((&shown["state"], &shown["counts"]["waiting"]), (&json!("paused"), &json!(1)));
    assert!(fleet.claim(&batch, 1).await.is_empty());

    cli.run(&["resume", &batch]).await.exited(0);
    fleet.hand_in(&fleet.claim(&batch, 1).await, |_| failed("no")).await;
    cli.run(&["cancel", &batch]).await.exited(0);
    cli.run(&["retry", &batch, "--all"]).await.exited(73).says("it is cancelled");
    cli.run(&["retry", &batch, "--key", "a"]).await.exited(73);
    assert_eq!(cli.counts(&batch).await["failed"], 1);
}

#[tokio::test]
async fn a_retry_of_many_goes_in_chunks() {
    let cli = Cli::new().await;
    let keys: Vec<String> = (0..2_500).map(|n| n.to_string()).collect();
    let lines: Vec<&str> = keys.iter().map(String::as_str).collect();
    let batch = cli.submit_with(&lines, &["--max-live", "10000"]).await;
    cli.fleet().drain(&batch, |_| failed("no")).await;

    let ran = cli.run(&["retry", &batch, "--all"]).await.exited(0);

    assert_eq!(ran.out, "2,500 items have new attempts\n");
    let counts = cli.counts(&batch).await;
    assert_eq!((&counts["waiting"], &counts["failed"]), (&json!(2_500), &json!(0)));
}

#[tokio::test]
async fn workers_are_told_of_what_changes_for_them() {
    let cli = Cli::new().await;
    let batch = cli.submit(&["a", "b"]).await;
    let fleet = cli.fleet();
    fleet.hand_in(&fleet.claim(&batch, 1).await, |_| failed("no")).await;
    let mut listener = Listener::connect(fleet.database.options()).await.unwrap();

    for verb in [&["pause"] as &[&str], &["resume"], &["retry", "--all"], &["cancel"]] {
        let (verb, flags) = verb.split_first().unwrap();
        cli.run(&[&[*verb, &batch] as &[&str], flags].concat()).await.exited(0);
    }

    let mut told = Vec::new();
    while told.len() < 3 {
        let next = tokio::time::timeout(Duration::from_secs(30), listener.next()).await;
        told.push(next.unwrap().unwrap());
    }
    let work = Event::Work("q".into());
    assert_eq!(told, [work.clone(), work, Event::Cancelled(batch.parse().unwrap())]);
}

#[tokio::test]
async fn the_audit_log_says_who_did_it() {
    let cli = Cli::new().await;
    let batch = cli.submit(&["a"]).await;
    cli.run(&["pause", &batch]).await.exited(0);
    let row = cli
        .db
        .client()
        .await
        .query_one("SELECT actor, verb, before, after FROM holdfast.audit_log", &[])
        .await
        .unwrap();
    assert!(row.get::<_, &str>(0).starts_with("cli: user "), "{}", row.get::<_, &str>(0));
    let change: [&str; 3] = [row.get(1), row.get(2), row.get(3)];
    assert_eq!(change, ["pause", "open", "paused"]);
}
