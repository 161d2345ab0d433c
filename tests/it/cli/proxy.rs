//! A way to the server that can be interrupted.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UnixStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

/// Hands connections on to the server of a database, as long as it likes.
pub(super) struct Proxy {
    url: String,
    line: Arc<Line>,
    _connections: JoinSet<()>,
}

struct Line {
    socket: PathBuf,
    /// Whether the answer to the next lone COMMIT is to be lost.
    lose_commit: AtomicBool,
    away: watch::Sender<bool>,
}

impl Proxy {
    pub(super) async fn before(url: &str) -> Self {
        let config: tokio_postgres::Config = url.parse().unwrap();
        let [tokio_postgres::config::Host::Unix(folder)] = config.get_hosts() else {
            panic!("the tests' server listens on a socket: {url}")
        };
        let line = Arc::new(Line {
            socket: socket(folder, config.get_ports()[0]),
            lose_commit: AtomicBool::new(false),
            away: watch::Sender::new(false),
        });
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let database = config.get_dbname().unwrap();
        let url = format!("postgres://postgres@127.0.0.1:{port}/{database}?sslmode=disable");
        let mut connections = JoinSet::new();
        connections.spawn(serve(listener, Arc::clone(&line)));
        Self { url, line, _connections: connections }
    }

    pub(super) fn url(&self) -> &str {
        &self.url
    }

    /// Takes the answer to the next lone COMMIT away, and its connection.
    pub(super) fn lose_the_next_commit(&self) {
        self.line.lose_commit.store(true, Ordering::Relaxed);
    }

    /// Ends all connections, and every new one at once.
    pub(super) fn go_away(&self) {
        self.line.away.send_replace(true);
    }

    pub(super) fn come_back(&self) {
        self.line.away.send_replace(false);
    }
}

fn socket(folder: &Path, port: u16) -> PathBuf {
    folder.join(format!(".s.PGSQL.{port}"))
}

async fn serve(listener: TcpListener, line: Arc<Line>) {
    let mut connections = JoinSet::new();
    while let Ok((client, _)) = listener.accept().await {
        let line = Arc::clone(&line);
        connections.spawn(async move {
            let mut away = line.away.subscribe();
            tokio::select! {
                biased;
                _ = away.wait_for(|away| *away) => {}
                () = hand_on(client, &line) => {}
            }
        });
    }
}

async fn hand_on(mut client: TcpStream, line: &Line) {
    let mut server = UnixStream::connect(&line.socket).await.unwrap();
    let (mut up, mut down) = (vec![0; 65_536], vec![0; 65_536]);
    loop {
        tokio::select! {
            read = client.read(&mut up) => {
                let Ok(read @ 1..) = read else { return };
                server.write_all(&up[..read]).await.unwrap();
                let commit = up[..read].ends_with(b"COMMIT\0");
                if commit && line.lose_commit.swap(false, Ordering::Relaxed) {
                    // The server has answered, so it is done; nobody hears of it.
                    let _ = server.read(&mut down).await.unwrap();
                    return;
                }
            }
            read = server.read(&mut down) => {
                let Ok(read @ 1..) = read else { return };
                if client.write_all(&down[..read]).await.is_err() {
                    return;
                }
            }
        }
    }
}
