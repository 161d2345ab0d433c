//! Databases that cannot be used, and what moves their schema.

use std::net::TcpListener;

use holdfast::store::migrate::{OLDEST, newest};
use serde_json::json;

use super::Cli;

const COMMANDS: [&[&str]; 6] = [
    &["submit", "items", "--lines", "--queue", "q"],
    &["batches"],
    &["workers"],
    &["show", "0194b2c8-7d1e-7c3a-9a53-0d6f5f3f2a11"],
    &["export", "0194b2c8-7d1e-7c3a-9a53-0d6f5f3f2a11"],
    &["cancel", "0194b2c8-7d1e-7c3a-9a53-0d6f5f3f2a11"],
];

#[tokio::test]
async fn a_schema_out_of_range_is_refused_with_the_command_that_helps() {
    let cli = Cli::new().await;
    cli.file("items", "a");
    let client = cli.db.client().await;

    let newer = newest() + 1;
    let insert = format!(
        "INSERT INTO holdfast.schema_migrations
                (version, description, success, checksum, execution_time)
         VALUES ({newer}, 'of tomorrow', true, '', 0)"
    );
    client.batch_execute(&insert).await.unwrap();
    for command in COMMANDS {
        cli.run(command).await.exited(69).says("too new").says("holdfast migrate down --to");
    }
    assert_eq!(cli.stored().await, (0, 0, 0));
    cli.run(&["migrate", "up"]).await.exited(69).says("does not know");
    let status = cli.run(&["migrate", "status", "--json"]).await.exited(69).json();
    assert_eq!((&status["version"], &status["supported"]), (&json!(newer), &json!(false)));

    client.batch_execute("DROP SCHEMA holdfast CASCADE").await.unwrap();
    for command in COMMANDS {
        cli.run(command).await.exited(69).says("too old").says("holdfast migrate up");
    }
}

#[tokio::test]
async fn a_database_that_is_away_is_told_from_one_that_lets_nobody_in() {
    let cli = Cli::new().await;
    cli.file("items", "a");
    let free = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = free.local_addr().unwrap().port();
    drop(free);
    let away = format!("postgres://nobody@127.0.0.1:{port}/none");
    for command in COMMANDS {
        let arguments = [command, &["--database-url", &away]].concat();
        cli.run(&arguments).await.exited(75).says("unreachable");
    }
    cli.run(&["migrate", "up", "--database-url", &away]).await.exited(75);

    let own = cli.db.url();
    let (server, _) = own.rsplit_once('/').unwrap();
    let no_database = format!("{server}/nothing");
    let no_user = own.replacen("postgres://postgres@", "postgres://somebody@", 1);
    assert_ne!(no_user, own);
    for command in [&["batches"] as &[&str], &["migrate", "status"]] {
        cli.run(&[command, &["--database-url", &no_database]].concat()).await.exited(78);
        cli.run(&[command, &["--database-url", &no_user]].concat()).await.exited(77);
    }
}

#[tokio::test]
async fn a_dry_run_needs_no_database() {
    let cli = Cli::new().await;
    let file = cli.file("items", "a\nb\n");
    let submit = ["submit", &file, "--lines", "--queue", "q", "--dry-run", "--json"];
    let mut command = cli.command(&submit);
    command.env_remove("HOLDFAST_DATABASE_URL");
    let ran = super::Ran::end(command.spawn().unwrap(), &submit).await.exited(0);
    assert_eq!(
        ran.json(),
        json!({"batch": null, "queue": "q", "items": 2, "created": false, "dry_run": true})
    );
    assert_eq!(cli.stored().await, (0, 0, 0));

    let file = cli.file("items", "a\na\n");
    cli.run(&["submit", &file, "--lines", "--queue", "q", "--dry-run"]).await.exited(65);
}

#[tokio::test]
async fn the_schema_moves_down_and_up() {
    let cli = Cli::new().await;
    let version = async || {
        let status = cli.run(&["migrate", "status", "--json"]).await.json();
        status["version"].as_i64().unwrap()
    };
    assert_eq!(version().await, newest());
    cli.run(&["migrate", "up"]).await.exited(0);

    // Not at a terminal, so it is not asked.
    cli.run(&["migrate", "down"]).await.exited(2).says("--yes");
    assert_eq!(version().await, newest());

    cli.run(&["migrate", "down", "--yes"]).await.exited(0);
    assert_eq!(version().await, newest() - 1);
    if OLDEST == newest() {
        cli.run(&["batches"]).await.exited(69).says("too old");
    }
    cli.run(&["migrate", "down", "--to", "0", "--yes"]).await.exited(0);
    assert_eq!(version().await, 0);
    let ran = cli.run(&["migrate", "down", "--yes"]).await.exited(0);
    assert_eq!(ran.out, "nothing to take back\n");

    cli.run(&["migrate", "up", "--to", "3"]).await.exited(0);
    assert_eq!(version().await, 3);
    let ran = cli.run(&["migrate", "up", "--json"]).await.exited(0);
    let applied = ran.json()["changed"].as_array().unwrap().len();
    assert_eq!(i64::try_from(applied).unwrap(), newest() - 3);
    cli.run(&["batches"]).await.exited(0);
    cli.run(&["migrate", "up", "--to", "9999"]).await.exited(2).says("--to 9999");
}

#[tokio::test]
async fn two_migrations_do_not_interleave() {
    let cli = Cli::new().await;
    let client = cli.db.client().await;
    // Far enough that a table is changed on the way up: there the first one is held up.
    cli.run(&["migrate", "down", "--to", "9", "--yes"]).await.exited(0);
    client.batch_execute("BEGIN; LOCK TABLE holdfast.batches").await.unwrap();
    let first = cli.command(&["migrate", "up"]).spawn().unwrap();
    let held = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND granted
                   AND database = (SELECT oid FROM pg_database WHERE datname = current_database())";
    while client.query_one(held, &[]).await.unwrap().get::<_, i64>(0) == 0 {
        tokio::task::yield_now().await;
    }

    cli.run(&["migrate", "up"]).await.exited(73).says("another migration is running");

    client.batch_execute("COMMIT").await.unwrap();
    super::Ran::end(first, &["migrate", "up"]).await.exited(0);
    cli.run(&["batches"]).await.exited(0);
}

#[tokio::test]
async fn the_configuration_is_checked_and_shown() {
    let cli = Cli::new().await;
    let ran = cli.run(&["config", "check", "--json"]).await.exited(0);
    assert_eq!(ran.json(), json!({"valid": true, "database": true, "queues": ["narrow", "q"]}));

    let shown = cli.run(&["config", "show"]).await.exited(0).out;
    assert!(shown.contains("queues.narrow.max_running = 4"), "{shown}");
    let shown = cli.run(&["config", "show", "--json"]).await.exited(0).json();
    let keys: Vec<_> = shown.as_array().unwrap().iter().map(|e| &e["key"]).collect();
    assert!(keys.contains(&&json!("lease.ttl")), "{keys:?}");

    cli.file("holdfast.toml", "[lease]\nttl = \"1 parsec\"\nttk = 1\n");
    cli.run(&["config", "check"]).await.exited(78).says("lease.ttl").says("lease.ttk");
    let ran = cli.run(&["config", "check", "--json"]).await.exited(78);
    let document: serde_json::Value = serde_json::from_str(&ran.err).unwrap();
    assert_eq!(document["problems"].as_array().unwrap().len(), 2);
}
