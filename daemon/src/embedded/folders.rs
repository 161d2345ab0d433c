//! The folders of a private server, and who may use or clean them.
//!
//! Each is held by a lock on a file inside that the kernel releases when its process ends, however
//! it ends: a held state folder has a running owner, and a run folder that nobody holds is what a
//! killed process left behind.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};

use tempfile::TempDir;

use super::EmbeddedError;
use super::account::Account;
use super::server::ServerFile;

/// How the names of run folders begin.
const RUN_PREFIX: &str = "holdfast-pg-";

/// The longest folder that leaves room for a run folder, its socket folder and the socket's name:
/// a socket's path has 107 bytes on Linux and 103 on other systems.
const LONGEST_BASE: usize = 55;

/// What one run of a server needs and nobody needs after it: the socket, and the data too if that
/// is not kept. Removed when dropped.
#[derive(Debug)]
pub(super) struct RunFolder {
    folder: TempDir,
    _lock: File,
}

impl RunFolder {
    /// Makes a fresh one in the system's temporary folder, and removes those whose process is gone.
    pub(super) fn create(account: Option<&Account>) -> Result<Self, EmbeddedError> {
        let base = short_base(std::env::temp_dir(), account.is_some());
        sweep(&base);
        let made = || -> io::Result<Self> {
            let folder = tempfile::Builder::new()
                .prefix(RUN_PREFIX)
                .permissions(fs::Permissions::from_mode(outer_mode(account)))
                .tempdir_in(&base)?;
            // Locked before it gets its name, so that no sweep ever sees it free.
            let unnamed = folder.path().join("lock.new");
            let lock = File::create_new(&unnamed)?;
            lock.try_lock()?;
            fs::rename(unnamed, folder.path().join("lock"))?;
            make_owned(&folder.path().join("socket"), account)?;
            Ok(Self { folder, _lock: lock })
        };
        made().map_err(|source| EmbeddedError::Folder { path: base.clone(), source })
    }

    pub(super) fn path(&self) -> &Path {
        self.folder.path()
    }

    pub(super) fn socket(&self) -> PathBuf {
        self.path().join("socket")
    }
}

/// A folder that keeps data between runs, held by one process at a time.
#[derive(Debug)]
pub(super) struct StateFolder {
    _lock: File,
}

impl StateFolder {
    /// Takes the folder, making it when it is not there.
    pub(super) fn take(path: &Path, account: Option<&Account>) -> Result<Self, EmbeddedError> {
        let opened = || -> io::Result<File> {
            if !path.exists() {
                fs::create_dir_all(path)?;
                fs::set_permissions(path, fs::Permissions::from_mode(outer_mode(account)))?;
            }
            OpenOptions::new()
                .create(true)
                .truncate(false)
                .write(true)
                .open(path.join("postgres.lock"))
        };
        let failed = |source| EmbeddedError::Folder { path: path.to_owned(), source };
        let lock = opened().map_err(failed)?;
        match lock.try_lock() {
            Ok(()) => Ok(Self { _lock: lock }),
            Err(fs::TryLockError::WouldBlock) => Err(already_running(&data_in(path))),
            Err(fs::TryLockError::Error(source)) => Err(failed(source)),
        }
    }
}

/// The data folder inside a state or run folder.
pub(super) fn data_in(folder: &Path) -> PathBuf {
    folder.join("postgres")
}

/// Says that another process runs a server on `data`, with its address when it has started.
pub(super) fn already_running(data: &Path) -> EmbeddedError {
    let url = ServerFile::read(data)
        .map_or(String::new(), |file| format!(": reach it at {}", file.url("postgres")));
    EmbeddedError::AlreadyRunning { data: data.to_owned(), url }
}

/// A folder of the account's own, closed to everyone else.
pub(super) fn make_owned(path: &Path, account: Option<&Account>) -> io::Result<()> {
    DirBuilder::new().mode(0o700).create(path)?;
    match account {
        Some(account) => chown(path, Some(account.uid), Some(account.gid)),
        None => Ok(()),
    }
}

/// Outer folders stay ours; an account dropped to must be able to pass through them.
const fn outer_mode(account: Option<&Account>) -> u32 {
    if account.is_some() { 0o711 } else { 0o700 }
}

/// `wanted`, unless its name is too long for a socket or the account could not get there.
fn short_base(wanted: PathBuf, others_must_pass: bool) -> PathBuf {
    let open = |dir: &Path| fs::metadata(dir).is_ok_and(|dir| dir.mode() & 0o001 != 0);
    let fits = wanted.as_os_str().len() <= LONGEST_BASE && wanted.is_absolute();
    if fits && (!others_must_pass || wanted.ancestors().all(open)) {
        wanted
    } else {
        PathBuf::from("/tmp")
    }
}

/// Removes run folders of ours whose process is gone. One whose server has not ended yet, or that
/// cannot be removed, is left to a later start.
fn sweep(base: &Path) {
    let entries = fs::read_dir(base).into_iter().flatten().flatten();
    let ours = entries.filter(|entry| {
        entry.file_name().to_string_lossy().starts_with(RUN_PREFIX)
            && entry.metadata().is_ok_and(|found| {
                found.is_dir() && found.uid() == rustix::process::geteuid().as_raw()
            })
    });
    for entry in ours {
        let folder = entry.path();
        let Ok(lock) = File::open(folder.join("lock")) else { continue };
        let server_lives = ServerFile::read(&data_in(&folder)).is_some_and(|file| file.is_alive());
        if lock.try_lock().is_ok() && !server_lives {
            let _ = fs::remove_dir_all(&folder);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_taker_of_a_state_folder_is_told_that_a_server_runs() {
        let state = tempfile::tempdir().unwrap();
        let data = data_in(state.path());
        fs::create_dir(&data).unwrap();
        fs::write(data.join("postmaster.pid"), "7\n/d\n1\n5432\n/tmp/s\n\n0 0\nready   \n")
            .unwrap();
        let first = StateFolder::take(state.path(), None).unwrap();

        let second = StateFolder::take(state.path(), None).unwrap_err();
        drop(first);
        let third = StateFolder::take(state.path(), None);

        assert!(matches!(second, EmbeddedError::AlreadyRunning { .. }));
        assert!(second.to_string().contains("postgres://postgres@%2Ftmp%2Fs:5432/postgres"));
        assert!(third.is_ok());
    }

    #[test]
    fn a_sweep_removes_what_nobody_holds_and_nothing_else() {
        let base = tempfile::tempdir().unwrap();
        let folder = |name: &str| {
            let folder = base.path().join(name);
            fs::create_dir(&folder).unwrap();
            folder
        };
        let left = folder("holdfast-pg-left");
        File::create(left.join("lock")).unwrap();
        let held = folder("holdfast-pg-held");
        let lock = File::create(held.join("lock")).unwrap();
        lock.try_lock().unwrap();
        let unborn = folder("holdfast-pg-unborn");
        let foreign = folder("foreign");
        File::create(foreign.join("lock")).unwrap();

        sweep(base.path());

        assert!(!left.exists());
        assert!(held.exists() && unborn.exists() && foreign.exists());
    }

    #[test]
    fn a_base_too_long_for_a_socket_or_closed_to_the_account_gives_way() {
        let closed = tempfile::tempdir().unwrap();
        fs::set_permissions(closed.path(), fs::Permissions::from_mode(0o700)).unwrap();
        let long = PathBuf::from(format!("/{}", "x".repeat(LONGEST_BASE)));

        assert_eq!(short_base(PathBuf::from("/usr"), true), PathBuf::from("/usr"));
        assert_eq!(short_base(long, false), PathBuf::from("/tmp"));
        assert_eq!(short_base(closed.path().to_owned(), true), PathBuf::from("/tmp"));
    }
}
