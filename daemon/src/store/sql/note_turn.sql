-- note_turn: one more line of an attempt's transcript.
-- locks: the lease's row, for key share   fence: lease_id + token + position (F3)   rows: 1, none when lost
SELECT * FROM holdfast.note_turn($1, $2, $3, $4, $5, $6)
