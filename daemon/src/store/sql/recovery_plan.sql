-- recovery_plan: the token epoch beside the server that is there now, and what a raise would leave behind.
-- locks: none   fence: none   rows: 1
SELECT c.epoch, greatest(c.epoch + 1, extract(epoch FROM clock_timestamp())::bigint) AS next_epoch,
       c.epoch * 2147483648
           + (SELECT CASE WHEN s.is_called THEN s.last_value ELSE s.last_value - 1 END
                FROM holdfast.token_seq s) - c.sequence_base AS last_token,
       c.claims_enabled, c.changed_at,
       greatest(extract(epoch FROM greatest(c.quiet_until, '1970-01-01') - clock_timestamp()),
                0)::double precision AS settles_in_s,
       c.system_identifier <> (SELECT system_identifier FROM pg_control_system())
           OR c.timeline <> ('x' || substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8))::bit(32)::integer
           AS moved,
       pg_postmaster_start_time() AS server_started,
       (SELECT count(*) FROM holdfast.leases) AS leases,
       (SELECT coalesce(sum(cardinality(l.positions)), 0)::bigint FROM holdfast.leases l) AS items_held,
       (SELECT count(*) FROM holdfast.leases l WHERE l.expires_at < clock_timestamp()) AS leases_expired,
       (SELECT max(l.token) FROM holdfast.leases l) AS highest_held,
       (SELECT count(*) FROM holdfast.workers w
         WHERE w.ended_at IS NULL
           AND w.heartbeat_at > clock_timestamp() - make_interval(secs => w.lease_s)) AS live_workers,
       (SELECT count(*) FROM holdfast.batches b WHERE b.finished_at IS NULL) AS unfinished_batches
  FROM holdfast.control c
