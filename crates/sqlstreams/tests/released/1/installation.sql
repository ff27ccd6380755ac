-- Which migrations this schema has had. Programs of every version read it before anything else: it keeps its columns.
CREATE TABLE schema_migration (
    version     int PRIMARY KEY,
    -- the oldest version of programs that can work with the schema since
    oldest      int NOT NULL,
    name        text NOT NULL,
    checksum    text NOT NULL,
    -- which functions came with it; NULL: none yet
    functions   text,
    applied_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    applied_by  text NOT NULL DEFAULT session_user,
    -- NULL: it is under way, or was interrupted
    finished_at timestamptz
);
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

INSERT INTO schema_migration (version, oldest, name, checksum, functions, finished_at) VALUES (1, 1, 'catalog', '', '9d047efac3b302e2', now());
-- Refusals shared by the functions. The SQLSTATEs of class SQ are part of the protocol: clients match on them.

-- Under REPEATABLE READ and SERIALIZABLE every statement of a transaction reads one old snapshot, so a claim would
-- take "not visible" for "will never come" and lose messages. A function cannot override the isolation: refuse.
CREATE OR REPLACE FUNCTION require_read_committed() RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
        RAISE EXCEPTION 'this transaction is %, and consuming needs READ COMMITTED', upper(current_setting('transaction_isolation'))
            USING ERRCODE = 'SQ003',
                  HINT = 'Start it with BEGIN ISOLATION LEVEL READ COMMITTED.';
    END IF;
END $$;

CREATE OR REPLACE FUNCTION require_stream(p_stream bigint) RETURNS stream
LANGUAGE plpgsql STABLE AS $$
DECLARE
    s stream;
BEGIN
    SELECT * INTO s FROM stream WHERE id = p_stream;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'there is no stream with id %', p_stream
            USING ERRCODE = 'SQ001', HINT = 'It may have been dropped. Table stream lists those that exist.';
    END IF;
    RETURN s;
END $$;

CREATE OR REPLACE FUNCTION require_group(p_stream bigint, p_group bigint) RETURNS consumer_group
LANGUAGE plpgsql STABLE AS $$
DECLARE
    g consumer_group;
BEGIN
    SELECT * INTO g FROM consumer_group WHERE id = p_group AND stream_id = p_stream;
    IF NOT FOUND THEN
        PERFORM require_stream(p_stream);
        RAISE EXCEPTION 'stream % has no consumer group with id %', p_stream, p_group
            USING ERRCODE = 'SQ002', HINT = 'It may have been dropped. Table consumer_group lists those that exist.';
    END IF;
    RETURN g;
END $$;

CREATE OR REPLACE FUNCTION require_idempotency_window(p_window interval) RETURNS void
LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    IF p_window NOT BETWEEN interval '5 minutes' AND interval '365 days' THEN
        RAISE EXCEPTION 'idempotency keys are remembered for 5 minutes to 365 days, not for %', p_window
            USING ERRCODE = 'SQ004', HINT = 'The default, 24 hours, suits most streams.';
    END IF;
END $$;

-- Refuses an argument unless p_holds.
CREATE OR REPLACE FUNCTION require_that(p_holds boolean, p_text text, p_hint text) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF p_holds IS NOT TRUE THEN
        RAISE EXCEPTION '%', p_text USING ERRCODE = 'SQ004', HINT = p_hint;
    END IF;
END $$;

CREATE OR REPLACE FUNCTION require_limit(p_limit bigint) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF p_limit < 1 THEN
        RAISE EXCEPTION 'a limit is at least 1, not %', p_limit USING ERRCODE = 'SQ004', HINT = 'Say how many at most.';
    END IF;
END $$;

CREATE OR REPLACE FUNCTION require_name(p_what text, p_name text) RETURNS void
LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    IF p_name IS NULL OR octet_length(p_name) NOT BETWEEN 1 AND 200 THEN
        RAISE EXCEPTION 'a % name takes 1 to 200 bytes, this one has %', p_what, coalesce(octet_length(p_name), 0)
            USING ERRCODE = 'SQ004', HINT = 'Choose a shorter name, or one that is not empty.';
    END IF;
END $$;

-- A template of a function's definition with a tag between the dollars that quote its body: the schema's name, which is in the body, may have two
-- dollars in a row itself.
CREATE OR REPLACE FUNCTION dollar_quoted(p_template text) RETURNS text
LANGUAGE plpgsql STABLE AS $fn$
DECLARE
    tag text := '$body$';
BEGIN
    WHILE position(tag IN current_schema()) > 0 LOOP
        tag := '$x' || substr(tag, 2);
    END LOOP;
    RETURN replace(p_template, '$$', tag);
END $fn$;

-- Wake-ups. They are hints: whoever gets none finds the messages by polling.

-- The channel of this installation. By number: a name may be longer than a channel's may.
CREATE OR REPLACE FUNCTION ring_channel() RETURNS text
LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
    SELECT 'sqlstreams_' || (SELECT oid FROM pg_namespace WHERE nspname = current_schema())
$$;

-- Tells the consumers of these streams that there is something to do, when the transaction commits. Not while the server's queue
-- of notifications fills up, since some session listens and does not read: a full one would make the commit fail.
CREATE OR REPLACE FUNCTION ring(p_streams bigint[]) RETURNS void
LANGUAGE sql VOLATILE SET search_path FROM CURRENT AS $$
    SELECT pg_notify(ring_channel(), s::text) FROM unnest(p_streams) AS s WHERE (SELECT pg_notification_queue_usage()) < 0.5
$$;

-- For streams that say so: every INSERT rings. Repeated within a transaction it rings once.
CREATE OR REPLACE FUNCTION ring_on_insert() RETURNS trigger
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
    PERFORM ring(ARRAY[TG_ARGV[0]::bigint]);
    RETURN NULL;
END $$;

-- Partitions of message_log_<stream id>: ranges of ids, made ahead of the head.

-- An INSERT straight into a partition locks only the partition, so the fence (fence.sql) would not see its writer
-- and readers would pass over the message. It does not fire for rows that arrive through the parent.
CREATE OR REPLACE FUNCTION refuse_direct_write() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'direct write to partition %', TG_TABLE_NAME
        USING ERRCODE = 'SQ007',
              HINT = format('Write to %I.%I: only there can consumers see a writer that has not committed yet.',
                            TG_TABLE_SCHEMA, regexp_replace(TG_TABLE_NAME, '_p\d+$', ''));
END $$;

-- Makes one partition: prepared on the side, then attached, so that neither producers nor readers are blocked
-- (CREATE TABLE … PARTITION OF would take ACCESS EXCLUSIVE on the parent).
CREATE OR REPLACE FUNCTION create_partition(p_stream bigint, p_size bigint, p_number bigint, p_compacted boolean) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    parent text := 'message_log_' || p_stream;
    leaf   text := parent || '_p' || p_number;
    lo     bigint := p_number * p_size;
    hi     bigint := (p_number + 1) * p_size;
BEGIN
    EXECUTE format('CREATE TABLE %I (LIKE %I INCLUDING DEFAULTS INCLUDING CONSTRAINTS INCLUDING STORAGE INCLUDING COMPRESSION)', leaf, parent);
    -- The bounds as a constraint: ATTACH believes it instead of scanning.
    EXECUTE format('ALTER TABLE %I ADD CONSTRAINT id_range CHECK (id >= %s AND id < %s)', leaf, lo, hi);
    -- Compaction deletes from partitions: through the parent it would look like a writer.
    EXECUTE format('CREATE TRIGGER refuse_direct_write BEFORE INSERT OR UPDATE %s ON %I FOR EACH STATEMENT EXECUTE FUNCTION refuse_direct_write()',
                   CASE WHEN NOT p_compacted THEN 'OR DELETE' END, leaf);
    IF p_compacted THEN
        EXECUTE format('CREATE INDEX ON %I (key, id)', leaf);
    END IF;
    -- ALWAYS: also where session_replication_role = replica (restores, logical replication).
    EXECUTE format('ALTER TABLE %I ENABLE ALWAYS TRIGGER refuse_direct_write', leaf);
    EXECUTE format('ALTER TABLE %I ATTACH PARTITION %I FOR VALUES FROM (%s) TO (%s)', parent, leaf, lo, hi);
END $$;

-- Makes the partitions up to p_ahead (1 to 1,000) beyond the one that the head is in. Returns how many it made. The last one is the last that
-- ends before the largest bigint: a stream whose ids have come so far takes no more.
-- SECURITY DEFINER: a producer that may only insert still gets room to insert into.
CREATE OR REPLACE FUNCTION ensure_partitions(p_stream bigint, p_ahead int DEFAULT 3) RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT SET lock_timeout = '3s' AS $$
DECLARE
    s       stream;
    head    bigint;
    made    int := 0;
    wanted  bigint;
    last    bigint;
BEGIN
    PERFORM require_stream(p_stream);
    -- One maker at a time per stream; the others find its partitions when they get the lock.
    SELECT * INTO s FROM stream WHERE id = p_stream FOR NO KEY UPDATE;
    EXECUTE format('SELECT last_value FROM %I', 'message_log_' || p_stream || '_id_seq') INTO head;
    last := 9223372036854775807 / s.partition_size - 1;
    IF head / s.partition_size > last THEN
        RAISE EXCEPTION 'the ids of stream % are used up', quote_ident(s.name)
            USING ERRCODE = 'SQ013', HINT = 'Nothing can be added to it any more. Create another stream for what comes.';
    END IF;
    FOR wanted IN
        SELECT n FROM generate_series(head / s.partition_size, least(head / s.partition_size + least(greatest(p_ahead, 1), 1000), last)) AS n
        WHERE to_regclass(format('%I', 'message_log_' || p_stream || '_p' || n)) IS NULL
    LOOP
        PERFORM create_partition(p_stream, s.partition_size, wanted, s.compacted);
        made := made + 1;
    END LOOP;
    RETURN made;
END $$;

-- Streams: the table family of one stream.

-- Waits for a migration that is under way, and lets none begin before the caller's transaction ends: it would neither see a
-- stream that is being made, nor that one is being dropped, when it makes the functions of all streams anew.
CREATE OR REPLACE FUNCTION hold_migrations_up() RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
    PERFORM pg_advisory_xact_lock_shared(hashtextextended('sqlstreams migrate ' || current_schema(), 0));
END $$;

CREATE OR REPLACE FUNCTION create_stream(p_name text, p_payload_type text DEFAULT 'json', p_partition_size bigint DEFAULT 1000000, p_notify boolean DEFAULT false, p_idempotency_window interval DEFAULT '24 hours', p_compacted boolean DEFAULT false) RETURNS bigint
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    n    bigint;
    part text;
BEGIN
    PERFORM require_name('stream', p_name);
    IF p_payload_type IS NULL OR p_payload_type NOT IN ('json', 'jsonb', 'text', 'bytea') THEN
        RAISE EXCEPTION 'unknown payload type %', coalesce(quote_literal(p_payload_type), 'NULL')
            USING ERRCODE = 'SQ004', HINT = 'Choose json, jsonb, text or bytea.';
    END IF;
    IF p_partition_size IS NULL OR p_partition_size NOT BETWEEN 1000 AND 1000000000 THEN
        RAISE EXCEPTION 'a partition holds 1,000 to 1,000,000,000 ids, not %', coalesce(p_partition_size::text, 'NULL')
            USING ERRCODE = 'SQ004', HINT = 'The default, 1,000,000, suits most streams.';
    END IF;
    PERFORM require_idempotency_window(p_idempotency_window);
    PERFORM hold_migrations_up();
    INSERT INTO stream (name, payload_type, partition_size, idempotency_window, compacted)
        VALUES (p_name, p_payload_type, p_partition_size, coalesce(p_idempotency_window, '24 hours'), coalesce(p_compacted, false))
        ON CONFLICT (name) DO NOTHING RETURNING id INTO n;
    IF n IS NULL THEN
        RAISE EXCEPTION 'stream % exists already', quote_ident(p_name)
            USING ERRCODE = 'SQ005', HINT = 'Use it, or choose another name.';
    END IF;
    INSERT INTO stream_fence (stream_id, generation) VALUES (n, 0);

    -- The log. CACHE 1: with a larger cache a session would hold ids that it draws only later, and the fence could
    -- not tell them from ids that never come.
    EXECUTE format(
        'CREATE TABLE %I (
             id          bigint GENERATED ALWAYS AS IDENTITY (SEQUENCE NAME %I CACHE 1) PRIMARY KEY,
             key         text COLLATE "C" CHECK (octet_length(key) <= 1024),
             routing_key text COLLATE "C" CHECK (octet_length(routing_key) <= 255),
             headers     jsonb CHECK (jsonb_typeof(headers) = ''object''),
             produced_at timestamptz NOT NULL DEFAULT clock_timestamp(),
             -- from then on nobody gets it
             expires_at  timestamptz,
             payload     %s
         ) PARTITION BY RANGE (id)',
        'message_log_' || n, 'message_log_' || n || '_id_seq', p_payload_type);
    IF p_compacted THEN
        EXECUTE format('CREATE INDEX %I ON %I (key, id)', 'message_key_' || n, 'message_log_' || n);
    END IF;

    -- Hot rows: room for HOT updates, and a vacuum that neither waits nor takes ACCESS EXCLUSIVE to truncate.
    EXECUTE format(
        'CREATE TABLE %I (
             group_id    bigint NOT NULL,
             generation  bigint NOT NULL,
             updates     int    NOT NULL DEFAULT 0,
             claimed     bigint NOT NULL,
             first_open  bigint NOT NULL DEFAULT 1,
             next_seq    bigint NOT NULL DEFAULT 1,
             -- up to here the rate limit is used up
             paced_until timestamptz,
             -- of ordered groups, and of fair ones
             cohorts     lane_cohort[],
             waiters     lane_waiter[],
             PRIMARY KEY (group_id, generation)
         ) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000,
                 autovacuum_vacuum_cost_delay = 0, vacuum_truncate = false)',
        'consumer_group_cursor_' || n);
    EXECUTE format(
        'CREATE TABLE %I (
             group_id   bigint NOT NULL,
             seq        bigint NOT NULL,
             token      uuid   NOT NULL,
             owner      bigint,
             -- of ordered groups: whose it is
             holder     uuid,
             -- of ordered and fair ones: the lanes it is for
             lanes      bigint,
             pending    int8multirange NOT NULL,
             expires_at timestamptz NOT NULL,
             reclaims   int    NOT NULL DEFAULT 0,
             PRIMARY KEY (group_id, seq)
         ) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000,
                 autovacuum_vacuum_cost_delay = 0, vacuum_truncate = false)',
        'consumer_lease_' || n);

    EXECUTE format(
        'CREATE TABLE %1$I (
             group_id         bigint NOT NULL,
             message_id       bigint NOT NULL,
             state            text   NOT NULL CHECK (state IN (''ready'', ''inflight'', ''deferred'', ''dead'')),
             attempts         int    NOT NULL DEFAULT 0,
             delays           int    NOT NULL DEFAULT 0,
             losses           int    NOT NULL DEFAULT 0,
             redrives         int    NOT NULL DEFAULT 0,
             due_at           timestamptz NOT NULL,
             lease_id         uuid,
             owner            bigint,
             lease_expires_at timestamptz,
             key              text COLLATE "C",
             -- of ordered and fair groups
             lane             smallint,
             last_error       text,
             history          jsonb NOT NULL DEFAULT ''[]'',
             first_failed_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
             dead_at          timestamptz,
             PRIMARY KEY (group_id, message_id),
             CHECK ((state = ''inflight'') = (lease_id IS NOT NULL AND lease_expires_at IS NOT NULL)),
             CHECK ((state = ''dead'') = (dead_at IS NOT NULL))
         ) WITH (fillfactor = 80, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000,
                 autovacuum_vacuum_cost_delay = 0, vacuum_truncate = false)',
        'exception_queue_' || n);
    -- What can run: suspects (losses > 0) apart from the rest, since they are claimed one at a time.
    EXECUTE format('CREATE INDEX %I ON %I (group_id, due_at) WHERE state = ''ready'' AND losses = 0', 'exception_ready_' || n, 'exception_queue_' || n);
    EXECUTE format('CREATE INDEX %I ON %I (group_id, due_at) WHERE state = ''ready'' AND losses > 0', 'exception_suspect_' || n, 'exception_queue_' || n);
    EXECUTE format('CREATE INDEX %I ON %I (group_id, lease_expires_at) WHERE state = ''inflight''', 'exception_inflight_' || n, 'exception_queue_' || n);
    EXECUTE format('CREATE INDEX %I ON %I (group_id, message_id) WHERE state = ''dead''', 'exception_dead_' || n, 'exception_queue_' || n);

    -- Those of ordered and fair groups: what of a lane can run, the rows of a key, and what is in flight under a lease.
    EXECUTE format('CREATE INDEX %I ON %I (group_id, lane, due_at) WHERE state = ''ready'' AND lane >= 0', 'exception_lane_' || n, 'exception_queue_' || n);
    EXECUTE format('CREATE INDEX %I ON %I (group_id, key, message_id) WHERE lane >= 0 AND state <> ''dead''', 'exception_key_' || n, 'exception_queue_' || n);
    EXECUTE format('CREATE INDEX %I ON %I (group_id, lease_id) WHERE lane >= 0', 'exception_held_' || n, 'exception_queue_' || n);

    -- Messages that were settled in their handlers' transactions, until the bookkeeping has caught up.
    EXECUTE format(
        'CREATE TABLE %I (
             group_id   bigint NOT NULL,
             message_id bigint NOT NULL,
             PRIMARY KEY (group_id, message_id)
         ) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000,
                 autovacuum_vacuum_cost_delay = 0, vacuum_truncate = false)',
        'consumer_done_' || n);

    -- The idempotency keys of messages, as hashes. No partitions by time: whether a key is there has to be told over all of them.
    EXECUTE format(
        'CREATE TABLE %I (
             hash_1       bigint NOT NULL,
             hash_2       bigint NOT NULL,
             message_id   bigint NOT NULL,
             payload_hash bigint NOT NULL,
             sent_at      timestamptz NOT NULL,
             PRIMARY KEY (hash_1, hash_2)
         ) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000,
                 autovacuum_vacuum_cost_delay = 0, vacuum_truncate = false)',
        'message_idempotency_' || n);
    EXECUTE format('CREATE INDEX %I ON %I (sent_at)', 'message_idempotency_sent_' || n, 'message_idempotency_' || n);

    -- Messages that are not due yet. They get their place in the log when they are: see functions/delayed.sql.
    EXECUTE format(
        'CREATE TABLE %I (
             -- what is due at no time would be in the way of all others
             deliver_at  timestamptz NOT NULL CHECK (isfinite(deliver_at)),
             id          bigint GENERATED ALWAYS AS IDENTITY (SEQUENCE NAME %I CACHE 1) UNIQUE,
             key         text COLLATE "C" CHECK (octet_length(key) <= 1024),
             routing_key text COLLATE "C" CHECK (octet_length(routing_key) <= 255),
             headers     jsonb CHECK (jsonb_typeof(headers) = ''object''),
             sent_at     timestamptz NOT NULL,
             expires_at  timestamptz,
             payload     %s,
             PRIMARY KEY (deliver_at, id)
         ) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000,
                 autovacuum_vacuum_cost_delay = 0, vacuum_truncate = false)',
        'message_delayed_' || n, 'message_delayed_' || n || '_id_seq', p_payload_type);

    -- A message without payload is a tombstone (current.sql), and only where there are keys to remove.
    FOREACH part IN ARRAY ARRAY['message_log_', 'message_delayed_'] LOOP
        IF p_compacted THEN
            EXECUTE format('ALTER TABLE %I ADD CONSTRAINT compacted_needs_key CHECK (key IS NOT NULL)', part || n);
        ELSE
            EXECUTE format('ALTER TABLE %I ALTER COLUMN payload SET NOT NULL', part || n);
        END IF;
    END LOOP;

    PERFORM make_stream_functions(n);
    PERFORM ensure_partitions(n);
    PERFORM alter_stream(n, p_notify);
    RETURN n;
END $$;

-- Changes settings of a stream; NULL leaves one as it is. p_notify: whether every INSERT rings for the consumers from inside
-- its transaction, for producers that are plain SQL; the crate's own ring by themselves, after their commit. p_idempotency_window:
-- how long keys are remembered; those that were given up under a shorter one stay so.
CREATE OR REPLACE FUNCTION alter_stream(p_stream bigint, p_notify boolean DEFAULT NULL, p_idempotency_window interval DEFAULT NULL) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT SET lock_timeout = '3s' AS $$
DECLARE
    s stream := require_stream(p_stream);
BEGIN
    PERFORM require_idempotency_window(p_idempotency_window);
    UPDATE stream SET idempotency_window = p_idempotency_window WHERE id = p_stream AND idempotency_window <> p_idempotency_window;
    IF p_notify IS NULL OR p_notify = s.notify THEN
        RETURN;
    END IF;
    UPDATE stream SET notify = p_notify WHERE id = p_stream;
    IF p_notify THEN
        EXECUTE format('CREATE TRIGGER ring AFTER INSERT ON %I FOR EACH STATEMENT EXECUTE FUNCTION ring_on_insert(%L)', 'message_log_' || p_stream, p_stream);
    ELSE
        EXECUTE format('DROP TRIGGER ring ON %I', 'message_log_' || p_stream);
    END IF;
END $$;

-- Drops the stream with every message, cursor and exception it has.
CREATE OR REPLACE FUNCTION drop_stream(p_stream bigint) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    s      stream := require_stream(p_stream);
    name   text;
    tables text;
BEGIN
    PERFORM hold_migrations_up();
    -- In the order in which partitions are made, and in which consumers and producers lock.
    PERFORM FROM stream WHERE id = p_stream FOR UPDATE;
    FOREACH name IN ARRAY ARRAY['consumer_group_cursor_', 'consumer_lease_', 'exception_queue_', 'consumer_done_', 'message_log_', 'message_idempotency_', 'message_delayed_'] LOOP
        EXECUTE format('LOCK TABLE %I IN ACCESS EXCLUSIVE MODE', name || p_stream);
        tables := concat_ws(', ', tables, format('%I', name || p_stream));
    END LOOP;
    EXECUTE 'DROP TABLE ' || tables;
    PERFORM drop_stream_functions(p_stream);
    DELETE FROM stream WHERE id = p_stream;
    INSERT INTO audit (action, stream_name) VALUES ('drop_stream', s.name);
END $$;

-- Consumer groups of a stream.

-- The last id drawn so far, 0 when none was. Not a transactional read: ids at or below it may still be uncommitted.
CREATE OR REPLACE FUNCTION log_head(p_stream bigint) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    head bigint;
BEGIN
    EXECUTE format('SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM %I', 'message_log_' || p_stream || '_id_seq') INTO head;
    RETURN head;
END $$;

-- The same for callers from outside, whose search_path is their own.
CREATE OR REPLACE FUNCTION stream_head(p_stream bigint) RETURNS bigint
LANGUAGE plpgsql SET search_path FROM CURRENT SET jit = off AS $$
BEGIN
    PERFORM require_stream(p_stream);
    RETURN log_head(p_stream);
END $$;

-- The position just before the first message produced at or after p_at, which must not lie in the future: a binary search over the ids.
-- Ids and times are drawn together but by many sessions, so neighbours may be swapped: the last thousand ids before
-- the hit are looked through as well.
CREATE OR REPLACE FUNCTION position_at(p_stream bigint, p_at timestamptz) RETURNS bigint
LANGUAGE plpgsql SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
DECLARE
    size bigint := (require_stream(p_stream)).partition_size;
    lo   bigint := 0;                              -- everything at or below is older
    hi   bigint := log_head(p_stream) + 1;         -- from here on nothing is older
    mid  bigint;
    seen record;
BEGIN
    -- A few minutes are a client's clock; more is a mistake, and would pass over what is produced until then.
    IF p_at > clock_timestamp() + interval '5 minutes' AND p_at < 'infinity' THEN
        RAISE EXCEPTION 'the time % lies in the future', p_at
            USING ERRCODE = 'SQ004', HINT = 'Start at the latest message, or at a time that has been.';
    END IF;
    WHILE hi - lo > 1 LOOP
        mid := lo + (hi - lo) / 2;
        -- Bounded by a partition each: an unbounded look-up would open them all.
        EXECUTE format('SELECT id, produced_at FROM %I WHERE id >= $1 AND id < $2 AND id < $1 + $3 ORDER BY id LIMIT 1', 'message_log_' || p_stream)
            INTO seen USING mid, hi, size;
        IF seen.id IS NULL THEN
            IF mid + size >= hi THEN hi := mid; ELSE lo := mid + size - 1; END IF;
        ELSIF seen.produced_at >= p_at THEN
            hi := mid;
        ELSE
            lo := seen.id;
        END IF;
    END LOOP;
    EXECUTE format('SELECT least(min(id) - 1, $1) FROM %I WHERE id > $1 - 1000 AND id <= $1 AND produced_at >= $2', 'message_log_' || p_stream)
        INTO mid USING lo, p_at;
    RETURN mid;
END $$;

-- Creates a group that starts after p_after (0: the beginning). Settings not given take the table's defaults. p_bindings: see
-- set_bindings; they hold for the whole log.
CREATE OR REPLACE FUNCTION create_group(p_stream bigint, p_name text, p_after bigint DEFAULT 0,
    p_lease_duration interval DEFAULT NULL, p_max_attempts int DEFAULT NULL,
    p_backoff_base interval DEFAULT NULL, p_backoff_factor double precision DEFAULT NULL, p_backoff_cap interval DEFAULT NULL,
    p_max_in_flight int DEFAULT NULL, p_rate_limit double precision DEFAULT NULL, p_transactional boolean DEFAULT NULL,
    p_bindings jsonb DEFAULT NULL, p_mode text DEFAULT NULL, p_newest_only boolean DEFAULT NULL)
RETURNS bigint
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    s    stream := require_stream(p_stream);
    head bigint;
    g    bigint;
BEGIN
    PERFORM require_name('group', p_name);
    IF s.compacted THEN
        -- A step of it that is under way knows nothing of the group.
        PERFORM pg_advisory_xact_lock_shared(compact_lock(p_stream));
    END IF;
    head := log_head(p_stream);
    IF p_after IS NULL OR p_after < 0 OR p_after > head THEN
        RAISE EXCEPTION 'group % cannot start after id %: the log of stream % ends at %', quote_ident(p_name), coalesce(p_after::text, 'NULL'), quote_ident(s.name), head
            USING ERRCODE = 'SQ004', HINT = 'Start at the beginning, at the latest message or at an id that has been drawn.';
    END IF;
    INSERT INTO consumer_group (stream_id, name) VALUES (p_stream, p_name)
        ON CONFLICT (stream_id, name) DO NOTHING RETURNING id INTO g;
    IF g IS NULL THEN
        RAISE EXCEPTION 'stream % has a group % already', quote_ident(s.name), quote_ident(p_name)
            USING ERRCODE = 'SQ006', HINT = 'Use it, or choose another name.';
    END IF;
    PERFORM alter_group(p_stream, g, p_lease_duration, p_max_attempts, p_backoff_base, p_backoff_factor, p_backoff_cap,
                        p_max_in_flight, p_rate_limit, p_transactional, p_newest_only);
    EXECUTE format('INSERT INTO %I (group_id, generation, claimed) VALUES ($1, 0, $2)', 'consumer_group_cursor_' || p_stream) USING g, p_after;
    IF p_bindings IS NOT NULL AND normal_bindings(p_bindings) <> '[]' THEN
        PERFORM add_binding_set(p_stream, g, 0, normal_bindings(p_bindings));
    END IF;
    IF p_mode IS NOT NULL THEN
        PERFORM set_mode(p_stream, g, p_mode);
    END IF;
    RETURN g;
END $$;

-- Changes settings of a group; NULL leaves one as it is, and 0 lifts p_max_in_flight or p_rate_limit. Takes effect with the
-- next call of every consumer. p_transactional: settle_in_transaction may be used; that cannot be taken back, since a
-- handler may be about to commit. p_newest_only, of a group of a compacted stream: what a newer message of its key has superseded is not handed out, and is done.
CREATE OR REPLACE FUNCTION alter_group(p_stream bigint, p_group bigint, p_lease_duration interval DEFAULT NULL, p_max_attempts int DEFAULT NULL,
    p_backoff_base interval DEFAULT NULL, p_backoff_factor double precision DEFAULT NULL, p_backoff_cap interval DEFAULT NULL,
    p_max_in_flight int DEFAULT NULL, p_rate_limit double precision DEFAULT NULL, p_transactional boolean DEFAULT NULL, p_newest_only boolean DEFAULT NULL)
RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    old consumer_group := require_group(p_stream, p_group);
    s   stream := require_stream(p_stream);
BEGIN
    IF p_newest_only AND NOT s.compacted THEN
        RAISE EXCEPTION 'group % cannot receive only the newest message of each key: stream % is not compacted', quote_ident(old.name), quote_ident(s.name)
            USING ERRCODE = 'SQ004', HINT = 'Only a compacted stream knows it; whether a stream is, is said when it is created.';
    END IF;
    PERFORM require_that(coalesce(p_lease_duration, '1 s') BETWEEN '100 milliseconds' AND '1 day', format('a lease lasts 100 ms to 1 day, not %s', p_lease_duration),
                         'The default, 15 seconds, suits most groups.');
    PERFORM require_that(coalesce(p_max_attempts, 1) >= 1, format('a message has at least one attempt, not %s', p_max_attempts), 'The default is 5.');
    PERFORM require_that(coalesce(p_backoff_base, '0') BETWEEN '0' AND '365 days' AND coalesce(p_backoff_cap, '0') BETWEEN '0' AND '365 days',
                         format('the delay after a failure has bounds from 0 to 365 days, not %s', concat_ws(' and ', p_backoff_base, p_backoff_cap)),
                         'The defaults are 1 second, doubled with every attempt, and at most 5 minutes.');
    PERFORM require_that(coalesce(p_backoff_factor, 1) BETWEEN 1 AND 1000, format('the delay after a failure grows by a factor of 1 to 1000, not %s', p_backoff_factor), 'The default is 2.');
    PERFORM require_that(coalesce(p_max_in_flight, 0) >= 0, format('so many messages in flight are no limit: %s', p_max_in_flight), 'Choose at least 1, or 0 for no limit.');
    PERFORM require_that(coalesce(p_rate_limit, 0) = 0 OR p_rate_limit BETWEEN 1e-6 AND 1e9, format('a rate limit is 0.000001 to 1,000,000,000 messages a second, not %s', p_rate_limit),
                         'Choose one of these, or 0 for no limit.');
    UPDATE consumer_group AS g SET
        lease_duration = n.lease_duration, max_attempts = n.max_attempts,
        backoff_base = n.backoff_base, backoff_factor = n.backoff_factor, backoff_cap = n.backoff_cap,
        max_in_flight = n.max_in_flight, rate_limit = n.rate_limit, transactional = n.transactional,
        newest_only = n.newest_only, bound = g.bound OR n.newest_only
    FROM (SELECT coalesce(p_lease_duration, lease_duration) AS lease_duration, coalesce(p_max_attempts, max_attempts) AS max_attempts,
                 coalesce(p_backoff_base, backoff_base) AS backoff_base, coalesce(p_backoff_factor, backoff_factor) AS backoff_factor,
                 coalesce(p_backoff_cap, backoff_cap) AS backoff_cap,
                 nullif(coalesce(p_max_in_flight, max_in_flight), 0) AS max_in_flight,
                 nullif(coalesce(p_rate_limit, rate_limit), 0) AS rate_limit,
                 transactional OR coalesce(p_transactional, false) AS transactional, coalesce(p_newest_only, newest_only) AS newest_only
          FROM consumer_group WHERE id = p_group) AS n
    WHERE g.id = p_group
      -- Consumers say this at every start: no row version, and no lock, where nothing changes.
      AND (g.lease_duration, g.max_attempts, g.backoff_base, g.backoff_factor, g.backoff_cap, g.max_in_flight, g.rate_limit, g.transactional, g.newest_only)
          IS DISTINCT FROM
          (n.lease_duration, n.max_attempts, n.backoff_base, n.backoff_factor, n.backoff_cap, n.max_in_flight, n.rate_limit, n.transactional, n.newest_only);
END $$;

-- Messages that went by unhandled, for whoever looks at the group. Consumers say it now and then; nothing depends on it.
CREATE OR REPLACE FUNCTION count_passed_over(p_stream bigint, p_group bigint, p_expired bigint, p_superseded bigint DEFAULT 0) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
BEGIN
    PERFORM require_group(p_stream, p_group);
    PERFORM require_that(p_expired >= 0 AND p_superseded >= 0, 'messages that went by are counted upwards', 'Say how many more there were.');
    INSERT INTO group_tally AS t (group_id, expired, superseded) VALUES (p_group, p_expired, p_superseded)
        ON CONFLICT (group_id) DO UPDATE SET expired = t.expired + EXCLUDED.expired, superseded = t.superseded + EXCLUDED.superseded;
END $$;

CREATE OR REPLACE FUNCTION drop_group(p_stream bigint, p_group bigint) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    g consumer_group := require_group(p_stream, p_group);
BEGIN
    -- The cursor first: whoever holds or waits for it must be done before the rest goes.
    EXECUTE format('DELETE FROM %I WHERE group_id = $1', 'consumer_group_cursor_' || p_stream) USING p_group;
    -- Leases in the order in which everybody locks them.
    EXECUTE format('SELECT FROM %I WHERE group_id = $1 ORDER BY seq FOR UPDATE', 'consumer_lease_' || p_stream) USING p_group;
    EXECUTE format('DELETE FROM %I WHERE group_id = $1', 'consumer_lease_' || p_stream) USING p_group;
    EXECUTE format('DELETE FROM %I WHERE group_id = $1', 'exception_queue_' || p_stream) USING p_group;
    EXECUTE format('DELETE FROM %I WHERE group_id = $1', 'consumer_done_' || p_stream) USING p_group;
    DELETE FROM consumer_group WHERE id = p_group;
    INSERT INTO audit (action, stream_name, group_name)
        SELECT 'drop_group', s.name, g.name FROM stream s WHERE s.id = p_stream;
END $$;

-- The fence: how far the log of a stream is final.
--
-- Ids are drawn at insert and become visible at commit, so a reader that went to the newest visible id would pass
-- over a lower one that commits later. Every INSERT takes ROW EXCLUSIVE on message_log_<n> before it draws an id and
-- keeps it until its transaction has ended and is visible. So with
--     head    = the sequence, read first, and
--     writers = the transactions that hold that lock, read in a LATER statement,
-- every id <= head was drawn by a transaction that is in writers or has ended. Once no writer runs any more, what is
-- missing at or below head never comes: head is settled.
--
-- Invariant: stream_fence.settled only grows, and no row with id <= settled ever becomes visible later.

-- The transactions that may still make an id visible. Not those that wait for the lock (nothing drawn yet), not
-- ourselves (our own rows are visible to us), not '…/0' (ended and visible, the lock is about to go).
CREATE OR REPLACE FUNCTION log_writers(p_stream bigint) RETURNS text[]
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    RETURN (
        SELECT coalesce(array_agg(DISTINCT l.virtualtransaction), '{}')
        FROM pg_locks l
        WHERE l.locktype = 'relation'
          AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
          AND l.relation = to_regclass(format('%I', 'message_log_' || p_stream))
          AND l.mode = 'RowExclusiveLock'
          AND l.granted
          AND l.virtualtransaction NOT LIKE '%/0'
          AND l.pid IS DISTINCT FROM pg_backend_pid());
END $$;

CREATE OR REPLACE FUNCTION settled_id(p_stream bigint) RETURNS bigint
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    RETURN (SELECT settled FROM stream_fence WHERE stream_id = p_stream ORDER BY generation DESC LIMIT 1);
END $$;

-- Looks at the lock table on behalf of a group whose next id, p_position + 1, is missing though drawn.
-- Returns the settled id, which may or may not have moved. Never waits: while another session looks, or while looking
-- again would cost more than 5 % of the time (but a look a second is always allowed), the old value is the answer.
CREATE OR REPLACE FUNCTION look_at_gap(p_stream bigint, p_position bigint) RETURNS bigint
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    f       stream_fence;
    started timestamptz := clock_timestamp();
    head    bigint;
BEGIN
    SELECT * INTO f FROM stream_fence WHERE stream_id = p_stream ORDER BY generation DESC LIMIT 1 FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        -- Another session looks; usually it is about to commit. One that stays in its transaction must not hold the other
        -- groups up: look for ourselves then, without a memory.
        SELECT * INTO f FROM stream_fence WHERE stream_id = p_stream ORDER BY generation DESC LIMIT 1;
        IF f.looked_at > started - interval '1 second' THEN
            RETURN f.settled;
        END IF;
        head := log_head(p_stream);
        RETURN CASE WHEN cardinality(log_writers(p_stream)) = 0 THEN greatest(f.settled, head) ELSE f.settled END;
    END IF;
    -- A look that was stamped in the future, by a clock since set back, does not count.
    IF f.settled > p_position
       OR started BETWEEN f.looked_at AND f.looked_at + least(greatest(interval '5 milliseconds', f.look_cost * 20), interval '1 second') THEN
        RETURN f.settled;
    END IF;

    IF f.head IS NULL THEN
        -- These two stay separate statements, in this order.
        head := log_head(p_stream);
        f.writers := log_writers(p_stream);
        f.head := head;
    ELSE
        -- A prepared transaction that survived a restart is listed as '-1/<xid>', whatever it was called before.
        f.writers := ARRAY(SELECT w FROM unnest(log_writers(p_stream)) AS w WHERE w = ANY (f.writers) OR w LIKE '-1/%');
    END IF;
    IF cardinality(f.writers) = 0 THEN
        f.settled := greatest(f.settled, f.head);
        f.head := NULL;
        f.writers := NULL;
    END IF;
    f.looked_at := started;
    f.look_cost := clock_timestamp() - started;

    IF f.updates < 200 THEN
        UPDATE stream_fence SET updates = f.updates + 1, settled = f.settled, head = f.head, writers = f.writers,
                                looked_at = f.looked_at, look_cost = f.look_cost
        WHERE stream_id = p_stream AND generation = f.generation;
    ELSE
        DELETE FROM stream_fence WHERE stream_id = p_stream AND generation = f.generation;
        INSERT INTO stream_fence (stream_id, generation, settled, head, writers, looked_at, look_cost)
            VALUES (p_stream, f.generation + 1, f.settled, f.head, f.writers, f.looked_at, f.look_cost);
    END IF;
    RETURN f.settled;
END $$;

-- The cursor of a group: one row, rotated.
--
-- Under anybody's long-running snapshot dead row versions cannot be removed, and a row that is updated for ever
-- collects them. So about every 200 updates a new generation replaces the row in the same transaction; readers take
-- the newest, and never visit the dead generations, which lie behind it in the index.

-- Fails if the stream was dropped: that is to be called so, not a missing table.
CREATE OR REPLACE FUNCTION require_tables(p_stream bigint) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    IF to_regclass(format('%I', 'consumer_group_cursor_' || p_stream)) IS NULL THEN
        PERFORM require_stream(p_stream);
    END IF;
END $$;

-- Locks and returns the cursor. The lock is the group's mutex: every claim goes through it.
CREATE OR REPLACE FUNCTION lock_cursor(p_stream bigint, p_group bigint) RETURNS group_cursor
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    c group_cursor;
BEGIN
    PERFORM require_tables(p_stream);
    LOOP
        EXECUTE format('SELECT generation, updates, claimed, first_open, next_seq, paced_until, cohorts, waiters FROM %I WHERE group_id = $1 ORDER BY generation DESC LIMIT 1 FOR UPDATE',
                       'consumer_group_cursor_' || p_stream)
            INTO c USING p_group;
        EXIT WHEN c.generation IS NOT NULL;
        -- Nothing: the row was rotated while we waited for it (look again), or the group is gone.
        PERFORM require_group(p_stream, p_group);
    END LOOP;
    RETURN c;
END $$;

CREATE OR REPLACE FUNCTION save_cursor(p_stream bigint, p_group bigint, c group_cursor) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    IF c.updates < 200 THEN
        EXECUTE format('UPDATE %I SET updates = $3 + 1, claimed = $4, first_open = $5, next_seq = $6, paced_until = $7, cohorts = $8, waiters = $9 WHERE group_id = $1 AND generation = $2',
                       'consumer_group_cursor_' || p_stream)
            USING p_group, c.generation, c.updates, c.claimed, c.first_open, c.next_seq, c.paced_until, c.cohorts, c.waiters;
    ELSE
        EXECUTE format('DELETE FROM %I WHERE group_id = $1 AND generation = $2', 'consumer_group_cursor_' || p_stream)
            USING p_group, c.generation;
        EXECUTE format('INSERT INTO %I (group_id, generation, claimed, first_open, next_seq, paced_until, cohorts, waiters) VALUES ($1, $2 + 1, $3, $4, $5, $6, $7, $8)',
                       'consumer_group_cursor_' || p_stream)
            USING p_group, c.generation, c.claimed, c.first_open, c.next_seq, c.paced_until, c.cohorts, c.waiters;
    END IF;
END $$;

-- The cursor as it stands, without waiting for anybody.
CREATE OR REPLACE FUNCTION peek_cursor(p_stream bigint, p_group bigint) RETURNS group_cursor
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    c group_cursor;
BEGIN
    PERFORM require_tables(p_stream);
    EXECUTE format('SELECT generation, updates, claimed, first_open, next_seq, paced_until, cohorts, waiters FROM %I WHERE group_id = $1 ORDER BY generation DESC LIMIT 1',
                   'consumer_group_cursor_' || p_stream)
        INTO c USING p_group;
    RETURN c;
END $$;

-- The lowest seq that is still open, found from where the last one was.
CREATE OR REPLACE FUNCTION first_open_lease(p_stream bigint, p_group bigint, c group_cursor) RETURNS bigint
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    lowest bigint;
BEGIN
    EXECUTE format('SELECT seq FROM %I WHERE group_id = $1 AND seq >= $2 ORDER BY seq LIMIT 1', 'consumer_lease_' || p_stream)
        INTO lowest USING p_group, c.first_open;
    RETURN coalesce(lowest, c.next_seq);
END $$;

-- Whether every message up to p_id is done or dead for the group: nothing of it waits, runs or will be tried again.
CREATE OR REPLACE FUNCTION is_resolved(p_stream bigint, p_group bigint, p_id bigint) RETURNS boolean
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
DECLARE
    c    group_cursor := peek_cursor(p_stream, p_group);
    open boolean;
BEGIN
    IF c.generation IS NULL THEN
        PERFORM require_group(p_stream, p_group);
    END IF;
    EXECUTE format(
        'SELECT EXISTS (SELECT FROM %1$I WHERE group_id = $1 AND seq >= $2 AND lower(pending) <= $3)
             OR EXISTS (SELECT FROM %2$I WHERE group_id = $1 AND state = ''ready'' AND message_id <= $3)
             OR EXISTS (SELECT FROM %2$I WHERE group_id = $1 AND state = ''inflight'' AND message_id <= $3)',
        'consumer_lease_' || p_stream, 'exception_queue_' || p_stream)
        INTO open USING p_group, c.first_open, p_id;
    RETURN c.claimed >= p_id AND NOT open;
END $$;

-- What a failure leads to.

-- Whether a message that has failed p_attempts times before is dead after this outcome.
CREATE OR REPLACE FUNCTION is_final(p_outcome text, p_attempts int, p_max_attempts int) RETURNS boolean
LANGUAGE sql IMMUTABLE AS $$
    SELECT p_outcome = 'dead' OR p_outcome = 'retry' AND p_attempts + 1 >= p_max_attempts
$$;

CREATE OR REPLACE FUNCTION cut_text(p_text text, p_bytes int) RETURNS text
LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    cut text := left(p_text, p_bytes);
BEGIN
    WHILE octet_length(cut) > p_bytes LOOP
        -- At least so many characters have to go: none is longer than four bytes.
        cut := left(cut, -((octet_length(cut) - p_bytes + 3) / 4));
    END LOOP;
    RETURN cut;
END $$;

-- Error text as stored: at most 8 KiB, cut between characters.
CREATE OR REPLACE FUNCTION error_text(p_error text) RETURNS text
LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN octet_length(p_error) <= 8192 THEN p_error ELSE cut_text(p_error, 8192) END
$$;

-- The delay before the next attempt, after p_attempts failed ones: full jitter below an exponential bound.
CREATE OR REPLACE FUNCTION retry_delay(g consumer_group, p_attempts int) RETURNS interval
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    base double precision := extract(epoch FROM g.backoff_base);
    cap  double precision := extract(epoch FROM g.backoff_cap);
BEGIN
    IF base <= 0 OR cap <= 0 THEN
        RETURN interval '0';
    END IF;
    -- Compared as logarithms: factor ^ attempts itself overflows.
    IF base < cap AND ln(g.backoff_factor) * (greatest(p_attempts, 1) - 1) < ln(cap / base) THEN
        cap := base * power(g.backoff_factor, greatest(p_attempts, 1) - 1);
    END IF;
    RETURN make_interval(secs => cap * random());
END $$;

-- A caller's own delay in seconds, as far as timestamps reach: NaN and negative ones mean now, ten years are the most.
CREATE OR REPLACE FUNCTION asked_delay(p_seconds double precision) RETURNS interval
LANGUAGE sql IMMUTABLE STRICT AS $$
    SELECT make_interval(secs => CASE WHEN p_seconds = 'NaN' THEN 0 ELSE greatest(0, least(p_seconds, 315360000)) END)
$$;

-- The attempts of a message, newest last, the last twenty: when, what, why.
CREATE OR REPLACE FUNCTION add_history(p_history jsonb, p_attempt int, p_outcome text, p_error text) RETURNS jsonb
LANGUAGE sql VOLATILE AS $$
    SELECT CASE WHEN jsonb_array_length(p_history) >= 20 THEN p_history - 0 ELSE p_history END
        || jsonb_build_object('at', clock_timestamp(), 'attempt', p_attempt, 'outcome', p_outcome, 'error', left(p_error, 500))
$$;

-- Flow control: pausing, max_in_flight and rate_limit hold over all consumers of a group. All that is decided here is decided
-- under the cursor's lock, from what the tables say, so a consumer that died leaves nothing to be cleared up.

CREATE OR REPLACE FUNCTION id_count(p_ids int8multirange) RETURNS bigint
LANGUAGE sql IMMUTABLE AS $$
    SELECT coalesce(sum(upper(r) - lower(r)), 0)::bigint FROM unnest(p_ids) AS r
$$;

-- How many messages are handed out: pending in leases that run, and exceptions in flight, in an ordered group those under such leases.
-- What is behind a lease that ran out or was handed back counts for nobody.
CREATE OR REPLACE FUNCTION in_flight(p_stream bigint, g consumer_group, c group_cursor) RETURNS bigint
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    started    timestamptz := clock_timestamp();
    leased     bigint;
    exceptions bigint;
BEGIN
    EXECUTE format('SELECT coalesce(sum(id_count(pending)), 0) FROM %I WHERE group_id = $1 AND seq >= $2 AND expires_at > $3', 'consumer_lease_' || p_stream)
        INTO leased USING g.id, c.first_open, started;
    IF g.mode = 'ordered' THEN
        EXECUTE format('SELECT count(*) FROM %I AS l JOIN %I AS e ON e.group_id = $1 AND e.lease_id = l.token AND e.lane >= 0
                        WHERE l.group_id = $1 AND l.seq >= $2 AND l.expires_at > $3', 'consumer_lease_' || p_stream, 'exception_queue_' || p_stream)
            INTO exceptions USING g.id, c.first_open, started;
    ELSE
        EXECUTE format('SELECT count(*) FROM %I WHERE group_id = $1 AND state = ''inflight'' AND lease_expires_at > $2', 'exception_queue_' || p_stream)
            INTO exceptions USING g.id, started;
    END IF;
    RETURN leased + exceptions;
END $$;

-- How many of p_limit messages may be handed out now, and when the rate limit is used up, how long to wait.
CREATE OR REPLACE FUNCTION allowance(p_stream bigint, g consumer_group, c group_cursor, p_limit bigint, OUT room bigint, OUT wait interval)
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    started timestamptz := clock_timestamp();
    since   timestamptz;
    free    double precision;
BEGIN
    room := CASE WHEN g.paused THEN 0 ELSE p_limit END;
    IF g.max_in_flight IS NOT NULL AND room > 0 THEN
        room := greatest(0, least(room, g.max_in_flight - in_flight(p_stream, g, c)));
    END IF;
    IF g.rate_limit IS NOT NULL AND room > 0 THEN
        since := greatest(c.paced_until, started - rate_burst(g));
        -- A little over, or rounding takes the last one away.
        free := floor(extract(epoch FROM started - since)::double precision * g.rate_limit + 1e-6);
        room := least(room, greatest(free, 0)::bigint);
        IF free < 1 THEN
            room := 0;
            -- Not for every single message of many: the burst covers this pause.
            wait := greatest(since + make_interval(secs => 1 / g.rate_limit) - started, interval '20 milliseconds');
        END IF;
    END IF;
END $$;

-- What of the rate limit may be spent at once: that of a tenth of a second, and at least one message.
CREATE OR REPLACE FUNCTION rate_burst(g consumer_group) RETURNS interval
LANGUAGE sql IMMUTABLE AS $$ SELECT make_interval(secs => greatest(0.1, 1 / g.rate_limit)) $$;

-- The cursor's paced_until after p_count messages were handed out.
CREATE OR REPLACE FUNCTION spend(g consumer_group, p_paced_until timestamptz, p_count bigint) RETURNS timestamptz
LANGUAGE sql VOLATILE AS $$
    SELECT CASE WHEN g.rate_limit IS NULL THEN p_paced_until
                ELSE greatest(p_paced_until, clock_timestamp() - rate_burst(g)) + make_interval(secs => p_count / g.rate_limit) END
$$;

-- Stops handing out messages; what is handed out already is finished. Doing it twice is harmless.
CREATE OR REPLACE FUNCTION pause_group(p_stream bigint, p_group bigint) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
BEGIN
    PERFORM set_paused(p_stream, p_group, true);
END $$;

-- Hands out messages again.
CREATE OR REPLACE FUNCTION resume_group(p_stream bigint, p_group bigint) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
BEGIN
    PERFORM set_paused(p_stream, p_group, false);
END $$;

CREATE OR REPLACE FUNCTION set_paused(p_stream bigint, p_group bigint, p_paused boolean) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    g consumer_group := require_group(p_stream, p_group);
BEGIN
    -- Consumers look at the group after they have the cursor: once this is committed, nobody claims on an older view of it.
    PERFORM lock_cursor(p_stream, p_group);
    UPDATE consumer_group SET paused = p_paused WHERE id = p_group AND paused <> p_paused;
    IF FOUND THEN
        INSERT INTO audit (action, stream_name, group_name)
            SELECT CASE WHEN p_paused THEN 'pause_group' ELSE 'resume_group' END, s.name, g.name FROM stream AS s WHERE s.id = p_stream;
    END IF;
    PERFORM ring(ARRAY[p_stream]);
END $$;

-- Dead owners. A consumer process holds a shared advisory lock on a number of its own, on a connection that it keeps; the
-- server frees it within milliseconds when the process dies. What such a process holds is then taken over without
-- waiting for the leases to run out.
--
-- The number comes from a sequence, so that numbers never collide and a process that reconnects never waits for its
-- predecessor. Nobody tries to take another's lock: that would be seen as a life. The look is pg_locks.

-- The key of an owner's lock: a constant ("SQLS") above, the number below.
CREATE OR REPLACE FUNCTION owner_key(p_owner bigint) RETURNS bigint
LANGUAGE sql IMMUTABLE AS $$ SELECT (1397836883::bigint << 32) | p_owner $$;

-- Makes this session the life of a new owner and returns its number.
CREATE OR REPLACE FUNCTION become_owner() RETURNS bigint
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
DECLARE
    owner bigint := nextval('consumer_owner');
BEGIN
    PERFORM pg_advisory_lock_shared(owner_key(owner));
    RETURN owner;
END $$;

-- Which of these owners hold no lock.
CREATE OR REPLACE FUNCTION missing_owners(p_owners bigint[]) RETURNS bigint[]
LANGUAGE sql VOLATILE SET search_path FROM CURRENT AS $$
    SELECT coalesce(array_agg(o), '{}') FROM unnest(p_owners) AS o
    WHERE NOT EXISTS (
        SELECT FROM pg_locks
        WHERE locktype = 'advisory' AND classid = 1397836883 AND objid = o::oid AND objsubid = 1 AND granted
          AND database = (SELECT oid FROM pg_database WHERE datname = current_database()))
$$;

-- Whether this session, of which the caller knows the backend, holds an owner's lock: behind a transaction pooler another
-- backend answers, or the lock was dropped with the last transaction.
CREATE OR REPLACE FUNCTION is_owner(p_owner bigint, p_backend int) RETURNS boolean
LANGUAGE sql VOLATILE SET search_path FROM CURRENT AS $$
    SELECT pg_backend_pid() = p_backend AND EXISTS (
        SELECT FROM pg_locks WHERE pid = p_backend AND locktype = 'advisory' AND classid = 1397836883 AND objid = p_owner::oid AND objsubid = 1)
$$;

-- Ends the leases of an owner that has been missing in two looks at least a second apart, if it is missing still. Only a
-- process whose own lock has been held for at least 5 s without a break may judge: after a restart of the server nobody
-- holds one. A living owner that is taken for dead costs a repeat, never a message. Returns whether it was missing.
CREATE OR REPLACE FUNCTION expire_owner(p_stream bigint, p_group bigint, p_owner bigint) RETURNS boolean
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
DECLARE
    started timestamptz := clock_timestamp();
BEGIN
    PERFORM require_read_committed();
    IF cardinality(missing_owners(ARRAY[p_owner])) = 0 THEN
        RETURN false;
    END IF;
    EXECUTE format(
        'WITH dead AS (SELECT seq FROM %1$I WHERE group_id = $1 AND seq >= $2 AND owner = $3 AND expires_at > $4 ORDER BY seq FOR UPDATE SKIP LOCKED)
         UPDATE %1$I AS l SET expires_at = $4 FROM dead WHERE l.group_id = $1 AND l.seq = dead.seq', 'consumer_lease_' || p_stream)
        USING p_group, (peek_cursor(p_stream, p_group)).first_open, p_owner, started;
    EXECUTE format(
        'WITH dead AS (SELECT message_id FROM %1$I WHERE group_id = $1 AND state = ''inflight'' AND lease_expires_at > $3 AND owner = $2 ORDER BY message_id FOR UPDATE SKIP LOCKED)
         UPDATE %1$I AS e SET lease_expires_at = $3 FROM dead WHERE e.group_id = $1 AND e.message_id = dead.message_id', 'exception_queue_' || p_stream)
        USING p_group, p_owner, started;
    RETURN true;
END $$;

-- Settling in the handler's own transaction: its writes and the settlement commit together, so effects in this database
-- happen exactly once.
--
-- It leaves a row in consumer_done_<n>, and never touches the cursor or a lease, on which all handlers would wait for each
-- other's commits. The order is what makes it safe: first the row, and in a later statement the look whether the message is
-- still the caller's. Whoever takes a lease over changes its token first and reads the rows afterwards (take_done), so a
-- handler that lost its lease either sees that, or its row is found: by the one who takes over, or by the next handler
-- of that message, whose own row conflicts with it. The message may have become an exception by then: it ends where
-- the row is found (end_settled).

-- Settles messages that are held under p_token in the caller's transaction, which must be READ COMMITTED. Call it last, and
-- claim nothing in that transaction. p_exceptions: p_token proves claimed exceptions, not a lease.
--
-- p_mark: for clients that lend the transaction to a handler, which may have ended it. They say SET LOCAL
-- sqlstreams.transaction = p_mark when they begin; the setting ends with the transaction.
--
-- SQ008: the lease was lost. SQ009: some were settled before; see unsettled. SQ010: this is not the transaction that was
-- lent. All leave nothing to do but to roll back.
CREATE OR REPLACE FUNCTION settle_in_transaction(p_stream bigint, p_group bigint, p_token uuid, p_ids bigint[], p_exceptions boolean DEFAULT false, p_mark text DEFAULT NULL) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
DECLARE
    g       consumer_group;
    ids     bigint[] := ARRAY(SELECT DISTINCT i FROM unnest(p_ids) AS i ORDER BY i);
    wanted  int := cardinality(ids);
    hits    int;
BEGIN
    PERFORM require_lent(p_mark);
    g := require_group(p_stream, p_group);
    IF NOT g.transactional THEN
        RAISE EXCEPTION 'group % does not settle in transactions', quote_ident(g.name)
            USING ERRCODE = 'SQ004', HINT = 'Say so first: alter_group(…, p_transactional => true).';
    END IF;
    EXECUTE format('INSERT INTO %I (group_id, message_id) SELECT $1, id FROM unnest($2) AS id ON CONFLICT DO NOTHING', 'consumer_done_' || p_stream)
        USING p_group, ids;
    GET DIAGNOSTICS hits = ROW_COUNT;
    IF hits < wanted THEN
        PERFORM refuse_settled(wanted - hits);
    END IF;

    IF p_exceptions THEN
        PERFORM lock_exceptions(p_stream, p_group, array_fill(p_token, ARRAY[cardinality(p_ids)]), p_ids);
        EXECUTE format('DELETE FROM %I WHERE group_id = $1 AND message_id >= (SELECT min(i) FROM unnest($2) AS i) AND message_id = ANY ($2) AND lease_id = $3', 'exception_queue_' || p_stream)
            USING p_group, ids, p_token;
        GET DIAGNOSTICS hits = ROW_COUNT;
        -- The row of the exception was the message's one place; with it gone nobody can be handed the message any more.
        EXECUTE format('DELETE FROM %I WHERE group_id = $1 AND message_id >= (SELECT min(i) FROM unnest($2) AS i) AND message_id = ANY ($2)', 'consumer_done_' || p_stream) USING p_group, ids;
        IF hits < wanted THEN
            PERFORM refuse_lost();
        END IF;
    ELSE
        PERFORM require_held(p_stream, p_group, p_token, ids);
    END IF;
END $$;

-- Refuses to go on unless these messages are pending in the caller's lease.
CREATE OR REPLACE FUNCTION require_held(p_stream bigint, p_group bigint, p_token uuid, p_ids bigint[]) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
DECLARE
    pending int8multirange;
BEGIN
    pending := lease_pending(p_stream, p_group, p_token);
    IF EXISTS (SELECT FROM unnest(p_ids) AS i WHERE (pending @> i) IS NOT TRUE) THEN
        PERFORM refuse_lost();
    END IF;
END $$;

CREATE OR REPLACE FUNCTION require_lent(p_mark text) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
BEGIN
    PERFORM require_read_committed();
    IF current_setting('sqlstreams.transaction', true) IS DISTINCT FROM p_mark AND p_mark IS NOT NULL THEN
        RAISE EXCEPTION 'the handler ended the transaction that it was given'
            USING ERRCODE = 'SQ010', HINT = 'Leave COMMIT and ROLLBACK to the consumer; savepoints are fine.';
    END IF;
END $$;

CREATE OR REPLACE FUNCTION refuse_lost() RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    RAISE EXCEPTION 'the lease was lost before the messages were settled'
        USING ERRCODE = 'SQ008', HINT = 'Roll back: another consumer handles them.';
END $$;

CREATE OR REPLACE FUNCTION refuse_settled(p_count bigint) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    RAISE EXCEPTION 'settled before: % of these messages', p_count
        USING ERRCODE = 'SQ009', HINT = 'Roll back: their effects are there already.';
END $$;

-- Which of these messages still have to be handled by whoever holds them under p_token, for a caller that does not know
-- whether its transaction has committed. Waits for transactions that are settling one of them right now. What it leaves out
-- was settled, or is not the caller's any more.
CREATE OR REPLACE FUNCTION unsettled(p_stream bigint, p_group bigint, p_token uuid, p_ids bigint[], p_exceptions boolean DEFAULT false) RETURNS bigint[]
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
DECLARE
    id   bigint;
    open bigint[] := '{}';
    hits int;
BEGIN
    PERFORM require_read_committed();
    PERFORM require_group(p_stream, p_group);
    IF p_exceptions THEN
        PERFORM end_settled(p_stream, p_group, array_fill(p_token, ARRAY[cardinality(p_ids)]), p_ids);
        EXECUTE format('SELECT array_agg(message_id) FROM (SELECT message_id FROM %I WHERE group_id = $1 AND message_id >= (SELECT min(i) FROM unnest($2) AS i) AND message_id = ANY ($2) AND lease_id = $3 ORDER BY message_id FOR UPDATE) AS x', 'exception_queue_' || p_stream)
            INTO open USING p_group, p_ids, p_token;
        RETURN coalesce(open, '{}');
    END IF;
    FOR id IN SELECT DISTINCT i FROM unnest(p_ids) AS i ORDER BY i LOOP
        -- A row of the same key is what makes an insert wait for another's commit.
        EXECUTE format('INSERT INTO %I (group_id, message_id) VALUES ($1, $2) ON CONFLICT DO NOTHING', 'consumer_done_' || p_stream) USING p_group, id;
        GET DIAGNOSTICS hits = ROW_COUNT;
        IF hits > 0 THEN
            open := open || id;
            EXECUTE format('DELETE FROM %I WHERE group_id = $1 AND message_id = $2', 'consumer_done_' || p_stream) USING p_group, id;
        END IF;
    END LOOP;
    RETURN ARRAY(SELECT i FROM unnest(open) AS i WHERE lease_pending(p_stream, p_group, p_token) @> i);
END $$;

-- Takes the rows of p_ids away that lie in these lanes (NULL: all), and returns the ids that had one: others may have a lease of the same
-- range in other lanes. The caller has locked the lease that held them, in an earlier statement, and takes them out of its pending now.
CREATE OR REPLACE FUNCTION take_done(p_stream bigint, p_group bigint, p_ids int8multirange, p_lanes bigint) RETURNS int8multirange
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    taken int8multirange;
BEGIN
    EXECUTE format(
        'WITH gone AS (
             DELETE FROM %I AS d WHERE group_id = $1 AND message_id >= lower($2) AND message_id < upper($2) AND $2 @> message_id
                AND ($3 = -1 OR EXISTS (SELECT FROM %I AS m WHERE m.id = d.message_id AND m.id >= lower($2) AND m.id < upper($2) AND ($3 >> lane_of(m.key, m.id)) & 1 = 1))
             RETURNING message_id)
         SELECT coalesce(range_agg(int8range(message_id, message_id, ''[]'')), ''{}'') FROM gone', 'consumer_done_' || p_stream, 'message_log_' || p_stream)
        INTO taken USING p_group, p_ids, coalesce(p_lanes, -1);
    RETURN taken;
END $$;

-- Ends exceptions that are held under these tokens and were settled all the same, by a handler that had lost the message when
-- its transaction committed. Returns their ids. Waits for transactions that are settling one of them right now.
CREATE OR REPLACE FUNCTION end_settled(p_stream bigint, p_group bigint, p_tokens uuid[], p_ids bigint[]) RETURNS bigint[]
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    ended bigint[];
BEGIN
    EXECUTE format(
        'WITH held AS MATERIALIZED (
             SELECT e.message_id FROM unnest($2, $3) AS u(token, id)
             JOIN %1$I AS e ON e.group_id = $1 AND e.message_id = u.id AND e.lease_id = u.token
             ORDER BY e.message_id FOR UPDATE OF e),
         done AS (DELETE FROM %2$I AS d USING held WHERE d.group_id = $1 AND d.message_id = held.message_id RETURNING d.message_id),
         gone AS (DELETE FROM %1$I AS e USING done WHERE e.group_id = $1 AND e.message_id = done.message_id RETURNING e.message_id)
         SELECT coalesce(array_agg(message_id), ''{}'') FROM gone', 'exception_queue_' || p_stream, 'consumer_done_' || p_stream)
        INTO ended USING p_group, p_tokens, p_ids;
    RETURN ended;
END $$;

-- Leases: ranges of the log that a consumer works on. An id is in exactly one place: above the cursor, in one lease's
-- pending, in one row of the exception queue, or resolved. Whatever turns it into an exception row takes it out of
-- pending in the same transaction; the exception queue's primary key catches a violation.

-- Locks the lease that p_token proves. p_seq says where it lies; a lease that was moved (extend) is looked for by its
-- token. A lease that is not the caller's any more comes back as NULLs.
CREATE OR REPLACE FUNCTION lock_lease(p_stream bigint, p_group bigint, p_seq bigint, p_token uuid) RETURNS group_lease
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    l group_lease;
BEGIN
    EXECUTE format('SELECT seq, token, pending, lanes FROM %I WHERE group_id = $1 AND seq = $2 AND token = $3 FOR UPDATE', 'consumer_lease_' || p_stream)
        INTO l USING p_group, p_seq, p_token;
    IF l.seq IS NULL THEN
        EXECUTE format('SELECT seq, token, pending, lanes FROM %I WHERE group_id = $1 AND seq >= $2 AND token = $3 ORDER BY seq DESC LIMIT 1 FOR UPDATE',
                       'consumer_lease_' || p_stream)
            INTO l USING p_group, (peek_cursor(p_stream, p_group)).first_open, p_token;
    END IF;
    RETURN l;
END $$;

-- Moves a lease up. Readers of leases start at the lowest open one and walk every dead row above it, so one that lives long is moved from
-- time to time; its token stays. The caller has the cursor's lock.
CREATE OR REPLACE FUNCTION move_lease(p_stream bigint, p_group bigint, p_seq bigint, INOUT c group_cursor)
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    EXECUTE format('WITH moved AS (DELETE FROM %1$I WHERE group_id = $1 AND seq = $2 RETURNING *)
                    INSERT INTO %1$I (group_id, seq, token, owner, holder, lanes, pending, expires_at, reclaims)
                    SELECT group_id, $3, token, owner, holder, lanes, pending, expires_at, reclaims FROM moved', 'consumer_lease_' || p_stream)
        USING p_group, p_seq, c.next_seq;
    c.next_seq := c.next_seq + 1;
END $$;

-- Takes p_done out of a lease, and makes exception rows of those of p_ids that are pending in it. What remains is leased
-- for another lease_duration and belongs to p_owner. Returns the seq the lease has (or had, when nothing remains); NULL when the lease is not
-- the caller's any more: then nothing is changed.
CREATE OR REPLACE FUNCTION settle_lease(p_stream bigint, g consumer_group, p_owner bigint, p_seq bigint, p_token uuid, p_done int8multirange,
    p_ids bigint[] DEFAULT NULL, p_outcomes text[] DEFAULT NULL, p_errors text[] DEFAULT NULL, p_delays double precision[] DEFAULT NULL)
RETURNS bigint
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    l    group_lease;
    hits int;
BEGIN
    IF p_ids IS NULL AND NOT g.transactional THEN
        -- The usual case, everything done, in one statement.
        EXECUTE format('DELETE FROM %I WHERE group_id = $1 AND seq = $2 AND token = $3 AND pending <@ $4', 'consumer_lease_' || p_stream)
            USING g.id, p_seq, p_token, p_done;
        GET DIAGNOSTICS hits = ROW_COUNT;
        IF hits > 0 THEN
            RETURN p_seq;
        END IF;
    END IF;

    l := lock_lease(p_stream, g.id, p_seq, p_token);
    IF l.seq IS NULL THEN
        RETURN NULL;
    END IF;
    IF p_ids IS NOT NULL THEN
        IF g.transactional THEN
            -- What a handler that had lost it has settled all the same did not fail.
            l.pending := l.pending - take_done(p_stream, g.id, l.pending * (SELECT range_agg(int8range(id, id, '[]')) FROM unnest(p_ids) AS id), l.lanes);
        END IF;
        l.pending := l.pending - record_failures(p_stream, g, l.pending, p_ids, p_outcomes, p_errors, p_delays);
    END IF;
    IF g.transactional THEN
        PERFORM take_done(p_stream, g.id, l.pending * p_done, l.lanes);
    END IF;
    l.pending := l.pending - p_done;
    IF isempty(l.pending) THEN
        EXECUTE format('DELETE FROM %I WHERE group_id = $1 AND seq = $2', 'consumer_lease_' || p_stream) USING g.id, l.seq;
    ELSE
        EXECUTE format('UPDATE %I SET pending = $3, expires_at = $4, owner = $5 WHERE group_id = $1 AND seq = $2', 'consumer_lease_' || p_stream)
            USING g.id, l.seq, l.pending, clock_timestamp() + g.lease_duration, p_owner;
    END IF;
    RETURN l.seq;
END $$;

-- Makes exception rows of first deliveries that failed, as far as p_pending holds them. Returns the ids it took.
CREATE OR REPLACE FUNCTION record_failures(p_stream bigint, g consumer_group, p_pending int8multirange,
    p_ids bigint[], p_outcomes text[], p_errors text[], p_delays double precision[], p_ordered boolean DEFAULT false)
RETURNS int8multirange
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    taken   int8multirange;
    lowest  bigint;
    highest bigint;
    started timestamptz := clock_timestamp();
BEGIN
    SELECT range_agg(int8range(id, id, '[]')), min(id), max(id) INTO taken, lowest, highest
        FROM unnest(p_ids) AS id WHERE p_pending @> id;
    IF taken IS NULL THEN
        RETURN '{}';
    END IF;
    -- The bounds keep the other partitions out of the plan. LEFT JOIN: a failure is recorded even if its message is gone.
    EXECUTE format(
        'INSERT INTO %I (group_id, message_id, state, attempts, delays, due_at, key, lane, last_error, history, first_failed_at, dead_at)
         SELECT $1.id, f.id,
                CASE WHEN f.final THEN ''dead'' WHEN $10 AND m.key IS NOT NULL THEN ''deferred'' ELSE ''ready'' END,
                CASE WHEN f.outcome = ''delay'' THEN 0 ELSE 1 END,
                CASE WHEN f.outcome = ''delay'' THEN 1 ELSE 0 END,
                CASE WHEN f.final THEN $8 ELSE $8 + coalesce(asked_delay(f.delay), retry_delay($1, 1)) END,
                m.key, CASE WHEN $1.mode <> ''parallel'' THEN lane_of(m.key, f.id) END, error_text(f.error),
                CASE WHEN f.outcome = ''delay'' THEN ''[]'' ELSE add_history(''[]'', 1, CASE WHEN f.final THEN ''dead'' ELSE f.outcome END, f.error) END,
                $8,
                CASE WHEN f.final THEN $8 END
         FROM (SELECT DISTINCT ON (id) id, outcome, error, delay, is_final(outcome, 0, $1.max_attempts) AS final
               FROM unnest($3, $4, $5, $6) AS u(id, outcome, error, delay)
               WHERE $2 @> id) AS f
         LEFT JOIN %I AS m ON m.id = f.id AND m.id >= $7 AND m.id <= $9',
        'exception_queue_' || p_stream, 'message_log_' || p_stream)
        USING g, taken, p_ids, p_outcomes, p_errors, p_delays, lowest, started, highest, p_ordered;
    RETURN taken;
END $$;

-- Refuses outcomes that do not exist before anything is changed.
CREATE OR REPLACE FUNCTION require_outcomes(p_outcomes text[], p_allowed text[]) RETURNS void
LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    wrong text := (SELECT coalesce(o, 'NULL') FROM unnest(p_outcomes) AS o WHERE o IS NULL OR o <> ALL (p_allowed) LIMIT 1);
BEGIN
    IF wrong IS NOT NULL THEN
        RAISE EXCEPTION 'unknown outcome %', wrong
            USING ERRCODE = 'SQ004', HINT = format('An outcome is one of %s.', array_to_string(p_allowed, ', '));
    END IF;
END $$;

-- Ordered groups: messages of one key are handled one at a time, in id order, whatever fails or dies. Keys hash into 64 lanes.
--
-- Lanes are no rows. The group's cursor holds cohorts, (lanes, position) with equal positions merged; leases carry the lanes they
-- are for. Rules, each the answer to a race; all is changed under the cursor's lock, by statements that begin after it:
--   1. A lane is in the live leases of at most one holder, and all work of its keys goes through that holder: fresh messages,
--      leases taken over, exceptions, redriven ones.
--   2. One fence per holder: each of its calls names all its leases and renews them; if one is gone, all are lost. One that it
--      does not name is free at once.
--   3. An id is in one place (lease.sql).
--   4. Of the unresolved rows of a key only the lowest is ready or inflight, the others are deferred. Only the deferred ones that
--      follow it closely are claimed together with it.
--   5. The leases that a lost holder has left come before the exceptions of their lanes, and before what is fresh, by lowest id.
--   6. An id that is claimed while its key has an unresolved row with a lower one becomes a deferred row in that transaction.
--   7. The holder runs a key's messages one by one, and after a failure none of the key's until it has told; what is pending of the
--      key becomes deferred rows then.
--   8. A redriven message takes its place among the unresolved ones of its key.

-- A message without a key is in a lane, too, so that it is read once, but waits for nobody.
CREATE OR REPLACE FUNCTION lane_of(p_key text, p_id bigint) RETURNS int
LANGUAGE sql IMMUTABLE AS $$
    SELECT ((CASE WHEN p_key IS NULL THEN p_id ELSE hashtextextended(p_key, 0) END) & 63)::int
$$;

-- A condition for the messages of these lanes, for dynamic SQL.
CREATE OR REPLACE FUNCTION in_lanes(p_lanes bigint) RETURNS text
LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN p_lanes <> -1 THEN format(' AND (%L::bigint >> lane_of(key, id)) & 1 = 1', p_lanes) ELSE '' END
$$;

CREATE OR REPLACE FUNCTION lane_count(p_lanes bigint) RETURNS int
LANGUAGE sql IMMUTABLE AS $$ SELECT bit_count(p_lanes::bit(64))::int $$;

-- At most p_count of these lanes.
CREATE OR REPLACE FUNCTION first_lanes(p_lanes bigint, p_count int) RETURNS bigint
LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    chosen bigint := 0;
BEGIN
    IF lane_count(p_lanes) <= p_count THEN
        RETURN p_lanes;
    END IF;
    FOR lane IN 0..63 LOOP
        EXIT WHEN lane_count(chosen) >= p_count;
        chosen := chosen | (p_lanes & (1::bigint << lane));
    END LOOP;
    RETURN chosen;
END $$;

-- The cohorts after these lanes have been read up to p_position.
CREATE OR REPLACE FUNCTION move_lanes(p_cohorts lane_cohort[], p_lanes bigint, p_position bigint) RETURNS lane_cohort[]
LANGUAGE sql IMMUTABLE AS $$
    SELECT array_agg((lanes, position)::lane_cohort ORDER BY position)
    FROM (SELECT bit_or(lanes) AS lanes, position
          FROM (SELECT lanes & ~p_lanes AS lanes, position FROM unnest(p_cohorts) UNION ALL SELECT p_lanes, p_position) AS x
          WHERE lanes <> 0 GROUP BY position) AS y
$$;

CREATE OR REPLACE FUNCTION lowest_position(p_cohorts lane_cohort[]) RETURNS bigint
LANGUAGE sql IMMUTABLE AS $$ SELECT min(position) FROM unnest(p_cohorts) $$;

-- Whoever calls for an ordered group what is for the others, or the other way round, has not seen that the mode was changed. Fair groups
-- are called as parallel ones.
CREATE OR REPLACE FUNCTION require_mode(g consumer_group, p_mode text) RETURNS void
LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    IF (g.mode = 'ordered') <> (p_mode = 'ordered') THEN
        RAISE EXCEPTION 'group % is %', quote_ident(g.name), g.mode
            USING ERRCODE = 'SQ012', HINT = CASE g.mode WHEN 'ordered' THEN 'Use advance_lanes and release_lanes.' ELSE 'Use the functions for parallel groups.' END;
    END IF;
END $$;

-- Makes the lowest unresolved row of each of these keys the one that can run.
CREATE OR REPLACE FUNCTION promote(p_stream bigint, p_group bigint, p_keys text[]) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    IF cardinality(p_keys) > 0 THEN
        EXECUTE format(
            'UPDATE %1$I AS e SET state = ''ready'', due_at = greatest(due_at, $3)
             FROM (SELECT (SELECT message_id FROM %1$I WHERE group_id = $1 AND key = k AND lane >= 0 AND state <> ''dead'' ORDER BY message_id LIMIT 1) AS id
                   FROM (SELECT DISTINCT unnest($2) AS k) AS x) AS head
             WHERE e.group_id = $1 AND e.message_id = head.id AND e.state = ''deferred''', 'exception_queue_' || p_stream)
            USING p_group, p_keys, clock_timestamp();
    END IF;
END $$;

-- After rows of these messages were made ready: of their keys only the lowest stays so.
CREATE OR REPLACE FUNCTION line_up(p_stream bigint, p_group bigint, p_ids bigint[]) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    keys text[];
BEGIN
    EXECUTE format(
        'WITH keys AS MATERIALIZED (SELECT DISTINCT key FROM %1$I WHERE group_id = $1 AND message_id >= (SELECT min(i) FROM unnest($2) AS i) AND message_id = ANY ($2) AND key IS NOT NULL),
         rows AS (
             UPDATE %1$I AS e SET state = ''deferred'' FROM keys
             WHERE e.group_id = $1 AND e.key = keys.key AND e.lane >= 0 AND e.state = ''ready'' RETURNING e.key)
         SELECT array_agg(key) FROM keys', 'exception_queue_' || p_stream)
        INTO keys USING p_group, p_ids;
    PERFORM promote(p_stream, p_group, keys);
END $$;

-- Makes deferred rows of those of p_ids whose key has an unresolved row with a lower id. Returns them.
CREATE OR REPLACE FUNCTION defer_blocked(p_stream bigint, p_group bigint, p_ids int8multirange, p_lanes bigint) RETURNS int8multirange
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    exceptions text := 'exception_queue_' || p_stream;
    blocked    text[];
    taken      int8multirange := '{}';
    none       boolean;
BEGIN
    EXECUTE format('SELECT NOT EXISTS (SELECT FROM %I WHERE group_id = $1 AND lane >= 0 AND state <> ''dead'' AND key IS NOT NULL)', exceptions)
        INTO none USING p_group;
    IF none OR isempty(p_ids) THEN
        RETURN taken;
    END IF;
    -- The keys that have such rows, from one to the next, unless they are very many.
    EXECUTE format(
        'WITH RECURSIVE keys AS (
             (SELECT key, 1 AS n FROM %1$I WHERE group_id = $1 AND lane >= 0 AND state <> ''dead'' AND key IS NOT NULL ORDER BY key LIMIT 1)
             UNION ALL
             SELECT next.key, n + 1 FROM keys CROSS JOIN LATERAL (SELECT e.key FROM %1$I AS e WHERE group_id = $1 AND lane >= 0 AND state <> ''dead'' AND e.key > keys.key ORDER BY e.key LIMIT 1) AS next
             WHERE n <= 1000)
         SELECT array_agg(key) FROM keys', exceptions)
        INTO blocked USING p_group;
    EXECUTE format(
        'WITH mine AS MATERIALIZED (
             SELECT id, key FROM %2$I WHERE id >= lower($2) AND id < upper($2) AND $2 @> id AND key IS NOT NULL
                AND ($3 >> lane_of(key, id)) & 1 = 1 AND ($4 IS NULL OR key = ANY ($4)) AND (%3$s)),
         lowest AS MATERIALIZED (
             SELECT key, (SELECT message_id FROM %1$I AS e WHERE group_id = $1 AND e.key = k.key AND lane >= 0 AND state <> ''dead'' ORDER BY message_id LIMIT 1) AS id
             FROM (SELECT DISTINCT key FROM mine) AS k),
         rows AS (
             INSERT INTO %1$I (group_id, message_id, state, due_at, key, lane)
             SELECT $1, m.id, ''deferred'', $5, m.key, lane_of(m.key, m.id) FROM mine AS m JOIN lowest AS l ON l.key = m.key AND l.id < m.id
             RETURNING message_id)
         SELECT coalesce(range_agg(int8range(message_id, message_id, ''[]'')), ''{}'') FROM rows', exceptions, 'message_log_' || p_stream,
        coalesce(binding_condition(p_group, lower(p_ids), upper(p_ids)), 'true'))
        INTO taken USING p_group, p_ids, p_lanes, CASE WHEN cardinality(blocked) <= 1000 THEN blocked END, clock_timestamp();
    RETURN taken;
END $$;

-- Fair groups: where very much of one tenant waits, the others' messages do not wait behind it. The tenant is the message's key.
--
-- The lanes of lanes.sql, but nobody owns one: advance, fetch, settle and the exceptions are those of parallel groups, and any number of leases
-- may be for the same lane, or for the same ids in different lanes. The cursor's cohorts stand in the order of their turns: first
-- the one that was served longest ago.
--
-- Invariants, beside those of lease.sql:
--   * A message is in one place: above the position of its lane's cohort, in one lease that is for its lane, in an exception row, or resolved.
--   * A lane is in one cohort. Up to the highest position everything is final.
--   * claimed is the lowest position.
--   * A cohort that has something to read is served before any other is served twice.
--
-- A claim reads no message, so it cannot know whose they are. The caller does, of what it has fetched: it names the lanes that it wants,
-- those that are heavy, and how large a part of the ids each has. From a cohort of which more waits than is claimed the lanes that are
-- not heavy go on alone. So a tenant's burst is left behind once, and the others pass over it in wide claims.

-- Of the lanes that are there, those to hand out now. p_much: there is more than is claimed.
CREATE OR REPLACE FUNCTION choose_lanes(p_there bigint, w lane_wish, p_much boolean) RETURNS bigint
LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN p_much AND p_there & w.lanes & ~w.heavy <> 0 THEN p_there & w.lanes & ~w.heavy ELSE p_there & w.lanes END
$$;

-- Among how many ids about p_limit messages of these lanes are to be found.
CREATE OR REPLACE FUNCTION lane_width(p_lanes bigint, w lane_wish, p_limit bigint) RETURNS bigint
LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN w.shares IS NULL THEN p_limit ELSE greatest(p_limit, least(w.most,
        p_limit / greatest((SELECT sum(share) FROM unnest(w.shares) WITH ORDINALITY AS u(share, n) WHERE (p_lanes >> (n - 1)::int) & 1 = 1), 1e-6)))::bigint END
$$;

-- The cohorts after these lanes were served up to p_position: their turn is the last, together with those that stand there already.
CREATE OR REPLACE FUNCTION serve_lanes(p_cohorts lane_cohort[], p_lanes bigint, p_position bigint) RETURNS lane_cohort[]
LANGUAGE sql IMMUTABLE AS $$
    SELECT array_agg((lanes, position)::lane_cohort ORDER BY turn)
    FROM (SELECT bit_or(lanes) AS lanes, position, max(turn) AS turn
          FROM (SELECT lanes & ~p_lanes AS lanes, position, turn FROM unnest(p_cohorts) WITH ORDINALITY AS u(lanes, position, turn)
                UNION ALL SELECT p_lanes, p_position, 1000) AS x
          WHERE lanes <> 0 GROUP BY position) AS y
$$;

-- The next ids of the log, for the lanes whose turn it is. unread: lanes that have more.
CREATE OR REPLACE FUNCTION next_in_turn(p_stream bigint, w lane_wish, p_limit bigint, INOUT c group_cursor, OUT range int8range, OUT lanes bigint, OUT unread bigint)
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    turns  lane_cohort[] := c.cohorts;
    top    bigint := (SELECT max(y.position) FROM unnest(turns) AS y);
    head   bigint;
    x      record;
    r      record;
    at     group_cursor;
    width  bigint;
    beyond bigint;
    read   bigint := 0;
BEGIN
    -- Only then anything depends on it.
    IF cardinality(turns) > 1 OR w.heavy <> 0 THEN
        head := greatest(top, log_head(p_stream));
    END IF;
    FOR x IN SELECT u.lanes, u.position FROM unnest(turns) WITH ORDINALITY AS u(lanes, position, turn) ORDER BY turn LOOP
        CONTINUE WHEN x.lanes & w.lanes = 0 OR x.position >= head;
        lanes := choose_lanes(x.lanes, w, coalesce(head - x.position > p_limit, false));
        width := lane_width(lanes, w, p_limit);
        at := c;
        at.claimed := x.position;
        IF x.position < top THEN
            -- Others have been there. No further than where the next ones stand: with those it goes on then.
            beyond := (SELECT min(y.position) FROM unnest(c.cohorts) AS y WHERE y.position > x.position);
            at.claimed := least(x.position + width, beyond);
            range := int8range(x.position, at.claimed, '(]');
        ELSE
            SELECT * INTO r FROM next_range(p_stream, width, at);
            at := r.c;
            range := r.range;
            IF range IS NULL OR at.claimed - lower(range) + 1 < width THEN
                -- That was all, for now.
                read := read | x.lanes;
            END IF;
        END IF;
        IF at.claimed > x.position THEN
            c.cohorts := serve_lanes(c.cohorts, lanes, at.claimed);
            c.claimed := lowest_position(c.cohorts);
        END IF;
        EXIT WHEN range IS NOT NULL;
    END LOOP;
    top := (SELECT max(y.position) FROM unnest(c.cohorts) AS y);
    unread := (SELECT coalesce(bit_or(CASE WHEN y.position < top THEN y.lanes WHEN coalesce(head > top, true) THEN y.lanes & ~read ELSE 0 END), 0) FROM unnest(c.cohorts) AS y);
END $$;

-- Before a lease is taken over: of its lanes only those to hand out now stay in it, the others become a lease of their own, as old
-- and as often lost as it is.
CREATE OR REPLACE FUNCTION cut_lease(p_stream bigint, p_group bigint, w lane_wish, p_limit bigint, p_seq bigint, p_pending int8multirange, INOUT c group_cursor, INOUT lanes bigint)
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    there bigint := coalesce(lanes, -1);
BEGIN
    lanes := choose_lanes(there, w, id_count(p_pending) > p_limit);
    IF lanes <> there THEN
        EXECUTE format('INSERT INTO %1$I (group_id, seq, token, lanes, pending, expires_at, reclaims)
                        SELECT group_id, $3, gen_random_uuid(), $4, $5, expires_at, reclaims FROM %1$I WHERE group_id = $1 AND seq = $2', 'consumer_lease_' || p_stream)
            USING p_group, p_seq, c.next_seq, there & ~lanes, p_pending;
        c.next_seq := c.next_seq + 1;
    END IF;
END $$;

-- Up to p_limit exceptions that are due, of these lanes: of each that has some about as many, those first that are due longest.
CREATE OR REPLACE FUNCTION due_in_turn(p_stream bigint, p_group bigint, p_lanes bigint, p_limit bigint, p_from timestamptz, p_now timestamptz) RETURNS bigint[]
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    exceptions text := 'exception_queue_' || p_stream;
    ready      text := 'group_id = $1 AND lane = l.lane AND lane >= 0 AND state = ''ready'' AND losses = 0 AND due_at <= $3 AND due_at >= $4';
    filled     smallint[];
    ids        bigint[];
BEGIN
    EXECUTE format('SELECT array_agg(l.lane) FROM unnest($2) AS l(lane) CROSS JOIN LATERAL (SELECT FROM %I WHERE %s ORDER BY due_at LIMIT 1) AS e', exceptions, ready)
        INTO filled USING p_group, ARRAY(SELECT i::smallint FROM generate_series(0, 63) AS i WHERE (p_lanes >> i) & 1 = 1), p_now, p_from;
    IF filled IS NULL THEN
        RETURN '{}';
    END IF;
    EXECUTE format(
        'SELECT array_agg(message_id) FROM (
             SELECT e.message_id FROM unnest($2) AS l(lane)
             CROSS JOIN LATERAL (SELECT message_id, due_at FROM %I WHERE %s ORDER BY due_at LIMIT $5 FOR UPDATE SKIP LOCKED) AS e
             ORDER BY e.due_at LIMIT $6) AS x', exceptions, ready)
        INTO ids USING p_group, filled, p_now, p_from, ceil(p_limit::numeric / cardinality(filled))::bigint, p_limit;
    RETURN ids;
END $$;

-- What the holder of lanes tells: see lanes.sql for the rules. Leases are looked up from the lowest on and by = ANY, not by the join alone: the
-- planner would take a small table for a reason to walk the whole group, dead rows and all.

-- Where p_holder's leases lie that these tokens prove; NULL unless all of them are its own still. If one is not, nothing is: whoever
-- goes on with some of its leases after others were taken over would step back behind what those have settled.
CREATE OR REPLACE FUNCTION held_lanes(p_stream bigint, p_group bigint, c group_cursor, p_holder uuid, p_tokens uuid[]) RETURNS bigint[]
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    leases  text := 'consumer_lease_' || p_stream;
    started timestamptz := clock_timestamp();
    held    bigint[];
    held_by uuid[];
    seqs    bigint[] := '{}';
BEGIN
    IF c.first_open < c.next_seq THEN
        EXECUTE format('SELECT array_agg(seq), array_agg(token) FROM %I WHERE group_id = $1 AND seq >= $2 AND holder = $3', leases)
            INTO held, held_by USING p_group, c.first_open, p_holder;
        seqs := ARRAY(SELECT f.seq FROM unnest(p_tokens) WITH ORDINALITY AS u(token, n) JOIN unnest(held, held_by) AS f(seq, token) ON f.token = u.token ORDER BY u.n);
    END IF;
    IF cardinality(seqs) < cardinality(p_tokens) THEN
        EXECUTE format('UPDATE %I SET expires_at = $4, holder = NULL WHERE group_id = $1 AND seq >= $2 AND holder = $3', leases)
            USING p_group, c.first_open, p_holder, started;
        RETURN NULL;
    END IF;
    IF cardinality(held) > cardinality(seqs) THEN
        -- Claimed, but its holder never heard of it.
        EXECUTE format('UPDATE %I SET expires_at = ''-infinity'', holder = NULL WHERE group_id = $1 AND seq >= $2 AND holder = $3 AND token <> ALL ($4)', leases)
            USING p_group, c.first_open, p_holder, p_tokens;
    END IF;
    RETURN seqs;
END $$;

-- What one of the holder's leases has above p_after becomes two leases of its own: one for p_lanes, one for its other lanes. So
-- what waits in a few lanes does not keep the others from being read on.
CREATE OR REPLACE FUNCTION part_lanes(p_stream bigint, p_group bigint, p_seq bigint, p_after bigint, p_lanes bigint, p_tokens uuid[], INOUT c group_cursor)
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    beyond int8multirange := int8multirange(int8range(p_after, NULL, '()'));
BEGIN
    EXECUTE format('INSERT INTO %1$I (group_id, seq, token, owner, holder, lanes, pending, expires_at, reclaims)
                    SELECT l.group_id, $3 + u.n - 1, u.token, l.owner, l.holder, CASE u.n WHEN 1 THEN l.lanes & ~$4 ELSE l.lanes & $4 END, l.pending * $5, l.expires_at, l.reclaims
                    FROM %1$I AS l, unnest($6) WITH ORDINALITY AS u(token, n) WHERE l.group_id = $1 AND l.seq = $2 AND u.n <= 2', 'consumer_lease_' || p_stream)
        USING p_group, p_seq, c.next_seq, p_lanes, beyond, p_tokens;
    EXECUTE format('UPDATE %I SET pending = pending - $3 WHERE group_id = $1 AND seq = $2', 'consumer_lease_' || p_stream)
        USING p_group, p_seq, beyond;
    c.next_seq := c.next_seq + 2;
END $$;

-- Exceptions that ended: 'ok', 'retry', 'dead', 'delay', or 'left', which was not run. A failure that is tried again takes back
-- those of its key that were claimed with it.
CREATE OR REPLACE FUNCTION settle_lane_exceptions(p_stream bigint, g consumer_group, p_tokens uuid[], p_ids bigint[], p_keys text[],
    p_outcomes text[], p_errors text[], p_delays double precision[]) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    exceptions text := 'exception_queue_' || p_stream;
    stopped    text[];
BEGIN
    PERFORM require_outcomes(p_outcomes, '{ok,retry,dead,delay,left}');
    IF g.transactional THEN
        -- What a handler has settled in its transaction is over, whatever is said of it.
        PERFORM end_settled(p_stream, g.id, p_tokens, p_ids);
    END IF;
    EXECUTE format('DELETE FROM %I AS e USING unnest($2, $3, $4) AS u(token, id, outcome)
                    WHERE e.group_id = $1 AND e.message_id = u.id AND e.lease_id = u.token AND u.outcome = ''ok''', exceptions)
        USING g.id, p_tokens, p_ids, p_outcomes;
    EXECUTE format(
        'UPDATE %1$I AS e SET
             state = CASE WHEN is_final(u.outcome, e.attempts, $1.max_attempts) THEN ''dead'' ELSE ''deferred'' END,
             attempts = e.attempts + (u.outcome IN (''retry'', ''dead''))::int,
             delays = e.delays + (u.outcome = ''delay'')::int,
             losses = CASE WHEN u.outcome = ''left'' THEN e.losses ELSE 0 END,
             due_at = CASE WHEN u.outcome = ''left'' OR is_final(u.outcome, e.attempts, $1.max_attempts) THEN $2
                           ELSE $2 + coalesce(asked_delay(u.delay), retry_delay($1, e.attempts + 1)) END,
             lease_id = NULL, lease_expires_at = NULL, owner = NULL,
             last_error = coalesce(error_text(u.error), e.last_error),
             history = CASE WHEN u.outcome IN (''delay'', ''left'') THEN e.history
                            ELSE add_history(e.history, e.attempts + 1,
                                             CASE WHEN is_final(u.outcome, e.attempts, $1.max_attempts) THEN ''dead'' ELSE ''retry'' END, u.error) END,
             dead_at = CASE WHEN is_final(u.outcome, e.attempts, $1.max_attempts) THEN $2 END
         FROM unnest($3, $4, $5, $6, $7) AS u(token, id, outcome, error, delay)
         WHERE e.group_id = $1.id AND e.message_id = u.id AND e.lease_id = u.token AND u.outcome <> ''ok''', exceptions)
        USING g, clock_timestamp(), p_tokens, p_ids, p_outcomes, p_errors, p_delays;
    SELECT array_agg(k) INTO stopped FROM unnest(p_keys, p_outcomes) AS u(k, o) WHERE o IN ('retry', 'delay') AND k IS NOT NULL;
    IF stopped IS NOT NULL THEN
        EXECUTE format('UPDATE %I SET state = ''deferred'', due_at = $4, lease_id = NULL, lease_expires_at = NULL
                        WHERE group_id = $1 AND lane >= 0 AND lease_id = ANY ($2) AND key = ANY ($3)', exceptions)
            USING g.id, p_tokens, stopped, clock_timestamp();
    END IF;
    -- Those without a key wait for nobody.
    EXECUTE format('UPDATE %I SET state = ''ready'' WHERE group_id = $1 AND message_id >= (SELECT min(i) FROM unnest($2) AS i) AND message_id = ANY ($2) AND key IS NULL AND state = ''deferred''', exceptions)
        USING g.id, p_ids;
    PERFORM promote(p_stream, g.id, p_keys);
END $$;

-- First deliveries that failed, of any of the holder's leases. What is pending of a key that is to be tried again becomes
-- deferred rows; what is done must have been taken out of pending before.
CREATE OR REPLACE FUNCTION fail_in_lanes(p_stream bigint, g consumer_group, p_seqs bigint[], p_tokens uuid[],
    p_failed_tokens uuid[], p_ids bigint[], p_outcomes text[], p_errors text[], p_delays double precision[]) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    l       record;
    taken   int8multirange;
    f       record;
    stopped text[];
    lowest  bigint := (SELECT min(i) FROM unnest(p_ids) AS i);
    highest bigint := (SELECT max(i) FROM unnest(p_ids) AS i);
    first   bigint := (SELECT min(s) FROM unnest(p_seqs) AS s);
BEGIN
    PERFORM require_outcomes(p_outcomes, '{retry,dead,delay}');
    FOR l IN EXECUTE format('SELECT l.seq, l.token, l.pending, l.lanes FROM unnest($2, $3) AS u(seq, token) JOIN %I AS l ON l.group_id = $1 AND l.seq >= $4 AND l.seq = ANY ($2) AND l.seq = u.seq AND l.token = u.token ORDER BY l.seq', 'consumer_lease_' || p_stream)
        USING g.id, p_seqs, p_tokens, first
    LOOP
        CONTINUE WHEN l.token <> ALL (p_failed_tokens);
        -- Only its own: leases of other lanes may be pending in the same range.
        SELECT range_agg(int8range(id, id, '[]')) AS among, array_agg(id) AS ids, array_agg(outcome) AS outcomes, array_agg(error) AS errors, array_agg(delay) AS delays INTO f
            FROM unnest(p_failed_tokens, p_ids, p_outcomes, p_errors, p_delays) AS u(token, id, outcome, error, delay) WHERE u.token = l.token;
        IF g.transactional THEN
            l.pending := l.pending - take_done(p_stream, g.id, l.pending * f.among, l.lanes);
        END IF;
        taken := record_failures(p_stream, g, l.pending, f.ids, f.outcomes, f.errors, f.delays, true);
        EXECUTE format('UPDATE %I SET pending = $3 WHERE group_id = $1 AND seq = $2', 'consumer_lease_' || p_stream) USING g.id, l.seq, l.pending - taken;
    END LOOP;

    EXECUTE format('SELECT array_agg(DISTINCT m.key) FROM unnest($1, $2) AS u(id, outcome) JOIN %I AS m ON m.id = u.id AND m.id >= $3 AND m.id <= $4
                    WHERE u.outcome <> ''dead'' AND m.key IS NOT NULL', 'message_log_' || p_stream)
        INTO stopped USING p_ids, p_outcomes, lowest, highest;
    IF stopped IS NULL THEN
        RETURN;
    END IF;
    FOR l IN EXECUTE format('SELECT l.seq, l.pending, l.lanes FROM unnest($2, $3) AS u(seq, token) JOIN %I AS l ON l.group_id = $1 AND l.seq >= $4 AND l.seq = ANY ($2) AND l.seq = u.seq AND l.token = u.token WHERE NOT isempty(l.pending) ORDER BY l.seq', 'consumer_lease_' || p_stream)
        USING g.id, p_seqs, p_tokens, first
    LOOP
        EXECUTE format(
            'WITH rows AS (
                 INSERT INTO %1$I (group_id, message_id, state, due_at, key, lane)
                 SELECT $1, id, ''deferred'', $5, key, lane_of(key, id) FROM %2$I
                 WHERE id >= lower($2) AND id < upper($2) AND $2 @> id AND key = ANY ($3) AND ($4 >> lane_of(key, id)) & 1 = 1 AND (%3$s)
                 RETURNING message_id)
             SELECT range_agg(int8range(message_id, message_id, ''[]'')) FROM rows', 'exception_queue_' || p_stream, 'message_log_' || p_stream,
            coalesce(binding_condition(g.id, lower(l.pending), upper(l.pending)), 'true'))
            INTO taken USING g.id, l.pending, stopped, l.lanes, clock_timestamp();
        IF taken IS NOT NULL THEN
            EXECUTE format('UPDATE %I SET pending = $3 WHERE group_id = $1 AND seq = $2', 'consumer_lease_' || p_stream) USING g.id, l.seq, l.pending - taken;
        END IF;
    END LOOP;
    -- One that has failed for good holds nobody up.
    PERFORM promote(p_stream, g.id, stopped);
END $$;

-- Takes what is finished out of the holder's leases; what remains is its for another lease_duration.
CREATE OR REPLACE FUNCTION take_done_in_lanes(p_stream bigint, g consumer_group, p_seqs bigint[], p_tokens uuid[], p_done int8multirange[]) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    first bigint := (SELECT min(s) FROM unnest(p_seqs) AS s);
    l     record;
BEGIN
    IF g.transactional THEN
        FOR l IN EXECUTE format('SELECT l.pending * u.done AS done, l.lanes FROM unnest($2, $3, $4) AS u(seq, token, done) JOIN %I AS l ON l.group_id = $1 AND l.seq >= $5 AND l.seq = ANY ($2) AND l.seq = u.seq AND l.token = u.token ORDER BY l.seq', 'consumer_lease_' || p_stream)
            USING g.id, p_seqs, p_tokens, p_done, first
        LOOP
            PERFORM take_done(p_stream, g.id, l.done, l.lanes);
        END LOOP;
    END IF;
    EXECUTE format('UPDATE %I AS l SET pending = l.pending - u.done FROM unnest($2, $3, $4) AS u(seq, token, done)
                    WHERE l.group_id = $1 AND l.seq >= $5 AND l.seq = ANY ($2) AND l.seq = u.seq AND l.token = u.token AND l.pending && u.done', 'consumer_lease_' || p_stream)
        USING g.id, p_seqs, p_tokens, p_done, first;
END $$;

-- Leases that are finished go; the others are the holder's for another lease_duration, also where nothing is left of them that it
-- knows of: it counts on them, and if it is lost, somebody has to make ready what comes next of their keys.
CREATE OR REPLACE FUNCTION renew_lanes(p_stream bigint, g consumer_group, p_owner bigint, p_seqs bigint[], p_tokens uuid[], p_finished boolean[]) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    first bigint := (SELECT min(s) FROM unnest(p_seqs) AS s);
BEGIN
    EXECUTE format(
        'DELETE FROM %1$I AS l USING unnest($2, $3, $4) AS u(seq, token, finished)
         WHERE l.group_id = $1 AND l.seq >= $5 AND l.seq = ANY ($2) AND l.seq = u.seq AND l.token = u.token AND isempty(l.pending) AND u.finished
           AND NOT EXISTS (SELECT FROM %2$I AS e WHERE e.group_id = $1 AND e.lease_id = u.token AND e.lane >= 0)', 'consumer_lease_' || p_stream, 'exception_queue_' || p_stream)
        USING g.id, p_seqs, p_tokens, p_finished, first;
    EXECUTE format('UPDATE %I AS l SET expires_at = $4, owner = $5 FROM unnest($2, $3) AS u(seq, token) WHERE l.group_id = $1 AND l.seq >= $6 AND l.seq = ANY ($2) AND l.seq = u.seq AND l.token = u.token', 'consumer_lease_' || p_stream)
        USING g.id, p_seqs, p_tokens, clock_timestamp() + g.lease_duration, p_owner, first;
END $$;

-- Others wait for lanes: leases of which little is left keep only those that they need. A handler may run for hours.
CREATE OR REPLACE FUNCTION free_lanes(p_stream bigint, p_group bigint, p_seqs bigint[], p_tokens uuid[]) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    EXECUTE format(
        'UPDATE %1$I AS l SET lanes = needed.lanes
         FROM (SELECT x.seq,
                      coalesce((SELECT bit_or(1::bigint << lane_of(m.key, m.id)) FROM unnest(x.pending) AS r
                                JOIN %2$I AS m ON m.id >= lower(r) AND m.id < upper(r) WHERE (x.lanes >> lane_of(m.key, m.id)) & 1 = 1), 0)
                    | coalesce((SELECT bit_or(1::bigint << e.lane) FROM %3$I AS e WHERE e.group_id = $1 AND e.lease_id = x.token AND e.lane >= 0), 0) AS lanes
               FROM unnest($2, $3) AS u(seq, token) JOIN %1$I AS x ON x.group_id = $1 AND x.seq >= $4 AND x.seq = ANY ($2) AND x.seq = u.seq AND x.token = u.token
               WHERE id_count(x.pending) <= 64) AS needed
         WHERE l.group_id = $1 AND l.seq >= $4 AND l.seq = needed.seq AND l.lanes <> needed.lanes AND needed.lanes <> 0',
        'consumer_lease_' || p_stream, 'message_log_' || p_stream, 'exception_queue_' || p_stream)
        USING p_group, p_seqs, p_tokens, (SELECT min(s) FROM unnest(p_seqs) AS s);
END $$;

-- Exceptions that were in flight under a lease whose holder was lost, or (p_lost false) that hands it back.
CREATE OR REPLACE FUNCTION put_back_lane_exceptions(p_stream bigint, g consumer_group, p_token uuid, p_lanes bigint, p_lost boolean) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    exceptions text := 'exception_queue_' || p_stream;
    back       record;
BEGIN
    EXECUTE format('SELECT array_agg(message_id) AS ids, array_agg(DISTINCT key) FILTER (WHERE key IS NOT NULL) AS keys FROM %I WHERE group_id = $1 AND lane >= 0 AND lease_id = $2', exceptions)
        INTO back USING g.id, p_token;
    IF back.ids IS NOT NULL THEN
        EXECUTE format(
            'UPDATE %1$I AS e SET
                 state = CASE WHEN n.final THEN ''dead'' WHEN e.key IS NULL THEN ''ready'' ELSE ''deferred'' END,
                 losses = e.losses + $4::int, attempts = n.attempts,
                 due_at = CASE WHEN n.counts AND NOT n.final THEN $3 + retry_delay($1, n.attempts) ELSE $3 END,
                 lease_id = NULL, lease_expires_at = NULL, owner = NULL,
                 last_error = CASE WHEN $4 THEN n.error ELSE e.last_error END,
                 history = CASE WHEN $4 THEN add_history(e.history, n.attempts, CASE WHEN n.final THEN ''dead'' ELSE ''lost'' END, n.error) ELSE e.history END,
                 dead_at = CASE WHEN n.final THEN $3 END
             FROM (SELECT message_id, $4 AND losses > 0 AS counts, attempts + ($4 AND losses > 0)::int AS attempts,
                          $4 AND losses > 0 AND attempts + 1 >= $1.max_attempts AS final,
                          CASE WHEN losses > 0 THEN ''the lease was lost while the message ran alone: its consumer died or hung''
                               ELSE ''the lease was lost: its consumer died or hung'' END AS error
                   FROM %1$I WHERE group_id = $1.id AND message_id >= (SELECT min(i) FROM unnest($2) AS i) AND message_id = ANY ($2)) AS n
             WHERE e.group_id = $1.id AND e.message_id = n.message_id', exceptions)
            USING g, back.ids, clock_timestamp(), p_lost;
        PERFORM promote(p_stream, g.id, back.keys);
    END IF;
    IF g.transactional THEN
        -- The head of a key may have been settled by its handler, with nobody left to tell.
        EXECUTE format('SELECT array_agg(DISTINCT key) FROM %I WHERE group_id = $1 AND lane = ANY ($2) AND state = ''deferred'' AND key IS NOT NULL', exceptions)
            INTO back.keys USING g.id, ARRAY(SELECT i::smallint FROM generate_series(0, 63) AS i WHERE (p_lanes >> i) & 1 = 1);
        PERFORM promote(p_stream, g.id, back.keys);
    END IF;
END $$;

-- Changing how a group hands out its messages.

-- Makes a group parallel, ordered or fair. Refused while messages of it are handed out or wait to be tried again: pause it, and ask
-- again when they have ended. Dead letters stay.
CREATE OR REPLACE FUNCTION set_mode(p_stream bigint, p_group bigint, p_mode text) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
DECLARE
    exceptions text := 'exception_queue_' || p_stream;
    c          group_cursor;
    g          consumer_group;
    open       bigint;
    x          lane_cohort;
BEGIN
    PERFORM require_read_committed();
    IF p_mode IS NULL OR p_mode NOT IN ('parallel', 'ordered', 'fair') THEN
        RAISE EXCEPTION 'unknown mode %', coalesce(quote_literal(p_mode), 'NULL')
            USING ERRCODE = 'SQ004', HINT = 'Choose parallel, ordered or fair.';
    END IF;
    c := lock_cursor(p_stream, p_group);
    g := require_group(p_stream, p_group);
    IF g.mode = p_mode THEN
        RETURN;
    END IF;
    IF g.mode <> 'parallel' AND g.lane_probe <> lane_probe() THEN
        c := realign(p_stream, g, c);
    END IF;
    EXECUTE format('SELECT (SELECT count(*) FROM %I WHERE group_id = $1 AND seq >= $2)
                         + (SELECT count(*) FROM %I WHERE group_id = $1 AND state <> ''dead'')', 'consumer_lease_' || p_stream, exceptions)
        INTO open USING p_group, c.first_open;
    IF open > 0 THEN
        RAISE EXCEPTION 'group % has messages that are handed out or wait for another attempt', quote_ident(g.name)
            USING ERRCODE = 'SQ014', HINT = 'Ask again when the group has caught up, or stop its consumers first: a paused one keeps what it holds.';
    END IF;
    IF p_mode <> 'parallel' THEN
        -- Between the two that have lanes each goes on where it stands.
        c.cohorts := coalesce(c.cohorts, ARRAY[(-1, c.claimed)::lane_cohort]);
        c.waiters := NULL;
        EXECUTE format('UPDATE %I SET lane = lane_of(key, message_id) WHERE group_id = $1', exceptions) USING p_group;
    ELSE
        -- Lanes that are behind the others: what they have not read waits as leases that nobody has.
        c.claimed := (SELECT max(position) FROM unnest(c.cohorts));
        FOR x IN SELECT * FROM unnest(c.cohorts) WHERE position < c.claimed ORDER BY position LOOP
            EXECUTE format('INSERT INTO %I (group_id, seq, token, lanes, pending, expires_at) VALUES ($1, $2, gen_random_uuid(), $3, $4, ''-infinity'')', 'consumer_lease_' || p_stream)
                USING p_group, c.next_seq, x.lanes, int8multirange(int8range(x.position, c.claimed, '(]'));
            c.next_seq := c.next_seq + 1;
        END LOOP;
        c.cohorts := NULL;
        c.waiters := NULL;
        EXECUTE format('UPDATE %I SET lane = NULL WHERE group_id = $1', exceptions) USING p_group;
    END IF;
    UPDATE consumer_group SET mode = p_mode, lane_probe = lane_probe() WHERE id = p_group;
    PERFORM save_cursor(p_stream, p_group, c);
    INSERT INTO audit (action, stream_name, group_name, detail)
        SELECT 'set_mode', s.name, g.name, jsonb_build_object('mode', p_mode) FROM stream AS s WHERE s.id = p_stream;
    PERFORM ring(ARRAY[p_stream]);
END $$;

-- What the lanes of keys go by: it is not promised that every server hashes alike.
CREATE OR REPLACE FUNCTION lane_probe() RETURNS bigint
LANGUAGE sql IMMUTABLE AS $$ SELECT hashtextextended('sqlstreams', 0) $$;

-- Where keys are in other lanes than they were, as after a restore elsewhere: nobody holds anything any more, and what lies between the
-- lane that was read least and the one that was read most waits to be read again, whoever has handled it, but for what has rows.
-- Messages are repeated by this, in order; none is lost. The caller has the cursor's lock.
CREATE OR REPLACE FUNCTION realign(p_stream bigint, g consumer_group, INOUT c group_cursor)
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    exceptions text := 'exception_queue_' || p_stream;
    leases     text := 'consumer_lease_' || p_stream;
    highest    bigint := (SELECT max(position) FROM unnest(c.cohorts));
    lowest     bigint;
    rows       int8multirange;
    first      bigint;
    waiting    text[];
BEGIN
    EXECUTE format('WITH gone AS (DELETE FROM %I WHERE group_id = $1 AND seq >= $2 RETURNING pending) SELECT min(lower(pending)) - 1 FROM gone', leases)
        INTO lowest USING g.id, c.first_open;
    lowest := least(lowest, lowest_position(c.cohorts));
    EXECUTE format('UPDATE %I SET lane = lane_of(key, message_id), state = CASE WHEN state <> ''inflight'' THEN state WHEN key IS NULL OR $2 = ''fair'' THEN ''ready'' ELSE ''deferred'' END,
                           due_at = CASE WHEN state = ''inflight'' THEN greatest(due_at, clock_timestamp()) ELSE due_at END, lease_id = NULL, lease_expires_at = NULL, owner = NULL WHERE group_id = $1', exceptions)
        USING g.id, g.mode;
    EXECUTE format('SELECT array_agg(DISTINCT key) FROM %I WHERE group_id = $1 AND state = ''deferred''', exceptions) INTO waiting USING g.id;
    PERFORM promote(p_stream, g.id, waiting);
    -- In pieces: rows make holes.
    FOR first IN SELECT generate_series(lowest + 1, highest, 10000) LOOP
        EXECUTE format('SELECT coalesce(range_agg(int8range(message_id, message_id, ''[]'')), ''{}'') FROM %I WHERE group_id = $1 AND message_id >= $2 AND message_id < $2 + 10000', exceptions)
            INTO rows USING g.id, first;
        EXECUTE format('INSERT INTO %I (group_id, seq, token, lanes, pending, expires_at) VALUES ($1, $2, gen_random_uuid(), -1, $3, ''-infinity'')', leases)
            USING g.id, c.next_seq, int8multirange(int8range(first, least(first + 9999, highest), '[]')) - rows;
        c.next_seq := c.next_seq + 1;
    END LOOP;
    c.cohorts := ARRAY[(-1, highest)::lane_cohort];
    c.waiters := NULL;
    c.claimed := highest;
    UPDATE consumer_group SET lane_probe = lane_probe() WHERE id = g.id;
    INSERT INTO audit (action, stream_name, group_name, detail)
        SELECT 'realign', s.name, g.name, jsonb_build_object('after', lowest, 'up_to', highest) FROM stream AS s WHERE s.id = p_stream;
END $$;

-- Claiming: the next piece of work of a group, under the cursor's lock.

-- Moves c.claimed over the next ids that are final and returns what lay between, at most p_limit ids; NULL when there is
-- nothing to claim yet.
CREATE OR REPLACE FUNCTION next_range(p_stream bigint, p_limit bigint, INOUT c group_cursor, OUT range int8range)
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    log      text := 'message_log_' || p_stream;
    settled  bigint := settled_id(p_stream);
    reached  bigint := c.claimed;
    width    bigint := p_limit;
    hit      bigint;
    looked   boolean := false;
BEGIN
    LOOP
        -- At or below the settled id nothing comes any more: no contiguity to check, and holes are passed over,
        -- in windows that grow so that they cost index probes rather than calls.
        WHILE reached < settled AND reached - c.claimed < 1000000 LOOP
            EXECUTE format('SELECT id FROM %I WHERE id > $1 AND id <= $2 ORDER BY id LIMIT 1', log)
                INTO hit USING reached, least(reached + width, settled);
            IF hit IS NOT NULL THEN
                c.claimed := least(hit - 1 + p_limit, settled);
                range := int8range(hit, c.claimed, '[]');
                RETURN;
            END IF;
            reached := least(reached + width, settled);
            width := width * 4;
        END LOOP;
        c.claimed := reached;
        EXIT WHEN reached < settled;    -- a million ids of nothing: let others have the lock

        -- A claim so wide is for a group with bindings that catches up. To be told by the fence that all of it is final costs less
        -- than to check it.
        IF p_limit > 20000 AND NOT looked AND log_head(p_stream) >= c.claimed + p_limit THEN
            looked := true;
            settled := look_at_gap(p_stream, c.claimed);
            CONTINUE WHEN settled > c.claimed;
        END IF;

        -- Above it, as far as the ids follow each other without a gap: everything is visible, nothing to wait for.
        EXECUTE format('SELECT max(id) FROM (SELECT id, row_number() OVER (ORDER BY id) AS n FROM %I WHERE id > $1 AND id <= $1 + $2) AS x WHERE id = $1 + n', log)
            INTO hit USING c.claimed, p_limit;
        IF hit IS NOT NULL THEN
            range := int8range(c.claimed + 1, hit, '[]');
            c.claimed := hit;
            RETURN;
        END IF;

        EXIT WHEN looked OR log_head(p_stream) <= c.claimed;
        -- Drawn but not visible: will it come? What the look frees is read by later statements, round the loop.
        looked := true;
        settled := look_at_gap(p_stream, c.claimed);
        EXIT WHEN settled <= c.claimed;
    END LOOP;
END $$;

-- Takes over a lease that ran out or was released, or its first p_limit ids, under a new token. Poison ranges that it
-- meets become suspects on the way. NULL when there is none. In a fair group only what is for the lanes in w.
CREATE OR REPLACE FUNCTION take_over(p_stream bigint, g consumer_group, p_owner bigint, p_token uuid, p_limit bigint, w lane_wish, INOUT c group_cursor, OUT pending int8multirange, OUT lanes bigint)
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    leases   text := 'consumer_lease_' || p_stream;
    started  timestamptz := clock_timestamp();
    l        record;
    cut      record;
    part     int8range;
    room     bigint := p_limit;
    rest     int8multirange;
BEGIN
    LOOP
        EXECUTE format('SELECT seq, pending, expires_at, reclaims, lanes FROM %I WHERE group_id = $1 AND seq >= $2 AND expires_at <= $3 AND coalesce(lanes, -1) & $4 <> 0
                        ORDER BY seq LIMIT 1 FOR UPDATE SKIP LOCKED', leases)
            INTO l USING g.id, c.first_open, started, coalesce(w.lanes, -1);
        IF l.seq IS NULL THEN
            RETURN;
        END IF;
        IF g.transactional THEN
            l.pending := l.pending - take_done(p_stream, g.id, l.pending, l.lanes);
        END IF;
        EXIT WHEN NOT isempty(l.pending) AND (l.expires_at = '-infinity' OR l.reclaims < g.max_reclaims);
        PERFORM make_suspects(p_stream, g, l.pending, l.lanes);
        EXECUTE format('DELETE FROM %I WHERE group_id = $1 AND seq = $2', leases) USING g.id, l.seq;
    END LOOP;

    IF g.mode = 'fair' THEN
        SELECT * INTO cut FROM cut_lease(p_stream, g.id, w, p_limit, l.seq, l.pending, c, l.lanes);
        c := cut.c;
        l.lanes := cut.lanes;
        room := lane_width(l.lanes, w, p_limit);
    END IF;
    lanes := l.lanes;
    pending := '{}';
    FOR part IN SELECT r FROM unnest(l.pending) AS r ORDER BY r LOOP
        EXIT WHEN room <= 0;
        part := int8range(lower(part), least(upper(part), lower(part) + room));
        pending := pending + int8multirange(part);
        room := room - (upper(part) - lower(part));
    END LOOP;
    rest := l.pending - pending;

    -- Both halves get new tokens, or the old owner could still settle what it lost.
    IF isempty(rest) THEN
        EXECUTE format('DELETE FROM %I WHERE group_id = $1 AND seq = $2', leases) USING g.id, l.seq;
    ELSE
        EXECUTE format('UPDATE %I SET token = gen_random_uuid(), pending = $3, lanes = $4 WHERE group_id = $1 AND seq = $2', leases)
            USING g.id, l.seq, rest, l.lanes;
    END IF;
    -- A lease that was handed back is not a lost one.
    EXECUTE format('INSERT INTO %I (group_id, seq, token, owner, pending, expires_at, reclaims, lanes) VALUES ($1, $2, $3, $7, $4, $5, $6, $8)', leases)
        USING g.id, c.next_seq, p_token, pending, started + g.lease_duration,
              l.reclaims + CASE WHEN l.expires_at = '-infinity' THEN 0 ELSE 1 END, p_owner, l.lanes;
    c.next_seq := c.next_seq + 1;
END $$;

-- The messages of a poison range as exception rows that run alone, so that the one that kills its process does so alone.
CREATE OR REPLACE FUNCTION make_suspects(p_stream bigint, g consumer_group, p_pending int8multirange, p_lanes bigint) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    EXECUTE format(
        'INSERT INTO %I (group_id, message_id, state, losses, due_at, key, lane, last_error)
         SELECT $1, id, ''ready'', 1, clock_timestamp(), key, CASE WHEN $4 THEN lane_of(key, id) END, ''its lease was lost repeatedly''
         FROM %I WHERE id >= lower($2) AND id < upper($2) AND $2 @> id AND ($3 IS NULL OR ($3 >> lane_of(key, id)) & 1 = 1) AND (%s)',
        'exception_queue_' || p_stream, 'message_log_' || p_stream, coalesce(binding_condition(g.id, lower(p_pending), upper(p_pending)), 'true'))
        USING g.id, p_pending, p_lanes, g.mode <> 'parallel';
END $$;

-- Claims up to p_limit ids under p_token: a lease that ran out first, else the next ids of the log (fresh). In a fair group for about
-- p_limit messages of lanes that are in w; unread: see next_in_turn.
CREATE OR REPLACE FUNCTION claim_range(p_stream bigint, g consumer_group, p_owner bigint, p_token uuid, p_limit bigint, w lane_wish,
    INOUT c group_cursor, OUT pending int8multirange, OUT lanes bigint, OUT fresh boolean, OUT unread bigint)
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    r record;
    -- Where a tenant's burst was handed back, others would wait behind it if it always came first.
    log_first boolean := g.mode = 'fair' AND random() < 0.5;
BEGIN
    fresh := false;
    FOR turn IN 1..2 LOOP
        IF log_first = (turn = 1) THEN
            IF g.mode = 'fair' THEN
                SELECT * INTO r FROM next_in_turn(p_stream, w, p_limit, c);
                lanes := r.lanes;
                unread := r.unread;
            ELSE
                SELECT * INTO r FROM next_range(p_stream, p_limit, c);
            END IF;
            c := r.c;
            IF r.range IS NOT NULL THEN
                pending := int8multirange(r.range);
                fresh := true;
                EXECUTE format('INSERT INTO %I (group_id, seq, token, owner, pending, expires_at, lanes) VALUES ($1, $2, $3, $4, $5, $6, $7)', 'consumer_lease_' || p_stream)
                    USING g.id, c.next_seq, p_token, p_owner, pending, clock_timestamp() + g.lease_duration, lanes;
                c.next_seq := c.next_seq + 1;
                RETURN;
            END IF;
        -- Else no lease is open: none to take over.
        ELSIF c.first_open < c.next_seq THEN
            SELECT * INTO r FROM take_over(p_stream, g, p_owner, p_token, p_limit, w, c);
            c := r.c;
            IF r.pending IS NOT NULL THEN
                pending := r.pending;
                lanes := r.lanes;
                unread := w.lanes;
                RETURN;
            END IF;
        END IF;
    END LOOP;
END $$;

-- Settles what a consumer has finished, records what failed, and claims the next ids, in one call.
--
-- p_seqs, p_tokens, p_done: leases, and the ids of each that are finished.
-- p_failed_tokens, …: failed first deliveries: 'retry', 'dead' or 'delay', the error, and a delay in seconds (NULL: the
-- group's backoff) before the next attempt.
-- p_limit: ids to claim, 0 for none. p_token: the token of the new lease; chosen by the caller, it lets the caller send
-- fetch(p_token) in the same write. It must be random.
--
-- p_owner: the number of the calling process (owner.sql), NULL if it has none.
-- p_width: in a group with bindings, the ids to look among for p_limit messages. Then it claims that many ids, of which
-- fetch returns the messages that are for the group. Without it, or where the group has a limit, it claims only ids of such
-- messages, at most 64.
--
-- Returns one row: the leases named that were not the caller's any more (nothing about those was recorded), and the new
-- lease, NULLs when there was nothing to claim. paused: the group is. limited: it has a limit, so tell at once what is
-- finished. wait: the rate limit is used up; ask again after that.
-- looked_at: in a group with bindings, or a fair one, how many ids the claim is about; there may be none of them to hand out.
--
-- In a fair group (fair.sql): p_lanes are those of which the caller wants messages, p_heavy those of which it gets very many, p_shares the part
-- of the ids that each lane's messages are, as it has seen, and p_width the most ids to look among. lanes: those of the new lease. unread: those that
-- have more to read, as far as is known; NULL in other groups.
CREATE OR REPLACE FUNCTION advance(p_stream bigint, p_group bigint,
    p_seqs bigint[], p_tokens uuid[], p_done int8multirange[],
    p_failed_tokens uuid[], p_failed_ids bigint[], p_outcomes text[], p_errors text[], p_delays double precision[],
    p_limit bigint, p_token uuid DEFAULT gen_random_uuid(), p_owner bigint DEFAULT NULL, p_width bigint DEFAULT NULL,
    p_lanes bigint DEFAULT -1, p_heavy bigint DEFAULT 0, p_shares double precision[] DEFAULT NULL)
RETURNS TABLE (lost uuid[], seq bigint, token uuid, pending int8multirange, lease_duration interval, paused boolean, limited boolean, wait interval, looked_at bigint, lanes bigint, unread bigint)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off SET constraint_exclusion = off AS $$
#variable_conflict use_column
DECLARE
    g      consumer_group;
    before group_cursor;
    c      group_cursor;
    r      record;
    w      lane_wish;
    room   bigint;
    wide   bigint;
BEGIN
    PERFORM require_read_committed();
    before := lock_cursor(p_stream, p_group);
    -- As it is now that we have the lock: pausing takes that too.
    g := require_group(p_stream, p_group);
    PERFORM require_mode(g, 'parallel');
    c := before;
    IF g.mode = 'fair' AND g.lane_probe <> lane_probe() THEN
        c := realign(p_stream, g, c);
    END IF;

    lost := settle_all(p_stream, g, p_owner, p_seqs, p_tokens, p_done, p_failed_tokens, p_failed_ids, p_outcomes, p_errors, p_delays);
    paused := g.paused;
    limited := g.max_in_flight IS NOT NULL OR g.rate_limit IS NOT NULL;
    looked_at := CASE WHEN g.bound OR g.mode = 'fair' THEN 0 END;
    unread := CASE WHEN g.mode = 'fair' THEN 0 END;
    room := least(p_limit, 1000000);
    IF room > 0 THEN
        SELECT a.room, a.wait INTO room, wait FROM allowance(p_stream, g, c, room) AS a;
    END IF;
    IF c.first_open < c.next_seq AND (room > 0 OR cardinality(p_seqs) > 0) THEN
        c.first_open := first_open_lease(p_stream, p_group, c);
    END IF;
    IF room > 0 THEN
        wide := room;
        IF g.mode = 'fair' THEN
            -- Where there is a limit, all that is claimed is looked through under the lock.
            w := (coalesce(p_lanes, -1), coalesce(p_heavy, 0), p_shares, least(claim_width(room, p_width), CASE WHEN limited THEN 10000 ELSE 50000 END))::lane_wish;
        ELSIF g.bound THEN
            wide := claim_width(room, p_width);
        END IF;
        SELECT * INTO r FROM claim_range(p_stream, g, p_owner, p_token, wide, w, c);
        c := r.c;
        pending := r.pending;
        lanes := r.lanes;
        unread := r.unread;
        seq := c.next_seq - 1;
        IF g.bound OR g.mode = 'fair' THEN
            looked_at := id_count(pending);
            IF pending IS NOT NULL AND (limited OR p_width IS NULL) AND (g.bound OR lanes <> -1 OR looked_at > room) THEN
                SELECT * INTO r FROM keep_matching(p_stream, g, seq, r.fresh, room, lanes, c, pending);
                c := r.c;
                pending := r.pending;
                looked_at := r.looked_at;
            END IF;
        END IF;
        IF pending IS NULL THEN
            seq := NULL;
        ELSE
            token := p_token;
            c.paced_until := spend(g, c.paced_until, id_count(pending));
        END IF;
    END IF;
    IF c IS DISTINCT FROM before THEN
        PERFORM save_cursor(p_stream, p_group, c);
    END IF;
    lease_duration := g.lease_duration;
    RETURN NEXT;
END $$;

-- The leases of one report, lowest seq first: every caller locks in that order. Returns the tokens that were lost.
CREATE OR REPLACE FUNCTION settle_all(p_stream bigint, g consumer_group, p_owner bigint, p_seqs bigint[], p_tokens uuid[], p_done int8multirange[],
    p_failed_tokens uuid[], p_failed_ids bigint[], p_outcomes text[], p_errors text[], p_delays double precision[])
RETURNS uuid[]
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    lost uuid[] := '{}';
    l    record;
    f    record;
    seq  bigint;
BEGIN
    IF cardinality(p_outcomes) > 0 THEN
        PERFORM require_outcomes(p_outcomes, '{retry,dead,delay}');
    END IF;
    FOR l IN SELECT u.seq, u.token, u.done FROM unnest(p_seqs, p_tokens, p_done) AS u(seq, token, done) ORDER BY u.seq LOOP
        IF l.token = ANY (p_failed_tokens) THEN
            SELECT array_agg(u.id) AS ids, array_agg(u.outcome) AS outcomes, array_agg(u.error) AS errors, array_agg(u.delay) AS delays INTO f
                FROM unnest(p_failed_tokens, p_failed_ids, p_outcomes, p_errors, p_delays) AS u(token, id, outcome, error, delay)
                WHERE u.token = l.token;
            seq := settle_lease(p_stream, g, p_owner, l.seq, l.token, coalesce(l.done, '{}'), f.ids, f.outcomes, f.errors, f.delays);
        ELSE
            seq := settle_lease(p_stream, g, p_owner, l.seq, l.token, coalesce(l.done, '{}'));
        END IF;
        IF seq IS NULL THEN
            lost := lost || l.token;
        END IF;
    END LOOP;
    RETURN lost;
END $$;

-- Bindings: what of a stream is for a group. A binding is a pattern over routing keys, conditions on headers, or both:
--     {"pattern": "orders.*.created", "headers": {"region": "eu"}}
-- A routing key is words with dots between them; * stands for exactly one word, # for any number of them, none included.
-- Headers have to hold all that the condition holds (headers @> condition). A message is for the group if any binding
-- matches, or if there is none. A message without a routing key, or with an empty one, has no word: only # matches it.
--
-- A set of bindings is compiled into one SQL condition over the log's columns. Everything a user wrote is quoted in it
-- by %L, and escaped where it is part of a regular expression.

CREATE OR REPLACE FUNCTION refuse_binding(p_what text, p_hint text) RETURNS void
LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    RAISE EXCEPTION '%', p_what USING ERRCODE = 'SQ020', HINT = p_hint;
END $$;

-- The normal form of a pattern; refuses what is none. Of wildcards in a row only the number of * counts, and whether there is
-- a #: #.# is #, and #.*.# is *.#.
CREATE OR REPLACE FUNCTION normal_pattern(p_pattern text) RETURNS text
LANGUAGE plpgsql IMMUTABLE STRICT AS $$
DECLARE
    shown  text := quote_literal(cut_text(p_pattern, 80));
    words  text[] := string_to_array(p_pattern, '.');
    word   text;
    normal text[] := '{}';
    hash   boolean := false;
BEGIN
    IF p_pattern = '' THEN
        PERFORM refuse_binding('a pattern is empty', 'Write # for every message.');
    ELSIF octet_length(p_pattern) > 255 THEN
        PERFORM refuse_binding(format('pattern %s… has %s bytes, more than 255', shown, octet_length(p_pattern)), 'No routing key is longer than 255 bytes.');
    ELSIF cardinality(words) > 32 THEN
        PERFORM refuse_binding(format('pattern %s has %s words, more than 32', shown, cardinality(words)), 'Use # for any number of words.');
    END IF;
    FOREACH word IN ARRAY words LOOP
        IF word = '' THEN
            PERFORM refuse_binding(format('pattern %s has an empty word', shown), 'Words stand between single dots: orders.eu.created.');
        ELSIF word ~ '[*#]' AND word NOT IN ('*', '#') THEN
            PERFORM refuse_binding(format('pattern %s has a wildcard within the word %s', shown, quote_literal(word)),
                                   '* and # are words of their own: orders.*.created, orders.#. What starts with some letters cannot be said.');
        END IF;
        IF word = '#' THEN
            hash := true;
            CONTINUE;
        END IF;
        IF hash AND word <> '*' THEN
            normal := array_append(normal, '#');
            hash := false;
        END IF;
        normal := array_append(normal, word);
    END LOOP;
    IF hash THEN
        normal := array_append(normal, '#');
    END IF;
    RETURN array_to_string(normal, '.');
END $$;

-- The normal form of a set of bindings: objects, sorted, each once. A string stands for a pattern. Refuses what is none.
CREATE OR REPLACE FUNCTION normal_bindings(p_bindings jsonb) RETURNS jsonb
LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    b       jsonb;
    pattern text;
    headers jsonb;
    normal  jsonb := '[]';
BEGIN
    IF jsonb_typeof(p_bindings) IS DISTINCT FROM 'array' THEN
        PERFORM refuse_binding('bindings are an array', 'Write ["orders.*.created", {"headers": {"region": "eu"}}]; [] for none.');
    END IF;
    FOR b IN SELECT * FROM jsonb_array_elements(p_bindings) LOOP
        IF jsonb_typeof(b) = 'string' THEN
            b := jsonb_build_object('pattern', b);
        END IF;
        IF jsonb_typeof(b) <> 'object' THEN
            PERFORM refuse_binding(format('%s is no binding', cut_text(b::text, 80)), 'A binding is a pattern or an object with "pattern", "headers" or both.');
        END IF;
        IF b - '{pattern,headers}'::text[] <> '{}' THEN
            PERFORM refuse_binding(format('a binding has no %s', (SELECT quote_literal(cut_text(k, 80)) FROM jsonb_object_keys(b - '{pattern,headers}'::text[]) AS k LIMIT 1)),
                                   'It has "pattern", "headers" or both.');
        END IF;
        IF jsonb_typeof(b -> 'pattern') NOT IN ('string', 'null') THEN
            PERFORM refuse_binding(format('pattern %s is no text', cut_text(b ->> 'pattern', 80)), 'Write it as a string: "orders.*.created".');
        ELSIF jsonb_typeof(b -> 'headers') NOT IN ('object', 'null') THEN
            PERFORM refuse_binding(format('header conditions %s are no object', cut_text(b ->> 'headers', 80)), 'Write {"headers": {"region": "eu"}}.');
        ELSIF octet_length((b -> 'headers')::text) > 2048 THEN
            PERFORM refuse_binding(format('header conditions have %s bytes, more than 2048', octet_length((b -> 'headers')::text)), 'Select by less.');
        END IF;
        pattern := normal_pattern(b ->> 'pattern');
        headers := nullif(nullif(b -> 'headers', '{}'), 'null');
        IF pattern IS NULL AND headers IS NULL THEN
            PERFORM refuse_binding('a binding says nothing', 'It has a pattern, conditions on headers, or both; the pattern # takes everything.');
        END IF;
        IF headers IS NOT NULL THEN
            pattern := nullif(pattern, '#');
        END IF;
        normal := normal || jsonb_build_array(jsonb_strip_nulls(jsonb_build_object('pattern', pattern)) || CASE WHEN headers IS NULL THEN '{}' ELSE jsonb_build_object('headers', headers) END);
    END LOOP;
    normal := (SELECT coalesce(jsonb_agg(DISTINCT x ORDER BY x), '[]') FROM jsonb_array_elements(normal) AS x);
    IF jsonb_array_length(normal) > 64 THEN
        PERFORM refuse_binding(format('%s bindings are more than 64', jsonb_array_length(normal)), 'Use wildcards, or a header that says what is for this group.');
    END IF;
    RETURN normal;
END $$;

-- A pattern in normal form as a regular expression for the whole routing key.
CREATE OR REPLACE FUNCTION pattern_regex(p_pattern text) RETURNS text
LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    words text[] := string_to_array(p_pattern, '.');
    regex text := '';
    dot   text := '';   -- what stands before the next word
BEGIN
    IF p_pattern = '*' THEN
        RETURN '[^.]+';   -- the empty key has no word
    END IF;
    FOR i IN 1 .. cardinality(words) LOOP
        IF words[i] <> '#' THEN
            regex := regex || dot || CASE words[i] WHEN '*' THEN '[^.]*' ELSE regexp_replace(words[i], '([][\\^$.|?+(){}])', '\\\1', 'g') END;
            dot := '\.';
        ELSIF i = cardinality(words) THEN
            regex := regex || '(?:\..*)?';
        ELSE
            regex := regex || dot || '(?:.*\.)?';
            dot := '';
        END IF;
    END LOOP;
    RETURN regex;
END $$;

-- The condition that any of these patterns, in normal form, matches; cheapest first. NULL: every message does.
--
-- Never routing_key ~ ANY (…): a session keeps 32 compiled expressions, and with more of them it compiles for every row.
CREATE OR REPLACE FUNCTION patterns_condition(p_patterns text[]) RETURNS text
LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    pattern  text;
    literals text[] := '{}';
    prefixes text[] := '{}';
    others   text[] := '{}';
    any_word boolean := false;
    parts    text[] := '{}';
BEGIN
    FOREACH pattern IN ARRAY p_patterns LOOP
        IF pattern = '#' THEN
            RETURN NULL;
        ELSIF pattern = '*.#' THEN
            any_word := true;
        ELSIF pattern !~ '[*#]' THEN
            literals := array_append(literals, pattern);
        ELSIF pattern ~ '^[^*#]+\.#$' THEN
            literals := array_append(literals, left(pattern, -2));
            prefixes := array_append(prefixes, left(pattern, -1));
        ELSE
            others := array_append(others, pattern_regex(pattern));
        END IF;
    END LOOP;
    IF any_word THEN
        parts := array_append(parts, 'routing_key <> ''''');
    END IF;
    IF cardinality(literals) = 1 THEN
        parts := array_append(parts, format('routing_key = %L', literals[1]));
    ELSIF cardinality(literals) > 1 THEN
        parts := array_append(parts, format('routing_key = ANY (%L::text[])', literals::text));
    END IF;
    FOREACH pattern IN ARRAY prefixes LOOP
        parts := array_append(parts, format('starts_with(routing_key, %L)', pattern));
    END LOOP;
    IF cardinality(others) > 0 THEN
        parts := array_append(parts, format('routing_key ~ %L', '^(?:' || array_to_string(others, '|') || ')$'));
    END IF;
    RETURN array_to_string(parts, ' OR ');
END $$;

-- The condition for a set of bindings in normal form, over the columns routing_key and headers. NULL: every message is for the
-- group.
CREATE OR REPLACE FUNCTION bindings_condition(p_bindings jsonb) RETURNS text
LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    plain text[] := ARRAY(SELECT b ->> 'pattern' FROM jsonb_array_elements(p_bindings) AS b WHERE b -> 'headers' IS NULL);
    parts text[] := '{}';
BEGIN
    IF p_bindings = '[]' OR '#' = ANY (plain) THEN
        RETURN NULL;
    END IF;
    IF cardinality(plain) > 0 THEN
        parts := ARRAY[patterns_condition(plain)];
    END IF;
    RETURN array_to_string(parts || ARRAY(
        SELECT CASE WHEN b -> 'pattern' IS NULL THEN format('headers @> %L::jsonb', b -> 'headers')
                    ELSE format('((%s) AND headers @> %L::jsonb)', patterns_condition(ARRAY[b ->> 'pattern']), b -> 'headers') END
        FROM jsonb_array_elements(p_bindings) AS b WHERE b -> 'headers' IS NOT NULL ORDER BY b -> 'pattern' IS NOT NULL), ' OR ');
END $$;

-- The bindings of a group, in versions: a change holds for ids above the group's claimed at that time, and what was handed
-- out before is judged by what held then, also when its lease is taken over, released or fetched in pages later.
--
-- Invariant: an id is judged by the latest version whose after_id lies below it, by none if there is none: then it is for the
-- group. after_id is the cursor's claimed, read under the cursor's lock, so a claim does not cross it; where a range
-- of ids does all the same, each of them is judged by its own version.
--
-- The versions are the history, too: the last hundred are kept, and what an open lease may need.

-- The condition on messages with p_lower <= id < p_upper, to be put into a query on the log, which it names; NULL: all are for the group.
CREATE OR REPLACE FUNCTION binding_condition(p_group bigint, p_lower bigint, p_upper bigint) RETURNS text
LANGUAGE plpgsql STABLE AS $$
DECLARE
    g         record;
    condition text;
BEGIN
    SELECT stream_id, bound, newest_only INTO g FROM consumer_group WHERE id = p_group;
    IF NOT g.bound THEN
        RETURN NULL;
    END IF;
    condition := bound_condition(p_group, p_lower, p_upper);
    IF g.newest_only THEN
        condition := concat_ws(' AND ', '(' || condition || ')', format('NOT (%s)', superseded(g.stream_id, 'message_log_' || g.stream_id, p_lower)));
    END IF;
    RETURN condition;
END $$;

-- Whether a newer message of the same key is visible than one that p_message names, as SQL. LIMIT keeps it a look-up per message. Those that are asked about
-- have ids from p_lower on, so that partitions below are not planned for.
CREATE OR REPLACE FUNCTION superseded(p_stream bigint, p_message text, p_lower bigint) RETURNS text
LANGUAGE sql IMMUTABLE AS $$
    SELECT format('(SELECT newer.id FROM %1$I AS newer WHERE newer.key = %2$I.key AND newer.id > %2$I.id AND newer.id >= %3$L::bigint ORDER BY newer.id LIMIT 1) IS NOT NULL',
                  'message_log_' || p_stream, p_message, coalesce(p_lower, 0))
$$;

-- The part of it that the bindings make.
CREATE OR REPLACE FUNCTION bound_condition(p_group bigint, p_lower bigint, p_upper bigint) RETURNS text
LANGUAGE plpgsql STABLE AS $$
DECLARE
    latest record;
BEGIN
    SELECT after_id, condition INTO latest FROM binding_set WHERE group_id = p_group ORDER BY version DESC LIMIT 1;
    IF NOT FOUND THEN
        RETURN NULL;
    ELSIF latest.after_id < p_lower THEN
        RETURN latest.condition;
    END IF;
    RETURN (
        SELECT CASE WHEN bool_and(condition IS NULL) THEN NULL
                    WHEN count(*) = 1 THEN min(condition)
                    ELSE string_agg(format('(id > %s AND id <= %s AND (%s))', after_id, up_to, coalesce(condition, 'true')), ' OR ') END
        FROM (SELECT condition, greatest(after_id, p_lower - 1) AS after_id,
                     least(min(after_id) OVER (ORDER BY version ROWS BETWEEN 1 FOLLOWING AND UNBOUNDED FOLLOWING), p_upper - 1) AS up_to
              FROM (SELECT version, after_id, condition FROM binding_set WHERE group_id = p_group
                    UNION ALL SELECT 0, -1, NULL) AS v) AS v
        WHERE after_id < up_to);
END $$;

-- How many ids to look among for p_limit messages.
CREATE OR REPLACE FUNCTION claim_width(p_limit bigint, p_width bigint) RETURNS bigint
LANGUAGE sql IMMUTABLE AS $$ SELECT greatest(p_limit, least(coalesce(p_width, 10000), 1000000)) $$;

-- Of what was just claimed as lease p_seq, keeps only the ids of messages that are for the group, the first p_limit of them.
-- Fair groups look for messages of the lease's lanes in the same way. For groups with a limit, which count what is handed out, and for clients that do not ask for a width: then what is
-- pending is as many messages as ids. At most 64, so that a lease stays a small row. What lies beyond the last one is given
-- back: to the log if it came from there (p_fresh), else as a lease that anybody can take over.
--
-- pending: NULL where nothing was kept. looked_at: how many ids this is about.
CREATE OR REPLACE FUNCTION keep_matching(p_stream bigint, g consumer_group, p_seq bigint, p_fresh boolean, p_limit bigint, p_lanes bigint,
    INOUT c group_cursor, INOUT pending int8multirange, OUT looked_at bigint)
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    leases text := 'consumer_lease_' || p_stream;
    most   bigint := least(p_limit, 64);
    ids    bigint[];
    rest   int8multirange := '{}';
    hits   int;
BEGIN
    EXECUTE format('SELECT array_agg(id) FROM (SELECT id FROM %I WHERE id >= $1 AND id < $2 AND $3 @> id%s AND (%s) ORDER BY id LIMIT $4) AS x',
                   'message_log_' || p_stream, in_lanes(p_lanes), coalesce(binding_condition(g.id, lower(pending), upper(pending)), 'true'))
        INTO ids USING lower(pending), upper(pending), pending, most;
    IF cardinality(ids) = most THEN
        rest := pending * int8multirange(int8range(ids[most] + 1, NULL));
    END IF;
    looked_at := id_count(pending) - id_count(rest);
    IF NOT isempty(rest) THEN
        IF p_fresh AND g.mode = 'fair' THEN
            c.cohorts := serve_lanes(c.cohorts, p_lanes, ids[most]);
            c.claimed := lowest_position(c.cohorts);
        ELSIF p_fresh THEN
            c.claimed := ids[most];
        ELSE
            -- The lease that it was cut off from may be there still: else each claim would leave a piece behind. With a new token: whoever
            -- had that lease must not settle what is added.
            EXECUTE format('UPDATE %1$I SET pending = pending + $3, token = gen_random_uuid() WHERE group_id = $1 AND seq = (
                                SELECT seq FROM %1$I WHERE group_id = $1 AND seq >= $2 AND expires_at <= $4 AND pending -|- $3 AND lanes IS NOT DISTINCT FROM $5 ORDER BY seq LIMIT 1 FOR UPDATE SKIP LOCKED)', leases)
                USING g.id, c.first_open, rest, clock_timestamp(), p_lanes;
            GET DIAGNOSTICS hits = ROW_COUNT;
            IF hits = 0 THEN
                EXECUTE format('INSERT INTO %1$I (group_id, seq, token, lanes, pending, expires_at, reclaims)
                                SELECT group_id, $3, gen_random_uuid(), lanes, $4, ''-infinity'', reclaims FROM %1$I WHERE group_id = $1 AND seq = $2', leases)
                    USING g.id, p_seq, c.next_seq, rest;
                c.next_seq := c.next_seq + 1;
            END IF;
        END IF;
    END IF;
    IF ids IS NULL THEN
        pending := NULL;
        EXECUTE format('DELETE FROM %I WHERE group_id = $1 AND seq = $2', leases) USING g.id, p_seq;
    ELSE
        pending := (SELECT range_agg(int8range(i, i, '[]')) FROM unnest(ids) AS i);
        EXECUTE format('UPDATE %I SET pending = $3 WHERE group_id = $1 AND seq = $2', leases) USING g.id, p_seq, pending;
    END IF;
END $$;

-- The bindings that hold for what is claimed from now on; [] if there are none.
CREATE OR REPLACE FUNCTION current_bindings(p_stream bigint, p_group bigint) RETURNS jsonb
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
BEGIN
    RETURN latest_bindings((require_group(p_stream, p_group)).id);
END $$;

CREATE OR REPLACE FUNCTION latest_bindings(p_group bigint) RETURNS jsonb
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    RETURN coalesce((SELECT bindings FROM binding_set WHERE group_id = p_group ORDER BY version DESC LIMIT 1), '[]');
END $$;

-- A new version, for ids above p_after. The caller holds the cursor's lock, or nobody else knows of the group yet.
CREATE OR REPLACE FUNCTION add_binding_set(p_stream bigint, p_group bigint, p_after bigint, p_bindings jsonb) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    INSERT INTO binding_set (group_id, version, after_id, bindings, condition)
        SELECT p_group, coalesce(max(version), 0) + 1, p_after, p_bindings, bindings_condition(p_bindings) FROM binding_set WHERE group_id = p_group;
    UPDATE consumer_group SET bound = true WHERE id = p_group AND NOT bound;
END $$;

-- Replaces the bindings of a group for everything above its cursor, which the caller has locked.
CREATE OR REPLACE FUNCTION replace_bindings(p_stream bigint, g consumer_group, c group_cursor, p_bindings jsonb) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    before  jsonb := latest_bindings(g.id);
    -- In an ordered or fair group that of the lane that is furthest on.
    claimed bigint := greatest(c.claimed, (SELECT max(position) FROM unnest(c.cohorts)));
BEGIN
    PERFORM add_binding_set(p_stream, g.id, claimed, p_bindings);
    INSERT INTO audit (action, stream_name, group_name, detail)
        SELECT 'set_bindings', s.name, g.name, jsonb_build_object('after_id', claimed, 'bindings', p_bindings, 'before', before)
        FROM stream AS s WHERE s.id = p_stream;
    PERFORM forget_binding_sets(p_stream, g.id, c);
END $$;

-- Versions beyond the last hundred go when no lease is left whose ids they judge; what they held for falls to the oldest that
-- stays.
CREATE OR REPLACE FUNCTION forget_binding_sets(p_stream bigint, p_group bigint, c group_cursor) RETURNS void
LANGUAGE plpgsql VOLATILE SET enable_seqscan = off AS $$
DECLARE
    oldest bigint := (SELECT after_id FROM binding_set WHERE group_id = p_group ORDER BY version LIMIT 1);
    newest int := (SELECT max(version) FROM binding_set WHERE group_id = p_group);
    lowest bigint;
    kept   int;
BEGIN
    IF NOT EXISTS (SELECT FROM binding_set WHERE group_id = p_group AND version <= newest - 100) THEN
        RETURN;
    END IF;
    EXECUTE format('SELECT least(min(lower(pending)), $3) FROM %I WHERE group_id = $1 AND seq >= $2', 'consumer_lease_' || p_stream)
        INTO lowest USING p_group, c.first_open, c.claimed + 1;
    -- The first version that has to stay: one of the last hundred, or what judges the lowest pending id.
    kept := least(newest - 99, coalesce((SELECT max(version) FROM binding_set WHERE group_id = p_group AND after_id < lowest), 0));
    DELETE FROM binding_set WHERE group_id = p_group AND version < kept;
    IF FOUND THEN
        UPDATE binding_set SET after_id = least(after_id, oldest) WHERE group_id = p_group AND version = kept;
    END IF;
END $$;

-- Makes p_bindings, an array of patterns and bindings, the bindings of a group: see binding.sql; [] takes all of them away, and
-- the group receives everything. Returns whether that changed anything. What was claimed before is not affected.
CREATE OR REPLACE FUNCTION set_bindings(p_stream bigint, p_group bigint, p_bindings jsonb) RETURNS boolean
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
DECLARE
    g      consumer_group := require_group(p_stream, p_group);
    normal jsonb := normal_bindings(p_bindings);
    c      group_cursor;
BEGIN
    PERFORM require_read_committed();
    -- Consumers say this at every start: no lock where nothing changes.
    IF latest_bindings(p_group) = normal THEN
        RETURN false;
    END IF;
    c := lock_cursor(p_stream, p_group);
    IF latest_bindings(p_group) = normal THEN
        RETURN false;
    END IF;
    PERFORM replace_bindings(p_stream, g, c, normal);
    RETURN true;
END $$;

-- Adds one binding: a pattern, conditions on headers, or both. Returns whether it is new. To a group that had none, and so
-- received everything, it is the only one then.
CREATE OR REPLACE FUNCTION bind(p_stream bigint, p_group bigint, p_pattern text, p_headers jsonb DEFAULT NULL) RETURNS boolean
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
DECLARE
    g      consumer_group := require_group(p_stream, p_group);
    added  jsonb := normal_bindings(jsonb_build_array(jsonb_build_object('pattern', p_pattern, 'headers', p_headers)));
    c      group_cursor;
    before jsonb;
BEGIN
    PERFORM require_read_committed();
    c := lock_cursor(p_stream, p_group);
    before := latest_bindings(p_group);
    IF normal_bindings(before || added) = before THEN
        RETURN false;
    END IF;
    PERFORM replace_bindings(p_stream, g, c, normal_bindings(before || added));
    RETURN true;
END $$;

-- Takes one binding away. Returns whether there was one. The last one stays: without any, the group would receive everything.
CREATE OR REPLACE FUNCTION unbind(p_stream bigint, p_group bigint, p_pattern text, p_headers jsonb DEFAULT NULL) RETURNS boolean
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
DECLARE
    g       consumer_group := require_group(p_stream, p_group);
    removed jsonb := normal_bindings(jsonb_build_array(jsonb_build_object('pattern', p_pattern, 'headers', p_headers)));
    c       group_cursor;
    before  jsonb;
    rest    jsonb;
BEGIN
    PERFORM require_read_committed();
    c := lock_cursor(p_stream, p_group);
    before := latest_bindings(p_group);
    rest := (SELECT coalesce(jsonb_agg(b ORDER BY b), '[]') FROM jsonb_array_elements(before) AS b WHERE b <> removed -> 0);
    IF rest = before THEN
        RETURN false;
    ELSIF rest = '[]' THEN
        PERFORM refuse_binding(format('this is the only binding of group %s: without one it receives everything', quote_ident(g.name)),
                               'If that is what you want, set its bindings to none.');
    END IF;
    PERFORM replace_bindings(p_stream, g, c, rest);
    RETURN true;
END $$;

-- Which groups of a stream a message with this routing key and these headers would reach, if it were produced now, and by
-- which of their bindings: a row for each that matches, without pattern and headers for a group that receives everything.
CREATE OR REPLACE FUNCTION test_bindings(p_stream bigint, p_routing_key text, p_headers jsonb DEFAULT NULL)
RETURNS TABLE (consumer_group text, pattern text, headers jsonb)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
    s   stream := require_stream(p_stream);
    b   record;
    hit boolean;
BEGIN
    IF octet_length(p_routing_key) > 255 THEN
        RAISE EXCEPTION 'no routing key has % bytes', octet_length(p_routing_key) USING ERRCODE = 'SQ004', HINT = 'The limit is 255.';
    ELSIF jsonb_typeof(p_headers) <> 'object' THEN
        RAISE EXCEPTION 'headers are an object, not %', jsonb_typeof(p_headers) USING ERRCODE = 'SQ004', HINT = 'Write {"region": "eu"}.';
    END IF;
    FOR b IN
        SELECT g.name, x.binding FROM consumer_group AS g CROSS JOIN LATERAL (SELECT latest_bindings(g.id) AS bindings) AS c
        LEFT JOIN LATERAL jsonb_array_elements(c.bindings) AS x(binding) ON true
        WHERE g.stream_id = p_stream ORDER BY g.name, x.binding
    LOOP
        EXECUTE format('SELECT %s FROM (SELECT $1 COLLATE "C" AS routing_key, $2 AS headers) AS m',
                       coalesce(bindings_condition(CASE WHEN b.binding IS NULL THEN '[]' ELSE jsonb_build_array(b.binding) END), 'true'))
            INTO hit USING p_routing_key, p_headers;
        IF hit THEN
            RETURN QUERY SELECT b.name, b.binding ->> 'pattern', b.binding -> 'headers';
        END IF;
    END LOOP;
END $$;

-- The history of bindings, the latest version last. A version holds for ids above after_id, up to that of the next one.
CREATE OR REPLACE FUNCTION list_binding_sets(p_stream text DEFAULT NULL, p_group text DEFAULT NULL)
RETURNS TABLE (stream text, consumer_group text, version int, after_id bigint, bindings jsonb, changed_at timestamptz, changed_by text)
LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
    SELECT s.name, g.name, b.version, b.after_id, b.bindings, b.changed_at, b.changed_by
    FROM binding_set AS b JOIN consumer_group AS g ON g.id = b.group_id JOIN stream AS s ON s.id = g.stream_id
    WHERE (s.name = p_stream OR p_stream IS NULL) AND (g.name = p_group OR p_group IS NULL)
    ORDER BY s.name, g.name, b.version
$$;
CREATE OR REPLACE VIEW binding_history AS SELECT * FROM list_binding_sets();

-- The bindings that hold now, one a row.
CREATE OR REPLACE VIEW binding AS
    SELECT v.stream, v.consumer_group, b ->> 'pattern' AS pattern, b -> 'headers' AS headers, v.after_id, v.changed_at, v.changed_by
    FROM (SELECT DISTINCT ON (stream, consumer_group) * FROM list_binding_sets() ORDER BY stream, consumer_group, version DESC) AS v,
         jsonb_array_elements(v.bindings) AS b;

-- Claiming in an ordered group: see lanes.sql for the rules.

-- How the lanes are shared out, as p_holder sees it.
CREATE OR REPLACE FUNCTION look_at_lanes(p_stream bigint, p_group bigint, c group_cursor, p_holder uuid, p_now timestamptz,
    OUT mine bigint, OUT others bigint, OUT orphaned bigint, OUT holders int)
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    EXECUTE format(
        'SELECT coalesce(bit_or(lanes) FILTER (WHERE holder = $3 AND expires_at > $4), 0),
                coalesce(bit_or(lanes) FILTER (WHERE holder <> $3 AND expires_at > $4), 0),
                coalesce(bit_or(lanes) FILTER (WHERE holder IS NULL OR expires_at <= $4), 0),
                (SELECT count(*) FROM (SELECT holder FROM %1$I WHERE group_id = $1 AND seq >= $2 AND expires_at > $4 AND holder IS NOT NULL
                                       UNION SELECT (w).holder FROM unnest($5) AS w WHERE (w).until > $4 UNION SELECT $3) AS x)
         FROM %1$I WHERE group_id = $1 AND seq >= $2', 'consumer_lease_' || p_stream)
        INTO mine, others, orphaned, holders USING p_group, c.first_open, p_holder, p_now, c.waiters;
END $$;

-- Takes over one lease that a holder has left, or as much of it as lies in those of p_lanes that are free or p_holder's: that with the
-- lowest id first. p_room: where the group has a limit, the most messages. Exceptions that were in flight under such leases are put
-- back on the way. NULLs when there is none.
CREATE OR REPLACE FUNCTION take_over_lanes(p_stream bigint, g consumer_group, p_holder uuid, p_owner bigint, p_token uuid, p_lanes bigint, p_room bigint, p_now timestamptz,
    INOUT c group_cursor, OUT pending int8multirange, OUT lanes bigint)
LANGUAGE plpgsql VOLATILE AS $$
#variable_conflict use_variable
DECLARE
    leases text := 'consumer_lease_' || p_stream;
    l      record;
    others bigint := (SELECT x.others FROM look_at_lanes(p_stream, g.id, c, p_holder, p_now) AS x);
    lost   boolean;
    part   record;
BEGIN
    FOR l IN EXECUTE format('SELECT seq, token, pending, lanes, expires_at, reclaims, owner FROM %I WHERE group_id = $1 AND seq >= $2 AND (holder IS NULL OR expires_at <= $3)
                             ORDER BY lower(pending) NULLS FIRST, seq', leases)
        USING g.id, c.first_open, p_now
    LOOP
        lost := l.expires_at > '-infinity';
        PERFORM put_back_lane_exceptions(p_stream, g, l.token, l.lanes, lost);
        lanes := l.lanes & ~others & p_lanes;
        CONTINUE WHEN lanes = 0 AND NOT isempty(l.pending);
        -- Only where pending is written as well: who takes a row of consumer_done and leaves its id pending lets it run again.
        IF g.transactional THEN
            l.pending := l.pending - take_done(p_stream, g.id, l.pending, l.lanes);
        END IF;
        IF isempty(l.pending) THEN
            EXECUTE format('DELETE FROM %I WHERE group_id = $1 AND seq = $2', leases) USING g.id, l.seq;
            CONTINUE;
        END IF;
        -- The lost holder must not settle any part of it.
        IF lanes = l.lanes THEN
            EXECUTE format('DELETE FROM %I WHERE group_id = $1 AND seq = $2', leases) USING g.id, l.seq;
        ELSE
            EXECUTE format('UPDATE %I SET token = gen_random_uuid(), holder = NULL, lanes = $3, pending = $4 WHERE group_id = $1 AND seq = $2', leases)
                USING g.id, l.seq, l.lanes & ~lanes, l.pending;
        END IF;
        IF lost AND l.reclaims >= g.max_reclaims THEN
            PERFORM make_lane_suspects(p_stream, g, l.pending, lanes);
            CONTINUE;
        END IF;
        IF p_room IS NOT NULL THEN
            -- The rest stays behind as it is, and comes next.
            SELECT * INTO part FROM first_of_lanes(p_stream, g.id, l.pending, lanes, p_room);
            IF part.cut IS NOT NULL THEN
                EXECUTE format('INSERT INTO %I (group_id, seq, token, lanes, pending, expires_at, reclaims) VALUES ($1, $2, gen_random_uuid(), $3, $4, $5, $6)', leases)
                    USING g.id, c.next_seq, lanes, l.pending * int8multirange(int8range(part.cut, NULL)), l.expires_at, l.reclaims;
                c.next_seq := c.next_seq + 1;
            END IF;
            CONTINUE WHEN part.picked IS NULL;
            l.pending := part.picked;
        END IF;
        pending := l.pending - defer_blocked(p_stream, g.id, l.pending, lanes);
        EXECUTE format('INSERT INTO %I (group_id, seq, token, owner, holder, lanes, pending, expires_at, reclaims) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9)', leases)
            USING g.id, c.next_seq, p_token, p_owner, p_holder, lanes, pending, p_now + g.lease_duration, l.reclaims + lost::int;
        c.next_seq := c.next_seq + 1;
        RETURN;
    END LOOP;
    pending := NULL;
    lanes := NULL;
END $$;

-- The messages of a poison range as exceptions that run alone; of each key the lowest first.
CREATE OR REPLACE FUNCTION make_lane_suspects(p_stream bigint, g consumer_group, p_pending int8multirange, p_lanes bigint) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    keys text[];
BEGIN
    EXECUTE format(
        'WITH rows AS (
             INSERT INTO %1$I (group_id, message_id, state, losses, due_at, key, lane, last_error)
             SELECT $1, id, CASE WHEN key IS NULL THEN ''ready'' ELSE ''deferred'' END, 1, $4, key, lane_of(key, id), ''its lease was lost repeatedly''
             FROM %2$I WHERE id >= lower($2) AND id < upper($2) AND $2 @> id AND ($3 >> lane_of(key, id)) & 1 = 1 AND (%3$s)
             RETURNING key)
         SELECT array_agg(DISTINCT key) FROM rows WHERE key IS NOT NULL', 'exception_queue_' || p_stream, 'message_log_' || p_stream,
        coalesce(binding_condition(g.id, lower(p_pending), upper(p_pending)), 'true'))
        INTO keys USING g.id, p_pending, p_lanes, clock_timestamp();
    PERFORM promote(p_stream, g.id, keys);
END $$;

-- Exceptions of these lanes that are due, at most about p_limit: each key's head, and the deferred ones that follow it if it has not
-- failed before and p_alone does not say otherwise: one that fails again would only take them back. Later ones may be in flight, if it
-- was redriven meanwhile: they stay where they are, and so does what follows those. With p_suspect it may be one suspect alone. Returns how many it put into flight under p_token, and their lanes.
CREATE OR REPLACE FUNCTION take_lane_exceptions(p_stream bigint, g consumer_group, p_lanes bigint, p_limit bigint, p_alone boolean, p_suspect boolean, p_token uuid, p_now timestamptz,
    OUT taken bigint, OUT lanes bigint)
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    exceptions text := 'exception_queue_' || p_stream;
    each       smallint[];
    open       boolean;
BEGIN
    taken := 0;
    EXECUTE format('SELECT EXISTS (SELECT FROM %I WHERE group_id = $1 AND state = ''ready'' AND losses = 0 AND due_at <= $2)
                        OR $3 AND EXISTS (SELECT FROM %1$I WHERE group_id = $1 AND state = ''ready'' AND losses > 0 AND due_at <= $2)', exceptions)
        INTO open USING g.id, p_now, p_suspect;
    IF NOT open THEN
        RETURN;
    END IF;
    each := ARRAY(SELECT i FROM generate_series(0, 63) AS i WHERE (p_lanes >> i) & 1 = 1);
    IF p_suspect THEN
        EXECUTE format(
            'WITH head AS (
                 SELECT e.message_id FROM unnest($2) AS l(lane)
                 CROSS JOIN LATERAL (SELECT message_id, due_at FROM %1$I WHERE group_id = $1 AND lane = l.lane AND lane >= 0 AND state = ''ready'' AND losses > 0 AND due_at <= $3 ORDER BY due_at LIMIT 1) AS e
                 ORDER BY e.due_at LIMIT 1),
             claimed AS (
                 UPDATE %1$I AS e SET state = ''inflight'', lease_id = $4, lease_expires_at = ''infinity'' FROM head
                 WHERE e.group_id = $1 AND e.message_id = head.message_id RETURNING e.lane)
             SELECT count(*), bit_or(1::bigint << lane) FROM claimed', exceptions)
            INTO taken, lanes USING g.id, each, p_now, p_token;
        IF taken > 0 THEN
            RETURN;
        END IF;
    END IF;
    EXECUTE format(
        'WITH filled AS MATERIALIZED (
             SELECT l.lane FROM unnest($2) AS l(lane)
             CROSS JOIN LATERAL (SELECT FROM %1$I WHERE group_id = $1 AND lane = l.lane AND lane >= 0 AND state = ''ready'' AND losses = 0 AND due_at <= $3 ORDER BY due_at LIMIT 1) AS e),
         -- Of each about as many: all of each, to find the first of all, would be very many.
         head AS MATERIALIZED (
             SELECT e.* FROM filled AS l
             CROSS JOIN LATERAL (SELECT message_id, key, due_at, attempts + delays > 0 AS failed FROM %1$I
                                 WHERE group_id = $1 AND lane = l.lane AND lane >= 0 AND state = ''ready'' AND losses = 0 AND due_at <= $3 ORDER BY due_at
                                 LIMIT (SELECT ceil($5::numeric / nullif(count(*), 0))::bigint FROM filled)) AS e
             ORDER BY e.due_at LIMIT $5),
         followers AS MATERIALIZED (
             SELECT f.message_id, f.key, f.stays, f.place FROM head
             CROSS JOIN LATERAL (SELECT message_id, key, losses > 0 OR state <> ''deferred'' AS stays, row_number() OVER (ORDER BY message_id) AS place FROM (
                                     SELECT message_id, key, losses, state FROM %1$I WHERE group_id = $1 AND key = head.key AND lane >= 0 AND state <> ''dead'' AND message_id > head.message_id
                                     ORDER BY message_id LIMIT $5) AS x) AS f
             WHERE NOT head.failed AND NOT $6),
         alone AS (SELECT key, min(place) AS place FROM followers WHERE stays GROUP BY key),
         chosen AS (
             SELECT message_id FROM (
                 SELECT message_id, 0 AS place FROM head
                 UNION ALL
                 SELECT f.message_id, f.place FROM followers AS f LEFT JOIN alone AS a ON a.key = f.key WHERE a.place IS NULL OR f.place < a.place) AS x
             ORDER BY place, message_id LIMIT $5),
         claimed AS (
             UPDATE %1$I AS e SET state = ''inflight'', lease_id = $4, lease_expires_at = ''infinity'' FROM chosen
             WHERE e.group_id = $1 AND e.message_id = chosen.message_id RETURNING e.lane)
         SELECT count(*), bit_or(1::bigint << lane) FROM claimed', exceptions)
        INTO taken, lanes USING g.id, each, p_now, p_token, p_limit, p_alone;
END $$;

-- Of these ids the first messages in these lanes that are for the group, at most p_room: as a group that has a limit hands them out, of
-- each lane one with a key, since a second could only wait. cut: where what was not looked at begins, NULL if all was.
CREATE OR REPLACE FUNCTION first_of_lanes(p_stream bigint, p_group bigint, p_ids int8multirange, p_lanes bigint, p_room bigint, OUT picked int8multirange, OUT cut bigint)
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    EXECUTE format(
        'WITH mine AS MATERIALIZED (
             SELECT id, key IS NOT NULL AND row_number() OVER (PARTITION BY lane_of(key, id), key IS NULL ORDER BY id) > 1 OR row_number() OVER (ORDER BY id) > $3 AS over
             FROM (SELECT id, key FROM %I WHERE id >= lower($1) AND id < upper($1) AND $1 @> id AND ($2 >> lane_of(key, id)) & 1 = 1 AND (%s) ORDER BY id LIMIT $3 + 1) AS x),
         cut AS MATERIALIZED (SELECT min(id) AS id FROM mine WHERE over)
         SELECT range_agg(int8range(mine.id, mine.id, ''[]'')) FILTER (WHERE mine.id IS NOT NULL), min(cut.id) FROM cut LEFT JOIN mine ON cut.id IS NULL OR mine.id < cut.id', 'message_log_' || p_stream,
        coalesce(binding_condition(p_group, lower(p_ids), upper(p_ids)), 'true'))
        INTO picked, cut USING p_ids, p_lanes, p_room;
END $$;

-- The next ids of the log for these lanes, of those furthest behind: p_width of them, or without it as many as it takes for p_limit
-- messages when all lanes have as many. p_limited: no more than p_limit messages, counted. looked_at: how many ids it is about, of which
-- there may be none to hand out; reached: up to where.
CREATE OR REPLACE FUNCTION next_lane_range(p_stream bigint, p_group bigint, p_lanes bigint, p_limit bigint, p_width bigint, p_limited boolean,
    INOUT c group_cursor, OUT pending int8multirange, OUT lanes bigint, OUT looked_at bigint, OUT reached bigint)
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    r      record;
    at     group_cursor := c;
    first  lane_cohort;
    beyond bigint;
    width  bigint;
BEGIN
    SELECT x.lanes & p_lanes, x.position INTO first FROM unnest(c.cohorts) AS x WHERE x.lanes & p_lanes <> 0 ORDER BY x.position LIMIT 1;
    IF first.lanes IS NULL THEN
        RETURN;
    END IF;
    lanes := first.lanes;
    -- No further than where the next cohort stands: it is read together with that one then.
    SELECT min(x.position) INTO beyond FROM unnest(c.cohorts) AS x WHERE x.lanes & p_lanes <> 0 AND x.position > first.position;
    at.claimed := first.position;
    width := greatest(1, coalesce(p_width, p_limit * 64 / lane_count(lanes)));
    SELECT * INTO r FROM next_range(p_stream, least(width, CASE WHEN p_limited THEN 10000 ELSE 50000 END, beyond - first.position), at);
    at := r.c;
    reached := least(at.claimed, beyond);
    -- Passing over holes it may have gone beyond.
    pending := int8multirange(r.range * int8range(NULL, beyond, '[]'));
    IF isempty(pending) THEN
        pending := NULL;
    END IF;
    looked_at := upper(pending) - lower(pending);
    IF p_limited AND pending IS NOT NULL THEN
        SELECT * INTO r FROM first_of_lanes(p_stream, p_group, pending, lanes, p_limit);
        reached := coalesce(r.cut - 1, reached);
        looked_at := reached + 1 - lower(pending);
        pending := r.picked;
    END IF;
    c.cohorts := move_lanes(c.cohorts, lanes, reached);
    c.claimed := lowest_position(c.cohorts);
END $$;

-- Settles and renews what p_holder has, records what failed, and claims more, in one call; the one call of an ordered group's
-- consumers, heartbeats too, which follow each other.
--
-- p_holder: chosen at random by the consumer, and anew after a loss. p_tokens, p_done: all its leases, and the ids of
-- each that are finished; p_finished: all of them are, and so are the exceptions that were claimed under it. p_failed_…: failed first deliveries, as for advance. p_ended_…: exceptions that ended, with their keys; see
-- settle_lane_exceptions. p_limit: about how many messages to claim, 0 for none. p_suspect: one suspect may be among them, alone.
-- p_lanes: the lanes of which more is wanted. p_width: the ids to look among for p_limit messages. p_part: what this lease has above
-- p_part_after becomes two, p_part_tokens: the second for p_part_lanes, the first for its other lanes.
--
-- lost: nothing was recorded, all that the holder has is lost. Else there may be a new lease (seq), for lanes, which holds either ids of
-- the log (pending) or exceptions (ids and so on, in id order; pending is empty). waiting: there is something to read, but no lane for the
-- caller yet. limited: the group has a limit, so tell at once what is finished. wait: the rate limit is used up; ask again after that.
-- looked_at: how many ids of the log the claim is about, of which there may be none to hand out; reached: up to where the lanes were read.
CREATE OR REPLACE FUNCTION advance_lanes(p_stream bigint, p_group bigint, p_holder uuid, p_owner bigint,
    p_tokens uuid[], p_done int8multirange[], p_finished boolean[],
    p_failed_tokens uuid[], p_failed_ids bigint[], p_outcomes text[], p_errors text[], p_delays double precision[],
    p_ended_tokens uuid[], p_ended_ids bigint[], p_ended_keys text[], p_ended_outcomes text[], p_ended_errors text[], p_ended_delays double precision[],
    p_limit bigint, p_suspect boolean, p_token uuid, p_lanes bigint DEFAULT -1, p_width bigint DEFAULT NULL,
    p_part uuid DEFAULT NULL, p_part_after bigint DEFAULT NULL, p_part_lanes bigint DEFAULT NULL, p_part_tokens uuid[] DEFAULT NULL)
RETURNS TABLE (lost boolean, seq bigint, lanes bigint, pending int8multirange, ids bigint[], attempts int[], delays int[], first_failed_at timestamptz[], suspect boolean,
               lease_duration interval, paused boolean, waiting boolean, limited boolean, wait interval, looked_at bigint, reached bigint)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off SET constraint_exclusion = off AS $$
#variable_conflict use_column
DECLARE
    leases text := 'consumer_lease_' || p_stream;
    seqs   bigint[];
    held   bigint;
    g      consumer_group;
    before group_cursor;
    c      group_cursor;
    now    timestamptz;
    r      record;
    l      record;
    e      record;
    room   bigint := p_limit;
    quota  int;
    free   bigint;
    may    bigint;
BEGIN
    PERFORM require_read_committed();
    before := lock_cursor(p_stream, p_group);
    g := require_group(p_stream, p_group);
    PERFORM require_mode(g, 'ordered');
    c := before;
    IF g.lane_probe <> lane_probe() THEN
        c := realign(p_stream, g, c);
    END IF;
    lease_duration := g.lease_duration;
    paused := g.paused;
    waiting := false;
    limited := g.max_in_flight IS NOT NULL OR g.rate_limit IS NOT NULL;

    seqs := held_lanes(p_stream, p_group, c, p_holder, p_tokens);
    lost := seqs IS NULL;
    IF lost THEN
        IF c IS DISTINCT FROM before THEN
            PERFORM save_cursor(p_stream, p_group, c);
        END IF;
        RETURN NEXT;
        RETURN;
    END IF;
    IF cardinality(p_ended_ids) > 0 THEN
        PERFORM settle_lane_exceptions(p_stream, g, p_ended_tokens, p_ended_ids, p_ended_keys, p_ended_outcomes, p_ended_errors, p_ended_delays);
    END IF;
    IF cardinality(p_tokens) > 0 THEN
        PERFORM take_done_in_lanes(p_stream, g, seqs, p_tokens, p_done);
        IF cardinality(p_failed_ids) > 0 THEN
            PERFORM fail_in_lanes(p_stream, g, seqs, p_tokens, p_failed_tokens, p_failed_ids, p_outcomes, p_errors, p_delays);
        END IF;
        PERFORM renew_lanes(p_stream, g, p_owner, seqs, p_tokens, p_finished);
        IF EXISTS (SELECT FROM unnest(c.waiters) AS w WHERE (w).holder <> p_holder AND (w).until > clock_timestamp()) THEN
            PERFORM free_lanes(p_stream, p_group, seqs, p_tokens);
        END IF;
        IF p_part IS NOT NULL THEN
            c := part_lanes(p_stream, p_group, seqs[array_position(p_tokens, p_part)], p_part_after, p_part_lanes, p_part_tokens, c);
        END IF;
        FOREACH held IN ARRAY seqs LOOP
            IF held < c.next_seq - 1000 THEN
                c := move_lease(p_stream, p_group, held, c);
            END IF;
        END LOOP;
    END IF;
    IF c.first_open < c.next_seq THEN
        c.first_open := first_open_lease(p_stream, p_group, c);
    END IF;

    IF limited AND room > 0 THEN
        SELECT a.room, a.wait INTO room, wait FROM allowance(p_stream, g, c, room) AS a;
    END IF;
    now := clock_timestamp();
    IF room > 0 AND NOT g.paused THEN
        IF c.first_open < c.next_seq THEN
            SELECT * INTO r FROM take_over_lanes(p_stream, g, p_holder, p_owner, p_token, p_lanes, CASE WHEN limited THEN room END, now, c);
            c := r.c;
            pending := r.pending;
            lanes := r.lanes;
        END IF;
        IF pending IS NOT NULL THEN
            seq := c.next_seq - 1;
        ELSE
            SELECT * INTO l FROM look_at_lanes(p_stream, p_group, c, p_holder, now);
            quota := ceil(64.0 / l.holders);
            may := l.mine & ~l.orphaned;
            IF lane_count(l.mine) > quota THEN
                -- What is beyond the quota drains, and is free then.
                may := first_lanes(may, quota);
            ELSE
                -- Free ones, of those that are furthest behind.
                free := ~l.mine & ~l.others & ~l.orphaned & p_lanes;
                FOR r IN SELECT x.lanes FROM unnest(c.cohorts) AS x ORDER BY x.position LOOP
                    may := may | first_lanes(r.lanes & free, quota - lane_count(may));
                END LOOP;
            END IF;
            SELECT * INTO e FROM take_lane_exceptions(p_stream, g, may & p_lanes, room, limited, p_suspect, p_token, now);
            IF e.taken > 0 THEN
                seq := c.next_seq;
                pending := '{}';
                lanes := e.lanes;
                EXECUTE format('SELECT array_agg(message_id ORDER BY message_id), array_agg(attempts ORDER BY message_id), array_agg(delays ORDER BY message_id),
                                       array_agg(first_failed_at ORDER BY message_id), bool_or(losses > 0) FROM %I WHERE group_id = $1 AND lane >= 0 AND lease_id = $2', 'exception_queue_' || p_stream)
                    INTO ids, attempts, delays, first_failed_at, suspect USING p_group, p_token;
            ELSE
                SELECT * INTO r FROM next_lane_range(p_stream, p_group, may & p_lanes, room, p_width, limited, c);
                c := r.c;
                lanes := r.lanes;
                looked_at := r.looked_at;
                reached := r.reached;
                IF r.pending IS NOT NULL THEN
                    seq := c.next_seq;
                    pending := r.pending - defer_blocked(p_stream, p_group, r.pending, lanes);
                ELSE
                    waiting := lane_count(may) < quota AND log_head(p_stream) > c.claimed;
                END IF;
            END IF;
            IF seq IS NOT NULL THEN
                EXECUTE format('INSERT INTO %I (group_id, seq, token, owner, holder, lanes, pending, expires_at) VALUES ($1, $2, $3, $4, $5, $6, $7, $8)', leases)
                    USING p_group, seq, p_token, p_owner, p_holder, lanes, pending, now + g.lease_duration;
                c.next_seq := c.next_seq + 1;
            END IF;
        END IF;
        IF limited AND seq IS NOT NULL THEN
            c.paced_until := spend(g, c.paced_until, id_count(pending) + coalesce(cardinality(ids), 0));
        END IF;
        IF waiting AND EXISTS (SELECT FROM unnest(c.waiters) AS w WHERE (w).holder = p_holder AND (w).until > now + interval '1 second') THEN
            NULL;   -- that is known
        ELSIF waiting THEN
            c.waiters := ARRAY(SELECT w FROM unnest(c.waiters) AS w WHERE (w).until > now AND (w).holder <> p_holder) || (p_holder, now + interval '2 seconds')::lane_waiter;
        ELSIF EXISTS (SELECT FROM unnest(c.waiters) AS w WHERE (w).holder = p_holder) THEN
            c.waiters := ARRAY(SELECT w FROM unnest(c.waiters) AS w WHERE (w).until > now AND (w).holder <> p_holder);
        END IF;
    END IF;
    IF c IS DISTINCT FROM before THEN
        PERFORM save_cursor(p_stream, p_group, c);
    END IF;
    RETURN NEXT;
END $$;

-- Hands everything back that p_holder has: it can be claimed at once by anybody.
CREATE OR REPLACE FUNCTION release_lanes(p_stream bigint, p_group bigint, p_holder uuid) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
DECLARE
    c group_cursor;
BEGIN
    PERFORM require_read_committed();
    c := lock_cursor(p_stream, p_group);
    EXECUTE format('UPDATE %I SET expires_at = ''-infinity'', holder = NULL, owner = NULL WHERE group_id = $1 AND seq >= $2 AND holder = $3', 'consumer_lease_' || p_stream)
        USING p_group, c.first_open, p_holder;
    PERFORM ring(ARRAY[p_stream]);
END $$;

-- Reading the messages of a lease. No lock is held while they travel: a consumer that stops reading stops nobody else.

-- What is pending in the lease that p_token proves; NULL when there is none. The one just claimed is among the newest few;
-- only for an older one the cursor has to say how far down leases lie.
CREATE OR REPLACE FUNCTION lease_pending(p_stream bigint, p_group bigint, p_token uuid) RETURNS int8multirange
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    RETURN (SELECT pending FROM find_lease(p_stream, p_group, p_token));
END $$;

-- The same and the lanes that it is for.
CREATE OR REPLACE FUNCTION find_lease(p_stream bigint, p_group bigint, p_token uuid, OUT pending int8multirange, OUT lanes bigint)
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    PERFORM require_tables(p_stream);
    EXECUTE format('SELECT pending, lanes FROM (SELECT token, pending, lanes FROM %I WHERE group_id = $1 ORDER BY seq DESC LIMIT 3) AS x WHERE token = $2', 'consumer_lease_' || p_stream)
        INTO pending, lanes USING p_group, p_token;
    IF pending IS NULL THEN
        EXECUTE format('SELECT pending, lanes FROM %I WHERE group_id = $1 AND seq >= $2 AND token = $3 ORDER BY seq DESC LIMIT 1', 'consumer_lease_' || p_stream)
            INTO pending, lanes USING p_group, (peek_cursor(p_stream, p_group)).first_open, p_token;
    END IF;
END $$;

-- The messages of lease p_token after id p_after that are for the group (binding_set.sql), at most p_limit of them and about p_bytes of payload (but at least
-- one). "more" says on the last one whether the lease holds more. p_type is only there for its type, that of the
-- stream's payloads: fetch(…, NULL::json).
--
-- A message that has expired is told of without its payload: it is finished, unhandled. remaining: how long the others have, 0 for those that have expired, NULL for
-- those that do not; whoever hands one out later looks again.
-- A message without payload that has not expired is a tombstone (current.sql). lane: which of the lease's lanes it is in, where the
-- lease is for some of them.
-- A group that wants only what is newest is not told of what a newer message of its key has superseded.
--
-- constraint_exclusion is off, here as in advance: pruning needs none, and reading every partition's checks anew for each
-- plan took a third of the time.
--
-- Never read message_log_<n> in the statement that claims, or under an older snapshot: rows that the claim freed would
-- be missing. (The name is quoted since FETCH is a reserved word; qualified, sqlstreams.fetch(…), it needs no quotes.)
CREATE OR REPLACE FUNCTION "fetch"(p_stream bigint, p_group bigint, p_token uuid, p_after bigint, p_limit bigint, p_bytes bigint, p_type anyelement)
RETURNS TABLE (id bigint, key text, routing_key text, headers jsonb, produced_at timestamptz, more boolean, payload anyelement, remaining interval, lane smallint)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off SET constraint_exclusion = off SET work_mem = '32MB' AS $$
#variable_conflict use_column
DECLARE
    pending   int8multirange;
    lanes     bigint;
    condition text;
    now       timestamptz := clock_timestamp();
BEGIN
    PERFORM require_read_committed();
    SELECT f.pending, f.lanes INTO pending, lanes FROM find_lease(p_stream, p_group, p_token) AS f;
    IF pending IS NULL OR isempty(pending) THEN
        RETURN;
    END IF;
    condition := binding_condition(p_group, lower(pending), upper(pending));
    RETURN QUERY EXECUTE format(
        'SELECT id, key, routing_key, headers, produced_at, more, CASE WHEN expires_at <= $7 THEN NULL ELSE payload END, CASE WHEN expires_at <= $7 THEN interval ''0'' WHEN isfinite(expires_at) THEN expires_at - $7 END, %s::smallint
         FROM (SELECT id, key, routing_key, headers, produced_at, expires_at, payload,
                      lead(id) OVER (ORDER BY id) IS NOT NULL AS more,
                      sum(coalesce(pg_column_size(payload), 0)) OVER (ORDER BY id ROWS UNBOUNDED PRECEDING) - coalesce(pg_column_size(payload), 0) AS bytes_before
               FROM (SELECT * FROM %I WHERE id >= $1 AND id < $2 AND id > $3%s%s%s ORDER BY id LIMIT $5 + 1) AS m) AS m
         WHERE bytes_before < $6
         ORDER BY id LIMIT $5', CASE WHEN lanes IS NULL THEN 'NULL' ELSE 'lane_of(key, id)' END, 'message_log_' || p_stream,
        -- Of one range the bounds say it all, which counts where most rows are for others.
        CASE WHEN id_count(pending) < upper(pending) - lower(pending) THEN ' AND $4 @> id' END, in_lanes(lanes), ' AND (' || condition || ')')
        USING lower(pending), upper(pending), p_after, pending, p_limit, p_bytes, now;
END $$;

-- Messages of the log by their ids, in order, about p_bytes of payload (but at least one); "more" and expired ones as above. Ids for which
-- there is no message are left out. superseded: p_group wants only what is newest, and that is not; it comes without payload and is finished.
CREATE OR REPLACE FUNCTION fetch_messages(p_stream bigint, p_ids bigint[], p_bytes bigint, p_type anyelement, p_group bigint DEFAULT NULL)
RETURNS TABLE (id bigint, key text, routing_key text, headers jsonb, produced_at timestamptz, more boolean, payload anyelement, remaining interval, superseded boolean)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off SET constraint_exclusion = off SET work_mem = '32MB' AS $$
#variable_conflict use_column
DECLARE
    now    timestamptz := clock_timestamp();
    lowest bigint := (SELECT min(i) FROM unnest(p_ids) AS i);
    newest boolean := coalesce((SELECT newest_only FROM consumer_group WHERE id = p_group), false);
BEGIN
    -- LIMIT 1 keeps it a look-up per id: the ids may lie anywhere in the log, and a join would read all between them.
    RETURN QUERY EXECUTE format(
        'SELECT id, key, routing_key, headers, produced_at, more, CASE WHEN superseded OR expires_at <= $5 THEN NULL ELSE payload END,
                CASE WHEN expires_at <= $5 THEN interval ''0'' WHEN isfinite(expires_at) THEN expires_at - $5 END, superseded
         FROM (SELECT m.*, %s AS superseded, lead(m.id) OVER (ORDER BY m.id) IS NOT NULL AS more,
                      sum(coalesce(pg_column_size(m.payload), 0)) OVER (ORDER BY m.id ROWS UNBOUNDED PRECEDING) - coalesce(pg_column_size(m.payload), 0) AS bytes_before
               FROM unnest($1) AS u(id)
               CROSS JOIN LATERAL (SELECT * FROM %I WHERE id = u.id AND id >= $2 AND id <= $3 LIMIT 1) AS m) AS m
         WHERE bytes_before < $4 ORDER BY id', CASE WHEN newest THEN superseded(p_stream, 'm', lowest) ELSE 'false' END, 'message_log_' || p_stream)
        USING p_ids, lowest, (SELECT max(i) FROM unnest(p_ids) AS i), p_bytes, now;
END $$;

-- The id that comes next in lease p_token after p_after, for a client that cannot read its message.
CREATE OR REPLACE FUNCTION next_id(p_stream bigint, p_group bigint, p_token uuid, p_after bigint) RETURNS bigint
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off SET constraint_exclusion = off AS $$
DECLARE
    pending int8multirange;
    lanes   bigint;
    hit     bigint;
BEGIN
    PERFORM require_read_committed();
    SELECT f.pending, f.lanes INTO pending, lanes FROM find_lease(p_stream, p_group, p_token) AS f;
    EXECUTE format('SELECT id FROM %I WHERE id >= $1 AND id < $2 AND id > $3 AND $4 @> id%s AND (%s) ORDER BY id LIMIT 1', 'message_log_' || p_stream,
                   in_lanes(lanes), coalesce(binding_condition(p_group, lower(pending), upper(pending)), 'true'))
        INTO hit USING lower(pending), upper(pending), p_after, pending;
    RETURN hit;
END $$;

-- The steps of advance one by one, for clients that do not need them in one call.

-- Claims up to p_limit messages and returns them, all under the same lease; those that have expired are left out. In a group with
-- bindings, or a fair one, it looks for a tenth of a second at most: that there are no rows does not say that there is nothing beyond.
CREATE OR REPLACE FUNCTION claim(p_stream bigint, p_group bigint, p_limit bigint, p_type anyelement)
RETURNS TABLE (seq bigint, token uuid, id bigint, key text, routing_key text, headers jsonb, produced_at timestamptz, payload anyelement)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
    a       record;
    started timestamptz := clock_timestamp();
BEGIN
    LOOP
        SELECT * INTO a FROM advance(p_stream, p_group, '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', p_limit) AS a;
        EXIT WHEN a.token IS NOT NULL OR coalesce(a.looked_at, 0) = 0 OR clock_timestamp() > started + interval '100 milliseconds';
    END LOOP;
    RETURN QUERY
        SELECT a.seq, a.token, f.id, f.key, f.routing_key, f.headers, f.produced_at, f.payload
        FROM "fetch"(p_stream, p_group, a.token, 0, p_limit, 9223372036854775807, p_type) AS f WHERE f.remaining IS NULL OR f.remaining > '0';
END $$;

-- Takes finished ids out of a lease. False: the lease was lost, nothing is recorded.
CREATE OR REPLACE FUNCTION settle(p_stream bigint, p_group bigint, p_seq bigint, p_token uuid, p_done int8multirange) RETURNS boolean
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
BEGIN
    PERFORM require_read_committed();
    RETURN settle_lease(p_stream, require_group(p_stream, p_group), NULL, p_seq, p_token, p_done) IS NOT NULL;
END $$;

-- Makes exception rows of messages of a lease that failed. False: the lease was lost, nothing is recorded.
CREATE OR REPLACE FUNCTION fail(p_stream bigint, p_group bigint, p_seq bigint, p_token uuid,
    p_ids bigint[], p_outcomes text[], p_errors text[], p_delays double precision[] DEFAULT '{}') RETURNS boolean
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
BEGIN
    PERFORM require_read_committed();
    PERFORM require_outcomes(p_outcomes, '{retry,dead,delay}');
    RETURN settle_lease(p_stream, require_group(p_stream, p_group), NULL, p_seq, p_token, '{}', p_ids, p_outcomes, p_errors, p_delays) IS NOT NULL;
END $$;

-- The heartbeat: takes finished ids out of leases and leases the rest for another lease_duration, for p_owner (owner.sql).
-- Returns each lease with the seq it has now, NULL for those that were lost.
CREATE OR REPLACE FUNCTION extend(p_stream bigint, p_group bigint, p_seqs bigint[], p_tokens uuid[], p_done int8multirange[], p_owner bigint DEFAULT NULL)
RETURNS TABLE (token uuid, seq bigint)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    g      consumer_group;
    before group_cursor;
    c      group_cursor;
    l      record;
    moving boolean;
BEGIN
    PERFORM require_read_committed();
    g := require_group(p_stream, p_group);
    -- To move leases up takes the cursor's lock, before any lease's.
    c := peek_cursor(p_stream, p_group);
    moving := EXISTS (SELECT FROM unnest(p_seqs) AS s WHERE s < c.next_seq - 1000);
    IF moving THEN
        c := lock_cursor(p_stream, p_group);
    END IF;
    before := c;
    FOR l IN SELECT u.seq, u.token, u.done FROM unnest(p_seqs, p_tokens, p_done) AS u(seq, token, done) ORDER BY u.seq LOOP
        token := l.token;
        seq := settle_lease(p_stream, g, p_owner, l.seq, l.token, coalesce(l.done, '{}'));
        IF moving AND seq < c.next_seq - 1000 THEN
            c := move_lease(p_stream, p_group, seq, c);
            seq := c.next_seq - 1;
        END IF;
        RETURN NEXT;
    END LOOP;
    IF c IS DISTINCT FROM before THEN
        c.first_open := first_open_lease(p_stream, p_group, c);
        PERFORM save_cursor(p_stream, p_group, c);
    END IF;
END $$;

-- Hands leases back: finished ids leave them, the rest can be claimed by anyone at once and does not count as lost.
-- Returns the tokens that were lost before.
CREATE OR REPLACE FUNCTION release(p_stream bigint, p_group bigint, p_seqs bigint[], p_tokens uuid[], p_done int8multirange[]) RETURNS uuid[]
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
DECLARE
    g    consumer_group;
    lost uuid[] := '{}';
    l    record;
    seq  bigint;
BEGIN
    PERFORM require_read_committed();
    g := require_group(p_stream, p_group);
    FOR l IN SELECT u.seq, u.token, u.done FROM unnest(p_seqs, p_tokens, p_done) AS u(seq, token, done) ORDER BY u.seq LOOP
        seq := settle_lease(p_stream, g, NULL, l.seq, l.token, coalesce(l.done, '{}'));
        IF seq IS NULL THEN
            lost := lost || l.token;
        ELSE
            EXECUTE format('UPDATE %I SET expires_at = ''-infinity'', token = gen_random_uuid() WHERE group_id = $1 AND seq = $2 AND token = $3', 'consumer_lease_' || p_stream)
                USING p_group, seq, l.token;
        END IF;
    END LOOP;
    PERFORM ring(ARRAY[p_stream]);
    RETURN lost;
END $$;

-- Hands part of a lease back, as a lease of its own that anyone can take over at once. False: the lease was lost.
CREATE OR REPLACE FUNCTION release_part(p_stream bigint, p_group bigint, p_seq bigint, p_token uuid, p_part int8multirange) RETURNS boolean
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
DECLARE
    c group_cursor;
    l group_lease;
BEGIN
    PERFORM require_read_committed();
    c := lock_cursor(p_stream, p_group);
    l := lock_lease(p_stream, p_group, p_seq, p_token);
    IF l.seq IS NULL THEN
        RETURN false;
    END IF;
    EXECUTE format('INSERT INTO %1$I (group_id, seq, token, lanes, pending, expires_at, reclaims)
                    SELECT group_id, $3, gen_random_uuid(), lanes, pending * $4, ''-infinity'', reclaims FROM %1$I
                    WHERE group_id = $1 AND seq = $2 AND NOT isempty(pending * $4)', 'consumer_lease_' || p_stream)
        USING p_group, l.seq, c.next_seq, p_part;
    EXECUTE format('WITH kept AS (UPDATE %1$I SET pending = pending - $3 WHERE group_id = $1 AND seq = $2 AND NOT pending <@ $3)
                    DELETE FROM %1$I WHERE group_id = $1 AND seq = $2 AND pending <@ $3', 'consumer_lease_' || p_stream)
        USING p_group, l.seq, p_part;
    c.next_seq := c.next_seq + 1;
    PERFORM save_cursor(p_stream, p_group, c);
    PERFORM ring(ARRAY[p_stream]);
    RETURN true;
END $$;

-- Hands back whatever was claimed under p_token, for a caller that never learnt what that was: the answer was lost. Returns
-- whether there was anything.
CREATE OR REPLACE FUNCTION release_claim(p_stream bigint, p_group bigint, p_token uuid) RETURNS boolean
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
DECLARE
    hits int;
BEGIN
    IF cardinality(release(p_stream, p_group, '{0}', ARRAY[p_token], '{"{}"}')) = 0 THEN
        RETURN true;
    END IF;
    EXECUTE format(
        'WITH claimed AS (SELECT message_id FROM %1$I
                          WHERE group_id = $1 AND state = ''inflight'' AND lease_expires_at > clock_timestamp() AND lease_id = $2
                          ORDER BY message_id FOR UPDATE)
         UPDATE %1$I AS e SET state = ''ready'', due_at = clock_timestamp(), lease_id = NULL, lease_expires_at = NULL, owner = NULL
         FROM claimed WHERE e.group_id = $1 AND e.message_id = claimed.message_id', 'exception_queue_' || p_stream)
        USING p_group, p_token;
    GET DIAGNOSTICS hits = ROW_COUNT;
    RETURN hits > 0;
END $$;

-- The exception queue: one row per message of a group that failed, through its whole life. See the state table in
-- docs/exceptions.md.

-- Claims up to p_limit exceptions that are due, as one batch under p_token. With p_suspect it claims one suspect instead: a
-- message whose process died while holding it, which is run alone. Their messages are read by fetch_messages.
--
-- Under a held snapshot the rows claimed and settled before stay in the index, all with an earlier due_at. Callers that
-- claim often pass p_due_from, the smallest due_at they got last less a second, and every few seconds -infinity: every way
-- to ready sets due_at >= clock_timestamp(), so nothing hides below for long. With a bound only leases that ran out in
-- the last second are looked for, too: the rows that were in flight before lie dead below that.
--
-- In a fair group they are of these lanes, of each about as many; suspects, of which each process runs one at a time, are of any.
CREATE OR REPLACE FUNCTION take_exceptions(p_stream bigint, p_group bigint, p_token uuid, p_limit bigint, p_suspect boolean, p_due_from timestamptz, p_owner bigint DEFAULT NULL, p_lanes bigint DEFAULT -1)
RETURNS TABLE (id bigint, attempts int, delays int, first_failed_at timestamptz, due_at timestamptz, lease_duration interval, lane smallint)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    g       consumer_group;
    c       group_cursor;
    started timestamptz;
    room    bigint := CASE WHEN p_suspect THEN least(p_limit, 1) ELSE p_limit END;
    taken   int;
    chosen  bigint[];
    due     text := 'SELECT message_id FROM %1$I
             WHERE group_id = $1 AND state = ''ready'' AND losses %2$s 0 AND due_at <= $2 AND due_at >= $3
             ORDER BY due_at LIMIT $4 FOR UPDATE SKIP LOCKED';
BEGIN
    PERFORM require_read_committed();
    g := require_group(p_stream, p_group);
    PERFORM require_mode(g, 'parallel');
    IF g.paused OR g.max_in_flight IS NOT NULL OR g.rate_limit IS NOT NULL THEN
        -- Limits are kept under the cursor's lock; only groups that have one wait for it here.
        c := lock_cursor(p_stream, p_group);
        g := require_group(p_stream, p_group);
        room := (allowance(p_stream, g, c, room)).room;
        IF room = 0 THEN
            RETURN;
        END IF;
    END IF;
    PERFORM reclaim_exceptions(p_stream, g, p_due_from);
    -- In a variable: in the query itself it would be a filter, not a bound of the index scan. Taken after the
    -- reclaim, whose rows are due at its own clock, so that this call can hand them out.
    started := clock_timestamp();
    IF g.mode = 'fair' AND NOT p_suspect THEN
        chosen := due_in_turn(p_stream, p_group, coalesce(p_lanes, -1), room, coalesce(p_due_from, '-infinity'), started);
        due := 'SELECT unnest($9) AS message_id';
    END IF;
    RETURN QUERY EXECUTE format(
        'WITH due AS (' || due || ')
         UPDATE %1$I AS e SET state = ''inflight'', lease_id = $5, lease_expires_at = $6, owner = $8
         FROM due WHERE e.group_id = $1 AND e.message_id = due.message_id
         RETURNING e.message_id, e.attempts, e.delays, e.first_failed_at, e.due_at, $7, e.lane',
        'exception_queue_' || p_stream, CASE WHEN p_suspect THEN '>' ELSE '=' END)
        USING p_group, started, coalesce(p_due_from, '-infinity'), room,
              p_token, started + g.lease_duration, g.lease_duration, p_owner, chosen;
    GET DIAGNOSTICS taken = ROW_COUNT;
    IF g.rate_limit IS NOT NULL AND taken > 0 THEN
        c.paced_until := spend(g, c.paced_until, taken);
        PERFORM save_cursor(p_stream, p_group, c);
    END IF;
END $$;

-- Both in one call, for clients that know their payloads to be small. What has expired or is superseded is settled.
CREATE OR REPLACE FUNCTION claim_exceptions(p_stream bigint, p_group bigint, p_token uuid, p_limit bigint, p_suspect boolean, p_due_from timestamptz, p_type anyelement)
RETURNS TABLE (id bigint, key text, routing_key text, headers jsonb, produced_at timestamptz, payload anyelement,
               attempts int, delays int, first_failed_at timestamptz, due_at timestamptz, lease_duration interval)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
    taken   record;
    m       record;
    over    bigint[] := '{}';
    expired bigint := 0;
BEGIN
    -- Once, and by id from here on: among what is in flight the dead entries of all that ever was are found as well.
    SELECT array_agg(t.id) AS ids, array_agg(t.attempts) AS attempts, array_agg(t.delays) AS delays, array_agg(t.first_failed_at) AS first_failed_at,
           array_agg(t.due_at) AS due_at, min(t.lease_duration) AS lease_duration
        INTO taken FROM take_exceptions(p_stream, p_group, p_token, p_limit, p_suspect, p_due_from) AS t;
    -- Each is judged once: what is handed out is not settled, whatever the clock says by then.
    FOR m IN
        SELECT f.*, t.attempts, t.delays, t.first_failed_at, t.due_at
        FROM fetch_messages(p_stream, taken.ids, 9223372036854775807, p_type, p_group) AS f
        JOIN unnest(taken.ids, taken.attempts, taken.delays, taken.first_failed_at, taken.due_at) AS t(id, attempts, delays, first_failed_at, due_at) ON t.id = f.id
        ORDER BY f.id
    LOOP
        IF m.superseded OR m.remaining <= '0' THEN
            over := over || m.id;
            expired := expired + CASE WHEN m.remaining <= '0' THEN 1 ELSE 0 END;
        ELSE
            id := m.id;
            key := m.key;
            routing_key := m.routing_key;
            headers := m.headers;
            produced_at := m.produced_at;
            payload := m.payload;
            attempts := m.attempts;
            delays := m.delays;
            first_failed_at := m.first_failed_at;
            due_at := m.due_at;
            lease_duration := taken.lease_duration;
            RETURN NEXT;
        END IF;
    END LOOP;
    IF over <> '{}' THEN
        PERFORM settle_exceptions(p_stream, p_group, array_fill(p_token, ARRAY[cardinality(over)]), over,
                                  array_fill('ok'::text, ARRAY[cardinality(over)]), array_fill(NULL::text, ARRAY[cardinality(over)]));
        PERFORM count_passed_over(p_stream, p_group, expired, cardinality(over) - expired);
    END IF;
END $$;

-- From when on a caller that bounds its look at the due exceptions looks for leases that ran out.
CREATE OR REPLACE FUNCTION lapsed_since(p_now timestamptz, p_due_from timestamptz) RETURNS timestamptz
LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN p_due_from > '-infinity' THEN p_now - interval '1 second' ELSE '-infinity' END
$$;

-- Exceptions whose lease ran out can be claimed again, as suspects. A lost lease is not an attempt, unless the message
-- was alone in it: then nothing else can have killed the process.
CREATE OR REPLACE FUNCTION reclaim_exceptions(p_stream bigint, g consumer_group, p_due_from timestamptz) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    started timestamptz := clock_timestamp();
    since   timestamptz := lapsed_since(started, p_due_from);
    lapsed  bigint[];
BEGIN
    EXECUTE format(
        'SELECT array_agg(message_id) FROM (
             SELECT message_id FROM %I WHERE group_id = $1 AND state = ''inflight'' AND lease_expires_at <= $2 AND lease_expires_at >= $3
             ORDER BY lease_expires_at LIMIT 1000 FOR UPDATE SKIP LOCKED) AS x', 'exception_queue_' || p_stream)
        INTO lapsed USING g.id, started, since;
    IF lapsed IS NULL THEN
        RETURN;
    END IF;
    EXECUTE format(
        'UPDATE %I AS e SET
             state = CASE WHEN n.final THEN ''dead'' ELSE ''ready'' END,
             losses = e.losses + 1,
             attempts = n.attempts,
             due_at = CASE WHEN n.counts THEN $3 + retry_delay($1, n.attempts) ELSE $3 END,
             lease_id = NULL, lease_expires_at = NULL, owner = NULL,
             last_error = n.error,
             history = add_history(e.history, n.attempts, CASE WHEN n.final THEN ''dead'' ELSE ''lost'' END, n.error),
             dead_at = CASE WHEN n.final THEN $3 END
         FROM (SELECT message_id, losses > 0 AS counts, attempts + (losses > 0)::int AS attempts,
                      losses > 0 AND attempts + 1 >= $1.max_attempts AS final,
                      CASE WHEN losses > 0 THEN ''the lease was lost while the message ran alone: its consumer died or hung''
                           ELSE ''the lease was lost: its consumer died or hung'' END AS error
               FROM %1$I WHERE group_id = $1.id AND message_id >= (SELECT min(i) FROM unnest($2) AS i) AND message_id = ANY ($2)) AS n
         WHERE e.group_id = $1.id AND e.message_id = n.message_id', 'exception_queue_' || p_stream)
        USING g, lapsed, started;
END $$;

-- Locks claimed exceptions, lowest id first. Whoever changes several of them and waits for locks takes them in this order.
CREATE OR REPLACE FUNCTION lock_exceptions(p_stream bigint, p_group bigint, p_tokens uuid[], p_ids bigint[]) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    EXECUTE format(
        'SELECT count(*) FROM (SELECT FROM unnest($2, $3) AS u(token, id)
                               JOIN %I AS e ON e.group_id = $1 AND e.message_id = u.id AND e.lease_id = u.token
                               ORDER BY e.message_id FOR UPDATE OF e) AS x', 'exception_queue_' || p_stream)
        USING p_group, p_tokens, p_ids;
END $$;

-- Records the outcomes of claimed exceptions: 'ok' (the row goes), 'retry', 'dead' or 'delay'. Returns the ids whose
-- lease was lost; nothing about those is recorded.
--
-- lease_id is set in state 'inflight' only (a CHECK says so), and the state is not asked for: the partial index on it
-- would then seem attractive, and it holds the dead entries of every row that has ever been in flight.
CREATE OR REPLACE FUNCTION settle_exceptions(p_stream bigint, p_group bigint, p_tokens uuid[], p_ids bigint[],
    p_outcomes text[], p_errors text[], p_delays double precision[] DEFAULT '{}') RETURNS bigint[]
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
DECLARE
    g       consumer_group;
    handled bigint[];
    failed  bigint[];
BEGIN
    PERFORM require_read_committed();
    PERFORM require_outcomes(p_outcomes, '{ok,retry,dead,delay}');
    g := require_group(p_stream, p_group);
    PERFORM lock_exceptions(p_stream, p_group, p_tokens, p_ids);
    EXECUTE format(
        'WITH gone AS (
             DELETE FROM %I AS e USING unnest($2, $3, $4) AS u(token, id, outcome)
             WHERE e.group_id = $1 AND e.message_id = u.id AND e.lease_id = u.token AND u.outcome = ''ok''
             RETURNING e.message_id)
         SELECT array_agg(message_id) FROM gone', 'exception_queue_' || p_stream)
        INTO handled USING p_group, p_tokens, p_ids, p_outcomes;
    IF EXISTS (SELECT FROM unnest(p_outcomes) AS o WHERE o <> 'ok') THEN
        IF g.transactional THEN
            handled := handled || end_settled(p_stream, p_group, p_tokens, p_ids);
        END IF;
        EXECUTE format(
            'WITH kept AS (
                 UPDATE %I AS e SET
                     state = CASE WHEN is_final(u.outcome, e.attempts, $1.max_attempts) THEN ''dead'' ELSE ''ready'' END,
                     attempts = e.attempts + (u.outcome <> ''delay'')::int,
                     delays = e.delays + (u.outcome = ''delay'')::int,
                     -- It ran to its end: whatever killed its process before, it was not this message.
                     losses = 0,
                     due_at = CASE WHEN is_final(u.outcome, e.attempts, $1.max_attempts) THEN $2
                                   ELSE $2 + coalesce(asked_delay(u.delay), retry_delay($1, e.attempts + 1)) END,
                     lease_id = NULL, lease_expires_at = NULL, owner = NULL,
                     last_error = coalesce(error_text(u.error), e.last_error),
                     history = CASE WHEN u.outcome = ''delay'' THEN e.history
                                    ELSE add_history(e.history, e.attempts + 1,
                                                     CASE WHEN is_final(u.outcome, e.attempts, $1.max_attempts) THEN ''dead'' ELSE ''retry'' END, u.error) END,
                     dead_at = CASE WHEN is_final(u.outcome, e.attempts, $1.max_attempts) THEN $2 END
                 FROM unnest($3, $4, $5, $6, $7) AS u(token, id, outcome, error, delay)
                 WHERE e.group_id = $1.id AND e.message_id = u.id AND e.lease_id = u.token AND u.outcome <> ''ok''
                 RETURNING e.message_id)
             SELECT array_agg(message_id) FROM kept', 'exception_queue_' || p_stream)
            INTO failed USING g, clock_timestamp(), p_tokens, p_ids, p_outcomes, p_errors, p_delays;
    END IF;
    RETURN ARRAY(SELECT unnest(p_ids) EXCEPT SELECT unnest(handled || failed));
END $$;

-- The heartbeat of claimed exceptions. Returns the ids whose lease was lost. A row that is locked is being settled in its
-- handler's transaction: it is not waited for.
CREATE OR REPLACE FUNCTION extend_exceptions(p_stream bigint, p_group bigint, p_tokens uuid[], p_ids bigint[], p_owner bigint DEFAULT NULL) RETURNS bigint[]
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
DECLARE
    g    consumer_group;
    held bigint[];
BEGIN
    PERFORM require_read_committed();
    g := require_group(p_stream, p_group);
    EXECUTE format(
        'WITH held AS (
             SELECT e.message_id FROM unnest($2, $3) AS u(token, id)
             JOIN %1$I AS e ON e.group_id = $1 AND e.message_id = u.id AND e.lease_id = u.token
             ORDER BY e.message_id FOR UPDATE OF e SKIP LOCKED)
         UPDATE %1$I AS e SET lease_expires_at = $4, owner = $5 FROM held WHERE e.group_id = $1 AND e.message_id = held.message_id',
        'exception_queue_' || p_stream)
        USING p_group, p_tokens, p_ids, clock_timestamp() + g.lease_duration, p_owner;
    EXECUTE format(
        'SELECT array_agg(u.id) FROM unnest($2, $3) AS u(token, id)
         JOIN %I AS e ON e.group_id = $1 AND e.message_id = u.id AND e.lease_id = u.token', 'exception_queue_' || p_stream)
        INTO held USING p_group, p_tokens, p_ids;
    RETURN ARRAY(SELECT unnest(p_ids) EXCEPT SELECT unnest(held));
END $$;

-- Hands claimed exceptions back unfinished: due at once, no attempt counted. Returns the ids whose lease was lost before.
CREATE OR REPLACE FUNCTION release_exceptions(p_stream bigint, p_group bigint, p_tokens uuid[], p_ids bigint[]) RETURNS bigint[]
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
DECLARE
    held bigint[];
BEGIN
    PERFORM require_read_committed();
    PERFORM require_group(p_stream, p_group);
    PERFORM lock_exceptions(p_stream, p_group, p_tokens, p_ids);
    EXECUTE format(
        'WITH held AS (
             UPDATE %I AS e SET state = ''ready'', due_at = clock_timestamp(), lease_id = NULL, lease_expires_at = NULL, owner = NULL
             FROM unnest($2, $3) AS u(token, id)
             WHERE e.group_id = $1 AND e.message_id = u.id AND e.lease_id = u.token
             RETURNING e.message_id)
         SELECT array_agg(message_id) FROM held', 'exception_queue_' || p_stream)
        INTO held USING p_group, p_tokens, p_ids;
    RETURN ARRAY(SELECT unnest(p_ids) EXCEPT SELECT unnest(held));
END $$;

-- Looking for work: what consumers do again and again while there is none. No lock, no write.

-- fresh: ids were drawn beyond the cursor. lapsed: a lease ran out. due, suspect: exceptions can run. All false while the
-- group is paused. next_due: when the next exception comes due. owners: whose leases and exceptions are running.
-- p_due_from bounds the look at the exceptions from below; see take_exceptions.
CREATE OR REPLACE FUNCTION poll(p_stream bigint, p_group bigint, p_due_from timestamptz DEFAULT '-infinity')
RETURNS TABLE (fresh boolean, lapsed boolean, due boolean, suspect boolean, paused boolean, claimed bigint, next_due interval, owners bigint[])
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
DECLARE
    c   group_cursor := peek_cursor(p_stream, p_group);
    now timestamptz := clock_timestamp();
BEGIN
    paused := (require_group(p_stream, p_group)).paused;
    claimed := c.claimed;
    fresh := log_head(p_stream) > c.claimed;
    EXECUTE format('SELECT coalesce(bool_or(expires_at <= $3), false), coalesce(array_agg(DISTINCT owner) FILTER (WHERE owner IS NOT NULL AND expires_at > $3), ''{}'')
                    FROM %I WHERE group_id = $1 AND seq >= $2', 'consumer_lease_' || p_stream)
        INTO lapsed, owners USING p_group, c.first_open, now;
    -- Of the exceptions in flight the few that run out first: who is dead does not renew.
    EXECUTE format('SELECT EXISTS (SELECT FROM %1$I WHERE group_id = $1 AND state = ''ready'' AND losses = 0 AND due_at <= $2 AND due_at >= $3)
                        OR EXISTS (SELECT FROM %1$I WHERE group_id = $1 AND state = ''inflight'' AND lease_expires_at <= $2 AND lease_expires_at >= $4),
                           EXISTS (SELECT FROM %1$I WHERE group_id = $1 AND state = ''ready'' AND losses > 0 AND due_at <= $2),
                           (SELECT min(due_at) - $2 FROM (SELECT due_at FROM %1$I WHERE group_id = $1 AND state = ''ready'' AND losses = 0 AND due_at > $2 ORDER BY due_at LIMIT 1) AS x),
                           $5 || ARRAY(SELECT DISTINCT owner FROM (SELECT owner FROM %1$I WHERE group_id = $1 AND state = ''inflight'' AND lease_expires_at > $2
                                                                   ORDER BY lease_expires_at LIMIT 20) AS x WHERE owner IS NOT NULL)', 'exception_queue_' || p_stream)
        INTO due, suspect, next_due, owners USING p_group, now, p_due_from, lapsed_since(now, p_due_from), owners;
    IF paused THEN
        SELECT false, false, false, false, NULL INTO fresh, lapsed, due, suspect, next_due;
    END IF;
    RETURN NEXT;
END $$;

-- The look of a whole process, at all its groups in one statement. A group is looked at in full where p_deep says so; else only
-- for fresh messages, which takes no more than its stream's sequence as long as that is not beyond p_known, the claimed
-- that was seen last.
--
-- One row for each group that was looked at in full or has something fresh. gone: the group or its stream was dropped. missing: those of its
-- owners that hold no lock (owner.sql), but for p_self, the caller's own number; looked for only if that is given.
--
-- p_backend: the process that the caller takes for its own; where another one answers, that is refused.
--
-- Refused where nothing can be written, as it is after a fail-over: whoever went on looking there would never see a message again.
CREATE OR REPLACE FUNCTION watch(p_streams bigint[], p_groups bigint[], p_known bigint[], p_due_from timestamptz[], p_deep boolean[], p_self bigint DEFAULT NULL, p_backend int DEFAULT NULL)
RETURNS TABLE (group_id bigint, gone boolean, fresh boolean, lapsed boolean, due boolean, suspect boolean, paused boolean, claimed bigint, next_due interval, owners bigint[], missing bigint[])
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET jit = off AS $$
#variable_conflict use_column
DECLARE
    w record;
    p record;
    c group_cursor;
BEGIN
    IF current_setting('transaction_read_only')::boolean THEN
        RAISE EXCEPTION 'nothing can be consumed from a read-only server' USING ERRCODE = 'read_only_sql_transaction';
    END IF;
    IF p_backend <> pg_backend_pid() THEN
        RAISE EXCEPTION 'this is not the session it was: a pooler has changed it' USING ERRCODE = 'SQ011';
    END IF;
    -- MATERIALIZED: the sequences are read in one go, before anything is looked at closely.
    FOR w IN
        WITH head AS MATERIALIZED (
            SELECT u.*, s.id IS NULL AS gone, pg_sequence_last_value(to_regclass(format('%I.%I', current_schema(), 'message_log_' || u.stream || '_id_seq'))) AS head
            FROM unnest(p_streams, p_groups, p_known, p_due_from, p_deep) AS u(stream, id, known, due_from, deep)
            LEFT JOIN consumer_group AS s ON s.id = u.id)
        SELECT * FROM head WHERE deep OR head > known OR gone
    LOOP
        IF w.gone THEN
            RETURN QUERY SELECT w.id, true, false, false, false, false, false, 0::bigint, NULL::interval, '{}'::bigint[], '{}'::bigint[];
            CONTINUE;
        END IF;
        IF NOT w.deep THEN
            c := peek_cursor(w.stream, w.id);
            RETURN QUERY SELECT w.id, false, w.head > c.claimed, false, false, false, NULL::boolean, c.claimed, NULL::interval, NULL::bigint[], '{}'::bigint[];
            CONTINUE;
        END IF;
        SELECT * INTO p FROM poll(w.stream, w.id, coalesce(w.due_from, '-infinity'));
        p.owners := array_remove(p.owners, p_self);
        RETURN QUERY SELECT w.id, false, p.fresh, p.lapsed, p.due, p.suspect, p.paused, p.claimed, p.next_due, p.owners,
                            CASE WHEN p_self IS NOT NULL AND cardinality(p.owners) > 0 THEN missing_owners(p.owners) ELSE '{}' END;
    END LOOP;
END $$;

-- Dead letters: what an operator does about them.

-- Puts dead letters of a group back to work: attempts start again, the history stays. p_ids NULL means all, lowest id
-- first, at most p_limit of them. Returns the ids; those that are not dead (any more) are not among them, so doing it
-- twice is harmless. The message itself stays in the log: other groups never see it.
CREATE OR REPLACE FUNCTION redrive(p_stream bigint, p_group bigint, p_ids bigint[] DEFAULT NULL, p_limit bigint DEFAULT 10000) RETURNS bigint[]
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
DECLARE
    g   consumer_group := require_group(p_stream, p_group);
    ids bigint[];
BEGIN
    IF g.mode = 'ordered' THEN
        -- In its place among the unresolved messages of its key.
        PERFORM lock_cursor(p_stream, p_group);
    END IF;
    ids := lock_dead(p_stream, p_group, p_ids, p_limit);
    EXECUTE format(
        'UPDATE %I SET state = ''ready'', attempts = 0, redrives = redrives + 1, due_at = clock_timestamp(), dead_at = NULL,
                history = add_history(history, 0, ''redriven'', NULL)
         WHERE group_id = $1 AND message_id >= (SELECT min(i) FROM unnest($2) AS i) AND message_id = ANY ($2)', 'exception_queue_' || p_stream)
        USING p_group, ids;
    IF g.mode = 'ordered' THEN
        PERFORM line_up(p_stream, p_group, ids);
    END IF;
    PERFORM audit_dead('redrive', p_stream, p_group, ids);
    RETURN ids;
END $$;

-- Gives dead letters up for good: the group counts them as resolved, the audit keeps their ids.
CREATE OR REPLACE FUNCTION discard(p_stream bigint, p_group bigint, p_ids bigint[] DEFAULT NULL, p_limit bigint DEFAULT 10000) RETURNS bigint[]
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
DECLARE
    ids bigint[] := lock_dead(p_stream, p_group, p_ids, p_limit);
BEGIN
    EXECUTE format('DELETE FROM %I WHERE group_id = $1 AND message_id >= (SELECT min(i) FROM unnest($2) AS i) AND message_id = ANY ($2)', 'exception_queue_' || p_stream) USING p_group, ids;
    EXECUTE format('DELETE FROM %I WHERE group_id = $1 AND message_id >= (SELECT min(i) FROM unnest($2) AS i) AND message_id = ANY ($2)', 'consumer_done_' || p_stream) USING p_group, ids;
    PERFORM audit_dead('discard', p_stream, p_group, ids);
    RETURN ids;
END $$;

CREATE OR REPLACE FUNCTION lock_dead(p_stream bigint, p_group bigint, p_ids bigint[], p_limit bigint) RETURNS bigint[]
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    ids bigint[];
BEGIN
    PERFORM require_group(p_stream, p_group);
    PERFORM require_limit(p_limit);
    -- In id order and skipping what another operator has in hand, so that two of them never wait for each other.
    EXECUTE format(
        'SELECT coalesce(array_agg(message_id ORDER BY message_id), ''{}'') FROM (
             SELECT message_id FROM %I WHERE group_id = $1 AND state = ''dead'' AND ($2 IS NULL OR message_id = ANY ($2))
             ORDER BY message_id LIMIT $3 FOR UPDATE SKIP LOCKED) AS x', 'exception_queue_' || p_stream)
        INTO ids USING p_group, p_ids, p_limit;
    RETURN ids;
END $$;

CREATE OR REPLACE FUNCTION audit_dead(p_action text, p_stream bigint, p_group bigint, p_ids bigint[]) RETURNS void
LANGUAGE sql VOLATILE AS $$
    INSERT INTO audit (action, stream_name, group_name, detail)
        SELECT p_action, s.name, g.name, jsonb_build_object('count', cardinality(p_ids), 'ids', p_ids)
        FROM consumer_group AS g JOIN stream AS s ON s.id = g.stream_id
        WHERE g.id = p_group AND s.id = p_stream AND cardinality(p_ids) > 0
$$;

-- Which payloads of a refused batch the server would not take, and why: their places (from 0) and its messages.
-- Only asked after a batch was refused; nothing is stored.
CREATE OR REPLACE FUNCTION invalid_payloads(p_payload_type text, p_payloads bytea[]) RETURNS TABLE (place int, reason text)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
DECLARE
    payload text;
    context text;
BEGIN
    FOR i IN 1 .. coalesce(array_length(p_payloads, 1), 0) LOOP
        BEGIN
            IF p_payload_type <> 'bytea' THEN
                payload := convert_from(p_payloads[i], 'UTF8');
                IF p_payload_type = 'json' THEN
                    PERFORM payload::json;
                ELSIF p_payload_type = 'jsonb' THEN
                    PERFORM payload::jsonb;
                END IF;
            END IF;
        EXCEPTION WHEN data_exception OR program_limit_exceeded OR statement_too_complex OR out_of_memory OR internal_error THEN
            GET STACKED DIAGNOSTICS reason = MESSAGE_TEXT, context = PG_EXCEPTION_DETAIL;
            place := i - 1;
            reason := reason || CASE WHEN context <> '' THEN ': ' || context ELSE '' END;
            RETURN NEXT;
        END;
    END LOOP;
END $$;

-- What became of a commit whose answer never came.
--
-- A producer knows of its transaction, before it sends COMMIT, the xid, the backend's pid, and (id, produced_at) of each
-- row. The status of the xid only tells when the transaction has ended. It must not tell how: after a crash or a failover
-- the same xid, and the same id, may have been given to somebody else. So the rows decide, by id and the microsecond of
-- their insert together.

-- Whether p_xid still runs. A transaction whose number lies in the future (22023, after a crash or a failover) or is
-- forgotten (NULL) does not.
CREATE OR REPLACE FUNCTION transaction_runs(p_xid xid8) RETURNS boolean
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    RETURN coalesce(pg_xact_status(p_xid) = 'in progress', false);
EXCEPTION WHEN invalid_parameter_value THEN
    RETURN false;
END $$;

-- Ends the session p_pid if it is the one that p_xid runs in: its client is gone. Without the privilege to, it goes on.
-- So does one that waits for a synchronous standby: ended, it would count as stored before the standby has it.
CREATE OR REPLACE FUNCTION terminate_transaction(p_xid xid8, p_pid int) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    IF EXISTS (SELECT FROM pg_locks
               WHERE locktype = 'transactionid' AND transactionid = p_xid::xid AND pid = p_pid
                 AND mode = 'ExclusiveLock' AND granted)
       AND NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = p_pid AND wait_event = 'SyncRep') THEN
        PERFORM pg_terminate_backend(p_pid);
    END IF;
EXCEPTION WHEN insufficient_privilege THEN
    NULL;
END $$;

-- A transaction that stored nothing but delayed messages is told by its witness, a row of message_idempotency_<n> (produce.sql), and p_produced_at
-- has the one time of that.
--
-- Returns 'standby' or 'in_progress' (ask again), 'stored', 'missing' (it never will be stored), or 'gone': the partition
-- that the rows were in, if they were stored, is no longer part of the log. p_ids may be some of the transaction's rows.
-- Runs with the caller's privileges, as it may end a session.
CREATE OR REPLACE FUNCTION resolve_commit(p_stream bigint, p_xid text, p_pid int, p_ids bigint[], p_produced_at timestamptz[], p_terminate boolean, p_witness_1 bigint DEFAULT NULL, p_witness_2 bigint DEFAULT NULL) RETURNS text
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
DECLARE
    s     stream;
    hits  bigint;
    parts bigint[];
BEGIN
    IF pg_is_in_recovery() THEN
        RETURN 'standby';
    END IF;
    -- One snapshot for all statements would miss the rows of a transaction that ends between them.
    PERFORM require_read_committed();
    IF transaction_runs(p_xid::xid8) THEN
        IF p_terminate THEN
            PERFORM terminate_transaction(p_xid::xid8, p_pid);
        END IF;
        RETURN 'in_progress';
    END IF;

    -- In a later statement than the status: what that transaction stored is visible now.
    s := require_stream(p_stream);
    IF p_witness_1 IS NOT NULL THEN
        EXECUTE format('SELECT count(*) FROM %I WHERE hash_1 = $1 AND hash_2 = $2 AND sent_at = $3', 'message_idempotency_' || p_stream)
            INTO hits USING p_witness_1, p_witness_2, p_produced_at[1];
        RETURN CASE WHEN hits > 0 THEN 'stored' ELSE 'missing' END;
    END IF;
    EXECUTE format(
        'SELECT count(*) FROM unnest($1, $2) AS u(id, produced_at)
         CROSS JOIN LATERAL (SELECT FROM %I WHERE id = u.id AND id >= $3 AND id <= $4 AND produced_at = u.produced_at LIMIT 1) AS m',
        'message_log_' || p_stream)
        INTO hits USING p_ids, p_produced_at, (SELECT min(i) FROM unnest(p_ids) AS i), (SELECT max(i) FROM unnest(p_ids) AS i);
    IF hits = cardinality(p_ids) THEN
        RETURN 'stored';
    END IF;

    parts := ARRAY(SELECT substring(c.relname FROM '_p(\d+)$')::bigint
                   FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
                   WHERE i.inhparent = to_regclass(format('%I', 'message_log_' || p_stream)) AND NOT i.inhdetachpending);
    -- Partitions go from the front. One that is missing at the end was never there on this server.
    IF EXISTS (SELECT FROM (SELECT i / s.partition_size AS part FROM unnest(p_ids) AS i) AS p
               WHERE part <> ALL (parts) AND part < (SELECT max(x) FROM unnest(parts) AS x)) THEN
        RETURN CASE WHEN hits > 0 THEN 'stored' ELSE 'gone' END;
    END IF;
    IF hits > 0 THEN
        RAISE EXCEPTION 'only % of % messages of one transaction are in the log of stream %', hits, cardinality(p_ids), p_stream
            USING ERRCODE = 'data_corrupted', HINT = 'Were messages deleted by hand?';
    END IF;
    RETURN 'missing';
END $$;

-- What people read in psql: cursors, leases, exceptions and dead letters by the names of stream and group.
--
-- The tables exist once per stream, so each view is a function that goes through the streams; the functions take a
-- stream and a group name to look at less (NULL: all), which the views cannot push down.
-- Without jit: where a sequential scan is the only way (a sequence), ruling it out makes the plan look dear enough to be
-- compiled before 18, and looking at eight groups took 330 ms instead of 10.

-- Makes a view, and makes one anew only if that changes it: that waits for every transaction that has read it, and whoever reads
-- it afterwards waits with it.
CREATE OR REPLACE FUNCTION make_view(p_name text, p_query text) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    installed regclass := to_regclass(quote_ident(p_name));
    same      boolean  := false;
BEGIN
    IF installed IS NOT NULL THEN
        EXECUTE 'CREATE VIEW view_made_anew AS ' || p_query;
        same := pg_get_viewdef(installed) = pg_get_viewdef('view_made_anew'::regclass);
        DROP VIEW view_made_anew;
    END IF;
    IF NOT same THEN
        EXECUTE format('CREATE OR REPLACE VIEW %I AS %s', p_name, p_query);
    END IF;
END $$;

CREATE OR REPLACE FUNCTION list_cursors(p_stream text DEFAULT NULL, p_group text DEFAULT NULL)
RETURNS TABLE (stream text, consumer_group text, stream_id bigint, group_id bigint, claimed bigint, resolved bigint, head bigint, lag bigint,
               open_leases bigint, ready bigint, inflight bigint, deferred bigint, dead bigint, paused boolean, max_in_flight int, rate_limit double precision, mode text, expired bigint, superseded bigint)
LANGUAGE plpgsql STABLE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    s record;
BEGIN
    FOR s IN SELECT * FROM stream WHERE name = p_stream OR p_stream IS NULL ORDER BY name LOOP
        -- Per group and newest generation first: anything that looked at the tables as a whole would walk dead rows.
        RETURN QUERY EXECUTE format(
            'SELECT $1, g.name, $2, g.id, c.claimed, least(l.lowest - 1, c.claimed), h.head, greatest(h.head - c.claimed, 0),
                    l.open, e.ready, e.inflight, e.deferred, e.dead, g.paused, g.max_in_flight, g.rate_limit, g.mode, coalesce(t.expired, 0), coalesce(t.superseded, 0)
             FROM consumer_group AS g
             LEFT JOIN group_tally AS t ON t.group_id = g.id
             CROSS JOIN (SELECT CASE WHEN is_called THEN last_value ELSE 0 END AS head FROM %4$I) AS h
             CROSS JOIN LATERAL (SELECT claimed, first_open FROM %1$I WHERE group_id = g.id ORDER BY generation DESC LIMIT 1) AS c
             CROSS JOIN LATERAL (SELECT min(lower(pending)) AS lowest, count(*) AS open FROM %2$I WHERE group_id = g.id AND seq >= c.first_open) AS l
             CROSS JOIN LATERAL (SELECT count(*) FILTER (WHERE state = ''ready'') AS ready, count(*) FILTER (WHERE state = ''inflight'') AS inflight, count(*) FILTER (WHERE state = ''deferred'') AS deferred,
                                        count(*) FILTER (WHERE state = ''dead'') AS dead FROM %3$I WHERE group_id = g.id) AS e
             WHERE g.stream_id = $2 AND (g.name = $3 OR $3 IS NULL) ORDER BY g.name',
            'consumer_group_cursor_' || s.id, 'consumer_lease_' || s.id, 'exception_queue_' || s.id, 'message_log_' || s.id || '_id_seq')
            USING s.name, s.id, p_group;
    END LOOP;
END $$;
SELECT make_view('consumer_group_cursor', 'SELECT * FROM list_cursors()');

CREATE OR REPLACE FUNCTION list_leases(p_stream text DEFAULT NULL, p_group text DEFAULT NULL)
RETURNS TABLE (stream text, consumer_group text, seq bigint, token uuid, pending int8multirange, expires_at timestamptz, reclaims int, owner bigint)
LANGUAGE plpgsql STABLE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    s record;
BEGIN
    FOR s IN SELECT * FROM stream WHERE name = p_stream OR p_stream IS NULL ORDER BY name LOOP
        RETURN QUERY EXECUTE format(
            'SELECT $1, g.name, l.seq, l.token, l.pending, l.expires_at, l.reclaims, l.owner
             FROM consumer_group AS g
             CROSS JOIN LATERAL (SELECT first_open FROM %I WHERE group_id = g.id ORDER BY generation DESC LIMIT 1) AS c
             CROSS JOIN LATERAL (SELECT * FROM %I WHERE group_id = g.id AND seq >= c.first_open) AS l
             WHERE g.stream_id = $2 AND (g.name = $3 OR $3 IS NULL) ORDER BY g.name, l.seq',
            'consumer_group_cursor_' || s.id, 'consumer_lease_' || s.id)
            USING s.name, s.id, p_group;
    END LOOP;
END $$;
SELECT make_view('consumer_lease', 'SELECT * FROM list_leases()');

CREATE OR REPLACE FUNCTION list_exceptions(p_stream text DEFAULT NULL, p_group text DEFAULT NULL, p_state text DEFAULT NULL,
    p_after bigint DEFAULT 0, p_limit bigint DEFAULT 9223372036854775807)
RETURNS TABLE (stream text, consumer_group text, message_id bigint, state text, attempts int, delays int, losses int, redrives int,
               due_at timestamptz, lease_expires_at timestamptz, key text, last_error text, history jsonb, first_failed_at timestamptz, dead_at timestamptz)
LANGUAGE plpgsql STABLE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    s record;
BEGIN
    FOR s IN SELECT * FROM stream WHERE name = p_stream OR p_stream IS NULL ORDER BY name LOOP
        RETURN QUERY EXECUTE format(
            'SELECT $1, g.name, e.message_id, e.state, e.attempts, e.delays, e.losses, e.redrives,
                    e.due_at, e.lease_expires_at, e.key, e.last_error, e.history, e.first_failed_at, e.dead_at
             FROM consumer_group AS g
             CROSS JOIN LATERAL (SELECT * FROM %I WHERE group_id = g.id AND message_id > $4 %s ORDER BY message_id LIMIT $5) AS e
             WHERE g.stream_id = $2 AND (g.name = $3 OR $3 IS NULL) ORDER BY g.name, e.message_id',
            'exception_queue_' || s.id, CASE WHEN p_state IS NOT NULL THEN format('AND state = %L', p_state) END)
            USING s.name, s.id, p_group, p_after, p_limit;
    END LOOP;
END $$;
SELECT make_view('exception_queue', 'SELECT * FROM list_exceptions()');
SELECT make_view('dead_letter', $$
    SELECT stream, consumer_group, message_id, attempts, losses, redrives, key, last_error, history, first_failed_at, dead_at
    FROM list_exceptions(p_state => 'dead')$$);

-- Producing messages that carry more than an INSERT can say: idempotency keys, delays, times to expire. What carries none is a plain INSERT
-- into message_log_<n>, and costs nothing of this.

-- Makes produce_<n>, which is called for each such batch and so keeps its plans (see generated.sql). It takes the columns of the batch as arrays of one
-- length (or empty: all NULL; delays are seconds, and what expires in so many seconds does so counted from when it is due) and returns one row per message, in order: its id, when it was written, whether it is
-- a duplicate, and then whether its payload differs from the one that is stored; whether it is delayed, so that the id is one of
-- message_delayed_<n>, and until when.
--
-- p_expected, in a compacted stream: the ids that the keys' current values have to have, see require_latest (current.sql). Not for messages that are
-- delayed or have idempotency keys.
--
-- witness_1 and witness_2, of a message that was delayed, are the hashes of a row of message_idempotency_<n> that was written in this
-- transaction, at written_at: the message itself may have gone into the log by the time that somebody asks what became of the commit
-- (commit.sql). It is the row of its key, or else one made for the purpose, under a key that nobody has.
--
-- Invariants:
--   * Whoever has a key's row in message_idempotency_<n> has its message: both are written in one transaction, the row first.
--   * The log is locked before an id is drawn: a writer without the lock would not be seen by the fence.
--   * Ids are drawn in the order of the batch, rows of keys are written in the order of their hashes: two batches of one
--     statement each never wait for each other in a circle.
-- A key that another open transaction has written is waited for: whether it is a duplicate only shows when that ends.
--
-- Keys are kept as two hashes of 64 bits. Collisions of keys that nobody made for the purpose do not occur.
-- Joins are look-ups per row, by LATERAL with LIMIT: on a table that was just filled the planner would rather read it all.
CREATE OR REPLACE FUNCTION make_produce_function(p_stream bigint) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $make$
DECLARE
    s stream := require_stream(p_stream);
BEGIN
    EXECUTE format(dollar_quoted($text$
        CREATE OR REPLACE FUNCTION %2$I(p_keys text[], p_routing_keys text[], p_headers text[], p_payloads %6$s[], p_idempotency_keys text[],
            p_deliver_at timestamptz[], p_delays float8[], p_expires_at timestamptz[], p_expires_in float8[], p_expected bigint[] DEFAULT '{}')
        RETURNS TABLE (id bigint, written_at timestamptz, duplicate boolean, differs boolean, deliver_at timestamptz, delayed boolean, witness_1 bigint, witness_2 bigint)
        LANGUAGE plpgsql VOLATILE SET enable_seqscan = off SET jit = off AS $$
        #variable_conflict use_column
        DECLARE
            begun   timestamptz := clock_timestamp();
            now     timestamptz;
            oldest  timestamptz;
            -- By the place in the batch: when it is due (NULL: now), the hashes of the key (NULL: no key), of the payload, the id that was
            -- drawn for it, and the id and the payload's hash that are stored under the key. Ids of delayed messages are negative here, and
            -- in message_idempotency_<n>.
            due     timestamptz[];
            expires timestamptz[];
            hashes1 bigint[];
            hashes2 bigint[];
            sums    bigint[];
            ids     bigint[];
            known   bigint[];
            stored  bigint[];
            wanted  bigint;
            made    bigint;
            rounds  int := 0;
            marker  uuid;
        BEGIN
            IF EXISTS (SELECT FROM unnest(ARRAY[cardinality(p_keys), cardinality(p_routing_keys), cardinality(p_headers), cardinality(p_idempotency_keys), cardinality(p_deliver_at),
                                                cardinality(p_delays), cardinality(p_expires_at), cardinality(p_expires_in), cardinality(p_expected)]) AS n WHERE n NOT IN (0, cardinality(p_payloads))) THEN
                PERFORM %1$I.require_that(false, 'the arrays of a batch are of one length, or empty', 'Give each message a place in each of them: NULL for none.');
            END IF;
            IF cardinality(p_expected) > 0 THEN
                PERFORM %1$I.require_latest(%5$s, p_keys, p_expected);
            END IF;
            LOCK TABLE ONLY %1$I.%3$I IN ROW EXCLUSIVE MODE;
            SELECT begun - s.idempotency_window INTO oldest FROM %1$I.stream AS s WHERE s.id = %5$s;
            SELECT array_agg(hashtextextended(u.k COLLATE "C", 0)), array_agg(hashtextextended(u.k COLLATE "C", 1)),
                   array_agg(CASE WHEN u.k IS NOT NULL THEN coalesce(hashtextextended(%7$s COLLATE "C", 0), 0) END)
                INTO hashes1, hashes2, sums FROM unnest(p_idempotency_keys, p_payloads) AS u(k, payload);
            due := ARRAY(SELECT CASE WHEN d.at > begun THEN d.at END
                         FROM (SELECT coalesce(u.at, begun + make_interval(secs => u.delay)) AS at FROM unnest(p_deliver_at, p_delays) AS u(at, delay)) AS d);
            expires := ARRAY(SELECT coalesce(u.at, coalesce(u.due, begun) + make_interval(secs => u.after)) FROM unnest(p_expires_at, p_expires_in, due) AS u(at, after, due));
            LOOP
                SELECT array_agg(x.message_id), array_agg(x.payload_hash) INTO known, stored
                FROM unnest(hashes1, hashes2) AS u(h1, h2)
                LEFT JOIN LATERAL (SELECT i.message_id, i.payload_hash FROM %1$I.%4$I AS i
                                   WHERE i.hash_1 = u.h1 AND i.hash_2 = u.h2 AND i.sent_at > oldest LIMIT 1) AS x ON true;
                -- Of each key that is not known the first, and in the first round all without a key.
                SELECT array_agg(CASE WHEN n.takes THEN coalesce(n.id, CASE WHEN n.due IS NULL THEN nextval(%8$L) ELSE -nextval(%10$L) END) ELSE n.id END), count(n.h1) FILTER (WHERE n.known IS NULL)
                    INTO ids, wanted
                FROM (SELECT u.id, u.due, u.h1, u.known, u.h1 IS NULL OR u.known IS NULL AND row_number() OVER (PARTITION BY u.h1, u.h2 ORDER BY u.n) = 1 AS takes
                      FROM unnest(ids, due, hashes1, hashes2, known) WITH ORDINALITY AS u(id, due, h1, h2, known, n) ORDER BY u.n) AS n;
                EXIT WHEN wanted = 0;
                -- One that has outlived the window makes place. One that was written meanwhile stays.
                INSERT INTO %1$I.%4$I AS i (hash_1, hash_2, message_id, payload_hash, sent_at)
                SELECT u.h1, u.h2, u.id, u.sum, begun FROM unnest(hashes1, hashes2, ids, sums, known) AS u(h1, h2, id, sum, known)
                WHERE u.h1 IS NOT NULL AND u.id IS NOT NULL AND u.known IS NULL ORDER BY u.h1, u.h2
                ON CONFLICT (hash_1, hash_2) DO UPDATE SET message_id = EXCLUDED.message_id, payload_hash = EXCLUDED.payload_hash, sent_at = EXCLUDED.sent_at
                    WHERE i.sent_at <= oldest;
                GET DIAGNOSTICS made = ROW_COUNT;
                IF made = wanted THEN
                    SELECT array_agg(coalesce(u.known, u.id)) INTO known FROM unnest(known, ids) AS u(known, id);
                    EXIT;
                END IF;
                -- Somebody was faster, or the batch has a key twice: look again, in a later statement, which sees them.
                rounds := rounds + 1;
                IF rounds > 100 THEN
                    RAISE EXCEPTION 'rows of message_idempotency_%5$s go as fast as they come' USING ERRCODE = 'serialization_failure', HINT = 'Send the messages again.';
                END IF;
            END LOOP;

            IF cardinality(due) > 0 THEN
                INSERT INTO %1$I.%9$I (deliver_at, id, key, routing_key, headers, sent_at, expires_at, payload) OVERRIDING SYSTEM VALUE
                SELECT u.due, -u.id, u.key, u.routing_key, u.headers::jsonb, begun, u.expires, u.payload
                FROM unnest(ids, hashes1, known, due, expires, p_keys, p_routing_keys, p_headers, p_payloads) AS u(id, h1, known, due, expires, key, routing_key, headers, payload)
                WHERE u.id < 0 AND (u.h1 IS NULL OR u.id = u.known);
                IF EXISTS (SELECT FROM unnest(ids, hashes1) AS u(id, h1) WHERE u.id < 0 AND u.h1 IS NULL) THEN
                    marker := gen_random_uuid();
                    INSERT INTO %1$I.%4$I (hash_1, hash_2, message_id, payload_hash, sent_at)
                    VALUES (hashtextextended(marker::text, 0), hashtextextended(marker::text, 1), 0, 0, begun);
                END IF;
            END IF;
            now := clock_timestamp();
            INSERT INTO %1$I.%3$I (id, key, routing_key, headers, produced_at, expires_at, payload) OVERRIDING SYSTEM VALUE
            SELECT u.id, u.key, u.routing_key, u.headers::jsonb, now, u.expires, u.payload
            FROM unnest(ids, hashes1, known, expires, p_keys, p_routing_keys, p_headers, p_payloads) AS u(id, h1, known, expires, key, routing_key, headers, payload)
            WHERE u.id > 0 AND (u.h1 IS NULL OR u.id = u.known);
            RETURN QUERY
            SELECT abs(x.id), CASE WHEN x.id < 0 THEN begun ELSE now END, x.duplicate, x.differs, x.due, x.id < 0,
                   CASE WHEN x.id < 0 THEN coalesce(x.h1, hashtextextended(marker::text, 0)) END, CASE WHEN x.id < 0 THEN coalesce(x.h2, hashtextextended(marker::text, 1)) END
            FROM (SELECT coalesce(u.known, u.id) AS id, u.h1 IS NOT NULL AND u.id IS DISTINCT FROM u.known AS duplicate, coalesce(u.stored <> u.sum, false) AS differs,
                         u.due, u.h1, u.h2
                  FROM unnest(ids, hashes1, hashes2, known, stored, sums, due) AS u(id, h1, h2, known, stored, sum, due)) AS x;
        END $$
        $text$), current_schema(), 'produce_' || p_stream, 'message_log_' || p_stream, 'message_idempotency_' || p_stream, p_stream, s.payload_type,
        CASE s.payload_type WHEN 'bytea' THEN 'encode(u.payload, ''hex'')' ELSE 'u.payload::text' END, format('%I.%I', current_schema(), 'message_log_' || p_stream || '_id_seq'),
        'message_delayed_' || p_stream, format('%I.%I', current_schema(), 'message_delayed_' || p_stream || '_id_seq'));
END $make$;

-- Sends one message, for people and programs that speak SQL: the payload in its text form, whatever the stream stores. Returns the message's id, whether
-- it is delayed, so that the id is one for cancel_delayed, whether a message with its idempotency key was there before, and then whether that has another payload.
CREATE OR REPLACE FUNCTION produce(p_stream text, p_payload text, p_key text DEFAULT NULL, p_routing_key text DEFAULT NULL, p_headers jsonb DEFAULT NULL,
    p_idempotency_key text DEFAULT NULL, p_delay interval DEFAULT NULL, p_deliver_at timestamptz DEFAULT NULL,
    p_expires_in interval DEFAULT NULL, p_expires_at timestamptz DEFAULT NULL, p_expect_latest bigint DEFAULT NULL)
RETURNS TABLE (id bigint, delayed boolean, duplicate boolean, differs boolean)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
DECLARE
    s stream;
BEGIN
    SELECT * INTO s FROM stream WHERE name = p_stream;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'there is no stream %', quote_ident(p_stream)
            USING ERRCODE = 'SQ001', HINT = 'Table stream lists those that exist.';
    END IF;
    IF p_idempotency_key = '' OR octet_length(p_idempotency_key) > 1024 THEN
        RAISE EXCEPTION 'an idempotency key takes 1 to 1024 bytes, this one has %', octet_length(p_idempotency_key)
            USING ERRCODE = 'SQ004', HINT = 'Choose a shorter one, or one that is not empty.';
    END IF;
    PERFORM require_that(p_payload IS NOT NULL OR s.compacted, format('a message of stream %I has a payload', s.name), 'Only in a compacted stream NULL removes a key.');
    PERFORM require_that(p_key IS NOT NULL OR NOT s.compacted, format('a message of compacted stream %I has a key', s.name), 'Say which value it is.');
    PERFORM require_that(coalesce(octet_length(p_key), 0) <= 1024, format('a key takes at most 1024 bytes, this one has %s', octet_length(p_key)), 'Choose a shorter one.');
    PERFORM require_that(coalesce(octet_length(p_routing_key), 0) <= 255, format('a routing key takes at most 255 bytes, this one has %s', octet_length(p_routing_key)), 'Choose a shorter one.');
    PERFORM require_that(coalesce(jsonb_typeof(p_headers), 'object') = 'object', format('headers are a JSON object, not %s', jsonb_typeof(p_headers)), 'Write {"name": "value"}.');
    PERFORM require_that(p_delay IS NULL OR p_deliver_at IS NULL, 'a message is due after a delay or at a time, not both', 'Give one of p_delay and p_deliver_at.');
    PERFORM require_that(p_expires_in IS NULL OR p_expires_at IS NULL, 'a message expires after a time or at a time, not both', 'Give one of p_expires_in and p_expires_at.');
    PERFORM require_that(coalesce(p_delay, '0') BETWEEN '0' AND '200000 years' AND coalesce(p_expires_in, '0') BETWEEN '0' AND '200000 years',
                         'a delay, and a time to expire, is 0 to 200000 years long', 'Leave it out for none.');
    PERFORM require_that(coalesce(p_deliver_at, '-infinity') < 'infinity', 'a message that is due at infinity would never be delivered', 'Give the time at which it is to be.');
    IF p_expect_latest IS NOT NULL AND (p_idempotency_key IS NOT NULL OR p_delay IS NOT NULL OR p_deliver_at IS NOT NULL) THEN
        RAISE EXCEPTION 'a message that expects what is latest is neither delayed nor has it an idempotency key'
            USING ERRCODE = 'SQ004', HINT = 'Sent twice, it is refused the second time.';
    END IF;
    RETURN QUERY EXECUTE format(
        'SELECT p.id, p.delayed, p.duplicate, p.differs FROM %I(ARRAY[$1], ARRAY[$2], ARRAY[$3], ARRAY[$4::%s], ARRAY[$5], ARRAY[$6], ARRAY[$7], ARRAY[$8], ARRAY[$9], CASE WHEN $10 IS NULL THEN ''{}'' ELSE ARRAY[$10] END) AS p',
        'produce_' || s.id, s.payload_type)
        USING p_key, p_routing_key, p_headers::text, p_payload, p_idempotency_key,
              p_deliver_at, extract(epoch FROM p_delay)::float8, p_expires_at, extract(epoch FROM p_expires_in)::float8, p_expect_latest;
END $$;

-- Removes keys that have outlived the stream's window, the oldest first, at most p_limit. p_from bounds the look from below: where it
-- ended the last time, so that rows which are dead and cannot be removed yet are not read again and again. Returns how many were removed, and
-- from where on to go on; nothing while another does the same.
--
-- Rows that are locked are passed over, so that it waits for nobody.
CREATE OR REPLACE FUNCTION expire_idempotency_keys(p_stream bigint, p_from timestamptz DEFAULT '-infinity', p_limit bigint DEFAULT 10000) RETURNS TABLE (removed bigint, upto timestamptz)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
DECLARE
    s      stream := require_stream(p_stream);
    oldest timestamptz := clock_timestamp() - s.idempotency_window;
BEGIN
    PERFORM require_limit(p_limit);
    IF NOT pg_try_advisory_xact_lock(hashtextextended('sqlstreams expire keys ' || current_schema(), p_stream)) THEN
        RETURN;
    END IF;
    EXECUTE format(
        'WITH old AS MATERIALIZED (SELECT hash_1, hash_2, sent_at FROM %1$I WHERE sent_at >= $1 AND sent_at <= $2 ORDER BY sent_at LIMIT $3 FOR UPDATE SKIP LOCKED),
              gone AS (DELETE FROM %1$I AS i USING old WHERE i.hash_1 = old.hash_1 AND i.hash_2 = old.hash_2 RETURNING i.sent_at)
         SELECT count(*), max(sent_at) FROM gone', 'message_idempotency_' || p_stream)
        INTO removed, upto USING p_from, oldest, p_limit;
    upto := coalesce(upto, p_from);
    RETURN NEXT;
END $$;

-- Messages that are not due yet: they wait in message_delayed_<n>, beside the log, in the order in which they come due. Then a mover puts
-- them into the log, once for all groups: from there on they are messages like others, with the id, the order and the
-- produced_at that they get now.
--
-- Any consumer is the mover. It never moves in a transaction in which it claims: the claim would wait for its own writer.

-- Moves what is due, in that order, at most p_limit messages. p_from and p_from_id bound the look from below: what was moved before may
-- have left dead rows. Returns how many were moved, the last of them by what it waited for, and the time until the next
-- one is due. busy: another does the same. no_room: the log lacks partitions for so many (ensure_partitions).
--
-- Rows that are locked are passed over: somebody cancels them. SECURITY DEFINER: a consumer need not be allowed to produce.
CREATE OR REPLACE FUNCTION move_delayed(p_stream bigint, p_from timestamptz DEFAULT '-infinity', p_from_id bigint DEFAULT 0, p_limit bigint DEFAULT 1000)
RETURNS TABLE (moved bigint, upto timestamptz, upto_id bigint, looked_at timestamptz, next_due interval, busy boolean, no_room boolean)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
DECLARE
    s     stream := require_stream(p_stream);
    first timestamptz;
    head  bigint;
BEGIN
    PERFORM require_read_committed();
    SELECT 0, clock_timestamp(), false, false INTO moved, looked_at, busy, no_room;
    EXECUTE format('SELECT deliver_at FROM %I WHERE (deliver_at, id) > ($1, $2) ORDER BY deliver_at, id LIMIT 1', 'message_delayed_' || p_stream)
        INTO first USING p_from, p_from_id;
    IF first > looked_at OR first IS NULL THEN
        next_due := first - looked_at;
        RETURN NEXT;
        RETURN;
    END IF;
    IF NOT pg_try_advisory_xact_lock(hashtextextended('sqlstreams move delayed ' || current_schema(), p_stream)) THEN
        busy := true;
        RETURN NEXT;
        RETURN;
    END IF;
    EXECUTE format('SELECT last_value FROM %I', 'message_log_' || p_stream || '_id_seq') INTO head;
    IF to_regclass(format('%I', 'message_log_' || p_stream || '_p' || (head + p_limit) / s.partition_size)) IS NULL THEN
        no_room := true;
        RETURN NEXT;
        RETURN;
    END IF;
    EXECUTE format(
        'WITH gone AS (DELETE FROM %1$I WHERE ctid = ANY (ARRAY(SELECT ctid FROM %1$I WHERE (deliver_at, id) > ($1, $2) AND deliver_at <= $3
                                                               ORDER BY deliver_at, id LIMIT $4 FOR UPDATE SKIP LOCKED))
                       RETURNING deliver_at, id, key, routing_key, headers, expires_at, payload),
              moved AS (INSERT INTO %2$I (key, routing_key, headers, expires_at, payload)
                        SELECT key, routing_key, headers, expires_at, payload FROM gone ORDER BY deliver_at, id)
         SELECT deliver_at, id, count(*) OVER () FROM gone ORDER BY deliver_at DESC, id DESC LIMIT 1', 'message_delayed_' || p_stream, 'message_log_' || p_stream)
        INTO upto, upto_id, moved USING p_from, p_from_id, looked_at, p_limit;
    moved := coalesce(moved, 0);
    EXECUTE format('SELECT deliver_at - clock_timestamp() FROM %I WHERE (deliver_at, id) > ($1, $2) ORDER BY deliver_at, id LIMIT 1', 'message_delayed_' || p_stream)
        INTO next_due USING coalesce(upto, p_from), coalesce(upto_id, p_from_id);
    RETURN NEXT;
END $$;

-- The time until the next delayed message of each of these streams is due; none for a stream that has none. Nearly nothing for one that never
-- had any. p_from: a lower bound for each.
CREATE OR REPLACE FUNCTION next_delayed(p_streams bigint[], p_from timestamptz[]) RETURNS TABLE (stream bigint, due_in interval)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
DECLARE
    d record;
BEGIN
    FOR d IN SELECT u.stream, u.lower FROM unnest(p_streams, p_from) AS u(stream, lower)
             WHERE pg_relation_size(to_regclass(format('%I.%I', current_schema(), 'message_delayed_' || u.stream))) > 0 LOOP
        EXECUTE format('SELECT deliver_at - clock_timestamp() FROM %I WHERE deliver_at >= $1 ORDER BY deliver_at LIMIT 1', 'message_delayed_' || d.stream)
            INTO due_in USING coalesce(d.lower, '-infinity');
        IF due_in IS NOT NULL THEN
            stream := d.stream;
            RETURN NEXT;
        END IF;
    END LOOP;
END $$;

-- Takes a delayed message back: false when there is none of that id, since it was moved into the log or cancelled before.
CREATE OR REPLACE FUNCTION cancel_delayed(p_stream bigint, p_id bigint) RETURNS boolean
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off AS $$
DECLARE
    hits bigint;
BEGIN
    PERFORM require_stream(p_stream);
    EXECUTE format('DELETE FROM %I WHERE id = $1', 'message_delayed_' || p_stream) USING p_id;
    GET DIAGNOSTICS hits = ROW_COUNT;
    RETURN hits > 0;
END $$;

CREATE OR REPLACE FUNCTION count_delayed(p_stream bigint) RETURNS bigint
LANGUAGE plpgsql STABLE SET search_path FROM CURRENT AS $$
DECLARE
    waiting bigint;
BEGIN
    PERFORM require_stream(p_stream);
    EXECUTE format('SELECT count(*) FROM %I', 'message_delayed_' || p_stream) INTO waiting;
    RETURN waiting;
END $$;

-- The current values of a compacted stream: of each key the newest message, unless that is a tombstone or has expired.
--
-- A tombstone is a message without payload (NULL; JSON's null, an empty text and empty bytes are values like others). From then on its key has no
-- value. Of a stream that is compacted, keys are indexed with their ids, in every partition.

-- Makes latest_message_<n> and current_messages_<n> of a compacted stream. They keep their plans (see generated.sql): planning, which grows with
-- the partitions, costs more than the look-up.
CREATE OR REPLACE FUNCTION make_current_functions(p_stream bigint) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $make$
DECLARE
    s stream := require_stream(p_stream);
BEGIN
    IF NOT s.compacted THEN
        RETURN;
    END IF;
    -- ORDER BY id goes through the partitions from the newest on, and LIMIT ends it in the first that has the key.
    EXECUTE format(dollar_quoted($text$
        CREATE OR REPLACE FUNCTION %2$I(p_key text)
        RETURNS TABLE (id bigint, key text, routing_key text, headers jsonb, produced_at timestamptz, expires_at timestamptz, payload %4$s)
        LANGUAGE plpgsql STABLE SET enable_seqscan = off SET jit = off SET constraint_exclusion = off SET plan_cache_mode = force_generic_plan AS $$
        #variable_conflict use_column
        BEGIN
            RETURN QUERY
            SELECT m.id, m.key, m.routing_key, m.headers, m.produced_at, m.expires_at, m.payload
            FROM (SELECT * FROM %1$I.%3$I AS l WHERE l.key = p_key ORDER BY l.id DESC LIMIT 1) AS m
            WHERE m.payload IS NOT NULL AND (m.expires_at IS NULL OR m.expires_at > clock_timestamp());
        END $$
        $text$), current_schema(), 'latest_message_' || p_stream, 'message_log_' || p_stream, s.payload_type);
    -- From key to key, whatever the number of versions that each has. After 1,000 keys that have no value it ends with a row that has nothing but the key
    -- that it has come to, from which to go on.
    EXECUTE format(dollar_quoted($text$
        CREATE OR REPLACE FUNCTION %2$I(p_after text, p_limit bigint)
        RETURNS TABLE (id bigint, key text, routing_key text, headers jsonb, produced_at timestamptz, expires_at timestamptz, payload %5$s)
        LANGUAGE plpgsql STABLE SET enable_seqscan = off SET jit = off SET constraint_exclusion = off SET plan_cache_mode = force_generic_plan AS $$
        #variable_conflict use_column
        DECLARE
            next   text;
            found  bigint := 0;
            before bigint;
            passed int := 0;
        BEGIN
            -- No key sorts before the empty one, which is a key.
            IF p_after IS NULL THEN
                SELECT l.key INTO next FROM %1$I.%3$I AS l WHERE l.key >= '' ORDER BY l.key LIMIT 1;
            ELSE
                SELECT l.key INTO next FROM %1$I.%3$I AS l WHERE l.key > p_after ORDER BY l.key LIMIT 1;
            END IF;
            WHILE next IS NOT NULL AND found < p_limit LOOP
                before := found;
                FOR id, key, routing_key, headers, produced_at, expires_at, payload IN SELECT m.* FROM %1$I.%4$I(next) AS m LOOP
                    found := found + 1;
                    RETURN NEXT;
                END LOOP;
                IF found = before THEN
                    passed := passed + 1;
                    IF passed = 1000 THEN
                        SELECT NULL, next, NULL, NULL, NULL, NULL, NULL INTO id, key, routing_key, headers, produced_at, expires_at, payload;
                        RETURN NEXT;
                        RETURN;
                    END IF;
                END IF;
                SELECT (SELECT l.key FROM %1$I.%3$I AS l WHERE l.key > next ORDER BY l.key LIMIT 1) INTO next;
            END LOOP;
        END $$
        $text$), current_schema(), 'current_messages_' || p_stream, 'message_log_' || p_stream, 'latest_message_' || p_stream, s.payload_type);
END $make$;

CREATE OR REPLACE FUNCTION require_compacted(s stream) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF NOT s.compacted THEN
        RAISE EXCEPTION 'stream % is not compacted', quote_ident(s.name)
            USING ERRCODE = 'SQ004', HINT = 'Whether a stream is, is said when it is created.';
    END IF;
END $$;

CREATE OR REPLACE FUNCTION find_compacted(p_stream text) RETURNS stream
LANGUAGE plpgsql STABLE AS $$
DECLARE
    s stream;
BEGIN
    SELECT * INTO s FROM stream WHERE name = p_stream;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'there is no stream %', quote_ident(p_stream)
            USING ERRCODE = 'SQ001', HINT = 'Table stream lists those that exist.';
    END IF;
    PERFORM require_compacted(s);
    RETURN s;
END $$;

-- The current value of a key, for people and programs that speak SQL: the payload in its text form. No row when the key has none.
CREATE OR REPLACE FUNCTION latest_message(p_stream text, p_key text)
RETURNS TABLE (id bigint, key text, routing_key text, headers jsonb, produced_at timestamptz, expires_at timestamptz, payload text)
LANGUAGE plpgsql STABLE SET search_path FROM CURRENT AS $$
DECLARE
    s stream := find_compacted(p_stream);
BEGIN
    RETURN QUERY EXECUTE format('SELECT m.id, m.key, m.routing_key, m.headers, m.produced_at, m.expires_at, m.payload::text FROM %I($1) AS m', 'latest_message_' || s.id) USING p_key;
END $$;

-- Current values in the order of their keys, at most p_limit; of keys after p_after (NULL: from the first on). Where many keys in a row were removed, it ends early: a
-- last row without an id has the key after which to go on.
CREATE OR REPLACE FUNCTION current_messages(p_stream text, p_after text DEFAULT NULL, p_limit bigint DEFAULT 100)
RETURNS TABLE (id bigint, key text, routing_key text, headers jsonb, produced_at timestamptz, expires_at timestamptz, payload text)
LANGUAGE plpgsql STABLE SET search_path FROM CURRENT AS $$
DECLARE
    s stream := find_compacted(p_stream);
BEGIN
    PERFORM require_that(p_limit >= 1, format('a page holds at least 1 message, not %s', coalesce(p_limit::text, 'NULL')), 'The default is 100.');
    RETURN QUERY EXECUTE format('SELECT m.id, m.key, m.routing_key, m.headers, m.produced_at, m.expires_at, m.payload::text FROM %I($1, $2) AS m', 'current_messages_' || s.id) USING p_after, p_limit;
END $$;

-- The id of the current value of a key; 0 when it has none.
CREATE OR REPLACE FUNCTION latest_id(p_stream bigint, p_key text) RETURNS bigint
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    found bigint;
BEGIN
    EXECUTE format('SELECT id FROM %I($1)', 'latest_message_' || p_stream) INTO found USING p_key;
    RETURN coalesce(found, 0);
END $$;

-- Compare and set: fails unless the current value of each of these keys is the message that is expected (0: unless there is none; NULL: whatever
-- it is). Then nobody else who asks the same of the key stores anything for it before the caller's transaction has ended.
--
-- The lock comes first and the look in a later statement, so that it sees what the holder before has committed. Locks are taken in one order, so that
-- batches of one statement each do not wait in a circle. It keeps out those only who ask, too: a plain INSERT goes on.
CREATE OR REPLACE FUNCTION require_latest(p_stream bigint, p_keys text[], p_expected bigint[]) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
DECLARE
    e      record;
    actual bigint;
BEGIN
    PERFORM require_compacted(require_stream(p_stream));
    PERFORM require_read_committed();
    IF (SELECT count(u.expected) <> count(DISTINCT u.key) FILTER (WHERE u.expected IS NOT NULL) FROM unnest(p_keys, p_expected) AS u(key, expected)) THEN
        RAISE EXCEPTION 'a batch expects something of a key twice, or of no key'
            USING ERRCODE = 'SQ004', HINT = 'The second message would find the first. Send them one after the other.';
    END IF;
    FOR e IN SELECT hashtextextended('sqlstreams key ' || current_schema() || ' ' || u.key COLLATE "C", p_stream) AS lock
             FROM unnest(p_keys, p_expected) AS u(key, expected) WHERE u.expected IS NOT NULL ORDER BY lock LOOP
        PERFORM pg_advisory_xact_lock(e.lock);
    END LOOP;
    FOR e IN SELECT u.key, u.expected, u.n FROM unnest(p_keys, p_expected) WITH ORDINALITY AS u(key, expected, n) WHERE u.expected IS NOT NULL ORDER BY n LOOP
        actual := latest_id(p_stream, e.key);
        IF actual <> e.expected THEN
            RAISE EXCEPTION 'key % %', quote_literal(left(e.key, 100)), CASE WHEN actual = 0 THEN format('has no current value, and %s is expected', e.expected)
                    ELSE format('has message %s as its current value, and %s is expected', actual, CASE WHEN e.expected = 0 THEN 'none' ELSE e.expected::text END) END
                USING ERRCODE = 'SQ015', DETAIL = actual::text, HINT = 'Somebody else was faster: read the current value and decide again.';
        END IF;
    END LOOP;
END $$;

-- Compaction: deletes from the log of a compacted stream what newer messages of the same key have superseded.
--
-- Invariants:
--   * Of each key the newest message stays, unless it is a tombstone or has expired.
--   * A tombstone, or what has expired, goes only when no older message of its key is there: else that would be the newest again.
--   * Nothing goes that a group has not resolved: that is above its cursor, pending in one of its leases, or in its exception queue, dead letters, too.
--   * Nothing goes above the settled id: below it no message comes any more, so no older one of a key either, and holes are no gaps.
--   * Nothing goes that is younger than p_min_age: a producer may still ask what became of its commit (commit.sql).
-- Messages are deleted from the leaf partition. Through the parent it would look like a writer, and the fence would wait for it.

-- Up to here every group has claimed, and nothing is pending in a lease. In one statement, since a claim moves ids from one to the other. Of an ordered
-- group claimed is the lowest position of its lanes.
CREATE OR REPLACE FUNCTION compact_floor(p_stream bigint) RETURNS bigint
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    settled  bigint := settled_id(p_stream);
    resolved bigint;
BEGIN
    IF settled < log_head(p_stream) THEN
        settled := look_at_gap(p_stream, settled);
    END IF;
    EXECUTE format(
        'SELECT min(least(c.claimed, l.lowest - 1))
         FROM consumer_group AS g
         CROSS JOIN LATERAL (SELECT claimed, first_open FROM %I WHERE group_id = g.id ORDER BY generation DESC LIMIT 1) AS c
         CROSS JOIN LATERAL (SELECT min(lower(pending)) AS lowest FROM %I WHERE group_id = g.id AND seq >= c.first_open) AS l
         WHERE g.stream_id = $1', 'consumer_group_cursor_' || p_stream, 'consumer_lease_' || p_stream)
        INTO resolved USING p_stream;
    RETURN least(settled, resolved);
END $$;

-- Whoever has this advisory lock compacts the stream; groups are created under a shared one.
CREATE OR REPLACE FUNCTION compact_lock(p_stream bigint) RETURNS bigint
LANGUAGE sql STABLE AS $$ SELECT hashtextextended('sqlstreams compact ' || current_schema(), p_stream) $$;

-- One step: looks at up to p_limit messages after id p_after, within one partition, and deletes those that may go. Call it again with upto
-- until that is the floor; begin at 0 some time later. Each step is its own transaction, may be stopped, and repeats nothing.
--
-- p_min_age: what is younger stays. p_tombstone_age: younger tombstones stay, so that whoever reads the log from its beginning in that time
-- learns of them; what has expired stays as long.
--
-- Returns how many messages it looked at and removed, up to which id, and the floor, which it cannot pass at present. busy: somebody else compacts the stream.
--
-- No group is created meanwhile (create_group): it would be handed messages that go, and have dead letters without a message. busy may mean that, too.
CREATE OR REPLACE FUNCTION compact(p_stream bigint, p_after bigint DEFAULT 0, p_limit bigint DEFAULT 10000,
    p_min_age interval DEFAULT '5 minutes', p_tombstone_age interval DEFAULT '24 hours')
RETURNS TABLE (looked_at bigint, removed bigint, upto bigint, floor bigint, busy boolean)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off SET constraint_exclusion = off AS $$
#variable_conflict use_column
DECLARE
    s     stream := require_stream(p_stream);
    now   timestamptz := clock_timestamp();
    first bigint;
    last  bigint;
BEGIN
    PERFORM require_compacted(s);
    PERFORM require_read_committed();
    PERFORM require_limit(p_limit);
    PERFORM require_that(p_min_age BETWEEN '0' AND '1000 years' AND p_tombstone_age BETWEEN '0' AND '1000 years', 'messages are removed at an age of 0 to 1000 years', 'The defaults are 5 minutes, and 24 hours for tombstones.');
    SELECT 0, 0, p_after, p_after, false INTO looked_at, removed, upto, floor, busy;
    IF NOT pg_try_advisory_xact_lock(compact_lock(p_stream)) THEN
        busy := true;
        RETURN NEXT;
        RETURN;
    END IF;
    floor := compact_floor(p_stream);
    EXECUTE format('SELECT id FROM %I WHERE id > $1 AND id <= $2 ORDER BY id LIMIT 1', 'message_log_' || p_stream) INTO first USING p_after, floor;
    IF first IS NULL THEN
        upto := greatest(p_after, floor);
        RETURN NEXT;
        RETURN;
    END IF;
    EXECUTE format(
        'WITH part AS MATERIALIZED (
             SELECT id, key, produced_at < $4 AS old,
                    payload IS NULL AND produced_at < $5 OR coalesce(expires_at < $5, false) AS ended
             FROM %1$I WHERE id >= $1 AND id <= $2 ORDER BY id LIMIT $3),
         gone AS MATERIALIZED (
             SELECT id FROM part AS p
             WHERE old
               AND ((SELECT l.id FROM %2$I AS l WHERE l.key = p.key AND l.id > p.id ORDER BY l.id LIMIT 1) IS NOT NULL
                    OR ended AND (SELECT l.id FROM %2$I AS l WHERE l.key = p.key AND l.id < p.id ORDER BY l.id DESC LIMIT 1) IS NULL)
               AND NOT EXISTS (SELECT FROM consumer_group AS g
                               CROSS JOIN LATERAL (SELECT FROM %3$I AS e WHERE e.group_id = g.id AND e.message_id = p.id LIMIT 1) AS e
                               WHERE g.stream_id = $6)),
         deleted AS (DELETE FROM %1$I AS l WHERE l.id = ANY (ARRAY(SELECT id FROM gone)) RETURNING l.id)
         SELECT (SELECT count(*) FROM part), (SELECT count(*) FROM deleted), (SELECT max(id) FROM part)',
        'message_log_' || p_stream || '_p' || first / s.partition_size, 'message_log_' || p_stream, 'exception_queue_' || p_stream)
        INTO looked_at, removed, last
        USING first, floor, greatest(p_limit, 1), now - greatest(p_min_age, '0'), now - greatest(p_min_age, p_tombstone_age, '0'), p_stream;
    upto := CASE WHEN looked_at < greatest(p_limit, 1) THEN least((first / s.partition_size + 1) * s.partition_size - 1, floor) ELSE last END;
    RETURN NEXT;
END $$;

-- The disk space of partitions that compaction has emptied, or half of it. Deleting gives none back: VACUUM (FULL) of a partition does, which no function
-- and no transaction can run. It is a statement for a client; this says of which partitions.
--
-- Never of the parent. Not of partitions into which something may still be inserted: their producers would wait. What a held snapshot sees
-- stays in the partition that is written anew, and is not given back before that ends.

-- Partitions of which at least half the space is free or dead, as far as that is worth anything: their names, quoted; what they take, with TOAST and without indexes; about
-- how much of that is messages; and whether the caller may vacuum them. It looks at about a thousand pages of each.
CREATE OR REPLACE FUNCTION reclaimable(p_stream bigint)
RETURNS TABLE (partition text, bytes bigint, live_bytes bigint, permitted boolean)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET jit = off AS $$
DECLARE
    s       stream := require_stream(p_stream);
    settled bigint := settled_id(p_stream);
    leaf    record;
    part    double precision;
BEGIN
    FOR leaf IN
        SELECT c.oid, c.relname, c.relowner, pg_relation_size(c.oid) / current_setting('block_size')::bigint AS pages
        FROM pg_inherits AS i JOIN pg_class AS c ON c.oid = i.inhrelid
        WHERE i.inhparent = to_regclass(format('%I', 'message_log_' || p_stream))
          AND (substring(c.relname FROM '_p(\d+)$')::bigint + 1) * s.partition_size - 1 <= settled
        ORDER BY substring(c.relname FROM '_p(\d+)$')::bigint
    LOOP
        bytes := pg_table_size(leaf.oid);
        CONTINUE WHEN bytes < 1048576;
        part := least(100.0, 100000.0 / greatest(leaf.pages, 1));
        EXECUTE format('SELECT coalesce(sum(40 + octet_length(key) + coalesce(octet_length(routing_key), 0) + coalesce(pg_column_size(headers), 0) + coalesce(pg_column_size(payload), 0)), 0) * 100 / $1
                        FROM %I TABLESAMPLE SYSTEM ($1)', leaf.relname)
            INTO live_bytes USING part;
        CONTINUE WHEN live_bytes * 2 > bytes;
        partition := format('%I.%I', current_schema(), leaf.relname);
        permitted := pg_has_role(leaf.relowner, 'USAGE')
            OR CASE WHEN current_setting('server_version_num')::int >= 170000 THEN has_table_privilege(leaf.oid, 'MAINTAIN') ELSE false END;
        RETURN NEXT;
    END LOOP;
END $$;

-- Functions that are made for each stream, with its tables named in their text: unlike EXECUTE, that keeps their plans. For
-- what is called once per message. They are made anew with all functions.

CREATE OR REPLACE FUNCTION make_stream_functions(p_stream bigint) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $make$
BEGIN
    -- settle_in_transaction for one message of a lease, which is nearly every handler's. The usual case is told from here;
    -- whatever is not is looked at closely: p_seq is where the lease lies, unless it was moved (extend). Names are qualified, since setting a search_path has its cost, too.
    EXECUTE format(dollar_quoted($text$
        CREATE OR REPLACE FUNCTION %2$I(p_group bigint, p_seq bigint, p_token uuid, p_id bigint, p_mark text DEFAULT NULL) RETURNS void
        LANGUAGE plpgsql VOLATILE SET enable_seqscan = off AS $$
        BEGIN
            -- Before anything is written: where the handler has ended the transaction, that would be committed by itself.
            IF current_setting('transaction_isolation') <> 'read committed' OR current_setting('sqlstreams.transaction', true) IS DISTINCT FROM p_mark THEN
                PERFORM %1$I.require_lent(p_mark);
            END IF;
            INSERT INTO %1$I.%3$I (group_id, message_id) VALUES (p_group, p_id) ON CONFLICT DO NOTHING;
            IF NOT FOUND THEN
                PERFORM %1$I.refuse_settled(1);
            END IF;
            IF NOT EXISTS (SELECT FROM %1$I.%4$I WHERE group_id = p_group AND seq = p_seq AND token = p_token AND pending @> p_id) THEN
                PERFORM %1$I.require_held(%5$L, p_group, p_token, ARRAY[p_id]);
            END IF;
        END $$
        $text$), current_schema(), 'settle_message_' || p_stream, 'consumer_done_' || p_stream, 'consumer_lease_' || p_stream, p_stream);
    PERFORM make_produce_function(p_stream);
    PERFORM make_current_functions(p_stream);
END $make$;

CREATE OR REPLACE FUNCTION drop_stream_functions(p_stream bigint) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
    EXECUTE format('DROP FUNCTION IF EXISTS %I, %I, %I, %I', 'settle_message_' || p_stream, 'produce_' || p_stream, 'latest_message_' || p_stream, 'current_messages_' || p_stream);
END $$;

DO $$
BEGIN
    PERFORM make_stream_functions(id) FROM stream;
END $$;

