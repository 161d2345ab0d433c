//! Removing a directory that somebody else may still write in.

use std::ffi::{CStr, CString};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use rustix::fs::{AtFlags, Dir, Mode, OFlags, chmod, fchmod, openat, renameat, unlinkat};
use rustix::io::Errno;
use rustix::path::Arg;
use uuid::Uuid;

/// Removes a directory and everything in it: without following a link, whatever the permissions,
/// and at any depth with a fixed number of open files and no recursion. For that, what lies deep is
/// moved up first.
pub(crate) fn remove_tree(at: impl AsFd, name: impl Arg + Copy) -> rustix::io::Result<()> {
    let root = open_dir(&at, name)?;
    while clear(&root)? {}
    unlinkat(at, name, AtFlags::REMOVEDIR)
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
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt;

    use rustix::fs::CWD;
    use rustix::thread::{CapabilitySet, capabilities, set_capabilities};

    use super::*;

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

        remove_tree(CWD, &top).unwrap();

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

        remove_tree(CWD, &top).unwrap();

        assert!(!top.exists());
    }
}
