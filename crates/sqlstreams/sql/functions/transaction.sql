-- Settling in the handler's own transaction: its writes and the settlement commit together, so effects in this database
-- happen exactly once.
--
-- It leaves a row in consumer_done_<n>, and never touches the cursor or a lease, on which all handlers would wait for each
-- other's commits. The order is what makes it safe: first the row, and in a later statement the look whether the message is
-- still the caller's. Whoever takes a lease over changes its token first and reads the rows afterwards (take_done), so a
-- handler that lost its lease either sees that, or its row is found: by the one who takes over, or by the next handler
-- of that message, whose own row conflicts with it. The message may have become an exception by then: it ends where
-- the row is found (end_settled).

-- Settles messages that are held under p_token in the caller's transaction, which must be READ COMMITTED. Call it last, and
-- claim nothing in that transaction. p_exceptions: p_token proves claimed exceptions, not a lease.
--
-- p_mark: for clients that lend the transaction to a handler, which may have ended it. They say SET LOCAL
-- sqlstreams.transaction = p_mark when they begin; the setting ends with the transaction.
--
-- SQ008: the lease was lost. SQ009: some were settled before; see unsettled. SQ010: this is not the transaction that was
-- lent. All leave nothing to do but to roll back.
CREATE OR REPLACE FUNCTION settle_in_transaction(p_stream bigint, p_group bigint, p_token uuid, p_ids bigint[], p_exceptions boolean DEFAULT false, p_mark text DEFAULT NULL) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
DECLARE
    g       consumer_group;
    ids     bigint[] := ARRAY(SELECT DISTINCT i FROM unnest(p_ids) AS i ORDER BY i);
    wanted  int := cardinality(ids);
    hits    int;
BEGIN
    PERFORM require_lent(p_mark);
    g := require_group(p_stream, p_group);
    IF NOT g.transactional THEN
        RAISE EXCEPTION 'group % does not settle in transactions', quote_ident(g.name)
            USING ERRCODE = 'SQ004', HINT = 'Make it a transactional group first.';
    END IF;
    EXECUTE format('INSERT INTO %I (group_id, message_id) SELECT $1, id FROM unnest($2) AS id ON CONFLICT DO NOTHING', 'consumer_done_' || p_stream)
        USING p_group, ids;
    GET DIAGNOSTICS hits = ROW_COUNT;
    IF hits < wanted THEN
        PERFORM refuse_settled(wanted - hits);
    END IF;

    IF p_exceptions THEN
        PERFORM lock_exceptions(p_stream, p_group, array_fill(p_token, ARRAY[cardinality(p_ids)]), p_ids);
        EXECUTE format('DELETE FROM %I WHERE group_id = $1 AND message_id >= (SELECT min(i) FROM unnest($2) AS i) AND message_id = ANY ($2) AND lease_id = $3', 'exception_queue_' || p_stream)
            USING p_group, ids, p_token;
        GET DIAGNOSTICS hits = ROW_COUNT;
        -- The row of the exception was the message's one place; with it gone nobody can be handed the message any more.
        EXECUTE format('DELETE FROM %I WHERE group_id = $1 AND message_id >= (SELECT min(i) FROM unnest($2) AS i) AND message_id = ANY ($2)', 'consumer_done_' || p_stream) USING p_group, ids;
        IF hits < wanted THEN
            PERFORM refuse_lost();
        END IF;
    ELSE
        PERFORM require_held(p_stream, p_group, p_token, ids);
    END IF;
END $$;

-- Refuses to go on unless these messages are pending in the caller's lease.
CREATE OR REPLACE FUNCTION require_held(p_stream bigint, p_group bigint, p_token uuid, p_ids bigint[]) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
DECLARE
    pending int8multirange;
BEGIN
    pending := lease_pending(p_stream, p_group, p_token);
    IF EXISTS (SELECT FROM unnest(p_ids) AS i WHERE (pending @> i) IS NOT TRUE) THEN
        PERFORM refuse_lost();
    END IF;
END $$;

CREATE OR REPLACE FUNCTION require_lent(p_mark text) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
BEGIN
    PERFORM require_read_committed();
    IF current_setting('sqlstreams.transaction', true) IS DISTINCT FROM p_mark AND p_mark IS NOT NULL THEN
        RAISE EXCEPTION 'the handler ended the transaction that it was given'
            USING ERRCODE = 'SQ010', HINT = 'Leave COMMIT and ROLLBACK to the consumer; savepoints are fine.';
    END IF;
END $$;

CREATE OR REPLACE FUNCTION refuse_lost() RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    RAISE EXCEPTION 'the lease was lost before the messages were settled'
        USING ERRCODE = 'SQ008', HINT = 'Roll back: another consumer handles them.';
END $$;

CREATE OR REPLACE FUNCTION refuse_settled(p_count bigint) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    RAISE EXCEPTION 'settled before: % of these messages', p_count
        USING ERRCODE = 'SQ009', HINT = 'Roll back: their effects are there already.';
END $$;

-- Which of these messages still have to be handled by whoever holds them under p_token, for a caller that does not know
-- whether its transaction has committed. Waits for transactions that are settling one of them right now. What it leaves out
-- was settled, or is not the caller's any more.
CREATE OR REPLACE FUNCTION unsettled(p_stream bigint, p_group bigint, p_token uuid, p_ids bigint[], p_exceptions boolean DEFAULT false) RETURNS bigint[]
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
DECLARE
    id   bigint;
    open bigint[] := '{}';
    hits int;
BEGIN
    PERFORM require_read_committed();
    PERFORM require_group(p_stream, p_group);
    IF p_exceptions THEN
        PERFORM end_settled(p_stream, p_group, array_fill(p_token, ARRAY[cardinality(p_ids)]), p_ids);
        EXECUTE format('SELECT array_agg(message_id) FROM (SELECT message_id FROM %I WHERE group_id = $1 AND message_id >= (SELECT min(i) FROM unnest($2) AS i) AND message_id = ANY ($2) AND lease_id = $3 ORDER BY message_id FOR UPDATE) AS x', 'exception_queue_' || p_stream)
            INTO open USING p_group, p_ids, p_token;
        RETURN coalesce(open, '{}');
    END IF;
    FOR id IN SELECT DISTINCT i FROM unnest(p_ids) AS i ORDER BY i LOOP
        -- A row of the same key is what makes an insert wait for another's commit.
        EXECUTE format('INSERT INTO %I (group_id, message_id) VALUES ($1, $2) ON CONFLICT DO NOTHING', 'consumer_done_' || p_stream) USING p_group, id;
        GET DIAGNOSTICS hits = ROW_COUNT;
        IF hits > 0 THEN
            open := open || id;
            EXECUTE format('DELETE FROM %I WHERE group_id = $1 AND message_id = $2', 'consumer_done_' || p_stream) USING p_group, id;
        END IF;
    END LOOP;
    RETURN ARRAY(SELECT i FROM unnest(open) AS i WHERE lease_pending(p_stream, p_group, p_token) @> i);
END $$;

-- Takes the rows of p_ids away that lie in these lanes (NULL: all), and returns the ids that had one: others may have a lease of the same
-- range in other lanes. The caller has locked the lease that held them, in an earlier statement, and takes them out of its pending now.
CREATE OR REPLACE FUNCTION take_done(p_stream bigint, p_group bigint, p_ids int8multirange, p_lanes bigint) RETURNS int8multirange
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    taken int8multirange;
BEGIN
    EXECUTE format(
        'WITH gone AS (
             DELETE FROM %I AS d WHERE group_id = $1 AND message_id >= lower($2) AND message_id < upper($2) AND $2 @> message_id
                AND ($3 = -1 OR EXISTS (SELECT FROM %I AS m WHERE m.id = d.message_id AND m.id >= lower($2) AND m.id < upper($2) AND ($3 >> lane_of(m.key, m.id)) & 1 = 1))
             RETURNING message_id)
         SELECT coalesce(range_agg(int8range(message_id, message_id, ''[]'')), ''{}'') FROM gone', 'consumer_done_' || p_stream, 'message_log_' || p_stream)
        INTO taken USING p_group, p_ids, coalesce(p_lanes, -1);
    RETURN taken;
END $$;

-- Ends exceptions that are held under these tokens and were settled all the same, by a handler that had lost the message when
-- its transaction committed. Returns their ids. Waits for transactions that are settling one of them right now.
CREATE OR REPLACE FUNCTION end_settled(p_stream bigint, p_group bigint, p_tokens uuid[], p_ids bigint[]) RETURNS bigint[]
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    ended bigint[];
BEGIN
    EXECUTE format(
        'WITH held AS MATERIALIZED (
             SELECT e.message_id FROM unnest($2, $3) AS u(token, id)
             JOIN %1$I AS e ON e.group_id = $1 AND e.message_id = u.id AND e.lease_id = u.token
             ORDER BY e.message_id FOR UPDATE OF e),
         done AS (DELETE FROM %2$I AS d USING held WHERE d.group_id = $1 AND d.message_id = held.message_id RETURNING d.message_id),
         gone AS (DELETE FROM %1$I AS e USING done WHERE e.group_id = $1 AND e.message_id = done.message_id RETURNING e.message_id)
         SELECT coalesce(array_agg(message_id), ''{}'') FROM gone', 'exception_queue_' || p_stream, 'consumer_done_' || p_stream)
        INTO ended USING p_group, p_tokens, p_ids;
    RETURN ended;
END $$;
