use std::io::{self, BufRead, BufReader, Read, Take};
use std::path::Path;

use indicatif::HumanCount;

use crate::submit::keys::Keys;
use crate::submit::report::{Problem, Report};
use crate::submit::spool::{SpoolWriter, Spooled};
use crate::submit::validate::{self, grouped};

/// How the lines of an input are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// Each line is an object with the members of an item.
    Jsonl,
    /// Each line is an item's key and input.
    Lines,
}

/// The sizes up to which a submission is accepted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SubmitLimits {
    /// Items in a batch; default 1,000,000, at most `i32::MAX`.
    pub items: u32,
    /// Bytes of the whole input; default 16 GiB. It also bounds an input that never ends.
    pub total_bytes: u64,
    /// Bytes of a line without its end; default 2 MiB. One line is held in memory.
    pub line_bytes: usize,
    /// Bytes of the JSON text of an item's input; default 1 MiB.
    pub input_bytes: usize,
    /// Unicode scalar values of an item's key; default 512.
    pub key_chars: usize,
    /// How many problems a report names before it only counts them; default 1,000.
    pub named_problems: usize,
}

impl Default for SubmitLimits {
    fn default() -> Self {
        Self {
            items: 1_000_000,
            total_bytes: 16 << 30,
            line_bytes: 2 << 20,
            input_bytes: 1 << 20,
            key_chars: 512,
            named_problems: 1_000,
        }
    }
}

/// How far the reading of an input has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Physical lines read.
    pub lines: u64,
    /// Lines that are not blank: as many items, if all are valid.
    pub items: u64,
    /// Bytes read.
    pub bytes: u64,
}

/// Why no batch came of an input.
#[derive(Debug, thiserror::Error)]
pub enum SubmitError {
    /// The input is at fault. Correct it and submit it again.
    #[error("{0}")]
    Invalid(Report),
    /// The input could not be read to its end.
    #[error("read the items")]
    Unreadable(#[source] io::Error),
    /// The temporary file could not be written. Make room, or name another folder.
    #[error("write the items to a temporary file")]
    Spool(#[source] io::Error),
}

/// Reads a whole input, validates it and spools its items to an unnamed file in `spool_dir` (none:
/// the system's folder for temporary files).
///
/// `progress` is called every 1,000 lines and at the end. Blocks the thread for as long as the
/// input takes.
///
/// # Errors
/// [`SubmitError::Invalid`] names all that is wrong, up to [`SubmitLimits::named_problems`].
/// Reading goes on after a bad line; it stops where a limit of the whole input is passed.
pub fn read_items(
    mut input: impl Read,
    form: Form,
    limits: &SubmitLimits,
    spool_dir: Option<&Path>,
    progress: &mut dyn FnMut(Progress),
) -> Result<Spooled, SubmitError> {
    let mut lines = Lines::of(&mut input, limits);
    let mut admission = Admission {
        form,
        limits,
        items: 0,
        keys: Keys::default(),
        report: Report::keeping(limits.named_problems),
        spool: SpoolWriter::create(spool_dir).map_err(SubmitError::Spool)?,
    };
    while let Some(line) = lines.next().map_err(SubmitError::Unreadable)? {
        match admission.line(&line) {
            Ok(()) => {}
            Err(Stop::AtLimit) => break,
            Err(Stop::Spool(error)) => return Err(SubmitError::Spool(error)),
        }
        if lines.number.is_multiple_of(1_000) {
            progress(lines.progress(admission.items));
        }
    }
    progress(lines.progress(admission.items));
    admission.finish()
}

/// What is known of an input while it is read.
struct Admission<'a> {
    form: Form,
    limits: &'a SubmitLimits,
    items: u64,
    keys: Keys,
    report: Report,
    spool: SpoolWriter,
}

/// Why nothing more is read.
enum Stop {
    /// A limit of the whole input was passed, which is reported.
    AtLimit,
    Spool(io::Error),
}

impl Admission<'_> {
    fn line(&mut self, line: &Line<'_>) -> Result<(), Stop> {
        let number = line.number;
        match line.content {
            Content::Whole(bytes) => self.whole(number, bytes),
            Content::TooLong => {
                self.count(number)?;
                let most = grouped(self.limits.line_bytes);
                self.refuse(number, format!("longer than {most} bytes"));
                Ok(())
            }
            Content::PastTotal => {
                let most = HumanCount(self.limits.total_bytes);
                Err(self.stop(number, &format!("the input is larger than {most} bytes")))
            }
        }
    }

    fn whole(&mut self, number: u64, mut bytes: &[u8]) -> Result<(), Stop> {
        if number == 1 {
            if bytes.starts_with(b"\xFF\xFE") || bytes.starts_with(b"\xFE\xFF") {
                return Err(self.stop(number, "the input is UTF-16; convert it to UTF-8"));
            }
            bytes = bytes.strip_prefix(b"\xEF\xBB\xBF").unwrap_or(bytes);
        }
        if bytes.trim_ascii().is_empty() {
            return Ok(());
        }
        self.count(number)?;
        match str::from_utf8(bytes) {
            Ok(text) => self.text(number, text),
            Err(error) => {
                self.refuse(number, format!("not UTF-8 at byte {}", error.valid_up_to() + 1));
                Ok(())
            }
        }
    }

    fn text(&mut self, number: u64, text: &str) -> Result<(), Stop> {
        let checked = match self.form {
            Form::Jsonl => validate::json(text, self.limits),
            Form::Lines => validate::plain(text, self.limits),
        };
        if let Some(key) = &checked.key {
            self.keys.note(key, number);
        }
        match checked.item() {
            // After the first problem nothing will be stored, so nothing more is spooled.
            Ok(item) if self.report.is_empty() => self.spool.push(&item).map_err(Stop::Spool)?,
            Ok(_) => {}
            Err(faults) => {
                for fault in faults {
                    self.report.add(Problem::on_line(number, fault.field, fault.message));
                }
            }
        }
        Ok(())
    }

    /// Counts a line that is to be an item, valid or not: so an endless input ends, too.
    fn count(&mut self, line: u64) -> Result<(), Stop> {
        self.items += 1;
        if self.items > self.limits.items.into() {
            let most = HumanCount(self.limits.items.into());
            return Err(self.stop(line, &format!("a batch has at most {most} items")));
        }
        Ok(())
    }

    fn refuse(&mut self, line: u64, message: String) {
        self.report.add(Problem::on_line(line, None, message));
    }

    fn stop(&mut self, line: u64, reason: &str) -> Stop {
        self.refuse(line, format!("{reason}; reading stopped here"));
        Stop::AtLimit
    }

    fn finish(self) -> Result<Spooled, SubmitError> {
        let Self { form, items, keys, mut report, spool, .. } = self;
        report.merge(keys.repeated().into_iter().map(|repeat| match form {
            Form::Jsonl => {
                let message = format!("is already the key of line {}", repeat.first);
                Problem::on_line(repeat.line, Some(validate::KEY), message)
            }
            Form::Lines => {
                let message = format!("the same as line {}; keys are unique", repeat.first);
                Problem::on_line(repeat.line, None, message)
            }
        }));
        if items == 0 && report.is_empty() {
            report.add(Problem::overall("the input holds no items".to_owned()));
        }
        if report.is_empty() {
            spool.finish().map_err(SubmitError::Spool)
        } else {
            Err(SubmitError::Invalid(report))
        }
    }
}

/// Splits an input into physical lines, of which it holds one.
struct Lines<'a> {
    input: BufReader<Take<&'a mut dyn Read>>,
    buffer: Vec<u8>,
    line_bytes: usize,
    total_bytes: u64,
    number: u64,
    bytes: u64,
}

struct Line<'a> {
    number: u64,
    content: Content<'a>,
}

enum Content<'a> {
    /// The line without its end.
    Whole(&'a [u8]),
    /// A line that was passed over.
    TooLong,
    /// The input goes on past its limit somewhere in this line.
    PastTotal,
}

impl<'a> Lines<'a> {
    fn of(input: &'a mut dyn Read, limits: &SubmitLimits) -> Self {
        // One byte past the limit tells an input that reaches it from one that passes it.
        let input = input.take(limits.total_bytes.saturating_add(1));
        Self {
            input: BufReader::with_capacity(64 * 1024, input),
            buffer: Vec::new(),
            line_bytes: limits.line_bytes,
            total_bytes: limits.total_bytes,
            number: 0,
            bytes: 0,
        }
    }

    fn next(&mut self) -> io::Result<Option<Line<'_>>> {
        const LINE_END: usize = b"\r\n".len();

        self.buffer.clear();
        let most = (self.line_bytes + LINE_END) as u64;
        let read = self.input.by_ref().take(most).read_until(b'\n', &mut self.buffer)?;
        if read == 0 {
            return Ok(None);
        }
        let line = match self.buffer.strip_suffix(b"\n") {
            Some(line) => line.strip_suffix(b"\r").unwrap_or(line),
            None => &self.buffer,
        };
        let rest = if read as u64 == most && !self.buffer.ends_with(b"\n") {
            self.input.skip_until(b'\n')?
        } else {
            0
        };
        self.number += 1;
        self.bytes += (read + rest) as u64;
        let content = if self.bytes > self.total_bytes {
            Content::PastTotal
        } else if line.len() > self.line_bytes {
            Content::TooLong
        } else {
            Content::Whole(line)
        };
        Ok(Some(Line { number: self.number, content }))
    }

    const fn progress(&self, items: u64) -> Progress {
        Progress { lines: self.number, items, bytes: self.bytes }
    }
}

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;
    use std::io::Cursor;

    use proptest::prelude::*;

    use super::*;
    use crate::model::NewItem;

    fn read(input: &[u8], form: Form, limits: &SubmitLimits) -> Result<Spooled, SubmitError> {
        read_items(Cursor::new(input), form, limits, None, &mut |_| {})
    }

    fn items(input: &[u8], form: Form) -> Vec<NewItem> {
        let mut spooled = read(input, form, &SubmitLimits::default()).unwrap();
        spooled.items().unwrap().map(Result::unwrap).collect()
    }

    fn keys(input: &[u8], form: Form) -> Vec<String> {
        items(input, form).into_iter().map(|item| item.key).collect()
    }

    fn report(input: &[u8], form: Form, limits: &SubmitLimits) -> Report {
        match read(input, form, limits) {
            Err(SubmitError::Invalid(report)) => report,
            other => panic!("accepted, or another error: {other:?}"),
        }
    }

    fn problems(input: &[u8], form: Form, limits: &SubmitLimits) -> Vec<String> {
        report(input, form, limits).problems().iter().map(ToString::to_string).collect()
    }

    #[test]
    fn lines_end_with_lf_or_crlf_or_the_input_and_blank_ones_are_skipped() {
        for input in
            ["a\nb\nc", "a\r\nb\r\nc\r\n", "\n \t\na\n\r\nb\n\nc\n\n  ", "\u{feff}a\nb\nc\n"]
        {
            assert_eq!(keys(input.as_bytes(), Form::Lines), ["a", "b", "c"], "{input:?}");
        }
    }

    #[test]
    fn a_byte_order_mark_is_skipped_at_the_start_and_nowhere_else() {
        assert_eq!(keys("\u{feff}{\"key\":\"a\",\"input\":1}".as_bytes(), Form::Jsonl), ["a"]);
        assert_eq!(keys("a\n\u{feff}b".as_bytes(), Form::Lines), ["a", "\u{feff}b"]);
    }

    #[test]
    fn every_bad_line_is_named_by_its_physical_number() {
        let input = b"{\"key\":\"a\",\"input\":1}\n\
            \n\
            {\"key\":\"b\"}\r\n\
            [1]\n\
            {\"key\":\"a\",\"input\":\"\xff\"}\n\
            {\"key\":\"a\",\"input\":2,\"extra\":3}\n\
            {\"key\":\"c\",\"input\":3}\n\
            {\"key\":\"b\",\"input\":4}";
        assert_eq!(
            problems(input, Form::Jsonl, &SubmitLimits::default()),
            [
                "line 3: \"input\": missing",
                "line 4: expected an object, found an array; each line is one item",
                "line 5: not UTF-8 at byte 21",
                "line 6: unknown member \"extra\"; an item has key, input, acceptance_criteria and \
                 not_before",
                "line 6: \"key\": is already the key of line 1",
                "line 8: \"key\": is already the key of line 3",
            ]
        );
    }

    #[test]
    fn repeated_plain_lines_are_named_with_the_first() {
        let problems = problems(b"a\nb\n\na\na", Form::Lines, &SubmitLimits::default());
        let again = [
            "line 4: the same as line 1; keys are unique",
            "line 5: the same as line 1; keys are unique",
        ];
        assert_eq!(problems, again);
    }

    #[test]
    fn an_input_without_items_is_refused() {
        for input in ["", "\n", " \r\n\n\t", "\u{feff}"] {
            for form in [Form::Jsonl, Form::Lines] {
                let problems = problems(input.as_bytes(), form, &SubmitLimits::default());
                assert_eq!(problems, ["the input holds no items"], "{input:?}");
            }
        }
    }

    #[test]
    fn utf_16_is_named_as_such() {
        for start in [b"\xff\xfea\0\n\0", b"\xfe\xff\0a\0\n"] {
            let problems = problems(start, Form::Lines, &SubmitLimits::default());
            let utf_16 = "line 1: the input is UTF-16; convert it to UTF-8; reading stopped here";
            assert_eq!(problems, [utf_16]);
        }
    }

    #[test]
    fn a_line_is_accepted_up_to_its_limit_whatever_ends_it() {
        let limits = SubmitLimits { line_bytes: 4, ..SubmitLimits::default() };
        for end in ["", "\n", "\r\n"] {
            let fits = format!("1234{end}");
            assert_eq!(read(fits.as_bytes(), Form::Lines, &limits).unwrap().item_count(), 1);
            for long in ["12345", "123456", "1234567", "12345678901234567890"] {
                let input = format!("a\n{long}{end}");
                let problems = problems(input.as_bytes(), Form::Lines, &limits);
                assert_eq!(problems, ["line 2: longer than 4 bytes"], "{input:?}");
            }
        }
    }

    #[test]
    fn reading_goes_on_after_a_line_that_is_too_long() {
        let limits = SubmitLimits { line_bytes: 4, ..SubmitLimits::default() };
        let input = format!("{}\na\na\n", "x".repeat(1_000_000));
        let expected =
            ["line 1: longer than 4 bytes", "line 3: the same as line 2; keys are unique"];
        assert_eq!(problems(input.as_bytes(), Form::Lines, &limits), expected);
    }

    #[test]
    fn one_item_more_than_a_batch_may_have_ends_the_reading() {
        let limits = SubmitLimits { items: 2, ..SubmitLimits::default() };
        assert_eq!(read(b"a\n\nb\n\n", Form::Lines, &limits).unwrap().item_count(), 2);

        let endless =
            io::repeat(b'\n').take(3).chain(Cursor::new(b"a\nb\n")).chain(Endless(b"c\n"));
        let result = read_items(endless, Form::Lines, &limits, None, &mut |_| {});

        let Err(SubmitError::Invalid(report)) = result else { panic!("{result:?}") };
        let problem = "line 6: a batch has at most 2 items; reading stopped here";
        assert_eq!(report.problems()[0].to_string(), problem);
    }

    #[test]
    fn an_endless_input_ends_at_the_limit_of_the_whole() {
        let limits = SubmitLimits { total_bytes: 100_000, ..SubmitLimits::default() };
        for endless in [io::repeat(b'\n'), io::repeat(b'x')] {
            let result = read_items(endless, Form::Lines, &limits, None, &mut |_| {});
            let Err(SubmitError::Invalid(report)) = result else { panic!("{result:?}") };
            let text = report.problems()[0].message();
            assert_eq!(text, "the input is larger than 100,000 bytes; reading stopped here");
        }

        let limits = SubmitLimits { total_bytes: 4, ..SubmitLimits::default() };
        assert_eq!(read(b"a\nb\n", Form::Lines, &limits).unwrap().item_count(), 2);
        assert_eq!(problems(b"a\nb\nc", Form::Lines, &limits).len(), 1);
    }

    #[test]
    fn problems_past_the_limit_are_counted() {
        let limits = SubmitLimits { named_problems: 3, ..SubmitLimits::default() };
        let report = report("x\n".repeat(5000).as_bytes(), Form::Jsonl, &limits);
        assert_eq!((report.problems().len(), report.total()), (3, 5000));
    }

    #[test]
    fn progress_is_told_on_the_way_and_at_the_end() {
        let mut input = String::new();
        (0..2500).for_each(|n| writeln!(input, "{n}\n").unwrap());
        let mut told = Vec::new();
        let limits = SubmitLimits::default();
        read_items(Cursor::new(&input), Form::Lines, &limits, None, &mut |p| told.push(p)).unwrap();

        let lines: Vec<u64> = told.iter().map(|progress| progress.lines).collect();
        assert_eq!(lines, [1000, 2000, 3000, 4000, 5000, 5000]);
        let end = Progress { lines: 5000, items: 2500, bytes: input.len() as u64 };
        assert_eq!(told.last(), Some(&end));
    }

    #[test]
    fn a_failing_source_is_unreadable() {
        let result = read_items(Broken, Form::Lines, &SubmitLimits::default(), None, &mut |_| {});
        assert!(matches!(result, Err(SubmitError::Unreadable(_))), "{result:?}");
    }

    #[test]
    fn a_missing_folder_is_a_fault_of_the_spool() {
        let nowhere = Some(Path::new("/nonexistent"));
        let result =
            read_items(&b"a"[..], Form::Lines, &SubmitLimits::default(), nowhere, &mut |_| {});
        assert!(matches!(result, Err(SubmitError::Spool(_))), "{result:?}");
    }

    struct Endless(&'static [u8]);

    impl Read for Endless {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            let most = self.0.len().min(buffer.len());
            buffer[..most].copy_from_slice(&self.0[..most]);
            Ok(most)
        }
    }

    struct Broken;

    impl Read for Broken {
        fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
            Err(io::Error::other("the disk is gone"))
        }
    }

    /// Hands out a few bytes at a time, as pipes and sockets do.
    struct Dripping<'a>(&'a [u8], usize);

    impl Read for Dripping<'_> {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            let most = self.1.min(buffer.len());
            self.0.read(&mut buffer[..most])
        }
    }

    /// Bytes in which JSON, faults in it and odd line ends are likely.
    fn bytes() -> impl Strategy<Value = Vec<u8>> {
        let part = prop_oneof![
            Just(b"\n".to_vec()),
            Just(b"\r\n".to_vec()),
            Just(b"{\"key\":\"".to_vec()),
            Just(b"\",\"input\":".to_vec()),
            Just(b"\"acceptance_criteria\":[".to_vec()),
            Just(b"\"not_before\":\"2030-01-31T08:00:00Z\"".to_vec()),
            Just(b"\\ud800".to_vec()),
            Just(b"\\u00".to_vec()),
            Just(b"\xef\xbb\xbf".to_vec()),
            proptest::sample::select(&b"{}[]\",:\\u0"[..]).prop_map(|byte| vec![byte]),
            proptest::collection::vec(any::<u8>(), 0..8),
        ];
        proptest::collection::vec(part, 0..40).prop_map(|parts| parts.concat())
    }

    proptest! {
        #[test]
        fn any_bytes_are_items_or_problems(bytes in bytes(), lines: bool, limit in 0_usize..64) {
            let form = if lines { Form::Lines } else { Form::Jsonl };
            let limits = SubmitLimits { line_bytes: limit, ..SubmitLimits::default() };
            match read(&bytes, form, &limits) {
                Ok(spooled) => prop_assert!(spooled.item_count() > 0),
                Err(SubmitError::Invalid(report)) => {
                    prop_assert!(report.total() > 0);
                    prop_assert!(report.to_string().lines().all(|l| !l.contains(char::is_control)));
                }
                Err(other) => prop_assert!(false, "{other:?}"),
            }
        }

        #[test]
        fn items_come_out_as_they_went_in_however_they_arrive(
            inputs in proptest::collection::vec(any::<Option<String>>(), 1..30),
            step in 1_usize..20,
            crlf: bool,
        ) {
            let end = if crlf { "\r\n" } else { "\n" };
            let mut jsonl = String::new();
            let mut expected = Vec::new();
            for (n, input) in inputs.iter().enumerate() {
                // U+0000 is refused, which is another test's matter.
                let input = input.as_ref().map(|text| text.replace('\0', "0"));
                let input = serde_json::to_string(&input).unwrap();
                write!(jsonl, "{{\"key\":\"{n}\", \"input\": {input}}}{end}").unwrap();
                expected.push((i32::try_from(n).unwrap(), n.to_string(), input));
            }
            let source = Dripping(jsonl.as_bytes(), step);
            let limits = SubmitLimits::default();
            let mut spooled = read_items(source, Form::Jsonl, &limits, None, &mut |_| {}).unwrap();

            let got: Vec<_> = spooled
                .items()
                .unwrap()
                .map(Result::unwrap)
                .map(|item| (item.position.get(), item.key, item.input))
                .collect();
            prop_assert_eq!(got, expected);
        }
    }
}
