//! The traces of real workers, as a collector receives them.

use std::fs;
use std::process::{Command, Stdio};
use std::time::Duration;

use holdfast::clock::{Clock, SystemClock};
use holdfast::model::{BatchId, FencingToken, ItemRef, Position};
use holdfast::telemetry::trace::TraceContext;
use opentelemetry_proto::tonic::trace::v1::Span;
use opentelemetry_proto::tonic::trace::v1::span::Link;
use opentelemetry_proto::tonic::trace::v1::status::StatusCode;
use rustix::process::Signal;
use serde_json::{Value, json};
use tokio::net::TcpListener;

use crate::support::collector::{Collector, hex, texts};
use crate::support::fleet::{Fleet, LONG, SHORT_LEASE, until};
use crate::support::worker_process::WorkerProcess;

const CALLER: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

/// A queue whose items are shell texts; each notes where in a trace it runs.
const QUEUE: &str = r#"
[retry]
backoff_base = '10ms'
[drain]
grace = '0s'
[queues.traced]
executor = 'command'
argv = ['sh', '-c', 'echo "$HOLDFAST_ATTEMPT $TRACEPARENT" >>"$NOTES"; eval "$1"', 'sh', '{input}']
env_pass = ['NOTES']
"#;

/// Workers that send their spans to one collector.
struct Bed {
    fleet: Fleet,
    endpoint: String,
}

impl Bed {
    async fn new(settings: &str, endpoint: String) -> Self {
        Self { fleet: Fleet::new(&format!("{settings}{QUEUE}")).await, endpoint }
    }

    fn start(&self, arguments: &[&str]) -> WorkerProcess {
        let notes = self.fleet.file("notes");
        let variables = [
            ("OTEL_EXPORTER_OTLP_ENDPOINT", self.endpoint.as_str()),
            ("OTEL_BSP_SCHEDULE_DELAY", "100"),
            ("NOTES", notes.to_str().unwrap()),
        ];
        self.fleet.start_at(self.fleet.url(), arguments, &variables)
    }

    /// `holdfast submit` of these items, called by [`CALLER`].
    async fn submit(&self, items: &[Value]) -> BatchId {
        let lines: Vec<String> = items.iter().map(|item| format!("{item}\n")).collect();
        let file = self.fleet.file("items.jsonl");
        fs::write(&file, lines.concat()).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_holdfast"));
        command
            .args(["submit", "--json", "--queue", "traced"])
            .args(["--database-url", self.fleet.url(), "--config"])
            .arg(self.fleet.file("holdfast.toml"))
            .arg(file)
            .env("TRACEPARENT", CALLER)
            .env("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", &self.endpoint)
            .stdin(Stdio::null());
        // Not on this thread: the collector answers here.
        let output = tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
        answer["batch"].as_str().unwrap().parse().unwrap()
    }

    /// What the commands noted: attempt and `TRACEPARENT`.
    fn notes(&self) -> Vec<(String, String)> {
        let text = fs::read_to_string(self.fleet.file("notes")).unwrap_or_default();
        let pairs = text.lines().map(|line| line.split_once(' ').unwrap());
        pairs.map(|(attempt, place)| (attempt.to_owned(), place.to_owned())).collect()
    }

    async fn noted(&self, times: usize) {
        until("commands run", LONG, async || self.notes().len() >= times).await;
    }

    /// Ends a worker in order; all of its spans have been delivered then.
    async fn end(worker: &mut WorkerProcess) -> i32 {
        worker.signal(Signal::TERM);
        worker.exit_status().await
    }

    /// The tokens of the attempts without an outcome, and how they ended.
    async fn attempts(&self, batch: BatchId) -> Vec<(FencingToken, String)> {
        let select = "SELECT token, ending FROM holdfast.attempts WHERE batch_id = $1
                       ORDER BY token";
        let rows = self.fleet.sql.query(select, &[&batch.uuid()]).await.unwrap();
        rows.iter().map(|row| (FencingToken::new(row.get(0)), row.get(1))).collect()
    }
}

fn item(input: &str) -> Value {
    json!({"key": "a", "input": input})
}

fn place_of(batch: BatchId, token: FencingToken) -> TraceContext {
    TraceContext::of_hold(ItemRef::new(batch, Position::new(0)), token)
}

/// Trace and span, as a link or a span names them.
fn place(trace: &[u8], span: &[u8]) -> String {
    format!("00-{}-{}", hex(trace), hex(span))
}

fn place_of_span(span: &Span) -> String {
    place(&span.trace_id, &span.span_id)
}

fn links(span: &Span) -> Vec<String> {
    span.links.iter().map(|link| place(&link.trace_id, &link.span_id)).collect()
}

fn link_to<'s>(span: &'s Span, to: &TraceContext) -> Option<&'s Link> {
    let to = to.to_string();
    span.links.iter().find(|link| to.starts_with(&place(&link.trace_id, &link.span_id)))
}

/// The names of the spans of one trace, sorted.
fn names_in(collector: &Collector, lease: &Span) -> Vec<String> {
    let spans = collector.all().into_iter();
    let mut names: Vec<String> =
        spans.filter(|s| s.trace_id == lease.trace_id).map(|s| s.name).collect();
    names.sort();
    names
}

/// The one lease span of each attempt and its one execution, in the order in which they were held.
fn attempts_in(collector: &Collector, attempts: usize) -> Vec<(Span, Span)> {
    let leases = collector.named("lease traced");
    let processes = collector.named("process traced");
    assert_eq!((leases.len(), processes.len()), (attempts, attempts), "one of each per attempt");
    let pair = |lease: Span| {
        assert_eq!(lease.parent_span_id, Vec::<u8>::new(), "a root");
        let inside: Vec<&Span> =
            processes.iter().filter(|span| span.parent_span_id == lease.span_id).collect();
        assert_eq!(inside.len(), 1, "one execution in each");
        assert_eq!(inside[0].trace_id, lease.trace_id);
        (lease, inside[0].clone())
    };
    leases.into_iter().map(pair).collect()
}

fn end_reason(lease: &Span) -> String {
    texts(&lease.attributes)["holdfast.lease.end_reason"].clone()
}

/// Every line from inside an attempt says which one it is.
fn assert_lines_carry_their_ids(worker: &WorkerProcess) {
    let inside = ["holdfast::attempt", "holdfast::execute::command"];
    let mut seen = 0;
    for line in worker.log() {
        let target = line["target"].as_str().unwrap();
        if inside.iter().any(|module| target.starts_with(module)) {
            seen += 1;
            for id in ["trace_id", "span_id", "batch", "position", "lease", "token", "queue"] {
                assert!(!line[id].is_null(), "no {id}: {line}");
            }
        }
    }
    assert!(seen > 0, "nothing was logged from inside an attempt");
}

#[tokio::test]
async fn each_attempt_is_a_trace_that_leads_to_its_submit_and_to_the_attempt_before() {
    let (collector, address, _server) = Collector::start().await;
    let bed = Bed::new("", format!("http://{address}")).await;
    let batch = bed.submit(&[item("test \"$HOLDFAST_ATTEMPT\" -ge 2")]).await;
    let mut worker = bed.start(&[]);
    bed.fleet.ended(batch).await;
    assert_eq!(Bed::end(&mut worker).await, 0);

    let send = &collector.named("send traced")[0];
    assert_eq!(place(&send.trace_id, &send.parent_span_id), CALLER[..52], "the caller's trace");
    assert_eq!(texts(&send.attributes)["messaging.message.conversation_id"], batch.to_string());

    let attempts = attempts_in(&collector, 2);
    let claims = collector.named("claim traced");
    let [(first, one), (second, two)] = &attempts[..] else { panic!("two attempts") };
    let before = bed.attempts(batch).await;
    assert_eq!(place_of_span(first), place_of(batch, before[0].0).to_string()[..52]);
    let granted: Vec<String> = claims.iter().map(place_of_span).collect();
    assert_eq!(links(first), [place_of_span(send), granted[0].clone()]);
    assert_eq!(links(second), [place_of_span(send), granted[1].clone(), place_of_span(first)]);
    let known = texts(&link_to(second, &place_of(batch, before[0].0)).unwrap().attributes);
    assert_eq!(known["holdfast.attempt.ending"], "error");
    assert_ne!(first.trace_id, second.trace_id);

    assert_eq!(
        names_in(&collector, first),
        ["exec sh", "fail traced", "lease traced", "process traced"]
    );
    assert_eq!(
        names_in(&collector, second),
        ["complete traced", "exec sh", "lease traced", "process traced"]
    );
    let settle = &collector.named("complete traced")[0];
    assert_eq!(settle.parent_span_id, second.span_id);
    assert_eq!(collector.named("exec sh")[0].parent_span_id, one.span_id);
    assert_eq!(one.status.as_ref().unwrap().code(), StatusCode::Error);
    assert_eq!(end_reason(second), "settled");
    assert_eq!(
        bed.notes(),
        [("1", one), ("2", two)]
            .map(|(attempt, span)| (attempt.to_owned(), format!("{}-01", place_of_span(span)))),
        "the commands were told of their executions"
    );
    for span in collector.all() {
        let text = format!("{:?} {:?}", texts(&span.attributes), span.events);
        assert!(!text.contains("HOLDFAST_ATTEMPT"), "no input: {text}");
    }
    assert_lines_carry_their_ids(&worker);
}

#[tokio::test]
async fn the_attempt_after_a_crash_leads_to_the_one_that_nobody_could_export() {
    let (collector, address, _server) = Collector::start().await;
    let bed = Bed::new(SHORT_LEASE, format!("http://{address}")).await;
    let batch = bed.submit(&[item("test \"$HOLDFAST_ATTEMPT\" -ge 2 || exec sleep 300")]).await;
    let mut first = bed.start(&[]);
    bed.noted(1).await;
    first.kill();
    let mut second = bed.start(&[]);
    bed.fleet.ended(batch).await;
    Bed::end(&mut second).await;

    let (lease, _) = &attempts_in(&collector, 1)[0];
    let attempts = bed.attempts(batch).await;
    let [(token, ending)] = &attempts[..] else { panic!("one attempt was lost: {attempts:?}") };
    assert_eq!(ending, "expired");
    let lost = place_of(batch, *token);
    let known = texts(&link_to(lease, &lost).expect("a link to the lost attempt").attributes);
    assert_eq!(known["holdfast.attempt.ending"], "expired");
    assert_eq!(known["messaging.client.id"], first.id().await.to_string());
    let recover = &collector.named("recover traced")[0];
    assert!(link_to(recover, &lost).is_some(), "whoever took it back says which it was");
    let line =
        second.log().into_iter().find(|line| line["message"] == "took back an expired lease");
    assert_eq!(line.unwrap()["trace_id"], lost.trace_id().to_string());
    // The command of the dead worker was told of a place in the same trace.
    assert_eq!(bed.notes()[0].1[3..35], lost.trace_id().to_string());
}

#[tokio::test]
async fn a_drained_worker_delivers_the_spans_of_what_it_gave_back() {
    let (collector, address, _server) = Collector::start().await;
    let bed = Bed::new("", format!("http://{address}")).await;
    let stuck = "test \"$(wc -l <\"$NOTES\")\" -ge 2 || exec sleep 300";
    let batch = bed.submit(&[item(stuck)]).await;
    let mut first = bed.start(&[]);
    bed.noted(1).await;
    Bed::end(&mut first).await;
    assert_eq!(collector.named("lease traced").len(), 1, "delivered before it ended");
    let mut second = bed.start(&[]);
    bed.fleet.ended(batch).await;
    Bed::end(&mut second).await;

    let attempts = attempts_in(&collector, 2);
    let [(given_back, stopped), (done, _)] = &attempts[..] else { panic!("two attempts") };
    assert_eq!(end_reason(given_back), "drain_interrupted");
    assert_eq!(texts(&stopped.attributes)["holdfast.execution.outcome"], "interrupted");
    assert!(names_in(&collector, given_back).contains(&"release traced".to_owned()));
    assert!(links(done).contains(&place_of_span(given_back)));
    assert_lines_carry_their_ids(&first);
}

#[tokio::test]
async fn a_check_is_a_part_of_its_attempt() {
    let (collector, address, _server) = Collector::start().await;
    let bed = Bed::new("", format!("http://{address}")).await;
    let criteria = ["file:gone.txt exists", "it is well written"];
    let checked = json!({"key": "a", "input": "true", "acceptance_criteria": criteria});
    let batch = bed.submit(&[checked]).await;
    let mut worker = bed.start(&[]);
    bed.fleet.ended(batch).await;
    Bed::end(&mut worker).await;

    let (lease, _) = &attempts_in(&collector, 1)[0];
    assert_eq!(
        names_in(&collector, lease),
        [
            "check traced",
            "complete traced",
            "exec sh",
            "lease traced",
            "process traced",
            "verdict traced"
        ]
    );
    let check = &collector.named("check traced")[0];
    assert_eq!(check.parent_span_id, lease.span_id);
    let said = texts(&check.attributes);
    assert!(said["holdfast.check.criteria_count"].contains('2'), "{said:?}");
    assert!(said.contains_key("holdfast.check.wait_s"), "{said:?}");
    let verdict = &texts(&collector.named("verdict traced")[0].attributes);
    assert_eq!(verdict["holdfast.settle.reason"], said["holdfast.check.verdict"]);
    let text = format!("{said:?} {:?}", check.events);
    assert!(!text.contains("gone.txt"), "no text of a criterion: {text}");
    assert_eq!(end_reason(lease), "settled");
    assert_lines_carry_their_ids(&worker);
}

/// From its start until a worker has run a batch, and from its signal to its end.
async fn run_against(endpoint: &str) -> (Duration, Duration, f64) {
    let bed = Bed::new("", endpoint.to_owned()).await;
    let worker_first = bed.submit(&[item("true")]).await;
    let mut worker = bed.start(&["--slots", "4"]);
    bed.fleet.ended(worker_first).await;
    let items: Vec<Value> =
        (0..150).map(|n| json!({"key": format!("k{n}"), "input": "true"})).collect();
    let clock = SystemClock;
    let began = clock.now();
    let batch = bed.submit(&items).await;
    bed.fleet.ended(batch).await;
    let worked = clock.now();
    let mut dropped = 0.0;
    if !endpoint.is_empty() {
        until("dropped spans are counted", LONG, async || {
            let Some((200, text)) = worker.get("/metrics").await else { return false };
            let series = "holdfast_telemetry_dropped_total{signal=\"spans\"} ";
            let line = text.lines().find_map(|line| line.strip_prefix(series)).unwrap();
            dropped = line.parse().unwrap();
            dropped > 0.0
        })
        .await;
    }
    let asked = clock.now();
    assert_eq!(Bed::end(&mut worker).await, 0);
    (worked.since(began), clock.now().since(asked), dropped)
}

/// A collector that takes connections and never answers is worse than one that is not there.
#[tokio::test]
async fn a_silent_collector_costs_neither_throughput_nor_more_than_its_bound_at_the_end() {
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = silent.local_addr().unwrap();

    let (without, _, _) = run_against("").await;
    let (with, end, dropped) = run_against(&format!("http://{address}")).await;

    eprintln!("150 items: {without:?} without, {with:?} with a silent collector; end {end:?}");
    // The submit waits for a second, and the machine may do other things meanwhile.
    assert!(with < without * 2 + Duration::from_secs(5), "{with:?}, {without:?} without");
    // 3.5 s are the bound; the rest is what ending takes on a busy machine.
    assert!(end < Duration::from_secs(9), "{end:?}");
    assert!(dropped > 0.0);
}
