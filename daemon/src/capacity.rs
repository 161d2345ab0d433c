//! capacity.
