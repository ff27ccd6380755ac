-- Reading a log without a group: pages of what is final, for exports and whoever else wants to see what is there. Nothing is claimed, and
-- nothing is held up.

-- The lowest id that the partitions of the log reach down to: retention takes partitions from the front.
CREATE OR REPLACE FUNCTION lowest_possible_id(p_stream bigint) RETURNS bigint
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    RETURN (SELECT coalesce(min(substring(c.relname FROM '_p(\d+)$')::bigint), 0) * (SELECT partition_size FROM stream WHERE id = p_stream)
            FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
            WHERE i.inhparent = to_regclass(format('%I', 'message_log_' || p_stream)) AND NOT i.inhdetachpending);
END $$;

-- How far the log is final, as far as can be told without waiting, for somebody who stands at p_after: the settled id, or what a look at the
-- writers finds. On a standby only what was found on the primary: its writers cannot be seen there.
CREATE OR REPLACE FUNCTION final_id(p_stream bigint, p_after bigint) RETURNS bigint
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    settled bigint := settled_id(p_stream);
    head    bigint;
BEGIN
    IF settled > p_after OR pg_is_in_recovery() THEN
        RETURN settled;
    END IF;
    IF has_table_privilege('stream_fence', 'UPDATE') AND NOT current_setting('transaction_read_only')::bool THEN
        RETURN look_at_gap(p_stream, p_after);
    END IF;
    -- Whoever may not write it down looks without a memory. The two statements stay in this order.
    head := log_head(p_stream);
    RETURN CASE WHEN cardinality(log_writers(p_stream)) = 0 THEN greatest(settled, head) ELSE settled END;
END $$;

-- A page of the log: messages above p_after and up to p_upto, lowest id first, at most p_limit and about p_bytes of payload (but at least
-- one), expired ones too. Only what is final: no message ever appears later at or below an id that a page has gone past. Nothing needs
-- to be held between pages. p_type is only there for its type, that of the stream's payloads: read_log(…, NULL::json).
--
-- The last row has no id: upto says how far the page goes, so that the next begins after it; head is the last id drawn. A page that does not
-- get further than p_after has come to the end of what is final: all of it where that is head, else a transaction is under way.
--
-- Invariant: upto never exceeds the settled id, but where every id between p_after and upto has a row that is visible.
CREATE OR REPLACE FUNCTION read_log(p_stream bigint, p_after bigint, p_upto bigint, p_limit bigint, p_bytes bigint, p_type anyelement)
RETURNS TABLE (id bigint, key text, routing_key text, headers jsonb, produced_at timestamptz, expires_at timestamptz, payload anyelement,
    upto bigint, head bigint)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off SET constraint_exclusion = off AS $$
#variable_conflict use_column
DECLARE
    log     text := 'message_log_' || p_stream;
    page    bigint := least(p_limit, 10000);
    size    bigint;
    settled bigint;
    reached bigint;
    width   bigint;
    hit     bigint;
    m       record;
    n       bigint := 0;
    last    bigint;
    tail    bigint;
BEGIN
    PERFORM require_read_committed();
    size := (require_stream(p_stream)).partition_size;
    PERFORM require_limit(p_limit);
    PERFORM require_that(p_upto < p_after IS NOT TRUE,
                         format('the range ends before it begins: after id %s, up to %s', p_after, p_upto), 'Say its beginning first.');
    tail := log_head(p_stream);
    reached := greatest(p_after, 0);
    -- All partitions are looked at only where this one is gone.
    IF to_regclass(format('%I', log || '_p' || reached / size)) IS NULL THEN
        reached := greatest(reached, least(lowest_possible_id(p_stream) - 1, p_upto));
    END IF;
    width := page;
    settled := settled_id(p_stream);
    IF reached >= settled THEN
        -- As far as ids follow each other without a gap there is nothing to wait for.
        EXECUTE format('SELECT max(id) FROM (SELECT id, row_number() OVER (ORDER BY id) AS n FROM %I WHERE id > $1 AND id <= $2) AS x WHERE id = $1 + n', log)
            INTO hit USING reached, least(reached + page, p_upto);
        -- Drawn but not visible: what the look frees is read by later statements.
        settled := coalesce(hit, CASE WHEN tail > reached THEN final_id(p_stream, reached) ELSE settled END);
    END IF;
    settled := least(settled, p_upto);
    -- Over what is empty in windows that grow, so that they cost index probes rather than calls; not for ever, though.
    hit := NULL;
    WHILE reached < settled AND reached - p_after < 10000000 LOOP
        EXECUTE format('SELECT id FROM %I WHERE id > $1 AND id <= $2 ORDER BY id LIMIT 1', log) INTO hit USING reached, least(reached + width, settled);
        EXIT WHEN hit IS NOT NULL;
        reached := least(reached + width, settled);
        width := least(width * 4, 10000000);
    END LOOP;
    IF hit IS NOT NULL THEN
        last := least(hit - 1 + page, settled);
        FOR m IN EXECUTE format(
            'SELECT m.*, sum(coalesce(pg_column_size(payload), 0)) OVER (ORDER BY id ROWS UNBOUNDED PRECEDING) - coalesce(pg_column_size(payload), 0) AS bytes_before
             FROM (SELECT * FROM %I WHERE id >= $1 AND id <= $2 ORDER BY id) AS m ORDER BY id', log) USING hit, last
        LOOP
            IF m.bytes_before >= p_bytes AND n > 0 THEN
                last := reached;
                EXIT;
            END IF;
            id := m.id; key := m.key; routing_key := m.routing_key; headers := m.headers; produced_at := m.produced_at; expires_at := m.expires_at; payload := m.payload;
            RETURN NEXT;
            n := n + 1;
            reached := m.id;
        END LOOP;
        reached := last;
    END IF;
    id := NULL; key := NULL; routing_key := NULL; headers := NULL; produced_at := NULL; expires_at := NULL; payload := NULL;
    upto := greatest(reached, p_after);
    head := tail;
    RETURN NEXT;
END $$;
