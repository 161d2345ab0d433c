//! The values of every metric label but `queue`: closed sets, so that no caller can invent one.

macro_rules! label {
    ($(#[$meta:meta])* $name:ident { $($(#[$about:meta])* $value:ident = $text:literal,)+ }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum $name { $($(#[$about])* $value,)+ }

        impl $name {
            /// Every value.
            pub const ALL: &'static [Self] = &[$(Self::$value),+];
            /// Every value, as it is exported.
            pub const VALUES: &'static [&'static str] = &[$($text),+];

            /// The value as it is exported.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$value => $text,)+ }
            }
        }
    };
}

label! {
    /// The end result of renewing one lease.
    RenewalOutcome {
        /// Renewed at the first try.
        Ok = "ok",
        /// Renewed after at least one failed try.
        Retried = "retried",
        /// The batch was cancelled: told to stop, which is normal.
        Cancelled = "cancelled",
        /// The fence refused it: the lease is gone.
        Rejected = "rejected",
        /// No answer before the deadline.
        Error = "error",
    }
}
label! {
    /// Why an item was given up without being settled.
    LostReason {
        /// Its lease ran out and was taken back.
        Expired = "expired",
        /// It is held under another token.
        Superseded = "superseded",
        /// Its batch was cancelled.
        Cancelled = "cancelled",
        /// The database was away until the trust deadline.
        DbUnreachable = "db_unreachable",
    }
}
label! {
    /// Why an item left its lease on purpose.
    ReleaseReason {
        /// Its outcome or its next attempt was handed in.
        Settled = "settled",
        /// Returned by a drain before it started.
        DrainUnstarted = "drain_unstarted",
        /// Stopped and returned by a drain.
        DrainInterrupted = "drain_interrupted",
        /// Stopped by the worker itself, and returned once the database answered again.
        SelfFenced = "self_fenced",
    }
}
label! {
    /// Why a worker stopped its own work.
    SelfFenceReason {
        /// No renewal was committed in time.
        RenewalDeadline = "renewal_deadline",
        /// This process stood still for a beat or longer: stopped, or its machine overloaded.
        RuntimeStall = "runtime_stall",
    }
}
label! {
    /// A fenced write.
    FenceOp {
        /// Extending the lease.
        Renew = "renew",
        /// Handing in a success.
        Complete = "complete",
        /// Handing in a failure, or an attempt that failed.
        Fail = "fail",
        /// Giving an item back.
        Release = "release",
    }
}
label! {
    /// Why the fence refused a write.
    FenceReason {
        /// Lease id or token do not match.
        Token = "token",
        /// The batch was cancelled.
        Cancelled = "cancelled",
    }
}
label! {
    /// Why an attempt was not charged.
    RefundReason {
        /// A drain returned the item before it started.
        DrainUnstarted = "drain_unstarted",
        /// A drain stopped it.
        DrainInterrupted = "drain_interrupted",
        /// Not the item's fault: no resources to start it, a lost claim, an outage.
        Infrastructure = "infrastructure",
    }
}
label! {
    /// What became of an item that was taken back: by the reaper, or by the guard of a worker that
    /// crashed.
    RecoveryDisposition {
        /// It waits for its next attempt.
        Requeued = "requeued",
        /// Its attempts are spent.
        Failed = "failed",
        /// It was executed: it waits for another check.
        Rechecked = "rechecked",
        /// It was executed, and its checks were lost too often: ended without a verdict.
        Published = "published",
    }
}
label! {
    /// How a sweep of the reaper ended.
    ReaperOutcome {
        /// Completed.
        Ok = "ok",
        /// Expired leases were left alone: the database's clock is not trusted yet.
        Skipped = "skipped",
        /// Failed.
        Error = "error",
    }
}
label! {
    /// How a claim call ended.
    ClaimOutcome {
        /// At least one item was granted.
        Granted = "granted",
        /// Nothing was due.
        Empty = "empty",
        /// Another claimer had the batch's ticket.
        Contended = "contended",
        /// A cap of the batch or of the process allowed nothing.
        Throttled = "throttled",
        /// It failed.
        Error = "error",
    }
}
label! {
    /// What woke the claim loop.
    WakeupSource {
        /// A notification of the database.
        Notify = "notify",
        /// The poll interval.
        Poll = "poll",
        /// A slot of this process became free.
        Local = "local",
    }
}
label! {
    /// A budget of slots.
    SlotKind {
        /// Executions.
        Execution = "execution",
        /// Acceptance checks.
        Check = "check",
    }
}
label! {
    /// What a slot is doing; busy and idle together are the capacity.
    SlotState {
        /// In use.
        Busy = "busy",
        /// Free.
        Idle = "idle",
    }
}
label! {
    /// How an execution ended. `Interrupted` and `Lost` are faults of the platform, not of the
    /// work.
    ExecutionOutcome {
        /// It did what it should.
        Succeeded = "succeeded",
        /// It failed.
        Failed = "failed",
        /// It took longer than its queue allows.
        TimedOut = "timed_out",
        /// Its batch was cancelled.
        Cancelled = "cancelled",
        /// A drain stopped it.
        Interrupted = "interrupted",
        /// Its lease was lost.
        Lost = "lost",
    }
}
label! {
    /// Why an item gets another attempt.
    RetryReason {
        /// The execution failed.
        Error = "error",
        /// It timed out.
        Timeout = "timeout",
        /// Its lease ran out.
        LeaseExpired = "lease_expired",
        /// Its worker crashed, and the guard released it.
        WorkerDied = "worker_died",
        /// It was stopped or returned by its worker.
        Interrupted = "interrupted",
    }
}
label! {
    /// How an item ended.
    ItemOutcome {
        /// Succeeded.
        Succeeded = "succeeded",
        /// Failed.
        Failed = "failed",
    }
}
label! {
    /// Why an item failed that would have been tried again.
    PoisonReason {
        /// Its attempts are spent.
        MaxAttempts = "max_attempts",
        /// Its worker crashed with it too often.
        MaxCrashes = "max_crashes",
    }
}
label! {
    /// Why a check gave no verdict.
    CheckErrorReason {
        /// It did not end in time.
        Timeout = "timeout",
        /// It failed, or what it needs cannot be read.
        Internal = "internal",
    }
}
label! {
    /// Where an item in the care of the checks is.
    CheckState {
        /// It waits for a slot, or for its result to be stored.
        Waiting = "waiting",
        /// It is checked.
        Running = "running",
    }
}
label! {
    /// A pool of database connections.
    DbPool {
        /// Claims, finishes, sweeps.
        Main = "main",
        /// Renewals only.
        Heartbeat = "heartbeat",
    }
}
label! {
    /// What a pooled connection is doing.
    ConnectionState {
        /// Lent to a caller.
        Used = "used",
        /// Open and free.
        Idle = "idle",
    }
}
label! {
    /// A database error, folded to a closed set.
    DbErrorClass {
        /// No connection, or it broke.
        Connection = "connection",
        /// Could not serialize access.
        Serialization = "serialization",
        /// Deadlock.
        Deadlock = "deadlock",
        /// A lock was not free in time.
        LockTimeout = "lock_timeout",
        /// A statement took too long or was cancelled.
        StatementTimeout = "statement_timeout",
        /// The server stops or starts.
        AdminShutdown = "admin_shutdown",
        /// The server accepts no more sessions.
        TooManyConnections = "too_many_connections",
        /// The server is a standby.
        ReadOnly = "read_only",
        /// A constraint was violated.
        Constraint = "constraint",
        /// Anything else.
        Other = "other",
    }
}
label! {
    /// One end of a range.
    Bound {
        /// The lowest.
        Min = "min",
        /// The highest.
        Max = "max",
    }
}
label! {
    /// Where the items are that have not ended.
    ItemState {
        /// Beyond the live window, before its time, or its batch is paused.
        Pending = "pending",
        /// It may be claimed, or is between two attempts.
        Queued = "queued",
        /// Held by a worker that has not started it.
        Leased = "leased",
        /// Held by a worker that runs it.
        Running = "running",
        /// Executed, and under check.
        Checking = "checking",
    }
}
label! {
    /// The state of a batch that has not ended.
    BatchState {
        /// Its items may be claimed.
        Open = "open",
        /// They may not.
        Paused = "paused",
    }
}
label! {
    /// How a worker stands to the database.
    WorkerPresence {
        /// It works.
        Live = "live",
        /// It ends.
        Draining = "draining",
        /// It has sent no heartbeat for longer than its lease.
        Stale = "stale",
    }
}
label! {
    /// A table of which the dead rows matter.
    Table {
        /// Batches.
        Batches = "batches",
        /// Leases.
        Leases = "leases",
        /// Counts of batches.
        Progress = "progress",
        /// What has changed in them since.
        ProgressDeltas = "progress_deltas",
        /// Results under check.
        StagedOutcomes = "staged_outcomes",
        /// Items between two attempts.
        Waiting = "waiting",
        /// Workers.
        Workers = "workers",
    }
}
label! {
    /// A part of what the exporter collects.
    Collector {
        /// Items, leases and batches, by queue.
        Queues = "queues",
        /// Workers.
        Workers = "workers",
        /// The switches and the schema.
        Control = "control",
        /// Live and dead rows.
        Tables = "tables",
        /// Transactions, notifications, the timeline.
        Server = "server",
    }
}

impl DbErrorClass {
    /// The class of an `SQLSTATE`; an error without one never reached the server or lost it.
    #[must_use]
    pub fn of_sqlstate(code: Option<&str>) -> Self {
        match code {
            None | Some("25P03" | "57P05") => Self::Connection,
            Some("40001") => Self::Serialization,
            Some("40P01") => Self::Deadlock,
            Some("55P03") => Self::LockTimeout,
            Some("57014") => Self::StatementTimeout,
            Some("57P01" | "57P02" | "57P03") => Self::AdminShutdown,
            Some("53300") => Self::TooManyConnections,
            Some("25006") => Self::ReadOnly,
            Some(code) if code.starts_with("08") => Self::Connection,
            Some(code) if code.starts_with("23") => Self::Constraint,
            Some(_) => Self::Other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sqlstates_fold_to_their_class() {
        for (code, class) in [
            (None, DbErrorClass::Connection),
            (Some("08006"), DbErrorClass::Connection),
            (Some("25P03"), DbErrorClass::Connection),
            (Some("40001"), DbErrorClass::Serialization),
            (Some("40P01"), DbErrorClass::Deadlock),
            (Some("55P03"), DbErrorClass::LockTimeout),
            (Some("57014"), DbErrorClass::StatementTimeout),
            (Some("57P03"), DbErrorClass::AdminShutdown),
            (Some("53300"), DbErrorClass::TooManyConnections),
            (Some("25006"), DbErrorClass::ReadOnly),
            (Some("23505"), DbErrorClass::Constraint),
            (Some("42601"), DbErrorClass::Other),
        ] {
            assert_eq!(DbErrorClass::of_sqlstate(code), class, "{code:?}");
        }
    }
}
