//! Fuzzing for minutes (`make long`): the criteria parser, normalization and the command matcher, on
//! changed and mixed texts of the vectors.
//!
//! Cases are made from numbers, so that `HOLDFAST_FUZZ_SEED=N` runs the same ones again; each test
//! goes on for `HOLDFAST_FUZZ_SECONDS`, 600 without it. A case that takes longer than ten seconds
//! ends the process and is named.

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{LazyLock, Mutex};
use std::time::Duration;

use holdfast::check::{
    CheckInput, Criterion, DEFAULT_VIRTUAL_PREFIX, Directories, Workspace, judge, needs_workspace,
    parse_file,
};
use holdfast::clock::{Clock, SystemClock};
use holdfast::model::criteria::{BLOCKED_TAGS, MAX_CRITERION_CHARS, neutralize, normalize};
use holdfast::model::{Evidence, Family, Finding};
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use regex::Regex;
use serde_json::Value;

/// The longest that one case may take.
const HANG: Duration = Duration::from_secs(10);

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().unwrap())
}

/// Runs cases until the time is over, and says how many there were.
fn fuzz<C: Debug>(name: &str, make: impl Fn(&mut StdRng) -> C, check: impl Fn(&C)) {
    let seed = setting("HOLDFAST_FUZZ_SEED", 0);
    let budget = Duration::from_secs(setting("HOLDFAST_FUZZ_SECONDS", 600));
    let (began, started) = (SystemClock.now(), AtomicU64::new(0));
    let (current, over) = (Mutex::new(String::new()), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| watch(&started, &current, &over));
        let mut cases = 0;
        while SystemClock.now().since(began) < budget {
            let mut random = StdRng::seed_from_u64(seed ^ cases);
            let case = make(&mut random);
            *current.lock().unwrap() = format!("case {cases} of seed {seed}: {case:?}");
            started.store(SystemClock.now().as_nanos(), Ordering::Relaxed);
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| check(&case))) {
                eprintln!("{name}, {}", current.lock().unwrap());
                over.store(true, Ordering::Relaxed);
                resume_unwind(panic);
            }
            cases += 1;
        }
        over.store(true, Ordering::Relaxed);
        eprintln!("{name}: {cases} cases of seed {seed}");
        assert!(cases > 0);
    });
}

fn watch(started: &AtomicU64, current: &Mutex<String>, over: &AtomicBool) {
    let limit = u64::try_from(HANG.as_nanos()).expect("ten seconds");
    while !over.load(Ordering::Relaxed) {
        std::thread::sleep(Duration::from_millis(100));
        let at = started.load(Ordering::Relaxed);
        if at > 0 && SystemClock.now().as_nanos().saturating_sub(at) > limit {
            eprintln!("hangs: {}", current.lock().unwrap());
            std::process::abort();
        }
    }
}

/// Every text in the vectors.
static SEEDS: LazyLock<Vec<String>> = LazyLock::new(|| {
    let (directory, _) = super::directory();
    let mut texts = BTreeSet::new();
    for file in super::FILES {
        let vectors = std::fs::read_to_string(directory.join(file)).unwrap_or_default();
        for line in vectors.lines() {
            let vector: Value = serde_json::from_str(line).unwrap();
            collect(&vector["input"], &mut texts);
        }
    }
    assert!(!texts.is_empty());
    texts.into_iter().collect()
});

fn collect(value: &Value, into: &mut BTreeSet<String>) {
    match value {
        Value::String(text) if text.len() < 4096 => drop(into.insert(text.clone())),
        Value::Array(entries) => entries.iter().for_each(|entry| collect(entry, into)),
        Value::Object(members) => members.values().for_each(|member| collect(member, into)),
        Value::String(_) | Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

/// What the three readers take for special.
const PIECES: [&str; 74] = [
    "file:",
    "FILE:",
    "f\u{131}le:",
    "file_written:",
    "tests_passed:",
    "TE\u{17f}TS_PASSED:",
    " exists",
    " non-empty",
    " ex\u{130}sts",
    "\n",
    "\r\n",
    "\t",
    " ",
    "\u{a0}",
    "\u{1c}",
    "\u{2028}",
    "\u{85}",
    "\0",
    "<",
    ">",
    "</",
    "< / ",
    "<system",
    "<prompt>",
    "<think",
    "&lt;",
    "--- BEGIN USER INPUT ---",
    "--- END USER INPUT ---",
    "\u{301}",
    "\u{203f}",
    "\u{212a}",
    "\"",
    "'",
    "\\",
    "\u{201c}",
    "\u{2019}",
    "`",
    "$X",
    "$(x)",
    "{a,b}",
    "{1..3}",
    "~",
    "@",
    "^",
    "!x!",
    "%x%",
    "#",
    ";",
    "&&",
    "||",
    "|",
    "|&",
    "&",
    "(",
    ")",
    "=",
    "A=1 ",
    "..",
    "./",
    "../",
    "/",
    "C:\\",
    "//h/s",
    "::",
    "*",
    "?",
    "[",
    "--",
    "-k ",
    "--ignore=",
    "--deselect ",
    "-n 2",
    "cd app",
    "pytest spec/a",
];

/// A text of the vectors, pieces, or both, changed in some places.
pub(super) fn text(random: &mut StdRng) -> String {
    let mut text = match random.random_range(0..4) {
        0 => String::new(),
        _ => SEEDS.choose(random).expect("there are vectors").clone(),
    };
    for _ in 0..random.random_range(0..6) {
        let at = text.floor_char_boundary(random.random_range(0..=text.len()));
        match random.random_range(0..8) {
            0..3 => text.insert_str(at, PIECES.choose(random).expect("pieces")),
            3 => text.insert(at, any_char(random)),
            4 => text.truncate(at),
            5 => {
                let end = text.ceil_char_boundary((at + random.random_range(0..9)).min(text.len()));
                text.replace_range(at..end, "");
            }
            6 => {
                let other = SEEDS.choose(random).expect("there are vectors");
                let cut = other.floor_char_boundary(random.random_range(0..=other.len()));
                text.insert_str(at, &other[cut..]);
            }
            _ => {
                let end =
                    text.ceil_char_boundary((at + random.random_range(0..40)).min(text.len()));
                let piece = text[at..end].repeat(random.random_range(1..30));
                text.insert_str(at, &piece);
            }
        }
    }
    text
}

/// Any characters at all, up to some more than a criterion keeps.
pub(super) fn any_text(random: &mut StdRng) -> String {
    let length = if random.random_bool(0.1) { 520 } else { 24 };
    (0..random.random_range(0..length)).map(|_| any_char(random)).collect()
}

fn any_char(random: &mut StdRng) -> char {
    let last = *[0x7f, 0x24f, 0x2fff, 0x10_ffff].choose(random).expect("four");
    char::from_u32(random.random_range(0..=last)).unwrap_or(char::REPLACEMENT_CHARACTER)
}

/// The families as one would write them down as a pattern.
static FILE: LazyLock<[(Family, Regex); 2]> = LazyLock::new(|| {
    let fold = |word: &str| {
        let letter = |c: char| match c {
            'i' => "[iI\u{131}\u{130}]".to_owned(),
            's' => "[sS\u{17f}]".to_owned(),
            'k' => "[kK\u{212a}]".to_owned(),
            c if c.is_ascii_alphabetic() => format!("[{c}{}]", c.to_ascii_uppercase()),
            c => regex::escape(&c.to_string()),
        };
        word.chars().map(letter).collect::<String>()
    };
    let gap = r"[\s\x1c-\x1f]+";
    let whole = |body: String| Regex::new(&format!(r"\A(?:{body})\z")).unwrap();
    let modes = format!("(?:(?P<exists>{})|{})", fold("exists"), fold("non-empty"));
    [
        (Family::FileExists, whole(format!("{}(?P<path>.+?){gap}{modes}", fold("file:")))),
        (Family::FileWritten, whole(format!("{}(?P<path>.+)", fold("file_written:")))),
    ]
});

fn parse_by_pattern(text: &str) -> Option<(Family, String)> {
    FILE.iter().find_map(|(family, pattern)| {
        let found = pattern.captures(text)?;
        let family = match family {
            Family::FileExists if found.name("exists").is_none() => Family::FileNonEmpty,
            Family::FileExists
            | Family::FileNonEmpty
            | Family::FileWritten
            | Family::TestsPassed
            | Family::Undecidable => *family,
        };
        Some((family, found["path"].to_owned()))
    })
}

#[test]
#[ignore = "takes minutes: make long"]
fn long_fuzz_the_parser_of_criteria() {
    fuzz("parser", text, |text| {
        let file = parse_file(text).map(|file| (file.family, file.path.to_owned()));
        assert_eq!(file, parse_by_pattern(text));
        let is_file = matches!(Criterion::parse(text), Criterion::File(_));
        assert_eq!(is_file, needs_workspace([text]));
        let normal = normalize([text]);
        // What a check takes for a file, admission saw in what is stored.
        for stored in normal.iter().flatten() {
            let parsed = parse_by_pattern(stored);
            assert_eq!(Criterion::parse(stored).family().needs_workspace(), parsed.is_some());
        }
    });
}

/// Neutralization, written out character by character.
fn neutralize_by_hand(text: &str) -> String {
    let white = |c: char| c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c);
    let word = |c: char| c == '_' || is_letter_or_number(c);
    let fold = |c: char| match c {
        '\u{131}' | '\u{130}' => 'i',
        '\u{17f}' => 's',
        '\u{212a}' => 'k',
        c => c.to_ascii_lowercase(),
    };
    let chars: Vec<char> = text.chars().collect();
    let (mut done, mut at) = (String::new(), 0);
    while at < chars.len() {
        let blank = |mut at: usize| {
            while chars.get(at).is_some_and(|c| white(*c)) {
                at += 1;
            }
            at
        };
        let mut name = blank(at + 1);
        if chars.get(name) == Some(&'/') {
            name = blank(name + 1);
        }
        let blocked = chars[at] == '<'
            && BLOCKED_TAGS.iter().any(|tag| {
                let end = name + tag.chars().count();
                end <= chars.len()
                    && chars[name..end].iter().copied().map(fold).eq(tag.chars())
                    && !chars.get(end).is_some_and(|c| word(*c))
            });
        if blocked {
            let end =
                chars[at..].iter().position(|c| *c == '>').map_or(chars.len(), |n| at + n + 1);
            for c in &chars[at..end] {
                match c {
                    '<' => done.push_str("&lt;"),
                    '>' => done.push_str("&gt;"),
                    c => done.push(*c),
                }
            }
            at = end;
        } else {
            done.push(chars[at]);
            at += 1;
        }
    }
    done.replace("--- BEGIN USER INPUT ---", "[BEGIN USER INPUT]")
        .replace("--- END USER INPUT ---", "[END USER INPUT]")
}

/// Whether it is a letter or a numeric, by general category.
fn is_letter_or_number(c: char) -> bool {
    static LETTER: LazyLock<Regex> = LazyLock::new(|| Regex::new(r"\A[\p{L}\p{N}]\z").unwrap());
    LETTER.is_match(c.encode_utf8(&mut [0; 4]))
}

#[test]
#[ignore = "takes minutes: make long"]
fn long_fuzz_normalization() {
    let list = |random: &mut StdRng| -> Vec<String> {
        (0..random.random_range(1..4)).map(|_| text(random)).collect()
    };
    fuzz("normalization", list, |texts| {
        for text in texts {
            assert_eq!(neutralize(text), neutralize_by_hand(text));
        }
        let stored = normalize(texts);
        assert_eq!(normalize(stored.iter().flatten()), stored);
        for criterion in stored.iter().flatten() {
            assert!(criterion.chars().count() <= MAX_CRITERION_CHARS);
            assert_eq!(&neutralize_by_hand(criterion), criterion);
        }
    });
}

#[test]
#[ignore = "takes minutes: make long"]
fn long_fuzz_the_matcher_of_commands() {
    let case = |random: &mut StdRng| {
        let wanted = text(random);
        let execution = |random: &mut StdRng| Evidence {
            command: if random.random_bool(0.5) { changed(&wanted, random) } else { text(random) },
            status: [Some("success"), Some("success"), Some("error"), None]
                .choose(random)
                .expect("four")
                .map(str::to_owned),
            output_tail: if random.random_bool(0.7) { "3 passed".into() } else { text(random) },
            command_truncated: random.random_bool(0.1),
            shell_persistent: *[Some(false), Some(false), Some(true), None]
                .choose(random)
                .expect("four"),
            ..Evidence::default()
        };
        let executions: Vec<Evidence> =
            (0..random.random_range(0..4)).map(|_| execution(random)).collect();
        (wanted, executions)
    };
    fuzz("matcher", case, |(wanted, executions)| {
        let criterion = [format!("tests_passed:{wanted}")];
        for directories in [Some(directories("/data/t")), Some(directories(r"C:\t")), None] {
            let judged = |executions: &[Evidence]| {
                judge(&CheckInput {
                    criteria: &criterion,
                    evidence: executions,
                    workspace: Workspace::Unknown,
                    directories: directories.as_ref(),
                    virtual_prefix: DEFAULT_VIRTUAL_PREFIX,
                })
            };
            let answers = judged(executions);
            assert_eq!(judged(executions), answers);
            let Some((leaf, reason)) = answers.first() else { continue };
            assert_ne!(reason.as_str(), "crashed");
            if leaf.finding() == Finding::Holds {
                let matches = |run: &&Evidence| {
                    judged(std::slice::from_ref(*run))[0].1.as_str() != "no_match"
                };
                let newest = executions.iter().rev().find(matches).expect("something matched");
                assert_eq!(newest.status.as_deref(), Some("success"));
                assert_eq!(
                    (newest.shell_persistent, newest.command_truncated),
                    (Some(false), false)
                );
                // Nothing that a shell expands or hides is ever proven.
                assert!(!newest.command.contains(['$', '`', '\\', '#', '^', '\u{a0}', '\0']));
            }
        }
    });
}

/// A command with another one before or behind it, or a word more or less.
fn changed(command: &str, random: &mut StdRng) -> String {
    let piece = PIECES.choose(random).expect("pieces");
    match random.random_range(0..5) {
        0 => command.to_owned(),
        1 => format!("{command} {piece}"),
        2 => format!("{piece} {command}"),
        3 => format!("cd app && {command}"),
        _ => {
            let mut words: Vec<&str> = command.split(' ').collect();
            let at = random.random_range(0..words.len());
            if random.random_bool(0.5) {
                words.insert(at, piece);
            } else {
                words.remove(at);
            }
            words.join(" ")
        }
    }
}

fn directories(root: &str) -> Directories {
    let part = |name: &str| format!("{root}/{name}");
    Directories { workspace: part("workspace"), outputs: part("outputs"), uploads: part("uploads") }
}
