-- Leases: ranges of the log that a consumer works on. An id is in exactly one place: above the cursor, in one lease's
-- pending, in one row of the exception queue, or resolved. Whatever turns it into an exception row takes it out of
-- pending in the same transaction; the exception queue's primary key catches a violation.

-- Locks the lease that p_token proves. p_seq says where it lies; a lease that was moved (extend) is looked for by its
-- token. A lease that is not the caller's any more comes back as NULLs.
CREATE OR REPLACE FUNCTION lock_lease(p_stream bigint, p_group bigint, p_seq bigint, p_token uuid) RETURNS group_lease
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    l group_lease;
BEGIN
    EXECUTE format('SELECT seq, token, pending, lanes FROM %I WHERE group_id = $1 AND seq = $2 AND token = $3 FOR UPDATE', 'consumer_lease_' || p_stream)
        INTO l USING p_group, p_seq, p_token;
    IF l.seq IS NULL THEN
        EXECUTE format('SELECT seq, token, pending, lanes FROM %I WHERE group_id = $1 AND seq >= $2 AND token = $3 ORDER BY seq DESC LIMIT 1 FOR UPDATE',
                       'consumer_lease_' || p_stream)
            INTO l USING p_group, (peek_cursor(p_stream, p_group)).first_open, p_token;
    END IF;
    RETURN l;
END $$;

-- Moves a lease up. Readers of leases start at the lowest open one and walk every dead row above it, so one that lives long is moved from
-- time to time; its token stays. The caller has the cursor's lock.
CREATE OR REPLACE FUNCTION move_lease(p_stream bigint, p_group bigint, p_seq bigint, INOUT c group_cursor)
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    EXECUTE format('WITH moved AS (DELETE FROM %1$I WHERE group_id = $1 AND seq = $2 RETURNING *)
                    INSERT INTO %1$I (group_id, seq, token, owner, holder, lanes, replay, pending, expires_at, reclaims)
                    SELECT group_id, $3, token, owner, holder, lanes, replay, pending, expires_at, reclaims FROM moved', 'consumer_lease_' || p_stream)
        USING p_group, p_seq, c.next_seq;
    c.next_seq := c.next_seq + 1;
END $$;

-- Takes p_done out of a lease, and makes exception rows of those of p_ids that are pending in it. What remains is leased
-- for another lease_duration and belongs to p_owner. Returns the seq the lease has (or had, when nothing remains); NULL when the lease is not
-- the caller's any more: then nothing is changed.
CREATE OR REPLACE FUNCTION settle_lease(p_stream bigint, g consumer_group, p_owner bigint, p_seq bigint, p_token uuid, p_done int8multirange,
    p_ids bigint[] DEFAULT NULL, p_outcomes text[] DEFAULT NULL, p_errors text[] DEFAULT NULL, p_delays double precision[] DEFAULT NULL)
RETURNS bigint
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    l    group_lease;
    hits int;
BEGIN
    IF p_ids IS NULL AND NOT g.transactional THEN
        -- The usual case, everything done, in one statement.
        EXECUTE format('DELETE FROM %I WHERE group_id = $1 AND seq = $2 AND token = $3 AND pending <@ $4', 'consumer_lease_' || p_stream)
            USING g.id, p_seq, p_token, p_done;
        GET DIAGNOSTICS hits = ROW_COUNT;
        IF hits > 0 THEN
            RETURN p_seq;
        END IF;
    END IF;

    l := lock_lease(p_stream, g.id, p_seq, p_token);
    IF l.seq IS NULL THEN
        RETURN NULL;
    END IF;
    IF p_ids IS NOT NULL THEN
        IF g.transactional THEN
            -- What a handler that had lost it has settled all the same did not fail.
            l.pending := l.pending - take_done(p_stream, g.id, l.pending * (SELECT range_agg(int8range(id, id, '[]')) FROM unnest(p_ids) AS id), l.lanes);
        END IF;
        l.pending := l.pending - record_failures(p_stream, g, l.pending, p_ids, p_outcomes, p_errors, p_delays);
    END IF;
    IF g.transactional THEN
        PERFORM take_done(p_stream, g.id, l.pending * p_done, l.lanes);
    END IF;
    l.pending := l.pending - p_done;
    IF isempty(l.pending) THEN
        EXECUTE format('DELETE FROM %I WHERE group_id = $1 AND seq = $2', 'consumer_lease_' || p_stream) USING g.id, l.seq;
    ELSE
        EXECUTE format('UPDATE %I SET pending = $3, expires_at = $4, owner = $5 WHERE group_id = $1 AND seq = $2', 'consumer_lease_' || p_stream)
            USING g.id, l.seq, l.pending, clock_timestamp() + g.lease_duration, p_owner;
    END IF;
    RETURN l.seq;
END $$;

-- Makes exception rows of first deliveries that failed, as far as p_pending holds them. Returns the ids it took.
CREATE OR REPLACE FUNCTION record_failures(p_stream bigint, g consumer_group, p_pending int8multirange,
    p_ids bigint[], p_outcomes text[], p_errors text[], p_delays double precision[], p_ordered boolean DEFAULT false)
RETURNS int8multirange
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    taken   int8multirange;
    lowest  bigint;
    highest bigint;
    started timestamptz := clock_timestamp();
BEGIN
    SELECT range_agg(int8range(id, id, '[]')), min(id), max(id) INTO taken, lowest, highest
        FROM unnest(p_ids) AS id WHERE p_pending @> id;
    IF taken IS NULL THEN
        RETURN '{}';
    END IF;
    -- The bounds keep the other partitions out of the plan. LEFT JOIN: a failure is recorded even if its message is gone.
    EXECUTE format(
        'INSERT INTO %I (group_id, message_id, state, attempts, delays, due_at, key, lane, last_error, history, first_failed_at, dead_at)
         SELECT $1.id, f.id,
                CASE WHEN f.final THEN ''dead'' WHEN $10 AND m.key IS NOT NULL THEN ''deferred'' ELSE ''ready'' END,
                CASE WHEN f.outcome = ''delay'' THEN 0 ELSE 1 END,
                CASE WHEN f.outcome = ''delay'' THEN 1 ELSE 0 END,
                CASE WHEN f.final THEN $8 ELSE $8 + coalesce(asked_delay(f.delay), retry_delay($1, 1)) END,
                m.key, CASE WHEN $1.mode <> ''parallel'' THEN lane_of(m.key, f.id) END, error_text(f.error),
                CASE WHEN f.outcome = ''delay'' THEN ''[]'' ELSE add_history(''[]'', 1, CASE WHEN f.final THEN ''dead'' ELSE f.outcome END, f.error) END,
                $8,
                CASE WHEN f.final THEN $8 END
         FROM (SELECT DISTINCT ON (id) id, outcome, error, delay, is_final(outcome, 0, $1.max_attempts) AS final
               FROM unnest($3, $4, $5, $6) AS u(id, outcome, error, delay)
               WHERE $2 @> id) AS f
         LEFT JOIN %I AS m ON m.id = f.id AND m.id >= $7 AND m.id <= $9',
        'exception_queue_' || p_stream, 'message_log_' || p_stream)
        USING g, taken, p_ids, p_outcomes, p_errors, p_delays, lowest, started, highest, p_ordered;
    RETURN taken;
END $$;

-- Refuses outcomes that do not exist before anything is changed.
CREATE OR REPLACE FUNCTION require_outcomes(p_outcomes text[], p_allowed text[]) RETURNS void
LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    wrong text := (SELECT coalesce(o, 'NULL') FROM unnest(p_outcomes) AS o WHERE o IS NULL OR o <> ALL (p_allowed) LIMIT 1);
BEGIN
    IF wrong IS NOT NULL THEN
        RAISE EXCEPTION 'unknown outcome %', wrong
            USING ERRCODE = 'SQ004', HINT = format('An outcome is one of %s.', array_to_string(p_allowed, ', '));
    END IF;
END $$;
