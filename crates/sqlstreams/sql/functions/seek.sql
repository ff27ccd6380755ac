-- Moving a group to another place of the log, forward or back, while its consumers run.
--
-- All of it happens under the cursor's lock. Every lease ends: its token proves nothing any more, so that what its consumer says later is refused.
-- After a seek to position P, in this order of the invariant "an id is in one place":
--   * what lies above P is above the cursor, and will be handed out: again, where it was before. Exception rows of such ids go, their attempts with
--     them; dead letters stay where they are (p_dead = 'keep'), and claims leave them out, up to the cursor's reread_to; or they go, too ('repeat').
--   * what lies at or below P and was never handed out is passed over.
--   * what lies at or below P and was handed out but not finished, in a lease or an exception row, is finished as before ('keep'): what was pending in a
--     lease is handed out anew, exceptions keep their attempts; or that is passed over, too (p_unfinished = 'drop'). Dead letters stay in any case.
--   * replays end at P.
-- In ordered and fair groups all lanes stand at P afterwards.

-- p_to: 'beginning' or 'latest'; or p_id: the next message is the first with that id or a higher one; or p_at: the first one produced at or after that time
-- (position.sql). An id below the lowest that the log has means the lowest. p_preview: changes nothing and says what would be.
--
-- before_id: up to where the group had claimed, the lane that was furthest on; after_id: P. repeated: ids above P that it had claimed, skipped: ids
-- up to P that it had not: both count ids, of which some may have no message or not be for the group. ended_leases. unfinished: how many messages at or below P
-- were handed out or waited for another attempt; restarted: how many above P did, and begin anew; dead: dead letters above P.
CREATE OR REPLACE FUNCTION seek(p_stream bigint, p_group bigint, p_to text DEFAULT NULL, p_id bigint DEFAULT NULL, p_at timestamptz DEFAULT NULL,
    p_unfinished text DEFAULT 'keep', p_dead text DEFAULT 'keep', p_preview boolean DEFAULT false)
RETURNS TABLE (before_id bigint, after_id bigint, repeated bigint, skipped bigint, ended_leases bigint, unfinished bigint, restarted bigint, dead bigint)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off SET constraint_exclusion = off AS $$
#variable_conflict use_column
DECLARE
    exceptions text := 'exception_queue_' || p_stream;
    s          stream;
    g          consumer_group;
    c          group_cursor;
    l          record;
    leased     bigint := 0;
BEGIN
    PERFORM require_read_committed();
    s := require_stream(p_stream);
    g := require_group(p_stream, p_group);
    PERFORM require_that(num_nonnulls(p_to, p_id, p_at) = 1, 'a group is moved to one place', 'Say beginning or latest, an id or a time.');
    PERFORM require_that(coalesce(p_to, 'latest') IN ('beginning', 'latest'),
                             format('there is no place called %s', quote_literal(p_to)), 'Say beginning or latest, an id or a time.');
    PERFORM require_that(p_unfinished IN ('keep', 'drop'), 'what is unfinished is kept or dropped', 'Say keep or drop.');
    PERFORM require_that(p_dead IN ('keep', 'repeat'), 'dead letters are kept or repeated', 'Say keep or repeat.');
    IF NOT p_preview THEN
        -- Retention waits for us, or we for it: what is above the lowest id stays until this is committed.
        PERFORM FROM stream WHERE id = p_stream FOR KEY SHARE;
        IF s.compacted THEN
            -- A step of it that is under way reckons with where the group stood.
            PERFORM pg_advisory_xact_lock_shared(compact_lock(p_stream));
        END IF;
    END IF;
    -- Before the lock: what has been produced stays where it is.
    IF p_at IS NOT NULL THEN
        after_id := position_at(p_stream, p_at);
    ELSIF p_id IS NOT NULL THEN
        after_id := greatest(p_id, 1) - 1;
    ELSIF p_to = 'beginning' THEN
        after_id := 0;
    ELSE
        after_id := log_head(p_stream);
    END IF;
    after_id := greatest(after_id, lowest_id(p_stream) - 1);
    PERFORM require_that(after_id <= log_head(p_stream),
                             format('group %s cannot go to id %s: the log of stream %s ends at %s', quote_ident(g.name), after_id + 1, quote_ident(s.name),
                                    log_head(p_stream)),
                         'Go to the latest message or to an id that has been drawn.');

    IF p_preview THEN
        c := peek_cursor(p_stream, p_group);
        IF c.generation IS NULL THEN
            PERFORM refuse_without_cursor(p_group);
        END IF;
    ELSE
        c := lock_cursor(p_stream, p_group);
        g := require_group(p_stream, p_group);
        IF g.mode <> 'parallel' AND g.lane_probe <> lane_probe() THEN
            c := realign(p_stream, g, c);
        END IF;
        -- Whoever is just recording what became of a lease comes first, and what it has written is seen below.
        EXECUTE format('SELECT FROM %I WHERE group_id = $1 AND seq >= $2 ORDER BY seq FOR UPDATE', 'consumer_lease_' || p_stream) USING p_group, c.first_open;
    END IF;
    before_id := greatest(c.claimed, (SELECT max(x.position) FROM unnest(c.cohorts) AS x));
    repeated := greatest(before_id - after_id, 0);
    skipped := greatest(after_id - c.claimed, 0);
    EXECUTE format('SELECT count(*), coalesce(sum(id_count(pending * int8multirange(int8range(NULL, $3, ''[]'')))), 0)::bigint
                        FROM %I WHERE group_id = $1 AND seq >= $2', 'consumer_lease_' || p_stream)
        INTO ended_leases, leased USING p_group, c.first_open, after_id;
    EXECUTE format('SELECT count(*) FILTER (WHERE state <> ''dead'' AND message_id <= $2), count(*) FILTER (WHERE state <> ''dead'' AND message_id > $2),
                           count(*) FILTER (WHERE state = ''dead'' AND message_id > $2) FROM %I WHERE group_id = $1', exceptions)
        INTO unfinished, restarted, dead USING p_group, after_id;
    unfinished := unfinished + leased;
    IF p_preview THEN
        RETURN NEXT;
        RETURN;
    END IF;

    c := end_leases(p_stream, g, after_id, p_unfinished = 'keep', c);
    c.reread_to := forget_exceptions(p_stream, g, after_id, p_unfinished = 'keep', p_dead = 'keep');
    IF g.transactional THEN
        -- In a statement after the one that took the tokens: a handler that commits later finds its message gone, or leaves its row for the next one.
        EXECUTE format('DELETE FROM %I WHERE group_id = $1 AND message_id > $2', 'consumer_done_' || p_stream)
            USING p_group, CASE WHEN p_unfinished = 'keep' THEN after_id ELSE 0 END;
    END IF;
    c.replays := CASE WHEN p_unfinished = 'keep' THEN
        (SELECT array_agg((r.id, r.next_id, least(r.upto_id, after_id))::group_replay ORDER BY n)
         FROM unnest(c.replays) WITH ORDINALITY AS r(id, next_id, upto_id, n) WHERE r.next_id <= after_id) END;
    c.claimed := after_id;
    IF c.cohorts IS NOT NULL THEN
        c.cohorts := ARRAY[(-1, after_id)::lane_cohort];
    END IF;
    IF (SELECT b.after_id > seek.after_id FROM binding_set AS b WHERE b.group_id = p_group ORDER BY b.version DESC LIMIT 1) THEN
        -- What is read again is judged by the bindings that hold now.
        PERFORM add_binding_set(p_stream, p_group, after_id, latest_bindings(p_group));
    END IF;
    PERFORM save_cursor(p_stream, p_group, c);
    INSERT INTO audit (action, stream_name, group_name, detail)
        VALUES ('seek', s.name, g.name, jsonb_strip_nulls(
            jsonb_build_object('to', p_to, 'id', p_id, 'at', p_at, 'before_id', before_id,
                'after_id', after_id, 'repeated', repeated, 'skipped', skipped,
            'ended_leases', ended_leases, 'unfinished', unfinished, 'restarted', restarted, 'dead', dead, 'unfinished_was', p_unfinished, 'dead_was', p_dead)));
    PERFORM ring(ARRAY[p_stream]);
    RETURN NEXT;
END $$;

-- Ends every lease of a group. With p_keep what was pending in them up to p_after waits as leases that nobody has.
CREATE OR REPLACE FUNCTION end_leases(p_stream bigint, g consumer_group, p_after bigint, p_keep boolean, INOUT c group_cursor)
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    leases text := 'consumer_lease_' || p_stream;
    kept   int8multirange := CASE WHEN p_keep THEN int8multirange(int8range(NULL, p_after, '[]')) ELSE '{}' END;
    l      record;
BEGIN
    IF g.mode = 'ordered' THEN
        -- Exceptions in flight there are so under a lease.
        FOR l IN EXECUTE format('SELECT token, lanes FROM %I WHERE group_id = $1 AND seq >= $2 ORDER BY seq', leases) USING g.id, c.first_open LOOP
            PERFORM put_back_lane_exceptions(p_stream, g, l.token, l.lanes, false);
        END LOOP;
    END IF;
    EXECUTE format('DELETE FROM %I WHERE group_id = $1 AND seq >= $2 AND isempty(pending * $3)', leases) USING g.id, c.first_open, kept;
    EXECUTE format('UPDATE %I SET token = gen_random_uuid(), pending = pending * $3, expires_at = ''-infinity'', owner = NULL, holder = NULL
                        WHERE group_id = $1 AND seq >= $2', leases)
        USING g.id, c.first_open, kept;
    c.first_open := first_open_lease(p_stream, g.id, c);
END $$;

-- Of the exception rows of a group those above p_after go, but for dead letters if p_keep_dead, and those at or below it unless p_keep. What is in flight
-- waits again. Returns the highest id above p_after that still has a row.
CREATE OR REPLACE FUNCTION forget_exceptions(p_stream bigint, g consumer_group, p_after bigint, p_keep boolean, p_keep_dead boolean) RETURNS bigint
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    exceptions text := 'exception_queue_' || p_stream;
    highest    bigint;
BEGIN
    -- In the order in which everybody locks them.
    EXECUTE format('WITH gone AS MATERIALIZED (
                        SELECT message_id FROM %1$I WHERE group_id = $1 AND message_id > $2
                            AND (state <> ''dead'' AND (message_id > $3 OR NOT $4) OR state = ''dead'' AND message_id > $3 AND NOT $5)
                        ORDER BY message_id FOR UPDATE)
                    DELETE FROM %1$I AS e USING gone WHERE e.group_id = $1 AND e.message_id = gone.message_id', exceptions)
        USING g.id, CASE WHEN p_keep THEN p_after ELSE -1 END, p_after, p_keep, p_keep_dead;
    IF g.mode <> 'ordered' THEN
        EXECUTE format('WITH held AS MATERIALIZED (SELECT message_id FROM %1$I WHERE group_id = $1 AND state = ''inflight'' ORDER BY message_id FOR UPDATE)
                        UPDATE %1$I AS e SET state = ''ready'', due_at = clock_timestamp(), lease_id = NULL, lease_expires_at = NULL, owner = NULL
                        FROM held WHERE e.group_id = $1 AND e.message_id = held.message_id', exceptions)
            USING g.id;
    END IF;
    EXECUTE format('SELECT message_id FROM %I WHERE group_id = $1 AND message_id > $2 ORDER BY message_id DESC LIMIT 1', exceptions)
        INTO highest USING g.id, p_after;
    RETURN highest;
END $$;
