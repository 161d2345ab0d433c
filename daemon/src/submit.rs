//! submit.
