-- Dead owners. A consumer process holds a shared advisory lock on a number of its own, on a connection that it keeps; the
-- server frees it within milliseconds when the process dies. What such a process holds is then taken over without
-- waiting for the leases to run out.
--
-- The number comes from a sequence, so that numbers never collide and a process that reconnects never waits for its
-- predecessor. Nobody tries to take another's lock: that would be seen as a life. The look is pg_locks.

-- The key of an owner's lock: a constant ("SQLS") above, the number below.
CREATE OR REPLACE FUNCTION owner_key(p_owner bigint) RETURNS bigint
LANGUAGE sql IMMUTABLE AS $$ SELECT (1397836883::bigint << 32) | p_owner $$;

-- Makes this session the life of a new owner and returns its number.
CREATE OR REPLACE FUNCTION become_owner() RETURNS bigint
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
DECLARE
    owner bigint := nextval('consumer_owner');
BEGIN
    PERFORM pg_advisory_lock_shared(owner_key(owner));
    RETURN owner;
END $$;

-- Which of these owners hold no lock.
CREATE OR REPLACE FUNCTION missing_owners(p_owners bigint[]) RETURNS bigint[]
LANGUAGE sql VOLATILE SET search_path FROM CURRENT AS $$
    SELECT coalesce(array_agg(o), '{}') FROM unnest(p_owners) AS o
    WHERE NOT EXISTS (
        SELECT FROM pg_locks
        WHERE locktype = 'advisory' AND classid = 1397836883 AND objid = o::oid AND objsubid = 1 AND granted
          AND database = (SELECT oid FROM pg_database WHERE datname = current_database()))
$$;

-- Whether this session, of which the caller knows the backend, holds an owner's lock: behind a transaction pooler another
-- backend answers, or the lock was dropped with the last transaction.
CREATE OR REPLACE FUNCTION is_owner(p_owner bigint, p_backend int) RETURNS boolean
LANGUAGE sql VOLATILE SET search_path FROM CURRENT AS $$
    SELECT pg_backend_pid() = p_backend AND EXISTS (
        SELECT FROM pg_locks WHERE pid = p_backend AND locktype = 'advisory' AND classid = 1397836883 AND objid = p_owner::oid AND objsubid = 1)
$$;

-- Ends the leases of an owner that has been missing in two looks at least a second apart, if it is missing still. Only a
-- process whose own lock has been held for at least 5 s without a break may judge: after a restart of the server nobody
-- holds one. A living owner that is taken for dead costs a repeat, never a message. Returns whether it was missing.
CREATE OR REPLACE FUNCTION expire_owner(p_stream bigint, p_group bigint, p_owner bigint) RETURNS boolean
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
DECLARE
    started timestamptz := clock_timestamp();
BEGIN
    PERFORM require_read_committed();
    IF cardinality(missing_owners(ARRAY[p_owner])) = 0 THEN
        RETURN false;
    END IF;
    EXECUTE format(
        'WITH dead AS (SELECT seq FROM %1$I WHERE group_id = $1 AND seq >= $2 AND owner = $3 AND expires_at > $4 ORDER BY seq FOR UPDATE SKIP LOCKED)
         UPDATE %1$I AS l SET expires_at = $4 FROM dead WHERE l.group_id = $1 AND l.seq = dead.seq', 'consumer_lease_' || p_stream)
        USING p_group, (peek_cursor(p_stream, p_group)).first_open, p_owner, started;
    EXECUTE format(
        'WITH dead AS (SELECT message_id FROM %1$I WHERE group_id = $1 AND state = ''inflight'' AND lease_expires_at > $3 AND owner = $2 ORDER BY message_id FOR UPDATE SKIP LOCKED)
         UPDATE %1$I AS e SET lease_expires_at = $3 FROM dead WHERE e.group_id = $1 AND e.message_id = dead.message_id', 'exception_queue_' || p_stream)
        USING p_group, p_owner, started;
    RETURN true;
END $$;
