//! Whether an exclusion may touch what a criterion selects (`acceptance.md` 1.6, M7). Spellings
//! whose relation cannot be told count as overlapping.

use std::sync::LazyLock;

use regex::Regex;

/// Where a path starts. Paths that start differently may name the same file.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Start {
    Relative,
    Absolute,
    Drive { letter: String, rooted: bool },
    Unc { server: String, share: String },
    Named(String),
}

/// A selection of tests: a path and, behind `::`, a node within it.
struct Selection {
    start: Start,
    components: Vec<String>,
    node: Option<String>,
    /// Whether Windows may read a component as another name.
    aliased: bool,
}

static SHORT_NAME: LazyLock<Regex> =
    LazyLock::new(|| Regex::new(r"~[0-9]").expect("a constant pattern"));

/// Whether the values overlap: equal, one an ancestor of the other, or not comparable.
pub(super) fn overlap(one: &str, other: &str, windows: bool) -> bool {
    let one = Selection::parse(one, windows);
    let other = Selection::parse(other, windows);
    if one.aliased || other.aliased || one.start != other.start {
        return true;
    }
    let shared = one.components.len().min(other.components.len());
    if one.components[..shared] != other.components[..shared] {
        return false;
    }
    one.components.len() != other.components.len()
        || nodes_overlap(one.node.as_deref(), other.node.as_deref())
}

/// Whether `value` is how `selected` begins, letter by letter: some options exclude by prefix.
pub(super) fn is_textual_prefix(value: &str, selected: &str) -> bool {
    selected.trim_start_matches("./").starts_with(value.trim_start_matches("./"))
}

/// Whether a path has a parent component, which a link before it makes unpredictable.
pub(super) fn has_parent(value: &str) -> bool {
    value.split("::").next().is_some_and(|path| path.split(['/', '\\']).any(|part| part == ".."))
}

fn nodes_overlap(one: Option<&str>, other: Option<&str>) -> bool {
    let (Some(one), Some(other)) = (one, other) else { return true };
    let within = |inner: &str, outer: &str| {
        // A bracket opens the parameters of one node.
        inner
            .strip_prefix(outer)
            .is_some_and(|rest| rest.starts_with("::") || rest.starts_with('['))
    };
    one == other || within(one, other) || within(other, one)
}

impl Selection {
    fn parse(text: &str, windows: bool) -> Self {
        let (path, node) = match text.split_once("::") {
            // The file system provider of one shell, in front of a path of any kind.
            Some((provider, _)) if provider.to_lowercase().ends_with("filesystem") => (text, None),
            Some((path, node)) => (path, Some(node.to_owned())),
            None => (text, None),
        };
        let path = path.replace('\\', "/");
        let (start, rest) = Start::split(&path);
        let windows = windows || matches!(start, Start::Drive { .. } | Start::Unc { .. });
        // What lies at or below a pattern is not known, so the selection reaches from above it.
        let components: Vec<String> = rest
            .split('/')
            .filter(|part| !part.is_empty() && *part != ".")
            .take_while(|part| *part != "..." && !part.contains(['*', '?', '[']))
            .map(|part| if windows { part.to_lowercase() } else { part.to_owned() })
            .collect();
        let aliased = windows
            && components
                .iter()
                .any(|part| part.ends_with([' ', '.']) || SHORT_NAME.is_match(part));
        Self { start, components, node, aliased }
    }
}

impl Start {
    /// How a path with forward slashes starts, and the rest of it.
    fn split(path: &str) -> (Self, &str) {
        if let Some(unc) = path.strip_prefix("//") {
            let mut parts = unc.splitn(3, '/').map(str::to_lowercase);
            let server = parts.next().unwrap_or_default();
            let share = parts.next().unwrap_or_default();
            return (Self::Unc { server, share }, unc.splitn(3, '/').nth(2).unwrap_or_default());
        }
        if let Some(rest) = path.strip_prefix('/') {
            return (Self::Absolute, rest);
        }
        match path.split_once(':') {
            Some((name, rest)) if !name.contains('/') => {
                let name = name.to_lowercase();
                if name.len() == 1 && name.starts_with(|c: char| c.is_ascii_alphabetic()) {
                    (Self::Drive { letter: name, rooted: rest.starts_with('/') }, rest)
                } else {
                    (Self::Named(name), rest)
                }
            }
            Some(_) | None => (Self::Relative, path),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_path_below_the_other_overlaps() {
        for (one, other) in [
            ("spec", "spec"),
            ("spec", "spec/slow"),
            ("spec/unit", "spec"),
            ("spec/unit", "./spec//unit/x.py"),
            ("spec/unit", "."),
            ("spec/unit", ""),
            ("./...", "x"),
            ("spec/*", "spec/slow"),
            ("/a/b", "/a"),
        ] {
            assert!(overlap(one, other, false), "{one} {other}");
        }
        for (one, other) in [("spec/unit", "spec/slow"), ("spec/unit", "spec/un"), ("/a", "/b")] {
            assert!(!overlap(one, other, false), "{one} {other}");
        }
    }

    #[test]
    fn nodes_overlap_at_their_boundaries() {
        assert!(overlap("a.py", "a.py::t", false));
        assert!(overlap("a.py::C", "a.py::C::t", false));
        assert!(overlap("a.py::t", "a.py::t[1]", false));
        assert!(!overlap("a.py::C", "a.py::Cx", false));
        assert!(!overlap("a.py::C", "b.py::C", false));
    }

    #[test]
    fn different_starts_cannot_be_told_apart() {
        for other in [
            "/spec/unit",
            "C:/x",
            "D:spec/x",
            "//server/share/x",
            "Env:x",
            "FileSystem::C:/x",
            r"\\server\share\x",
        ] {
            assert!(overlap("spec/unit", other, false), "{other}");
        }
        assert!(overlap("C:/a", "D:/b", false));
        assert!(overlap("//s/one/a", "//s/two/b", false));
        assert!(!overlap("C:/a", "c:/b", false));
        assert!(overlap("C:/A/x", "c:/a", false));
    }

    #[test]
    fn windows_roots_compare_without_case_and_distrust_aliases() {
        assert!(overlap("spec/unit", "SPEC/UNIT/x.py", true));
        assert!(!overlap("spec/unit", "SPEC/UNIT/x.py", false));
        for alias in ["spec/slow~1", "spec/slow.", "spec/slow "] {
            assert!(overlap("spec/unit", alias, true), "{alias}");
            assert!(!overlap("spec/unit", alias, false), "{alias}");
        }
    }
}
