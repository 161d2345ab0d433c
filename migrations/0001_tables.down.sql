-- Everything of ours goes, the schema's own migration ledger excepted.
DROP TABLE holdfast.audit_log, holdfast.workers, holdfast.attempts, holdfast.outcomes,
    holdfast.waiting, holdfast.leases, holdfast.items, holdfast.progress_deltas, holdfast.progress,
    holdfast.batches, holdfast.sweep, holdfast.control;
DROP SEQUENCE holdfast.delta_seq;
DROP SEQUENCE holdfast.token_seq;
