//! The sections `[access]` and `[workspace]`: who may use directories for files, and where they are.

use std::collections::BTreeMap;
use std::path::{Component, Path};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::units;

/// Section `[access]`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Access {
    /// Role of the batches submitted with these settings. Default `submitter`. Key: `access.role`.
    pub role: String,
    /// What each role may use; one that is not here, nothing. Table: `access.roles`.
    pub roles: BTreeMap<String, Vec<Permission>>,
}

/// Something that a role may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "&'static str")]
pub enum Permission {
    /// Directories for files, and checks of them.
    Workspace,
}

impl From<Permission> for &'static str {
    fn from(permission: Permission) -> Self {
        match permission {
            Permission::Workspace => "workspace",
        }
    }
}

impl TryFrom<String> for Permission {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        match text.as_str() {
            "workspace" => Ok(Self::Workspace),
            _ => Err(format!("{text:?} is not one of workspace")),
        }
    }
}

impl Access {
    /// Everything wrong with these settings, each with its key.
    pub(super) fn problems(&self) -> Vec<(&'static str, String)> {
        let mut found = Vec::new();
        if let Some(role) = self.roles.keys().find(|role| !is_role(role)) {
            let what = format!("{role:?} is not 1 to 64 of a-z, 0-9, `-`, `_` and `.`");
            found.push(("access.roles", what));
        }
        if !self.roles.contains_key(&self.role) {
            found.push(("access.role", format!("role {:?} is not in access.roles", self.role)));
        }
        found
    }
}

fn is_role(name: &str) -> bool {
    let fits = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b"-_.".contains(&b);
    (1..=64).contains(&name.len()) && name.bytes().all(fits)
}

/// Section `[workspace]`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Workspace {
    /// Directory below which items have theirs; none means the state folder of the user. Key:
    /// `workspace.root`.
    #[serde(with = "units::optional")]
    pub root: Option<String>,
    /// Directory below which criteria may name them. Default `/mnt/user-data`. Key:
    /// `workspace.virtual_prefix`.
    pub virtual_prefix: String,
    /// How long directories are kept after their last batch ended. 0 to 365 d, default 7 d. Key:
    /// `workspace.retention`.
    #[serde(with = "units::duration")]
    pub retention: Duration,
    /// Time between two clean-ups. 100 ms to 1 h, default 10 min. Key: `workspace.clean_interval`.
    #[serde(with = "units::duration")]
    pub clean_interval: Duration,
}

impl Workspace {
    /// Everything wrong with these settings, each with its key.
    pub(super) fn problems(&self) -> Vec<(&'static str, String)> {
        let mut found = Vec::new();
        if self.root.as_deref().is_some_and(|root| !Path::new(root).is_absolute()) {
            found.push(("workspace.root", "must be an absolute path".to_owned()));
        }
        let prefix = Path::new(&self.virtual_prefix);
        let plain = |part| matches!(part, Component::RootDir | Component::Normal(_));
        let dots = self.virtual_prefix.split('/').any(|part| part == "." || part == "..");
        if !prefix.is_absolute() || dots || !prefix.components().all(plain) {
            let what = "must be an absolute path without `.` and `..`";
            found.push(("workspace.virtual_prefix", what.to_owned()));
        }
        found
    }
}
