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
    EXECUTE format($text$
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
        $text$, current_schema(), 'latest_message_' || p_stream, 'message_log_' || p_stream, s.payload_type);
    -- From key to key, whatever the number of versions that each has.
    EXECUTE format($text$
        CREATE OR REPLACE FUNCTION %2$I(p_after text, p_limit bigint)
        RETURNS TABLE (id bigint, key text, routing_key text, headers jsonb, produced_at timestamptz, expires_at timestamptz, payload %5$s)
        LANGUAGE plpgsql STABLE SET enable_seqscan = off SET jit = off SET constraint_exclusion = off SET plan_cache_mode = force_generic_plan AS $$
        #variable_conflict use_column
        DECLARE
            next  text;
            found bigint := 0;
        BEGIN
            -- No key sorts before the empty one, which is a key.
            IF p_after IS NULL THEN
                SELECT l.key INTO next FROM %1$I.%3$I AS l WHERE l.key >= '' ORDER BY l.key LIMIT 1;
            ELSE
                SELECT l.key INTO next FROM %1$I.%3$I AS l WHERE l.key > p_after ORDER BY l.key LIMIT 1;
            END IF;
            WHILE next IS NOT NULL AND found < p_limit LOOP
                FOR id, key, routing_key, headers, produced_at, expires_at, payload IN SELECT m.* FROM %1$I.%4$I(next) AS m LOOP
                    found := found + 1;
                    RETURN NEXT;
                END LOOP;
                SELECT (SELECT l.key FROM %1$I.%3$I AS l WHERE l.key > next ORDER BY l.key LIMIT 1) INTO next;
            END LOOP;
        END $$
        $text$, current_schema(), 'current_messages_' || p_stream, 'message_log_' || p_stream, 'latest_message_' || p_stream, s.payload_type);
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

-- Current values in the order of their keys, at most p_limit; of keys after p_after (NULL: from the first on).
CREATE OR REPLACE FUNCTION current_messages(p_stream text, p_after text DEFAULT NULL, p_limit bigint DEFAULT 100)
RETURNS TABLE (id bigint, key text, routing_key text, headers jsonb, produced_at timestamptz, expires_at timestamptz, payload text)
LANGUAGE plpgsql STABLE SET search_path FROM CURRENT AS $$
DECLARE
    s stream := find_compacted(p_stream);
BEGIN
    RETURN QUERY EXECUTE format('SELECT m.id, m.key, m.routing_key, m.headers, m.produced_at, m.expires_at, m.payload::text FROM %I($1, $2) AS m', 'current_messages_' || s.id) USING p_after, p_limit;
END $$;
