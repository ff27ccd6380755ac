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

CREATE OR REPLACE FUNCTION refuse_without_cursor(p_group bigint) RETURNS void
LANGUAGE plpgsql STABLE AS $$
BEGIN
    RAISE EXCEPTION 'group % has no cursor: its row is missing', (SELECT quote_ident(name) FROM consumer_group WHERE id = p_group)
        USING ERRCODE = 'SQ016', HINT = 'Ask `sqlstreams doctor`. A restore has left it out, or somebody has deleted it.';
END $$;

-- Locks and returns the cursor. The lock is the group's mutex: every claim goes through it.
CREATE OR REPLACE FUNCTION lock_cursor(p_stream bigint, p_group bigint) RETURNS group_cursor
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    c     group_cursor;
    tries int := 0;
BEGIN
    PERFORM require_tables(p_stream);
    LOOP
        EXECUTE format('SELECT generation, updates, claimed, first_open, next_seq, paced_until, cohorts, waiters, reread_to, replays FROM %I WHERE group_id = $1 ORDER BY generation DESC LIMIT 1 FOR UPDATE',
                       'consumer_group_cursor_' || p_stream)
            INTO c USING p_group;
        EXIT WHEN c.generation IS NOT NULL;
        -- Nothing: the row was rotated while we waited for it (look again), or the group is gone.
        PERFORM require_group(p_stream, p_group);
        tries := tries + 1;
        IF tries > 20 THEN
            PERFORM refuse_without_cursor(p_group);
        END IF;
        PERFORM pg_sleep(0.001 * tries);
    END LOOP;
    RETURN c;
END $$;

CREATE OR REPLACE FUNCTION save_cursor(p_stream bigint, p_group bigint, c group_cursor) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    IF c.updates < 200 THEN
        EXECUTE format('UPDATE %I SET updates = $3 + 1, claimed = $4, first_open = $5, next_seq = $6, paced_until = $7, cohorts = $8, waiters = $9, reread_to = $10, replays = $11 WHERE group_id = $1 AND generation = $2',
                       'consumer_group_cursor_' || p_stream)
            USING p_group, c.generation, c.updates, c.claimed, c.first_open, c.next_seq, c.paced_until, c.cohorts, c.waiters, c.reread_to, c.replays;
    ELSE
        EXECUTE format('DELETE FROM %I WHERE group_id = $1 AND generation = $2', 'consumer_group_cursor_' || p_stream)
            USING p_group, c.generation;
        EXECUTE format('INSERT INTO %I (group_id, generation, claimed, first_open, next_seq, paced_until, cohorts, waiters, reread_to, replays) VALUES ($1, $2 + 1, $3, $4, $5, $6, $7, $8, $9, $10)',
                       'consumer_group_cursor_' || p_stream)
            USING p_group, c.generation, c.claimed, c.first_open, c.next_seq, c.paced_until, c.cohorts, c.waiters, c.reread_to, c.replays;
    END IF;
END $$;

-- The cursor as it stands, without waiting for anybody.
CREATE OR REPLACE FUNCTION peek_cursor(p_stream bigint, p_group bigint) RETURNS group_cursor
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    c group_cursor;
BEGIN
    PERFORM require_tables(p_stream);
    EXECUTE format('SELECT generation, updates, claimed, first_open, next_seq, paced_until, cohorts, waiters, reread_to, replays FROM %I WHERE group_id = $1 ORDER BY generation DESC LIMIT 1',
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

-- How far every group of a stream (or p_group) has resolved, and which is furthest behind; NULLs without groups. In one statement, since a claim moves ids from the cursor to a lease.
-- What a group is still to be handed out once more (a replay, in the cursor's replays) counts as not resolved.
CREATE OR REPLACE FUNCTION resolved_by_groups(p_stream bigint, p_group bigint DEFAULT NULL, OUT resolved bigint, OUT group_id bigint)
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    EXECUTE format(
        'SELECT least(c.claimed, l.lowest - 1, r.lowest - 1), g.id
         FROM consumer_group AS g
         CROSS JOIN LATERAL (SELECT claimed, first_open, replays FROM %I WHERE group_id = g.id ORDER BY generation DESC LIMIT 1) AS c
         CROSS JOIN LATERAL (SELECT min(lower(pending)) AS lowest FROM %I WHERE group_id = g.id AND seq >= c.first_open) AS l
         CROSS JOIN LATERAL (SELECT min(r.next_id) AS lowest FROM unnest(c.replays) AS r) AS r
         WHERE g.stream_id = $1 AND (g.id = $2 OR $2 IS NULL) ORDER BY 1, 2 LIMIT 1', 'consumer_group_cursor_' || p_stream, 'consumer_lease_' || p_stream)
        INTO resolved, group_id USING p_stream, p_group;
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
    RETURN c.claimed >= p_id AND NOT open AND NOT EXISTS (SELECT FROM unnest(c.replays) AS r WHERE r.next_id <= p_id);
END $$;
