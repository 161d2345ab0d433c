-- batch_work: what a worker has to know of a batch to run its items.
-- locks: none   fence: none   rows: 0 or 1
SELECT b.queue, b.owner, b.spec::text, b.max_attempts, b.traceparent, b.thread,
       b.principal::text
  FROM holdfast.batches b WHERE b.id = $1
