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
    IF open > 0 OR c.replays IS NOT NULL THEN
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
    again      record;
BEGIN
    -- What is replayed is below all that, and goes on by itself.
    FOR again IN EXECUTE format('WITH gone AS (DELETE FROM %I WHERE group_id = $1 AND seq >= $2 AND replay IS NOT NULL RETURNING replay, pending)
                                 SELECT replay, range_agg(pending) AS pending FROM gone GROUP BY replay', leases) USING g.id, c.first_open
    LOOP
        EXECUTE format('INSERT INTO %I (group_id, seq, token, lanes, replay, pending, expires_at) VALUES ($1, $2, gen_random_uuid(), -1, $3, $4, ''-infinity'')', leases)
            USING g.id, c.next_seq, again.replay, again.pending;
        c.next_seq := c.next_seq + 1;
    END LOOP;
    EXECUTE format('WITH gone AS (DELETE FROM %I WHERE group_id = $1 AND seq >= $2 AND replay IS NULL RETURNING pending) SELECT min(lower(pending)) - 1 FROM gone', leases)
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
