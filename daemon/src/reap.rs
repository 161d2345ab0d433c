//! reap.
