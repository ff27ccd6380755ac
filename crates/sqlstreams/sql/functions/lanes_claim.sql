-- Claiming in an ordered group: see lanes.sql for the rules.

-- How the lanes are shared out, as p_holder sees it.
CREATE OR REPLACE FUNCTION look_at_lanes(p_stream bigint, p_group bigint, c group_cursor, p_holder uuid, p_now timestamptz,
    OUT mine bigint, OUT others bigint, OUT orphaned bigint, OUT holders int)
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    EXECUTE format(
        'SELECT coalesce(bit_or(lanes) FILTER (WHERE holder = $3 AND expires_at > $4), 0),
                coalesce(bit_or(lanes) FILTER (WHERE holder <> $3 AND expires_at > $4), 0),
                coalesce(bit_or(lanes) FILTER (WHERE holder IS NULL OR expires_at <= $4), 0),
                (SELECT count(*) FROM (SELECT holder FROM %1$I WHERE group_id = $1 AND seq >= $2 AND expires_at > $4 AND holder IS NOT NULL
                                       UNION SELECT (w).holder FROM unnest($5) AS w WHERE (w).until > $4 UNION SELECT $3) AS x)
         FROM %1$I WHERE group_id = $1 AND seq >= $2', 'consumer_lease_' || p_stream)
        INTO mine, others, orphaned, holders USING p_group, c.first_open, p_holder, p_now, c.waiters;
END $$;

-- Takes over one lease that a holder has left, or as much of it as lies in those of p_lanes that are free or p_holder's: that with the
-- lowest id first. p_room: where the group has a limit, the most messages. Exceptions that were in flight under such leases are put
-- back on the way. NULLs when there is none.
CREATE OR REPLACE FUNCTION take_over_lanes(p_stream bigint, g consumer_group, p_holder uuid, p_owner bigint, p_token uuid, p_lanes bigint, p_room bigint, p_now timestamptz,
    INOUT c group_cursor, OUT pending int8multirange, OUT lanes bigint)
LANGUAGE plpgsql VOLATILE AS $$
#variable_conflict use_variable
DECLARE
    leases text := 'consumer_lease_' || p_stream;
    l      record;
    others bigint := (SELECT x.others FROM look_at_lanes(p_stream, g.id, c, p_holder, p_now) AS x);
    lost   boolean;
    part   record;
BEGIN
    FOR l IN EXECUTE format('SELECT seq, token, pending, lanes, expires_at, reclaims, owner FROM %I WHERE group_id = $1 AND seq >= $2 AND (holder IS NULL OR expires_at <= $3)
                             ORDER BY lower(pending) NULLS FIRST, seq', leases)
        USING g.id, c.first_open, p_now
    LOOP
        lost := l.expires_at > '-infinity';
        PERFORM put_back_lane_exceptions(p_stream, g, l.token, l.lanes, lost);
        lanes := l.lanes & ~others & p_lanes;
        CONTINUE WHEN lanes = 0 AND NOT isempty(l.pending);
        -- Only where pending is written as well: who takes a row of consumer_done and leaves its id pending lets it run again.
        IF g.transactional THEN
            l.pending := l.pending - take_done(p_stream, g.id, l.pending, l.lanes);
        END IF;
        IF isempty(l.pending) THEN
            EXECUTE format('DELETE FROM %I WHERE group_id = $1 AND seq = $2', leases) USING g.id, l.seq;
            CONTINUE;
        END IF;
        -- The lost holder must not settle any part of it.
        IF lanes = l.lanes THEN
            EXECUTE format('DELETE FROM %I WHERE group_id = $1 AND seq = $2', leases) USING g.id, l.seq;
        ELSE
            EXECUTE format('UPDATE %I SET token = gen_random_uuid(), holder = NULL, lanes = $3, pending = $4 WHERE group_id = $1 AND seq = $2', leases)
                USING g.id, l.seq, l.lanes & ~lanes, l.pending;
        END IF;
        IF lost AND l.reclaims >= g.max_reclaims THEN
            PERFORM make_lane_suspects(p_stream, g, l.pending, lanes);
            CONTINUE;
        END IF;
        IF p_room IS NOT NULL THEN
            -- The rest stays behind as it is, and comes next.
            SELECT * INTO part FROM first_of_lanes(p_stream, g.id, l.pending, lanes, p_room);
            IF part.cut IS NOT NULL THEN
                EXECUTE format('INSERT INTO %I (group_id, seq, token, lanes, pending, expires_at, reclaims) VALUES ($1, $2, gen_random_uuid(), $3, $4, $5, $6)', leases)
                    USING g.id, c.next_seq, lanes, l.pending * int8multirange(int8range(part.cut, NULL)), l.expires_at, l.reclaims;
                c.next_seq := c.next_seq + 1;
            END IF;
            CONTINUE WHEN part.picked IS NULL;
            l.pending := part.picked;
        END IF;
        pending := l.pending - defer_blocked(p_stream, g.id, l.pending, lanes);
        EXECUTE format('INSERT INTO %I (group_id, seq, token, owner, holder, lanes, pending, expires_at, reclaims) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9)', leases)
            USING g.id, c.next_seq, p_token, p_owner, p_holder, lanes, pending, p_now + g.lease_duration, l.reclaims + lost::int;
        c.next_seq := c.next_seq + 1;
        RETURN;
    END LOOP;
    pending := NULL;
    lanes := NULL;
END $$;

-- The messages of a poison range as exceptions that run alone; of each key the lowest first.
CREATE OR REPLACE FUNCTION make_lane_suspects(p_stream bigint, g consumer_group, p_pending int8multirange, p_lanes bigint) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    keys text[];
BEGIN
    EXECUTE format(
        'WITH rows AS (
             INSERT INTO %1$I (group_id, message_id, state, losses, due_at, key, lane, last_error)
             SELECT $1, id, CASE WHEN key IS NULL THEN ''ready'' ELSE ''deferred'' END, 1, $4, key, lane_of(key, id), ''its lease was lost repeatedly''
             FROM %2$I WHERE id >= lower($2) AND id < upper($2) AND $2 @> id AND ($3 >> lane_of(key, id)) & 1 = 1 AND (%3$s)
             RETURNING key)
         SELECT array_agg(DISTINCT key) FROM rows WHERE key IS NOT NULL', 'exception_queue_' || p_stream, 'message_log_' || p_stream,
        coalesce(binding_condition(g.id, lower(p_pending), upper(p_pending)), 'true'))
        INTO keys USING g.id, p_pending, p_lanes, clock_timestamp();
    PERFORM promote(p_stream, g.id, keys);
END $$;

-- Exceptions of these lanes that are due, at most about p_limit: each key's head, and the deferred ones that follow it if it has not
-- failed before and p_alone does not say otherwise: one that fails again would only take them back. Later ones may be in flight, if it
-- was redriven meanwhile: they stay where they are, and so does what follows those. With p_suspect it may be one suspect alone. Returns how many it put into flight under p_token, and their lanes.
CREATE OR REPLACE FUNCTION take_lane_exceptions(p_stream bigint, g consumer_group, p_lanes bigint, p_limit bigint, p_alone boolean, p_suspect boolean, p_token uuid, p_now timestamptz,
    OUT taken bigint, OUT lanes bigint)
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    exceptions text := 'exception_queue_' || p_stream;
    each       smallint[];
    open       boolean;
BEGIN
    taken := 0;
    EXECUTE format('SELECT EXISTS (SELECT FROM %I WHERE group_id = $1 AND state = ''ready'' AND losses = 0 AND due_at <= $2)
                        OR $3 AND EXISTS (SELECT FROM %1$I WHERE group_id = $1 AND state = ''ready'' AND losses > 0 AND due_at <= $2)', exceptions)
        INTO open USING g.id, p_now, p_suspect;
    IF NOT open THEN
        RETURN;
    END IF;
    each := ARRAY(SELECT i FROM generate_series(0, 63) AS i WHERE (p_lanes >> i) & 1 = 1);
    IF p_suspect THEN
        EXECUTE format(
            'WITH head AS (
                 SELECT e.message_id FROM unnest($2) AS l(lane)
                 CROSS JOIN LATERAL (SELECT message_id, due_at FROM %1$I WHERE group_id = $1 AND lane = l.lane AND lane >= 0 AND state = ''ready'' AND losses > 0 AND due_at <= $3 ORDER BY due_at LIMIT 1) AS e
                 ORDER BY e.due_at LIMIT 1),
             claimed AS (
                 UPDATE %1$I AS e SET state = ''inflight'', lease_id = $4, lease_expires_at = ''infinity'' FROM head
                 WHERE e.group_id = $1 AND e.message_id = head.message_id RETURNING e.lane)
             SELECT count(*), bit_or(1::bigint << lane) FROM claimed', exceptions)
            INTO taken, lanes USING g.id, each, p_now, p_token;
        IF taken > 0 THEN
            RETURN;
        END IF;
    END IF;
    EXECUTE format(
        'WITH filled AS MATERIALIZED (
             SELECT l.lane FROM unnest($2) AS l(lane)
             CROSS JOIN LATERAL (SELECT FROM %1$I WHERE group_id = $1 AND lane = l.lane AND lane >= 0 AND state = ''ready'' AND losses = 0 AND due_at <= $3 ORDER BY due_at LIMIT 1) AS e),
         -- Of each about as many: all of each, to find the first of all, would be very many.
         head AS MATERIALIZED (
             SELECT e.* FROM filled AS l
             CROSS JOIN LATERAL (SELECT message_id, key, due_at, attempts + delays > 0 AS failed FROM %1$I
                                 WHERE group_id = $1 AND lane = l.lane AND lane >= 0 AND state = ''ready'' AND losses = 0 AND due_at <= $3 ORDER BY due_at
                                 LIMIT (SELECT ceil($5::numeric / nullif(count(*), 0))::bigint FROM filled)) AS e
             ORDER BY e.due_at LIMIT $5),
         followers AS MATERIALIZED (
             SELECT f.message_id, f.key, f.stays, f.place FROM head
             CROSS JOIN LATERAL (SELECT message_id, key, losses > 0 OR state <> ''deferred'' AS stays, row_number() OVER (ORDER BY message_id) AS place FROM (
                                     SELECT message_id, key, losses, state FROM %1$I WHERE group_id = $1 AND key = head.key AND lane >= 0 AND state <> ''dead'' AND message_id > head.message_id
                                     ORDER BY message_id LIMIT $5) AS x) AS f
             WHERE NOT head.failed AND NOT $6),
         alone AS (SELECT key, min(place) AS place FROM followers WHERE stays GROUP BY key),
         chosen AS (
             SELECT message_id FROM (
                 SELECT message_id, 0 AS place FROM head
                 UNION ALL
                 SELECT f.message_id, f.place FROM followers AS f LEFT JOIN alone AS a ON a.key = f.key WHERE a.place IS NULL OR f.place < a.place) AS x
             ORDER BY place, message_id LIMIT $5),
         claimed AS (
             UPDATE %1$I AS e SET state = ''inflight'', lease_id = $4, lease_expires_at = ''infinity'' FROM chosen
             WHERE e.group_id = $1 AND e.message_id = chosen.message_id RETURNING e.lane)
         SELECT count(*), bit_or(1::bigint << lane) FROM claimed', exceptions)
        INTO taken, lanes USING g.id, each, p_now, p_token, p_limit, p_alone;
END $$;

-- Of these ids the first messages in these lanes that are for the group, at most p_room: as a group that has a limit hands them out, of
-- each lane one with a key, since a second could only wait. cut: where what was not looked at begins, NULL if all was.
CREATE OR REPLACE FUNCTION first_of_lanes(p_stream bigint, p_group bigint, p_ids int8multirange, p_lanes bigint, p_room bigint, OUT picked int8multirange, OUT cut bigint)
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    EXECUTE format(
        'WITH mine AS MATERIALIZED (
             SELECT id, key IS NOT NULL AND row_number() OVER (PARTITION BY lane_of(key, id), key IS NULL ORDER BY id) > 1 OR row_number() OVER (ORDER BY id) > $3 AS over
             FROM (SELECT id, key FROM %I WHERE id >= lower($1) AND id < upper($1) AND $1 @> id AND ($2 >> lane_of(key, id)) & 1 = 1 AND (%s) ORDER BY id LIMIT $3 + 1) AS x),
         cut AS MATERIALIZED (SELECT min(id) AS id FROM mine WHERE over)
         SELECT range_agg(int8range(mine.id, mine.id, ''[]'')) FILTER (WHERE mine.id IS NOT NULL), min(cut.id) FROM cut LEFT JOIN mine ON cut.id IS NULL OR mine.id < cut.id', 'message_log_' || p_stream,
        coalesce(binding_condition(p_group, lower(p_ids), upper(p_ids)), 'true'))
        INTO picked, cut USING p_ids, p_lanes, p_room;
END $$;

-- The next ids of the log for these lanes, of those furthest behind: p_width of them, or without it as many as it takes for p_limit
-- messages when all lanes have as many. p_limited: no more than p_limit messages, counted. looked_at: how many ids it is about, of which
-- there may be none to hand out; reached: up to where.
CREATE OR REPLACE FUNCTION next_lane_range(p_stream bigint, p_group bigint, p_lanes bigint, p_limit bigint, p_width bigint, p_limited boolean,
    INOUT c group_cursor, OUT pending int8multirange, OUT lanes bigint, OUT looked_at bigint, OUT reached bigint)
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    r      record;
    at     group_cursor := c;
    first  lane_cohort;
    beyond bigint;
    width  bigint;
BEGIN
    SELECT x.lanes & p_lanes, x.position INTO first FROM unnest(c.cohorts) AS x WHERE x.lanes & p_lanes <> 0 ORDER BY x.position LIMIT 1;
    IF first.lanes IS NULL THEN
        RETURN;
    END IF;
    lanes := first.lanes;
    -- No further than where the next cohort stands: it is read together with that one then.
    SELECT min(x.position) INTO beyond FROM unnest(c.cohorts) AS x WHERE x.lanes & p_lanes <> 0 AND x.position > first.position;
    at.claimed := first.position;
    width := greatest(1, coalesce(p_width, p_limit * 64 / lane_count(lanes)));
    SELECT * INTO r FROM next_range(p_stream, p_group, least(width, CASE WHEN p_limited THEN 10000 ELSE 50000 END, beyond - first.position), at);
    at := r.c;
    reached := least(at.claimed, beyond);
    -- Passing over holes it may have gone beyond.
    pending := r.range * int8multirange(int8range(NULL, beyond, '[]'));
    IF isempty(pending) THEN
        pending := NULL;
    END IF;
    looked_at := upper(pending) - lower(pending);
    IF p_limited AND pending IS NOT NULL THEN
        SELECT * INTO r FROM first_of_lanes(p_stream, p_group, pending, lanes, p_limit);
        reached := coalesce(r.cut - 1, reached);
        looked_at := reached + 1 - lower(pending);
        pending := r.picked;
    END IF;
    c.cohorts := move_lanes(c.cohorts, lanes, reached);
    c.claimed := lowest_position(c.cohorts);
END $$;

-- Settles and renews what p_holder has, records what failed, and claims more, in one call; the one call of an ordered group's
-- consumers, heartbeats too, which follow each other.
--
-- p_holder: chosen at random by the consumer, and anew after a loss. p_tokens, p_done: all its leases, and the ids of
-- each that are finished; p_finished: all of them are, and so are the exceptions that were claimed under it. p_failed_…: failed first deliveries, as for advance. p_ended_…: exceptions that ended, with their keys; see
-- settle_lane_exceptions. p_limit: about how many messages to claim, 0 for none. p_suspect: one suspect may be among them, alone.
-- p_lanes: the lanes of which more is wanted. p_width: the ids to look among for p_limit messages. p_part: what this lease has above
-- p_part_after becomes two, p_part_tokens: the second for p_part_lanes, the first for its other lanes.
--
-- lost: nothing was recorded, all that the holder has is lost. Else there may be a new lease (seq), for lanes, which holds either ids of
-- the log (pending) or exceptions (ids and so on, in id order; pending is empty). waiting: there is something to read, but no lane for the
-- caller yet. limited: the group has a limit, so tell at once what is finished. wait: the rate limit is used up; ask again after that.
-- looked_at: how many ids of the log the claim is about, of which there may be none to hand out; reached: up to where the lanes were read.
CREATE OR REPLACE FUNCTION advance_lanes(p_stream bigint, p_group bigint, p_holder uuid, p_owner bigint,
    p_tokens uuid[], p_done int8multirange[], p_finished boolean[],
    p_failed_tokens uuid[], p_failed_ids bigint[], p_outcomes text[], p_errors text[], p_delays double precision[],
    p_ended_tokens uuid[], p_ended_ids bigint[], p_ended_keys text[], p_ended_outcomes text[], p_ended_errors text[], p_ended_delays double precision[],
    p_limit bigint, p_suspect boolean, p_token uuid, p_lanes bigint DEFAULT -1, p_width bigint DEFAULT NULL,
    p_part uuid DEFAULT NULL, p_part_after bigint DEFAULT NULL, p_part_lanes bigint DEFAULT NULL, p_part_tokens uuid[] DEFAULT NULL)
RETURNS TABLE (lost boolean, seq bigint, lanes bigint, pending int8multirange, ids bigint[], attempts int[], delays int[], first_failed_at timestamptz[], suspect boolean,
               lease_duration interval, paused boolean, waiting boolean, limited boolean, wait interval, looked_at bigint, reached bigint)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off SET constraint_exclusion = off AS $$
#variable_conflict use_column
DECLARE
    leases text := 'consumer_lease_' || p_stream;
    seqs   bigint[];
    held   bigint;
    g      consumer_group;
    before group_cursor;
    c      group_cursor;
    now    timestamptz;
    r      record;
    l      record;
    e      record;
    room   bigint := p_limit;
    quota  int;
    free   bigint;
    may    bigint;
BEGIN
    PERFORM require_read_committed();
    before := lock_cursor(p_stream, p_group);
    g := require_group(p_stream, p_group);
    PERFORM require_mode(g, 'ordered');
    c := before;
    IF g.lane_probe <> lane_probe() THEN
        c := realign(p_stream, g, c);
    END IF;
    lease_duration := g.lease_duration;
    paused := g.paused;
    waiting := false;
    limited := g.max_in_flight IS NOT NULL OR g.rate_limit IS NOT NULL;

    seqs := held_lanes(p_stream, p_group, c, p_holder, p_tokens);
    lost := seqs IS NULL;
    IF lost THEN
        IF c IS DISTINCT FROM before THEN
            PERFORM save_cursor(p_stream, p_group, c);
        END IF;
        RETURN NEXT;
        RETURN;
    END IF;
    IF cardinality(p_ended_ids) > 0 THEN
        PERFORM settle_lane_exceptions(p_stream, g, p_ended_tokens, p_ended_ids, p_ended_keys, p_ended_outcomes, p_ended_errors, p_ended_delays);
    END IF;
    IF cardinality(p_tokens) > 0 THEN
        PERFORM take_done_in_lanes(p_stream, g, seqs, p_tokens, p_done);
        IF cardinality(p_failed_ids) > 0 THEN
            PERFORM fail_in_lanes(p_stream, g, seqs, p_tokens, p_failed_tokens, p_failed_ids, p_outcomes, p_errors, p_delays);
        END IF;
        PERFORM renew_lanes(p_stream, g, p_owner, seqs, p_tokens, p_finished);
        IF EXISTS (SELECT FROM unnest(c.waiters) AS w WHERE (w).holder <> p_holder AND (w).until > clock_timestamp()) THEN
            PERFORM free_lanes(p_stream, p_group, seqs, p_tokens);
        END IF;
        IF p_part IS NOT NULL THEN
            c := part_lanes(p_stream, p_group, seqs[array_position(p_tokens, p_part)], p_part_after, p_part_lanes, p_part_tokens, c);
        END IF;
        FOREACH held IN ARRAY seqs LOOP
            IF held < c.next_seq - 1000 THEN
                c := move_lease(p_stream, p_group, held, c);
            END IF;
        END LOOP;
    END IF;
    IF c.first_open < c.next_seq THEN
        c.first_open := first_open_lease(p_stream, p_group, c);
    END IF;

    IF limited AND room > 0 THEN
        SELECT a.room, a.wait INTO room, wait FROM allowance(p_stream, g, c, room) AS a;
    END IF;
    now := clock_timestamp();
    IF room > 0 AND NOT g.paused THEN
        IF c.first_open < c.next_seq THEN
            SELECT * INTO r FROM take_over_lanes(p_stream, g, p_holder, p_owner, p_token, p_lanes, CASE WHEN limited THEN room END, now, c);
            c := r.c;
            pending := r.pending;
            lanes := r.lanes;
        END IF;
        IF pending IS NOT NULL THEN
            seq := c.next_seq - 1;
        ELSE
            SELECT * INTO l FROM look_at_lanes(p_stream, p_group, c, p_holder, now);
            quota := ceil(64.0 / l.holders);
            may := l.mine & ~l.orphaned;
            IF lane_count(l.mine) > quota THEN
                -- What is beyond the quota drains, and is free then.
                may := first_lanes(may, quota);
            ELSE
                -- Free ones, of those that are furthest behind.
                free := ~l.mine & ~l.others & ~l.orphaned & p_lanes;
                FOR r IN SELECT x.lanes FROM unnest(c.cohorts) AS x ORDER BY x.position LOOP
                    may := may | first_lanes(r.lanes & free, quota - lane_count(may));
                END LOOP;
            END IF;
            SELECT * INTO e FROM take_lane_exceptions(p_stream, g, may & p_lanes, room, limited, p_suspect, p_token, now);
            IF e.taken > 0 THEN
                seq := c.next_seq;
                pending := '{}';
                lanes := e.lanes;
                EXECUTE format('SELECT array_agg(message_id ORDER BY message_id), array_agg(attempts ORDER BY message_id), array_agg(delays ORDER BY message_id),
                                       array_agg(first_failed_at ORDER BY message_id), bool_or(losses > 0) FROM %I WHERE group_id = $1 AND lane >= 0 AND lease_id = $2', 'exception_queue_' || p_stream)
                    INTO ids, attempts, delays, first_failed_at, suspect USING p_group, p_token;
            ELSE
                SELECT * INTO r FROM next_lane_range(p_stream, p_group, may & p_lanes, room, p_width, limited, c);
                c := r.c;
                lanes := r.lanes;
                looked_at := r.looked_at;
                reached := r.reached;
                IF r.pending IS NOT NULL THEN
                    seq := c.next_seq;
                    pending := r.pending - defer_blocked(p_stream, p_group, r.pending, lanes);
                ELSE
                    waiting := lane_count(may) < quota AND log_head(p_stream) > c.claimed;
                END IF;
            END IF;
            IF seq IS NOT NULL THEN
                EXECUTE format('INSERT INTO %I (group_id, seq, token, owner, holder, lanes, pending, expires_at) VALUES ($1, $2, $3, $4, $5, $6, $7, $8)', leases)
                    USING p_group, seq, p_token, p_owner, p_holder, lanes, pending, now + g.lease_duration;
                c.next_seq := c.next_seq + 1;
            END IF;
        END IF;
        IF limited AND seq IS NOT NULL THEN
            c.paced_until := spend(g, c.paced_until, id_count(pending) + coalesce(cardinality(ids), 0));
        END IF;
        IF waiting AND EXISTS (SELECT FROM unnest(c.waiters) AS w WHERE (w).holder = p_holder AND (w).until > now + interval '1 second') THEN
            NULL;   -- that is known
        ELSIF waiting THEN
            c.waiters := ARRAY(SELECT w FROM unnest(c.waiters) AS w WHERE (w).until > now AND (w).holder <> p_holder) || (p_holder, now + interval '2 seconds')::lane_waiter;
        ELSIF EXISTS (SELECT FROM unnest(c.waiters) AS w WHERE (w).holder = p_holder) THEN
            c.waiters := ARRAY(SELECT w FROM unnest(c.waiters) AS w WHERE (w).until > now AND (w).holder <> p_holder);
        END IF;
    END IF;
    IF c.claimed >= c.reread_to THEN
        c.reread_to := NULL;
    END IF;
    IF c IS DISTINCT FROM before THEN
        PERFORM save_cursor(p_stream, p_group, c);
    ELSE
        PERFORM note_in_vain(p_stream, p_group);
    END IF;
    RETURN NEXT;
END $$;

-- Hands everything back that p_holder has: it can be claimed at once by anybody.
CREATE OR REPLACE FUNCTION release_lanes(p_stream bigint, p_group bigint, p_holder uuid) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
DECLARE
    c group_cursor;
BEGIN
    PERFORM require_read_committed();
    c := lock_cursor(p_stream, p_group);
    EXECUTE format('UPDATE %I SET expires_at = ''-infinity'', holder = NULL, owner = NULL WHERE group_id = $1 AND seq >= $2 AND holder = $3', 'consumer_lease_' || p_stream)
        USING p_group, c.first_open, p_holder;
    PERFORM ring(ARRAY[p_stream]);
END $$;
