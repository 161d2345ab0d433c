//! Argument templates: the item's data put into the words of a queue's `argv`, once.

use std::ffi::{CString, NulError};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use super::InvalidCommand;
use crate::execute::Job;

/// What stands for item data in a word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Slot {
    Input,
    InputFile,
    Key,
    Position,
    Attempt,
}

const SLOTS: [(&str, Slot); 5] = [
    ("{input}", Slot::Input),
    ("{input_file}", Slot::InputFile),
    ("{key}", Slot::Key),
    ("{position}", Slot::Position),
    ("{attempt}", Slot::Attempt),
];

#[derive(Debug, PartialEq, Eq)]
enum Part {
    Text(String),
    Slot(Slot),
}

/// An argument vector with slots.
#[derive(Debug)]
pub(super) struct Template {
    words: Vec<Vec<Part>>,
}

/// What goes into the slots.
pub(super) struct Values<'a> {
    /// The item.
    pub(super) job: &'a Job,
    /// Its input as text.
    pub(super) input: &'a str,
    /// The file that holds it.
    pub(super) input_file: &'a Path,
}

impl Template {
    pub(super) fn parse(argv: &[String]) -> Result<Self, InvalidCommand> {
        let program = argv.first().filter(|word| !word.is_empty());
        let program = program.ok_or(InvalidCommand::NoProgram)?;
        if let Some(word) = argv.iter().find(|word| word.contains('\0')) {
            return Err(InvalidCommand::Nul(word.clone()));
        }
        let words: Vec<_> = argv.iter().map(|word| parse_word(word)).collect();
        if words[0].iter().any(|part| matches!(part, Part::Slot(_))) {
            return Err(InvalidCommand::ProgramFromData(program.clone()));
        }
        Ok(Self { words })
    }

    /// Whether the input has to be in a file.
    pub(super) fn uses_input_file(&self) -> bool {
        self.uses(Slot::InputFile)
    }

    /// Whether no word carries the input.
    pub(super) fn leaves_input_to_stdin(&self) -> bool {
        !self.uses(Slot::Input) && !self.uses(Slot::InputFile)
    }

    fn uses(&self, slot: Slot) -> bool {
        self.words.iter().flatten().any(|part| *part == Part::Slot(slot))
    }

    /// The argument vector of one item.
    ///
    /// # Errors
    /// When the data holds a NUL character, which no argument can.
    pub(super) fn render(&self, values: &Values<'_>) -> Result<Vec<CString>, NulError> {
        self.words.iter().map(|word| render_word(word, values)).collect()
    }
}

fn parse_word(word: &str) -> Vec<Part> {
    let mut parts = Vec::new();
    let mut text = String::new();
    let mut rest = word;
    while let Some(next) = rest.chars().next() {
        if let Some((name, slot)) = SLOTS.iter().find(|(name, _)| rest.starts_with(name)) {
            if !text.is_empty() {
                parts.push(Part::Text(std::mem::take(&mut text)));
            }
            parts.push(Part::Slot(*slot));
            rest = &rest[name.len()..];
        } else {
            text.push(next);
            rest = &rest[next.len_utf8()..];
        }
    }
    if !text.is_empty() {
        parts.push(Part::Text(text));
    }
    parts
}

fn render_word(word: &[Part], values: &Values<'_>) -> Result<CString, NulError> {
    let mut bytes = Vec::new();
    for part in word {
        match part {
            Part::Text(text) => bytes.extend_from_slice(text.as_bytes()),
            Part::Slot(Slot::Input) => bytes.extend_from_slice(values.input.as_bytes()),
            Part::Slot(Slot::InputFile) => {
                bytes.extend_from_slice(values.input_file.as_os_str().as_bytes());
            }
            Part::Slot(Slot::Key) => bytes.extend_from_slice(values.job.key.as_bytes()),
            Part::Slot(Slot::Position) => {
                bytes.extend_from_slice(values.job.item.position().to_string().as_bytes());
            }
            Part::Slot(Slot::Attempt) => {
                bytes.extend_from_slice(values.job.attempt.to_string().as_bytes());
            }
        }
    }
    CString::new(bytes)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::tests::job;
    use super::*;

    fn rendered(argv: &[&str], input: &str) -> Vec<String> {
        let argv: Vec<_> = argv.iter().map(|&word| word.to_owned()).collect();
        let job = job(r#""unused""#);
        let values = Values { job: &job, input, input_file: Path::new("/tmp/x/input") };
        let words = Template::parse(&argv).unwrap().render(&values).unwrap();
        words.into_iter().map(|word| word.into_string().unwrap()).collect()
    }

    #[test]
    fn slots_take_the_data_of_the_item() {
        let argv = ["p", "{input}", "--in={input_file}", "{key}:{position}.{attempt}", ""];
        assert_eq!(
            rendered(&argv, "a b;$(c)\n"),
            ["p", "a b;$(c)\n", "--in=/tmp/x/input", "the key:7.2", ""]
        );
    }

    #[test]
    fn other_braces_stay() {
        for word in ["{", "}", "{}", "{Input}", "{ input}", "{input", "{ir}", "é{ü}"] {
            assert_eq!(rendered(&["awk", word], "x")[1], word);
        }
        assert_eq!(rendered(&["awk", "{{input}}"], "x")[1], "{x}");
    }

    #[test]
    fn data_is_never_expanded_again() {
        let data = "{key}{input}{input_file}{position}";
        assert_eq!(rendered(&["p", "<{input}{input}>"], data)[1], format!("<{data}{data}>"));
        // Data and template together must not make a slot either.
        assert_eq!(rendered(&["p", "{in{input}}"], "put")[1], "{input}");
    }

    #[test]
    fn the_input_goes_to_one_place() {
        for (word, stdin, file) in [
            ("x", true, false),
            ("{key}", true, false),
            ("{input}", false, false),
            ("{input_file}", false, true),
        ] {
            let template = Template::parse(&["p".to_owned(), word.to_owned()]).unwrap();
            assert_eq!(template.leaves_input_to_stdin(), stdin, "{word}");
            assert_eq!(template.uses_input_file(), file, "{word}");
        }
    }

    #[test]
    fn a_program_is_named_and_never_made_of_data() {
        let parse = |argv: &[&str]| {
            let argv: Vec<_> = argv.iter().map(|&word| word.to_owned()).collect();
            Template::parse(&argv).map(|_| ())
        };
        assert_eq!(parse(&[]), Err(InvalidCommand::NoProgram));
        assert_eq!(parse(&[""]), Err(InvalidCommand::NoProgram));
        assert_eq!(
            parse(&["/bin/{key}"]),
            Err(InvalidCommand::ProgramFromData("/bin/{key}".to_owned()))
        );
        assert_eq!(parse(&["p", "a\0"]), Err(InvalidCommand::Nul("a\0".to_owned())));
        assert_eq!(parse(&["p", "{input}"]), Ok(()));
    }

    #[test]
    fn data_with_nul_is_no_argument() {
        let job = job("0");
        let values = Values { job: &job, input: "a\0b", input_file: Path::new("/f") };
        let template = Template::parse(&["p".to_owned(), "{input}".to_owned()]).unwrap();
        assert!(template.render(&values).is_err());
    }

    proptest! {
        #[test]
        fn one_word_stays_one_word_with_the_data_in_it(
            before in "[^{}\\x00]{0,8}", input in "[^\\x00]{0,40}", after in "[^{}\\x00]{0,8}",
        ) {
            let word = format!("{before}{{input}}{after}");
            let words = rendered(&["p", &word], &input);
            prop_assert_eq!(words, ["p".to_owned(), format!("{before}{input}{after}")]);
        }
    }
}
