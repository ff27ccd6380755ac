-- The fence: how far the log of a stream is final.
--
-- Ids are drawn at insert and become visible at commit, so a reader that went to the newest visible id would pass
-- over a lower one that commits later. Every INSERT takes ROW EXCLUSIVE on message_log_<n> before it draws an id and
-- keeps it until its transaction has ended and is visible. So with
--     head    = the sequence, read first, and
--     writers = the transactions that hold that lock, read in a LATER statement,
-- every id <= head was drawn by a transaction that is in writers or has ended. Once no writer runs any more, what is
-- missing at or below head never comes: head is settled.
--
-- Invariant: stream_fence.settled only grows, and no row with id <= settled ever becomes visible later.

-- The transactions that may still make an id visible. Not those that wait for the lock (nothing drawn yet), not
-- ourselves (our own rows are visible to us), not '…/0' (ended and visible, the lock is about to go).
CREATE OR REPLACE FUNCTION log_writers(p_stream bigint) RETURNS text[]
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    RETURN (
        SELECT coalesce(array_agg(DISTINCT l.virtualtransaction), '{}')
        FROM pg_locks l
        WHERE l.locktype = 'relation'
          AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
          AND l.relation = to_regclass(format('%I', 'message_log_' || p_stream))
          AND l.mode = 'RowExclusiveLock'
          AND l.granted
          AND l.virtualtransaction NOT LIKE '%/0'
          AND l.pid IS DISTINCT FROM pg_backend_pid());
END $$;

CREATE OR REPLACE FUNCTION settled_id(p_stream bigint) RETURNS bigint
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    RETURN (SELECT settled FROM stream_fence WHERE stream_id = p_stream ORDER BY generation DESC LIMIT 1);
END $$;

-- Looks at the lock table on behalf of a group whose next id, p_position + 1, is missing though drawn.
-- Returns the settled id, which may or may not have moved. Never waits: while another session looks, or while looking
-- again would cost more than 5 % of the time (but a look a second is always allowed), the old value is the answer.
CREATE OR REPLACE FUNCTION look_at_gap(p_stream bigint, p_position bigint) RETURNS bigint
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    f       stream_fence;
    started timestamptz := clock_timestamp();
    head    bigint;
BEGIN
    SELECT * INTO f FROM stream_fence WHERE stream_id = p_stream ORDER BY generation DESC LIMIT 1 FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        -- Another session looks; usually it is about to commit. One that stays in its transaction must not hold the other
        -- groups up: look for ourselves then, without a memory.
        SELECT * INTO f FROM stream_fence WHERE stream_id = p_stream ORDER BY generation DESC LIMIT 1;
        IF f.looked_at > started - interval '1 second' THEN
            RETURN f.settled;
        END IF;
        head := log_head(p_stream);
        RETURN CASE WHEN cardinality(log_writers(p_stream)) = 0 THEN greatest(f.settled, head) ELSE f.settled END;
    END IF;
    -- A look that was stamped in the future, by a clock since set back, does not count.
    IF f.settled > p_position
       OR started BETWEEN f.looked_at AND f.looked_at + least(greatest(interval '5 milliseconds', f.look_cost * 20), interval '1 second') THEN
        RETURN f.settled;
    END IF;

    IF f.head IS NULL THEN
        -- These two stay separate statements, in this order.
        head := log_head(p_stream);
        f.writers := log_writers(p_stream);
        f.head := head;
    ELSE
        -- A prepared transaction that survived a restart is listed as '-1/<xid>', whatever it was called before.
        f.writers := ARRAY(SELECT w FROM unnest(log_writers(p_stream)) AS w WHERE w = ANY (f.writers) OR w LIKE '-1/%');
    END IF;
    IF cardinality(f.writers) = 0 THEN
        f.settled := greatest(f.settled, f.head);
        f.head := NULL;
        f.writers := NULL;
    END IF;
    f.looked_at := started;
    f.look_cost := clock_timestamp() - started;

    IF f.updates < 200 THEN
        UPDATE stream_fence SET updates = f.updates + 1, settled = f.settled, head = f.head, writers = f.writers,
                                looked_at = f.looked_at, look_cost = f.look_cost
        WHERE stream_id = p_stream AND generation = f.generation;
    ELSE
        DELETE FROM stream_fence WHERE stream_id = p_stream AND generation = f.generation;
        INSERT INTO stream_fence (stream_id, generation, settled, head, writers, looked_at, look_cost)
            VALUES (p_stream, f.generation + 1, f.settled, f.head, f.writers, f.looked_at, f.look_cost);
    END IF;
    RETURN f.settled;
END $$;
