//! A scripted upstream: it answers what the test says, well or badly, and records every request.

use std::collections::VecDeque;
use std::io::Write;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use flate2::Compression;
use flate2::write::GzEncoder;
use holdfast::clock::{BootInstant, Clock, SystemClock};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

use super::fleet::{LONG, until};

/// One request as it came.
#[derive(Clone, Debug)]
pub(crate) struct Seen {
    pub(crate) at: BootInstant,
    pub(crate) method: String,
    pub(crate) target: String,
    headers: Vec<(String, String)>,
    pub(crate) body: String,
}

impl Seen {
    /// The header of this name, in lower case.
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap()
    }

    /// The messages of a chat with this role.
    pub(crate) fn messages(&self, role: &str) -> Vec<Value> {
        let body = self.json();
        let messages = body["messages"].as_array().unwrap().iter();
        messages.filter(|message| message["role"] == role).cloned().collect()
    }
}

/// How a body is sent.
#[derive(Clone, Debug)]
enum Body {
    Whole(Vec<u8>),
    /// A byte at a time.
    Trickle(Vec<u8>, Duration),
    /// The first bytes, then the connection breaks.
    Cut(Vec<u8>, usize),
    /// The first bytes, then nothing more.
    Stuck(Vec<u8>, usize),
    /// Without end.
    Endless,
}

/// One reply of a script.
#[derive(Clone, Debug)]
pub(crate) struct Reply {
    delay: Duration,
    status: u16,
    headers: Vec<(String, String)>,
    body: Body,
    /// Nothing is answered: the connection breaks, or with `hangs` stays as it is.
    silent: bool,
    hangs: bool,
}

impl Reply {
    pub(crate) fn status(status: u16) -> Self {
        Self {
            delay: Duration::ZERO,
            status,
            headers: Vec::new(),
            body: Body::Whole(Vec::new()),
            silent: false,
            hangs: false,
        }
    }

    pub(crate) fn text(text: &str) -> Self {
        Self { body: Body::Whole(text.as_bytes().to_vec()), ..Self::status(200) }
    }

    pub(crate) fn json(body: &Value) -> Self {
        Self::text(&body.to_string()).header("content-type", "application/json")
    }

    /// An error as model servers tell it.
    pub(crate) fn error(status: u16, code: &str) -> Self {
        let body = json!({"error": {"code": code, "message": format!("this is {code}")}});
        Self { status, ..Self::json(&body) }
    }

    pub(crate) fn header(mut self, name: &str, value: &str) -> Self {
        self.headers.push((name.to_owned(), value.to_owned()));
        self
    }

    pub(crate) fn after(mut self, delay: Duration) -> Self {
        self.delay = delay;
        self
    }

    /// Breaks the connection in place of an answer.
    pub(crate) fn reset() -> Self {
        Self { silent: true, ..Self::status(200) }
    }

    /// Never answers.
    pub(crate) fn hang() -> Self {
        Self { silent: true, hangs: true, ..Self::status(200) }
    }

    pub(crate) fn trickle(text: &str, every: Duration) -> Self {
        Self { body: Body::Trickle(text.as_bytes().to_vec(), every), ..Self::status(200) }
    }

    pub(crate) fn cut(text: &str, after: usize) -> Self {
        Self { body: Body::Cut(text.as_bytes().to_vec(), after), ..Self::status(200) }
    }

    pub(crate) fn stuck(text: &str, after: usize) -> Self {
        Self { body: Body::Stuck(text.as_bytes().to_vec(), after), ..Self::status(200) }
    }

    pub(crate) fn endless() -> Self {
        Self { body: Body::Endless, ..Self::status(200) }
    }

    /// So many zero bytes in next to nothing.
    pub(crate) fn gzip_bomb(size: usize) -> Self {
        let mut packed = GzEncoder::new(Vec::new(), Compression::best());
        for _ in 0..size / 4096 {
            packed.write_all(&[b'0'; 4096]).unwrap();
        }
        let body = Body::Whole(packed.finish().unwrap());
        Self { body, ..Self::status(200) }.header("content-encoding", "gzip")
    }

    /// A header larger than any client takes.
    pub(crate) fn giant_header() -> Self {
        Self::text("").header("x-giant", &"x".repeat(4 << 20))
    }

    /// What a model says.
    pub(crate) fn says(text: &str) -> Self {
        Self::chat(&json!({"role": "assistant", "content": text}), "stop")
    }

    /// What a model asks for: tools with their arguments.
    pub(crate) fn calls(calls: &[(&str, Value)]) -> Self {
        let calls = calls.iter().enumerate().map(|(n, (name, arguments))| {
            let function = json!({"name": name, "arguments": arguments.to_string()});
            json!({"id": format!("c{n}"), "type": "function", "function": function})
        });
        let calls: Vec<Value> = calls.collect();
        Self::chat(
            &json!({"role": "assistant", "content": null, "tool_calls": calls}),
            "tool_calls",
        )
    }

    pub(crate) fn chat(message: &Value, finish_reason: &str) -> Self {
        Self::json(&json!({"model": "scripted-1", "choices": [
            {"index": 0, "message": message, "finish_reason": finish_reason}],
            "usage": {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}}))
    }
}

#[derive(Default)]
struct State {
    script: Mutex<VecDeque<Reply>>,
    seen: Mutex<Vec<Seen>>,
    /// Requests that the client gave up before their answer was whole.
    dropped: AtomicUsize,
    running: AtomicUsize,
    most: AtomicUsize,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The server. It ends when it is dropped.
pub(crate) struct Upstream {
    address: SocketAddr,
    state: Arc<State>,
    _tasks: JoinSet<()>,
}

impl Upstream {
    /// A server that gives these replies in their order, then the last one again and again.
    pub(crate) async fn new(script: impl IntoIterator<Item = Reply>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let state = Arc::new(State::default());
        *lock(&state.script) = script.into_iter().collect();
        let mut tasks = JoinSet::new();
        tasks.spawn(serve(listener, Arc::clone(&state)));
        Self { address, state, _tasks: tasks }
    }

    pub(crate) fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    pub(crate) fn port(&self) -> u16 {
        self.address.port()
    }

    /// Every request so far, in the order in which they came.
    pub(crate) fn seen(&self) -> Vec<Seen> {
        lock(&self.state.seen).clone()
    }

    pub(crate) fn count(&self) -> usize {
        lock(&self.state.seen).len()
    }

    /// Requests given up by the client.
    pub(crate) fn dropped(&self) -> usize {
        self.state.dropped.load(Ordering::SeqCst)
    }

    /// The most requests that were under way at once.
    pub(crate) fn most_at_once(&self) -> usize {
        self.state.most.load(Ordering::SeqCst)
    }

    pub(crate) async fn has_seen(&self, count: usize) {
        until("requests arrive", LONG, async || self.count() >= count).await;
    }
}

async fn serve(listener: TcpListener, state: Arc<State>) {
    let mut connections = JoinSet::new();
    while let Ok((stream, _)) = listener.accept().await {
        let state = Arc::clone(&state);
        connections.spawn(async move { converse(stream, &state).await });
        while connections.try_join_next().is_some() {}
    }
}

/// Answers the requests of one connection until either side closes it.
async fn converse(mut stream: TcpStream, state: &State) {
    let mut buffer = Vec::new();
    while let Some(seen) = next_request(&mut stream, &mut buffer).await {
        let reply = next_reply(state);
        lock(&state.seen).push(seen);
        let running = state.running.fetch_add(1, Ordering::SeqCst) + 1;
        state.most.fetch_max(running, Ordering::SeqCst);
        let answered = answer(&mut stream, &reply).await;
        state.running.fetch_sub(1, Ordering::SeqCst);
        match answered {
            Answered::Whole => {}
            Answered::Broken => return,
            Answered::Dropped => {
                state.dropped.fetch_add(1, Ordering::SeqCst);
                return;
            }
        }
    }
}

fn next_reply(state: &State) -> Reply {
    let mut script = lock(&state.script);
    if script.len() > 1 { script.pop_front().unwrap() } else { script[0].clone() }
}

async fn next_request(stream: &mut TcpStream, buffer: &mut Vec<u8>) -> Option<Seen> {
    let end = loop {
        if let Some(end) = buffer.windows(4).position(|window| window == b"\r\n\r\n") {
            break end + 4;
        }
        if stream.read_buf(buffer).await.ok()? == 0 {
            return None;
        }
    };
    let at = SystemClock.now();
    let head = String::from_utf8(buffer.drain(..end).collect()).unwrap();
    let mut lines = head.lines();
    let mut first = lines.next()?.split(' ');
    let (method, target) = (first.next()?.to_owned(), first.next()?.to_owned());
    let headers: Vec<(String, String)> = lines
        .filter_map(|line| line.split_once(": "))
        .map(|(name, value)| (name.to_ascii_lowercase(), value.to_owned()))
        .collect();
    let length = headers.iter().find(|(name, _)| name == "content-length");
    let length: usize = length.map_or(0, |(_, value)| value.parse().unwrap());
    while buffer.len() < length {
        if stream.read_buf(buffer).await.ok()? == 0 {
            return None;
        }
    }
    let body = String::from_utf8(buffer.drain(..length).collect()).unwrap();
    Some(Seen { at, method, target, headers, body })
}

enum Answered {
    Whole,
    /// By the script.
    Broken,
    /// By the client.
    Dropped,
}

async fn answer(stream: &mut TcpStream, reply: &Reply) -> Answered {
    if is_dropped_within(stream, reply.delay).await {
        return Answered::Dropped;
    }
    if reply.silent {
        if reply.hangs {
            is_dropped_within(stream, Duration::from_hours(1)).await;
            return Answered::Dropped;
        }
        return Answered::Broken;
    }
    let length = match &reply.body {
        Body::Whole(bytes)
        | Body::Trickle(bytes, _)
        | Body::Cut(bytes, _)
        | Body::Stuck(bytes, _) => format!("content-length: {}\r\n", bytes.len()),
        Body::Endless => "connection: close\r\n".to_owned(),
    };
    let headers: Vec<String> =
        reply.headers.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
    let headers = headers.concat();
    let head = format!("HTTP/1.1 {} Scripted\r\n{length}{headers}\r\n", reply.status);
    if stream.write_all(head.as_bytes()).await.is_err() {
        return Answered::Dropped;
    }
    match &reply.body {
        Body::Whole(bytes) => match stream.write_all(bytes).await {
            Ok(()) => Answered::Whole,
            Err(_) => Answered::Dropped,
        },
        Body::Trickle(bytes, every) => {
            for byte in bytes {
                if stream.write_all(&[*byte]).await.is_err()
                    || is_dropped_within(stream, *every).await
                {
                    return Answered::Dropped;
                }
            }
            Answered::Whole
        }
        Body::Cut(bytes, after) => {
            let _ = stream.write_all(&bytes[..*after]).await;
            Answered::Broken
        }
        Body::Stuck(bytes, after) => {
            let _ = stream.write_all(&bytes[..*after]).await;
            is_dropped_within(stream, Duration::from_hours(1)).await;
            Answered::Dropped
        }
        Body::Endless => {
            while stream.write_all(&[b'x'; 4096]).await.is_ok() {}
            Answered::Dropped
        }
    }
}

/// Waits, unless the client closes the connection before.
async fn is_dropped_within(stream: &mut TcpStream, time: Duration) -> bool {
    if time.is_zero() {
        return false;
    }
    let mut one = [0];
    let closed = async { matches!(stream.read(&mut one).await, Ok(0) | Err(_)) };
    tokio::time::timeout(time, closed).await.unwrap_or(false)
}
