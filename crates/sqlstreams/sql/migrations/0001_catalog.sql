-- The catalogue: which streams and consumer groups exist. Everything that moves with traffic lives in the
-- table family of one stream (functions/stream.sql), so that streams never share a hot page.
--
-- Every file of this folder runs with search_path = <the installation's schema>, pg_temp: names are left
-- unqualified, and the functions keep that path by SET search_path FROM CURRENT.

CREATE TABLE stream (
    id             bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name           text COLLATE "C" NOT NULL UNIQUE CHECK (octet_length(name) BETWEEN 1 AND 200),
    payload_type   text NOT NULL CHECK (payload_type IN ('json', 'jsonb', 'text', 'bytea')),
    -- ids per partition of the log
    partition_size bigint NOT NULL CHECK (partition_size BETWEEN 1000 AND 1000000000),
    -- every INSERT rings for the consumers, from inside its transaction
    notify         boolean NOT NULL DEFAULT false,
    -- how long a message's idempotency key is remembered; longer than it takes to find out what became of a commit
    idempotency_window interval NOT NULL DEFAULT '24 hours' CHECK (idempotency_window BETWEEN '5 minutes' AND '365 days'),
    -- only the newest message of each key is kept for good: see functions/current.sql and compact.sql
    compacted      boolean NOT NULL DEFAULT false,
    created_at     timestamptz NOT NULL DEFAULT now()
);
COMMENT ON TABLE stream IS 'One row per stream. Its tables carry the id: message_log_<id>, consumer_group_cursor_<id>, consumer_lease_<id>, exception_queue_<id>, consumer_done_<id>, message_idempotency_<id>, message_delayed_<id>.';

CREATE TABLE consumer_group (
    id              bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    stream_id       bigint NOT NULL REFERENCES stream ON DELETE CASCADE,
    name            text COLLATE "C" NOT NULL CHECK (octet_length(name) BETWEEN 1 AND 200),
    lease_duration  interval NOT NULL DEFAULT '15 seconds' CHECK (lease_duration BETWEEN '100 milliseconds' AND '1 day'),
    -- a range whose lease was lost more often than this is taken apart into suspects
    max_reclaims    int NOT NULL DEFAULT 2 CHECK (max_reclaims BETWEEN 0 AND 1000),
    max_attempts    int NOT NULL DEFAULT 5 CHECK (max_attempts >= 1),
    -- delay before attempt n + 1: random() * least(backoff_cap, backoff_base * backoff_factor ^ (n - 1))
    backoff_base    interval NOT NULL DEFAULT '1 second' CHECK (backoff_base BETWEEN '0' AND '365 days'),
    backoff_factor  double precision NOT NULL DEFAULT 2 CHECK (backoff_factor BETWEEN 1 AND 1000),
    backoff_cap     interval NOT NULL DEFAULT '5 minutes' CHECK (backoff_cap BETWEEN '0' AND '365 days'),
    -- nothing is handed out while paused
    paused          boolean NOT NULL DEFAULT false,
    -- over all consumers: messages that are handed out and not finished; NULL: no limit
    max_in_flight   int CHECK (max_in_flight >= 1),
    -- over all consumers: messages handed out per second; NULL: no limit
    rate_limit      double precision CHECK (rate_limit BETWEEN 1e-6 AND 1e9),
    -- some of its consumers settle in their handlers' transactions: see functions/transaction.sql
    transactional   boolean NOT NULL DEFAULT false,
    -- ordered: messages of one key one at a time, in id order: see functions/lanes.sql
    -- fair: a key of which much waits does not make others wait: see functions/fair.sql
    mode            text NOT NULL DEFAULT 'parallel' CHECK (mode IN ('parallel', 'ordered', 'fair')),
    -- of each key only the newest message, of a compacted stream: see functions/binding_set.sql
    newest_only     boolean NOT NULL DEFAULT false,
    -- what its lanes go by: another server may hash differently, see functions/lanes_mode.sql
    lane_probe      bigint NOT NULL DEFAULT hashtextextended('sqlstreams', 0),
    -- not every message is for it, or was: it has bindings, or gets only what is newest
    bound           boolean NOT NULL DEFAULT false,
    created_at      timestamptz NOT NULL DEFAULT now(),
    UNIQUE (stream_id, name)
);

-- How many messages a group has passed over, a row for each group that has, updated every few seconds at most while it does.
CREATE TABLE group_tally (
    group_id   bigint PRIMARY KEY REFERENCES consumer_group ON DELETE CASCADE,
    -- before a handler could have them
    expired    bigint NOT NULL DEFAULT 0,
    -- while they waited for another attempt, in groups that want only what is newest
    superseded bigint NOT NULL DEFAULT 0
) WITH (fillfactor = 50);

-- What of its stream is for a group: the latest version for ids above its after_id, the one before for those below, and so on.
-- See functions/binding.sql and binding_set.sql.
CREATE TABLE binding_set (
    group_id   bigint NOT NULL REFERENCES consumer_group ON DELETE CASCADE,
    version    int NOT NULL,
    after_id   bigint NOT NULL,
    bindings   jsonb NOT NULL,
    -- they, as SQL over the columns of the log; NULL: every message is for the group
    condition  text,
    changed_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    changed_by text NOT NULL DEFAULT session_user,
    PRIMARY KEY (group_id, version)
);

-- The fence of a stream: how far its log is final. See functions/fence.sql.
-- Rotated like the cursor: the newest generation counts.
CREATE TABLE stream_fence (
    stream_id  bigint NOT NULL REFERENCES stream ON DELETE CASCADE,
    generation bigint NOT NULL,
    updates    int NOT NULL DEFAULT 0,
    -- every id at or below it is committed or never comes
    settled    bigint NOT NULL DEFAULT 0,
    -- under observation: ids up to head are settled once none of the writers runs any more
    head       bigint,
    writers    text[],
    looked_at  timestamptz,
    look_cost  interval,
    PRIMARY KEY (stream_id, generation)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000,
        autovacuum_vacuum_cost_delay = 0, vacuum_truncate = false);

-- Consumer processes that can be seen to have died: each holds a shared advisory lock on its number. See functions/owner.sql.
CREATE SEQUENCE consumer_owner MINVALUE 1 MAXVALUE 2147483647 CYCLE CACHE 1;

-- What operators did that cannot be read off the tables afterwards. Names are copied: the row outlives them.
CREATE TABLE audit (
    id          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at          timestamptz NOT NULL DEFAULT clock_timestamp(),
    actor       text NOT NULL DEFAULT session_user,
    action      text NOT NULL,
    stream_name text NOT NULL,
    group_name  text,
    detail      jsonb NOT NULL DEFAULT '{}'
);

-- Row shapes shared by the functions; the tables themselves exist once per stream.

-- Lanes of an ordered or fair group that were read up to the same position, as bits; and a consumer that waits for lanes.
CREATE TYPE lane_cohort AS (
    lanes    bigint,
    position bigint
);
CREATE TYPE lane_waiter AS (
    holder uuid,
    until  timestamptz
);
-- What a consumer of a fair group wants: messages of these lanes; those of which it gets much; how large a part of the ids the messages
-- of each of the 64 are (NULL: it does not know); and the most ids to look among.
CREATE TYPE lane_wish AS (
    lanes  bigint,
    heavy  bigint,
    shares double precision[],
    most   bigint
);
CREATE TYPE group_cursor AS (
    generation  bigint,
    updates     int,
    claimed     bigint,
    first_open  bigint,
    next_seq    bigint,
    paced_until timestamptz,
    cohorts     lane_cohort[],
    waiters     lane_waiter[]
);
CREATE TYPE group_lease AS (
    seq     bigint,
    token   uuid,
    pending int8multirange,
    lanes   bigint
);
