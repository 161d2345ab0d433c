//! Whether a recorded command is the one a criterion demands (`acceptance.md` 1.6, M1 to M8 and
//! control flow). What cannot be proven is said to be unprovable, never guessed.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use regex::Regex;

use super::options::{
    Argument, Exclusion, Runner, arguments, first_target, is_harmless, is_option, last_component,
    may_take_a_value, takes_no_value,
};
use super::overlap::{has_parent, is_textual_prefix, overlap};
use super::scope::Scope;
use super::shell::{CommandLine, Segment, Word, depends_on_the_shell, fold_blanks, parse};

/// How a recorded command ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ending {
    Success,
    Failure,
    /// Not recorded in a form that says so.
    Unknown,
}

/// How a recorded command relates to the demanded one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Match {
    No,
    Unprovable,
    /// It ran it, as its last segments.
    Proven(Run),
}

/// A recorded command that ran the demanded one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Run {
    line: CommandLine,
    start: usize,
}

impl Run {
    /// The segments that ran before it and are not part of the criterion.
    pub(super) fn earlier(&self) -> &[Segment] {
        &self.line.segments[..self.start]
    }

    /// The segment whose status and output were recorded.
    pub(super) fn last(&self) -> &Segment {
        self.line.segments.last().expect("a match has a segment")
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pair {
    No,
    Unprovable,
    Yes,
}

/// Compares the criterion's command with a recorded one that ended as `ending` says.
pub(super) fn match_command(
    demanded: &str,
    recorded: &str,
    ending: Ending,
    scope: &Scope<'_>,
) -> Match {
    let (Some(wanted), Some(ran)) = (parse(demanded), parse(recorded)) else {
        // No shell ran what cannot be split, so even the same text proves nothing.
        let same = fold_blanks(demanded) == fold_blanks(recorded);
        return if same { Match::Unprovable } else { Match::No };
    };
    let span = wanted.segments.len();
    if span == 0 || span > ran.segments.len() {
        return Match::No;
    }
    let start = ran.segments.len() - span;
    match pair_window(&wanted.segments, &ran.segments[start..], scope.windows) {
        Pair::Yes => {}
        Pair::Unprovable => return Match::Unprovable,
        Pair::No => {
            // The status belongs to the last segments, so a run before them proves nothing.
            let ran_earlier = ran.segments[..ran.segments.len() - 1]
                .windows(span)
                .any(|window| pair_window(&wanted.segments, window, scope.windows) != Pair::No);
            return if ran_earlier { Match::Unprovable } else { Match::No };
        }
    }
    let run = Run { start, line: ran };
    let provable = !wanted.begins_with_operator
        && !run.line.begins_with_operator
        && !depends_on_the_shell(demanded, &wanted)
        && !depends_on_the_shell(recorded, &run.line)
        && !single_quotes_matter(&wanted, &run, scope)
        && !run.earlier().iter().any(changes_environment)
        && flow_is_proven(&wanted, &run, ending);
    if provable { Match::Proven(run) } else { Match::Unprovable }
}

/// One shell passes single quotes on, so a word in them is not known where it decides something.
fn single_quotes_matter(wanted: &CommandLine, run: &Run, scope: &Scope<'_>) -> bool {
    let quoted = |segment: &Segment| segment.iter().any(|word| word.single_quoted);
    wanted.segments.iter().any(quoted)
        || run.line.segments[run.start..].iter().any(quoted)
        || run.earlier().iter().any(|segment| quoted(segment) && scope.is_silent(segment))
}

/// Whether an earlier segment changes variables that the run sees.
fn changes_environment(segment: &Segment) -> bool {
    is_assignment(&segment[0].text)
        || segment.len() > 1 && ["export", "unset"].contains(&segment[0].text.as_str())
}

/// Whether the recorded status is provably the run's own, and the criterion's order was kept.
fn flow_is_proven(wanted: &CommandLine, run: &Run, ending: Ending) -> bool {
    let succeeded = ending == Ending::Success;
    let span = wanted.segments.len();
    let operators = &run.line.operators;
    let before = &operators[..run.start];
    let within = &operators[run.start..run.start + span - 1];
    let after = &operators[run.start + span - 1..];
    let demanded = &wanted.operators[..span - 1];
    let demanded_after = &wanted.operators[span - 1..];
    before.iter().all(|operator| match operator.as_str() {
        ";" | "|" | "|&" => true,
        "&&" => succeeded,
        "||" => ending == Ending::Failure,
        _ => false,
    }) && within.iter().zip(demanded).all(|(ran, wanted)| match ran.as_str() {
        ";" => wanted == ";",
        "&&" => succeeded && (wanted == "&&" || wanted == ";"),
        _ => false,
    }) && after.iter().chain(demanded_after).all(|operator| operator == ";")
}

fn pair_window(wanted: &[Segment], ran: &[Segment], windows: bool) -> Pair {
    let mut all = Pair::Yes;
    for (wanted, ran) in wanted.iter().zip(ran) {
        match pair_segments(wanted, ran, windows) {
            Pair::No => return Pair::No,
            Pair::Unprovable => all = Pair::Unprovable,
            Pair::Yes => {}
        }
    }
    all
}

/// M1 to M8, in their order.
fn pair_segments(wanted: &[Word], ran: &[Word], windows: bool) -> Pair {
    let (wanted_variables, wanted_words) = split_assignments(wanted);
    let (ran_variables, ran_words) = split_assignments(ran);
    if wanted_variables != ran_variables {
        return Pair::Unprovable; // M1: no variable is without effect on every test
    }
    let (Some(wanted_program), Some(ran_program)) = (wanted_words.first(), ran_words.first())
    else {
        return Pair::No; // M2
    };
    if wanted.iter().chain(ran).any(|word| word.text.contains(['$', '`'])) {
        return Pair::Unprovable; // M3: what it expands to was not recorded
    }
    let program = pair_executables(&wanted_program.text, &ran_program.text);
    if program != Pair::Yes {
        return program;
    }
    let wanted_arguments = arguments(&wanted_words[1..]);
    let ran_arguments = arguments(&ran_words[1..]);
    let Some(places) = places_in_order(&wanted_arguments, &ran_arguments) else {
        return Pair::No; // M5
    };
    let pairing = Pairing {
        target: first_target(&wanted_program.text, &wanted_arguments).map(|at| places[at]),
        wanted: &wanted_arguments,
        ran: &ran_arguments,
        places: &places,
        runner: Runner::of(wanted_words),
        windows,
    };
    if pairing.exclusions_are_elsewhere() && pairing.values_are_kept() && pairing.extras_widen() {
        Pair::Yes
    } else {
        Pair::Unprovable
    }
}

static ASSIGNMENT: LazyLock<Regex> =
    LazyLock::new(|| Regex::new(r"^[A-Za-z_][A-Za-z0-9_]*\+?=").expect("a constant pattern"));

fn is_assignment(word: &str) -> bool {
    ASSIGNMENT.is_match(word)
}

/// The variables set in front of a command, the last value of each, and the words behind them.
fn split_assignments(words: &[Word]) -> (BTreeMap<&str, &str>, &[Word]) {
    let count = words.iter().take_while(|word| is_assignment(&word.text)).count();
    let (assignments, rest) = words.split_at(count);
    (assignments.iter().filter_map(|word| word.text.split_once('=')).collect(), rest)
}

/// M4: a bare name trusts the search path; a spelled path names that one program.
fn pair_executables(wanted: &str, ran: &str) -> Pair {
    let is_path = |program: &str| program.contains(['/', '\\']);
    let same = if wanted == ran {
        true
    } else if has_parent(wanted) || has_parent(ran) {
        return Pair::Unprovable;
    } else if is_path(wanted) {
        is_path(ran) && clean(wanted) == clean(ran)
    } else {
        wanted == last_component(ran)
    };
    if same { Pair::Yes } else { Pair::No }
}

/// A path without `.` and doubled separators, and whether it is absolute.
fn clean(path: &str) -> (bool, Vec<&str>) {
    let parts = path.split(['/', '\\']).filter(|part| !part.is_empty() && *part != ".");
    (path.starts_with(['/', '\\']), parts.collect())
}

/// M5: where each demanded argument stands among the executed ones, in order. An exclusion is only
/// found in the same exclusion, so its value never counts for a target.
fn places_in_order(wanted: &[Argument<'_>], ran: &[Argument<'_>]) -> Option<Vec<usize>> {
    let mut rest = ran.iter().enumerate();
    wanted
        .iter()
        .map(|wanted| rest.find(|(_, argument)| *argument == wanted).map(|(at, _)| at))
        .collect()
}

/// Two argument lists of which the first stands in the second.
struct Pairing<'a> {
    wanted: &'a [Argument<'a>],
    ran: &'a [Argument<'a>],
    /// Where each wanted argument was found.
    places: &'a [usize],
    /// Where the criterion's first target was found; none when it has no provable target.
    target: Option<usize>,
    runner: Runner,
    windows: bool,
}

impl Pairing<'_> {
    fn is_extra(&self, at: usize) -> bool {
        !self.places.contains(&at)
    }

    /// M6 and M7: no exclusion that the criterion does not make itself touches what it selects.
    fn exclusions_are_elsewhere(&self) -> bool {
        let selected: Vec<&str> = self
            .wanted
            .iter()
            .filter_map(|argument| match argument {
                Argument::Word(word) => Some(*word),
                Argument::Exclusion(_) => None,
            })
            .collect();
        self.ran.iter().enumerate().filter(|(at, _)| self.is_extra(*at)).all(|(_, argument)| {
            match argument {
                Argument::Word(_) => true,
                Argument::Exclusion(exclusion) => {
                    self.target.is_some() && self.is_elsewhere(*exclusion, &selected)
                }
            }
        })
    }

    fn is_elsewhere(&self, exclusion: Exclusion<'_>, selected: &[&str]) -> bool {
        let Some(value) = exclusion.value else { return false };
        !value.contains(['$', '`', '*', '?', '['])
            && !is_option(value)
            && !has_parent(value)
            && !selected.iter().any(|selected| {
                has_parent(selected)
                    || overlap(selected, value, self.windows)
                    || exclusion.option == "--deselect" && is_textual_prefix(value, selected)
            })
    }

    /// Nothing slipped between a demanded option and what follows it, where it could be that
    /// option's value, or could hide that the option has lost its value.
    fn values_are_kept(&self) -> bool {
        self.wanted.iter().zip(self.places).enumerate().all(|(index, (argument, place))| {
            let Argument::Word(option) = argument else { return true };
            let next = place + 1;
            *option == "--"
                || !may_take_a_value(option)
                || self.places.get(index + 1) == Some(&next)
                || match self.ran.get(next) {
                    Some(Argument::Word(word)) => takes_no_value(word),
                    Some(Argument::Exclusion(_)) => false,
                    None => true,
                }
        })
    }

    /// M8: every extra word is harmless: an option that keeps the selection, or a further target.
    fn extras_widen(&self) -> bool {
        self.ran.iter().enumerate().filter(|(at, _)| self.is_extra(*at)).all(|(at, argument)| {
            let Argument::Word(word) = argument else { return true };
            if word.contains(['$', '`', '*', '?', '[']) {
                false
            } else if is_option(word) {
                let follower = match self.ran.get(at + 1) {
                    Some(Argument::Word(next)) if !is_option(next) => {
                        Some((*next, !self.is_extra(at + 1)))
                    }
                    Some(Argument::Word(_) | Argument::Exclusion(_)) | None => None,
                };
                is_harmless(self.runner, word, follower)
            } else {
                // Before the first target it may be a subcommand or a value of something unknown;
                // a variable or a negation changes what runs wherever it stands.
                self.target.is_some_and(|target| target < at)
                    && !is_assignment(word)
                    && !word.starts_with('!')
            }
        })
    }
}
