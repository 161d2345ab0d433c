//! What words a test command's arguments are: options, their values, exclusions and targets
//! (`acceptance.md` 1.6, M6 and M8).

use std::sync::LazyLock;

use regex::Regex;

use super::shell::Word;

/// Options whose value names what does not run.
const EXCLUDING: [&str; 7] = [
    "--ignore",
    "--ignore-glob",
    "--deselect",
    "--exclude",
    "--exclude-glob",
    "--skip",
    "--skip-file",
];

/// Options that take the next word as their value; the excluding ones do so too.
const VALUE_TAKING: [&str; 16] = [
    "-k",
    "-m",
    "-c",
    "-p",
    "-n",
    "-r",
    "--maxfail",
    "--junitxml",
    "--basetemp",
    "--cov",
    "--cov-report",
    "--durations-min",
    "--capture",
    "--tb",
    "--color",
    "--dist",
];

/// Words whose next positional argument is the program they run, not a selection of tests.
static RUNS_NEXT: LazyLock<Regex> = LazyLock::new(|| {
    Regex::new(
        r"^(?:(?:python|pypy|ruby|perl|php|node|deno|bun|tsx|ts-node|java|env|time|nice|sudo|(?:ba|da|z|k|fi)?sh)[0-9.]*|run|exec)$",
    )
    .expect("a constant pattern")
});

/// Options that change how a run is shown or how fast it goes, and not which tests run.
static HARMLESS: LazyLock<Regex> = LazyLock::new(|| {
    Regex::new(
        r"^(?:-[vqxsl]+|--verbose|--quiet|--capture=\S+|--tb=\S+|--color=\S+|--durations(?:=\S+)?|--durations-min=\S+|--disable-warnings|--junitxml=\S+|--basetemp=\S+|--dist=\S+|--cov(?:=\S*)?|--cov-report=\S+|--strict-markers|--strict-config|--exitfirst|--showlocals|--maxfail=[0-9]+|--no-header|--no-summary)$",
    )
    .expect("a constant pattern")
});

/// Options of pytest alone: which outcomes it reports at the end, and how many processes it uses.
static HARMLESS_TO_PYTEST: LazyLock<Regex> =
    LazyLock::new(|| Regex::new(r"^(?:-r[fEsxXpPwaAN]*|-n[0-9]*)$").expect("a constant pattern"));

/// One argument of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Argument<'a> {
    /// Any word but the next kind.
    Word(&'a str),
    /// An excluding option with its value.
    Exclusion(Exclusion<'a>),
}

/// An excluding option as spelled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Exclusion<'a> {
    pub(super) option: &'a str,
    /// What it excludes; none when the command ends with the option.
    pub(super) value: Option<&'a str>,
    /// Whether the value stands in the same word, after `=`.
    glued: bool,
}

/// The arguments of a segment without its executable. Behind `--` nothing is an option any more.
pub(super) fn arguments(words: &[Word]) -> Vec<Argument<'_>> {
    let mut rest = words.iter().map(|word| word.text.as_str());
    let mut arguments = Vec::new();
    while let Some(word) = rest.next() {
        if word == "--" {
            arguments.push(Argument::Word(word));
            arguments.extend(rest.by_ref().map(Argument::Word));
        } else if EXCLUDING.contains(&word) {
            let value = rest.next();
            arguments.push(Argument::Exclusion(Exclusion { option: word, value, glued: false }));
        } else if let Some((option, value)) =
            word.split_once('=').filter(|(option, _)| EXCLUDING.contains(option))
        {
            let value = Some(value);
            arguments.push(Argument::Exclusion(Exclusion { option, value, glued: true }));
        } else {
            arguments.push(Argument::Word(word));
        }
    }
    arguments
}

/// Whether a word is an option, as long as no `--` came before it.
pub(super) fn is_option(word: &str) -> bool {
    word.starts_with('-')
}

/// Whether an option takes the following word as its value, or may.
pub(super) fn may_take_a_value(option: &str) -> bool {
    is_option(option) && !option.contains('=') && !takes_no_value(option)
}

/// Whether a word is an option known to be complete in itself.
pub(super) fn takes_no_value(option: &str) -> bool {
    HARMLESS.is_match(option) && !["--cov", "--durations"].contains(&option)
}

/// Where the first argument stands that names a selection of tests by path; none when there is none,
/// or when an unknown option may have taken it for its value.
pub(super) fn first_target(executable: &str, arguments: &[Argument<'_>]) -> Option<usize> {
    let mut options_ended = false;
    let mut module_named = false;
    let mut previous = executable;
    let mut first = None;
    let mut rest = arguments.iter().enumerate().peekable();
    while let Some((at, argument)) = rest.next() {
        let Argument::Word(word) = *argument else { continue };
        if !options_ended && word == "--" {
            options_ended = true;
        } else if !options_ended && is_option(word) {
            module_named |= word == "-m";
            if VALUE_TAKING.contains(&word) {
                rest.next();
            } else if let Some((_, Argument::Word(next))) = rest.peek()
                && !word.contains('=')
                && !is_option(next)
                && is_path_like(next)
            {
                return None;
            }
        } else {
            let is_program = !module_named && RUNS_NEXT.is_match(last_component(previous));
            if is_path_like(word) && !is_program && first.is_none() {
                first = Some(at);
            }
            previous = word;
        }
    }
    first
}

fn is_path_like(word: &str) -> bool {
    const SOURCES: [&str; 10] =
        [".py", ".js", ".jsx", ".ts", ".tsx", ".go", ".rs", ".java", ".rb", ".php"];
    word.contains(['/', '\\']) || SOURCES.iter().any(|source| word.ends_with(source))
}

/// The last component of a path, by either separator.
pub(super) fn last_component(path: &str) -> &str {
    path.rsplit(['/', '\\']).next().unwrap_or(path)
}

/// What kind of program a command is, as far as it changes the meaning of short options.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Runner {
    Pytest,
    /// Has a dry run (`-n`), a question (`-q`) and a version (`-v`) among its short options.
    Make,
    Other,
}

impl Runner {
    pub(super) fn of(words: &[Word]) -> Self {
        let is_pytest = |word: &Word| ["pytest", "py.test"].contains(&last_component(&word.text));
        let executable = words.first().map_or("", |word| last_component(&word.text));
        if executable.ends_with("make") {
            Self::Make
        } else if words.iter().any(is_pytest) {
            Self::Pytest
        } else {
            Self::Other
        }
    }
}

/// Whether an extra option, followed by an extra word or not, keeps the selection of tests.
///
/// `follower` is the next word of the command if it is no option, and whether the criterion demands
/// that word: then the option may have taken it for its value.
pub(super) fn is_harmless(runner: Runner, option: &str, follower: Option<(&str, bool)>) -> bool {
    let known = match runner {
        Runner::Make => option == "--quiet" || option == "-s",
        Runner::Pytest => HARMLESS.is_match(option) || HARMLESS_TO_PYTEST.is_match(option),
        Runner::Other => HARMLESS.is_match(option),
    };
    let takes = |is_value: fn(char) -> bool| {
        follower.is_some_and(|(word, demanded)| !demanded && word.chars().all(is_value))
    };
    known
        && match option {
            "-n" | "--durations" if follower.is_some() => takes(|c| c.is_ascii_digit()),
            "-r" if follower.is_some() => takes(|c| "fEsxXpPwaAN".contains(c)),
            "-n" | "-r" => false,
            "--cov" => follower.is_none_or(|(_, demanded)| !demanded),
            _ => true,
        }
}

#[cfg(test)]
mod tests {
    use super::super::shell;
    use super::*;

    fn target(command: &str) -> Option<String> {
        let line = shell::parse(command).unwrap();
        let words = &line.segments[0];
        let arguments = arguments(&words[1..]);
        first_target(&words[0].text, &arguments).map(|at| match arguments[at] {
            Argument::Word(word) => word.to_owned(),
            Argument::Exclusion(_) => panic!("an exclusion is no target"),
        })
    }

    #[test]
    fn a_target_is_a_positional_path() {
        assert_eq!(target("pytest spec/a"), Some("spec/a".to_owned()));
        assert_eq!(target("pytest -k spec/a b.py"), Some("b.py".to_owned()));
        assert_eq!(target("pytest --basetemp=/p/x"), None);
        assert_eq!(target("make check"), None);
        assert_eq!(target("pytest --ignore spec/a"), None);
    }

    #[test]
    fn an_unknown_option_may_own_the_path_behind_it() {
        assert_eq!(target("pytest --rootdir spec/a spec/b"), None);
        assert_eq!(target("pytest --rootdir spec spec/b"), Some("spec/b".to_owned()));
        assert_eq!(target("pytest -- spec/b"), Some("spec/b".to_owned()));
    }

    #[test]
    fn the_program_an_interpreter_runs_is_no_target() {
        assert_eq!(target("python manage.py test"), None);
        assert_eq!(target("python3.12 manage.py test app/a"), Some("app/a".to_owned()));
        assert_eq!(target("python -m pytest spec/a"), Some("spec/a".to_owned()));
        assert_eq!(target("go run ./cmd/suite"), None);
        assert_eq!(target("uv run python manage.py test"), None);
        assert_eq!(target("uv run pytest spec/a"), Some("spec/a".to_owned()));
    }
}
