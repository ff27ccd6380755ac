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
