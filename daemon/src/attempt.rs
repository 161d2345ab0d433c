//! attempt.
