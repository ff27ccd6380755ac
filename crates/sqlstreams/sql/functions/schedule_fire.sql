-- Schedules, at their times: what is due, and producing the message of each time once. The invariants are in schedule.sql.

-- A time as it is written into headers: 2026-03-29T00:30:00Z.
CREATE OR REPLACE FUNCTION fire_time_text(p_at timestamptz) RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT to_char(p_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS')
        || CASE WHEN date_trunc('second', p_at) <> p_at THEN to_char(p_at AT TIME ZONE 'UTC', '.US') ELSE '' END || 'Z'
$$;

-- Produces the message now, also of a schedule that is paused or over. Its times stay as they are. Returns the message's id.
CREATE OR REPLACE FUNCTION run_schedule(p_name text) RETURNS bigint
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
DECLARE
    s    schedule;
    t    schedule_turn;
    now  timestamptz;
    ids  bigint[];
BEGIN
    -- The stream first; see above. Where it changes meanwhile, that is to another that exists.
    PERFORM FROM stream WHERE id = (SELECT x.stream_id FROM schedule AS x WHERE x.name = p_name) FOR KEY SHARE;
    s := require_schedule(p_name);
    t := newest_turn(s.id);
    now := clock_timestamp();
    ids := produce_scheduled(s, ARRAY[now], 0);
    t.runs := t.runs + 1;
    t.produced := t.produced + 1;
    INSERT INTO schedule_run (schedule_id, number, kind, fire_time, at, message_id) VALUES (s.id, t.runs, 'manual', now, now, ids[1]);
    PERFORM forget_runs(t, 1);
    PERFORM next_turn(t);
    INSERT INTO audit (action, stream_name, detail)
        SELECT 'run_schedule', x.name, jsonb_build_object('schedule', s.name, 'message_id', ids[1]) FROM stream AS x WHERE x.id = s.stream_id;
    PERFORM ring(ARRAY[s.stream_id]);
    RETURN ids[1];
END $$;

-- Inserts the schedule's message for each of these times, in their order, and returns the ids. The first says how many times before it have none.
CREATE OR REPLACE FUNCTION produce_scheduled(s schedule, p_times timestamptz[], p_missed bigint) RETURNS bigint[]
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    ids bigint[];
BEGIN
    EXECUTE format(
        'WITH made AS (INSERT INTO %I (key, routing_key, headers, expires_at, payload)
                       SELECT $1, $2, u.headers, $4, $5::%s FROM unnest($3) WITH ORDINALITY AS u(headers, n) ORDER BY u.n RETURNING id)
         SELECT array_agg(id ORDER BY id) FROM made',
        'message_log_' || s.stream_id, (SELECT payload_type FROM stream WHERE id = s.stream_id))
        INTO ids
        USING s.key, s.routing_key,
              ARRAY(SELECT coalesce(s.headers, '{}') || jsonb_build_object('schedule', s.name, 'fire_time', fire_time_text(u.at))
                           || CASE WHEN u.n = 1 AND p_missed > 0 THEN jsonb_build_object('missed', p_missed) ELSE '{}' END
                    FROM unnest(p_times) WITH ORDINALITY AS u(at, n) ORDER BY u.n),
              clock_timestamp() + s.expires_in, s.payload;
    RETURN ids;
END $$;

-- Keeps the latest 100 rows of the history; p_new were added. Bounded from below: what was removed before may be dead and still there.
CREATE OR REPLACE FUNCTION forget_runs(t schedule_turn, p_new bigint) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    DELETE FROM schedule_run WHERE schedule_id = t.schedule_id AND number > t.runs - 100 - p_new AND number <= t.runs - 100;
END $$;

-- The schedules to look at now, the first due first, at most p_limit, and after those with due_in above zero the one that is next. p_from bounds the
-- look from below: no schedule was due before that when it was last looked without it.
--
-- Planned without p_from: for the value the planner would look where the index really begins, among rows that are dead.
CREATE OR REPLACE FUNCTION due_schedules(p_from timestamptz DEFAULT '-infinity', p_limit bigint DEFAULT 100)
RETURNS TABLE (looked_at timestamptz, due_in interval, id bigint, turn bigint, stream_id bigint, name text, cron text, at timestamptz, zone text, missed text,
               grace interval, catch_up int, since timestamptz, done_until timestamptz)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
    now timestamptz := clock_timestamp();
    x   record;
BEGIN
    PERFORM require_limit(p_limit);
    FOR x IN SELECT t.due_at, t.turn, t.done_until, s.* FROM schedule_turn AS t JOIN schedule AS s ON s.id = t.schedule_id
             WHERE t.due_at >= coalesce(p_from, '-infinity') ORDER BY t.due_at LIMIT p_limit + 1 LOOP
        RETURN QUERY SELECT now, x.due_at - now, x.id, x.turn, x.stream_id, x.name, x.cron, x.at, x.zone, x.missed, x.grace, x.catch_up, x.since, x.done_until;
        EXIT WHEN x.due_at > now;
    END LOOP;
END $$;

-- The step of the maintenance: until when there is nothing to do (maintain.sql). It looks from where the step, which says that in its memory, has
-- left off; if that is long ago, at all of them.
CREATE OR REPLACE FUNCTION schedules_due(p_heads stream_head[]) RETURNS TABLE (stream_id bigint, due_in interval)
LANGUAGE plpgsql VOLATILE SET enable_seqscan = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    now    timestamptz := clock_timestamp();
    bound  timestamptz := (SELECT (memory->>'from')::timestamptz FROM maintenance_step WHERE step = 'schedules' AND maintenance_step.stream_id IS NULL);
BEGIN
    IF bound IS NULL OR bound NOT BETWEEN now - interval '10 seconds' AND now THEN
        bound := '-infinity';
    END IF;
    RETURN QUERY SELECT NULL::bigint, t.due_at - now FROM schedule_turn AS t WHERE t.due_at >= bound ORDER BY t.due_at LIMIT 1;
END $$;

-- Produces the messages of a schedule for p_times, which are some of its times after done_until and up to p_until, in their order, of which the first
-- p_late are late ones that are made up for; for p_missed others, the latest of which is p_missed_at, there are none. Then its times up to p_until
-- are done with, and the next is p_next (NULL: never).
--
-- Returns the ids, and what came of it: 'done'; 'gone': somebody was faster, or it was changed, paused or dropped; 'busy': somebody is at it;
-- 'early': by the server's clock it is not yet time; 'no_room': the log lacks a partition (ensure_partitions).
CREATE OR REPLACE FUNCTION fire_schedule(p_schedule bigint, p_turn bigint, p_times timestamptz[], p_late int, p_missed bigint, p_missed_at timestamptz,
    p_until timestamptz, p_next timestamptz) RETURNS TABLE (outcome text, stream_id bigint, ids bigint[])
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off SET lock_timeout = '1s' AS $$
#variable_conflict use_column
DECLARE
    s     schedule;
    t     schedule_turn;
    now   timestamptz;
    head  bigint;
    many  int := cardinality(p_times);
    added bigint;
BEGIN
    PERFORM require_read_committed();
    SELECT x.stream_id INTO stream_id FROM schedule AS x WHERE x.id = p_schedule;
    IF NOT FOUND THEN
        outcome := 'gone';
        RETURN NEXT;
        RETURN;
    END IF;
    PERFORM FROM stream AS x WHERE x.id = stream_id FOR KEY SHARE SKIP LOCKED;
    IF FOUND THEN
        SELECT * INTO s FROM schedule AS x WHERE x.id = p_schedule FOR NO KEY UPDATE SKIP LOCKED;
    END IF;
    IF s.id IS NULL THEN
        outcome := 'busy';
        RETURN NEXT;
        RETURN;
    END IF;
    t := newest_turn(p_schedule);
    now := clock_timestamp();
    IF t.turn <> p_turn OR t.due_at IS NULL OR s.stream_id <> stream_id THEN
        outcome := 'gone';
    ELSIF p_until > now THEN
        outcome := 'early';
    END IF;
    IF outcome IS NOT NULL THEN
        RETURN NEXT;
        RETURN;
    END IF;
    PERFORM require_that((SELECT coalesce(bool_and(u.at > u.before AND u.at <= p_until), true) FROM (SELECT v.at, lag(v.at, 1, t.done_until) OVER (ORDER BY v.n) AS before FROM unnest(p_times) WITH ORDINALITY AS v(at, n)) AS u)
                             AND p_until >= t.done_until AND coalesce(p_next > p_until, true) AND p_missed >= 0 AND p_late BETWEEN 0 AND many AND (p_missed = 0 OR many > 0 OR p_missed_at <= p_until),
                         format('these are no times of schedule %I', s.name), 'They follow each other, after those that are done with.');
    IF many > 0 THEN
        EXECUTE format('SELECT last_value FROM %I', 'message_log_' || stream_id || '_id_seq') INTO head;
        IF to_regclass(format('%I', 'message_log_' || stream_id || '_p' || (head + many) / (require_stream(stream_id)).partition_size)) IS NULL THEN
            outcome := 'no_room';
            RETURN NEXT;
            RETURN;
        END IF;
        ids := produce_scheduled(s, p_times, p_missed);
        INSERT INTO schedule_run (schedule_id, number, kind, fire_time, at, message_id, missed)
            SELECT s.id, t.runs + u.n, CASE WHEN u.n <= p_late THEN 'caught_up' ELSE 'due' END, u.at, now, u.id, CASE WHEN u.n = 1 THEN p_missed ELSE 0 END
            FROM unnest(p_times, ids) WITH ORDINALITY AS u(at, id, n);
        added := many;
    ELSIF p_missed > 0 THEN
        INSERT INTO schedule_run (schedule_id, number, kind, fire_time, at, missed) VALUES (s.id, t.runs + 1, 'skipped', p_missed_at, now, p_missed);
        added := 1;
    END IF;
    t.done_until := p_until;
    t.fire_at := p_next;
    t.due_at := p_next;
    t.runs := t.runs + coalesce(added, 0);
    t.produced := t.produced + many;
    t.missed := t.missed + p_missed;
    t.failures := 0;
    IF added > 0 THEN
        PERFORM forget_runs(t, added);
    END IF;
    PERFORM next_turn(t);
    outcome := 'done';
    RETURN NEXT;
END $$;

-- The schedule could not be fired: it is tried again after 1 s, 2 s, 4 s … up to 5 minutes. Returns false where somebody was faster.
CREATE OR REPLACE FUNCTION fail_schedule(p_schedule bigint, p_turn bigint, p_error text) RETURNS boolean
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
DECLARE
    t schedule_turn;
BEGIN
    PERFORM require_read_committed();
    PERFORM FROM schedule WHERE id = p_schedule FOR NO KEY UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    t := newest_turn(p_schedule);
    IF t.turn <> p_turn OR t.due_at IS NULL THEN
        RETURN false;
    END IF;
    t.failed_at := clock_timestamp();
    t.due_at := t.failed_at + least(interval '1 second' * 2 ^ least(t.failures, 20), interval '5 minutes');
    t.failures := t.failures + 1;
    t.last_error := left(p_error, 2000);
    PERFORM next_turn(t);
    RETURN true;
END $$;
