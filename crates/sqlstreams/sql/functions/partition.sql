-- Partitions of message_log_<stream id>: ranges of ids, made ahead of the head.

-- An INSERT straight into a partition locks only the partition, so the fence (fence.sql) would not see its writer
-- and readers would pass over the message. It does not fire for rows that arrive through the parent.
CREATE OR REPLACE FUNCTION refuse_direct_write() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'direct write to partition %', TG_TABLE_NAME
        USING ERRCODE = 'SQ007',
              HINT = format('Write to %I.%I: only there can consumers see a writer that has not committed yet.',
                            TG_TABLE_SCHEMA, regexp_replace(TG_TABLE_NAME, '_p\d+$', ''));
END $$;

-- Makes one partition: prepared on the side, then attached, so that neither producers nor readers are blocked
-- (CREATE TABLE … PARTITION OF would take ACCESS EXCLUSIVE on the parent).
CREATE OR REPLACE FUNCTION create_partition(p_stream bigint, p_size bigint, p_number bigint, p_compacted boolean) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    parent text := 'message_log_' || p_stream;
    leaf   text := parent || '_p' || p_number;
    lo     bigint := p_number * p_size;
    hi     bigint := (p_number + 1) * p_size;
BEGIN
    EXECUTE format('CREATE TABLE %I (LIKE %I INCLUDING DEFAULTS INCLUDING CONSTRAINTS INCLUDING STORAGE INCLUDING COMPRESSION)', leaf, parent);
    -- The bounds as a constraint: ATTACH believes it instead of scanning.
    EXECUTE format('ALTER TABLE %I ADD CONSTRAINT id_range CHECK (id >= %s AND id < %s)', leaf, lo, hi);
    -- Compaction deletes from partitions: through the parent it would look like a writer.
    EXECUTE format('CREATE TRIGGER refuse_direct_write BEFORE INSERT OR UPDATE %s ON %I FOR EACH STATEMENT EXECUTE FUNCTION refuse_direct_write()',
                   CASE WHEN NOT p_compacted THEN 'OR DELETE' END, leaf);
    IF p_compacted THEN
        EXECUTE format('CREATE INDEX ON %I (key, id)', leaf);
    END IF;
    -- ALWAYS: also where session_replication_role = replica (restores, logical replication).
    EXECUTE format('ALTER TABLE %I ENABLE ALWAYS TRIGGER refuse_direct_write', leaf);
    EXECUTE format('ALTER TABLE %I ATTACH PARTITION %I FOR VALUES FROM (%s) TO (%s)', parent, leaf, lo, hi);
END $$;

-- Makes the partitions up to p_ahead (1 to 1,000) beyond the one that the head is in. Returns how many it made. The last one is the last that
-- ends before the largest bigint: a stream whose ids have come so far takes no more.
-- SECURITY DEFINER: a producer that may only insert still gets room to insert into.
CREATE OR REPLACE FUNCTION ensure_partitions(p_stream bigint, p_ahead int DEFAULT 3) RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT SET lock_timeout = '3s' AS $$
DECLARE
    s       stream;
    head    bigint;
    made    int := 0;
    wanted  bigint;
    last    bigint;
BEGIN
    PERFORM require_stream(p_stream);
    -- One maker at a time per stream; the others find its partitions when they get the lock.
    SELECT * INTO s FROM stream WHERE id = p_stream FOR NO KEY UPDATE;
    EXECUTE format('SELECT last_value FROM %I', 'message_log_' || p_stream || '_id_seq') INTO head;
    last := 9223372036854775807 / s.partition_size - 1;
    IF head / s.partition_size > last THEN
        RAISE EXCEPTION 'the ids of stream % are used up', quote_ident(s.name)
            USING ERRCODE = 'SQ013', HINT = 'Nothing can be added to it any more. Create another stream for what comes.';
    END IF;
    FOR wanted IN
        SELECT n FROM generate_series(head / s.partition_size, least(head / s.partition_size + least(greatest(p_ahead, 1), 1000), last)) AS n
        WHERE to_regclass(format('%I', 'message_log_' || p_stream || '_p' || n)) IS NULL
    LOOP
        PERFORM create_partition(p_stream, s.partition_size, wanted, s.compacted);
        made := made + 1;
    END LOOP;
    RETURN made;
END $$;
