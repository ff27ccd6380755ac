-- The exception queue: one row per message of a group that failed, through its whole life. See the state table in
-- docs/exceptions.md.

-- Claims up to p_limit exceptions that are due, as one batch under p_token, and returns them with their messages.
-- With p_suspect it claims one suspect instead: a message whose process died while holding it, which is run alone.
--
-- Under a held snapshot the rows claimed and settled before stay in the index, all with an earlier due_at. Callers that
-- claim often pass p_due_from, the smallest due_at they got last less a second, and every few seconds -infinity: every way
-- to ready sets due_at >= clock_timestamp(), so nothing hides below for long.
CREATE OR REPLACE FUNCTION claim_exceptions(p_stream bigint, p_group bigint, p_token uuid, p_limit bigint, p_suspect boolean, p_due_from timestamptz, p_type anyelement)
RETURNS TABLE (id bigint, key text, routing_key text, headers jsonb, produced_at timestamptz, payload anyelement,
               attempts int, delays int, first_failed_at timestamptz, due_at timestamptz, lease_duration interval)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off AS $$
#variable_conflict use_column
DECLARE
    g       consumer_group;
    queue   text := 'exception_queue_' || p_stream;
    started timestamptz;
    ids     bigint[];
BEGIN
    PERFORM require_read_committed();
    g := require_group(p_stream, p_group);
    PERFORM reclaim_exceptions(p_stream, g);
    -- In a variable: in the query itself it would be a filter, not a bound of the index scan. Taken after the
    -- reclaim, whose rows are due at its own clock, so that this call can hand them out.
    started := clock_timestamp();
    EXECUTE format(
        'WITH due AS (
             SELECT message_id FROM %1$I
             WHERE group_id = $1 AND state = ''ready'' AND (losses > 0) = $2 AND due_at <= $3 AND due_at >= $4
             ORDER BY due_at LIMIT $5 FOR UPDATE SKIP LOCKED),
         taken AS (
             UPDATE %1$I AS e SET state = ''inflight'', lease_id = $6, lease_expires_at = $7
             FROM due WHERE e.group_id = $1 AND e.message_id = due.message_id
             RETURNING e.message_id)
         SELECT array_agg(message_id) FROM taken', queue)
        INTO ids
        USING p_group, p_suspect, started, coalesce(p_due_from, '-infinity'), CASE WHEN p_suspect THEN 1 ELSE p_limit END,
              p_token, started + g.lease_duration;
    IF ids IS NULL THEN
        RETURN;
    END IF;
    RETURN QUERY EXECUTE format(
        'SELECT m.id, m.key, m.routing_key, m.headers, m.produced_at, m.payload, e.attempts, e.delays, e.first_failed_at, e.due_at, $4
         FROM unnest($2) AS u(id)
         JOIN %I AS e ON e.group_id = $1 AND e.message_id = u.id
         JOIN %I AS m ON m.id = u.id AND m.id >= $3 AND m.id <= $5
         ORDER BY m.id', queue, 'message_log_' || p_stream)
        USING p_group, ids, (SELECT min(i) FROM unnest(ids) AS i), g.lease_duration, (SELECT max(i) FROM unnest(ids) AS i);
END $$;

-- Exceptions whose lease ran out can be claimed again, as suspects. A lost lease is not an attempt, unless the message
-- was alone in it: then nothing else can have killed the process.
CREATE OR REPLACE FUNCTION reclaim_exceptions(p_stream bigint, g consumer_group) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    started timestamptz := clock_timestamp();
    lapsed  bigint[];
BEGIN
    EXECUTE format(
        'SELECT array_agg(message_id) FROM (
             SELECT message_id FROM %I WHERE group_id = $1 AND state = ''inflight'' AND lease_expires_at <= $2
             ORDER BY lease_expires_at LIMIT 1000 FOR UPDATE SKIP LOCKED) AS x', 'exception_queue_' || p_stream)
        INTO lapsed USING g.id, started;
    IF lapsed IS NULL THEN
        RETURN;
    END IF;
    EXECUTE format(
        'UPDATE %I AS e SET
             state = CASE WHEN n.final THEN ''dead'' ELSE ''ready'' END,
             losses = e.losses + 1,
             attempts = n.attempts,
             due_at = CASE WHEN n.counts THEN $3 + retry_delay($1, n.attempts) ELSE $3 END,
             lease_id = NULL, lease_expires_at = NULL,
             last_error = n.error,
             history = add_history(e.history, n.attempts, CASE WHEN n.final THEN ''dead'' ELSE ''lost'' END, n.error),
             dead_at = CASE WHEN n.final THEN $3 END
         FROM (SELECT message_id, losses > 0 AS counts, attempts + (losses > 0)::int AS attempts,
                      losses > 0 AND attempts + 1 >= $1.max_attempts AS final,
                      CASE WHEN losses > 0 THEN ''the lease was lost while the message ran alone: its consumer died or hung''
                           ELSE ''the lease was lost: its consumer died or hung'' END AS error
               FROM %1$I WHERE group_id = $1.id AND message_id = ANY ($2)) AS n
         WHERE e.group_id = $1.id AND e.message_id = n.message_id', 'exception_queue_' || p_stream)
        USING g, lapsed, started;
END $$;

-- Records the outcomes of claimed exceptions: 'ok' (the row goes), 'retry', 'dead' or 'delay'. Returns the ids whose
-- lease was lost; nothing about those is recorded.
CREATE OR REPLACE FUNCTION settle_exceptions(p_stream bigint, p_group bigint, p_tokens uuid[], p_ids bigint[],
    p_outcomes text[], p_errors text[], p_delays double precision[] DEFAULT '{}') RETURNS bigint[]
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off AS $$
DECLARE
    g       consumer_group;
    started timestamptz := clock_timestamp();
    held    bigint[];
BEGIN
    PERFORM require_read_committed();
    PERFORM require_outcomes(p_outcomes, '{ok,retry,dead,delay}');
    g := require_group(p_stream, p_group);
    held := lock_exceptions(p_stream, p_group, p_tokens, p_ids);
    EXECUTE format('DELETE FROM %I WHERE group_id = $1 AND message_id = ANY ($2)', 'exception_queue_' || p_stream)
        USING p_group, (SELECT array_agg(u.id) FROM unnest(p_ids, p_outcomes) AS u(id, outcome) WHERE u.outcome = 'ok' AND u.id = ANY (held));
    IF EXISTS (SELECT FROM unnest(p_outcomes) AS o WHERE o <> 'ok') THEN
        EXECUTE format(
            'UPDATE %I AS e SET
                 state = CASE WHEN n.final THEN ''dead'' ELSE ''ready'' END,
                 attempts = n.attempts,
                 delays = e.delays + (n.outcome = ''delay'')::int,
                 -- It ran to its end, so whatever killed its process before, it was not this message.
                 losses = 0,
                 due_at = CASE WHEN n.final THEN $3 ELSE $3 + coalesce(asked_delay(n.delay), retry_delay($1, n.attempts)) END,
                 lease_id = NULL, lease_expires_at = NULL,
                 last_error = coalesce(error_text(n.error), e.last_error),
                 history = CASE WHEN n.outcome = ''delay'' THEN e.history
                                ELSE add_history(e.history, n.attempts, CASE WHEN n.final THEN ''dead'' ELSE ''retry'' END, n.error) END,
                 dead_at = CASE WHEN n.final THEN $3 END
             FROM (SELECT u.id, u.outcome, u.error, u.delay, x.attempts + (u.outcome <> ''delay'')::int AS attempts,
                          u.outcome = ''dead'' OR u.outcome = ''retry'' AND x.attempts + 1 >= $1.max_attempts AS final
                   FROM unnest($4, $5, $6, $7) AS u(id, outcome, error, delay)
                   JOIN %1$I AS x ON x.group_id = $1.id AND x.message_id = u.id
                   WHERE u.outcome <> ''ok'' AND u.id = ANY ($2)) AS n
             WHERE e.group_id = $1.id AND e.message_id = n.id', 'exception_queue_' || p_stream)
            USING g, held, started, p_ids, p_outcomes, p_errors, p_delays;
    END IF;
    RETURN ARRAY(SELECT u FROM unnest(p_ids) AS u WHERE u <> ALL (held));
END $$;

-- Locks those of the exceptions that are still leased under the token named for them, by primary key and in its order.
CREATE OR REPLACE FUNCTION lock_exceptions(p_stream bigint, p_group bigint, p_tokens uuid[], p_ids bigint[]) RETURNS bigint[]
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    held bigint[];
BEGIN
    EXECUTE format(
        'SELECT coalesce(array_agg(message_id), ''{}'') FROM (
             SELECT e.message_id FROM unnest($2, $3) AS u(token, id)
             JOIN %I AS e ON e.group_id = $1 AND e.message_id = u.id
             WHERE e.state = ''inflight'' AND e.lease_id = u.token
             ORDER BY e.message_id FOR UPDATE OF e) AS x', 'exception_queue_' || p_stream)
        INTO held USING p_group, p_tokens, p_ids;
    RETURN held;
END $$;

-- The heartbeat of claimed exceptions. Returns the ids whose lease was lost.
CREATE OR REPLACE FUNCTION extend_exceptions(p_stream bigint, p_group bigint, p_tokens uuid[], p_ids bigint[]) RETURNS bigint[]
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off AS $$
DECLARE
    g    consumer_group;
    held bigint[];
BEGIN
    PERFORM require_read_committed();
    g := require_group(p_stream, p_group);
    held := lock_exceptions(p_stream, p_group, p_tokens, p_ids);
    EXECUTE format('UPDATE %I SET lease_expires_at = $3 WHERE group_id = $1 AND message_id = ANY ($2)', 'exception_queue_' || p_stream)
        USING p_group, held, clock_timestamp() + g.lease_duration;
    RETURN ARRAY(SELECT u FROM unnest(p_ids) AS u WHERE u <> ALL (held));
END $$;

-- Hands claimed exceptions back unfinished: due at once, no attempt counted.
CREATE OR REPLACE FUNCTION release_exceptions(p_stream bigint, p_group bigint, p_tokens uuid[], p_ids bigint[]) RETURNS bigint[]
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off AS $$
DECLARE
    held bigint[];
BEGIN
    PERFORM require_read_committed();
    PERFORM require_group(p_stream, p_group);
    held := lock_exceptions(p_stream, p_group, p_tokens, p_ids);
    EXECUTE format('UPDATE %I SET state = ''ready'', due_at = clock_timestamp(), lease_id = NULL, lease_expires_at = NULL WHERE group_id = $1 AND message_id = ANY ($2)',
                   'exception_queue_' || p_stream)
        USING p_group, held;
    RETURN ARRAY(SELECT u FROM unnest(p_ids) AS u WHERE u <> ALL (held));
END $$;
