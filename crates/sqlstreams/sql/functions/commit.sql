-- What became of a commit whose answer never came.
--
-- A producer knows of its transaction, before it sends COMMIT, the xid, the backend's pid, and (id, produced_at) of each
-- row. The status of the xid only tells when the transaction has ended. It must not tell how: after a crash or a failover
-- the same xid, and the same id, may have been given to somebody else. So the rows decide, by id and the microsecond of
-- their insert together.

-- Whether p_xid still runs. A transaction whose number lies in the future (22023, after a crash or a failover) or is
-- forgotten (NULL) does not.
CREATE OR REPLACE FUNCTION transaction_runs(p_xid xid8) RETURNS boolean
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    RETURN coalesce(pg_xact_status(p_xid) = 'in progress', false);
EXCEPTION WHEN invalid_parameter_value THEN
    RETURN false;
END $$;

-- Ends the session p_pid if it is the one that p_xid runs in: its client is gone. Without the privilege to, it goes on.
-- So does one that waits for a synchronous standby: ended, it would count as stored before the standby has it.
CREATE OR REPLACE FUNCTION terminate_transaction(p_xid xid8, p_pid int) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    IF EXISTS (SELECT FROM pg_locks
               WHERE locktype = 'transactionid' AND transactionid = p_xid::xid AND pid = p_pid
                 AND mode = 'ExclusiveLock' AND granted)
       AND NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = p_pid AND wait_event = 'SyncRep') THEN
        PERFORM pg_terminate_backend(p_pid);
    END IF;
EXCEPTION WHEN insufficient_privilege THEN
    NULL;
END $$;

-- A transaction that stored nothing but delayed messages is told by its witness, a row of message_idempotency_<n> (produce.sql), and p_produced_at
-- has the one time of that.
--
-- Returns 'standby' or 'in_progress' (ask again), 'stored', 'missing' (it never will be stored), or 'gone': the partition
-- that the rows were in, if they were stored, is no longer part of the log. p_ids may be some of the transaction's rows.
-- Runs with the caller's privileges, as it may end a session.
CREATE OR REPLACE FUNCTION resolve_commit(p_stream bigint, p_xid text, p_pid int, p_ids bigint[], p_produced_at timestamptz[], p_terminate boolean, p_witness_1 bigint DEFAULT NULL, p_witness_2 bigint DEFAULT NULL) RETURNS text
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
DECLARE
    s     stream;
    hits  bigint;
    parts bigint[];
BEGIN
    IF pg_is_in_recovery() THEN
        RETURN 'standby';
    END IF;
    -- One snapshot for all statements would miss the rows of a transaction that ends between them.
    PERFORM require_read_committed();
    IF transaction_runs(p_xid::xid8) THEN
        IF p_terminate THEN
            PERFORM terminate_transaction(p_xid::xid8, p_pid);
        END IF;
        RETURN 'in_progress';
    END IF;

    -- In a later statement than the status: what that transaction stored is visible now.
    s := require_stream(p_stream);
    IF p_witness_1 IS NOT NULL THEN
        EXECUTE format('SELECT count(*) FROM %I WHERE hash_1 = $1 AND hash_2 = $2 AND sent_at = $3', 'message_idempotency_' || p_stream)
            INTO hits USING p_witness_1, p_witness_2, p_produced_at[1];
        RETURN CASE WHEN hits > 0 THEN 'stored' ELSE 'missing' END;
    END IF;
    EXECUTE format(
        'SELECT count(*) FROM unnest($1, $2) AS u(id, produced_at)
         CROSS JOIN LATERAL (SELECT FROM %I WHERE id = u.id AND id >= $3 AND id <= $4 AND produced_at = u.produced_at LIMIT 1) AS m',
        'message_log_' || p_stream)
        INTO hits USING p_ids, p_produced_at, (SELECT min(i) FROM unnest(p_ids) AS i), (SELECT max(i) FROM unnest(p_ids) AS i);
    IF hits = cardinality(p_ids) THEN
        RETURN 'stored';
    END IF;

    parts := ARRAY(SELECT substring(c.relname FROM '_p(\d+)$')::bigint
                   FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
                   WHERE i.inhparent = to_regclass(format('%I', 'message_log_' || p_stream)) AND NOT i.inhdetachpending);
    -- Partitions go from the front. One that is missing at the end was never there on this server.
    IF EXISTS (SELECT FROM (SELECT i / s.partition_size AS part FROM unnest(p_ids) AS i) AS p
               WHERE part <> ALL (parts) AND part < (SELECT max(x) FROM unnest(parts) AS x)) THEN
        RETURN CASE WHEN hits > 0 THEN 'stored' ELSE 'gone' END;
    END IF;
    IF hits > 0 THEN
        RAISE EXCEPTION 'only % of % messages of one transaction are in the log of stream %', hits, cardinality(p_ids), p_stream
            USING ERRCODE = 'data_corrupted', HINT = 'Were messages deleted by hand?';
    END IF;
    RETURN 'missing';
END $$;
