-- What a stream of version 1 is missing. Whatever is there already is left alone, without a lock: it is called again for streams that were made meanwhile.

-- Who may do something with the one table may do so with the other.
CREATE OR REPLACE FUNCTION grant_like(p_table text, p_new text) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    a record;
BEGIN
    FOR a IN SELECT CASE x.grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(g.rolname) END AS grantee, x.privilege_type, x.is_grantable
             FROM pg_class AS c CROSS JOIN aclexplode(c.relacl) AS x LEFT JOIN pg_roles AS g ON g.oid = x.grantee
             WHERE c.oid = to_regclass(quote_ident(p_table)) AND x.grantee <> c.relowner AND x.privilege_type IN ('SELECT', 'INSERT', 'UPDATE', 'DELETE') LOOP
        EXECUTE format('GRANT %s ON %I TO %s%s', a.privilege_type, p_new, a.grantee, CASE WHEN a.is_grantable THEN ' WITH GRANT OPTION' END);
    END LOOP;
END $$;

SELECT grant_like('consumer_group', t) FROM unnest(ARRAY['group_watch', 'replay', 'retention_hold', 'log_partition', 'stream_pace', 'schedule', 'schedule_turn', 'schedule_run', 'import_progress']) AS t;

CREATE OR REPLACE FUNCTION migrate_stream(p_stream bigint) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    s stream;
BEGIN
    SELECT * INTO s FROM stream WHERE id = p_stream FOR NO KEY UPDATE;
    IF s.id IS NULL THEN
        RETURN;   -- dropped
    END IF;
    IF to_regclass(format('%I', 'message_archive_' || p_stream)) IS NULL THEN
        EXECUTE format(
            'CREATE TABLE %I (
                 id          bigint PRIMARY KEY,
                 key         text COLLATE "C",
                 routing_key text COLLATE "C",
                 headers     jsonb,
                 produced_at timestamptz NOT NULL,
                 expires_at  timestamptz,
                 payload     %s
             ) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000,
                     autovacuum_vacuum_cost_delay = 0, vacuum_truncate = false)',
            'message_archive_' || p_stream, s.payload_type);
        PERFORM grant_like('message_log_' || p_stream, 'message_archive_' || p_stream);
    END IF;
    IF to_regclass(format('%I', 'exception_dead_at_' || p_stream)) IS NULL THEN
        EXECUTE format('CREATE INDEX %I ON %I (dead_at) WHERE state = ''dead''', 'exception_dead_at_' || p_stream, 'exception_queue_' || p_stream);
    END IF;
    IF NOT EXISTS (SELECT FROM pg_attribute WHERE attrelid = to_regclass(format('%I', 'consumer_lease_' || p_stream)) AND attname = 'replay') THEN
        EXECUTE format('ALTER TABLE %I ADD COLUMN replay bigint', 'consumer_lease_' || p_stream);
    END IF;
    IF NOT EXISTS (SELECT FROM pg_attribute WHERE attrelid = to_regclass(format('%I', 'consumer_group_cursor_' || p_stream)) AND attname = 'replays') THEN
        EXECUTE format('ALTER TABLE %I ADD COLUMN reread_to bigint, ADD COLUMN replays group_replay[]', 'consumer_group_cursor_' || p_stream);
    END IF;
    INSERT INTO log_partition (stream_id, number, from_id, to_id)
        SELECT p_stream, x.number, x.number * s.partition_size, (x.number + 1) * s.partition_size - 1
        FROM (SELECT substring(c.relname FROM '_p(\d+)$')::bigint AS number
              FROM pg_inherits AS i JOIN pg_class AS c ON c.oid = i.inhrelid WHERE i.inhparent = to_regclass(format('%I', 'message_log_' || p_stream))) AS x
        ON CONFLICT DO NOTHING;
    INSERT INTO stream_pace (stream_id, head, seen_at, rated_at)
        VALUES (p_stream, coalesce(pg_sequence_last_value(to_regclass(format('%I', 'message_log_' || p_stream || '_id_seq'))), 0), clock_timestamp(), clock_timestamp())
        ON CONFLICT DO NOTHING;
END $$;
