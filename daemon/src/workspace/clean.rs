//! Removing places that nobody uses any more.

use std::io;
use std::ops::AddAssign;
use std::os::fd::OwnedFd;

use rustix::fs::{AtFlags, Dir, FlockOperation, renameat, statat, unlinkat};
use rustix::io::{Errno, Result};
use time::{Duration, OffsetDateTime};
use tokio_util::sync::CancellationToken;
use tracing::debug;
use uuid::Uuid;

use super::local::{NEW, Root, TRASH};
use super::names::{self, Below};
use super::place::{Locked, Locking, open_dir};
use super::remove_tree;
use crate::model::BatchId;

/// What was put together for longer than this was left by a process that died.
const LEFT: Duration = Duration::HOUR;

/// Directories that were made for a batch or a thread.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Used {
    /// All items of a batch.
    Batch {
        /// Its owner.
        owner: String,
        /// The batch.
        batch: BatchId,
    },
    /// A thread.
    Thread {
        /// Its owner.
        owner: String,
        /// Its name.
        thread: String,
    },
}

/// What a clean-up did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cleaned {
    /// Places that are gone.
    pub removed: usize,
    /// Places that stay because they are held, or were meanwhile.
    pub held: usize,
    /// Places that could not be removed.
    pub failed: usize,
}

impl AddAssign for Cleaned {
    fn add_assign(&mut self, other: Self) {
        self.removed += other.removed;
        self.held += other.held;
        self.failed += other.failed;
    }
}

/// See [`Workspaces::untouched`](super::Workspaces::untouched).
pub(super) fn untouched(root: &Root, before: OffsetDateTime) -> io::Result<Vec<Used>> {
    let mut found = Vec::new();
    for name in entries(&root.dir)? {
        let Some(owner) = names::owner(&name) else { continue };
        let Ok(dir) = open_dir(&root.dir, &name) else { continue };
        for name in entries(&dir)? {
            let used = match names::below_owner(&name) {
                Some(Below::Batch(batch)) => Used::Batch { owner: owner.clone(), batch },
                Some(Below::Thread(thread)) => Used::Thread { owner: owner.clone(), thread },
                None => continue,
            };
            if touched(&dir, &name).is_ok_and(|at| at <= before.unix_timestamp()) {
                found.push(used);
            }
        }
    }
    Ok(found)
}

/// See [`Workspaces::clean`](super::Workspaces::clean).
pub(super) fn clean(
    root: &Root,
    unused: &[Used],
    before: OffsetDateTime,
    stop: &CancellationToken,
) -> io::Result<Cleaned> {
    let mut cleaner = Cleaner {
        trash: open_dir(&root.own, TRASH)?,
        before: before.unix_timestamp(),
        stop,
        done: Cleaned::default(),
    };
    for used in unused {
        if let Err(error) = cleaner.clean(root, used) {
            debug!(?used, %error, "workspaces could not be cleaned");
            cleaner.done.failed += 1;
        }
    }
    cleaner.empty_trash()?;
    remove_left_behind(&open_dir(&root.own, NEW)?, before)?;
    Ok(cleaner.done)
}

struct Cleaner<'a> {
    trash: OwnedFd,
    before: i64,
    stop: &'a CancellationToken,
    done: Cleaned,
}

impl Cleaner<'_> {
    fn clean(&mut self, root: &Root, used: &Used) -> Result<()> {
        let (owner, name) = match used {
            Used::Batch { owner, batch } => (owner, Some(names::of_batch(*batch))),
            Used::Thread { owner, thread } => (owner, names::of_thread(thread)),
        };
        let (Some(owner), Some(name)) = (names::of_owner(owner), name) else { return Ok(()) };
        let Some(parent) = root.descend(std::slice::from_ref(&owner), false)? else {
            return Ok(());
        };
        match used {
            Used::Thread { .. } => self.clean_place(&parent, &name),
            Used::Batch { .. } => {
                let Some(batch) = root.descend(&[owner.clone(), name.clone()], false)? else {
                    return Ok(());
                };
                for position in entries(&batch)? {
                    if self.stop.is_cancelled() {
                        return Ok(());
                    }
                    self.clean_place(&batch, &position);
                }
                remove_empty(&parent, &name)?;
            }
        }
        remove_empty(&root.dir, &owner)
    }

    fn clean_place(&mut self, parent: &OwnedFd, name: &str) {
        match self.try_clean(parent, name) {
            Ok(true) => self.done.removed += 1,
            Ok(false) => self.done.held += 1,
            Err(error) => {
                debug!(name, %error, "a workspace could not be cleaned");
                self.done.failed += 1;
            }
        }
    }

    /// Whether the place is gone.
    fn try_clean(&self, parent: &OwnedFd, name: &str) -> Result<bool> {
        let place = match Locked::take(parent, name, FlockOperation::NonBlockingLockExclusive) {
            Ok(Locking::Locked(place)) => Some(place),
            Ok(Locking::Missing) => return Ok(true),
            Ok(Locking::Busy) => return Ok(false),
            // Its own execution removed what it is held by.
            Err(Errno::NOENT) => None,
            Err(error) => return Err(error),
        };
        let last_used = match &place {
            Some(place) => place.last_used()?,
            None => touched(parent, name)?,
        };
        if last_used > self.before {
            return Ok(false);
        }
        // Under the lock it gets out of everyone's sight; its removal may then take its time.
        let name_there = Uuid::new_v4().to_string();
        renameat(parent, name, &self.trash, &name_there)?;
        drop(place);
        remove_tree(&self.trash, name_there.as_str())?;
        Ok(true)
    }

    /// What another clean-up began; nobody can hold it.
    fn empty_trash(&self) -> Result<()> {
        for name in entries(&self.trash)? {
            if self.stop.is_cancelled() {
                break;
            }
            if let Err(error) = remove_tree(&self.trash, name.as_str()) {
                debug!(name, %error, "what is left of a workspace could not be removed");
            }
        }
        Ok(())
    }
}

/// Removes what processes that died did not finish putting together.
fn remove_left_behind(new: &OwnedFd, before: OffsetDateTime) -> Result<()> {
    for name in entries(new)? {
        let left = (before - LEFT).unix_timestamp();
        if touched(new, &name).is_ok_and(|at| at <= left) {
            let _ = remove_tree(new, name.as_str());
        }
    }
    Ok(())
}

fn remove_empty(parent: &OwnedFd, name: &str) -> Result<()> {
    match unlinkat(parent, name, AtFlags::REMOVEDIR) {
        Ok(()) | Err(Errno::NOTEMPTY | Errno::EXIST | Errno::NOENT) => Ok(()),
        Err(error) => Err(error),
    }
}

fn touched(at: &OwnedFd, name: &str) -> Result<i64> {
    Ok(statat(at, name, AtFlags::SYMLINK_NOFOLLOW)?.st_mtime)
}

/// The names in a directory; those that are not UTF-8 are none of ours.
fn entries(dir: &OwnedFd) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in Dir::read_from(dir)? {
        if let Ok(name) = entry?.file_name().to_str()
            && name != "."
            && name != ".."
        {
            names.push(name.to_owned());
        }
    }
    Ok(names)
}
