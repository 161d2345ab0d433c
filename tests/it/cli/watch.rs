//! Following a batch to its end.

use rustix::process::Signal;
use serde_json::json;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::Child;

use super::{Cli, Ran, failed, signal, succeeded};
use crate::support::proxy::Proxy;

/// Waits until the watch has said this on standard error.
async fn said(child: &mut Child, text: &str) {
    let mut lines = BufReader::new(child.stderr.as_mut().unwrap()).lines();
    loop {
        let line = lines.next_line().await.unwrap().unwrap_or_else(|| panic!("no {text:?}"));
        if line.contains(text) {
            return;
        }
    }
}

#[tokio::test]
async fn the_exit_code_tells_how_the_batch_ended() {
    let cli = Cli::new().await;
    let fleet = cli.fleet();
    let well = cli.submit(&["a", "b"]).await;
    fleet.drain(&well, |_| succeeded("1")).await;
    let badly = cli.submit(&["a", "b"]).await;
    fleet
        .drain(&badly, |hold| match hold.item().position().get() {
            0 => succeeded("1"),
            _ => failed("no"),
        })
        .await;
    let cancelled = cli.submit(&["a", "b"]).await;
    cli.run(&["cancel", &cancelled]).await.exited(0);

    let ran = cli.run(&["watch", &well]).await.exited(0);
    assert_eq!(ran.out, format!("batch {well} has ended: 2 succeeded\n"));
    let ran = cli.run(&["watch", &badly]).await.exited(1);
    assert_eq!(ran.out, format!("batch {badly} has ended: 1 succeeded, 1 failed\n"));
    let ran = cli.run(&["watch", &cancelled]).await.exited(1);
    assert_eq!(ran.out, format!("batch {cancelled} was cancelled: 0 succeeded, 2 cancelled\n"));

    let looks = cli.run(&["watch", &badly, "--json"]).await.exited(1).lines();
    let last = looks.last().unwrap();
    assert_eq!((&last["state"], &last["ended"]), (&json!("finished"), &json!(2)));
    assert_eq!(last["counts"]["failed"], 1);
}

#[tokio::test]
async fn a_watch_sees_a_batch_through() {
    let cli = Cli::new().await;
    let fleet = cli.fleet();
    let batch = cli.submit(&["a", "b", "c"]).await;
    cli.run(&["pause", &batch]).await.exited(0);
    let mut child = cli.command(&["watch", &batch]).spawn().unwrap();

    said(&mut child, "paused; go on with: holdfast resume").await;
    cli.run(&["resume", &batch]).await.exited(0);
    fleet.hand_in(&fleet.claim(&batch, 1).await, |_| failed("no")).await;
    said(&mut child, "1/3, 1 failed").await;
    fleet.drain(&batch, |_| succeeded("1")).await;

    let ran = Ran::end(child, &["watch"]).await.exited(1);
    assert_eq!(ran.out, format!("batch {batch} has ended: 2 succeeded, 1 failed\n"));
}

#[tokio::test]
async fn an_interrupt_ends_the_watch_and_not_the_batch() {
    let cli = Cli::new().await;
    let batch = cli.submit(&["a"]).await;
    let mut child = cli.command(&["watch", &batch]).spawn().unwrap();
    said(&mut child, "0/1").await;

    signal(&child, Signal::INT);

    Ran::end(child, &["watch"]).await.exited(130).says("holdfast watch");
    let shown = cli.run(&["show", &batch, "--json"]).await.exited(0).json();
    assert_eq!(shown["state"], "queued");
}

#[tokio::test]
async fn a_watch_waits_for_a_database_that_is_away() {
    let cli = Cli::new().await;
    let proxy = Proxy::before(cli.db.url()).await;
    let batch = cli.submit(&["a"]).await;
    let watch = ["watch", &batch, "--database-url", proxy.url()];
    let mut child = cli.command(&watch).spawn().unwrap();
    said(&mut child, "0/1").await;

    proxy.go_away();
    said(&mut child, "the database is away").await;
    proxy.come_back();
    said(&mut child, "the database is back").await;

    cli.run(&["cancel", &batch]).await.exited(0);
    Ran::end(child, &["watch"]).await.exited(1);
}

#[tokio::test]
async fn a_submit_can_be_watched_to_its_end() {
    let cli = Cli::new().await;
    let fleet = cli.fleet();
    let file = cli.file("items", "a\nb\n");
    let arguments = ["submit", &file, "--lines", "--queue", "q", "--watch", "--json"];
    let mut child = cli.command(&arguments).spawn().unwrap();
    let mut out = BufReader::new(child.stdout.take().unwrap()).lines();
    let stored: serde_json::Value =
        serde_json::from_str(&out.next_line().await.unwrap().unwrap()).unwrap();

    fleet.drain(stored["batch"].as_str().unwrap(), |_| succeeded("1")).await;

    let mut last = None;
    while let Some(line) = out.next_line().await.unwrap() {
        last = Some(line);
    }
    let last: serde_json::Value = serde_json::from_str(&last.unwrap()).unwrap();
    assert_eq!((&last["state"], &last["ended"]), (&json!("finished"), &json!(2)));
    Ran::end(child, &arguments).await.exited(0);
}
