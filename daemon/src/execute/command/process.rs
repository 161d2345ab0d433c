//! One process from its start to the end of its group.

use std::future::{Future, pending};
use std::io;
use std::pin::pin;
use std::time::Duration;

use tokio::net::unix::pipe;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::capture::{Head, Tail};
use super::record::{Recording, Stream};
use crate::clock::{BootInstant, Clock, sleep_until};
use crate::execute::spawner::{Exit, Spawned};

/// How long what a process left in its pipes is read after its exit, counted from the last byte.
/// A descendant that holds them open and is silent costs no more than this.
const DRAIN_IDLE: Duration = Duration::from_millis(250);
/// The same for one that goes on writing.
const DRAIN_TOTAL: Duration = Duration::from_secs(2);
/// The same once it is told to stop.
const DRAIN_STOPPED: Duration = Duration::from_millis(50);
/// How much is read at once.
const CHUNK_BYTES: usize = 16 * 1024;

/// What a process may use.
pub(super) struct Limits {
    /// When it is asked to end.
    pub(super) deadline: BootInstant,
    /// How long after that it is made to.
    pub(super) kill_grace: Duration,
    /// How much of its standard output is kept.
    pub(super) result_bytes: usize,
    /// How much of the end of its standard error is kept.
    pub(super) log_bytes: usize,
    /// Whether what it prints is recorded as evidence.
    pub(super) record: bool,
}

/// Why a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cause {
    /// By itself, or by somebody else's signal.
    Exited,
    /// It reached its deadline.
    TimedOut,
    /// It was told to stop.
    Stopped,
}

/// A process after its end.
pub(super) struct Ended {
    /// Why it ended.
    pub(super) cause: Cause,
    /// How, unless somebody else has taken its exit status.
    pub(super) exit: io::Result<Exit>,
    /// What it wrote to standard output.
    pub(super) stdout: Head,
    /// What it wrote to standard error.
    pub(super) stderr: Tail,
    /// Both, where that was asked for.
    pub(super) recording: Option<Recording>,
}

/// Feeds and reads a process until it exits, reaches its deadline or is stopped; returns when
/// nothing of its group is left.
///
/// The wait is for the exit, never for the end of the pipes: a descendant may hold those for ever.
pub(super) async fn run(
    spawned: Spawned,
    input: &[u8],
    limits: &Limits,
    stop: &CancellationToken,
    clock: &dyn Clock,
) -> Ended {
    let Spawned { mut running, stdin, stdout, stderr } = spawned;
    let mut streams = Streams {
        input,
        stdin,
        stdout: Some(stdout),
        stderr: Some(stderr),
        head: Head::new(limits.result_bytes),
        tail: Tail::new(limits.log_bytes),
        recording: limits.record.then(Recording::default),
        chunk: vec![0; CHUNK_BYTES],
    };

    let first = async {
        tokio::select! {
            biased; // what exited in time has neither timed out nor been stopped
            () = running.exited() => Cause::Exited,
            () = stop.cancelled() => Cause::Stopped,
            () = sleep_until(clock, limits.deadline) => Cause::TimedOut,
        }
    };
    let cause = streams.pump_until(first).await;
    match cause {
        Cause::Exited => {
            streams.stdin = None; // nobody is left whose input it was
            let stopped = async {
                stop.cancelled().await;
                sleep(DRAIN_STOPPED).await;
            };
            tokio::select! {
                // A worker that was frozen sees the exit and the wish to stop at once: what the
                // process has left in its pipes is its result all the same.
                biased;
                () = streams.pump_until_idle() => {}
                () = stopped => {}
                () = sleep(DRAIN_TOTAL) => {}
            }
        }
        Cause::TimedOut | Cause::Stopped => {
            running.terminate();
            let grace_end = clock.now() + limits.kill_grace;
            // The grace is for the whole group: a shell may be gone at once while the program it
            // ran is still tidying up. Open pipes say that it is.
            let group = async {
                streams.pump_until(running.exited()).await;
                streams.pump_to_end().await;
            };
            tokio::select! {
                () = sleep_until(clock, grace_end) => {}
                () = group => {}
            }
        }
    }
    let exit = running.end().await;
    let Streams { head: stdout, tail: stderr, recording, .. } = streams;
    Ended { cause, exit, stdout, stderr, recording }
}

/// Our ends of the pipes, and what came through them.
struct Streams<'a> {
    /// What is still to be written.
    input: &'a [u8],
    stdin: Option<pipe::Sender>,
    stdout: Option<pipe::Receiver>,
    stderr: Option<pipe::Receiver>,
    head: Head,
    tail: Tail,
    recording: Option<Recording>,
    chunk: Vec<u8>,
}

enum Ready {
    Stdin,
    Stdout,
    Stderr,
}

impl Streams<'_> {
    async fn pump_until<T>(&mut self, end: impl Future<Output = T>) -> T {
        let mut end = pin!(end);
        loop {
            tokio::select! {
                biased; // a flood must not hide the end
                value = &mut end => return value,
                () = self.pump() => {}
            }
        }
    }

    async fn pump_to_end(&mut self) {
        while self.has_output() {
            self.pump().await;
        }
    }

    async fn pump_until_idle(&mut self) {
        while self.has_output() && timeout(DRAIN_IDLE, self.pump()).await.is_ok() {}
    }

    fn has_output(&self) -> bool {
        self.stdout.is_some() || self.stderr.is_some()
    }

    /// Moves one chunk in whichever direction it can; waits for ever when every pipe is closed.
    ///
    /// # Cancel safety
    /// Safe: no byte is moved before the last await.
    async fn pump(&mut self) {
        let ready = tokio::select! {
            () = writable(self.stdin.as_ref()) => Ready::Stdin,
            () = readable(self.stdout.as_ref()) => Ready::Stdout,
            () = readable(self.stderr.as_ref()) => Ready::Stderr,
        };
        match ready {
            Ready::Stdin => self.feed(),
            Ready::Stdout => {
                let bytes = read(&mut self.stdout, &mut self.chunk);
                self.head.push(bytes);
                self.recording.iter_mut().for_each(|record| record.push(Stream::Out, bytes));
            }
            Ready::Stderr => {
                let bytes = read(&mut self.stderr, &mut self.chunk);
                self.tail.push(bytes);
                self.recording.iter_mut().for_each(|record| record.push(Stream::Error, bytes));
            }
        }
    }

    fn feed(&mut self) {
        let Some(stdin) = &self.stdin else { return };
        match stdin.try_write(self.input) {
            Ok(written) => self.input = &self.input[written..],
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
            // Mostly a broken pipe: it has no use for the rest.
            Err(_) => self.input = &[],
        }
        if self.input.is_empty() {
            self.stdin = None;
        }
    }
}

async fn writable(pipe: Option<&pipe::Sender>) {
    match pipe {
        // An error shows up again at the write.
        Some(pipe) => drop(pipe.writable().await),
        None => pending().await,
    }
}

async fn readable(pipe: Option<&pipe::Receiver>) {
    match pipe {
        Some(pipe) => drop(pipe.readable().await),
        None => pending().await,
    }
}

/// Reads what is there, at most one chunk; closes the pipe at its end.
fn read<'c>(from: &mut Option<pipe::Receiver>, chunk: &'c mut [u8]) -> &'c [u8] {
    let Some(pipe) = from else { return &[] };
    match pipe.try_read(chunk) {
        Ok(length) if length > 0 => &chunk[..length],
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => &[],
        Ok(_) | Err(_) => {
            *from = None;
            &[]
        }
    }
}

#[cfg(test)]
mod tests {
    use async_trait::async_trait;
    use tokio::io::AsyncWriteExt;

    use super::*;
    use crate::clock::SystemClock;
    use crate::execute::spawner::Running;

    /// A process that has exited.
    struct Exited;

    #[async_trait]
    impl Running for Exited {
        async fn exited(&self) {}

        fn terminate(&self) {}

        async fn end(&mut self) -> io::Result<Exit> {
            Ok(Exit::Status(0))
        }
    }

    #[tokio::test]
    async fn what_exited_before_it_was_told_to_stop_keeps_its_output() {
        let stop = CancellationToken::new();
        stop.cancel();
        for _ in 0..20 {
            let (mut out, stdout) = pipe::pipe().unwrap();
            let (err, stderr) = pipe::pipe().unwrap();
            out.write_all(b"the result").await.unwrap();
            drop(err);
            let running = Box::new(Exited);
            let spawned = Spawned { running, stdin: None, stdout, stderr };
            let clock = SystemClock;
            let deadline = clock.now() + Duration::from_mins(1);
            let kill_grace = Duration::ZERO;
            let limits =
                Limits { deadline, kill_grace, result_bytes: 100, log_bytes: 100, record: false };

            // `out` is still open, as by a descendant.
            let ended = run(spawned, b"", &limits, &stop, &clock).await;

            assert_eq!(ended.cause, Cause::Exited);
            assert_eq!(ended.stdout.into_text().0, "the result");
            drop(out);
        }
    }
}
