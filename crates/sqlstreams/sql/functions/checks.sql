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

-- Refuses what the stream does not take as a message.
CREATE OR REPLACE FUNCTION require_message(s stream, p_payload text, p_key text, p_routing_key text, p_headers jsonb) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM require_that(p_payload IS NOT NULL OR s.compacted, format('a message of stream %I has a payload', s.name), 'Only a compacted stream takes messages without one, which remove their keys.');
    PERFORM require_that(p_key IS NOT NULL OR NOT s.compacted, format('a message of compacted stream %I has a key', s.name), 'Say which value it is.');
    PERFORM require_that(coalesce(octet_length(p_key), 0) <= 1024, format('a key takes at most 1024 bytes, this one has %s', octet_length(p_key)), 'Choose a shorter one.');
    PERFORM require_that(coalesce(octet_length(p_routing_key), 0) <= 255, format('a routing key takes at most 255 bytes, this one has %s', octet_length(p_routing_key)), 'Choose a shorter one.');
    PERFORM require_that(coalesce(jsonb_typeof(p_headers), 'object') = 'object', format('headers are a JSON object, not %s', jsonb_typeof(p_headers)), 'Write {"name": "value"}.');
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

-- Everything that makes a function do what it does, in short, and the same in every version of PostgreSQL.
CREATE OR REPLACE FUNCTION function_digest(p_function oid) RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT md5(concat_ws('|', p.prosrc, p.proconfig::text, pg_get_function_result(p.oid), pg_get_function_identity_arguments(p.oid), p.pronargdefaults, p.provolatile, p.prosecdef, p.proisstrict, p.proretset, l.lanname))
    FROM pg_proc AS p JOIN pg_language AS l ON l.oid = p.prolang WHERE p.oid = p_function
$$;

-- The functions that are made for a stream, as far as they are there.
CREATE OR REPLACE FUNCTION stream_functions(p_stream bigint) RETURNS oid[]
LANGUAGE sql VOLATILE AS $$
    SELECT array_agg(oid) FROM pg_proc
    WHERE proname = ANY (ARRAY['settle_message_' || p_stream, 'produce_' || p_stream, 'latest_message_' || p_stream, 'current_messages_' || p_stream])
      AND pronamespace = (SELECT oid FROM pg_namespace WHERE nspname = current_schema())
$$;
