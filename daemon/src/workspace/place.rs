//! One place: `workspace`, `outputs` and `uploads` of an item or a thread, and the file by whose
//! lock it is held.

use std::fmt;
use std::os::fd::OwnedFd;

use rustix::fs::{
    AtFlags, FlockOperation, Mode, OFlags, Stat, Timespec, Timestamps, UTIME_NOW, flock, fstat,
    futimens, mkdirat, openat, renameat, statat,
};
use rustix::io::{Errno, Result, pread, write};
use uuid::Uuid;

use super::{WorkspaceId, remove_tree};
use crate::check::{Directories, Roots};

/// The file whose lock holds a place; in it, the place's id.
const HOLDER: &str = ".holder";

const PARTS: [&str; 3] = ["workspace", "outputs", "uploads"];

/// The use of a workspace. While it lives, in any process, the place is not cleaned away.
///
/// Dropped, it gives the lock up, once; the kernel does when the process dies first. No child
/// inherits it.
pub struct Holder {
    id: WorkspaceId,
    directories: Directories,
    roots: Roots,
    // After what is open below it.
    _lock: OwnedFd,
}

impl Holder {
    /// Which directories these are; to be noted with what an execution left in them.
    #[must_use]
    pub const fn id(&self) -> WorkspaceId {
        self.id
    }

    /// Their absolute paths, without links.
    #[must_use]
    pub const fn directories(&self) -> &Directories {
        &self.directories
    }

    /// The opened workspace and outputs, for as long as they are held.
    #[must_use]
    pub const fn roots(&self) -> &Roots {
        &self.roots
    }
}

impl fmt::Debug for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Holder({}, {})", self.id, self.directories.workspace)
    }
}

/// What came of locking a place.
pub(super) enum Locking {
    Locked(Locked),
    /// There is no such place.
    Missing,
    /// Somebody has a lock that excludes this one, or it was replaced meanwhile.
    Busy,
}

/// A place and the lock on it.
pub(super) struct Locked {
    dir: OwnedFd,
    lock: OwnedFd,
    id: Uuid,
}

impl Locked {
    /// Locks the place `name` in `parent`, without waiting.
    pub(super) fn take(parent: &OwnedFd, name: &str, how: FlockOperation) -> Result<Locking> {
        let dir = match open_dir(parent, name) {
            Ok(dir) => dir,
            Err(Errno::NOENT) => return Ok(Locking::Missing),
            Err(error) => return Err(error),
        };
        // For writing: network file systems want that of an exclusive lock.
        let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let lock = openat(&dir, HOLDER, flags, Mode::empty())?;
        match flock(&lock, how) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => return Ok(Locking::Busy),
            Err(error) => return Err(error),
        }
        // Between the look and the lock it may have been cleaned away, and even made again.
        if !is_at(parent, name, &dir)? || !is_at(&dir, HOLDER, &lock)? {
            return Ok(Locking::Busy);
        }
        let id = read_id(&lock)?;
        Ok(Locking::Locked(Self { dir, lock, id }))
    }

    pub(super) const fn id(&self) -> Uuid {
        self.id
    }

    /// When it was last held, in seconds of the file system's clock.
    pub(super) fn last_used(&self) -> Result<i64> {
        Ok(fstat(&self.lock)?.st_mtime)
    }

    /// Makes again what an execution removed of its directories.
    pub(super) fn complete(&self) -> Result<()> {
        PARTS.iter().try_for_each(|part| make_dir(&self.dir, part))
    }

    /// Opens the directories. `path` is this place's.
    pub(super) fn hold(self, volume: Uuid, path: &str) -> Result<Holder> {
        let now = Timespec { tv_sec: 0, tv_nsec: UTIME_NOW };
        futimens(&self.lock, &Timestamps { last_access: now, last_modification: now })?;
        let [workspace, outputs, uploads] = PARTS.map(|part| format!("{path}/{part}"));
        let opened = open_dir(&self.dir, PARTS[0])?;
        let opened_outputs = match open_dir(&self.dir, PARTS[1]) {
            Ok(dir) => Some((dir, outputs.as_str())),
            Err(Errno::NOENT) => None,
            Err(error) => return Err(error),
        };
        Ok(Holder {
            id: WorkspaceId { volume, place: self.id },
            roots: Roots::of_handles((opened, &workspace), opened_outputs),
            directories: Directories { workspace, outputs, uploads },
            _lock: self.lock,
        })
    }
}

/// Makes the place `name` in `parent`, whole or not at all; it is put together in `new`. Nothing
/// changes where there is one already, or `parent` is gone.
pub(super) fn make(new: &OwnedFd, parent: &OwnedFd, name: &str) -> Result<()> {
    let draft = Uuid::new_v4().to_string();
    mkdirat(new, &draft, Mode::RWXU)?;
    let made = fill(new, &draft).and_then(|()| renameat(new, &draft, parent, name));
    match made {
        Ok(()) => Ok(()),
        Err(error) => {
            // What stays of it is removed by the clean-up.
            let _ = remove_tree(new, draft.as_str());
            match error {
                // A place is never empty, so that no rename replaces one.
                Errno::EXIST | Errno::NOTEMPTY | Errno::NOENT => Ok(()),
                error => Err(error),
            }
        }
    }
}

fn fill(new: &OwnedFd, draft: &str) -> Result<()> {
    let dir = open_dir(new, draft)?;
    PARTS.iter().try_for_each(|part| make_dir(&dir, part))?;
    write_id(&dir, HOLDER)
}

/// Writes a fresh id into a new file.
pub(super) fn write_id(dir: &OwnedFd, name: &str) -> Result<()> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let file = openat(dir, name, flags, Mode::RUSR | Mode::WUSR)?;
    let id = Uuid::new_v4().to_string();
    if write(&file, id.as_bytes())? == id.len() { Ok(()) } else { Err(Errno::NOSPC) }
}

/// Reads the id in a file that [`write_id`] made.
pub(super) fn read_id(file: &OwnedFd) -> Result<Uuid> {
    let mut text = [0; uuid::fmt::Hyphenated::LENGTH];
    let read = pread(file, &mut text, 0)?;
    Uuid::try_parse_ascii(&text[..read]).map_err(|_| Errno::INVAL)
}

/// Makes a directory that may be there already.
pub(super) fn make_dir(at: &OwnedFd, name: &str) -> Result<()> {
    match mkdirat(at, name, Mode::RWXU) {
        Ok(()) | Err(Errno::EXIST) => Ok(()),
        Err(error) => Err(error),
    }
}

/// Opens a directory, no link.
pub(super) fn open_dir(at: &OwnedFd, name: &str) -> Result<OwnedFd> {
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    openat(at, name, flags, Mode::empty())
}

/// Whether this name still stands for what was opened by it.
fn is_at(at: &OwnedFd, name: &str, opened: &OwnedFd) -> Result<bool> {
    let file = |stat: Stat| (stat.st_dev, stat.st_ino);
    match statat(at, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(there) => Ok(file(there) == file(fstat(opened)?)),
        Err(Errno::NOENT) => Ok(false),
        Err(error) => Err(error),
    }
}
