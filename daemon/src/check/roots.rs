//! The directories whose files can prove something, and how a path is followed below them.
//!
//! Every component is looked at on its own, relative to a directory handle, and every link is read
//! and followed here. So a path that leaves the roots, by `..` or through links, is known for what it
//! is before anything outside is touched; the handles keep even a directory swapped for a link from
//! leading out.

use std::collections::VecDeque;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

use cap_std::ambient_authority;
use cap_std::fs::Dir;

use super::files::is_gone;
use super::scope::Directories;

/// The most links followed on one path, as in the kernel.
const MAX_LINKS: usize = 40;

/// The most components walked on one path. A criterion spells at most 250; links may add to them.
const MAX_STEPS: usize = 1000;

/// The longest path that the kernel takes, in bytes with its end.
const PATH_MAX: usize = 4096;

/// The opened workspace and outputs of an item. Everything a check reads is opened below them.
#[derive(Debug)]
pub struct Roots(Vec<Root>);

#[derive(Debug)]
struct Root {
    directory: Dir,
    /// Its name below the virtual prefix.
    kind: &'static str,
    /// Its absolute path as configured.
    spelled: Vec<OsString>,
    /// Its absolute path without links.
    real: Vec<OsString>,
}

/// Where a path leads.
pub(super) enum Found<'r> {
    File(FoundFile<'r>),
    /// Nowhere, within the roots.
    Missing,
    /// Out of the roots, or to where it cannot be told without looking there.
    Outside,
    /// To something that is no regular file or cannot be asked.
    SizeUnknown,
}

/// A regular file below a root, not opened yet.
pub(super) struct FoundFile<'r> {
    pub(super) directory: &'r Dir,
    /// Relative to the directory, without links.
    pub(super) path: PathBuf,
    pub(super) size: u64,
}

impl Roots {
    /// The opened workspace.
    pub(crate) fn workspace(&self) -> &Dir {
        &self.0[0].directory
    }

    /// Opens the workspace and the outputs. Blocking. Outputs that do not exist are no root.
    ///
    /// # Errors
    /// When the workspace, or outputs that exist, cannot be opened as a directory.
    pub fn open(directories: &Directories) -> io::Result<Self> {
        let mut roots = vec![Root::open("workspace", &directories.workspace)?];
        match Root::open("outputs", &directories.outputs) {
            Ok(outputs) => roots.push(outputs),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
        Ok(Self(roots))
    }

    /// Roots that are open already, with their absolute paths without links: the workspace, and the
    /// outputs where there are any.
    #[must_use]
    pub fn of_handles(workspace: (OwnedFd, &str), outputs: Option<(OwnedFd, &str)>) -> Self {
        let root = |kind, (directory, path): (OwnedFd, &str)| Root {
            directory: Dir::from_std_file(directory.into()),
            kind,
            spelled: components(Path::new(path)),
            real: components(Path::new(path)),
        };
        let outputs = outputs.map(|opened| root("outputs", opened));
        Self([root("workspace", workspace)].into_iter().chain(outputs).collect())
    }

    /// Follows a path: relative to the workspace, below the virtual prefix, or absolute.
    pub(super) fn find(&self, path: &str, virtual_prefix: &str) -> Found<'_> {
        let path = OsStr::new(path);
        let mut rest = steps(path, Origin::Criterion);
        let position = if is_absolute(path) {
            self.enter_virtual(&mut rest, virtual_prefix)
                .unwrap_or_else(|| self.enter_absolute(&mut rest))
        } else {
            Position::Below { root: 0, names: Vec::new() }
        };
        Walk { roots: self, position }.follow(rest)
    }

    fn enter_virtual(&self, rest: &mut VecDeque<Step>, prefix: &str) -> Option<Position> {
        let prefix = components(Path::new(prefix));
        self.0
            .iter()
            .position(|root| {
                let virtual_root: Vec<_> =
                    prefix.iter().cloned().chain([OsString::from(root.kind)]).collect();
                strip(rest, &virtual_root)
            })
            .map(|root| Position::Below { root, names: Vec::new() })
    }

    /// The position a host path starts from. A root is entered by either of its spellings; any other
    /// path starts at the top, without a look at what is there.
    fn enter_absolute(&self, rest: &mut VecDeque<Step>) -> Position {
        self.0
            .iter()
            .position(|root| strip(rest, &root.spelled) || strip(rest, &root.real))
            .map_or(Position::Above(Vec::new()), |root| Position::Below { root, names: Vec::new() })
    }

    /// The position of a real path: at or below a root, or on the way down to one; none elsewhere.
    fn place(&self, path: Vec<OsString>) -> Option<Position> {
        let at_or_below = self.0.iter().enumerate().find_map(|(root, Root { real, .. })| {
            let names = path.strip_prefix(real.as_slice())?.to_vec();
            Some(Position::Below { root, names })
        });
        at_or_below.or_else(|| {
            self.0.iter().any(|root| root.real.starts_with(&path)).then_some(Position::Above(path))
        })
    }
}

impl Root {
    fn open(kind: &'static str, path: &str) -> io::Result<Self> {
        let real = std::fs::canonicalize(path)?;
        Ok(Self {
            directory: Dir::open_ambient_dir(&real, ambient_authority())?,
            kind,
            spelled: components(&std::path::absolute(path)?),
            real: components(&real),
        })
    }
}

/// Who wrote a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Origin {
    Criterion,
    Link,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Step {
    Name(OsString),
    Up(Origin),
    /// What was reached so far must be a directory.
    Directory,
}

/// Where a walk stands: always at a directory.
enum Position {
    /// Above the roots, on the way down to one; nothing is looked at there.
    Above(Vec<OsString>),
    /// At or below a root.
    Below { root: usize, names: Vec<OsString> },
}

/// What stands under one name.
enum Entry<'r> {
    /// A directory, which is the position now.
    Entered,
    Link(PathBuf),
    File(FoundFile<'r>),
    /// Neither of those.
    Special,
    Missing,
    Outside,
    Unknown,
}

struct Walk<'r> {
    roots: &'r Roots,
    position: Position,
}

impl<'r> Walk<'r> {
    fn follow(mut self, mut rest: VecDeque<Step>) -> Found<'r> {
        let (mut links, mut walked) = (0, 0);
        while let Some(step) = rest.pop_front() {
            walked += 1;
            if walked > MAX_STEPS {
                return Found::SizeUnknown;
            }
            let entry = match step {
                Step::Directory => continue,
                Step::Up(_) => self.go_up(),
                Step::Name(name) => self.enter(name),
            };
            match entry {
                Entry::Entered => {}
                Entry::Link(target) => {
                    // Dropping `link/..` from the text would not lead where the system goes.
                    if rest.front() == Some(&Step::Up(Origin::Criterion)) {
                        return Found::Outside;
                    }
                    links += 1;
                    if links > MAX_LINKS {
                        return Found::SizeUnknown;
                    }
                    rest = self.prepend(target.as_os_str(), rest);
                }
                Entry::File(file) if rest.is_empty() => return Found::File(file),
                Entry::Special if rest.is_empty() => return Found::SizeUnknown,
                Entry::File(_) | Entry::Special | Entry::Missing => return dead_end(&rest),
                Entry::Outside => return Found::Outside,
                Entry::Unknown => return Found::SizeUnknown,
            }
        }
        match self.position {
            Position::Below { .. } => Found::SizeUnknown,
            Position::Above(_) => Found::Outside,
        }
    }

    fn prepend(&mut self, target: &OsStr, mut rest: VecDeque<Step>) -> VecDeque<Step> {
        let mut steps = steps(target, Origin::Link);
        if is_absolute(target) {
            self.position = self.roots.enter_absolute(&mut steps);
        }
        steps.append(&mut rest);
        steps
    }

    fn go_up(&mut self) -> Entry<'r> {
        match &mut self.position {
            Position::Above(path) => {
                path.pop();
            }
            Position::Below { root, names } => {
                if names.pop().is_none() {
                    let mut above = self.roots.0[*root].real.clone();
                    above.pop();
                    return self.move_to(above);
                }
            }
        }
        Entry::Entered
    }

    fn move_to(&mut self, path: Vec<OsString>) -> Entry<'r> {
        match self.roots.place(path) {
            Some(position) => {
                self.position = position;
                Entry::Entered
            }
            None => Entry::Outside,
        }
    }

    fn enter(&mut self, name: OsString) -> Entry<'r> {
        let (root, names) = match &mut self.position {
            Position::Above(path) => {
                let mut path = path.clone();
                path.push(name);
                return self.move_to(path);
            }
            Position::Below { root, names } => (*root, names),
        };
        let roots: &'r Roots = self.roots;
        let directory = &roots.0[root].directory;
        let path: PathBuf = names.iter().chain([&name]).collect();
        if path.as_os_str().len() >= PATH_MAX {
            return Entry::Unknown;
        }
        let metadata = match directory.symlink_metadata(&path) {
            Ok(metadata) => metadata,
            Err(error) if is_gone(&error) => return Entry::Missing,
            Err(_) => return Entry::Unknown,
        };
        if metadata.is_dir() {
            names.push(name);
            Entry::Entered
        } else if metadata.is_symlink() {
            directory.read_link_contents(&path).map_or(Entry::Unknown, Entry::Link)
        } else if metadata.is_file() {
            Entry::File(FoundFile { directory, path, size: metadata.len() })
        } else {
            Entry::Special
        }
    }
}

/// The end of a path whose last found component has nothing below it. A `..` behind it would have
/// been dropped by one reader of the path and not by another.
fn dead_end(rest: &VecDeque<Step>) -> Found<'static> {
    if rest.iter().any(|step| matches!(step, Step::Up(_))) {
        Found::Outside
    } else {
        Found::Missing
    }
}

fn is_absolute(path: &OsStr) -> bool {
    path.as_bytes().first() == Some(&b'/')
}

fn steps(path: &OsStr, origin: Origin) -> VecDeque<Step> {
    let parts: Vec<&[u8]> = path.as_bytes().split(|byte| *byte == b'/').collect();
    let mut steps: VecDeque<Step> = parts
        .iter()
        .copied()
        .filter(|part| !part.is_empty() && *part != b".")
        .map(|part| match part {
            b".." => Step::Up(origin),
            name => Step::Name(OsStr::from_bytes(name).to_owned()),
        })
        .collect();
    if parts.last().is_some_and(|part| part.is_empty() || *part == b".") {
        steps.push_back(Step::Directory);
    }
    steps
}

/// Drops the steps that spell `prefix`, if they do.
fn strip(steps: &mut VecDeque<Step>, prefix: &[OsString]) -> bool {
    let spells = steps.len() >= prefix.len()
        && steps.iter().zip(prefix).all(|(step, name)| matches!(step, Step::Name(n) if n == name));
    if spells {
        steps.drain(..prefix.len());
    }
    spells
}

fn components(path: &Path) -> Vec<OsString> {
    path.components()
        .filter_map(|component| match component {
            Component::Normal(name) => Some(name.to_owned()),
            Component::ParentDir => Some(OsString::from("..")),
            Component::Prefix(_) | Component::RootDir | Component::CurDir => None,
        })
        .collect()
}
