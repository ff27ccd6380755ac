-- Messages that are not due yet: they wait in message_delayed_<n>, beside the log, in the order in which they come due. Then a mover puts
-- them into the log, once for all groups: from there on they are messages like others, with the id, the order and the
-- produced_at that they get now.
--
-- Any consumer is the mover. It never moves in a transaction in which it claims: the claim would wait for its own writer.

-- Moves what is due, in that order, at most p_limit messages. p_from and p_from_id bound the look from below: what was moved before may
-- have left dead rows. Returns how many were moved, the last of them by what it waited for, and the time until the next
-- one is due. busy: another does the same. no_room: the log lacks partitions for so many (ensure_partitions).
--
-- Rows that are locked are passed over: somebody cancels them. SECURITY DEFINER: a consumer need not be allowed to produce.
CREATE OR REPLACE FUNCTION move_delayed(p_stream bigint, p_from timestamptz DEFAULT '-infinity', p_from_id bigint DEFAULT 0, p_limit bigint DEFAULT 1000)
RETURNS TABLE (moved bigint, upto timestamptz, upto_id bigint, looked_at timestamptz, next_due interval, busy boolean, no_room boolean)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
DECLARE
    s     stream := require_stream(p_stream);
    first timestamptz;
    head  bigint;
BEGIN
    PERFORM require_read_committed();
    SELECT 0, clock_timestamp(), false, false INTO moved, looked_at, busy, no_room;
    EXECUTE format('SELECT deliver_at FROM %I WHERE (deliver_at, id) > ($1, $2) ORDER BY deliver_at, id LIMIT 1', 'message_delayed_' || p_stream)
        INTO first USING p_from, p_from_id;
    IF first > looked_at OR first IS NULL THEN
        next_due := first - looked_at;
        RETURN NEXT;
        RETURN;
    END IF;
    IF NOT pg_try_advisory_xact_lock(hashtextextended('sqlstreams move delayed ' || current_schema(), p_stream)) THEN
        busy := true;
        RETURN NEXT;
        RETURN;
    END IF;
    EXECUTE format('SELECT last_value FROM %I', 'message_log_' || p_stream || '_id_seq') INTO head;
    IF to_regclass(format('%I', 'message_log_' || p_stream || '_p' || (head + p_limit) / s.partition_size)) IS NULL THEN
        no_room := true;
        RETURN NEXT;
        RETURN;
    END IF;
    EXECUTE format(
        'WITH gone AS (DELETE FROM %1$I WHERE ctid = ANY (ARRAY(SELECT ctid FROM %1$I WHERE (deliver_at, id) > ($1, $2) AND deliver_at <= $3
                                                               ORDER BY deliver_at, id LIMIT $4 FOR UPDATE SKIP LOCKED))
                       RETURNING deliver_at, id, key, routing_key, headers, expires_at, payload),
              moved AS (INSERT INTO %2$I (key, routing_key, headers, expires_at, payload)
                        SELECT key, routing_key, headers, expires_at, payload FROM gone ORDER BY deliver_at, id)
         SELECT deliver_at, id, count(*) OVER () FROM gone ORDER BY deliver_at DESC, id DESC LIMIT 1', 'message_delayed_' || p_stream, 'message_log_' || p_stream)
        INTO upto, upto_id, moved USING p_from, p_from_id, looked_at, p_limit;
    moved := coalesce(moved, 0);
    EXECUTE format('SELECT deliver_at - clock_timestamp() FROM %I WHERE (deliver_at, id) > ($1, $2) ORDER BY deliver_at, id LIMIT 1', 'message_delayed_' || p_stream)
        INTO next_due USING coalesce(upto, p_from), coalesce(upto_id, p_from_id);
    RETURN NEXT;
END $$;

-- The time until the next delayed message of each of these streams is due; none for a stream that has none. Nearly nothing for one that never
-- had any. p_from: a lower bound for each.
CREATE OR REPLACE FUNCTION next_delayed(p_streams bigint[], p_from timestamptz[]) RETURNS TABLE (stream bigint, due_in interval)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
DECLARE
    d record;
BEGIN
    FOR d IN SELECT u.stream, u.lower FROM unnest(p_streams, p_from) AS u(stream, lower)
             WHERE pg_relation_size(to_regclass(format('%I.%I', current_schema(), 'message_delayed_' || u.stream))) > 0 LOOP
        EXECUTE format('SELECT deliver_at - clock_timestamp() FROM %I WHERE deliver_at >= $1 ORDER BY deliver_at LIMIT 1', 'message_delayed_' || d.stream)
            INTO due_in USING coalesce(d.lower, '-infinity');
        IF due_in IS NOT NULL THEN
            stream := d.stream;
            RETURN NEXT;
        END IF;
    END LOOP;
END $$;

-- Takes a delayed message back: false when there is none of that id, since it was moved into the log or cancelled before.
CREATE OR REPLACE FUNCTION cancel_delayed(p_stream bigint, p_id bigint) RETURNS boolean
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off AS $$
DECLARE
    hits bigint;
BEGIN
    PERFORM require_stream(p_stream);
    EXECUTE format('DELETE FROM %I WHERE id = $1', 'message_delayed_' || p_stream) USING p_id;
    GET DIAGNOSTICS hits = ROW_COUNT;
    RETURN hits > 0;
END $$;

CREATE OR REPLACE FUNCTION count_delayed(p_stream bigint) RETURNS bigint
LANGUAGE plpgsql STABLE SET search_path FROM CURRENT AS $$
DECLARE
    waiting bigint;
BEGIN
    PERFORM require_stream(p_stream);
    EXECUTE format('SELECT count(*) FROM %I', 'message_delayed_' || p_stream) INTO waiting;
    RETURN waiting;
END $$;
