//! Time behind one trait: a boot-time clock that counts suspend, and the wall clock.

use std::ops::{Add, Sub};
use std::time::Duration;

use time::OffsetDateTime;

/// An instant of the boot-time clock: monotonic, and it goes on while the machine is suspended
/// (F5). Nanoseconds since boot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct BootInstant(u64);

impl BootInstant {
    /// An instant this many nanoseconds after boot.
    #[must_use]
    pub const fn from_nanos(nanos: u64) -> Self {
        Self(nanos)
    }

    /// Nanoseconds since boot.
    #[must_use]
    pub const fn as_nanos(self) -> u64 {
        self.0
    }

    /// The time from `earlier` to this instant; zero when `earlier` is later.
    #[must_use]
    pub const fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

impl Add<Duration> for BootInstant {
    type Output = Self;

    fn add(self, by: Duration) -> Self {
        Self(self.0.saturating_add(u64::try_from(by.as_nanos()).unwrap_or(u64::MAX)))
    }
}

impl Sub<Duration> for BootInstant {
    type Output = Self;

    fn sub(self, by: Duration) -> Self {
        Self(self.0.saturating_sub(u64::try_from(by.as_nanos()).unwrap_or(u64::MAX)))
    }
}

/// The time sources of a process. Database time is never asked here (F4).
pub trait Clock: Send + Sync {
    /// Now, on the boot-time clock.
    fn now(&self) -> BootInstant;
    /// Now, on the wall clock; for display only.
    fn wall(&self) -> OffsetDateTime;
}

/// The clocks of this machine.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    fn now(&self) -> BootInstant {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
        let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
        let nanos = u64::try_from(now.tv_nsec).unwrap_or(0);
        BootInstant(seconds * 1_000_000_000 + nanos)
    }

    fn wall(&self) -> OffsetDateTime {
        OffsetDateTime::now_utc()
    }
}

/// Waits until the boot-time clock reaches `deadline`.
///
/// The runtime's timers stop while the machine is suspended, so this looks at the clock at least
/// every quarter second.
///
/// # Cancel safety
/// Safe: it holds nothing.
pub async fn sleep_until(clock: &dyn Clock, deadline: BootInstant) {
    loop {
        let left = deadline.since(clock.now());
        if left.is_zero() {
            return;
        }
        tokio::time::sleep(left.min(Duration::from_millis(250))).await;
    }
}
