//! File criteria against real directories: however a path is spelled, nothing outside the roots is
//! read or confirmed.

use std::fs;
use std::os::unix::fs::symlink;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicBool, Ordering};

use holdfast::check::{CheckInput, Workspace, judge, run};
use holdfast::model::{Finding, VerdictClass};
use proptest::prelude::*;
use rustix::fs::{CWD, RenameFlags, renameat_with};

use super::support::{Tree, fifo, usually};

/// The reason code of each criterion.
fn reasons(tree: &Tree, criteria: &[&str]) -> Vec<&'static str> {
    let criteria: Vec<String> = criteria.iter().map(|text| tree.fill_in(text)).collect();
    let roots = tree.roots();
    let check = CheckInput { criteria: &criteria, ..tree.check(&roots) };
    judge(&check).iter().map(|(_, reason)| reason.as_str()).collect()
}

#[track_caller]
fn assert_reason(tree: &Tree, criterion: &str, expected: &str) {
    assert_eq!(reasons(tree, &[criterion]), [expected], "{criterion:?}");
}

#[test]
fn odd_spellings_of_a_path_get_the_answer_of_the_system() {
    let tree = Tree::new(&[]);
    fs::write(tree.path("workspace/a.txt"), "x\r\ny").unwrap();
    fs::write(tree.path(r"workspace/b\c"), "x").unwrap();
    fs::create_dir(tree.path("workspace/d")).unwrap();

    let roots = tree.roots();
    let written = ["file_written:a.txt".to_owned()];
    let leaf = judge(&CheckInput { criteria: &written, ..tree.check(&roots) }).remove(0).0;
    assert!(leaf.detail().ends_with(": 4 bytes"), "line ends are bytes: {}", leaf.detail());
    assert_reason(&tree, "file:a.txt/ exists", "missing");
    assert_reason(&tree, "file:a.txt/. exists", "missing");
    assert_reason(&tree, "file:a.txt/x exists", "missing");
    assert_reason(&tree, "file:d/../a.txt exists", "exists");
    assert_reason(&tree, r"file:b\c exists", "exists");
    assert_reason(&tree, r"file:d\..\a.txt exists", "missing");
    assert_reason(&tree, "file:a\0.txt exists", "size_unknown");
    assert_reason(&tree, &format!("file:{} exists", "n".repeat(300)), "missing");
    assert_reason(&tree, "file:   exists", "outside_scope");
    assert_reason(&tree, "file:/mnt/user-data exists", "outside_scope");
    assert_reason(&tree, "file:/mnt/user-data/workspace/../outputs/x exists", "missing");
    assert_reason(&tree, "file:/mnt/user-data2/workspace/a.txt exists", "outside_scope");
    assert_reason(&tree, "file:/ exists", "outside_scope");
    assert_reason(&tree, "file:.. exists", "outside_scope");
}

#[test]
fn a_parent_behind_a_link_or_behind_nothing_is_unchecked() {
    let tree = Tree::new(&[]);
    fs::write(tree.path("workspace/a.txt"), "x").unwrap();
    fs::create_dir_all(tree.path("workspace/d/e")).unwrap();
    symlink("d/e", tree.path("workspace/l")).unwrap();

    for path in ["l/../a.txt", "gone/../a.txt", "gone/x/../../a.txt", "a.txt/../a.txt"] {
        assert_reason(&tree, &format!("file:{path} exists"), "outside_scope");
    }
}

#[test]
fn a_link_may_lead_to_the_other_root_and_nowhere_else() {
    let tree = Tree::new(&[]);
    fs::write(tree.path("outputs/o.txt"), "x").unwrap();
    fs::write(tree.path("uploads/u.txt"), "x").unwrap();
    for (name, target) in [
        ("relative", "../outputs/o.txt"),
        ("absolute", "{ROOT}/outputs/o.txt"),
        ("around", "../uploads/../outputs/o.txt"),
        ("up", "../uploads/u.txt"),
        ("down", "/dev/null"),
        ("self", "/proc/self/cwd/Cargo.toml"),
        ("loop", "loop"),
        ("dir", "{ROOT}"),
    ] {
        symlink(tree.fill_in(target), tree.path("workspace").join(name)).unwrap();
    }

    assert_reason(&tree, "file_written:relative", "read_back");
    assert_reason(&tree, "file_written:absolute", "read_back");
    assert_reason(&tree, "file_written:dir/outputs/o.txt", "read_back");
    for outside in ["around", "up", "down", "self", "dir", "dir/uploads/u.txt"] {
        assert_reason(&tree, &format!("file_written:{outside}"), "outside_scope");
    }
    assert_reason(&tree, "file_written:loop", "size_unknown");
}

#[test]
fn roots_reached_through_a_link_are_the_same_roots() {
    let tree = Tree::new(&[]);
    fs::create_dir(tree.path("real")).unwrap();
    fs::write(tree.path("real/a.txt"), "x").unwrap();
    fs::remove_dir(tree.path("workspace")).unwrap();
    symlink("real", tree.path("workspace")).unwrap();

    assert_reason(&tree, "file:{ROOT}/workspace/a.txt exists", "exists");
    assert_reason(&tree, "file:{ROOT}/real/a.txt exists", "exists");
    assert_reason(&tree, "file:a.txt exists", "exists");
}

#[test]
fn sparse_giants_and_chains_of_links_cost_nothing() {
    let tree = Tree::new(&[]);
    let giant = fs::File::create(tree.path("workspace/giant")).unwrap();
    giant.set_len(1 << 40).unwrap();
    for n in 0..60 {
        symlink(format!("c{}", n + 1), tree.path(&format!("workspace/c{n}"))).unwrap();
    }
    let wide = "./d/../".repeat(500) + "giant";
    fs::create_dir(tree.path("workspace/d")).unwrap();
    symlink(wide, tree.path("workspace/wide")).unwrap();

    assert_reason(&tree, "file:giant non-empty", "large_size_only");
    assert_reason(&tree, "file_written:giant", "large_opened");
    assert_reason(&tree, "file:c0 exists", "size_unknown");
    assert_reason(&tree, "file:wide exists", "size_unknown");
}

#[test]
fn a_denied_workspace_costs_only_the_file_leaves() {
    let tree = Tree::new(&[]);
    fs::write(tree.path("workspace/a.txt"), "x").unwrap();
    let criteria = ["file:a.txt exists".to_owned(), "tests_passed:make".to_owned()];
    let roots = tree.roots();
    let denied = Workspace::Denied("role `reader` may not use workspaces");
    let check = CheckInput { criteria: &criteria, workspace: denied, ..tree.check(&roots) };

    let leaves = judge(&check);

    let codes: Vec<_> = leaves.iter().map(|(_, reason)| reason.as_str()).collect();
    assert_eq!(codes, ["denied", "no_match"]);
    assert!(leaves[0].0.detail().ends_with("role `reader` may not use workspaces"));
}

#[test]
fn absent_outputs_are_no_root_and_an_absent_workspace_is_an_error() {
    let tree = Tree::new(&[]);
    fs::remove_dir(tree.path("outputs")).unwrap();
    assert_reason(&tree, "file:../outputs/x exists", "outside_scope");

    fs::remove_dir(tree.path("workspace")).unwrap();
    let directories = tree.check(&Tree::new(&[]).roots()).directories.unwrap().clone();
    assert!(holdfast::check::Roots::open(&directories).is_err());
}

#[test]
fn no_usable_criterion_gives_no_verdict() {
    let tree = Tree::new(&[]);
    let roots = tree.roots();
    let blank = ["  ".to_owned()];

    assert_eq!(run(&CheckInput { criteria: &blank, ..tree.check(&roots) }), None);
    let many: Vec<String> = (0..25).map(|n| format!("file:{n} exists")).collect();
    let verdict = run(&CheckInput { criteria: &many, ..tree.check(&roots) }).unwrap();
    assert_eq!((verdict.leaves().len(), verdict.class()), (20, VerdictClass::Fails));
}

/// Judges a criterion again and again while two paths change places in one step, until each of two
/// reasons was given many times.
fn reasons_while_swapping(tree: &Tree, swap: [&str; 2], criterion: &str, until: [&str; 2]) -> u32 {
    let roots = tree.roots();
    let criteria = [criterion.to_owned()];
    let check = CheckInput { criteria: &criteria, ..tree.check(&roots) };
    let [one, other] = swap.map(|path| tree.path(path));
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                renameat_with(CWD, &one, CWD, &other, RenameFlags::EXCHANGE).expect("both exist");
            }
        });
        let mut seen = [0; 2];
        let mut held = 0;
        let mut looks = 0;
        while seen.iter().any(|count| *count < 500) && looks < 1_000_000 {
            looks += 1;
            let (leaf, reason) = judge(&check).remove(0);
            held += u32::from(leaf.finding() == Finding::Holds);
            for (count, reason_wanted) in seen.iter_mut().zip(until) {
                *count += u32::from(reason.as_str() == reason_wanted);
            }
        }
        done.store(true, Ordering::Relaxed);
        assert!(looks < 1_000_000, "{until:?} were seen {seen:?} times");
        held
    })
}

#[test]
fn a_directory_swapped_for_a_link_does_not_lead_out() {
    let tree = Tree::new(&[]);
    fs::create_dir(tree.path("workspace/d")).unwrap();
    fs::create_dir(tree.path("other")).unwrap();
    fs::write(tree.path("other/secret"), "not yours").unwrap();
    symlink(tree.path("other"), tree.path("workspace/link")).unwrap();

    let swap = ["workspace/d", "workspace/link"];
    let until = ["missing", "outside_scope"];
    assert_eq!(reasons_while_swapping(&tree, swap, "file_written:d/secret", until), 0);
}

#[test]
fn a_file_swapped_for_a_fifo_does_not_block() {
    let tree = Tree::new(&[]);
    fs::write(tree.path("workspace/a.txt"), "x").unwrap();
    fifo(&tree.path("workspace/fifo"));

    let swap = ["workspace/a.txt", "workspace/fifo"];
    let until = ["read_back", "size_unknown"];
    assert!(reasons_while_swapping(&tree, swap, "file_written:a.txt", until) >= 500);
}

/// Paths from pieces that exist inside and outside the roots.
fn path() -> impl Strategy<Value = String> {
    let piece = prop::sample::select(vec![
        "..",
        ".",
        "",
        "d",
        "l",
        "up",
        "top",
        "abs",
        "dangling",
        "fifo",
        "a.txt",
        "workspace",
        "outputs",
        "uploads",
        "other",
        "secret",
        "{ROOT}",
        "/mnt/user-data",
        "/",
        "etc",
        "passwd",
        "\0",
        "~",
    ]);
    prop::collection::vec(piece, 1..8).prop_map(|pieces| pieces.join("/"))
}

/// Directories without a single regular file below the roots; beside them, every name is one, or
/// none is.
fn surrounded(by_files: bool) -> Tree {
    let tree = Tree::new(&[]);
    for inside in ["workspace/d", "outputs/d"] {
        fs::create_dir(tree.path(inside)).expect("a new entry");
    }
    if by_files {
        fs::create_dir_all(tree.path("uploads/d")).expect("a new entry");
        fs::create_dir(tree.path("other")).expect("a new entry");
        for outside in [".", "uploads", "uploads/d", "other"] {
            for name in ["a.txt", "secret", "passwd"] {
                fs::write(tree.path(outside).join(name), "not yours").expect("a new entry");
            }
        }
    }
    for root in ["workspace", "outputs"] {
        for (name, target) in [
            ("l", "d"),
            ("up", ".."),
            ("top", "/"),
            ("abs", "{ROOT}/other"),
            ("dangling", "../gone/../uploads/a.txt"),
            ("d/l", "../../uploads"),
        ] {
            symlink(tree.fill_in(target), tree.path(root).join(name)).expect("a new entry");
        }
        fifo(&tree.path(root).join("fifo"));
    }
    tree
}

proptest! {
    #![proptest_config(usually(1024))]

    #[test]
    fn no_spelling_reads_or_confirms_anything_outside_the_roots(
        paths in prop::collection::vec(path(), 20),
    ) {
        static TREES: LazyLock<[Tree; 2]> = LazyLock::new(|| [true, false].map(surrounded));
        let criteria: Vec<String> =
            paths.iter().map(|path| format!("file_written:{path}")).collect();
        let criteria: Vec<&str> = criteria.iter().map(String::as_str).collect();

        let [by_files, by_nothing] = TREES.each_ref().map(|tree| reasons(tree, &criteria));

        prop_assert_eq!(&by_files, &by_nothing);
        for reason in by_files {
            prop_assert!(["missing", "outside_scope", "size_unknown", "undecidable"].contains(&reason), "{reason}");
        }
    }
}
