//! What the facts mean. Thresholds are here and nowhere else.

use std::error::Error;
use std::time::Duration;

use super::super::exit::CliError;
use super::finding::Finding;
use super::finding::Severity::{Critical, Note, Warning};
use crate::model::BatchId;
use crate::store::{Fact, FlightError, StoreError};

/// Versions of `PostgreSQL` that this program is tested with, as `server_version_num` has them.
const VERSIONS: std::ops::Range<f64> = 140_000.0..190_000.0;
/// Share of the connections, and of the notification queue, above which room gets short.
const NEARLY_FULL: f64 = 0.8;
const HALF_FULL: f64 = 0.5;
/// Dead rows of a narrow table that slow its readers down.
const DEAD_ROWS: f64 = 10_000.0;
/// Transactions that a slot or a standby may lag behind.
const LAG: f64 = 1_000_000.0;
/// Difference of the clocks that confuses people and logs; leases do not depend on it (F4).
const CLOCK_OFFSET: Duration = Duration::from_secs(2);

const VACUUM: &str = "dead rows cannot be vacuumed away while this lasts; claims stay fast, tables \
                      and their indexes grow";

/// How facts are judged.
pub(super) struct Judge {
    /// Transactions open for longer are findings.
    pub(super) older_than: Duration,
}

impl Judge {
    /// A finding, if the fact is one.
    pub(super) fn fact(&self, fact: &Fact) -> Option<Finding> {
        let kind = fact.kind.as_str();
        if kind.starts_with("lease_") {
            return lease(fact);
        }
        if kind.starts_with("holder_") {
            return self.holder(fact);
        }
        server(fact).or_else(|| table(fact)).or_else(|| state(fact))
    }

    fn holder(&self, fact: &Fact) -> Option<Finding> {
        let (subject, amount) = (&fact.subject, fact.amount);
        let old = amount > self.older_than.as_secs_f64();
        let severity =
            if amount > 12.0 * self.older_than.as_secs_f64() { Critical } else { Warning };
        match fact.kind.as_str() {
            "holder_session" if old => Some(Finding::new(
                "long_transaction",
                severity,
                format!("a transaction is open for {}: {subject}", seconds(amount)),
                VACUUM,
                "end it where it runs, or with pg_terminate_backend; set \
                 idle_in_transaction_session_timeout for roles of people and reports",
            )),
            "holder_prepared" if old => Some(Finding::new(
                "prepared_transaction",
                severity,
                format!("a prepared transaction waits for {}: {subject}", seconds(amount)),
                VACUUM,
                format!("ask its owner, then COMMIT PREPARED or ROLLBACK PREPARED '{subject}'"),
            )),
            "holder_slot" if fact.beside == 0.0 => Some(Finding::new(
                "idle_slot",
                Warning,
                format!("nobody reads the replication slot {subject}"),
                "the server keeps WAL for it until the disk is full, and dead rows as well when its \
                 standby gives feedback",
                format!(
                    "start its reader, or ask its owner and pg_drop_replication_slot('{subject}')"
                ),
            )),
            "holder_slot" if amount > LAG => Some(Finding::new(
                "lagging_slot",
                Warning,
                format!("the replication slot {subject} is {amount:.0} transactions behind"),
                VACUUM,
                "look for long queries on the standby that reads it",
            )),
            "holder_standby" if amount > LAG => Some(Finding::new(
                "standby_feedback",
                Warning,
                format!("the standby {subject} needs rows of {amount:.0} transactions ago"),
                VACUUM,
                "end the long queries there, or turn hot_standby_feedback off for reports",
            )),
            _ => None,
        }
    }
}

fn server(fact: &Fact) -> Option<Finding> {
    let (subject, share) = (&fact.subject, fact.amount / fact.beside.max(1.0));
    Some(match fact.kind.as_str() {
        "version" if !VERSIONS.contains(&fact.amount) => Finding::new(
            "server_version",
            if fact.amount < VERSIONS.start { Critical } else { Warning },
            format!("the server is PostgreSQL {subject}"),
            "this program is tested with PostgreSQL 14 to 18",
            "use one of these",
        ),
        "standby" => Finding::new(
            "standby",
            Critical,
            "the server is a standby: it takes no writes",
            "nothing can be claimed or handed in here",
            "point database.url at the primary; look at what moved it",
        ),
        "connections" if share >= NEARLY_FULL => Finding::new(
            "connections",
            Warning,
            format!("{:.0} of {:.0} connections are in use", fact.amount, fact.beside),
            "workers that find none left claim nothing, and lose leases when it lasts",
            "look for the application with the most in pg_stat_activity; lower database.pool_size, \
             or put a pooler of transactions before the server",
        ),
        "notifications" if share > HALF_FULL => Finding::new(
            "notification_queue",
            if share > 0.9 { Critical } else { Warning },
            format!("the notification queue is {:.0} % full", share * 100.0),
            "some session has listened without reading for long; when the queue is full, every \
             commit that notifies fails",
            "find the oldest open transaction of a listening session (pid in the server's log), and \
             end it",
        ),
        "blind" => Finding::new(
            "blind",
            Note,
            format!("the role {subject} does not see what other roles run"),
            "long transactions of others are not found",
            format!("GRANT pg_read_all_stats TO {subject}"),
        ),
        "setting_off" => match subject.as_str() {
            "fsync" | "full_page_writes" => Finding::new(
                "not_durable",
                Warning,
                format!("{subject} is off"),
                "a crash of the machine may lose or damage what was acknowledged",
                format!("set {subject} = on, unless the data is for a test"),
            ),
            _ => Finding::new(
                "autovacuum",
                Critical,
                format!("{subject} is off"),
                "dead rows are never cleared away: tables grow until work stands still",
                format!("set {subject} = on"),
            ),
        },
        _ => return None,
    })
}

fn table(fact: &Fact) -> Option<Finding> {
    let subject = &fact.subject;
    Some(match fact.kind.as_str() {
        "dead_rows" if fact.amount >= DEAD_ROWS && fact.amount > 2.0 * fact.beside => Finding::new(
            "dead_rows",
            Warning,
            format!(
                "holdfast.{subject} has {:.0} dead rows beside {:.0}",
                fact.amount, fact.beside
            ),
            "vacuum does not keep up, or something holds it back: heartbeats, sweeps and lists get \
             slower",
            format!("look at what else was found; then VACUUM (ANALYZE) holdfast.{subject}"),
        ),
        "vacuum_off" => Finding::new(
            "autovacuum",
            Critical,
            format!("autovacuum is off for holdfast.{subject}"),
            "its dead rows are never cleared away",
            format!("ALTER TABLE holdfast.{subject} RESET (autovacuum_enabled)"),
        ),
        "vacuum_lazy" => Finding::new(
            "autovacuum",
            Warning,
            format!("holdfast.{subject} has lost its own vacuum settings"),
            "vacuum looks at it too rarely for a table whose rows come and go",
            format!(
                "ALTER TABLE holdfast.{subject} SET (autovacuum_vacuum_scale_factor = 0, \
                 autovacuum_vacuum_threshold = 500)"
            ),
        ),
        _ => return None,
    })
}

fn state(fact: &Fact) -> Option<Finding> {
    let subject = &fact.subject;
    Some(match fact.kind.as_str() {
        "claims_off" => Finding::new(
            "claims_off",
            Warning,
            format!("claims are switched off since {subject}"),
            "running work goes on, nothing new is handed out",
            "switch them on when the reason is gone",
        ),
        "settling" => Finding::new(
            "settling",
            Note,
            format!(
                "the token epoch was raised at {subject}; claims wait for {:.0} s yet",
                fact.amount
            ),
            "commits may have been lost: what runs under lost claims ends first",
            "nothing: claims go on by themselves",
        ),
        "moved" => Finding::new(
            "moved",
            Note,
            "the server or its timeline is another one than at the last claim",
            "the next claim raises the token epoch; commits may have been lost on the way here",
            "holdfast recover plan",
        ),
        "deltas_behind" => Finding::new(
            "deltas_behind",
            Critical,
            format!(
                "holdfast.delta_seq stands at {:.0}, {:.0} is counted already",
                fact.amount, fact.beside
            ),
            "what is handed in from here on would not be counted, and batches would not end (L6)",
            format!("stop the workers; SELECT setval('holdfast.delta_seq', {:.0})", fact.beside),
        ),
        "numbers_cached" => Finding::new(
            "numbers_cached",
            Critical,
            format!("holdfast.{subject} hands out {:.0} numbers at a time", fact.amount),
            "they come out of order: counts are lost, tokens fall (L6, F2)",
            format!("stop the workers; ALTER SEQUENCE holdfast.{subject} CACHE 1"),
        ),
        "sweep_late" => Finding::new(
            "sweep_late",
            Warning,
            format!(
                "no full sweep for {}, though {:.0} workers live",
                seconds(fact.amount),
                fact.beside
            ),
            "leases that nobody knows of are not taken back, batches may not end",
            "look for errors of sweeps in the workers' logs",
        ),
        "workers_silent" => Finding::new(
            "workers_silent",
            Warning,
            format!(
                "{:.0} workers sent no heartbeat for longer than their lease, such as {subject}; the \
                 longest for {}",
                fact.amount,
                seconds(fact.beside)
            ),
            "they died, are frozen or cannot reach the database; what they held goes to others",
            "holdfast workers; look at their machines",
        ),
        "nobody_works" => Finding::new(
            "nobody_works",
            Warning,
            format!("{:.0} open batches are in queues that no live worker serves", fact.amount),
            "they wait",
            "start a worker that serves their queues: holdfast batches, holdfast workers",
        ),
        _ => return None,
    })
}

fn lease(fact: &Fact) -> Option<Finding> {
    let which = format!("{:.0} leases, such as {}", fact.amount, fact.subject);
    let repair = "not by hand-written SQL; keep a copy of the rows and report it";
    Some(match fact.kind.as_str() {
        "lease_overdue" => Finding::new(
            "lease_overdue",
            Critical,
            format!("{which}, expired up to {} ago and were not taken back", seconds(fact.beside)),
            "their items wait for a sweep that does not come",
            "start a worker; if one lives, look for errors of its sweeps, and for the session that \
             blocks the batch (pg_blocking_pids)",
        ),
        "lease_far" => Finding::new(
            "lease_far",
            Warning,
            format!("{which}, expire up to {} from now, beyond their length", seconds(fact.beside)),
            "the database clock was set back: a crash now would be noticed late",
            "the next full sweep cuts them; look at the clock of the database host",
        ),
        "lease_stranger" => Finding::new(
            "lease_stranger",
            Warning,
            format!("{which}, belong to no known worker"),
            "rows of workers were removed by hand, or a restore has brought leases back",
            "they are taken back when they expire",
        ),
        "lease_of_ended" => Finding::new(
            "lease_of_ended",
            Note,
            format!("{which}, belong to workers that have ended"),
            "they ended without giving everything back",
            "they are taken back when they expire",
        ),
        "lease_orphan" => Finding::new(
            "lease_orphan",
            Critical,
            format!("{which}, belong to no batch"),
            "a batch was removed by hand",
            repair,
        ),
        "lease_left_over" => Finding::new(
            "lease_left_over",
            Warning,
            format!("{which}, are left over from a cancelled batch and not marked for clearing"),
            "they do no harm, but nobody clears them away",
            repair,
        ),
        "lease_uneven" => Finding::new(
            "lease_uneven",
            Critical,
            format!("{which}, have not one history for each position"),
            "attempts of their items are counted wrongly",
            repair,
        ),
        "lease_outside" => Finding::new(
            "lease_outside",
            Critical,
            format!("{which}, hold positions that their batch does not have"),
            "they were not made by a claim",
            repair,
        ),
        "lease_overlap" => Finding::new(
            "lease_overlap",
            Critical,
            format!(
                "{:.0} items are in more than one lease, such as of {}",
                fact.amount, fact.subject
            ),
            "two workers may run one item (I1)",
            repair,
        ),
        _ => return None,
    })
}

/// The first look failed.
pub(super) fn unreachable(failed: &FlightError) -> Finding {
    let said = chain(failed);
    if said.contains("statement pooling") {
        return pooler(said);
    }
    Finding::new(
        "unreachable",
        Critical,
        format!("the database does not answer: {said}"),
        "nothing can be looked at",
        "check database.url (holdfast config show), the server and the way to it",
    )
}

/// A look failed: that is worth knowing, and the others go on.
pub(super) fn unseen(what: &str, failed: &FlightError) -> Finding {
    Finding::new(
        "unseen",
        Warning,
        format!("could not look at {what}: {}", chain(failed)),
        "what is wrong there is not in this report",
        "try again; on a busy server it may have taken too long, or the role may not read it",
    )
}

/// What a pooler of transactions means for workers that listen through it, or not.
pub(super) fn pooled(listens_directly: bool) -> Option<Finding> {
    (!listens_directly).then(|| {
        Finding::new(
            "pooled",
            Warning,
            "database.url goes through a pooler of transactions, and database.listen_url is not set",
            "notifications do not arrive: work is found and cancels are noticed by polling alone",
            "set database.listen_url to the server itself",
        )
    })
}

/// Transactions of two connections side by side did not work.
pub(super) fn pooler_failed(failed: &StoreError) -> Finding {
    pooler(format!("two connections could not be used side by side: {}", chain(failed)))
}

fn pooler(what: String) -> Finding {
    Finding::new(
        "pooler",
        Critical,
        what,
        "a pooler of statements, or one with a single connection, cannot be used",
        "use a pooler of transactions with more connections than database.pool_size, or none",
    )
}

/// The schema is not one this program works with.
pub(super) fn schema(wrong: &StoreError) -> Finding {
    Finding::new(
        "schema",
        Critical,
        chain(wrong),
        "workers wait and commands refuse until it fits",
        "holdfast migrate status",
    )
}

/// The clocks of this machine and of the database.
pub(super) fn clock(offset: time::Duration, answered_in: Duration) -> Option<Finding> {
    let beyond = offset.unsigned_abs() > CLOCK_OFFSET + answered_in;
    beyond.then(|| {
        let ahead = if offset.is_negative() { "behind" } else { "ahead of" };
        Finding::new(
            "clock_offset",
            Warning,
            format!(
                "the database clock is {} {ahead} the clock of this machine",
                seconds(offset.unsigned_abs().as_secs_f64())
            ),
            "leases do not depend on it, but logs do not fit together, and a failover to a host with \
             another clock makes leases expire early or late",
            "check the time service of both machines",
        )
    })
}

/// Counts or places of a batch are wrong.
pub(super) fn inconsistent(batch: BatchId, faults: &[String]) -> Finding {
    Finding::new(
        "inconsistent",
        Critical,
        format!("batch {batch}: {}", faults.join("; ")),
        "rows were changed by hand or damaged, or there is a fault in this program (I1, L5)",
        "pause the batch, keep a copy of its rows and report it",
    )
}

/// A batch could not be verified.
pub(super) fn unverified(batch: BatchId, failed: &FlightError) -> Finding {
    unseen(&format!("batch {batch}"), failed)
}

fn chain(error: &(impl Error + Send + Sync + 'static)) -> String {
    CliError::chain(error)
}

fn seconds(seconds: f64) -> String {
    let rounded = Duration::try_from_secs_f64(seconds.max(0.0).round()).unwrap_or_default();
    humantime::format_duration(rounded).to_string()
}

#[cfg(test)]
mod tests {
    use super::super::finding::Severity;
    use super::*;

    fn judged(kind: &str, amount: f64, beside: f64) -> Option<(&'static str, Severity)> {
        let fact = Fact { kind: kind.into(), subject: "it".into(), amount, beside };
        let judge = Judge { older_than: Duration::from_mins(5) };
        judge.fact(&fact).map(|finding| (finding.name, finding.severity))
    }

    #[test]
    fn what_is_in_order_is_no_finding() {
        for (kind, amount, beside) in [
            ("version", 150_018.0, 0.0),
            ("connections", 79.0, 100.0),
            ("notifications", 0.4, 1.0),
            ("holder_session", 299.0, 0.0),
            ("holder_prepared", 1.0, 0.0),
            ("holder_slot", 100.0, 1.0),
            ("holder_standby", 100.0, 0.0),
            ("dead_rows", 9_999.0, 0.0),
            ("dead_rows", 50_000.0, 40_000.0),
        ] {
            assert_eq!(judged(kind, amount, beside), None, "{kind} {amount} {beside}");
        }
        assert_eq!(clock(time::Duration::seconds(-3), Duration::from_secs(2)), None);
        assert_eq!(pooled(true), None);
    }

    #[test]
    fn what_no_test_server_can_be_brought_to_is_found_by_its_numbers() {
        for (kind, amount, beside, found) in [
            ("version", 130_010.0, 0.0, ("server_version", Critical)),
            ("version", 190_000.0, 0.0, ("server_version", Warning)),
            ("standby", 0.0, 0.0, ("standby", Critical)),
            ("connections", 80.0, 100.0, ("connections", Warning)),
            ("notifications", 0.51, 1.0, ("notification_queue", Warning)),
            ("notifications", 0.95, 1.0, ("notification_queue", Critical)),
            ("blind", 0.0, 0.0, ("blind", Note)),
            ("holder_session", 301.0, 0.0, ("long_transaction", Warning)),
            ("holder_session", 3_601.0, 0.0, ("long_transaction", Critical)),
            ("holder_slot", 2_000_000.0, 1.0, ("lagging_slot", Warning)),
            ("holder_standby", 2_000_000.0, 0.0, ("standby_feedback", Warning)),
        ] {
            assert_eq!(judged(kind, amount, beside), Some(found), "{kind} {amount} {beside}");
        }
        for offset in [-9, 9] {
            assert!(clock(time::Duration::seconds(offset), Duration::from_secs(1)).is_some());
        }
        assert!(pooled(false).is_some());
        // The words of PgBouncer.
        let refused = "transaction blocks not allowed in statement pooling mode";
        assert_eq!(unreachable(&FlightError::Unknown(refused.into())).name, "pooler");
        assert_eq!(unreachable(&FlightError::Unknown("away".into())).name, "unreachable");
    }
}
