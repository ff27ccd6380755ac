-- Looking for work: what consumers do again and again while there is none. No lock, and no write but a sign of life now and then, where groups expire.

-- fresh: ids were drawn beyond the cursor, or something is replayed. lapsed: a lease ran out. due, suspect: exceptions can run. All false while the
-- group is paused. next_due: when the next exception comes due. owners: whose leases and exceptions are running.
-- p_due_from bounds the look at the exceptions from below; see take_exceptions.
CREATE OR REPLACE FUNCTION poll(p_stream bigint, p_group bigint, p_due_from timestamptz DEFAULT '-infinity')
RETURNS TABLE (fresh boolean, lapsed boolean, due boolean, suspect boolean, paused boolean, claimed bigint, next_due interval, owners bigint[])
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
DECLARE
    c   group_cursor := peek_cursor(p_stream, p_group);
    now timestamptz := clock_timestamp();
BEGIN
    paused := (require_group(p_stream, p_group)).paused;
    claimed := c.claimed;
    fresh := log_head(p_stream) > c.claimed OR c.replays IS NOT NULL;
    EXECUTE format('SELECT coalesce(bool_or(expires_at <= $3), false), coalesce(array_agg(DISTINCT owner) FILTER (WHERE owner IS NOT NULL AND expires_at > $3), ''{}'')
                    FROM %I WHERE group_id = $1 AND seq >= $2', 'consumer_lease_' || p_stream)
        INTO lapsed, owners USING p_group, c.first_open, now;
    -- Of the exceptions in flight the few that run out first: who is dead does not renew.
    EXECUTE format('SELECT EXISTS (SELECT FROM %1$I WHERE group_id = $1 AND state = ''ready'' AND losses = 0 AND due_at <= $2 AND due_at >= $3)
                        OR EXISTS (SELECT FROM %1$I WHERE group_id = $1 AND state = ''inflight'' AND lease_expires_at <= $2 AND lease_expires_at >= $4),
                           EXISTS (SELECT FROM %1$I WHERE group_id = $1 AND state = ''ready'' AND losses > 0 AND due_at <= $2),
                           (SELECT min(due_at) - $2 FROM (SELECT due_at FROM %1$I WHERE group_id = $1 AND state = ''ready'' AND losses = 0 AND due_at > $2 ORDER BY due_at LIMIT 1) AS x),
                           $5 || ARRAY(SELECT DISTINCT owner FROM (SELECT owner FROM %1$I WHERE group_id = $1 AND state = ''inflight'' AND lease_expires_at > $2
                                                                   ORDER BY lease_expires_at LIMIT 20) AS x WHERE owner IS NOT NULL)', 'exception_queue_' || p_stream)
        INTO due, suspect, next_due, owners USING p_group, now, p_due_from, lapsed_since(now, p_due_from), owners;
    IF paused THEN
        SELECT false, false, false, false, NULL INTO fresh, lapsed, due, suspect, next_due;
    ELSIF NOT (fresh OR lapsed OR due OR suspect) THEN
        PERFORM note_in_vain(p_stream, p_group);
    END IF;
    RETURN NEXT;
END $$;

-- The look of a whole process, at all its groups in one statement. A group is looked at in full where p_deep says so; else only
-- for fresh messages, which takes no more than its stream's sequence as long as that is not beyond p_known, the claimed
-- that was seen last.
--
-- One row for each group that was looked at in full or has something fresh. gone: the group or its stream was dropped. missing: those of its
-- owners that hold no lock (owner.sql), but for p_self, the caller's own number; looked for only if that is given.
--
-- p_backend: the process that the caller takes for its own; where another one answers, that is refused.
--
-- Refused where nothing can be written, as it is after a fail-over: whoever went on looking there would never see a message again.
CREATE OR REPLACE FUNCTION watch(p_streams bigint[], p_groups bigint[], p_known bigint[], p_due_from timestamptz[], p_deep boolean[], p_self bigint DEFAULT NULL, p_backend int DEFAULT NULL)
RETURNS TABLE (group_id bigint, gone boolean, fresh boolean, lapsed boolean, due boolean, suspect boolean, paused boolean, claimed bigint, next_due interval, owners bigint[], missing bigint[])
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET jit = off AS $$
#variable_conflict use_column
DECLARE
    w record;
    p record;
    c group_cursor;
BEGIN
    IF current_setting('transaction_read_only')::boolean THEN
        RAISE EXCEPTION 'nothing can be consumed from a read-only server' USING ERRCODE = 'read_only_sql_transaction';
    END IF;
    IF p_backend <> pg_backend_pid() THEN
        RAISE EXCEPTION 'this is not the session it was: a pooler has changed it' USING ERRCODE = 'SQ011';
    END IF;
    -- MATERIALIZED: the sequences are read in one go, before anything is looked at closely.
    FOR w IN
        WITH head AS MATERIALIZED (
            SELECT u.*, s.id IS NULL AS gone, pg_sequence_last_value(to_regclass(format('%I.%I', current_schema(), 'message_log_' || u.stream || '_id_seq'))) AS head
            FROM unnest(p_streams, p_groups, p_known, p_due_from, p_deep) AS u(stream, id, known, due_from, deep)
            LEFT JOIN consumer_group AS s ON s.id = u.id)
        SELECT * FROM head WHERE deep OR head > known OR gone
    LOOP
        IF w.gone THEN
            RETURN QUERY SELECT w.id, true, false, false, false, false, false, 0::bigint, NULL::interval, '{}'::bigint[], '{}'::bigint[];
            CONTINUE;
        END IF;
        IF NOT w.deep THEN
            c := peek_cursor(w.stream, w.id);
            -- Without a cursor there is nothing to look at: the claim says so.
            RETURN QUERY SELECT w.id, false, coalesce(w.head > c.claimed, true), false, false, false, NULL::boolean, coalesce(c.claimed, 0), NULL::interval, NULL::bigint[], '{}'::bigint[];
            CONTINUE;
        END IF;
        SELECT * INTO p FROM poll(w.stream, w.id, coalesce(w.due_from, '-infinity'));
        p.owners := array_remove(p.owners, p_self);
        RETURN QUERY SELECT w.id, false, coalesce(p.fresh, true), p.lapsed, p.due, p.suspect, p.paused, coalesce(p.claimed, 0), p.next_due, p.owners,
                            CASE WHEN p_self IS NOT NULL AND cardinality(p.owners) > 0 THEN missing_owners(p.owners) ELSE '{}' END;
    END LOOP;
END $$;
