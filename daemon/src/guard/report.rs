//! What a worker tells its guard: that it lives, and how it stands.

use std::fmt;
use std::io;
use std::os::unix::net::UnixDatagram;

use serde::{Deserialize, Serialize};
use tracing::debug;

/// The longest report, in bytes.
const LONGEST: usize = 1024;

/// One sign of life. A worker that cannot vouch for itself gives none.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// Its state, as in its row.
    pub state: String,
    /// Whether it has not begun to work yet.
    pub starting: bool,
    /// Whether it is about to end.
    pub ending: bool,
    /// Leases it holds.
    pub leases: usize,
    /// Items in them.
    pub items: usize,
    /// Execution slots that are free.
    pub free: usize,
    /// Execution slots.
    pub slots: usize,
    /// How often it has read its configuration anew, whatever came of it.
    pub reloads: u64,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { state, leases, items, free, slots, .. } = self;
        write!(f, "{state}: {items} items in {leases} leases, {free} of {slots} slots free")
    }
}

/// The worker's end of the way to its guard.
#[derive(Debug)]
pub struct Reporter(UnixDatagram);

impl Reporter {
    pub(super) fn new(socket: UnixDatagram) -> io::Result<Self> {
        socket.set_nonblocking(true)?;
        Ok(Self(socket))
    }

    /// Tells the guard. One that does not listen now misses it, and hears the next.
    ///
    /// # Panics
    /// Never: a report has no keys but texts.
    pub fn tell(&self, report: &Report) {
        let text = serde_json::to_vec(report).expect("a report has no keys but texts");
        if let Err(error) = self.0.send(&text) {
            debug!(%error, "the guard was not told");
        }
    }
}

/// The guard's end.
pub(super) struct Reports(tokio::net::UnixDatagram);

impl Reports {
    /// Both ends.
    pub(super) fn pair() -> io::Result<(Self, UnixDatagram)> {
        let (own, theirs) = UnixDatagram::pair()?;
        own.set_nonblocking(true)?;
        Ok((Self(tokio::net::UnixDatagram::from_std(own)?), theirs))
    }

    /// Waits for the next report.
    ///
    /// # Cancel safety
    /// Safe: what comes later is seen by the next call.
    pub(super) async fn next(&self) -> Report {
        let mut text = [0; LONGEST];
        loop {
            match self.0.recv(&mut text).await {
                Ok(size) => match serde_json::from_slice(&text[..size]) {
                    Ok(report) => return report,
                    Err(error) => debug!(%error, "a report that nobody understands"),
                },
                Err(error) => {
                    debug!(%error, "no reports any more");
                    return std::future::pending().await;
                }
            }
        }
    }
}
