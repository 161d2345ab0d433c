/// What happened to an item before the attempt at hand: five small counters, packed into one
/// number so that a lease carries one array for all of its items.
///
/// Byte 0: attempts charged. Byte 1: crashes (charged attempts whose worker died). Byte 2:
/// interruptions. Byte 3: admission failures. Byte 4: check losses. Byte 5: explicit retries. Each
/// stops at 255. The SQL functions `history_*` read and write the same layout; a test compares.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct History(i64);

macro_rules! counter {
    ($(#[$meta:meta])* $get:ident, $with:ident, $byte:literal) => {
        $(#[$meta])*
        #[must_use]
        pub const fn $get(self) -> u8 {
            self.byte($byte)
        }

        /// One more of the same.
        #[must_use]
        pub const fn $with(self) -> Self {
            self.plus_one($byte)
        }
    };
}

impl History {
    /// An item that never ran.
    pub const FRESH: Self = Self(0);

    /// Unpacks a stored history.
    #[must_use]
    pub const fn from_packed(packed: i64) -> Self {
        Self(packed)
    }

    /// The number as stored.
    #[must_use]
    pub const fn packed(self) -> i64 {
        self.0
    }

    counter!(
        /// Attempts charged so far.
        attempts, plus_attempt, 0
    );
    counter!(
        /// Charged attempts whose worker died with them.
        crashes, plus_crash, 1
    );
    counter!(
        /// Interruptions by a drain, a mass expiry or a lost claim.
        interruptions, plus_interruption, 2
    );
    counter!(
        /// Executions that could not be admitted.
        admissions, plus_admission, 3
    );
    counter!(
        /// Checks that were lost with their worker.
        check_losses, plus_check_loss, 4
    );
    counter!(
        /// Explicit retries.
        retries, plus_retry, 5
    );

    const fn byte(self, byte: usize) -> u8 {
        self.0.to_le_bytes()[byte]
    }

    const fn plus_one(self, byte: usize) -> Self {
        if self.byte(byte) == u8::MAX { self } else { Self(self.0 + (1 << (8 * byte))) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_do_not_touch_each_other() {
        let history = History::FRESH.plus_attempt().plus_attempt().plus_crash().plus_retry();

        assert_eq!((history.attempts(), history.crashes(), history.retries()), (2, 1, 1));
        assert_eq!(
            (history.interruptions(), history.admissions(), history.check_losses()),
            (0, 0, 0)
        );
        assert_eq!(History::from_packed(history.packed()), history);
    }

    #[test]
    fn a_counter_stops_at_its_end() {
        let full = (0..300).fold(History::FRESH, |h, _| h.plus_interruption());

        assert_eq!((full.interruptions(), full.admissions(), full.crashes()), (255, 0, 0));
    }
}
