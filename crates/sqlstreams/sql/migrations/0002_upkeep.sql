-- The upkeep of logs: partitions by the rate that is seen, retention, replays, schedules, imports, and who looks after all that.

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
    -- why the leaf cannot be dropped, and since when: somebody's view is made of it, say. It is empty, and not part of the log
    kept_by   text,
    kept_since timestamptz,
    PRIMARY KEY (stream_id, number)
);

CREATE INDEX log_partition_unsealed ON log_partition (stream_id, number) WHERE sealed_at IS NULL;
CREATE INDEX log_partition_leaving ON log_partition (stream_id, number) WHERE state <> 'attached';

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

-- A stream as maintenance looks at it: where its sequence is.
CREATE TYPE stream_head AS (
    stream_id      bigint,
    head           bigint,
    partition_size bigint
);

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

-- When a group was last seen alive, where groups of its stream expire: written when maintenance finds that it has moved, once an hour at most, and as often when
-- somebody asks it for work in vain.
CREATE TABLE group_watch (
    group_id   bigint PRIMARY KEY REFERENCES consumer_group ON DELETE CASCADE,
    -- its cursor, as it was then
    mark       text,
    changed_at timestamptz NOT NULL,
    -- when one of its consumers said that it was there, or asked in vain
    seen_at    timestamptz,
    -- since when it is said that it will expire
    warned_at  timestamptz
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_cost_delay = 0, vacuum_truncate = false);

-- Ranges of the log that a group is handed out once more, or was: see functions/replay.sql. How far each is stands in the group's cursor.
CREATE TABLE replay (
    id         bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    group_id   bigint NOT NULL REFERENCES consumer_group ON DELETE CASCADE,
    from_id    bigint NOT NULL,
    upto_id    bigint NOT NULL,
    -- only messages that one of these matches; NULL: all
    bindings   jsonb,
    -- they and the bindings that the group had, as SQL over the columns of the log; NULL: every message of the range
    condition  text,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    created_by text NOT NULL DEFAULT session_user,
    cancelled_at timestamptz
);

CREATE INDEX replay_group ON replay (group_id, id);

-- A replay as far as it has not been handed out: the ids from next_id to upto_id.
CREATE TYPE group_replay AS (
    id      bigint,
    next_id bigint,
    upto_id bigint
);

-- Schedules: messages that are produced at certain times. What changes with each of its times is in schedule_turn. See functions/schedule.sql.
CREATE TABLE schedule (
    id          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name        text COLLATE "C" NOT NULL UNIQUE CHECK (octet_length(name) BETWEEN 1 AND 200),
    stream_id   bigint NOT NULL REFERENCES stream ON DELETE CASCADE,
    -- when: a cron expression, or one time
    cron        text CHECK (octet_length(cron) <= 1000),
    at          timestamptz CHECK (isfinite(at)),
    -- the IANA name of the time zone whose clocks the expression is about
    zone        text NOT NULL DEFAULT 'UTC' CHECK (octet_length(zone) <= 200),
    -- what becomes of times at which nobody was there: none, the latest, or each of them is made up for
    missed      text NOT NULL DEFAULT 'once' CHECK (missed IN ('skip', 'once', 'all')),
    -- later than this it counts as missed
    grace       interval NOT NULL DEFAULT '1 minute' CHECK (grace BETWEEN '1 second' AND '1 day'),
    -- with 'all': so many at most, the latest
    catch_up    int NOT NULL DEFAULT 100 CHECK (catch_up BETWEEN 1 AND 1000),
    -- the message; the payload in its text form
    key         text COLLATE "C" CHECK (octet_length(key) <= 1024),
    routing_key text COLLATE "C" CHECK (octet_length(routing_key) <= 255),
    headers     jsonb CHECK (jsonb_typeof(headers) = 'object'),
    expires_in  interval CHECK (expires_in > '0'),
    payload     text,
    paused      boolean NOT NULL DEFAULT false,
    -- its times are those after this; what @every counts from
    since       timestamptz NOT NULL,
    created_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    CHECK ((cron IS NULL) <> (at IS NULL))
);

CREATE INDEX schedule_of_stream ON schedule (stream_id);

-- Where a schedule stands. Each change is a row with the next turn instead of the old one, so that readers, who look for the newest, or from
-- the latest due_at on, never meet rows that are dead and cannot be removed yet.
CREATE TABLE schedule_turn (
    schedule_id bigint NOT NULL REFERENCES schedule ON DELETE CASCADE,
    turn        bigint NOT NULL,
    -- times up to here are done with
    done_until  timestamptz NOT NULL,
    -- the next time; NULL: there is none, or it is yet to be computed
    fire_at     timestamptz,
    -- when it is to be looked at; NULL: not at all, it is paused, or nothing comes any more
    due_at      timestamptz,
    -- how many rows of schedule_run it has had
    runs        bigint NOT NULL DEFAULT 0,
    -- how many messages were produced, and for how many times none was
    produced    bigint NOT NULL DEFAULT 0,
    missed      bigint NOT NULL DEFAULT 0,
    -- since the last success
    failures    int NOT NULL DEFAULT 0,
    last_error  text,
    failed_at   timestamptz,
    PRIMARY KEY (schedule_id, turn)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000,
        autovacuum_vacuum_cost_delay = 0, vacuum_truncate = false);

CREATE INDEX schedule_due ON schedule_turn (due_at) WHERE due_at IS NOT NULL;

-- What a schedule did, the latest 100 of each.
CREATE TABLE schedule_run (
    schedule_id bigint NOT NULL REFERENCES schedule ON DELETE CASCADE,
    number      bigint NOT NULL,
    -- due: in time; caught_up: later; skipped: not at all, with those before it; manual: when somebody asked for it
    kind        text NOT NULL CHECK (kind IN ('due', 'caught_up', 'skipped', 'manual')),
    fire_time   timestamptz NOT NULL,
    at          timestamptz NOT NULL,
    message_id  bigint,
    -- for so many times before it there is no message
    missed      bigint NOT NULL DEFAULT 0,
    PRIMARY KEY (schedule_id, number)
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000,
        autovacuum_vacuum_cost_delay = 0, vacuum_truncate = false);

-- How far imports came that have a name, by the ids of where they come from: see functions/import.sql.
CREATE TABLE import_progress (
    stream_id bigint NOT NULL REFERENCES stream ON DELETE CASCADE,
    name      text COLLATE "C" NOT NULL CHECK (octet_length(name) BETWEEN 1 AND 200),
    upto      bigint NOT NULL DEFAULT 0,
    messages  bigint NOT NULL DEFAULT 0,
    at        timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (stream_id, name)
);

-- Where this installation lives: when that is another cluster, database or timeline than it was, it was restored, copied, or the server failed
-- over; see functions/doctor.sql. The latest counts.
CREATE TABLE installation (
    number      bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    -- the cluster's identifier, its timeline, and the oids of database and schema
    system      bigint NOT NULL,
    timeline    bigint NOT NULL,
    database    bigint NOT NULL,
    schema      bigint NOT NULL,
    recorded_at timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- What others work with comes last, so that it is locked for no longer than it takes.

ALTER TYPE group_cursor
    -- up to here ids above claimed may have exception rows, since somebody went back: see functions/seek.sql
    ADD ATTRIBUTE reread_to bigint,
    -- what is handed out once more, without the cursor: see functions/replay.sql
    ADD ATTRIBUTE replays group_replay[];

-- Something that the doctor has found: see functions/doctor.sql.
CREATE TYPE doctor_finding AS (
    code           text,
    severity       text,
    stream         text,
    consumer_group text,
    message        text,
    hint           text,
    fixable        boolean,
    detail         jsonb
);

ALTER TABLE consumer_group
    -- of the bindings that were set last: by which the doctor sees that they are gone from binding_set
    ADD COLUMN binding_version int NOT NULL DEFAULT 0;

CREATE INDEX consumer_group_of_stream ON consumer_group (stream_id, id);

ALTER TABLE group_tally
    -- ids that retention took before the group had claimed them, of a stream with drop_unread
    ADD COLUMN dropped bigint NOT NULL DEFAULT 0;

ALTER TABLE stream
    -- How long messages are kept, NULL for ever: see functions/retention.sql. The newest messages within a limit are kept; a partition that lies beyond
    -- one of the limits goes, once every group has resolved it or at once with drop_unread.
    ADD COLUMN retain_for interval CHECK (retain_for BETWEEN '1 second' AND '1000 years'),
    ADD COLUMN retain_bytes bigint CHECK (retain_bytes >= 1),
    -- in ids
    ADD COLUMN retain_count bigint CHECK (retain_count >= 1),
    -- what every group has resolved goes
    ADD COLUMN retain_resolved boolean NOT NULL DEFAULT false,
    ADD COLUMN drop_unread boolean NOT NULL DEFAULT false,
    -- how long dead letters are kept
    ADD COLUMN retain_dead_for interval CHECK (retain_dead_for BETWEEN '1 second' AND '1000 years'),
    -- The lowest id that is kept: below it the log is gone, or about to go. It only grows, under FOR UPDATE of this row, and nobody's cursor is put below
    -- it: who moves one back, or creates one, reads it under FOR KEY SHARE (hold_first_id) and begins at first_id if that is higher.
    ADD COLUMN first_id bigint NOT NULL DEFAULT 1,
    -- message_archive_<id> may hold something
    ADD COLUMN archived boolean NOT NULL DEFAULT false,
    -- groups that show no sign of life for so long are dropped; NULL: never. See functions/group_expiry.sql
    ADD COLUMN group_expiry interval CHECK (group_expiry BETWEEN '1 hour' AND '3650 days');
COMMENT ON TABLE stream IS 'One row per stream. Its tables carry the id: message_log_<id>, consumer_group_cursor_<id>, consumer_lease_<id>, exception_queue_<id>, consumer_done_<id>, message_idempotency_<id>, message_delayed_<id>, message_archive_<id>.';
