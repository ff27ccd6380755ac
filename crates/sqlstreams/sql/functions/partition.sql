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

-- A partition that is not attached yet, by the name message_log_<stream id>_next_<number>: everything that takes time is done on it, where nobody waits.
CREATE OR REPLACE FUNCTION prepare_partition(s stream, p_number bigint) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    parent text := 'message_log_' || s.id;
    leaf   text := parent || '_next_' || p_number;
BEGIN
    EXECUTE format('CREATE TABLE %I (LIKE %I INCLUDING DEFAULTS INCLUDING CONSTRAINTS INCLUDING STORAGE INCLUDING COMPRESSION)', leaf, parent);
    -- The bounds as a constraint: ATTACH believes it instead of scanning.
    EXECUTE format('ALTER TABLE %I ADD CONSTRAINT id_range CHECK (id >= %s AND id < %s)', leaf, p_number * s.partition_size, (p_number + 1) * s.partition_size);
    -- Compaction deletes from partitions: through the parent it would look like a writer.
    EXECUTE format('CREATE TRIGGER refuse_direct_write BEFORE INSERT OR UPDATE %s ON %I FOR EACH STATEMENT EXECUTE FUNCTION refuse_direct_write()',
                   CASE WHEN NOT s.compacted THEN 'OR DELETE' END, leaf);
    IF s.compacted THEN
        EXECUTE format('CREATE INDEX %I ON %I (key, id)', parent || '_p' || p_number || '_key_id_idx', leaf);
    END IF;
    -- ALWAYS: also where session_replication_role = replica (restores, logical replication).
    EXECUTE format('ALTER TABLE %I ENABLE ALWAYS TRIGGER refuse_direct_write', leaf);
END $$;

-- Attaches a partition, which producers and readers do not notice (CREATE TABLE … PARTITION OF would take ACCESS EXCLUSIVE on the parent). What conflicts
-- is another ATTACH or DETACH, ANALYZE of the whole log, DDL: then it waits for lock_timeout and returns false. The prepared table stays, and whoever
-- comes next goes on with it.
--
-- A table is called message_log_<stream id>_p<number> from its ATTACH on, in the same transaction: who finds one by this name can insert.
CREATE OR REPLACE FUNCTION create_partition(s stream, p_number bigint) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    parent   text := 'message_log_' || s.id;
    prepared text := parent || '_next_' || p_number;
    leaf     text := parent || '_p' || p_number;
BEGIN
    FOR attempt IN 1..2 LOOP
        IF to_regclass(format('%I', prepared)) IS NULL THEN
            PERFORM prepare_partition(s, p_number);
        END IF;
        BEGIN
            EXECUTE format('LOCK TABLE ONLY %I IN SHARE UPDATE EXCLUSIVE MODE', parent);
            EXECUTE format('ALTER TABLE %I RENAME TO %I', prepared, leaf);
            EXECUTE format('ALTER TABLE %I ATTACH PARTITION %I FOR VALUES FROM (%s) TO (%s)', parent, leaf, p_number * s.partition_size, (p_number + 1) * s.partition_size);
            INSERT INTO log_partition (stream_id, number, from_id, to_id) VALUES (s.id, p_number, p_number * s.partition_size, (p_number + 1) * s.partition_size - 1)
                ON CONFLICT (stream_id, number) DO UPDATE SET made_at = EXCLUDED.made_at, sealed_at = NULL, state = EXCLUDED.state;
            RETURN true;
        EXCEPTION
            WHEN lock_not_available THEN
                RETURN false;
            WHEN OTHERS THEN
                -- It may have been prepared for a log that was another then.
                IF attempt = 2 THEN
                    RAISE;
                END IF;
                EXECUTE format('DROP TABLE %I', prepared);
        END;
    END LOOP;
END $$;

-- The number of the last partition that ids can reach: the last that ends before the largest bigint.
CREATE OR REPLACE FUNCTION last_partition(p_size bigint) RETURNS bigint
LANGUAGE sql IMMUTABLE AS $$ SELECT 9223372036854775807 / p_size - 1 $$;

-- How many ids are drawn per second at the most: the highest rate that was measured counts for half after a day, for a quarter after two.
CREATE OR REPLACE FUNCTION stream_rate(p stream_pace, p_now timestamptz) RETURNS double precision
LANGUAGE sql IMMUTABLE AS $$ SELECT coalesce((p).rate, 0) * 0.5 ^ least(greatest(extract(epoch FROM p_now - (p).rated_at) / 86400, 0), 1000) $$;

-- How many partitions there have to be beyond the one that is written to: for ten minutes at that rate, 3 at least and 1,000 at most: each makes
-- planning a little dearer.
CREATE OR REPLACE FUNCTION partitions_ahead(p stream_pace, p_size bigint, p_now timestamptz) RETURNS int
LANGUAGE sql IMMUTABLE AS $$ SELECT greatest(3, least(ceil(stream_rate(p, p_now) * 600 / p_size), 1000))::int $$;

-- Measures how fast these streams are. Of those that have moved for at least 5 s it writes the row once a minute, and when the rate has risen by a
-- quarter. Waits for nobody.
CREATE OR REPLACE FUNCTION note_pace(p_heads stream_head[]) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    now timestamptz := clock_timestamp();
BEGIN
    WITH moved AS MATERIALIZED (
             SELECT p.stream_id, h.head, -- More is none that was measured: somebody has set the sequence.
                    least(greatest((h.head - p.head) / greatest(extract(epoch FROM now - p.seen_at), 5), 0), 1e6) AS measured, stream_rate(p, now) AS known, p.seen_at
             FROM unnest(p_heads) AS h CROSS JOIN LATERAL (SELECT * FROM stream_pace WHERE stream_id = h.stream_id LIMIT 1) AS p
             -- Seen in the future, by a clock that was set back since: begin anew.
             WHERE h.head <> p.head AND (p.seen_at <= now - interval '5 seconds' OR p.seen_at > now)),
         due AS MATERIALIZED (
             SELECT m.* FROM moved AS m JOIN LATERAL (SELECT stream_id FROM stream_pace WHERE stream_id = m.stream_id FOR UPDATE SKIP LOCKED) AS l ON true
             WHERE m.seen_at NOT BETWEEN now - interval '1 minute' AND now OR m.measured > m.known * 1.25)
    UPDATE stream_pace AS p SET head = d.head, seen_at = now, rate = greatest(d.measured, d.known), rated_at = now
    FROM due AS d WHERE p.stream_id = d.stream_id;
    INSERT INTO stream_pace (stream_id, head, seen_at, rated_at)
        SELECT h.stream_id, h.head, now, now FROM unnest(p_heads) AS h
        WHERE NOT EXISTS (SELECT FROM stream_pace AS p WHERE p.stream_id = h.stream_id) AND EXISTS (SELECT FROM stream AS s WHERE s.id = h.stream_id)
        ON CONFLICT DO NOTHING;
END $$;

-- Makes the partitions up to p_ahead (1 to 1,000; NULL: what the stream's pace asks for) beyond the one that the head is in, p_most at most. Returns
-- how many it made: 0 also where something keeps it from attaching any. The last one is the last that ends before the largest bigint: a stream whose
-- ids have come so far takes no more. SECURITY DEFINER: a producer that may only insert still gets room to insert into.
CREATE OR REPLACE FUNCTION ensure_partitions(p_stream bigint, p_ahead int DEFAULT NULL, p_most int DEFAULT 1000) RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT SET lock_timeout = '1s' AS $$
DECLARE
    s       stream;
    head    bigint;
    current bigint;
    first   bigint;
    ahead   bigint;
    made    int := 0;
    wanted  bigint;
BEGIN
    PERFORM require_stream(p_stream);
    BEGIN
        -- One maker at a time per stream; the others find its partitions when they get the lock.
        SELECT * INTO s FROM stream WHERE id = p_stream FOR NO KEY UPDATE;
    EXCEPTION WHEN lock_not_available THEN
        RETURN 0;
    END;
    IF s.id IS NULL THEN
        PERFORM require_stream(p_stream);
    END IF;
    EXECUTE format('SELECT last_value FROM %I', 'message_log_' || p_stream || '_id_seq') INTO head;
    current := head / s.partition_size;
    IF current > last_partition(s.partition_size) THEN
        RAISE EXCEPTION 'the ids of stream % are used up', quote_ident(s.name)
            USING ERRCODE = 'SQ013', HINT = 'Nothing can be added to it any more. Create another stream for what comes.';
    END IF;
    PERFORM note_pace(ARRAY[(p_stream, head, s.partition_size)::stream_head]);
    ahead := coalesce(CASE WHEN p_ahead IS NOT NULL THEN least(greatest(p_ahead, 1), 1000) END, (SELECT partitions_ahead(p, s.partition_size, clock_timestamp()) FROM stream_pace AS p WHERE p.stream_id = p_stream), 3);
    -- Ids may have been drawn for partitions that were left out when the head ran away: for a few of them whoever has such an id still gets room.
    SELECT number + 1 INTO first FROM log_partition WHERE stream_id = p_stream AND number <= current ORDER BY number DESC LIMIT 1;
    FOR wanted IN
        SELECT n FROM generate_series(greatest(least(coalesce(first, current), current), current - 8), least(current + ahead, last_partition(s.partition_size))) AS n
        WHERE to_regclass(format('%I', 'message_log_' || p_stream || '_p' || n)) IS NULL
        ORDER BY n LIMIT greatest(p_most, 1)
    LOOP
        EXIT WHEN NOT create_partition(s, wanted);
        made := made + 1;
    END LOOP;
    RETURN made;
END $$;

-- Maintenance: the partitions that streams need, 8 a step.

CREATE OR REPLACE FUNCTION partitions_due(p_heads stream_head[]) RETURNS TABLE (stream_id bigint, due_in interval)
LANGUAGE plpgsql VOLATILE AS $$
#variable_conflict use_column
DECLARE
    now timestamptz := clock_timestamp();
BEGIN
    RETURN QUERY
    SELECT h.stream_id, interval '0'
    FROM unnest(p_heads) AS h
    LEFT JOIN LATERAL (SELECT p FROM stream_pace AS p WHERE p.stream_id = h.stream_id LIMIT 1) AS pace ON true
    LEFT JOIN LATERAL (SELECT l.number FROM log_partition AS l WHERE l.stream_id = h.stream_id ORDER BY l.number DESC LIMIT 1) AS made ON true
    WHERE h.head / h.partition_size <= last_partition(h.partition_size)
      AND coalesce(made.number, -1) < least(h.head / h.partition_size + partitions_ahead(pace.p, h.partition_size, now), last_partition(h.partition_size));
END $$;

-- more: it is to be called again, at once if that is urgent: there is room for less than half a minute, or for fewer than 3 partitions. trouble: what
-- kept it from making any.
CREATE OR REPLACE FUNCTION maintain_partitions(p_stream bigint) RETURNS TABLE (made int, more boolean, urgent boolean, trouble text)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
DECLARE
    s stream := require_stream(p_stream);
BEGIN
    made := ensure_partitions(p_stream, NULL, 8);
    urgent := coalesce((SELECT number FROM log_partition WHERE stream_id = p_stream ORDER BY number DESC LIMIT 1), -1)
        < log_head(p_stream) / s.partition_size + greatest(3, (SELECT ceil(stream_rate(p, clock_timestamp()) * 30 / s.partition_size) FROM stream_pace AS p WHERE p.stream_id = p_stream));
    more := EXISTS (SELECT FROM partitions_due(ARRAY[(p_stream, log_head(p_stream), s.partition_size)::stream_head]));
    urgent := urgent AND more;
    IF more AND made = 0 THEN
        SELECT 'partitions cannot be attached: session ' || string_agg(DISTINCT l.pid || ' holds ' || l.mode, ', session ') || format(' on message_log_%s', p_stream) INTO trouble
        FROM pg_locks AS l
        WHERE l.locktype = 'relation' AND l.relation = to_regclass(format('%I', 'message_log_' || p_stream)) AND l.granted AND l.pid <> pg_backend_pid()
          AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
          AND l.mode IN ('ShareUpdateExclusiveLock', 'ShareLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock');
        trouble := coalesce(trouble, 'partitions cannot be attached: somebody has the stream locked, or had the log');
    END IF;
    RETURN NEXT;
END $$;

-- Maintenance: which partitions are sealed. An id may be drawn for long before it is visible; from sealed_at on nothing of a partition comes any more, which
-- is what ages are counted from.

CREATE OR REPLACE FUNCTION seal_due(p_heads stream_head[]) RETURNS TABLE (stream_id bigint, due_in interval)
LANGUAGE plpgsql VOLATILE AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    SELECT h.stream_id, interval '0'
    FROM unnest(p_heads) AS h
    CROSS JOIN LATERAL (SELECT l.to_id FROM log_partition AS l WHERE l.stream_id = h.stream_id AND l.sealed_at IS NULL ORDER BY l.number LIMIT 1) AS open
    WHERE open.to_id <= h.head;
END $$;

-- Returns how many it sealed. more: some transaction that writes to the stream may still bring ids of another.
CREATE OR REPLACE FUNCTION seal_partitions(p_stream bigint) RETURNS TABLE (sealed int, more boolean)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off AS $$
DECLARE
    s       stream := require_stream(p_stream);
    head    bigint := log_head(p_stream);
    settled bigint := settled_id(p_stream);
    wanted  bigint;
BEGIN
    PERFORM require_read_committed();
    SELECT max(to_id) INTO wanted FROM log_partition WHERE stream_id = p_stream AND sealed_at IS NULL AND to_id <= head;
    IF settled < wanted THEN
        settled := look_at_gap(p_stream, wanted - 1);
    END IF;
    UPDATE log_partition SET sealed_at = clock_timestamp() WHERE stream_id = p_stream AND sealed_at IS NULL AND to_id <= settled;
    GET DIAGNOSTICS sealed = ROW_COUNT;
    more := settled < wanted;
    RETURN NEXT;
END $$;
