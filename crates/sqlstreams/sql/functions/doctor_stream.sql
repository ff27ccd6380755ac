-- What the doctor looks for in one stream. Each function is called by itself: where one fails, the others go on (doctor.sql).

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

-- Functions that were made for a stream, and are not as they were made: each carries the digest of its text as a comment (generated.sql).
CREATE OR REPLACE FUNCTION changed_functions(p_stream bigint) RETURNS text[]
LANGUAGE sql VOLATILE AS $$
    SELECT array_agg(split_part(f.oid::regprocedure::text, '(', 1) ORDER BY f.oid) FROM unnest(stream_functions(p_stream)) AS f(oid)
    WHERE obj_description(f.oid, 'pg_proc') IS DISTINCT FROM function_digest(f.oid)
$$;

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

-- Its tables, its sequences, and how far they and everything that knows ids have come.
CREATE OR REPLACE FUNCTION examine_sequences(s stream) RETURNS SETOF doctor_finding
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    known  record;
    head   bigint;
    stored bigint;
    r      record;
BEGIN
    IF to_regclass(format('%I', 'message_log_' || s.id || '_id_seq')) IS NULL OR to_regclass(format('%I', 'message_delayed_' || s.id || '_id_seq')) IS NULL
       OR EXISTS (SELECT FROM pg_attribute WHERE attrelid IN (to_regclass(format('%I', 'message_log_' || s.id)), to_regclass(format('%I', 'message_delayed_' || s.id))) AND attname = 'id' AND attidentity = '') THEN
        RETURN;   -- examine_shape tells, and how far its sequence has come says nothing
    END IF;
    SELECT * INTO known FROM known_id(s.id);
    head := (known.of ->> 'sequence')::bigint;
    stored := (known.of ->> 'log')::bigint;
    IF stored > head THEN
        RETURN QUERY SELECT 'sequence_behind', 'error', s.name, NULL::text,
            format('its sequence is at %s and its log at %s: sending fails until all ids between were tried', head, stored),
            'As after a restore of data alone. --fix moves the sequence.', true, jsonb_build_object('sequence', head, 'log', stored);
    END IF;
    IF known.highest > greatest(head, coalesce(stored, 0)) THEN
        RETURN QUERY SELECT 'ahead_of_log', 'error', s.name, NULL::text,
            format('the log has come to %s, but %s: the log was restored to an earlier point than the rest, or without its end', greatest(head, stored),
                   (SELECT string_agg(format('%s to %s', replace(k.key, '_', ' '), k.value), ', ') FROM jsonb_each_text(known.of) AS k WHERE k.value::bigint > greatest(head, stored))),
            'New messages would get ids that groups take for done, and nobody would receive them. --fix moves the sequence above all of these: no id is used twice, and what was lost stays a gap.',
            true, known.of;
    END IF;
    EXECUTE format('SELECT CASE WHEN q.is_called THEN q.last_value ELSE 0 END AS head, (SELECT max(id) FROM %I) AS stored FROM %I AS q', 'message_delayed_' || s.id, 'message_delayed_' || s.id || '_id_seq') INTO r;
    IF r.stored > r.head THEN
        RETURN QUERY SELECT 'delayed_sequence_behind', 'error', s.name, NULL::text, format('the sequence of its delayed messages is at %s, and one of them has id %s: delaying fails', r.head, r.stored),
            'As after a restore of data alone. --fix moves the sequence.', true, jsonb_build_object('sequence', r.head, 'stored', r.stored);
    END IF;

    FOR r IN SELECT q.seqrelid::regclass AS name, q.seqcache FROM pg_sequence AS q
             WHERE q.seqrelid IN (to_regclass(format('%I', 'message_log_' || s.id || '_id_seq')), to_regclass(format('%I', 'message_delayed_' || s.id || '_id_seq'))) AND q.seqcache <> 1 LOOP
        RETURN QUERY SELECT 'sequence_cache', 'error', s.name, NULL::text, format('sequence %s hands out %s ids at a time: messages that get theirs later are passed over', r.name, r.seqcache),
            '--fix sets it to 1. Sessions that write keep what they have drawn: let them reconnect.', true, jsonb_build_object('sequence', r.name::text, 'cache', r.seqcache);
    END LOOP;
END $$;

-- The parts of it that are made by and by: its row in the fence, functions, and that its indexes are valid.
CREATE OR REPLACE FUNCTION examine_parts(s stream) RETURNS SETOF doctor_finding
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    names text[];
BEGIN
    IF NOT EXISTS (SELECT FROM stream_fence AS f WHERE f.stream_id = s.id) THEN
        RETURN QUERY SELECT 'fence_missing', 'error', s.name, NULL::text, 'it has no row in stream_fence: groups stop at the first gap', '--fix makes one.', true, '{}'::jsonb;
    END IF;

    names := missing_functions(s.id);
    IF cardinality(names) > 0 THEN
        RETURN QUERY SELECT 'functions_missing', 'error', s.name, NULL::text, format('functions that are made for it are missing: %s', array_to_string(names, ', ')), '--fix makes them.', true, jsonb_build_object('functions', names);
    END IF;

    names := changed_functions(s.id);
    IF cardinality(names) > 0 THEN
        RETURN QUERY SELECT 'functions_changed', 'error', s.name, NULL::text, format('functions that are made for it are not what they were made: %s', array_to_string(names, ', ')), '--fix makes them anew.', true, jsonb_build_object('functions', names);
    END IF;

    SELECT array_agg(x.indexrelid::regclass::text ORDER BY x.indexrelid) INTO names
    FROM pg_class AS c JOIN pg_index AS x ON x.indrelid = c.oid
    WHERE c.relnamespace = (SELECT oid FROM pg_namespace WHERE nspname = current_schema()) AND NOT x.indisvalid
      AND (c.relname = ANY (ARRAY['message_log_' || s.id, 'consumer_group_cursor_' || s.id, 'consumer_lease_' || s.id, 'exception_queue_' || s.id, 'consumer_done_' || s.id, 'message_idempotency_' || s.id, 'message_delayed_' || s.id])
           OR c.oid IN (SELECT inhrelid FROM pg_inherits WHERE inhparent = to_regclass(format('%I', 'message_log_' || s.id))));
    IF cardinality(names) > 0 THEN
        RETURN QUERY SELECT 'index_invalid', 'warning', s.name, NULL::text, format('%s of its indexes are not valid: %s', cardinality(names), array_to_string(names[1:5], ', ')),
            'REINDEX INDEX CONCURRENTLY each; a partitioned one becomes valid when those of all partitions are.', false, jsonb_build_object('indexes', names[1:20]);
    END IF;
END $$;

-- Partitions that are to be attached and are not, and whether their tables are there: somebody has detached, or dropped, them by hand. A detach that was interrupted counts, too.
CREATE OR REPLACE FUNCTION strayed_partitions(p_stream bigint) RETURNS TABLE (number bigint, from_id bigint, to_id bigint, leaf text, there boolean, pending boolean)
LANGUAGE sql VOLATILE AS $$
    SELECT l.number, l.from_id, l.to_id, n.leaf, to_regclass(format('%I', n.leaf)) IS NOT NULL, i.inhrelid IS NOT NULL
    FROM log_partition AS l CROSS JOIN LATERAL (SELECT 'message_log_' || p_stream || '_p' || l.number AS leaf) AS n
    LEFT JOIN pg_inherits AS i ON i.inhrelid = to_regclass(format('%I', n.leaf)) AND i.inhparent = to_regclass(format('%I', 'message_log_' || p_stream))
    WHERE l.stream_id = p_stream AND l.state = 'attached' AND coalesce(i.inhdetachpending, true)
$$;

-- The other way round: partitions of the log that have no row there, by which retention would know of them.
CREATE OR REPLACE FUNCTION unlisted_partitions(p_stream bigint) RETURNS SETOF bigint
LANGUAGE sql VOLATILE AS $$
    SELECT n.number FROM pg_inherits AS i CROSS JOIN LATERAL (SELECT substring(c.relname FROM format('^message_log_%s_p(\d{1,18})$', p_stream))::bigint AS number FROM pg_class AS c WHERE c.oid = i.inhrelid LIMIT 1) AS n
    WHERE i.inhparent = to_regclass(format('%I', 'message_log_' || p_stream)) AND n.number IS NOT NULL
      AND NOT EXISTS (SELECT FROM log_partition AS l WHERE l.stream_id = p_stream AND l.number = n.number)
    ORDER BY 1
$$;

-- Why that table cannot become a partition of the log, as far as the catalogue shows; NULL: it may. Whether its rows are in the range, ATTACH sees.
CREATE OR REPLACE FUNCTION does_not_fit(s stream, p_number bigint) RETURNS text
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    parent regclass := to_regclass(format('%I', 'message_log_' || s.id));
    leaf   pg_class;
BEGIN
    SELECT * INTO leaf FROM pg_class WHERE oid = to_regclass(format('%I', 'message_log_' || s.id || '_p' || p_number));
    RETURN CASE
        WHEN leaf.relkind <> 'r' THEN format('%s is no table', leaf.relname)
        WHEN EXISTS (SELECT FROM pg_inherits AS i WHERE i.inhrelid = leaf.oid AND i.inhparent <> parent) THEN format('%s is part of another table', leaf.relname)
        WHEN columns_of(leaf.oid) <> columns_of(parent) THEN format('%s has other columns than the log', leaf.relname)
    END;
END $$;

CREATE OR REPLACE FUNCTION columns_of(p_table regclass) RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT string_agg(format('%I %s %s', attname, format_type(atttypid, atttypmod), attcollation::regcollation), ', ' ORDER BY attname) FROM pg_attribute WHERE attrelid = p_table AND attnum > 0 AND NOT attisdropped
$$;

-- Its partitions.
CREATE OR REPLACE FUNCTION examine_partitions(s stream) RETURNS SETOF doctor_finding
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    head   bigint := CASE WHEN to_regclass(format('%I', 'message_log_' || s.id || '_id_seq')) IS NOT NULL THEN log_head(s.id) END;
    names  text[];
    number bigint;
    ranges jsonb;
    fits   text;
    r      record;
BEGIN
    SELECT array_agg(u.partition ORDER BY u.partition), count(*) FILTER (WHERE u.missing) INTO names, number FROM unguarded_partitions(s.id) AS u;
    IF cardinality(names) > 0 THEN
        RETURN QUERY SELECT 'guard_missing', 'error', s.name, NULL::text,
            format('%s of its partitions take direct writes: trigger refuse_direct_write is missing in %s and not enabled ALWAYS in %s', cardinality(names), number, cardinality(names) - number),
            'Consumers pass over what is written so. --fix restores the trigger.', true, jsonb_build_object('partitions', names[1:20]);
    END IF;

    SELECT array_agg(l.leaf ORDER BY l.number), jsonb_agg(jsonb_build_array(l.from_id, l.to_id) ORDER BY l.number), min(does_not_fit(s, l.number)) INTO names, ranges, fits
    FROM strayed_partitions(s.id) AS l WHERE l.there;
    IF cardinality(names) > 0 THEN
        RETURN QUERY SELECT 'partition_detached', 'error', s.name, NULL::text,
            format('%s of its partitions are not part of the log any more: %s; what is in them is not read, and groups that come there pass it over', cardinality(names), array_to_string(names[1:5], ', ')),
            CASE WHEN fits IS NULL THEN '--fix attaches them again. Groups that have come by meanwhile get what they missed by `sqlstreams group replay`.'
                 ELSE format('%s. Put it right and attach it, or restore that table; if nobody misses it, delete its row from log_partition.', fits) END,
            fits IS NULL, jsonb_build_object('partitions', names[1:20], 'ids', ranges);
    END IF;
    SELECT array_agg(l.leaf ORDER BY l.number), jsonb_agg(jsonb_build_array(l.from_id, l.to_id) ORDER BY l.number) INTO names, ranges
    FROM strayed_partitions(s.id) AS l WHERE NOT l.there AND l.to_id < head;
    IF cardinality(names) > 0 THEN
        RETURN QUERY SELECT 'partition_lost', 'error', s.name, NULL::text,
            format('%s of its partitions were dropped by hand, with all messages in them: %s; groups that come there pass the gap over', cardinality(names), array_to_string(names[1:5], ', ')),
            format('Restore the tables from a backup and attach them, and `sqlstreams group replay` their ids. If that cannot be: DELETE FROM log_partition WHERE stream_id = %s AND number IN (%s).', s.id,
                   (SELECT string_agg(substring(n FROM '_p(\d+)$'), ', ') FROM unnest(names) AS n)),
            false, jsonb_build_object('partitions', names[1:20], 'ids', ranges);
    END IF;

    names := ARRAY(SELECT 'message_log_' || s.id || '_p' || n FROM unlisted_partitions(s.id) AS n);
    IF cardinality(names) > 0 THEN
        RETURN QUERY SELECT 'partition_unlisted', 'warning', s.name, NULL::text, format('%s of its partitions have no row in log_partition: %s; retention does not know of them', cardinality(names), array_to_string(names[1:5], ', ')),
            '--fix adds the rows.', true, jsonb_build_object('partitions', names[1:20]);
    END IF;

    -- At the head: what is written to, and what is next.
    SELECT array_agg(n) INTO names FROM generate_series(greatest(head, 1) / s.partition_size, least(greatest(head, 1) / s.partition_size + 1, last_partition(s.partition_size))) AS n
    WHERE NOT EXISTS (SELECT FROM pg_inherits AS i WHERE i.inhrelid = to_regclass(format('%I', 'message_log_' || s.id || '_p' || n)) AND i.inhparent = to_regclass(format('%I', 'message_log_' || s.id)))
      AND NOT EXISTS (SELECT FROM strayed_partitions(s.id) AS l WHERE l.number = n AND l.there);
    IF cardinality(names) > 0 THEN
        r := NULL;
        SELECT EXISTS (SELECT FROM unnest(names) AS n WHERE to_regclass(format('%I', 'message_log_' || s.id || '_p' || n)) IS NOT NULL) AS detached INTO r;
        RETURN QUERY SELECT 'partitions_missing', CASE WHEN (head / s.partition_size)::text = ANY (names) OR r.detached THEN 'error' ELSE 'warning' END, s.name, NULL::text,
            format('at its head, id %s, there is no partition %s', head, array_to_string(names, ', ')),
            CASE WHEN r.detached THEN 'A table of that name exists and is not part of the log: attach, rename or drop it.' ELSE '--fix makes it; so does whoever sends or consumes.' END,
            NOT r.detached, jsonb_build_object('head', head, 'partitions', names);
    END IF;
END $$;

-- Its groups.
CREATE OR REPLACE FUNCTION examine_groups(s stream) RETURNS SETOF doctor_finding
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    r record;
BEGIN
    FOR r IN SELECT g.name, g.mode FROM consumer_group AS g WHERE g.stream_id = s.id AND g.mode <> 'parallel' AND g.lane_probe <> lane_probe() ORDER BY g.name LOOP
        RETURN QUERY SELECT 'lanes_moved', 'info', s.name, r.name, format('this server hashes keys otherwise than the one its lanes are from: the %s group will handle again what is not done in all lanes', r.mode),
            'Nothing needs to be done: its next consumer sees to it. Idempotency keys from the other server are not known here.', false, '{}'::jsonb;
    END LOOP;
    FOR r IN SELECT g.name, g.binding_version, coalesce(b.version, 0) AS version FROM consumer_group AS g
             LEFT JOIN LATERAL (SELECT version FROM binding_set WHERE group_id = g.id ORDER BY version DESC LIMIT 1) AS b ON true
             WHERE g.stream_id = s.id AND g.binding_version <> coalesce(b.version, 0) ORDER BY g.name LOOP
        RETURN QUERY SELECT 'bindings_missing', 'error', s.name, r.name,
            format('its bindings are not in binding_set: version %s is the latest, and %s is there; it %s', r.binding_version, CASE r.version WHEN 0 THEN 'none' ELSE 'version ' || r.version END,
                   CASE r.version WHEN 0 THEN 'receives every message' ELSE 'goes by those' END),
            'Restore the row, or say again what is for it: `sqlstreams group bindings set`. The table audit has what was set.', false, jsonb_build_object('latest', r.binding_version, 'found', r.version);
    END LOOP;
    -- A row each, or consuming fails with what looks like a dropped group.
    FOR r IN EXECUTE format('SELECT g.name FROM consumer_group AS g WHERE g.stream_id = $1 AND NOT EXISTS (SELECT FROM %I AS c WHERE c.group_id = g.id) ORDER BY g.name', 'consumer_group_cursor_' || s.id) USING s.id LOOP
        RETURN QUERY SELECT 'cursor_missing', 'error', s.name, r.name, 'it has no cursor: its table was restored without data', 'Restore it, or drop the group and create it where it is to start.', false, '{}'::jsonb;
    END LOOP;
END $$;

-- Who works with it in a way that holds others up.
CREATE OR REPLACE FUNCTION examine_writers(s stream, p_open interval) RETURNS SETOF doctor_finding
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    r record;
BEGIN
    FOR r IN SELECT * FROM fence_holders(s.id, p_open) LOOP
        RETURN QUERY SELECT 'fence_held', 'warning', s.name, NULL::text,
            CASE WHEN r.pid IS NULL THEN format('prepared transaction %s has been open for %s and has written to it', coalesce(quote_literal(r.gid), '(unknown)'), date_trunc('second', r.age))
                 ELSE format('session %s has had a transaction open for %s that has written to it', r.pid, date_trunc('second', r.age)) END,
            CASE WHEN r.pid IS NULL THEN 'Messages after its own wait for it. COMMIT PREPARED or ROLLBACK PREPARED it.' ELSE 'Messages after its own wait for it. End it: pg_terminate_backend, if it will not end by itself.' END,
            false, jsonb_strip_nulls(jsonb_build_object('pid', r.pid, 'gid', r.gid, 'seconds', extract(epoch FROM r.age)::bigint, 'query', r.query));
    END LOOP;
    IF EXISTS (SELECT FROM pg_subscription_rel WHERE srrelid = to_regclass(format('%I', 'message_log_' || s.id))) THEN
        RETURN QUERY SELECT 'subscribed', 'warning', s.name, NULL::text, 'its log is filled by logical replication, whose writers consumers cannot see: they may pass over messages', 'Consume on the publisher, or after the subscription has ended.', false, '{}'::jsonb;
    END IF;
END $$;
