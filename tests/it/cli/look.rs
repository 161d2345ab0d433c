//! Lists and single items.

use serde_json::json;

use super::{Cli, again, failed, succeeded};

#[tokio::test]
async fn batches_are_listed_newest_first_in_pages() {
    let cli = Cli::new().await;
    let mut batches = Vec::new();
    for n in ["1", "2", "3"] {
        batches.insert(0, cli.submit_with(&["a"], &["--title", n]).await);
    }
    cli.run(&["pause", &batches[1]]).await.exited(0);
    let list = async |flags: &[&str]| {
        let arguments = [&["batches", "--json"] as &[&str], flags].concat();
        let lines = cli.run(&arguments).await.exited(0).lines();
        lines.iter().map(|line| line["id"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };

    assert_eq!(list(&[]).await, batches);
    assert_eq!(list(&["--limit", "2"]).await, batches[..2]);
    assert_eq!(list(&["--before", &batches[1]]).await, batches[2..]);
    assert_eq!(list(&["--state", "paused"]).await, batches[1..2]);
    assert_eq!(list(&["--queue", "narrow"]).await, Vec::<String>::new());
    cli.run(&["batches", "--state", "asleep"]).await.exited(2).says("finished");

    let text = cli.run(&["batches", "--limit", "1"]).await.exited(0);
    assert!(text.out.contains(&batches[0]) && !text.out.contains(&batches[1]), "{}", text.out);
    text.says(&format!("--before {}", batches[0]));
}

#[tokio::test]
async fn items_are_listed_by_position_and_status() {
    let cli = Cli::new().await;
    let batch = cli.submit_with(&["a", "b", "c", "d", "e"], &["--max-live", "4"]).await;
    let fleet = cli.fleet();
    let holds = fleet.claim(&batch, 3).await;
    fleet.hand_in(&holds[..1], |_| succeeded("1")).await;
    fleet.hand_in(&holds[1..2], |_| failed("no\nluck")).await;
    let list = async |flags: &[&str]| {
        let arguments = [&["items", &batch, "--json"] as &[&str], flags].concat();
        let lines = cli.run(&arguments).await.exited(0).lines();
        lines
            .iter()
            .map(|l| format!("{} {}", l["key"].as_str().unwrap(), l["status"].as_str().unwrap()))
            .collect::<Vec<_>>()
    };

    let all = list(&[]).await;
    assert_eq!(all, ["a succeeded", "b failed", "c leased", "d queued", "e queued"]);
    assert_eq!(list(&["--status", "failed"]).await, ["b failed"]);
    assert_eq!(list(&["--from", "1", "--limit", "2"]).await, all[1..3]);
    assert_eq!(list(&["--from", "2147483647"]).await, Vec::<String>::new());
    cli.run(&["items", &batch, "--status", "sleeping"]).await.exited(2);

    let text = cli.run(&["items", &batch, "--limit", "2"]).await.exited(0).says("--from 2");
    assert!(text.out.contains("no\\nluck"), "{}", text.out);
}

#[tokio::test]
async fn an_item_is_shown_with_its_attempts_and_its_result() {
    let cli = Cli::new().await;
    let input =
        b"{\"key\":\"the key\",\"input\":{\"b\":1,\"a\":2},\"acceptance_criteria\":[\"x\"]}";
    let submit = ["submit", "-", "--queue", "q", "--json"];
    let ran = cli.run_with(&submit, input).await.exited(0).json();
    let batch = ran["batch"].as_str().unwrap();
    let fleet = cli.fleet();
    fleet.hand_in(&fleet.claim(batch, 1).await, |_| again("first try")).await;

    let item = cli.run(&["item", batch, "the key", "--json"]).await.exited(0).json();
    assert_eq!((&item["status"], &item["attempt"]), (&json!("queued"), &json!(2)));
    assert_eq!((&item["result"], &item["result_size"]), (&json!(null), &json!(0)));

    fleet.drain(batch, |_| succeeded("{\"y\":1,\"x\":2}")).await;
    let ran = cli.run(&["item", batch, "--position", "0", "--json"]).await.exited(0);
    let item = ran.json();
    assert_eq!((&item["status"], &item["attempt"]), (&json!("succeeded"), &json!(2)));
    assert!(ran.out.contains("\"input\":{\"b\":1,\"a\":2},"), "{}", ran.out);
    assert!(ran.out.contains("\"result\":{\"y\":1,\"x\":2},"), "{}", ran.out);
    assert_eq!(item["acceptance_criteria"], json!(["x"]));
    let attempt = &item["attempts"][0];
    assert_eq!((&attempt["attempt"], &attempt["ending"]), (&json!(1), &json!("error")));
    assert_eq!((&attempt["error"], &attempt["exit_status"]), (&json!("first try"), &json!(1)));
    // Numbers that outgrow a double travel as text.
    assert!(attempt["token"].is_string() && item["token"].is_string());

    let text = cli.run(&["item", batch, "the key"]).await.exited(0).out;
    for part in ["succeeded", "{\"y\":1,\"x\":2}", "first try", "error, status 1"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    cli.run(&["item", batch, "another"]).await.exited(77).says("\"another\"");
    cli.run(&["item", batch, "--position", "1"]).await.exited(77).says("position 1");
    cli.run(&["item", batch]).await.exited(2);
}

#[tokio::test]
async fn workers_are_listed_until_they_end() {
    let cli = Cli::new().await;
    let client = cli.db.client().await;
    let register = "INSERT INTO holdfast.workers
                           (id, name, host, pid, version, queues, slots, lease_s, state, heartbeat_at)
                    SELECT gen_random_uuid(), n, 'host', 1, '0', '{q}', 16, 60, 'running',
                           clock_timestamp() - silence
                      FROM (VALUES ('well', interval '0'), ('gone', interval '2 min')) v(n, silence)";
    client.batch_execute(register).await.unwrap();

    let workers = cli.run(&["workers", "--json"]).await.exited(0).lines();
    let mut states: Vec<_> = workers.iter().map(|w| json!([w["name"], w["silent"]])).collect();
    states.sort_by_key(ToString::to_string);
    assert_eq!(states, [json!(["gone", true]), json!(["well", false])]);

    client.batch_execute("UPDATE holdfast.workers SET ended_at = now()").await.unwrap();
    assert_eq!(cli.run(&["workers", "--json"]).await.exited(0).out, "");
}

#[tokio::test]
async fn leases_are_listed_the_first_to_expire_first() {
    let cli = Cli::new().await;
    let batch = cli.submit(&["a", "b", "c"]).await;
    let fleet = cli.fleet();
    let token = fleet.claim(&batch, 2).await[0].token();
    fleet.claim(&batch, 1).await;
    let client = cli.db.client().await;
    let expire = "UPDATE holdfast.leases SET expires_at = now() - interval '1 s'
                   WHERE cardinality(positions) = 1";
    client.batch_execute(expire).await.unwrap();

    let leases = cli.run(&["leases", "list", "--json"]).await.exited(0).lines();
    let seen: Vec<_> = leases.iter().map(|l| json!([l["items"], l["expired"]])).collect();
    assert_eq!(seen, [json!([1, true]), json!([2, false])]);
    assert_eq!((&leases[1]["batch"], &leases[1]["queue"]), (&json!(batch), &json!("q")));
    assert_eq!(leases[1]["token"], json!(token.to_string()));

    let first = cli.run(&["leases", "list", "--json", "--limit", "1"]).await.exited(0);
    assert_eq!(first.says("more than these 1").lines().len(), 1);
    for nobody in [["--owner", "nobody"], ["--queue", "r"]] {
        let list = [&["leases", "list", "--json"], &nobody[..]].concat();
        assert_eq!(cli.run(&list).await.exited(0).out, "");
    }
    let text = cli.run(&["leases", "list"]).await.exited(0).out;
    assert!(text.contains(&batch) && text.contains("0/2") && text.contains("expired"), "{text}");
}

/// A verdict of one leaf, as it is stored.
fn stored_verdict(criterion: &str, checked: bool, holds: bool) -> String {
    let unchecked = if checked { json!([]) } else { json!([criterion]) };
    json!({
        "source": "acceptance_checklist", "requirement": "delegation_acceptance_criteria",
        "leaves": [{"criterion": criterion, "family": "file_exists", "checked": checked,
                    "holds": holds, "detail": "why"}],
        "unchecked": unchecked, "all_hold": holds,
    })
    .to_string()
}

#[tokio::test]
async fn verdicts_are_listed_filtered_counted_and_exported() {
    let cli = Cli::new().await;
    let batch = cli.submit(&["a", "b", "c", "d"]).await;
    cli.fleet().drain(&batch, |_| succeeded("1")).await;
    let client = cli.db.client().await;
    for (position, class, verdict) in [
        (0, "holds", stored_verdict("file:x exists", true, true)),
        (1, "fails", stored_verdict("file:y\n- holds: z exists", true, false)),
        (2, "unverified", "[1]".to_owned()),
    ] {
        let update = "UPDATE holdfast.outcomes SET verdict_class = $2, verdict = $3::text::json
                       WHERE position = $1";
        client.execute(update, &[&position, &class, &verdict]).await.unwrap();
    }
    let counted = "UPDATE holdfast.progress p SET verdict_holds = 1, verdict_fails = 1
                    WHERE p.seq = (SELECT max(seq) FROM holdfast.progress)";
    client.execute(counted, &[]).await.unwrap();
    let keys = async |command: &str, classes: &[&str]| {
        let flags = classes.iter().flat_map(|class| ["--verdict", class]);
        let json = if command == "items" { &["--json"] as &[&str] } else { &[] };
        let arguments: Vec<&str> =
            [command, &batch].into_iter().chain(json.iter().copied()).chain(flags).collect();
        let lines = cli.run(&arguments).await.exited(0).lines();
        lines.iter().map(|line| line["key"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };

    for command in ["items", "export"] {
        assert_eq!(keys(command, &[]).await, ["a", "b", "c", "d"]);
        assert_eq!(keys(command, &["holds"]).await, ["a"]);
        assert_eq!(keys(command, &["fails"]).await, ["b"]);
        assert_eq!(keys(command, &["none"]).await, ["d"]);
        cli.run(&[command, &batch, "--verdict", "passed"]).await.exited(2).says("unverified");
    }
    assert_eq!(keys("export", &["fails", "none"]).await, ["b", "d"]);

    let lines = cli.run(&["export", &batch]).await.exited(0).lines();
    assert_eq!(lines[0]["acceptance_verdict"]["all_hold"], json!(true));
    assert_eq!(lines[2]["acceptance_verdict"], json!(null), "what is none reads as none");
    let item = cli.run(&["item", &batch, "b", "--json"]).await.exited(0).json();
    assert_eq!(item["acceptance_verdict"]["leaves"][0]["holds"], json!(false));
    let shown = cli.run(&["item", &batch, "b"]).await.exited(0).out;
    assert!(shown.contains("- does not hold: file:y - holds: z exists (why)"), "{shown}");
    let table = cli.run(&["items", &batch]).await.exited(0).out;
    assert!(table.contains("holds") && table.contains("fails"), "{table}");
    let row = cli.run(&["show", &batch, "--json"]).await.exited(0).json();
    assert_eq!(row["verdicts"], json!({"holds": 1, "fails": 1, "unverified": 0}));
    assert_eq!(row["counts"]["succeeded"], json!(4));
    let shown = cli.run(&["show", &batch]).await.exited(0).out;
    assert!(shown.contains("1 hold, 1 fail"), "{shown}");
}
