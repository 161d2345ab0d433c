//! Shell text as words, segments and operators, and the spellings that mean different things to
//! different shells (`acceptance.md` 1.6, parsing and unknown shell).

use std::sync::LazyLock;

use regex::Regex;

/// One word after its quotes are removed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Word {
    pub(super) text: String,
    /// Whether any of it stood in single quotes.
    pub(super) single_quoted: bool,
}

/// Words between operators; never empty.
pub(super) type Segment = Vec<Word>;

/// A command line that could be split.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct CommandLine {
    /// Whether an operator stands before the first word.
    pub(super) begins_with_operator: bool,
    pub(super) segments: Vec<Segment>,
    /// The operator after each segment; the last segment may have none.
    pub(super) operators: Vec<String>,
}

enum Token {
    Word(Word),
    Operator(String),
}

/// Splits a command; none when the quotes of a line do not balance.
pub(super) fn parse(command: &str) -> Option<CommandLine> {
    let mut line = CommandLine::default();
    for text in command.split('\n') {
        let mut open = false;
        for token in tokenize(text)? {
            match token {
                Token::Word(word) if open => {
                    line.segments.last_mut().expect("a segment is open").push(word);
                }
                Token::Word(word) => {
                    // The line before ended without an operator: the line break stands for one.
                    if line.operators.len() < line.segments.len() {
                        line.operators.push(";".to_owned());
                    }
                    line.segments.push(vec![word]);
                    open = true;
                }
                Token::Operator(operator) => {
                    open = false;
                    if line.segments.is_empty() {
                        line.begins_with_operator = true;
                    } else if line.operators.len() < line.segments.len() {
                        line.operators.push(operator);
                    } // else nothing stands between it and the one before, which is kept
                }
            }
        }
    }
    Some(line)
}

fn is_operator(c: char) -> bool {
    matches!(c, ';' | '&' | '|')
}

fn is_blank(c: char) -> bool {
    matches!(c, ' ' | '\t' | '\r')
}

fn tokenize(line: &str) -> Option<Vec<Token>> {
    let mut tokens = Vec::new();
    let mut word: Option<Word> = None;
    let mut chars = line.chars().peekable();
    while let Some(c) = chars.next() {
        if is_blank(c) || is_operator(c) || c == '#' {
            tokens.extend(word.take().map(Token::Word));
            if c == '#' {
                return Some(tokens);
            }
            if is_operator(c) {
                let mut operator = String::from(c);
                while let Some(next) = chars.next_if(|next| is_operator(*next)) {
                    operator.push(next);
                }
                tokens.push(Token::Operator(operator));
            }
            continue;
        }
        let word = word.get_or_insert_default();
        match c {
            '\\' => word.text.push(chars.next()?),
            '\'' => {
                word.single_quoted = true;
                while let Some(inner) = Some(chars.next()?).filter(|inner| *inner != '\'') {
                    word.text.push(inner);
                }
            }
            '"' => {
                while let Some(inner) = Some(chars.next()?).filter(|inner| *inner != '"') {
                    match inner {
                        '\\' if chars.peek().is_some_and(|next| "$`\"\\".contains(*next)) => {
                            word.text.extend(chars.next());
                        }
                        other => word.text.push(other),
                    }
                }
            }
            other => word.text.push(other),
        }
    }
    tokens.extend(word.map(Token::Word));
    Some(tokens)
}

/// How many segments there are for a shell that heeds a quote only where a word begins, and ends the
/// word with it; none when such a quote is not closed.
fn raw_segment_count(command: &str) -> Option<usize> {
    let mut count = 0;
    for line in command.split('\n') {
        let (mut in_segment, mut in_word) = (false, false);
        let mut chars = line.chars();
        while let Some(c) = chars.next() {
            if c == '#' {
                break;
            }
            if is_blank(c) || is_operator(c) {
                in_word = false;
                in_segment &= !is_operator(c);
                continue;
            }
            count += usize::from(!in_segment);
            in_segment = true;
            if !in_word && matches!(c, '"' | '\'') {
                chars.find(|next| *next == c)?;
            } else {
                in_word = true;
            }
        }
    }
    Some(count)
}

/// A brace list or range, a pair of exclamation marks, a pair of percent signs: each is replaced by
/// some shell.
static EXPANDED_SOMEWHERE: LazyLock<Regex> = LazyLock::new(|| {
    Regex::new(r"\{\S*(?:,|\.\.)\S*\}|![^!]*!|%[^%]*%").expect("a constant pattern")
});

/// Whether some shell would read this command differently than it was parsed here. The evidence does
/// not say which shell ran.
pub(super) fn depends_on_the_shell(command: &str, parsed: &CommandLine) -> bool {
    // A line break of two characters separates everywhere; any other control or space does not.
    let shared = command.replace("\r\n", "\n");
    shared.contains(is_foreign)
        || EXPANDED_SOMEWHERE.is_match(&shared)
        || quotes_hide_syntax(&shared)
        || parsed.segments.iter().flatten().any(|word| word.text.starts_with(['~', '@']))
        || raw_segment_count(command) != Some(parsed.segments.len())
}

fn is_foreign(c: char) -> bool {
    let shared_space = matches!(c, ' ' | '\t' | '\n');
    matches!(c, '#' | '^' | '\\' | '\u{2018}'..='\u{201f}')
        || !shared_space && (c.is_whitespace() || c.is_control())
}

/// Whether a parenthesis stands outside all quotes, or control syntax inside single quotes, which
/// one shell does not know.
fn quotes_hide_syntax(command: &str) -> bool {
    let mut quote = None;
    command.chars().any(|c| match (quote, c) {
        (None, '"' | '\'') => {
            quote = Some(c);
            false
        }
        (Some(open), _) if open == c => {
            quote = None;
            false
        }
        (None, '(' | ')') => true,
        (Some('\''), _) => "&|<>()".contains(c),
        (None | Some(_), _) => false,
    })
}

/// The command with every run of blanks as one space, by which commands that cannot be split are
/// compared.
pub(super) fn fold_blanks(command: &str) -> String {
    command.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The segments, and the operators after them.
    fn split(command: &str) -> (Vec<Vec<String>>, Vec<String>) {
        let line = parse(command).expect("balanced quotes");
        let words = |segment: &Segment| segment.iter().map(|word| word.text.clone()).collect();
        (line.segments.iter().map(words).collect(), line.operators)
    }

    fn hazard(command: &str) -> bool {
        depends_on_the_shell(command, &parse(command).expect("balanced quotes"))
    }

    #[test]
    fn quotes_are_removed_and_their_operators_are_text() {
        let (segments, operators) = split(r#"a "b;c" 'd|e' "f\"g" h\ i """#);

        assert_eq!(segments, [["a", "b;c", "d|e", "f\"g", "h i", ""]]);
        assert!(operators.is_empty());
    }

    #[test]
    fn a_line_break_is_a_semicolon_unless_an_operator_stands_beside_it() {
        assert_eq!(split("a\nb").1, [";"]);
        assert_eq!(split("a &&\nb").1, ["&&"]);
        assert_eq!(split("a\n|| b").1, ["||"]);
        assert_eq!(split("a\n||\nb").1, ["||"]);
        assert_eq!(split("a ; && b").1, [";"]);
        assert_eq!(split("\n\na\n\n").1, [""; 0]);
        assert!(!parse("\n\na").unwrap().begins_with_operator);
        assert!(parse("\n; a").unwrap().begins_with_operator);
    }

    #[test]
    fn unbalanced_quotes_cannot_be_split() {
        for command in ["a \"b", "a 'b\nc'", "a\\", "it's"] {
            assert_eq!(parse(command), None, "{command}");
        }
    }

    #[test]
    fn spellings_that_shells_disagree_on_are_told() {
        let hazards = [
            "a # b",
            "a ^b",
            "a \\b",
            "a {b,c}",
            "a {1..3}",
            "a !x!",
            "a %x%",
            "a ~b",
            "a \"@b\"",
            "a (b)",
            "a '(b)'",
            "a \u{201c}b",
            "a\u{a0}b",
            "a\rb",
            "a\r",
            "a\u{b}b",
            "a\u{85}b",
            "a x\"b;c\"",
            "a\u{0}b",
        ];
        for command in hazards {
            assert!(hazard(command), "{command:?}");
        }
        let shared = ["a b", "a\r\nb", "a \"b;c\"", "a {b}", "a b!c", "a 5%", "a \"(b)\"", "a 'b'"];
        for command in shared {
            assert!(!hazard(command), "{command:?}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_split_or_refused(text in any::<String>(), shellish in "[a'\"\\\\;&|# \n]{0,30}") {
            for command in [text, shellish] {
                if let Some(line) = parse(&command) {
                    prop_assert!(line.segments.iter().all(|segment| !segment.is_empty()));
                    prop_assert!(line.operators.len() <= line.segments.len());
                    prop_assert!(line.operators.len() + 1 >= line.segments.len());
                    depends_on_the_shell(&command, &line);
                }
            }
        }
    }
}
