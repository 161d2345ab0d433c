//! Recovery after a restore: tokens go on rising.

use holdfast::model::BatchId;
use serde_json::json;

use super::{Cli, succeeded};

impl Cli {
    /// Ends the wait that a raise begins (F7).
    async fn settle(&self) {
        let settle = "UPDATE holdfast.control SET quiet_until = '-infinity'";
        self.db.client().await.batch_execute(settle).await.unwrap();
    }

    async fn token_of_a_new_item(&self) -> i64 {
        let batch = self.submit(&["a"]).await;
        self.fleet().drain(&batch, |_| succeeded("1")).await;
        let batch: BatchId = batch.parse().unwrap();
        let token = "SELECT token FROM holdfast.outcomes WHERE batch_id = $1";
        let client = self.db.client().await;
        client.query_one(token, &[&batch.uuid()]).await.unwrap().get(0)
    }
}

#[tokio::test]
async fn tokens_are_above_all_before_after_a_restored_snapshot_and_a_raise() {
    let cli = Cli::new().await;
    let client = cli.db.client().await;
    cli.token_of_a_new_item().await;
    let snapshot = "SELECT last_value FROM holdfast.token_seq";
    let at_snapshot: i64 = client.query_one(snapshot, &[]).await.unwrap().get(0);
    let mut before = 0;
    for _ in 0..3 {
        before = cli.token_of_a_new_item().await;
    }

    // The snapshot is put back: sequence and epoch as they were, the same system and timeline.
    client.query_one("SELECT setval('holdfast.token_seq', $1)", &[&at_snapshot]).await.unwrap();
    assert!(cli.token_of_a_new_item().await < before, "only a raise helps");
    client.query_one("SELECT setval('holdfast.token_seq', $1)", &[&at_snapshot]).await.unwrap();
    let plan = cli.run(&["recover", "plan", "--json"]).await.exited(0).json();
    assert_eq!(plan["moved"], json!(false));
    let at_work = "INSERT INTO holdfast.workers
        (id, name, host, pid, version, queues, slots, state, lease_s)
        VALUES (gen_random_uuid(), 'w', 'h', 1, 'v', '{}', 1, 'running', 60)";
    client.batch_execute(at_work).await.unwrap();
    let epoch = |value: &serde_json::Value| value.as_str().unwrap().parse::<i64>().unwrap();
    let raised = cli.run(&["recover", "raise-epoch", "--yes", "--json"]).await.exited(0).json();

    assert_eq!(raised["before"], plan["epoch"]);
    assert!(epoch(&raised["epoch"]) >= epoch(&plan["next_epoch"]));
    let waits = raised["settles_in_s"].as_f64().unwrap();
    assert!((59.0..=60.0).contains(&waits), "for the lease of the worker: {raised}");
    let plan = cli.run(&["recover", "plan"]).await.exited(0).out;
    assert!(plan.contains("on; they wait for"), "{plan}");
    cli.settle().await;
    let after = cli.token_of_a_new_item().await;
    assert!(after > before, "{after} after {before}");
    assert_eq!(after >> 31, epoch(&raised["epoch"]));
    let audit = "SELECT actor, before, after FROM holdfast.audit_log WHERE verb = 'raise_epoch'";
    let audit = client.query_one(audit, &[]).await.unwrap();
    assert!(audit.get::<_, &str>(0).starts_with("cli: user "));
    assert_eq!(
        (json!(audit.get::<_, &str>(1)), json!(audit.get::<_, &str>(2))),
        (raised["before"].clone(), raised["epoch"].clone())
    );
}

#[tokio::test]
async fn a_token_seen_elsewhere_is_below_all_that_come() {
    let cli = Cli::new().await;
    let elsewhere = cli.token_of_a_new_item().await + (1_i64 << 31) * 100_000_000;
    let raise = ["recover", "raise-epoch", "--above", &elsewhere.to_string(), "--yes"];
    let raised = cli.run(&raise).await.exited(0).out;
    assert!(raised.contains("claims wait for"), "{raised}");
    cli.settle().await;
    assert!(cli.token_of_a_new_item().await > elsewhere);
}

#[tokio::test]
async fn a_plan_changes_nothing_and_a_raise_is_asked_about() {
    let cli = Cli::new().await;
    let client = cli.db.client().await;
    let control = async || {
        let row = client.query_one("SELECT c::text FROM holdfast.control c", &[]).await.unwrap();
        row.get::<_, String>(0)
    };
    let before = control().await;
    let plan = cli.run(&["recover", "plan"]).await.exited(0).out;
    for part in ["after a raise", "last token", "by hand", "- no worker of before the restore"] {
        assert!(plan.contains(part), "{part}: {plan}");
    }
    cli.run(&["recover", "raise-epoch"]).await.exited(2).says("--yes");
    cli.run(&["recover", "raise-epoch", "--above", "x", "--yes"]).await.exited(2);
    assert_eq!(control().await, before);

    client.batch_execute("UPDATE holdfast.control SET timeline = timeline + 1").await.unwrap();
    let plan = cli.run(&["recover", "plan"]).await.exited(0).out;
    assert!(plan.contains("by itself"), "{plan}");
}
