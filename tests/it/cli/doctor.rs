//! The doctor: each state that it knows is found, by its name and severity, and nothing else is.

use std::time::Duration;

use futures::future::join_all;
use holdfast::embedded::{DataDir, EmbeddedOptions, EmbeddedPostgres};
use holdfast::model::{Conclusion, History, Hold};
use holdfast::store::{Concluding, Staging, migrate};
use serde_json::Value;
use tokio_postgres::{Client, NoTls};
use tokio_util::task::TaskTracker;

use super::{Cli, failed, succeeded};
use crate::chaos::servers::Servers;
use crate::support::fleet::{LONG, until};

/// What every server of the tests lives without: `fsync` and `full_page_writes`.
const NOT_DURABLE: (&str, &str) = ("not_durable", "warning");

impl Cli {
    /// What the doctor finds, beside what every server of the tests lives without.
    async fn found(&self, arguments: &[&str], exit: i32) -> Vec<(String, String)> {
        let arguments = [&["doctor", "--json"], arguments].concat();
        let report = self.run(&arguments).await.exited(exit).json();
        let mut found = names(&report);
        found.retain(|(name, severity)| (name.as_str(), severity.as_str()) != NOT_DURABLE);
        assert_eq!(names(&report).len() - found.len(), 2);
        for finding in report["findings"].as_array().unwrap() {
            for part in ["what", "meaning", "remedy"] {
                assert!(!finding[part].as_str().unwrap().is_empty(), "{part}: {finding}");
            }
        }
        found
    }

    async fn sql(&self, statements: &str) {
        let client = self.db.client().await;
        client.batch_execute(statements).await.unwrap_or_else(|e| panic!("{statements}: {e:?}"));
    }

    /// One worker that is well.
    async fn worker(&self) {
        self.sql(
            "INSERT INTO holdfast.workers (id, name, host, pid, version, queues, slots, lease_s, state)
             VALUES ('00000000-0000-0000-0000-000000000001', 'well', 'h', 1, '0', '{q}', 1, 60, 'running')",
        )
        .await;
    }
}

fn names(report: &Value) -> Vec<(String, String)> {
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let findings = report["findings"].as_array().unwrap().iter();
    findings.map(|finding| (text(&finding["name"]), text(&finding["severity"]))).collect()
}

fn expected(found: &[(&str, &str)]) -> Vec<(String, String)> {
    found.iter().map(|(name, severity)| ((*name).to_owned(), (*severity).to_owned())).collect()
}

/// Some succeed, some fail, some are tried again.
fn mixed(hold: &Hold) -> holdfast::model::Settlement {
    if hold.item().position().get() % 3 == 0 { failed("no") } else { succeeded("1") }
}

#[tokio::test]
async fn a_database_in_order_has_no_findings() {
    let cli = Cli::new().await;
    cli.worker().await;
    let batch = cli.submit(&["a", "b", "c", "d"]).await;
    cli.fleet().drain(&batch, mixed).await;
    let cancelled = cli.submit(&["a", "b"]).await;
    cli.run(&["cancel", &cancelled]).await.exited(0);
    cli.submit(&["a", "b"]).await;

    assert_eq!(cli.found(&["--verify"], 10).await, []);
    let text = cli.run(&["doctor"]).await.exited(10).out;
    assert!(text.starts_with("warning: not_durable: fsync is off\n  means: "), "{text}");
    assert!(text.contains("\n  to do: set fsync = on"), "{text}");
}

#[tokio::test]
async fn switches_and_sequences_are_looked_at() {
    let cli = Cli::new().await;
    cli.worker().await;
    cli.submit(&["a"]).await;
    for (state, found) in [
        ("UPDATE holdfast.control SET claims_enabled = false", ("claims_off", "warning")),
        (
            "UPDATE holdfast.control SET claims_enabled = true, timeline = timeline + 1",
            ("moved", "note"),
        ),
        (
            "UPDATE holdfast.control SET timeline = timeline - 1;
             UPDATE holdfast.progress SET last_delta = 1000",
            ("deltas_behind", "critical"),
        ),
        (
            "UPDATE holdfast.progress SET last_delta = 0;
             ALTER SEQUENCE holdfast.token_seq CACHE 10",
            ("numbers_cached", "critical"),
        ),
        (
            "ALTER SEQUENCE holdfast.token_seq CACHE 1;
             UPDATE holdfast.workers SET started_at = now() - interval '1 hour'",
            ("sweep_late", "warning"),
        ),
        (
            "UPDATE holdfast.workers SET started_at = now(), queues = '{r}'",
            ("nobody_works", "warning"),
        ),
        (
            "UPDATE holdfast.workers SET queues = '{q}', heartbeat_at = now() - interval '2 min';
             UPDATE holdfast.batches SET control = 'paused'",
            ("workers_silent", "warning"),
        ),
    ] {
        cli.sql(state).await;
        let exit = if found.1 == "critical" { 20 } else { 10 };
        assert_eq!(cli.found(&[], exit).await, expected(&[found]), "{state}");
    }
}

#[tokio::test]
async fn leases_are_looked_at() {
    let cli = Cli::new().await;
    cli.worker().await;
    let batch = cli.submit(&["a", "b", "c"]).await;
    let lease = |values: &str| {
        format!(
            "DELETE FROM holdfast.leases;
             INSERT INTO holdfast.leases (batch_id, lease_id, token, worker_id, positions, histories,
                                          expires_at)
             SELECT b, gen_random_uuid(), 1, w, p, h, now() + e
               FROM (VALUES {values}) v(b, w, p, h, e)",
        )
        .replace("BATCH", &format!("'{batch}'::uuid"))
        .replace("WELL", "'00000000-0000-0000-0000-000000000001'::uuid")
    };
    let minute = "interval '1 min'";
    for (values, found) in [
        (format!("(BATCH, WELL, '{{0}}'::int[], NULL::bigint[], {minute})"), None),
        (
            "(BATCH, WELL, '{0}'::int[], NULL::bigint[], interval '-3 min')".to_owned(),
            Some(("lease_overdue", "critical")),
        ),
        (
            "(BATCH, WELL, '{0}'::int[], NULL::bigint[], interval '3 min')".to_owned(),
            Some(("lease_far", "warning")),
        ),
        (
            format!("(BATCH, gen_random_uuid(), '{{0}}'::int[], NULL::bigint[], {minute})"),
            Some(("lease_stranger", "warning")),
        ),
        (
            format!("(gen_random_uuid(), WELL, '{{0}}'::int[], NULL::bigint[], {minute})"),
            Some(("lease_orphan", "critical")),
        ),
        (
            format!("(BATCH, WELL, '{{0,1}}'::int[], '{{0}}'::bigint[], {minute})"),
            Some(("lease_uneven", "critical")),
        ),
        (
            format!("(BATCH, WELL, '{{3}}'::int[], NULL::bigint[], {minute})"),
            Some(("lease_outside", "critical")),
        ),
        (
            format!(
                "(BATCH, WELL, '{{0,1}}'::int[], NULL::bigint[], {minute}),
                 (BATCH, WELL, '{{1,2}}'::int[], NULL::bigint[], {minute})"
            ),
            Some(("lease_overlap", "critical")),
        ),
    ] {
        cli.sql(&lease(&values)).await;
        let exit = if found.is_some_and(|(_, severity)| severity == "critical") { 20 } else { 10 };
        let found: Vec<_> = found.into_iter().collect();
        assert_eq!(cli.found(&[], exit).await, expected(&found), "{values}");
    }

    cli.sql(&lease(&format!("(BATCH, WELL, '{{0}}'::int[], NULL::bigint[], {minute})"))).await;
    cli.sql("UPDATE holdfast.workers SET ended_at = now()").await;
    let found = [("nobody_works", "warning"), ("lease_of_ended", "note")];
    assert_eq!(cli.found(&[], 10).await, expected(&found));
    cli.run(&["cancel", &batch]).await.exited(0);
    cli.sql("UPDATE holdfast.batches SET leftovers = false").await;
    assert_eq!(cli.found(&[], 10).await, expected(&[("lease_left_over", "warning")]));
}

#[tokio::test]
async fn what_keeps_vacuum_from_its_work_is_named() {
    let cli = Cli::new().await;
    let client = cli.db.client().await;
    client
        .batch_execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT FROM holdfast.batches")
        .await
        .unwrap();
    assert_eq!(cli.found(&[], 10).await, []);
    let found = cli.found(&["--older-than", "1ms"], 20).await;
    assert_eq!(found, expected(&[("long_transaction", "critical")]));
    client.batch_execute("ROLLBACK").await.unwrap();

    cli.sql(
        "ALTER TABLE holdfast.waiting SET (autovacuum_enabled = off);
         ALTER TABLE holdfast.leases RESET (autovacuum_vacuum_threshold);
         INSERT INTO holdfast.waiting (batch_id, position, ready_at)
         SELECT gen_random_uuid(), g, now() FROM generate_series(1, 20000) g;
         DELETE FROM holdfast.waiting",
    )
    .await;
    // The counters of a session arrive after its end.
    let all = expected(&[
        ("autovacuum", "critical"),
        ("autovacuum", "warning"),
        ("dead_rows", "warning"),
    ]);
    let seen = async {
        while cli.found(&[], 20).await != all {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_mins(1), seen).await.expect("dead rows are seen");
}

#[tokio::test]
async fn what_belongs_to_the_whole_server_is_named() {
    let cli = Cli::new().await;
    let options = [("autovacuum", "off"), ("max_prepared_transactions", "2")];
    let server = Private::start(&options).await;
    let client = server.client().await;
    client
        .batch_execute(
            "SELECT pg_create_physical_replication_slot('forgotten');
             BEGIN; CREATE TABLE t (); PREPARE TRANSACTION 'forgotten too'",
        )
        .await
        .unwrap();

    let found = cli.found(&["--database-url", &server.url, "--older-than", "1ms"], 20).await;

    let all = [
        ("autovacuum", "critical"),
        ("prepared_transaction", "critical"),
        ("idle_slot", "warning"),
    ];
    assert_eq!(found, expected(&all));
    server.end().await;
}

#[tokio::test]
async fn few_connections_left_and_a_full_notification_queue_are_named() {
    let cli = Cli::new().await;
    let mut options = vec![("max_connections", "20")];
    let version: i32 = {
        let select = "SELECT current_setting('server_version_num')::integer";
        cli.db.client().await.query_one(select, &[]).await.unwrap().get(0)
    };
    // Before 17 the queue holds eight gigabytes: no test fills them.
    let fills = version >= 170_000;
    if fills {
        options.push(("max_notify_queue_pages", "64"));
    }
    let server = Private::start(&options).await;
    let doctor = ["--database-url", server.url.as_str()];
    assert_eq!(cli.found(&doctor, 10).await, []);

    let others = join_all((0..15).map(|_| server.client())).await;
    assert_eq!(cli.found(&doctor, 10).await, expected(&[("connections", "warning")]));
    drop(others);

    if fills {
        // A listener does not read while its transaction is open.
        let listener = server.client().await;
        listener.batch_execute("LISTEN c").await.unwrap();
        listener.batch_execute("BEGIN; SELECT 1").await.unwrap();
        let client = server.client().await;
        let notify = "SELECT pg_notify('c', g || repeat('x', 7900)) FROM generate_series(1, $1) g";
        let mut found = Vec::new();
        for (count, severity) in [(40, "warning"), (20, "critical")] {
            client.execute(notify, &[&count]).await.unwrap();
            let exit = if severity == "critical" { 20 } else { 10 };
            found = cli.found(&doctor, exit).await;
            assert_eq!(found, expected(&[("notification_queue", severity)]));
        }
        assert_eq!(found.len(), 1);
        listener.batch_execute("ROLLBACK").await.unwrap();
        until("the queue is empty again", LONG, async || cli.found(&doctor, 10).await.is_empty())
            .await;
    }
    server.end().await;
}

#[tokio::test]
async fn a_clock_that_is_far_off_is_named() {
    let cli = Cli::new().await;
    cli.db.replace_clock().await;
    assert_eq!(cli.found(&[], 10).await, []);
    for ahead in ["10 min", "-10 min"] {
        cli.sql(&format!("UPDATE clock.set SET ahead = '{ahead}'")).await;
        assert_eq!(cli.found(&[], 10).await, expected(&[("clock_offset", "warning")]), "{ahead}");
    }
}

#[tokio::test]
async fn a_standby_is_no_place_to_work() {
    let cli = Cli::new().await;
    let mut servers = Servers::new().await;
    if !servers.can_be_copied() {
        eprintln!("skipped: this server comes without pg_basebackup");
        return servers.end().await;
    }
    servers.attach_standby().await;

    let report = cli
        .run(&["doctor", "--json", "--database-url", &servers.standby_url()])
        .await
        .exited(20)
        .json();

    assert_eq!(names(&report), expected(&[("standby", "critical")]));
    servers.end().await;
}

/// Uses up so many transaction numbers.
async fn use_up_transactions(servers: &Servers, count: i32) {
    let client = servers.client().await;
    client.batch_execute("SET synchronous_commit = off").await.unwrap();
    let each = format!(
        "DO $$ BEGIN FOR n IN 1..{count} LOOP
             PERFORM pg_current_xact_id(); COMMIT; END LOOP; END $$"
    );
    client.batch_execute(&each).await.unwrap();
}

#[tokio::test]
#[ignore = "takes a minute: make long"]
async fn long_what_a_lagging_standby_keeps_from_vacuum_is_named() {
    let cli = Cli::new().await;
    let mut servers = Servers::new().await;
    if !servers.can_be_copied() {
        eprintln!("skipped: this server comes without pg_basebackup");
        return servers.end().await;
    }
    servers.attach_standby().await;
    let url = servers.url();
    let doctor = ["doctor", "--json", "--database-url", url.as_str()];
    assert_eq!(names(&cli.run(&doctor).await.exited(0).json()), []);

    servers.give_feedback(None).await;
    let reader = servers.standby_client().await;
    reader
        .batch_execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT FROM holdfast.batches")
        .await
        .unwrap();
    use_up_transactions(&servers, 1_100_000).await;
    let found = async |name| {
        until("it is named", LONG, async || {
            let report = cli.run(&doctor).await.json();
            names(&report) == expected(&[(name, "warning")])
        })
        .await;
    };
    found("standby_feedback").await;

    // With a slot it is the slot that remembers.
    let client = servers.client().await;
    client.batch_execute("SELECT pg_create_physical_replication_slot('s')").await.unwrap();
    servers.give_feedback(Some("s")).await;
    found("lagging_slot").await;
    drop(reader);
    servers.end().await;
}

/// A migrated server of a test's own.
struct Private {
    server: EmbeddedPostgres,
    url: String,
    connections: TaskTracker,
}

impl Private {
    async fn start(settings: &[(&str, &str)]) -> Self {
        let own = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
        let options = EmbeddedOptions {
            fsync: false,
            extra_settings: settings.iter().map(own).collect(),
            ..EmbeddedOptions::new(DataDir::Ephemeral)
        };
        let server = tokio::task::spawn_blocking(move || EmbeddedPostgres::start(&options));
        let server = server.await.unwrap().unwrap_or_else(|error| panic!("{error}"));
        let url = server.url("postgres");
        migrate::up(&url, None).await.unwrap();
        Self { server, url, connections: TaskTracker::new() }
    }

    async fn client(&self) -> Client {
        let (client, connection) = tokio_postgres::connect(&self.url, NoTls).await.unwrap();
        self.connections.spawn(async move { connection.await.ok() });
        client
    }

    async fn end(self) {
        tokio::task::spawn_blocking(move || drop(self.server)).await.unwrap();
    }
}

#[tokio::test]
async fn a_look_that_fails_is_a_finding_and_the_others_go_on() {
    let cli = Cli::new().await;
    cli.sql("UPDATE holdfast.control SET claims_enabled = false").await;
    let client = cli.db.client().await;
    client
        .batch_execute("BEGIN; LOCK TABLE holdfast.leases IN ACCESS EXCLUSIVE MODE")
        .await
        .unwrap();
    let all = [("claims_off", "warning"), ("unseen", "warning")];
    assert_eq!(cli.found(&[], 10).await, expected(&all));
    client.batch_execute("ROLLBACK").await.unwrap();

    cli.sql(
        "INSERT INTO holdfast.schema_migrations
         SELECT 9999, description, installed_on, success, checksum, execution_time
           FROM holdfast.schema_migrations LIMIT 1",
    )
    .await;
    assert_eq!(cli.found(&[], 20).await, expected(&[("schema", "critical")]));

    let nowhere = "postgres://nobody@127.0.0.1:1/nowhere";
    let report = cli.run(&["doctor", "--json", "--database-url", nowhere]).await.exited(20).json();
    assert_eq!(names(&report), expected(&[("unreachable", "critical")]));
    assert_eq!(report["worst"], "critical");
}

#[tokio::test]
async fn verification_finds_counts_and_places_that_are_wrong() {
    let cli = Cli::new().await;
    cli.worker().await;
    let batch = cli.submit(&["a", "b", "c", "d", "e", "f"]).await;
    cli.fleet().claim(&batch, 2).await;
    cli.sql("UPDATE holdfast.leases SET worker_id = '00000000-0000-0000-0000-000000000001'").await;
    assert_eq!(cli.found(&["--verify"], 10).await, []);
    for (wrong, says, undo) in [
        (
            "INSERT INTO holdfast.waiting (batch_id, position, ready_at)
             SELECT batch_id, 1, now() FROM holdfast.leases",
            ["position 1 is in", "rows say 1 and 0"],
            "DELETE FROM holdfast.waiting",
        ),
        (
            "UPDATE holdfast.leases SET positions = '{0}'",
            [
                "position 1 is in no place",
                "2 executing and 0 checked items are counted, rows say 1 and 0",
            ],
            "UPDATE holdfast.leases SET positions = '{0,1}'",
        ),
        (
            "UPDATE holdfast.progress SET next_position = 3 WHERE seq = 1",
            ["position 2 is in no place", "add up to 5 of 6"],
            "UPDATE holdfast.progress SET next_position = 2 WHERE seq = 1",
        ),
        (
            "UPDATE holdfast.batches SET finished_at = now()",
            ["ended with something left", "batch "],
            "UPDATE holdfast.batches SET finished_at = NULL",
        ),
        (
            "DELETE FROM holdfast.items WHERE position = 5",
            ["position 5 has no item", "batch "],
            "SELECT",
        ),
    ] {
        cli.sql(wrong).await;
        let report = cli.run(&["doctor", "--verify", "--json"]).await.exited(20).json();
        let finding = &report["findings"][0];
        assert_eq!(finding["name"], "inconsistent", "{wrong}");
        for part in says {
            assert!(finding["what"].as_str().unwrap().contains(part), "{part}: {finding}");
        }
        assert!(finding["what"].as_str().unwrap().contains(&batch));
        cli.sql(undo).await;
    }
}

#[tokio::test]
async fn verification_finds_staged_rows_that_are_not_their_leases() {
    let cli = Cli::new().await;
    cli.worker().await;
    let batch = cli.submit(&["a", "b", "c", "d"]).await;
    let fleet = cli.fleet();
    let holds = fleet.claim(&batch, 3).await;
    cli.sql("UPDATE holdfast.leases SET worker_id = '00000000-0000-0000-0000-000000000001'").await;
    let settlement = succeeded("1");
    let staging = |hold| Staging { hold, settlement: &settlement, evidence: &[], workspace: None };
    let items: Vec<Staging<'_>> = holds[..2].iter().map(staging).collect();
    let (id, ttl) = (batch.parse().unwrap(), Duration::from_mins(1));
    fleet.database.stage(id, fleet.worker, ttl, &items).await.unwrap();
    let conclusion = Conclusion::Recheck(History::FRESH);
    let given_back = [Concluding { hold: &holds[1], conclusion: &conclusion }];
    fleet.database.conclude(id, ttl, &given_back).await.unwrap();
    assert_eq!(cli.found(&["--verify"], 10).await, []);

    for (wrong, says, undo) in [
        (
            "UPDATE holdfast.staged_outcomes SET lease_id = gen_random_uuid() WHERE position = 0",
            "position 0 is staged under lease ",
            "UPDATE holdfast.staged_outcomes SET lease_id = l.lease_id
               FROM holdfast.leases l WHERE position = 0",
        ),
        (
            "UPDATE holdfast.staged_outcomes SET lease_id = NULL WHERE position = 0",
            "position 0 is staged under no lease, held under lease ",
            "UPDATE holdfast.staged_outcomes SET lease_id = l.lease_id
               FROM holdfast.leases l WHERE position = 0",
        ),
        (
            "UPDATE holdfast.staged_outcomes SET lease_id = gen_random_uuid() WHERE position = 1",
            ", held under no lease, and waits for a recheck",
            "UPDATE holdfast.staged_outcomes SET lease_id = NULL WHERE position = 1",
        ),
        (
            "UPDATE holdfast.waiting SET recheck = false",
            "position 1 is staged under no lease, held under no lease",
            "UPDATE holdfast.waiting SET recheck = true",
        ),
        (
            "CREATE TABLE kept AS SELECT * FROM holdfast.staged_outcomes WHERE position = 0;
             DELETE FROM holdfast.staged_outcomes WHERE position = 0",
            "1 executing and 2 checked items are counted, rows say 2 and 1",
            "INSERT INTO holdfast.staged_outcomes SELECT * FROM kept",
        ),
        (
            "DELETE FROM holdfast.staged_outcomes WHERE position = 1",
            "position 1 waits for a recheck of nothing",
            "SELECT",
        ),
    ] {
        cli.sql(wrong).await;
        let report = cli.run(&["doctor", "--verify", "--json"]).await.exited(20).json();
        let finding = &report["findings"][0];
        assert_eq!(finding["name"], "inconsistent", "{wrong}");
        assert!(finding["what"].as_str().unwrap().contains(says), "{says}: {finding}");
        cli.sql(undo).await;
    }
}
