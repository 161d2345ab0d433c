//! The lease protocol as an explicit-state model: every interleaving of a small world, looked at in
//! full. It holds the rules to what they promise, and shows for each of them what breaks without it.
//!
//! In the model are claims, hand-ins (finish, stage, give back), heartbeats, sweeps, cancels, the
//! guard, epochs, and time in ticks; and as faults: answers that do not come while their statement
//! commits late or never, frozen and killed workers, steps and drift of clocks, failovers that lose
//! commits, restored snapshots. A lease is three ticks, the kill grace one, the drift one.
//!
//! Not in it: counts and deltas (L5, L6), lock waits (L3, L4), pauses and retries: the tests of the
//! protocol's functions on a real server look at those.

mod explore;
mod faults;
mod rules;
mod state;
mod steps;

use explore::{
    CANCEL_WINS, ENDS, NO_OVERLAP, NO_STRAGGLER, NO_WASTE, ONE_OUTCOME, PAID_ONCE, Protocol,
    TOKENS_RISE,
};
use rules::{Bounds, Faults, Rule};
use stateright::{Checker, HasDiscoveries, Model};

const SMALL: Bounds = Bounds::SMALL;
const CALM: Faults = SMALL.faults;
const CRASH: Bounds = Bounds { faults: Faults { crashes: 1, ..CALM }, ..SMALL };
const FREEZE: Bounds = Bounds { faults: Faults { freezes: 1, ..CALM }, ..SMALL };
const LOST_ANSWER: Bounds = Bounds { faults: Faults { lost_answers: 1, ..CALM }, ..SMALL };
const CLOCK_STEP: Bounds = Bounds { faults: Faults { clock_steps: 1, ..CALM }, ..SMALL };
const CANCEL: Bounds = Bounds { faults: Faults { cancels: 1, ..CALM }, ..SMALL };
const FAILOVER: Bounds = Bounds { faults: Faults { failovers: 1, ..CALM }, ..SMALL };
const RESTORE: Bounds = Bounds { faults: Faults { restores: 1, ..CALM }, ..SMALL };

/// Looks at every state of a world with all rules: nothing is broken anywhere.
fn holds(name: &str, bounds: Bounds) {
    let checker = Protocol::new(bounds, &[]).checker().threads(2).spawn_bfs().join();
    eprintln!(
        "model: {name}: {} states, {} steps, depth {}",
        checker.unique_state_count(),
        checker.state_count(),
        checker.max_depth()
    );
    let broken = checker.discoveries().into_iter().next();
    if let Some((promise, path)) = broken {
        panic!("{name}: {promise} is broken by {:?}", path.into_actions());
    }
}

/// Looks for the shortest history that breaks a promise without some of the rules.
fn breaks(without: &[Rule], bounds: Bounds, promise: &'static str) {
    let found = HasDiscoveries::AllOf([promise].into());
    let checker =
        Protocol::new(bounds, without).checker().threads(2).finish_when(found).spawn_bfs().join();
    let path = checker.discovery(promise);
    let path = path.unwrap_or_else(|| panic!("without {without:?} it still holds: {promise}"));
    eprintln!("model: without {without:?}: {promise} is broken by {:?}", path.into_actions());
}

#[test]
fn the_promises_hold_when_workers_die_or_freeze() {
    holds("a crash", CRASH);
    holds("a freeze", FREEZE);
}

#[test]
fn the_promises_hold_when_answers_are_lost() {
    holds("a lost answer", Bounds { attempts: 1, ..LOST_ANSWER });
}

#[test]
fn the_promises_hold_beside_a_cancel_and_a_step_of_the_clock() {
    holds("a cancel", CANCEL);
    holds("a step of the database clock", CLOCK_STEP);
}

#[test]
fn the_promises_hold_for_checks_and_groups() {
    holds("checks", Bounds { checks: true, ..SMALL });
    holds("two items", Bounds { items: 2, slots: 2, attempts: 1, ..SMALL });
    let lease = Bounds { items: 2, slots: 2, claim_size: 2, attempts: 1, ..SMALL };
    holds("two items in a lease", lease);
}

#[test]
fn the_promises_hold_after_lost_commits() {
    holds("a lossy failover", Bounds { attempts: 1, ..FAILOVER });
    holds("a restored snapshot", Bounds { attempts: 1, ..RESTORE });
}

/// Of a claim whose commit was lost, the item would be given out again while its execution runs, until
/// the next heartbeat or the trust deadline ends that.
#[test]
fn executions_overlap_after_lost_commits_unless_claims_wait_for_a_lease() {
    breaks(&[Rule::ClaimsSettle], Bounds { attempts: 1, ..FAILOVER }, NO_OVERLAP);
    breaks(&[Rule::ClaimsSettle], Bounds { attempts: 1, ..RESTORE }, NO_OVERLAP);
}

#[test]
#[ignore = "takes minutes"]
fn long_the_promises_hold_with_several_faults_at_once() {
    holds("a lost answer", LOST_ANSWER);
    let lost = Faults { lost_answers: 2, ..CALM };
    holds("two lost answers", Bounds { attempts: 1, faults: lost, ..SMALL });
    holds("a lossy failover", FAILOVER);
    holds("a restored snapshot", RESTORE);
    let process = Faults { crashes: 1, freezes: 1, ..CALM };
    holds("a crash and a freeze", Bounds { faults: process, ..SMALL });
    let checked = Faults { crashes: 1, lost_answers: 1, ..CALM };
    holds("checks and a crash", Bounds { checks: true, faults: checked, ..SMALL });
    let clock = Faults { clock_steps: 1, freezes: 1, cancels: 1, ..CALM };
    holds("a freeze, a cancel and a step of the clock", Bounds { faults: clock, ..SMALL });
    let group = Faults { freezes: 1, ..CALM };
    let lease = Bounds { items: 2, slots: 2, claim_size: 2, ..SMALL };
    holds("two items in a lease", lease);
    let group = Bounds { items: 2, slots: 2, attempts: 1, faults: group, ..SMALL };
    holds("two items and a freeze", group);
}

#[test]
fn a_cancel_without_the_lock_lets_a_hand_in_pass() {
    breaks(&[Rule::CancelTakesLock], CANCEL, CANCEL_WINS);
}

#[test]
fn a_state_read_before_the_lock_lets_a_hand_in_pass_a_cancel() {
    breaks(&[Rule::LookAfterLock], CANCEL, CANCEL_WINS);
}

#[test]
fn a_fence_of_a_counter_alone_lets_a_straggler_publish_after_lost_commits() {
    let counter = [Rule::LeaseIdInFence, Rule::EpochInToken];
    breaks(&counter, Bounds { attempts: 1, ..FAILOVER }, NO_STRAGGLER);
}

#[test]
fn a_token_is_no_fence_after_a_restored_snapshot_unless_the_epoch_was_raised() {
    let token = [Rule::LeaseIdInFence, Rule::EpochRaisedAfterRestore];
    breaks(&token, Bounds { attempts: 1, ..RESTORE }, NO_STRAGGLER);
}

#[test]
fn tokens_fall_after_lost_commits_without_an_epoch() {
    breaks(&[Rule::EpochInToken], Bounds { attempts: 1, ..FAILOVER }, TOKENS_RISE);
    breaks(&[Rule::EpochRaisedAfterRestore], Bounds { attempts: 1, ..RESTORE }, TOKENS_RISE);
}

#[test]
fn a_hand_in_without_a_fence_publishes_twice() {
    breaks(&[Rule::LostIsRefused], SMALL, NO_STRAGGLER);
    breaks(&[Rule::LostIsRefused], LOST_ANSWER, ONE_OUTCOME);
}

#[test]
fn a_group_refused_for_one_lost_lease_throws_work_away() {
    let bounds = Bounds { items: 2, slots: 2, ..SMALL };
    breaks(&[Rule::LostIsLeftOut], bounds, NO_WASTE);
}

#[test]
fn an_expiry_looked_at_only_before_the_lock_takes_the_lease_of_another() {
    breaks(&[Rule::ExpiryLookedAtAgain], Bounds { attempts: 3, ..SMALL }, NO_OVERLAP);
}

#[test]
fn a_reaper_that_does_not_check_the_clock_takes_leases_that_are_trusted() {
    breaks(&[Rule::ClocksAgree], CLOCK_STEP, NO_OVERLAP);
}

#[test]
fn a_margin_one_tick_short_lets_executions_overlap() {
    breaks(&[Rule::MarginCoversKill], SMALL, NO_OVERLAP);
}

#[test]
fn trust_that_counts_from_the_answer_outlives_the_lease() {
    breaks(&[Rule::TrustFromAsking], SMALL, NO_OVERLAP);
}

#[test]
fn without_a_guard_the_execution_of_a_frozen_worker_outlives_its_lease() {
    breaks(&[Rule::Guard], FREEZE, NO_OVERLAP);
}

#[test]
fn a_guard_that_releases_before_the_children_are_gone_lets_executions_overlap() {
    breaks(&[Rule::ReleaseAfterProof], CRASH, NO_OVERLAP);
}

#[test]
fn a_claim_adopted_after_its_answer_was_given_up_runs_beside_another() {
    breaks(&[Rule::NeverAdopt], LOST_ANSWER, NO_OVERLAP);
}

#[test]
fn without_a_full_sweep_a_lease_that_nobody_knows_of_is_held_for_ever() {
    breaks(&[Rule::FullSweep], LOST_ANSWER, ENDS);
}

#[test]
fn without_a_full_sweep_a_batch_whose_last_worker_died_never_ends() {
    breaks(&[Rule::FullSweep], CRASH, ENDS);
}

#[test]
fn a_stored_result_that_is_not_rechecked_is_paid_for_twice() {
    let bounds = Bounds { checks: true, ..CRASH };
    breaks(&[Rule::StagedIsCheckedAgain], bounds, PAID_ONCE);
}
