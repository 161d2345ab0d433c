//! Every statement, one file each under `store/sql/`. A test prepares all of them on the migrated
//! schema and checks their headers.

macro_rules! statements {
    ($($(#[$meta:meta])* $name:ident = $file:literal;)*) => {
        $($(#[$meta])* pub const $name: &str = include_str!(concat!("sql/", $file, ".sql"));)*

        /// Every statement with its name, for the test that prepares them.
        pub const ALL: &[(&str, &str)] = &[$(($file, $name)),*];
    };
}

statements! {
    /// What some workers are asked for.
    ASK_WORKERS = "ask_workers";
    /// The attempts of one item that did not end in its outcome, oldest first.
    ATTEMPTS_OF_ITEM = "attempts_of_item";
    /// Nobody asks an upstream for so long.
    BLOCK_UPSTREAM = "block_upstream";
    /// One batch with its counts, of one owner or of anyone.
    BATCH_BY_ID = "batch_by_id";
    /// The batch an owner submitted under a key, with what it was submitted as.
    BATCH_BY_KEY = "batch_by_key";
    /// Of some batches, those that have not ended or ended less than so long ago.
    BATCHES_IN_USE = "batches_in_use";
    /// What a worker has to know of a batch to run its items.
    BATCH_WORK = "batch_work";
    /// Batches, newest first, before an id; of one owner, queue, state or of all.
    BATCHES_PAGE = "batches_page";
    /// Whether claims are granted at all, and what was last said about it.
    CLAIMS_SWITCH = "claims_switch";
    /// Take items of one batch under a new lease.
    CLAIM = "claim";
    /// Clear away what a cancel left behind.
    CLEAR_CANCELLED = "clear_cancelled";
    /// Clear away a chunk of a removed batch.
    CLEAR_REMOVED = "clear_removed";
    /// Mark workers as ended that sent no heartbeat for ten leases and hold none.
    CLOSE_DEAD_WORKERS = "close_dead_workers";
    /// Publish checked outcomes of one batch, or give them back for another check.
    CONCLUDE = "conclude";
    /// Pause, resume or cancel.
    CONTROL_BATCH = "control_batch";
    /// Whether a batch has nothing left and is not ended yet; the look after a finish, without a lock.
    COUNTS = "counts";
    /// Bring back expiries further ahead than their worker's lease, after a step of the database clock (F4).
    CUT_FAR_EXPIRIES = "cut_far_expiries";
    /// Who keeps dead rows of this database from being vacuumed away, and for how long.
    DOCTOR_HOLDERS = "doctor_holders";
    /// Leases that are not as they should be, by kind.
    DOCTOR_LEASES = "doctor_leases";
    /// What the server says of itself, apart from our schema.
    DOCTOR_SERVER = "doctor_server";
    /// Switches, sequences (L6), epoch (F2), sweeps and workers.
    DOCTOR_STATE = "doctor_state";
    /// Dead rows of the narrow tables, and how our tables are vacuumed.
    DOCTOR_TABLES = "doctor_tables";
    /// Whether expired leases of a batch speak of a database that was away.
    DATABASE_WAS_AWAY = "database_was_away";
    /// What the sequences have drawn, beside what was drawn from them (L6).
    DRAWN_NUMBERS = "drawn_numbers";
    /// End a batch with nothing left.
    END_BATCH = "end_batch";
    /// A worker process that ends, and why.
    END_WORKER = "end_worker";
    /// Unfinished batches with nothing left (full sweep).
    EXHAUSTED_BATCHES = "exhausted_batches";
    /// Batches with a lease past its expiry, whatever its worker does (full sweep).
    EXPIRED_BATCHES = "expired_batches";
    /// Ended items of some statuses and verdict classes over a range of positions, with their outcomes; as many as fit, at least one.
    EXPORT_PAGE = "export_page";
    /// A new batch's first counts.
    FIRST_PROGRESS = "first_progress";
    /// The switch of claims, the epoch of tokens, the version of the schema.
    GLOBAL_CONTROL = "global_control";
    /// What every queue has to do, and what is held of it.
    GLOBAL_QUEUES = "global_queues";
    /// The timeline, the oldest open transaction of this database, the queue of notifications.
    GLOBAL_SERVER = "global_server";
    /// Live and dead rows of some tables, by the statistics.
    GLOBAL_TABLES = "global_tables";
    /// How many workers that have not ended are how.
    GLOBAL_WORKERS = "global_workers";
    /// How many requests a worker may begin at an upstream, and when.
    GRANT_REQUESTS = "grant_requests";
    /// Return a whole lease whose claim was never answered.
    GIVE_BACK = "give_back";
    /// Publish outcomes and end attempts of one batch.
    HAND_IN = "hand_in";
    /// A batch whose items are stored in the same transaction; nothing when its owner used the key before.
    INSERT_BATCH = "insert_batch";
    /// Keys, inputs and criteria of claimed positions, read after the claim's commit (L3).
    ITEM_INPUTS = "item_inputs";
    /// An execution that runs alone is about to begin: its worker's death is judged by that.
    MARK_BEGUN = "mark_begun";
    /// Seconds until an item or a batch of some queues that waits for its time may be claimed.
    NEXT_DUE = "next_due";
    /// A page of items from a position on, each with its derived status, its criteria and its verdict.
    ITEMS_PAGE = "items_page";
    /// A page of items of one status from a position on.
    ITEMS_PAGE_STATUS = "items_page_status";
    /// Leases with their batches and workers, the first to expire first; some or all.
    LEASES_PAGE = "leases_page";
    /// What a lease still holds, with its histories, and whether it is under check.
    HELD_BY = "held_by";
    /// Cancelled batches with rows to clear away (full sweep).
    LEFTOVER_BATCHES = "leftover_batches";
    /// What a worker holds, batch by batch.
    LEASES_OF_WORKER = "leases_of_worker";
    /// Workers that have not ended, oldest first; with $1 the others too.
    LIVE_WORKERS = "live_workers";
    /// What an attempt used of a model so far.
    NOTE_SPENT = "note_spent";
    /// One more line of an attempt's transcript.
    NOTE_TURN = "note_turn";
    /// Nobody asks an upstream for so long, longer with every pause in a row.
    PAUSE_UPSTREAM = "pause_upstream";
    /// A paused upstream is well again.
    RESUME_UPSTREAM = "resume_upstream";
    /// A page of items whose verdict is of one class, or that have none, from a position on.
    ITEMS_PAGE_VERDICT = "items_page_verdict";
    /// An entry of the audit log about the whole database.
    NOTE_AUDIT = "note_audit";
    /// Where the item of a key is.
    POSITION_OF_KEY = "position_of_key";
    /// Batches that ended so long ago, after an id.
    PRUNABLE_BATCHES = "prunable_batches";
    /// The oldest chunk of an old audit log.
    PRUNE_AUDIT = "prune_audit";
    /// Deltas that a committed progress row has folded in, of batches that are at work, in chunks.
    PRUNE_DELTAS = "prune_deltas";
    /// A chunk of the evidence of one batch that ended long ago.
    PRUNE_EVIDENCE = "prune_evidence";
    /// What a prune would remove.
    PRUNE_PLAN = "prune_plan";
    /// Progress rows older than a newer one of the same ten seconds; never the newest of a batch, in chunks.
    PRUNE_PROGRESS = "prune_progress";
    /// A chunk of workers that ended long ago.
    PRUNE_WORKERS = "prune_workers";
    /// Raise the token epoch above all tokens before (F2).
    RAISE_EPOCH = "raise_epoch";
    /// Open batches of some queues with something to claim now, best first: priority with ageing, then the owner, then the batch with the fewest executing, then oldest.
    RANK_BATCHES = "rank_batches";
    /// Take back the expired leases of one batch.
    REAP = "reap";
    /// The token epoch beside the server that is there now.
    RECOVERY_PLAN = "recovery_plan";
    /// Take lost checks of one batch under a new lease.
    RECHECK = "recheck";
    /// Batches of some queues with lost checks, paused ones too, the longest waiting first.
    RECHECK_BATCHES = "recheck_batches";
    /// A worker process that has just started.
    REGISTER_WORKER = "register_worker";
    /// Make a batch unknown to everybody that ended long ago.
    REMOVE_BATCH = "remove_batch";
    /// Batches of which rows are still to be cleared away.
    REMOVED_BATCHES = "removed_batches";
    /// One heartbeat of one worker, and what an operator asks of it.
    RENEW = "renew";
    /// Release leases of one batch that a dead worker held.
    RELEASE_DEAD = "release_dead";
    /// A worker taken for dead is there again.
    REOPEN_WORKER = "reopen_worker";
    /// Give a chunk of failed items new attempts.
    RETRY_FAILED = "retry_failed";
    /// Take leases of one batch from their holders, for good (F8).
    REVOKE = "revoke";
    /// Batches with expired leases of workers whose heartbeat is older than their lease (fast sweep).
    SILENT_WORKERS_BATCHES = "silent_workers_batches";
    /// Store results of one batch before their acceptance checks.
    STAGE = "stage";
    /// Criteria, evidence and workspaces of staged positions, read after the commit that took them (L3).
    STAGED_ITEMS = "staged_items";
    /// Grant claims, or grant none, in the whole database.
    SWITCH_CLAIMS = "switch_claims";
    /// Of items taken back, those that ended with it or wait for another check.
    TAKEN_BACK = "taken_back";
    /// The turn to do the full sweep, if the last one is old enough.
    TAKE_SWEEP = "take_sweep";
    /// Of some threads, those with a batch that has not ended or ended less than so long ago.
    THREADS_IN_USE = "threads_in_use";
    /// Batches by id, to be verified one after the other.
    VERIFY_BATCHES = "verify_batches";
    /// Whether the counts, floors and ends of a batch fit its rows.
    VERIFY_COUNTS = "verify_counts";
    /// Items of a range of positions that are missing, or not in exactly one place (I1).
    VERIFY_PLACES = "verify_places";
}
