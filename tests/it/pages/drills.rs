//! Drills: the fault itself on a real system, the alert that sees it, the page that is followed, and the
//! alert that is quiet again. `make drills` runs them all, one after the other.

mod control;
mod database;
mod items;
mod leases;
