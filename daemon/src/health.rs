//! `/livez`, `/readyz`, `/startupz` and `/metrics`.
//!
//! Nothing here asks the database, so everything answers while it is away. Alive means that the
//! runtime ticks and that the heartbeat loop still tries to reach the database; whether it answers
//! is a matter of being ready. A process that only lacks its database must not be restarted: that
//! would turn one outage into a fleet restart and lost leases.

mod server;
mod state;

pub use self::server::{HealthServer, Probed};
pub use self::state::{Failing, HealthLimits, HealthState};
