-- The data model: insert-only ledgers, churn only in narrow tables (daemon/adr/0001-data-model.md).
CREATE SCHEMA IF NOT EXISTS holdfast;

-- Tokens rise with every claim: epoch * 2^31 + (sequence - sequence_base) (F2).
CREATE SEQUENCE holdfast.token_seq AS bigint CACHE 1;

-- Drawn by the statement that inserts the delta, never cached (L6).
CREATE SEQUENCE holdfast.delta_seq AS bigint CACHE 1;

CREATE TABLE holdfast.control (
    singleton         boolean PRIMARY KEY DEFAULT true CHECK (singleton),
    epoch             bigint NOT NULL,
    sequence_base     bigint NOT NULL DEFAULT 0,
    system_identifier bigint NOT NULL,
    timeline          integer NOT NULL,
    claims_enabled    boolean NOT NULL DEFAULT true,
    changed_at        timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- Whose turn the full sweep is: taken by moving the time forward.
CREATE TABLE holdfast.sweep (
    singleton boolean PRIMARY KEY DEFAULT true CHECK (singleton),
    taken_at  timestamptz NOT NULL DEFAULT '-infinity'
);

CREATE TABLE holdfast.batches (
    id             uuid PRIMARY KEY,
    lock_no        integer GENERATED ALWAYS AS IDENTITY UNIQUE,
    owner          text NOT NULL,
    queue          text NOT NULL,
    title          text,
    thread         text,
    submission_key text,
    content_digest bytea NOT NULL,
    spec           json NOT NULL,
    principal      json,
    item_count     integer NOT NULL CHECK (item_count > 0),
    has_not_before boolean NOT NULL DEFAULT false,
    max_running    integer CHECK (max_running > 0),
    max_live       integer NOT NULL CHECK (max_live > 0),
    max_checking   integer NOT NULL CHECK (max_checking > 0),
    max_attempts   integer NOT NULL CHECK (max_attempts BETWEEN 1 AND 100),
    priority       integer NOT NULL DEFAULT 0 CHECK (priority BETWEEN -100 AND 100),
    not_before     timestamptz,
    traceparent    text,
    control        text NOT NULL DEFAULT 'open' CHECK (control IN ('open', 'paused', 'cancelled')),
    created_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    finished_at    timestamptz,
    -- Whether the sweeps still have to clear away what a cancel left behind.
    leftovers      boolean NOT NULL DEFAULT false,
    UNIQUE (owner, submission_key),
    CHECK (control <> 'cancelled' OR finished_at IS NOT NULL)
);
CREATE INDEX batches_unfinished ON holdfast.batches (queue, id) WHERE finished_at IS NULL;
CREATE INDEX batches_leftovers ON holdfast.batches (id) WHERE leftovers;
CREATE INDEX batches_owner ON holdfast.batches (owner, id);

-- One row per transaction under the exclusive parent lock. The newest row plus the deltas after its
-- last_delta is the truth; older rows are the batch's throughput history.
CREATE TABLE holdfast.progress (
    batch_id      uuid NOT NULL,
    seq           bigint NOT NULL,
    next_position integer NOT NULL,
    executing     integer NOT NULL DEFAULT 0 CHECK (executing >= 0),
    checking      integer NOT NULL DEFAULT 0 CHECK (checking >= 0),
    waiting       integer NOT NULL DEFAULT 0 CHECK (waiting >= 0),
    -- How many of the waiting rows only wait for their item's own not_before; they are outside
    -- the live window.
    deferred      integer NOT NULL DEFAULT 0 CHECK (deferred >= 0),
    succeeded     integer NOT NULL DEFAULT 0 CHECK (succeeded >= 0),
    failed        integer NOT NULL DEFAULT 0 CHECK (failed >= 0),
    cancelled     integer NOT NULL DEFAULT 0 CHECK (cancelled >= 0),
    -- Of the three kinds of waiting rows none lies below its floor; floors never fall.
    retry_floor    timestamptz NOT NULL DEFAULT '-infinity',
    recheck_floor  timestamptz NOT NULL DEFAULT '-infinity',
    deferred_floor timestamptz NOT NULL DEFAULT '-infinity',
    last_delta     bigint NOT NULL DEFAULT 0,
    recorded_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (batch_id, seq)
);

-- One row per transaction under the shared parent lock: what it changed in the counts.
CREATE TABLE holdfast.progress_deltas (
    batch_id  uuid NOT NULL,
    id        bigint NOT NULL DEFAULT nextval('holdfast.delta_seq'),
    executing integer NOT NULL,
    checking  integer NOT NULL,
    waiting   integer NOT NULL,
    succeeded integer NOT NULL,
    failed    integer NOT NULL,
    PRIMARY KEY (batch_id, id)
);

-- Written once by COPY. Claims never read it, except for the not_before of batches that have one.
CREATE TABLE holdfast.items (
    batch_id            uuid NOT NULL,
    position            integer NOT NULL,
    key                 text NOT NULL,
    input               json NOT NULL,
    acceptance_criteria json,
    not_before          timestamptz,
    PRIMARY KEY (batch_id, position),
    UNIQUE (batch_id, key)
);
CREATE INDEX items_not_before ON holdfast.items (batch_id, position) WHERE not_before IS NOT NULL;

-- One row per claim. No index on the expiry and a low fillfactor: a heartbeat updates in place.
CREATE TABLE holdfast.leases (
    batch_id   uuid NOT NULL,
    lease_id   uuid NOT NULL,
    token      bigint NOT NULL,
    worker_id  uuid NOT NULL,
    positions  integer[] NOT NULL CHECK (cardinality(positions) > 0),
    -- One packed history per position (holdfast.history_*); null while all are fresh.
    histories  bigint[],
    -- Positions whose execution has begun; for display only.
    started    integer[] NOT NULL DEFAULT '{}',
    granted_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    expires_at timestamptz NOT NULL,
    traceparent text,
    PRIMARY KEY (batch_id, lease_id)
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500,
        autovacuum_vacuum_cost_delay = 0);
CREATE INDEX leases_worker ON holdfast.leases (worker_id);

-- One row per item between two attempts.
CREATE TABLE holdfast.waiting (
    batch_id   uuid NOT NULL,
    position   integer NOT NULL,
    ready_at   timestamptz NOT NULL,
    history    bigint NOT NULL DEFAULT 0,
    last_error text,
    recheck    boolean NOT NULL DEFAULT false,
    deferred   boolean NOT NULL DEFAULT false,
    PRIMARY KEY (batch_id, position)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000,
        autovacuum_vacuum_cost_delay = 0);
CREATE INDEX waiting_due ON holdfast.waiting (batch_id, recheck, deferred, ready_at, position);

-- One row per finished item. Deleted only by a retry and by retention.
CREATE TABLE holdfast.outcomes (
    batch_id         uuid NOT NULL,
    position         integer NOT NULL,
    status           text NOT NULL CHECK (status IN ('succeeded', 'failed')),
    -- The lease that published it; null when a sweep wrote it.
    lease_id         uuid,
    token            bigint NOT NULL,
    attempt          integer NOT NULL,
    worker_id        uuid NOT NULL,
    started_at       timestamptz,
    finished_at      timestamptz NOT NULL,
    result           json,
    result_truncated boolean NOT NULL DEFAULT false,
    result_size      bigint NOT NULL DEFAULT 0,
    error            text,
    stop_reason      text NOT NULL,
    exit_status      integer,
    signal           integer,
    model            text,
    usage            json,
    PRIMARY KEY (batch_id, position)
);
CREATE INDEX outcomes_failed ON holdfast.outcomes (batch_id, position) WHERE status <> 'succeeded';

-- One row per attempt that did not end in an outcome.
CREATE TABLE holdfast.attempts (
    batch_id    uuid NOT NULL,
    position    integer NOT NULL,
    lease_id    uuid NOT NULL,
    token       bigint NOT NULL,
    attempt     integer NOT NULL,
    worker_id   uuid NOT NULL,
    started_at  timestamptz,
    ended_at    timestamptz NOT NULL,
    ending      text NOT NULL CHECK (ending IN ('error', 'timed_out', 'signal', 'expired',
                                                'interrupted', 'unstarted', 'not_admitted',
                                                'retried')),
    charged     boolean NOT NULL,
    -- Whether the holder of lease_id wrote it, rather than a sweep or an operator (F6).
    by_holder   boolean NOT NULL,
    error       text,
    stop_reason text,
    exit_status integer,
    signal      integer
);
CREATE INDEX attempts_item ON holdfast.attempts (batch_id, position, lease_id);

-- One row per start of a worker process.
CREATE TABLE holdfast.workers (
    id           uuid PRIMARY KEY,
    name         text NOT NULL,
    host         text NOT NULL,
    pid          integer NOT NULL,
    version      text NOT NULL,
    queues       text[] NOT NULL,
    slots        integer NOT NULL,
    lease_s      double precision NOT NULL CHECK (lease_s > 0),
    state        text NOT NULL,
    executing    integer NOT NULL DEFAULT 0,
    started_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    heartbeat_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    ended_at     timestamptz,
    exit_reason  text
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500);
CREATE INDEX workers_live ON holdfast.workers (id) WHERE ended_at IS NULL;

CREATE TABLE holdfast.audit_log (
    id       bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    actor    text NOT NULL,
    verb     text NOT NULL,
    batch_id uuid,
    before   text,
    after    text,
    detail   json
);

INSERT INTO holdfast.sweep DEFAULT VALUES;
INSERT INTO holdfast.control (epoch, system_identifier, timeline)
SELECT extract(epoch FROM clock_timestamp())::bigint,
       (SELECT system_identifier FROM pg_control_system()),
       ('x' || substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8))::bit(32)::integer;
