//! Integration tests.

mod command_executor;
