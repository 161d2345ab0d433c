//! Takes one rule at a time out of the protocol's functions, and runs the tests that must miss it:
//! one that still passes then protects nothing. `tests/README.md` says which interleaving each is
//! for, and lists the rules that live in the daemon's code.

use std::process::{Command, Stdio};

/// One rule of the protocol's functions, and what they are without it.
struct Mutation {
    rule: &'static str,
    /// Statements that take it out; `pg_temp.rewrite(name, old, new)` changes a function.
    sql: &'static str,
    /// Tests of which each fails then.
    missed_by: &'static [&'static str],
}

/// Changes a function of the schema, and fails where the old words are not in it.
const REWRITE: &str = r"
CREATE FUNCTION pg_temp.rewrite(name text, old text, new text) RETURNS void
LANGUAGE plpgsql AS $rewrite$
DECLARE
    v_now text := (SELECT pg_get_functiondef(p.oid) FROM pg_proc p
                    WHERE p.pronamespace = 'holdfast'::regnamespace AND p.proname = name);
BEGIN
    IF strpos(v_now, old) = 0 THEN
        RAISE EXCEPTION 'cannot mutate: % has no %', name, old;
    END IF;
    EXECUTE replace(v_now, old, new);
END $rewrite$;
";

const MUTATIONS: &[Mutation] = &[
    Mutation {
        rule: "L1: hand-ins take the parent lock",
        sql: "SELECT pg_temp.rewrite('hand_in',
                  'PERFORM holdfast.lock_parent_shared(p_batch);', '')",
        missed_by: &[
            "protocol::control::hand_ins_pass_each_other_and_a_cancel_goes_before_newcomers",
            "protocol::races::finish_against_cancel",
        ],
    },
    Mutation {
        rule: "L1: a cancel takes the parent lock",
        sql: "SELECT pg_temp.rewrite('control_batch',
                  'PERFORM holdfast.lock_parent(p_batch);', '')",
        missed_by: &["protocol::races::finish_against_cancel"],
    },
    Mutation {
        rule: "L2: nothing runs on an old snapshot",
        sql: "SELECT pg_temp.rewrite('assert_protocol', $$<> 'read committed'$$, $$= 'none'$$)",
        missed_by: &[
            "protocol::tokens::every_step_refuses_to_run_on_an_old_snapshot",
            "protocol::leases::nobody_is_current_by_an_old_snapshot",
        ],
    },
    Mutation {
        rule: "L2: lease rows are locked in order",
        sql: "SELECT pg_temp.rewrite('hand_in',
                  'ARRAY(SELECT DISTINCT u.lease FROM unnest(p_lease) u(lease) ORDER BY u.lease)',
                  'ARRAY(SELECT x.lease FROM (SELECT DISTINCT u.lease FROM unnest(p_lease) u(lease)) x
                          ORDER BY random())')",
        missed_by: &["protocol::races::hand_ins_of_the_same_leases_in_different_orders"],
    },
    Mutation {
        rule: "L2: a heartbeat skips busy rows",
        sql: "SELECT pg_temp.rewrite('renew', ' SKIP LOCKED', '')",
        missed_by: &["protocol::leases::a_heartbeat_passes_a_lease_that_a_hand_in_holds"],
    },
    Mutation {
        rule: "L2: a heartbeat locks in the order of hand-ins, or does not wait",
        sql: "SELECT pg_temp.rewrite('renew',
                  'ORDER BY l.batch_id, l.lease_id FOR NO KEY UPDATE OF l SKIP LOCKED',
                  'ORDER BY l.batch_id, l.lease_id DESC FOR NO KEY UPDATE OF l')",
        missed_by: &[
            "protocol::interleavings::a_heartbeat_of_many_leases_against_a_grouped_hand_in",
        ],
    },
    Mutation {
        rule: "L2: a finish does not wait for a sibling's is_current",
        sql: "SELECT pg_temp.rewrite('hand_in', 'l.lease_id = u.lease FOR NO KEY UPDATE',
                  'l.lease_id = u.lease FOR UPDATE')",
        missed_by: &["protocol::leases::who_is_current_stays_so_until_its_commit"],
    },
    Mutation {
        rule: "L4: one claimer at a time",
        sql: "SELECT pg_temp.rewrite('claim', 'NOT holdfast.try_ticket(p_batch)', 'false')",
        missed_by: &["protocol::claim::a_claimer_goes_away_while_another_has_the_ticket"],
    },
    Mutation {
        rule: "L5: a hand-in names a position once",
        sql: "SELECT pg_temp.rewrite('hand_in', 'count(DISTINCT h)', '1000000 + count(DISTINCT h)')",
        missed_by: &["protocol::hand_in::a_hand_in_that_names_a_position_twice_is_refused_whole"],
    },
    Mutation {
        rule: "F6: a repeat finds itself applied",
        sql: "SELECT pg_temp.rewrite('was_applied', 'o.token = p_token', 'false'),
                     pg_temp.rewrite('was_applied', 'a.token = p_token', 'false')",
        missed_by: &[
            "protocol::hand_in::a_repeated_finish_finds_itself_applied_and_counts_nothing",
            "protocol::races::a_finish_against_its_own_repeat",
        ],
    },
    Mutation {
        rule: "F6: a repeat is found among the attempts, too",
        sql: "SELECT pg_temp.rewrite('was_applied', 'AND a.by_holder', 'AND false')",
        missed_by: &[
            "protocol::straggler::a_finish_repeated_after_a_retry_does_not_end_the_item_again",
            "protocol::races::a_stragglers_repeat_against_a_retry",
        ],
    },
    Mutation {
        rule: "F6: the reaper publishes under no lease",
        sql: "SELECT pg_temp.rewrite('reap', $$'failed', NULL, d.token$$,
                  $$'failed', d.lease_id, d.token$$)",
        missed_by: &[
            "protocol::straggler::a_straggler_does_not_take_the_reapers_outcome_for_its_own",
        ],
    },
    Mutation {
        rule: "F6: a repeated stage finds what it stored, wherever it went",
        sql: "SELECT pg_temp.rewrite('stage', 'AND o.staged_lease_id = h.lease', 'AND false')",
        missed_by: &[
            "protocol::checks::a_repeated_stage_finds_itself_applied_wherever_the_item_went",
            "protocol::interleavings::a_repeated_stage_behind_what_ends_its_item_stores_nothing",
        ],
    },
    Mutation {
        rule: "F6: what is staged is not staged again",
        sql: "SELECT pg_temp.rewrite('stage', 'AND NOT EXISTS (SELECT FROM holdfast.staged_outcomes s',
                  'AND NOT EXISTS (SELECT FROM holdfast.staged_outcomes s JOIN (SELECT) q ON false')",
        missed_by: &[
            "protocol::checks::a_repeated_stage_finds_itself_applied_wherever_the_item_went",
        ],
    },
    Mutation {
        rule: "L2: a stage looks after it has locked its lease",
        sql: "SELECT pg_temp.rewrite('stage', 'FOR NO KEY UPDATE', '')",
        missed_by: &[
            "protocol::interleavings::a_repeated_stage_behind_what_ends_its_item_stores_nothing",
        ],
    },
    Mutation {
        rule: "L2: a conclusion looks after it has locked its lease",
        sql: "SELECT pg_temp.rewrite('conclude', 'FOR NO KEY UPDATE', '')",
        missed_by: &[
            "protocol::interleavings::a_conclusion_behind_its_own_workers_delayed_stage_publishes_it",
        ],
    },
    Mutation {
        rule: "I1: a finish leaves what is staged under check",
        sql: "SELECT pg_temp.rewrite('hand_in', 'AND NOT EXISTS (SELECT FROM holdfast.staged_outcomes s',
                  'AND NOT EXISTS (SELECT FROM holdfast.staged_outcomes s JOIN (SELECT) q ON false')",
        missed_by: &[
            "protocol::interleavings::a_finish_behind_its_own_workers_delayed_stage_leaves_it_under_check",
        ],
    },
    Mutation {
        rule: "I1: a staged item is not executed again: claims",
        sql: "SELECT pg_temp.rewrite('take_due', 'AND NOT x.recheck ', '')",
        missed_by: &["protocol::checks::a_claim_takes_no_recheck_and_a_recheck_no_retry"],
    },
    Mutation {
        rule: "I1: a staged item is not executed again: an unanswered recheck",
        sql: "SELECT pg_temp.rewrite('give_back', 'staged_row IS NOT NULL AS staged', 'false AS staged')",
        missed_by: &[
            "protocol::checks::an_unanswered_recheck_is_given_back_by_its_lease_and_counts_nothing",
        ],
    },
    Mutation {
        rule: "F3: who lost a check does not conclude it",
        sql: "SELECT pg_temp.rewrite('conclude', '(p_lease[n], p_token[n], p_position[n]) IN (',
                  '(p_lease[n], p_token[n], p_position[n]) IN (
                        SELECT p_lease[n], p_token[n], p_position[n] UNION ALL')",
        missed_by: &["protocol::checks::only_the_holder_concludes"],
    },
    Mutation {
        rule: "a recheck loses nothing that it passes over",
        sql: "SELECT pg_temp.rewrite('recheck', 'least(v_last, v_left)', 'v_now')",
        missed_by: &[
            "protocol::checks::a_recheck_is_left_for_a_while_to_workers_that_see_its_volume",
        ],
    },
    Mutation {
        rule: "L6: a delta's number is drawn under the lock",
        sql: "SELECT pg_temp.rewrite('hand_in', 'PERFORM holdfast.lock_parent_shared(p_batch);',
                  $$PERFORM nextval('holdfast.delta_seq');
                    PERFORM holdfast.lock_parent_shared(p_batch);$$)",
        missed_by: &["protocol::interleavings::a_delta_draws_its_number_under_the_lock"],
    },
    Mutation {
        rule: "L6: the sequence is not cached",
        sql: "ALTER SEQUENCE holdfast.delta_seq CACHE 32",
        missed_by: &["protocol::schema::sequences_hand_out_their_numbers_in_order"],
    },
    Mutation {
        rule: "counts are read in one statement",
        sql: "SELECT pg_temp.rewrite('current_progress', 'SELECT p.batch_id, p.seq',
                  'SELECT * INTO v_now FROM holdfast.progress
                    WHERE batch_id = p_batch ORDER BY seq DESC LIMIT 1;
                   PERFORM pg_sleep(0.005);
                   SELECT p.batch_id, p.seq'),
                     pg_temp.rewrite('current_progress',
                  'FROM (SELECT * FROM holdfast.progress WHERE batch_id = p_batch ORDER BY seq DESC LIMIT 1) p',
                  'FROM (SELECT (v_now).*) p'),
                     pg_temp.rewrite('current_progress', ' STABLE', ' VOLATILE')",
        missed_by: &[
            "protocol::interleavings::counts_never_run_backwards_beside_those_who_fold_and_prune_them",
        ],
    },
    Mutation {
        rule: "F1, F3: lease and token together",
        sql: "SELECT pg_temp.rewrite('hand_in', 'SELECT l.lease_id, l.token, unnest(l.positions)',
                  'SELECT l.lease_id, p_token[n], unnest(l.positions)')",
        missed_by: &["protocol::straggler::lease_and_token_are_fences_only_together"],
    },
    Mutation {
        rule: "F2: another timeline has another epoch",
        sql: "SELECT pg_temp.rewrite('raise_epoch_if_moved',
                  'v_moved := (c.system_identifier, c.timeline) <> (v_system, v_line)',
                  'v_moved := false')",
        missed_by: &[
            "protocol::tokens::a_sequence_that_lost_its_wal_does_not_repeat_a_token",
            "protocol::tokens::another_timeline_or_system_raises_the_epoch_once",
        ],
    },
    Mutation {
        rule: "F7: claims wait after a failover",
        sql: "SELECT pg_temp.rewrite('claim', 'IF c.quiet_until > v_now', 'IF false')",
        missed_by: &[
            "protocol::tokens::claims_wait_for_the_longest_lease_at_work_until_lost_claims_are_over",
        ],
    },
    Mutation {
        rule: "F2: who is current stays so until its commit",
        sql: "SELECT pg_temp.rewrite('is_current', ' FOR KEY SHARE', '')",
        missed_by: &["protocol::leases::who_is_current_stays_so_until_its_commit"],
    },
    Mutation {
        rule: "F3: a lost position leaves the rest of its group",
        sql: "SELECT pg_temp.rewrite('hand_in', $$IF v_held <> '{}' THEN$$,
                  $$IF cardinality(v_held) < cardinality(p_position) THEN
                        RAISE EXCEPTION 'lost' USING ERRCODE = 'data_exception';
                    END IF;
                    IF v_held <> '{}' THEN$$)",
        missed_by: &["protocol::straggler::one_lost_item_of_a_group_leaves_the_other_nineteen"],
    },
    Mutation {
        rule: "F4: the expiry is judged on the row as it is now",
        sql: "SELECT pg_temp.rewrite('reap', ' AND l.expires_at < clock_timestamp()', '')",
        missed_by: &[
            "protocol::reap::a_lease_within_its_time_is_left_alone",
            "protocol::races::renew_against_reap",
        ],
    },
    Mutation {
        rule: "F5: a hand-in renews what its lease keeps",
        sql: "SELECT pg_temp.rewrite('hand_in', 'expires_at = greatest(l.expires_at,',
                  'expires_at = least(l.expires_at,')",
        missed_by: &[
            "protocol::hand_in::a_hand_in_renews_what_its_lease_keeps_and_never_shortens_it",
        ],
    },
    Mutation {
        rule: "no waiting row lies below its floor: whoever claims",
        sql: "SELECT pg_temp.rewrite('take_due', 'greatest(p_floor, max(d.ready_at))', 'p_now')",
        missed_by: &["protocol::deferred::due_rows_left_behind_are_claimed_later"],
    },
    Mutation {
        rule: "no waiting row lies below its floor: whoever lets an item wait",
        sql: "SELECT pg_temp.rewrite('hand_in',
                  'greatest(clock_timestamp() + make_interval(secs => p_delay_s[n]), v_floor)',
                  'clock_timestamp() + make_interval(secs => p_delay_s[n])')",
        missed_by: &["protocol::deferred::whoever_lets_an_item_wait_writes_at_least_the_floor"],
    },
    Mutation {
        rule: "P4: paused batches end, too",
        sql: "SELECT pg_temp.rewrite('end_if_done', 'b.finished_at IS NULL',
                  $$b.finished_at IS NULL AND b.control = 'open'$$)",
        missed_by: &["protocol::control::a_paused_batch_can_end_and_be_cancelled"],
    },
    Mutation {
        rule: "P7: caps are exact",
        sql: "SELECT pg_temp.rewrite('claim', 'v_room := least(p_want, b.max_running - p.executing)',
                  'v_room := p_want')",
        missed_by: &["protocol::claim::twenty_claimers_never_exceed_a_running_cap_of_three"],
    },
    Mutation {
        rule: "an item that waits to run alone is not charged",
        sql: "SELECT pg_temp.rewrite('take_back', ' OR x.waited', '')",
        missed_by: &[
            "protocol::reap::three_crashes_fail_an_item_as_poison_and_the_third_runs_alone",
        ],
    },
    Mutation {
        rule: "an item with two crashes runs alone",
        sql: "SELECT pg_temp.rewrite('take_due', '>= 2 AS lone', '>= 200 AS lone')",
        missed_by: &[
            "protocol::claim::an_item_with_two_crashes_gets_a_lease_of_its_own_in_its_turn",
        ],
    },
];

/// Runs one test of this program on a mutated schema; whether it passes, and what it printed.
fn passes(test: &str, mutation: &str) -> (bool, String) {
    let ran = Command::new(std::env::current_exe().unwrap())
        .args([test, "--exact"])
        .env("HOLDFAST_TEST_MUTATION", mutation)
        .env("RUST_BACKTRACE", "0")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let printed = String::from_utf8_lossy(&ran.stdout).into_owned();
    assert!(printed.contains("running 1 test"), "there is no test {test}");
    (ran.status.success(), printed)
}

#[test]
#[ignore = "takes minutes: make long"]
fn long_every_rule_of_the_functions_is_missed_by_its_tests() {
    // One rule by its words, or all.
    let only = std::env::var("HOLDFAST_TEST_RULE").unwrap_or_default();
    let mut idle = Vec::new();
    for mutation in MUTATIONS.iter().filter(|mutation| mutation.rule.contains(&only)) {
        let sql = format!("{REWRITE}{}", mutation.sql);
        for test in mutation.missed_by {
            let (passed, printed) = passes(test, &sql);
            // What cannot be mutated fails everything, and proves nothing.
            let mutated = !printed.contains("cannot mutate") && !printed.contains("pg_temp");
            assert!(mutated, "{}: {printed}", mutation.rule);
            eprintln!("{}: {test} {}", mutation.rule, if passed { "PASSES" } else { "fails" });
            if passed {
                idle.push(format!("{}: {test}", mutation.rule));
            }
        }
    }
    assert!(idle.is_empty(), "these tests pass without their rule:\n{}", idle.join("\n"));
}
