-- Streams: the table family of one stream.

-- Waits for a migration that is under way, and lets none begin before the caller's transaction ends: it would neither see a
-- stream that is being made, nor that one is being dropped, when it makes the functions of all streams anew.
CREATE OR REPLACE FUNCTION hold_migrations_up() RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
    PERFORM pg_advisory_xact_lock_shared(hashtextextended('sqlstreams migrate ' || current_schema(), 0));
END $$;

-- Creates a stream. What is kept of it for how long: see alter_stream; without, everything for ever.
CREATE OR REPLACE FUNCTION create_stream(p_name text, p_payload_type text DEFAULT 'json', p_partition_size bigint DEFAULT 1000000, p_notify boolean DEFAULT false, p_idempotency_window interval DEFAULT '24 hours', p_compacted boolean DEFAULT false,
    p_retain_for interval DEFAULT NULL, p_retain_bytes bigint DEFAULT NULL, p_retain_count bigint DEFAULT NULL,
    p_retain_resolved boolean DEFAULT NULL, p_drop_unread boolean DEFAULT NULL, p_retain_dead_for interval DEFAULT NULL) RETURNS bigint
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    n bigint;
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
    INSERT INTO stream_pace (stream_id, head, seen_at, rated_at) VALUES (n, 0, clock_timestamp(), clock_timestamp());
    PERFORM make_stream_tables(n, p_payload_type, coalesce(p_compacted, false));
    PERFORM make_stream_functions(n);
    PERFORM ensure_partitions(n);
    PERFORM alter_stream(n, p_notify, NULL, p_retain_for, p_retain_bytes, p_retain_count, p_retain_resolved, p_drop_unread, p_retain_dead_for);
    RETURN n;
END $$;

-- The tables of one stream, but for the partitions of its log.
CREATE OR REPLACE FUNCTION make_stream_tables(n bigint, p_payload_type text, p_compacted boolean) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    part text;
BEGIN
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
             -- after a seek, and while something is replayed
             reread_to   bigint,
             replays     group_replay[],
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
             -- which replay it is a piece of, if of one
             replay     bigint,
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
    EXECUTE format('CREATE INDEX %I ON %I (dead_at) WHERE state = ''dead''', 'exception_dead_at_' || n, 'exception_queue_' || n);

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

    -- Messages that are referred to when their partition leaves: see functions/archive.sql.
    EXECUTE format(
        'CREATE TABLE %I (
             id          bigint PRIMARY KEY,
             key         text COLLATE "C",
             routing_key text COLLATE "C",
             headers     jsonb,
             produced_at timestamptz NOT NULL,
             expires_at  timestamptz,
             payload     %s
         ) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000,
                 autovacuum_vacuum_cost_delay = 0, vacuum_truncate = false)',
        'message_archive_' || n, p_payload_type);

    -- A message without payload is a tombstone (current.sql), and only where there are keys to remove.
    FOREACH part IN ARRAY ARRAY['message_log_', 'message_delayed_'] LOOP
        IF p_compacted THEN
            EXECUTE format('ALTER TABLE %I ADD CONSTRAINT compacted_needs_key CHECK (key IS NOT NULL)', part || n);
        ELSE
            EXECUTE format('ALTER TABLE %I ALTER COLUMN payload SET NOT NULL', part || n);
        END IF;
    END LOOP;
END $$;

-- Changes settings of a stream; NULL leaves one as it is. p_notify: whether every INSERT rings for the consumers from inside
-- its transaction, for producers that are plain SQL; the crate's own ring by themselves, after their commit. p_idempotency_window:
-- how long keys are remembered; those that were given up under a shorter one stay so.
--
-- Retention (retention.sql), each 0 to lift it: what is newer than p_retain_for, the newest p_retain_bytes and the newest p_retain_count ids are kept; a partition that lies
-- beyond one of them goes, and with p_retain_resolved one that every group has resolved. p_drop_unread: it goes though a group has not resolved it.
-- p_retain_dead_for: how long dead letters are kept.
CREATE OR REPLACE FUNCTION alter_stream(p_stream bigint, p_notify boolean DEFAULT NULL, p_idempotency_window interval DEFAULT NULL,
    p_retain_for interval DEFAULT NULL, p_retain_bytes bigint DEFAULT NULL, p_retain_count bigint DEFAULT NULL,
    p_retain_resolved boolean DEFAULT NULL, p_drop_unread boolean DEFAULT NULL, p_retain_dead_for interval DEFAULT NULL) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT SET lock_timeout = '3s' AS $$
DECLARE
    s stream := require_stream(p_stream);
BEGIN
    PERFORM require_idempotency_window(p_idempotency_window);
    PERFORM require_that(coalesce(p_retain_for, '0') = '0' OR p_retain_for BETWEEN '1 second' AND '1000 years', format('messages are kept for 1 second to 1000 years, not for %s', p_retain_for), 'Without this limit they are kept for ever.');
    PERFORM require_that(coalesce(p_retain_dead_for, '0') = '0' OR p_retain_dead_for BETWEEN '1 second' AND '1000 years', format('dead letters are kept for 1 second to 1000 years, not for %s', p_retain_dead_for), 'Without this limit they are kept for ever.');
    PERFORM require_that(coalesce(p_retain_bytes, 0) >= 0 AND coalesce(p_retain_count, 0) >= 0, 'what is kept is at least 1 byte, or message', 'Choose at least 1, or no limit.');
    UPDATE stream SET idempotency_window = p_idempotency_window WHERE id = p_stream AND idempotency_window <> p_idempotency_window;
    UPDATE stream AS o SET retain_for = n.retain_for, retain_bytes = n.retain_bytes, retain_count = n.retain_count, retain_resolved = n.retain_resolved,
                           drop_unread = n.drop_unread, retain_dead_for = n.retain_dead_for
    FROM (SELECT nullif(coalesce(p_retain_for, retain_for), '0') AS retain_for, nullif(coalesce(p_retain_bytes, retain_bytes), 0) AS retain_bytes,
                 nullif(coalesce(p_retain_count, retain_count), 0) AS retain_count, coalesce(p_retain_resolved, retain_resolved) AS retain_resolved,
                 coalesce(p_drop_unread, drop_unread) AS drop_unread, nullif(coalesce(p_retain_dead_for, retain_dead_for), '0') AS retain_dead_for
          FROM stream WHERE id = p_stream) AS n
    WHERE o.id = p_stream AND (o.retain_for, o.retain_bytes, o.retain_count, o.retain_resolved, o.drop_unread, o.retain_dead_for)
                              IS DISTINCT FROM (n.retain_for, n.retain_bytes, n.retain_count, n.retain_resolved, n.drop_unread, n.retain_dead_for);
    IF FOUND THEN
        -- What kept others from going may not any more, and it is looked at anew.
        DELETE FROM retention_hold WHERE stream_id = p_stream;
        UPDATE maintenance_step SET next_due = NULL WHERE stream_id = p_stream AND step IN ('retention', 'archive') AND failing = 0;
    END IF;
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

-- Drops the stream with every message, cursor and exception it has, and its schedules.
CREATE OR REPLACE FUNCTION drop_stream(p_stream bigint) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    s         stream := require_stream(p_stream);
    name      text;
    tables    text;
    schedules jsonb;
BEGIN
    PERFORM hold_migrations_up();
    -- In the order in which partitions are made, and in which consumers and producers lock.
    PERFORM FROM stream WHERE id = p_stream FOR UPDATE;
    FOREACH name IN ARRAY ARRAY['consumer_group_cursor_', 'consumer_lease_', 'exception_queue_', 'consumer_done_', 'message_log_', 'message_idempotency_', 'message_delayed_', 'message_archive_'] LOOP
        EXECUTE format('LOCK TABLE %I IN ACCESS EXCLUSIVE MODE', name || p_stream);
        tables := concat_ws(', ', tables, format('%I', name || p_stream));
    END LOOP;
    EXECUTE 'DROP TABLE ' || tables;
    -- Partitions that have left the log, and are not gone yet.
    FOR name IN SELECT 'message_log_' || p_stream || '_p' || number FROM log_partition WHERE stream_id = p_stream AND state <> 'attached' LOOP
        EXECUTE format('DROP TABLE IF EXISTS %I', name);
    END LOOP;
    -- Partitions that were prepared and never attached.
    FOR name IN SELECT relname FROM pg_class WHERE relnamespace = (SELECT oid FROM pg_namespace WHERE nspname = current_schema()) AND relname LIKE format('message\_log\_%s\_next\_%%', p_stream) AND relkind = 'r' LOOP
        EXECUTE format('DROP TABLE %I', name);
    END LOOP;
    PERFORM drop_stream_functions(p_stream);
    SELECT jsonb_agg(x.name ORDER BY x.name) INTO schedules FROM schedule AS x WHERE x.stream_id = p_stream;
    DELETE FROM stream WHERE id = p_stream;
    INSERT INTO audit (action, stream_name, detail) VALUES ('drop_stream', s.name, jsonb_strip_nulls(jsonb_build_object('schedules', schedules)));
END $$;
