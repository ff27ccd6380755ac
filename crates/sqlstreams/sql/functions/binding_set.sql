-- The bindings of a group, in versions: a change holds for ids above the group's claimed at that time, and what was handed
-- out before is judged by what held then, also when its lease is taken over, released or fetched in pages later.
--
-- Invariant: an id is judged by the latest version whose after_id lies below it, by none if there is none: then it is for the
-- group. after_id is the cursor's claimed, read under the cursor's lock, so a claim does not cross it; where a range
-- of ids does all the same, each of them is judged by its own version.
--
-- The versions are the history, too: the last hundred are kept, and what an open lease may need.

-- The condition on messages with p_lower <= id < p_upper, to be put into a query on the log, which it names; NULL: all are for the group.
-- p_replay: they are of a lease that was made for a replay, of ids that it has found to be wanted.
CREATE OR REPLACE FUNCTION binding_condition(p_group bigint, p_lower bigint, p_upper bigint, p_replay bigint DEFAULT NULL) RETURNS text
LANGUAGE plpgsql STABLE AS $$
DECLARE
    g         record;
    condition text;
BEGIN
    SELECT stream_id, bound, newest_only INTO g FROM consumer_group WHERE id = p_group;
    IF NOT g.bound THEN
        RETURN NULL;
    END IF;
    condition := CASE WHEN p_replay IS NULL THEN bound_condition(p_group, p_lower, p_upper) END;
    IF g.newest_only THEN
        condition := concat_ws(' AND ', '(' || condition || ')', format('NOT (%s)', superseded(g.stream_id, 'message_log_' || g.stream_id, p_lower)));
    END IF;
    RETURN condition;
END $$;

-- Whether a newer message of the same key is visible than one that p_message names, as SQL. LIMIT keeps it a look-up per message. Those that are asked about
-- have ids from p_lower on, so that partitions below are not planned for.
CREATE OR REPLACE FUNCTION superseded(p_stream bigint, p_message text, p_lower bigint) RETURNS text
LANGUAGE sql IMMUTABLE AS $$
    SELECT format('(SELECT newer.id FROM %1$I AS newer WHERE newer.key = %2$I.key AND newer.id > %2$I.id AND newer.id >= %3$L::bigint ORDER BY newer.id LIMIT 1) IS NOT NULL',
                  'message_log_' || p_stream, p_message, coalesce(p_lower, 0))
$$;

-- The part of it that the bindings make.
CREATE OR REPLACE FUNCTION bound_condition(p_group bigint, p_lower bigint, p_upper bigint) RETURNS text
LANGUAGE plpgsql STABLE AS $$
DECLARE
    latest record;
BEGIN
    SELECT after_id, condition INTO latest FROM binding_set WHERE group_id = p_group ORDER BY version DESC LIMIT 1;
    IF NOT FOUND THEN
        RETURN NULL;
    ELSIF latest.after_id < p_lower THEN
        RETURN latest.condition;
    END IF;
    RETURN (
        SELECT CASE WHEN bool_and(condition IS NULL) THEN NULL
                    WHEN count(*) = 1 THEN min(condition)
                    ELSE string_agg(format('(id > %s AND id <= %s AND (%s))', after_id, up_to, coalesce(condition, 'true')), ' OR ') END
        FROM (SELECT condition, greatest(after_id, p_lower - 1) AS after_id,
                     least(min(after_id) OVER (ORDER BY version ROWS BETWEEN 1 FOLLOWING AND UNBOUNDED FOLLOWING), p_upper - 1) AS up_to
              FROM (SELECT version, after_id, condition FROM binding_set WHERE group_id = p_group
                    UNION ALL SELECT 0, -1, NULL) AS v) AS v
        WHERE after_id < up_to);
END $$;

-- How many ids to look among for p_limit messages.
CREATE OR REPLACE FUNCTION claim_width(p_limit bigint, p_width bigint) RETURNS bigint
LANGUAGE sql IMMUTABLE AS $$ SELECT greatest(p_limit, least(coalesce(p_width, 10000), 1000000)) $$;

-- Of what was just claimed as lease p_seq, keeps only the ids of messages that are for the group, the first p_limit of them.
-- Fair groups look for messages of the lease's lanes in the same way. For groups with a limit, which count what is handed out, and for clients that do not ask for a width: then what is
-- pending is as many messages as ids. At most 64, so that a lease stays a small row. What lies beyond the last one is given
-- back: to the log if it came from there (p_fresh), else as a lease that anybody can take over.
--
-- pending: NULL where nothing was kept. looked_at: how many ids this is about.
CREATE OR REPLACE FUNCTION keep_matching(p_stream bigint, g consumer_group, p_seq bigint, p_fresh boolean, p_limit bigint, p_lanes bigint, p_replay bigint,
    INOUT c group_cursor, INOUT pending int8multirange, OUT looked_at bigint)
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    leases text := 'consumer_lease_' || p_stream;
    most   bigint := least(p_limit, 64);
    ids    bigint[];
    rest   int8multirange := '{}';
    hits   int;
BEGIN
    EXECUTE format('SELECT array_agg(id) FROM (SELECT id FROM %I WHERE id >= $1 AND id < $2 AND $3 @> id%s AND (%s) ORDER BY id LIMIT $4) AS x',
                   'message_log_' || p_stream, in_lanes(p_lanes), coalesce(binding_condition(g.id, lower(pending), upper(pending), p_replay), 'true'))
        INTO ids USING lower(pending), upper(pending), pending, most;
    IF cardinality(ids) = most THEN
        rest := pending * int8multirange(int8range(ids[most] + 1, NULL));
    END IF;
    looked_at := id_count(pending) - id_count(rest);
    IF NOT isempty(rest) THEN
        IF p_fresh AND g.mode = 'fair' THEN
            c.cohorts := serve_lanes(c.cohorts, p_lanes, ids[most]);
            c.claimed := lowest_position(c.cohorts);
        ELSIF p_fresh THEN
            c.claimed := ids[most];
        ELSE
            -- The lease that it was cut off from may be there still: else each claim would leave a piece behind. With a new token: whoever
            -- had that lease must not settle what is added.
            EXECUTE format('UPDATE %1$I SET pending = pending + $3, token = gen_random_uuid() WHERE group_id = $1 AND seq = (
                                SELECT seq FROM %1$I WHERE group_id = $1 AND seq >= $2 AND expires_at <= $4 AND pending -|- $3 AND lanes IS NOT DISTINCT FROM $5 AND replay IS NOT DISTINCT FROM $6 ORDER BY seq LIMIT 1 FOR UPDATE SKIP LOCKED)', leases)
                USING g.id, c.first_open, rest, clock_timestamp(), p_lanes, p_replay;
            GET DIAGNOSTICS hits = ROW_COUNT;
            IF hits = 0 THEN
                EXECUTE format('INSERT INTO %1$I (group_id, seq, token, lanes, replay, pending, expires_at, reclaims)
                                SELECT group_id, $3, gen_random_uuid(), lanes, replay, $4, ''-infinity'', reclaims FROM %1$I WHERE group_id = $1 AND seq = $2', leases)
                    USING g.id, p_seq, c.next_seq, rest;
                c.next_seq := c.next_seq + 1;
            END IF;
        END IF;
    END IF;
    IF ids IS NULL THEN
        pending := NULL;
        EXECUTE format('DELETE FROM %I WHERE group_id = $1 AND seq = $2', leases) USING g.id, p_seq;
    ELSE
        pending := (SELECT range_agg(int8range(i, i, '[]')) FROM unnest(ids) AS i);
        EXECUTE format('UPDATE %I SET pending = $3 WHERE group_id = $1 AND seq = $2', leases) USING g.id, p_seq, pending;
    END IF;
END $$;

-- The bindings that hold for what is claimed from now on; [] if there are none.
CREATE OR REPLACE FUNCTION current_bindings(p_stream bigint, p_group bigint) RETURNS jsonb
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
BEGIN
    RETURN latest_bindings((require_group(p_stream, p_group)).id);
END $$;

CREATE OR REPLACE FUNCTION latest_bindings(p_group bigint) RETURNS jsonb
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    RETURN coalesce((SELECT bindings FROM binding_set WHERE group_id = p_group ORDER BY version DESC LIMIT 1), '[]');
END $$;

-- Whether these are in force, and the latest that were set: where somebody has deleted a version, the one before it is in force.
CREATE OR REPLACE FUNCTION bindings_are(p_group bigint, p_bindings jsonb) RETURNS boolean
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    RETURN latest_bindings(p_group) = p_bindings
       AND (SELECT binding_version FROM consumer_group WHERE id = p_group) = coalesce((SELECT version FROM binding_set WHERE group_id = p_group ORDER BY version DESC LIMIT 1), 0);
END $$;

-- A new version, for ids above p_after. The caller holds the cursor's lock, or nobody else knows of the group yet.
CREATE OR REPLACE FUNCTION add_binding_set(p_stream bigint, p_group bigint, p_after bigint, p_bindings jsonb) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    WITH added AS (
        INSERT INTO binding_set (group_id, version, after_id, bindings, condition)
            SELECT p_group, coalesce(max(version), 0) + 1, p_after, p_bindings, bindings_condition(p_bindings) FROM binding_set WHERE group_id = p_group
            RETURNING version)
    UPDATE consumer_group SET bound = true, binding_version = (SELECT version FROM added) WHERE id = p_group;
END $$;

-- Replaces the bindings of a group for everything above its cursor, which the caller has locked.
CREATE OR REPLACE FUNCTION replace_bindings(p_stream bigint, g consumer_group, c group_cursor, p_bindings jsonb) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    before  jsonb := latest_bindings(g.id);
    -- In an ordered or fair group that of the lane that is furthest on.
    claimed bigint := greatest(c.claimed, (SELECT max(position) FROM unnest(c.cohorts)));
BEGIN
    PERFORM add_binding_set(p_stream, g.id, claimed, p_bindings);
    INSERT INTO audit (action, stream_name, group_name, detail)
        SELECT 'set_bindings', s.name, g.name, jsonb_build_object('after_id', claimed, 'bindings', p_bindings, 'before', before)
        FROM stream AS s WHERE s.id = p_stream;
    PERFORM forget_binding_sets(p_stream, g.id, c);
END $$;

-- Versions beyond the last hundred go when no lease is left whose ids they judge; what they held for falls to the oldest that
-- stays.
CREATE OR REPLACE FUNCTION forget_binding_sets(p_stream bigint, p_group bigint, c group_cursor) RETURNS void
LANGUAGE plpgsql VOLATILE SET enable_seqscan = off AS $$
DECLARE
    oldest bigint := (SELECT after_id FROM binding_set WHERE group_id = p_group ORDER BY version LIMIT 1);
    newest int := (SELECT max(version) FROM binding_set WHERE group_id = p_group);
    lowest bigint;
    kept   int;
BEGIN
    IF NOT EXISTS (SELECT FROM binding_set WHERE group_id = p_group AND version <= newest - 100) THEN
        RETURN;
    END IF;
    EXECUTE format('SELECT least(min(lower(pending)), $3) FROM %I WHERE group_id = $1 AND seq >= $2', 'consumer_lease_' || p_stream)
        INTO lowest USING p_group, c.first_open, c.claimed + 1;
    -- The first version that has to stay: one of the last hundred, or what judges the lowest pending id.
    kept := least(newest - 99, coalesce((SELECT max(version) FROM binding_set WHERE group_id = p_group AND after_id < lowest), 0));
    DELETE FROM binding_set WHERE group_id = p_group AND version < kept;
    IF FOUND THEN
        UPDATE binding_set SET after_id = least(after_id, oldest) WHERE group_id = p_group AND version = kept;
    END IF;
END $$;

-- Makes p_bindings, an array of patterns and bindings, the bindings of a group: see binding.sql; [] takes all of them away, and
-- the group receives everything. Returns whether that changed anything. What was claimed before is not affected.
CREATE OR REPLACE FUNCTION set_bindings(p_stream bigint, p_group bigint, p_bindings jsonb) RETURNS boolean
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
DECLARE
    g      consumer_group := require_group(p_stream, p_group);
    normal jsonb := normal_bindings(p_bindings);
    c      group_cursor;
BEGIN
    PERFORM require_read_committed();
    -- Consumers say this at every start: no lock where nothing changes.
    IF bindings_are(p_group, normal) THEN
        RETURN false;
    END IF;
    c := lock_cursor(p_stream, p_group);
    IF bindings_are(p_group, normal) THEN
        RETURN false;
    END IF;
    PERFORM replace_bindings(p_stream, g, c, normal);
    RETURN true;
END $$;

-- Adds one binding: a pattern, conditions on headers, or both. Returns whether it is new. To a group that had none, and so
-- received everything, it is the only one then.
CREATE OR REPLACE FUNCTION bind(p_stream bigint, p_group bigint, p_pattern text, p_headers jsonb DEFAULT NULL) RETURNS boolean
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
DECLARE
    g      consumer_group := require_group(p_stream, p_group);
    added  jsonb := normal_bindings(jsonb_build_array(jsonb_build_object('pattern', p_pattern, 'headers', p_headers)));
    c      group_cursor;
    before jsonb;
BEGIN
    PERFORM require_read_committed();
    c := lock_cursor(p_stream, p_group);
    before := latest_bindings(p_group);
    IF normal_bindings(before || added) = before THEN
        RETURN false;
    END IF;
    PERFORM replace_bindings(p_stream, g, c, normal_bindings(before || added));
    RETURN true;
END $$;

-- Takes one binding away. Returns whether there was one. The last one stays: without any, the group would receive everything.
CREATE OR REPLACE FUNCTION unbind(p_stream bigint, p_group bigint, p_pattern text, p_headers jsonb DEFAULT NULL) RETURNS boolean
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
DECLARE
    g       consumer_group := require_group(p_stream, p_group);
    removed jsonb := normal_bindings(jsonb_build_array(jsonb_build_object('pattern', p_pattern, 'headers', p_headers)));
    c       group_cursor;
    before  jsonb;
    rest    jsonb;
BEGIN
    PERFORM require_read_committed();
    c := lock_cursor(p_stream, p_group);
    before := latest_bindings(p_group);
    rest := (SELECT coalesce(jsonb_agg(b ORDER BY b), '[]') FROM jsonb_array_elements(before) AS b WHERE b <> removed -> 0);
    IF rest = before THEN
        RETURN false;
    ELSIF rest = '[]' THEN
        PERFORM refuse_binding(format('this is the only binding of group %s: without one it receives everything', quote_ident(g.name)),
                               'If that is what you want, set its bindings to none.');
    END IF;
    PERFORM replace_bindings(p_stream, g, c, rest);
    RETURN true;
END $$;

-- Which groups of a stream a message with this routing key and these headers would reach, if it were produced now, and by
-- which of their bindings: a row for each that matches, without pattern and headers for a group that receives everything.
CREATE OR REPLACE FUNCTION test_bindings(p_stream bigint, p_routing_key text, p_headers jsonb DEFAULT NULL)
RETURNS TABLE (consumer_group text, pattern text, headers jsonb)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
    s   stream := require_stream(p_stream);
    b   record;
    hit boolean;
BEGIN
    IF octet_length(p_routing_key) > 255 THEN
        RAISE EXCEPTION 'no routing key has % bytes', octet_length(p_routing_key) USING ERRCODE = 'SQ004', HINT = 'The limit is 255.';
    ELSIF jsonb_typeof(p_headers) <> 'object' THEN
        RAISE EXCEPTION 'headers are an object, not %', jsonb_typeof(p_headers) USING ERRCODE = 'SQ004', HINT = 'Write {"region": "eu"}.';
    END IF;
    FOR b IN
        SELECT g.name, x.binding FROM consumer_group AS g CROSS JOIN LATERAL (SELECT latest_bindings(g.id) AS bindings) AS c
        LEFT JOIN LATERAL jsonb_array_elements(c.bindings) AS x(binding) ON true
        WHERE g.stream_id = p_stream ORDER BY g.name, x.binding
    LOOP
        EXECUTE format('SELECT %s FROM (SELECT $1 COLLATE "C" AS routing_key, $2 AS headers) AS m',
                       coalesce(bindings_condition(CASE WHEN b.binding IS NULL THEN '[]' ELSE jsonb_build_array(b.binding) END), 'true'))
            INTO hit USING p_routing_key, p_headers;
        IF hit THEN
            RETURN QUERY SELECT b.name, b.binding ->> 'pattern', b.binding -> 'headers';
        END IF;
    END LOOP;
END $$;

-- The history of bindings, the latest version last. A version holds for ids above after_id, up to that of the next one.
CREATE OR REPLACE FUNCTION list_binding_sets(p_stream text DEFAULT NULL, p_group text DEFAULT NULL)
RETURNS TABLE (stream text, consumer_group text, version int, after_id bigint, bindings jsonb, changed_at timestamptz, changed_by text)
LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
    SELECT s.name, g.name, b.version, b.after_id, b.bindings, b.changed_at, b.changed_by
    FROM binding_set AS b JOIN consumer_group AS g ON g.id = b.group_id JOIN stream AS s ON s.id = g.stream_id
    WHERE (s.name = p_stream OR p_stream IS NULL) AND (g.name = p_group OR p_group IS NULL)
    ORDER BY s.name, g.name, b.version
$$;
CREATE OR REPLACE VIEW binding_history AS SELECT * FROM list_binding_sets();

-- The bindings that hold now, one a row.
CREATE OR REPLACE VIEW binding AS
    SELECT v.stream, v.consumer_group, b ->> 'pattern' AS pattern, b -> 'headers' AS headers, v.after_id, v.changed_at, v.changed_by
    FROM (SELECT DISTINCT ON (stream, consumer_group) * FROM list_binding_sets() ORDER BY stream, consumer_group, version DESC) AS v,
         jsonb_array_elements(v.bindings) AS b;
