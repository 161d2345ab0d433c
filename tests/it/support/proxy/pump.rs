//! One connection: a pump for each direction.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::watch;

use super::frames::{ClientFrames, commit_answer_end};
use super::{CutAt, Direction, Line, Target, Weather};

/// How long the answer to a COMMIT may take before its connection is cut without it.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);

/// How a connection ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// One side closed it, or it broke.
    Closed,
    /// The client is reset. The server only sees its client gone: it reads what was sent.
    Cut,
    /// Both sides are reset.
    Reset,
}

enum Server {
    Tcp(TcpStream),
    Socket(UnixStream),
}

/// Hands one connection on until it ends.
pub(super) async fn hand_on(mut client: TcpStream, line: Arc<Line>) {
    client.set_nodelay(true).ok();
    let Some(server) = reach(&line).await else {
        reset(&client);
        return;
    };
    let end = match server {
        Server::Tcp(mut server) => {
            server.set_nodelay(true).ok();
            let end = Link::new(&line).run(client.split(), server.split()).await;
            if end == End::Reset {
                reset(&server);
            }
            end
        }
        Server::Socket(mut server) => Link::new(&line).run(client.split(), server.split()).await,
    };
    if end != End::Closed {
        reset(&client);
    }
}

/// The server, in weather that lets one get there; none when there is none or everybody is reset.
async fn reach(line: &Line) -> Option<Server> {
    let mut weather = line.weather.subscribe();
    let passable = |weather: &Weather| !matches!(weather, Weather::Stalled | Weather::BlackHole);
    let now = *weather.wait_for(passable).await.ok()?;
    if now == Weather::Reset {
        return None;
    }
    let target = line.target().clone();
    match target {
        Target::Tcp(address) => TcpStream::connect(address).await.ok().map(Server::Tcp),
        Target::Socket(path) => UnixStream::connect(path).await.ok().map(Server::Socket),
    }
}

/// Makes the close that follows a reset.
fn reset(stream: &TcpStream) {
    stream.set_zero_linger().ok();
}

/// What the two pumps of a connection share.
struct Link<'a> {
    line: &'a Line,
    weather: watch::Receiver<Weather>,
    /// By direction: whether bytes were lost, so that nothing after them makes sense any more.
    mute: [AtomicBool; 2],
    /// How much of the answer to a COMMIT under way the client gets.
    answer: Mutex<Option<usize>>,
    /// By direction: bytes passed in the present weather.
    passed: [AtomicUsize; 2],
}

impl<'a> Link<'a> {
    fn new(line: &'a Line) -> Self {
        Self {
            line,
            weather: line.weather.subscribe(),
            mute: Default::default(),
            answer: Mutex::default(),
            passed: Default::default(),
        }
    }

    async fn run(
        &self,
        (from_client, to_client): (impl AsyncRead + Unpin, impl AsyncWrite + Unpin),
        (from_server, to_server): (impl AsyncRead + Unpin, impl AsyncWrite + Unpin),
    ) -> End {
        let mut generation = self.line.generation.subscribe();
        let mut weather = self.weather.clone();
        tokio::select! {
            biased;
            _ = generation.changed() => End::Reset,
            _ = weather.wait_for(|weather| *weather == Weather::Reset) => End::Reset,
            end = self.pump_up(from_client, to_server) => end,
            end = self.pump_down(from_server, to_client) => end,
        }
    }

    async fn pump_up(
        &self,
        mut from: impl AsyncRead + Unpin,
        mut to: impl AsyncWrite + Unpin,
    ) -> End {
        let mut frames = ClientFrames::default();
        let mut buffer = vec![0; 65_536];
        loop {
            let Ok(read @ 1..) = from.read(&mut buffer).await else {
                return self.closed().await;
            };
            let piece = &buffer[..read];
            let commit = frames.take(piece);
            let cut = commit.and_then(|commit| {
                let at = self.line.cuts().take(&commit.of)?;
                Some((commit, at))
            });
            let Some((commit, at)) = cut else {
                if let Err(end) = self.pass(Direction::ToServer, piece, &mut to).await {
                    return end;
                }
                continue;
            };
            match at {
                CutAt::Before => to.write_all(&piece[..commit.before]).await.ok(),
                CutAt::Sent => to.write_all(&piece[..commit.through]).await.ok(),
                CutAt::Answered(bytes) => {
                    *self.answer.lock().unwrap_or_else(PoisonError::into_inner) = Some(bytes);
                    to.write_all(piece).await.ok();
                    continue;
                }
            };
            self.line.cut.fetch_add(1, Ordering::Relaxed);
            return End::Cut;
        }
    }

    async fn pump_down(
        &self,
        mut from: impl AsyncRead + Unpin,
        mut to: impl AsyncWrite + Unpin,
    ) -> End {
        let mut buffer = vec![0; 65_536];
        let mut held = Vec::new();
        loop {
            let limit = if held.is_empty() { Duration::MAX } else { ANSWER_LIMIT };
            let read = tokio::time::timeout(limit, from.read(&mut buffer)).await;
            let Ok(Ok(read @ 1..)) = read else {
                if held.is_empty() {
                    return self.closed().await;
                }
                self.line.cut.fetch_add(1, Ordering::Relaxed);
                return End::Cut;
            };
            let piece = &buffer[..read];
            let cut = *self.answer.lock().unwrap_or_else(PoisonError::into_inner);
            let Some(bytes) = cut else {
                if let Err(end) = self.pass(Direction::ToClient, piece, &mut to).await {
                    return end;
                }
                continue;
            };
            held.extend_from_slice(piece);
            if let Some(end) = commit_answer_end(&held) {
                to.write_all(&held[..bytes.min(end - 1)]).await.ok();
                to.flush().await.ok();
                self.line.cut.fetch_add(1, Ordering::Relaxed);
                return End::Cut;
            }
        }
    }

    /// Hands a piece on as the weather has it.
    async fn pass(
        &self,
        way: Direction,
        piece: &[u8],
        to: &mut (impl AsyncWrite + Unpin),
    ) -> Result<(), End> {
        let mut weather = self.weather.clone();
        let now = weather.wait_for(|weather| *weather != Weather::Stalled).await;
        let now = now.map_err(|_| End::Closed)?.to_owned();
        let passed = &self.passed[way as usize];
        let mut whole = piece;
        match now {
            Weather::Delayed(delay) => tokio::time::sleep(delay).await,
            Weather::BlackHole => {
                self.mute.iter().for_each(|way| way.store(true, Ordering::Relaxed));
            }
            Weather::HalfOpen(open) if open != way => {
                self.mute[way as usize].store(true, Ordering::Relaxed);
            }
            Weather::CutAfter(of, bytes) if of == way => {
                let left = bytes.saturating_sub(passed.load(Ordering::Relaxed));
                whole = &piece[..left.min(piece.len())];
            }
            Weather::Fair
            | Weather::Stalled
            | Weather::Reset
            | Weather::HalfOpen(_)
            | Weather::CutAfter(..) => {}
        }
        if self.mute[way as usize].load(Ordering::Relaxed) {
            return Ok(());
        }
        to.write_all(whole).await.map_err(|_| End::Closed)?;
        if !matches!(now, Weather::CutAfter(of, _) if of == way) {
            passed.store(0, Ordering::Relaxed);
            return Ok(());
        }
        passed.fetch_add(whole.len(), Ordering::Relaxed);
        if whole.len() < piece.len() { Err(End::Reset) } else { Ok(()) }
    }

    /// One side is gone. Where bytes are lost the other is not told before the weather changes.
    async fn closed(&self) -> End {
        let mut weather = self.weather.clone();
        let mute = self.mute.iter().any(|way| way.load(Ordering::Relaxed));
        let tells = |now: &Weather| match now {
            Weather::Fair | Weather::Delayed(_) | Weather::Reset | Weather::CutAfter(..) => true,
            Weather::HalfOpen(_) => !mute,
            Weather::Stalled | Weather::BlackHole => false,
        };
        weather.wait_for(tells).await.ok();
        End::Closed
    }
}
