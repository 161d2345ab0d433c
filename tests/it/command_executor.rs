//! The command executor with real processes.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use holdfast::clock::SystemClock;
use holdfast::execute::command::{CommandExecutor, CommandSpec, Otherwise};
use holdfast::execute::spawn::LocalSpawner;
use holdfast::execute::{Execution, ExecutionEnd, Executor, Job};
use holdfast::model::{
    Attempt, BatchId, FencingToken, ItemRef, LeaseId, Position, Reporter, StopReason,
};
use rustix::process::{Resource, Rlimit, Signal};
use tempfile::TempDir;
use time::OffsetDateTime;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

/// How long a test waits before it fails.
const PATIENCE: Duration = Duration::from_mins(1);

/// A place to run commands in, and a mark by which whatever they leave behind is found.
struct Bench {
    scratch: TempDir,
    cwd: TempDir,
    mark: String,
    stop: CancellationToken,
}

impl Bench {
    fn new() -> Self {
        Self {
            scratch: tempfile::tempdir().unwrap(),
            cwd: tempfile::tempdir().unwrap(),
            mark: Uuid::new_v4().to_string(),
            stop: CancellationToken::new(),
        }
    }

    fn spec(&self, argv: &[&str]) -> CommandSpec {
        CommandSpec {
            argv: argv.iter().map(|&word| word.to_owned()).collect(),
            timeout: Duration::from_mins(1),
            env: BTreeMap::from([("MARK".to_owned(), self.mark.clone())]),
            env_pass: Vec::new(),
            cwd: Some(self.cwd.path().to_owned()),
            workspace: false,
            success: vec![0],
            retry: vec![75],
            permanent: vec![2],
            otherwise: Otherwise::Permanent,
            result_bytes: 1024 * 1024,
            log_bytes: 4096,
            error_chars: 4000,
            kill_grace: Duration::from_secs(30),
        }
    }

    fn executor(&self, spec: CommandSpec, worker_env: &[(&str, &str)]) -> CommandExecutor {
        let worker_env: Vec<(OsString, OsString)> =
            worker_env.iter().map(|(name, value)| (name.into(), value.into())).collect();
        let spawner = Arc::new(LocalSpawner::new().unwrap());
        let scratch = self.scratch.path().to_owned();
        CommandExecutor::new(spec, None, worker_env, scratch, spawner, Arc::new(SystemClock))
            .unwrap()
    }

    /// Runs an item and checks what must hold however it ended: no process and no file is left.
    async fn run(&self, spec: CommandSpec, input_json: &str) -> Execution {
        let executor = self.executor(spec, &[]);
        let job = job(input_json);
        let execution = tokio::time::timeout(PATIENCE, executor.execute(&job, &self.stop)).await;
        let execution = execution.expect("the execution never ended");
        assert_eq!(self.processes(), Vec::<PathBuf>::new(), "left behind: {execution:?}");
        assert_eq!(fs::read_dir(self.scratch.path()).unwrap().count(), 0, "{execution:?}");
        execution
    }

    async fn sh(&self, script: &str) -> Execution {
        self.run(self.spec(&["sh", "-c", script]), r#""""#).await
    }

    /// Every process that has the mark in its environment.
    fn processes(&self) -> Vec<PathBuf> {
        let mark = format!("MARK={}", self.mark);
        let marked = |process: &PathBuf| {
            let environment = fs::read(process.join("environ")).unwrap_or_default();
            environment.split(|byte| *byte == 0).any(|line| line == mark.as_bytes())
        };
        let all = fs::read_dir("/proc").unwrap().map(|entry| entry.unwrap().path());
        all.filter(marked).collect()
    }

    /// Waits until the command has written its line into this file.
    async fn line_in(&self, name: &str) -> String {
        let path = self.cwd.path().join(name);
        until(|| fs::read_to_string(&path).is_ok_and(|text| text.ends_with('\n'))).await;
        fs::read_to_string(&path).unwrap().trim().to_owned()
    }
}

fn job(input_json: &str) -> Job {
    Job {
        item: ItemRef::new(BatchId::generate(), Position::new(7)),
        key: "the key".to_owned(),
        queue: "queue".parse().unwrap(),
        attempt: Attempt::new(2),
        retries: 0,
        lease: LeaseId::generate(),
        token: FencingToken::new(12),
        input_json: input_json.to_owned(),
        criteria: Vec::new(),
        deadline: OffsetDateTime::UNIX_EPOCH,
        traceparent: None,
        reporter: Reporter::default(),
    }
}

async fn until(condition: impl Fn() -> bool) {
    let held = tokio::time::timeout(PATIENCE, async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    });
    held.await.expect("the condition never held");
}

fn assert_end(execution: &Execution, end: ExecutionEnd, stop_reason: StopReason) {
    assert_eq!((&execution.end, execution.stop_reason), (&end, stop_reason), "{execution:?}");
}

// Results.

#[tokio::test]
async fn exit_statuses_are_mapped_by_the_queue() {
    let bench = Bench::new();
    for (status, end, stop_reason) in [
        (0, ExecutionEnd::Succeeded, StopReason::Completed),
        (75, ExecutionEnd::Retryable, StopReason::ExitStatus),
        (2, ExecutionEnd::Permanent, StopReason::ExitStatus),
        (255, ExecutionEnd::Permanent, StopReason::ExitStatus),
    ] {
        let execution = bench.sh(&format!("echo out; echo why >&2; exit {status}")).await;
        assert_end(&execution, end, stop_reason);
        assert_eq!(execution.exit_status, Some(status));
        assert_eq!(execution.output, "out\n");
        let error = (status != 0).then(|| format!("exit status {status}: why"));
        assert_eq!(execution.error, error);
        assert!(execution.started_at <= execution.ended_at);
    }
}

#[tokio::test]
async fn a_signal_is_told_apart_from_an_exit() {
    let execution = Bench::new().sh("kill -SEGV $$").await;
    assert_end(&execution, ExecutionEnd::Retryable, StopReason::Signal);
    assert_eq!((execution.exit_status, execution.signal), (None, Some(11)));
}

#[tokio::test]
async fn a_flood_is_counted_and_not_kept() {
    let resident = || {
        let status = fs::read_to_string("/proc/self/statm").unwrap();
        status.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096
    };
    let bench = Bench::new();
    let script = "head -c 200000000 /dev/zero; yes 'x y' | head -c 50000000 >&2; exit 3";
    let before = resident();
    let execution = bench.sh(script).await;
    let grown = resident().saturating_sub(before);

    assert_eq!((execution.output_bytes, execution.output_truncated), (200_000_000, true));
    assert_eq!(execution.output.len(), 1024 * 1024 / 3 * 3);
    assert!(execution.output.chars().all(|c| c == '\u{fffd}'));
    let error = execution.error.unwrap();
    assert!(error.ends_with("x y") && error.chars().count() <= 4000, "{} chars", error.len());
    // Other tests run in this process, too.
    assert!(grown < 120_000_000, "grown by {grown} bytes");
}

#[tokio::test]
async fn output_that_is_no_text_is_replaced() {
    let execution = Bench::new().sh(r"printf 'a\377b\0c\303'; printf '\377\0' >&2; exit 3").await;
    assert_eq!(execution.output, "a\u{fffd}b\u{fffd}c\u{fffd}");
    assert_eq!((execution.output_bytes, execution.output_truncated), (6, false));
    assert_eq!(execution.error.unwrap(), "exit status 3: \u{fffd}\u{fffd}");
}

#[tokio::test]
async fn a_character_is_not_cut_by_the_limit() {
    let bench = Bench::new();
    let mut spec = bench.spec(&["printf", "aé€"]);
    spec.result_bytes = 5;
    let execution = bench.run(spec, "1").await;
    assert_eq!((execution.output.as_str(), execution.output_truncated), ("aé", true));
    assert_eq!(execution.output_bytes, 6);
}

// Input.

#[tokio::test]
async fn standard_input_carries_the_exact_bytes() {
    let bench = Bench::new();
    // More than both pipes hold: it must be written while the output is read.
    let text = "line é😀\r\n\t\u{1}".repeat(20_000);
    let json = serde_json::to_string(&text).unwrap();
    let execution = bench.run(bench.spec(&["cat"]), &json).await;
    assert_end(&execution, ExecutionEnd::Succeeded, StopReason::Completed);
    assert!(execution.output == text, "{} bytes came back", execution.output_bytes);

    for json in [r#"{ "b": 1.50, "a": "\u00e9" }"#, "12345678901234567890.10", "null"] {
        let execution = bench.run(bench.spec(&["cat"]), json).await;
        assert_eq!(execution.output, json);
    }
    assert_eq!(bench.run(bench.spec(&["cat"]), r#""""#).await.output, "");
    // NUL cannot be an argument, but it can be read.
    assert_eq!(bench.run(bench.spec(&["wc", "-c"]), r#""a\u0000b""#).await.output, "3\n");
}

#[tokio::test]
async fn a_command_need_not_read_its_input() {
    let bench = Bench::new();
    let json = serde_json::to_string(&"x".repeat(10_000_000)).unwrap();
    for script in ["true", "exec <&-; sleep 0.2; echo done", "head -c 5 >/dev/null; sleep 0.1"] {
        let execution = bench.run(bench.spec(&["sh", "-c", script]), &json).await;
        assert_end(&execution, ExecutionEnd::Succeeded, StopReason::Completed);
    }
}

#[tokio::test]
async fn data_reaches_arguments_as_one_word_and_no_shell() {
    let bench = Bench::new();
    let argv = ["printf", "<%s>", "{input}", "{key}/{position}/{attempt}", "a{b}"];
    let data = r#"$(touch x) {key}; 'a" *\n"#;
    let execution = bench.run(bench.spec(&argv), &serde_json::to_string(data).unwrap()).await;
    assert_eq!(execution.output, format!("<{data}><the key/7/2><a{{b}}>"));
    assert_eq!(fs::read_dir(bench.cwd.path()).unwrap().count(), 0);

    let argv = ["sh", "-c", "readlink /proc/self/fd/0", "{input}"];
    assert_eq!(bench.run(bench.spec(&argv), r#""x""#).await.output, "/dev/null\n");
}

#[tokio::test]
async fn an_input_file_is_private_and_removed() {
    let bench = Bench::new();
    let script = r#"stat -c %a "$1" "${1%/*}"; cat "$1"; readlink /proc/self/fd/0; echo "$1""#;
    let spec = bench.spec(&["sh", "-c", script, "sh", "{input_file}"]);
    let execution = bench.run(spec, r#""a\u0000b\n""#).await;
    let lines: Vec<_> = execution.output.lines().collect();
    assert_eq!(lines[..4], ["600", "700", "a\u{fffd}b", "/dev/null"]);
    assert!(Path::new(lines[4]).starts_with(bench.scratch.path()), "{lines:?}");
}

// Surroundings.

#[tokio::test]
async fn the_environment_holds_what_it_should_and_nothing_else() {
    let bench = Bench::new();
    let mut spec = bench.spec(&["env"]);
    spec.env_pass = vec!["LANG".to_owned(), "UNSET".to_owned()];
    let worker_env = [("LANG", "C"), ("NOTIFY_SOCKET", "/s"), ("HOLDFAST__X", "s"), ("HOME", "/")];
    let executor = bench.executor(spec, &worker_env);
    let job = job("1");

    let execution = executor.execute(&job, &bench.stop).await;

    let lines = execution.output.lines();
    let (private, mut lines): (Vec<_>, Vec<_>) = lines.partition(|line| line.starts_with("TMPDIR"));
    lines.sort_unstable();
    let root = bench.scratch.path().display();
    assert!(private[0].starts_with(&format!("TMPDIR={root}/")), "{private:?}");
    assert_eq!(
        lines,
        [
            "HOLDFAST_ATTEMPT=2",
            &format!("HOLDFAST_BATCH_ID={}", job.item.batch()),
            "HOLDFAST_DEADLINE=1970-01-01T00:00:00Z",
            "HOLDFAST_KEY=the key",
            &format!("HOLDFAST_LEASE_ID={}", job.lease),
            "HOLDFAST_POSITION=7",
            "HOLDFAST_TOKEN=12",
            "LANG=C",
            &format!("MARK={}", bench.mark),
            "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        ]
    );
}

#[tokio::test]
async fn a_command_leads_a_session_and_group_of_its_own() {
    let execution = Bench::new().sh("read -r all < /proc/$$/stat; echo $$ ${all#*) }").await;
    let words: Vec<_> = execution.output.split(' ').collect();
    let [pid, _state, _parent, group, session] = words[..5] else { panic!("{words:?}") };
    assert_eq!((group, session), (pid, pid));
}

#[tokio::test]
async fn signals_are_at_their_default_and_files_are_closed() {
    let bench = Bench::new();
    // This process ignores SIGPIPE, as every Rust program does, and has a file open that a child
    // would inherit.
    let inherited = rustix::io::dup(std::io::stdin()).unwrap();
    let execution = bench.sh("cat /proc/self/status; ls /proc/$$/fd").await;
    drop(inherited);
    for set in ["SigBlk", "SigIgn", "SigCgt"] {
        let line = execution.output.lines().find(|line| line.starts_with(set)).unwrap();
        assert!(line.ends_with(":\t0000000000000000"), "{line}");
    }
    assert!(execution.output.ends_with("\n0\n1\n2\n"), "{}", execution.output);
}

#[tokio::test]
async fn without_a_directory_it_gets_a_private_one() {
    let bench = Bench::new();
    let mut spec =
        bench.spec(&["sh", "-c", "pwd; echo $TMPDIR; mkdir -p a/b; ln -s / a/b/c; ls -A"]);
    spec.cwd = None;
    let execution = bench.run(spec, "1").await;
    let lines: Vec<_> = execution.output.lines().collect();
    assert_eq!((lines[0], lines[2]), (lines[1], "a"));
    assert!(Path::new(lines[0]).starts_with(bench.scratch.path()), "{lines:?}");
}

// The end of the group.

#[tokio::test]
async fn a_descendant_that_holds_the_pipes_does_not_hold_the_attempt() {
    let bench = Bench::new();
    let execution = bench.sh("sleep 1000 & echo here").await;
    assert_end(&execution, ExecutionEnd::Succeeded, StopReason::Completed);
    assert_eq!(execution.output, "here\n");
}

#[tokio::test]
async fn a_descendant_that_goes_on_writing_does_not_hold_the_attempt() {
    let execution = Bench::new().sh("yes & exit 0").await;
    assert_end(&execution, ExecutionEnd::Succeeded, StopReason::Completed);
    assert!(execution.output_bytes > 0);
}

#[tokio::test]
async fn output_written_just_before_the_exit_is_read() {
    let bench = Bench::new();
    for _ in 0..50 {
        let execution = bench.sh("head -c 60000 /dev/zero").await;
        assert_eq!(execution.output_bytes, 60_000);
    }
}

#[tokio::test]
async fn what_takes_too_long_is_ended_with_its_children() {
    let bench = Bench::new();
    let mut spec = bench.spec(&["sh", "-c", "echo before; sleep 1000 & sleep 1000"]);
    spec.timeout = Duration::from_millis(500);
    let execution = bench.run(spec, "1").await;
    assert_end(&execution, ExecutionEnd::TimedOut, StopReason::TimedOut);
    assert_eq!(execution.signal, Some(Signal::TERM.as_raw()));
    assert_eq!(execution.error.unwrap(), "timed out after 500ms");
}

/// Runs `script` until it has written a line into `ready`, then stops it.
async fn stopped(bench: &Bench, script: &str, kill_grace: Duration) -> Execution {
    let mut spec = bench.spec(&["sh", "-c", script]);
    spec.kill_grace = kill_grace;
    let stop = async {
        bench.line_in("ready").await;
        bench.stop.cancel();
    };
    tokio::join!(bench.run(spec, "1"), stop).0
}

#[tokio::test]
async fn a_stopped_command_may_tidy_up() {
    let bench = Bench::new();
    let script = "trap 'echo bye; exit 4' TERM; echo >ready; while :; do sleep 0.01; done";
    let execution = stopped(&bench, script, Duration::from_secs(30)).await;
    assert_end(&execution, ExecutionEnd::Stopped, StopReason::Stopped);
    assert_eq!((execution.output.as_str(), execution.exit_status), ("bye\n", Some(4)));
}

#[tokio::test]
async fn the_grace_is_for_the_whole_group() {
    let bench = Bench::new();
    // The shell is gone at the signal, the program it runs takes its time.
    let script = "(trap 'sleep 0.5; echo tidied; exit' TERM; echo >ready; \
                  while :; do sleep 0.01; done) & wait";
    let execution = stopped(&bench, script, Duration::from_secs(30)).await;
    assert_eq!((execution.output.as_str(), execution.signal), ("tidied\n", Some(15)));
}

#[tokio::test]
async fn what_ignores_the_request_to_end_is_killed() {
    let bench = Bench::new();
    let script = "trap '' TERM; sleep 1000 & echo >ready; while :; do sleep 1; done";
    let execution = stopped(&bench, script, Duration::from_millis(100)).await;
    assert_end(&execution, ExecutionEnd::Stopped, StopReason::Stopped);
    assert_eq!(execution.signal, Some(Signal::KILL.as_raw()));
}

#[tokio::test]
async fn a_suspended_command_hears_the_request_to_end() {
    let bench = Bench::new();
    let spec =
        bench.spec(&["sh", "-c", "trap 'echo woke; exit' TERM; echo $$ >ready; kill -STOP $$"]);
    let stop = async {
        let process = PathBuf::from("/proc").join(bench.line_in("ready").await);
        until(|| fs::read_to_string(process.join("stat")).is_ok_and(|all| all.contains(") T ")))
            .await;
        bench.stop.cancel();
    };
    let (execution, ()) = tokio::join!(bench.run(spec, "1"), stop);
    assert_eq!(execution.output, "woke\n");
}

#[tokio::test]
async fn the_group_is_gone_when_an_execution_ends() {
    let bench = Bench::new();
    // As many as take the kernel a while to end.
    let script = "echo $$; i=0; while [ $i -lt 300 ]; do sleep 1000 & echo $!; i=$((i+1)); done";
    let executor = bench.executor(bench.spec(&["sh", "-c", script]), &[]);
    let job = job("1");

    let execution = executor.execute(&job, &bench.stop).await;

    let running = |pid: &str| {
        let stat = fs::read_to_string(Path::new("/proc").join(pid).join("stat"));
        stat.is_ok_and(|stat| !stat.contains(") Z "))
    };
    assert!(!execution.output.lines().rev().any(running), "{execution:?}");
    let leader = execution.output.lines().next().unwrap();
    assert!(!Path::new("/proc").join(leader).exists(), "not reaped");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn many_run_side_by_side() {
    let bench = Arc::new(Bench::new());
    let executor = Arc::new(bench.executor(bench.spec(&["sh", "-c", "cat; exit 75"]), &[]));
    let mut runs = tokio::task::JoinSet::new();
    for number in 0..200 {
        let (executor, stop) = (Arc::clone(&executor), bench.stop.clone());
        runs.spawn(async move {
            let execution = executor.execute(&job(&number.to_string()), &stop).await;
            assert_eq!(execution.output, number.to_string());
            assert_end(&execution, ExecutionEnd::Retryable, StopReason::ExitStatus);
        });
    }
    while let Some(run) = runs.join_next().await {
        run.unwrap();
    }
    assert_eq!(bench.processes(), Vec::<PathBuf>::new());
    assert_eq!(fs::read_dir(bench.scratch.path()).unwrap().count(), 0);
}

#[tokio::test]
async fn an_abandoned_execution_is_killed() {
    let bench = Bench::new();
    let executor = bench.executor(bench.spec(&["sh", "-c", "echo >ready; sleep 1000"]), &[]);
    let job = job("1");
    tokio::select! {
        execution = executor.execute(&job, &bench.stop) => panic!("{execution:?}"),
        _ = bench.line_in("ready") => {}
    }
    until(|| bench.processes().is_empty()).await;
}

// What cannot start.

#[tokio::test]
async fn what_can_never_start_fails_for_good() {
    let bench = Bench::new();
    let file = |name: &str, mode: u32| {
        let path = bench.cwd.path().join(name);
        fs::write(&path, "no program").unwrap();
        fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let (plain, text) = (file("plain", 0o644), file("text", 0o755));
    let long = serde_json::to_string(&"x".repeat(200_000)).unwrap();
    for (argv, input, reason) in [
        (["no-such-program", ""], "1", "No such file"),
        (["/no/such/program", ""], "1", "No such file"),
        ([plain.as_str(), ""], "1", "Permission denied"),
        (["/proc", ""], "1", "Permission denied"),
        ([text.as_str(), ""], "1", "Exec format error"),
        (["true", "{input}"], long.as_str(), "Argument list too long"),
        (["true", "{input}"], r#""\u0000""#, "NUL"),
        (["true", "{input}"], r#""\ud800""#, "input"),
    ] {
        let execution = bench.run(bench.spec(&argv), input).await;
        assert_end(&execution, ExecutionEnd::Permanent, StopReason::CannotStart);
        let error = execution.error.unwrap();
        assert!(error.contains(argv[0]) && error.contains(reason), "{error}");
        assert_eq!((execution.exit_status, execution.signal), (None, None));
    }
    let mut spec = bench.spec(&["true"]);
    spec.cwd = Some(bench.cwd.path().join("missing"));
    let execution = bench.run(spec, "1").await;
    assert_end(&execution, ExecutionEnd::Permanent, StopReason::CannotStart);
    assert!(execution.error.unwrap().contains("working directory"));
}

#[tokio::test]
async fn a_program_that_is_being_written_may_start_later() {
    let bench = Bench::new();
    let program = bench.cwd.path().join("program");
    fs::copy("/bin/true", &program).unwrap();
    let argv = [program.to_str().unwrap()];

    let writer = fs::OpenOptions::new().append(true).open(&program).unwrap();
    let execution = bench.run(bench.spec(&argv), "1").await;
    assert_end(&execution, ExecutionEnd::NotAdmitted, StopReason::CannotStart);

    drop(writer);
    let execution = bench.run(bench.spec(&argv), "1").await;
    assert_end(&execution, ExecutionEnd::Succeeded, StopReason::Completed);
}

// Tests that need a process of their own: they run a second test of this file in one.

/// This test binary, about to run the test of this name alone.
fn in_a_process_of_its_own(name: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--ignored", "--exact", "--nocapture", &format!("command_executor::{name}")]);
    command
}

#[test]
fn want_of_files_or_space_is_not_the_item_s_fault() {
    let output = in_a_process_of_its_own("with_little_files_and_space").output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
}

#[tokio::test]
#[ignore = "lowers the limits of its process; run by another test"]
async fn with_little_files_and_space() {
    let bench = Bench::new();
    let limit = |resource, current| {
        let maximum = rustix::process::getrlimit(resource).maximum;
        rustix::process::setrlimit(resource, Rlimit { current, maximum }).unwrap();
    };
    let files = rustix::process::getrlimit(Resource::Nofile).current;
    let executor = bench.executor(bench.spec(&["true"]), &[]);
    let open = fs::read_dir("/proc/self/fd").unwrap().count() as u64;

    limit(Resource::Nofile, Some(open + 2));
    let execution = executor.execute(&job("1"), &bench.stop).await;
    limit(Resource::Nofile, files);
    assert_end(&execution, ExecutionEnd::NotAdmitted, StopReason::CannotStart);
    assert!(execution.error.unwrap().contains("Too many open files"));
    let execution = executor.execute(&job("1"), &bench.stop).await;
    assert_end(&execution, ExecutionEnd::Succeeded, StopReason::Completed);

    // Stands for a full disk: a write that fails half way. The signal would end this process.
    let seen = Arc::new(false.into());
    signal_hook::flag::register(signal_hook::consts::SIGXFSZ, seen).unwrap();
    limit(Resource::Fsize, Some(1000));
    let json = serde_json::to_string(&"x".repeat(5000)).unwrap();
    let execution = bench.run(bench.spec(&["cat", "{input_file}"]), &json).await;
    assert_end(&execution, ExecutionEnd::NotAdmitted, StopReason::CannotStart);
    assert!(execution.error.unwrap().contains("File too large"));
}

#[tokio::test]
async fn a_command_dies_with_its_worker() {
    let bench = Bench::new();
    let mut worker = in_a_process_of_its_own("a_worker_with_a_command")
        .env("TEST_MARK", &bench.mark)
        .env("TEST_CWD", bench.cwd.path())
        .spawn()
        .unwrap();
    let pid = bench.line_in("ready").await;
    let command = PathBuf::from("/proc").join(&pid);
    assert!(bench.processes().contains(&command));

    worker.kill().unwrap();
    worker.wait().unwrap();

    until(|| bench.processes().is_empty()).await;
}

#[tokio::test]
#[ignore = "is killed by another test"]
async fn a_worker_with_a_command() {
    let mut bench = Bench::new();
    bench.mark = std::env::var("TEST_MARK").unwrap();
    let mut spec = bench.spec(&["sh", "-c", "echo $$ >ready; exec sleep 1000"]);
    spec.cwd = Some(std::env::var("TEST_CWD").unwrap().into());
    bench.run(spec, "1").await;
}

#[tokio::test]
async fn an_exit_status_counts_although_child_signals_are_ignored() {
    // The kernel then keeps no exit status, and a parent may have left it so.
    let output = Command::new("env")
        .arg("--ignore-signal=CHLD")
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "command_executor::a_signal_is_told_apart_from_an_exit"])
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
}
