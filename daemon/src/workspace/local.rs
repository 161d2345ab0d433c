//! Workspaces in a directory of this host, or one that hosts share.

use std::fs::{DirBuilder, canonicalize};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use rustix::fs::{AtFlags, CWD, FlockOperation, Mode, OFlags, linkat, openat, unlinkat};
use rustix::io::Errno;
use uuid::Uuid;

use super::place::{self, Locked, Locking, make_dir, open_dir};
use super::{Holder, Opening, Permit, Place, Refusal, Workspaces, names};
use crate::model::Position;

/// How often and how long after each other a place is tried that is being cleaned or made.
const TRIES: u32 = 500;
const BETWEEN_TRIES: Duration = Duration::from_millis(10);

const VOLUME: &str = "volume";

/// Workspaces below one directory. Nothing is made before the first use.
///
/// The file system must support locks (`flock`), between hosts where they share it.
#[derive(Clone, Debug)]
pub struct LocalWorkspaces {
    root: PathBuf,
    virtual_prefix: String,
}

impl LocalWorkspaces {
    /// Workspaces below `root`, an absolute path, which commands and criteria may name by
    /// `virtual_prefix`.
    #[must_use]
    pub const fn new(root: PathBuf, virtual_prefix: String) -> Self {
        Self { root, virtual_prefix }
    }

    /// The root, if anything was ever made below it.
    pub(super) fn root(&self) -> io::Result<Option<Root>> {
        Root::open(&self.root)
    }

    fn try_acquire(&self, path: &[String], opening: Opening<'_>) -> Result<Try, Refusal> {
        let (makes, noted) = match opening {
            Opening::Make => (true, None),
            Opening::Reopen(noted) => (false, noted),
        };
        let root = if makes { Root::make(&self.root).map(Some) } else { self.root() };
        let root = root.map_err(Refusal::Failed)?.ok_or(Refusal::Unseen("nothing is here"))?;
        if noted.is_some_and(|noted| noted.volume != root.volume) {
            return Err(Refusal::Unseen("it is on another volume"));
        }
        let (name, above) = path.split_last().expect("a place has a name");
        let Some(parent) = root.descend(above, makes).map_err(failed)? else {
            return Err(Refusal::Unseen("it is gone"));
        };
        let shared = FlockOperation::NonBlockingLockShared;
        match Locked::take(&parent, name, shared).map_err(failed)? {
            Locking::Busy => Ok(Try::Later),
            Locking::Missing if makes => {
                let new = open_dir(&root.own, NEW).map_err(failed)?;
                place::make(&new, &parent, name).map_err(failed)?;
                Ok(Try::Again)
            }
            Locking::Missing => Err(Refusal::Unseen("it is gone")),
            Locking::Locked(place) if noted.is_some_and(|noted| noted.place != place.id()) => {
                Err(Refusal::Unseen("it was made anew"))
            }
            Locking::Locked(place) => {
                if makes {
                    place.complete().map_err(failed)?;
                }
                let path = format!("{}/{}", root.real, path.join("/"));
                place.hold(root.volume, &path).map(Try::Held).map_err(failed)
            }
        }
    }
}

/// What came of one try.
enum Try {
    Held(Holder),
    /// It was made: to be locked like any other.
    Again,
    Later,
}

fn failed(error: Errno) -> Refusal {
    Refusal::Failed(error.into())
}

impl Workspaces for LocalWorkspaces {
    fn acquire(
        &self,
        permit: Permit<'_>,
        position: Position,
        opening: Opening<'_>,
    ) -> Result<Holder, Refusal> {
        let path = path_of(permit.batch().place(position))
            .ok_or_else(|| Refusal::Failed(io::ErrorKind::InvalidFilename.into()))?;
        for _ in 0..TRIES {
            match self.try_acquire(&path, opening)? {
                Try::Held(holder) => return Ok(holder),
                Try::Again => {}
                Try::Later => thread::sleep(BETWEEN_TRIES),
            }
        }
        Err(Refusal::Failed(io::ErrorKind::TimedOut.into()))
    }

    fn volume(&self) -> io::Result<Option<Uuid>> {
        Ok(self.root()?.map(|root| root.volume))
    }

    fn virtual_prefix(&self) -> &str {
        &self.virtual_prefix
    }
}

fn path_of(place: Place<'_>) -> Option<Vec<String>> {
    Some(match place {
        Place::Item { owner, batch, position } => {
            vec![names::of_owner(owner)?, names::of_batch(batch), position.to_string()]
        }
        Place::Thread { owner, thread } => {
            vec![names::of_owner(owner)?, names::of_thread(thread)?]
        }
    })
}

/// Where places are put together, and where they wait for their removal.
pub(super) const NEW: &str = "new";
pub(super) const TRASH: &str = "trash";

/// The opened root.
pub(super) struct Root {
    pub(super) dir: OwnedFd,
    /// The directory of the root's own files.
    pub(super) own: OwnedFd,
    /// Its path without links.
    real: String,
    volume: Uuid,
}

impl Root {
    fn open(path: &Path) -> io::Result<Option<Self>> {
        let (dir, real) = match open_root(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            opened => opened?,
        };
        let own = match open_dir(&dir, names::OWN) {
            Err(Errno::NOENT) => return Ok(None),
            opened => opened?,
        };
        match read_volume(&own) {
            Err(Errno::NOENT) => Ok(None),
            volume => Ok(Some(Self { dir, own, real, volume: volume? })),
        }
    }

    fn make(path: &Path) -> io::Result<Self> {
        if let Some(root) = Self::open(path)? {
            return Ok(root);
        }
        DirBuilder::new().recursive(true).mode(0o700).create(path)?;
        let (dir, real) = open_root(path)?;
        make_dir(&dir, names::OWN)?;
        let own = open_dir(&dir, names::OWN)?;
        make_dir(&own, NEW)?;
        make_dir(&own, TRASH)?;
        // Whole at once, and the first one counts, of whatever process or host.
        let draft = Uuid::new_v4().to_string();
        place::write_id(&own, &draft)?;
        let linked = linkat(&own, &draft, &own, VOLUME, AtFlags::empty());
        unlinkat(&own, &draft, AtFlags::empty())?;
        match linked {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(error) => return Err(error.into()),
        }
        let volume = read_volume(&own)?;
        Ok(Self { dir, own, real, volume })
    }

    /// Opens a directory below the root, one name at a time; none where it is not there.
    pub(super) fn descend(
        &self,
        path: &[String],
        makes: bool,
    ) -> rustix::io::Result<Option<OwnedFd>> {
        let mut dir = self.dir.try_clone().map_err(|_| Errno::MFILE)?;
        for name in path {
            if makes {
                make_dir(&dir, name)?;
            }
            dir = match open_dir(&dir, name) {
                Err(Errno::NOENT) => return Ok(None),
                opened => opened?,
            };
        }
        Ok(Some(dir))
    }
}

fn open_root(path: &Path) -> io::Result<(OwnedFd, String)> {
    let real = canonicalize(path)?;
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let dir = openat(CWD, &real, flags, Mode::empty())?;
    let real = real.into_os_string().into_string();
    Ok((dir, real.map_err(|_| io::Error::other("the path of the root is not UTF-8"))?))
}

fn read_volume(own: impl AsFd) -> rustix::io::Result<Uuid> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    place::read_id(&openat(own, VOLUME, flags, Mode::empty())?)
}
