//! Workspaces: the directories an item works in, who may use them, and what keeps them from being
//! cleaned meanwhile.
//!
//! Below one root every item has `OWNER/BATCH/POSITION`, and the items of a batch that was submitted
//! with a thread share `OWNER/THREAD`; each holds `workspace`, `outputs` and `uploads`. A place is
//! made at its first use, whole or not at all.
//!
//! [`Gate`] is the one door: it asks the batch's stored principal first and acquires a [`Holder`]
//! only then, and nothing reaches a workspace without a holder. A holder is a shared lock that the
//! kernel gives up when its process dies; the clean-up takes the same lock exclusively.
//!
//! Who can write in a workspace may rename, link and swap what is in it at any time. So every
//! directory is opened by one name at a time, relative to a handle and without following links.

mod clean;
mod local;
mod names;
mod place;
mod remove;

use std::fmt;
use std::io;
use std::str::FromStr;
use std::sync::Arc;

use time::OffsetDateTime;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

pub use clean::{Cleaned, Used};
pub use local::LocalWorkspaces;
pub use place::Holder;
pub(crate) use remove::remove_tree;

use crate::config::{Access, Permission};
use crate::model::{BatchId, Position, Principal};

/// Whose workspaces are asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BatchIdentity {
    /// The batch.
    pub batch: BatchId,
    /// Its owner.
    pub owner: String,
    /// The thread whose workspace its items share; none for one of each item's own.
    pub thread: Option<String>,
    /// On whose behalf it was submitted, as stored with it; none where nothing readable is.
    pub principal: Option<Principal>,
}

/// Which directories are meant, below a root.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place<'a> {
    /// Those of one item.
    Item {
        /// The owner of its batch.
        owner: &'a str,
        /// Its batch.
        batch: BatchId,
        /// Its position.
        position: Position,
    },
    /// Those that the batches of one thread share.
    Thread {
        /// The owner of the thread.
        owner: &'a str,
        /// Its name.
        thread: &'a str,
    },
}

impl BatchIdentity {
    /// Where the item at this position works.
    #[must_use]
    pub fn place(&self, position: Position) -> Place<'_> {
        match &self.thread {
            Some(thread) => Place::Thread { owner: &self.owner, thread },
            None => Place::Item { owner: &self.owner, batch: self.batch, position },
        }
    }
}

/// Which directories a holder has: the file system they are on and the place itself, each with a
/// random id of its own. Kept with a staged outcome, so that a checker on another host, or after a
/// clean-up, knows that it does not see them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WorkspaceId {
    /// The root, made on first use; hosts that share the file system share it.
    pub volume: Uuid,
    /// The place, as it was made.
    pub place: Uuid,
}

impl fmt::Display for WorkspaceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.volume, self.place)
    }
}

/// A text that is no workspace id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a workspace id")]
pub struct NotAWorkspaceId;

impl FromStr for WorkspaceId {
    type Err = NotAWorkspaceId;

    fn from_str(text: &str) -> Result<Self, NotAWorkspaceId> {
        let (volume, place) = text.split_once('/').ok_or(NotAWorkspaceId)?;
        let id = |text: &str| Uuid::try_parse(text).map_err(|_| NotAWorkspaceId);
        Ok(Self { volume: id(volume)?, place: id(place)? })
    }
}

/// Why there is no holder. Nothing was opened for [`Refusal::Denied`].
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    /// The batch's principal may not use workspaces; another attempt gets the same answer.
    #[error("use of the workspace was denied: {0}")]
    Denied(String),
    /// It is not there, or another one is: on another host, or cleaned since.
    #[error("the workspace cannot be seen from here: {0}")]
    Unseen(&'static str),
    /// The file system refused.
    #[error("the workspace cannot be opened")]
    Failed(#[source] io::Error),
}

/// Proof that a batch's principal was asked and may use its workspaces. Only [`Gate`] makes one.
#[derive(Clone, Copy, Debug)]
pub struct Permit<'a>(&'a BatchIdentity);

impl<'a> Permit<'a> {
    /// The batch it is for.
    #[must_use]
    pub const fn batch(&self) -> &'a BatchIdentity {
        self.0
    }
}

/// How a place is to be opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Opening<'a> {
    /// It is made where it does not exist: for an execution.
    Make,
    /// It exists, and is this one where one was noted: for a check, which must not take an empty new
    /// directory, or another host's, for what the execution left.
    Reopen(Option<&'a WorkspaceId>),
}

/// Provides workspaces.
pub trait Workspaces: Send + Sync {
    /// Opens the place of an item and holds it. Blocking, some seconds at most.
    ///
    /// # Errors
    /// Never [`Refusal::Denied`]: the permit says so.
    fn acquire(
        &self,
        permit: Permit<'_>,
        position: Position,
        opening: Opening<'_>,
    ) -> Result<Holder, Refusal>;

    /// The volume seen from here; none before anything was made on it. Blocking.
    ///
    /// # Errors
    /// When the file system refuses.
    fn volume(&self) -> io::Result<Option<Uuid>>;

    /// The batches and threads whose directories nobody began to use after `before`. Whether they
    /// may go is for the caller to say. Blocking.
    ///
    /// # Errors
    /// When the root cannot be read.
    fn untouched(&self, before: OffsetDateTime) -> io::Result<Vec<Used>>;

    /// Removes the places of these batches and threads, and what earlier clean-ups left, until
    /// `stop`; not those that are held now or were after `before`. Follows no link. Blocking.
    ///
    /// # Errors
    /// When the root cannot be read. What happens to single places is in the answer.
    fn clean(
        &self,
        unused: &[Used],
        before: OffsetDateTime,
        stop: &CancellationToken,
    ) -> io::Result<Cleaned>;

    /// The directory below which commands and criteria may name `workspace`, `outputs` and
    /// `uploads`.
    fn virtual_prefix(&self) -> &str;
}

/// The one door to the workspaces of a batch.
pub struct Gate {
    workspaces: Arc<dyn Workspaces>,
    access: Arc<Access>,
    identity: BatchIdentity,
}

impl Gate {
    /// The door of one batch, which opens as `access` says of the batch's principal.
    #[must_use]
    pub fn new(
        workspaces: Arc<dyn Workspaces>,
        access: Arc<Access>,
        identity: BatchIdentity,
    ) -> Self {
        Self { workspaces, access, identity }
    }

    /// Asks, then opens the item's workspace for an execution, and makes it when it is not there.
    /// Blocking.
    ///
    /// # Errors
    /// See [`Refusal`].
    pub fn make(&self, position: Position) -> Result<Holder, Refusal> {
        self.workspaces.acquire(self.permit()?, position, Opening::Make)
    }

    /// Asks, then opens for a check what an execution left, `noted` by it. Blocking.
    ///
    /// # Errors
    /// See [`Refusal`].
    pub fn reopen(
        &self,
        position: Position,
        noted: Option<&WorkspaceId>,
    ) -> Result<Holder, Refusal> {
        self.workspaces.acquire(self.permit()?, position, Opening::Reopen(noted))
    }

    /// See [`Workspaces::virtual_prefix`].
    #[must_use]
    pub fn virtual_prefix(&self) -> &str {
        self.workspaces.virtual_prefix()
    }

    fn permit(&self) -> Result<Permit<'_>, Refusal> {
        let denied = |why: String| Err(Refusal::Denied(why));
        let Some(principal) = &self.identity.principal else {
            return denied("the batch has no stored principal".into());
        };
        if principal.owner != self.identity.owner {
            return denied("the stored principal is not the owner of the batch".into());
        }
        match self.access.roles.get(&principal.role) {
            None => denied(format!("role {} is not configured", principal.role)),
            Some(permissions) if permissions.contains(&Permission::Workspace) => {
                Ok(Permit(&self.identity))
            }
            Some(_) => denied(format!("role {} may not use workspaces", principal.role)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    /// Opens nothing, and counts how often it was asked.
    #[derive(Default)]
    struct Counting(AtomicUsize);

    impl Workspaces for Counting {
        fn acquire(&self, _: Permit<'_>, _: Position, _: Opening<'_>) -> Result<Holder, Refusal> {
            self.0.fetch_add(1, Ordering::Relaxed);
            Err(Refusal::Unseen("nothing is here"))
        }

        fn volume(&self) -> io::Result<Option<Uuid>> {
            Ok(None)
        }

        fn untouched(&self, _: OffsetDateTime) -> io::Result<Vec<Used>> {
            Ok(Vec::new())
        }

        fn clean(
            &self,
            _: &[Used],
            _: OffsetDateTime,
            _: &CancellationToken,
        ) -> io::Result<Cleaned> {
            Ok(Cleaned::default())
        }

        fn virtual_prefix(&self) -> &'static str {
            "/mnt"
        }
    }

    fn access() -> Access {
        let roles = [("may", vec![Permission::Workspace]), ("may-not", Vec::new())];
        let roles = roles.into_iter().map(|(name, list)| (name.to_owned(), list));
        Access { role: "may".to_owned(), roles: roles.collect::<BTreeMap<_, _>>() }
    }

    fn asked(principal: Option<(&str, &str)>) -> (usize, Refusal) {
        let counting = Arc::new(Counting::default());
        let identity = BatchIdentity {
            batch: BatchId::generate(),
            owner: "ann".to_owned(),
            thread: None,
            principal: principal
                .map(|(owner, role)| Principal { owner: owner.into(), role: role.into() }),
        };
        let provider: Arc<dyn Workspaces> = Arc::<Counting>::clone(&counting);
        let gate = Gate::new(provider, Arc::new(access()), identity);
        let refusals = [gate.make(Position::new(0)), gate.reopen(Position::new(0), None)];
        let [refusal, _] = refusals.map(|refused| refused.err().unwrap());
        (counting.0.load(Ordering::Relaxed), refusal)
    }

    #[test]
    fn the_stored_principal_is_asked_before_anything_is_opened() {
        for (principal, why) in [
            (None, "the batch has no stored principal"),
            (Some(("bob", "may")), "the stored principal is not the owner of the batch"),
            (Some(("ann", "may-not")), "role may-not may not use workspaces"),
            (Some(("ann", "gone")), "role gone is not configured"),
        ] {
            let (opens, refusal) = asked(principal);
            assert_eq!(opens, 0, "{principal:?}");
            assert!(matches!(&refusal, Refusal::Denied(text) if text == why), "{refusal:?}");
        }
        let (opens, refusal) = asked(Some(("ann", "may")));
        assert_eq!(opens, 2);
        assert!(matches!(refusal, Refusal::Unseen(_)), "{refusal:?}");
    }

    #[test]
    fn an_id_reads_back_the_same() {
        let id = WorkspaceId { volume: Uuid::new_v4(), place: Uuid::new_v4() };
        assert_eq!(id.to_string().parse(), Ok(id));
        for text in ["", "/", "x/y", &id.volume.to_string()] {
            assert_eq!(text.parse::<WorkspaceId>(), Err(NotAWorkspaceId), "{text}");
        }
    }
}
