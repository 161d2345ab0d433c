//! The account the server runs as: `PostgreSQL` refuses to run as root.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use super::EmbeddedError;

/// Accounts a root process drops to, best first.
const DROP_TO: [&str; 2] = ["postgres", "nobody"];

/// An account of this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Account {
    pub(super) name: String,
    pub(super) uid: u32,
    pub(super) gid: u32,
}

impl Account {
    /// The account to drop to; none when this process is not root. Existing data keeps the account
    /// that owns it, since the server refuses a folder of anyone else's.
    pub(super) fn to_drop_to(data: Option<&Path>) -> Result<Option<Self>, EmbeddedError> {
        if !rustix::process::geteuid().is_root() {
            return Ok(None);
        }
        let accounts = fs::read_to_string("/etc/passwd").unwrap_or_default();
        let owner = data.and_then(|data| fs::metadata(data).ok()).map(|data| data.uid());
        Self::choose(&accounts, owner).map(Some).ok_or(EmbeddedError::NoAccount)
    }

    fn choose(passwd: &str, owner: Option<u32>) -> Option<Self> {
        let accounts: Vec<Self> = passwd.lines().filter_map(Self::parse).collect();
        let owner = accounts.iter().find(|account| account.uid != 0 && Some(account.uid) == owner);
        let named = || DROP_TO.iter().find_map(|name| accounts.iter().find(|a| a.name == *name));
        owner.or_else(named).cloned()
    }

    fn parse(line: &str) -> Option<Self> {
        let mut fields = line.split(':');
        let name = fields.next()?.to_owned();
        let uid = fields.nth(1)?.parse().ok()?;
        let gid = fields.next()?.parse().ok()?;
        Some(Self { name, uid, gid })
    }
}

/// A command for one of the server's programs: as `account`, with a clean environment (`PGPORT`
/// and its like would change the server), in a process group of its own (an interrupt typed at the
/// terminal is for us: the server must outlive our drain), and from a directory that every account
/// can enter.
pub(super) fn command(program: &Path, account: Option<&Account>) -> Command {
    let mut command = Command::new(program);
    command.current_dir("/").process_group(0).stdin(Stdio::null());
    command.env_clear().env("LC_ALL", "C.UTF-8").env("TZ", "UTC");
    for name in ["PATH", "LD_LIBRARY_PATH"] {
        if let Some(value) = std::env::var_os(name) {
            command.env(name, value);
        }
    }
    if let Some(account) = account {
        command.uid(account.uid).gid(account.gid);
    }
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &str = "root:x:0:0:root:/root:/bin/bash\n\
        nobody:x:65534:65533:nobody:/nonexistent:/usr/sbin/nologin\n\
        broken line\n\
        postgres:x:101:104:PostgreSQL administrator,,,:/var/lib/postgresql:/bin/bash\n";

    fn chosen(passwd: &str, owner: Option<u32>) -> Option<(String, u32, u32)> {
        Account::choose(passwd, owner).map(|account| (account.name, account.uid, account.gid))
    }

    #[test]
    fn postgres_is_preferred_and_nobody_the_fallback() {
        let without_postgres = PASSWD.replace("postgres:", "other:");

        assert_eq!(chosen(PASSWD, None), Some(("postgres".into(), 101, 104)));
        assert_eq!(chosen(&without_postgres, None), Some(("nobody".into(), 65534, 65533)));
        assert_eq!(chosen("root:x:0:0:root:/root:/bin/bash", None), None);
    }

    #[test]
    fn data_keeps_the_account_that_owns_it_unless_that_is_root() {
        assert_eq!(chosen(PASSWD, Some(65534)), Some(("nobody".into(), 65534, 65533)));
        assert_eq!(chosen(PASSWD, Some(0)), Some(("postgres".into(), 101, 104)));
        assert_eq!(chosen(PASSWD, Some(4711)), Some(("postgres".into(), 101, 104)));
    }
}
