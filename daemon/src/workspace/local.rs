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
use time::OffsetDateTime;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::place::{self, Locked, Locking, make_dir, open_dir};
use super::{Cleaned, Holder, Opening, Permit, Place, Refusal, Used, Workspaces, clean, names};
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
    fn root(&self) -> io::Result<Option<Root>> {
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

    fn untouched(&self, before: OffsetDateTime) -> io::Result<Vec<Used>> {
        self.root()?.map_or_else(|| Ok(Vec::new()), |root| clean::untouched(&root, before))
    }

    fn clean(
        &self,
        unused: &[Used],
        before: OffsetDateTime,
        stop: &CancellationToken,
    ) -> io::Result<Cleaned> {
        match self.root()? {
            Some(root) => clean::clean(&root, unused, before, stop),
            None => Ok(Cleaned::default()),
        }
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

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

    use tempfile::TempDir;
    use time::macros::datetime;

    use super::*;
    use crate::model::BatchId;
    use crate::workspace::{BatchIdentity, WorkspaceId};

    const EVER: OffsetDateTime = datetime!(9999-01-01 0:00 UTC);

    struct Bench {
        folder: TempDir,
        workspaces: LocalWorkspaces,
    }

    impl Bench {
        fn new() -> Self {
            let folder = tempfile::tempdir().unwrap();
            let root = folder.path().join("not/there");
            Self { folder, workspaces: LocalWorkspaces::new(root, "/mnt/user-data".into()) }
        }

        fn root(&self) -> PathBuf {
            self.workspaces.root.clone()
        }

        fn open(
            &self,
            batch: &BatchIdentity,
            position: i32,
            opening: Opening<'_>,
        ) -> Result<Holder, Refusal> {
            self.workspaces.acquire(Permit(batch), Position::new(position), opening)
        }

        fn make(&self, batch: &BatchIdentity, position: i32) -> Holder {
            self.open(batch, position, Opening::Make).unwrap()
        }

        /// Why a check cannot see the item's directories.
        fn unseen(
            &self,
            batch: &BatchIdentity,
            position: i32,
            noted: Option<WorkspaceId>,
        ) -> &'static str {
            match self.open(batch, position, Opening::Reopen(noted.as_ref())) {
                Err(Refusal::Unseen(why)) => why,
                other => panic!("{other:?}"),
            }
        }

        /// Cleans everything that nobody holds, at any age.
        fn clean(&self) -> Cleaned {
            let unused = self.workspaces.untouched(EVER).unwrap();
            self.workspaces.clean(&unused, EVER, &CancellationToken::new()).unwrap()
        }

        /// Cleans until only so many places are held. A process that another test is just starting
        /// has a copy of every descriptor, for an instant.
        fn clean_to(&self, held: usize) -> usize {
            let mut removed = 0;
            for _ in 0..6_000 {
                let done = self.clean();
                removed += done.removed;
                if done.held <= held {
                    return removed;
                }
                thread::sleep(Duration::from_millis(10));
            }
            panic!("more than {held} are held after a minute");
        }
    }

    fn batch(owner: &str, thread: Option<&str>) -> BatchIdentity {
        let thread = thread.map(str::to_owned);
        BatchIdentity { batch: BatchId::generate(), owner: owner.into(), thread, principal: None }
    }

    fn names(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name());
        let mut names: Vec<String> = entries.map(|name| name.into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn a_place_is_made_whole_and_found_again_by_its_id() {
        let bench = Bench::new();
        let ann = batch("ann", None);

        let made = bench.make(&ann, 7);

        let place = bench.root().join(format!("ann/{}/7", ann.batch));
        assert_eq!(names(&place), [".holder", "outputs", "uploads", "workspace"]);
        let mode = fs::metadata(&place).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o700);
        let real = fs::canonicalize(&place).unwrap();
        assert_eq!(Path::new(&made.directories().outputs), real.join("outputs"));
        for noted in [None, Some(&made.id())] {
            let again = bench.open(&ann, 7, Opening::Reopen(noted)).unwrap();
            assert_eq!(again.id(), made.id());
        }
        assert_eq!(bench.make(&ann, 7).id(), made.id());
        assert_ne!(bench.make(&ann, 8).id().place, made.id().place);
        assert_eq!(bench.workspaces.volume().unwrap(), Some(made.id().volume));
    }

    #[test]
    fn a_check_makes_nothing() {
        let bench = Bench::new();
        let ann = batch("ann", None);

        assert_eq!(bench.unseen(&ann, 0, None), "nothing is here");
        assert!(!bench.root().exists());
        bench.make(&ann, 1);
        assert_eq!(bench.unseen(&ann, 0, None), "it is gone");
        assert_eq!(bench.unseen(&batch("bob", None), 0, None), "it is gone");
        assert_eq!(names(&bench.root()), [".holdfast", "ann"]);
    }

    #[test]
    fn another_disk_and_a_place_made_anew_are_not_taken_for_the_noted_one() {
        let (here, elsewhere) = (Bench::new(), Bench::new());
        let ann = batch("ann", None);
        let noted = elsewhere.make(&ann, 0).id();
        here.make(&ann, 0);

        assert_eq!(here.unseen(&ann, 0, Some(noted)), "it is on another volume");
        assert_eq!(elsewhere.clean_to(0), 1);
        assert_eq!(elsewhere.unseen(&ann, 0, Some(noted)), "it is gone");
        elsewhere.make(&ann, 0);
        assert_eq!(elsewhere.unseen(&ann, 0, Some(noted)), "it was made anew");
    }

    #[test]
    fn the_batches_of_a_thread_share_one_place_and_owners_none() {
        let bench = Bench::new();
        let (first, second) = (batch("ann", Some("t")), batch("ann", Some("t")));
        let other = batch("bob", Some("t"));

        let id = bench.make(&first, 0).id();

        assert_eq!(bench.make(&second, 5).id(), id);
        assert_ne!(bench.make(&other, 0).id(), id);
        let named = first.batch.to_string();
        let lookalike = bench.make(&batch("ann", Some(&named)), 0);
        let own = bench.make(&BatchIdentity { thread: None, ..first }, 0);
        assert!(!own.directories().workspace.starts_with(&lookalike.directories().workspace[..60]));
    }

    #[test]
    fn links_in_the_place_of_directories_are_not_followed() {
        for swapped in ["ann", "ann/T", "ann/T/workspace", "ann/T/outputs", "ann/T/.holder"] {
            let bench = Bench::new();
            let ann = batch("ann", Some("T"));
            bench.make(&ann, 0);
            let path = bench.root().join(swapped);
            let away = bench.folder.path().join("away");
            fs::rename(&path, &away).unwrap();
            symlink(&away, &path).unwrap();

            for opening in [Opening::Make, Opening::Reopen(None)] {
                let refused = bench.open(&ann, 0, opening);
                assert!(matches!(refused, Err(Refusal::Failed(_))), "{swapped}: {refused:?}");
            }
            bench.clean();
            assert!(fs::symlink_metadata(&away).is_ok(), "{swapped} was followed");
        }
    }

    #[test]
    fn what_an_execution_removed_is_made_again_for_the_next() {
        let bench = Bench::new();
        let ann = batch("ann", None);
        let held = bench.make(&ann, 0);
        fs::remove_dir(&held.directories().workspace).unwrap();
        fs::remove_dir(&held.directories().outputs).unwrap();

        let refused = bench.open(&ann, 0, Opening::Reopen(None));
        assert!(matches!(refused, Err(Refusal::Failed(_))), "{refused:?}");
        bench.make(&ann, 0);

        assert!(Path::new(&held.directories().outputs).is_dir());
    }

    #[test]
    fn a_held_place_stays_until_its_last_holder_lets_go() {
        let bench = Bench::new();
        let ann = batch("ann", None);
        let first = bench.make(&ann, 0);
        let second = bench.open(&ann, 0, Opening::Reopen(None)).unwrap();
        bench.make(&ann, 1);
        fs::write(format!("{}/kept", first.directories().workspace), "").unwrap();

        assert_eq!(bench.clean_to(1), 1);
        drop(first);
        assert_eq!(bench.clean(), Cleaned { removed: 0, held: 1, failed: 0 });
        assert!(Path::new(&second.directories().workspace).join("kept").exists());
        drop(second);
        assert_eq!(bench.clean_to(0), 1);

        assert_eq!(names(&bench.root()), [".holdfast"]);
        assert_eq!(names(&bench.root().join(".holdfast/trash")), Vec::<String>::new());
        assert_eq!(names(&bench.root().join(".holdfast/new")), Vec::<String>::new());
    }

    #[test]
    fn only_what_was_not_used_for_long_enough_goes() {
        let bench = Bench::new();
        let (item, thread) = (batch("ann", None), batch("bob", Some("t")));
        bench.make(&item, 0);
        bench.make(&thread, 0);
        let long_ago = datetime!(2020-01-01 0:00 UTC);

        assert_eq!(bench.workspaces.untouched(long_ago).unwrap(), []);
        let mut all = bench.workspaces.untouched(EVER).unwrap();
        all.sort();
        let thread = Used::Thread { owner: "bob".into(), thread: "t".into() };
        assert_eq!(all, [Used::Batch { owner: "ann".into(), batch: item.batch }, thread.clone()]);
        let done = bench.workspaces.clean(&all, long_ago, &CancellationToken::new()).unwrap();
        assert_eq!(done, Cleaned { removed: 0, held: 2, failed: 0 });
        let done = bench.workspaces.clean(&[thread], EVER, &CancellationToken::new()).unwrap();
        assert_eq!(done.removed, 1);
        assert_eq!(names(&bench.root()), [".holdfast", "ann"]);
    }

    #[test]
    fn a_clean_up_follows_no_link_and_leaves_what_is_not_its_own() {
        let bench = Bench::new();
        let ann = batch("ann", None);
        let outside = bench.folder.path().join("outside");
        fs::create_dir(&outside).unwrap();
        fs::write(outside.join("kept"), "").unwrap();
        let made = bench.make(&ann, 0);
        symlink(&outside, format!("{}/link", made.directories().workspace)).unwrap();
        fs::remove_file(bench.root().join(format!("ann/{}/0/.holder", ann.batch))).unwrap();
        fs::create_dir(bench.root().join("ann/.theirs")).unwrap();
        symlink(&outside, bench.root().join("bob")).unwrap();
        drop(made);

        assert_eq!(bench.clean_to(0), 1);

        assert!(outside.join("kept").exists());
        assert_eq!(names(&bench.root().join("ann")), [".theirs"]);
    }

    #[test]
    fn holders_and_clean_ups_race_and_no_held_place_goes() {
        const WANTED: usize = 20;
        let bench = Bench::new();
        let ann = batch("ann", Some("t"));
        let (removed, over) = (AtomicUsize::new(0), AtomicBool::new(false));
        let went = thread::scope(|scope| {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    removed.fetch_add(bench.clean().removed, Ordering::Relaxed);
                }
            });
            let use_it = || {
                let mut went = 0;
                for _ in 0..10_000 {
                    if removed.load(Ordering::Relaxed) >= WANTED {
                        break;
                    }
                    let holder = bench.make(&ann, 0);
                    let file = tempfile::tempfile_in(&holder.directories().workspace);
                    thread::yield_now();
                    let there = fs::metadata(&holder.directories().outputs);
                    went += usize::from(file.is_err() || there.is_err());
                    drop(holder);
                    thread::sleep(Duration::from_millis(1));
                }
                went
            };
            let users: Vec<_> = (0..3).map(|_| scope.spawn(use_it)).collect();
            let went: usize = users.into_iter().map(|user| user.join().unwrap()).sum();
            over.store(true, Ordering::Relaxed);
            went
        });
        assert_eq!(went, 0);
        assert!(removed.into_inner() >= WANTED, "hardly ever cleaned: this shows nothing");
    }
}
