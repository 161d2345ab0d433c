//! The private directory of one execution.

use std::ffi::{CStr, CString};
use std::fs::{self, DirBuilder, OpenOptions, Permissions};
use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Dir, Mode, OFlags, chmod, fchmod, openat, renameat, unlinkat};
use rustix::io::Errno;
use rustix::path::Arg;
use tokio::task::spawn_blocking;
use uuid::Uuid;

/// A directory that this user alone can enter, and the input in it when asked for.
pub(super) struct Scratch {
    path: PathBuf,
    input_file: PathBuf,
}

impl Scratch {
    /// Makes a directory below `root`, and `root` when it is missing.
    ///
    /// # Errors
    /// When the file system refuses: full, out of inodes, read-only. Nothing is left then.
    pub(super) async fn create(root: &Path, input: Option<&[u8]>) -> io::Result<Self> {
        let path = match make_in(root) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                DirBuilder::new().recursive(true).mode(0o700).create(root)?;
                make_in(root)?
            }
            made => made?,
        };
        let scratch = Self { input_file: path.join("input"), path };
        if let Some(input) = input {
            let (file, bytes) = (scratch.input_file.clone(), input.to_vec());
            let written = spawn_blocking(move || write_private(&file, &bytes)).await;
            if let Err(error) = written.map_err(io::Error::other).flatten() {
                scratch.remove().await;
                return Err(error);
            }
        }
        Ok(scratch)
    }

    /// The directory.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Where the input is, or would be.
    pub(super) fn input_file(&self) -> &Path {
        &self.input_file
    }

    /// Removes it with whatever was put there.
    pub(super) async fn remove(self) {
        let Self { path, .. } = self;
        // Mostly it is empty, and this is all it takes.
        if fs::remove_dir(&path).is_ok() {
            return;
        }
        let shown = path.display().to_string();
        let removed = spawn_blocking(move || remove_tree(&path)).await;
        if let Err(error) = removed.map_err(io::Error::other).flatten() {
            tracing::warn!(path = shown, %error, "a private directory could not be removed");
        }
    }
}

fn make_in(root: &Path) -> io::Result<PathBuf> {
    let private = Permissions::from_mode(0o700);
    let folder = tempfile::Builder::new().prefix("run-").permissions(private).tempdir_in(root)?;
    Ok(folder.keep())
}

fn write_private(path: &Path, bytes: &[u8]) -> io::Result<()> {
    OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?.write_all(bytes)
}

/// Removes a directory and everything in it: without following a link, whatever the permissions,
/// and at any depth with a fixed number of open files and no recursion. For that, what lies deep is
/// moved up first.
fn remove_tree(path: &Path) -> io::Result<()> {
    let root = open_dir(CWD, path)?;
    while clear(&root)? {}
    fs::remove_dir(path)
}

/// Removes the entries of `root` and of its directories; moves the directories in those to `root`
/// and says whether there were any.
fn clear(root: &OwnedFd) -> rustix::io::Result<bool> {
    let mut moved = false;
    for name in entries(root)? {
        let name = name?;
        if removed(root, &name)? {
            continue;
        }
        let dir = open_dir(root, &name)?;
        for inner in entries(&dir)? {
            let inner = inner?;
            if !removed(&dir, &inner)? {
                // A move changes the entry `..`, which takes the right to write.
                drop(open_dir(&dir, &inner)?);
                renameat(&dir, &inner, root, Uuid::new_v4().to_string())?;
                moved = true;
            }
        }
        unlinkat(root, &name, AtFlags::REMOVEDIR)?;
    }
    Ok(moved)
}

fn entries(dir: &OwnedFd) -> rustix::io::Result<impl Iterator<Item = rustix::io::Result<CString>>> {
    let names = Dir::read_from(dir)?.map(|entry| entry.map(|entry| entry.file_name().to_owned()));
    let is_itself = |name: &CString| matches!(name.as_bytes(), b"." | b"..");
    Ok(names.filter(move |name| !name.as_ref().is_ok_and(is_itself)))
}

/// Removes a file, a link or an empty directory; false for a directory that is not empty.
fn removed(dir: &OwnedFd, name: &CStr) -> rustix::io::Result<bool> {
    match unlinkat(dir, name, AtFlags::empty()) {
        Err(Errno::ISDIR) => {}
        done => return done.map(|()| true),
    }
    match unlinkat(dir, name, AtFlags::REMOVEDIR) {
        Err(Errno::NOTEMPTY) => Ok(false),
        done => done.map(|()| true),
    }
}

/// Opens a directory, no link, after giving its owner every right to it.
fn open_dir(at: impl AsFd, name: impl Arg + Copy) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    match openat(&at, name, flags, Mode::empty()) {
        Ok(dir) => {
            fchmod(&dir, Mode::RWXU)?;
            Ok(dir)
        }
        Err(Errno::ACCESS) => {
            let unread = openat(&at, name, flags | OFlags::PATH, Mode::empty())?;
            chmod(format!("/proc/self/fd/{}", unread.as_raw_fd()), Mode::RWXU)?;
            openat(&at, name, flags, Mode::empty())
        }
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use rustix::thread::{CapabilitySet, capabilities, set_capabilities};

    use super::*;

    fn modes(path: &Path) -> u32 {
        fs::symlink_metadata(path).unwrap().permissions().mode() & 0o777
    }

    #[tokio::test]
    async fn a_directory_and_its_input_are_private_and_go_away() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path().join("not/there/yet");

        let scratch = Scratch::create(&root, Some(b"a\0b")).await.unwrap();

        let path = scratch.path().to_owned();
        assert_eq!(path.parent(), Some(root.as_path()));
        assert_eq!((modes(&path), modes(scratch.input_file())), (0o700, 0o600));
        assert_eq!(fs::read(scratch.input_file()).unwrap(), b"a\0b");
        scratch.remove().await;
        assert!(!path.exists());
    }

    #[tokio::test]
    async fn a_file_in_place_of_the_root_is_an_error() {
        let root = tempfile::NamedTempFile::new().unwrap();
        assert!(Scratch::create(root.path(), None).await.is_err());
    }

    #[tokio::test]
    async fn removal_does_not_follow_links() {
        let root = tempfile::tempdir().unwrap();
        let outside = tempfile::tempdir().unwrap();
        let kept = outside.path().join("kept");
        fs::create_dir(&kept).unwrap();
        fs::write(kept.join("file"), "").unwrap();
        let before = modes(&kept);

        let scratch = Scratch::create(root.path(), None).await.unwrap();
        let inner = scratch.path().join("a/b");
        fs::create_dir_all(&inner).unwrap();
        for (at, name) in [(scratch.path(), "link"), (&inner, "link"), (&inner, "other")] {
            symlink(&kept, at.join(name)).unwrap();
        }
        scratch.remove().await;

        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 0);
        assert!(kept.join("file").exists());
        assert_eq!(modes(&kept), before);
    }

    #[test]
    fn removal_goes_to_any_depth() {
        let root = tempfile::tempdir().unwrap();
        let top = root.path().join("top");
        fs::create_dir(&top).unwrap();
        let mut dir = open_dir(CWD, &top).unwrap();
        for _ in 0..1_500 {
            rustix::fs::mkdirat(&dir, "deeper", Mode::RWXU).unwrap();
            dir = open_dir(&dir, "deeper").unwrap();
        }

        remove_tree(&top).unwrap();

        assert!(!top.exists());
    }

    #[test]
    fn removal_gives_itself_the_rights_it_needs() {
        // A privileged user has them anyway; this thread gives that up.
        let mut mine = capabilities(None).unwrap();
        mine.effective -= CapabilitySet::DAC_OVERRIDE | CapabilitySet::DAC_READ_SEARCH;
        set_capabilities(None, mine).unwrap();
        let root = tempfile::tempdir().unwrap();
        let top = root.path().join("top");
        for (inner, mode) in [("a/b/c", 0o500), ("d/e/f", 0o000), ("g", 0o300)] {
            let inner = top.join(inner);
            fs::create_dir_all(&inner).unwrap();
            fs::write(inner.join("file"), "").unwrap();
            for dir in inner.ancestors().take_while(|dir| *dir != root.path()) {
                if *dir != top {
                    fs::set_permissions(dir, Permissions::from_mode(mode)).unwrap();
                }
            }
        }
        fs::set_permissions(&top, Permissions::from_mode(0o500)).unwrap();
        assert!(fs::remove_dir_all(&top).is_err(), "no right is missing: this shows nothing");

        remove_tree(&top).unwrap();

        assert!(!top.exists());
    }
}
