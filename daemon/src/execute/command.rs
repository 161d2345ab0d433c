//! execute/command.
