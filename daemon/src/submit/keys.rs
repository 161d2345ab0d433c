use sha2::{Digest, Sha256};

/// Which keys occurred on which lines, in 24 bytes a key.
///
/// Keys are compared by 128 bits of their SHA-256. That two different keys of one batch agree in
/// them by chance is less likely than 1 in 10^26 for a million keys, and takes 2^64 hashes to bring
/// about; it would refuse a batch, never accept a wrong one. So hits are not confirmed.
#[derive(Default)]
pub(super) struct Keys {
    seen: Vec<([u8; 16], u64)>,
}

impl Keys {
    pub(super) fn note(&mut self, key: &str, line: u64) {
        let hash = Sha256::digest(key);
        let half = hash.first_chunk().expect("SHA-256 has 32 bytes");
        self.seen.push((*half, line));
    }

    /// Each line whose key stands on an earlier one, in line order, with the earliest of those.
    pub(super) fn repeated(mut self) -> Vec<Repeat> {
        self.seen.sort_unstable();
        let mut repeats: Vec<Repeat> = self
            .seen
            .chunk_by(|a, b| a.0 == b.0)
            .flat_map(|same| {
                same[1..].iter().map(|(_, line)| Repeat { line: *line, first: same[0].1 })
            })
            .collect();
        repeats.sort_unstable_by_key(|repeat| repeat.line);
        repeats
    }
}

/// A key that stands on two lines.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Repeat {
    pub(super) line: u64,
    pub(super) first: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_repeated_key_is_found_with_its_first_line() {
        let mut keys = Keys::default();
        for (line, key) in [(1, "a"), (2, "b"), (4, "a"), (5, "c"), (6, "b"), (9, "a")] {
            keys.note(key, line);
        }
        let expected = [(4, 1), (6, 2), (9, 1)].map(|(line, first)| Repeat { line, first });
        assert_eq!(keys.repeated(), expected);
    }

    #[test]
    fn different_keys_do_not_repeat() {
        let mut keys = Keys::default();
        for line in 0..1000 {
            keys.note(&line.to_string(), line);
        }
        assert_eq!(keys.repeated(), []);
    }
}
