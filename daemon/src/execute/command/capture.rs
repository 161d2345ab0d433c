//! Output kept in bounded memory, and made text.
//!
//! The rule for text: bytes that are not UTF-8 become U+FFFD (as [`String::from_utf8_lossy`] does
//! it), and so does NUL. A character that the limit cuts is left out, not replaced.

/// The first bytes of a stream.
#[derive(Debug)]
pub(super) struct Head {
    kept: Vec<u8>,
    limit: usize,
    total: u64,
}

impl Head {
    pub(super) fn new(limit: usize) -> Self {
        Self { kept: Vec::new(), limit, total: 0 }
    }

    pub(super) fn push(&mut self, bytes: &[u8]) {
        self.total += bytes.len() as u64;
        let room = self.limit - self.kept.len();
        self.kept.extend_from_slice(&bytes[..bytes.len().min(room)]);
    }

    /// How many bytes the stream had.
    pub(super) fn total(&self) -> u64 {
        self.total
    }

    /// The text, at most as long as the limit although a replaced byte grows to three, and whether
    /// something is missing.
    pub(super) fn into_text(self) -> (String, bool) {
        let Self { mut kept, limit, total } = self;
        let truncated = total > kept.len() as u64;
        if truncated {
            kept.truncate(kept.len() - unfinished(&kept));
        }
        let mut text = into_text(kept);
        let grown = text.len() > limit;
        if grown {
            text.truncate(text.floor_char_boundary(limit));
        }
        (text, truncated || grown)
    }
}

/// How many bytes of the end of a stream are kept: more than evidence takes in characters.
pub(super) const TAIL_BYTES: usize = 4096;

/// The last bytes of a stream.
#[derive(Debug)]
pub(super) struct Tail {
    /// At most twice the limit, so that most pushes move nothing.
    kept: Vec<u8>,
    limit: usize,
    total: u64,
    truncated: bool,
}

impl Default for Tail {
    fn default() -> Self {
        Self::new(TAIL_BYTES)
    }
}

impl Tail {
    /// The last `limit` bytes, and no fewer than error texts take.
    pub(super) fn new(limit: usize) -> Self {
        let limit = limit.max(TAIL_BYTES);
        Self { kept: Vec::new(), limit, total: 0, truncated: false }
    }

    /// How many bytes the stream had.
    pub(super) fn total(&self) -> u64 {
        self.total
    }

    pub(super) fn push(&mut self, bytes: &[u8]) {
        self.total += bytes.len() as u64;
        let skipped = bytes.len().saturating_sub(self.limit);
        self.kept.extend_from_slice(&bytes[skipped..]);
        self.truncated |= skipped > 0;
        if self.kept.len() > 2 * self.limit {
            self.trim();
        }
    }

    /// What is kept; nothing is kept then.
    pub(super) fn take(&mut self) -> Vec<u8> {
        self.trim();
        std::mem::take(&mut self.kept)
    }

    /// Whether something was ever left out.
    pub(super) fn is_cut(&self) -> bool {
        self.truncated
    }

    fn trim(&mut self) {
        let excess = self.kept.len().saturating_sub(self.limit);
        self.kept.drain(..excess);
        self.truncated |= excess > 0;
    }

    /// The text for people to read: trimmed, and control characters other than line feed and tab
    /// became spaces.
    pub(super) fn to_text(&self) -> String {
        let clean = |c: char| if c.is_control() && c != '\n' && c != '\t' { ' ' } else { c };
        let text = end_of(&self.kept, TAIL_BYTES);
        let begin = if text.len() < self.kept.len() || self.truncated { cut_off(text) } else { 0 };
        into_text(text[begin..].to_vec()).trim().chars().map(clean).collect()
    }

    /// The text as it came, and whether something is missing before it.
    pub(super) fn into_raw_text(self) -> (String, bool) {
        let limit = self.limit;
        self.into_bounded_text(limit)
    }

    /// The same, at most `limit` bytes although a replaced byte grows to three.
    pub(super) fn into_bounded_text(mut self, limit: usize) -> (String, bool) {
        let excess = self.kept.len().saturating_sub(limit.min(self.limit));
        self.kept.drain(..excess);
        self.truncated |= excess > 0;
        if self.truncated {
            self.kept.drain(..cut_off(&self.kept));
        }
        let mut text = into_text(self.kept);
        let grown = text.len().saturating_sub(limit);
        if grown > 0 {
            text.drain(..text.ceil_char_boundary(grown));
        }
        (text, self.truncated || grown > 0)
    }
}

fn end_of(bytes: &[u8], limit: usize) -> &[u8] {
    &bytes[bytes.len().saturating_sub(limit)..]
}

/// How many bytes at the beginning end a character that began before.
fn cut_off(bytes: &[u8]) -> usize {
    bytes.iter().take(3).take_while(|byte| is_continuation(**byte)).count()
}

const fn is_continuation(byte: u8) -> bool {
    byte & 0b1100_0000 == 0b1000_0000
}

/// How many bytes at the end begin a character without ending it.
fn unfinished(bytes: &[u8]) -> usize {
    let begins_a_character = |length: &usize| {
        let end = std::str::from_utf8(&bytes[bytes.len() - length..]);
        end.is_err_and(|error| error.valid_up_to() == 0 && error.error_len().is_none())
    };
    (1..=bytes.len().min(3)).find(begins_a_character).unwrap_or(0)
}

fn into_text(bytes: Vec<u8>) -> String {
    let text = String::from_utf8(bytes)
        .unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned());
    if text.contains('\0') { text.replace('\0', "\u{fffd}") } else { text }
}

/// `what`, with as much of the end of `detail` as fits into `max_chars`.
pub(super) fn bounded(what: &str, detail: &str, max_chars: usize) -> String {
    let whole = if detail.is_empty() { what.to_owned() } else { format!("{what}: {detail}") };
    if whole.chars().count() <= max_chars {
        return whole;
    }
    let head: String = what.chars().chain(": …".chars()).take(max_chars).collect();
    let room = max_chars - head.chars().count();
    let skipped = detail.chars().count().saturating_sub(room);
    head.chars().chain(detail.chars().skip(skipped)).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn head(limit: usize, chunks: &[&[u8]]) -> (String, bool) {
        let mut head = Head::new(limit);
        for chunk in chunks {
            head.push(chunk);
        }
        head.into_text()
    }

    fn tail(chunks: &[&[u8]]) -> String {
        let mut tail = Tail::default();
        for chunk in chunks {
            tail.push(chunk);
        }
        tail.to_text()
    }

    #[test]
    fn a_head_says_what_it_left_out() {
        assert_eq!(head(5, &[b"abc", b"de"]), ("abcde".to_owned(), false));
        assert_eq!(head(5, &[b"abc", b"def", b"g"]), ("abcde".to_owned(), true));
        assert_eq!(head(0, &[b"a"]), (String::new(), true));
        assert_eq!(head(0, &[]), (String::new(), false));
        let mut long = Head::new(2);
        long.push(b"abc");
        long.push(b"d");
        assert_eq!(long.total(), 4);
    }

    #[test]
    fn bytes_that_are_no_text_are_replaced() {
        assert_eq!(head(99, &[b"a\xffb\0c"]), ("a\u{fffd}b\u{fffd}c".to_owned(), false));
        // Cut by the program itself, not by us: replaced.
        assert_eq!(head(99, &["aé".as_bytes().split_last().unwrap().1]).0, "a\u{fffd}");
    }

    #[test]
    fn a_character_cut_by_the_limit_is_left_out() {
        for (text, kept) in [("aé", "a"), ("a€", "a"), ("a😀", "a"), ("é€", "é")] {
            for limit in kept.len()..text.len() {
                assert_eq!(head(limit, &[text.as_bytes()]), (kept.to_owned(), true), "{text}");
            }
        }
        // A byte that begins no character is not taken for a cut one.
        assert_eq!(head(9, &[b"abcdef\x80\x80\x80x"]).0, "abcdef\u{fffd}");
    }

    #[test]
    fn text_that_grew_by_replacement_is_cut_again() {
        let (text, truncated) = head(10, &[&[0xff; 10]]);
        assert_eq!((text.as_str(), truncated), ("\u{fffd}\u{fffd}\u{fffd}", true));
        assert_eq!(head(10, &[&[0; 10]]).0.len(), 9);
    }

    #[test]
    fn a_tail_keeps_the_end_for_people_to_read() {
        assert_eq!(tail(&[b" a\r\x1b[1mb\tc\nd\0\xff\n\n"]), "a  [1mb\tc\nd\u{fffd}\u{fffd}");
        assert_eq!(tail(&[]), "");
        let long = [&[b'x'; 3 * TAIL_BYTES][..], b"end"].concat();
        let kept = tail(&[&long]);
        assert_eq!(kept.len(), TAIL_BYTES);
        assert!(kept.ends_with("xend"));
        // "é" is two bytes: an odd offset cuts the first one kept.
        let cut = "é".repeat(TAIL_BYTES) + "!";
        assert_eq!(tail(&[cut.as_bytes()]), "é".repeat(TAIL_BYTES / 2 - 1) + "!");
    }

    #[test]
    fn a_tail_kept_as_a_log_has_a_limit_of_its_own() {
        let log = |limit: usize, bytes: &[u8]| {
            let mut tail = Tail::new(limit);
            bytes.chunks(1000).for_each(|chunk| tail.push(chunk));
            let total = tail.total();
            let (text, truncated) = tail.into_bounded_text(limit);
            assert!(text.len() <= limit, "{} bytes", text.len());
            (text, truncated, total)
        };
        assert_eq!(log(9, b"a\r\xff"), ("a\r\u{fffd}".to_owned(), false, 3));
        assert_eq!(log(4, b"abcdefgh"), ("efgh".to_owned(), true, 8));
        assert_eq!(log(0, b"a"), (String::new(), true, 1));
        assert_eq!(log(3, "aéé".as_bytes()), ("é".to_owned(), true, 5));
        assert_eq!(log(4, b"\xff\xff"), ("\u{fffd}".to_owned(), true, 2));
        let (text, truncated, total) = log(20_000, &vec![b'x'; 50_000]);
        assert_eq!((text.len(), truncated, total), (20_000, true, 50_000));
    }

    #[test]
    fn a_tail_s_memory_is_bounded() {
        let mut tail = Tail::default();
        for length in (0..20_000).step_by(7) {
            tail.push(&vec![b'x'; length]);
            assert!(tail.kept.capacity() <= 8 * TAIL_BYTES, "{}", tail.kept.capacity());
        }
    }

    #[test]
    fn an_error_text_keeps_its_beginning_and_the_end_of_the_detail() {
        assert_eq!(bounded("exit status 3", "", 99), "exit status 3");
        assert_eq!(bounded("exit status 3", "no é", 99), "exit status 3: no é");
        assert_eq!(bounded("exit status 3", "no é", 19), "exit status 3: no é");
        assert_eq!(bounded("exit status 3", "ab no é", 20), "exit status 3: …no é");
        assert_eq!(bounded("exit status 3", "ab no é", 6), "exit s");
        assert_eq!(bounded("exit status 3", "ab", 0), "");
    }

    proptest! {
        #[test]
        fn how_output_is_cut_into_chunks_does_not_matter(
            chunks in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..3000), 0..8),
            limit in 0_usize..5000,
        ) {
            let chunks: Vec<&[u8]> = chunks.iter().map(Vec::as_slice).collect();
            let whole = chunks.concat();
            prop_assert_eq!(head(limit, &chunks), head(limit, &[&whole]));
            prop_assert_eq!(tail(&chunks), tail(&[&whole]));
            let (text, truncated) = head(limit, &chunks);
            prop_assert!(text.len() <= limit && !text.contains('\0'));
            prop_assert!(truncated || whole.len() <= limit);
        }

        #[test]
        fn text_is_kept_as_it_is(text in "[^\\x00]{0,200}") {
            prop_assert_eq!(head(1000, &[text.as_bytes()]), (text, false));
        }

        #[test]
        fn error_texts_are_bounded(what in ".{0,30}", detail in ".{0,60}", max in 0_usize..80) {
            prop_assert!(bounded(&what, &detail, max).chars().count() <= max);
        }
    }
}
