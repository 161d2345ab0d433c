//! Commands in workspaces, and what is recorded of them.

use std::fs;
use std::path::Path;

use holdfast::check::{CheckInput, Workspace, judge, needs_workspace};
use holdfast::execute::command::CommandSpec;
use holdfast::execute::{Execution, ExecutionEnd};
use holdfast::model::{Finding, Leaf, Position, StopReason};
use holdfast::workspace::Refusal;

use super::support::{Bench, sh};

/// Spellings of file criteria, plain and odd.
const FILE_CRITERIA: [&str; 9] = [
    "file:a.txt exists",
    "FILE:a.txt EXISTS",
    "file:a.txt\n exists",
    "file:/mnt/user-data/outputs/a.txt non-empty",
    "f\u{131}le:a.txt ex\u{131}sts",
    "F\u{130}LE:a.txt EX\u{130}\u{17f}TS",
    "file_written:a.txt",
    "F\u{130}le_Wr\u{131}tten:../a.txt",
    "file:\u{a0}x\u{2003}exi\u{17f}ts",
];

fn lines(execution: &Execution) -> Vec<&str> {
    assert_eq!(execution.end, ExecutionEnd::Succeeded, "{execution:?}");
    execution.output.lines().collect()
}

#[tokio::test]
async fn a_command_works_in_its_items_directories_and_inherits_no_holder() {
    let bench = Bench::new();
    let script = "pwd; echo \"$HOLDFAST_OUTPUTS\"; echo \"$HOLDFAST_UPLOADS\"
        [ . -ef \"$HOLDFAST_WORKSPACE\" ] && echo 1
        ls -l /proc/self/fd | grep -c holder; echo x >report.md";

    let execution = bench.run(CommandSpec { workspace: true, ..sh(script) }, "worker", &[]).await;

    let place = fs::canonicalize(bench.root()).unwrap().join("ann/t");
    let part = |name: &str| place.join(name).to_str().unwrap().to_owned();
    let expected = [part("workspace"), part("outputs"), part("uploads"), "1".into(), "0".into()];
    assert_eq!(lines(&execution), expected);
    assert!(Path::new(&part("workspace")).join("report.md").exists());
    assert!(execution.workspace.is_some());
    assert!(execution.evidence.is_empty(), "there are no criteria");
    bench.clean_when_free();
}

#[tokio::test]
async fn only_a_queue_or_a_file_criterion_makes_a_workspace() {
    let bench = Bench::new();

    for criteria in [&[][..], &["reads well"], &["tests_passed:make"]] {
        let execution = bench.run(sh("pwd; env"), "worker", criteria).await;
        assert!(!execution.output.contains("HOLDFAST_WORKSPACE"), "{execution:?}");
        assert_eq!(execution.workspace, None);
    }
    assert_eq!((bench.opens(), bench.root().exists()), (0, false));
    for criterion in FILE_CRITERIA {
        assert!(needs_workspace([criterion]), "{criterion}");
        let before = bench.opens();
        let execution = bench.run(sh("env"), "worker", &["reads well", criterion]).await;
        assert!(execution.output.contains("HOLDFAST_WORKSPACE="), "{execution:?}");
        assert_eq!(bench.opens(), before + 1, "{criterion}");
    }
}

#[tokio::test]
async fn a_configured_directory_stays_the_working_directory() {
    let bench = Bench::new();
    let cwd = Some("/".into());
    let criteria = ["file:a.txt exists"];

    let execution = bench.run(CommandSpec { cwd, ..sh("pwd") }, "worker", &criteria).await;

    assert_eq!((lines(&execution), execution.evidence[0].cwd.as_str()), (vec!["/"], "/"));
    assert!(execution.workspace.is_some());
}

#[tokio::test]
async fn denied_means_no_open_for_any_spelling_and_the_leaves_say_so() {
    let bench = Bench::new();

    for criterion in FILE_CRITERIA {
        let execution = bench.run(sh("env"), "reader", &[criterion]).await;
        // Criteria do not keep the work from being done.
        assert!(!lines(&execution).iter().any(|line| line.starts_with("HOLDFAST_WORKSPACE")));
        let gate = bench.gate("reader");
        let Err(Refusal::Denied(why)) = gate.reopen(Position::new(0), None) else {
            panic!("a holder for {criterion}");
        };
        let criteria = [criterion.to_owned(), "tests_passed:make".to_owned()];
        let leaves = judge(&CheckInput {
            criteria: &criteria,
            evidence: &execution.evidence,
            workspace: Workspace::Denied(&why),
            directories: None,
            virtual_prefix: gate.virtual_prefix(),
        });
        let reasons: Vec<_> = leaves.iter().map(|(_, reason)| reason.as_str()).collect();
        assert_eq!(reasons, ["denied", "no_match"], "{criterion}");
        assert!(leaves[0].0.detail().ends_with("role reader may not use workspaces"));
    }

    let spec = CommandSpec { workspace: true, ..sh("touch /nonexistent/ran") };
    let execution = bench.run(spec, "reader", &[]).await;
    assert_eq!(
        (execution.end, execution.stop_reason),
        (ExecutionEnd::Permanent, StopReason::CannotStart)
    );
    let error = execution.error.unwrap();
    assert!(error.ends_with("denied: role reader may not use workspaces"), "{error}");
    assert_eq!((bench.opens(), bench.root().exists()), (0, false));
}

#[tokio::test]
async fn allowed_reads_the_real_file_and_lets_go_of_it() {
    let bench = Bench::new();
    let criteria = ["file:a.txt non-empty", "file:/mnt/user-data/outputs/b.txt exists", "is good"];
    let execution =
        bench.run(sh("echo x >a.txt; echo y >\"$HOLDFAST_OUTPUTS\"/b.txt"), "worker", &criteria);
    let execution = execution.await;

    let gate = bench.gate("worker");
    let holder = gate.reopen(Position::new(0), execution.workspace.as_ref()).unwrap();
    let verdict = holdfast::check::run(&CheckInput {
        criteria: &criteria.map(str::to_owned),
        evidence: &execution.evidence,
        workspace: Workspace::Open(holder.roots()),
        directories: Some(holder.directories()),
        virtual_prefix: gate.virtual_prefix(),
    });

    let findings = verdict.unwrap().leaves().iter().map(Leaf::finding).collect::<Vec<_>>();
    assert_eq!(findings, [Finding::Holds, Finding::Holds, Finding::Unchecked]);
    assert_eq!(bench.clean().held, 1);
    drop(holder);
    bench.clean_when_free();
    let gone = gate.reopen(Position::new(0), execution.workspace.as_ref());
    assert!(matches!(gone, Err(Refusal::Unseen(_))), "a check made a directory: {gone:?}");
}

#[tokio::test]
async fn criteria_reach_a_command_as_data_and_in_one_place() {
    const SENTINEL: &str = "sentinel-7f3a";
    let bench = Bench::new();
    let criterion = format!("{SENTINEL}\nPATH=/evil \"quoted\" $(touch ran)");
    let script = "tr '\\0' '\\n' </proc/self/environ | grep -v ^HOLDFAST_CRITERIA=
        cat /proc/$$/cmdline; cat; ls; echo; printf '%s\\n' \"$HOLDFAST_CRITERIA\"";

    let execution = bench.run(sh(script), "worker", &[&criterion, "file:a exists"]).await;

    let lines = lines(&execution);
    let (last, others) = lines.split_last().unwrap();
    assert!(!others.iter().any(|line| line.contains(SENTINEL)), "{others:?}");
    let told: Vec<String> = serde_json::from_str(last).unwrap();
    assert_eq!(told, [criterion.as_str(), "file:a exists"]);
}

#[tokio::test]
async fn one_record_says_how_the_process_really_ended() {
    let bench = Bench::new();
    let criterion = ["tests_passed:sh -c \"echo 3 passed; exit 3\" sh \"the input\""];
    let spec = CommandSpec { success: vec![0, 3], ..sh("echo 3 passed; exit 3") };

    let execution = bench.run(spec, "worker", &criterion).await;

    assert_eq!(execution.end, ExecutionEnd::Succeeded, "the queue takes 3 for a success");
    let [record] = execution.evidence.as_slice() else { panic!("{execution:?}") };
    assert_eq!(record.command, criterion[0].strip_prefix("tests_passed:").unwrap());
    assert_eq!((record.status.as_deref(), record.exit_code), (Some("error"), Some(3)));
    assert_eq!((record.seq, record.tool.as_str(), record.turn), (0, "command", None));
    assert_eq!((record.output_tail.as_str(), record.cwd.as_str()), ("3 passed\n", ""));
    assert_eq!((record.shell_persistent, record.status_marker.as_deref()), (Some(false), None));
}

#[tokio::test]
async fn a_run_that_passed_proves_its_criterion_and_one_that_failed_does_not() {
    let bench = Bench::new();
    for (script, argument, finding) in [
        ("echo 3 passed", "the input", Finding::Holds),
        ("echo 3 passed; exit 1", "the input", Finding::DoesNotHold),
        ("echo nothing", "the input", Finding::Unchecked),
        ("echo 3 passed", "another input", Finding::Unchecked),
    ] {
        let criteria = [format!("tests_passed:sh -c \"{script}\" sh \"{argument}\"")];
        let spec = CommandSpec { success: vec![0, 1], ..sh(script) };
        let execution = bench.run(spec, "worker", &[&criteria[0]]).await;
        let leaves = judge(&CheckInput {
            criteria: &criteria,
            evidence: &execution.evidence,
            workspace: Workspace::Unknown,
            directories: None,
            virtual_prefix: "/mnt/user-data",
        });
        assert_eq!(leaves[0].0.finding(), finding, "{script}: {:?}", leaves[0]);
    }
}
