//! File criteria: size before content, nothing read beyond a bound, nothing opened or confirmed
//! outside the roots (`acceptance.md` 1.5). What cannot be told is unchecked.

use std::io::{self, Read};

use cap_std::fs::{File, OpenOptions, OpenOptionsExt};
use rustix::fs::OFlags;

use super::parse::FileCriterion;
use super::reason::{Answer, Reason};
use super::roots::{Found, FoundFile, Roots};
use crate::model::Family;
use crate::model::verdict::is_white;

/// The most bytes that are read of one file; a larger one is answered from its size.
pub const READ_CAP_BYTES: u64 = 50_000;

/// Judges one file criterion. Blocking.
pub(super) fn judge(criterion: FileCriterion<'_>, roots: &Roots, virtual_prefix: &str) -> Answer {
    let path = criterion.path.trim_matches(is_white);
    if path.is_empty() {
        return Reason::OutsideScope.into();
    }
    let found = match roots.find(path, virtual_prefix) {
        Found::File(file) => file,
        Found::Missing => return Reason::Missing.into(),
        Found::Outside => return Reason::OutsideScope.into(),
        Found::SizeUnknown => return Reason::SizeUnknown.into(),
    };
    let reason = if found.size > READ_CAP_BYTES {
        large(criterion.family, &found)
    } else {
        small(criterion.family, &found)
    };
    Answer::with(reason, size_note(reason, found.size))
}

fn large(family: Family, found: &FoundFile<'_>) -> Reason {
    if family != Family::FileWritten {
        return Reason::LargeSizeOnly;
    }
    match read(found, 1) {
        Ok(bytes) if !bytes.is_empty() => Reason::LargeOpened,
        Ok(_) | Err(_) => Reason::Unreadable,
    }
}

fn small(family: Family, found: &FoundFile<'_>) -> Reason {
    let bytes = match read(found, READ_CAP_BYTES) {
        Ok(bytes) => bytes,
        Err(error) if is_gone(&error) => return Reason::Missing,
        Err(_) => return Reason::Unreadable,
    };
    if str::from_utf8(&bytes).is_err() {
        return Reason::Binary;
    }
    match family {
        Family::FileExists => Reason::Exists,
        Family::FileNonEmpty if bytes.is_empty() => Reason::Empty,
        Family::FileNonEmpty => Reason::NonEmpty,
        Family::FileWritten => Reason::ReadBack,
        Family::TestsPassed | Family::Undecidable => Reason::Undecidable,
    }
}

/// Reads at most `cap` bytes, and only of a regular file.
fn read(found: &FoundFile<'_>, cap: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open(found)?.take(cap).read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn open(found: &FoundFile<'_>) -> io::Result<File> {
    // Since it was looked at it may have become a FIFO, which must not block, or a terminal.
    let flags = OFlags::NONBLOCK | OFlags::NOCTTY;
    let flags = i32::try_from(flags.bits()).expect("two flags of the kernel's int");
    let file = found
        .directory
        .open_with(&found.path, OpenOptions::new().read(true).custom_flags(flags))?;
    if !file.metadata()?.is_file() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    Ok(file)
}

/// Whether an error says that there is no such file. A path through something that is no directory,
/// and a name longer than any can be, name none either.
pub(super) fn is_gone(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory | io::ErrorKind::InvalidFilename
    )
}

fn size_note(reason: Reason, size: u64) -> String {
    match reason.finding() {
        crate::model::Finding::Holds => format!("{size} bytes"),
        crate::model::Finding::DoesNotHold | crate::model::Finding::Unchecked => String::new(),
    }
}
