-- The exception queue: one row per message of a group that failed, through its whole life. See the state table in
-- docs/exceptions.md.

-- Claims up to p_limit exceptions that are due, as one batch under p_token. With p_suspect it claims one suspect instead: a
-- message whose process died while holding it, which is run alone. Their messages are read by fetch_messages.
--
-- Under a held snapshot the rows claimed and settled before stay in the index, all with an earlier due_at. Callers that
-- claim often pass p_due_from, the smallest due_at they got last less a second, and every few seconds -infinity: every way
-- to ready sets due_at >= clock_timestamp(), so nothing hides below for long. With a bound only leases that ran out in
-- the last second are looked for, too: the rows that were in flight before lie dead below that.
--
-- In a fair group they are of these lanes, of each about as many; suspects, of which each process runs one at a time, are of any.
CREATE OR REPLACE FUNCTION take_exceptions(p_stream bigint, p_group bigint, p_token uuid, p_limit bigint, p_suspect boolean, p_due_from timestamptz, p_owner bigint DEFAULT NULL, p_lanes bigint DEFAULT -1)
RETURNS TABLE (id bigint, attempts int, delays int, first_failed_at timestamptz, due_at timestamptz, lease_duration interval, lane smallint)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    g       consumer_group;
    c       group_cursor;
    started timestamptz;
    room    bigint := CASE WHEN p_suspect THEN least(p_limit, 1) ELSE p_limit END;
    taken   int;
    chosen  bigint[];
    due     text := 'SELECT message_id FROM %1$I
             WHERE group_id = $1 AND state = ''ready'' AND losses %2$s 0 AND due_at <= $2 AND due_at >= $3
             ORDER BY due_at LIMIT $4 FOR UPDATE SKIP LOCKED';
BEGIN
    PERFORM require_read_committed();
    g := require_group(p_stream, p_group);
    PERFORM require_mode(g, 'parallel');
    IF g.paused OR g.max_in_flight IS NOT NULL OR g.rate_limit IS NOT NULL THEN
        -- Limits are kept under the cursor's lock; only groups that have one wait for it here.
        c := lock_cursor(p_stream, p_group);
        g := require_group(p_stream, p_group);
        room := (allowance(p_stream, g, c, room)).room;
        IF room = 0 THEN
            RETURN;
        END IF;
    END IF;
    PERFORM reclaim_exceptions(p_stream, g, p_due_from);
    -- In a variable: in the query itself it would be a filter, not a bound of the index scan. Taken after the
    -- reclaim, whose rows are due at its own clock, so that this call can hand them out.
    started := clock_timestamp();
    IF g.mode = 'fair' AND NOT p_suspect THEN
        chosen := due_in_turn(p_stream, p_group, coalesce(p_lanes, -1), room, coalesce(p_due_from, '-infinity'), started);
        due := 'SELECT unnest($9) AS message_id';
    END IF;
    RETURN QUERY EXECUTE format(
        'WITH due AS (' || due || ')
         UPDATE %1$I AS e SET state = ''inflight'', lease_id = $5, lease_expires_at = $6, owner = $8
         FROM due WHERE e.group_id = $1 AND e.message_id = due.message_id
         RETURNING e.message_id, e.attempts, e.delays, e.first_failed_at, e.due_at, $7, e.lane',
        'exception_queue_' || p_stream, CASE WHEN p_suspect THEN '>' ELSE '=' END)
        USING p_group, started, coalesce(p_due_from, '-infinity'), room,
              p_token, started + g.lease_duration, g.lease_duration, p_owner, chosen;
    GET DIAGNOSTICS taken = ROW_COUNT;
    IF g.rate_limit IS NOT NULL AND taken > 0 THEN
        c.paced_until := spend(g, c.paced_until, taken);
        PERFORM save_cursor(p_stream, p_group, c);
    END IF;
END $$;

-- Both in one call, for clients that know their payloads to be small. What has expired or is superseded is settled.
CREATE OR REPLACE FUNCTION claim_exceptions(p_stream bigint, p_group bigint, p_token uuid, p_limit bigint, p_suspect boolean, p_due_from timestamptz, p_type anyelement)
RETURNS TABLE (id bigint, key text, routing_key text, headers jsonb, produced_at timestamptz, payload anyelement,
               attempts int, delays int, first_failed_at timestamptz, due_at timestamptz, lease_duration interval)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
    taken   record;
    m       record;
    over    bigint[] := '{}';
    expired bigint := 0;
BEGIN
    -- Once, and by id from here on: among what is in flight the dead entries of all that ever was are found as well.
    SELECT array_agg(t.id) AS ids, array_agg(t.attempts) AS attempts, array_agg(t.delays) AS delays, array_agg(t.first_failed_at) AS first_failed_at,
           array_agg(t.due_at) AS due_at, min(t.lease_duration) AS lease_duration
        INTO taken FROM take_exceptions(p_stream, p_group, p_token, p_limit, p_suspect, p_due_from) AS t;
    -- Each is judged once: what is handed out is not settled, whatever the clock says by then.
    FOR m IN
        SELECT f.*, t.attempts, t.delays, t.first_failed_at, t.due_at
        FROM fetch_messages(p_stream, taken.ids, 9223372036854775807, p_type, p_group) AS f
        JOIN unnest(taken.ids, taken.attempts, taken.delays, taken.first_failed_at, taken.due_at) AS t(id, attempts, delays, first_failed_at, due_at) ON t.id = f.id
        ORDER BY f.id
    LOOP
        IF m.superseded OR m.remaining <= '0' THEN
            over := over || m.id;
            expired := expired + CASE WHEN m.remaining <= '0' THEN 1 ELSE 0 END;
        ELSE
            id := m.id;
            key := m.key;
            routing_key := m.routing_key;
            headers := m.headers;
            produced_at := m.produced_at;
            payload := m.payload;
            attempts := m.attempts;
            delays := m.delays;
            first_failed_at := m.first_failed_at;
            due_at := m.due_at;
            lease_duration := taken.lease_duration;
            RETURN NEXT;
        END IF;
    END LOOP;
    IF over <> '{}' THEN
        PERFORM settle_exceptions(p_stream, p_group, array_fill(p_token, ARRAY[cardinality(over)]), over,
                                  array_fill('ok'::text, ARRAY[cardinality(over)]), array_fill(NULL::text, ARRAY[cardinality(over)]));
        PERFORM count_passed_over(p_stream, p_group, expired, cardinality(over) - expired);
    END IF;
END $$;

-- From when on a caller that bounds its look at the due exceptions looks for leases that ran out.
CREATE OR REPLACE FUNCTION lapsed_since(p_now timestamptz, p_due_from timestamptz) RETURNS timestamptz
LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN p_due_from > '-infinity' THEN p_now - interval '1 second' ELSE '-infinity' END
$$;

-- Exceptions whose lease ran out can be claimed again, as suspects. A lost lease is not an attempt, unless the message
-- was alone in it: then nothing else can have killed the process.
CREATE OR REPLACE FUNCTION reclaim_exceptions(p_stream bigint, g consumer_group, p_due_from timestamptz) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    started timestamptz := clock_timestamp();
    since   timestamptz := lapsed_since(started, p_due_from);
    lapsed  bigint[];
BEGIN
    EXECUTE format(
        'SELECT array_agg(message_id) FROM (
             SELECT message_id FROM %I WHERE group_id = $1 AND state = ''inflight'' AND lease_expires_at <= $2 AND lease_expires_at >= $3
             ORDER BY lease_expires_at LIMIT 1000 FOR UPDATE SKIP LOCKED) AS x', 'exception_queue_' || p_stream)
        INTO lapsed USING g.id, started, since;
    IF lapsed IS NULL THEN
        RETURN;
    END IF;
    EXECUTE format(
        'UPDATE %I AS e SET
             state = CASE WHEN n.final THEN ''dead'' ELSE ''ready'' END,
             losses = e.losses + 1,
             attempts = n.attempts,
             due_at = CASE WHEN n.counts THEN $3 + retry_delay($1, n.attempts) ELSE $3 END,
             lease_id = NULL, lease_expires_at = NULL, owner = NULL,
             last_error = n.error,
             history = add_history(e.history, n.attempts, CASE WHEN n.final THEN ''dead'' ELSE ''lost'' END, n.error),
             dead_at = CASE WHEN n.final THEN $3 END
         FROM (SELECT message_id, losses > 0 AS counts, attempts + (losses > 0)::int AS attempts,
                      losses > 0 AND attempts + 1 >= $1.max_attempts AS final,
                      CASE WHEN losses > 0 THEN ''the lease was lost while the message ran alone: its consumer died or hung''
                           ELSE ''the lease was lost: its consumer died or hung'' END AS error
               FROM %1$I WHERE group_id = $1.id AND message_id >= (SELECT min(i) FROM unnest($2) AS i) AND message_id = ANY ($2)) AS n
         WHERE e.group_id = $1.id AND e.message_id = n.message_id', 'exception_queue_' || p_stream)
        USING g, lapsed, started;
END $$;

-- Locks claimed exceptions, lowest id first. Whoever changes several of them and waits for locks takes them in this order.
CREATE OR REPLACE FUNCTION lock_exceptions(p_stream bigint, p_group bigint, p_tokens uuid[], p_ids bigint[]) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    EXECUTE format(
        'SELECT count(*) FROM (SELECT FROM unnest($2, $3) AS u(token, id)
                               JOIN %I AS e ON e.group_id = $1 AND e.message_id = u.id AND e.lease_id = u.token
                               ORDER BY e.message_id FOR UPDATE OF e) AS x', 'exception_queue_' || p_stream)
        USING p_group, p_tokens, p_ids;
END $$;

-- Records the outcomes of claimed exceptions: 'ok' (the row goes), 'retry', 'dead' or 'delay'. Returns the ids whose
-- lease was lost; nothing about those is recorded.
--
-- lease_id is set in state 'inflight' only (a CHECK says so), and the state is not asked for: the partial index on it
-- would then seem attractive, and it holds the dead entries of every row that has ever been in flight.
CREATE OR REPLACE FUNCTION settle_exceptions(p_stream bigint, p_group bigint, p_tokens uuid[], p_ids bigint[],
    p_outcomes text[], p_errors text[], p_delays double precision[] DEFAULT '{}') RETURNS bigint[]
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
DECLARE
    g       consumer_group;
    handled bigint[];
    failed  bigint[];
BEGIN
    PERFORM require_read_committed();
    PERFORM require_outcomes(p_outcomes, '{ok,retry,dead,delay}');
    g := require_group(p_stream, p_group);
    PERFORM lock_exceptions(p_stream, p_group, p_tokens, p_ids);
    EXECUTE format(
        'WITH gone AS (
             DELETE FROM %I AS e USING unnest($2, $3, $4) AS u(token, id, outcome)
             WHERE e.group_id = $1 AND e.message_id = u.id AND e.lease_id = u.token AND u.outcome = ''ok''
             RETURNING e.message_id)
         SELECT array_agg(message_id) FROM gone', 'exception_queue_' || p_stream)
        INTO handled USING p_group, p_tokens, p_ids, p_outcomes;
    IF EXISTS (SELECT FROM unnest(p_outcomes) AS o WHERE o <> 'ok') THEN
        IF g.transactional THEN
            handled := handled || end_settled(p_stream, p_group, p_tokens, p_ids);
        END IF;
        EXECUTE format(
            'WITH kept AS (
                 UPDATE %I AS e SET
                     state = CASE WHEN is_final(u.outcome, e.attempts, $1.max_attempts) THEN ''dead'' ELSE ''ready'' END,
                     attempts = e.attempts + (u.outcome <> ''delay'')::int,
                     delays = e.delays + (u.outcome = ''delay'')::int,
                     -- It ran to its end: whatever killed its process before, it was not this message.
                     losses = 0,
                     due_at = CASE WHEN is_final(u.outcome, e.attempts, $1.max_attempts) THEN $2
                                   ELSE $2 + coalesce(asked_delay(u.delay), retry_delay($1, e.attempts + 1)) END,
                     lease_id = NULL, lease_expires_at = NULL, owner = NULL,
                     last_error = coalesce(error_text(u.error), e.last_error),
                     history = CASE WHEN u.outcome = ''delay'' THEN e.history
                                    ELSE add_history(e.history, e.attempts + 1,
                                                     CASE WHEN is_final(u.outcome, e.attempts, $1.max_attempts) THEN ''dead'' ELSE ''retry'' END, u.error) END,
                     dead_at = CASE WHEN is_final(u.outcome, e.attempts, $1.max_attempts) THEN $2 END
                 FROM unnest($3, $4, $5, $6, $7) AS u(token, id, outcome, error, delay)
                 WHERE e.group_id = $1.id AND e.message_id = u.id AND e.lease_id = u.token AND u.outcome <> ''ok''
                 RETURNING e.message_id)
             SELECT array_agg(message_id) FROM kept', 'exception_queue_' || p_stream)
            INTO failed USING g, clock_timestamp(), p_tokens, p_ids, p_outcomes, p_errors, p_delays;
    END IF;
    RETURN ARRAY(SELECT unnest(p_ids) EXCEPT SELECT unnest(handled || failed));
END $$;

-- The heartbeat of claimed exceptions. Returns the ids whose lease was lost. A row that is locked is being settled in its
-- handler's transaction: it is not waited for.
CREATE OR REPLACE FUNCTION extend_exceptions(p_stream bigint, p_group bigint, p_tokens uuid[], p_ids bigint[], p_owner bigint DEFAULT NULL) RETURNS bigint[]
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
DECLARE
    g    consumer_group;
    held bigint[];
BEGIN
    PERFORM require_read_committed();
    g := require_group(p_stream, p_group);
    EXECUTE format(
        'WITH held AS (
             SELECT e.message_id FROM unnest($2, $3) AS u(token, id)
             JOIN %1$I AS e ON e.group_id = $1 AND e.message_id = u.id AND e.lease_id = u.token
             ORDER BY e.message_id FOR UPDATE OF e SKIP LOCKED)
         UPDATE %1$I AS e SET lease_expires_at = $4, owner = $5 FROM held WHERE e.group_id = $1 AND e.message_id = held.message_id',
        'exception_queue_' || p_stream)
        USING p_group, p_tokens, p_ids, clock_timestamp() + g.lease_duration, p_owner;
    EXECUTE format(
        'SELECT array_agg(u.id) FROM unnest($2, $3) AS u(token, id)
         JOIN %I AS e ON e.group_id = $1 AND e.message_id = u.id AND e.lease_id = u.token', 'exception_queue_' || p_stream)
        INTO held USING p_group, p_tokens, p_ids;
    RETURN ARRAY(SELECT unnest(p_ids) EXCEPT SELECT unnest(held));
END $$;

-- Hands claimed exceptions back unfinished: due at once, no attempt counted. Returns the ids whose lease was lost before.
CREATE OR REPLACE FUNCTION release_exceptions(p_stream bigint, p_group bigint, p_tokens uuid[], p_ids bigint[]) RETURNS bigint[]
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
DECLARE
    held bigint[];
BEGIN
    PERFORM require_read_committed();
    PERFORM require_group(p_stream, p_group);
    PERFORM lock_exceptions(p_stream, p_group, p_tokens, p_ids);
    EXECUTE format(
        'WITH held AS (
             UPDATE %I AS e SET state = ''ready'', due_at = clock_timestamp(), lease_id = NULL, lease_expires_at = NULL, owner = NULL
             FROM unnest($2, $3) AS u(token, id)
             WHERE e.group_id = $1 AND e.message_id = u.id AND e.lease_id = u.token
             RETURNING e.message_id)
         SELECT array_agg(message_id) FROM held', 'exception_queue_' || p_stream)
        INTO held USING p_group, p_tokens, p_ids;
    RETURN ARRAY(SELECT unnest(p_ids) EXCEPT SELECT unnest(held));
END $$;
