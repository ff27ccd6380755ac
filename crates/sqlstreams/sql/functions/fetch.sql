-- Reading the messages of a lease. No lock is held while they travel: a consumer that stops reading stops nobody else.

-- What is pending in the lease that p_token proves; NULL when there is none. The one just claimed is among the newest few;
-- only for an older one the cursor has to say how far down leases lie.
CREATE OR REPLACE FUNCTION lease_pending(p_stream bigint, p_group bigint, p_token uuid) RETURNS int8multirange
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    RETURN (SELECT pending FROM find_lease(p_stream, p_group, p_token));
END $$;

-- The same, the lanes that it is for, and the replay that it is a piece of.
CREATE OR REPLACE FUNCTION find_lease(p_stream bigint, p_group bigint, p_token uuid, OUT pending int8multirange, OUT lanes bigint, OUT replay bigint)
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    PERFORM require_tables(p_stream);
    EXECUTE format('SELECT pending, lanes, replay FROM (SELECT token, pending, lanes, replay FROM %I WHERE group_id = $1 ORDER BY seq DESC LIMIT 3) AS x WHERE token = $2', 'consumer_lease_' || p_stream)
        INTO pending, lanes, replay USING p_group, p_token;
    IF pending IS NULL THEN
        EXECUTE format('SELECT pending, lanes, replay FROM %I WHERE group_id = $1 AND seq >= $2 AND token = $3 ORDER BY seq DESC LIMIT 1', 'consumer_lease_' || p_stream)
            INTO pending, lanes, replay USING p_group, (peek_cursor(p_stream, p_group)).first_open, p_token;
    END IF;
END $$;

-- For callers who read the log themselves: the first and the last id of lease p_token from id p_from on, if all that the log has between them is of the lease and for
-- the group, and there is no more to it; NULLs else, when only fetch knows. Asked in the statement that reads: a partition that this
-- finds has not been given up is planned for, and so locked, before.
CREATE OR REPLACE FUNCTION claimed_range(p_stream bigint, p_group bigint, p_token uuid, p_from bigint, OUT first bigint, OUT last bigint)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
DECLARE
    f record;
BEGIN
    PERFORM require_read_committed();
    SELECT pending * int8multirange(int8range(p_from, NULL)) AS pending, lanes, replay INTO f FROM find_lease(p_stream, p_group, p_token);
    IF isempty(f.pending) OR id_count(f.pending) < upper(f.pending) - lower(f.pending) OR f.lanes IS NOT NULL OR f.replay IS NOT NULL
       OR (SELECT NOT bound FROM consumer_group WHERE id = p_group) IS NOT TRUE OR (SELECT first_id <= lower(f.pending) FROM stream WHERE id = p_stream) IS NOT TRUE THEN
        RETURN;
    END IF;
    first := lower(f.pending);
    last := upper(f.pending) - 1;
END $$;

-- The messages of lease p_token after id p_after that are for the group (binding_set.sql), at most p_limit of them and about p_bytes of payload (but at least
-- one). "more" says on the last one whether the lease holds more. p_type is only there for its type, that of the
-- stream's payloads: fetch(…, NULL::json).
--
-- A message that has expired is told of without its payload: it is finished, unhandled. remaining: how long the others have, 0 for those that have expired, NULL for
-- those that do not; whoever hands one out later looks again.
-- A message without payload that has not expired is a tombstone (current.sql). lane: which of the lease's lanes it is in, where the
-- lease is for some of them.
-- A group that wants only what is newest is not told of what a newer message of its key has superseded.
--
-- constraint_exclusion is off, here as in advance: pruning needs none, and reading every partition's checks anew for each
-- plan took a third of the time.
--
-- Never read message_log_<n> in the statement that claims, or under an older snapshot: rows that the claim freed would
-- be missing. (The name is quoted since FETCH is a reserved word; qualified, sqlstreams.fetch(…), it needs no quotes.)
CREATE OR REPLACE FUNCTION "fetch"(p_stream bigint, p_group bigint, p_token uuid, p_after bigint, p_limit bigint, p_bytes bigint, p_type anyelement)
RETURNS TABLE (id bigint, key text, routing_key text, headers jsonb, produced_at timestamptz, more boolean, payload anyelement, remaining interval, lane smallint)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off SET constraint_exclusion = off SET work_mem = '32MB' AS $$
#variable_conflict use_column
DECLARE
    pending   int8multirange;
    lanes     bigint;
    replay    bigint;
    condition text;
    source    text;
    now       timestamptz := clock_timestamp();
    -- Below it messages may be in the archive alone, of leases that were open when their partition left.
    first_id  bigint := (SELECT s.first_id FROM stream AS s WHERE s.id = p_stream AND s.archived);
BEGIN
    PERFORM require_read_committed();
    SELECT f.pending, f.lanes, f.replay INTO pending, lanes, replay FROM find_lease(p_stream, p_group, p_token) AS f;
    IF pending IS NULL OR isempty(pending) THEN
        RETURN;
    END IF;
    condition := binding_condition(p_group, lower(pending), upper(pending), replay);
    source := format('%I', 'message_log_' || p_stream);
    IF first_id > greatest(lower(pending), p_after + 1) THEN
        source := format('(SELECT id, key, routing_key, headers, produced_at, expires_at, payload FROM %1$I UNION ALL
                           SELECT id, key, routing_key, headers, produced_at, expires_at, payload FROM %2$I AS a
                           WHERE NOT EXISTS (SELECT FROM %1$I AS l WHERE l.id = a.id AND l.id >= $1 AND l.id < $2)) AS log', 'message_log_' || p_stream, 'message_archive_' || p_stream);
    END IF;
    RETURN QUERY EXECUTE format(
        'SELECT id, key, routing_key, headers, produced_at, more, CASE WHEN expires_at <= $7 THEN NULL ELSE payload END, CASE WHEN expires_at <= $7 THEN interval ''0'' WHEN isfinite(expires_at) THEN expires_at - $7 END, %s::smallint
         FROM (SELECT id, key, routing_key, headers, produced_at, expires_at, payload,
                      lead(id) OVER (ORDER BY id) IS NOT NULL AS more,
                      sum(coalesce(pg_column_size(payload), 0)) OVER (ORDER BY id ROWS UNBOUNDED PRECEDING) - coalesce(pg_column_size(payload), 0) AS bytes_before
               FROM (SELECT * FROM %s WHERE id >= $1 AND id < $2 AND id > $3%s%s%s ORDER BY id LIMIT $5 + 1) AS m) AS m
         WHERE bytes_before < $6
         ORDER BY id LIMIT $5', CASE WHEN lanes IS NULL THEN 'NULL' ELSE 'lane_of(key, id)' END, source,
        -- Of one range the bounds say it all, which counts where most rows are for others.
        CASE WHEN id_count(pending) < upper(pending) - lower(pending) THEN ' AND $4 @> id' END, in_lanes(lanes), ' AND (' || condition || ')')
        USING lower(pending), upper(pending), p_after, pending, p_limit, p_bytes, now;
END $$;

-- Messages of the log by their ids, in order, about p_bytes of payload (but at least one); "more" and expired ones as above. Those whose partition has
-- left are looked up in the archive (archive.sql). Ids for which there is no message are left out. superseded: p_group wants only what is newest, and that is not; it comes without payload and is finished.
CREATE OR REPLACE FUNCTION fetch_messages(p_stream bigint, p_ids bigint[], p_bytes bigint, p_type anyelement, p_group bigint DEFAULT NULL)
RETURNS TABLE (id bigint, key text, routing_key text, headers jsonb, produced_at timestamptz, more boolean, payload anyelement, remaining interval, superseded boolean)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off SET constraint_exclusion = off SET work_mem = '32MB' AS $$
#variable_conflict use_column
DECLARE
    now    timestamptz := clock_timestamp();
    lowest bigint := (SELECT min(i) FROM unnest(p_ids) AS i);
    newest boolean := coalesce((SELECT newest_only FROM consumer_group WHERE id = p_group), false);
BEGIN
    -- LIMIT 1 keeps it a look-up per id: the ids may lie anywhere in the log, and a join would read all between them.
    RETURN QUERY EXECUTE format(
        'SELECT id, key, routing_key, headers, produced_at, more, CASE WHEN superseded OR expires_at <= $5 THEN NULL ELSE payload END,
                CASE WHEN expires_at <= $5 THEN interval ''0'' WHEN isfinite(expires_at) THEN expires_at - $5 END, superseded
         FROM (SELECT m.*, %s AS superseded, lead(m.id) OVER (ORDER BY m.id) IS NOT NULL AS more,
                      sum(coalesce(pg_column_size(m.payload), 0)) OVER (ORDER BY m.id ROWS UNBOUNDED PRECEDING) - coalesce(pg_column_size(m.payload), 0) AS bytes_before
               FROM unnest($1) AS u(id)
               CROSS JOIN LATERAL (SELECT id, key, routing_key, headers, produced_at, expires_at, payload FROM %I WHERE id = u.id AND id >= $2 AND id <= $3
                                   UNION ALL SELECT id, key, routing_key, headers, produced_at, expires_at, payload FROM %I WHERE id = u.id LIMIT 1) AS m) AS m
         WHERE bytes_before < $4 ORDER BY id', CASE WHEN newest THEN superseded(p_stream, 'm', lowest) ELSE 'false' END, 'message_log_' || p_stream, 'message_archive_' || p_stream)
        USING p_ids, lowest, (SELECT max(i) FROM unnest(p_ids) AS i), p_bytes, now;
END $$;

-- The id that comes next in lease p_token after p_after, for a client that cannot read its message.
CREATE OR REPLACE FUNCTION next_id(p_stream bigint, p_group bigint, p_token uuid, p_after bigint) RETURNS bigint
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off SET constraint_exclusion = off AS $$
DECLARE
    pending int8multirange;
    lanes   bigint;
    replay  bigint;
    hit     bigint;
BEGIN
    PERFORM require_read_committed();
    SELECT f.pending, f.lanes, f.replay INTO pending, lanes, replay FROM find_lease(p_stream, p_group, p_token) AS f;
    EXECUTE format('SELECT id FROM %I WHERE id >= $1 AND id < $2 AND id > $3 AND $4 @> id%s AND (%s) ORDER BY id LIMIT 1', 'message_log_' || p_stream,
                   in_lanes(lanes), coalesce(binding_condition(p_group, lower(pending), upper(pending), replay), 'true'))
        INTO hit USING lower(pending), upper(pending), p_after, pending;
    RETURN hit;
END $$;
