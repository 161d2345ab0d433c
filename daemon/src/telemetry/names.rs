//! Every name of a metric, a span and a span field, as literals: alerts and dashboards are tested
//! against them.

/// The value of the `queue` label for a queue that is not configured here.
pub const OTHER_QUEUE: &str = "_other";

/// Items handed to this worker by a committed claim.
pub const LEASES_GRANTED: &str = "holdfast_leases_granted_total";
/// Items this process holds now.
pub const LEASES_HELD: &str = "holdfast_leases_held";
/// Renewals by end result.
pub const LEASE_RENEWALS: &str = "holdfast_lease_renewals_total";
/// Round trip of one renewal statement.
pub const LEASE_RENEWAL_DURATION: &str = "holdfast_lease_renewal_duration_seconds";
/// How late a renewal was sent.
pub const LEASE_RENEWAL_LATENESS: &str = "holdfast_lease_renewal_lateness_seconds";
/// Share of the lease left when a renewal committed.
pub const LEASE_RENEWAL_MARGIN: &str = "holdfast_lease_renewal_margin_ratio";
/// Items given up without being settled.
pub const LEASES_LOST: &str = "holdfast_leases_lost_total";
/// Items returned on purpose.
pub const LEASES_RELEASED: &str = "holdfast_leases_released_total";
/// Times a worker stopped its own work.
pub const SELF_FENCES: &str = "holdfast_self_fences_total";
/// Writes the fence refused.
pub const FENCE_REJECTIONS: &str = "holdfast_fence_rejections_total";
/// Attempts not charged to the item.
pub const ATTEMPT_REFUNDS: &str = "holdfast_attempt_refunds_total";
/// Items of expired leases taken back.
pub const LEASES_EXPIRED: &str = "holdfast_leases_expired_total";
/// What became of items taken back.
pub const LEASES_RECOVERED: &str = "holdfast_leases_recovered_total";
/// Time from expiry to recovery.
pub const LEASE_RECOVERY_DELAY: &str = "holdfast_lease_recovery_delay_seconds";
/// Sweeps of the reaper.
pub const REAPER_RUNS: &str = "holdfast_reaper_runs_total";
/// When the reaper last completed a sweep.
pub const REAPER_LAST_SUCCESS: &str = "holdfast_reaper_last_success_timestamp_seconds";

/// Claim calls.
pub const CLAIMS: &str = "holdfast_claims_total";
/// Length of a claim transaction.
pub const CLAIM_DURATION: &str = "holdfast_claim_duration_seconds";
/// Wait for the parent lock of a batch.
pub const PARENT_LOCK_WAIT: &str = "holdfast_parent_lock_wait_seconds";
/// How long an item was next in line before it was granted.
pub const ITEM_WAIT: &str = "holdfast_item_wait_seconds";
/// What woke the claim loop.
pub const WAKEUPS: &str = "holdfast_wakeups_total";
/// Slots of this process.
pub const WORKER_SLOTS: &str = "holdfast_worker_slots";

/// Executions begun.
pub const EXECUTIONS_STARTED: &str = "holdfast_executions_started_total";
/// Executions ended.
pub const EXECUTIONS: &str = "holdfast_executions_total";
/// Length of an execution.
pub const EXECUTION_DURATION: &str = "holdfast_execution_duration_seconds";
/// Executions in flight.
pub const EXECUTIONS_RUNNING: &str = "holdfast_executions_running";
/// Items put back for another attempt.
pub const ITEM_RETRIES: &str = "holdfast_item_retries_total";
/// Items that ended.
pub const ITEMS_FINISHED: &str = "holdfast_items_finished_total";
/// Items that failed though another attempt was wished for.
pub const ITEMS_POISONED: &str = "holdfast_items_poisoned_total";

/// Items published after their check, by verdict.
pub const CHECKS: &str = "holdfast_checks_total";
/// Checks that gave no verdict.
pub const CHECK_ERRORS: &str = "holdfast_check_errors_total";
/// Length of a check.
pub const CHECK_DURATION: &str = "holdfast_check_duration_seconds";
/// Wait for a check slot.
pub const CHECK_WAIT: &str = "holdfast_check_wait_seconds";
/// Items in the care of the checks.
pub const CHECKS_PENDING: &str = "holdfast_checks_pending";

/// Whether the database answered last.
pub const DB_UP: &str = "holdfast_db_up";
/// Connections of a pool.
pub const DB_POOL_CONNECTIONS: &str = "holdfast_db_pool_connections";
/// Most connections of a pool.
pub const DB_POOL_LIMIT: &str = "holdfast_db_pool_connections_limit";
/// Callers waiting for a connection.
pub const DB_POOL_PENDING: &str = "holdfast_db_pool_pending_requests";
/// Database errors.
pub const DB_ERRORS: &str = "holdfast_db_errors_total";
/// The wall clock of this process less that of the database.
pub const DB_CLOCK_OFFSET: &str = "holdfast_db_clock_offset_seconds";
/// Whether notifications are listened for.
pub const LISTENER_UP: &str = "holdfast_notify_listener_up";
/// Items handed in together.
pub const FINISH_GROUP_ITEMS: &str = "holdfast_finish_group_items";
/// Length of a finish transaction.
pub const FINISH_DURATION: &str = "holdfast_finish_duration_seconds";

/// Spans that no collector got.
pub const TELEMETRY_DROPPED: &str = "holdfast_telemetry_dropped_total";

/// The worker's state.
pub const WORKER_STATE: &str = "holdfast_worker_state";
/// How late a timer of the runtime fires.
pub const RUNTIME_LAG: &str = "holdfast_runtime_lag_seconds";
/// Whether the configuration was applied when last read.
pub const CONFIG_RELOADED: &str = "holdfast_config_last_reload_successful";
/// The program that runs.
pub const BUILD_INFO: &str = "holdfast_build_info";
/// The schema versions it works with.
pub const SCHEMA_SUPPORTED: &str = "holdfast_schema_version_supported";

/// Items that have not ended, by state.
pub const ITEMS: &str = "holdfast_items";
/// Items under leases that have not expired.
pub const LEASES_ACTIVE: &str = "holdfast_leases_active";
/// Items under leases that have expired and were not taken back.
pub const LEASES_OVERDUE: &str = "holdfast_leases_overdue";
/// Since when the first item that may be claimed is next in line.
pub const OLDEST_READY: &str = "holdfast_queue_oldest_ready_timestamp_seconds";
/// Since when the oldest item is under check.
pub const OLDEST_CHECKING: &str = "holdfast_queue_oldest_checking_timestamp_seconds";
/// Batches that have not ended.
pub const BATCHES: &str = "holdfast_batches";
/// Workers that have not ended.
pub const WORKERS: &str = "holdfast_workers";
/// The switch of claims.
pub const CLAIMS_ENABLED: &str = "holdfast_claims_enabled";
/// The epoch of fencing tokens.
pub const LEASE_EPOCH: &str = "holdfast_lease_epoch";
/// The version of the schema.
pub const SCHEMA_VERSION: &str = "holdfast_schema_version";
/// The server's timeline.
pub const DB_TIMELINE: &str = "holdfast_db_timeline";
/// When the oldest open transaction began.
pub const OLDEST_TRANSACTION: &str = "holdfast_db_oldest_transaction_timestamp_seconds";
/// How full the queue of notifications is.
pub const NOTIFY_QUEUE_USAGE: &str = "holdfast_notify_queue_usage_ratio";
/// Live rows of a table.
pub const TABLE_LIVE: &str = "holdfast_table_live_tuples";
/// Dead rows of a table.
pub const TABLE_DEAD: &str = "holdfast_table_dead_tuples";
/// Length of a collection.
pub const COLLECT_DURATION: &str = "holdfast_exporter_collect_duration_seconds";
/// Collections that failed.
pub const COLLECT_ERRORS: &str = "holdfast_exporter_collect_errors_total";
/// When everything was last collected.
pub const COLLECT_LAST_SUCCESS: &str = "holdfast_exporter_last_success_timestamp_seconds";

/// Target of every span made here, so that no log level hides the ids they carry.
pub const SPAN_TARGET: &str = "holdfast::span";
/// Instrumentation scope of exported spans.
pub const SCOPE: &str = "holdfast";

/// Name of a span as it is exported.
pub const OTEL_NAME: &str = "otel.name";
/// Kind of a span.
pub const OTEL_KIND: &str = "otel.kind";
/// Status of a span: `ERROR`, or not set.
pub const OTEL_STATUS: &str = "otel.status_code";
/// What went wrong, from a closed set.
pub const ERROR_TYPE: &str = "error.type";
/// Always `holdfast`.
pub const SYSTEM: &str = "messaging.system";
/// `send`, `receive`, `process` or `settle`.
pub const OPERATION: &str = "messaging.operation.type";
/// The queue.
pub const QUEUE: &str = "messaging.destination.name";
/// The batch.
pub const BATCH: &str = "messaging.message.conversation_id";
/// The item: batch and position.
pub const ITEM: &str = "messaging.message.id";
/// How many items an operation covers.
pub const ITEM_COUNT: &str = "messaging.batch.message_count";
/// The worker process.
pub const WORKER: &str = "messaging.client.id";
/// The item's position in its batch.
pub const POSITION: &str = "holdfast.item.position";
/// The lease.
pub const LEASE: &str = "holdfast.lease.id";
/// Its fencing token, as text.
pub const TOKEN: &str = "holdfast.lease.token";
/// How the lease ended.
pub const LEASE_END: &str = "holdfast.lease.end_reason";
/// The number of the attempt.
pub const ATTEMPT: &str = "holdfast.attempt.number";
/// How the attempt before ended, on the link to it.
pub const ATTEMPT_ENDING: &str = "holdfast.attempt.ending";
/// How the execution ended.
pub const EXECUTION_OUTCOME: &str = "holdfast.execution.outcome";
/// The file name of a command's program.
pub const EXECUTABLE: &str = "process.executable.name";
/// The exit status of a command.
pub const EXIT_CODE: &str = "process.exit.code";
/// The signal that ended a command.
pub const EXIT_SIGNAL: &str = "holdfast.process.exit_signal";
/// How many criteria a check is asked.
pub const CHECK_CRITERIA: &str = "holdfast.check.criteria_count";
/// How long it waited for its slot, in seconds.
pub const CHECK_WAITED: &str = "holdfast.check.wait_s";
/// Its verdict.
pub const CHECK_VERDICT: &str = "holdfast.check.verdict";
/// The place of a criterion in its list, from 0.
pub const CRITERION_INDEX: &str = "holdfast.check.criterion_index";
/// Why an item was handed in so, or why the fence refused it.
pub const SETTLE_REASON: &str = "holdfast.settle.reason";
/// Trace of the submit, for backends that cannot search by link.
pub const SUBMIT_TRACE: &str = "holdfast.submit.trace_id";
/// The verb of a control command.
pub const CONTROL_VERB: &str = "holdfast.control.verb";
/// Marks a span that turned out not to be worth exporting.
pub(super) const UNEVENTFUL: &str = "holdfast.uneventful";

/// The name a span field has in log lines; none when it is left out there.
#[must_use]
pub fn in_logs(field: &str) -> Option<&str> {
    match field {
        QUEUE => Some("queue"),
        BATCH => Some("batch"),
        POSITION => Some("position"),
        LEASE => Some("lease"),
        TOKEN => Some("token"),
        ATTEMPT => Some("attempt"),
        WORKER => Some("worker"),
        CONTROL_VERB => Some("verb"),
        other
            if ["otel.", "messaging.", "holdfast.", "error.", "process."]
                .iter()
                .any(|p| other.starts_with(p)) =>
        {
            None
        }
        other => Some(other),
    }
}
