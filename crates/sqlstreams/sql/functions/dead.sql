-- Dead letters: what an operator does about them.

-- How many dead letters a group has. All of them are counted: list_cursors estimates, where there are very many.
CREATE OR REPLACE FUNCTION count_dead(p_stream bigint, p_group bigint) RETURNS bigint
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
DECLARE
    dead bigint;
BEGIN
    PERFORM require_group(p_stream, p_group);
    EXECUTE format('SELECT count(*) FROM %I WHERE group_id = $1 AND state = ''dead''', 'exception_queue_' || p_stream) INTO dead USING p_group;
    RETURN dead;
END $$;

-- Puts dead letters of a group back to work: attempts start again, the history stays. p_ids NULL means all, lowest id
-- first, at most p_limit of them. Returns the ids; those that are not dead (any more) are not among them, so doing it
-- twice is harmless. The message itself stays in the log: other groups never see it.
CREATE OR REPLACE FUNCTION redrive(p_stream bigint, p_group bigint, p_ids bigint[] DEFAULT NULL, p_limit bigint DEFAULT 10000) RETURNS bigint[]
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
DECLARE
    g   consumer_group := require_group(p_stream, p_group);
    ids bigint[];
BEGIN
    IF g.mode = 'ordered' THEN
        -- In its place among the unresolved messages of its key.
        PERFORM lock_cursor(p_stream, p_group);
    END IF;
    ids := lock_dead(p_stream, p_group, p_ids, p_limit);
    EXECUTE format(
        'UPDATE %I SET state = ''ready'', attempts = 0, redrives = redrives + 1, due_at = clock_timestamp(), dead_at = NULL,
                history = add_history(history, 0, ''redriven'', NULL)
         WHERE group_id = $1 AND message_id >= (SELECT min(i) FROM unnest($2) AS i) AND message_id = ANY ($2)', 'exception_queue_' || p_stream)
        USING p_group, ids;
    IF g.mode = 'ordered' THEN
        PERFORM line_up(p_stream, p_group, ids);
    END IF;
    PERFORM audit_dead('redrive', p_stream, p_group, ids);
    RETURN ids;
END $$;

-- Gives dead letters up for good: the group counts them as resolved, the audit keeps their ids.
CREATE OR REPLACE FUNCTION discard(p_stream bigint, p_group bigint, p_ids bigint[] DEFAULT NULL, p_limit bigint DEFAULT 10000) RETURNS bigint[]
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
DECLARE
    ids bigint[] := lock_dead(p_stream, p_group, p_ids, p_limit);
BEGIN
    EXECUTE format('DELETE FROM %I WHERE group_id = $1 AND message_id >= (SELECT min(i) FROM unnest($2) AS i) AND message_id = ANY ($2)', 'exception_queue_' || p_stream) USING p_group, ids;
    EXECUTE format('DELETE FROM %I WHERE group_id = $1 AND message_id >= (SELECT min(i) FROM unnest($2) AS i) AND message_id = ANY ($2)', 'consumer_done_' || p_stream) USING p_group, ids;
    PERFORM audit_dead('discard', p_stream, p_group, ids);
    RETURN ids;
END $$;

CREATE OR REPLACE FUNCTION lock_dead(p_stream bigint, p_group bigint, p_ids bigint[], p_limit bigint) RETURNS bigint[]
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    ids bigint[];
BEGIN
    PERFORM require_group(p_stream, p_group);
    PERFORM require_limit(p_limit);
    -- In id order and skipping what another operator has in hand, so that two of them never wait for each other.
    EXECUTE format(
        'SELECT coalesce(array_agg(message_id ORDER BY message_id), ''{}'') FROM (
             SELECT message_id FROM %I WHERE group_id = $1 AND state = ''dead'' AND ($2 IS NULL OR message_id = ANY ($2))
             ORDER BY message_id LIMIT $3 FOR UPDATE SKIP LOCKED) AS x', 'exception_queue_' || p_stream)
        INTO ids USING p_group, p_ids, p_limit;
    RETURN ids;
END $$;

CREATE OR REPLACE FUNCTION audit_dead(p_action text, p_stream bigint, p_group bigint, p_ids bigint[]) RETURNS void
LANGUAGE sql VOLATILE AS $$
    INSERT INTO audit (action, stream_name, group_name, detail)
        SELECT p_action, s.name, g.name, jsonb_build_object('count', cardinality(p_ids), 'ids', p_ids)
        FROM consumer_group AS g JOIN stream AS s ON s.id = g.stream_id
        WHERE g.id = p_group AND s.id = p_stream AND cardinality(p_ids) > 0
$$;
