-- Retention: old messages leave the log, a whole partition at a time.
--
-- A partition is wanted gone when it lies beyond one of its stream's limits, that is, when what is newer than the limit lies in later partitions: so
-- at least what the limit names is kept, and about a partition more. It goes once every group has resolved it, or at once where the stream has
-- drop_unread.
--
--   attached --retire_partitions--> leaving --archive_referenced--> archived --DETACH … CONCURRENTLY, drop_leaf--> gone
--
-- Each stage is written down (log_partition.state) or can be seen in pg_inherits, so that a crash at any point is gone on from. DETACH … CONCURRENTLY
-- cannot run in a function: a client sends it. One that was interrupted leaves the leaf pending, and is finished by finalize_detach.
--
-- Invariants:
--   * Partitions go from the front, and only sealed ones: nothing above the settled id goes, and what commits late goes as late.
--   * stream.first_id only grows. It is set past a partition before anything of that is touched, under FOR UPDATE of the stream's row, in the
--     transaction that has seen, after it had the lock, that every group has resolved it. Whoever puts a cursor anywhere holds that row FOR KEY SHARE
--     and does not go below. So nobody comes to refer to a message of it any more, but for leases that are open (with drop_unread only): what they
--     hold is copied, too.
--   * What an exception row refers to is copied into message_archive_<n> before the leaf is let go; fetch_messages and read_messages look there as
--     well.
--   * The parent is locked SHARE UPDATE EXCLUSIVE at most: neither producers nor readers wait, and the fence does not take it for a writer.

-- The lowest id that is kept, which stays so until the caller's transaction ends: for whoever puts a cursor somewhere, or refers to messages of the
-- log in any other way. SECURITY DEFINER: for the lock.
CREATE OR REPLACE FUNCTION hold_first_id(p_stream bigint) RETURNS bigint
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT AS $$
BEGIN
    RETURN (SELECT first_id FROM stream WHERE id = p_stream FOR KEY SHARE);
END $$;

-- How long a partition stays after it was sealed, whatever the limits say: a producer whose connection broke asks for a minute what became of its
-- messages (commit.sql).
CREATE OR REPLACE FUNCTION retention_min_age() RETURNS interval
LANGUAGE sql IMMUTABLE AS $$ SELECT interval '1 minute' $$;

-- Whether the partitions above one hold p_count ids. Where ids were left out (doctor.sql, import.sql) there are none, so it goes by the first and the
-- last message of each, from the newest on: no more than it takes.
CREATE OR REPLACE FUNCTION are_newer(p_stream bigint, p_number bigint, p_head bigint, p_count bigint) RETURNS boolean
LANGUAGE plpgsql STABLE AS $$
DECLARE
    leaf   text;
    ids    bigint;
    newer  bigint := 0;
BEGIN
    FOR leaf IN SELECT format('%I', 'message_log_' || n.stream_id || '_p' || n.number) FROM log_partition AS n
                WHERE n.stream_id = p_stream AND n.number > p_number AND n.from_id <= p_head AND n.state = 'attached' ORDER BY n.number DESC LOOP
        CONTINUE WHEN to_regclass(leaf) IS NULL;
        EXECUTE format('SELECT coalesce(max(id) - min(id) + 1, 0) FROM %s', leaf) INTO ids;
        newer := newer + ids;
        EXIT WHEN newer >= p_count;
    END LOOP;
    RETURN newer >= p_count;
END $$;

-- Whether a limit wants a sealed partition gone, but for retain_resolved. p_newer: the bytes of the sealed partitions above it.
CREATE OR REPLACE FUNCTION beyond_limits(s stream, p log_partition, p_head bigint, p_newer numeric, p_now timestamptz) RETURNS boolean
LANGUAGE sql STABLE AS $$
    SELECT coalesce(p.sealed_at <= p_now - retention_min_age(), false)
       AND (coalesce(p.sealed_at <= p_now - s.retain_for, false)
            OR CASE WHEN p_head - p.to_id >= s.retain_count THEN are_newer(s.id, p.number, p_head, s.retain_count) ELSE false END
            OR coalesce(p_newer >= s.retain_bytes, false))
$$;

CREATE OR REPLACE FUNCTION has_retention(s stream) RETURNS boolean
LANGUAGE sql IMMUTABLE AS $$ SELECT s.retain_for IS NOT NULL OR s.retain_bytes IS NOT NULL OR s.retain_count IS NOT NULL OR s.retain_resolved $$;

-- Streams where retention has something to do: partitions that are leaving, or an oldest one that may be wanted gone. See maintain.sql.
--
-- For many streams that have nothing to do it looks at the oldest partition of each, and with retain_bytes at those above it. One whose size is not
-- known yet counts as endless: then retire_partitions measures it. Those that said not to be asked for yet are left out: a row each, every few
-- seconds, would be a lot of rows.
CREATE OR REPLACE FUNCTION retention_due(p_heads stream_head[]) RETURNS TABLE (stream_id bigint, due_in interval)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET jit = off AS $$
#variable_conflict use_column
DECLARE
    now  timestamptz := clock_timestamp();
    last timestamptz := now - retention_min_age();
BEGIN
    RETURN QUERY
    SELECT s.id, interval '0'
    FROM unnest(p_heads) AS h
    JOIN stream AS s ON s.id = h.stream_id
    LEFT JOIN LATERAL (SELECT p.number, p.to_id, p.sealed_at FROM log_partition AS p
                           WHERE p.stream_id = s.id AND p.state = 'attached' ORDER BY p.number LIMIT 1) AS p
        ON s.retain_for IS NOT NULL OR s.retain_count IS NOT NULL OR s.retain_bytes IS NOT NULL OR s.retain_resolved
    WHERE (s.id IN (SELECT l.stream_id FROM log_partition AS l WHERE l.state <> 'attached')
           OR p.sealed_at <= last AND p.to_id < h.head
              AND (s.retain_resolved OR p.sealed_at <= now - s.retain_for OR h.head - p.to_id >= s.retain_count
                   OR s.retain_bytes IS NOT NULL AND s.retain_bytes <= (SELECT sum(coalesce(n.bytes::double precision, 'infinity')) FROM log_partition AS n
                                                                        WHERE n.stream_id = s.id AND n.number > p.number AND n.sealed_at IS NOT NULL)))
      AND NOT EXISTS (SELECT FROM maintenance_step AS m WHERE m.step = 'retention' AND m.stream_id = s.id AND m.next_due > now);
END $$;

-- Marks partitions that are wanted gone, and may go, as leaving: at most p_limit of them. Returns how many, whether a group holds others back, and
-- whether the caller may do it at all: only the owner of the tables can.
CREATE OR REPLACE FUNCTION retire_partitions(p_stream bigint, p_limit int DEFAULT 8) RETURNS TABLE (retired int, held boolean, permitted boolean)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off SET lock_timeout = '1s' AS $$
DECLARE
    s      stream := require_stream(p_stream);
    chosen record;
BEGIN
    PERFORM require_read_committed();
    SELECT 0, false, pg_has_role(relowner, 'USAGE') INTO retired, held, permitted
        FROM pg_class WHERE oid = to_regclass(format('%I', 'message_log_' || p_stream));
    IF NOT permitted THEN
        RETURN NEXT;
        RETURN;
    END IF;
    IF s.retain_bytes IS NOT NULL THEN
        UPDATE log_partition AS p SET bytes = n.bytes
        FROM (SELECT number, pg_total_relation_size(to_regclass(format('%I', 'message_log_' || p_stream || '_p' || number))) AS bytes
              FROM log_partition WHERE stream_id = p_stream AND state = 'attached' AND sealed_at IS NOT NULL) AS n
        WHERE p.stream_id = p_stream AND p.number = n.number AND n.bytes IS NOT NULL AND p.bytes IS DISTINCT FROM n.bytes;
    END IF;
    -- First without the lock: what is held up is asked again and again.
    SELECT * INTO chosen FROM choose_partitions(p_stream, p_limit);
    IF chosen.numbers <> '{}' THEN
        -- Nobody puts a cursor anywhere before we are done, and this statement ends before the next one looks at them.
        PERFORM FROM stream WHERE id = p_stream FOR UPDATE;
        SELECT * INTO chosen FROM choose_partitions(p_stream, p_limit);
        UPDATE log_partition SET state = 'leaving', leaving_at = clock_timestamp() WHERE stream_id = p_stream AND number = ANY (chosen.numbers);
        UPDATE stream SET first_id = greatest(first_id, chosen.last + 1) WHERE id = p_stream AND chosen.numbers <> '{}';
    END IF;
    retired := cardinality(chosen.numbers);
    held := chosen.held_by IS NOT NULL;
    IF held THEN
        PERFORM set_retention_hold(p_stream, 'group', chosen.held_by);
    END IF;
    RETURN NEXT;
END $$;

-- Which partitions are wanted gone and may go, the last id of them, and which group keeps the next one.
CREATE OR REPLACE FUNCTION choose_partitions(p_stream bigint, p_limit int, OUT numbers bigint[], OUT last bigint, OUT held_by bigint)
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    s       stream := require_stream(p_stream);
    floor   record;
    p       log_partition;
    head    bigint := log_head(p_stream);
    started timestamptz := clock_timestamp();
    beyond  boolean;
BEGIN
    numbers := '{}';
    IF NOT has_retention(s) THEN
        RETURN;
    END IF;
    SELECT * INTO floor FROM resolved_by_groups(p_stream);
    FOR p IN SELECT * FROM log_partition WHERE stream_id = p_stream AND state = 'attached' ORDER BY number LIMIT p_limit LOOP
        EXIT WHEN p.sealed_at IS NULL OR p.sealed_at > started - retention_min_age() OR p.to_id > settled_id(p_stream)
               -- The one that the head is in would be made anew.
               OR p.to_id >= head;
        beyond := beyond_limits(s, p, head, CASE WHEN s.retain_bytes IS NOT NULL THEN
            (SELECT sum(n.bytes) FROM log_partition AS n WHERE n.stream_id = p_stream AND n.number > p.number AND n.sealed_at IS NOT NULL) END, started);
        -- Nobody has resolved anything where there is no group.
        EXIT WHEN NOT beyond AND NOT (s.retain_resolved AND floor.group_id IS NOT NULL);
        IF floor.resolved < p.to_id AND NOT (s.drop_unread AND beyond) THEN
            held_by := floor.group_id;
            EXIT;
        END IF;
        numbers := numbers || p.number;
        last := p.to_id;
    END LOOP;
END $$;

-- Puts cursors that stand below the lowest kept id to it, of at most p_limit groups: where unread messages are dropped, consumers then go on behind
-- the gap at once. What they miss is counted (group_tally.dropped), in ids. Returns of how many, and whether there are more.
--
-- Without it nothing would break: a gap below the settled id is passed over, in steps. So a group whose cursor somebody keeps locked is left as it
-- is.
CREATE OR REPLACE FUNCTION skip_to_first(p_stream bigint, p_limit int DEFAULT 20) RETURNS TABLE (moved int, more boolean)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off SET lock_timeout = '100ms' AS $$
DECLARE
    s      stream := require_stream(p_stream);
    behind bigint[];
    g      bigint;
BEGIN
    PERFORM require_read_committed();
    EXECUTE format(
        'SELECT coalesce(array_agg(id), ''{}'') FROM (
             SELECT g.id FROM consumer_group AS g
             CROSS JOIN LATERAL (SELECT claimed FROM %I WHERE group_id = g.id ORDER BY generation DESC LIMIT 1) AS c
             WHERE g.stream_id = $1 AND c.claimed < $2 LIMIT $3 + 1) AS x', 'consumer_group_cursor_' || p_stream)
        INTO behind USING p_stream, s.first_id - 1, p_limit;
    moved := 0;
    FOREACH g IN ARRAY behind[:p_limit] LOOP
        BEGIN
            moved := moved + skip_group_to(p_stream, g, s.first_id - 1);
        EXCEPTION WHEN lock_not_available THEN
            NULL;
        END;
    END LOOP;
    more := moved > 0 AND cardinality(behind) > p_limit;
    IF moved > 0 THEN
        PERFORM ring(ARRAY[p_stream]);
    END IF;
    RETURN NEXT;
END $$;

-- The same of one group: 1 if it was below.
CREATE OR REPLACE FUNCTION skip_group_to(p_stream bigint, p_group bigint, p_position bigint) RETURNS int
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    c   group_cursor := lock_cursor(p_stream, p_group);
    was bigint := c.claimed;
BEGIN
    IF was >= p_position THEN
        RETURN 0;
    END IF;
    IF c.cohorts IS NOT NULL THEN
        c.cohorts := move_lanes(c.cohorts, (SELECT bit_or(x.lanes) FROM unnest(c.cohorts) AS x WHERE x.position < p_position), p_position);
    END IF;
    c.claimed := p_position;
    PERFORM save_cursor(p_stream, p_group, c);
    INSERT INTO group_tally AS t (group_id, dropped) VALUES (p_group, p_position - was)
        ON CONFLICT (group_id) DO UPDATE SET dropped = t.dropped + EXCLUDED.dropped;
    INSERT INTO audit (action, stream_name, group_name, detail)
        SELECT 'drop_unread', s.name, g.name, jsonb_build_object('from', was + 1, 'to', p_position)
            FROM consumer_group AS g JOIN stream AS s ON s.id = g.stream_id WHERE g.id = p_group;
    RETURN 1;
END $$;
