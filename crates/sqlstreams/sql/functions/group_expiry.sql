-- Groups that nobody consumes any more. A stream may have them expire: after so long without a sign of life they are dropped, with their dead letters, and some
-- time before that it is said that they will be.
--
-- A sign of life is a claim or a settlement, which moves the cursor: maintenance compares it with what it was when it last looked, at most an hour ago. Where
-- nothing is produced a group that is consumed does not move. Then whoever asks in vain (poll, advance, advance_lanes) leaves a sign itself, and processes that
-- consume by the crate say every half an hour what (note_consumers). A paused group lives.

-- How long until groups of a stream expire, 1 hour to 10 years; NULL: they never do. Groups are counted from when maintenance first looks at them, so
-- that none is dropped at once.
CREATE OR REPLACE FUNCTION expire_groups_after(p_stream bigint, p_after interval) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    s stream := require_stream(p_stream);
BEGIN
    PERFORM require_that(coalesce(p_after, '1 hour') BETWEEN '1 hour' AND '3650 days', format('groups expire after 1 hour to 3650 days, not %s', p_after), 'Choose one of these, or let them never expire.');
    UPDATE stream SET group_expiry = p_after WHERE id = p_stream AND group_expiry IS DISTINCT FROM p_after;
    IF FOUND THEN
        INSERT INTO audit (action, stream_name, detail) VALUES ('expire_groups_after', s.name, jsonb_build_object('before', s.group_expiry, 'after', p_after));
        DELETE FROM maintenance_step WHERE step = 'groups' AND stream_id = p_stream;
    END IF;
    IF p_after IS NULL THEN
        DELETE FROM group_watch AS w USING consumer_group AS g WHERE g.id = w.group_id AND g.stream_id = p_stream;
    END IF;
END $$;

-- How long a sign of life is good for before another is written: 10 minutes where groups expire after an hour, an hour where they do after a day.
CREATE OR REPLACE FUNCTION sign_lasts(p_expiry interval) RETURNS interval
LANGUAGE sql IMMUTABLE AS $$ SELECT least(greatest(p_expiry / 16, interval '10 minutes'), interval '1 hour') $$;

-- A process says which groups it consumes. Writes nothing of those that do not expire, and of the others no sooner than the last sign is used up. Waits for
-- nobody who has the row: a claim calls it, under the cursor's lock.
-- SECURITY DEFINER: it need not be allowed more than to consume.
CREATE OR REPLACE FUNCTION note_consumers(p_groups bigint[]) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
DECLARE
    now timestamptz := clock_timestamp();
BEGIN
    UPDATE group_watch AS w SET seen_at = now, warned_at = NULL
        FROM (SELECT x.group_id FROM group_watch AS x JOIN consumer_group AS g ON g.id = x.group_id JOIN stream AS s ON s.id = g.stream_id
              WHERE x.group_id = ANY (p_groups) AND s.group_expiry IS NOT NULL
                AND (x.seen_at IS NULL OR x.seen_at NOT BETWEEN now - sign_lasts(s.group_expiry) AND now OR x.warned_at IS NOT NULL)
              ORDER BY x.group_id FOR UPDATE OF x SKIP LOCKED) AS old
        WHERE w.group_id = old.group_id;
    INSERT INTO group_watch (group_id, changed_at, seen_at)
        SELECT g.id, now, now FROM consumer_group AS g JOIN stream AS s ON s.id = g.stream_id
        WHERE g.id = ANY (p_groups) AND s.group_expiry IS NOT NULL AND NOT EXISTS (SELECT FROM group_watch AS w WHERE w.group_id = g.id) ORDER BY g.id
        ON CONFLICT DO NOTHING;
END $$;

-- Somebody has asked for work of the group, and there was none. Two rows are read, and nothing is written while the last sign of life is good, or where groups
-- do not expire.
CREATE OR REPLACE FUNCTION note_in_vain(p_stream bigint, p_group bigint) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    now    timestamptz := clock_timestamp();
    expiry interval    := (SELECT group_expiry FROM stream WHERE id = p_stream);
BEGIN
    -- In a transaction that is stricter it could fail by what others write at the same time.
    IF expiry IS NOT NULL AND NOT current_setting('transaction_read_only')::boolean AND current_setting('transaction_isolation') = 'read committed'
       AND NOT EXISTS (SELECT FROM group_watch AS w WHERE w.group_id = p_group AND w.seen_at BETWEEN now - sign_lasts(expiry) AND now AND w.warned_at IS NULL) THEN
        PERFORM note_consumers(ARRAY[p_group]);
    END IF;
END $$;

-- What changes with every claim and settlement of a group.
CREATE OR REPLACE FUNCTION cursor_mark(p_stream bigint, p_group bigint) RETURNS text
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    mark text;
BEGIN
    EXECUTE format('SELECT concat_ws(''/'', generation, updates, claimed, first_open, next_seq) FROM %I WHERE group_id = $1 ORDER BY generation DESC LIMIT 1', 'consumer_group_cursor_' || p_stream)
        INTO mark USING p_group;
    RETURN mark;
END $$;

-- Drops a group that has shown no sign of life since p_mark, and since it was warned of. False where it has, or somebody has its cursor locked: a claim says that it is
-- there under that lock.
CREATE OR REPLACE FUNCTION expire_group(p_stream bigint, p_group bigint, p_mark text, p_since timestamptz) RETURNS boolean
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    s      stream         := require_stream(p_stream);
    g      consumer_group := require_group(p_stream, p_group);
    locked bigint;
    dead   bigint;
BEGIN
    EXECUTE format('SELECT claimed FROM %I WHERE group_id = $1 ORDER BY generation DESC LIMIT 1 FOR UPDATE SKIP LOCKED', 'consumer_group_cursor_' || p_stream) INTO locked USING p_group;
    IF locked IS NULL OR cursor_mark(p_stream, p_group) IS DISTINCT FROM p_mark OR g.paused
       OR NOT EXISTS (SELECT FROM group_watch AS w WHERE w.group_id = p_group AND w.warned_at IS NOT NULL) THEN
        RETURN false;
    END IF;
    EXECUTE format('SELECT count(*) FROM %I WHERE group_id = $1 AND state = ''dead''', 'exception_queue_' || p_stream) INTO dead USING p_group;
    PERFORM drop_group(p_stream, p_group);
    INSERT INTO audit (action, stream_name, group_name, detail)
        VALUES ('expire_group', s.name, g.name, jsonb_build_object('since', p_since, 'after', s.group_expiry, 'claimed', locked, 'head', log_head(p_stream), 'dead', dead));
    RETURN true;
END $$;

-- Maintenance: looks at the groups of a stream once an hour, 5,000 at once and 200 of those that have to go; p_after is the id of the group after
-- which to go on. Warns at three quarters of the time.

CREATE OR REPLACE FUNCTION groups_due(p_heads stream_head[]) RETURNS TABLE (stream_id bigint, due_in interval)
LANGUAGE plpgsql VOLATILE AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    SELECT s.id, interval '0' FROM unnest(p_heads) AS h JOIN stream AS s ON s.id = h.stream_id WHERE s.group_expiry IS NOT NULL;
END $$;

CREATE OR REPLACE FUNCTION maintain_groups(p_stream bigint, p_after bigint DEFAULT 0) RETURNS TABLE (warned bigint, expired bigint, next_after bigint, next_look interval)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off SET lock_timeout = '1s' AS $$
#variable_conflict use_column
DECLARE
    s    stream      := require_stream(p_stream);
    now  timestamptz := clock_timestamp();
    part bigint[]    := ARRAY(SELECT g.id FROM consumer_group AS g WHERE g.stream_id = p_stream AND g.id > p_after ORDER BY g.id LIMIT 5000);
    old  record;
BEGIN
    PERFORM require_read_committed();
    SELECT 0, 0, least(interval '1 hour', s.group_expiry / 8) INTO warned, expired, next_look;
    IF s.group_expiry IS NULL THEN
        RETURN NEXT;
        RETURN;
    END IF;
    -- What has moved since, or is new, or cannot move.
    EXECUTE format(
        'INSERT INTO group_watch AS w (group_id, mark, changed_at)
         SELECT g.id, concat_ws(''/'', c.generation, c.updates, c.claimed, c.first_open, c.next_seq), $2
         FROM unnest($1) AS u(id)
         CROSS JOIN LATERAL (SELECT id, paused FROM consumer_group WHERE id = u.id LIMIT 1) AS g
         CROSS JOIN LATERAL (SELECT * FROM %I WHERE group_id = g.id ORDER BY generation DESC LIMIT 1) AS c
         LEFT JOIN LATERAL (SELECT mark, warned_at FROM group_watch WHERE group_id = g.id LIMIT 1) AS old ON true
         WHERE g.paused OR old.mark IS DISTINCT FROM concat_ws(''/'', c.generation, c.updates, c.claimed, c.first_open, c.next_seq)
         ON CONFLICT (group_id) DO UPDATE SET mark = EXCLUDED.mark, changed_at = EXCLUDED.changed_at, warned_at = NULL', 'consumer_group_cursor_' || p_stream)
        USING part, now;
    WITH late AS (
        UPDATE group_watch AS w SET warned_at = now
        WHERE w.group_id = ANY (part) AND w.warned_at IS NULL AND greatest(w.changed_at, w.seen_at) <= now - s.group_expiry * 0.75
        RETURNING w.group_id, greatest(w.changed_at, w.seen_at) AS since)
    INSERT INTO audit (action, stream_name, group_name, detail)
    SELECT 'group_will_expire', s.name, g.name, jsonb_build_object('since', l.since, 'expires_at', l.since + s.group_expiry) FROM late AS l JOIN consumer_group AS g ON g.id = l.group_id;
    GET DIAGNOSTICS warned = ROW_COUNT;
    FOR old IN
        SELECT w.group_id, w.mark, greatest(w.changed_at, w.seen_at) AS since FROM unnest(part) AS u(id) CROSS JOIN LATERAL (SELECT * FROM group_watch WHERE group_id = u.id LIMIT 1) AS w
        -- Nobody is dropped without a warning, however late maintenance comes.
        WHERE w.warned_at < now - least(s.group_expiry / 8, interval '1 hour') AND greatest(w.changed_at, w.seen_at) <= now - s.group_expiry
        ORDER BY w.group_id LIMIT 200
    LOOP
        next_after := old.group_id;
        BEGIN
            expired := expired + expire_group(p_stream, old.group_id, old.mark, old.since)::int;
        EXCEPTION WHEN lock_not_available THEN
            NULL;
        END;
    END LOOP;
    -- Behind the last one that was dropped, where there may be more, else behind the part.
    IF expired < 200 THEN
        next_after := CASE WHEN cardinality(part) = 5000 THEN part[5000] END;
    END IF;
    RETURN NEXT;
END $$;
