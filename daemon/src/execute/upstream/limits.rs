//! The limits of upstreams: one for the whole fleet, and this process's part of it.
//!
//! A request begins with a `Permit`. What the permits of all processes may add up to is decided by
//! [`SharedLimits`], which a process asks for all of its waiting requests together. A grant is not a
//! number of requests but a row of instants, so that the requests of the fleet come one after the
//! other and never more of them in any minute than allowed, whoever holds how many.

mod unshared;

use std::collections::{HashMap, VecDeque};
use std::num::NonZeroU32;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use rand::Rng;
use tokio::time::sleep;
use tracing::{debug, warn};

pub use self::unshared::UnsharedLimits;

use crate::clock::{BootInstant, Clock};

/// What is limited: an upstream, and one of its models where it has several. The empty model stands
/// for the upstream itself: a pause of that is one of all of its models.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct UpstreamKey {
    /// Its name, or its origin where it has none.
    pub upstream: String,
    /// The model, or empty.
    pub model: String,
}

impl UpstreamKey {
    /// The upstream itself.
    #[must_use]
    pub fn whole(&self) -> Self {
        Self { upstream: self.upstream.clone(), model: String::new() }
    }
}

/// What a process asks for.
#[derive(Clone, Copy, Debug)]
pub struct GrantRequest<'a> {
    /// Of what.
    pub key: &'a UpstreamKey,
    /// Requests that are under way or granted and not begun.
    pub using: u32,
    /// How many more are wanted; with none it only renews and releases.
    pub want: u32,
    /// Time from one request of the fleet to the next; none without a limit.
    pub spacing: Option<Duration>,
    /// How far ahead instants are granted.
    pub horizon: Duration,
    /// Requests under way at once; none without a limit.
    pub max_in_flight: Option<u32>,
    /// How long what is in use counts without being renewed: after a crash it is free then.
    pub valid: Duration,
}

/// What a process gets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Grant {
    /// How many requests it may begin.
    pub granted: u32,
    /// From now until the first of them; each later one `spacing` after the one before.
    pub first_in: Duration,
    /// How long the upstream is blocked; zero when it is not.
    pub blocked_for: Duration,
    /// How often in a row the upstream was paused: above zero one request at a time finds out
    /// whether it is well again.
    pub pauses: u32,
    /// After how long asking again may give more.
    pub retry_in: Duration,
}

/// The fleet's limits cannot be asked now.
#[derive(Debug, thiserror::Error)]
#[error("the limits of upstreams cannot be asked")]
pub struct SharedLimitsError(#[source] pub Box<dyn std::error::Error + Send + Sync>);

/// What the processes of a fleet know together about upstreams.
#[async_trait]
pub trait SharedLimits: Send + Sync {
    /// Asks for requests.
    ///
    /// # Errors
    /// When there is no answer; what may have been granted lapses.
    async fn grant(&self, request: &GrantRequest<'_>) -> Result<Grant, SharedLimitsError>;

    /// Blocks an upstream for so long from now; a longer block stays.
    ///
    /// # Errors
    /// When there is no answer.
    async fn block(&self, key: &UpstreamKey, wait: Duration) -> Result<(), SharedLimitsError>;

    /// Pauses an upstream: for `first`, doubled for every pause in a row, at most `longest`. One that
    /// is blocked is not paused again. Answers how often it was in a row, and the time left.
    ///
    /// # Errors
    /// When there is no answer.
    async fn pause(
        &self,
        key: &UpstreamKey,
        first: Duration,
        longest: Duration,
    ) -> Result<(u32, Duration), SharedLimitsError>;

    /// Notes that a paused upstream is well again.
    ///
    /// # Errors
    /// When there is no answer.
    async fn resume(&self, key: &UpstreamKey) -> Result<(), SharedLimitsError>;
}

/// What one upstream allows.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::execute) struct Rates {
    pub(super) requests_per_minute: Option<NonZeroU32>,
    pub(super) max_in_flight: Option<NonZeroU32>,
}

/// The minute of a limit, with a reserve: requests reach the upstream a little earlier or later than
/// they were granted, and the limit holds for any minute as the upstream sees it.
const MINUTE: Duration = Duration::from_secs(62);
/// How far ahead instants are granted: what a worker that dies takes with it.
const HORIZON: Duration = Duration::from_secs(1);
/// How late a request may begin; part of the reserve of [`MINUTE`].
const LATEST: Duration = Duration::from_secs(1);
/// How long the answer to a request without limits counts for the next.
const FRESH: Duration = Duration::from_secs(1);
/// How long requests under way count without being renewed.
const VALID: Duration = Duration::from_secs(15);
/// The longest wait between two looks.
const LOOK: Duration = Duration::from_secs(5);
/// The wait after the limits could not be asked.
const UNANSWERED: Duration = Duration::from_millis(250);

impl Rates {
    fn spacing(self) -> Option<Duration> {
        self.requests_per_minute.map(|limit| MINUTE / limit.get())
    }

    fn is_unlimited(self) -> bool {
        self.requests_per_minute.is_none() && self.max_in_flight.is_none()
    }
}

/// Upstreams and models that this process keeps, beside those in use.
const KEPT: usize = 1024;

/// Why a request may not begin now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::execute) enum Refused {
    /// The upstream is blocked for so long, and was paused so often in a row.
    Blocked(Duration, u32),
    /// It waited for its turn as long as it may.
    Waited,
}

/// This process's part of the limits.
pub(in crate::execute) struct Admission {
    shared: Arc<dyn SharedLimits>,
    clock: Arc<dyn Clock>,
    gates: Mutex<HashMap<UpstreamKey, Arc<Gate>>>,
}

/// What this process knows of one upstream and model.
struct Gate {
    key: UpstreamKey,
    state: Mutex<State>,
    /// Whoever holds it asks for all that wait.
    asking: tokio::sync::Mutex<()>,
}

#[derive(Default)]
struct State {
    waiting: u32,
    in_flight: u32,
    /// When granted requests begin.
    ready: VecDeque<BootInstant>,
    blocked_until: Option<BootInstant>,
    pauses: u32,
    /// Until when requests begin without being asked for.
    open_until: Option<BootInstant>,
    /// When the requests under way were last told of.
    told_at: Option<BootInstant>,
}

impl Gate {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The right to one request. Dropped, it counts no more in this process; the fleet learns of that
/// with [`Admission::release`], or with what this process asks for next.
pub(in crate::execute) struct Permit {
    gate: Arc<Gate>,
    rates: Rates,
    /// How often the upstream was paused in a row before this.
    pauses: u32,
}

impl Permit {
    /// How often in a row the upstream was paused before this.
    pub(super) const fn pauses(&self) -> u32 {
        self.pauses
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.gate.state().in_flight -= 1;
    }
}

/// Counts a waiting request for as long as it waits.
struct Waiting<'a>(&'a Gate);

impl<'a> Waiting<'a> {
    fn new(gate: &'a Gate) -> Self {
        gate.state().waiting += 1;
        Self(gate)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.state().waiting -= 1;
    }
}

/// What to do next, by what is known.
enum Next {
    Begin(Permit),
    At(Permit, BootInstant),
    Blocked(Duration, u32),
    Ask,
}

impl Admission {
    pub(super) fn new(shared: Arc<dyn SharedLimits>, clock: Arc<dyn Clock>) -> Self {
        Self { shared, clock, gates: Mutex::default() }
    }

    fn gate(&self, key: &UpstreamKey) -> Arc<Gate> {
        let mut gates = self.gates.lock().unwrap_or_else(PoisonError::into_inner);
        if gates.len() >= KEPT && !gates.contains_key(key) {
            // Where every item has an origin of its own. What is known is asked for again.
            gates.retain(|_, gate| Arc::strong_count(gate) > 1);
        }
        let gate = gates.entry(key.clone()).or_insert_with(|| {
            Arc::new(Gate {
                key: key.clone(),
                state: Mutex::default(),
                asking: tokio::sync::Mutex::default(),
            })
        });
        Arc::clone(gate)
    }

    /// Waits until a request may begin, at most `longest`.
    ///
    /// # Cancel safety
    /// Safe: an instant that nobody takes lapses.
    pub(in crate::execute) async fn admit(
        &self,
        key: &UpstreamKey,
        rates: Rates,
        longest: Duration,
    ) -> Result<Permit, Refused> {
        let gate = self.gate(key);
        let deadline = self.clock.now() + longest;
        let _waiting = Waiting::new(&gate);
        loop {
            match self.next(&gate, rates) {
                Next::Begin(permit) => return Ok(permit),
                Next::Blocked(wait, pauses) => return Err(Refused::Blocked(wait, pauses)),
                Next::At(permit, begins) => {
                    sleep(begins.since(self.clock.now())).await;
                    let now = self.clock.now();
                    let is_blocked = gate.state().blocked_until.is_some_and(|until| until > now);
                    if now.since(begins) <= LATEST && !is_blocked {
                        return Ok(permit);
                    }
                    // Its minute may be over: another instant has to be asked for.
                }
                Next::Ask => {
                    let left = deadline.since(self.clock.now());
                    if left.is_zero() {
                        return Err(Refused::Waited);
                    }
                    let asked = async {
                        let _asking = gate.asking.lock().await;
                        if matches!(self.look(&gate, rates), Look::Ask) {
                            self.ask(&gate, rates).await;
                        }
                    };
                    tokio::select! {
                        () = asked => {}
                        () = sleep(left) => {}
                    }
                }
            }
        }
    }

    /// What is known, without taking anything.
    fn look(&self, gate: &Gate, rates: Rates) -> Look {
        let now = self.clock.now();
        let state = gate.state();
        let blocked = state.blocked_until.map(|until| until.since(now));
        if blocked.is_some_and(|left| !left.is_zero()) {
            Look::Blocked
        } else if state.ready.iter().any(|begins| now.since(*begins) <= LATEST)
            || (rates.is_unlimited() && state.open_until.is_some_and(|until| now < until))
        {
            Look::Ready
        } else {
            Look::Ask
        }
    }

    /// What to do next. A permit counts from here on, also while its instant is to come.
    fn next(&self, gate: &Arc<Gate>, rates: Rates) -> Next {
        let now = self.clock.now();
        let mut state = gate.state();
        let permit = |state: &mut State| {
            state.in_flight += 1;
            Permit { gate: Arc::clone(gate), rates, pauses: state.pauses }
        };
        if let Some(left) = state.blocked_until.map(|until| until.since(now))
            && !left.is_zero()
        {
            return Next::Blocked(left, state.pauses);
        }
        while let Some(begins) = state.ready.pop_front() {
            if now.since(begins) <= LATEST {
                return Next::At(permit(&mut state), begins);
            }
        }
        if rates.is_unlimited() && state.open_until.is_some_and(|until| now < until) {
            return Next::Begin(permit(&mut state));
        }
        Next::Ask
    }

    /// Asks for everybody who waits, and waits itself where there is nothing yet.
    async fn ask(&self, gate: &Gate, rates: Rates) {
        let want = gate.state().waiting;
        let grant = match self.tell(gate, rates, want).await {
            Ok(grant) => grant,
            Err(error) => {
                debug!(error = %error, cause = ?error.0, "limits of an upstream are not known");
                if rates.is_unlimited() {
                    gate.state().open_until = Some(self.clock.now() + FRESH);
                } else {
                    sleep(UNANSWERED).await;
                }
                return;
            }
        };
        if grant.granted == 0 && grant.blocked_for.is_zero() {
            let jitter = rand::rng().random_range(0.0..0.2);
            sleep(grant.retry_in.min(LOOK) + grant.retry_in.min(LOOK).mul_f64(jitter)).await;
        }
    }

    /// Tells what is in use, asks for `want` more and notes the answer.
    async fn tell(&self, gate: &Gate, rates: Rates, want: u32) -> Result<Grant, SharedLimitsError> {
        let asked_at = self.clock.now();
        let using = {
            let mut state = gate.state();
            state.ready.retain(|begins| asked_at.since(*begins) <= LATEST);
            state.told_at = Some(asked_at);
            state.in_flight + u32::try_from(state.ready.len()).unwrap_or(u32::MAX)
        };
        let spacing = rates.spacing();
        let request = GrantRequest {
            key: &gate.key,
            using,
            want,
            spacing,
            horizon: HORIZON,
            max_in_flight: rates.max_in_flight.map(NonZeroU32::get),
            valid: VALID,
        };
        let grant = self.shared.grant(&request).await?;
        let now = self.clock.now();
        let mut state = gate.state();
        state.pauses = grant.pauses;
        state.blocked_until = Some(now + grant.blocked_for).filter(|until| *until > now);
        if rates.is_unlimited() && grant.pauses == 0 {
            state.open_until = Some(now + FRESH);
        } else {
            // Counted from the answer: an instant may come later than it was meant, never earlier.
            let step = spacing.unwrap_or_default();
            for n in 0..grant.granted {
                state.ready.push_back(now + grant.first_in + step * n);
            }
        }
        Ok(grant)
    }

    /// Keeps a request under way counted; never ends. To be dropped with the request.
    ///
    /// # Cancel safety
    /// Safe.
    pub(in crate::execute) async fn keep(&self, permit: &Permit) -> std::convert::Infallible {
        loop {
            sleep(VALID / 3).await;
            let now = self.clock.now();
            let told_at = permit.gate.state().told_at;
            let is_old = told_at.is_none_or(|told_at| now.since(told_at) >= VALID / 3);
            if is_old && Self::counts(permit) {
                let told = self.tell(&permit.gate, permit.rates, 0).await;
                drop(
                    told.inspect_err(|error| debug!(%error, "requests under way are not counted")),
                );
            }
        }
    }

    /// Whether what is under way is counted in the fleet.
    fn counts(permit: &Permit) -> bool {
        permit.rates.max_in_flight.is_some() || permit.gate.state().pauses > 0
    }

    /// Gives a permit back, and says so to the fleet where others may wait for that.
    pub(in crate::execute) async fn release(&self, permit: Permit) {
        let counts = Self::counts(&permit);
        let (gate, rates) = (Arc::clone(&permit.gate), permit.rates);
        drop(permit);
        // Whoever waits here says it with what it asks for.
        if counts && gate.state().waiting == 0 {
            let told = self.tell(&gate, rates, 0).await;
            drop(told.inspect_err(|error| debug!(%error, "a request's end is told later")));
        }
    }

    /// Notes that the upstream answered well.
    pub(in crate::execute) async fn went_well(&self, permit: &Permit) {
        if permit.pauses == 0 {
            return;
        }
        permit.gate.state().pauses = 0;
        let key = &permit.gate.key;
        let _ = self.shared.resume(key).await;
        let _ = self.shared.resume(&key.whole()).await;
        debug!(upstream = key.upstream, model = key.model, "an upstream is well again");
    }

    /// Notes that the upstream asks everybody to wait.
    pub(in crate::execute) async fn throttled(&self, permit: &Permit, wait: Duration) {
        let until = self.clock.now() + wait;
        {
            let mut state = permit.gate.state();
            state.blocked_until = state.blocked_until.max(Some(until));
            state.ready.clear();
            state.open_until = None;
        }
        let _ = self.shared.block(&permit.gate.key, wait).await;
    }

    /// Pauses a model, or with `whole` the upstream. Answers how often it was in a row, and for how
    /// long.
    pub(in crate::execute) async fn pause(
        &self,
        permit: &Permit,
        whole: bool,
        first: Duration,
        longest: Duration,
        why: &str,
    ) -> (u32, Duration) {
        let own = &permit.gate.key;
        let key = if whole { own.whole() } else { own.clone() };
        let paused = self.shared.pause(&key, first, longest).await;
        let (pauses, wait) = paused.unwrap_or((permit.pauses + 1, first));
        let until = self.clock.now() + wait;
        let mut state = permit.gate.state();
        state.blocked_until = state.blocked_until.max(Some(until));
        state.pauses = state.pauses.max(pauses);
        state.ready.clear();
        state.open_until = None;
        drop(state);
        let (upstream, model) = (&key.upstream, &key.model);
        warn!(upstream, model, why, pauses, wait = ?wait, "an upstream is paused");
        (pauses, wait)
    }
}

/// What is known of an upstream.
enum Look {
    Blocked,
    Ready,
    Ask,
}
