//! Ranges of single values, and combinations that cannot work.

use std::fmt::Display;
use std::ops::RangeInclusive;
use std::time::Duration;

use tracing_subscriber::EnvFilter;

use super::Settings;
use super::extract::Problems;
use super::layers::KeyPath;
use super::units::size;

const ZERO: Duration = Duration::ZERO;
const MS: Duration = Duration::from_millis(1);
const S: Duration = Duration::from_secs(1);
const MIN: Duration = Duration::from_mins(1);
const H: Duration = Duration::from_hours(1);
const DAY: Duration = Duration::from_hours(24);
const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

/// Notes everything that is out of range or does not go together.
pub(super) fn check(settings: &Settings, problems: &mut Problems<'_>) {
    Ranges(problems).check(settings);
    check_lease(settings, problems);
    check_order(settings, problems);
    check_texts(settings, problems);
    check_access(settings, problems);
    check_upstreams(settings, problems);
    check_queues(settings, problems);
}

/// A key of a section, from its dotted form.
fn key(dotted: &str) -> KeyPath {
    dotted.split('.').map(str::to_owned).collect()
}

fn show(duration: Duration) -> impl Display {
    humantime::format_duration(duration)
}

struct Ranges<'p, 'o>(&'p mut Problems<'o>);

impl Ranges<'_, '_> {
    fn check(&mut self, settings: &Settings) {
        self.times(settings);
        self.numbers(settings);
        self.sizes(settings);
    }

    fn times(&mut self, settings: &Settings) {
        let Settings { database, lease, worker, claim, finish, retry, drain, .. } = settings;
        let Settings { reap, workspace, exporter, .. } = settings;
        self.time("database.connect_timeout", database.connect_timeout, 100 * MS..=MIN);
        self.time("database.statement_timeout", database.statement_timeout, 100 * MS..=MIN);
        self.time("database.lock_timeout", database.lock_timeout, 10 * MS..=MIN);
        self.time("lease.ttl", lease.ttl, 500 * MS..=H);
        self.time("lease.kill_grace", lease.kill_grace, ZERO..=5 * MIN);
        self.time("lease.slack", lease.slack, 10 * MS..=MIN);
        self.time("worker.poll_interval", worker.poll_interval, 10 * MS..=MIN);
        let notified = worker.notified_poll_interval;
        self.time("worker.notified_poll_interval", notified, 10 * MS..=5 * MIN);
        self.time("worker.restart_reset", worker.restart_reset, 10 * MS..=H);
        self.time("claim.rank_interval", claim.rank_interval, 10 * MS..=MIN);
        self.time("claim.ageing", claim.ageing, S..=30 * DAY);
        self.time("finish.group_delay", finish.group_delay, ZERO..=S);
        self.time("retry.backoff_base", retry.backoff_base, MS..=H);
        self.time("retry.backoff_max", retry.backoff_max, MS..=DAY);
        self.time("drain.grace", drain.grace, ZERO..=DAY);
        self.time("drain.interactive_grace", drain.interactive_grace, ZERO..=DAY);
        self.time("drain.release", drain.release, 100 * MS..=5 * MIN);
        self.time("drain.slack", drain.slack, ZERO..=10 * MIN);
        self.time("worker.check_timeout", worker.check_timeout, S..=H);
        self.time("reap.sweep_interval", reap.sweep_interval, 50 * MS..=MIN);
        self.time("reap.full_sweep_max", reap.full_sweep_max, 50 * MS..=MIN);
        self.time("workspace.retention", workspace.retention, ZERO..=365 * DAY);
        self.time("workspace.clean_interval", workspace.clean_interval, 100 * MS..=H);
        self.time("exporter.interval", exporter.interval, S..=5 * MIN);
        self.time("exporter.timeout", exporter.timeout, 100 * MS..=MIN);
    }

    fn numbers(&mut self, settings: &Settings) {
        let Settings { database, worker, claim, finish, retry, limits, batch, .. } = settings;
        self.number("database.pool_size", database.pool_size, 2..=1000);
        self.number("worker.execution_slots", worker.execution_slots, 1..=4096);
        self.number("worker.check_slots", worker.check_slots, 1..=4096);
        self.number("worker.check_backlog", worker.check_backlog, 0..=100_000);
        self.number("worker.claim_max", worker.claim_max, 1..=256);
        self.number("worker.restarts", worker.restarts, 0..=1_000_000);
        self.number("claim.candidates", claim.candidates, 1..=1000);
        self.number("finish.group_items", finish.group_items, 1..=256);
        // An item's counters stop at 255.
        self.number("retry.max_interruptions", retry.max_interruptions, 0..=250);
        self.number("retry.max_admissions", retry.max_admissions, 0..=250);
        self.number("retry.max_crashes", retry.max_crashes, 1..=250);
        self.number("limits.items_per_batch", limits.items_per_batch, 1..=100_000_000);
        // 512 characters of four bytes fit into an index entry, with the batch's id.
        self.number("limits.key_chars", limits.key_chars, 1..=512);
        self.number("limits.title_chars", limits.title_chars, 1..=1024);
        self.number("limits.preview_chars", limits.preview_chars, 1..=100_000);
        self.number("limits.error_chars", limits.error_chars, 100..=100_000);
        self.number("limits.max_attempts", limits.max_attempts, 1..=100);
        self.number("batch.max_attempts", batch.max_attempts, 1..=100);
        self.number("batch.max_live", batch.max_live, 1..=1_000_000);
        self.number("batch.max_checking", batch.max_checking, 1..=1_000_000);
        let running = batch.max_running.map_or(0, std::num::NonZeroU32::get);
        self.number("batch.max_running", running, 0..=1_000_000);
        self.number("telemetry.sample_ratio", settings.telemetry.sample_ratio, 0.0..=1.0);
    }

    fn sizes(&mut self, settings: &Settings) {
        let limits = &settings.limits;
        self.size("finish.group_bytes", settings.finish.group_bytes, KIB..=64 * MIB);
        self.size("limits.input_bytes", limits.input_bytes, KIB..=128 * MIB);
        self.size("limits.line_bytes", limits.line_bytes, KIB..=512 * MIB);
        self.size("limits.result_bytes", limits.result_bytes, KIB..=128 * MIB);
        self.size("limits.log_bytes", limits.log_bytes, 0..=MIB);
    }

    fn time(&mut self, name: &str, value: Duration, range: RangeInclusive<Duration>) {
        self.within(name, &value, range, |time| show(*time).to_string());
    }

    fn number<T: Copy + PartialOrd + Display>(
        &mut self,
        name: &str,
        value: T,
        range: RangeInclusive<T>,
    ) {
        self.within(name, &value, range, T::to_string);
    }

    fn size(&mut self, name: &str, value: usize, range: RangeInclusive<usize>) {
        self.within(name, &value, range, |bytes| size::show(*bytes));
    }

    fn within<T: PartialOrd>(
        &mut self,
        name: &str,
        value: &T,
        range: RangeInclusive<T>,
        show: impl Fn(&T) -> String,
    ) {
        if !range.contains(value) {
            let (least, most) = (show(range.start()), show(range.end()));
            self.0.add(&key(name), format!("is {}, must be {least} to {most}", show(value)));
        }
    }
}

/// F5: an execution must be dead before its lease can be granted again.
fn check_lease(settings: &Settings, problems: &mut Problems<'_>) {
    let lease = &settings.lease;
    if lease.needed_margin() > lease.margin() {
        let what = format!(
            "kill_grace {} * 1.01 + 0.02 * ttl {} + slack {} = {} is more than ttl/4 = {}: lower \
             lease.kill_grace or lease.slack, or raise lease.ttl",
            show(lease.kill_grace),
            show(lease.ttl),
            show(lease.slack),
            show(lease.needed_margin()),
            show(lease.margin()),
        );
        let keys = [key("lease.kill_grace"), key("lease.ttl"), key("lease.slack")];
        problems.add_about(&keys.each_ref().map(Vec::as_slice), what);
    }
}

/// Values of which one bounds the other.
fn check_order(settings: &Settings, problems: &mut Problems<'_>) {
    let Settings { database, worker, retry, limits, batch, exporter, .. } = settings;
    let time = |time| show(time).to_string();
    let number = |number: u8| number.to_string();
    let mut not_above = |low: (&str, String), high: (&str, String), holds: bool| {
        if !holds {
            let what = format!("is {}, above {} = {}", low.1, high.0, high.1);
            problems.add_about(&[&key(low.0), &key(high.0)], what);
        }
    };
    not_above(
        ("database.lock_timeout", time(database.lock_timeout)),
        ("database.statement_timeout", time(database.statement_timeout)),
        database.lock_timeout <= database.statement_timeout,
    );
    not_above(
        ("worker.poll_interval", time(worker.poll_interval)),
        ("worker.notified_poll_interval", time(worker.notified_poll_interval)),
        worker.poll_interval <= worker.notified_poll_interval,
    );
    not_above(
        ("retry.backoff_base", time(retry.backoff_base)),
        ("retry.backoff_max", time(retry.backoff_max)),
        retry.backoff_base <= retry.backoff_max,
    );
    not_above(
        ("exporter.timeout", time(exporter.timeout)),
        ("exporter.interval", time(exporter.interval)),
        exporter.timeout <= exporter.interval,
    );
    not_above(
        ("limits.input_bytes", size::show(limits.input_bytes)),
        ("limits.line_bytes", size::show(limits.line_bytes)),
        limits.input_bytes <= limits.line_bytes,
    );
    not_above(
        ("batch.max_attempts", number(batch.max_attempts)),
        ("limits.max_attempts", number(limits.max_attempts)),
        batch.max_attempts <= limits.max_attempts,
    );
}

fn check_texts(settings: &Settings, problems: &mut Problems<'_>) {
    if EnvFilter::builder().parse(&settings.log.level).is_err() {
        let what = "is no level (off, error, warn, info, debug, trace) and no list of directives \
                    such as \"info,holdfast::claim=debug\"";
        problems.add(&key("log.level"), what);
    }
    let name = settings.worker.name.as_deref().unwrap_or("host");
    for (name, text) in [
        ("worker.name", name),
        ("telemetry.service_name", settings.telemetry.service_name.as_str()),
    ] {
        if text.is_empty() || text.chars().count() > 128 || text.chars().any(char::is_control) {
            problems.add(&key(name), "must be 1 to 128 characters, no control characters");
        }
    }
}

fn check_access(settings: &Settings, problems: &mut Problems<'_>) {
    for (name, what) in settings.access.problems() {
        problems.add(&key(name), what);
    }
    for (name, what) in settings.workspace.problems() {
        problems.add(&key(name), what);
    }
}

fn check_upstreams(settings: &Settings, problems: &mut Problems<'_>) {
    for (name, upstream) in &settings.upstreams {
        if name.is_empty() || name.len() > 64 || name.chars().any(char::is_control) {
            let what = "the name must be 1 to 64 characters, no control characters";
            problems.add(&["upstreams".to_owned(), name.clone()], what);
        }
        for (key, what) in upstream.problems() {
            problems.add(&["upstreams".to_owned(), name.clone(), key.to_owned()], what);
        }
    }
}

fn check_queues(settings: &Settings, problems: &mut Problems<'_>) {
    for name in &settings.worker.queues {
        let table = ["queues".to_owned(), name.to_string()];
        if !settings.queues.contains_key(name) && !problems.touch(&table) {
            let what = format!("queue `{name}` has no [queues.{name}]");
            problems.add(&key("worker.queues"), what);
        }
    }
    for (name, queue) in &settings.queues {
        let at = |key: &str| ["queues".to_owned(), name.to_string(), key.to_owned()];
        for (key, what) in queue.problems(&settings.limits) {
            problems.add(&at(key), what);
        }
        if let Some(upstream) = queue.upstream()
            && !settings.upstreams.contains_key(upstream)
            && !problems.touch(&["upstreams".to_owned(), upstream.to_owned()])
        {
            problems.add(&at("upstream"), format!("there is no [upstreams.{upstream}]"));
        }
    }
}
