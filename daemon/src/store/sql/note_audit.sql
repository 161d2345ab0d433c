-- note_audit: an entry of the audit log about the whole database.
-- locks: none   fence: none   rows: 0
INSERT INTO holdfast.audit_log (actor, verb, detail) VALUES ($1, $2, $3::text::json)
