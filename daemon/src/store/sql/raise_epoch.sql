-- raise_epoch: raise the token epoch above all tokens before, unless it is not the one seen any more; audited.
-- locks: the control row   fence: the epoch seen ($1)   rows: 1, or 0 when another raised it
--
-- $2: a token known elsewhere that the new ones shall be above as well, or null. Claims under way keep the
-- epoch they have read; of one item they come before all later ones, by its parent lock. Later ones wait for
-- one lease (F7).
WITH raised AS (
    UPDATE holdfast.control c
       SET epoch = greatest(c.epoch + 1, extract(epoch FROM clock_timestamp())::bigint,
                            ($2 >> 31) + 1),
           sequence_base = (SELECT s.last_value FROM holdfast.token_seq s),
           system_identifier = (SELECT system_identifier FROM pg_control_system()),
           timeline = ('x' || substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8))::bit(32)::integer,
           changed_at = clock_timestamp(),
           quiet_until = clock_timestamp() + make_interval(secs => holdfast.longest_lease_s())
     WHERE c.epoch = $1
    RETURNING c.epoch, c.quiet_until
), noted AS (
    INSERT INTO holdfast.audit_log (actor, verb, before, after)
    SELECT $3, 'raise_epoch', $1::text, r.epoch::text FROM raised r
)
SELECT r.epoch,
       extract(epoch FROM r.quiet_until - clock_timestamp())::double precision AS settles_in_s
  FROM raised r
