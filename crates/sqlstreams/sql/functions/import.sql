-- Importing: messages from elsewhere, with the times they had there, under new ids or under their own.
--
-- New ids are drawn as producers draw them, beside producers. Own ids are not drawn, so that the fence (fence.sql) has to be told of them:
--   * The log is locked against every writer (SHARE ROW EXCLUSIVE) before anything is looked at. Nobody has drawn an id that is not final but
--     ourselves, and nobody draws one before our transaction has ended; readers read on.
--   * ROW EXCLUSIVE is taken as well, before the sequence moves: by that the fence sees writers.
--   * Only ids above all that the stream knows (known_id) are taken, so that no reader has gone past any of them.
--   * The sequence is restarted and set, in this order: what is set after a restart is taken back with the transaction. A rolled-back import
--     leaves no id that was drawn in vain, and may come again. Whoever reads the sequence's new value can also see the messages.
-- A reader that finds a gap among them waits until we have ended, as for any writer; then all that is missing never comes.

-- The highest id that anything of the stream knows: what was drawn, what is stored, what cursors, leases, replays, rows of failures, the archive, bindings,
-- keys, retention and the fence say. Where the log was restored to an earlier point than the rest, or without its sequence, that is above the sequence, and an id in
-- between would be used twice. of: the highest of each.
-- Bounded: a look-up per group and partition; of the idempotency keys the 1,000 newest, whose ids are about the highest.
CREATE OR REPLACE FUNCTION known_id(p_stream bigint, OUT highest bigint, OUT of jsonb)
LANGUAGE plpgsql VOLATILE SET enable_seqscan = off SET jit = off AS $$
BEGIN
    -- Groups of which only rows are left count as well: by a look at the next group's first entry of each index, not at all of them.
    EXECUTE format(
        'WITH RECURSIVE
            cursors AS ((SELECT group_id FROM %2$I ORDER BY group_id LIMIT 1)
                        UNION ALL SELECT (SELECT n.group_id FROM %2$I AS n WHERE n.group_id > c.group_id ORDER BY n.group_id LIMIT 1) FROM cursors AS c WHERE c.group_id IS NOT NULL),
            failed  AS ((SELECT group_id FROM %4$I ORDER BY group_id LIMIT 1)
                        UNION ALL SELECT (SELECT n.group_id FROM %4$I AS n WHERE n.group_id > c.group_id ORDER BY n.group_id LIMIT 1) FROM failed AS c WHERE c.group_id IS NOT NULL),
            done    AS ((SELECT group_id FROM %5$I ORDER BY group_id LIMIT 1)
                        UNION ALL SELECT (SELECT n.group_id FROM %5$I AS n WHERE n.group_id > c.group_id ORDER BY n.group_id LIMIT 1) FROM done AS c WHERE c.group_id IS NOT NULL)
         SELECT jsonb_strip_nulls(jsonb_build_object(
            ''log'', (SELECT max(id) FROM %1$I),
            ''cursors'', (SELECT max(greatest(x.claimed, (SELECT max(position) FROM unnest(x.cohorts)))) FROM cursors AS c
                          CROSS JOIN LATERAL (SELECT claimed, cohorts FROM %2$I AS n WHERE n.group_id = c.group_id ORDER BY generation DESC LIMIT 1) AS x),
            ''leases'', (SELECT max(upper(l.pending) - 1) FROM cursors AS c
                         CROSS JOIN LATERAL (SELECT first_open FROM %2$I AS n WHERE n.group_id = c.group_id ORDER BY generation DESC LIMIT 1) AS x
                         CROSS JOIN LATERAL (SELECT pending FROM %3$I AS n WHERE n.group_id = c.group_id AND n.seq >= x.first_open) AS l),
            ''replays'', (SELECT max((SELECT max(r.upto_id) FROM unnest(x.replays) AS r)) FROM cursors AS c
                          CROSS JOIN LATERAL (SELECT replays FROM %2$I AS n WHERE n.group_id = c.group_id ORDER BY generation DESC LIMIT 1) AS x),
            ''archive'', (SELECT max(id) FROM %7$I),
            ''exceptions'', (SELECT max(x.message_id) FROM failed AS c CROSS JOIN LATERAL (SELECT message_id FROM %4$I AS n WHERE n.group_id = c.group_id ORDER BY message_id DESC LIMIT 1) AS x),
            ''settled'', (SELECT max(x.message_id) FROM done AS c CROSS JOIN LATERAL (SELECT message_id FROM %5$I AS n WHERE n.group_id = c.group_id ORDER BY message_id DESC LIMIT 1) AS x),
            ''idempotency_keys'', (SELECT nullif(max(greatest(x.message_id, 0)), 0) FROM (SELECT message_id FROM %6$I ORDER BY sent_at DESC LIMIT 1000) AS x)))',
        'message_log_' || p_stream, 'consumer_group_cursor_' || p_stream, 'consumer_lease_' || p_stream, 'exception_queue_' || p_stream,
        'consumer_done_' || p_stream, 'message_idempotency_' || p_stream, 'message_archive_' || p_stream) INTO of;
    of := of || jsonb_strip_nulls(jsonb_build_object(
        'sequence', log_head(p_stream),
        'retention', (SELECT nullif(s.first_id - 1, 0) FROM stream AS s WHERE s.id = p_stream),
        'fence', (SELECT greatest(f.settled, f.head) FROM stream_fence AS f WHERE f.stream_id = p_stream ORDER BY generation DESC LIMIT 1),
        'bindings', (SELECT max(x.after_id) FROM consumer_group AS g CROSS JOIN LATERAL (SELECT after_id FROM binding_set WHERE group_id = g.id ORDER BY version DESC LIMIT 1) AS x WHERE g.stream_id = p_stream)));
    highest := (SELECT coalesce(max(value::bigint), 0) FROM jsonb_each_text(of));
END $$;

-- Moves the sequence of a log up to p_id, so that the next id drawn is above it, and takes that back with the transaction. Only under a lock against
-- all writers (lock_log), which know nothing of it.
CREATE OR REPLACE FUNCTION move_sequence(p_stream bigint, p_id bigint) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    name text := 'message_log_' || p_stream || '_id_seq';
BEGIN
    EXECUTE format('ALTER SEQUENCE %I RESTART', name);
    PERFORM setval(format('%I', name)::regclass, p_id);
    -- Nobody has drawn these: they say nothing about how fast ids are.
    UPDATE stream_pace SET head = p_id, seen_at = clock_timestamp() WHERE stream_id = p_stream;
END $$;

-- Keeps every writer out of the log until the transaction ends, once those that write have ended; the fence sees a writer in us. It waits for
-- lock_timeout: meanwhile producers wait behind it.
CREATE OR REPLACE FUNCTION lock_log(p_stream bigint) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    -- The stronger first: two that each had the weaker would wait for each other.
    EXECUTE format('LOCK TABLE ONLY %I IN SHARE ROW EXCLUSIVE MODE', 'message_log_' || p_stream);
    EXECUTE format('LOCK TABLE ONLY %I IN ROW EXCLUSIVE MODE', 'message_log_' || p_stream);
END $$;

-- Makes these partitions of the log where they are missing.
CREATE OR REPLACE FUNCTION make_partitions(s stream, p_numbers bigint[]) RETURNS int
LANGUAGE plpgsql AS $$
DECLARE
    wanted bigint;
    made   int := 0;
BEGIN
    FOR wanted IN SELECT DISTINCT n FROM unnest(p_numbers) AS n WHERE to_regclass(format('%I', 'message_log_' || s.id || '_p' || n)) IS NULL ORDER BY n LOOP
        IF NOT create_partition(s, wanted) THEN
            RAISE EXCEPTION 'partition % of stream % cannot be attached: something has its log locked', wanted, quote_ident(s.name)
                USING ERRCODE = 'lock_not_available', HINT = 'Try again: an ANALYZE, or whoever looks after partitions, may have it for a moment.';
        END IF;
        made := made + 1;
    END LOOP;
    RETURN made;
END $$;

-- Stores messages, in this order, with their own times. The arrays are of one length; keys, routing keys, headers and times to expire may be NULL, a
-- payload only in a compacted stream. p_ids, where they came from, ascend: with p_keep they are the messages' ids here as well.
--
-- p_name: an import by this name goes on where it ended: how far it came, by p_ids, is kept in the same transaction, and what it has stored
-- before is passed over. With p_keep what is there already is passed over where it is the same, and refused where it is not (SQ040), so is an id
-- of which the stream has no message though it has come beyond it (SQ041): readers may have gone past it.
--
-- Returns how many it stored and passed over, and the first and last id that they have here. With p_keep only the owner of the tables may.
CREATE OR REPLACE FUNCTION import_messages(p_stream bigint, p_keep boolean, p_name text, p_ids bigint[], p_keys text[], p_routing_keys text[], p_headers text[],
    p_produced_at timestamptz[], p_expires_at timestamptz[], p_payloads anyarray)
RETURNS TABLE (stored bigint, skipped bigint, first_id bigint, last_id bigint)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off SET lock_timeout = '3s' AS $$
#variable_conflict use_column
DECLARE
    s     stream := require_stream(p_stream);
    log   text := 'message_log_' || p_stream;
    n     int := coalesce(cardinality(p_ids), 0);
    skip  int := 0;
    upto  bigint;
    known bigint;
    m     record;
    head  bigint;
BEGIN
    PERFORM require_read_committed();
    PERFORM require_that(n BETWEEN 1 AND 10000
                             AND NOT EXISTS (SELECT FROM unnest(ARRAY[cardinality(p_keys), cardinality(p_routing_keys), cardinality(p_headers),
                                                                      cardinality(p_produced_at), cardinality(p_expires_at), cardinality(p_payloads)]) AS c
                                             WHERE c IS DISTINCT FROM n),
                         'an import takes 1 to 10000 messages, in arrays of one length', 'Give each message a place in each array: NULL for none.');
    PERFORM require_that((SELECT bool_and(u.id BETWEEN 1 AND 9223372036854775806 AND u.id > coalesce(u.before, 0))
                          FROM (SELECT id, lag(id) OVER (ORDER BY o) AS before FROM unnest(p_ids) WITH ORDINALITY AS u(id, o)) AS u),
                         'the ids of an import ascend, from 1 on', 'Import the messages in the order of their ids.');
    -- Also at infinity: what somebody's own SQL has stored so comes back as it was.
    PERFORM require_that(array_position(p_produced_at, NULL) IS NULL, 'a message was produced at some time', 'Give each message its time.');
    IF p_name IS NOT NULL THEN
        PERFORM require_name('import', p_name);
        INSERT INTO import_progress AS i (stream_id, name) VALUES (p_stream, p_name) ON CONFLICT DO NOTHING;
        SELECT i.upto INTO upto FROM import_progress AS i WHERE i.stream_id = p_stream AND i.name = p_name FOR UPDATE;
        skip := (SELECT count(*) FROM unnest(p_ids) AS i WHERE i <= upto);
    END IF;

    IF p_keep THEN
        -- In the order of whoever makes partitions: the stream's row, then the log.
        SELECT * INTO s FROM stream WHERE id = p_stream FOR NO KEY UPDATE;
        PERFORM require_stream(p_stream);
        PERFORM lock_log(p_stream);
        known := (known_id(p_stream)).highest;
        IF skip = 0 THEN
            skip := (SELECT count(*) FROM unnest(p_ids) AS i WHERE i <= known);
        END IF;
        FOR m IN EXECUTE format(
            'SELECT u.id, l.id IS NULL AS missing
             FROM unnest($1, $2, $3, $4, $5, $6, $7) AS u(id, key, routing_key, headers, produced_at, expires_at, payload)
             LEFT JOIN LATERAL (SELECT * FROM %I WHERE id = u.id LIMIT 1) AS l ON true
             WHERE u.id <= $8 AND (l.id IS NULL OR (l.key, l.routing_key, l.headers, l.produced_at, l.expires_at, l.payload::text) IS DISTINCT FROM (u.key, u.routing_key, u.headers::jsonb, u.produced_at, u.expires_at, u.payload::text))
             ORDER BY u.id LIMIT 1', log)
            USING p_ids, p_keys, p_routing_keys, p_headers, p_produced_at, p_expires_at, p_payloads, known
        LOOP
            IF m.missing THEN
                RAISE EXCEPTION 'stream % has come to id %, so that message % cannot be added any more', quote_ident(s.name), known, m.id
                    USING ERRCODE = 'SQ041', DETAIL = m.id::text, HINT = 'Import without keeping ids, or into a new stream: readers may have gone past that id.';
            END IF;
            RAISE EXCEPTION 'stream % has another message of id %', quote_ident(s.name), m.id
                USING ERRCODE = 'SQ040', DETAIL = m.id::text, HINT = 'Import without keeping ids, or into a new stream.';
        END LOOP;
    END IF;

    skipped := skip;
    stored := n - skip;
    IF stored > 0 THEN
        IF p_keep THEN
            PERFORM require_that((SELECT count(DISTINCT i / s.partition_size) FROM unnest(p_ids[skip + 1:]) AS i) <= 1000, 'the ids of one import lie in more than 1000 partitions', 'Import fewer messages at once.');
            PERFORM require_that(p_ids[n] / s.partition_size <= 9223372036854775807 / s.partition_size - 1, 'the ids of the stream would be used up', 'Import without keeping ids.');
            PERFORM make_partitions(s, ARRAY(SELECT i / s.partition_size FROM unnest(p_ids[skip + 1:]) AS i));
            EXECUTE format(
                'INSERT INTO %I (id, key, routing_key, headers, produced_at, expires_at, payload) OVERRIDING SYSTEM VALUE
                 SELECT u.id, u.key, u.routing_key, u.headers::jsonb, u.produced_at, u.expires_at, u.payload
                 FROM unnest($1, $2, $3, $4, $5, $6, $7) AS u(id, key, routing_key, headers, produced_at, expires_at, payload)', log)
                USING p_ids[skip + 1:], p_keys[skip + 1:], p_routing_keys[skip + 1:], p_headers[skip + 1:], p_produced_at[skip + 1:], p_expires_at[skip + 1:], p_payloads[skip + 1:];
            PERFORM move_sequence(p_stream, p_ids[n]);
            IF known = 0 AND NOT EXISTS (SELECT FROM consumer_group AS g WHERE g.stream_id = p_stream) THEN
                -- The log begins here: groups need not go through all the ids before.
                UPDATE stream AS x SET first_id = p_ids[1] WHERE x.id = p_stream;
            END IF;
            first_id := p_ids[skip + 1];
            last_id := p_ids[n];
            PERFORM ensure_partitions(p_stream);
        ELSE
            head := log_head(p_stream);
            IF to_regclass(format('%I', log || '_p' || (head + stored) / s.partition_size + 1)) IS NULL THEN
                PERFORM ensure_partitions(p_stream, (least(stored / s.partition_size, 900) + 3)::int);
            END IF;
            EXECUTE format(
                'WITH new AS (INSERT INTO %I (key, routing_key, headers, produced_at, expires_at, payload)
                              SELECT u.key, u.routing_key, u.headers::jsonb, u.produced_at, u.expires_at, u.payload
                              FROM unnest($1, $2, $3, $4, $5, $6) WITH ORDINALITY AS u(key, routing_key, headers, produced_at, expires_at, payload, n) ORDER BY u.n RETURNING id)
                 SELECT min(id), max(id) FROM new', log)
                INTO first_id, last_id
                USING p_keys[skip + 1:], p_routing_keys[skip + 1:], p_headers[skip + 1:], p_produced_at[skip + 1:], p_expires_at[skip + 1:], p_payloads[skip + 1:];
        END IF;
        IF p_name IS NOT NULL THEN
            UPDATE import_progress AS i SET upto = p_ids[n], messages = i.messages + stored, at = clock_timestamp() WHERE i.stream_id = p_stream AND i.name = p_name;
        END IF;
    END IF;
    RETURN NEXT;
END $$;

-- How far the import p_name came, by the ids of where it comes from; 0: it has not begun.
CREATE OR REPLACE FUNCTION import_upto(p_stream bigint, p_name text) RETURNS bigint
LANGUAGE plpgsql STABLE SET search_path FROM CURRENT AS $$
BEGIN
    PERFORM require_stream(p_stream);
    RETURN coalesce((SELECT upto FROM import_progress WHERE stream_id = p_stream AND name = p_name), 0);
END $$;
