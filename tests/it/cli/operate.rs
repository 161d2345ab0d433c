//! `ctl`, `leases`, `prune` and `workers`, as operators type them.

use holdfast::model::WorkerId;
use serde_json::{Value, json};

use super::{Cli, succeeded};

impl Cli {
    /// A row of a worker that holds what the fleet of this test claims.
    async fn register(&self, id: WorkerId, name: &str) {
        let insert = "INSERT INTO holdfast.workers (id, name, host, pid, version, queues, slots,
                             lease_s, state) VALUES ($1, $2, 'h', 1, '9.9', '{q}', 4, 60, 'running')";
        self.db.client().await.execute(insert, &[&id.uuid(), &name]).await.unwrap();
    }

    async fn audit(&self) -> Vec<String> {
        let select = "SELECT verb || coalesce(' ' || (detail ->> 'reason'), '')
                        FROM holdfast.audit_log ORDER BY id";
        let rows = self.db.client().await.query(select, &[]).await.unwrap();
        rows.iter().map(|row| row.get(0)).collect()
    }
}

#[tokio::test]
async fn claims_are_stopped_and_started_for_the_whole_database() {
    let cli = Cli::new().await;
    let batch = cli.submit(&["a"]).await;
    let fleet = cli.fleet();
    let switch = async |verb: &str, more: &[&str]| {
        let arguments = [&["ctl", verb, "--reason", "INC-1"] as &[&str], more].concat();
        cli.run(&arguments).await.exited(0)
    };

    assert_eq!(switch("stop-claims", &["--dry-run"]).await.out, "claims would be off\n");
    assert!(cli.audit().await.is_empty());
    let stopped = switch("stop-claims", &["--json"]).await.json();
    assert_eq!(stopped, json!({"claims": "off", "changed": true, "dry_run": false}));
    assert!(fleet.claim(&batch, 1).await.is_empty());
    let again = switch("stop-claims", &[]).await.out;
    assert!(
        again.starts_with("claims are off already, since ") && again.contains("INC-1"),
        "{again}"
    );

    assert_eq!(switch("start-claims", &[]).await.out, "claims are on\n");
    assert_eq!(fleet.claim(&batch, 1).await.len(), 1);
    assert_eq!(cli.audit().await, ["stop_claims INC-1", "start_claims INC-1"]);
    cli.run(&["ctl", "stop-claims"]).await.exited(2).says("--reason");
}

#[tokio::test]
async fn workers_are_asked_by_name_or_id_or_all() {
    let cli = Cli::new().await;
    let (one, other) = (WorkerId::generate(), WorkerId::generate());
    cli.register(one, "one").await;
    cli.register(other, "other").await;
    let asked = async || {
        let workers = cli.run(&["workers", "--json"]).await.exited(0).lines();
        workers.iter().map(|worker| worker["asked"].clone()).collect::<Vec<Value>>()
    };

    cli.run(&["ctl", "quiet", "one", "--dry-run"]).await.exited(0).says("nothing was changed");
    assert_eq!(asked().await, [json!(null), json!(null)]);
    let said = cli.run(&["ctl", "quiet", "one"]).await.exited(0).out;
    assert_eq!(said, format!("worker {one} (one) is asked to be quiet\n"));
    assert_eq!(asked().await, [json!("quiet"), json!(null)]);
    let text = cli.run(&["workers"]).await.exited(0).out;
    assert!(text.contains("running, asked to be quiet") && text.contains(" s ago"), "{text}");
    cli.run(&["ctl", "quiet", "--off", &one.to_string()]).await.exited(0);
    assert_eq!(asked().await, [json!(null), json!(null)]);

    let drained = cli.run(&["ctl", "drain", "--all", "--reason", "r", "--json"]).await.exited(0);
    assert_eq!(drained.lines().len(), 2);
    assert_eq!(drained.lines()[0]["done"], json!(true));
    assert_eq!(asked().await, [json!("drain"), json!("drain")]);
    cli.run(&["ctl", "quiet", "--off", "one"]).await.exited(73);
    cli.run(&["ctl", "quiet", "nobody"]).await.exited(77).says("nobody");
    cli.run(&["ctl", "quiet"]).await.exited(2);
    assert_eq!(cli.audit().await, ["quiet", "unquiet", "drain r", "drain r"]);
}

#[tokio::test]
async fn leases_are_shown_expired_and_released() {
    let cli = Cli::new().await;
    let batch = cli.submit(&["a", "b"]).await;
    let fleet = cli.fleet();
    cli.register(fleet.worker, "holder").await;
    let holds = fleet.claim(&batch, 1).await;
    let list = async |flags: &[&str]| {
        let arguments = [&["leases", "list", "--json"] as &[&str], flags].concat();
        cli.run(&arguments).await.exited(0).lines()
    };
    let lease = holds[0].lease().to_string();

    let listed = list(&["--worker", "holder"]).await;
    assert_eq!(listed[0]["lease"], json!(lease));
    assert!(listed[0]["margin_s"].as_f64().unwrap() > 0.0, "{listed:?}");
    assert!(list(&["--overdue"]).await.is_empty());

    let expire = ["leases", "expire", &lease, "--reason", "INC-2"];
    let shown = cli.run(&expire).await.exited(0).says("--yes");
    assert!(shown.out.contains(&lease), "{}", shown.out);
    assert_eq!(list(&[]).await[0]["revoked_at"], json!(null), "a look changes nothing");
    let done = cli.run(&[&expire as &[&str], &["--yes"]].concat()).await.exited(0).out;
    assert!(
        done.starts_with(&format!("lease {lease} is revoked: its items run again in ")),
        "{done}"
    );
    assert_ne!(list(&[]).await[0]["revoked_at"], json!(null));
    assert!(cli.run(&["leases", "list"]).await.out.contains("revoked"));

    let release = ["leases", "release", "--worker", "holder", "--reason", "INC-2", "--yes"];
    let kept = cli.run(&release).await.exited(73).out;
    assert!(kept.contains("is kept: its worker may be alive"), "{kept}");
    let gone = [&release as &[&str], &["--worker-is-gone"]].concat();
    let done = cli.run(&gone).await.exited(0).out;
    assert_eq!(done, format!("lease {lease} is over: 1 items are given back\n"));
    assert!(list(&[]).await.is_empty());
    assert_eq!(cli.counts(&batch).await["waiting"], json!(1));
    cli.run(&expire).await.exited(77).says(&lease);
    cli.run(&["leases", "expire", "--reason", "x"]).await.exited(2);
    assert_eq!(cli.audit().await, ["expire_lease INC-2", "release_lease INC-2"]);
}

#[tokio::test]
async fn what_is_old_is_shown_and_removed() {
    let cli = Cli::new().await;
    let (old, young) = (cli.submit(&["a", "b"]).await, cli.submit(&["a"]).await);
    let fleet = cli.fleet();
    for batch in [&old, &young] {
        fleet.drain(batch, |_| succeeded("1")).await;
    }
    let open = cli.submit(&["a"]).await;
    let age =
        "UPDATE holdfast.batches SET finished_at = finished_at - interval '2 h' WHERE id = $1";
    let id: holdfast::model::BatchId = old.parse().unwrap();
    cli.db.client().await.execute(age, &[&id.uuid()]).await.unwrap();

    let shown = cli.run(&["prune", "--older-than", "1h", "--json"]).await.exited(0).json();
    assert_eq!((&shown["batches"], &shown["items"]), (&json!(1), &json!(2)));
    cli.run(&["show", &old]).await.exited(0);
    let nothing = ["prune", "--older-than", "1h", "--owner", "nobody", "--yes", "--json"];
    assert_eq!(cli.run(&nothing).await.exited(0).json()["batches"], json!(0));
    let done = cli.run(&["prune", "--older-than", "1h", "--yes", "--json"]).await.exited(0).json();
    assert_eq!(done["batches"], json!(1));
    assert!(done["rows"].as_i64().unwrap() >= 4, "{done}");

    cli.run(&["show", &old]).await.exited(77);
    cli.run(&["show", &young]).await.exited(0);
    assert_eq!(cli.counts(&open).await["succeeded"], json!(0));
    cli.run(&["prune", "--older-than", "1h", "--owner", "x", "--kind", "audit"]).await.exited(2);
    cli.run(&["prune"]).await.exited(2);
    assert_eq!(cli.audit().await.iter().filter(|verb| *verb == "prune").count(), 3);
}
