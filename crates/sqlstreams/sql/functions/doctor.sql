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
        -- What is written to: pg_control_checkpoint knows of a recovery only after the checkpoint that follows it.
        IF pg_is_in_recovery() THEN
            SELECT timeline_id INTO e.timeline FROM pg_control_checkpoint();
        ELSE
            e.timeline := ('x' || left(pg_walfile_name(pg_current_wal_insert_lsn()), 8))::bit(32)::int;
        END IF;
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

-- Where it lived by what it remembers, and whether that is another place.
CREATE OR REPLACE FUNCTION last_epoch(e installation, OUT was installation, OUT moved boolean)
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    SELECT * INTO was FROM installation ORDER BY number DESC LIMIT 1;
    -- 0: whoever looked was not allowed to know.
    moved := was.number IS NULL OR (was.database, was.schema) <> (e.database, e.schema)
             OR 0 NOT IN (was.system, e.system) AND (was.system, was.timeline) <> (e.system, e.timeline);
END $$;

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

-- Functions of the installation that are not there, or not what they were installed as (installed.sql).
CREATE OR REPLACE FUNCTION altered_functions(OUT missing text[], OUT changed text[])
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    IF to_regproc('installed_functions') IS NULL THEN
        missing := ARRAY['installed_functions()'];
        RETURN;
    END IF;
    SELECT array_agg(i.signature ORDER BY i.signature) FILTER (WHERE f.oid IS NULL), array_agg(i.signature ORDER BY i.signature) FILTER (WHERE function_digest(f.oid) <> i.digest)
        INTO missing, changed
    FROM installed_functions() AS i CROSS JOIN LATERAL (SELECT to_regprocedure(i.signature)::oid AS oid) AS f;
END $$;

-- Everything that is found, of one stream or of all. severity: error (messages are lost, refused or used twice unless something is done), warning, info.
-- fixable: doctor_repair(code, stream) does something about it. p_open and p_old: how long a transaction that has written to a log, or has a snapshot, may be open.
CREATE OR REPLACE FUNCTION doctor(p_stream text DEFAULT NULL, p_open interval DEFAULT '1 minute', p_old interval DEFAULT '1 hour')
RETURNS TABLE (code text, severity text, stream text, consumer_group text, message text, hint text, fixable boolean, detail jsonb)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    s       stream;
    part    text;
    failed  text;
    names   text[];
    changed text[];
    r       record;
    e       installation := present_epoch();
    was     installation;
BEGIN
    PERFORM require_read_committed();
    -- What everything else needs.
    SELECT array_agg(DISTINCT x.of) INTO names FROM expected_shape() AS x WHERE x.of NOT LIKE '%\_N' AND x.part NOT IN ('sequence', 'view') AND to_regclass(format('%I', x.of)) IS NULL;
    IF cardinality(names) > 0 THEN
        RETURN QUERY SELECT 'tables_missing', 'error', NULL::text, NULL::text, format('tables of the installation are missing: %s', array_to_string(names, ', ')),
            'Restore them: what was in them cannot be told from what is left.', false, jsonb_build_object('tables', names);
        RETURN;
    END IF;
    SELECT coalesce(x.missing, '{}'), coalesce(x.changed, '{}') INTO names, changed FROM altered_functions() AS x;
    IF cardinality(names) > 0 THEN
        RETURN QUERY SELECT 'functions_missing', 'error', NULL::text, NULL::text, format('functions of the installation are missing: %s', array_to_string(names, ', ')),
            '--fix makes all functions anew. More may be found then.', true, jsonb_build_object('functions', names);
        RETURN;
    END IF;
    IF p_stream IS NULL AND cardinality(changed) > 0 THEN
        RETURN QUERY SELECT 'functions_changed', 'error', NULL::text, NULL::text, format('functions are not those of this version: %s', array_to_string(changed, ', ')),
            '--fix makes all functions anew. What somebody has changed on purpose is lost.', true, jsonb_build_object('functions', changed);
    END IF;
    IF p_stream IS NULL THEN
        -- First: what repairs the others leaves a row in audit, which has a sequence, too.
        RETURN QUERY SELECT 'catalog_sequence_behind', 'error', NULL::text, NULL::text,
            format('sequences are behind their tables: %s; creating and changing fails', string_agg(format('%s is at %s, table %s at %s', l.sequence, l.head, l.of, l.stored), '; ')),
            'As after a restore of data alone. --fix moves them.', true, jsonb_build_object('tables', array_agg(l.of))
        FROM late_sequences() AS l HAVING count(*) > 0;
        RETURN QUERY SELECT * FROM examine_shape(NULL);
    END IF;
    r := last_epoch(e);
    was := r.was;
    IF p_stream IS NULL AND r.moved THEN
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
        failed := NULL;
        names := missing_tables(s.id);
        IF cardinality(names) > 0 THEN
            RETURN QUERY SELECT 'tables_missing', 'error', s.name, NULL::text, format('%s of its tables are missing: %s', cardinality(names), array_to_string(names, ', ')),
                CASE WHEN cardinality(names) = 8 THEN '--fix makes them, empty, for data to be restored into; or drop the stream.'
                     ELSE 'Restore them: what is missing cannot be told from what is left.' END,
                cardinality(names) = 8, jsonb_build_object('tables', names);
            CONTINUE;
        END IF;

        FOREACH part IN ARRAY ARRAY['shape', 'sequences', 'parts', 'partitions', 'groups', 'writers'] LOOP
            BEGIN
                IF part = 'writers' THEN
                    RETURN QUERY SELECT * FROM examine_writers(s, p_open);
                ELSE
                    RETURN QUERY EXECUTE format('SELECT * FROM %I($1)', 'examine_' || part) USING s;
                END IF;
            EXCEPTION
                WHEN insufficient_privilege THEN
                    RAISE;
                WHEN OTHERS THEN
                    -- One stream's trouble keeps nobody from seeing the others'.
                    failed := concat_ws('; ', failed, format('its %s: %s', part, SQLERRM));
            END;
        END LOOP;
        IF failed IS NOT NULL THEN
            RETURN QUERY SELECT 'not_looked_at', 'error', s.name, NULL::text, format('not all of it could be looked at: %s', failed),
                'See to what else is found of it first, and look again.', false, jsonb_build_object('failed', failed);
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

-- An installation that is made now lives here, and so does one that is brought to the version that knows of this table.
DO $$
BEGIN
    IF NOT EXISTS (SELECT FROM installation) AND (NOT EXISTS (SELECT FROM stream) OR EXISTS (SELECT FROM schema_migration WHERE version = 2 AND functions IS NULL)) THEN
        PERFORM record_epoch();
    END IF;
END $$;
