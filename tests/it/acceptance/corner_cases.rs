//! Answers where a literal reading of the rules would mislead, and neighbours of them.

use holdfast::check::{CheckInput, DEFAULT_VIRTUAL_PREFIX, Directories, Workspace, judge};
use holdfast::model::{Evidence, Finding};
use proptest::prelude::*;

use super::support::usually;

/// An execution that ended well in a fresh shell and printed a passing summary.
fn passing(command: &str) -> Evidence {
    Evidence {
        command: command.to_owned(),
        status: Some("success".to_owned()),
        output_tail: "7 passed in 0.42s".to_owned(),
        shell_persistent: Some(false),
        ..Evidence::default()
    }
}

fn failing(command: &str) -> Evidence {
    Evidence { status: Some("error".to_owned()), ..passing(command) }
}

fn printing(output: &str) -> Evidence {
    Evidence { output_tail: output.to_owned(), ..passing("make check") }
}

fn directories() -> Directories {
    Directories {
        workspace: "/data/t/workspace".to_owned(),
        outputs: "/data/t/outputs".to_owned(),
        uploads: "/data/t/uploads".to_owned(),
    }
}

/// The reason code of `tests_passed:COMMAND` after these executions.
fn reason(command: &str, evidence: &[Evidence]) -> &'static str {
    let leaves = judge(&CheckInput {
        criteria: &[format!("tests_passed:{command}")],
        evidence,
        workspace: Workspace::Unknown,
        directories: Some(&directories()),
        virtual_prefix: DEFAULT_VIRTUAL_PREFIX,
    });
    leaves[0].1.as_str()
}

/// Asserts what one passing execution of `ran` says of the criterion `wanted`.
fn assert_reason(wanted: &str, ran: &str, expected: &str) {
    assert_eq!(reason(wanted, &[passing(ran)]), expected, "wanted `{wanted}`, ran `{ran}`");
}

#[test]
fn plain_words_are_free_only_behind_the_first_target() {
    let wanted = "python -m pytest spec/a";
    assert_reason(wanted, "python evil.py -m pytest spec/a", "unprovable");
    assert_reason(wanted, "python -m other pytest spec/a", "unprovable");
    assert_reason(wanted, "python -m pytest spec/a spec/b", "pass_summary");
    assert_reason(wanted, "python -m pytest spec/b spec/a", "unprovable");
}

#[test]
fn a_script_given_to_an_interpreter_is_not_widened_by_more_words() {
    assert_reason("python manage.py test", "python manage.py test", "pass_summary");
    assert_reason("python manage.py test", "python manage.py test app.one", "unprovable");
    assert_reason("bash ci/run.sh", "bash ci/run.sh smoke", "unprovable");
}

#[test]
fn report_letters_and_process_counts_are_options_of_pytest() {
    assert_reason("go test ./...", "go test -run X ./...", "unprovable");
    assert_reason("go test ./...", "go test -run=X ./...", "unprovable");
    assert_reason("go test ./...", "go test -n ./...", "unprovable");
    assert_reason("pytest spec/a", "pytest -rfE -n2 spec/a", "pass_summary");
    assert_reason("pytest spec/a", "pytest -rootdir spec/a", "unprovable");
    assert_reason("python -m pytest spec/a", "python -m pytest -rA spec/a", "pass_summary");
}

#[test]
fn a_dry_run_or_a_question_is_no_run_of_make() {
    for option in ["-n", "-q", "-sq", "-v", "--dry-run"] {
        assert_reason("make check", &format!("make {option} check"), "unprovable");
    }
    assert_reason("make check", "make -s check", "pass_summary");
}

#[test]
fn a_target_that_is_an_options_value_is_no_target() {
    for option in ["--cov", "--durations", "-n", "-r"] {
        assert_reason("pytest spec/a", &format!("pytest {option} spec/a"), "unprovable");
    }
    assert_reason("pytest spec/a", "pytest spec/a --durations 5 -n 4 -r fE", "pass_summary");
    assert_reason("pytest spec/a", "pytest spec/a -n auto", "unprovable");
    assert_reason("pytest spec/a", "pytest spec/a --durations", "pass_summary");
}

#[test]
fn a_demanded_option_keeps_its_value() {
    let wanted = "pytest spec/a -k fast";
    assert_reason(wanted, "pytest spec/a -k fast", "pass_summary");
    assert_reason(wanted, "pytest spec/a -k slow fast", "unprovable");
    assert_reason("pytest spec/a --lf", "pytest spec/a --lf spec/b", "unprovable");
    assert_reason("pytest -v spec/a", "pytest -v -q spec/a", "pass_summary");
}

#[test]
fn a_variable_or_a_negation_among_the_targets_is_no_target() {
    assert_reason("make spec/a.py", "make spec/a.py TESTS=none", "unprovable");
    assert_reason("jest src/a", "jest src/a !src/a/slow", "unprovable");
}

#[test]
fn exclusions_that_may_cover_everything_are_unprovable() {
    let wanted = "pytest spec/a";
    for exclusion in [
        "--exclude .",
        "--exclude=",
        "--exclude \"\"",
        "--skip",
        "--skip -x",
        "--deselect spec/",
        "--deselect sp",
    ] {
        assert_reason(wanted, &format!("pytest spec/a {exclusion}"), "unprovable");
    }
    assert_reason("go test ./...", "go test ./... --skip slow", "unprovable");
}

#[test]
fn exclusions_that_the_criterion_makes_are_part_of_it() {
    for command in
        ["pytest spec --ignore spec/slow", "make check --skip x", "pytest --deselect=a.py::t"]
    {
        assert_reason(command, command, "pass_summary");
    }
    let wanted = "pytest spec --ignore spec/slow";
    assert_reason(wanted, "pytest spec --ignore spec/slow -q", "pass_summary");
    assert_reason(wanted, "pytest spec --ignore spec/slow --ignore spec/b", "unprovable");
    assert_reason(wanted, "pytest spec", "no_match");
    assert_reason("pytest --ignore spec/a", "pytest spec/a", "no_match");
}

#[test]
fn two_dashes_end_the_options() {
    let wanted = "pytest -- spec/a";
    assert_reason(wanted, "pytest -- spec/a", "pass_summary");
    assert_reason(wanted, "pytest --ignore spec/b -- spec/a", "pass_summary");
    assert_reason(wanted, "pytest --ignore spec -- spec/a", "unprovable");
    assert_reason(wanted, "pytest -- --ignore spec/a", "unprovable");
    assert_reason("cargo test -- --skip slow", "cargo test -- --skip slow", "pass_summary");
    assert_reason("cargo test", "cargo test -- --skip slow", "unprovable");
}

#[test]
fn what_no_shell_could_run_proves_nothing() {
    assert_reason("make \"check", "make  \"check", "unprovable");
    assert_reason("make check", "; make check", "unprovable");
    assert_reason("; make check", "make check", "unprovable");
}

#[test]
fn the_steps_of_the_criterion_are_its_own() {
    let wanted = "make lint && make check";
    assert_reason(wanted, "make lint && make check", "pass_summary");
    assert_reason(wanted, "make lint; make check", "unprovable");
    assert_reason("make lint; make check", "make lint && make check", "pass_summary");
    assert_reason(wanted, "make deps; make lint && make check", "unattributable");
}

#[test]
fn a_status_in_an_unknown_form_is_unchecked() {
    for status in [None, Some(""), Some("  "), Some("Success"), Some("SUCCESS"), Some("Error")] {
        let execution = Evidence { status: status.map(str::to_owned), ..passing("make check") };
        assert_eq!(reason("make check", &[execution]), "unknown_status", "{status:?}");
    }
}

#[test]
fn a_failure_elsewhere_says_nothing_of_the_tests() {
    for command in [
        "cd /tmp; pytest spec/a",
        "cd ..; pytest spec/a",
        "cd $D; pytest spec/a",
        "pushd /tmp; pytest spec/a",
        "exit 3; pytest spec/a",
    ] {
        assert_eq!(reason("pytest spec/a", &[failing(command)]), "unattributable", "{command}");
    }
    assert_eq!(reason("pytest spec/a", &[failing("cd app; pytest spec/a")]), "failed_status");
    assert_eq!(reason("pytest spec/a", &[failing("echo hi; pytest spec/a")]), "failed_status");
}

#[test]
fn failing_summaries_outweigh_passing_ones() {
    for output in [
        "ok 1 - a\nnot ok 2 - b",
        "3 passed\nBUILD FAILED",
        "Tests run: 3, Failures: 1, Errors: 0, Skipped: 0\n[INFO] BUILD SUCCESS",
        "12 passed\n3 errors suppressed",
        "12 passed\nFAILED a.py::t",
    ] {
        assert_eq!(reason("make check", &[printing(output)]), "fail_summary", "{output:?}");
    }
}

#[test]
fn runs_without_a_real_test_are_unchecked() {
    for output in [
        "Ran 4 tests in 0.1s\n\nOK (skipped=4)",
        "test result: ok. 0 passed; 0 failed\n\ntest result: ok. 0 passed; 0 failed",
        "?   \tm/a\t[no test files]",
        "-3 passed",
        "3\npassed",
        "\u{663} passed",
    ] {
        assert_eq!(reason("make check", &[printing(output)]), "no_summary", "{output:?}");
    }
    for output in [
        "Ran 4 tests in 0.1s\n\nOK (skipped=3)",
        "test result: ok. 9 passed; 0 failed\n\ntest result: ok. 0 passed; 0 failed",
        "?   \tm/a\t[no test files]\nok  \tm/b\t0.1s",
        "03 passed",
        "Ran 4 tests\r\n\r\nOK\r\n",
    ] {
        assert_eq!(reason("make check", &[printing(output)]), "pass_summary", "{output:?}");
    }
}

#[test]
fn more_than_a_shell_word_is_needed_to_be_the_command() {
    for ran in ["echo make check", "sh -c \"make check\"", "make -C x check", "time make check"] {
        let answer = reason("make check", &[passing(ran)]);
        assert!(["no_match", "unprovable"].contains(&answer), "{ran}: {answer}");
    }
}

#[test]
fn the_exit_marker_is_shown_with_the_failure() {
    let execution =
        Evidence { status_marker: Some("Exit Code: 3".to_owned()), ..failing("make check") };
    let leaves = judge(&CheckInput {
        criteria: &["tests_passed:make check".to_owned()],
        evidence: &[execution],
        workspace: Workspace::Unknown,
        directories: None,
        virtual_prefix: DEFAULT_VIRTUAL_PREFIX,
    });

    assert_eq!(leaves[0].0.finding(), Finding::DoesNotHold);
    assert_eq!(leaves[0].0.detail(), "the newest execution failed: Exit Code: 3");
}

/// Pieces of commands, so that criteria and executions often meet.
fn command() -> impl Strategy<Value = String> {
    let piece = prop::sample::select(vec![
        "pytest",
        "make",
        "check",
        "spec/a",
        "spec/b.py::t",
        "-k",
        "-q",
        "-n",
        "--",
        "--ignore",
        "--ignore=spec",
        "--cov",
        ";",
        "&&",
        "||",
        "|",
        "&",
        "\n",
        "cd",
        "app",
        "A=1",
        "'x'",
        "\"",
        "'",
        "\\",
        "#",
        "$X",
        "*",
        "..",
        "./",
        ">",
        "é",
        "\u{a0}",
        "{a,b}",
        "=",
        "::",
        "C:",
    ]);
    let words = prop::collection::vec(piece, 0..8).prop_map(|words| words.join(" "));
    prop_oneof![4 => words, 1 => any::<String>()]
}

prop_compose! {
    fn execution()(
        command in command(),
        status in prop::option::of(prop::sample::select(vec!["success", "error", ""])),
        output_tail in prop_oneof![
            Just("3 passed".to_owned()), Just("0 passed\nok\n1 failed".to_owned()), any::<String>(),
        ],
        command_truncated in any::<bool>(),
        shell_persistent in any::<Option<bool>>(),
    ) -> Evidence {
        Evidence {
            command, output_tail, command_truncated, shell_persistent,
            status: status.map(str::to_owned),
            ..Evidence::default()
        }
    }
}

proptest! {
    #![proptest_config(usually(4096))]

    #[test]
    fn any_command_against_any_evidence_gets_an_answer(
        wanted in command(),
        evidence in prop::collection::vec(execution(), 0..4),
    ) {
        prop_assert_ne!(reason(&wanted, &evidence), "crashed");
    }

    #[test]
    fn only_a_fresh_uncut_success_of_the_newest_run_holds(
        wanted in command(),
        evidence in prop::collection::vec(execution(), 1..4),
    ) {
        if reason(&wanted, &evidence) == "pass_summary" {
            let deciding = evidence
                .iter()
                .rev()
                .find(|newest| reason(&wanted, std::slice::from_ref(*newest)) != "no_match")
                .expect("something matched");
            prop_assert_eq!(deciding.status.as_deref(), Some("success"));
            prop_assert_eq!(deciding.shell_persistent, Some(false));
            prop_assert!(!deciding.command_truncated);
            prop_assert!(!deciding.command.contains(['$', '#', '\\', '>']));
        }
    }
}
