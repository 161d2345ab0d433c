-- global_control: the switch of claims, the epoch of tokens, the version of the schema.
-- locks: none   fence: none   rows: one
SELECT c.claims_enabled, c.epoch,
       (SELECT coalesce(max(m.version), 0) FROM holdfast.schema_migrations m WHERE m.success)
           AS schema_version
  FROM holdfast.control c
