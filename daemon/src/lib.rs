//! Holdfast: a distributed worker daemon with a lease-fenced batch queue on `PostgreSQL`.
//!
//! Modules follow an item from submit to export: [`submit`] stores it, [`claim`] takes it under a
//! lease, [`attempt`] runs it with [`execute`] while [`heartbeat`] keeps the lease, [`finish`]
//! publishes its outcome, [`reap`] recovers what a dead worker held, and [`export`] reads it out.
//! All SQL is in [`store`]; the lock order and the fences are the module documentation of
//! [`store::locking`].

pub mod attempt;
pub mod cancel;
pub mod capacity;
pub mod check;
pub mod claim;
pub mod cli;
pub mod clock;
pub mod config;
pub mod embedded;
pub mod execute;
pub mod export;
pub mod exporter;
pub mod fault;
pub mod finish;
pub mod guard;
pub mod health;
pub mod heartbeat;
pub mod leases;
pub mod model;
pub mod reap;
pub mod recheck;
pub mod store;
pub mod submit;
pub mod supervise;
pub mod telemetry;
pub mod workspace;
