//! finish.
