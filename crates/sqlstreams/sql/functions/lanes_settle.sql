-- What the holder of lanes tells: see lanes.sql for the rules. Leases are looked up from the lowest on and by = ANY, not by the join alone: the
-- planner would take a small table for a reason to walk the whole group, dead rows and all.

-- Where p_holder's leases lie that these tokens prove; NULL unless all of them are its own still. If one is not, nothing is: whoever
-- goes on with some of its leases after others were taken over would step back behind what those have settled.
CREATE OR REPLACE FUNCTION held_lanes(p_stream bigint, p_group bigint, c group_cursor, p_holder uuid, p_tokens uuid[]) RETURNS bigint[]
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    leases  text := 'consumer_lease_' || p_stream;
    started timestamptz := clock_timestamp();
    held    bigint[];
    held_by uuid[];
    seqs    bigint[] := '{}';
BEGIN
    IF c.first_open < c.next_seq THEN
        EXECUTE format('SELECT array_agg(seq), array_agg(token) FROM %I WHERE group_id = $1 AND seq >= $2 AND holder = $3', leases)
            INTO held, held_by USING p_group, c.first_open, p_holder;
        seqs := ARRAY(SELECT f.seq FROM unnest(p_tokens) WITH ORDINALITY AS u(token, n) JOIN unnest(held, held_by) AS f(seq, token) ON f.token = u.token ORDER BY u.n);
    END IF;
    IF cardinality(seqs) < cardinality(p_tokens) THEN
        EXECUTE format('UPDATE %I SET expires_at = $4, holder = NULL WHERE group_id = $1 AND seq >= $2 AND holder = $3', leases)
            USING p_group, c.first_open, p_holder, started;
        RETURN NULL;
    END IF;
    IF cardinality(held) > cardinality(seqs) THEN
        -- Claimed, but its holder never heard of it.
        EXECUTE format('UPDATE %I SET expires_at = ''-infinity'', holder = NULL WHERE group_id = $1 AND seq >= $2 AND holder = $3 AND token <> ALL ($4)', leases)
            USING p_group, c.first_open, p_holder, p_tokens;
    END IF;
    RETURN seqs;
END $$;

-- What one of the holder's leases has above p_after becomes two leases of its own: one for p_lanes, one for its other lanes. So
-- what waits in a few lanes does not keep the others from being read on.
CREATE OR REPLACE FUNCTION part_lanes(p_stream bigint, p_group bigint, p_seq bigint, p_after bigint, p_lanes bigint, p_tokens uuid[], INOUT c group_cursor)
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    beyond int8multirange := int8multirange(int8range(p_after, NULL, '()'));
BEGIN
    EXECUTE format('INSERT INTO %1$I (group_id, seq, token, owner, holder, lanes, pending, expires_at, reclaims)
                    SELECT l.group_id, $3 + u.n - 1, u.token, l.owner, l.holder, CASE u.n WHEN 1 THEN l.lanes & ~$4 ELSE l.lanes & $4 END, l.pending * $5, l.expires_at, l.reclaims
                    FROM %1$I AS l, unnest($6) WITH ORDINALITY AS u(token, n) WHERE l.group_id = $1 AND l.seq = $2 AND u.n <= 2', 'consumer_lease_' || p_stream)
        USING p_group, p_seq, c.next_seq, p_lanes, beyond, p_tokens;
    EXECUTE format('UPDATE %I SET pending = pending - $3 WHERE group_id = $1 AND seq = $2', 'consumer_lease_' || p_stream)
        USING p_group, p_seq, beyond;
    c.next_seq := c.next_seq + 2;
END $$;

-- Exceptions that ended: 'ok', 'retry', 'dead', 'delay', or 'left', which was not run. A failure that is tried again takes back
-- those of its key that were claimed with it.
CREATE OR REPLACE FUNCTION settle_lane_exceptions(p_stream bigint, g consumer_group, p_tokens uuid[], p_ids bigint[], p_keys text[],
    p_outcomes text[], p_errors text[], p_delays double precision[]) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    exceptions text := 'exception_queue_' || p_stream;
    stopped    text[];
BEGIN
    PERFORM require_outcomes(p_outcomes, '{ok,retry,dead,delay,left}');
    IF g.transactional THEN
        -- What a handler has settled in its transaction is over, whatever is said of it.
        PERFORM end_settled(p_stream, g.id, p_tokens, p_ids);
    END IF;
    EXECUTE format('DELETE FROM %I AS e USING unnest($2, $3, $4) AS u(token, id, outcome)
                    WHERE e.group_id = $1 AND e.message_id = u.id AND e.lease_id = u.token AND u.outcome = ''ok''', exceptions)
        USING g.id, p_tokens, p_ids, p_outcomes;
    EXECUTE format(
        'UPDATE %1$I AS e SET
             state = CASE WHEN is_final(u.outcome, e.attempts, $1.max_attempts) THEN ''dead'' ELSE ''deferred'' END,
             attempts = e.attempts + (u.outcome IN (''retry'', ''dead''))::int,
             delays = e.delays + (u.outcome = ''delay'')::int,
             losses = CASE WHEN u.outcome = ''left'' THEN e.losses ELSE 0 END,
             due_at = CASE WHEN u.outcome = ''left'' OR is_final(u.outcome, e.attempts, $1.max_attempts) THEN $2
                           ELSE $2 + coalesce(asked_delay(u.delay), retry_delay($1, e.attempts + 1)) END,
             lease_id = NULL, lease_expires_at = NULL, owner = NULL,
             last_error = coalesce(error_text(u.error), e.last_error),
             history = CASE WHEN u.outcome IN (''delay'', ''left'') THEN e.history
                            ELSE add_history(e.history, e.attempts + 1,
                                             CASE WHEN is_final(u.outcome, e.attempts, $1.max_attempts) THEN ''dead'' ELSE ''retry'' END, u.error) END,
             dead_at = CASE WHEN is_final(u.outcome, e.attempts, $1.max_attempts) THEN $2 END
         FROM unnest($3, $4, $5, $6, $7) AS u(token, id, outcome, error, delay)
         WHERE e.group_id = $1.id AND e.message_id = u.id AND e.lease_id = u.token AND u.outcome <> ''ok''', exceptions)
        USING g, clock_timestamp(), p_tokens, p_ids, p_outcomes, p_errors, p_delays;
    SELECT array_agg(k) INTO stopped FROM unnest(p_keys, p_outcomes) AS u(k, o) WHERE o IN ('retry', 'delay') AND k IS NOT NULL;
    IF stopped IS NOT NULL THEN
        EXECUTE format('UPDATE %I SET state = ''deferred'', due_at = $4, lease_id = NULL, lease_expires_at = NULL
                        WHERE group_id = $1 AND lane >= 0 AND lease_id = ANY ($2) AND key = ANY ($3)', exceptions)
            USING g.id, p_tokens, stopped, clock_timestamp();
    END IF;
    -- Those without a key wait for nobody.
    EXECUTE format('UPDATE %I SET state = ''ready'' WHERE group_id = $1 AND message_id >= (SELECT min(i) FROM unnest($2) AS i) AND message_id = ANY ($2) AND key IS NULL AND state = ''deferred''', exceptions)
        USING g.id, p_ids;
    PERFORM promote(p_stream, g.id, p_keys);
END $$;

-- First deliveries that failed, of any of the holder's leases. What is pending of a key that is to be tried again becomes
-- deferred rows; what is done must have been taken out of pending before.
CREATE OR REPLACE FUNCTION fail_in_lanes(p_stream bigint, g consumer_group, p_seqs bigint[], p_tokens uuid[],
    p_failed_tokens uuid[], p_ids bigint[], p_outcomes text[], p_errors text[], p_delays double precision[]) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    l       record;
    taken   int8multirange;
    f       record;
    stopped text[];
    lowest  bigint := (SELECT min(i) FROM unnest(p_ids) AS i);
    highest bigint := (SELECT max(i) FROM unnest(p_ids) AS i);
    first   bigint := (SELECT min(s) FROM unnest(p_seqs) AS s);
BEGIN
    PERFORM require_outcomes(p_outcomes, '{retry,dead,delay}');
    FOR l IN EXECUTE format('SELECT l.seq, l.token, l.pending, l.lanes FROM unnest($2, $3) AS u(seq, token) JOIN %I AS l ON l.group_id = $1 AND l.seq >= $4 AND l.seq = ANY ($2) AND l.seq = u.seq AND l.token = u.token ORDER BY l.seq', 'consumer_lease_' || p_stream)
        USING g.id, p_seqs, p_tokens, first
    LOOP
        CONTINUE WHEN l.token <> ALL (p_failed_tokens);
        -- Only its own: leases of other lanes may be pending in the same range.
        SELECT range_agg(int8range(id, id, '[]')) AS among, array_agg(id) AS ids, array_agg(outcome) AS outcomes, array_agg(error) AS errors, array_agg(delay) AS delays INTO f
            FROM unnest(p_failed_tokens, p_ids, p_outcomes, p_errors, p_delays) AS u(token, id, outcome, error, delay) WHERE u.token = l.token;
        IF g.transactional THEN
            l.pending := l.pending - take_done(p_stream, g.id, l.pending * f.among, l.lanes);
        END IF;
        taken := record_failures(p_stream, g, l.pending, f.ids, f.outcomes, f.errors, f.delays, true);
        EXECUTE format('UPDATE %I SET pending = $3 WHERE group_id = $1 AND seq = $2', 'consumer_lease_' || p_stream) USING g.id, l.seq, l.pending - taken;
    END LOOP;

    EXECUTE format('SELECT array_agg(DISTINCT m.key) FROM unnest($1, $2) AS u(id, outcome) JOIN %I AS m ON m.id = u.id AND m.id >= $3 AND m.id <= $4
                    WHERE u.outcome <> ''dead'' AND m.key IS NOT NULL', 'message_log_' || p_stream)
        INTO stopped USING p_ids, p_outcomes, lowest, highest;
    IF stopped IS NULL THEN
        RETURN;
    END IF;
    FOR l IN EXECUTE format('SELECT l.seq, l.pending, l.lanes FROM unnest($2, $3) AS u(seq, token) JOIN %I AS l ON l.group_id = $1 AND l.seq >= $4 AND l.seq = ANY ($2) AND l.seq = u.seq AND l.token = u.token WHERE NOT isempty(l.pending) ORDER BY l.seq', 'consumer_lease_' || p_stream)
        USING g.id, p_seqs, p_tokens, first
    LOOP
        EXECUTE format(
            'WITH rows AS (
                 INSERT INTO %1$I (group_id, message_id, state, due_at, key, lane)
                 SELECT $1, id, ''deferred'', $5, key, lane_of(key, id) FROM %2$I
                 WHERE id >= lower($2) AND id < upper($2) AND $2 @> id AND key = ANY ($3) AND ($4 >> lane_of(key, id)) & 1 = 1 AND (%3$s)
                 RETURNING message_id)
             SELECT range_agg(int8range(message_id, message_id, ''[]'')) FROM rows', 'exception_queue_' || p_stream, 'message_log_' || p_stream,
            coalesce(binding_condition(g.id, lower(l.pending), upper(l.pending)), 'true'))
            INTO taken USING g.id, l.pending, stopped, l.lanes, clock_timestamp();
        IF taken IS NOT NULL THEN
            EXECUTE format('UPDATE %I SET pending = $3 WHERE group_id = $1 AND seq = $2', 'consumer_lease_' || p_stream) USING g.id, l.seq, l.pending - taken;
        END IF;
    END LOOP;
    -- One that has failed for good holds nobody up.
    PERFORM promote(p_stream, g.id, stopped);
END $$;

-- Takes what is finished out of the holder's leases; what remains is its for another lease_duration.
CREATE OR REPLACE FUNCTION take_done_in_lanes(p_stream bigint, g consumer_group, p_seqs bigint[], p_tokens uuid[], p_done int8multirange[]) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    first bigint := (SELECT min(s) FROM unnest(p_seqs) AS s);
    l     record;
BEGIN
    IF g.transactional THEN
        FOR l IN EXECUTE format('SELECT l.pending * u.done AS done, l.lanes FROM unnest($2, $3, $4) AS u(seq, token, done) JOIN %I AS l ON l.group_id = $1 AND l.seq >= $5 AND l.seq = ANY ($2) AND l.seq = u.seq AND l.token = u.token ORDER BY l.seq', 'consumer_lease_' || p_stream)
            USING g.id, p_seqs, p_tokens, p_done, first
        LOOP
            PERFORM take_done(p_stream, g.id, l.done, l.lanes);
        END LOOP;
    END IF;
    EXECUTE format('UPDATE %I AS l SET pending = l.pending - u.done FROM unnest($2, $3, $4) AS u(seq, token, done)
                    WHERE l.group_id = $1 AND l.seq >= $5 AND l.seq = ANY ($2) AND l.seq = u.seq AND l.token = u.token AND l.pending && u.done', 'consumer_lease_' || p_stream)
        USING g.id, p_seqs, p_tokens, p_done, first;
END $$;

-- Leases that are finished go; the others are the holder's for another lease_duration, also where nothing is left of them that it
-- knows of: it counts on them, and if it is lost, somebody has to make ready what comes next of their keys.
CREATE OR REPLACE FUNCTION renew_lanes(p_stream bigint, g consumer_group, p_owner bigint, p_seqs bigint[], p_tokens uuid[], p_finished boolean[]) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    first bigint := (SELECT min(s) FROM unnest(p_seqs) AS s);
BEGIN
    EXECUTE format(
        'DELETE FROM %1$I AS l USING unnest($2, $3, $4) AS u(seq, token, finished)
         WHERE l.group_id = $1 AND l.seq >= $5 AND l.seq = ANY ($2) AND l.seq = u.seq AND l.token = u.token AND isempty(l.pending) AND u.finished
           AND NOT EXISTS (SELECT FROM %2$I AS e WHERE e.group_id = $1 AND e.lease_id = u.token AND e.lane >= 0)', 'consumer_lease_' || p_stream, 'exception_queue_' || p_stream)
        USING g.id, p_seqs, p_tokens, p_finished, first;
    EXECUTE format('UPDATE %I AS l SET expires_at = $4, owner = $5 FROM unnest($2, $3) AS u(seq, token) WHERE l.group_id = $1 AND l.seq >= $6 AND l.seq = ANY ($2) AND l.seq = u.seq AND l.token = u.token', 'consumer_lease_' || p_stream)
        USING g.id, p_seqs, p_tokens, clock_timestamp() + g.lease_duration, p_owner, first;
END $$;

-- Others wait for lanes: leases of which little is left keep only those that they need. A handler may run for hours.
CREATE OR REPLACE FUNCTION free_lanes(p_stream bigint, p_group bigint, p_seqs bigint[], p_tokens uuid[]) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    EXECUTE format(
        'UPDATE %1$I AS l SET lanes = needed.lanes
         FROM (SELECT x.seq,
                      coalesce((SELECT bit_or(1::bigint << lane_of(m.key, m.id)) FROM unnest(x.pending) AS r
                                JOIN %2$I AS m ON m.id >= lower(r) AND m.id < upper(r) WHERE (x.lanes >> lane_of(m.key, m.id)) & 1 = 1), 0)
                    | coalesce((SELECT bit_or(1::bigint << e.lane) FROM %3$I AS e WHERE e.group_id = $1 AND e.lease_id = x.token AND e.lane >= 0), 0) AS lanes
               FROM unnest($2, $3) AS u(seq, token) JOIN %1$I AS x ON x.group_id = $1 AND x.seq >= $4 AND x.seq = ANY ($2) AND x.seq = u.seq AND x.token = u.token
               WHERE id_count(x.pending) <= 64) AS needed
         WHERE l.group_id = $1 AND l.seq >= $4 AND l.seq = needed.seq AND l.lanes <> needed.lanes AND needed.lanes <> 0',
        'consumer_lease_' || p_stream, 'message_log_' || p_stream, 'exception_queue_' || p_stream)
        USING p_group, p_seqs, p_tokens, (SELECT min(s) FROM unnest(p_seqs) AS s);
END $$;

-- Exceptions that were in flight under a lease whose holder was lost, or (p_lost false) that hands it back.
CREATE OR REPLACE FUNCTION put_back_lane_exceptions(p_stream bigint, g consumer_group, p_token uuid, p_lanes bigint, p_lost boolean) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    exceptions text := 'exception_queue_' || p_stream;
    back       record;
BEGIN
    EXECUTE format('SELECT array_agg(message_id) AS ids, array_agg(DISTINCT key) FILTER (WHERE key IS NOT NULL) AS keys FROM %I WHERE group_id = $1 AND lane >= 0 AND lease_id = $2', exceptions)
        INTO back USING g.id, p_token;
    IF back.ids IS NOT NULL THEN
        EXECUTE format(
            'UPDATE %1$I AS e SET
                 state = CASE WHEN n.final THEN ''dead'' WHEN e.key IS NULL THEN ''ready'' ELSE ''deferred'' END,
                 losses = e.losses + $4::int, attempts = n.attempts,
                 due_at = CASE WHEN n.counts AND NOT n.final THEN $3 + retry_delay($1, n.attempts) ELSE $3 END,
                 lease_id = NULL, lease_expires_at = NULL, owner = NULL,
                 last_error = CASE WHEN $4 THEN n.error ELSE e.last_error END,
                 history = CASE WHEN $4 THEN add_history(e.history, n.attempts, CASE WHEN n.final THEN ''dead'' ELSE ''lost'' END, n.error) ELSE e.history END,
                 dead_at = CASE WHEN n.final THEN $3 END
             FROM (SELECT message_id, $4 AND losses > 0 AS counts, attempts + ($4 AND losses > 0)::int AS attempts,
                          $4 AND losses > 0 AND attempts + 1 >= $1.max_attempts AS final,
                          CASE WHEN losses > 0 THEN ''the lease was lost while the message ran alone: its consumer died or hung''
                               ELSE ''the lease was lost: its consumer died or hung'' END AS error
                   FROM %1$I WHERE group_id = $1.id AND message_id >= (SELECT min(i) FROM unnest($2) AS i) AND message_id = ANY ($2)) AS n
             WHERE e.group_id = $1.id AND e.message_id = n.message_id', exceptions)
            USING g, back.ids, clock_timestamp(), p_lost;
        PERFORM promote(p_stream, g.id, back.keys);
    END IF;
    IF g.transactional THEN
        -- The head of a key may have been settled by its handler, with nobody left to tell.
        EXECUTE format('SELECT array_agg(DISTINCT key) FROM %I WHERE group_id = $1 AND lane = ANY ($2) AND state = ''deferred'' AND key IS NOT NULL', exceptions)
            INTO back.keys USING g.id, ARRAY(SELECT i::smallint FROM generate_series(0, 63) AS i WHERE (p_lanes >> i) & 1 = 1);
        PERFORM promote(p_stream, g.id, back.keys);
    END IF;
END $$;
