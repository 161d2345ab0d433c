-- first_progress: a new batch's first counts.
-- locks: none   fence: the batch is not visible yet   rows: 0
INSERT INTO holdfast.progress (batch_id, seq, next_position) VALUES ($1, 0, 0)
