-- The doctor: what is wrong with an installation, in words and by stable codes, and how it is repaired. After restores, mostly: of data without
-- sequences, of a part, to an earlier point, in another place.
--
-- Looking changes nothing, waits for nobody, and is bounded: a few look-ups per stream, group and partition, whatever the tables hold.
-- A repair (doctor_repair) looks again under the locks it needs, does one thing in the caller's transaction, and leaves a row in audit.

-- Where this installation lives.
CREATE OR REPLACE FUNCTION present_epoch() RETURNS installation
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    e installation;
BEGIN
    BEGIN
        SELECT system_identifier INTO e.system FROM pg_control_system();
        SELECT timeline_id INTO e.timeline FROM pg_control_checkpoint();
    EXCEPTION WHEN insufficient_privilege THEN
        -- Everybody may, unless that was taken away.
        e.system := 0;
        e.timeline := 0;
    END;
    SELECT oid::bigint INTO e.database FROM pg_database WHERE datname = current_database();
    SELECT oid::bigint INTO e.schema FROM pg_namespace WHERE nspname = current_schema();
    RETURN e;
END $$;

CREATE OR REPLACE FUNCTION record_epoch() RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    e installation := present_epoch();
BEGIN
    INSERT INTO installation (system, database, timeline, schema) VALUES (e.system, e.database, e.timeline, e.schema);
END $$;

-- What of a stream's tables is not there.
CREATE OR REPLACE FUNCTION missing_tables(p_stream bigint) RETURNS text[]
LANGUAGE sql VOLATILE AS $$
    SELECT coalesce(array_agg(t || p_stream), '{}')
    FROM unnest(ARRAY['message_log_', 'consumer_group_cursor_', 'consumer_lease_', 'exception_queue_', 'consumer_done_', 'message_idempotency_', 'message_delayed_', 'message_archive_']) AS t
    WHERE to_regclass(format('%I', t || p_stream)) IS NULL
$$;

CREATE OR REPLACE FUNCTION missing_functions(p_stream bigint) RETURNS text[]
LANGUAGE sql VOLATILE AS $$
    SELECT coalesce(array_agg(f || p_stream), '{}')
    FROM unnest(ARRAY['settle_message_', 'produce_'] || CASE WHEN (SELECT compacted FROM stream WHERE id = p_stream) THEN ARRAY['latest_message_', 'current_messages_'] ELSE '{}' END) AS f
    WHERE to_regproc(format('%I', f || p_stream)) IS NULL
$$;

-- The sequences of the tables that exist once, where they are behind them.
CREATE OR REPLACE FUNCTION late_sequences() RETURNS TABLE (sequence regclass, of name, attribute name, head bigint, stored bigint)
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    FOR sequence, of, attribute IN
        SELECT q.seqrelid, t.relname, a.attname FROM pg_class AS t JOIN pg_depend AS d ON d.refobjid = t.oid AND d.deptype = 'i' AND d.classid = 'pg_class'::regclass
        JOIN pg_sequence AS q ON q.seqrelid = d.objid JOIN pg_attribute AS a ON a.attrelid = t.oid AND a.attnum = d.refobjsubid
        WHERE t.relnamespace = (SELECT oid FROM pg_namespace WHERE nspname = current_schema()) AND t.relname !~ '^message_(log|delayed)_\d+$' ORDER BY t.relname
    LOOP
        EXECUTE format('SELECT (SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM %s), (SELECT max(%I) FROM %I)', sequence, attribute, of) INTO head, stored;
        IF stored > head THEN
            RETURN NEXT;
        END IF;
    END LOOP;
END $$;

-- Partitions of the log that anybody may write to by themselves: without the trigger that refuses it, or with one that does not always fire.
CREATE OR REPLACE FUNCTION unguarded_partitions(p_stream bigint) RETURNS TABLE (partition name, missing boolean)
LANGUAGE sql VOLATILE AS $$
    SELECT c.relname, t.oid IS NULL
    FROM pg_inherits AS i JOIN pg_class AS c ON c.oid = i.inhrelid
    LEFT JOIN pg_trigger AS t ON t.tgrelid = c.oid AND t.tgname = 'refuse_direct_write'
    WHERE i.inhparent = to_regclass(format('%I', 'message_log_' || p_stream)) AND t.tgenabled IS DISTINCT FROM 'A'
    ORDER BY c.oid
$$;

-- Who holds the fence of a stream up, and has for at least p_for: transactions that have written to the log and are open.
CREATE OR REPLACE FUNCTION fence_holders(p_stream bigint, p_for interval) RETURNS TABLE (pid int, gid text, age interval, query text)
LANGUAGE sql VOLATILE AS $$
    SELECT l.pid, p.gid, clock_timestamp() - coalesce(p.prepared, a.xact_start), left(a.query, 200)
    FROM pg_locks AS l
    LEFT JOIN pg_stat_activity AS a ON a.pid = l.pid
    -- Of a prepared transaction the lock names no process. Its number is in another lock, or in its name after a restart.
    LEFT JOIN pg_prepared_xacts AS p ON l.pid IS NULL AND (l.virtualtransaction = '-1/' || p.transaction::text
        OR EXISTS (SELECT FROM pg_locks AS x WHERE x.locktype = 'transactionid' AND x.transactionid = p.transaction AND x.virtualtransaction = l.virtualtransaction AND x.pid IS NULL))
    WHERE l.locktype = 'relation' AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
      AND l.relation = to_regclass(format('%I', 'message_log_' || p_stream)) AND l.mode = 'RowExclusiveLock' AND l.granted
      AND l.virtualtransaction NOT LIKE '%/0' AND l.pid IS DISTINCT FROM pg_backend_pid()
      AND clock_timestamp() - coalesce(p.prepared, a.xact_start) >= p_for
    ORDER BY 3 DESC LIMIT 10
$$;

-- Everything that is found, of one stream or of all. severity: error (messages are lost, refused or used twice unless something is done), warning, info.
-- fixable: doctor_repair(code, stream) does something about it. p_open and p_old: how long a transaction that has written to a log, or has a snapshot, may be open.
CREATE OR REPLACE FUNCTION doctor(p_stream text DEFAULT NULL, p_open interval DEFAULT '1 minute', p_old interval DEFAULT '1 hour')
RETURNS TABLE (code text, severity text, stream text, consumer_group text, message text, hint text, fixable boolean, detail jsonb)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    s       stream;
    known   record;
    head    bigint;
    stored  bigint;
    names   text[];
    number  bigint;
    r       record;
    e       installation := present_epoch();
    was     installation;
BEGIN
    PERFORM require_read_committed();
    fixable := true;
    IF p_stream IS NULL THEN
        -- First: what repairs the others leaves a row in audit, which has a sequence, too.
        RETURN QUERY SELECT 'catalog_sequence_behind', 'error', NULL::text, NULL::text,
            format('sequences are behind their tables: %s; creating and changing fails', string_agg(format('%s is at %s, table %s at %s', l.sequence, l.head, l.of, l.stored), '; ')),
            'As after a restore of data alone. --fix moves them.', true, jsonb_build_object('tables', array_agg(l.of))
        FROM late_sequences() AS l HAVING count(*) > 0;
    END IF;
    SELECT * INTO was FROM installation ORDER BY number DESC LIMIT 1;
    -- 0: whoever looked was not allowed to know.
    IF p_stream IS NULL AND (was.number IS NULL OR (was.database, was.schema) <> (e.database, e.schema)
                             OR 0 NOT IN (was.system, e.system) AND (was.system, was.timeline) <> (e.system, e.timeline)) THEN
        RETURN QUERY SELECT 'restored', 'warning', NULL::text, NULL::text,
            CASE WHEN was.number IS NULL THEN 'where this installation lives is not known: its tables were restored without table installation'
                 WHEN was.system <> e.system AND 0 NOT IN (was.system, e.system) THEN 'this installation was made in another cluster: it was restored or copied, or the server was upgraded'
                 WHEN (was.database, was.schema) IS DISTINCT FROM (e.database, e.schema) THEN 'this installation was made in another database: it was restored or copied'
                 ELSE format('the server is on timeline %s, and was on %s: it was restored to some point, or a standby took over', e.timeline, was.timeline) END,
            'Ids that were given out after that point would be given out again, to other messages: whoever outside of the database remembers ids takes one for the other. --fix leaves a million ids out in each stream, and remembers the new place.',
            true, jsonb_build_object('was', to_jsonb(was), 'is', to_jsonb(e) - 'number' - 'recorded_at');
    END IF;

    IF p_stream IS NOT NULL AND NOT EXISTS (SELECT FROM stream WHERE name = p_stream) THEN
        RAISE EXCEPTION 'there is no stream %', quote_ident(p_stream)
            USING ERRCODE = 'SQ001', HINT = 'Table stream lists those that exist.';
    END IF;
    FOR s IN SELECT * FROM stream WHERE name = p_stream OR p_stream IS NULL ORDER BY name LOOP
        stream := s.name;
        consumer_group := NULL;
        names := missing_tables(s.id);
        IF cardinality(names) > 0 THEN
            RETURN QUERY SELECT 'tables_missing', 'error', stream, NULL::text, format('%s of its tables are missing: %s', cardinality(names), array_to_string(names, ', ')),
                CASE WHEN cardinality(names) = 8 THEN '--fix makes them, empty, for data to be restored into; or drop the stream.'
                     ELSE 'Restore them: what is missing cannot be told from what is left.' END,
                cardinality(names) = 8, jsonb_build_object('tables', names);
            CONTINUE;
        END IF;

        SELECT * INTO known FROM known_id(s.id);
        head := (known.of ->> 'sequence')::bigint;
        stored := (known.of ->> 'log')::bigint;
        IF stored > head THEN
            RETURN QUERY SELECT 'sequence_behind', 'error', stream, NULL::text,
                format('its sequence is at %s and its log at %s: sending fails until all ids between were tried', head, stored),
                'As after a restore of data alone. --fix moves the sequence.', true, jsonb_build_object('sequence', head, 'log', stored);
        END IF;
        IF known.highest > greatest(head, coalesce(stored, 0)) THEN
            RETURN QUERY SELECT 'ahead_of_log', 'error', stream, NULL::text,
                format('the log has come to %s, but %s: the log was restored to an earlier point than the rest, or without its end', greatest(head, stored),
                       (SELECT string_agg(format('%s to %s', replace(k.key, '_', ' '), k.value), ', ') FROM jsonb_each_text(known.of) AS k WHERE k.value::bigint > greatest(head, stored))),
                'New messages would get ids that groups take for done, and nobody would receive them. --fix moves the sequence above all of these: no id is used twice, and what was lost stays a gap.',
                true, known.of;
        END IF;
        EXECUTE format('SELECT CASE WHEN q.is_called THEN q.last_value ELSE 0 END AS head, (SELECT max(id) FROM %I) AS stored FROM %I AS q', 'message_delayed_' || s.id, 'message_delayed_' || s.id || '_id_seq') INTO r;
        IF r.stored > r.head THEN
            RETURN QUERY SELECT 'delayed_sequence_behind', 'error', stream, NULL::text, format('the sequence of its delayed messages is at %s, and one of them has id %s: delaying fails', r.head, r.stored),
                'As after a restore of data alone. --fix moves the sequence.', true, jsonb_build_object('sequence', r.head, 'stored', r.stored);
        END IF;

        FOR r IN SELECT q.seqrelid::regclass AS name, q.seqcache FROM pg_sequence AS q
                 WHERE q.seqrelid IN (to_regclass(format('%I', 'message_log_' || s.id || '_id_seq')), to_regclass(format('%I', 'message_delayed_' || s.id || '_id_seq'))) AND q.seqcache <> 1 LOOP
            RETURN QUERY SELECT 'sequence_cache', 'error', stream, NULL::text, format('sequence %s hands out %s ids at a time: messages that get theirs later are passed over', r.name, r.seqcache),
                '--fix sets it to 1. Sessions that write keep what they have drawn: let them reconnect.', true, jsonb_build_object('sequence', r.name::text, 'cache', r.seqcache);
        END LOOP;

        IF NOT EXISTS (SELECT FROM stream_fence AS f WHERE f.stream_id = s.id) THEN
            RETURN QUERY SELECT 'fence_missing', 'error', stream, NULL::text, 'it has no row in stream_fence: groups stop at the first gap', '--fix makes one.', true, '{}'::jsonb;
        END IF;

        SELECT array_agg(u.partition ORDER BY u.partition), count(*) FILTER (WHERE u.missing) INTO names, number FROM unguarded_partitions(s.id) AS u;
        IF cardinality(names) > 0 THEN
            RETURN QUERY SELECT 'guard_missing', 'error', stream, NULL::text,
                format('%s of its partitions take direct writes: trigger refuse_direct_write is missing in %s and not enabled ALWAYS in %s', cardinality(names), number, cardinality(names) - number),
                'Consumers pass over what is written so. --fix restores the trigger.', true, jsonb_build_object('partitions', names[1:20]);
        END IF;

        SELECT array_agg(n) INTO names FROM generate_series(greatest(head, 1) / s.partition_size, least(greatest(head, 1) / s.partition_size + 1, 9223372036854775807 / s.partition_size - 1)) AS n
        WHERE NOT EXISTS (SELECT FROM pg_inherits AS i WHERE i.inhrelid = to_regclass(format('%I', 'message_log_' || s.id || '_p' || n)) AND i.inhparent = to_regclass(format('%I', 'message_log_' || s.id)));
        IF cardinality(names) > 0 THEN
            r := NULL;
            SELECT EXISTS (SELECT FROM unnest(names) AS n WHERE to_regclass(format('%I', 'message_log_' || s.id || '_p' || n)) IS NOT NULL) AS detached INTO r;
            RETURN QUERY SELECT 'partitions_missing', CASE WHEN (head / s.partition_size)::text = ANY (names) OR r.detached THEN 'error' ELSE 'warning' END, stream, NULL::text,
                format('at its head, id %s, there is no partition %s', head, array_to_string(names, ', ')),
                CASE WHEN r.detached THEN 'A table of that name exists and is not part of the log: attach, rename or drop it.' ELSE '--fix makes it; so does whoever sends or consumes.' END,
                NOT r.detached, jsonb_build_object('head', head, 'partitions', names);
        END IF;

        names := missing_functions(s.id);
        IF cardinality(names) > 0 THEN
            RETURN QUERY SELECT 'functions_missing', 'error', stream, NULL::text, format('functions that are made for it are missing: %s', array_to_string(names, ', ')), '--fix makes them.', true, jsonb_build_object('functions', names);
        END IF;

        SELECT array_agg(x.indexrelid::regclass::text ORDER BY x.indexrelid) INTO names
        FROM pg_class AS c JOIN pg_index AS x ON x.indrelid = c.oid
        WHERE c.relnamespace = (SELECT oid FROM pg_namespace WHERE nspname = current_schema()) AND NOT x.indisvalid
          AND (c.relname = ANY (ARRAY['message_log_' || s.id, 'consumer_group_cursor_' || s.id, 'consumer_lease_' || s.id, 'exception_queue_' || s.id, 'consumer_done_' || s.id, 'message_idempotency_' || s.id, 'message_delayed_' || s.id])
               OR c.oid IN (SELECT inhrelid FROM pg_inherits WHERE inhparent = to_regclass(format('%I', 'message_log_' || s.id))));
        IF cardinality(names) > 0 THEN
            RETURN QUERY SELECT 'index_invalid', 'warning', stream, NULL::text, format('%s of its indexes are not valid: %s', cardinality(names), array_to_string(names[1:5], ', ')),
                'REINDEX INDEX CONCURRENTLY each; a partitioned one becomes valid when those of all partitions are.', false, jsonb_build_object('indexes', names[1:20]);
        END IF;

        FOR r IN SELECT g.name, g.mode FROM consumer_group AS g WHERE g.stream_id = s.id AND g.mode <> 'parallel' AND g.lane_probe <> lane_probe() ORDER BY g.name LOOP
            RETURN QUERY SELECT 'lanes_moved', 'info', stream, r.name, format('this server hashes keys otherwise than the one its lanes are from: the %s group will handle again what is not done in all lanes', r.mode),
                'Nothing needs to be done: its next consumer sees to it. Idempotency keys from the other server are not known here.', false, '{}'::jsonb;
        END LOOP;
        -- A row each, or consuming fails with what looks like a dropped group.
        FOR r IN EXECUTE format('SELECT g.name FROM consumer_group AS g WHERE g.stream_id = $1 AND NOT EXISTS (SELECT FROM %I AS c WHERE c.group_id = g.id) ORDER BY g.name', 'consumer_group_cursor_' || s.id) USING s.id LOOP
            RETURN QUERY SELECT 'cursor_missing', 'error', stream, r.name, 'it has no cursor: its table was restored without data', 'Restore it, or drop the group and create it where it is to start.', false, '{}'::jsonb;
        END LOOP;

        FOR r IN SELECT * FROM fence_holders(s.id, p_open) LOOP
            RETURN QUERY SELECT 'fence_held', 'warning', stream, NULL::text,
                CASE WHEN r.pid IS NULL THEN format('prepared transaction %s has been open for %s and has written to it', coalesce(quote_literal(r.gid), '(unknown)'), date_trunc('second', r.age))
                     ELSE format('session %s has had a transaction open for %s that has written to it', r.pid, date_trunc('second', r.age)) END,
                CASE WHEN r.pid IS NULL THEN 'Messages after its own wait for it. COMMIT PREPARED or ROLLBACK PREPARED it.' ELSE 'Messages after its own wait for it. End it: pg_terminate_backend, if it will not end by itself.' END,
                false, jsonb_strip_nulls(jsonb_build_object('pid', r.pid, 'gid', r.gid, 'seconds', extract(epoch FROM r.age)::bigint, 'query', r.query));
        END LOOP;
        IF EXISTS (SELECT FROM pg_subscription_rel WHERE srrelid = to_regclass(format('%I', 'message_log_' || s.id))) THEN
            RETURN QUERY SELECT 'subscribed', 'warning', stream, NULL::text, 'its log is filled by logical replication, whose writers consumers cannot see: they may pass over messages', 'Consume on the publisher, or after the subscription has ended.', false, '{}'::jsonb;
        END IF;
    END LOOP;

    IF p_stream IS NULL THEN
        FOR r IN
            SELECT format('session %s', a.pid) AS who, a.pid, NULL::text AS gid, clock_timestamp() - a.xact_start AS age FROM pg_stat_activity AS a
            WHERE a.backend_xmin IS NOT NULL AND a.xact_start < clock_timestamp() - p_old AND a.pid <> pg_backend_pid() AND a.datname = current_database()
            UNION ALL SELECT format('prepared transaction %L', p.gid), NULL, p.gid, clock_timestamp() - p.prepared FROM pg_prepared_xacts AS p WHERE p.prepared < clock_timestamp() - p_old AND p.database = current_database()
            UNION ALL SELECT format('replication slot %s', quote_ident(slot_name)), NULL, NULL, NULL FROM pg_replication_slots WHERE NOT active AND age(coalesce(xmin, catalog_xmin)) > 1000000
            ORDER BY 4 DESC LIMIT 10
        LOOP
            RETURN QUERY SELECT 'old_snapshot', 'warning', NULL::text, NULL::text, format('%s keeps dead rows from being removed%s', r.who, ', for ' || date_trunc('second', r.age)::text),
                'Everything gets slower and larger with time. End it.', false, jsonb_strip_nulls(jsonb_build_object('pid', r.pid, 'gid', r.gid, 'seconds', extract(epoch FROM r.age)::bigint));
        END LOOP;
    END IF;
END $$;

-- Moves the sequence of a stream above all that anything knows, and p_beyond further. Returns where it was and is.
CREATE OR REPLACE FUNCTION raise_sequence(s stream, p_beyond bigint) RETURNS jsonb
LANGUAGE plpgsql AS $$
DECLARE
    before bigint;
    after  bigint;
BEGIN
    -- In the order of whoever makes partitions.
    PERFORM FROM stream WHERE id = s.id FOR NO KEY UPDATE;
    PERFORM lock_log(s.id);
    before := log_head(s.id);
    after := (known_id(s.id)).highest;
    IF after + p_beyond > before THEN
        PERFORM move_sequence(s.id, after + p_beyond);
        PERFORM ensure_partitions(s.id);
    END IF;
    RETURN jsonb_build_object('from', before, 'to', greatest(before, after + p_beyond));
END $$;

-- Makes the tables of a stream that has a row and none of them, empty.
CREATE OR REPLACE FUNCTION make_missing_tables(s stream) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM hold_migrations_up();
    PERFORM make_stream_tables(s.id, s.payload_type, s.compacted);
    PERFORM make_stream_functions(s.id);
    IF s.notify THEN
        UPDATE stream SET notify = false WHERE id = s.id;
        PERFORM alter_stream(s.id, true);
    END IF;
END $$;

-- Repairs what doctor found by that code, of a stream (NULL: of the installation). Returns what it did; NULL where there was nothing to do.
CREATE OR REPLACE FUNCTION doctor_repair(p_code text, p_stream text DEFAULT NULL) RETURNS jsonb
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off SET lock_timeout = '3s' AS $$
DECLARE
    s     stream;
    done  jsonb;
    r     record;
    names text[];
    moved jsonb := '{}';
BEGIN
    PERFORM require_read_committed();
    IF p_stream IS NOT NULL THEN
        SELECT * INTO s FROM stream WHERE name = p_stream;
        IF NOT FOUND THEN
            RAISE EXCEPTION 'there is no stream %', quote_ident(p_stream) USING ERRCODE = 'SQ001', HINT = 'Table stream lists those that exist.';
        END IF;
    END IF;
    IF p_code IN ('restored', 'catalog_sequence_behind') <> (p_stream IS NULL) THEN
        PERFORM require_that(false, format('%s is not repaired for %s', p_code, CASE WHEN p_stream IS NULL THEN 'an installation' ELSE 'a stream' END), 'Pass what doctor returned.');
    END IF;
    CASE p_code
        WHEN 'restored' THEN
            FOR s IN SELECT * FROM stream ORDER BY id LOOP
                IF cardinality(missing_tables(s.id)) = 0 AND (known_id(s.id)).highest > 0 THEN
                    moved := moved || jsonb_build_object(s.name, raise_sequence(s, 1000000));
                END IF;
            END LOOP;
            PERFORM record_epoch();
            done := jsonb_build_object('sequences', moved);
            s := NULL;
        WHEN 'catalog_sequence_behind' THEN
            FOR r IN SELECT * FROM late_sequences() LOOP
                -- Who inserts meanwhile has drawn, or waits.
                EXECUTE format('LOCK TABLE %I IN SHARE ROW EXCLUSIVE MODE', r.of);
                EXECUTE format('SELECT setval(%L, max(%I)) FROM %I', r.sequence, r.attribute, r.of);
                names := names || r.of::text;
            END LOOP;
            done := jsonb_build_object('tables', names);
        WHEN 'tables_missing' THEN
            names := missing_tables(s.id);
            PERFORM require_that(cardinality(names) IN (0, 8), format('stream %I has some of its tables and lacks others', s.name), 'Restore them.');
            IF cardinality(names) = 8 THEN
                PERFORM make_missing_tables(s);
                done := jsonb_build_object('tables', names);
            END IF;
        WHEN 'sequence_behind', 'ahead_of_log' THEN
            done := raise_sequence(s, 0);
        WHEN 'delayed_sequence_behind' THEN
            EXECUTE format('LOCK TABLE %I IN SHARE ROW EXCLUSIVE MODE', 'message_delayed_' || s.id);
            EXECUTE format('SELECT jsonb_build_object(''to'', setval(%L::regclass, (SELECT max(id) FROM %I)))', format('%I', 'message_delayed_' || s.id || '_id_seq'), 'message_delayed_' || s.id) INTO done;
        WHEN 'sequence_cache' THEN
            EXECUTE format('ALTER SEQUENCE %I CACHE 1', 'message_log_' || s.id || '_id_seq');
            EXECUTE format('ALTER SEQUENCE %I CACHE 1', 'message_delayed_' || s.id || '_id_seq');
            done := jsonb_build_object('cache', 1);
        WHEN 'fence_missing' THEN
            INSERT INTO stream_fence (stream_id, generation) SELECT s.id, 0 WHERE NOT EXISTS (SELECT FROM stream_fence WHERE stream_id = s.id);
            done := '{}';
        WHEN 'guard_missing' THEN
            FOR r IN SELECT * FROM unguarded_partitions(s.id) LOOP
                IF r.missing THEN
                    EXECUTE format('CREATE TRIGGER refuse_direct_write BEFORE INSERT OR UPDATE %s ON %I FOR EACH STATEMENT EXECUTE FUNCTION refuse_direct_write()', CASE WHEN NOT s.compacted THEN 'OR DELETE' END, r.partition);
                END IF;
                EXECUTE format('ALTER TABLE %I ENABLE ALWAYS TRIGGER refuse_direct_write', r.partition);
                names := names || r.partition::text;
            END LOOP;
            done := jsonb_build_object('partitions', names);
        WHEN 'partitions_missing' THEN
            done := jsonb_build_object('made', ensure_partitions(s.id));
        WHEN 'functions_missing' THEN
            PERFORM hold_migrations_up();
            done := jsonb_build_object('functions', missing_functions(s.id));
            PERFORM make_stream_functions(s.id);
        ELSE
            PERFORM require_that(false, format('there is no repair for %s', quote_literal(p_code)), 'Doctor says what is fixable.');
    END CASE;
    INSERT INTO audit (action, stream_name, detail) VALUES ('doctor_' || p_code, coalesce(p_stream, ''), coalesce(done, '{}'));
    RETURN done;
END $$;

-- For restores of data alone: makes the tables of streams that have a row and no tables, and these partitions of logs, message_log_<stream
-- id>_p<number>, that the data is to go into. Returns how many partitions it made. It writes no other rows: those come with the data.
CREATE OR REPLACE FUNCTION prepare_restore(p_partitions text[] DEFAULT '{}') RETURNS int
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
DECLARE
    s    stream;
    made int := 0;
    bad  text;
BEGIN
    SELECT p INTO bad FROM unnest(p_partitions) AS p
    WHERE p !~ '^message_log_\d{1,18}_p\d{1,18}$' OR NOT EXISTS (SELECT FROM stream AS x WHERE x.id = substring(p FROM 'log_(\d+)_')::bigint) LIMIT 1;
    PERFORM require_that(bad IS NULL, format('%L is no partition of a stream that there is', bad), 'Restore the data of table stream first, and name partitions as message_log_1_p0.');
    FOR s IN SELECT * FROM stream ORDER BY id LOOP
        IF cardinality(missing_tables(s.id)) = 8 THEN
            PERFORM make_missing_tables(s);
        END IF;
        made := made + make_partitions(s, ARRAY(SELECT substring(p FROM '_p(\d+)$')::bigint FROM unnest(p_partitions) AS p WHERE p LIKE format('message\_log\_%s\_p%%', s.id)));
    END LOOP;
    RETURN made;
END $$;

-- An installation that is made now lives here, and so does one that is brought to the version that knows of this table.
DO $$
BEGIN
    IF NOT EXISTS (SELECT FROM installation) AND (NOT EXISTS (SELECT FROM stream) OR EXISTS (SELECT FROM schema_migration WHERE version = 2 AND functions IS NULL)) THEN
        PERFORM record_epoch();
    END IF;
END $$;
