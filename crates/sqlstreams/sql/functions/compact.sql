-- Compaction: deletes from the log of a compacted stream what newer messages of the same key have superseded.
--
-- Invariants:
--   * Of each key the newest message stays, unless it is a tombstone or has expired.
--   * A tombstone, or what has expired, goes only when no older message of its key is there: else that would be the newest again.
--   * Nothing goes that a group has not resolved: that is above its cursor, pending in one of its leases, or in its exception queue, dead letters, too.
--   * Nothing goes above the settled id: below it no message comes any more, so no older one of a key either, and holes are no gaps.
--   * Nothing goes that is younger than p_min_age: a producer may still ask what became of its commit (commit.sql).
-- Messages are deleted from the leaf partition. Through the parent it would look like a writer, and the fence would wait for it.

-- Up to here every message is final, and every group has resolved it. Of an ordered group claimed is the lowest position of its lanes.
CREATE OR REPLACE FUNCTION compact_floor(p_stream bigint) RETURNS bigint
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    settled bigint := settled_id(p_stream);
BEGIN
    IF settled < log_head(p_stream) THEN
        settled := look_at_gap(p_stream, settled);
    END IF;
    RETURN least(settled, (resolved_by_groups(p_stream)).resolved);
END $$;

-- Whoever has this advisory lock compacts the stream; groups are created under a shared one.
CREATE OR REPLACE FUNCTION compact_lock(p_stream bigint) RETURNS bigint
LANGUAGE sql STABLE AS $$ SELECT hashtextextended('sqlstreams compact ' || current_schema(), p_stream) $$;

-- One step: looks at up to p_limit messages after id p_after, within one partition, and deletes those that may go. Call it again with upto
-- until that is the floor; begin at 0 some time later. Each step is its own transaction, may be stopped, and repeats nothing.
--
-- p_min_age: what is younger stays. p_tombstone_age: younger tombstones stay, so that whoever reads the log from its beginning in that time
-- learns of them; what has expired stays as long.
--
-- Returns how many messages it looked at and removed, up to which id, and the floor, which it cannot pass at present. busy: somebody else compacts the stream.
--
-- No group is created meanwhile (create_group): it would be handed messages that go, and have dead letters without a message. busy may mean that, too.
CREATE OR REPLACE FUNCTION compact(p_stream bigint, p_after bigint DEFAULT 0, p_limit bigint DEFAULT 10000,
    p_min_age interval DEFAULT '5 minutes', p_tombstone_age interval DEFAULT '24 hours')
RETURNS TABLE (looked_at bigint, removed bigint, upto bigint, floor bigint, busy boolean)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off SET constraint_exclusion = off AS $$
#variable_conflict use_column
DECLARE
    s     stream := require_stream(p_stream);
    now   timestamptz := clock_timestamp();
    first bigint;
    last  bigint;
BEGIN
    PERFORM require_compacted(s);
    PERFORM require_read_committed();
    PERFORM require_limit(p_limit);
    PERFORM require_that(p_min_age BETWEEN '0' AND '1000 years' AND p_tombstone_age BETWEEN '0' AND '1000 years', 'messages are removed at an age of 0 to 1000 years', 'The defaults are 5 minutes, and 24 hours for tombstones.');
    SELECT 0, 0, p_after, p_after, false INTO looked_at, removed, upto, floor, busy;
    IF NOT pg_try_advisory_xact_lock(compact_lock(p_stream)) THEN
        busy := true;
        RETURN NEXT;
        RETURN;
    END IF;
    floor := compact_floor(p_stream);
    -- Partitions that are leaving are retention's.
    p_after := greatest(p_after, s.first_id - 1);
    EXECUTE format('SELECT id FROM %I WHERE id > $1 AND id <= $2 ORDER BY id LIMIT 1', 'message_log_' || p_stream) INTO first USING p_after, floor;
    IF first IS NULL THEN
        upto := greatest(p_after, floor);
        RETURN NEXT;
        RETURN;
    END IF;
    EXECUTE format(
        'WITH part AS MATERIALIZED (
             SELECT id, key, produced_at < $4 AS old,
                    payload IS NULL AND produced_at < $5 OR coalesce(expires_at < $5, false) AS ended
             FROM %1$I WHERE id >= $1 AND id <= $2 ORDER BY id LIMIT $3),
         gone AS MATERIALIZED (
             SELECT id FROM part AS p
             WHERE old
               AND ((SELECT l.id FROM %2$I AS l WHERE l.key = p.key AND l.id > p.id ORDER BY l.id LIMIT 1) IS NOT NULL
                    OR ended AND (SELECT l.id FROM %2$I AS l WHERE l.key = p.key AND l.id < p.id ORDER BY l.id DESC LIMIT 1) IS NULL)
               AND NOT EXISTS (SELECT FROM consumer_group AS g
                               CROSS JOIN LATERAL (SELECT FROM %3$I AS e WHERE e.group_id = g.id AND e.message_id = p.id LIMIT 1) AS e
                               WHERE g.stream_id = $6)),
         deleted AS (DELETE FROM %1$I AS l WHERE l.id = ANY (ARRAY(SELECT id FROM gone)) RETURNING l.id)
         SELECT (SELECT count(*) FROM part), (SELECT count(*) FROM deleted), (SELECT max(id) FROM part)',
        'message_log_' || p_stream || '_p' || first / s.partition_size, 'message_log_' || p_stream, 'exception_queue_' || p_stream)
        INTO looked_at, removed, last
        USING first, floor, greatest(p_limit, 1), now - greatest(p_min_age, '0'), now - greatest(p_min_age, p_tombstone_age, '0'), p_stream;
    upto := CASE WHEN looked_at < greatest(p_limit, 1) THEN least((first / s.partition_size + 1) * s.partition_size - 1, floor) ELSE last END;
    RETURN NEXT;
END $$;

-- Maintenance: compaction begins anew when a thousand messages came since it last did, and half as many as it then went through; and once a day where any came. Its memory has
-- "head", where the log was when it last began, "looked", how many messages it went through, and while it is at it "upto".
CREATE OR REPLACE FUNCTION compact_due(p_heads stream_head[]) RETURNS TABLE (stream_id bigint, due_in interval)
LANGUAGE plpgsql VOLATILE AS $$
#variable_conflict use_column
DECLARE
    now timestamptz := clock_timestamp();
BEGIN
    RETURN QUERY
    SELECT s.id, interval '0'
    FROM unnest(p_heads) AS h JOIN stream AS s ON s.id = h.stream_id
    LEFT JOIN maintenance_step AS m ON m.step = 'compact' AND m.stream_id = s.id
    CROSS JOIN LATERAL (SELECT h.head - coalesce((m.memory->>'head')::bigint, 0) AS fresh, coalesce((m.memory->>'looked')::bigint, 0) AS looked) AS l
    WHERE s.compacted AND s.created_at < now - interval '10 minutes'
      AND (m.memory ? 'upto' OR l.fresh >= greatest(1000, l.looked / 2) OR l.fresh > 0 AND coalesce(m.started_at, '-infinity') < now - interval '1 day');
END $$;
