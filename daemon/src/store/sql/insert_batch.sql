-- insert_batch: a batch whose items are stored in the same transaction; nothing when its owner used the key before.
-- locks: the unique entry of (owner, submission_key)   fence: that entry   rows: 1, or 0 on a repeat
INSERT INTO holdfast.batches (id, owner, queue, title, thread, submission_key, content_digest, spec,
                              item_count, has_not_before, max_running, max_live, max_checking,
                              max_attempts, priority, not_before, traceparent, principal)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8::text::json, $9, $10, $11, $12, $13, $14, $15, $16, $17,
        $18::text::json)
ON CONFLICT (owner, submission_key) DO NOTHING
RETURNING id
