//! Integration tests.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod health;
mod metrics;
mod telemetry;
