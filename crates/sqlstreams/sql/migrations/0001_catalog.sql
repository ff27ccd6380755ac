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
    -- How long messages are kept, NULL for ever: see functions/retention.sql. The newest messages within a limit are kept; a partition that lies beyond
    -- one of the limits goes, once every group has resolved it or at once with drop_unread.
    retain_for     interval CHECK (retain_for BETWEEN '1 second' AND '1000 years'),
    retain_bytes   bigint CHECK (retain_bytes >= 1),
    -- in ids
    retain_count   bigint CHECK (retain_count >= 1),
    -- what every group has resolved goes
    retain_resolved boolean NOT NULL DEFAULT false,
    drop_unread    boolean NOT NULL DEFAULT false,
    -- how long dead letters are kept
    retain_dead_for interval CHECK (retain_dead_for BETWEEN '1 second' AND '1000 years'),
    -- The lowest id that is kept: below it the log is gone, or about to go. It only grows, under FOR UPDATE of this row, and nobody's cursor is put below
    -- it: who moves one back, or creates one, reads it under FOR KEY SHARE (hold_first_id) and begins at first_id if that is higher.
    first_id       bigint NOT NULL DEFAULT 1,
    -- message_archive_<id> may hold something
    archived       boolean NOT NULL DEFAULT false,
    created_at     timestamptz NOT NULL DEFAULT now(),
    -- groups that show no sign of life for so long are dropped; NULL: never. See functions/group_expiry.sql
    group_expiry   interval CHECK (group_expiry BETWEEN '1 hour' AND '3650 days')
);
COMMENT ON TABLE stream IS 'One row per stream. Its tables carry the id: message_log_<id>, consumer_group_cursor_<id>, consumer_lease_<id>, exception_queue_<id>, consumer_done_<id>, message_idempotency_<id>, message_delayed_<id>, message_archive_<id>.';

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

CREATE INDEX consumer_group_of_stream ON consumer_group (stream_id, id);

-- When a group was last seen alive, where groups of its stream expire: written when maintenance finds that it has moved, once an hour at most.
CREATE TABLE group_watch (
    group_id   bigint PRIMARY KEY REFERENCES consumer_group ON DELETE CASCADE,
    -- its cursor, as it was then
    mark       text,
    changed_at timestamptz NOT NULL,
    -- when one of its consumers said that it was there
    seen_at    timestamptz,
    -- since when it is said that it will expire
    warned_at  timestamptz
);

-- How many messages a group has passed over, a row for each group that has, updated every few seconds at most while it does.
CREATE TABLE group_tally (
    group_id   bigint PRIMARY KEY REFERENCES consumer_group ON DELETE CASCADE,
    -- before a handler could have them
    expired    bigint NOT NULL DEFAULT 0,
    -- while they waited for another attempt, in groups that want only what is newest
    superseded bigint NOT NULL DEFAULT 0,
    -- ids that retention took before the group had claimed them, of a stream with drop_unread
    dropped    bigint NOT NULL DEFAULT 0
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

-- The partitions of each log, a row for every one that exists and is attached (or is leaving: retention). Written in the transaction that
-- attaches, so whoever sees the row can insert. See functions/partition.sql.
CREATE TABLE log_partition (
    stream_id bigint NOT NULL REFERENCES stream ON DELETE CASCADE,
    -- the leaf is message_log_<stream_id>_p<number>
    number    bigint NOT NULL CHECK (number >= 0),
    -- the first and the last id that it takes, both included
    from_id   bigint NOT NULL,
    to_id     bigint NOT NULL CHECK (to_id > from_id),
    made_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    -- when maintenance first saw that every id of it is final: to_id <= settled. Each of its messages was visible to everybody by then. NULL: not yet
    sealed_at timestamptz,
    -- attached, or a stage of leaving. leaving: its ids are below the stream's first_id, and what is still referred to is being copied; archived: that is done, nobody
    -- needs the leaf any more. The row goes with the leaf. Whether that is attached still, pg_inherits says.
    state     text NOT NULL DEFAULT 'attached' CHECK (state IN ('attached', 'leaving', 'archived')),
    -- since it is not attached any more
    leaving_at timestamptz,
    -- up to which group, and message of it, what is referred to has been copied
    copied_group bigint NOT NULL DEFAULT 0,
    copied_to bigint NOT NULL DEFAULT 0,
    -- what it takes on disk with indexes and TOAST, as of when retention needed to know; of streams with retain_bytes
    bytes     bigint,
    PRIMARY KEY (stream_id, number)
);
CREATE INDEX log_partition_leaving ON log_partition (stream_id, number) WHERE state <> 'attached';

-- What keeps retention from doing what a stream asks for. Written when that changes.
CREATE TABLE retention_hold (
    stream_id bigint PRIMARY KEY REFERENCES stream ON DELETE CASCADE,
    -- group: one has not resolved what is to go. detach: somebody has the log, or an old snapshot, open. privilege: whoever does the upkeep is not the owner of the tables
    reason    text NOT NULL CHECK (reason IN ('group', 'detach', 'privilege')),
    group_id  bigint REFERENCES consumer_group ON DELETE CASCADE,
    since     timestamptz NOT NULL DEFAULT clock_timestamp(),
    -- for people
    detail    text
);
CREATE INDEX retention_hold_group ON retention_hold (group_id);
CREATE INDEX log_partition_unsealed ON log_partition (stream_id, number) WHERE sealed_at IS NULL;

-- How fast ids of a stream are drawn. A row is written only while the stream moves: at most once a minute, and when the rate has risen by a quarter.
CREATE TABLE stream_pace (
    stream_id  bigint PRIMARY KEY REFERENCES stream ON DELETE CASCADE,
    -- where the sequence was, and when: the rate is measured from there
    head       bigint NOT NULL,
    seen_at    timestamptz NOT NULL,
    -- the highest rate, in ids per second, measured over at least 5 s; it counts for half after a day: stream_rate()
    rate       double precision NOT NULL DEFAULT 0,
    rated_at   timestamptz NOT NULL
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_cost_delay = 0, vacuum_truncate = false);

-- Who does the upkeep: the newest generation counts. Rotated like the cursor. See functions/maintain.sql.
CREATE TABLE maintenance (
    generation bigint PRIMARY KEY,
    updates    int NOT NULL DEFAULT 0,
    -- NULL: it was given back
    holder     uuid,
    -- what it says of itself, for people
    name       text,
    since      timestamptz,
    -- from then on anybody may take it
    until      timestamptz
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_cost_delay = 0, vacuum_truncate = false);

INSERT INTO maintenance (generation) VALUES (0);

-- What the steps of the upkeep did. A row appears when a step has done something or has failed. stream_id NULL: of the whole installation.
CREATE TABLE maintenance_step (
    step         text COLLATE "C" NOT NULL,
    stream_id    bigint REFERENCES stream ON DELETE CASCADE,
    started_at   timestamptz NOT NULL,
    duration     interval NOT NULL,
    runs         bigint NOT NULL DEFAULT 0,
    failures     bigint NOT NULL DEFAULT 0,
    -- failures since it last worked: it is put off by 1 s, 2 s, 4 s … up to 5 minutes
    failing      int NOT NULL DEFAULT 0,
    last_error   text,
    failed_at    timestamptz,
    -- not before; NULL: whenever there is something to do
    next_due     timestamptz,
    -- what the step wants to know the next time
    memory       jsonb NOT NULL DEFAULT '{}',
    UNIQUE NULLS NOT DISTINCT (step, stream_id)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_cost_delay = 0, vacuum_truncate = false);

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

-- A stream as maintenance looks at it: where its sequence is.
CREATE TYPE stream_head AS (
    stream_id      bigint,
    head           bigint,
    partition_size bigint
);
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
