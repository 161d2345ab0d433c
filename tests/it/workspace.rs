//! Workspaces with real commands and real processes: who gets them, what they see, what is held.

mod check_command;
mod commands;
mod holders;
mod support;
