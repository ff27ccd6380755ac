-- The disk space of partitions that compaction has emptied, or half of it. Deleting gives none back: VACUUM (FULL) of a partition does, which no function
-- and no transaction can run. It is a statement for a client; this says of which partitions.
--
-- Never of the parent. Not of partitions into which something may still be inserted: their producers would wait. What a held snapshot sees
-- stays in the partition that is written anew, and is not given back before that ends.

-- Partitions of which at least half the space is free or dead, as far as that is worth anything: their names, quoted; what they take, with TOAST and without indexes; about
-- how much of that is messages; and whether the caller may vacuum them. It looks at about a thousand pages of each.
CREATE OR REPLACE FUNCTION reclaimable(p_stream bigint)
RETURNS TABLE (partition text, bytes bigint, live_bytes bigint, permitted boolean)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET jit = off AS $$
DECLARE
    s       stream := require_stream(p_stream);
    settled bigint := settled_id(p_stream);
    leaf    record;
    part    double precision;
BEGIN
    FOR leaf IN
        SELECT c.oid, c.relname, c.relowner, pg_relation_size(c.oid) / current_setting('block_size')::bigint AS pages
        FROM pg_inherits AS i JOIN pg_class AS c ON c.oid = i.inhrelid
        WHERE i.inhparent = to_regclass(format('%I', 'message_log_' || p_stream))
          AND NOT i.inhdetachpending
          AND (substring(c.relname FROM '_p(\d+)$')::bigint + 1) * s.partition_size - 1 <= settled
          -- Those that are leaving need none.
          AND (substring(c.relname FROM '_p(\d+)$')::bigint + 1) * s.partition_size - 1 >= s.first_id
        ORDER BY substring(c.relname FROM '_p(\d+)$')::bigint
    LOOP
        bytes := pg_table_size(leaf.oid);
        CONTINUE WHEN bytes < 1048576;
        part := least(100.0, 100000.0 / greatest(leaf.pages, 1));
        EXECUTE format('SELECT coalesce(sum(40 + octet_length(key) + coalesce(octet_length(routing_key), 0) + coalesce(pg_column_size(headers), 0) + coalesce(pg_column_size(payload), 0)), 0) * 100 / $1
                        FROM %I TABLESAMPLE SYSTEM ($1)', leaf.relname)
            INTO live_bytes USING part;
        CONTINUE WHEN live_bytes * 2 > bytes;
        partition := format('%I.%I', current_schema(), leaf.relname);
        permitted := pg_has_role(leaf.relowner, 'USAGE')
            OR CASE WHEN current_setting('server_version_num')::int >= 170000 THEN has_table_privilege(leaf.oid, 'MAINTAIN') ELSE false END;
        RETURN NEXT;
    END LOOP;
END $$;

-- Maintenance: after compaction has removed something, its step says so here.
CREATE OR REPLACE FUNCTION reclaim_due(p_heads stream_head[]) RETURNS TABLE (stream_id bigint, due_in interval)
LANGUAGE plpgsql VOLATILE AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    SELECT h.stream_id, interval '0'
    FROM unnest(p_heads) AS h JOIN maintenance_step AS m ON m.step = 'reclaim' AND m.stream_id = h.stream_id AND m.memory ? 'wanted';
END $$;
