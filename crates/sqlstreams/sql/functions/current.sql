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
