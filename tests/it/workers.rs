//! Real worker processes: what they promise while they run, stop, freeze and die.

mod cancel;
mod checks;
mod clock;
mod counted;
mod crash;
mod fairness;
mod faults;
mod fences;
mod guard;
mod in_process;
mod orders;
mod outage;
mod retry;
mod rolling;
mod start;
mod stop;
mod straggler;
mod workspaces;
