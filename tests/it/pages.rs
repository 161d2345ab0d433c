//! Alerts, dashboards and runbooks: as files, against a real Prometheus that scrapes real workers, and
//! against the faults they are for.

mod blocks;
mod dashboards;
mod drills;
mod files;
mod runbook;
mod server;
mod world;
