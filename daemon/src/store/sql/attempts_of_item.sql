-- attempts_of_item: the attempts of one item that did not end in its outcome, oldest first.
-- locks: none   fence: none   rows: any
SELECT a.attempt, a.token, a.worker_id, a.started_at, a.ended_at, a.ending, a.charged, a.error,
       a.stop_reason, a.exit_status, a.signal
  FROM holdfast.attempts a WHERE a.batch_id = $1 AND a.position = $2 ORDER BY a.ended_at, a.token
