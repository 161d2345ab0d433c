/// What a worker process is doing: `starting -> running <-> quiet -> draining -> cancelling ->
/// releasing -> exited`, and from any of them `fenced`. Source: `workers.state`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WorkerState {
    /// Not ready yet: settings, pools or schema are still being checked.
    Starting,
    /// Claims and executes.
    Running,
    /// Claims nothing for now; what it holds goes on.
    Quiet,
    /// Claims nothing any more; running work may end by itself.
    Draining,
    /// The grace is over; running work is being stopped.
    Cancelling,
    /// Nothing runs; leases are being returned.
    Releasing,
    /// Done.
    Exited,
    /// Cannot prove that it owns what it holds; everything is being stopped, nothing is returned.
    Fenced,
}

impl WorkerState {
    /// Every state.
    pub const ALL: [Self; 8] = [
        Self::Starting,
        Self::Running,
        Self::Quiet,
        Self::Draining,
        Self::Cancelling,
        Self::Releasing,
        Self::Exited,
        Self::Fenced,
    ];

    /// The word stored and shown.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Running => "running",
            Self::Quiet => "quiet",
            Self::Draining => "draining",
            Self::Cancelling => "cancelling",
            Self::Releasing => "releasing",
            Self::Exited => "exited",
            Self::Fenced => "fenced",
        }
    }
}

/// What an operator asks of a worker, which reads it with its heartbeat. Source: `workers.asked`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Asked {
    /// Claim nothing more; what it holds goes on.
    Quiet,
    /// Drain, and end.
    Drain,
}

impl Asked {
    /// The word stored and shown.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Quiet => "quiet",
            Self::Drain => "drain",
        }
    }

    /// What a word means; none when it is of a newer program.
    #[must_use]
    pub fn of(word: &str) -> Option<Self> {
        [Self::Quiet, Self::Drain].into_iter().find(|asked| asked.as_str() == word)
    }
}
