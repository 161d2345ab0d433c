-- batch_by_key: the batch an owner submitted under a key, with what it was submitted as.
-- locks: none   fence: none   rows: 0 or 1
SELECT b.id, b.content_digest FROM holdfast.batches b WHERE b.owner = $1 AND b.submission_key = $2
