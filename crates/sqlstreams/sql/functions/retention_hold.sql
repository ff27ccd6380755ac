-- Retention: what is in its way, for people, and when it is worth to come again.

-- Notes what holds retention up, or with NULL that nothing does. SECURITY DEFINER: whoever lacks the privileges to do it says so here.
CREATE OR REPLACE FUNCTION set_retention_hold(p_stream bigint, p_reason text, p_group bigint DEFAULT NULL, p_detail text DEFAULT NULL) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT AS $$
BEGIN
    IF p_reason IS NULL THEN
        DELETE FROM retention_hold WHERE stream_id = p_stream;
    ELSIF NOT EXISTS (SELECT FROM retention_hold AS h
                          WHERE h.stream_id = p_stream AND h.reason = p_reason AND (h.group_id, h.detail) IS NOT DISTINCT FROM (p_group, p_detail)) THEN
        INSERT INTO retention_hold AS h (stream_id, reason, group_id, detail) VALUES (p_stream, p_reason, p_group, p_detail)
            ON CONFLICT (stream_id) DO UPDATE SET reason = p_reason, group_id = p_group, detail = p_detail,
                since = CASE WHEN h.reason = p_reason AND h.group_id IS NOT DISTINCT FROM p_group THEN h.since ELSE clock_timestamp() END;
    END IF;
END $$;

-- What is in the way of a DETACH: whoever has the log open for the longest, else the oldest snapshot, for people. Without the privilege to see
-- others' sessions it names no more than their process.
CREATE OR REPLACE FUNCTION detach_blocker(p_stream bigint) RETURNS text
LANGUAGE sql VOLATILE SET search_path FROM CURRENT AS $$
    SELECT format('process %s%s', a.pid, ' (' || nullif(concat_ws(', ', nullif(a.application_name, ''), a.usename, a.state), '') || ')') FROM (
        SELECT a.*, EXISTS (SELECT FROM pg_locks AS l WHERE l.pid = a.pid AND l.locktype = 'relation' AND l.granted
                              AND l.relation = to_regclass(format('%I', 'message_log_' || p_stream))) AS opened
        FROM pg_stat_activity AS a WHERE a.datname = current_database() AND a.pid <> pg_backend_pid()
          AND (a.backend_xmin IS NOT NULL OR a.backend_xid IS NOT NULL OR a.state LIKE 'idle in%')) AS a
    ORDER BY a.opened DESC, a.xact_start LIMIT 1
$$;

-- Who has the row of the stream, or of a partition that is leaving, locked, for people: what keeps retention from it that could not have that lock.
-- As a rule another that does the same; no row where it is over.
CREATE OR REPLACE FUNCTION retention_busy(p_stream bigint) RETURNS TABLE (who text, since timestamptz)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
DECLARE
    mark    xid;
    lockers xid[] := '{}';
BEGIN
    -- Locks of rows are not in pg_locks: the row has the number of the transaction that holds it, or that of a set of transactions.
    FOR mark IN SELECT s.xmax FROM stream AS s WHERE s.id = p_stream
                UNION ALL SELECT p.xmax FROM log_partition AS p WHERE p.stream_id = p_stream AND p.state <> 'attached' LOOP
        lockers := lockers || mark;
        BEGIN
            lockers := lockers || ARRAY(SELECT m.xid FROM pg_get_multixact_members(mark) AS m);
        EXCEPTION WHEN OTHERS THEN
            NULL;   -- no such set
        END;
    END LOOP;
    RETURN QUERY
    SELECT CASE WHEN l.pid IS NULL THEN 'a prepared transaction'
                ELSE format('process %s%s', l.pid, ' (' || nullif(concat_ws(', ', nullif(a.application_name, ''), a.usename, a.state), '') || ')')
                END, a.xact_start
    FROM pg_locks AS l LEFT JOIN pg_stat_activity AS a ON a.pid = l.pid
    WHERE l.locktype = 'transactionid' AND l.granted AND l.transactionid = ANY (lockers) AND l.pid IS DISTINCT FROM pg_backend_pid()
    ORDER BY a.xact_start LIMIT 1;
END $$;

-- The step of a stream has ended; p_detaching: what is leaving waits for others; p_held: a group keeps something; p_idle: there was nothing to do.
-- Notes that, and says when to come again.
CREATE OR REPLACE FUNCTION retention_ended(p_stream bigint, p_permitted boolean, p_detaching boolean, p_held boolean, p_idle boolean) RETURNS interval
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
DECLARE
    h    retention_hold;
    kept timestamptz := (SELECT min(p.kept_since) FROM log_partition AS p WHERE p.stream_id = p_stream AND p.state <> 'attached');
BEGIN
    IF NOT p_permitted THEN
        PERFORM set_retention_hold(p_stream, 'privilege', p_detail => format('%s is not the owner of the tables', quote_ident(current_user)));
    ELSIF p_detaching AND NOT p_held THEN
        PERFORM set_retention_hold(p_stream, 'detach', p_detail => detach_blocker(p_stream));
    ELSIF NOT p_held THEN
        PERFORM set_retention_hold(p_stream, NULL);
    END IF;
    IF p_detaching THEN
        RETURN interval '1 second';
    END IF;
    IF p_idle AND p_permitted AND NOT p_held THEN
        -- It seemed to be due, as where there is no group that could resolve anything.
        RETURN interval '10 minutes';
    END IF;
    SELECT * INTO h FROM retention_hold WHERE stream_id = p_stream;
    -- What has been held up for long is looked at more rarely.
    RETURN least(greatest((clock_timestamp() - greatest(h.since, kept)) / 10, interval '2 seconds'), interval '10 minutes');
END $$;

-- What holds the retention of a stream up, now.
CREATE OR REPLACE FUNCTION retention_hold(p_stream bigint) RETURNS TABLE (reason text, consumer_group text, resolved bigint, since timestamptz, detail text)
LANGUAGE plpgsql STABLE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
DECLARE
    h retention_hold;
BEGIN
    SELECT * INTO h FROM retention_hold WHERE stream_id = p_stream;
    -- What cannot be dropped is told beside whatever else it is.
    SELECT min(k.kept_since), string_agg(k.kept_by, '; ' ORDER BY k.number) INTO since, detail
        FROM (SELECT p.number, p.kept_by, p.kept_since FROM log_partition AS p
              WHERE p.stream_id = p_stream AND p.state <> 'attached' AND p.kept_by IS NOT NULL ORDER BY p.number LIMIT 3) AS k;
    IF h.stream_id IS NOT NULL THEN
        SELECT h.reason, g.name, h.since, nullif(concat_ws('; ', h.detail, detail), '') INTO reason, consumer_group, since, detail
            FROM (SELECT) AS one LEFT JOIN consumer_group AS g ON g.id = h.group_id;
        IF h.group_id IS NOT NULL THEN
            resolved := (resolved_by_groups(p_stream, h.group_id)).resolved;
        END IF;
        RETURN NEXT;
    ELSIF since IS NOT NULL THEN
        reason := 'depends';
        RETURN NEXT;
    END IF;
END $$;

-- The streams whose retention something holds up, by name, at most p_limit.
CREATE OR REPLACE FUNCTION list_retention_holds(p_limit bigint DEFAULT 100)
RETURNS TABLE (stream text, reason text, consumer_group text, resolved bigint, since timestamptz, detail text)
LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
    SELECT s.name, h.* FROM (
        SELECT x.id, x.name FROM stream AS x
        WHERE x.id IN (SELECT r.stream_id FROM retention_hold AS r
                      UNION ALL SELECT p.stream_id FROM log_partition AS p WHERE p.state <> 'attached' AND p.kept_by IS NOT NULL)
        ORDER BY x.name LIMIT p_limit) AS s
    CROSS JOIN LATERAL retention_hold(s.id) AS h ORDER BY s.name
$$;
