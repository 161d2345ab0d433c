//! As much of PostgreSQL's protocol as it takes to see a COMMIT go by.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;

/// What a client sent in one transaction, before its COMMIT.
#[derive(Clone, Debug, Default)]
pub(super) struct Sent {
    /// The texts of its statements.
    pub(super) statements: String,
    /// The same for the same statements with the same parameters.
    pub(super) fingerprint: DefaultHasher,
}

/// Follows what a client sends, message by message, whatever pieces it comes in.
#[derive(Debug, Default)]
pub(super) struct ClientFrames {
    started: bool,
    /// The begin of a message that is not complete.
    begun: Vec<u8>,
    /// Since the last BEGIN.
    sent: Sent,
}

/// A COMMIT in a piece.
#[derive(Debug)]
pub(super) struct Commit {
    /// How much of the piece comes before its message; none when that began in an earlier piece.
    pub(super) before: usize,
    /// How much of the piece comes before the message's end.
    pub(super) through: usize,
    /// What its transaction consists of.
    pub(super) of: Sent,
}

impl ClientFrames {
    /// Takes the next piece; the first COMMIT in it.
    pub(super) fn take(&mut self, piece: &[u8]) -> Option<Commit> {
        let earlier = self.begun.len();
        self.begun.extend_from_slice(piece);
        let mut from = 0;
        let mut found = None;
        while let Some(length) = self.message_length(from) {
            let message = from..from + length;
            if self.look_at(message.clone()) && found.is_none() {
                found = Some(Commit {
                    before: message.start.saturating_sub(earlier),
                    through: message.end - earlier,
                    of: std::mem::take(&mut self.sent),
                });
            }
            from = message.end;
        }
        self.begun.drain(..from);
        found
    }

    /// The length of the complete message that begins there.
    fn message_length(&mut self, from: usize) -> Option<usize> {
        // Only the very first message has no tag.
        let tag = usize::from(self.started);
        let field = self.begun.get(from + tag..from + tag + 4)?;
        let length = tag + usize::try_from(u32::from_be_bytes(field.try_into().ok()?)).ok()?;
        (self.begun.len() >= from + length).then(|| {
            self.started = true;
            length
        })
    }

    /// Whether the message is a COMMIT; notes what else is said.
    fn look_at(&mut self, message: Range<usize>) -> bool {
        let whole = &self.begun[message];
        let tag = whole[0];
        if ![b'Q', b'P', b'B'].contains(&tag) {
            return false;
        }
        let body = &whole[5..];
        if tag == b'Q' && body.trim_ascii_end().eq_ignore_ascii_case(b"COMMIT\0") {
            return true;
        }
        if tag == b'Q' && body.len() >= 5 && body[..5].eq_ignore_ascii_case(b"BEGIN") {
            // What came before it is not of this transaction.
            self.sent = Sent::default();
        }
        // The names of statements and portals differ from time to time.
        let unnamed = if tag == b'B' { body.iter().position(|byte| *byte == 0) } else { Some(0) };
        body[unnamed.unwrap_or(0)..].hash(&mut self.sent.fingerprint);
        if tag != b'B' {
            self.sent.statements.push_str(&String::from_utf8_lossy(body));
        }
        false
    }
}

/// How many bytes from the begin the answer to a COMMIT ends: its tag and "ready", last of all.
pub(super) fn commit_answer_end(answer: &[u8]) -> Option<usize> {
    let ends: [&[u8]; 2] = [b"COMMIT\0Z\0\0\0\x05I", b"ROLLBACK\0Z\0\0\0\x05I"];
    ends.into_iter()
        .filter_map(|end| {
            let at = answer.windows(end.len()).rposition(|window| window == end)?;
            Some(at + end.len())
        })
        .max()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn startup() -> Vec<u8> {
        let mut message = vec![0, 0, 0, 8];
        message.extend([0, 3, 0, 0]);
        message
    }

    fn message(tag: u8, body: &[u8]) -> Vec<u8> {
        let length = u32::try_from(body.len() + 4).unwrap();
        [&[tag], &length.to_be_bytes()[..], body].concat()
    }

    #[test]
    fn a_commit_is_seen_in_whatever_pieces_it_comes() {
        let flight = [
            message(b'Q', b"BEGIN\0"),
            message(b'P', b"\0SELECT holdfast.hand_in()\0\0\0"),
            message(b'B', b"COMMIT\0"),
        ]
        .concat();
        let commit = message(b'Q', b"COMMIT\0");
        let all = [startup(), flight.clone(), commit.clone()].concat();
        let end = all.len();

        let mut frames = ClientFrames::default();
        let seen = frames.take(&all).unwrap();
        assert_eq!((seen.before, seen.through), (end - commit.len(), end));
        let first = seen.of;
        assert!(first.statements.contains("hand_in"), "{}", first.statements);

        let mut frames = ClientFrames::default();
        assert!(frames.take(&all[..end - 3]).is_none());
        let seen = frames.take(&all[end - 3..]).unwrap();
        assert_eq!((seen.before, seen.through), (0, 3));
        assert_eq!(seen.of.fingerprint.finish(), first.fingerprint.finish());

        // What was sent before an earlier COMMIT is not of the next one.
        let again = frames.take(&commit).unwrap();
        assert_eq!(again.of.statements, "");
        assert_ne!(again.of.fingerprint.finish(), first.fingerprint.finish());
        assert!(frames.take(&flight).is_none());
    }

    #[test]
    fn an_answer_to_a_commit_ends_with_ready() {
        let ready = message(b'Z', b"I");
        let commit = [message(b'C', b"COMMIT\0"), ready.clone()].concat();
        let all = [message(b'C', b"BEGIN\0"), message(b'Z', b"T"), commit.clone()].concat();

        assert_eq!(commit_answer_end(&all), Some(all.len()));
        assert_eq!(commit_answer_end(&all[..all.len() - 1]), None);
        let rolled_back = [message(b'C', b"ROLLBACK\0"), ready].concat();
        assert_eq!(commit_answer_end(&rolled_back), Some(rolled_back.len()));
    }
}
