//! An independent judge of the client: llmock breaks its calls, and says how it coped.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use holdfast::clock::SystemClock;
use holdfast::config::{AgentSpec, HttpSpec, Settings};
use holdfast::execute::agent::AgentExecutor;
use holdfast::execute::command::InvalidCommand;
use holdfast::execute::{ExecutionEnd, Executor, NoLedger};
use serde_json::{Value, json};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;

use super::support::{LOCAL, PATIENCE, Queue, job, local, spec, upstreams};
use crate::support::fleet::{LONG, until};

/// Where `.ci/judge` puts it.
fn installed() -> Option<PathBuf> {
    let target = std::env::var_os("CARGO_TARGET_DIR").map(PathBuf::from);
    let target = target.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("target"));
    Some(target.join("judge")).filter(|folder| folder.join("installed.txt").exists())
}

struct Judge {
    child: Child,
    port: u16,
}

impl Drop for Judge {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Judge {
    async fn start(folder: &Path) -> Self {
        let port = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap().port();
        let child = Command::new("python3")
            .args(["-m", "llmock.cli", "serve", "--port", &port.to_string()])
            .env("PYTHONPATH", folder)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let judge = Self { child, port };
        until("the judge listens", LONG, async || {
            TcpStream::connect(("127.0.0.1", port)).await.is_ok()
        })
        .await;
        judge
    }

    fn url(&self, path: &str) -> String {
        format!("http://127.0.0.1:{}{path}", self.port)
    }

    /// Asks it by our own executor, which is the client at hand.
    async fn ask(&self, method: &str, path: &str, body: &Value) -> Value {
        let queue = HttpSpec { method: method.to_owned(), ..spec(self.url(path)) };
        let answer = Queue::new(queue, &upstreams(local())).run(&job(&body.to_string())).await;
        assert_eq!(answer.end, ExecutionEnd::Succeeded, "{answer:?}");
        serde_json::from_str(&answer.output).unwrap()
    }

    async fn breaks(&self, behaviors: &Value) {
        self.ask("POST", "/_llmock/scenario", &json!({ "behaviors": behaviors })).await;
    }

    async fn says_pass(&self) {
        let verdict = self.ask("GET", "/_llmock/verdict", &json!(null)).await;
        assert_eq!(verdict["passed"], true, "{verdict}");
        assert_eq!(verdict["errors"], 0, "{verdict}");
        assert_ne!(verdict["faults_injected"], 0, "{verdict}");
    }
}

#[tokio::test]
async fn an_independent_judge_finds_no_fault_with_the_client() {
    let Some(folder) = installed() else {
        eprintln!("llmock is not installed: skipped");
        return;
    };
    let judge = Judge::start(&folder).await;
    judge
        .breaks(&json!([
            {"type": "fail", "status": 429, "retry_after": 1, "times": 2},
            {"type": "fail", "status": 503, "times": 1},
            {"type": "reply", "text": "It is done."},
        ]))
        .await;
    let stop = CancellationToken::new();
    let item = job(r#""say that it is done""#);
    let executor = agent(&judge);
    let execution = tokio::time::timeout(PATIENCE, executor.execute(&item, &stop));
    let execution = execution.await.unwrap();

    assert_eq!(
        (execution.stop_reason.as_str(), execution.output.as_str()),
        ("completed", "It is done.")
    );
    judge.says_pass().await;
    for status in [400, 401, 403, 404, 422] {
        judge.breaks(&json!([{"type": "fail", "status": status, "times": null}])).await;
        let item = job(&Value::from(format!("status {status}")).to_string());
        // Each on an upstream of its own: a refused credential pauses one.
        let execution = agent(&judge).execute(&item, &stop).await;
        assert_ne!(execution.end, ExecutionEnd::Succeeded, "{status}");
        judge.ask("DELETE", "/_llmock/scenario", &json!(null)).await;
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    judge.says_pass().await;
}

/// A model without tools.
fn agent(judge: &Judge) -> AgentExecutor {
    let spec = AgentSpec {
        upstream: LOCAL.to_owned(),
        tools: Vec::new(),
        ..AgentSpec::new(judge.url("/v1"), "gpt-4o", &Settings::defaults().limits)
    };
    let (ledger, clock) = (Arc::new(NoLedger), Arc::new(SystemClock));
    AgentExecutor::new(spec, &upstreams(local()), Box::new(no_shell), None, ledger, 4000, clock)
        .unwrap()
}

/// Nothing asks for one.
fn no_shell(
    timeout: Duration,
) -> Result<holdfast::execute::command::CommandExecutor, InvalidCommand> {
    use holdfast::execute::command::{CommandExecutor, CommandSpec, Otherwise};
    use holdfast::execute::spawn::LocalSpawner;
    let spec = CommandSpec {
        argv: vec!["false".to_owned()],
        timeout,
        env: std::collections::BTreeMap::new(),
        env_pass: Vec::new(),
        cwd: None,
        workspace: false,
        success: vec![0],
        retry: Vec::new(),
        permanent: Vec::new(),
        otherwise: Otherwise::Permanent,
        result_bytes: 1024,
        log_bytes: 1024,
        error_chars: 1000,
        kill_grace: timeout,
    };
    let env: Vec<(std::ffi::OsString, std::ffi::OsString)> = Vec::new();
    let spawner = Arc::new(LocalSpawner::new().expect("a machine that runs tests"));
    CommandExecutor::new(spec, None, env, "/tmp".into(), spawner, Arc::new(SystemClock))
}
