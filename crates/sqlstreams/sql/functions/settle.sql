-- The steps of advance one by one, for clients that do not need them in one call.

-- Claims up to p_limit messages and returns them, all under the same lease; those that have expired are left out. In a group with
-- bindings, or a fair one, it looks for a tenth of a second at most: that there are no rows does not say that there is nothing beyond.
CREATE OR REPLACE FUNCTION claim(p_stream bigint, p_group bigint, p_limit bigint, p_type anyelement)
RETURNS TABLE (seq bigint, token uuid, id bigint, key text, routing_key text, headers jsonb, produced_at timestamptz, payload anyelement)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
    a       record;
    started timestamptz := clock_timestamp();
BEGIN
    LOOP
        SELECT * INTO a FROM advance(p_stream, p_group, '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', p_limit) AS a;
        EXIT WHEN a.token IS NOT NULL OR coalesce(a.looked_at, 0) = 0 OR clock_timestamp() > started + interval '100 milliseconds';
    END LOOP;
    RETURN QUERY
        SELECT a.seq, a.token, f.id, f.key, f.routing_key, f.headers, f.produced_at, f.payload
        FROM "fetch"(p_stream, p_group, a.token, 0, p_limit, 9223372036854775807, p_type) AS f WHERE f.remaining IS NULL OR f.remaining > '0';
END $$;

-- Takes finished ids out of a lease. False: the lease was lost, nothing is recorded.
CREATE OR REPLACE FUNCTION settle(p_stream bigint, p_group bigint, p_seq bigint, p_token uuid, p_done int8multirange) RETURNS boolean
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
BEGIN
    PERFORM require_read_committed();
    RETURN settle_lease(p_stream, require_group(p_stream, p_group), NULL, p_seq, p_token, p_done) IS NOT NULL;
END $$;

-- Makes exception rows of messages of a lease that failed. False: the lease was lost, nothing is recorded.
CREATE OR REPLACE FUNCTION fail(p_stream bigint, p_group bigint, p_seq bigint, p_token uuid,
    p_ids bigint[], p_outcomes text[], p_errors text[], p_delays double precision[] DEFAULT '{}') RETURNS boolean
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
BEGIN
    PERFORM require_read_committed();
    PERFORM require_outcomes(p_outcomes, '{retry,dead,delay}');
    RETURN settle_lease(p_stream, require_group(p_stream, p_group), NULL, p_seq, p_token, '{}', p_ids, p_outcomes, p_errors, p_delays) IS NOT NULL;
END $$;

-- The heartbeat: takes finished ids out of leases and leases the rest for another lease_duration, for p_owner (owner.sql).
-- Returns each lease with the seq it has now, NULL for those that were lost.
CREATE OR REPLACE FUNCTION extend(p_stream bigint, p_group bigint, p_seqs bigint[], p_tokens uuid[], p_done int8multirange[], p_owner bigint DEFAULT NULL)
RETURNS TABLE (token uuid, seq bigint)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    g      consumer_group;
    before group_cursor;
    c      group_cursor;
    l      record;
    moving boolean;
BEGIN
    PERFORM require_read_committed();
    g := require_group(p_stream, p_group);
    -- To move leases up takes the cursor's lock, before any lease's.
    c := peek_cursor(p_stream, p_group);
    moving := EXISTS (SELECT FROM unnest(p_seqs) AS s WHERE s < c.next_seq - 1000);
    IF moving THEN
        c := lock_cursor(p_stream, p_group);
    END IF;
    before := c;
    FOR l IN SELECT u.seq, u.token, u.done FROM unnest(p_seqs, p_tokens, p_done) AS u(seq, token, done) ORDER BY u.seq LOOP
        token := l.token;
        seq := settle_lease(p_stream, g, p_owner, l.seq, l.token, coalesce(l.done, '{}'));
        IF moving AND seq < c.next_seq - 1000 THEN
            c := move_lease(p_stream, p_group, seq, c);
            seq := c.next_seq - 1;
        END IF;
        RETURN NEXT;
    END LOOP;
    IF c IS DISTINCT FROM before THEN
        c.first_open := first_open_lease(p_stream, p_group, c);
        PERFORM save_cursor(p_stream, p_group, c);
    END IF;
END $$;

-- Hands leases back: finished ids leave them, the rest can be claimed by anyone at once and does not count as lost.
-- Returns the tokens that were lost before.
CREATE OR REPLACE FUNCTION release(p_stream bigint, p_group bigint, p_seqs bigint[], p_tokens uuid[], p_done int8multirange[]) RETURNS uuid[]
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
DECLARE
    g    consumer_group;
    lost uuid[] := '{}';
    l    record;
    seq  bigint;
BEGIN
    PERFORM require_read_committed();
    g := require_group(p_stream, p_group);
    FOR l IN SELECT u.seq, u.token, u.done FROM unnest(p_seqs, p_tokens, p_done) AS u(seq, token, done) ORDER BY u.seq LOOP
        seq := settle_lease(p_stream, g, NULL, l.seq, l.token, coalesce(l.done, '{}'));
        IF seq IS NULL THEN
            lost := lost || l.token;
        ELSE
            EXECUTE format('UPDATE %I SET expires_at = ''-infinity'', token = gen_random_uuid() WHERE group_id = $1 AND seq = $2 AND token = $3', 'consumer_lease_' || p_stream)
                USING p_group, seq, l.token;
        END IF;
    END LOOP;
    PERFORM ring(ARRAY[p_stream]);
    RETURN lost;
END $$;

-- Hands part of a lease back, as a lease of its own that anyone can take over at once. False: the lease was lost.
CREATE OR REPLACE FUNCTION release_part(p_stream bigint, p_group bigint, p_seq bigint, p_token uuid, p_part int8multirange) RETURNS boolean
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
DECLARE
    c group_cursor;
    l group_lease;
BEGIN
    PERFORM require_read_committed();
    c := lock_cursor(p_stream, p_group);
    l := lock_lease(p_stream, p_group, p_seq, p_token);
    IF l.seq IS NULL THEN
        RETURN false;
    END IF;
    EXECUTE format('INSERT INTO %1$I (group_id, seq, token, lanes, replay, pending, expires_at, reclaims)
                    SELECT group_id, $3, gen_random_uuid(), lanes, replay, pending * $4, ''-infinity'', reclaims FROM %1$I
                    WHERE group_id = $1 AND seq = $2 AND NOT isempty(pending * $4)', 'consumer_lease_' || p_stream)
        USING p_group, l.seq, c.next_seq, p_part;
    EXECUTE format('WITH kept AS (UPDATE %1$I SET pending = pending - $3 WHERE group_id = $1 AND seq = $2 AND NOT pending <@ $3)
                    DELETE FROM %1$I WHERE group_id = $1 AND seq = $2 AND pending <@ $3', 'consumer_lease_' || p_stream)
        USING p_group, l.seq, p_part;
    c.next_seq := c.next_seq + 1;
    PERFORM save_cursor(p_stream, p_group, c);
    PERFORM ring(ARRAY[p_stream]);
    RETURN true;
END $$;

-- Hands back whatever was claimed under p_token, for a caller that never learnt what that was: the answer was lost. Returns
-- whether there was anything.
CREATE OR REPLACE FUNCTION release_claim(p_stream bigint, p_group bigint, p_token uuid) RETURNS boolean
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
DECLARE
    hits int;
BEGIN
    IF cardinality(release(p_stream, p_group, '{0}', ARRAY[p_token], '{"{}"}')) = 0 THEN
        RETURN true;
    END IF;
    EXECUTE format(
        'WITH claimed AS (SELECT message_id FROM %1$I
                          WHERE group_id = $1 AND state = ''inflight'' AND lease_expires_at > clock_timestamp() AND lease_id = $2
                          ORDER BY message_id FOR UPDATE)
         UPDATE %1$I AS e SET state = ''ready'', due_at = clock_timestamp(), lease_id = NULL, lease_expires_at = NULL, owner = NULL
         FROM claimed WHERE e.group_id = $1 AND e.message_id = claimed.message_id', 'exception_queue_' || p_stream)
        USING p_group, p_token;
    GET DIAGNOSTICS hits = ROW_COUNT;
    RETURN hits > 0;
END $$;
