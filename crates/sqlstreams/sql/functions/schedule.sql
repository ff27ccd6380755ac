-- Schedules: messages that are produced at certain times, each exactly once, whoever is at it and whoever is killed.
--
-- Which times those are the server does not know: a client computes them (cron expressions, time zones) from what due_schedules tells, and
-- fire_schedule checks them against the server's clock, the only one that counts.
--
-- Invariants:
--   * Whatever changes a schedule does it under the lock of its row in table schedule, reads its newest turn in a statement after that, and
--     replaces it (next_turn). So a turn that somebody has computed for is either still the newest, or nothing of what was computed happens.
--   * The message of a time is inserted in the transaction that moves done_until to that time or beyond; done_until never moves back, and no
--     message is produced for a time at or below it.
--   * Whoever fires never waits: for the schedule's lock, for a stream that is being dropped, or for long for its log.
--   * Locks are taken in the order stream, schedule, log, which is that of drop_stream.

-- The schedule of this name, locked until the transaction ends.
CREATE OR REPLACE FUNCTION require_schedule(p_name text) RETURNS schedule
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    s schedule;
BEGIN
    PERFORM require_read_committed();
    SELECT * INTO s FROM schedule WHERE name = p_name FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'there is no schedule %', coalesce(quote_ident(p_name), 'NULL')
            USING ERRCODE = 'SQ030', HINT = 'It may have been dropped. Table schedule lists those that exist.';
    END IF;
    RETURN s;
END $$;

CREATE OR REPLACE FUNCTION newest_turn(p_schedule bigint) RETURNS schedule_turn
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    t schedule_turn;
BEGIN
    SELECT * INTO t FROM schedule_turn WHERE schedule_id = p_schedule ORDER BY turn DESC LIMIT 1;
    RETURN t;
END $$;

-- Puts t in the place of the turn that it was made from.
CREATE OR REPLACE FUNCTION next_turn(t schedule_turn) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    DELETE FROM schedule_turn WHERE schedule_id = t.schedule_id AND turn = t.turn;
    t.turn := t.turn + 1;
    INSERT INTO schedule_turn SELECT (t).*;
END $$;

-- Its times are from now on those after p_from, the first of them p_next; NULL: whoever looks next computes it.
CREATE OR REPLACE FUNCTION plan_schedule(s schedule, p_from timestamptz, p_next timestamptz) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    t schedule_turn := newest_turn(s.id);
BEGIN
    PERFORM require_that(p_next IS NULL OR p_next > p_from, format('the next time, %s, is not after %s', p_next, p_from), 'Leave it out: it is computed.');
    IF t.schedule_id IS NULL THEN
        INSERT INTO schedule_turn (schedule_id, turn, done_until) VALUES (s.id, 0, p_from) RETURNING * INTO t;
    END IF;
    t.done_until := greatest(p_from, t.done_until);
    t.fire_at := CASE WHEN NOT s.paused THEN p_next END;
    t.due_at := CASE WHEN NOT s.paused THEN coalesce(p_next, clock_timestamp()) END;
    t.failures := 0;
    PERFORM next_turn(t);
    -- Whoever does the maintenance sleeps until what was known to be next.
    PERFORM ring(ARRAY[0]::bigint[]);
END $$;

-- Refuses a schedule that could produce nothing.
CREATE OR REPLACE FUNCTION require_sound(s schedule) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    of stream := require_stream(s.stream_id);
BEGIN
    PERFORM require_that((s.cron IS NULL) <> (s.at IS NULL), format('schedule %I has either a cron expression or a time', s.name), 'Give one of the two.');
    PERFORM require_that(isfinite(coalesce(s.at, 'epoch')), 'a schedule''s time is one that comes', 'Write it as 2027-01-01T00:00:00Z.');
    PERFORM require_that(coalesce(octet_length(s.cron), 0) <= 1000, 'a cron expression takes at most 1000 bytes', 'Make two schedules of it.');
    PERFORM require_that(octet_length(s.zone) BETWEEN 1 AND 200, 'a time zone has a name', 'Write it like Europe/Berlin, or UTC.');
    PERFORM require_that(s.missed IN ('skip', 'once', 'all'), format('times that were missed are not made up for as %L', s.missed), 'Choose skip, once or all.');
    PERFORM require_that(s.grace BETWEEN '1 second' AND '1 day', format('a time is in time for 1 second to 1 day, not for %s', s.grace), 'The default is 1 minute.');
    PERFORM require_that(s.catch_up BETWEEN 1 AND 1000, format('1 to 1000 times that were missed are made up for, not %s', s.catch_up), 'The default is 100.');
    PERFORM require_that(coalesce(s.expires_in, '1 s') > '0' AND coalesce(s.expires_in, '1 s') <= '200000 years', format('a message does not expire after %s', s.expires_in), 'Leave it out for never.');
    PERFORM require_message(of, s.payload, s.key, s.routing_key, s.headers);
    -- Whether the stream's type takes the payload.
    EXECUTE format('SELECT $1::%s', of.payload_type) USING s.payload;
END $$;

-- Makes a schedule: of p_stream, a message with this payload (in its text form), key, routing key and headers, at the times of p_cron in p_zone, or
-- once, at p_at. p_missed: what becomes of times that were missed, by more than p_grace: 'skip', 'once', or 'all', of which the latest p_catch_up.
-- p_expires_in: after so long nobody gets the message any more. Returns the schedule's id.
--
-- p_replace: a schedule of this name is changed to this, as a whole; its history stays, and where its times are the same, so do they.
--
-- p_from, p_next: for clients that can compute times: it starts after p_from, and that is its first time. Else the first that looks at it does; an
-- expression that makes no sense shows then, as the schedule's last_error.
CREATE OR REPLACE FUNCTION create_schedule(p_name text, p_stream text, p_payload text, p_cron text DEFAULT NULL, p_at timestamptz DEFAULT NULL, p_zone text DEFAULT 'UTC',
    p_missed text DEFAULT 'once', p_grace interval DEFAULT '1 minute', p_catch_up int DEFAULT 100,
    p_key text DEFAULT NULL, p_routing_key text DEFAULT NULL, p_headers jsonb DEFAULT NULL, p_expires_in interval DEFAULT NULL,
    p_replace boolean DEFAULT false, p_from timestamptz DEFAULT NULL, p_next timestamptz DEFAULT NULL)
RETURNS bigint
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
DECLARE
    s     schedule;
    made  schedule;
    old   schedule;
    begun timestamptz := coalesce(p_from, clock_timestamp());
BEGIN
    PERFORM require_read_committed();
    PERFORM require_name('schedule', p_name);
    SELECT id INTO s.stream_id FROM stream WHERE name = p_stream FOR KEY SHARE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'there is no stream %', coalesce(quote_ident(p_stream), 'NULL')
            USING ERRCODE = 'SQ001', HINT = 'Table stream lists those that exist.';
    END IF;
    SELECT p_name, p_cron, p_at, coalesce(p_zone, 'UTC'), coalesce(p_missed, 'once'), coalesce(p_grace, '1 minute'), coalesce(p_catch_up, 100), p_key, p_routing_key, p_headers, p_expires_in, p_payload
        INTO s.name, s.cron, s.at, s.zone, s.missed, s.grace, s.catch_up, s.key, s.routing_key, s.headers, s.expires_in, s.payload;
    PERFORM require_sound(s);
    INSERT INTO schedule (name, stream_id, cron, at, zone, missed, grace, catch_up, key, routing_key, headers, expires_in, payload, since)
        VALUES (s.name, s.stream_id, s.cron, s.at, s.zone, s.missed, s.grace, s.catch_up, s.key, s.routing_key, s.headers, s.expires_in, s.payload, begun)
        ON CONFLICT (name) DO NOTHING RETURNING * INTO made;
    IF FOUND THEN
        PERFORM require_time(made);
        PERFORM plan_schedule(made, begun, p_next);
        INSERT INTO audit (action, stream_name, detail) VALUES ('create_schedule', p_stream, jsonb_build_object('schedule', p_name));
        RETURN made.id;
    END IF;
    IF p_replace IS NOT TRUE THEN
        RAISE EXCEPTION 'schedule % exists already', quote_ident(p_name)
            USING ERRCODE = 'SQ031', HINT = 'Alter or replace it, or choose another name.';
    END IF;
    old := require_schedule(p_name);
    SELECT old.id, old.paused, old.since, old.created_at INTO s.id, s.paused, s.since, s.created_at;
    PERFORM put_schedule(old, s, begun, p_next);
    RETURN s.id;
END $$;

-- A time that has been comes no more.
CREATE OR REPLACE FUNCTION require_time(s schedule) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    PERFORM require_that(coalesce(s.at > clock_timestamp(), true), format('the time %s has been', s.at), 'Give one that lies ahead, or send the message now.');
END $$;

-- Changes old, which is locked, to s. Nothing is written where they are the same.
CREATE OR REPLACE FUNCTION put_schedule(old schedule, s schedule, p_from timestamptz, p_next timestamptz) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    IF (old.cron, old.at, old.zone) IS DISTINCT FROM (s.cron, s.at, s.zone) THEN
        PERFORM require_time(s);
        s.since := p_from;
        PERFORM plan_schedule(s, p_from, p_next);
    ELSIF old IS NOT DISTINCT FROM s THEN
        RETURN;
    ELSIF (newest_turn(s.id)).failures > 0 THEN
        -- What failed may work now.
        PERFORM retry_schedule(s);
    END IF;
    UPDATE schedule SET stream_id = s.stream_id, cron = s.cron, at = s.at, zone = s.zone, missed = s.missed, grace = s.grace, catch_up = s.catch_up,
        key = s.key, routing_key = s.routing_key, headers = s.headers, expires_in = s.expires_in, payload = s.payload, since = s.since
        WHERE id = s.id;
    INSERT INTO audit (action, stream_name, detail)
        SELECT 'alter_schedule', x.name, jsonb_build_object('schedule', s.name) FROM stream AS x WHERE x.id = s.stream_id;
END $$;

CREATE OR REPLACE FUNCTION retry_schedule(s schedule) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    t schedule_turn := newest_turn(s.id);
BEGIN
    IF t.due_at IS NOT NULL THEN
        t.due_at := coalesce(t.fire_at, clock_timestamp());
        PERFORM next_turn(t);
        PERFORM ring(ARRAY[0]::bigint[]);
    END IF;
END $$;

-- Changes a schedule; NULL leaves a part as it is. p_message: the parts of the message (payload, key, routing key, headers, expires_in) are taken as
-- they are, NULL too. Giving one of p_cron and p_at puts it in the place of the other. With other times it starts anew, after p_from; see
-- create_schedule.
CREATE OR REPLACE FUNCTION alter_schedule(p_name text, p_cron text DEFAULT NULL, p_at timestamptz DEFAULT NULL, p_zone text DEFAULT NULL,
    p_missed text DEFAULT NULL, p_grace interval DEFAULT NULL, p_catch_up int DEFAULT NULL,
    p_payload text DEFAULT NULL, p_key text DEFAULT NULL, p_routing_key text DEFAULT NULL, p_headers jsonb DEFAULT NULL, p_expires_in interval DEFAULT NULL,
    p_message boolean DEFAULT false, p_from timestamptz DEFAULT NULL, p_next timestamptz DEFAULT NULL)
RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
DECLARE
    old schedule;
    s   schedule;
    whole boolean := coalesce(p_message, false);
BEGIN
    PERFORM require_that(p_cron IS NULL OR p_at IS NULL, 'a schedule has either a cron expression or a time', 'Give one of the two.');
    old := require_schedule(p_name);
    s := old;
    IF p_cron IS NOT NULL OR p_at IS NOT NULL THEN
        SELECT p_cron, p_at INTO s.cron, s.at;
    END IF;
    SELECT coalesce(p_zone, s.zone), coalesce(p_missed, s.missed), coalesce(p_grace, s.grace), coalesce(p_catch_up, s.catch_up)
        INTO s.zone, s.missed, s.grace, s.catch_up;
    SELECT CASE WHEN whole THEN p_payload ELSE coalesce(p_payload, s.payload) END, CASE WHEN whole THEN p_key ELSE coalesce(p_key, s.key) END,
           CASE WHEN whole THEN p_routing_key ELSE coalesce(p_routing_key, s.routing_key) END, CASE WHEN whole THEN p_headers ELSE coalesce(p_headers, s.headers) END,
           CASE WHEN whole THEN p_expires_in ELSE coalesce(p_expires_in, s.expires_in) END
        INTO s.payload, s.key, s.routing_key, s.headers, s.expires_in;
    PERFORM require_sound(s);
    PERFORM put_schedule(old, s, coalesce(p_from, clock_timestamp()), p_next);
END $$;

-- Nothing is produced any more, until resume_schedule. Returns whether that is new.
CREATE OR REPLACE FUNCTION pause_schedule(p_name text) RETURNS boolean
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
DECLARE
    s schedule := require_schedule(p_name);
    t schedule_turn;
BEGIN
    IF s.paused THEN
        RETURN false;
    END IF;
    UPDATE schedule SET paused = true WHERE id = s.id;
    t := newest_turn(s.id);
    t.fire_at := NULL;
    t.due_at := NULL;
    PERFORM next_turn(t);
    INSERT INTO audit (action, stream_name, detail)
        SELECT 'pause_schedule', x.name, jsonb_build_object('schedule', s.name) FROM stream AS x WHERE x.id = s.stream_id;
    RETURN true;
END $$;

-- Goes on with the times after p_from, now: those that went by meanwhile are not made up for. A single time that went by is over.
-- p_next: see create_schedule. Returns whether it was paused.
CREATE OR REPLACE FUNCTION resume_schedule(p_name text, p_from timestamptz DEFAULT NULL, p_next timestamptz DEFAULT NULL) RETURNS boolean
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
DECLARE
    s schedule := require_schedule(p_name);
BEGIN
    IF NOT s.paused THEN
        RETURN false;
    END IF;
    UPDATE schedule SET paused = false WHERE id = s.id;
    s.paused := false;
    PERFORM plan_schedule(s, coalesce(p_from, clock_timestamp()), p_next);
    INSERT INTO audit (action, stream_name, detail)
        SELECT 'resume_schedule', x.name, jsonb_build_object('schedule', s.name) FROM stream AS x WHERE x.id = s.stream_id;
    RETURN true;
END $$;

-- Drops a schedule with its history. What it has produced stays.
CREATE OR REPLACE FUNCTION drop_schedule(p_name text) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
DECLARE
    s schedule := require_schedule(p_name);
BEGIN
    DELETE FROM schedule WHERE id = s.id;
    INSERT INTO audit (action, stream_name, detail)
        SELECT 'drop_schedule', x.name, jsonb_build_object('schedule', s.name) FROM stream AS x WHERE x.id = s.stream_id;
END $$;

-- For people, and clients: the schedules with where they stand, by name. state: active, paused, failing (it is tried again at retry_at), over.
CREATE OR REPLACE FUNCTION list_schedules(p_name text DEFAULT NULL, p_stream text DEFAULT NULL, p_after text DEFAULT NULL, p_limit bigint DEFAULT NULL)
RETURNS TABLE (name text, id bigint, stream text, stream_id bigint, state text, cron text, at timestamptz, zone text, missed text, grace interval, catch_up int,
               key text, routing_key text, headers jsonb, expires_in interval, payload text, created_at timestamptz, since timestamptz, next_fire timestamptz,
               last_fire timestamptz, last_message_id bigint, last_at timestamptz, produced bigint, not_produced bigint,
               failures int, retry_at timestamptz, last_error text, failed_at timestamptz)
LANGUAGE plpgsql STABLE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    SELECT s.name, s.id, x.name, x.id, CASE WHEN s.paused THEN 'paused' WHEN t.due_at IS NULL THEN 'over' WHEN t.failures > 0 THEN 'failing' ELSE 'active' END,
           s.cron, s.at, s.zone, s.missed, s.grace, s.catch_up, s.key, s.routing_key, s.headers, s.expires_in, s.payload, s.created_at, s.since, t.fire_at,
           r.fire_time, r.message_id, r.at, t.produced, t.missed,
           t.failures, CASE WHEN t.failures > 0 THEN t.due_at END, t.last_error, t.failed_at
    FROM schedule AS s
    JOIN stream AS x ON x.id = s.stream_id
    CROSS JOIN LATERAL (SELECT * FROM schedule_turn AS y WHERE y.schedule_id = s.id ORDER BY y.turn DESC LIMIT 1) AS t
    LEFT JOIN LATERAL (SELECT * FROM schedule_run AS y WHERE y.schedule_id = s.id AND y.number <= t.runs ORDER BY y.number DESC LIMIT 1) AS r ON true
    WHERE (s.name = p_name OR p_name IS NULL) AND (x.name = p_stream OR p_stream IS NULL) AND (s.name > p_after OR p_after IS NULL)
    ORDER BY s.name LIMIT p_limit;
END $$;
SELECT make_view('schedule_status', 'SELECT * FROM list_schedules()');
