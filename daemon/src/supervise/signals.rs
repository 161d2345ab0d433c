//! Signals to stop requests: the first drains, the second stops what runs, the third ends at once.
//! And signals that ask for something else than the end.

use std::io;
use std::time::Duration;

use futures::StreamExt;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook_tokio::Signals;
use tokio::sync::watch;
use tracing::info;

use super::StopRequest;
use crate::clock::{BootInstant, Clock};
use crate::config::Drain;

/// Repeats within this time are ignored: wrappers and terminals deliver a signal twice.
const REPEAT: Duration = Duration::from_secs(2);

/// Turns TERM and INT into stop requests until the receiver is gone.
pub struct StopSignals(Signals);

impl StopSignals {
    /// Takes the signals over; from here on they no longer end the process by themselves.
    ///
    /// # Errors
    /// When the system refuses the handlers.
    pub fn take() -> io::Result<Self> {
        Signals::new([SIGTERM, SIGINT]).map(Self)
    }

    /// Forwards each signal.
    ///
    /// # Cancel safety
    /// Safe; signals that arrive later are seen by the next call.
    pub async fn forward(
        mut self,
        clock: &dyn Clock,
        drain: &Drain,
        stop: &watch::Sender<StopRequest>,
    ) {
        let mut last: Option<BootInstant> = None;
        while let Some(signal) = self.0.next().await {
            let now = clock.now();
            if last.is_some_and(|last| now.since(last) < REPEAT) {
                continue;
            }
            last = Some(now);
            let request = next(*stop.borrow(), signal, drain);
            info!(signal, ?request, "received a signal");
            stop.send_replace(request);
        }
    }
}

/// What a signal asks of a worker that goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// HUP: read the configuration anew.
    Reload,
    /// USR1: write down how it stands.
    Dump,
    /// USR2: be quiet, or not any more.
    Quiet,
}

/// The signals that are orders.
pub struct OrderSignals(Signals);

impl OrderSignals {
    /// Takes the signals over; from here on they no longer end the process.
    ///
    /// # Errors
    /// When the system refuses the handlers.
    pub fn take() -> io::Result<Self> {
        Signals::new([SIGHUP, SIGUSR1, SIGUSR2]).map(Self)
    }

    /// Waits for the next one.
    ///
    /// # Cancel safety
    /// Safe; signals that arrive later are seen by the next call.
    pub async fn next(&mut self) -> Order {
        loop {
            match self.0.next().await {
                Some(SIGHUP) => return Order::Reload,
                Some(SIGUSR1) => return Order::Dump,
                Some(SIGUSR2) => return Order::Quiet,
                Some(_) => {}
                None => return std::future::pending().await,
            }
        }
    }
}

/// What a signal asks for after what was asked before.
fn next(asked: StopRequest, signal: i32, drain: &Drain) -> StopRequest {
    match asked {
        // Somebody waits at a terminal.
        StopRequest::Run if signal == SIGINT => {
            StopRequest::Drain(drain.grace.min(drain.interactive_grace))
        }
        StopRequest::Run => StopRequest::Drain(drain.grace),
        StopRequest::Drain(_) => StopRequest::Cancel,
        StopRequest::Cancel | StopRequest::Abort => StopRequest::Abort,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_escalate() {
        let drain = &crate::config::Settings::defaults().drain;

        assert_eq!(
            next(StopRequest::Run, SIGTERM, drain),
            StopRequest::Drain(Duration::from_secs(90))
        );
        let first = next(StopRequest::Run, SIGINT, drain);
        assert_eq!(first, StopRequest::Drain(Duration::from_secs(10)));
        let second = next(first, SIGTERM, drain);
        assert_eq!(second, StopRequest::Cancel);
        assert_eq!(next(second, SIGTERM, drain), StopRequest::Abort);
    }
}
