//! Batches that are stored: once, as they were submitted.

use holdfast::model::BatchId;
use serde_json::json;
use tokio::io::AsyncWriteExt;

use super::{Cli, succeeded};
use crate::support::proxy::Proxy;

#[tokio::test]
async fn a_batch_is_stored_with_all_that_was_said_about_it() {
    let cli = Cli::new().await;
    let input = "{\"key\":\"a\",\"input\":{\"n\":1},\"acceptance_criteria\":[\" file_exists:x \"]}\n\
                 {\"key\":\"b\",\"input\":\"text\",\"not_before\":\"2030-01-01T00:00:00+01:00\"}\n";
    let flags = [
        "--title",
        "A title",
        "--key",
        "k",
        "--owner",
        "ana",
        "--thread",
        "t",
        "--max-running",
        "9",
        "--max-live",
        "20",
        "--max-attempts",
        "5",
        "--priority",
        "-7",
        "--not-before",
        "2029-01-01T00:00:00Z",
        "--json",
    ];
    let submit = [&["submit", "-", "--queue", "narrow"] as &[&str], &flags].concat();

    let ran = cli.run_with(&submit, input.as_bytes()).await.exited(0).json();
    let batch = ran["batch"].as_str().unwrap();

    assert_eq!(ran, json!({"batch": batch, "queue": "narrow", "items": 2, "created": true}));
    let shown = cli.run(&["show", batch, "--json"]).await.exited(0).json();
    for (member, value) in [
        ("owner", json!("ana")),
        ("queue", json!("narrow")),
        ("title", json!("A title")),
        ("thread", json!("t")),
        ("submission_key", json!("k")),
        ("state", json!("queued")),
        ("item_count", json!(2)),
        ("priority", json!(-7)),
        // The queue's own cap is lower.
        ("max_running", json!(4)),
        ("max_live", json!(20)),
        ("max_attempts", json!(5)),
        ("not_before", json!("2029-01-01T00:00:00Z")),
        ("finished_at", json!(null)),
    ] {
        assert_eq!(shown[member], value, "{member}");
    }
    let row = cli
        .db
        .client()
        .await
        .query_one(
            "SELECT spec->>'executor', (SELECT acceptance_criteria::text FROM holdfast.items
                                         WHERE batch_id = b.id AND key = 'a'),
                    (SELECT not_before = '2029-12-31T23:00:00Z' FROM holdfast.items
                      WHERE batch_id = b.id AND key = 'b')
               FROM holdfast.batches b",
            &[],
        )
        .await
        .unwrap();
    assert_eq!(row.get::<_, &str>(0), "command/1");
    assert_eq!(row.get::<_, &str>(1), "[\"file_exists:x\"]");
    assert!(row.get::<_, bool>(2));
}

#[tokio::test]
async fn digits_survive_from_the_input_to_the_export() {
    let cli = Cli::new().await;
    let number = "{\"n\": 12345678901234567890123.450, \"m\":9007199254740993,  \"e\":1e999}";
    let line = format!("{{\"key\":\"a\",\"input\":{number}}}");
    let submit = ["submit", "-", "--queue", "q", "--json"];
    let ran = cli.run_with(&submit, line.as_bytes()).await.exited(0).json();
    let batch = ran["batch"].as_str().unwrap();

    let fleet = cli.fleet();
    let holds = fleet.claim(batch, 1).await;
    let positions = [holds[0].item().position()];
    let input = fleet.database.item_inputs(holds[0].item().batch(), &positions).await.unwrap();
    assert_eq!(input[0].input_json, number);
    fleet.hand_in(&holds, |_| succeeded(number)).await;

    let item = cli.run(&["item", batch, "a", "--json"]).await.exited(0).out;
    assert!(item.contains(&format!("\"input\":{number},")), "{item}");
    assert!(item.contains(&format!("\"result\":{number},")), "{item}");
    let export = cli.run(&["export", batch]).await.exited(0).out;
    assert!(export.contains(&format!("\"result\":{number},")), "{export}");
}

#[tokio::test]
async fn a_repeat_under_the_same_key_is_the_first_batch() {
    let cli = Cli::new().await;
    let file = cli.file("items", "a\nb\n");
    let other = cli.file("other", "a\nc\n");
    let submit = ["submit", &file, "--lines", "--queue", "q", "--key", "k", "--json"];

    let first = cli.run(&submit).await.exited(0).json();
    let again = cli.run(&submit).await.exited(0).json();

    assert_eq!((&first["created"], &again["created"]), (&json!(true), &json!(false)));
    assert_eq!(first["batch"], again["batch"]);
    assert_eq!(cli.stored().await, (1, 2, 1));
    let said = cli.run(&submit[..submit.len() - 1]).await.exited(0).out;
    assert!(said.contains("stored before under this key"), "{said}");

    // Other content, other parameters: a conflict. Another owner's key is another key.
    let batch = first["batch"].as_str().unwrap();
    let changed = ["submit", &other, "--lines", "--queue", "q", "--key", "k"];
    cli.run(&changed).await.exited(73).says(batch);
    cli.run(&[&submit as &[&str], &["--priority", "1"]].concat()).await.exited(73).says(batch);
    assert_eq!(cli.stored().await, (1, 2, 1));
    let ana = cli.run(&[&submit as &[&str], &["--owner", "ana"]].concat()).await.exited(0).json();
    assert_ne!(ana["batch"], first["batch"]);
}

#[tokio::test]
async fn racing_repeats_store_one_batch() {
    let cli = Cli::new().await;
    let file = cli.file("items", "a\nb\n");
    let submit = ["submit", &file, "--lines", "--queue", "q", "--key", "k", "--json"];
    let ran = tokio::join!(cli.run(&submit), cli.run(&submit), cli.run(&submit), cli.run(&submit));
    let answers = [ran.0, ran.1, ran.2, ran.3].map(|ran| ran.exited(0).json());
    let created = answers.iter().filter(|answer| answer["created"] == true).count();
    assert_eq!(created, 1);
    assert!(answers.iter().all(|answer| answer["batch"] == answers[0]["batch"]));
    assert_eq!(cli.stored().await, (1, 2, 1));
}

#[tokio::test]
async fn without_a_key_every_submit_is_a_batch() {
    let cli = Cli::new().await;
    assert_ne!(cli.submit(&["a"]).await, cli.submit(&["a"]).await);
    assert_eq!(cli.stored().await, (2, 2, 2));
}

#[tokio::test]
async fn a_batch_whose_commit_was_not_answered_is_found() {
    let cli = Cli::new().await;
    let proxy = Proxy::before(cli.db.url()).await;
    let file = cli.file("items", "a\nb\n");
    for flags in [&[] as &[&str], &["--key", "k"]] {
        proxy.lose_the_next_commit();
        let submit = ["submit", &file, "--lines", "--queue", "q", "--json"];
        let through = ["--database-url", proxy.url()];
        let arguments = [&submit as &[&str], &through, flags].concat();
        let ran = cli.run(&arguments).await.exited(0).json();
        assert_eq!(ran["created"], true);
        let batch: BatchId = ran["batch"].as_str().unwrap().parse().unwrap();
        cli.run(&["show", &batch.to_string()]).await.exited(0);
    }
    assert_eq!(cli.stored().await, (2, 4, 2));
}

#[tokio::test]
async fn a_submit_that_dies_before_its_end_leaves_nothing() {
    let cli = Cli::new().await;
    let mut child =
        cli.command(&["submit", "-", "--lines", "--queue", "q", "--key", "k"]).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(b"a\nb\n").await.unwrap();

    child.kill().await.unwrap();

    assert_eq!(cli.stored().await, (0, 0, 0));
    cli.submit_with(&["a", "b"], &["--key", "k"]).await;
    assert_eq!(cli.stored().await, (1, 2, 1));
}

#[tokio::test]
async fn workers_are_told_of_a_new_batch() {
    let cli = Cli::new().await;
    let fleet = cli.fleet();
    let mut listener = holdfast::store::Listener::connect(fleet.database.options()).await.unwrap();

    cli.submit(&["a"]).await;

    let told = tokio::time::timeout(std::time::Duration::from_secs(30), listener.next()).await;
    assert_eq!(told.unwrap(), Some(holdfast::store::Event::Work("q".into())));
}
