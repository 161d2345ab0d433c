//! Which directories an item's commands may work in, as far as their text tells, and which earlier
//! segments of a command leave the output and the directory of the run alone (`acceptance.md` 1.6,
//! attribution).

use super::shapes::carries_shape;
use super::shell::Segment;

/// Where the directories of an item are, as the commands it ran may spell them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Directories {
    /// Where it works; relative paths start here.
    pub workspace: String,
    /// Where it leaves its results.
    pub outputs: String,
    /// What was given to it; its files prove nothing.
    pub uploads: String,
}

/// The directories a command text is judged by.
#[derive(Clone, Debug)]
pub(super) struct Scope<'a> {
    roots: Vec<&'a str>,
    virtual_prefix: &'a str,
    /// Whether the directories are Windows paths.
    pub(super) windows: bool,
}

impl<'a> Scope<'a> {
    pub(super) fn new(directories: Option<&'a Directories>, virtual_prefix: &'a str) -> Self {
        let roots = directories.map_or_else(Vec::new, |d| {
            vec![d.workspace.as_str(), d.outputs.as_str(), d.uploads.as_str()]
        });
        let windows = roots.iter().any(|root| has_drive(root) || root.starts_with(r"\\"));
        Self { roots, virtual_prefix, windows }
    }

    /// Whether an earlier segment provably prints nothing and stays in the item's directories: only
    /// `cd` to one literal place in scope.
    pub(super) fn is_silent(&self, segment: &Segment) -> bool {
        match segment.as_slice() {
            [program, target] => program.text == "cd" && self.may_enter(&target.text),
            _ => false,
        }
    }

    fn may_enter(&self, target: &str) -> bool {
        let literal = !target.contains(['$', '`', '*', '?', '[']);
        // With a search path set, `cd` prints where it went, and that must not look like a result.
        literal
            && !carries_shape(target)
            && !target.is_empty()
            && !target.starts_with(['-', '~'])
            && !target.split(['/', '\\']).any(|part| part == "..")
            && self.contains(target)
    }

    fn contains(&self, target: &str) -> bool {
        if has_drive(target) || target.starts_with(r"\\") {
            let target = normal(&target.to_lowercase());
            self.windows
                && self.roots.iter().any(|root| is_below(&target, &normal(&root.to_lowercase())))
        } else if target.starts_with(['/', '\\']) {
            let target = normal(target);
            let places = self.roots.iter().copied().chain([self.virtual_prefix]);
            !self.windows && places.into_iter().any(|root| is_below(&target, &normal(root)))
        } else {
            true
        }
    }
}

/// Whether a segment may leave the directory or end the shell, so that even a failure behind it says
/// nothing of the run.
pub(super) fn may_divert(segment: &Segment) -> bool {
    const DIVERTING: [&str; 10] =
        ["cd", "chdir", "pushd", "popd", "exit", "exec", "return", "source", ".", "eval"];
    DIVERTING.contains(&segment[0].text.as_str())
}

/// Whether a segment sends or takes a stream elsewhere; a quoted bracket counts too.
pub(super) fn is_redirected(segment: &Segment) -> bool {
    segment.iter().any(|word| word.text.contains(['<', '>']))
}

fn has_drive(path: &str) -> bool {
    let mut chars = path.chars();
    chars.next().is_some_and(|c| c.is_ascii_alphabetic()) && chars.next() == Some(':')
}

/// A path with single forward slashes and without `.` components.
fn normal(path: &str) -> String {
    let absolute = if path.starts_with(['/', '\\']) { "/" } else { "" };
    let parts: Vec<&str> =
        path.split(['/', '\\']).filter(|part| !part.is_empty() && *part != ".").collect();
    format!("{absolute}{}", parts.join("/"))
}

fn is_below(path: &str, root: &str) -> bool {
    let rooted = root.starts_with('/') || has_drive(root);
    rooted
        && path
            .strip_prefix(root)
            .is_some_and(|rest| rest.is_empty() || rest.starts_with('/') || root == "/")
}

#[cfg(test)]
mod tests {
    use super::super::shell;
    use super::*;

    fn silent(command: &str, directories: Option<&Directories>) -> bool {
        let line = shell::parse(command).unwrap();
        Scope::new(directories, "/mnt/user-data").is_silent(&line.segments[0])
    }

    fn posix() -> Directories {
        Directories {
            workspace: "/data/t/workspace".into(),
            outputs: "/data/t/outputs".into(),
            uploads: "/data/t/uploads".into(),
        }
    }

    #[test]
    fn only_a_cd_that_stays_in_scope_is_silent() {
        let posix = posix();
        for command in ["cd app", "cd \"my app\"", "cd /data/t/uploads/", "cd /mnt/user-data/x"] {
            assert!(silent(command, Some(&posix)), "{command}");
        }
        for command in [
            "cd",
            "cd a b",
            "cd -",
            "cd -P",
            "cd ~",
            "cd ..",
            "cd a/../b",
            "cd $D",
            "cd a*",
            "cd ok",
            "cd \"\"",
            "cd /",
            "cd /data",
            "cd /data/t/workspace2",
            "cd C:/x",
            "true",
            "/usr/bin/cd app",
        ] {
            assert!(!silent(command, Some(&posix)), "{command}");
        }
    }

    #[test]
    fn a_windows_root_makes_other_absolute_paths_foreign() {
        let windows = Directories {
            workspace: r"C:\t\workspace".into(),
            outputs: r"C:\t\outputs".into(),
            uploads: r"C:\t\uploads".into(),
        };
        assert!(silent("cd c:/T/Workspace/app", Some(&windows)));
        assert!(!silent("cd C:app", Some(&windows)));
        assert!(!silent("cd /mnt/user-data", Some(&windows)));
        assert!(!silent("cd //server/share", Some(&windows)));
    }
}
