//! Properties over many cases: normalization is a fixed point, and a stored verdict is valid exactly
//! when a checker could have made it.

use std::sync::LazyLock;

use holdfast::check::judge;
use holdfast::model::criteria::{MAX_CRITERION_CHARS, normalize, normalize_json};
use holdfast::model::{Evidence, Family, Verdict};
use proptest::prelude::*;
use rand::SeedableRng;
use rand::rngs::StdRng;
use serde_json::{Value, json};

use super::fuzz::{any_text, text};
use super::support::{Tree, usually};

/// How many texts are normalized.
const TEXTS: u64 = 100_000;

#[test]
fn normalization_is_idempotent_over_any_unicode() {
    for case in 0..TEXTS {
        let mut random = StdRng::seed_from_u64(case);
        let text = if case % 2 == 0 { text(&mut random) } else { any_text(&mut random) };

        let once = normalize([&text]);

        assert_eq!(normalize(once.iter().flatten()), once, "case {case}: {text:?}");
        for criterion in once.iter().flatten() {
            assert!(criterion.chars().count() <= MAX_CRITERION_CHARS, "case {case}: {text:?}");
        }
        if case % 16 == 0 {
            assert_eq!(normalize_json(&json!(once).to_string()), Ok(once), "case {case}: {text:?}");
        }
    }
}

/// Some criteria and executions, so that every family and finding occurs.
fn verdict() -> impl Strategy<Value = Value> {
    let criterion = prop_oneof![
        3 => prop::sample::select(vec![
            "file:a.txt exists", "file:a.txt non-empty", "file_written:gone", "file:../x exists",
            "tests_passed:make check", "tests_passed:make lint", "tests_passed:make", "reads well",
        ])
        .prop_map(str::to_owned),
        1 => any::<String>(),
    ];
    prop::collection::vec(criterion, 1..25).prop_filter_map("no usable criterion", |criteria| {
        static TREE: LazyLock<Tree> = LazyLock::new(|| {
            let tree = Tree::new(&[]);
            std::fs::write(tree.path("workspace/a.txt"), "x").expect("a new file");
            tree
        });
        let run = |command: &str, status: &str| Evidence {
            command: command.to_owned(),
            status: Some(status.to_owned()),
            output_tail: "3 passed".to_owned(),
            shell_persistent: Some(false),
            ..Evidence::default()
        };
        let evidence = [run("make check", "success"), run("make lint", "error")];
        let roots = TREE.roots();
        let leaves = judge(&holdfast::check::CheckInput {
            criteria: &criteria,
            evidence: &evidence,
            ..TREE.check(&roots)
        });
        let verdict = Verdict::new(leaves.into_iter().map(|(leaf, _)| leaf).collect())?;
        Some(verdict.to_json())
    })
}

/// Whether a checker could have made this, said once more and in another way: with unknown members
/// dropped it is what its own leaves give.
fn could_be_made(value: &Value) -> bool {
    fn text(value: &Value, max: usize) -> bool {
        value.as_str().is_some_and(|text| text.chars().count() <= max)
    }
    let (Some(leaves), Some(unchecked)) =
        (value["leaves"].as_array(), value["unchecked"].as_array())
    else {
        return false;
    };
    let sound = |leaf: &Value| {
        let known = Family::ALL.iter().any(|family| leaf["family"] == family.as_str());
        leaf.is_object()
            && text(&leaf["criterion"], 500)
            && text(&leaf["detail"], 160)
            && known
            && leaf["checked"].is_boolean()
            && leaf["holds"].is_boolean()
            && (leaf["checked"] == true || leaf["holds"] == false)
            && (leaf["family"] != "undecidable" || leaf["checked"] == false)
    };
    let open: Vec<&Value> = leaves
        .iter()
        .filter(|leaf| leaf["checked"] == false)
        .map(|leaf| &leaf["criterion"])
        .collect();
    text(&value["source"], 160)
        && text(&value["requirement"], 160)
        && (1..=20).contains(&leaves.len())
        && leaves.iter().all(sound)
        && unchecked.iter().collect::<Vec<_>>() == open
        && value["all_hold"] == Value::Bool(leaves.iter().all(|leaf| leaf["holds"] == true))
}

/// Every place in a value, as pointers.
fn places(value: &Value, at: &str, into: &mut Vec<String>) {
    into.push(at.to_owned());
    match value {
        Value::Object(members) => {
            members.iter().for_each(|(key, below)| places(below, &format!("{at}/{key}"), into));
        }
        Value::Array(entries) => {
            entries.iter().enumerate().for_each(|(n, below)| {
                places(below, &format!("{at}/{n}"), into);
            });
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

fn replacement() -> impl Strategy<Value = Value> {
    prop_oneof![
        prop::sample::select(vec![
            json!(null),
            json!(true),
            json!(false),
            json!(1),
            json!(0),
            json!("true"),
            json!([]),
            json!({}),
            json!("reads well"),
            json!("file_exists"),
            json!("undecidable"),
            json!("vibes"),
            json!(["reads well"]),
            json!("x".repeat(161)),
            json!("x".repeat(501)),
        ]),
        any::<String>().prop_map(Value::from),
    ]
}

proptest! {
    #![proptest_config(usually(512))]

    #[test]
    fn what_a_checker_makes_is_valid_and_any_change_of_it_only_if_one_could_have_made_it(
        made in verdict(),
        changes in prop::collection::vec(
            (any::<prop::sample::Index>(), replacement(), 0..4_u8), 0..3,
        ),
    ) {
        prop_assert_eq!(Verdict::from_json(&made).map(|verdict| verdict.to_json()), Ok(made.clone()));
        let mut changed = made;
        for (place, value, how) in changes {
            let mut all = Vec::new();
            places(&changed, "", &mut all);
            let place = &all[place.index(all.len())];
            let place = changed.pointer_mut(place).expect("a place of it");
            match (how, place) {
                (0, Value::Object(members)) => drop(members.insert("unknown".to_owned(), value)),
                (1, Value::Object(members)) => {
                    let first = members.keys().next().cloned();
                    first.map(|key| members.remove(&key));
                }
                (0, Value::Array(entries)) => entries.push(value),
                (1, Value::Array(entries)) => drop(entries.pop()),
                (2, Value::Array(entries)) => {
                    let again = entries.first().cloned();
                    entries.extend(again);
                }
                (_, place) => *place = value,
            }
        }

        let read = Verdict::from_json(&changed);

        prop_assert_eq!(read.is_ok(), could_be_made(&changed), "{} as {:?}", changed, read);
    }
}
