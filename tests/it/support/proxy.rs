//! A way to the server that fails on demand.
//!
//! Every connection has a pump for each direction. What a pump does with what it reads is decided by
//! the [`Weather`] at that moment, and, once, by a [`CommitCut`]: both ends are then cut off at a
//! chosen byte around a transaction's COMMIT.

#[path = "proxy/frames.rs"]
mod frames;
#[path = "proxy/pump.rs"]
mod pump;

use std::collections::{HashSet, VecDeque};
use std::hash::Hasher;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinSet;

use frames::Sent;

/// Which way bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    ToServer,
    ToClient,
}

/// What happens to bytes on their way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Weather {
    /// They pass.
    #[default]
    Fair,
    /// They pass this much later.
    Delayed(Duration),
    /// They wait until the weather changes. New connections wait too.
    Stalled,
    /// They are lost and nobody is told. A connection that lost some stays mute for ever, as behind
    /// a firewall that forgot it; its ends are not told of each other's end.
    BlackHole,
    /// As a black hole in this direction, fair in the other.
    HalfOpen(Direction),
    /// Connections are reset, new ones too.
    Reset,
    /// Each connection is reset after so many more bytes in this direction.
    CutAfter(Direction, usize),
}

/// Where a connection is cut around a COMMIT.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CutAt {
    /// The server gets everything up to the COMMIT, not the COMMIT.
    Before,
    /// The server gets the COMMIT, and loses its client at once.
    Sent,
    /// The server has answered; the client gets so many bytes of that, and never all of them.
    Answered(usize),
}

/// A cut of the next transaction in which a statement with this text was sent; any with "".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CommitCut {
    pub(crate) of: &'static str,
    pub(crate) at: CutAt,
}

impl CutAt {
    /// Longer than any answer to a transaction here: cut one byte before its end.
    const WHOLE_ANSWER: usize = 4_096;

    /// A cut anywhere around the COMMIT.
    pub(crate) fn any(random: &mut StdRng) -> Self {
        match random.random_range(0..4) {
            0 => Self::Before,
            1 => Self::Sent,
            2 => Self::Answered(random.random_range(0..256)),
            _ => Self::Answered(Self::WHOLE_ANSWER),
        }
    }
}

/// Which transactions are cut around their COMMIT.
#[derive(Default)]
struct Cuts {
    /// The next ones, in this order.
    next: VecDeque<CommitCut>,
    /// Every first try.
    first_tries: Option<FirstTries>,
}

struct FirstTries {
    of: &'static str,
    random: StdRng,
    seen: HashSet<u64>,
}

impl Cuts {
    /// The cut that the COMMIT after this is for. One that will be refused counts too.
    fn take(&mut self, sent: &Sent) -> Option<CutAt> {
        if let Some(first) = &mut self.first_tries
            && sent.statements.contains(first.of)
            && first.seen.insert(sent.fingerprint.finish())
        {
            return Some(CutAt::any(&mut first.random));
        }
        self.next.pop_front_if(|cut| sent.statements.contains(cut.of)).map(|cut| cut.at)
    }
}

#[derive(Clone, Debug)]
enum Target {
    Socket(PathBuf),
    Tcp(SocketAddr),
}

impl Target {
    fn of(config: &tokio_postgres::Config) -> Self {
        let port = config.get_ports()[0];
        match &config.get_hosts()[0] {
            tokio_postgres::config::Host::Unix(folder) => {
                Self::Socket(folder.join(format!(".s.PGSQL.{port}")))
            }
            tokio_postgres::config::Host::Tcp(host) => {
                Self::Tcp(SocketAddr::new(host.parse().unwrap(), port))
            }
        }
    }
}

/// Hands connections on to a server, as far as it is told to.
pub(crate) struct Proxy {
    url: String,
    port: u16,
    line: Arc<Line>,
    _connections: JoinSet<()>,
}

/// What all connections share.
struct Line {
    target: Mutex<Target>,
    weather: watch::Sender<Weather>,
    /// Raised to end all connections there are.
    generation: watch::Sender<u64>,
    cuts: Mutex<Cuts>,
    cut: AtomicUsize,
}

impl Line {
    fn cuts(&self) -> MutexGuard<'_, Cuts> {
        self.cuts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn target(&self) -> MutexGuard<'_, Target> {
        self.target.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Proxy {
    /// A proxy before the server of this address, in fair weather. Its port stays the same.
    pub(crate) async fn before(url: &str) -> Self {
        let config: tokio_postgres::Config = url.parse().unwrap();
        let line = Arc::new(Line {
            target: Mutex::new(Target::of(&config)),
            weather: watch::Sender::default(),
            generation: watch::Sender::default(),
            cuts: Mutex::default(),
            cut: AtomicUsize::new(0),
        });
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let database = config.get_dbname().unwrap();
        let url = format!("postgres://postgres@127.0.0.1:{port}/{database}?sslmode=disable");
        let mut connections = JoinSet::new();
        connections.spawn(serve(listener, Arc::clone(&line)));
        Self { url, port, line, _connections: connections }
    }

    /// The address of the database behind it.
    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    /// The port it listens on, at 127.0.0.1.
    pub(crate) const fn port(&self) -> u16 {
        self.port
    }

    /// Changes what happens to bytes from now on.
    pub(crate) fn set(&self, weather: Weather) {
        self.line.weather.send_replace(weather);
    }

    /// Resets all connections there are; new ones pass.
    pub(crate) fn reset_all(&self) {
        self.line.generation.send_modify(|generation| *generation += 1);
    }

    /// Leads to another server from now on; connections to the old one are reset.
    pub(crate) fn lead_to(&self, url: &str) {
        *self.line.target() = Target::of(&url.parse().unwrap());
        self.reset_all();
    }

    /// Cuts the connection of the next COMMIT that this is for. Cuts come in the order of the calls.
    pub(crate) fn cut(&self, cut: CommitCut) {
        self.line.cuts().next.push_back(cut);
    }

    /// Cuts the first try of every transaction with this text somewhere around its COMMIT, and lets
    /// its repeats pass: they say the same with the same parameters.
    pub(crate) fn cut_first_tries(&self, of: &'static str, seed: u64) {
        let random = StdRng::seed_from_u64(seed);
        self.line.cuts().first_tries = Some(FirstTries { of, random, seen: HashSet::new() });
    }

    /// Lets every COMMIT pass again.
    pub(crate) fn spare_commits(&self) {
        *self.line.cuts() = Cuts::default();
    }

    /// How many of the cuts were made.
    pub(crate) fn cuts_made(&self) -> usize {
        self.line.cut.load(Ordering::Relaxed)
    }

    /// Takes the answer to the next COMMIT away, and its connection.
    pub(crate) fn lose_the_next_commit(&self) {
        self.cut(CommitCut { of: "", at: CutAt::Answered(0) });
    }

    /// Ends all connections, and every new one at once.
    pub(crate) fn go_away(&self) {
        self.set(Weather::Reset);
    }

    pub(crate) fn come_back(&self) {
        self.set(Weather::Fair);
    }
}

async fn serve(listener: TcpListener, line: Arc<Line>) {
    let mut connections = JoinSet::new();
    while let Ok((client, _)) = listener.accept().await {
        connections.spawn(pump::hand_on(client, Arc::clone(&line)));
        while connections.try_join_next().is_some() {}
    }
}
