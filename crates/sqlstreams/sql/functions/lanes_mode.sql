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
    EXECUTE format('SELECT (SELECT count(*) FROM %I WHERE group_id = $1 AND seq >= $2)
                         + (SELECT count(*) FROM %I WHERE group_id = $1 AND state <> ''dead'')', 'consumer_lease_' || p_stream, exceptions)
        INTO open USING p_group, c.first_open;
    IF open > 0 THEN
        RAISE EXCEPTION 'group % has messages that are handed out or wait for another attempt', quote_ident(g.name)
            USING ERRCODE = 'SQ014', HINT = 'Pause the group, wait until nothing is in flight or ready, and change the mode then.';
    END IF;
    IF p_mode = 'ordered' AND (g.max_in_flight IS NOT NULL OR g.rate_limit IS NOT NULL) THEN
        PERFORM refuse_limits(g.name);
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
    UPDATE consumer_group SET mode = p_mode WHERE id = p_group;
    PERFORM save_cursor(p_stream, p_group, c);
    INSERT INTO audit (action, stream_name, group_name, detail)
        SELECT 'set_mode', s.name, g.name, jsonb_build_object('mode', p_mode) FROM stream AS s WHERE s.id = p_stream;
    PERFORM ring(ARRAY[p_stream]);
END $$;

CREATE OR REPLACE FUNCTION refuse_limits(p_name text) RETURNS void
LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    RAISE EXCEPTION 'group % is ordered, and takes neither max_in_flight nor rate_limit', quote_ident(p_name)
        USING ERRCODE = 'SQ004', HINT = 'Lift the limits, or make the group parallel or fair.';
END $$;
