//! Executors of upstreams against a scripted one: what every answer and every fault means.

mod agents;
mod fleet;
mod judge;
mod requests;
mod support;
