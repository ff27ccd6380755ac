-- message_archive_<n>: messages that outlive their partition, since rows of the exception queue, dead letters above all, refer to them. It is read by
-- id, after the log.

-- Copies messages of a partition that is leaving into the archive that something still refers to: rows of the exception queue, and leases: also those
-- that have run out, which somebody takes over. A call looks at p_limit references at most, and copies about p_bytes; where it ended is noted in the
-- partition's row. Returns how many it copied, and whether that is all: then the partition is marked so.
CREATE OR REPLACE FUNCTION archive_referenced(p_stream bigint, p_number bigint, p_limit int DEFAULT 1000, p_bytes bigint DEFAULT 16777216)
RETURNS TABLE (copied bigint, finished boolean)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off SET lock_timeout = '1s' AS $$
DECLARE
    leaf    text := 'message_log_' || p_stream || '_p' || p_number;
    part    log_partition;
    seen    int := 0;
    groups  bigint[];
    ids     bigint[];
    sizes   bigint[];
    total   bigint := 0;
BEGIN
    PERFORM require_read_committed();
    copied := 0;
    finished := true;
    -- Whoever finds the archive empty, and says so, waits; the stream first, as everywhere.
    PERFORM FROM stream WHERE id = p_stream FOR KEY SHARE;
    SELECT * INTO part FROM log_partition WHERE stream_id = p_stream AND number = p_number AND state = 'leaving' FOR UPDATE;
    IF NOT FOUND OR to_regclass(format('%I', leaf)) IS NULL THEN
        RETURN NEXT;
        RETURN;
    END IF;
    EXECUTE format(
        'SELECT array_agg(x.group_id ORDER BY x.group_id, x.id), array_agg(x.id ORDER BY x.group_id, x.id),
                array_agg(coalesce((SELECT pg_column_size(m.payload) FROM %1$I AS m WHERE m.id = x.id), 0) ORDER BY x.group_id, x.id)
         FROM (SELECT g.id AS group_id, r.id
               FROM (SELECT g.id, CASE WHEN g.id = $2 THEN greatest($3 + 1, $4) ELSE $4 END AS lowest FROM consumer_group AS g WHERE g.stream_id = $1 AND g.id >= $2) AS g
               CROSS JOIN LATERAL (SELECT first_open FROM %3$I WHERE group_id = g.id ORDER BY generation DESC LIMIT 1) AS c
               CROSS JOIN LATERAL (
                   SELECT id FROM (
                       (SELECT message_id AS id FROM %2$I AS e WHERE e.group_id = g.id AND e.message_id >= g.lowest AND e.message_id <= $5 ORDER BY e.message_id LIMIT $6)
                       UNION
                       (SELECT m.id FROM %4$I AS l CROSS JOIN LATERAL unnest(l.pending * int8multirange(int8range(least(g.lowest, $5 + 1), $5 + 1))) AS r
                        CROSS JOIN LATERAL (SELECT id FROM %1$I AS m WHERE m.id >= lower(r) AND m.id < upper(r) ORDER BY m.id LIMIT $6) AS m
                        WHERE l.group_id = g.id AND l.seq >= c.first_open ORDER BY m.id LIMIT $6)) AS u
                   ORDER BY id LIMIT $6) AS r
               ORDER BY g.id, r.id LIMIT $6) AS x',
        leaf, 'exception_queue_' || p_stream, 'consumer_group_cursor_' || p_stream, 'consumer_lease_' || p_stream)
        INTO groups, ids, sizes USING p_stream, part.copied_group, part.copied_to, part.from_id, part.to_id, p_limit;
    WHILE seen < coalesce(cardinality(ids), 0) AND total <= p_bytes LOOP
        seen := seen + 1;
        total := total + sizes[seen];
    END LOOP;
    IF seen > 0 THEN
        EXECUTE format(
            'INSERT INTO %1$I (id, key, routing_key, headers, produced_at, expires_at, payload)
             SELECT id, key, routing_key, headers, produced_at, expires_at, payload FROM %2$I
             WHERE id >= $2 AND id <= $3 AND id = ANY ($1) ON CONFLICT (id) DO NOTHING', 'message_archive_' || p_stream, leaf)
            USING ids[:seen], part.from_id, part.to_id;
        GET DIAGNOSTICS copied = ROW_COUNT;
        UPDATE stream SET archived = true WHERE id = p_stream AND NOT archived;
    END IF;
    finished := seen = coalesce(cardinality(ids), 0) AND seen < p_limit;
    UPDATE log_partition SET state = CASE WHEN finished THEN 'archived' ELSE state END, copied_group = coalesce(groups[seen], copied_group), copied_to = coalesce(ids[seen], copied_to)
        WHERE stream_id = p_stream AND number = p_number;
    RETURN NEXT;
END $$;

-- Streams whose archive, or whose dead letters, are to be looked through. See maintain.sql.
CREATE OR REPLACE FUNCTION archive_due(p_heads stream_head[]) RETURNS TABLE (stream_id bigint, due_in interval)
LANGUAGE sql VOLATILE SET search_path FROM CURRENT SET jit = off AS $$
    SELECT s.id, interval '0'
    FROM unnest(p_heads) AS h
    JOIN stream AS s ON s.id = h.stream_id
    WHERE (s.archived OR s.retain_dead_for IS NOT NULL)
      AND NOT EXISTS (SELECT FROM maintenance_step AS m WHERE m.step = 'archive' AND m.stream_id = s.id AND m.next_due > clock_timestamp())
$$;

-- Removes messages from the archive that nothing refers to any more: looks at p_limit of them after id p_after. Returns how many it looked at and
-- removed, and where it ended; upto NULL: at the end. SECURITY DEFINER: whoever does the upkeep need not be allowed to change messages.
CREATE OR REPLACE FUNCTION tidy_archive(p_stream bigint, p_after bigint DEFAULT 0, p_limit int DEFAULT 1000) RETURNS TABLE (looked_at bigint, removed bigint, upto bigint)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off SET lock_timeout = '1s' AS $$
DECLARE
    ids   bigint[];
    empty boolean;
BEGIN
    PERFORM require_stream(p_stream);
    PERFORM require_read_committed();
    PERFORM require_limit(p_limit);
    EXECUTE format('SELECT coalesce(array_agg(id ORDER BY id), ''{}'') FROM (SELECT id FROM %I WHERE id > $1 ORDER BY id LIMIT $2) AS x', 'message_archive_' || p_stream)
        INTO ids USING p_after, p_limit;
    looked_at := cardinality(ids);
    removed := 0;
    IF looked_at > 0 THEN
        -- What is copied by now and not referred to in this one snapshot never will be: only a lease makes a row of what has none, and it goes in
        -- that transaction. A message of a partition that is being copied stays.
        EXECUTE format(
            'WITH kept AS MATERIALIZED (
                 SELECT e.message_id AS id FROM consumer_group AS g
                 CROSS JOIN LATERAL (SELECT message_id FROM %2$I AS e WHERE e.group_id = g.id AND e.message_id >= $2 AND e.message_id <= $3 AND e.message_id = ANY ($1)) AS e
                 WHERE g.stream_id = $4),
             held AS MATERIALIZED (
                 SELECT range_agg(l.pending) AS pending FROM consumer_group AS g
                 CROSS JOIN LATERAL (SELECT first_open FROM %3$I WHERE group_id = g.id ORDER BY generation DESC LIMIT 1) AS c
                 CROSS JOIN LATERAL (SELECT pending FROM %4$I AS l WHERE l.group_id = g.id AND l.seq >= c.first_open) AS l
                 WHERE g.stream_id = $4),
             gone AS (DELETE FROM %1$I AS a WHERE a.id = ANY ($1) AND a.id >= $2 AND a.id <= $3 AND NOT EXISTS (SELECT FROM kept WHERE kept.id = a.id)
                          AND NOT coalesce((SELECT pending FROM held) @> a.id, false)
                          AND NOT EXISTS (SELECT FROM log_partition AS p WHERE p.stream_id = $4 AND p.state = ''leaving'' AND a.id BETWEEN p.from_id AND p.to_id) RETURNING a.id)
             SELECT count(*) FROM gone', 'message_archive_' || p_stream, 'exception_queue_' || p_stream, 'consumer_group_cursor_' || p_stream, 'consumer_lease_' || p_stream)
            INTO removed USING ids, ids[1], ids[looked_at], p_stream;
    END IF;
    IF looked_at = p_limit THEN
        upto := ids[looked_at];
    ELSIF looked_at = 0 AND p_after = 0 THEN
        -- Whoever copies holds this row, and we look after we have it. Somebody may be at it all the time; then the next time.
        PERFORM FROM stream WHERE id = p_stream AND archived FOR UPDATE SKIP LOCKED;
        IF FOUND THEN
            EXECUTE format('SELECT NOT EXISTS (SELECT FROM %I)', 'message_archive_' || p_stream) INTO empty;
            UPDATE stream SET archived = false WHERE id = p_stream AND empty;
        END IF;
    END IF;
    RETURN NEXT;
END $$;

-- Gives dead letters up that are older than the stream keeps them, at most p_limit. p_from bounds the look from below, as for
-- expire_idempotency_keys. Returns how many were removed, from where on to go on, and when the next one is due (NULL: there is none). The group
-- counts them as resolved; the audit has their number and ids.
CREATE OR REPLACE FUNCTION expire_dead_letters(p_stream bigint, p_from timestamptz DEFAULT '-infinity', p_limit bigint DEFAULT 1000) RETURNS TABLE (removed bigint, upto timestamptz, next_due interval)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
DECLARE
    s      stream := require_stream(p_stream);
    oldest timestamptz := clock_timestamp() - s.retain_dead_for;
    gone   record;
BEGIN
    PERFORM require_read_committed();
    PERFORM require_limit(p_limit);
    SELECT 0, p_from INTO removed, upto;
    IF s.retain_dead_for IS NOT NULL THEN
        -- Skipping what an operator has in hand.
        FOR gone IN EXECUTE format(
            'WITH old AS MATERIALIZED (SELECT group_id, message_id, dead_at FROM %1$I WHERE state = ''dead'' AND dead_at >= $1 AND dead_at <= $2 ORDER BY dead_at LIMIT $3 FOR UPDATE SKIP LOCKED),
                  rows AS (DELETE FROM %1$I AS e USING old WHERE e.group_id = old.group_id AND e.message_id = old.message_id RETURNING e.group_id, e.message_id, e.dead_at),
                  done AS (DELETE FROM %2$I AS d USING old WHERE d.group_id = old.group_id AND d.message_id = old.message_id)
             SELECT group_id, array_agg(message_id ORDER BY message_id) AS ids, max(dead_at) AS latest FROM rows GROUP BY group_id', 'exception_queue_' || p_stream, 'consumer_done_' || p_stream)
            USING p_from, oldest, p_limit
        LOOP
            removed := removed + cardinality(gone.ids);
            upto := greatest(upto, gone.latest);
            PERFORM audit_dead('expire_dead', p_stream, gone.group_id, gone.ids);
        END LOOP;
        EXECUTE format('SELECT dead_at - $2 FROM %I WHERE state = ''dead'' AND dead_at >= $1 ORDER BY dead_at LIMIT 1', 'exception_queue_' || p_stream)
            INTO next_due USING upto, oldest;
    END IF;
    RETURN NEXT;
END $$;
