-- Retention: a partition that is marked as leaving, on its way out of the log. The stages and invariants are in retention.sql.

-- The partitions that are leaving, the lowest first, as they are: state as in log_partition, the leaf's name as it is written in SQL, whether it is
-- there, part of the log, or halfway out of it; and whether the caller may drop it. Those that could not be dropped come last, any of them: they keep
-- no others from going.
CREATE OR REPLACE FUNCTION leaving_partitions(p_stream bigint, p_limit int DEFAULT 8)
RETURNS TABLE (number bigint, state text, parent text, leaf text, present boolean, attached boolean, pending boolean, permitted boolean)
LANGUAGE sql VOLATILE SET search_path FROM CURRENT AS $$
    SELECT p.number, p.state, format('%I.%I', current_schema(), 'message_log_' || p_stream),
           format('%I.%I', current_schema(), 'message_log_' || p_stream || '_p' || p.number),
           c.oid IS NOT NULL, i.inhrelid IS NOT NULL, coalesce(i.inhdetachpending, false), coalesce(pg_has_role(c.relowner, 'USAGE'), true)
    FROM (SELECT x.number, x.state, row_number() OVER (ORDER BY x.kept_by IS NOT NULL, CASE WHEN x.kept_by IS NULL THEN x.number ELSE random() END) AS turn
          FROM log_partition AS x WHERE x.stream_id = p_stream AND x.state <> 'attached' ORDER BY turn LIMIT p_limit) AS p
    LEFT JOIN pg_class AS c ON c.oid = to_regclass(format('%I.%I', current_schema(), 'message_log_' || p_stream || '_p' || p.number))
    LEFT JOIN pg_inherits AS i ON i.inhrelid = c.oid AND i.inhparent = to_regclass(format('%I.%I', current_schema(), 'message_log_' || p_stream))
    ORDER BY p.turn
$$;

-- Of a DETACH … CONCURRENTLY that runs: whether it waits for the lock of the leaf, and has for half a second. It holds that of the parent meanwhile, so that no
-- partition can be made; it is to be cancelled then, and finished by finalize_detach.
CREATE OR REPLACE FUNCTION detach_is_stuck(p_leaf text) RETURNS boolean
LANGUAGE sql VOLATILE SET search_path FROM CURRENT AS $$
    SELECT EXISTS (SELECT FROM pg_locks WHERE locktype = 'relation' AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
                   AND relation = to_regclass(p_leaf) AND NOT granted AND mode IN ('ShareUpdateExclusiveLock', 'AccessExclusiveLock')
                   AND waitstart < clock_timestamp() - interval '500 milliseconds')
$$;

-- Whether DETACH … CONCURRENTLY would wait for the lock of the leaf right away, and hold that of the parent meanwhile: while the leaf is vacuumed, as a rule.
CREATE OR REPLACE FUNCTION leaf_is_locked(p_leaf text) RETURNS boolean
LANGUAGE sql VOLATILE SET search_path FROM CURRENT AS $$
    SELECT EXISTS (SELECT FROM pg_locks WHERE locktype = 'relation' AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
                   AND relation = to_regclass(p_leaf)
                   AND mode IN ('ShareUpdateExclusiveLock', 'ShareLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock'))
$$;

-- Finishes the detaching of a leaf that is pending. It waits for older snapshots, of whatever in the database, and holds the lock meanwhile that is
-- needed to make a partition; so it does for a moment only, and is called again. Returns whether the leaf is not part of the log any more.
CREATE OR REPLACE FUNCTION finalize_detach(p_stream bigint, p_number bigint) RETURNS boolean
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET lock_timeout = '200ms' AS $$
DECLARE
    parent text := 'message_log_' || p_stream;
    leaf   text := parent || '_p' || p_number;
BEGIN
    IF EXISTS (SELECT FROM pg_inherits WHERE inhrelid = to_regclass(format('%I', leaf)) AND inhdetachpending) THEN
        EXECUTE format('ALTER TABLE %I DETACH PARTITION %I FINALIZE', parent, leaf);
    END IF;
    RETURN NOT EXISTS (SELECT FROM pg_inherits WHERE inhrelid = to_regclass(format('%I', leaf)));
EXCEPTION WHEN lock_not_available THEN
    RETURN false;
END $$;

-- Gives the disk space of a leaf back that nobody needs and that cannot be detached yet: whoever still reads it keeps it. Returns whether it is empty.
CREATE OR REPLACE FUNCTION empty_leaf(p_stream bigint, p_number bigint) RETURNS boolean
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET lock_timeout = '100ms' AS $$
DECLARE
    leaf text := 'message_log_' || p_stream || '_p' || p_number;
BEGIN
    IF NOT EXISTS (SELECT FROM log_partition WHERE stream_id = p_stream AND number = p_number AND state = 'archived') THEN
        RETURN false;
    END IF;
    IF pg_relation_size(to_regclass(format('%I', leaf))) > 0 THEN
        EXECUTE format('TRUNCATE %I', leaf);
    END IF;
    RETURN true;
EXCEPTION WHEN lock_not_available OR feature_not_supported THEN
    -- Somebody has it; or somebody's foreign key refers to it.
    RETURN false;
END $$;

-- Drops a leaf that is not part of the log any more and that nobody needs, and with it the last trace of the partition. False: it is too early, or
-- somebody reads it. NULL: something of somebody's is made of it, a view say, which is not for us to drop; that is written down
-- (log_partition.kept_by).
CREATE OR REPLACE FUNCTION drop_leaf(p_stream bigint, p_number bigint) RETURNS boolean
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET lock_timeout = '200ms' AS $$
DECLARE
    leaf text := 'message_log_' || p_stream || '_p' || p_number;
    why  text;
BEGIN
    PERFORM FROM log_partition WHERE stream_id = p_stream AND number = p_number
            AND (state = 'archived' OR state = 'leaving' AND to_regclass(format('%I', leaf)) IS NULL) FOR UPDATE;
    IF NOT FOUND OR EXISTS (SELECT FROM pg_inherits WHERE inhrelid = to_regclass(format('%I', leaf))) THEN
        RETURN false;
    END IF;
    BEGIN
        EXECUTE format('DROP TABLE IF EXISTS %I', leaf);
    EXCEPTION WHEN dependent_objects_still_exist THEN
        GET STACKED DIAGNOSTICS why = PG_EXCEPTION_DETAIL;
    END;
    IF why IS NOT NULL THEN
        why := left(replace(why, E'\n', ', '), 500);
        UPDATE log_partition SET kept_by = why, kept_since = coalesce(kept_since, clock_timestamp())
            WHERE stream_id = p_stream AND number = p_number AND kept_by IS DISTINCT FROM why;
        RETURN NULL;
    END IF;
    DELETE FROM log_partition WHERE stream_id = p_stream AND number = p_number;
    RETURN true;
EXCEPTION WHEN lock_not_available THEN
    RETURN false;
END $$;
