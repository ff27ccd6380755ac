-- What a stream of version 1 is missing. Whatever is there already is left alone, without a lock: it is called again for streams that were made meanwhile.

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
