-- Fair groups: where very much of one tenant waits, the others' messages do not wait behind it. The tenant is the message's key.
--
-- The lanes of lanes.sql, but nobody owns one: advance, fetch, settle and the exceptions are those of parallel groups, and any number of leases
-- may be for the same lane, or for the same ids in different lanes. The cursor's cohorts stand in the order of their turns: first
-- the one that was served longest ago.
--
-- Invariants, beside those of lease.sql:
--   * A message is in one place: above the position of its lane's cohort, in one lease that is for its lane, in an exception row, or resolved.
--   * A lane is in one cohort. Up to the highest position everything is final.
--   * claimed is the lowest position.
--   * A cohort that has something to read is served before any other is served twice.
--
-- A claim reads no message, so it cannot know whose they are. The caller does, of what it has fetched: it names the lanes that it wants,
-- those that are heavy, and how large a part of the ids each has. From a cohort of which more waits than is claimed the lanes that are
-- not heavy go on alone. So a tenant's burst is left behind once, and the others pass over it in wide claims.

-- Of the lanes that are there, those to hand out now. p_much: there is more than is claimed.
CREATE OR REPLACE FUNCTION choose_lanes(p_there bigint, w lane_wish, p_much boolean) RETURNS bigint
LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN p_much AND p_there & w.lanes & ~w.heavy <> 0 THEN p_there & w.lanes & ~w.heavy ELSE p_there & w.lanes END
$$;

-- Among how many ids about p_limit messages of these lanes are to be found.
CREATE OR REPLACE FUNCTION lane_width(p_lanes bigint, w lane_wish, p_limit bigint) RETURNS bigint
LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN w.shares IS NULL THEN p_limit ELSE greatest(p_limit, least(w.most,
        p_limit / greatest((SELECT sum(share) FROM unnest(w.shares) WITH ORDINALITY AS u(share, n) WHERE (p_lanes >> (n - 1)::int) & 1 = 1), 1e-6)))::bigint END
$$;

-- The cohorts after these lanes were served up to p_position: their turn is the last, together with those that stand there already.
CREATE OR REPLACE FUNCTION serve_lanes(p_cohorts lane_cohort[], p_lanes bigint, p_position bigint) RETURNS lane_cohort[]
LANGUAGE sql IMMUTABLE AS $$
    SELECT array_agg((lanes, position)::lane_cohort ORDER BY turn)
    FROM (SELECT bit_or(lanes) AS lanes, position, max(turn) AS turn
          FROM (SELECT lanes & ~p_lanes AS lanes, position, turn FROM unnest(p_cohorts) WITH ORDINALITY AS u(lanes, position, turn)
                UNION ALL SELECT p_lanes, p_position, 1000) AS x
          WHERE lanes <> 0 GROUP BY position) AS y
$$;

-- The next ids of the log, for the lanes whose turn it is. unread: lanes that have more.
CREATE OR REPLACE FUNCTION next_in_turn(p_stream bigint, p_group bigint, w lane_wish, p_limit bigint, INOUT c group_cursor, OUT range int8multirange, OUT lanes bigint, OUT unread bigint)
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    turns  lane_cohort[] := c.cohorts;
    top    bigint := (SELECT max(y.position) FROM unnest(turns) AS y);
    head   bigint;
    x      record;
    r      record;
    at     group_cursor;
    width  bigint;
    beyond bigint;
    read   bigint := 0;
BEGIN
    -- Only then anything depends on it.
    IF cardinality(turns) > 1 OR w.heavy <> 0 THEN
        head := greatest(top, log_head(p_stream));
    END IF;
    FOR x IN SELECT u.lanes, u.position FROM unnest(turns) WITH ORDINALITY AS u(lanes, position, turn) ORDER BY turn LOOP
        CONTINUE WHEN x.lanes & w.lanes = 0 OR x.position >= head;
        lanes := choose_lanes(x.lanes, w, coalesce(head - x.position > p_limit, false));
        width := lane_width(lanes, w, p_limit);
        at := c;
        at.claimed := x.position;
        IF x.position < top THEN
            -- Others have been there. No further than where the next ones stand: with those it goes on then.
            beyond := (SELECT min(y.position) FROM unnest(c.cohorts) AS y WHERE y.position > x.position);
            at.claimed := least(x.position + width, beyond);
            range := int8multirange(int8range(x.position, at.claimed, '(]'));
            IF x.position < c.reread_to THEN
                SELECT f.ids, f.upto INTO range, at.claimed FROM free_ids(p_stream, p_group, range) AS f;
            END IF;
        ELSE
            SELECT * INTO r FROM next_range(p_stream, p_group, width, at);
            at := r.c;
            range := r.range;
            IF range IS NULL OR at.claimed - lower(range) + 1 < width THEN
                -- That was all, for now.
                read := read | x.lanes;
            END IF;
        END IF;
        IF at.claimed > x.position THEN
            c.cohorts := serve_lanes(c.cohorts, lanes, at.claimed);
            c.claimed := lowest_position(c.cohorts);
        END IF;
        EXIT WHEN NOT isempty(range);
        range := NULL;
    END LOOP;
    top := (SELECT max(y.position) FROM unnest(c.cohorts) AS y);
    unread := (SELECT coalesce(bit_or(CASE WHEN y.position < top THEN y.lanes WHEN coalesce(head > top, true) THEN y.lanes & ~read ELSE 0 END), 0) FROM unnest(c.cohorts) AS y);
END $$;

-- Before a lease is taken over: of its lanes only those to hand out now stay in it, the others become a lease of their own, as old
-- and as often lost as it is.
CREATE OR REPLACE FUNCTION cut_lease(p_stream bigint, p_group bigint, w lane_wish, p_limit bigint, p_seq bigint, p_pending int8multirange, INOUT c group_cursor, INOUT lanes bigint)
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    there bigint := coalesce(lanes, -1);
BEGIN
    lanes := choose_lanes(there, w, id_count(p_pending) > p_limit);
    IF lanes <> there THEN
        EXECUTE format('INSERT INTO %1$I (group_id, seq, token, lanes, replay, pending, expires_at, reclaims)
                        SELECT group_id, $3, gen_random_uuid(), $4, replay, $5, expires_at, reclaims FROM %1$I WHERE group_id = $1 AND seq = $2', 'consumer_lease_' || p_stream)
            USING p_group, p_seq, c.next_seq, there & ~lanes, p_pending;
        c.next_seq := c.next_seq + 1;
    END IF;
END $$;

-- Up to p_limit exceptions that are due, of these lanes: of each that has some about as many, those first that are due longest.
CREATE OR REPLACE FUNCTION due_in_turn(p_stream bigint, p_group bigint, p_lanes bigint, p_limit bigint, p_from timestamptz, p_now timestamptz) RETURNS bigint[]
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    exceptions text := 'exception_queue_' || p_stream;
    ready      text := 'group_id = $1 AND lane = l.lane AND lane >= 0 AND state = ''ready'' AND losses = 0 AND due_at <= $3 AND due_at >= $4';
    filled     smallint[];
    ids        bigint[];
BEGIN
    EXECUTE format('SELECT array_agg(l.lane) FROM unnest($2) AS l(lane) CROSS JOIN LATERAL (SELECT FROM %I WHERE %s ORDER BY due_at LIMIT 1) AS e', exceptions, ready)
        INTO filled USING p_group, ARRAY(SELECT i::smallint FROM generate_series(0, 63) AS i WHERE (p_lanes >> i) & 1 = 1), p_now, p_from;
    IF filled IS NULL THEN
        RETURN '{}';
    END IF;
    EXECUTE format(
        'SELECT array_agg(message_id) FROM (
             SELECT e.message_id FROM unnest($2) AS l(lane)
             CROSS JOIN LATERAL (SELECT message_id, due_at FROM %I WHERE %s ORDER BY due_at LIMIT $5 FOR UPDATE SKIP LOCKED) AS e
             ORDER BY e.due_at LIMIT $6) AS x', exceptions, ready)
        INTO ids USING p_group, filled, p_now, p_from, ceil(p_limit::numeric / cardinality(filled))::bigint, p_limit;
    RETURN ids;
END $$;
