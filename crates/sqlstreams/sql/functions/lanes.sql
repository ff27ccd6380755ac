-- Ordered groups: messages of one key are handled one at a time, in id order, whatever fails or dies. Keys hash into 64 lanes.
--
-- Lanes are no rows. The group's cursor holds cohorts, (lanes, position) with equal positions merged; leases carry the lanes they
-- are for. Rules, each the answer to a race; all is changed under the cursor's lock, by statements that begin after it:
--   1. A lane is in the live leases of at most one holder, and all work of its keys goes through that holder: fresh messages,
--      leases taken over, exceptions, redriven ones.
--   2. One fence per holder: each of its calls names all its leases and renews them; if one is gone, all are lost. One that it
--      does not name is free at once.
--   3. An id is in one place (lease.sql).
--   4. Of the unresolved rows of a key only the lowest is ready or inflight, the others are deferred. Only the deferred ones that
--      follow it closely are claimed together with it.
--   5. The leases that a lost holder has left come before the exceptions of their lanes, and before what is fresh, by lowest id.
--   6. An id that is claimed while its key has an unresolved row with a lower one becomes a deferred row in that transaction.
--   7. The holder runs a key's messages one by one, and after a failure none of the key's until it has told; what is pending of the
--      key becomes deferred rows then.
--   8. A redriven message takes its place among the unresolved ones of its key.

-- A message without a key is in a lane, too, so that it is read once, but waits for nobody.
CREATE OR REPLACE FUNCTION lane_of(p_key text, p_id bigint) RETURNS int
LANGUAGE sql IMMUTABLE AS $$
    SELECT ((CASE WHEN p_key IS NULL THEN p_id ELSE hashtextextended(p_key, 0) END) & 63)::int
$$;

-- A condition for the messages of these lanes, for dynamic SQL.
CREATE OR REPLACE FUNCTION in_lanes(p_lanes bigint) RETURNS text
LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN p_lanes <> -1 THEN format(' AND (%L::bigint >> lane_of(key, id)) & 1 = 1', p_lanes) ELSE '' END
$$;

CREATE OR REPLACE FUNCTION lane_count(p_lanes bigint) RETURNS int
LANGUAGE sql IMMUTABLE AS $$ SELECT bit_count(p_lanes::bit(64))::int $$;

-- At most p_count of these lanes.
CREATE OR REPLACE FUNCTION first_lanes(p_lanes bigint, p_count int) RETURNS bigint
LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    chosen bigint := 0;
BEGIN
    IF lane_count(p_lanes) <= p_count THEN
        RETURN p_lanes;
    END IF;
    FOR lane IN 0..63 LOOP
        EXIT WHEN lane_count(chosen) >= p_count;
        chosen := chosen | (p_lanes & (1::bigint << lane));
    END LOOP;
    RETURN chosen;
END $$;

-- The cohorts after these lanes have been read up to p_position.
CREATE OR REPLACE FUNCTION move_lanes(p_cohorts lane_cohort[], p_lanes bigint, p_position bigint) RETURNS lane_cohort[]
LANGUAGE sql IMMUTABLE AS $$
    SELECT array_agg((lanes, position)::lane_cohort ORDER BY position)
    FROM (SELECT bit_or(lanes) AS lanes, position
          FROM (SELECT lanes & ~p_lanes AS lanes, position FROM unnest(p_cohorts) UNION ALL SELECT p_lanes, p_position) AS x
          WHERE lanes <> 0 GROUP BY position) AS y
$$;

CREATE OR REPLACE FUNCTION lowest_position(p_cohorts lane_cohort[]) RETURNS bigint
LANGUAGE sql IMMUTABLE AS $$ SELECT min(position) FROM unnest(p_cohorts) $$;

-- Whoever calls for an ordered group what is for the others, or the other way round, has not seen that the mode was changed. Fair groups
-- are called as parallel ones.
CREATE OR REPLACE FUNCTION require_mode(g consumer_group, p_mode text) RETURNS void
LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    IF (g.mode = 'ordered') <> (p_mode = 'ordered') THEN
        RAISE EXCEPTION 'group % is %', quote_ident(g.name), g.mode
            USING ERRCODE = 'SQ012', HINT = CASE g.mode WHEN 'ordered' THEN 'Use the functions for ordered groups.' ELSE 'Use the functions for parallel groups.' END;
    END IF;
END $$;

-- Makes the lowest unresolved row of each of these keys the one that can run.
CREATE OR REPLACE FUNCTION promote(p_stream bigint, p_group bigint, p_keys text[]) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    IF cardinality(p_keys) > 0 THEN
        EXECUTE format(
            'UPDATE %1$I AS e SET state = ''ready'', due_at = greatest(due_at, $3)
             FROM (SELECT (SELECT message_id FROM %1$I WHERE group_id = $1 AND key = k AND lane >= 0 AND state <> ''dead'' ORDER BY message_id LIMIT 1) AS id
                   FROM (SELECT DISTINCT unnest($2) AS k) AS x) AS head
             WHERE e.group_id = $1 AND e.message_id = head.id AND e.state = ''deferred''', 'exception_queue_' || p_stream)
            USING p_group, p_keys, clock_timestamp();
    END IF;
END $$;

-- After rows of these messages were made ready: of their keys only the lowest stays so.
CREATE OR REPLACE FUNCTION line_up(p_stream bigint, p_group bigint, p_ids bigint[]) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    keys text[];
BEGIN
    EXECUTE format(
        'WITH keys AS MATERIALIZED (SELECT DISTINCT key FROM %1$I WHERE group_id = $1 AND message_id >= (SELECT min(i) FROM unnest($2) AS i) AND message_id = ANY ($2) AND key IS NOT NULL),
         rows AS (
             UPDATE %1$I AS e SET state = ''deferred'' FROM keys
             WHERE e.group_id = $1 AND e.key = keys.key AND e.lane >= 0 AND e.state = ''ready'' RETURNING e.key)
         SELECT array_agg(key) FROM keys', 'exception_queue_' || p_stream)
        INTO keys USING p_group, p_ids;
    PERFORM promote(p_stream, p_group, keys);
END $$;

-- Makes deferred rows of those of p_ids whose key has an unresolved row with a lower id. Returns them.
CREATE OR REPLACE FUNCTION defer_blocked(p_stream bigint, p_group bigint, p_ids int8multirange, p_lanes bigint) RETURNS int8multirange
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    exceptions text := 'exception_queue_' || p_stream;
    blocked    text[];
    taken      int8multirange := '{}';
    none       boolean;
BEGIN
    EXECUTE format('SELECT NOT EXISTS (SELECT FROM %I WHERE group_id = $1 AND lane >= 0 AND state <> ''dead'' AND key IS NOT NULL)', exceptions)
        INTO none USING p_group;
    IF none OR isempty(p_ids) THEN
        RETURN taken;
    END IF;
    -- The keys that have such rows, from one to the next, unless they are very many.
    EXECUTE format(
        'WITH RECURSIVE keys AS (
             (SELECT key, 1 AS n FROM %1$I WHERE group_id = $1 AND lane >= 0 AND state <> ''dead'' AND key IS NOT NULL ORDER BY key LIMIT 1)
             UNION ALL
             SELECT next.key, n + 1 FROM keys CROSS JOIN LATERAL (SELECT e.key FROM %1$I AS e WHERE group_id = $1 AND lane >= 0 AND state <> ''dead'' AND e.key > keys.key ORDER BY e.key LIMIT 1) AS next
             WHERE n <= 1000)
         SELECT array_agg(key) FROM keys', exceptions)
        INTO blocked USING p_group;
    EXECUTE format(
        'WITH mine AS MATERIALIZED (
             SELECT id, key FROM %2$I WHERE id >= lower($2) AND id < upper($2) AND $2 @> id AND key IS NOT NULL
                AND ($3 >> lane_of(key, id)) & 1 = 1 AND ($4 IS NULL OR key = ANY ($4)) AND (%3$s)),
         lowest AS MATERIALIZED (
             SELECT key, (SELECT message_id FROM %1$I AS e WHERE group_id = $1 AND e.key = k.key AND lane >= 0 AND state <> ''dead'' ORDER BY message_id LIMIT 1) AS id
             FROM (SELECT DISTINCT key FROM mine) AS k),
         rows AS (
             INSERT INTO %1$I (group_id, message_id, state, due_at, key, lane)
             SELECT $1, m.id, ''deferred'', $5, m.key, lane_of(m.key, m.id) FROM mine AS m JOIN lowest AS l ON l.key = m.key AND l.id < m.id
             RETURNING message_id)
         SELECT coalesce(range_agg(int8range(message_id, message_id, ''[]'')), ''{}'') FROM rows', exceptions, 'message_log_' || p_stream,
        coalesce(binding_condition(p_group, lower(p_ids), upper(p_ids)), 'true'))
        INTO taken USING p_group, p_ids, p_lanes, CASE WHEN cardinality(blocked) <= 1000 THEN blocked END, clock_timestamp();
    RETURN taken;
END $$;
