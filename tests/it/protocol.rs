//! The lease protocol on a real server: every edge of an item's life, every fence from both sides,
//! and races. Rules are cited by their numbers in `store/locking.rs`.

mod charging;
mod checks;
mod claim;
mod control;
mod deferred;
mod hand_in;
mod interleavings;
mod leases;
mod migration;
mod plans;
mod prune;
mod races;
mod random;
mod reap;
mod release;
mod retry;
mod revoke;
mod schema;
mod status;
mod straggler;
mod sweeps;
mod tokens;
