//! Limits without a fleet.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use tokio::time::Instant;

use super::{Grant, GrantRequest, SharedLimits, SharedLimitsError, UpstreamKey};

/// Limits that end with this process: for a program that embeds an executor without a fleet, and
/// for tests. It blocks and pauses; it counts nothing.
#[derive(Default)]
pub struct UnsharedLimits {
    known: Mutex<HashMap<UpstreamKey, (Option<Instant>, u32)>>,
}

impl UnsharedLimits {
    fn known(&self) -> MutexGuard<'_, HashMap<UpstreamKey, (Option<Instant>, u32)>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn left(until: Option<Instant>) -> Duration {
    until.map_or(Duration::ZERO, |until| until.saturating_duration_since(Instant::now()))
}

#[async_trait]
impl SharedLimits for UnsharedLimits {
    async fn grant(&self, request: &GrantRequest<'_>) -> Result<Grant, SharedLimitsError> {
        let known = self.known();
        let of = |key: &UpstreamKey| known.get(key).copied().unwrap_or_default();
        let (own, whole) = (of(request.key), of(&request.key.whole()));
        let blocked_for = left(own.0).max(left(whole.0));
        let granted = if blocked_for.is_zero() { request.want } else { 0 };
        let pauses = own.1.max(whole.1);
        Ok(Grant { granted, blocked_for, pauses, ..Grant::default() })
    }

    async fn block(&self, key: &UpstreamKey, wait: Duration) -> Result<(), SharedLimitsError> {
        let mut known = self.known();
        let entry = known.entry(key.clone()).or_default();
        entry.0 = entry.0.max(Some(Instant::now() + wait));
        Ok(())
    }

    async fn pause(
        &self,
        key: &UpstreamKey,
        first: Duration,
        longest: Duration,
    ) -> Result<(u32, Duration), SharedLimitsError> {
        let mut known = self.known();
        let entry = known.entry(key.clone()).or_default();
        if left(entry.0).is_zero() {
            let wait = first.saturating_mul(1 << entry.1.min(20)).min(longest);
            *entry = (Some(Instant::now() + wait), entry.1 + 1);
        }
        Ok((entry.1, left(entry.0)))
    }

    async fn resume(&self, key: &UpstreamKey) -> Result<(), SharedLimitsError> {
        if let Some(entry) = self.known().get_mut(key) {
            entry.1 = 0;
        }
        Ok(())
    }
}
