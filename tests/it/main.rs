//! Integration tests.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod databases;
mod embedded;
mod health;
mod metrics;
mod support;
mod telemetry;
