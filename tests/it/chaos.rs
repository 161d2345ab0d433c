//! Faults of every kind, and what holds all the same.

mod cancel;
mod commit;
mod failover;
mod history;
mod history_tests;
mod plan;
mod run;
pub(crate) mod servers;
mod witness;
mod work;

use std::time::Duration;

use run::{Orders, run};

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok().filter(|text| !text.is_empty())?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name}={text} is no number")))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_short_run_of_all_faults_breaks_no_promise() {
    run(Orders { seed: 1, length: Duration::from_secs(15) }).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "as long as one likes: make chaos"]
async fn chaos_as_ordered() {
    let seed = number("HOLDFAST_CHAOS_SEED").unwrap_or_else(rand::random);
    let length = Duration::from_secs(number("HOLDFAST_CHAOS_SECONDS").unwrap_or(60));
    run(Orders { seed, length }).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "takes minutes: make long"]
async fn long_chaos_breaks_no_promise() {
    let seed = number("HOLDFAST_CHAOS_SEED").unwrap_or_else(rand::random);
    run(Orders { seed, length: Duration::from_mins(10) }).await;
}
