-- What the doctor repairs. Each repair looks again under the locks that it needs: two at once do once what there is to do.

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
    PERFORM make_stream_tables(s.id, s.payload_type, s.compacted);
    PERFORM make_stream_functions(s.id);
    IF s.notify THEN
        UPDATE stream SET notify = false WHERE id = s.id;
        PERFORM alter_stream(s.id, true);
    END IF;
END $$;

-- Makes a partition that somebody has detached part of the log again.
CREATE OR REPLACE FUNCTION attach_again(s stream, p_number bigint, p_pending boolean) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    parent text := 'message_log_' || s.id;
    leaf   text := parent || '_p' || p_number;
    misfit text := does_not_fit(s, p_number);
BEGIN
    PERFORM require_that(misfit IS NULL, format('%s cannot be attached: %s', leaf, misfit), 'Put it right and attach it, or restore the table.');
    IF p_pending THEN
        EXECUTE format('ALTER TABLE %I DETACH PARTITION %I FINALIZE', parent, leaf);
    END IF;
    EXECUTE format('ALTER TABLE %I ATTACH PARTITION %I FOR VALUES FROM (%s) TO (%s)', parent, leaf, p_number * s.partition_size, (p_number + 1) * s.partition_size);
EXCEPTION WHEN check_violation OR invalid_table_definition OR datatype_mismatch OR wrong_object_type OR undefined_column THEN
    PERFORM require_that(false, format('%s cannot be attached: %s', leaf, SQLERRM), 'Put it right and attach it, or restore the table.');
END $$;

-- Sets a default, an identity or a sequence as it is made.
CREATE OR REPLACE FUNCTION restore_shape(s stream, p_code text, p_of text, p_part text, p_expected text) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    attribute text := substr(p_part, 9);
    sequence  text := format('%s_%s_seq', p_of, substr(p_part, 9));
    last      bigint;
BEGIN
    IF p_code = 'default_changed' THEN
        EXECUTE format('ALTER TABLE %I ALTER COLUMN %I %s', p_of, attribute,
                       CASE WHEN p_expected IS NULL THEN 'DROP DEFAULT' WHEN p_expected LIKE '% AS IDENTITY' THEN 'SET GENERATED ALWAYS' ELSE 'SET DEFAULT ' || p_expected END);
    ELSIF p_code = 'identity_missing' THEN
        EXECUTE format('LOCK TABLE %I IN ACCESS EXCLUSIVE MODE', p_of);
        EXECUTE format('ALTER TABLE %I ALTER COLUMN %I DROP DEFAULT', p_of, attribute);
        -- One that somebody has put there may have given ids out.
        IF to_regclass(format('%I', sequence)) IS NOT NULL THEN
            EXECUTE format('SELECT last_value FROM %I', sequence) INTO last;
            EXECUTE format('DROP SEQUENCE %I', sequence);
        END IF;
        EXECUTE format('ALTER TABLE %I ALTER COLUMN %I ADD GENERATED ALWAYS AS IDENTITY (SEQUENCE NAME %I CACHE 1)', p_of, attribute, sequence);
        EXECUTE format('SELECT setval(%L::regclass, greatest($1, max(%I), 0) + %s) FROM %I', format('%I', sequence), attribute, CASE WHEN s.id IS NULL THEN 1000 ELSE 1000000 END, p_of) USING last;
        IF p_of = 'message_log_' || s.id THEN
            PERFORM raise_sequence(s, 1000000);
        END IF;
    ELSIF p_of = 'consumer_owner' THEN
        EXECUTE format('CREATE SEQUENCE IF NOT EXISTS %I CACHE 1', p_of);
        EXECUTE format('ALTER SEQUENCE %I %s OWNED BY NONE RESTART WITH %s', p_of, p_expected, 1 + floor(random() * 2147483646)::bigint);
    ELSE
        IF to_regclass(format('%I', p_of)) IS NULL THEN
            -- It is there, under another name.
            EXECUTE format('ALTER SEQUENCE %s RENAME TO %I', pg_get_serial_sequence(format('%I', regexp_replace(p_of, '_(id|number)_seq$', '')), substring(p_of FROM '_(id|number)_seq$')), p_of);
        END IF;
        EXECUTE format('SELECT last_value FROM %I', p_of) INTO last;
        EXECUTE format('ALTER SEQUENCE %I %s%s', p_of, p_expected, CASE WHEN last < 1 THEN ' RESTART' END);
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
    -- In the order of whoever makes streams and migrates them. One repair of a stream at a time, and one of the installation.
    PERFORM hold_migrations_up();
    IF p_stream IS NULL THEN
        LOCK TABLE installation IN SHARE ROW EXCLUSIVE MODE;
    ELSE
        SELECT * INTO s FROM stream WHERE name = p_stream FOR NO KEY UPDATE;
        IF NOT FOUND THEN
            RAISE EXCEPTION 'there is no stream %', quote_ident(p_stream) USING ERRCODE = 'SQ001', HINT = 'Table stream lists those that exist.';
        END IF;
    END IF;
    IF p_code NOT IN ('identity_missing', 'sequence_changed', 'default_changed') AND p_code IN ('restored', 'catalog_sequence_behind') <> (p_stream IS NULL) THEN
        PERFORM require_that(false, format('%s is not repaired for %s', p_code, CASE WHEN p_stream IS NULL THEN 'an installation' ELSE 'a stream' END), 'Pass what doctor returned.');
    END IF;
    CASE p_code
        WHEN 'restored' THEN
            -- Whoever was faster has recorded it, and has left ids out once.
            IF (last_epoch(present_epoch())).moved THEN
                FOR s IN SELECT * FROM stream ORDER BY id LOOP
                    -- One that has no sequence, or is not whole, gets its gap when that is repaired.
                    IF cardinality(missing_tables(s.id)) = 0 AND to_regclass(format('%I', 'message_log_' || s.id || '_id_seq')) IS NOT NULL AND (known_id(s.id)).highest > 0 THEN
                        moved := moved || jsonb_build_object(s.name, raise_sequence(s, 1000000));
                    END IF;
                END LOOP;
                PERFORM record_epoch();
                done := jsonb_build_object('sequences', moved);
            END IF;
        WHEN 'catalog_sequence_behind' THEN
            FOR r IN SELECT * FROM late_sequences() LOOP
                -- Who inserts meanwhile has drawn, or waits.
                EXECUTE format('LOCK TABLE %I IN SHARE ROW EXCLUSIVE MODE', r.of);
                IF EXISTS (SELECT FROM late_sequences() AS l WHERE l.sequence = r.sequence) THEN
                    EXECUTE format('SELECT setval(%L, max(%I)) FROM %I', r.sequence, r.attribute, r.of);
                    names := names || r.of::text;
                END IF;
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
            -- Never back: ids of messages that went into the log, or were cancelled, are in somebody's hands.
            EXECUTE format('SELECT jsonb_build_object(''to'', setval(%L::regclass, m.id)) FROM (SELECT max(id) AS id FROM %I) AS m, %I AS q WHERE m.id > CASE WHEN q.is_called THEN q.last_value ELSE 0 END',
                           format('%I', 'message_delayed_' || s.id || '_id_seq'), 'message_delayed_' || s.id, 'message_delayed_' || s.id || '_id_seq') INTO done;
        WHEN 'sequence_cache' THEN
            EXECUTE format('ALTER SEQUENCE %I CACHE 1', 'message_log_' || s.id || '_id_seq');
            EXECUTE format('ALTER SEQUENCE %I CACHE 1', 'message_delayed_' || s.id || '_id_seq');
            done := jsonb_build_object('cache', 1);
        WHEN 'fence_missing' THEN
            INSERT INTO stream_fence (stream_id, generation) SELECT s.id, 0 WHERE NOT EXISTS (SELECT FROM stream_fence WHERE stream_id = s.id);
            done := CASE WHEN FOUND THEN '{}'::jsonb END;
        WHEN 'guard_missing' THEN
            FOR r IN SELECT * FROM unguarded_partitions(s.id) LOOP
                IF r.missing THEN
                    EXECUTE format('CREATE TRIGGER refuse_direct_write BEFORE INSERT OR UPDATE %s ON %I FOR EACH STATEMENT EXECUTE FUNCTION refuse_direct_write()', CASE WHEN NOT s.compacted THEN 'OR DELETE' END, r.partition);
                END IF;
                EXECUTE format('ALTER TABLE %I ENABLE ALWAYS TRIGGER refuse_direct_write', r.partition);
                names := names || r.partition::text;
            END LOOP;
            done := jsonb_build_object('partitions', names);
        WHEN 'partition_detached' THEN
            FOR r IN SELECT * FROM strayed_partitions(s.id) AS l WHERE l.there ORDER BY l.number LOOP
                PERFORM attach_again(s, r.number, r.pending);
                names := names || r.leaf;
            END LOOP;
            done := jsonb_build_object('partitions', names);
        WHEN 'partition_unlisted' THEN
            WITH added AS (
                INSERT INTO log_partition (stream_id, number, from_id, to_id)
                SELECT s.id, n, n * s.partition_size, (n + 1) * s.partition_size - 1 FROM unlisted_partitions(s.id) AS n ON CONFLICT DO NOTHING RETURNING number)
            SELECT jsonb_build_object('partitions', jsonb_agg(number ORDER BY number)) INTO done FROM added;
        WHEN 'partitions_missing' THEN
            done := jsonb_build_object('made', ensure_partitions(s.id));
        WHEN 'functions_missing', 'functions_changed' THEN
            done := jsonb_build_object('functions', missing_functions(s.id) || coalesce(changed_functions(s.id), '{}'));
            PERFORM make_stream_functions(s.id);
        WHEN 'identity_missing', 'sequence_changed', 'default_changed' THEN
            FOR r IN SELECT d.* FROM shape_differences(s) AS d WHERE kind_of_difference(d.part, d.expected, d.found) = p_code LOOP
                PERFORM restore_shape(s, p_code, r.of, r.part, r.expected);
                names := names || concat_ws('.', r.of, substring(r.part FROM '^default (.*)'));
            END LOOP;
            done := jsonb_build_object('restored', names);
        ELSE
            PERFORM require_that(false, format('there is no repair for %s', quote_literal(p_code)), 'Doctor says what is fixable.');
    END CASE;
    IF done IS NULL OR EXISTS (SELECT FROM jsonb_each(done) AS d WHERE d.value IN ('null', '[]')) THEN
        RETURN NULL;
    END IF;
    INSERT INTO audit (action, stream_name, detail) VALUES ('doctor_' || p_code, coalesce(p_stream, ''), done);
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
    PERFORM hold_migrations_up();
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
