use crate::model::Finding;

/// Why a leaf is what it is: a stable code inside the checker, not stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reason {
    /// No code can decide the criterion.
    Undecidable,
    /// No recorded execution matches the command.
    NoMatch,
    /// The decisive execution cannot be proven to be the command.
    Unprovable,
    /// The decisive execution was recorded with a cut command.
    Truncated,
    /// It ran in a shell that earlier commands share.
    PersistentShell,
    /// Nothing says what kind of shell it ran in.
    UnknownShell,
    /// Its status is not recorded in a form that says how it ended.
    UnknownStatus,
    /// It failed.
    FailedStatus,
    /// It failed, and left an exit marker.
    ExitMarker,
    /// Its output went elsewhere.
    Redirected,
    /// Its output or its directory may be another command's doing.
    Unattributable,
    /// Its output ends in a failing summary.
    FailSummary,
    /// Its output ends in a passing summary.
    PassSummary,
    /// Its output says neither.
    NoSummary,
    /// The path is not provably below the workspace or the outputs.
    OutsideScope,
    /// No such file.
    Missing,
    /// Not a regular file, or its size cannot be told without opening it.
    SizeUnknown,
    /// Too large to read; answered from its size.
    LargeSizeOnly,
    /// Too large to read whole; one byte could be read.
    LargeOpened,
    /// Read; not text.
    Binary,
    /// Read; no bytes.
    Empty,
    /// Read; some bytes.
    NonEmpty,
    /// Read.
    Exists,
    /// Read back.
    ReadBack,
    /// There, but it cannot be read.
    Unreadable,
    /// The use of the workspace was denied; nothing was looked at.
    Denied,
    /// The check of this leaf failed itself.
    Crashed,
}

impl Reason {
    /// The stable code.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Undecidable => "undecidable",
            Self::NoMatch => "no_match",
            Self::Unprovable => "unprovable",
            Self::Truncated => "truncated",
            Self::PersistentShell => "persistent_shell",
            Self::UnknownShell => "unknown_shell",
            Self::UnknownStatus => "unknown_status",
            Self::FailedStatus => "failed_status",
            Self::ExitMarker => "exit_marker",
            Self::Redirected => "redirected",
            Self::Unattributable => "unattributable",
            Self::FailSummary => "fail_summary",
            Self::PassSummary => "pass_summary",
            Self::NoSummary => "no_summary",
            Self::OutsideScope => "outside_scope",
            Self::Missing => "missing",
            Self::SizeUnknown => "size_unknown",
            Self::LargeSizeOnly => "large_size_only",
            Self::LargeOpened => "large_opened",
            Self::Binary => "binary",
            Self::Empty => "empty",
            Self::NonEmpty => "non_empty",
            Self::Exists => "exists",
            Self::ReadBack => "read_back",
            Self::Unreadable => "unreadable",
            Self::Denied => "denied",
            Self::Crashed => "crashed",
        }
    }

    /// What a leaf with this reason says.
    #[must_use]
    pub const fn finding(self) -> Finding {
        match self {
            Self::PassSummary
            | Self::LargeSizeOnly
            | Self::LargeOpened
            | Self::Binary
            | Self::NonEmpty
            | Self::Exists
            | Self::ReadBack => Finding::Holds,
            Self::FailedStatus
            | Self::ExitMarker
            | Self::FailSummary
            | Self::Missing
            | Self::Empty => Finding::DoesNotHold,
            Self::Undecidable
            | Self::NoMatch
            | Self::Unprovable
            | Self::Truncated
            | Self::PersistentShell
            | Self::UnknownShell
            | Self::UnknownStatus
            | Self::Redirected
            | Self::Unattributable
            | Self::NoSummary
            | Self::OutsideScope
            | Self::SizeUnknown
            | Self::Unreadable
            | Self::Denied
            | Self::Crashed => Finding::Unchecked,
        }
    }

    /// The sentence that a leaf's detail begins with.
    #[must_use]
    pub const fn detail(self) -> &'static str {
        match self {
            Self::Undecidable => "no code can decide this criterion",
            Self::NoMatch => "no recorded execution of this command",
            Self::Unprovable => "the newest similar execution is not provably this command",
            Self::Truncated => "the newest matching execution was recorded with its command cut",
            Self::PersistentShell => "it ran in a shell that other commands share",
            Self::UnknownShell => "nothing recorded says what kind of shell it ran in",
            Self::UnknownStatus => "nothing recorded says how the newest execution ended",
            Self::FailedStatus | Self::ExitMarker => "the newest execution failed",
            Self::Redirected => "the output of the newest execution was redirected",
            Self::Unattributable => {
                "other commands share the newest execution's output or directory"
            }
            Self::FailSummary => "the newest execution printed a failing summary",
            Self::PassSummary => "the newest execution ended well and printed a passing summary",
            Self::NoSummary => "the newest execution printed no test summary",
            Self::OutsideScope => "the path is not provably in the workspace or the outputs",
            Self::Missing => "no such file at check time",
            Self::SizeUnknown => "not a regular file whose size can be told",
            Self::LargeSizeOnly => "present by its size; too large to read",
            Self::LargeOpened => "present by its size; a byte could be read",
            Self::Binary => "read back; not text",
            Self::Empty => "read back; empty",
            Self::NonEmpty => "read back; not empty",
            Self::Exists => "present and readable",
            Self::ReadBack => "read back",
            Self::Unreadable => "present, but it cannot be read",
            Self::Denied => "use of the workspace was denied",
            Self::Crashed => "the check of this criterion failed",
        }
    }
}

/// The answer to one criterion before it becomes a leaf.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Answer {
    pub(super) reason: Reason,
    /// Evidence that follows the reason's sentence; may be empty.
    pub(super) note: String,
}

impl From<Reason> for Answer {
    fn from(reason: Reason) -> Self {
        Self { reason, note: String::new() }
    }
}

impl Answer {
    pub(super) fn with(reason: Reason, note: impl Into<String>) -> Self {
        Self { reason, note: note.into() }
    }

    pub(super) fn detail(&self) -> String {
        let sentence = self.reason.detail();
        if self.note.is_empty() {
            sentence.to_owned()
        } else {
            format!("{sentence}: {}", self.note)
        }
    }
}
