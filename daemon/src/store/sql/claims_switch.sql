-- claims_switch: whether claims are granted at all, and what was last said about it.
-- locks: none   fence: none   rows: 1
SELECT c.claims_enabled, a.at, a.actor, a.detail ->> 'reason' AS reason
  FROM holdfast.control c
  LEFT JOIN LATERAL (SELECT * FROM holdfast.audit_log x
                      WHERE x.verb IN ('stop_claims', 'start_claims')
                      ORDER BY x.id DESC LIMIT 1) a ON true
