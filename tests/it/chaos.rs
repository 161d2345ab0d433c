//! Faults of every kind, and what holds all the same.

mod commit;
