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

-- Creates a group that starts after p_after (0: the beginning), or with the lowest id that is kept, if that is above it. Settings not given take the table's defaults. p_bindings: see
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
    EXECUTE format('INSERT INTO %I (group_id, generation, claimed) VALUES ($1, 0, $2)', 'consumer_group_cursor_' || p_stream) USING g, greatest(p_after, hold_first_id(p_stream) - 1);
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
