//! The private directory of one execution.

use std::fs::{self, DirBuilder, OpenOptions, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::CWD;
use tokio::task::spawn_blocking;

use crate::workspace::remove_tree;

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
        let removed = spawn_blocking(move || remove_tree(CWD, &path)).await;
        if let Err(error) = removed.map_err(io::Error::other).and_then(|done| Ok(done?)) {
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

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

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
}
