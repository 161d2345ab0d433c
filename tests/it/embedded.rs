//! The private server: its start, its end, and what it keeps.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use holdfast::clock::{Clock, SystemClock};
use holdfast::embedded::{DataDir, EmbeddedError, EmbeddedOptions, EmbeddedPostgres};
use tempfile::TempDir;
use tokio_postgres::{NoTls, SimpleQueryMessage};

/// Set for the process that `a_server_dies_with_its_parent` starts and kills.
const HOLD_A_SERVER: &str = "HOLDFAST_TEST_HOLD_A_SERVER";

fn start(data: DataDir) -> Result<EmbeddedPostgres, EmbeddedError> {
    EmbeddedPostgres::start(&EmbeddedOptions::new(data))
}

/// A folder that the account dropped to can pass through.
fn state() -> TempDir {
    tempfile::Builder::new()
        .permissions(std::os::unix::fs::PermissionsExt::from_mode(0o755))
        .tempdir()
        .unwrap()
}

/// Runs statements and returns the first column of the last one that has any.
fn ask(server: &EmbeddedPostgres, statements: &str) -> Option<String> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let url = server.url("postgres");
        let (client, connection) = tokio_postgres::connect(&url, NoTls).await.unwrap();
        let asked = async move { client.simple_query(statements).await.unwrap() };
        let (answers, _) = tokio::join!(asked, connection);
        answers.iter().rev().find_map(|answer| {
            let SimpleQueryMessage::Row(row) = answer else { return None };
            row.get(0).map(str::to_owned)
        })
    })
}

fn wait_until(what: &str, condition: impl Fn() -> bool) {
    let deadline = SystemClock.now() + Duration::from_secs(30);
    while !condition() {
        assert!(SystemClock.now() < deadline, "{what}: not within 30 s");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn lives(pid: u32) -> bool {
    // A zombie has ended; who reaps it is the machine's affair.
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with('Z'))
}

#[test]
fn an_ephemeral_server_answers_and_leaves_nothing_behind() {
    let server = start(DataDir::Ephemeral).unwrap();
    let (pid, folder) = (server.pid(), server.run_dir().to_owned());
    let socket = server.socket_dir().join(".s.PGSQL.5432");

    assert_eq!(ask(&server, "SHOW server_encoding").as_deref(), Some("UTF8"));
    assert_eq!(ask(&server, "SHOW listen_addresses").as_deref(), Some(""));
    assert_eq!(ask(&server, "SHOW server_version_num").unwrap()[..2], {
        server.version().major().to_string()
    });
    assert!(fs::metadata(socket).unwrap().file_type().is_socket());
    server.stop();

    assert!(!lives(pid));
    assert!(!folder.exists());
}

#[test]
fn settings_of_the_caller_win_and_fsync_can_be_turned_off() {
    let server = EmbeddedPostgres::start(&EmbeddedOptions {
        fsync: false,
        extra_settings: vec![
            ("full_page_writes".into(), "on".into()),
            ("work_mem".into(), "7MB".into()),
        ],
        ..EmbeddedOptions::new(DataDir::Ephemeral)
    })
    .unwrap();

    assert_eq!(ask(&server, "SHOW fsync").as_deref(), Some("off"));
    assert_eq!(ask(&server, "SHOW full_page_writes").as_deref(), Some("on"));
    assert_eq!(ask(&server, "SHOW work_mem").as_deref(), Some("7MB"));
}

#[test]
fn a_state_folder_keeps_its_data_for_one_server_at_a_time() {
    let folder = state();
    let data = || DataDir::State(folder.path().join("state"));
    let first = start(data()).unwrap();
    ask(&first, "CREATE TABLE kept AS SELECT 'still here' AS what");

    let meanwhile = start(data()).unwrap_err();
    let url = first.url("postgres");
    first.stop();
    let second = start(data()).unwrap();

    assert!(matches!(meanwhile, EmbeddedError::AlreadyRunning { .. }), "{meanwhile}");
    assert!(meanwhile.to_string().contains(&url), "{meanwhile}");
    assert_eq!(ask(&second, "SELECT what FROM kept").as_deref(), Some("still here"));
    assert_eq!(ask(&second, "SHOW fsync").as_deref(), Some("on"));
}

#[test]
fn data_of_another_major_version_is_refused_by_name() {
    let folder = state();
    let data = folder.path().join("postgres");
    fs::create_dir(&data).unwrap();
    fs::write(data.join("PG_VERSION"), "9.6\n").unwrap();

    let refused = start(DataDir::State(folder.path().to_owned())).unwrap_err();

    assert!(matches!(refused, EmbeddedError::OtherVersion { .. }), "{refused}");
    let message = refused.to_string();
    assert!(message.contains("was made by PostgreSQL 9.6"), "{message}");
    assert!(message.contains("--pg-bin"), "{message}");
}

#[test]
fn a_data_folder_whose_making_was_cut_short_is_made_anew() {
    let folder = state();
    let unfinished = folder.path().join("postgres.new.1");
    fs::create_dir(&unfinished).unwrap();
    fs::write(unfinished.join("PG_VERSION"), "15\n").unwrap();

    let server = start(DataDir::State(folder.path().to_owned())).unwrap();

    assert_eq!(ask(&server, "SELECT 'works'").as_deref(), Some("works"));
    assert!(!unfinished.exists());
}

#[test]
fn a_server_that_cannot_start_says_what_its_log_says() {
    let refused = EmbeddedPostgres::start(&EmbeddedOptions {
        extra_settings: vec![("no_such_setting".into(), "1".into())],
        ..EmbeddedOptions::new(DataDir::Ephemeral)
    })
    .unwrap_err();

    assert!(matches!(refused, EmbeddedError::NotStarted { .. }), "{refused}");
    assert!(refused.to_string().contains("\"no_such_setting\""), "{refused}");
}

#[test]
fn a_server_dies_with_its_parent_and_its_data_can_be_used_at_once() {
    let folder = state();
    let mut parent = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "embedded::hold_a_server", "--ignored", "--nocapture"])
        .env(HOLD_A_SERVER, folder.path())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(parent.stderr.take().unwrap()).lines().map(Result::unwrap);
    let held = lines
        .inspect(|line| eprintln!("{line}"))
        .find_map(|line| line.split_once("held: ").map(|(_, held)| held.to_owned()));
    let (pid, run) = held.as_deref().and_then(|held| held.split_once(' ')).unwrap();
    let (pid, run): (u32, PathBuf) = (pid.parse().unwrap(), run.into());
    assert!(lives(pid));

    parent.kill().unwrap(); // SIGKILL: the parent can do nothing about it
    parent.wait().unwrap();
    let next = start(DataDir::State(folder.path().to_owned())).unwrap();

    wait_until("the server ends", || !lives(pid));
    assert_eq!(ask(&next, "SELECT what FROM kept").as_deref(), Some("committed"));
    assert!(!run.exists(), "a later start removes the run folder of the dead");
}

#[test]
#[ignore = "the process that a_server_dies_with_its_parent starts and kills"]
fn hold_a_server() {
    let Some(folder) = std::env::var_os(HOLD_A_SERVER) else { return };
    let server = start(DataDir::State(Path::new(&folder).to_owned())).unwrap();
    ask(&server, "CREATE TABLE kept AS SELECT 'committed' AS what");
    eprintln!("held: {} {}", server.pid(), server.run_dir().display());
    loop {
        std::thread::park();
    }
}
