//! Integration tests.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
#![expect(clippy::float_cmp, reason = "values of an exposition are whole numbers")]

mod acceptance;
mod chaos;
mod cli;
mod command_executor;
mod databases;
mod embedded;
mod exporter;
mod health;
mod keeper;
mod layering;
mod long;
mod metrics;
mod model;
mod mutations;
mod pages;
mod pgbouncer;
mod protocol;
mod support;
mod telemetry;
mod traces;
mod upstreams;
mod workers;
mod workspace;
