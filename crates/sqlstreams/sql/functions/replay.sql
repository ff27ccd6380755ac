-- Replay: a range of the log is handed out once more to one group, beside everything else; its cursor stays where it is.
--
-- What is still to be handed out stands in the group's cursor, (next_id, upto_id); with the claims that consumers make it is cut into pieces, leases
-- that nobody has, which they take over like any others. Retries and dead letters are as usual. An id that is in a lease or has an exception row when
-- its piece is cut is left out: it is in one place. One replay of a group after the other, and what is replayed and what is fresh take turns by lot.
--
-- A piece without conditions is a range of ids; with some, the ids that match, found when it is cut, under the cursor's lock: at most 10,000 are
-- looked at in one go, for a twentieth of a second, and at most 64 pieces of them make a lease. So claims stay small however long the range is.

-- The ids p_from_id to p_upto_id, or what was produced from p_from up to but not at p_until; NULL: from the beginning, up to where the group stands,
-- which is the most. A time's edge is as in position.sql; messages produced at about that time may be among them. p_bindings: only messages that
-- match one of these (binding.sql) and the group's own bindings, as they are now; NULL: those that match the latter. p_preview: only says what it
-- would be.
--
-- Returns its number, and which ids; none: the range holds nothing that the group has claimed.
CREATE OR REPLACE FUNCTION replay(p_stream bigint, p_group bigint, p_from_id bigint DEFAULT NULL, p_upto_id bigint DEFAULT NULL,
    p_from timestamptz DEFAULT NULL, p_until timestamptz DEFAULT NULL, p_bindings jsonb DEFAULT NULL, p_preview boolean DEFAULT false)
RETURNS TABLE (replay bigint, from_id bigint, upto_id bigint)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off SET constraint_exclusion = off AS $$
#variable_conflict use_column
DECLARE
    s         stream;
    g         consumer_group;
    c         group_cursor;
    bindings  jsonb := nullif(normal_bindings(coalesce(p_bindings, '[]')), '[]');
    condition text;
BEGIN
    PERFORM require_read_committed();
    s := require_stream(p_stream);
    g := require_group(p_stream, p_group);
    PERFORM require_that((p_from_id IS NULL OR p_from IS NULL) AND (p_upto_id IS NULL OR p_until IS NULL),
                             'a range has one beginning and one end', 'Say each by an id or by a time.');
    PERFORM require_that(p_from_id <= p_upto_id IS NOT FALSE AND p_from < p_until IS NOT FALSE, 'the range ends before it begins', 'Say its beginning first.');
    PERFORM require_past(p_from);
    IF NOT p_preview THEN
        PERFORM FROM stream WHERE id = p_stream FOR KEY SHARE;
        IF s.compacted THEN
            PERFORM pg_advisory_xact_lock_shared(compact_lock(p_stream));
        END IF;
    END IF;
    from_id := coalesce(p_from_id, (SELECT first_from FROM time_edge(p_stream, p_from) WHERE p_from IS NOT NULL), 1);
    upto_id := coalesce(p_upto_id, (SELECT last_before FROM time_edge(p_stream, p_until) WHERE p_until IS NOT NULL));
    IF p_preview THEN
        c := peek_cursor(p_stream, p_group);
    ELSE
        c := lock_cursor(p_stream, p_group);
        g := require_group(p_stream, p_group);
    END IF;
    IF g.mode = 'ordered' THEN
        RAISE EXCEPTION 'group % is ordered: what is replayed would be handled beside later messages of the same keys', quote_ident(g.name)
            USING ERRCODE = 'SQ012', HINT = 'Move the group back (seek), or let a new group read the range.';
    END IF;
    -- An id and a time. Nothing can be said of an id that the group has not come to.
    PERFORM require_that(from_id <= upto_id + 1 IS NOT FALSE OR from_id > c.claimed OR (p_from_id IS NULL) = (p_upto_id IS NULL),
                         'the range ends before it begins', 'Say its beginning first.');
    from_id := greatest(from_id, lowest_id(p_stream));
    -- What is above comes anyway.
    upto_id := least(upto_id, c.claimed);
    IF from_id > upto_id THEN
        from_id := NULL;
        upto_id := NULL;
    END IF;
    IF p_preview OR from_id IS NULL THEN
        RETURN NEXT;
        RETURN;
    END IF;
    PERFORM require_that(coalesce(cardinality(c.replays), 0) < 16, format('16 replays of group %s wait already', quote_ident(g.name)),
                             'Ask again when one has ended, or cancel some.');

    condition := (SELECT string_agg(format('(%s)', x), ' AND ')
                  FROM unnest(ARRAY[bindings_condition(latest_bindings(p_group)),
                                    CASE WHEN bindings IS NOT NULL THEN bindings_condition(bindings) END]) AS x WHERE x IS NOT NULL);
    INSERT INTO replay AS r (group_id, from_id, upto_id, bindings, condition) VALUES (p_group, from_id, upto_id, bindings, condition)
        RETURNING r.id INTO replay;
    c.replays := c.replays || (replay, from_id, upto_id)::group_replay;
    PERFORM save_cursor(p_stream, p_group, c);
    -- A hundred are remembered, and those that are not over.
    DELETE FROM replay AS r WHERE r.group_id = p_group
        AND r.id <= (SELECT o.id FROM replay AS o WHERE o.group_id = p_group ORDER BY o.id DESC OFFSET 100 LIMIT 1)
        AND r.id <> ALL (ARRAY(SELECT x.id FROM unnest(c.replays) AS x));
    INSERT INTO audit (action, stream_name, group_name, detail)
        VALUES ('replay', s.name, g.name, jsonb_strip_nulls(
            jsonb_build_object('replay', replay, 'from_id', from_id, 'upto_id', upto_id,
                'from', p_from, 'until', p_until, 'bindings', bindings)));
    PERFORM ring(ARRAY[p_stream]);
    RETURN NEXT;
END $$;

-- SECURITY DEFINER: what consumers need not be granted.
CREATE OR REPLACE FUNCTION replay_condition(p_replay bigint) RETURNS text
LANGUAGE sql STABLE SECURITY DEFINER SET search_path FROM CURRENT AS $$ SELECT condition FROM replay WHERE id = p_replay $$;

-- Cuts the next piece off what is replayed, about p_limit ids, as a lease that nobody has; unless there is one already. The caller has the cursor's lock.
CREATE OR REPLACE FUNCTION feed_replay(p_stream bigint, g consumer_group, p_limit bigint, INOUT c group_cursor)
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    leases    text := 'consumer_lease_' || p_stream;
    started   timestamptz := clock_timestamp();
    r         group_replay := c.replays[1];
    condition text := replay_condition(r.id);
    at        group_cursor := c;
    x         record;
    waits     boolean;
    piece     int8multirange;
    upto      bigint;
    begun     bigint := r.next_id;
BEGIN
    EXECUTE format('SELECT EXISTS (SELECT FROM %I WHERE group_id = $1 AND seq >= $2 AND replay IS NOT NULL AND expires_at <= $3)', leases)
        INTO waits USING g.id, c.first_open, started;
    IF waits THEN
        RETURN;
    END IF;
    -- Exception rows are left out all along.
    at.reread_to := r.upto_id;
    WHILE r.next_id <= r.upto_id LOOP
        at.claimed := r.next_id - 1;
        SELECT * INTO x FROM next_range(p_stream, g.id, CASE WHEN condition IS NULL THEN least(p_limit, 10000) ELSE 10000 END, at);
        at := x.c;
        -- A writer that has not committed may still bring what is missing.
        EXIT WHEN at.claimed < r.next_id;
        upto := least(at.claimed, r.upto_id);
        piece := coalesce(x.range, '{}') * int8multirange(int8range(NULL, upto, '[]'));
        IF NOT isempty(piece) THEN
            SELECT f.ids, f.upto INTO piece, upto FROM first_pieces(piece - leased_ids(p_stream, g, c, piece), upto) AS f;
        END IF;
        IF condition IS NOT NULL AND NOT isempty(piece) THEN
            EXECUTE format('SELECT coalesce(range_agg(int8range(id, id, ''[]'')), ''{}'') AS ids, count(*) AS count
                                FROM (SELECT id FROM %I WHERE id >= $1 AND id < $2 AND $3 @> id AND (%s) ORDER BY id LIMIT $4) AS m',
                           'message_log_' || p_stream, condition)
                INTO x USING lower(piece), upper(piece), piece, p_limit;
            IF x.count = p_limit THEN
                upto := upper(x.ids) - 1;
            END IF;
            SELECT f.ids, f.upto INTO piece, upto FROM first_pieces(x.ids, upto) AS f;
        END IF;
        r.next_id := upto + 1;
        IF NOT isempty(piece) THEN
            IF g.transactional THEN
                -- Left behind by handlers that had lost them: else they would count as settled again.
                EXECUTE format('DELETE FROM %I WHERE group_id = $1 AND message_id >= $2 AND message_id < $3 AND $4 @> message_id', 'consumer_done_' || p_stream)
                    USING g.id, lower(piece), upper(piece), piece;
            END IF;
            EXECUTE format('INSERT INTO %I (group_id, seq, token, lanes, replay, pending, expires_at)
                                VALUES ($1, $2, gen_random_uuid(), $3, $4, $5, ''-infinity'')', leases)
                USING g.id, c.next_seq, CASE WHEN g.mode = 'fair' THEN -1 END, r.id, piece;
            c.next_seq := c.next_seq + 1;
            EXIT;
        END IF;
        EXIT WHEN clock_timestamp() > started + interval '50 milliseconds';
    END LOOP;
    IF r.next_id > r.upto_id THEN
        c.replays := nullif(c.replays[2:], '{}');
    ELSIF r.next_id > begun THEN
        c.replays[1] := r;
    END IF;
END $$;

-- Which of these ids are in leases of the group. In a fair group leases of the same range are for different lanes.
CREATE OR REPLACE FUNCTION leased_ids(p_stream bigint, g consumer_group, c group_cursor, p_ids int8multirange) RETURNS int8multirange
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    taken int8multirange;
    part  int8multirange;
    l     record;
BEGIN
    taken := '{}';
    IF c.first_open = c.next_seq THEN
        RETURN taken;
    END IF;
    FOR l IN EXECUTE format('SELECT pending * $3 AS pending, lanes FROM %I WHERE group_id = $1 AND seq >= $2 AND pending && $3', 'consumer_lease_' || p_stream)
        USING g.id, c.first_open, p_ids
    LOOP
        part := l.pending;
        IF l.lanes <> -1 THEN
            EXECUTE format('SELECT range_agg(int8range(id, id, ''[]'')) FROM %I WHERE id >= $1 AND id < $2 AND $3 @> id%s',
                           'message_log_' || p_stream, in_lanes(l.lanes))
                INTO part USING lower(part), upper(part), part;
        END IF;
        taken := taken + coalesce(part, '{}');
    END LOOP;
    RETURN taken;
END $$;

-- Gives up what of one replay, or of all of a group (NULL), has not been handed out. What handlers have in hand goes on, and so do retries. Returns
-- how many ids it was.
CREATE OR REPLACE FUNCTION cancel_replay(p_stream bigint, p_group bigint, p_replay bigint DEFAULT NULL) RETURNS bigint
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
DECLARE
    g     consumer_group := require_group(p_stream, p_group);
    c     group_cursor;
    ids   bigint;
    freed record;
    over  bigint[];
    rest  group_replay[];
BEGIN
    PERFORM require_read_committed();
    c := lock_cursor(p_stream, p_group);
    SELECT coalesce(sum(r.upto_id - r.next_id + 1) FILTER (WHERE r.id = p_replay OR p_replay IS NULL), 0),
           array_agg(r.id) FILTER (WHERE r.id = p_replay OR p_replay IS NULL),
           array_agg((r.id, r.next_id, r.upto_id)::group_replay ORDER BY n) FILTER (WHERE r.id <> p_replay)
        INTO ids, over, rest FROM unnest(c.replays) WITH ORDINALITY AS r(id, next_id, upto_id, n);
    EXECUTE format('WITH free AS MATERIALIZED (SELECT seq FROM %1$I
                                           WHERE group_id = $1 AND seq >= $2 AND replay IS NOT NULL AND (replay = $3 OR $3 IS NULL)
                                             AND expires_at = ''-infinity'' ORDER BY seq FOR UPDATE),
                         gone AS (DELETE FROM %1$I AS l USING free WHERE l.group_id = $1 AND l.seq = free.seq RETURNING l.replay, l.pending)
                    SELECT coalesce(sum(id_count(pending)), 0)::bigint AS ids, array_agg(replay) AS replays FROM gone', 'consumer_lease_' || p_stream)
        INTO freed USING p_group, c.first_open, p_replay;
    ids := ids + freed.ids;
    IF ids > 0 THEN
        c.replays := rest;
        c.first_open := first_open_lease(p_stream, p_group, c);
        PERFORM save_cursor(p_stream, p_group, c);
        UPDATE replay SET cancelled_at = clock_timestamp() WHERE id = ANY (over || freed.replays);
        INSERT INTO audit (action, stream_name, group_name, detail)
            SELECT 'cancel_replay', s.name, g.name, jsonb_strip_nulls(jsonb_build_object('replay', p_replay, 'ids', ids))
                FROM stream AS s WHERE s.id = p_stream;
    END IF;
    RETURN ids;
END $$;

-- The replays of a group, the latest first, the last hundred. waiting: ids that are still to be handed out; leased: that are handed out and not
-- finished. Both are upper bounds of the messages. Those with neither are over.
CREATE OR REPLACE FUNCTION list_replays(p_stream bigint, p_group bigint)
RETURNS TABLE (replay bigint, from_id bigint, upto_id bigint, waiting bigint, leased bigint, bindings jsonb,
               created_at timestamptz, created_by text, cancelled boolean)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
DECLARE
    c group_cursor := peek_cursor(p_stream, p_group);
BEGIN
    PERFORM require_group(p_stream, p_group);
    RETURN QUERY EXECUTE format(
        'WITH pieces AS MATERIALIZED (SELECT replay, sum(id_count(pending)) FILTER (WHERE expires_at = ''-infinity'') AS free,
                                              sum(id_count(pending)) FILTER (WHERE expires_at <> ''-infinity'') AS held
                                      FROM %I WHERE group_id = $1 AND seq >= $2 AND replay IS NOT NULL GROUP BY replay)
         SELECT r.id, r.from_id, r.upto_id, (coalesce(x.upto_id - x.next_id + 1, 0) + coalesce(p.free, 0))::bigint, coalesce(p.held, 0)::bigint,
                r.bindings, r.created_at, r.created_by, r.cancelled_at IS NOT NULL
         FROM replay AS r LEFT JOIN unnest($3) AS x ON x.id = r.id LEFT JOIN pieces AS p ON p.replay = r.id
         WHERE r.group_id = $1 ORDER BY r.id DESC', 'consumer_lease_' || p_stream)
        USING p_group, c.first_open, c.replays;
END $$;
