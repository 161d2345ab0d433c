//! The files of a workspace, as a model reads and writes them: regular files only, bounded, and never
//! outside, whatever links lead there.

use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Component, Path, PathBuf};

use cap_std::fs::{Dir, File, OpenOptions, OpenOptionsExt};

/// The most that one reading shows, in bytes.
pub(super) const MOST_SHOWN: u64 = 16 * 1024;

/// How deep directories are counted.
const DEEPEST: usize = 64;

/// A path as a model gives it, made relative to the workspace.
fn relative(path: &str, virtual_prefix: &str) -> Result<PathBuf, String> {
    let below = format!("{}/workspace/", virtual_prefix.trim_end_matches('/'));
    let path = path.strip_prefix(&below).unwrap_or(path);
    let mut clean = PathBuf::new();
    for part in Path::new(path).components() {
        match part {
            Component::Normal(name) => clean.push(name),
            Component::CurDir => {}
            Component::ParentDir | Component::RootDir | Component::Prefix(_) => {
                return Err("the path must be relative to the workspace, without `..`".to_owned());
            }
        }
    }
    if clean.as_os_str().is_empty() { Err("the path names no file".to_owned()) } else { Ok(clean) }
}

/// Opens without waiting, for whatever is there, and keeps regular files only.
fn open(workspace: &Dir, path: &Path, options: &mut OpenOptions) -> Result<File, String> {
    let flags = i32::try_from(rustix::fs::OFlags::NONBLOCK.bits()).expect("it is one bit of few");
    let file = workspace
        .open_with(path, options.custom_flags(flags))
        .map_err(|error| format!("{}: {error}", path.display()))?;
    let metadata = file.metadata().map_err(|error| error.to_string())?;
    if metadata.is_file() {
        Ok(file)
    } else {
        Err(format!("{} is not a regular file", path.display()))
    }
}

/// Reads from byte `offset` on, at most `limit` bytes.
pub(super) fn read(
    workspace: &Dir,
    virtual_prefix: &str,
    path: &str,
    offset: u64,
    limit: u64,
) -> Result<String, String> {
    let path = relative(path, virtual_prefix)?;
    let mut file = open(workspace, &path, OpenOptions::new().read(true))?;
    let failed = |error: io::Error| format!("{}: {error}", path.display());
    let size = file.metadata().map_err(failed)?.len();
    file.seek(SeekFrom::Start(offset)).map_err(failed)?;
    let limit = limit.clamp(1, MOST_SHOWN);
    let mut bytes = Vec::new();
    file.take(limit).read_to_end(&mut bytes).map_err(failed)?;
    let end = offset + bytes.len() as u64;
    let Some(text) = text_of(&bytes, offset > 0, end < size) else {
        return Ok(format!("[binary file, {size} bytes]"));
    };
    if offset == 0 && end >= size {
        return Ok(text);
    }
    Ok(format!("{text}\n[bytes {offset} to {end} of {size}]"))
}

/// The text, without a character cut at an end that was cut; none where it is not text.
fn text_of(bytes: &[u8], cut_before: bool, cut_after: bool) -> Option<String> {
    let is_inside = |byte: &&u8| **byte & 0b1100_0000 == 0b1000_0000;
    let skipped = if cut_before { bytes.iter().take(3).take_while(is_inside).count() } else { 0 };
    let bytes = &bytes[skipped..];
    let text = match std::str::from_utf8(bytes) {
        Ok(text) => text,
        Err(error) if cut_after && error.error_len().is_none() => {
            std::str::from_utf8(&bytes[..error.valid_up_to()]).ok()?
        }
        Err(_) => return None,
    };
    (!text.contains('\0')).then(|| text.to_owned())
}

/// Writes a file, and makes the directories above it.
pub(super) fn write(
    workspace: &Dir,
    virtual_prefix: &str,
    path: &str,
    content: &str,
    append: bool,
) -> Result<String, String> {
    let path = relative(path, virtual_prefix)?;
    let failed = |error: io::Error| format!("{}: {error}", path.display());
    if let Some(above) = path.parent().filter(|above| !above.as_os_str().is_empty()) {
        workspace.create_dir_all(above).map_err(failed)?;
    }
    // Cut to nothing only when it is known to be a file of its own.
    let mut file = open(workspace, &path, OpenOptions::new().write(true).create(true))?;
    if append {
        file.seek(SeekFrom::End(0)).map_err(failed)?;
    } else {
        file.set_len(0).map_err(failed)?;
    }
    file.write_all(content.as_bytes()).map_err(failed)?;
    Ok(format!("{} bytes written", content.len()))
}

/// Whether the workspace holds more than so many bytes or files. It is counted no further than that.
pub(super) fn exceeds(workspace: &Dir, most_bytes: u64, most_files: u64) -> io::Result<bool> {
    let mut used = (0, 0);
    let within = count(workspace, DEEPEST, &mut used, (most_bytes, most_files))?;
    Ok(!within)
}

fn count(dir: &Dir, depth: usize, used: &mut (u64, u64), most: (u64, u64)) -> io::Result<bool> {
    for entry in dir.entries()? {
        let entry = entry?;
        let Ok(metadata) = entry.metadata() else { continue };
        used.0 = used.0.saturating_add(metadata.len());
        used.1 += 1;
        if used.0 > most.0 || used.1 > most.1 {
            return Ok(false);
        }
        if metadata.is_dir() {
            // What is nested beyond all use counts as too much.
            let Some(below) = depth.checked_sub(1) else { return Ok(false) };
            let Ok(inner) = entry.open_dir() else { continue };
            if !count(&inner, below, used, most)? {
                return Ok(false);
            }
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use cap_std::ambient_authority;
    use rustix::fs::{CWD, FileType, Mode, mknodat};
    use tempfile::TempDir;

    use super::*;

    fn workspace() -> (TempDir, Dir) {
        let folder = tempfile::tempdir().unwrap();
        let dir = Dir::open_ambient_dir(folder.path(), ambient_authority()).unwrap();
        (folder, dir)
    }

    fn shown(dir: &Dir, path: &str) -> Result<String, String> {
        read(dir, "/mnt/user-data", path, 0, MOST_SHOWN)
    }

    #[test]
    fn what_is_written_can_be_read_by_every_spelling() {
        let (folder, dir) = workspace();
        write(&dir, "/mnt/user-data", "a/b.txt", "one", false).unwrap();
        write(&dir, "/mnt/user-data", "./a/b.txt", "\ntwo", true).unwrap();
        assert_eq!(shown(&dir, "/mnt/user-data/workspace/a/b.txt").unwrap(), "one\ntwo");
        write(&dir, "/mnt/user-data", "a/b.txt", "3", false).unwrap();
        assert_eq!(std::fs::read_to_string(folder.path().join("a/b.txt")).unwrap(), "3");
    }

    #[test]
    fn nothing_outside_is_read_or_written() {
        let (folder, dir) = workspace();
        let outside = tempfile::tempdir().unwrap();
        std::fs::write(outside.path().join("secret"), "hunter2").unwrap();
        symlink(outside.path(), folder.path().join("link")).unwrap();
        symlink(outside.path().join("secret"), folder.path().join("file")).unwrap();
        symlink(outside.path().join("new"), folder.path().join("dangling")).unwrap();
        for path in ["link/secret", "file", "../x", "/etc/passwd", "a/../../x", "", ".", "dangling"]
        {
            let read = shown(&dir, path).unwrap_err();
            assert!(!read.contains("hunter2"), "{path}");
            assert!(write(&dir, "/mnt/user-data", path, "x", false).is_err(), "{path}");
        }
        assert_eq!(std::fs::read_to_string(outside.path().join("secret")).unwrap(), "hunter2");
        assert!(!outside.path().join("new").exists());
    }

    #[test]
    fn what_is_no_regular_file_is_refused_without_waiting() {
        let (folder, dir) = workspace();
        let fifo = folder.path().join("fifo");
        mknodat(CWD, &fifo, FileType::Fifo, Mode::RWXU, 0).unwrap();
        std::fs::create_dir(folder.path().join("dir")).unwrap();
        for path in ["fifo", "dir", "missing"] {
            assert!(shown(&dir, path).is_err(), "{path}");
        }
        assert!(write(&dir, "/mnt/user-data", "fifo", "x", false).is_err());
        assert!(write(&dir, "/mnt/user-data", "dir", "x", false).is_err());
    }

    #[test]
    fn a_large_file_is_shown_in_parts_and_a_binary_one_is_named() {
        let (folder, dir) = workspace();
        std::fs::write(folder.path().join("big"), "é".repeat(100_000)).unwrap();
        let first = shown(&dir, "big").unwrap();
        assert!(first.ends_with("\n[bytes 0 to 16384 of 200000]"), "{}", &first[16_000..]);
        let part = read(&dir, "/", "big", 1, 4).unwrap();
        assert_eq!(part, "é\n[bytes 1 to 5 of 200000]");
        std::fs::write(folder.path().join("bin"), [0, 1, 0xff]).unwrap();
        assert_eq!(shown(&dir, "bin").unwrap(), "[binary file, 3 bytes]");
        let sparse = std::fs::File::create(folder.path().join("sparse")).unwrap();
        sparse.set_len(1 << 40).unwrap();
        assert_eq!(shown(&dir, "sparse").unwrap(), format!("[binary file, {} bytes]", 1_u64 << 40));
    }

    #[test]
    fn a_workspace_is_counted_to_its_quota_and_without_its_links() {
        let (folder, dir) = workspace();
        std::fs::create_dir(folder.path().join("d")).unwrap();
        std::fs::write(folder.path().join("d/f"), [0; 5000]).unwrap();
        symlink("/", folder.path().join("root")).unwrap();
        assert!(!exceeds(&dir, 1 << 20, 3).unwrap());
        assert!(exceeds(&dir, 1 << 20, 2).unwrap());
        assert!(exceeds(&dir, 5000, 100).unwrap());
    }
}
