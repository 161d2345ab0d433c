//! Names of directories for owners, threads and batches: whatever the text, one component that
//! leads nowhere else, and no two texts with the same.

use crate::model::BatchId;

/// The longest name that file systems take, in bytes.
const NAME_MAX: usize = 255;

/// What is stored of the root itself. No encoded name begins with a dot.
pub(super) const OWN: &str = ".holdfast";

/// The directory of an owner; none where the text would make no name.
pub(super) fn of_owner(owner: &str) -> Option<String> {
    encode(owner, false)
}

/// The directory of a thread: never that of a batch.
pub(super) fn of_thread(thread: &str) -> Option<String> {
    encode(thread, is_batch(thread))
}

/// The directory of a batch.
pub(super) fn of_batch(batch: BatchId) -> String {
    batch.to_string()
}

/// Whose directory a name is below an owner's.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Below {
    Batch(BatchId),
    Thread(String),
}

/// What [`of_thread`] or [`of_batch`] made this name of; none for a name of another origin.
pub(super) fn below_owner(name: &str) -> Option<Below> {
    if is_batch(name) {
        return name.parse().ok().map(Below::Batch);
    }
    let thread = decode(name)?;
    (of_thread(&thread).as_deref() == Some(name)).then_some(Below::Thread(thread))
}

/// What [`of_owner`] made this name of; none for a name of another origin.
pub(super) fn owner(name: &str) -> Option<String> {
    let owner = decode(name)?;
    (of_owner(&owner).as_deref() == Some(name)).then_some(owner)
}

/// Letters, digits, `_`, `-`, `@` and, but for the first character, `.` as they are; every other
/// byte as `%` and two digits.
fn encode(text: &str, escape_first: bool) -> Option<String> {
    let mut name = String::with_capacity(text.len());
    for (at, byte) in text.bytes().enumerate() {
        let plain =
            byte.is_ascii_alphanumeric() || b"_-@".contains(&byte) || byte == b'.' && at > 0;
        if plain && !(escape_first && at == 0) {
            name.push(char::from(byte));
        } else {
            name.push('%');
            name.extend([byte >> 4, byte & 15].map(hex));
        }
    }
    (1..=NAME_MAX).contains(&name.len()).then_some(name)
}

fn hex(digit: u8) -> char {
    char::from_digit(digit.into(), 16).expect("half a byte").to_ascii_uppercase()
}

fn decode(name: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(name.len());
    let mut rest = name.bytes();
    while let Some(byte) = rest.next() {
        if byte == b'%' {
            let digits = [rest.next()?, rest.next()?];
            bytes.push(u8::from_str_radix(str::from_utf8(&digits).ok()?, 16).ok()?);
        } else {
            bytes.push(byte);
        }
    }
    String::from_utf8(bytes).ok()
}

/// Whether a text is spelled as the id of a batch is.
fn is_batch(text: &str) -> bool {
    text.parse::<BatchId>().is_ok_and(|batch| of_batch(batch) == text)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn usual_names_stay_readable() {
        for name in ["default", "Ann.B_c-9@x", "a..b", "..."] {
            let encoded = if name == "..." { "%2E.." } else { name };
            assert_eq!(of_owner(name).as_deref(), Some(encoded));
            assert_eq!(of_thread(name).as_deref(), Some(encoded));
        }
    }

    #[test]
    fn nothing_leads_elsewhere() {
        for (text, name) in [
            (".", "%2E"),
            ("..", "%2E."),
            ("../x", "%2E.%2Fx"),
            (OWN, "%2Eholdfast"),
            ("a/b", "a%2Fb"),
            ("a\0b", "a%00b"),
            ("%41", "%2541"),
            ("é", "%C3%A9"),
        ] {
            assert_eq!(of_owner(text).as_deref(), Some(name));
        }
        assert_eq!(of_owner(""), None);
        assert_eq!(of_owner(&"é".repeat(43)), None, "258 bytes");
    }

    #[test]
    fn a_thread_named_like_a_batch_is_not_the_batch() {
        let batch = BatchId::generate();
        let thread = batch.to_string();
        let name = of_thread(&thread).unwrap();

        assert_ne!(name, of_batch(batch));
        assert_eq!(below_owner(&name), Some(Below::Thread(thread)));
        assert_eq!(below_owner(&of_batch(batch)), Some(Below::Batch(batch)));
    }

    proptest! {
        #[test]
        fn every_text_has_a_name_of_its_own(text in "[a-zé./%\\x00-]{0,9}|(?s).{0,60}") {
            let Some(name) = of_thread(&text) else {
                prop_assert!(text.is_empty() || text.len() > 80);
                return Ok(());
            };
            prop_assert!(!name.starts_with('.') && !name.contains(['/', '\0']));
            prop_assert_eq!(below_owner(&name), Some(Below::Thread(text.clone())));
            prop_assert_eq!(of_owner(&text).and_then(|name| owner(&name)), Some(text));
        }

        #[test]
        fn what_we_did_not_name_is_not_ours(name in "[a-z%0-9./A-F]{0,9}") {
            if let Some(Below::Thread(thread)) = below_owner(&name) {
                prop_assert_eq!(of_thread(&thread), Some(name));
            }
        }
    }
}
