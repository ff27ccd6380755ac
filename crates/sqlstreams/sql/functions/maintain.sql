-- Maintenance: what a log needs that nobody waits for. One process at a time does it for all streams of the installation, under a lease that
-- runs out; any consumer can, and `sqlstreams maintain`.
--
-- Each few seconds the holder sends one statement, maintenance_look, which renews the lease and says which steps are due of which streams, over
-- all streams at once. Then it runs these, each in a transaction of its own, and records what came of them (record_step). A step that fails is
-- put off and does not keep others waiting. Steps have to be safe for several at once: a holder that was frozen may go on beside the next one.
--
-- How to add a step <x> (of streams, or of the installation):
--   * a function <x>_due(p_heads stream_head[]) RETURNS TABLE (stream_id bigint, due_in interval): the streams (NULL: the installation) that have
--     something to do, with how long until then ('0': now). One statement over all of p_heads, in bounded time, without locks or writes. Where
--     nothing is to be done it returns no row. A step of the installation is asked with each part of the streams, and returns its row whatever p_heads is.
--   * its name in maintenance_due, below, and a variant of Step (src/maintain/step.rs) that runs it in bounded time.

-- Whoever holds the lease keeps all others from the work, so it is for roles that can do all of it: that own the tables.
CREATE OR REPLACE FUNCTION require_maintainer() RETURNS void
LANGUAGE plpgsql STABLE AS $$
BEGIN
    IF NOT pg_has_role((SELECT relowner FROM pg_class WHERE oid = to_regclass(format('%I.%I', current_schema(), 'maintenance'))), 'USAGE') THEN
        RAISE EXCEPTION 'role % may not do the maintenance', quote_ident(current_user)
            USING ERRCODE = 'insufficient_privilege', HINT = 'Do it as the owner of the schema''s tables or a member of that role: run `sqlstreams maintain`.';
    END IF;
END $$;

-- Takes the lease for p_holder or renews it, p_lease being 1 s to 5 minutes. Never waits. Returns whether p_holder has it, and for how long whoever
-- has it still does. p_name: what it is called, for people.
CREATE OR REPLACE FUNCTION hold_maintenance(p_holder uuid, p_name text DEFAULT NULL, p_lease interval DEFAULT '10 seconds') RETURNS TABLE (held boolean, remaining interval)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
DECLARE
    m   maintenance;
    now timestamptz := clock_timestamp();
BEGIN
    PERFORM require_maintainer();
    PERFORM require_that(p_holder IS NOT NULL AND p_lease BETWEEN '1 second' AND '5 minutes', 'maintenance is held by somebody, for 1 second to 5 minutes', 'The default is 10 seconds.');
    -- A crash of the server may take the lease back.
    PERFORM set_config('synchronous_commit', 'off', true);
    SELECT * INTO m FROM maintenance ORDER BY generation DESC LIMIT 1;
    -- A lease beyond the longest was taken under a clock that was set back since.
    IF m.holder <> p_holder AND m.until > now AND m.until <= now + interval '5 minutes' THEN
        RETURN QUERY SELECT false, m.until - now;
        RETURN;
    END IF;
    SELECT * INTO m FROM maintenance ORDER BY generation DESC LIMIT 1 FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        -- Somebody is taking it at this moment; or there never was a row (a restore of data only).
        IF NOT EXISTS (SELECT FROM maintenance) THEN
            INSERT INTO maintenance (generation) VALUES (0) ON CONFLICT DO NOTHING;
        END IF;
        RETURN QUERY SELECT false, interval '100 milliseconds';
        RETURN;
    END IF;
    now := clock_timestamp();
    IF m.holder <> p_holder AND m.until > now AND m.until <= now + interval '5 minutes' THEN
        RETURN QUERY SELECT false, m.until - now;
        RETURN;
    END IF;
    IF m.updates < 200 THEN
        UPDATE maintenance SET updates = m.updates + 1, holder = p_holder, name = p_name, since = CASE WHEN m.holder = p_holder THEN m.since ELSE now END, until = now + p_lease
        WHERE generation = m.generation;
    ELSE
        DELETE FROM maintenance WHERE generation = m.generation;
        INSERT INTO maintenance (generation, holder, name, since, until)
            VALUES (m.generation + 1, p_holder, p_name, CASE WHEN m.holder = p_holder THEN m.since ELSE now END, now + p_lease);
    END IF;
    RETURN QUERY SELECT true, p_lease;
END $$;

-- Gives the lease back, so that another can take it at once. Returns whether p_holder had it.
CREATE OR REPLACE FUNCTION release_maintenance(p_holder uuid) RETURNS boolean
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
DECLARE
    m maintenance;
BEGIN
    PERFORM set_config('synchronous_commit', 'off', true);
    SELECT * INTO m FROM maintenance ORDER BY generation DESC LIMIT 1 FOR UPDATE;
    IF m.holder IS DISTINCT FROM p_holder THEN
        RETURN false;
    END IF;
    UPDATE maintenance SET updates = m.updates + 1, holder = NULL, name = NULL, since = NULL, until = NULL WHERE generation = m.generation;
    RETURN true;
END $$;

-- What came of a step: p_error, if it failed. Then it is put off, for 1 s at first and for 5 minutes at most; else for p_next, if given. p_memory:
-- what the step wants to know the next time; NULL: as it was. Nothing for a stream that is gone.
CREATE OR REPLACE FUNCTION record_step(p_step text, p_stream bigint, p_started timestamptz, p_error text DEFAULT NULL, p_next interval DEFAULT NULL, p_memory jsonb DEFAULT NULL) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
DECLARE
    now timestamptz := clock_timestamp();
    bad int := (p_error IS NOT NULL)::int;
BEGIN
    PERFORM set_config('synchronous_commit', 'off', true);
    INSERT INTO maintenance_step AS m (step, stream_id, started_at, duration, runs, failures, failing, last_error, failed_at, next_due, memory)
    SELECT p_step, p_stream, least(p_started, now), greatest(now - p_started, '0'), 1, bad, bad, left(p_error, 4000), CASE WHEN bad = 1 THEN now END,
           now + CASE bad WHEN 1 THEN interval '1 second' ELSE p_next END, coalesce(p_memory, '{}')
    WHERE p_stream IS NULL OR EXISTS (SELECT FROM stream AS s WHERE s.id = p_stream)
    ON CONFLICT (step, stream_id) DO UPDATE SET
        started_at = EXCLUDED.started_at, duration = EXCLUDED.duration, runs = m.runs + 1, failures = m.failures + bad,
        failing = CASE bad WHEN 1 THEN m.failing + 1 ELSE 0 END, last_error = coalesce(EXCLUDED.last_error, m.last_error), failed_at = coalesce(EXCLUDED.failed_at, m.failed_at),
        next_due = now + CASE bad WHEN 1 THEN least(interval '1 second' * 2 ^ least(m.failing, 20), interval '5 minutes') ELSE p_next END,
        memory = coalesce(p_memory, m.memory);
END $$;

-- Where the sequences of up to 1,000 streams are, from the first with an id above p_after on: each one that is read stays locked until the transaction ends,
-- and there is only room for so many locks. A stream whose sequence cannot be read is left out, which is recorded.
CREATE OR REPLACE FUNCTION stream_heads(p_after bigint, OUT heads stream_head[], OUT next_after bigint)
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    started timestamptz := clock_timestamp();
    chosen  stream[] := ARRAY(SELECT x FROM stream AS x WHERE x.id > p_after ORDER BY x.id LIMIT 1000);
    s       stream;
BEGIN
    IF cardinality(chosen) = 1000 THEN
        next_after := (chosen[1000]).id;
    END IF;
    heads := ARRAY(SELECT (u.id, coalesce(pg_sequence_last_value(to_regclass(format('%I.%I', current_schema(), 'message_log_' || u.id || '_id_seq'))), 0), u.partition_size)::stream_head
                   FROM unnest(chosen) AS u);
    UPDATE maintenance_step AS m SET failing = 0 WHERE m.step = 'look' AND m.failing > 0 AND m.stream_id IN (SELECT (c).id FROM unnest(chosen) AS c);
EXCEPTION WHEN OTHERS THEN
    heads := '{}';
    FOREACH s IN ARRAY chosen LOOP
        started := clock_timestamp();
        BEGIN
            heads := heads || (s.id, log_head(s.id), s.partition_size)::stream_head;
            UPDATE maintenance_step AS m SET failing = 0 WHERE m.step = 'look' AND m.failing > 0 AND m.stream_id = s.id;
        EXCEPTION WHEN OTHERS THEN
            PERFORM record_step('look', s.id, started, SQLERRM);
        END;
    END LOOP;
END $$;

-- Which steps are due, of the installation or of these streams, or will be. What has failed, or wants to be left alone for a while, is due when that
-- is over. A step that cannot even be looked for keeps no other from it.
CREATE OR REPLACE FUNCTION maintenance_due(p_heads stream_head[]) RETURNS TABLE (step text, stream_id bigint, due_in interval)
LANGUAGE plpgsql VOLATILE AS $$
#variable_conflict use_column
DECLARE
    started timestamptz;
    name    text;
    failed  boolean := false;
BEGIN
    FOREACH name IN ARRAY ARRAY['partitions', 'schedules', 'seal', 'keys', 'groups', 'compact', 'reclaim', 'retention', 'archive'] LOOP
        started := clock_timestamp();
        BEGIN
            RETURN QUERY EXECUTE format(
                'SELECT $2, d.stream_id, greatest(d.due_in, coalesce(m.next_due - $3, ''0''))
                 FROM %I($1) AS d
                 LEFT JOIN LATERAL (SELECT next_due FROM maintenance_step WHERE step = $2 AND stream_id = d.stream_id
                                    UNION ALL SELECT next_due FROM maintenance_step WHERE step = $2 AND stream_id IS NULL AND d.stream_id IS NULL) AS m ON true', name || '_due')
                USING p_heads, name, started;
        EXCEPTION WHEN OTHERS THEN
            failed := true;
            PERFORM record_step('look', NULL, started, name || ': ' || SQLERRM);
        END;
    END LOOP;
    IF NOT failed THEN
        UPDATE maintenance_step AS m SET failing = 0 WHERE m.step = 'look' AND m.failing > 0 AND m.stream_id IS NULL;
    END IF;
END $$;

-- The statement of each pass. Takes or renews the lease and, if that is held, says what is due of up to 1,000 streams with ids above p_after. The
-- first row has no step, and with next_after from where on to go on (NULL: that was all). A row with due_in above zero says when to come again.
CREATE OR REPLACE FUNCTION maintenance_look(p_holder uuid, p_name text DEFAULT NULL, p_lease interval DEFAULT '10 seconds', p_after bigint DEFAULT 0)
RETURNS TABLE (held boolean, remaining interval, next_after bigint, step text, stream_id bigint, due_in interval)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET lock_timeout = '1s' SET jit = off AS $$
#variable_conflict use_column
DECLARE
    part stream_head[];
BEGIN
    SELECT h.held, h.remaining INTO held, remaining FROM hold_maintenance(p_holder, p_name, p_lease) AS h;
    IF held THEN
        SELECT h.heads, h.next_after INTO part, next_after FROM stream_heads(p_after) AS h;
        PERFORM note_pace(part);
        RETURN NEXT;
        RETURN QUERY SELECT true, remaining, NULL::bigint, d.step, d.stream_id, d.due_in FROM maintenance_due(part) AS d;
    ELSE
        RETURN NEXT;
    END IF;
END $$;
