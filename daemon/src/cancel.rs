//! cancel.
