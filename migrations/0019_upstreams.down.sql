DROP FUNCTION holdfast.note_turn, holdfast.note_spent, holdfast.pause_upstream,
    holdfast.block_upstream, holdfast.grant_requests, holdfast.lock_upstream;
DROP TABLE holdfast.spent, holdfast.transcripts, holdfast.upstream_use, holdfast.upstreams;
