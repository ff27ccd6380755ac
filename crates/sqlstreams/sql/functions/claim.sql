-- Claiming: the next piece of work of a group, under the cursor's lock.

-- Moves c.claimed over the next ids that are final and returns what lay between, at most p_limit ids; NULL when there is
-- nothing to claim yet. Up to c.reread_to it leaves those out that have exception rows: each id is in one place.
CREATE OR REPLACE FUNCTION next_range(p_stream bigint, p_group bigint, p_limit bigint, INOUT c group_cursor, OUT range int8multirange)
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    r record;
BEGIN
    FOR turn IN 1..100 LOOP
        SELECT * INTO r FROM next_ids(p_stream, p_limit, c);
        c := r.c;
        range := int8multirange(r.range);
        EXIT WHEN r.range IS NULL OR c.reread_to IS NULL OR lower(r.range) > c.reread_to;
        SELECT f.ids, f.upto INTO range, c.claimed FROM free_ids(p_stream, p_group, range) AS f;
        EXIT WHEN NOT isempty(range);
        range := NULL;
    END LOOP;
END $$;

-- Of a range of ids the first that have no exception row, in at most 64 pieces; upto: as far as was looked.
CREATE OR REPLACE FUNCTION free_ids(p_stream bigint, p_group bigint, p_range int8multirange, OUT ids int8multirange, OUT upto bigint)
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    rows record;
BEGIN
    EXECUTE format('SELECT coalesce(range_agg(int8range(message_id, message_id, ''[]'')), ''{}'') AS ids, count(*) AS count, max(message_id) AS last
                    FROM (SELECT message_id FROM %I WHERE group_id = $1 AND message_id >= $2 AND message_id < $3 ORDER BY message_id LIMIT 10000) AS e', 'exception_queue_' || p_stream)
        INTO rows USING p_group, lower(p_range), upper(p_range);
    upto := CASE WHEN rows.count < 10000 THEN upper(p_range) - 1 ELSE rows.last END;
    SELECT f.ids, f.upto INTO ids, upto FROM first_pieces(p_range * int8multirange(int8range(NULL, upto, '[]')) - rows.ids, upto) AS f;
END $$;

-- The first 64 pieces of a set of ids, so that a lease stays a small row; upto: where they end, or p_upto if they are all.
CREATE OR REPLACE FUNCTION first_pieces(p_ids int8multirange, p_upto bigint, OUT ids int8multirange, OUT upto bigint)
LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    beyond bigint := (SELECT lower(r) FROM unnest(p_ids) AS r ORDER BY r OFFSET 64 LIMIT 1);
BEGIN
    ids := p_ids;
    upto := p_upto;
    IF beyond IS NOT NULL THEN
        ids := p_ids * int8multirange(int8range(NULL, beyond, '()'));
        upto := upper(ids) - 1;
    END IF;
END $$;

-- The ids themselves.
CREATE OR REPLACE FUNCTION next_ids(p_stream bigint, p_limit bigint, INOUT c group_cursor, OUT range int8range)
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    log      text := 'message_log_' || p_stream;
    settled  bigint := settled_id(p_stream);
    reached  bigint := c.claimed;
    width    bigint := p_limit;
    hit      bigint;
    counted  bigint;
    looked   boolean := false;
BEGIN
    LOOP
        -- At or below the settled id nothing comes any more: no contiguity to check, and holes are passed over,
        -- in windows that grow so that they cost index probes rather than calls.
        WHILE reached < settled AND reached - c.claimed < 1000000 LOOP
            EXECUTE format('SELECT id FROM %I WHERE id > $1 AND id <= $2 ORDER BY id LIMIT 1', log)
                INTO hit USING reached, least(reached + width, settled);
            IF hit IS NOT NULL THEN
                c.claimed := least(hit - 1 + p_limit, settled);
                range := int8range(hit, c.claimed, '[]');
                RETURN;
            END IF;
            reached := least(reached + width, settled);
            width := width * 4;
        END LOOP;
        c.claimed := reached;
        EXIT WHEN reached < settled;    -- a million ids of nothing: let others have the lock

        -- A claim so wide is for a group with bindings that catches up. To be told by the fence that all of it is final costs less
        -- than to check it.
        IF p_limit > 20000 AND NOT looked AND log_head(p_stream) >= c.claimed + p_limit THEN
            looked := true;
            settled := look_at_gap(p_stream, c.claimed);
            CONTINUE WHEN settled > c.claimed;
        END IF;

        -- Above it, as far as the ids follow each other without a gap: everything is visible, nothing to wait for. Nearly always all
        -- of them do, and to count them is far cheaper than to number them.
        EXECUTE format('SELECT max(id), count(*) FROM %I WHERE id > $1 AND id <= $1 + $2', log) INTO hit, counted USING c.claimed, p_limit;
        IF hit <> c.claimed + counted THEN
            EXECUTE format('SELECT max(id) FROM (SELECT id, row_number() OVER (ORDER BY id) AS n FROM %I WHERE id > $1 AND id <= $2) AS x WHERE id = $1 + n', log)
                INTO hit USING c.claimed, hit;
        END IF;
        IF hit IS NOT NULL THEN
            range := int8range(c.claimed + 1, hit, '[]');
            c.claimed := hit;
            RETURN;
        END IF;

        EXIT WHEN looked OR log_head(p_stream) <= c.claimed;
        -- Drawn but not visible: will it come? What the look frees is read by later statements, round the loop.
        looked := true;
        settled := look_at_gap(p_stream, c.claimed);
        EXIT WHEN settled <= c.claimed;
    END LOOP;
END $$;

-- Takes over a lease that ran out or was released, or its first p_limit ids, under a new token. Poison ranges that it
-- meets become suspects on the way. NULL when there is none. In a fair group only what is for the lanes in w.
CREATE OR REPLACE FUNCTION take_over(p_stream bigint, g consumer_group, p_owner bigint, p_token uuid, p_limit bigint, w lane_wish, INOUT c group_cursor, OUT pending int8multirange, OUT lanes bigint, OUT replay bigint)
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    leases   text := 'consumer_lease_' || p_stream;
    started  timestamptz := clock_timestamp();
    l        record;
    cut      record;
    part     int8range;
    room     bigint := p_limit;
    rest     int8multirange;
BEGIN
    LOOP
        EXECUTE format('SELECT seq, pending, expires_at, reclaims, lanes, replay FROM %I WHERE group_id = $1 AND seq >= $2 AND expires_at <= $3 AND coalesce(lanes, -1) & $4 <> 0
                        ORDER BY seq LIMIT 1 FOR UPDATE SKIP LOCKED', leases)
            INTO l USING g.id, c.first_open, started, coalesce(w.lanes, -1);
        IF l.seq IS NULL THEN
            RETURN;
        END IF;
        IF g.transactional THEN
            l.pending := l.pending - take_done(p_stream, g.id, l.pending, l.lanes);
        END IF;
        EXIT WHEN NOT isempty(l.pending) AND (l.expires_at = '-infinity' OR l.reclaims < g.max_reclaims);
        PERFORM make_suspects(p_stream, g, l.pending, l.lanes, l.replay);
        EXECUTE format('DELETE FROM %I WHERE group_id = $1 AND seq = $2', leases) USING g.id, l.seq;
    END LOOP;

    IF g.mode = 'fair' THEN
        SELECT * INTO cut FROM cut_lease(p_stream, g.id, w, p_limit, l.seq, l.pending, c, l.lanes);
        c := cut.c;
        l.lanes := cut.lanes;
        room := lane_width(l.lanes, w, p_limit);
    END IF;
    lanes := l.lanes;
    replay := l.replay;
    pending := '{}';
    FOR part IN SELECT r FROM unnest(l.pending) AS r ORDER BY r LOOP
        EXIT WHEN room <= 0;
        part := int8range(lower(part), least(upper(part), lower(part) + room));
        pending := pending + int8multirange(part);
        room := room - (upper(part) - lower(part));
    END LOOP;
    rest := l.pending - pending;

    -- Both halves get new tokens, or the old owner could still settle what it lost.
    IF isempty(rest) THEN
        EXECUTE format('DELETE FROM %I WHERE group_id = $1 AND seq = $2', leases) USING g.id, l.seq;
    ELSE
        EXECUTE format('UPDATE %I SET token = gen_random_uuid(), pending = $3, lanes = $4 WHERE group_id = $1 AND seq = $2', leases)
            USING g.id, l.seq, rest, l.lanes;
    END IF;
    -- A lease that was handed back is not a lost one.
    EXECUTE format('INSERT INTO %I (group_id, seq, token, owner, pending, expires_at, reclaims, lanes, replay) VALUES ($1, $2, $3, $7, $4, $5, $6, $8, $9)', leases)
        USING g.id, c.next_seq, p_token, pending, started + g.lease_duration,
              l.reclaims + CASE WHEN l.expires_at = '-infinity' THEN 0 ELSE 1 END, p_owner, l.lanes, l.replay;
    c.next_seq := c.next_seq + 1;
END $$;

-- The messages of a poison range as exception rows that run alone, so that the one that kills its process does so alone.
CREATE OR REPLACE FUNCTION make_suspects(p_stream bigint, g consumer_group, p_pending int8multirange, p_lanes bigint, p_replay bigint) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    EXECUTE format(
        'INSERT INTO %I (group_id, message_id, state, losses, due_at, key, lane, last_error)
         SELECT $1, id, ''ready'', 1, clock_timestamp(), key, CASE WHEN $4 THEN lane_of(key, id) END, ''its lease was lost repeatedly''
         FROM %I WHERE id >= lower($2) AND id < upper($2) AND $2 @> id AND ($3 IS NULL OR ($3 >> lane_of(key, id)) & 1 = 1) AND (%s)',
        'exception_queue_' || p_stream, 'message_log_' || p_stream, coalesce(binding_condition(g.id, lower(p_pending), upper(p_pending), p_replay), 'true'))
        USING g.id, p_pending, p_lanes, g.mode <> 'parallel';
END $$;

-- Claims up to p_limit ids under p_token: a lease that ran out first, else the next ids of the log (fresh). In a fair group for about
-- p_limit messages of lanes that are in w; unread: see next_in_turn.
CREATE OR REPLACE FUNCTION claim_range(p_stream bigint, g consumer_group, p_owner bigint, p_token uuid, p_limit bigint, w lane_wish,
    INOUT c group_cursor, OUT pending int8multirange, OUT lanes bigint, OUT replay bigint, OUT fresh boolean, OUT unread bigint)
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    r record;
    -- Where a tenant's burst was handed back, others would wait behind it if it always came first.
    log_first boolean := g.mode = 'fair' AND random() < 0.5;
BEGIN
    fresh := false;
    FOR turn IN 1..2 LOOP
        IF log_first = (turn = 1) THEN
            IF g.mode = 'fair' THEN
                SELECT * INTO r FROM next_in_turn(p_stream, g.id, w, p_limit, c);
                lanes := r.lanes;
                unread := r.unread;
            ELSE
                SELECT * INTO r FROM next_range(p_stream, g.id, p_limit, c);
            END IF;
            c := r.c;
            IF r.range IS NOT NULL THEN
                pending := r.range;
                fresh := true;
                EXECUTE format('INSERT INTO %I (group_id, seq, token, owner, pending, expires_at, lanes) VALUES ($1, $2, $3, $4, $5, $6, $7)', 'consumer_lease_' || p_stream)
                    USING g.id, c.next_seq, p_token, p_owner, pending, clock_timestamp() + g.lease_duration, lanes;
                c.next_seq := c.next_seq + 1;
                RETURN;
            END IF;
        -- Else no lease is open: none to take over.
        ELSIF c.first_open < c.next_seq THEN
            SELECT * INTO r FROM take_over(p_stream, g, p_owner, p_token, p_limit, w, c);
            c := r.c;
            IF r.pending IS NOT NULL THEN
                pending := r.pending;
                lanes := r.lanes;
                replay := r.replay;
                unread := w.lanes;
                RETURN;
            END IF;
        END IF;
    END LOOP;
END $$;

-- Settles what a consumer has finished, records what failed, and claims the next ids, in one call.
--
-- p_seqs, p_tokens, p_done: leases, and the ids of each that are finished.
-- p_failed_tokens, …: failed first deliveries: 'retry', 'dead' or 'delay', the error, and a delay in seconds (NULL: the
-- group's backoff) before the next attempt.
-- p_limit: ids to claim, 0 for none. p_token: the token of the new lease; chosen by the caller, it lets the caller send
-- fetch(p_token) in the same write. It must be random.
--
-- p_owner: the number of the calling process (owner.sql), NULL if it has none.
-- p_width: in a group with bindings, the ids to look among for p_limit messages. Then it claims that many ids, of which
-- fetch returns the messages that are for the group. Without it, or where the group has a limit, it claims only ids of such
-- messages, at most 64.
--
-- Returns one row: the leases named that were not the caller's any more (nothing about those was recorded), and the new
-- lease, NULLs when there was nothing to claim. paused: the group is. limited: it has a limit, so tell at once what is
-- finished. wait: the rate limit is used up; ask again after that.
-- looked_at: in a group with bindings, or a fair one, how many ids the claim is about; there may be none of them to hand out.
--
-- In a fair group (fair.sql): p_lanes are those of which the caller wants messages, p_heavy those of which it gets very many, p_shares the part
-- of the ids that each lane's messages are, as it has seen, and p_width the most ids to look among. lanes: those of the new lease. unread: those that
-- have more to read, as far as is known; NULL in other groups.
CREATE OR REPLACE FUNCTION advance(p_stream bigint, p_group bigint,
    p_seqs bigint[], p_tokens uuid[], p_done int8multirange[],
    p_failed_tokens uuid[], p_failed_ids bigint[], p_outcomes text[], p_errors text[], p_delays double precision[],
    p_limit bigint, p_token uuid DEFAULT gen_random_uuid(), p_owner bigint DEFAULT NULL, p_width bigint DEFAULT NULL,
    p_lanes bigint DEFAULT -1, p_heavy bigint DEFAULT 0, p_shares double precision[] DEFAULT NULL)
RETURNS TABLE (lost uuid[], seq bigint, token uuid, pending int8multirange, lease_duration interval, paused boolean, limited boolean, wait interval, looked_at bigint, lanes bigint, unread bigint)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off SET constraint_exclusion = off AS $$
#variable_conflict use_column
DECLARE
    g      consumer_group;
    before group_cursor;
    c      group_cursor;
    r      record;
    w      lane_wish;
    room   bigint;
    wide   bigint;
    fed    boolean := false;
BEGIN
    PERFORM require_read_committed();
    before := lock_cursor(p_stream, p_group);
    -- As it is now that we have the lock: pausing takes that too.
    g := require_group(p_stream, p_group);
    PERFORM require_mode(g, 'parallel');
    c := before;
    IF g.mode = 'fair' AND g.lane_probe <> lane_probe() THEN
        c := realign(p_stream, g, c);
    END IF;

    lost := settle_all(p_stream, g, p_owner, p_seqs, p_tokens, p_done, p_failed_tokens, p_failed_ids, p_outcomes, p_errors, p_delays);
    paused := g.paused;
    limited := g.max_in_flight IS NOT NULL OR g.rate_limit IS NOT NULL;
    looked_at := CASE WHEN g.bound OR g.mode = 'fair' THEN 0 END;
    unread := CASE WHEN g.mode = 'fair' THEN 0 END;
    room := least(p_limit, 1000000);
    IF room > 0 THEN
        SELECT a.room, a.wait INTO room, wait FROM allowance(p_stream, g, c, room) AS a;
    END IF;
    IF c.first_open < c.next_seq AND (room > 0 OR cardinality(p_seqs) > 0) THEN
        c.first_open := first_open_lease(p_stream, p_group, c);
    END IF;
    IF room > 0 THEN
        wide := room;
        IF g.mode = 'fair' THEN
            -- Where there is a limit, all that is claimed is looked through under the lock.
            w := (coalesce(p_lanes, -1), coalesce(p_heavy, 0), p_shares, least(claim_width(room, p_width), CASE WHEN limited THEN 10000 ELSE 50000 END))::lane_wish;
        ELSIF g.bound THEN
            wide := claim_width(room, p_width);
        END IF;
        -- What is replayed and what is fresh take turns by lot.
        IF c.replays IS NOT NULL AND random() < 0.5 THEN
            c := feed_replay(p_stream, g, wide, c);
            fed := true;
        END IF;
        SELECT * INTO r FROM claim_range(p_stream, g, p_owner, p_token, wide, w, c);
        c := r.c;
        IF r.pending IS NULL AND c.replays IS NOT NULL AND NOT fed THEN
            c := feed_replay(p_stream, g, wide, c);
            SELECT * INTO r FROM claim_range(p_stream, g, p_owner, p_token, wide, w, c);
            c := r.c;
        END IF;
        pending := r.pending;
        lanes := r.lanes;
        unread := CASE WHEN g.mode = 'fair' AND c.replays IS NOT NULL THEN -1 ELSE r.unread END;
        seq := c.next_seq - 1;
        IF g.bound OR g.mode = 'fair' THEN
            looked_at := id_count(pending);
            IF pending IS NOT NULL AND (limited OR p_width IS NULL) AND (g.bound OR lanes <> -1 OR looked_at > room) THEN
                SELECT * INTO r FROM keep_matching(p_stream, g, seq, r.fresh, room, lanes, r.replay, c, pending);
                c := r.c;
                pending := r.pending;
                looked_at := r.looked_at;
            END IF;
        END IF;
        IF pending IS NULL THEN
            seq := NULL;
        ELSE
            token := p_token;
            c.paced_until := spend(g, c.paced_until, id_count(pending));
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
    lease_duration := g.lease_duration;
    RETURN NEXT;
END $$;

-- The leases of one report, lowest seq first: every caller locks in that order. Returns the tokens that were lost.
CREATE OR REPLACE FUNCTION settle_all(p_stream bigint, g consumer_group, p_owner bigint, p_seqs bigint[], p_tokens uuid[], p_done int8multirange[],
    p_failed_tokens uuid[], p_failed_ids bigint[], p_outcomes text[], p_errors text[], p_delays double precision[])
RETURNS uuid[]
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    lost uuid[] := '{}';
    l    record;
    f    record;
    seq  bigint;
BEGIN
    IF cardinality(p_outcomes) > 0 THEN
        PERFORM require_outcomes(p_outcomes, '{retry,dead,delay}');
    END IF;
    FOR l IN SELECT u.seq, u.token, u.done FROM unnest(p_seqs, p_tokens, p_done) AS u(seq, token, done) ORDER BY u.seq LOOP
        IF l.token = ANY (p_failed_tokens) THEN
            SELECT array_agg(u.id) AS ids, array_agg(u.outcome) AS outcomes, array_agg(u.error) AS errors, array_agg(u.delay) AS delays INTO f
                FROM unnest(p_failed_tokens, p_failed_ids, p_outcomes, p_errors, p_delays) AS u(token, id, outcome, error, delay)
                WHERE u.token = l.token;
            seq := settle_lease(p_stream, g, p_owner, l.seq, l.token, coalesce(l.done, '{}'), f.ids, f.outcomes, f.errors, f.delays);
        ELSE
            seq := settle_lease(p_stream, g, p_owner, l.seq, l.token, coalesce(l.done, '{}'));
        END IF;
        IF seq IS NULL THEN
            lost := lost || l.token;
        END IF;
    END LOOP;
    RETURN lost;
END $$;
