//! The folder below which executions have their private directories: one for each process.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::fs::{FlockOperation, flock};
use tempfile::TempDir;
use time::{Duration, OffsetDateTime};
use tracing::debug;

use crate::clock::Clock;

const PREFIX: &str = "holdfast-scratch-";

/// A folder younger than this may not be locked yet.
const SETTLED: Duration = Duration::MINUTE;

/// A folder of this process; gone when it is dropped. Of a process that was killed it stays, until
/// the next one starts: the kernel has given up its lock.
pub(super) struct ScratchRoot {
    folder: TempDir,
    _lock: File,
}

impl ScratchRoot {
    /// Makes one, and removes those that killed processes left behind.
    pub(super) fn create(clock: &dyn Clock) -> io::Result<Self> {
        let place = std::env::temp_dir();
        remove_left_behind(&place, clock.wall());
        let folder = tempfile::Builder::new().prefix(PREFIX).tempdir_in(place)?;
        let lock = File::open(folder.path())?;
        flock(&lock, FlockOperation::LockExclusive)?;
        Ok(Self { folder, _lock: lock })
    }

    pub(super) fn path(&self) -> &Path {
        self.folder.path()
    }
}

fn remove_left_behind(place: &Path, now: OffsetDateTime) {
    let Ok(entries) = fs::read_dir(place) else { return };
    for entry in entries.flatten() {
        let ours = entry.file_name().to_string_lossy().starts_with(PREFIX);
        if ours && is_left_behind(&entry.path(), now).unwrap_or(false) {
            let removed = fs::remove_dir_all(entry.path());
            debug!(folder = %entry.path().display(), ?removed, "removed what a killed process left");
        }
    }
}

/// Whether a folder is of this user, settled, and locked by nobody.
fn is_left_behind(folder: &Path, now: OffsetDateTime) -> io::Result<bool> {
    let metadata = fs::symlink_metadata(folder)?;
    let settled = now - OffsetDateTime::from(metadata.modified()?) > SETTLED;
    if !metadata.is_dir() || metadata.uid() != rustix::process::geteuid().as_raw() || !settled {
        return Ok(false);
    }
    let lock = File::open(folder)?;
    Ok(flock(&lock, FlockOperation::NonBlockingLockExclusive).is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::SystemClock;

    #[test]
    fn what_a_killed_process_left_goes_and_what_is_in_use_stays() {
        let place = tempfile::tempdir().unwrap();
        let later = SystemClock.wall() + Duration::HOUR;
        let folders = ["left", "used", "young"].map(|name| {
            let folder = place.path().join(format!("{PREFIX}{name}"));
            fs::create_dir_all(folder.join("execution")).unwrap();
            folder
        });
        let other = place.path().join("other");
        fs::create_dir(&other).unwrap();
        let lock = File::open(&folders[1]).unwrap();
        flock(&lock, FlockOperation::LockExclusive).unwrap();

        remove_left_behind(place.path(), SystemClock.wall());
        assert!(folders[2].exists(), "too young to be judged");
        remove_left_behind(place.path(), later);

        assert_eq!(folders.map(|folder| folder.exists()), [false, true, false]);
        assert!(other.exists());
    }
}
