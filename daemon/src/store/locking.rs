//! The lock order and the fences, numbered. Statement headers, functions, comments, tests and
//! runbooks cite these numbers and never repeat the text.
//!
//! # Where an item is
//!
//! - **I1** An item is at or beyond its batch's cursor, or in exactly one lease's `positions`, or in
//!   `waiting`, or in `outcomes`; in nothing else once its batch is cancelled. A position leaves its
//!   lease in the same transaction that puts it anywhere else. Positions never enter an existing
//!   lease; leases are never split or merged. Single positions leave only by the holder's own
//!   transactions; anyone else takes the whole row. Heartbeats write columns from parameters only.
//!   A staged row belongs to a position in the lease it names, or names none and belongs to a waiting
//!   row marked `recheck`; such a position counts as checking and nothing else, is never executed
//!   again, and leaves only by a conclusion or with its whole lease.
//!
//! # Locks
//!
//! - **L1 Parent first.** A transaction that changes what items of a batch are doing takes the
//!   batch's parent lock before it touches any item-level row: a transaction-level advisory lock on
//!   `batches.lock_no`, exclusive to hand work out, take it back, control or end the batch (claim,
//!   recheck, reap, revoke, pause, resume, cancel, retry, end), shared to hand results in (finish, stage,
//!   conclude, give back). A transaction takes one exclusive parent lock and no other, or shared ones
//!   for at most 16 batches, in order of `lock_no`. It never upgrades. Heartbeats take no parent
//!   lock.
//! - **L2 Look after locking.** Batch state, counts and cursors are read in a statement after the
//!   one that took the parent lock. A shared holder then locks its lease rows in
//!   (`batch_id`, `lease_id`) order in a statement of its own (`FOR NO KEY UPDATE` when positions
//!   only go to outcomes or staged, `FOR UPDATE` when one goes to waiting; reapers `FOR UPDATE SKIP
//!   LOCKED`), and reads, writes and deletes in the next. What touches one lease row and nothing else
//!   waits for it. Every transaction is `READ COMMITTED` by
//!   its own `BEGIN`; functions of several steps are `VOLATILE` and assert it; `synchronous_commit`
//!   is at least `on`.
//! - **L3 Short, and nothing depends on the client.** The statement that takes the lock carries its
//!   whole payload; lock to commit is one flight (`BEGIN; SET LOCAL …`, one function call, `COMMIT`)
//!   with no client decision in between; it returns ids, never inputs or results. Lock, statement
//!   and idle timeouts are set for the transaction alone.
//! - **L4 One claimer at a time per batch.** A claimer first tries the batch's ticket, a second
//!   advisory lock; taken means another batch, or back in a few milliseconds. Reapers try the same
//!   ticket. So a control command waits for the finishers in flight and one claimer, however many
//!   workers there are.
//! - **L5 Counts from what happened.** Every delta is computed from the rows a statement really
//!   changed, never from the request. A repeated hand-in that finds itself applied is success and
//!   changes no count. A hand-in names a position once.
//! - **L6 Delta ids** come from a `CACHE 1` sequence, drawn by the inserting statement itself after
//!   the shared lock is held; nobody without the parent lock writes a delta. A worker does not start
//!   where the sequence is cached or stands below what was folded.
//!
//! # Fences
//!
//! - **F1** A lease is identified by `lease_id` (random, chosen by the worker before it sends the
//!   claim) and `token` together. A counter alone can be handed out twice after a failover that lost
//!   WAL.
//! - **F2** The token is what the outside sees. It rises with every claim in the database's life:
//!   `epoch * 2^31 + sequence`. A claim that sees another system identifier or timeline raises the
//!   epoch first. A string in JSON. `holdfast.is_current` lets work ask whether it is current.
//! - **F3** Every write of a holder names batch, position, `lease_id` and token (the give-back of an
//!   unanswered claim: batch and `lease_id`). A position that its lease no longer holds is lost: it
//!   is left out of the group, its attempt publishes nothing, it is counted and logged; the rest
//!   commits; the answer names what was applied.
//! - **F4** The token decides safety; the expiry only decides when another may take the lease. It is
//!   written and judged by the database clock; workers send durations. A reaper takes expired leases
//!   only while the database clock and its own boot-time clock agreed for one whole lease on the
//!   same server start and timeline, and looks once more just before: a step since the last heartbeat
//!   costs nobody a lease. What says that the database was away since a lease was last
//!   renewed (a server start, another epoch, a clock or timeline that changed, three workers and more
//!   than half of those at work that fell silent together) decides who is charged, and delays
//!   nothing.
//! - **F5** A worker trusts its lease until `asked_at + lease - margin` on a boot-time clock,
//!   `asked_at` taken before the claim or renewal was sent; a later reply extends nothing. At that
//!   instant the execution is ended. margin = lease/4, with
//!   `kill grace * 1.01 + 0.02 * lease + slack <= margin` and
//!   `1.1 * lease/3 + 2 * lease/6 <= lease - margin`.
//! - **F6** After an unknown answer the hand-in is repeated: it finds itself applied (an outcome or
//!   an attempt with its lease, a staged row that it made or gave back), or still in its lease, or
//!   lost. What was staged is found wherever it went since. `Rolled back` is not `unknown`. A
//!   claim whose answer never came is never adopted: it is given back by its `lease_id`, and again
//!   at the next heartbeat. A commit counts only if every statement before it answered. A position
//!   that a lease's row holds and its worker does not know of, no hand-in being under way, is given
//!   back by the worker as interrupted.
//!
//! - **F7** After a failover or a restore commits may be lost, a claim's among them: its execution runs,
//!   and nothing in the database says so. So a raise of the epoch that is due to another system
//!   identifier or timeline, or to an operator, begins a wait of the longest lease of the workers that
//!   were at work: until `control.quiet_until` nothing is handed out to be executed. By then whoever
//!   held a lost claim has heard of it or has stopped trusting it (F5). Hand-ins, heartbeats, sweeps and
//!   checks do not wait.
//! - **F8** An operator takes a lease from its holder by giving it a new token, which nobody has, under
//!   the exclusive parent lock: by F3 its holder can neither renew it nor hand anything in under it, and
//!   hears at its next heartbeat that it is gone. Its expiry stays and is never moved forward again, so
//!   the item runs elsewhere only after the holder has stopped trusting it (F5). The expiry is brought
//!   back to now only where the worker has ended, or has been silent for two leases, and the lease has
//!   expired; or where somebody vouches that nothing of the worker runs any more. It counts as an
//!   interruption.
//!
//! The advisory lock classes are 1212564301 (parent) and 1212564302 (ticket), `0x4846434d` and
//! `0x4846434e` in the two-integer form.
