//! heartbeat.
