-- What people read in psql: cursors, leases, exceptions and dead letters by the names of stream and group.
--
-- The tables exist once per stream, so each view is a function that goes through the streams; the functions take a
-- stream and a group name to look at less (NULL: all), which the views cannot push down.
-- Without jit: where a sequential scan is the only way (a sequence), ruling it out makes the plan look dear enough to be
-- compiled before 18, and looking at eight groups took 330 ms instead of 10.

-- Makes a view, and makes one anew only if that changes it: that waits for every transaction that has read it, and whoever reads
-- it afterwards waits with it.
CREATE OR REPLACE FUNCTION make_view(p_name text, p_query text) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    installed regclass := to_regclass(quote_ident(p_name));
    same      boolean  := false;
BEGIN
    IF installed IS NOT NULL THEN
        EXECUTE 'CREATE VIEW view_made_anew AS ' || p_query;
        same := pg_get_viewdef(installed) = pg_get_viewdef('view_made_anew'::regclass);
        DROP VIEW view_made_anew;
    END IF;
    IF NOT same THEN
        EXECUTE format('CREATE OR REPLACE VIEW %I AS %s', p_name, p_query);
    END IF;
END $$;

-- Exceptions are counted up to here, of each state; where there are more it is an estimate.
CREATE OR REPLACE FUNCTION counted_up_to() RETURNS bigint
LANGUAGE sql IMMUTABLE AS $$ SELECT 100000::bigint $$;

-- How many rows a query has, as the planner sees it: from a sample, and without reading them.
CREATE OR REPLACE FUNCTION estimated_rows(p_query text) RETURNS bigint
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    plan json;
BEGIN
    EXECUTE 'EXPLAIN (FORMAT JSON) ' || p_query INTO plan;
    RETURN (plan -> 0 -> 'Plan' ->> 'Plan Rows')::numeric::bigint;
END $$;

-- About how many exceptions of a group are in a state, of which p_counted were counted, that is, counted_up_to and one more where there are more.
CREATE OR REPLACE FUNCTION about_exceptions(p_stream bigint, p_group bigint, p_state text, p_counted bigint) RETURNS bigint
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    IF p_counted <= counted_up_to() THEN
        RETURN p_counted;
    END IF;
    RETURN greatest(p_counted, estimated_rows(format('SELECT FROM %I WHERE group_id = %s AND state = %L', 'exception_queue_' || p_stream, p_group, p_state)));
END $$;

-- estimated: ready, inflight, deferred or dead is, being more than counted_up_to. Each state has an index, which the order makes sure of, and no more than that is
-- read of it; the deferred ones are looked for among all that are not dead of their lanes.
CREATE OR REPLACE FUNCTION list_cursors(p_stream text DEFAULT NULL, p_group text DEFAULT NULL)
RETURNS TABLE (stream text, consumer_group text, stream_id bigint, group_id bigint, claimed bigint, resolved bigint, head bigint, lag bigint,
               open_leases bigint, ready bigint, inflight bigint, deferred bigint, dead bigint, paused boolean, max_in_flight int, rate_limit double precision, mode text, expired bigint, superseded bigint, dropped bigint, replaying bigint,
               estimated boolean)
LANGUAGE plpgsql STABLE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    s record;
BEGIN
    FOR s IN SELECT * FROM stream WHERE name = p_stream OR p_stream IS NULL ORDER BY name LOOP
        -- Per group and newest generation first: anything that looked at the tables as a whole would walk dead rows.
        RETURN QUERY EXECUTE format(
            'SELECT $1, g.name, $2, g.id, c.claimed, least(l.lowest - 1, c.claimed), h.head, greatest(h.head - c.claimed, 0),
                    l.open, e.ready, e.inflight, e.deferred, e.dead, g.paused, g.max_in_flight, g.rate_limit, g.mode, coalesce(t.expired, 0), coalesce(t.superseded, 0), coalesce(t.dropped, 0),
                    coalesce((SELECT sum(r.upto_id - r.next_id + 1) FROM unnest(c.replays) AS r), 0)::bigint + l.replaying, e.estimated
             FROM consumer_group AS g
             LEFT JOIN group_tally AS t ON t.group_id = g.id
             CROSS JOIN (SELECT CASE WHEN is_called THEN last_value ELSE 0 END AS head FROM %3$I) AS h
             CROSS JOIN LATERAL (SELECT claimed, first_open, replays FROM %1$I WHERE group_id = g.id ORDER BY generation DESC LIMIT 1) AS c
             CROSS JOIN LATERAL (SELECT min(lower(pending)) FILTER (WHERE replay IS NULL) AS lowest, count(*) AS open,
                                        coalesce(sum(id_count(pending)) FILTER (WHERE replay IS NOT NULL), 0)::bigint AS replaying FROM %2$I WHERE group_id = g.id AND seq >= c.first_open) AS l
             CROSS JOIN LATERAL (
                 SELECT (SELECT count(*) FROM (SELECT FROM %4$I WHERE group_id = g.id AND state = ''ready'' AND losses = 0 ORDER BY due_at LIMIT $4) AS x) AS ready,
                        (SELECT count(*) FROM (SELECT FROM %4$I WHERE group_id = g.id AND state = ''ready'' AND losses > 0 ORDER BY due_at LIMIT $4) AS x) AS suspect,
                        (SELECT count(*) FROM (SELECT FROM %4$I WHERE group_id = g.id AND state = ''inflight'' ORDER BY lease_expires_at LIMIT $4) AS x) AS inflight,
                        (SELECT count(*) FROM (SELECT FROM %4$I WHERE group_id = g.id AND state = ''dead'' ORDER BY message_id LIMIT $4) AS x) AS dead) AS n
             CROSS JOIN LATERAL (SELECT count(*) FILTER (WHERE state = ''deferred'') AS deferred, count(*) AS laned
                                 FROM (SELECT state FROM %4$I WHERE group_id = g.id AND lane >= 0 AND state <> ''dead'' ORDER BY key, message_id LIMIT $4) AS x) AS d
             CROSS JOIN LATERAL (
                 SELECT CASE WHEN greatest(n.ready, n.suspect) < $4 THEN n.ready + n.suspect ELSE about_exceptions($2, g.id, ''ready'', n.ready + n.suspect) END AS ready,
                        CASE WHEN n.inflight < $4 THEN n.inflight ELSE about_exceptions($2, g.id, ''inflight'', n.inflight) END AS inflight,
                        CASE WHEN n.dead < $4 THEN n.dead ELSE about_exceptions($2, g.id, ''dead'', n.dead) END AS dead,
                        CASE WHEN d.laned < $4 THEN d.deferred ELSE about_exceptions($2, g.id, ''deferred'', d.laned) END AS deferred,
                        greatest(n.ready, n.suspect, n.inflight, n.dead, d.laned) >= $4 AS estimated) AS e
             WHERE g.stream_id = $2 AND (g.name = $3 OR $3 IS NULL) ORDER BY g.name',
            'consumer_group_cursor_' || s.id, 'consumer_lease_' || s.id, 'message_log_' || s.id || '_id_seq', 'exception_queue_' || s.id)
            USING s.name, s.id, p_group, counted_up_to() + 1;
    END LOOP;
END $$;
SELECT make_view('consumer_group_cursor', 'SELECT * FROM list_cursors()');

CREATE OR REPLACE FUNCTION list_leases(p_stream text DEFAULT NULL, p_group text DEFAULT NULL)
RETURNS TABLE (stream text, consumer_group text, seq bigint, token uuid, pending int8multirange, expires_at timestamptz, reclaims int, owner bigint)
LANGUAGE plpgsql STABLE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    s record;
BEGIN
    FOR s IN SELECT * FROM stream WHERE name = p_stream OR p_stream IS NULL ORDER BY name LOOP
        RETURN QUERY EXECUTE format(
            'SELECT $1, g.name, l.seq, l.token, l.pending, l.expires_at, l.reclaims, l.owner
             FROM consumer_group AS g
             CROSS JOIN LATERAL (SELECT first_open FROM %I WHERE group_id = g.id ORDER BY generation DESC LIMIT 1) AS c
             CROSS JOIN LATERAL (SELECT * FROM %I WHERE group_id = g.id AND seq >= c.first_open) AS l
             WHERE g.stream_id = $2 AND (g.name = $3 OR $3 IS NULL) ORDER BY g.name, l.seq',
            'consumer_group_cursor_' || s.id, 'consumer_lease_' || s.id)
            USING s.name, s.id, p_group;
    END LOOP;
END $$;
SELECT make_view('consumer_lease', 'SELECT * FROM list_leases()');

CREATE OR REPLACE FUNCTION list_exceptions(p_stream text DEFAULT NULL, p_group text DEFAULT NULL, p_state text DEFAULT NULL,
    p_after bigint DEFAULT 0, p_limit bigint DEFAULT 9223372036854775807)
RETURNS TABLE (stream text, consumer_group text, message_id bigint, state text, attempts int, delays int, losses int, redrives int,
               due_at timestamptz, lease_expires_at timestamptz, key text, last_error text, history jsonb, first_failed_at timestamptz, dead_at timestamptz)
LANGUAGE plpgsql STABLE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    s record;
BEGIN
    FOR s IN SELECT * FROM stream WHERE name = p_stream OR p_stream IS NULL ORDER BY name LOOP
        RETURN QUERY EXECUTE format(
            'SELECT $1, g.name, e.message_id, e.state, e.attempts, e.delays, e.losses, e.redrives,
                    e.due_at, e.lease_expires_at, e.key, e.last_error, e.history, e.first_failed_at, e.dead_at
             FROM consumer_group AS g
             CROSS JOIN LATERAL (SELECT * FROM %I WHERE group_id = g.id AND message_id > $4 %s ORDER BY message_id LIMIT $5) AS e
             WHERE g.stream_id = $2 AND (g.name = $3 OR $3 IS NULL) ORDER BY g.name, e.message_id',
            'exception_queue_' || s.id, CASE WHEN p_state IS NOT NULL THEN format('AND state = %L', p_state) END)
            USING s.name, s.id, p_group, p_after, p_limit;
    END LOOP;
END $$;
SELECT make_view('exception_queue', 'SELECT * FROM list_exceptions()');
SELECT make_view('dead_letter', $$
    SELECT stream, consumer_group, message_id, attempts, losses, redrives, key, last_error, history, first_failed_at, dead_at
    FROM list_exceptions(p_state => 'dead')$$);
