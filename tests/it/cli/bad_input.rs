//! Input that is refused: a clear message, the right exit code, and nothing stored.

use std::fmt::Write as _;

use serde_json::json;

use super::Cli;

/// A file, and what is said about it.
type Case = (&'static str, Vec<u8>, &'static [&'static str]);

fn cases() -> Vec<Case> {
    let text = |text: &str| text.as_bytes().to_vec();
    let long = format!("{{\"key\":\"a\",\"input\":\"{}\"}}", "x".repeat(2 << 20));
    let endless = format!("{{\"key\":\"a\",\"input\":\"{}\"}}", "x".repeat(9 << 20));
    vec![
        (
            "unknown key",
            text("{\"key\":\"a\",\"input\":1}\n\n{\"key\":\"b\",\"inputs\":1}"),
            &["line 3: unknown member \"inputs\"", "line 3: \"input\": missing"],
        ),
        ("wrong type", text("{\"key\":7,\"input\":1}"), &["line 1: \"key\": ", "number"]),
        (
            "duplicate keys",
            text(
                "{\"key\":\"a\",\"input\":1}\n{\"key\":\"b\",\"input\":1}\n{\"key\":\"a\",\"input\":2}",
            ),
            &["line 3: \"key\": is already the key of line 1"],
        ),
        (
            "array instead of object",
            text("[{\"key\":\"a\",\"input\":1}]"),
            &["line 1: expected an object, found an array"],
        ),
        (
            "NUL escape",
            text("{\"key\":\"a\",\"input\":\"x\\u0000y\"}"),
            &["line 1: \"input\"", "\\u0000"],
        ),
        (
            "lone surrogate",
            text("{\"key\":\"a\",\"input\":\"\\ud800\"}"),
            &["line 1: \"input\"", "surrogate"],
        ),
        ("a line of 2 MiB", text(&long), &["line 1: \"input\"", "the limit is 1,048,576"]),
        ("a line of 9 MiB", text(&endless), &["line 1: longer than 8,388,608 bytes"]),
        ("empty", text(""), &["the input holds no items"]),
        ("blank", text("\n  \r\n\n"), &["the input holds no items"]),
        (
            "not UTF-8",
            b"{\"key\":\"a\",\"input\":\"\xff\"}".to_vec(),
            &["line 1: not UTF-8 at byte 21"],
        ),
        ("UTF-16", b"\xff\xfe{\0".to_vec(), &["UTF-16"]),
        (
            "cut short",
            text("{\"key\":\"a\",\"input\":1}\n{\"key\":\"b\",\"inp"),
            &["line 2: the JSON text is not complete"],
        ),
        ("missing members", text("{}"), &["\"key\": missing", "\"input\": missing"]),
    ]
}

#[tokio::test]
async fn bad_lines_are_named_and_nothing_is_stored() {
    let cli = Cli::new().await;
    for (name, content, expected) in cases() {
        let file = cli.file("bad.jsonl", content);
        let mut ran = cli.run(&["submit", &file, "--queue", "q"]).await.exited(65);
        for part in expected {
            ran = ran.says(part);
        }
        ran = ran.says("nothing was stored");
        assert_eq!(ran.out, "", "{name}");
        assert_eq!(cli.stored().await, (0, 0, 0), "{name}");
    }
}

#[tokio::test]
async fn all_problems_are_listed_for_programs() {
    let cli = Cli::new().await;
    let input = b"{\"key\":\"a\",\"input\":1}\n\n{\"key\":\"a\"}\nnope";

    let ran = cli.run_with(&["submit", "-", "--queue", "q", "--json"], input).await.exited(65);

    let document: serde_json::Value = serde_json::from_str(&ran.err).unwrap();
    assert_eq!(document["exit_code"], 65);
    let problems = document["problems"].as_array().unwrap();
    let places: Vec<_> = problems.iter().map(|p| json!([p["line"], p["field"]])).collect();
    assert_eq!(places, [json!([3, "input"]), json!([3, "key"]), json!([4, null])]);
    assert_eq!(cli.stored().await, (0, 0, 0));
}

#[tokio::test]
async fn a_thousand_problems_are_named_and_the_others_counted() {
    let cli = Cli::new().await;
    let mut lines = String::new();
    for n in 0..1_500 {
        writeln!(lines, "{{\"key\":{n},\"input\":1}}").unwrap();
    }
    let ran = cli.run_with(&["submit", "-", "--queue", "q"], lines.as_bytes()).await.exited(65);
    assert!(ran.err.contains("line 1000: ") && !ran.err.contains("line 1001: "));
    ran.says("and 500 more").says("1,500 problems; nothing was stored");
}

#[tokio::test]
async fn odd_but_sound_input_is_accepted() {
    let cli = Cli::new().await;
    // A byte-order mark, CR LF, blank lines, no end of the last line, escapes that stand for text.
    let input = "\u{feff}{\"key\":\"a\",\"input\":1}\r\n\r\n{\"key\":\"\\u00e9\",\"input\":\"\\ud83d\\ude00\"}";

    let file = cli.file("odd.jsonl", input);
    let ran = cli.run(&["submit", &file, "--queue", "q", "--json"]).await.exited(0);

    let batch = ran.json()["batch"].as_str().unwrap().to_owned();
    let items = cli.run(&["items", &batch, "--json"]).await.exited(0).lines();
    let keys: Vec<_> = items.iter().map(|item| item["key"].as_str().unwrap()).collect();
    assert_eq!(keys, ["a", "é"]);
}

#[tokio::test]
async fn what_cannot_be_read_is_told_from_what_is_wrong() {
    let cli = Cli::new().await;
    let folder = cli.folder.path().to_str().unwrap().to_owned();

    cli.run(&["submit", "nowhere.jsonl", "--queue", "q"]).await.exited(66).says("nowhere.jsonl");
    cli.run(&["submit", &folder, "--queue", "q"]).await.exited(66).says(&folder);

    assert_eq!(cli.stored().await, (0, 0, 0));
}

#[tokio::test]
async fn an_unknown_queue_is_refused_with_the_names_of_the_others() {
    let cli = Cli::new().await;
    let file = cli.file("items", "a");
    let submit = ["submit", &file, "--lines", "--queue", "other"];
    let ran = cli.run(&submit).await.exited(78);
    ran.says("`other`").says("narrow, q");
    assert_eq!(cli.stored().await, (0, 0, 0));
}

#[tokio::test]
async fn a_wrong_flag_is_named() {
    let cli = Cli::new().await;
    let file = cli.file("items", "a");
    for (flag, value) in [
        ("--max-running", "0"),
        ("--max-live", "0"),
        ("--max-attempts", "101"),
        ("--priority", "101"),
        ("--title", ""),
        ("--key", ""),
        ("--owner", "a/b"),
        ("--thread", ".."),
        ("--not-before", "tomorrow"),
    ] {
        let submit = ["submit", &file, "--lines", "--queue", "q", flag, value];
        cli.run(&submit).await.exited(2).says(flag);
    }
    cli.run(&["submit", &file]).await.exited(2).says("--queue");
    cli.run(&["show", "not-an-id"]).await.exited(2).says("not-an-id");
    assert_eq!(cli.stored().await, (0, 0, 0));
}

#[tokio::test]
async fn wrong_command_lines_are_documents_for_those_who_ask_for_json() {
    let cli = Cli::new().await;
    for (arguments, said) in [
        (&["show", "not-an-id", "--json"] as &[&str], "not-an-id"),
        (&["--json", "submit", "-"], "--queue"),
        (&["--json", "frobnicate"], "frobnicate"),
    ] {
        let ran = cli.run(arguments).await.exited(2);
        let document: serde_json::Value = serde_json::from_str(&ran.err).unwrap();
        assert_eq!(document["exit_code"], 2, "{document}");
        assert!(document["error"].as_str().unwrap().contains(said), "{document}");
    }
    cli.run(&["show", "not-an-id"]).await.exited(2).says("For more information");
}

#[tokio::test]
async fn what_the_operator_has_to_set_right_is_a_fault_of_the_configuration() {
    let cli = Cli::new().await;
    let file = cli.file("items", "a");
    for url in ["postgres://h:port/d", "postgres://h/d?sslmode=some", "postgres://h/d?user"] {
        cli.run(&["config", "check", "--database-url", url]).await.exited(78).says("database.url");
        cli.run(&["batches", "--database-url", url]).await.exited(78);
    }
    cli.run(&["config", "check", "--database-url", "postgres://h/d?sslmode=verify-full"])
        .await
        .exited(0);
    let folder = cli.file("folder", "");
    let run = ["run", &file, "--lines", "--pg-bin", &folder, "--", "cat"];
    cli.run(&run).await.exited(78).says(&folder);
}

#[tokio::test]
async fn messages_have_no_power_over_a_terminal() {
    let cli = Cli::new().await;
    let input = b"{\"key\":\"a\",\"\\u001b[2J\":1,\"input\":1}\n\x1b[2J";
    let ran = cli.run_with(&["submit", "-", "--queue", "q"], input).await.exited(65);
    assert!(!ran.err.contains('\u{1b}'), "{:?}", ran.err);

    let batch = cli.submit_with(&["a\u{9b}31mb"], &["--title", "t\u{202e}t"]).await;
    for arguments in [
        &["show", &batch] as &[&str],
        &["batches"],
        &["items", &batch],
        &["item", &batch, "--position", "0"],
    ] {
        let out = cli.run(arguments).await.exited(0).out;
        assert!(!out.contains(['\u{9b}', '\u{202e}']), "{out:?}");
    }
}
